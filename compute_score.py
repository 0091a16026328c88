"""Reward functions of FAPO (arXiv:2510.22543): one sample in, one score out.

    compute_score                 outcome reward: +1 if the last \\boxed{} has the correct answer, else -1
    compute_score_gsm8k           outcome reward for GSM8K, which also accepts "#### N"
    compute_score_baseline        outcome reward; a generative reward model (GenRM), if any, measures flaws
    compute_score_fapo            outcome reward, minus `penalty` if the GenRM finds a wrong step
    compute_score_fapo_genrm      reward for training the GenRM itself
    compute_score_discriminative  score of a discriminative reward model, with the outcome reward's accuracy

Pass a function to grpo_trainer.py (--reward-fn compute_score.py:compute_score_fapo), or to verl as its custom
reward function (except compute_score_discriminative, which needs `prompt`). Settings are keyword-only, so a
misspelt setting raises an error. A failure is a status, not a number: if the judge is down or its critique is
unusable, the sample gets `score: None` ("no verdict"), not +1 or 0. Standalone: imports nothing from this
repository. Requires Python 3.11 or later. Sections 1, 2 and 5 are the paper's rewards. The other sections are
the parts that these use.
Not covered: code execution, process rewards per token, judges that are not OpenAI-compatible servers.
"""

import ast
import asyncio
import contextlib
import functools
import inspect
import json
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import unicodedata
import warnings
from collections.abc import Mapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Literal

import aiohttp

# --- 1. The outcome reward (paper eq. 4: +1 if the answer is right, else -1) --------------------------------
_SCORES = {True: 1.0, False: -1.0, None: None}  # None: correctness is unknown


def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    reward_router_address=None,
    reward_model_tokenizer=None,
    turns=(),
    *,
    verifier: Literal["rule", "math_verify"] = "rule",
) -> dict:
    """Score one solution by the answer in its last box. A GSM8K solution without a box may use "####".

    Args:
        turns: the turns of a rollout function. The answer is then read only from the policy's turns.
        verifier: "rule" compares normal forms. "math_verify" lets the library math-verify compare values. The
            call then blocks, and acc is None if math-verify does not finish.
    Returns:
        A dict with score (+1, -1 or None), acc (whether the answer is correct) and pred (the answer's normal
        form, or "[INVALID]" if there is no answer or the box is empty).
    Raises:
        ValueError: The verifier is unknown, the response is not a text, or the ground truth is not a single
            answer.
    """
    one_of("verifier", verifier, VERIFIERS)
    truth = single_answer(ground_truth, data_source)
    answer = find_answer(data_source, policy_text(solution_str, turns)[-TAIL_CHARS:])
    pred = normalize_final_answer(answer or "") or "[INVALID]"  # as in the original
    equal = _math_verify if verifier == "math_verify" else is_equal
    acc = pred != "[INVALID]" and equal(answer, truth)
    return {"score": _SCORES[acc], "acc": acc, "pred": pred}


def compute_score_gsm8k(data_source, *sample, **settings) -> dict:
    """Score by the rule for GSM8K, regardless of `data_source`. Arguments: see compute_score."""
    return compute_score("gsm8k", *sample, **settings)


# Callers check arguments against this signature before the run starts.
compute_score_gsm8k.__signature__ = inspect.signature(compute_score)

TAIL_CHARS = 300  # As in DAPO, only the end is searched. Answers in MATH-500 have at most 53 characters.


def find_answer(data_source: str, text: str) -> str | None:
    """Return the content of the last box (GSM8K without a box: the number after "####"), or None."""
    if "\\boxed{" in text:
        boxed = last_boxed_only_string(text)
        return boxed and remove_boxed(boxed)
    if data_source in ("gsm8k", "openai/gsm8k"):
        _, mark, rest = text.rpartition("####")
        line = rest.strip().partition("\n")[0]
        number = re.fullmatch(
            r"(?i)[\\$€£(* ]*+([-−+]?)[\\$€£ ]*(?=\.?[0-9])"
            r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?+)"
            r"(?!,?\d|(?:-|[\s*]*)(?:(?:k|(?-i:[MB]))\b|(?:x|(?-i:T))\b(?!-)"
            r"|(?:mil|bn|or|and|to(?!\s(?:be|the)\b))\b|dozen|hundred|thousand|million|billion|trillion"
            r"|\\pi|[π²³¼-¾⅐-⅞&]))[^0-9]*",
            line,
        )
        if mark and number:  # "18 or 20", "1,2" and "5 million" are not answers.
            return number[1] + number[2].replace(",", "")
    return None


def last_boxed_only_string(text: str) -> str | None:
    """Return the last `\\boxed{...}` in `text`, or None if there is no box or the last one is not closed."""
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
        raise ValueError(f"{boxed[:50]!r} is not a \\boxed{{...}} string")
    return match[1]


def policy_text(solution_str: str, turns=()) -> str:
    """Return the part of a response that the policy wrote, in which the rule looks for the answer.

    This is the whole response, unless a rollout function has added turns of tools and users. If such a turn
    interrupts a box, the box contains only what the policy wrote. Raises ValueError if the response is not a
    text, such as a list of messages: a membership test in a list would find no box.
    """
    turns = list(() if turns is None else turns)  # from NumPy's array, as pandas reads lists of Parquet files
    for text in (solution_str, *(turn["text"] for turn in turns)):
        if not isinstance(text, str):
            raise ValueError(
                f"solution_str (column `response`): {text!r:.80} is not a text; write one row "
                "with one text per response"
            )
    if not turns:
        return solution_str
    return "\n\n".join(turn["text"] for turn in turns if turn["who"] == "policy")


# --- 2. FAPO (paper eq. 8 and 11) ---------------------------------------------------------------------------
GENRM_MAX_TOKENS = 16384  # The original recipe uses the same limit (reward_fn_reasoning.py).
# Time limit in seconds for all attempts of a request. The reward loop's limit of 600 s is higher, so a judge
# that is too slow is reported as genrm_status "timeout".
GENRM_TIMEOUT_S = 500.0

NO_JUDGE = "the reward function needs a judge; pass --genrm or --router-address"


async def compute_score_fapo(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    reward_router_address=None,
    reward_model_tokenizer=None,
    turns=(),
    *,
    penalty=1.0,
    on_no_verdict: Literal["none", "rule"] = "none",
    judge_test=False,
    judge_wrong=False,
    keep_critique=False,
    prompt_style="tagged",
    genrm_model=None,
    verifier: Literal["rule", "math_verify"] = "rule",
    genrm_temperature=None,
    genrm_chat_kwargs=None,
    genrm_max_tokens=GENRM_MAX_TOKENS,
    genrm_timeout_s=GENRM_TIMEOUT_S,
) -> dict:
    """Score one solution with FAPO (equation 8 of the paper).

    The score is 1 if the solution is fully correct, 1 - penalty if the answer is correct but a step is wrong,
    and -1 if the answer is wrong.

    Args:
        turns: the turns of a rollout function. The judge then reviews turns (each with its author) instead
            of paragraphs, and first_wrong is the index of a turn. The answer is read from the policy's turns.
        penalty: lambda; the paper's majority-guided default is 1.0 (appendix A). With None, the judge is
            optional and does not affect the score.
        on_no_verdict: what to do without a verdict. "none" leaves the sample unscored. "rule" scores the
            sample as if the solution were sound, as the original does. "rule" also avoids None in the
            returned numbers, because verl averages every value.
        judge_test: also query the judge on the test split. The score is still the outcome reward.
        judge_wrong: also query the judge on wrong answers to get first_wrong. Their score does not change.
        keep_critique: return the text of the critique.
        prompt_style: the judge's prompt, a key of PROMPT_STYLES.
        verifier: as in compute_score.
        genrm_chat_kwargs: arguments for the judge's chat template, such as {"enable_thinking": false}.
        genrm_*: all other settings are passed to `chat` without the prefix.
    Returns:
        A dict with score, acc, pred, flawed_positive (None if unknown) and the values of `judge_solution`,
        with the genrm_status "skipped" if the judge was not asked.
    Raises:
        ValueError: As in compute_score, or the value of a setting is unknown, or the judge is needed, but its
            address or the text of the problem is missing.
    """
    one_of("on_no_verdict", on_no_verdict, WITHOUT_VERDICT)
    outcome = functools.partial(compute_score, data_source, solution_str, ground_truth, turns=turns)
    if verifier == "rule":
        result = outcome()
    else:  # math-verify blocks, and asyncio needs its default threads to resolve host names.
        grade = functools.partial(outcome, verifier=verifier)
        _, _, threads = _grading()
        result = await asyncio.get_running_loop().run_in_executor(threads, grade)
        if result["acc"] is None and on_no_verdict == "rule":
            result = outcome()
    extra_info = extra_info or {}
    is_test = extra_info.get("split") == "test"
    only_measures = is_test or penalty is None
    wants_verdict = result["acc"] or (judge_wrong and result["acc"] is False)
    if is_test and not judge_test or only_measures and not reward_router_address:
        wants_verdict = False
    verdict = dict(NOT_ASKED)
    if wants_verdict:
        if reward_router_address is None:
            raise ValueError(NO_JUDGE)
        verdict = await judge_solution(
            question_of(extra_info),
            single_answer(ground_truth, data_source),
            show_solution(solution_str, turns),
            reward_router_address,
            prompt_style,
            model=genrm_model,
            temperature=genrm_temperature,
            max_tokens=genrm_max_tokens,
            timeout_s=genrm_timeout_s,
            chat_kwargs=genrm_chat_kwargs,
        )
    first_wrong = verdict["first_wrong"]
    if first_wrong is None and on_no_verdict == "rule":
        first_wrong = verdict["first_wrong"] = -1
    flawed = None
    if first_wrong is not None:
        flawed = first_wrong != -1
    if result["acc"] is False:  # A wrong answer is not a flawed positive, whatever the judge says.
        flawed = False
    if not only_measures:
        if flawed is None:
            result["score"] = None
        elif flawed:
            result["score"] -= penalty
    if not keep_critique:
        del verdict["critique"]
    return result | {"flawed_positive": flawed} | verdict


