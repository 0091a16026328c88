"""What the command line of every script needs: flags with help texts, JSON options, secrets, one-line errors.

    config = parse_command_line(Config)       # a dataclass whose comments are the help texts, in groups
    config = cli(Config, "What it does.")     # any dataclass or function, as tyro shows it
    with one_line_errors():
        main(config)

Needs reward_worker.py. Not covered: files of settings, environment variables.
"""

import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from dataclasses import MISSING, Field, field, fields, make_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, get_type_hints

import tyro

from reward_worker import flag

# The groups of --help. A name that ends in _ stands for all settings that begin with it.
GROUPS = {
    "data": "val_file chat_template_kwargs max_prompt_length seed",
    "reward": """reward_fn reward_kwargs reward_mode num_workers sync_processes timeout max_in_flight max_rpm
        http_retries max_no_verdict_rate""",
    "judge": "genrm genrm_ router_address reward_model_",
    "rollout": """rollout rollout_ group_size temperature max_response_length overlap max_logprob_diff""",
    "algorithm": """advantage advantage_kwargs loss loss_kwargs clip_ tis_cap sampler_logprobs kl_coef
        entropy_coef overlong_ dynamic_sampling max_refills max_idle_steps""",
    "optimizer": """total_steps train_batch_size mini_batch_size lr lr_warmup_steps adam_betas weight_decay
        max_grad_norm max_tokens_per_micro_batch gradient_checkpointing compile_layers bf16_head""",
    "model": "max_positions trust_remote_code lora_",
    "evaluation": "val_",
    "checkpoint": "save_every keep_checkpoints resume samples_per_step tensorboard wandb dry_run",
    "hardware": "device policy_ max_restarts num_threads",
}
IN_WORDS = tyro.conf.arg(help_behavior_hint="")  # The help text itself explains the default.
HIDDEN = "(hidden)"  # replaces secrets, because users share the files and the page of a run
# The ends of names whose values are secrets, such as API_KEY, apiKey, api_key_judge_two, --judge-token and
# X-Auth. num_key_value_heads is not a secret.
SECRET = re.compile(
    r"(?:(token)s?[-_]?\d*|(?:key|secret|password|passwd|passphrase|pwd|credential|authorization|auth|bearer)"
    r"s?\d*(?![-_]value[-_]heads)(?:[-_]+[a-z\d]+){0,9}[-_]*)$",
    re.IGNORECASE,
)


# ---- parsing


def cli(config, description="", args: list[str] | None = None, markers=(), end="Needs "):
    """Parse this script's command line with tyro. --help shows the command as the documentation writes it.

    Args:
        config: A dataclass, or a function to call with the settings.
        description: The text that --help shows above the settings, or None, as `__doc__` is with python -OO.
        args: The arguments; by default, those of this process.
        markers: tyro's options.
        end: What follows the text that --help shows.
    """
    script = Path(sys.argv[0]).resolve()
    prog = f"python {script.name}"
    with contextlib.suppress(FileNotFoundError):  # The working directory was deleted.
        prog = f"python {os.path.relpath(script)}"
    if (script.parent / "__init__.py").is_file():
        prog = f"python -m {script.parent.name}.{script.stem}"
    if {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback.
    args = [expanded(word) for word in (sys.argv[1:] if args is None else args)]
    about = wrapped((description or "").partition(end)[0])
    parsed = tyro.cli(config, prog=prog, description=about, args=args, config=markers)
    # After `>&-`, the next file that is opened would be the output of this process.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    # Whoever reads a pipe or a log sees each line at once, and a locale such as C cannot encode all names.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    return parsed


def expanded(word: str) -> str:
    """Expand ~ as in --out-dir=~/run and NAME=~/judge, where shells do not."""
    return re.sub(r"^((?:[\w-]+=)*)~(?=/|$)", lambda found: found[1] + os.path.expanduser("~"), word)


def wrapped(text: str) -> str:
    """Wrap the paragraphs of a description for the terminal, except indented ones such as commands.

    tyro joins lines that begin with a letter into one line, so each line begins with a space.
    """
    width = min(100, shutil.get_terminal_size().columns) - 1
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        if not paragraph.startswith(" "):
            paragraph = textwrap.fill(paragraph, width, initial_indent=" ", subsequent_indent=" ")
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def hint_of(default: str) -> str:
    """Return what --help adds to a help text. "None" and "''" say nothing that the text does not say."""
    if default in ("None", "''", ""):
        return ""
    return f"(default: {default})"


def place_of(setting: Field) -> tuple[str, int]:
    """Return the group of a setting in --help, and its position in the group."""
    if setting.default is MISSING:
        return "required", 0
    for prefix in (setting.name, *accumulate(f"{part}_" for part in setting.name.split("_"))):
        for group, names in GROUPS.items():
            # The whole name comes first: val_file belongs to "data", all other val_ settings to "evaluation".
            if prefix in names.split():
                return group, names.split().index(prefix)
    return "other", 0


def grouped(config: type) -> dict[str, list[Field]]:
    """Sort the settings into the groups of --help."""
    groups = {group: [] for group in ("required", *GROUPS, "other")}
    for setting in sorted(fields(config), key=lambda one: place_of(one)[1]):
        groups[place_of(setting)[0]].append(setting)
    return groups


def help_texts(config: type) -> dict[str, str]:
    """Read each setting's help text: the comment at the end of its line, or else the comments above it."""
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        above = []
        for line in inspect.getsource(kind).splitlines():
            code, _, comment = line.partition("# ")
            setting = re.match(r"    (\w+): ", code)
            if setting:
                texts[setting[1]] = comment or " ".join(above)
            if code.strip() or not comment:
                above = []
            else:
                above.append(comment)
    return texts


def parse_command_line(config: type, args: list[str] | None = None, description="", end="Needs "):
    """Parse the command line. --help shows the settings in groups, the required ones first.

    Args:
        config: A dataclass whose comments are the help texts of its settings.
        args: The arguments; by default, those of this process.
        description, end: As in `cli`.
    """
    hints = get_type_hints(config, include_extras=True)
    texts = help_texts(config)
    boxes = []
    for group, settings in grouped(config).items():
        box = []
        for setting in settings:
            about = tyro.conf.arg(help=texts[setting.name], help_behavior_hint=hint_of)
            hint = Annotated[hints[setting.name], about]
            box.append((setting.name, hint, field(default=setting.default)))
        if box:
            boxes.append((group, make_dataclass(group, box, kw_only=True)))
    everything = make_dataclass("Everything", boxes)
    without = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)  # no --data.seed, no {None}|STR
    parsed = cli(everything, description, args, without, end)
    values = {}
    for box in vars(parsed).values():
        values |= vars(box)
    return config(**values)


