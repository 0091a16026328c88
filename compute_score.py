"""Reward functions of FAPO (arXiv:2510.22543): one sample in, one score out.

    compute_score             the rule: is the last \\boxed{} the right answer?  +1 / -1
    compute_score_gsm8k       the rule for GSM8K, which also accepts "#### N"
    compute_score_baseline    the rule; a generative reward model (GenRM), if there is one, only measures
    compute_score_fapo        the rule minus `penalty` if the GenRM finds a wrong step in a right answer
    compute_score_fapo_genrm  trains the GenRM itself

How to use it: name one of them as reward function, for example
    python grpo_trainer.py ... --reward-fn compute_score.py:compute_score_fapo
The file imports nothing of this repository. Copy it, change it, or give it to verl as a custom reward function.
Every function names all that it can be given: what a reward loop passes to each, and its settings after the "*". So a setting
that is misspelt is refused.

A failure is a status, never a number: a judge that is down or says nothing usable gives `score: None`
("no verdict"), not +1 and not 0. A framework that needs a number, such as verl, sets on_no_verdict="rule".

What it leaves out: code execution, process rewards per token, and judges that are not OpenAI-compatible servers.
"""

import asyncio
import collections
import functools
import inspect
import itertools
import json
import os
import queue
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import aiohttp

# --- 1. The answer in the box -----------------------------------------------------------------------------------------

TAIL_CHARS = 300  # only the end of a solution is searched (DAPO's and FAPO's rule; the longest MATH-500 answer has 159)


def last_boxed_only_string(text: str) -> str | None:
    """The last `\\boxed{...}` in `text`, wrapper included; None if there is none, or if the last one is never closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]) if start >= 0 else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.end()]
    return None


def remove_boxed(boxed: str) -> str:
    """The content of `\\boxed{...}`. Raises ValueError if `boxed` is not such a string."""
    if not (boxed.startswith("\\boxed{") and boxed.endswith("}")):
        raise ValueError(f"not a \\boxed{{...}} string: {boxed[:50]!r}")
    return boxed[len("\\boxed{") : -1]


# Normalisation of answers: Minerva's procedure (Lewkowycz et al. 2022, appendix D.1), which DAPO and FAPO use. Where ours
# departs from theirs, and why, is one table: docs/answers.md.
_SUBSTITUTIONS = [
    ("\\left", ""), ("\\right", ""), ("dfrac", "frac"), ("tfrac", "frac"), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""),
    ("\n", ""), (",\\!", ","), ("{,}", ","), ("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]  # fmt: skip
_REMOVED = [
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "children", "tickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}",
    "\\;", '"', "\\dots",
]  # fmt: skip
_TYPE = r"\\(?:text|textbf|mathrm|mathbf|overline|boxed)\{((?:[^{}]|\{[^{}]*\})*)\}"
_BARE = r"(\\[a-zA-Z]+|[^{}\\\[])"  # an argument without braces: a command or one character


def normalize_final_answer(answer: str) -> str:
    """`answer` (the content of a box, or the ground truth) in the form in which two answers are compared.

    Known weakness of the procedure: only what follows the last "=" counts, so the answer "2x+y=0" becomes "0".
    """
    between = re.sub(r"\([^()]*\)", "", answer).split("=")[1:-1]  # what stands between two equals signs
    if not any(re.search(r",(?!\d{3})|;|\b(?:and|or)\b", part) for part in between):  # "x=1,x=2" is a list and stays one
        answer = answer.split("=")[-1]
    answer = re.sub(r"\ban |\ba (?=[A-Za-z]{2}|\d)", "", answer)  # articles, not the a of "a + b"
    for old, new in _SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    in_dollars = re.search(r"\$([^$]*)\$", answer)
    answer = in_dollars[1] if in_dollars else answer
    answer = re.sub(_TYPE, r"\1", re.sub(_TYPE, r"\1", answer))  # twice: \textbf{\text{A}}
    answer = re.sub(r"\\frac" + _BARE, r"\\frac{\1}", answer)  # \frac12 -> \frac{1}2
    answer = re.sub(r"(\\frac\{[^{}]*\})" + _BARE, r"\1{\2}", answer)  # \frac{1}2 -> \frac{1}{2}
    answer = re.sub(r"\\sqrt" + _BARE, r"\\sqrt{\1}", answer)
    answer = answer.replace("$", "").strip()
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    if re.fullmatch(r"[-+]?\d+", answer):
        answer = re.sub(r"^([-+]?)0+(?=\d)", r"\1", answer)  # AIME's 025
    choice = re.fullmatch(r"\(?([A-J])\)?[.:]?", answer)  # (A), A. and A) are the choice A
    return choice[1] if choice else answer


# --- 2. The rule (paper eq. 4: +1 if the answer is right, else -1) ----------------------------------------------------


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None, reward_model_tokenizer=None,
    reward_router_addresses=None, step=None, *, verifier="rule",
) -> dict:  # fmt: skip
    """Score of one solution by its final answer: its last box, or for GSM8K, where there is none, the number after "####".

    verifier: "rule" compares normalised strings; "math_verify" asks the math-verify library whether they are equal (blocks).
    Returns {"score": 1.0 | -1.0, "acc": bool, "pred": str}; where math-verify did not finish, score and acc None and
    "verify_status": "failed". Raises ValueError for an unknown verifier or a missing library.
    """
    if verifier not in ("rule", "math_verify"):
        raise ValueError(f"verifier: {verifier!r} is unknown; use 'rule' or 'math_verify'")
    tail, truth = solution_str[-TAIL_CHARS:], str(ground_truth)
    boxed = last_boxed_only_string(tail)
    answer = remove_boxed(boxed) if boxed else None
    if data_source in ("gsm8k", "openai/gsm8k") and "\\boxed{" not in tail:
        hashes = re.findall(r"####\s*\$?\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)", tail)
        answer = hashes[-1].replace(",", "") if hashes else None
    if answer is None:
        return {"score": -1.0, "acc": False, "pred": "[INVALID]"}  # the original's word
    if verifier == "math_verify":
        acc, pred = _math_verify(answer, truth), answer
    else:
        pred = normalize_final_answer(answer)
        acc = pred != "" and pred == normalize_final_answer(truth)
    if acc is None:
        return {"score": None, "acc": None, "pred": pred, "verify_status": "failed"}
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}


def compute_score_gsm8k(data_source, *sample, **named) -> dict:
    """compute_score's rule for GSM8K, whatever the data source is called."""
    return compute_score("gsm8k", *sample, **named)