async def compute_score_baseline(*sample, **settings) -> dict:
    """Return the outcome reward only, even if a GenRM measures flaws. Arguments: see compute_score_fapo."""
    return await compute_score_fapo(*sample, **settings | {"penalty": None})


compute_score_baseline.__signature__ = inspect.signature(compute_score_fapo)

# --- 3. The judge's prompt and its verdict ------------------------------------------------------------------
NOT_ASKED = {
    "first_wrong": None,
    "genrm_status": "skipped",
    "genrm_error": "",
    "genrm_shared": False,
    "critique": "",
}


async def judge_solution(problem, answer, solution, address, prompt_style="tagged", **settings) -> dict:
    """Ask the GenRM for its verdict on one solution. `settings` are passed to `chat`.

    Returns:
        A dict with first_wrong (index of the first wrong paragraph, from 0; -1 if there is none, None if
        unknown), genrm_status ("ok", "truncated", "unparsable", "http_error" or "timeout"), genrm_error,
        genrm_shared (whether the answer came from an identical request) and critique.
    """
    prompt = format_critic_prompt(problem, answer, solution, prompt_style)
    status, text, tokens = await chat(prompt, address, **settings)
    verdict = NOT_ASKED | {"genrm_status": status, "genrm_shared": tokens is None, "critique": text}
    if status in ("http_error", "timeout"):
        verdict |= {"genrm_error": text, "critique": ""}
    elif status == "ok":
        # With a raw prompt, the judge numbers the steps itself, so any index is valid.
        count = None
        if prompt_style != "raw":
            count = len(split_paragraphs(solution))
        verdict["first_wrong"] = parse_critique(text, count)
        if verdict["first_wrong"] is None:
            verdict["genrm_status"] = "unparsable"
    return verdict


# FAPO-GenRM was trained on this prompt, quoted verbatim from appendix F of the paper and from FAPO-Critic.
_TAGGED = (
    "The following is a math problem with its ground truth answer, along with an AI solution (split into "
    "paragraphs, enclosed with tags and indexed from 0):\n\n"
    "[Math Problem]\n\n{problem}\n\n[Ground Truth]\n\n{answer}\n\n[AI Solution]\n\n{solution}\n\n"
    "Your task is to review and critique the solution paragraph by paragraph. Once you identify an error in "
    "a paragraph, return the index of the paragraph where the earliest error occurs. Otherwise, return the "
    "index of -1 (which typically denotes 'not found').\n\n"
    "Please reason step by step, put your final answer (i.e., the index) in \\boxed{{}}."
)
# The original recipe uses this prompt during RL, although its judge never saw the prompt in training. The
# style "raw" exists for comparisons with that recipe.
_RAW = _TAGGED.replace(", enclosed with tags and indexed from 0", "").replace("paragraph", "step")
# Benchmarks without a ground truth use the tagged prompt without its "[Ground Truth]" section.
_NO_TRUTH = _TAGGED.replace(" with its ground truth answer", "").replace("[Ground Truth]\n\n{answer}\n\n", "")
_TAGS = "<paragraph_{index}>\n{text}\n</paragraph_{index}>\n\n"

# {style: (template, format of one paragraph)}. With an empty format, the solution is not split. Add your own
# styles here.
PROMPT_STYLES = {"tagged": (_TAGGED, _TAGS), "no_truth": (_NO_TRUTH, _TAGS), "raw": (_RAW, "")}


def format_critic_prompt(problem: str, answer: str, solution: str | list[str], prompt_style="tagged") -> str:
    """Return the judge's prompt for a solution, which is a string or a list of paragraphs."""
    one_of("prompt_style", prompt_style, PROMPT_STYLES)
    template, paragraph = PROMPT_STYLES[prompt_style]
    frame = _TAGGED + _TAGS + template + paragraph
    if paragraph:
        tagged = ""
        for index, text in enumerate(split_paragraphs(solution)):
            tagged += paragraph.format(index=index, text=break_frame(text, frame))
        solution = tagged.rstrip("\n")
    else:
        if not isinstance(solution, str):
            solution = "\n\n".join(solution)
        solution = break_frame(solution, frame)
    return template.format(problem=problem, answer=answer, solution=solution)


def split_paragraphs(solution: str | list[str]) -> list[str]:
    """Split a solution at empty lines. A list of paragraphs is returned unchanged.

    As in FAPO-Critic, a line that contains spaces is not empty.
    """
    if not isinstance(solution, str):
        return solution
    return [paragraph.strip() for paragraph in solution.split("\n\n") if paragraph.strip()]


def show_solution(solution_str: str, turns=()) -> str | list[str]:
    """Return the solution as a judge sees it: the text, or "(AUTHOR) TEXT" for each turn of a trajectory.

    No text can claim another author: "(tool)" in a text, or a near copy of it, becomes "{tool}". A response
    of a single turn is a trajectory if a rollout function has sampled it. Only such turns have `tokens`.
    """
    turns = list(() if turns is None else turns)
    authors = ["policy", "tool", "user", *(turn["who"] for turn in turns)]
    pattern = _author_pattern(frozenset(authors))
    if not turns or len(turns) == 1 and turns[0].get("tokens") is None:
        return _replace_brackets(solution_str, pattern, "{}")
    shown = []
    for turn in turns:
        text = _replace_brackets(turn["text"], pattern, "{}")
        shown.append(f"({turn['who']}) {text.strip()}")
    return shown


_THOUGHT_TAGS = ("<think>", "<seed:think>", "<thought>", "[THINK]")  # the tags of several models
_QUOTED_TAG = re.compile(r"""["'`“‘](?:</?(?:(?:seed:)?think|thought)>|\[/?THINK\])["'`”’]""")


def final_box(text: str, num_chars=TAIL_CHARS) -> str | None:
    """Return the content of the box with which a judge's reply ends, or None if there is no such box.

    A box in the judge's thought is a draft, so only the text after the last `</think>` counts. A tag between
    quotation marks is quoted from the solution. A box that does not begin within the last `num_chars`
    characters may be a quotation in a reply without a verdict.
    """
    reply = text = _QUOTED_TAG.sub("", text)
    for tag in _THOUGHT_TAGS:
        rest = text.rpartition(f"{tag[0]}/{tag[1:]}")[2]
        if tag in rest:  # The thought is not closed.
            return None
        reply = min(reply, rest, key=len)
    boxed = last_boxed_only_string(reply.rstrip()[-num_chars:])
    return boxed and remove_boxed(boxed)


def parse_critique(text: str, num_paragraphs: int | None) -> int | None:
    """Return the index in the final box (-1: no error found), or None if it is not a valid index."""
    box = re.fullmatch(r"\s*[-−+]?[0-9]+\s*", final_box(text) or "")  # int() would also read 1_0.
    if not box:
        return None
    index = int(box[0].replace("−", "-"))
    if index < -1 or num_paragraphs is not None and index >= num_paragraphs:
        return None
    return index


