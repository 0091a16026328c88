"""The command lines of scripts: how they start, their --help, and what vLLM's own parser says to ours."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import forked
import rollout
from command_line import cli, parse_command_line
from genrm_server import Config, VllmServer, resolve_config
from settings import Config as RunConfig
from settings import PolicyOptions

ROOT = Path(__file__).parent.parent
POLICY = str(ROOT / "toy/models/policy")
GPU = Config(POLICY, device="cuda", port=1)
MODES = {
    "judge": GPU,
    "judge on a share": replace(GPU, gpu_share=0.22, vllm_args=("--max-model-len", "512")),
    "judge that sleeps": replace(GPU, sleep_mode=True, gpu_share=0.4),
    "judge of two GPUs": replace(GPU, tensor_parallel_size=2, vllm_args=("--max-num-seqs=64",)),
    "discriminative judge": replace(GPU, task="classify"),
    "with room for keys and values": replace(GPU, vllm_args=("--kv-cache-memory-bytes", "4000000000")),
    "on CPU": replace(GPU, device="cpu", cpus="0"),
}

# vLLM 0.24 and 0.32 have the parser in different places.
PARSER = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for name, line in json.loads(sys.argv[1]).items():
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    validate_parsed_serve_args(found)
    print(json.dumps([name, {key: value for key, value in vars(found).items() if type(value) in
                             (int, float, str, bool, list, dict)}]))
"""


def policy_server(monkeypatch, trust_remote_code=False):
    """Return the command of a policy server, with the configuration that PolicyServers makes."""
    seen = []

    class Started(Exception):
        pass

    def start(self, config):
        seen.append(config)
        raise Started

    class OnGpu:
        device = rollout.torch.device("cuda")
        config = PolicyOptions(model=POLICY, trust_remote_code=trust_remote_code)

        def model_info(self):
            from transformers import AutoConfig

            shape = AutoConfig.from_pretrained(POLICY)
            return {"config": shape, "architecture": "LlamaForCausalLM", "numel": 1, "code": {}}

    from transformers import AutoTokenizer

    monkeypatch.setattr(rollout.PolicyServers, "start", start)
    settings = Config(model="", gpu_share=0.3, max_model_len=512, vllm_args=("--max-num-seqs", "64"))
    with pytest.raises(Started):
        rollout.PolicyServers(OnGpu(), AutoTokenizer.from_pretrained(POLICY), settings)
    return seen[0]


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_servers_of_the_policy_run_its_code_if_the_trainer_does(monkeypatch, trust_remote_code):
    args = policy_server(monkeypatch, trust_remote_code).vllm_args
    assert ("--trust-remote-code" in args) is trust_remote_code