compute_score_gsm8k.__signature__ = inspect.signature(compute_score)  # so that callers see what it takes


# math-verify limits its own time with signal.alarm, which works in the main thread of a process only, and reward functions run
# in threads and event loops. So child processes grade, one answer at a time each: an answer that hangs or kills its child costs
# no other one, and the next answer gets a new child. (A ProcessPoolExecutor breaks as a whole, cannot import a file that was
# loaded under a name of the caller's own, as verl does, and its processes outlive a parent that is killed.)
MAX_GRADERS = 4
STAGE_TIMEOUT_S = 2  # math-verify's own limit to parse a side and to compare; an honest answer takes milliseconds
GRADE_TIMEOUT_S = 4  # then a child ends itself: what computes in C does not hear the alarm
_graders: queue.LifoQueue = queue.LifoQueue()  # those that are idle; last in, first out starts no more than are needed
for _ in range(MAX_GRADERS):
    _graders.put(None)  # not started yet
_grader_threads = ThreadPoolExecutor(MAX_GRADERS)  # for callers in event loops; starts none before they are needed


def _math_verify(pred: str, truth: str) -> bool | None:
    """Whether math-verify calls the two answers equal; None if it did not finish. Blocks; safe in any thread."""
    grader, line = _graders.get(), ""
    try:
        if grader is None or grader.poll() is not None:
            command = [sys.executable, os.path.abspath(__file__), "--grade", str(GRADE_TIMEOUT_S)]
            grader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if grader.stdout.readline() != "ready\n":
                raise ValueError("verifier: 'math_verify' could not start; is it installed? (pip install math-verify)")
        print(json.dumps([pred, truth]), file=grader.stdin, flush=True)
        line = grader.stdout.readline()
        return json.loads(line or "null")
    finally:
        if grader and not line:  # it ended itself or died, or we are interrupted: its answer would pass for that to the next one
            grader.kill()
            grader.wait()
        _graders.put(grader)