# --- 4. A solution cannot pass its text off as part of the prompt -------------------------------------------
def break_frame(solution: str, frame: str) -> str:
    """Replace the brackets of a prompt's headings and tags (`frame` is its template) with parentheses.

    Otherwise a policy could learn to write `</paragraph_0>` or `[Ground Truth]` and pass off its own text as
    part of the prompt. Copies with other spaces, invisible characters or letters that look the same count as
    well, and so do control tokens of chat templates, such as `<|im_end|>`, with which a policy could end the
    judge's prompt. A solution without such markers is returned unchanged.
    """
    return _replace_brackets(solution, _frame_pattern(frame), "()")


# In a near copy of a marker, these characters may stand between the letters.
_BETWEEN = r"(?:[^\w()\[\]<>{}]|_)*+"
_INVISIBLE = "\u200b"
# Letters that a reader takes for Latin letters. A Greek capital is listed if it looks like another Latin
# letter than its small letter does. "Σ" is the normal form of a letter that looks like C.
_CYRILLIC = dict(zip("авьԁегғһніјӏкмопрԛѕтуүѵԝхс", "abbderfhhijlkmonpqstyyvwxc", strict=True))
_GREEK = dict(zip("αβγεζηικμνορςστυχωϳΗΜΝΣΥ", "abyeznikuvopcotuxwjhmncy", strict=True))
_LOOK_ALIKES = _CYRILLIC | _GREEK | {"ɑ": "a", "ǀ": "l"}
_LATIN = re.compile("LATIN .*LETTER (?:SMALL CAPITAL |SCRIPT |DOTLESS )?([A-Z])(?: WITH .*)?")
# In some font, I, l and 1 look alike, and so do O and 0. The patterns ignore case.
_ALIKE = dict.fromkeys("il1", "[il1]") | dict.fromkeys("o0", "[o0]")


@functools.lru_cache(4096)
def _fold(char):
    """Return the ASCII letter, digit or bracket that looks like this character, else the character."""
    category = unicodedata.category(char)
    if category in ("Cf", "Mn", "Me") or char in "\u115f\u1160\u2800\u3164\uffa0":
        return _INVISIBLE
    plain = [part for part in unicodedata.normalize("NFKD", char) if not unicodedata.combining(part)]
    if len(plain) == 1:
        char = _LOOK_ALIKES.get(plain[0]) or _LOOK_ALIKES.get(plain[0].lower(), plain[0])
    if char.isascii():
        return char
    name = unicodedata.name(char, "")
    latin = _LATIN.fullmatch(name)
    if latin:
        return latin[1]
    position = {"Ps": 0, "Pi": 0, "Pe": 1, "Pf": 1}.get(category)
    if position is None:
        return char
    for kind, brackets in (("PARENTHESIS", "()"), ("ANGLE", "<>"), ("BRACKET", "[]")):
        if kind in name:
            return brackets[position]
    return char


def _folded(text):
    """Return the text with each character folded, so that all characters keep their places."""
    if text.isascii():
        return text
    return "".join(map(_fold, text))


def _replace_brackets(text, pattern, brackets):
    """Replace the brackets around each match. The pattern is compared with the folded text."""
    characters = list(text)
    for found in pattern.finditer(_folded(text)):
        characters[found.start()], characters[found.end() - 1] = brackets
    return "".join(characters)


# Control tokens of common chat templates, which a judge's tokenizer reads even inside a user's message.
# Between bars, names of one or two letters are mathematics, as in |x|<|AB|>|z|. Unlike copies of the frame,
# tokens have one spelling, so other cases are code, as in prices[tool_id].
_WORD, _REST = r"[^\W\d_]{2}", r"[\w▁/-]"
_CONTROL = (
    rf"(?-i:<\|/?{_WORD}{_REST}+(?:\|{_REST}*)?>|<{_WORD}{_REST}+\|>"  # <|im_end|>, <|DSML|invoke>, <turn|>
    rf"|\[\|{_WORD}{_REST}+\|\]|</?{_WORD}[^\W\d_]*[_:][\w:]*>"  # [|endofturn|], <start_of_turn>
    r"|</?(?:s|bos|eos|pad|unk|think|thought|system|user|assistant)>|<</?SYS>>"
    r"|\[/?(?:INST|THINK|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z\d_]+)\])"
)


def _near_copies(parts):
    """Return a pattern for a marker's letters and numbers, and for near copies of them."""
    number, alike = r"\d++", {}
    if len(parts) > 2:  # Copies of shorter markers would be mathematics: (1), (t0), [A1].
        number, alike = rf"[\dilo](?:{_BETWEEN}[\dilo])*", _ALIKE
    return _BETWEEN.join(alike.get(part.lower(), part) if len(part) == 1 else number for part in parts)


@functools.lru_cache(64)
def _frame_pattern(frame):
    """Return a pattern for the headings and tags in `frame`, and for near copies of them."""
    patterns = [_CONTROL]
    for marker in dict.fromkeys(re.findall(r"\[[^\[\]]+\]|<[^<>]+>", frame)):
        parts = re.findall(r"\{index[^}]*\}|[^\W_]", _folded(marker))
        first, last = re.escape(marker[0]), re.escape(marker[-1])
        if any(len(part) == 1 for part in parts):
            patterns.append(rf"[\[<]{_BETWEEN}{_near_copies(parts)}{_BETWEEN}[\]>]")
        elif parts:  # "2 < 4 > 3" is not a copy of <4>, except at the start of a line.
            patterns += [
                rf"{first}{_INVISIBLE}*\d+{_INVISIBLE}*{last}",
                rf"(?m:^){first}[\s{_INVISIBLE}]*\d+[\s{_INVISIBLE}]*{last}",
            ]
        else:
            patterns.append(re.escape(marker))
    return re.compile("|".join(patterns), re.IGNORECASE)


@functools.lru_cache(64)
def _author_pattern(authors):
    names = "|".join(_near_copies(re.findall(r"[^\W_]", _folded(author))) for author in authors)
    # A mark does not follow a word: f(user) is a call.
    return re.compile(rf"(?<![^\W_])[(\[<]{_BETWEEN}(?:{names}){_BETWEEN}[)\]>]", re.IGNORECASE)


