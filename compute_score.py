"""Reward functions of FAPO (arXiv:2510.22543): one sample in, one score out.

    compute_score                 the rule: is the last \\boxed{} the correct answer?  +1 / -1
    compute_score_gsm8k           the rule for GSM8K, which also accepts "#### N"
    compute_score_baseline        the rule; a generative reward model (GenRM), if one runs, only measures
    compute_score_fapo            the rule, minus `penalty` if the GenRM finds a wrong step of a right answer
    compute_score_fapo_genrm      trains the GenRM itself
    compute_score_discriminative  the score of a discriminative reward model, with the rule's accuracy

Use: grpo_trainer.py ... --reward-fn compute_score.py:compute_score_fapo, or as verl's custom reward function.
Standalone: imports nothing from this repository. Requires Python 3.11 or newer. Settings are keyword-only, so
that a misspelt one is rejected. A failure is a status, never a number: if the judge is down or its critique
is unusable, the sample gets `score: None` ("no verdict"), not +1 or 0.
Not covered: code execution, process rewards per token, judges that are not OpenAI-compatible servers.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import aiohttp

# --- 1. The answer in the box -------------------------------------------------------------------------------
TAIL_CHARS = 300  # Only the end of a solution is searched, as in DAPO. MATH-500 answers have at most 159.


def last_boxed_only_string(text: str) -> str | None:
    """Return the last `\\boxed{...}` in `text`, or None if there is none or it is never closed."""
    _, box, rest = text.rpartition("\\boxed{")
    if not box:
        return None
    depth = 1
    for brace in re.finditer(r"[{}]", rest):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return box + rest[: brace.end()]
    return None


def remove_boxed(boxed: str) -> str:
    """Return the content of `\\boxed{...}`. Raises ValueError if `boxed` is not such a string."""
    match = re.fullmatch(r"(?s)\\boxed\{(.*)\}", boxed)
    if not match:
        raise ValueError(f"not a \\boxed{{...}} string: {boxed[:50]!r}")
    return match[1]


# Minerva's normalisation (Lewkowycz et al. 2022, appendix D.1) as in DAPO, extended and made stricter: see
# docs/answers.md. An answer is split into LaTeX tokens. The tokens of a line below mean the same, and the
# first one replaces the others.
_SAME = r"""
- − –
\pi π
\infty ∞
\sqrt √
\cdot \times · × *
\ldots \dots \cdots ...
\le ≤ <= \leq \leqslant
\ge ≥ >= \geq \geqslant
\ne ≠ \neq
< \lt
> \gt
\{ \lbrace
\} \rbrace
| \vert \lvert \rvert
\emptyset \varnothing
\frac \dfrac \tfrac \cfrac
\binom \dbinom \tbinom
\begin{pmatrix} \begin{bmatrix}
\end{pmatrix} \end{bmatrix}
percent % \%
degrees degree ° \degree ^\circ ^{\circ}
meters \text{m} \mathrm{m}
, and
"""
_UNITS = """
units unit
dollars dollar
cents cent
percent
degrees
meters meter
cm centimeter centimeters
mm millimeter millimeters
km kilometer kilometers
kg kilogram kilograms
grams gram g
mph
inches inch in
feet foot ft
yards yard
miles mile
seconds second
minutes minute min
hours hour hr hrs
days day
weeks week
months month
years year
pounds pound lb lbs
liters liter
points
digits
ways
integers
meals
edges
students
children
people
tickets
multiples
th
"""


def _first_of_line(table):
    return {token: line.split()[0] for line in table.splitlines() for token in line.split()}


_SAME = _first_of_line(_SAME)
_UNITS = _first_of_line(_UNITS)
_TOKEN = re.compile(r"""
    \\(?:text|mathrm)\s*\{\s*m\s*\} | \^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})
    | (?P<space> \s+ | [~$"] | \*\* | \\[\s,;:!()\[\]] | (?<=\\\\)\[\w*\] | \ban?\s+(?=\d|[a-zA-Z]{2})
        | \\(?:q?quad|displaystyle|left|right|[bB]igg?[lr]?|boxed|mbox|text[a-z]*|math(?:rm|bf|it|sf)
            |boldsymbol|overline(?=\s*\{\s*[A-Z]+\s*\}))(?![a-zA-Z]) )
    | (?P<thousands> (?<![\d.,])[1-9]\d{0,2}
        (?:(?:,|\s*\{\s*,\s*\}\s*|\\,)(?:\\!\s*)?\d{3})+ (?!\d)(?:\.\d+)? )
    | \d+(?:\.\d+)? | \.\d+ | [^\W\d_]+ | [<>]= | \.\.\.
    | \\\\ | \\begin\s*\{\s*array\s*\}\s*\{[^{}]*\} | \\(?:begin|end)\s*\{\s*\w+\*?\s*\} | \\sqrt\s*\[[^\]]*\]
    | \\[a-zA-Z]+ | \\. | .