def _grade_forever(timeout_s: float) -> None:
    """The child process: reads [pred, truth] lines, writes true, false or null, ends with its input or at its time limit."""
    import faulthandler
    import resource

    # By a thread in C, which does not wait for Python.
    end_after = functools.partial(faulthandler.dump_traceback_later, exit=True, file=open(os.devnull, "w"))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not get among the answers
    end_after(120)  # importing sympy on a busy machine
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    def tried(function, *arguments, **limit):
        """What it returns; None if it did not finish, False if it is impossible (what cannot be compared is not equal)."""
        try:
            return function(*arguments, raise_on_error=True, **limit)
        except (TimeoutException, MemoryError):
            return None
        except Exception:
            return False

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # an answer such as 9^{9^{9^9}} must not eat the machine
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        end_after(timeout_s)
        outcomes = [tried(parse, f"\\boxed{{{answer}}}", parsing_timeout=STAGE_TIMEOUT_S) for answer in json.loads(line)]
        if None not in outcomes and False not in outcomes:  # but all that each side can be read as: expressions and texts
            pairs = itertools.product(*outcomes)
            outcomes = [tried(verify, truth, pred, timeout_seconds=STAGE_TIMEOUT_S) for pred, truth in pairs]
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(True if True in outcomes else None if None in outcomes else False), file=answers, flush=True)


# --- 3. The judge's prompt and its answer -----------------------------------------------------------------------------

# What FAPO-GenRM was trained on (paper appendix F and every row of the FAPO-Critic data), letter by letter.
_TAGGED = (
    "The following is a math problem with its ground truth answer, along with an AI solution (split into paragraphs, enclosed "
    "with tags and indexed from 0):\n\n"
    "[Math Problem]\n\n{problem}\n\n[Ground Truth]\n\n{answer}\n\n[AI Solution]\n\n{solution}\n\n"
    "Your task is to review and critique the solution paragraph by paragraph. Once you identify an error in a paragraph, return "
    "the index of the paragraph where the earliest error occurs. Otherwise, return the index of -1 (which typically denotes "
    "'not found').\n\n"
    "Please reason step by step, put your final answer (i.e., the index) in \\boxed{{}}."
)
# What the original recipe asks at RL time although its judge never saw it in training; for comparisons.
_RAW = _TAGGED.replace("paragraphs, enclosed with tags and indexed from 0", "steps").replace("paragraph", "step")
# The first one for benchmarks that do not tell the true answer.
_NO_TRUTH = _TAGGED.replace(" with its ground truth answer", "").replace("[Ground Truth]\n\n{answer}\n\n", "")
_TAGS = "<paragraph_{index}>\n{text}\n</paragraph_{index}>\n\n"

# style -> (template, format of one paragraph with the white space after it; "" = the solution goes in unsplit). Add your own.
PROMPT_STYLES: dict[str, tuple[str, str]] = {
    "tagged": (_TAGGED, _TAGS),
    "no_truth": (_NO_TRUTH, _TAGS),
    "raw": (_RAW, ""),
}


def split_paragraphs(solution: str) -> list[str]:
    """The paragraphs that the judge counts: separated by empty lines, stripped, empty ones dropped.

    A line of spaces does not separate, because it does not in the FAPO-Critic data (row 7 of its example file).
    """
    return [paragraph.strip() for paragraph in solution.split("\n\n") if paragraph.strip()]