# --- 5. Training the judge (paper eq. 7; the recipe's reward_fn_genrm.py) -----------------------------------
def whole_number(value) -> int:
    """Return the integer, also from a float, because pandas stores integers with gaps as floats."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def compute_score_fapo_genrm(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address=None,
    reward_model_tokenizer=None,
    turns=(),
    *,
    on_no_verdict: Literal["none", "rule"] = "none",
) -> dict:
    """Score one critique: R = R_outcome + R_process.

    R_outcome is +1 if the critique correctly says whether the solution is flawed (acc), else -1. R_outcome is
    also -1 if the critique does not end in an index (see parse_critique). R_process is
    -|pred - true| / total_steps if both the critique and the label say that the solution is flawed, else 0.

    Returns:
        A dict with score, acc, exact (whether the index is right) and gt (the label). If on_no_verdict is
        "none", the dict also has pred and three values whose means are rates: recall and location (over
        flawed solutions) and sound_kept (over sound ones). They may be None, which verl cannot average.
    Raises:
        ValueError: ground_truth or extra_info["total_steps"] is missing or out of range.
    """
    truth, total_steps = _read_label(ground_truth, extra_info)
    pred = parse_critique(policy_text(solution_str, turns), total_steps)
    flawed, exact = truth != -1, pred == truth
    acc = pred is not None and (pred != -1) == flawed
    score = -1.0
    if acc:
        score = 1.0 - abs(pred - truth) / total_steps
    result = {"score": score, "acc": acc, "exact": exact, "gt": truth}
    if on_no_verdict == "rule":
        return result
    result |= {"pred": pred, "recall": None, "location": None, "sound_kept": acc}
    if flawed:
        result |= {"recall": acc, "location": exact, "sound_kept": None}
    return result


def _read_label(ground_truth, extra_info):
    """Return the index of the first wrong paragraph and the number of paragraphs of a judge row."""
    try:
        truth, total_steps = whole_number(ground_truth), whole_number(extra_info["total_steps"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"ground_truth and extra_info['total_steps'] must be integers: {error!r}") from error
    if total_steps < 1:
        raise ValueError(f"extra_info['total_steps']: {total_steps} must be at least 1")
    if not -1 <= truth < total_steps:
        raise ValueError(
            f"ground_truth: {truth} must be between -1 and total_steps - 1, which is {total_steps - 1}"
        )
    return truth, total_steps


def check_label(row: dict, settings: dict) -> None:
    """Raise ValueError if the label of a judge row is missing or out of range."""
    _read_label(row["reward_model"]["ground_truth"], row.get("extra_info"))


compute_score_fapo_genrm.check_row = check_label


# --- 6. Asking a reward model -------------------------------------------------------------------------------
async def compute_score_discriminative(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    *,
    prompt,
    reward_router_address,
    reward_model_tokenizer,
    turns=(),
) -> dict:
    """Score a conversation by the logit that vLLM's /classify returns for a discriminative reward model.

    Args:
        prompt: the messages of the prompt. The reward model's chat template renders them, including BOS.
    Returns:
        A dict with score, and with acc and pred from the outcome reward (None if ground_truth is "").
    Raises:
        aiohttp.ClientError: The server failed.
        ReplyError: The server's response is not JSON, or reports an error.
        ValueError: As in compute_score, or the model has more than one label.
    """
    policy_text(solution_str, turns)  # This raises ValueError if the response is not a text.
    messages = [*prompt, {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(messages, tokenize=False)
    body = {"input": text, "add_special_tokens": False, "use_activation": False}
    reply = await _json_request("POST", f"http://{reward_router_address}/classify", json=body)
    (score,) = reply["data"][0]["probs"]
    result = {"acc": None, "pred": None}
    if ground_truth != "":
        result = compute_score(data_source, solution_str, ground_truth, turns=turns)
    return result | {"score": score}


KILLS_SERVERS = 422  # router.py returns this status for a request that crashed servers.


async def chat(
    prompt: str | list[dict],
    address: str,
    *,
    model=None,
    temperature=None,
    top_p=None,
    max_tokens=GENRM_MAX_TOKENS,
    timeout_s=GENRM_TIMEOUT_S,
    chat_kwargs=None,
) -> tuple[str, str, int | None]:
    """Send a prompt to `http://address/v1/chat/completions`. Settings that are None are not sent.

    The prompt is the text of one user message, or a list of messages with the keys "role" and "content".
    After a broken connection, status 408, 425, 429 or 5xx (even in the body of a reply with HTTP status 200),
    or a reply that is not JSON or has no choices, the request is retried with growing random pauses until
    `timeout_s` has passed. Without `model`, the model is the only one that the server lists. A failing server
    never makes `chat` raise an exception, but a setting that JSON cannot express does. At temperature 0,
    identical requests wait for the first one, even if it hangs, and share its answer. They share a failure
    only if the request crashed servers.

    Returns:
        (status, text, completion tokens). The status is "ok", "truncated" (cut off at the limit, by a content
        filter or an error, or because vLLM was put to sleep), "http_error" or "timeout". For the last two
        statuses, the text describes the error. The number of tokens is None if the answer was shared.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    body = {
        "messages": prompt,
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "chat_template_kwargs": chat_kwargs,
    }
    body = {key: value for key, value in body.items() if value is not None}
    body = json.loads(_as_utf8(json.dumps(body, ensure_ascii=False, default=_plain)))
    shared = _SharedAnswer()
    if temperature == 0:
        shared = _shared_answer(asyncio.get_running_loop(), f"{address} {body}")
    failure = "none"
    pause = 0.5
    try:
        async with asyncio.timeout(timeout_s), shared:
            while not shared.answer:
                try:
                    reply = await _complete_chat(address, body)
                    status, text, tokens, is_aborted = _read_reply(reply)
                    if not is_aborted:
                        shared.answer = status, text
                    return status, text, tokens
                except Exception as error:  # This includes bad addresses and unreadable replies.
                    failure = f"{type(error).__name__}: {error}"
                    # Identical requests share this failure, because they would crash more servers.
                    if getattr(error, "status", 0) == KILLS_SERVERS:
                        shared.answer = "http_error", failure
                    if not _is_retryable(error):
                        return "http_error", failure, 0
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause = min(8.0, 2 * pause)
            return *shared.answer, None
    except TimeoutError:
        return "timeout", f"no response from {address} within {timeout_s:g} s (last error: {failure})", 0


SHARED_ANSWERS = 1024  # Identical requests come from one group, so a few recent answers suffice.


class _SharedAnswer(asyncio.Lock):
    """The answer to identical requests. The first caller sends its request; the others wait for the lock."""

    answer = None


@functools.lru_cache(SHARED_ANSWERS)
def _shared_answer(loop, request):
    return _SharedAnswer()


def _plain(value):
    """Return what JSON needs for NumPy's values and for OmegaConf's mappings and lists, as from verl."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, MutableSequence):
        return list(value)
    raise TypeError(f"{value!r:.60} cannot be sent to the judge as JSON")


def _as_utf8(text):
    """Replace halves of surrogate pairs, as of a truncated emoji. Servers and Parquet files reject them."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_retryable(error):
    """Return whether another attempt may succeed after this error."""
    status = getattr(error, "status", None)
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    return isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError))


async def _complete_chat(address, body):
    """Send one request with a model name and max_tokens that the server accepts, and return the reply."""
    url = f"http://{address}/v1/chat/completions"
    model = body.get("model")
    if model is None:
        served = await served_model(address)
    else:  # A look-up follows only if max_tokens turns out to be too high.
        served = _served.get((address, model)) or {"id": model}
    body = body | {"model": served["id"]}
    # Without max_tokens, the answer may fill the rest of the context.
    if body.get("max_tokens", 0) >= (served.get("max_model_len") or math.inf):
        del body["max_tokens"]
    try:
        return await _json_request("POST", url, json=body)
    except (aiohttp.ClientResponseError, ReplyError) as error:
        if error.status == 404:
            await _check_name(address, body["model"])
        if error.status != 400 or "max_tokens" not in body:
            raise
        with contextlib.suppress(Exception):  # The first error is the one to report.
            served = await served_model(address, model)
        limit = body.pop("max_tokens")  # The prompt may leave fewer tokens.
        if not served.get("max_model_len"):
            if "max_completion_tokens" not in str(error):
                raise
            body["max_completion_tokens"] = limit  # the name for OpenAI's reasoning models
    return await _json_request("POST", url, json=body)


async def _check_name(address, model):
    """Raise ValueError if the server at this address lists other models. They are other judges."""
    names = [model]
    with contextlib.suppress(Exception):  # Some servers have no list.
        names = [card["id"] for card in await listed_models(address)]
    if model not in names:
        raise ValueError(
            f"the requests are for the model {model!r}, but http://{address} serves "
            f"{', '.join(names)}; choose one with genrm_model, or serve {model!r} again"
        )


# Finish reasons of incomplete answers, of vLLM and several APIs, in lower case. Any other reason means a
# complete answer.
CUT_OFF = (
    *("length", "max_tokens", "model_length", "model_context_window_exceeded", "repetition"),
    *("content_filter", "content_filtered", "guardrail_intervened", "refusal"),
    *("safety", "recitation", "blocklist", "prohibited_content"),
)
ABORTED = ("abort", "error", "insufficient_system_resource")  # Another attempt may be complete.


def _read_reply(reply):
    """Return (status, text, completion tokens, whether the server aborted) of a chat completion.

    Raises:
        ReplyError: The reply has no choices yet, or its first choice reports an error.
        ValueError: The reply has no readable text.
    """
    if not isinstance(reply, dict):
        raise ReplyError(f"the reply has no choices: {reply!s:.200}")
    usage = reply.get("usage") or {}
    choices = reply.get("choices")
    if choices == [] and usage.get("completion_tokens"):  # The thought used up all tokens.
        choices = [{"message": None, "finish_reason": "length"}]
    if not choices:  # as while a server warms up
        raise ReplyError(f"the reply has no choices: {reply!s:.200}")
    status = "ok"
    try:
        choice = choices[0]
        _raise_if_failed(choice)
        end = str(choice.get("finish_reason")).lower()
        message = choice["message"]
        is_aborted = end in ABORTED
        if is_aborted or end in CUT_OFF:  # Some servers then leave out the content or the message.
            status = "truncated"
            message = {"content": None} | (message or {})
        text = message["content"] or ""  # null if a reasoning parser found no final answer
        if isinstance(text, list):  # Some servers send the content in parts.
            text = [part.get("text") or "" for part in text]
        text = _as_utf8("".join(text))  # This raises TypeError if the content is not text.
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply is not a chat completion: {reply!s:.200}") from error
    return status, text, usage.get("completion_tokens") or 0, is_aborted