""", re.VERBOSE | re.DOTALL)  # fmt: skip
_ARGUMENTS = {"^": 1, "_": 1, "\\sqrt": 1, "\\overline": 1, "\\frac": 2, "\\binom": 2}


def _tokens(answer):
    """Return the tokens of `answer` in their first spelling, without white space and font commands."""
    found = []
    for match in _TOKEN.finditer(answer):
        token = re.sub(r"\s", "", match[0])
        if match["thousands"] and re.search(r"[{\\]", token):  # Only "1,234" stays, since it may be a list.
            token = re.sub(r"[^\d.]+", "", token)
        if not match["space"]:
            found.append(_SAME.get(token, token))
    return found


def _members(answer):
    """Return the normal form of each member of a list, which top-level commas separate. Most have one member.

    In a normal form every argument of a command is in braces, there are no other braces, and white space
    remains only between words or numbers.
    """
    todo, found, wanted, groups, depth = _tokens(answer)[::-1], [], 0, [], 0
    while todo:
        token = todo.pop()
        if token == "{":
            groups.append(wanted)
            token = token if wanted else ""
            wanted = 0
        elif token == "}":
            wanted = groups.pop() if groups else 0
            token = token if wanted else ""
            wanted = max(0, wanted - 1)
        elif wanted:  # An argument without braces is one character or one command.
            size = len(token) if token[0] == "\\" else 1
            todo += [token[size:]] * (size < len(token)) + ["}", token[:size], "{"]
            continue
        else:
            wanted = _ARGUMENTS.get(token.partition("[")[0], 0)
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            token = "\n" if token in (",", ";") else token.replace(",", "")
        if token:
            found.append(token)
    text = " ".join(found)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return [member.replace("~", " ") for member in text.split("\n") if member]


_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
# Spellings that concern several tokens, applied in this order: each line has a regular expression and, after
# the arrow, its replacement. A member of the list is a line of the text; ~ is white space that must remain.
_SPELLINGS = r"""
(\\[a-zA-Z]+)\x20(?=[a-zA-Z])               → \1~
(?<=\d)\x20(?=\d)|(?<=LL)\x20(?=LL)         → ~
\x20                                        →
# 1/2, \pi/2, and 1 1/2; the minus of a fraction goes before it, unless it is a factor as in 2\frac{-1}{2}
START((?:[\w.]|\\(?:pi|sqrt|frac)(?![a-z])~?|GROUP)+)/(\d+|\\pi)END → \\frac{\1}{\2}
(?<=\d)~(?=\\frac)                          →
(^|[(\[{,\n=&\\]|matrix\})\\frac\{-((?:[^{}+-]|\{[^{}+-]*\})+)\} → \1-\\frac{\2}
# x^{2}, +5, .5, 34.0, 025, a full stop, (A)
([\^_])\{(\w)\}(?!\w)                       → \1\2
(^|[(\[,=])\+                               → \1
(?<![\d.])\.(?=\d)                          → 0.
(\.\d*?)0+(?![\d\\])                        → \1
\.(?!\d|\\overline|\\dot)                   →
(^|=)(-?)0+(?=\d+(?![\d.]))                 → \1\2
^\(?([A-J])\)?:?$                           → \1
# The end of a row before nothing, any matrix, \$5, 5 square cm, 16 years old, "the answer is 7"
\\\\(?=\\end)                               →
[(\[]\\begin\{(?:array\}\{[^{}]*|matrix)\}(.*?)\\end\{\w+\}[)\]] → \\begin{pmatrix}\1\\end{pmatrix}
\\\$(\d[\d.]*)                              → \1dollars
sq(?:uare)?~([a-z]+)$                       → \1^2
cubic~([a-z]+)$                             → \1^3
~old$                                       →
^(?!.*NEGATION)[a-zA-Z~]*\b(?:is|are)(?=[\d\\(-])(?!\\[lgn]e\b)~* →
"""
_NEGATION = r"\b(?:not|no\b|never|neither|nor\b|none|cannot|isn|without|wrong|false)"
for _short, _long in {
    "LL": r"[^\W\d_]{2}",
    "START": r"(?:^|(?<=[(\[{,\n=&+<>~-])|(?<=\\\\)|(?<=matrix\}))",
    "END": r"(?=$|[)\]},\n=&+<>-]|\\\\|\\(?:end|cup|[lg]e)\b|[a-z]{2})",
    "GROUP": r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}",
    "NEGATION": _NEGATION,
}.items():
    _SPELLINGS = _SPELLINGS.replace(_short, _long)
_SPELLINGS = re.findall(r"^(\S+) +→ ?(\S*)$", _SPELLINGS, re.MULTILINE)

# What may name a value: x, a_{10}, f'(-2), \angle ABC, (x,y), |AB|, dy/dx, and m+n, which AIME asks for.
_TRIG = "sin|cos|tan|cot|sec|csc"
_GREEK = (
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|"
    "upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)"
)
_LETTER = rf"angle|triangle|ell|vec|overrightarrow|bar|hat|det|gcd|{_TRIG}|{_GREEK}"
_LETTER = rf"(?:(?:[a-zA-Z]|\\(?:{_LETTER})(?![a-zA-Z])) ?)"
_NAME = rf"{_LETTER}+(?:_(?:\w|\{{\w+\}}))?'*(?:\^\{{-1\}})?(?:\((?:[^()=<>+^-]|(?<=[(,])-)*\))?"
_NAME = (
    rf"(?:{_NAME}|\((?:{_NAME},)+{_NAME}\)|\|[A-Z]{{2,}}\||\[[A-Z]{{3,}}\]|\\frac\{{d\w?\}}\{{d\w\}}"
    rf"|\\(?:{_TRIG}) ?(?:\d+{_LETTER}|\\frac\{{\d*{_LETTER}\}}\{{\d+\}}))"
)
_CONSTANT = re.compile(r"(?:\\(?:frac|sqrt|pi|cdot|binom|ln|log|pm)(?![a-zA-Z]) ?|[^a-zA-Z\\=<>])+")
_SUM = re.compile(rf"{_NAME}(?:\+{_NAME})+")
_NAME = re.compile(_NAME)
_UNIT = "|".join(sorted(_UNITS, reverse=True))
_UNIT = re.compile(rf"(.*?[\d}})i]) ?({_UNIT}|m/s)((?: ?per |/)\w+)?(\^[23])?")


def _name_value_unit(text):
    """Split one member into name, value and unit. An equation that is not "name = value" is all value."""
    *heads, value = re.split(r"=|\\in(?![a-z]) ?", text)
    value, unit, rate, power = (_UNIT.fullmatch(value) or re.fullmatch("(.*)()()()", value)).groups("")
    names = [head for head in heads if _NAME.fullmatch(head) and not re.search(_NEGATION, head)]
    constants = [head for head in heads if _CONSTANT.fullmatch(head)]
    name = names[0] if names else ""
    if len(heads) == 1 and _SUM.fullmatch(heads[0]) and re.fullmatch(r"[1-9]\d*", value):
        name = heads[0]
    elif len(names) + len(constants) < len(heads) or constants and not _CONSTANT.fullmatch(value):
        return "", text, ""  # an equation
    return name, value, _UNITS.get(unit, unit) + rate.replace(" ", "") + power


@functools.lru_cache(4096)  # All samples of a group share a ground truth.
def _parts(answer):
    """Return (name, normalised value, unit) of each member of an answer. Most answers have one member."""
    return [_name_value_unit(member) for member in _members(answer)]


def normalize_final_answer(answer: str) -> str:
    """Return `answer` (the content of a box, or the ground truth) in normal form, without "x =" and unit."""
    return ",".join(value for _, value, _ in _parts(answer))


def _values(parts):
    """Join the values. Their order matters if names differ. "East" equals "east", but "A" is not "a"."""
    values = ", ".join(value for _, value, _ in parts)
    values = re.sub(r"\b[A-Z](?=[a-z])", lambda letter: letter[0].lower(), values)
    return f"({values})" if len({name for name, _, _ in parts if name}) > 1 else values


def _agree(parts, true_parts):
    """Say whether names and units are equal. Either may be missing on one side."""
    for (name, _, unit), (true_name, _, true_unit) in zip(parts, true_parts):
        if name and true_name and name != true_name or unit and true_unit and unit != true_unit:
            return False
    return True


def is_equal(answer: str, truth: str) -> bool:
    """Say whether two answers have the same normal form. 5 cm equals 5, and x=5 equals 5 but not y=5."""
    parts, true_parts = _parts(answer), _parts(truth)
    return _agree(parts, true_parts) and _values(parts) == _values(true_parts) != ""


# --- 2. The rule (paper eq. 4: +1 if the answer is right, else -1) ------------------------------------------
_SCORES = {True: 1.0, False: -1.0, None: None}  # None: correctness is unknown


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None,
    reward_model_tokenizer=None, *, verifier: Literal["rule", "math_verify"] = "rule") -> dict:  # fmt: skip
    """Score one solution by the answer in its last box, or in GSM8K without a box after "####".

    Args:
        verifier: "rule" compares normal forms; "math_verify" lets that library compare the values. The
            library blocks, and acc is None if it did not finish.
    Returns:
        score, acc and pred.
    Raises:
        ValueError: for an unknown verifier, or if the ground truth is not one answer.
    """
    if verifier not in ("rule", "math_verify"):
        raise ValueError(f"verifier: {verifier!r} is unknown; use 'rule' or 'math_verify'")
    truth = str(ground_truth).strip()
    if not isinstance(ground_truth, (str, int, float)) or truth == "":
        raise ValueError(f"ground_truth: {ground_truth!r:.80} ({data_source}) is not one answer: "
                         "this data source needs its own reward function")  # fmt: skip
    answer = _find_answer(data_source, solution_str[-TAIL_CHARS:])
    if answer is None:
        pred, acc = "[INVALID]", False  # as in the original
    elif verifier == "math_verify":
        pred, acc = answer, _math_verify(answer, truth)
    else:
        pred, acc = normalize_final_answer(answer), is_equal(answer, truth)
    return {"score": _SCORES[acc], "acc": acc, "pred": pred}


def _find_answer(data_source, text):
    """Return the content of the last box of the text, or what follows "####"; None without either."""
    if "\\boxed{" in text:
        boxed = last_boxed_only_string(text)
        return boxed and remove_boxed(boxed)
    if data_source in ("gsm8k", "openai/gsm8k"):
        _, mark, rest = text.rpartition("####")
        line = rest.strip().partition("\n")[0]
        number = re.fullmatch(r"[\\$* ]*+(-?)[\\$]*([0-9][0-9,]*(?:\.[0-9]+)?)[^0-9]*", line)
        if mark and number:  # "18 or 20" is not an answer.
            return number[1] + number[2].replace(",", "")
    return None


def compute_score_gsm8k(
    data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None,
    reward_model_tokenizer=None, *, verifier: Literal["rule", "math_verify"] = "rule") -> dict:  # fmt: skip
    """Apply compute_score's rule for GSM8K, whatever the data source is called."""
    return compute_score("gsm8k", solution_str, ground_truth, verifier=verifier)


# math-verify limits its time with signal.alarm, which works in main threads only. Therefore child processes
# do the comparison, and an answer that hangs or kills its child affects no other answer. The children are
# forked, because a spawned child would run the main script again.
GRADE_TIMEOUT_S = 4  # Seconds per answer; ordinary answers take milliseconds.
GRADE_MEMORY = 2 << 30  # Bytes; an answer such as 9^{9^{9^9}} must not exhaust the machine.
_grader_threads = ThreadPoolExecutor(4)  # Callers in event loops therefore have at most 4 children.


@functools.cache
def _graders(process):
    """Return (pipes to idle child processes, the lock for starting more). A forked process has its own."""
    return [], threading.Lock()


def _start_grader():
    """Start a child process and return the pipe to it."""
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()
    fork.Process(target=_grade, args=(its, ours), daemon=True).start()
    its.close()
    return ours


def _grade(pipe, parents_end):
    """Run a child process: read (truth, answer) and answer whether they are equal; None if memory ran out."""
    from math_verify import parse, verify
    parents_end.close()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # The parent may have set a handler.
    logging.disable()  # math-verify warns about calls without its own time limit.
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = GRADE_MEMORY + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError, ConnectionError):  # The parent has ended or closed the pipe.
        while True:
            sides = pipe.recv()
            signal.alarm(GRADE_TIMEOUT_S)  # The signal ends this process even inside C code.
            try:
                boxes = [f"\\boxed{{{side}}}" for side in sides]
                parsed = [parse(box, parsing_timeout=None, raise_on_error=True) for box in boxes]
                verdict = verify(*parsed, timeout_seconds=None, raise_on_error=True)
            except MemoryError:
                verdict = None
            except Exception:  # What cannot be compared counts as not equal.
                verdict = False
            signal.alarm(0)
            pipe.send(verdict)


# The library ignores these, so it would take 52_8 for 52, 1.4\ldots for 1.4, and an equation for a value.
_NOT_READ = re.compile(
    r"=|_(?:\w|\{.*?\})|\d \d|\\(?:ldots|mod|pmod|bmod|equiv|approx|sim|pm|mp|to|neg)(?![a-zA-Z])|"
    r"(?<![a-zA-Z\\{])[a-zA-Z]{3,}"
)


def _math_verify(answer, truth):
    """Ask math-verify whether the two are equal; None if it did not finish. Blocks; safe in any thread."""
    import math_verify  # noqa: F401  (imported before the fork, so that the children share it)
    if answer == truth or is_equal(answer, truth):
        return True
    parts, true_parts = _parts(answer), _parts(truth)
    answer, truth = _values(parts), _values(true_parts)
    if answer.isalpha() and truth.isalpha() or _NOT_READ.findall(answer) != _NOT_READ.findall(truth):
        return False
    if not _agree(parts, true_parts):
        return False
    free, lock = _graders(os.getpid())
    with lock:  # A child that inherited another child's pipe would hide the death of that child.
        grader = free.pop() if free else _start_grader()
    try:
        grader.send((truth, answer))
        verdict = grader.recv()
    except (EOFError, ConnectionError):  # The child died.
        return None
    free.append(grader)  # After an interrupt this is skipped, since the child's answer is still to come.
    return verdict


# --- 3. The judge's prompt and its answer -------------------------------------------------------------------
# The prompt that FAPO-GenRM was trained on (paper appendix F and all FAPO-Critic data), verbatim.
_TAGGED = (
    "The following is a math problem with its ground truth answer, along with an AI solution (split into "
    "paragraphs, enclosed with tags and indexed from 0):\n\n"
    "[Math Problem]\n\n{problem}\n\n[Ground Truth]\n\n{answer}\n\n[AI Solution]\n\n{solution}\n\n"
    "Your task is to review and critique the solution paragraph by paragraph. Once you identify an error in "
    "a paragraph, return the index of the paragraph where the earliest error occurs. Otherwise, return the "
    "index of -1 (which typically denotes 'not found').\n\n"
    "Please reason step by step, put your final answer (i.e., the index) in \\boxed{{}}."
)
# The prompt of the original recipe at RL time, which its judge never saw in training; for comparisons.
_RAW = _TAGGED.replace(", enclosed with tags and indexed from 0", "").replace("paragraph", "step")
# The tagged prompt for benchmarks without a ground truth.
_NO_TRUTH = _TAGGED.replace(" with its ground truth answer", "").replace("[Ground Truth]\n\n{answer}\n\n", "")
_TAGS = "<paragraph_{index}>\n{text}\n</paragraph_{index}>\n\n"

# style -> (template, format of one paragraph; "" leaves the solution unsplit). Add your own styles here.
PROMPT_STYLES = {"tagged": (_TAGGED, _TAGS), "no_truth": (_NO_TRUTH, _TAGS), "raw": (_RAW, "")}


def split_paragraphs(solution: str) -> list[str]:
    """Split a solution at empty lines. As in FAPO-Critic, a line of spaces is not an empty line."""
    return [paragraph.strip() for paragraph in solution.split("\n\n") if paragraph.strip()]


def _break_frame(solution: str, template: str, paragraph: str) -> str:
    """Replace the brackets of the prompt's own headings and tags by round ones inside the solution.

    Otherwise a policy that learns to write `</paragraph_0>` or `[Ground Truth]` could pass its own text off
    as part of the prompt. Solutions without such markers are returned unchanged.
    """
    markers = re.findall(r"\[[^\[\]]+\]|<[^<>]+>", _TAGGED + _TAGS + template + paragraph)
    pattern = "|".join(map(re.escape, markers)).replace(r"\{index\}", r"\d+")
    return re.sub(pattern, lambda marker: f"({marker[0][1:-1]})", solution, flags=re.IGNORECASE)


def format_critic_prompt(problem: str, answer: str, solution: str | list[str], prompt_style="tagged") -> str:
    """Return the judge's prompt. `solution` is a text, or a list of paragraphs.

    Headings and tags of the prompt are defused inside the solution (see `_break_frame`).
    """
    if prompt_style not in PROMPT_STYLES:
        raise ValueError(f"prompt_style: {prompt_style!r} is unknown; use one of {', '.join(PROMPT_STYLES)}")
    template, paragraph = PROMPT_STYLES[prompt_style]
    if paragraph:
        if isinstance(solution, str):
            solution = split_paragraphs(solution)
        parts = []
        for index, text in enumerate(solution):
            parts.append(paragraph.format(index=index, text=_break_frame(text, template, paragraph)))
        solution = "".join(parts).rstrip("\n")
    else:
        if not isinstance(solution, str):
            solution = "\n\n".join(solution)
        solution = _break_frame(solution, template, paragraph)
    return template.format(problem=problem, answer=answer, solution=solution)


def parse_critique(text: str, num_paragraphs: int | None) -> int | None:
    """Return the index in the last box: -1 for no error, None if unparsable or not below num_paragraphs."""
    try:
        index = int(remove_boxed(last_boxed_only_string(text) or ""))
    except ValueError:
        return None
    if index < -1 or (num_paragraphs is not None and index >= num_paragraphs):
        return None
    return index


# --- 4. Asking a reward model -------------------------------------------------------------------------------
KILLS_SERVERS = 422  # router.py rejects a request that crashed servers with this status.
GENRM_MAX_TOKENS = 16384  # as in the recipe's reward_fn_reasoning.py
GENRM_TIMEOUT_S = 500.0  # For all attempts. Below the reward loop's 600 s, so that the status says "timeout".
SHARED_ANSWERS = 1024  # Equal requests at temperature 0 come from one group, so a few recent answers suffice.


class _SharedAnswer(asyncio.Lock):
    """The answer to equal requests: the first caller holds the lock and asks, the others find the answer."""
    answer = None


@functools.lru_cache(SHARED_ANSWERS)
def _shared_answer(loop, request):
    return _SharedAnswer()


_sessions = {}  # event loop -> aiohttp session


async def _session():
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        headers = {}
        # The key is for a judge on another machine. It never appears in a config or log, and may come from a
        # file that ends with a newline.
        key = os.environ.get("ROUTER_API_KEY", "").strip()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1024),  # The default of 100 is too small for judges.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # `chat` limits the total.
            headers=headers,
        )
        for other in list(_sessions):
            if other.is_closed():  # such as the loops of functions that call asyncio.run per sample
                await close_session(other)
    return _sessions[loop]


async def close_session(loop=None) -> None:
    """Close this event loop's session. Scripts and tests call it before their loop ends."""
    session = _sessions.pop(loop or asyncio.get_running_loop(), None)
    if session:
        await session.close()


class ReplyError(Exception):
    """A reply with HTTP status 200 that reports a failure. `status` is the one inside the reply."""

    def __init__(self, status, message):
        super().__init__(f"{status}, inside a reply with HTTP status 200: {message}")
        self.status = status


def _raise_if_failed(reply):
    """Raise ReplyError if a reply, or one choice of a reply, has an `error`, as gateways send them."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if not error:
        return
    code = str(error.get("code")) if isinstance(error, dict) else ""
    status = int(code) if re.fullmatch(r"[45]\d\d", code) else 502  # 502: the gateway's server failed
    raise ReplyError(status, f"{error!s:.200}")


async def _json_request(method, url, **kwargs):
    session = await _session()
    async with session.request(method, url, **kwargs) as response:
        if not response.ok:
            text = await response.text(errors="replace")
            response.reason = text[:200]  # raise_for_status puts it into the error's message.
            response.raise_for_status()
        reply = await response.json(content_type=None)
    _raise_if_failed(reply)
    return reply


async def served_model(address: str, outdated=None) -> dict:
    """Return the first model of GET /v1/models: id, max_model_len and more. It asks once per address.

    outdated: an earlier answer that turned out to be wrong; ask again, unless another caller has done so.
    """
    shared = _shared_answer(asyncio.get_running_loop(), address)
    async with shared:
        if shared.answer is outdated:
            shared.answer = None
            limit = aiohttp.ClientTimeout(total=60)
            models = await _json_request("GET", f"http://{address}/v1/models", timeout=limit)
            if not isinstance(models, dict) or not models.get("data"):
                raise ValueError(f"http://{address}/v1/models names no model: {models!s:.200}")
            shared.answer = models["data"][0]
        return shared.answer


async def chat(
    prompt: str, address: str, *, model=None, temperature=None, top_p=None, max_tokens=GENRM_MAX_TOKENS,
    timeout_s=GENRM_TIMEOUT_S, chat_kwargs=None) -> tuple[str, str, int | None]:  # fmt: skip
    """Send one user message to `http://address/v1/chat/completions`; settings that are None are not sent.

    Cut connections, HTTP 408, 425, 429 and 5xx, also inside a reply with HTTP status 200, are retried after
    growing random pauses until `timeout_s` has passed. A failing server never makes it raise.
    At temperature 0, equal requests wait for the first one and share its answer. A failure is not shared,
    unless the request crashed servers. While the first one hangs, the others wait.

    Returns:
        (status, text, completion tokens). The status is "ok", "truncated" (cut at the limit, or aborted
        because vLLM was put to sleep), "http_error" or "timeout" (the text then says what went wrong). The
        tokens are None if the answer was shared.
    """
    # Half of a surrogate pair, such as a cut emoji leaves, is not valid UTF-8 and makes servers fail.
    prompt = prompt.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "chat_template_kwargs": chat_kwargs,
    }
    body = {key: value for key, value in body.items() if value is not None}
    shared = _SharedAnswer()
    if temperature == 0:
        shared = _shared_answer(asyncio.get_running_loop(), f"{address} {body}")
    failure = "neither this request nor an equal one was answered"
    pause = 0.5
    try:
        async with asyncio.timeout(timeout_s), shared:
            while not shared.answer:
                try:
                    return await _ask(address, body, shared)
                except Exception as error:  # includes a bad address or reply
                    failure = f"{type(error).__name__}: {error}"
                    if getattr(error, "status", 0) == KILLS_SERVERS:  # Equal ones would crash more.
                        shared.answer = "http_error", failure
                    if not _is_retryable(error):
                        return "http_error", failure, 0
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause = min(8.0, 2 * pause)
            return *shared.answer, None
    except TimeoutError:
        return "timeout", f"no answer from {address} within {timeout_s:g} s; last: {failure}", 0


def _is_retryable(error):
    """Say whether another attempt may succeed."""
    status = getattr(error, "status", None)
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    return isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError))


async def _ask(address, body, shared):
    """Make one attempt and return what `chat` returns. `shared` gets the answer, unless it was aborted."""
    reply = await _complete_chat(address, body)
    status, text, tokens, is_aborted = _read_reply(reply)
    if not is_aborted:
        shared.answer = status, text
    return status, text, tokens


async def _complete_chat(address, body):
    """Send one request, with a model name and max_tokens that the server accepts, and return the reply."""
    url = f"http://{address}/v1/chat/completions"
    if "model" in body:
        return await _json_request("POST", url, json=body)
    served = await served_model(address)
    body = body | {"model": served["id"]}
    context = served.get("max_model_len") or math.inf  # for prompt and answer together
    # Without max_tokens the server uses what the prompt leaves of the context.
    if body.get("max_tokens", 0) >= context:
        del body["max_tokens"]
    try:
        return await _json_request("POST", url, json=body)
    except (aiohttp.ClientResponseError, ReplyError) as error:
        if error.status == 404:  # Another model may have been started at this address.
            renamed = await served_model(address, outdated=served)
            if renamed["id"] == served["id"]:
                raise
            body["model"] = renamed["id"]
        elif error.status == 400 and "max_tokens" in body and context < math.inf:
            del body["max_tokens"]  # The prompt may leave less room than that.
        else:
            raise
    return await _json_request("POST", url, json=body)


def _read_reply(reply):
    """Return (status, text, completion tokens, whether the server aborted) of a chat completion.

    Raises ReplyError for a reply without choices, or with an error in its choice, and ValueError for a
    completion without text.
    """
    if not isinstance(reply, dict) or reply.get("choices") is None:
        raise ReplyError(502, f"no choices in the reply {reply!s:.200}")
    try:
        choice = reply["choices"][0]
        _raise_if_failed(choice)
        text = choice["message"]["content"] or ""  # null: the reasoning parser found no final part
        if isinstance(text, list):  # content in parts
            text = [part.get("text") or "" for part in text]
        text = "".join(text)  # raises TypeError if the content is not text
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply is not a chat completion: {reply!s:.200}") from error
    end = choice.get("finish_reason")
    status = "truncated" if end in ("length", "abort") else "ok"
    usage = reply.get("usage") or {}
    return status, text, usage.get("completion_tokens") or 0, end == "abort"


NOT_ASKED = {"first_wrong": None, "genrm_status": "skipped", "genrm_error": "", "genrm_shared": False,
             "critique": ""}  # fmt: skip


async def judge_solution(problem, answer, solution, address, prompt_style="tagged", **settings) -> dict:
    """Ask the GenRM for its verdict on one solution. settings: see `chat`.

    Returns first_wrong (0-based paragraph, -1 if none, None if unknown), critique, genrm_error, genrm_shared
    (whether an equal request got the answer) and genrm_status ("ok", "truncated", "unparsable", "http_error",
    "timeout" or "skipped").
    """
    prompt = format_critic_prompt(problem, answer, solution, prompt_style)
    status, text, tokens = await chat(prompt, address, **settings)
    verdict = NOT_ASKED | {"genrm_status": status, "genrm_shared": tokens is None, "critique": text}
    if status in ("http_error", "timeout"):
        verdict |= {"genrm_error": text, "critique": ""}
    elif status == "ok":
        # With a raw prompt the judge numbers the steps itself, so any index is valid.
        paragraphs = split_paragraphs(solution) if isinstance(solution, str) else solution
        count = None if prompt_style == "raw" else len(paragraphs)
        verdict["first_wrong"] = parse_critique(text, count)
        if verdict["first_wrong"] is None:
            verdict["genrm_status"] = "unparsable"
    return verdict


async def compute_score_discriminative(
    data_source, solution_str, ground_truth, extra_info=None, *, prompt, reward_router_address,
    reward_model_tokenizer) -> dict:  # fmt: skip
    """Score with a discriminative reward model: the logit that vLLM's /classify gives for the conversation.

    prompt: the row's messages. The chat template of the model's own tokenizer renders them, with BOS.
    Returns score, and the rule's acc and pred (None if ground_truth is "").
    Raises aiohttp.ClientError if the server fails, ValueError for a model with more than one label.
    """
    messages = [*prompt, {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(messages, tokenize=False)
    body = {"input": text, "add_special_tokens": False, "use_activation": False}
    reply = await _json_request("POST", f"http://{reward_router_address}/classify", json=body)
    (score,) = reply["data"][0]["probs"]
    result = {"acc": None, "pred": None}
    if ground_truth != "":
        result = compute_score(data_source, solution_str, ground_truth)
    return result | {"score": score}


# --- 5. FAPO (paper eq. 8 and 11) ---------------------------------------------------------------------------
async def compute_score_fapo(
    data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None,
    reward_model_tokenizer=None, turns=(), *, penalty=1.0, on_no_verdict: Literal["none", "rule"] = "none",
    judge_test=False, judge_wrong=False, keep_critique=False, prompt_style="tagged", genrm_model=None,
    verifier: Literal["rule", "math_verify"] = "rule", genrm_temperature=None, genrm_chat_kwargs=None,
    genrm_max_tokens=GENRM_MAX_TOKENS, genrm_timeout_s=GENRM_TIMEOUT_S) -> dict:  # fmt: skip
    """Score with FAPO: 1 if fully correct, 1 - penalty for a correct answer with a wrong step, -1 if wrong.

    See equation 8 of the paper.

    Args:
        turns: the turns of a rollout function. If there are several, the judge reads them, each with its
            author, instead of paragraphs, and first_wrong counts turns.
        penalty: lambda. 1.0 is the paper's majority-guided default (appendix A). With None the judge only
            measures, and may be missing.
        on_no_verdict: what to do without a verdict. "none" leaves the sample unscored. "rule" scores it as
            if the solution were sound, as the original does, and returns no None: verl averages all values.
        judge_test: also query the judge on the test split, only to measure; the score stays the rule's.
        judge_wrong: also query it on wrong answers, for first_wrong; their score stays the rule's.
        keep_critique: return the text of the critique.
        genrm_chat_kwargs: for the judge's chat template, such as {"enable_thinking": false}.
        genrm_*: all others: see `chat`.
    Returns:
        For every sample score, acc, pred, flawed_positive (None: unknown) and the values of `judge_solution`.
    Raises:
        ValueError: if the judge is needed and has no address.
    """
    if on_no_verdict not in ("none", "rule"):
        raise ValueError(f"on_no_verdict: {on_no_verdict!r} is unknown; use 'none' or 'rule'")
    result = compute_score(data_source, solution_str, ground_truth)
    if verifier != "rule":  # It blocks, and asyncio.to_thread's threads must be free for host names.
        grade = functools.partial(compute_score, data_source, solution_str, ground_truth, verifier=verifier)
        graded = await asyncio.get_running_loop().run_in_executor(_grader_threads, grade)
        if graded["acc"] is not None or on_no_verdict == "none":
            result = graded
    extra_info = extra_info or {}
    is_test = extra_info.get("split") == "test"
    only_measures = is_test or penalty is None
    is_asked = result["acc"] or (judge_wrong and result["acc"] is False)
    if is_test and not judge_test or only_measures and not reward_router_address:
        is_asked = False
    verdict = dict(NOT_ASKED)
    if is_asked:
        if reward_router_address is None:
            raise ValueError("reward_router_address: missing; pass --genrm or --router-address")
        if extra_info.get("question") is None:
            raise ValueError("extra_info['question']: missing; the judge needs the text of the problem")
        solution = solution_str
        if len(turns) > 1:  # The author comes first, so that no text can claim another author.
            solution = [f"({turn['who']}) {turn['text'].strip()}" for turn in turns]
        verdict = await judge_solution(
            extra_info["question"], str(ground_truth), solution, reward_router_address, prompt_style,
            model=genrm_model, temperature=genrm_temperature, max_tokens=genrm_max_tokens,
            timeout_s=genrm_timeout_s, chat_kwargs=genrm_chat_kwargs)  # fmt: skip
    first_wrong = verdict["first_wrong"]
    if first_wrong is None and on_no_verdict == "rule":
        first_wrong = verdict["first_wrong"] = -1
    flawed = None if first_wrong is None else first_wrong != -1
    if result["acc"] is False:  # A wrong answer is not a flawed positive, whatever the judge says.
        flawed = False
    if flawed is None and not only_measures:
        result["score"] = None
    elif flawed and not only_measures:
        result["score"] -= penalty
    if not keep_critique:
        del verdict["critique"]
    return result | {"flawed_positive": flawed} | verdict


async def compute_score_baseline(*sample, **settings) -> dict:
    """Score with the rule alone. A GenRM, if one runs, only measures. Takes what compute_score_fapo takes."""
    return await compute_score_fapo(*sample, **settings | {"penalty": None})


# Callers check arguments against this signature before the run starts.
compute_score_baseline.__signature__ = inspect.signature(compute_score_fapo)


# --- 6. Training the judge (paper eq. 7; the recipe's reward_fn_genrm.py) -----------------------------------
def compute_score_fapo_genrm(
    data_source, solution_str, ground_truth, extra_info, reward_router_address=None,
    reward_model_tokenizer=None, *, on_no_verdict: Literal["none", "rule"] = "none") -> dict:  # fmt: skip
    """Score one critique: R = R_outcome + R_process.

    R_outcome is +1 if the critique is right about whether the solution is flawed (acc), else -1, also if the
    last 300 characters contain no index. R_process is -|pred - true| / total_steps if both say flawed.
    Returns score, acc, exact (the right index) and gt. Unless on_no_verdict is "rule", for verl, it also
    returns pred (or None) and three values whose means are rates: recall and location, over flawed solutions,
    and sound_kept, over sound ones.
    Raises ValueError if ground_truth or extra_info["total_steps"] is missing or out of range.
    """
    try:
        truth, total_steps = int(ground_truth), int(extra_info["total_steps"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"ground_truth, extra_info['total_steps']: must be integers ({error!r})") from error
    if not -1 <= truth < total_steps:
        raise ValueError(f"ground_truth: {truth} is not in -1 .. total_steps - 1 = {total_steps - 1}")
    pred = parse_critique(solution_str[-TAIL_CHARS:], total_steps)
    flawed, exact = truth != -1, pred == truth
    acc = pred is not None and (pred != -1) == flawed
    score = -1.0
    if acc:
        score = 1.0 - abs(pred - truth) / total_steps
    result = {"score": score, "acc": acc, "exact": exact, "gt": truth}
    if on_no_verdict != "rule":
        result |= {
            "pred": pred,
            "recall": acc if flawed else None,
            "location": exact if flawed else None,
            "sound_kept": None if flawed else acc,
        }
    return result