def format_critic_prompt(problem: str, answer: str, solution: str | list[str], prompt_style: str = "tagged") -> str:
    """The judge's prompt. `solution` is a text, or a list of paragraphs where the caller has split it already."""
    if prompt_style not in PROMPT_STYLES:
        raise ValueError(f"prompt_style: {prompt_style!r} is unknown; use one of {', '.join(PROMPT_STYLES)}")
    template, paragraph = PROMPT_STYLES[prompt_style]
    if paragraph:
        parts = split_paragraphs(solution) if isinstance(solution, str) else solution
        solution = "".join(paragraph.format(index=i, text=text) for i, text in enumerate(parts)).rstrip("\n")
    elif not isinstance(solution, str):
        solution = "\n\n".join(solution)
    return template.format(problem=problem, answer=answer, solution=solution)


def parse_critique(text: str, num_paragraphs: int | None) -> int | None:
    """The index in the critique's last box: -1 = no error, else the first wrong paragraph, counted from 0.

    None = unparsable: no box, not an integer, or outside -1 .. num_paragraphs - 1 (num_paragraphs None: no upper bound).
    """
    try:
        index = int(remove_boxed(last_boxed_only_string(text) or ""))
    except ValueError:
        return None
    return index if index >= -1 and (num_paragraphs is None or index < num_paragraphs) else None


# --- 4. Asking the judge ----------------------------------------------------------------------------------------------

RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}  # anything else would be refused again
GENRM_MAX_TOKENS = 16384  # the recipe's reward_fn_reasoning.py
GENRM_TIMEOUT_S = 500.0  # waiting and all attempts; below the reward loop's 600 s per sample, so that it is named here

_loop_state: dict[asyncio.AbstractEventLoop, tuple] = {}  # what `_state` returns


async def _state() -> tuple[aiohttp.ClientSession, dict[str, asyncio.Lock], dict[str, str]]:
    """This event loop's one session (loops cannot share one), and by address: the locks for looking models up, the models."""
    loop = asyncio.get_running_loop()
    if loop not in _loop_state:
        connector = aiohttp.TCPConnector(limit=1024)  # the default of 100 is too small for judges
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the total is chat's timeout_s
        # A judge on another machine should ask for a key; it is never in a config or log. A secret's file may end with a newline.
        key = os.environ.get("ROUTER_API_KEY", "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        _loop_state[loop] = session, collections.defaultdict(asyncio.Lock), {}
        for ended in [other for other in _loop_state.copy() if other.is_closed()]:  # of asyncio.run once per sample, say
            if state := _loop_state.pop(ended, None):
                await state[0].close()
    return _loop_state[loop]


async def close_session() -> None:
    """Closes this event loop's session; for scripts and tests that end their loop."""
    if asyncio.get_running_loop() in _loop_state:
        await _loop_state.pop(asyncio.get_running_loop())[0].close()


async def _json_request(method: str, url: str, **kwargs) -> dict:
    session, _, _ = await _state()
    async with session.request(method, url, **kwargs) as response:
        if response.status != 200:
            text = (await response.text(errors="replace"))[:200].replace("\n", " ")
            status, headers = response.status, response.headers
            raise aiohttp.ClientResponseError(response.request_info, (), status=status, message=text, headers=headers)
        return await response.json(content_type=None)


async def model_id(address: str) -> str:
    """The first model that GET /v1/models names; asked once per address, the callers in between wait for the answer."""
    _, locks, models = await _state()
    async with locks[address]:
        if address not in models:
            reply = await _json_request("GET", f"http://{address}/v1/models", timeout=aiohttp.ClientTimeout(total=60))
            models[address] = reply["data"][0]["id"]
        return models[address]


async def chat(
    prompt: str, address: str, *, model: str | None = None, temperature: float | None = None, top_p: float | None = None,
    max_tokens: int = GENRM_MAX_TOKENS, timeout_s: float = GENRM_TIMEOUT_S, chat_kwargs: dict | None = None,
) -> tuple[str, str, int]:  # fmt: skip
    """One user message to `http://address/v1/chat/completions`. What is None is not sent.

    Returns (status, text, completion tokens). status is "ok"; "truncated" where the text was cut at the length limit or the
    server aborted it (vLLM does, when it is put to sleep); "http_error" or "timeout", and then the text says what went wrong.
    A judge that is away or busy is waited for: broken connections and RETRIED_STATUS are tried again until `timeout_s` has
    passed, after growing random pauses, or what Retry-After asks for if that is longer. Never raises for a bad server.
    """
    settings = dict(max_tokens=max_tokens, temperature=temperature, top_p=top_p, chat_template_kwargs=chat_kwargs)
    body = {key: value for key, value in settings.items() if value is not None}
    body["messages"] = [{"role": "user", "content": prompt}]
    reason = "the request was sent, and no answer came"

    async def attempts() -> tuple[str, str, int]:
        nonlocal reason
        pause = 0.5
        while True:
            asked = ""
            try:
                body["model"] = model or await model_id(address)
                reply = await _json_request("POST", f"http://{address}/v1/chat/completions", json=body)
                choice = reply["choices"][0]
                status = "truncated" if choice.get("finish_reason") in ("length", "abort") else "ok"
                text = choice["message"]["content"] or ""  # null when a reasoning parser found no final part
                return status, text, int((reply.get("usage") or {}).get("completion_tokens") or 0)
            except aiohttp.ClientResponseError as error:
                reason, asked = f"HTTP {error.status}: {error.message}", (error.headers or {}).get("Retry-After", "")
                if error.status == 404:  # perhaps another model is served there now: look its name up next time
                    (await _state())[2].pop(address, None)
                if error.status not in RETRIED_STATUS:
                    return "http_error", reason, 0
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # no such address, or no chat completion
                return "http_error", f"malformed address or reply: {type(error).__name__}: {error}", 0
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
            await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), float(asked) if asked.isdecimal() else 0.0))
            pause = min(8.0, 2 * pause)

    try:
        return await asyncio.wait_for(attempts(), timeout_s)
    except asyncio.TimeoutError:
        return "timeout", f"no answer from {address} within {timeout_s:g} s; last: {reason}", 0