# (address, model or None) -> the model's entry in /v1/models; kept as long as this process. The reward loop
# has looked the models up, so that all its workers ask the same ones, even after a restart.
_served = {}
for _address, _card in json.loads(os.environ.get("GENRM_MODELS", "{}")).items():
    _served[_address, None] = _served[_address, _card["id"]] = _card


async def listed_models(address: str) -> list[dict]:
    """Return the models that GET /v1/models lists now."""
    limit = aiohttp.ClientTimeout(total=60)
    models = await _json_request("GET", f"http://{address}/v1/models", timeout=limit)
    if not isinstance(models, dict) or not models.get("data"):  # as while a server starts
        raise ReplyError(f"http://{address}/v1/models lists no models: {models!s:.200}")
    return models["data"]


async def served_model(address: str, model: str | None = None) -> dict:
    """Return what GET /v1/models says about a model: its id, max_model_len and more.

    Without `model`, the server must serve only one, which may have several names. A process asks only once,
    so that all its requests go to the same model even if the server then lists another one. A worker of the
    reward loop does not ask, because the loop has asked when the run began.

    Raises:
        ValueError: `model` is not given and the server serves several, or it has no list of models.
        LookupError: The server does not serve `model`.
    """
    async with _shared_answer(asyncio.get_running_loop(), f"{address} {model}"):  # One caller asks.
        if (address, model) not in _served:
            try:
                found = await listed_models(address)
            except aiohttp.ClientResponseError as error:
                if error.status != 404:
                    raise
                raise ValueError(
                    f"http://{address} does not list its models (/v1/models); name a model with genrm_model "
                    f"(`model` in a call of chat); the server says: {error.message}"
                ) from error
            names = ", ".join(card["id"] for card in found)
            if model is not None:
                found = [card for card in found if card["id"] == model]
            if len({card.get("root") or card["id"] for card in found}) > 1:
                raise ValueError(
                    f"http://{address} serves several models ({names}); choose one with "
                    "genrm_model (`model` in a call of chat)"
                )
            _served[address, model] = found[0]
        return _served[address, model]


class ReplyError(Exception):
    """A reply with HTTP status 200 whose body reports a failure with the status `status`.

    Without a status, assume 502: the server behind a gateway failed.
    """

    def __init__(self, message, status=502):
        super().__init__(f"HTTP status 200, but the body reports status {status}: {message}")
        self.status = status


def _raise_if_failed(reply):
    """Raise ReplyError if `reply` (a reply or one of its choices) has an `error`, as some gateways send."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if not error:
        return
    message = f"{error!s:.200}"
    if isinstance(error, dict) and re.fullmatch(r"[45]\d\d", str(error.get("code"))):
        raise ReplyError(message, int(error["code"]))
    raise ReplyError(message)


async def _json_request(method, url, **kwargs):
    session = await _session()
    try:
        async with session.request(method, url, **kwargs) as response:
            if not response.ok:
                text = await response.text(errors="replace")
                response.reason = text[:200]  # raise_for_status puts the reason into the error's message.
                response.raise_for_status()
            text = await response.read()
    except aiohttp.ClientResponseError as error:
        # aiohttp reports a malformed response as status 400, as if the server had rejected the request.
        if isinstance(error.__cause__, aiohttp.http.HttpProcessingError):
            raise aiohttp.ClientPayloadError(f"malformed response: {error.message}") from error
        raise
    try:
        reply = json.loads(text)
    except ValueError as error:  # A page, or a reply that breaks off
        raise ReplyError(f"the body is not JSON ({error}): {text[:200]!r}") from error
    _raise_if_failed(reply)
    return reply


_sessions = {}  # event loop -> (aiohttp session, generator that closes it)


async def _open_session():
    """Yield a session. asyncio.run closes it, because it ends all generators of its event loop."""
    headers = {}
    # A judge on another machine may require a key. The key comes from the environment to keep it out of
    # configs and logs. Of several keys, the last is the newest. A key file may end in a newline.
    key = os.environ.get("ROUTER_API_KEY", "").strip(", \n").rpartition(",")[2].strip()
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=1024),  # The default of 100 is too low for judges.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # `chat` sets the total limit.
        headers=headers,
        max_field_size=1 << 16,  # bytes; gateways may send long cookies or policies
    ) as session:
        yield session


async def _session():
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        generator = _open_session()
        _sessions[loop] = await anext(generator), generator
        for other in list(_sessions):
            if other.is_closed():  # A function that calls asyncio.run for each sample leaves closed loops.
                await close_session(other)
    return _sessions[loop][0]


async def close_session(loop=None) -> None:
    """Close this event loop's session now, and not when the loop ends."""
    loop = loop or asyncio.get_running_loop()
    if loop in _sessions:
        _, generator = _sessions.pop(loop)
        await generator.aclose()


# --- 7. Ground truths and settings, which are checked before a run ------------------------------------------
def written_out(value) -> str:
    """Return `value` as text, with all digits of a number: 0.00005, not 5e-05."""
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def single_answer(ground_truth, data_source="") -> str:
    """Return a ground truth as text. A list of one text, even as JSON or as Python prints it, is this text.

    Raises:
        ValueError: The ground truth is empty, or it is several answers or an object, such as test cases.
    """
    found = ground_truth
    if hasattr(found, "tolist"):  # NumPy's arrays and numbers
        found = found.tolist()
        if isinstance(found, float) and not found.is_integer():
            found = float(str(ground_truth))  # for 32 bits 0.1, and not 0.10000000149011612
    if isinstance(found, (list, tuple)) and len(found) == 1 and isinstance(found[0], str):
        found = found[0]
    answer = None
    if isinstance(found, (str, int, float)) and found == found:  # NaN does not equal itself.
        answer = _answer_in(written_out(found).strip())
    if not answer:
        raise ValueError(
            f"ground_truth: {ground_truth!r:.80} (data source {data_source}) is not a single "
            "answer; pass a reward function that supports this data source"
        )
    return answer


# literal_eval reads ground truths such as ['\sqrt{2}'], and would warn about LaTeX's backslashes.
warnings.filterwarnings("ignore", ".*invalid escape sequence", module="<unknown>")


@functools.lru_cache(4096)
def _answer_in(text):
    """Return the text, the only text in a list like '["4"]', or None for other lists of texts and objects."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError):
            return text  # no list, but an answer such as [a, b)
    if not isinstance(value, (list, dict)) or _is_numeric(value):
        return text  # an interval, a matrix or a set
    several = re.search(r"""['"]\s+['"]""", text)  # NumPy prints ['4' '5'], which Python would join.
    if isinstance(value, dict) or several or len(value) != 1 or not isinstance(value[0], str):
        return None
    if re.search(r"[\x00-\x1f]", value[0]):  # In ["\frac12"], one backslash is missing.
        return None
    return _answer_in(value[0].strip())


def _is_numeric(value):
    """Return whether a nonempty list or set contains only numbers, and lists and sets of numbers."""
    if isinstance(value, (list, tuple, set)):
        return len(value) > 0 and all(map(_is_numeric, value))
    return type(value) in (int, float, complex)


def question_of(extra_info: dict | None) -> str:
    """Return the text of the problem, which a judge needs. Raises ValueError if it is missing or empty."""
    question = (extra_info or {}).get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"extra_info['question'] is {question!r:.60}; the judge needs the problem's text")
    return question


VERIFIERS = ("rule", "math_verify")
WITHOUT_VERDICT = ("none", "rule")  # values of on_no_verdict


def one_of(name: str, value, known) -> None:
    if value not in tuple(known):
        choices = ", ".join(map(str, known))
        raise ValueError(f"{name}: {value!r} is unknown; use one of {choices} (in --reward-kwargs)")


NULL = type(None)


def one_kind(settings: dict, name: str, kind: str, *types, least=-math.inf) -> None:
    """Raise ValueError if a setting has none of these JSON types, or is a number below `least`."""
    value = settings.get(name)
    is_low = type(value) in (int, float) and value < least
    if name in settings and (type(value) not in types or is_low):
        raise ValueError(f"{name}: {value!r:.80} is not {kind} (in --reward-kwargs)")