@pytest.mark.slow
def test_vllm_takes_the_command_lines_of_all_modes(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    configs = {name: resolve_config(replace(mode, log_dir=tmp_path)) for name, mode in MODES.items()}
    configs["policy server"] = policy_server(monkeypatch, trust_remote_code=True)
    lines = {}
    for name, config in configs.items():
        server = VllmServer(config, 3, 0, 1)
        lines[name] = server.command[3:]  # after python -m MODULE
        server.reserved.close()
    ended = forked.run(["-c", PARSER, json.dumps(lines)], where=forked.address("servers"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))
    assert set(found) == set(lines)
    for name, taken in found.items():
        middleware = ["router.SglangGenerate", "genrm_server.KeyGuard"]
        assert taken["seed"] == 3 and taken["middleware"] == middleware
        assert taken["disable_uvicorn_access_log"] is True, name
        assert taken["override_generation_config"] == {"max_new_tokens": None}
    assert found["judge on a share"]["gpu_memory_utilization"] == 0.22
    assert found["judge that sleeps"]["enable_sleep_mode"] is True
    assert found["judge of two GPUs"]["tensor_parallel_size"] == 2
    assert found["discriminative judge"]["runner"] == "pooling"
    assert found["with room for keys and values"]["kv_cache_memory_bytes"] == 4_000_000_000
    assert found["on CPU"]["dtype"] == "float32" and found["on CPU"]["enforce_eager"] is True
    policy = found["policy server"]
    assert policy["trust_remote_code"] is True
    assert policy["logprobs_mode"] == "processed_logprobs" and policy["generation_config"] == "vllm"
    assert (policy["dtype"], policy["max_model_len"], policy["max_num_seqs"]) == ("bfloat16", 512, 64)


def start(where, *command, **more):
    """Start a script from another folder, as a shell would: without this folder in PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=where, env=environment, text=True, stderr=subprocess.PIPE, **more
    )


IN_FOLDERS = [*ROOT.glob("tools/[a-z]*.py"), ROOT / "toy/report.py", ROOT / "toy/warm_start.py"]


@pytest.mark.slow
@pytest.mark.parametrize("path", IN_FOLDERS, ids=lambda path: path.stem)
def test_a_script_in_a_folder_starts_in_both_ways_and_shows_the_documented_one(path, tmp_path):
    name = f"{path.parent.name}.{path.stem}"
    assert f"    python -m {name} " in path.read_text().split('"""')[1]
    for where, command in ((tmp_path, [str(path)]), (ROOT, ["-m", name])):
        said, errors = start(where, *command, "--help", stdout=subprocess.PIPE).communicate()
        assert said.startswith(f"usage: python -m {name} [-h]") and not errors, errors
        prose = [line for line in said.splitlines()[1:] if not line.startswith("    ")]
        assert max(map(len, prose)) <= 100, max(prose, key=len)


@pytest.mark.parametrize("name", ["recipes/padding.py", "docs/make_settings.py"])
def test_the_help_of_a_script_that_writes_a_file_writes_nothing(name, tmp_path):
    """Run a copy, because the script may write to its own folder."""
    left_out = shutil.ignore_patterns("models", "evidence", "settings.md")
    for folder in ("docs", "recipes", "toy", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc"}
    done = forked.run([name, "--help"], cwd=tmp_path, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python {name} [-h]"), done.stderr
    assert f"    python {name}" in done.stdout
    after = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}
    assert after <= before


@pytest.mark.parametrize("name", ["router.py", "genrm_server.py"])
def test_the_help_of_a_service_shows_its_commands(name):
    examples = (ROOT / name).read_text().split('"""')[1].split("\n\n")[1]
    done = forked.run([name, "--help"], timeout=100)
    assert done.stdout.startswith(f"usage: python {name} [-h]") and examples in done.stdout
    done = forked.run([name, "--no-such-flag"], timeout=100)
    assert done.returncode == 2 and f"python {name} --help" in done.stderr


HELP = (
    "grpo_trainer.py",
    "score_file.py",
    "-m tools.view_run",
    "prepare_data.py",
    "router.py",
    "genrm_server.py",
)


@pytest.mark.parametrize("command", map(str.split, HELP), ids=HELP)
def test_help_for_a_reader_who_has_seen_enough(command):
    """This happens in `--help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with tempfile.TemporaryFile() as errors:
        process = forked.Script([*command, "--help"], write, errors)
        os.close(write)
        process.wait()
        errors.seek(0)
        assert errors.read() == b""


def test_help_in_a_folder_that_was_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "prepare_data.py")])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit):
        cli(int, args=["--help"])
    assert capsys.readouterr().out.startswith("usage: python prepare_data.py [-h]")


def test_help_without_docstrings():
    said, errors = start(ROOT, "-OO", "prepare_data.py", "--help", stdout=subprocess.PIPE).communicate()
    assert said.startswith("usage: python prepare_data.py [-h]") and not errors, errors


def test_a_tilde_that_the_shell_leaves_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flags = ["--model=~/m", "--train-file", "~/t", "--out-dir=~", "--val-file=~/v:4", "--genrm=rm=~/j"]
    config = parse_command_line(RunConfig, [*flags, "a=~/b", "--reward-fn=~/f.py:f", "--loss=a~/b"])
    assert (config.model, config.train_file, config.out_dir) == ("/home/me/m", "/home/me/t", "/home/me")
    assert (config.val_file, config.genrm) == (("/home/me/v:4",), ("rm=/home/me/j", "a=/home/me/b"))
    assert (config.reward_fn, config.loss) == ("/home/me/f.py:f", "a~/b")


def test_each_line_leaves_a_script_at_once(tmp_path, monkeypatch):
    """`| tee log` and `nohup` show a run while it trains. Here the script is killed before Python flushes."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import os, command_line; command_line.cli(int); print('step 1'); os.kill(os.getpid(), 9)"
    with open(tmp_path / "nohup.out", "w+") as file:
        for output in (subprocess.PIPE, file):
            said, errors = start(ROOT, "-c", code, "7", stdout=output).communicate()
            assert not errors, errors
            assert (said or (tmp_path / "nohup.out").read_text()) == "step 1\n"


def test_a_script_prints_what_its_locale_cannot_encode(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = "import command_line; command_line.cli(int); print('modèle')"
    assert start(ROOT, "-c", code, "7", stdout=subprocess.PIPE).communicate() == ("mod\\xe8le\n", "")


def test_a_closed_output_is_that_of_no_file():
    code = "import command_line; command_line.cli(int); print(1)"
    code += "; import os, sys; print(os.readlink('/proc/self/fd/1'), end='', file=sys.stderr)"
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code, "7"]
    done = subprocess.run(closed, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, os.devnull)