# --- 5. FAPO (paper eq. 8 and 11) -------------------------------------------------------------------------------------


async def compute_score_fapo(
    data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None, reward_model_tokenizer=None,
    reward_router_addresses=None, step=None, *, penalty=1.0, on_no_verdict="none", judge_test=False, keep_critique=False,
    verifier="rule", prompt_style="tagged", genrm_model=None, genrm_temperature=None, genrm_max_tokens=GENRM_MAX_TOKENS,
    genrm_timeout_s=GENRM_TIMEOUT_S, genrm_chat_kwargs=None,
) -> dict:  # fmt: skip
    """FAPO's score: 1 fully correct, 1 - penalty right answer with a wrong step, -1 wrong (R_RLVR + R_delta, paper eq. 8).

    The judge is asked about right answers only, as a wrong one is no flawed positive. It is asked through the chat endpoint,
    which applies its own template: no tokenizer is needed here.

    penalty: lambda; 1.0 is the paper's majority-guided default (appendix A: 2 / (rho_shift + 1) with rho_shift = 1). None:
    the judge only measures, and may be missing.
    on_no_verdict: where the judge gives no verdict, "none" scores None, "rule" scores as if the solution were sound
    (what the original does).
    judge_test: ask about the test split, too; its score is the rule's all the same.
    keep_critique: return the critique. verifier, prompt_style: see compute_score and PROMPT_STYLES.
    genrm_*: see `chat`; chat_kwargs are sent as chat_template_kwargs, {"enable_thinking": false} for judges with such a switch.

    Returns score, acc, pred, flawed_positive (None = not known), genrm_status ("skipped", "ok", "truncated", "unparsable",
    "http_error" or "timeout"), critique if keep_critique, genrm_error after a failure.
    Raises ValueError where a judge is needed and reward_router_address is None, and for settings with an unknown value.
    """
    if on_no_verdict not in ("none", "rule"):
        raise ValueError(f"on_no_verdict: {on_no_verdict!r} is unknown; use 'none' or 'rule'")
    rule = functools.partial(compute_score, data_source, solution_str, ground_truth, verifier=verifier)
    if verifier == "math_verify":  # blocks: in threads of its own, as those of asyncio.to_thread also look up host names
        result = await asyncio.get_running_loop().run_in_executor(_grader_threads, rule)
    else:
        result = rule()
    extra_info = extra_info or {}
    is_test = extra_info.get("split") == "test"
    only_measures = is_test or penalty is None
    result |= {"flawed_positive": False if result["acc"] is False else None, "genrm_status": "skipped"}
    if not result["acc"] or is_test and not judge_test or only_measures and reward_router_address is None:
        return result
    if reward_router_address is None:
        raise ValueError("reward_router_address: missing; this function needs a running GenRM (--genrm or --router-address)")
    if extra_info.get("question") is None:
        raise ValueError("extra_info['question']: missing; the judge needs the problem text (prepare_data.py writes it)")
    prompt = format_critic_prompt(extra_info["question"], str(ground_truth), solution_str, prompt_style)
    status, text, _ = await chat(
        prompt, reward_router_address, model=genrm_model, temperature=genrm_temperature, max_tokens=genrm_max_tokens,
        timeout_s=genrm_timeout_s, chat_kwargs=genrm_chat_kwargs,
    )  # fmt: skip
    if status == "ok":
        # In a raw prompt the judge counts steps of its own, so that no index is too large.
        index = parse_critique(text, None if prompt_style == "raw" else len(split_paragraphs(solution_str)))
        status = "unparsable" if index is None else "ok"
        result["flawed_positive"] = None if index is None else index != -1
    result["genrm_status"] = status
    if status in ("http_error", "timeout"):
        result["genrm_error"] = text
    elif keep_critique:
        result["critique"] = text
    if only_measures:
        return result
    if result["flawed_positive"]:
        result["score"] -= penalty
    elif status != "ok" and on_no_verdict == "none":
        result["score"] = None
    return result