# A reward function's `check_row` is called for each row before a run starts. `settings` are the arguments of
# the reward function that are the same for all rows.
def check_answer(row: dict, settings: dict) -> None:
    """Raise ValueError if the ground truth of a row is not a single answer, or the verifier is unknown."""
    one_of("verifier", settings.get("verifier", "rule"), VERIFIERS)
    single_answer(row["reward_model"]["ground_truth"], row["data_source"])


def check_judged(row: dict, settings: dict) -> None:
    """Raise ValueError if the ground truth or a setting is invalid, or a judge or the problem is missing."""
    check_answer(row, settings)
    one_of("on_no_verdict", settings.get("on_no_verdict", "none"), WITHOUT_VERDICT)
    one_of("prompt_style", settings.get("prompt_style", "tagged"), PROMPT_STYLES)
    for name in ("judge_test", "judge_wrong", "keep_critique"):
        one_of(name, settings.get(name, False), (True, False))
    one_kind(settings, "penalty", "a number", int, float, NULL)
    one_kind(settings, "genrm_temperature", "a number of at least 0", int, float, NULL, least=0)
    one_kind(settings, "genrm_max_tokens", "a whole number above 0", int, NULL, least=1)
    one_kind(settings, "genrm_timeout_s", "a number above 0", int, float, least=1e-9)
    one_kind(settings, "genrm_chat_kwargs", "an object", dict, NULL)
    one_kind(settings, "genrm_model", "the name of a model", str, NULL)
    extra_info = row.get("extra_info") or {}
    is_test = extra_info.get("split") == "test"
    if settings.get("reward_router_address") or settings.get("reward_router_addresses"):
        if settings.get("judge_test") or not is_test:
            question_of(extra_info)
    elif settings.get("penalty", 1.0) is not None and not is_test:
        raise ValueError(NO_JUDGE)


def check_measured(row: dict, settings: dict) -> None:
    """Raise ValueError as check_judged does, except that there may be no judge."""
    check_judged(row, settings | {"penalty": None})


compute_score.check_row = compute_score_gsm8k.check_row = check_answer
compute_score_fapo.check_row, compute_score_baseline.check_row = check_judged, check_measured


# --- 8. When two answers are equal --------------------------------------------------------------------------
def is_equal(answer: str, truth: str) -> bool:
    """Return whether two answers have the same normal form. 5 cm equals 5, and x=5 equals 5 but not y=5."""
    parts, true_parts = _parts(answer), _parts(truth)
    if all("\t" in name for name, _, _ in parts) and sorted(parts) == sorted(true_parts):
        return bool(parts)  # Names in words tell the values apart in any order.
    return _agree(parts, true_parts) and _values(parts) == _values(true_parts) != ""


def normalize_final_answer(answer: str) -> str:
    """Return the normal form of `answer` (the content of a box, or a ground truth) without "x =" and unit."""
    return ",".join(value for _, value, _ in _parts(answer))


def _values(parts):
    """Join the values of an answer. Parentheses mark an order that matters because the names differ."""
    values = ", ".join(value for _, value, _ in parts)
    if len({name for name, _, _ in parts if name and "\t" not in name}) > 1:
        return f"({values})"
    return values


def _agree(parts, true_parts):
    """Return whether names and units agree. A missing name or unit agrees with anything.

    Names in words may be paraphrases, so they disagree only if a name has another place on the other side.
    """
    own, true = [{name for name, _, _ in side} for side in (parts, true_parts)]
    shared = own & true
    for (name, _, unit), (true_name, _, true_unit) in zip(parts, true_parts):
        names = {name, true_name} - {""}
        are_in_words = "\t" in name + true_name
        if len(names) > 1 and (not are_in_words or names & shared):
            return False
        if unit and true_unit and unit != true_unit:
            return False
    return True


def _first_of_line(table):
    return {token: line.split()[0] for line in re.split("[\n;]", table) for token in line.split()}


# The normalisation follows Minerva (Lewkowycz et al. 2022, appendix D.1) as used in DAPO; docs/answers.md
# lists extensions and stricter rules. An answer is split into LaTeX tokens. The tokens on each line of the
# first table, and between semicolons of the second one, are synonyms. The first one replaces the others.
_SAME = _first_of_line(r"""
- − – ‑ \textminus
^ \textsuperscript
\pi π
\infty ∞
\sqrt √
\cdot \times · × *
\ldots \dots \cdots ...
\le ≤ ⩽ <= \leq \leqslant
\ge ≥ ⩾ >= \geq \geqslant
\ne ≠ \neq
< \lt
> \gt
\{ \lbrace
\} \rbrace
| \vert \lvert \rvert
\emptyset \varnothing ∅
\cup ∪
\frac \dfrac \tfrac \cfrac
\binom \dbinom \tbinom
\begin{pmatrix} \begin{bmatrix}
\end{pmatrix} \end{bmatrix}
percent % \% \textpercent
\$ \textdollar
degrees degree ° \degree \textdegree ^\circ ^{\circ}
meters \text{m} \textrm{m} \mathrm{m}
, and
""")
_UNITS = _first_of_line("""
units unit; dollars dollar; cents cent; percent; degrees; points; digits; ways; integers; multiples; th
meters meter; cm centimeter centimeters; mm millimeter millimeters; km kilometer kilometers
inches inch in; feet foot ft; yards yard; miles mile
kg kilogram kilograms; grams gram g; pounds pound lb lbs; ounces ounce oz; liters liter; gallons gallon
seconds second; minutes minute min; hours hour hr hrs; days day; weeks week; months month; years year
degreesC; degreesF; radians radian; times; meals; edges; students; children; people; tickets
""")
_UNICODE = str.maketrans({"²": "^2", "³": "^3", "½": "\\frac12"})
_TOKEN = re.compile(
    r"""
    \\(?:text|textrm|mathrm)\s*\{[\s~]*m\s*\} | \^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})
    | (?P<space> \s+ | [~$"] | \*\* | \\[\s,;:!()\[\]] | (?<=\\\\)\[[\w.]*\]
        | \ban\s+(?=\d) | (?<![-+*/])(?<![-+*/]\s)\ban?\s+
            (?!(?:(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|sqrt|log|exp|(?:max|min)(?=\s*\()|abs|gcd|lcm|det
                |and|mod|plus|times|over)(?![a-zA-Z]))
            (?=[a-zA-Z]{3}|\d[\d.]*\s*(?:\\?%|[a-zA-Z]{2}))
        | \\(?:[hv]space\*?|tag|label|phantom)\s*\{[^{}]*\}
        | \\(?:q?quad|displaystyle|left|right|[bB]igg?[lr]?|boxed|mbox|rm|bf|math(?:rm|bf|it|sf|strut)
            |underline|fbox|bm|pmb|ensuremath|nonumber|checkmark
            |tiny|small|(?:script|footnote|normal)size|[lL]arge|LARGE|[hH]uge
            |text(?:bf|it|md|normal|rm|sc|sf|sl|style|tt|up)?
            |boldsymbol|overline(?=\s*\{\s*[A-Z]{2,}\s*\}))(?![a-zA-Z]) )
    | (?P<thousands> (?<![\d.,])[1-9]\d{0,2}
        (?:(?:,|\s*\{\s*,\s*\}\s*|\\,)(?:\\!\s*)?\d{3})+ (?!\d)(?:\.\d+)? )
    | \d+(?:\.\d+)? | \.\d+ | [^\W\d_]+ | [<>]= | \.\.\.
    | \\\\ | \\begin\s*\{\s*array\s*\}\s*\{[^{}]*\} | \\(?:begin|end)\s*\{\s*\w+\*?\s*\} | \\sqrt\s*\[[^\]]*\]
    | \\[a-zA-Z]+ | \\. | .
""",
    re.VERBOSE | re.DOTALL,
)
_ARGUMENTS = {"^": 1, "_": 1, "\\sqrt": 1, "\\overline": 1, "\\frac": 2, "\\binom": 2}