# ---- values of options


def named(field: str, values: tuple[str, ...]) -> dict[str, str]:
    """Split NAME=VALUE; the default name is "genrm": ("a:1", "rm=b:2") -> {"genrm": "a:1", "rm": "b:2"}.

    Raises ValueError if two values have the same name.
    """
    found = {}
    for value in values:
        name, text = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", value, re.DOTALL).groups("genrm")
        if os.path.exists(value):  # A sweep may write into a folder such as lr=1e-4.
            name, text = "genrm", value
        if name in found:
            raise ValueError(f"{flag(field)} {value}: another model has the same name; pass NEW_NAME={text}")
        found[name] = text
    return found


def split_arguments(field: str, text: str) -> tuple[str, ...]:
    """Split a string as a shell does. Raise ValueError if a quote is not closed."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(
            f"{flag(field)} {text!r}: cannot be split into arguments ({error}); check the quotes"
        ) from None


def check_unused(options, names, needed: str) -> None:
    """Raise ValueError if one of these settings was changed although nothing reads it without `needed`."""
    for name in names:
        value = getattr(options, name)
        if value != getattr(type(options), name):
            text = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(f"{flag(name)} {text}: has no effect without {needed}; pass both or neither")


def json_object(field: str, text: str) -> dict:
    """Parse a JSON object. Raise ValueError for other texts, without the text, which may contain a key."""
    form = f"""{flag(field)}: must be a JSON object such as '{{"NAME": 1}}'"""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{form} ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(form)
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:  # Python accepts NaN, Infinity and 1e999, but other JSON parsers do not.
        raise ValueError(f"{flag(field)}: all numbers must be finite") from None
    return found


# ---- secrets in options


def without_secrets(value, name: str = ""):
    """Return a value from JSON with all secrets hidden, also those in lists, JSON text and command lines.

    The value itself is hidden if its `name` says that it is secret.
    """
    if is_secret(name, value):
        return HIDDEN
    if isinstance(value, dict):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return words_without_secrets(value)
    if not isinstance(value, str):
        return value
    try:
        inner = json.loads(value)
        shown = without_secrets(inner)
        if shown == inner:
            return value
        return json.dumps(shown)
    except ValueError:
        pass  # The text is not JSON.
    # Hide the password of a URL, which may contain / and @ (but 8000/ is a port), or a token without a user.
    text = re.sub(r'(://[^/\s:@]*:)(?!\d*[/?])[^\s"]*@|(://)[^/\s:@"]+@', rf"\1\2{HIDDEN}@", value)
    parts = re.fullmatch(r"([^\s=:]+[=:])(.*)", text, re.DOTALL)
    if parts:  # --flag=VALUE, NAME=VALUE, "Header: VALUE" or an address
        start, rest = parts.groups()
        return start + without_secrets(rest, start[:-1])
    try:
        words = shlex.split(text)
    except ValueError:  # for instance an apostrophe
        words = text.split()
    if words == [text]:
        return text
    shown = words_without_secrets(words)
    if shown == words:
        return text
    return shlex.join(shown).replace(f"'{HIDDEN}'", HIDDEN)


def words_without_secrets(words) -> list:
    """Hide the secrets in a list, which may be the words of a command line."""
    shown = []
    name = ""  # the flag, such as --api-key, or the header, such as Authorization:, that the words belong to
    for word in words:
        if isinstance(word, str) and (word.startswith("-") or word.endswith(":")):
            name = word.rstrip(":")
        elif is_secret(name, word):
            word = HIDDEN
        shown.append(without_secrets(word))
    return shown


def is_secret(name: str, value) -> bool:
    """Return whether a value with this name is secret.

    A number of tokens is not, nor are values such as stop_token_ids and empty values.
    """
    found = SECRET.search(name)
    if not found or value in (None, "") or isinstance(value, bool):
        return False
    return not (found[1] and str(value).isdecimal())


# ---- the end of a script


@contextlib.contextmanager
def one_line_errors(if_interrupted: str = ""):
    """End the script with a one-line message and an exit code if this context fails or is interrupted.

    The code is 2 if the input is invalid or the machine has failed, 1 if the run had to stop, and 130 after
    Ctrl-C, for which the message is `if_interrupted`. An error may have another `exit_code`.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(if_interrupted)
        raise SystemExit(130) from None
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RuntimeError) else 2
        raise SystemExit(getattr(error, "exit_code", code)) from error