async def compute_score_baseline(*sample, **settings) -> dict:
    """The rule's score, never touched; a GenRM, if there is one, only measures. Keys and settings as compute_score_fapo."""
    return await compute_score_fapo(*sample, **settings | {"penalty": None})


compute_score_baseline.__signature__ = inspect.signature(compute_score_fapo)  # so that callers see what it takes


# --- 6. Training the judge (paper eq. 7; the recipe's reward_fn_genrm.py) ---------------------------------------------


def compute_score_fapo_genrm(
    data_source, solution_str, ground_truth, extra_info, reward_router_address=None, reward_model_tokenizer=None,
    reward_router_addresses=None, step=None,
) -> dict:  # fmt: skip
    """Score of one critique: R = R_outcome + R_process.

    R_outcome is +1 if the critique is right about flawed or not, else -1; R_process is -|pred - true| / total_steps where
    both say flawed. A critique without a valid index in its last 300 characters scores -1.
    Returns score, acc (right about flawed or not), exact (right index), pred (index or None), gt, and three whose means over
    many critiques are rates: recall and location (on flawed solutions, else None), sound_kept (on sound ones, else None).
    Raises ValueError where ground_truth or extra_info["total_steps"] is missing or does not fit.
    """
    try:
        truth, total_steps = int(ground_truth), int(extra_info["total_steps"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"ground_truth, extra_info['total_steps']: two integers are needed ({error!r})") from error
    if not -1 <= truth < total_steps:
        raise ValueError(f"ground_truth: {truth} is not in -1 .. total_steps - 1 = {total_steps - 1}")
    pred = parse_critique(solution_str[-TAIL_CHARS:], total_steps)
    flawed, exact = truth != -1, pred == truth
    acc = pred is not None and (pred != -1) == flawed
    score = 1.0 if acc else -1.0
    if acc and flawed:
        score -= abs(pred - truth) / total_steps
    rates = {"recall": acc if flawed else None, "location": exact if flawed else None, "sound_kept": None if flawed else acc}
    return {"score": score, "acc": acc, "exact": exact, "pred": pred, "gt": truth} | rates


if __name__ == "__main__":
    if sys.argv[1:2] != ["--grade"]:  # --grade SECONDS: this file as its own child process, see _math_verify
        sys.exit(__doc__)
    _grade_forever(float(sys.argv[2]))