_POWER = r"(?<=[\w)}\]|!'])( ?)\*\*\1"
_MARKS = [  # applied in order, before an answer is split into tokens
    # The cross product: elsewhere, \times and \cdot are synonyms.
    (r"(\\nabla|\\(?:vec|overrightarrow)\s*(?:\{[^{}]*\}|\w))\s*(?:\\times(?![a-zA-Z])|×)", r"\1\\cross "),
    (r"√\s*(?:(\d[\d.]*)|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r'(?<![\w)}\]])"([^"]*)"', r"\1"),  # a quotation
    (r'(?<=[a-zA-Z)])"', "''"),  # the second derivative y"
    (r"^\s*\*\*((?:(?!\*\*).)+\*\*(?:(?!\*\*).)+)\*\*\s*$", r"\1"),  # a power in bold text
    (r"(?<![\w)}\]])\*\*(?=\S)(.*?)(?<=\S)\*\*(?!\d)", r"\1"),  # Markdown's bold text
    (rf"{_POWER}(-?\d+(?:\.\d+)?|-?\w)", r"^{\2}"),  # Python's x**2, which may be inside of e**(-x**2)
    (rf"{_POWER}\(((?:[^()*]|\*(?!\*))*)\)", r"^{\2}"),
    (rf"{_POWER}(?=[({{\\])", "^"),
]


def _tokens(answer):
    """Split `answer` into tokens, replace synonyms, and drop white space and font commands."""
    found = []
    answer = answer.translate(_UNICODE)
    for pattern, replacement in _MARKS:
        answer = re.sub(pattern, replacement, answer)
    for match in _TOKEN.finditer(answer):
        token = re.sub(r"[\s~]", "", match[0])
        if match["thousands"] and re.search(r"[{\\]", token):  # A plain "1,234" may be a list.
            token = re.sub(r"[^\d.]+", "", token)
        if not match["space"]:
            found.append(_SAME.get(token, token))
    return found


@functools.lru_cache(4096)  # All samples of a group share a ground truth.
def _parts(answer):
    """Split an answer at its top-level commas and return (name, normalised value, unit) for each member.

    In the normal form, braces surround the arguments of commands and nothing else, and white space remains
    only between words or numbers.
    """
    todo, found, wanted, groups, depth = _tokens(answer)[::-1], [], 0, [], 0
    while todo:
        token = todo.pop()
        if token == "{":
            groups.append(wanted)
            if not wanted:
                token = ""
            wanted = 0
        elif token == "}":
            wanted = 0
            if groups:
                wanted = groups.pop()
            if wanted:
                wanted -= 1
            else:
                token = ""
        elif wanted:  # In LaTeX an argument without braces is one character or one command.
            size = len(token) if token[0] == "\\" else 1
            if size < len(token):
                todo.append(token[size:])
            todo += ["}", token[:size], "{"]
            continue
        else:
            wanted = _ARGUMENTS.get(token.partition("[")[0], 0)
        depth += (token in ("(", "[", "\\{")) - (token in (")", "]", "\\}"))
        if depth == 0:
            if token not in (",", ";"):
                token = token.replace(",", "")  # the thousands of 10,000
            elif not any(groups):
                token = "\n"
        if token:
            found.append(token)
    text = " ".join(found)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return [_name_value_unit(member.replace("~", " ")) for member in text.split("\n") if member]


# These substitutions span several tokens and are applied in order. Each line has a regular expression, an
# arrow and a replacement. The text has one line per member of the answer, and ~ marks white space to keep.
# For examples, see tests/data/answer_pairs.jsonl.
_SPELLINGS = r"""
# x=1 or x=2, where a space surrounds each token
(?:^\x20?|(?<=\x20or\x20))([^=\n]+)=([^=\n]+?)\n?\x20or\x20(?=\1=) → \1=\2\n
# Spaces
(\\[a-zA-Z]+)\x20(?=[a-zA-Z])               → \1~
(?<=\d)\x20(?=\d)|(?<=[^\W\d_]{2})\x20(?=[^\W\d_]{2}) → ~
\x20                                        →
# Any matrix
[(\[]\\begin\{(?:array\}\{[^{}]*|matrix)\}(.*?)\\end\{\w+\}[)\]] → \\begin{pmatrix}\1\\end{pmatrix}
# 1/2, \pi/2, and 1 1/2; a minus in a numerator moves before the fraction, except in 2\frac{-1}{2}
START((?:[\w.^]|\\(?:pi|sqrt|frac)(?![a-z])~?|GROUP)+)/(\d+|\\pi)END → \\frac{\1}{\2}
(?<=\d)~(?=\\frac)                          →
(^|[(\[{,\n=&\\]|matrix\})\\frac\{-((?:[^{}+-]|\{[^{}+-]*\})+)\} → \1-\\frac{\2}
# x^{2}, +5, 12^{th}, =5, .5, 34.0, 025, a full stop; at the end (A)
([\^_])\{(\w)\}(?!\w)                       → \1\2
(^|[(\[,=])\+                               → \1
(?<=\d)\^\{th\}$                            → th
^=(?![<>])                                  →
(?<![\d.])\.(?=\d|\\overline)               → 0.
(\.\d*?)0+(?!\d|\\overline|\\dot|\\ldots)   → \1
\.(?!\d|\\overline|\\dot)                   →
(^|=)(-?)0+(?=\d+(?![\d.]))                 → \1\2
# Rates: dollars per day, mph, m/s
(?:~|(?<=[\d$]))per~                        → /
(?<![a-zA-Z\\])mph\b                        → miles/h
(?<=[\d})i])m(?=/s\b)                       → meters
# A row separator at the end, \$5, 5\$, 5 square cm, 16 years old, "the answer is 7"
# In a list such as "Ann is 5, Bob is 3", the words are names, so they stay before a tab.
\\\\(?=\\end|$)                             →
\\\$(-?\d[\d.]*)(?:\\\$)?                   → \1dollars
(?<=\d)\\\$(?=$|/)                          → dollars
sq(?:uare)?~([a-z]+)$                       → \1^2
cubic~([a-z]+)$                             → \1^3
~old$                                       →
^(?!.*NEGATION)(?:[Tt]he~)?([a-zA-Z~]*)\b(?:is|are)(?=[\d\\(-])(?!\\[lgn]e\b)~* → \1\t
(^|\t)(?:Option)?\(?([A-J])\)?:?$           → \1\2
"""
_NEGATION = r"\b(?:not|no\b|never|neither|nor\b|none|cannot|isn|without|wrong|false)"
for _short, _long in {
    "START": r"(?:^|(?<=[(\[{,\n=&+<>~-])|(?<=\\\\)|(?<=matrix\}))",
    "END": r"(?=$|[)\]},\n=&+<>-]|\\\\|\\(?:end|cup|[lg]e)\b|[a-z]{2})",
    "GROUP": r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}",
    "NEGATION": _NEGATION,
}.items():
    _SPELLINGS = _SPELLINGS.replace(_short, _long)
_SPELLINGS = re.findall(r"^(\S+) +→ ?(\S*)$", _SPELLINGS, re.MULTILINE)

# These patterns match names of values: x, a_{10}, f'(-2), \angle ABC, (x,y), |AB|, dy/dx and AIME's m+n.
_TRIG = "sin|cos|tan|cot|sec|csc"
_GREEK_NAME = (
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|"
    "upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)"
)
_LETTER = rf"angle|triangle|ell|vec|overrightarrow|bar|hat|det|gcd|{_TRIG}|{_GREEK_NAME}"
_LETTER = rf"(?:(?:[a-zA-Z]|\\(?:{_LETTER})(?![a-zA-Z])) ?)"
_NAME = rf"{_LETTER}+(?:_(?:\w|\{{\w+\}}))?'*(?:\^\{{-1\}})?(?:\((?:[^()=<>+^-]|(?<=[(,])-)*\))?"
_NAME = (
    rf"(?:{_NAME}|\((?:{_NAME},)+{_NAME}\)|\|[A-Z]{{2,}}\||\[[A-Z]{{3,}}\]|\\frac\{{d\w?\}}\{{d\w\}}"
    rf"|\\(?:{_TRIG}) ?(?:\d+{_LETTER}|\\frac\{{\d*{_LETTER}\}}\{{\d+\}}))"
)
_CONSTANT = re.compile(r"(?:\\(?:frac|sqrt|pi|cdot|binom|ln|log|pm)(?![a-zA-Z]) ?|[^a-zA-Z\\=<>])+")
_SUM = re.compile(rf"{_NAME}(?:\+{_NAME})+")
_NAME = re.compile(rf"(?!.*{_NEGATION}){_NAME}")
_UNIT = "|".join(_UNITS)
_UNIT_NAMES = "|".join(_UNITS.keys() - {"g", "th", "times"})  # The others may stand in products.
_UNIT = re.compile(rf"(.*?)(?:(?<=[\d}})i]) ?({_UNIT})(/\w+)?(\^[23])?)?")
_WORDS = re.compile(r"No|(?=.{3})(?:\b[a-zA-Z][a-z]*\s?)+")
_CAPITAL = re.compile(r"\b(?:[A-Z](?=[a-z]*[aeiouy])|A(?=ll\b)|O(?=dd\b))")


def _name_value_unit(text):
    """Split one member into name, value and unit. An equation other than "name = value" counts as a value.

    The first letter of a word becomes lower case, so "East" equals "east". Formulas keep their capitals: "A"
    is not "a", and "Mgh" is not "mgh". A name in words, as in "Ann is 5", ends with a tab.
    """
    words, tab, text = text.rpartition("\t")
    words = words.lower() + tab
    *heads, value = re.split(r"=|\\in(?![a-z]) ?", text)
    value, unit, rate, power = _UNIT.fullmatch(value).groups("")
    names = [head for head in heads if _NAME.fullmatch(head)]
    constants = [head for head in heads if _CONSTANT.fullmatch(head)]
    name = "".join(names[:1])
    sums = [head for head in constants if "+" in head]
    if len(sums) == len(heads) - 1 and _SUM.fullmatch(heads[0]) and re.fullmatch(r"[1-9]\d*", value):
        name = heads[0]
    elif len(names) + len(constants) < len(heads) or constants and not _CONSTANT.fullmatch(value):
        return words, text, ""  # an equation
    if _WORDS.fullmatch(value):
        value = _CAPITAL.sub(lambda letter: letter[0].lower(), value)
    rate = re.sub("(?<=^/h)(our|r)$|(?<=^/s)ec.*", "", rate)
    return name or words, value, _UNITS.get(unit, unit) + rate + power


# --- 9. Comparing with math-verify --------------------------------------------------------------------------
# math-verify limits its running time with signal.alarm, which works only in the main thread of a process.
# So child processes compare the answers, and an answer that hangs or kills its child does not affect other
# answers. The children are forked because a spawned child would run the main script again, and with os.fork
# because workers of a multiprocessing.Pool may not start a multiprocessing.Process.
GRADE_TIMEOUT_S = 4  # Seconds of CPU time per answer, whatever the load; ordinary answers take milliseconds.
GRADE_WALL_S = 120  # Time limit in seconds for an answer that waits without using the CPU.
GRADE_MEMORY = 2 << 30  # Bytes; an answer such as 9^{9^{9^9}} must not exhaust the machine's memory.
_graders = {}  # id of a process -> what _grading returns; a forked process cannot use its parent's

# math-verify ignores these parts: it would parse 52_8 as 52, 1.4\ldots as 1.4, f' as f, and an equation as a
# value. It also ignores whether a comma is outside brackets, so -1,2 would equal the interval (-1,2), and the
# case of symbols with names such as \Omega and A_1. It takes the time 2:40 for 1/20, the ratio 1:2:3 for 1/6,
# n!! for (n!)!, and the units of 5 feet 3 inches for factors.
_NOT_READ = re.compile(
    rf"=|^.*:[^,=]*:.*|!!|(?<![\d.])[\d.]++ ?(?:{_UNIT_NAMES}) ?[\d.]+|"
    r".'+|(?:\\[a-zA-Z]+|.)?_(?:\w|\{.*?\})|(?<![^(, ])\\[A-Z][a-z]*(?![^),])|"
    r"^(?=(?:[^(\[,]|[(\[][^(),\]]*[)\]])*(?:,|or))|\d \d|\b\d\d?:[0-5]\d\b|"
    r"\\(?:ldots|mod|pmod|bmod|equiv|approx|sim|pm|mp|to|neg)(?![a-zA-Z])|(?<![a-zA-Z\\{])[a-zA-Z]{3,}"
)


def _grading():
    """Return this process's idle children (pid, pipe), a lock for them, and threads for event loops."""
    new = [], threading.Lock(), ThreadPoolExecutor(4)  # An event loop uses at most 4 children at a time.
    return _graders.setdefault(os.getpid(), new)  # atomic


def _math_verify(answer, truth):
    """Ask math-verify whether two answers are equal. Return None if math-verify does not finish.

    The call blocks, but is thread-safe.
    """
    import math_verify  # noqa: F401  (Child processes share what is imported before the fork.)

    if is_equal(answer, truth):
        return True
    parts, true_parts = _parts(answer), _parts(truth)
    answer, truth = _values(parts), _values(true_parts)
    if answer.isalpha() and truth.isalpha() or _NOT_READ.findall(answer) != _NOT_READ.findall(truth):
        return False
    fewer, more = sorted([len(parts), len(true_parts)])
    if not _agree(parts, true_parts) or 1 < fewer < more:  # lists of different lengths
        return False
    if len({unit for _, _, unit in parts + true_parts if unit}) > 1:
        answer, truth = f"({answer})", f"({truth})"  # The order of 5 feet, 3 inches matters.
    free, lock, _ = _grading()
    with lock:  # If a child inherited the pipe of another child, the other child's death would go unnoticed.
        pid, pipe = free.pop() if free else _start_grader()
    try:
        pipe.send((truth, answer))
        verdict = pipe.recv()
    except BaseException as error:  # The child died, or its answer is still pending after an interrupt.
        pipe.close()
        with contextlib.suppress(OSError):  # The caller may have reaped the child.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if isinstance(error, (EOFError, ConnectionError)):
            return None
        raise
    free.append((pid, pipe))
    return verdict


def _compare(sides):
    """Compare two answers with math-verify."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import nan, oo, zoo
    from sympy.core.function import Application
    from sympy.logic.boolalg import Boolean

    # By default, math-verify drops units at the end, such as the t of 5t.
    normal = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    kinds = [LatexExtractionConfig(normalization_config=normal)]
    parsed = []
    for side in sides:
        # math-verify takes ^T for a transpose, and drops it if it does not follow a matrix.
        side = re.sub(r"(?<!matrix\})\^(T|\{T\})", "^{(T)}", side)
        # By default, math-verify takes a fraction out of a box that it cannot read.
        options = dict(parsing_timeout=None, raise_on_error=True, extraction_mode="first_match")
        parsed.append(parse(f"\\boxed{{{side}}}", kinds, **options))
    if not verify(*parsed, timeout_seconds=None, raise_on_error=True):
        return False
    with contextlib.suppress(TypeError, AttributeError):  # not numbers, or texts that cannot be read
        truth, answer = (side[0] for side in parsed)
        # math-verify takes a function of infinity, such as \max(\infty,5), for any number.
        if truth.has(Application) or answer.has(Application):
            truth, answer = truth.doit(), answer.doit()
            values = [side for side in (truth, answer) if not isinstance(side, Boolean)]
            if len({value.has(oo, -oo, zoo, nan) for value in values}) > 1:
                return False
        # math-verify rounds to six decimals, so all small numbers would be equal.
        return bool(abs(answer - truth) <= 1e-5 * abs(truth))
    return True


@functools.cache
def _warm_up():
    """Compare once before the first fork. The first call takes 0.35 s of CPU time, which children save."""
    logger = logging.getLogger("math_verify")  # It warns about calls without its own time limit.
    level = logger.level
    logger.setLevel(logging.ERROR)
    _compare(["\\frac{1}{2}+x", "0.5"])
    logger.setLevel(level)


def _keep_case():
    """Keep math-verify in this process from reading R as r, which would make R - r equal to 0."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import parser

    config = ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = functools.partial(parser.latex2sympy, conversion_config=config)
    parser.parse_latex_cached.cache_clear()  # The parent filled it.


def _start_grader():
    """Start a child process and return its pid and the pipe to it."""
    _warm_up()
    ours, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _grade(its)  # It ends with an error when the parent has ended or closed the pipe.
        finally:
            os._exit(0)  # without the parent's cleanup and without a traceback
    its.close()
    return pid, ours


def _grade(pipe):
    """Receive (truth, answer) pairs in a child process; send True, False, or None if memory ran out."""
    for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM):  # The parent may have set handlers.
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # After Ctrl-C, the parent decides.
    logging.disable()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    limit = GRADE_MEMORY + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _keep_case()
    while True:
        sides = pipe.recv()
        # These signals end this process even while C code runs.
        signal.setitimer(signal.ITIMER_PROF, GRADE_TIMEOUT_S)
        signal.alarm(GRADE_WALL_S)
        try:
            verdict = _compare(sides)
        except MemoryError:
            verdict = None
        except Exception:  # Answers that math-verify cannot compare count as different.
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        pipe.send(verdict)
