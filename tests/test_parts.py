"""Parts that can be used alone: each file works in an empty folder, together with the files that its header
names.
"""

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

import forked
from played import lines_of, server, stand_in_for_vllm
from test_genrm_server import STAND_IN
from test_house import ROOT, TOP
from tiny import config_of, write_model

WHOLE = ("grpo_trainer.py", "run.py")  # these two need nearly all other files
PARTS = [path.name for path in TOP if path.name not in WHOLE]


def header_of(name):
    return " ".join(ast.get_docstring(ast.parse((ROOT / name).read_text())).split())


def needs(name):
    """Return (the files that a copy needs, the files that it may use), according to the header.

    "Needs A.py and B.py; for C D.py." or "This file imports nothing from this repository except D.py ...".
    """
    header = header_of(name)
    nothing = re.search(r"imports nothing from this repository(.*?)\.(?= |$)", header)
    if nothing:
        always, sometimes = "", nothing[1]
    else:
        (sentence,) = re.findall(r"\b[Nn]eeds (.*?\.py.*?)\.(?= |$)", header)
        always, _, sometimes = sentence.partition(";")
        assert always.endswith(".py")
    return set(re.findall(r"[\w/]+\.py", always)), set(re.findall(r"[\w/]+(?:\.py|/)", sometimes))


def imports_of(name):
    """Return (our files that are imported with this one, our files that a function or a try block may import
    later).
    """
    tree, at_once, later = ast.parse((ROOT / name).read_text()), set(), set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        files = {f"{module.replace('.', '/')}.py" for module in names}
        (at_once if node in tree.body else later).update(one for one in files if (ROOT / one).is_file())
    return at_once, later - at_once


def all_imports_of(name):
    """Return the files that are imported with this one."""
    found, waiting = set(), [name]
    while waiting:
        new = imports_of(waiting.pop())[0] - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("name", [*PARTS, "tools/diagnose.py", "tools/merge_lora.py", "toy/report.py"])
def test_a_header_names_what_its_file_imports(name):
    always, sometimes = needs(name)
    at_once, (_, later) = all_imports_of(name), imports_of(name)
    assert at_once <= always <= at_once | later
    assert {one for one in later - always if not {one, one.split("/")[0] + "/"} & sometimes} == set()


# ---- each part in an empty folder


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Copy a file and the files that it needs into an empty folder, where commands then run."""
    for name in ("PYTHONPATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def copy(name, *more):
        for file in {name, *more} | (set() if name in WHOLE else needs(name)[0]):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / file)
        return tmp_path

    return copy


def run(*command, **env):
    """Run a command in the folder and return what it prints. The repository is not on any path."""
    done = forked.run(command, os.getcwd(), os.environ | env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def serving(*command):
    """Yield the address that a router in the folder prints when it is ready."""
    with subprocess.Popen([sys.executable, "-u", *command], text=True, stdout=subprocess.PIPE) as server:
        try:
            ready = (re.search(r"router \w+ at (http\S+) \(\d servers\)", line) for line in server.stdout)
            yield next(filter(None, ready))[1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()


def get(url):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through HTTP_PROXY
    with direct.open(url, timeout=30) as answer:
        return answer.read().decode()


def test_the_folder_sees_nothing_of_the_repository(alone):
    """Otherwise the tests below would prove nothing."""
    alone("prepare_data.py").joinpath("compute_score.py").unlink()
    with pytest.raises(AssertionError, match="No module named 'compute_score'"):
        run("prepare_data.py")


def test_algorithm_alone(alone):
    """With a ratio of 1 for every token, the loss is minus the mean advantage of the tokens."""
    alone("algorithm.py")
    code = """
import torch
from algorithm import compute_advantages, compute_policy_loss
advantages = compute_advantages(torch.tensor([[1.0, 0.0, -1.0]])).flatten()
logprobs, mask = torch.full((3, 2), -0.5), torch.tensor([[True, True], [True, False], [True, False]])
loss, _ = compute_policy_loss(logprobs, logprobs, advantages, mask, num_tokens=4)
print([round(float(x), 3) for x in (*advantages, loss)])
"""
    assert json.loads(run("-c", code)) == [1.0, 0.0, -1.0, -0.25]


def test_weight_sums_alone(alone):
    """In float32, 1.0 consists of the words 0 and 3f80. Six times 3f80 is 1_7d00."""
    alone("weight_sync.py")
    code = """
import json, torch
from weight_sync import compare, summed
sent = {}
list(summed([("w", torch.ones(2, 3))], sent))
print(json.dumps([sent, list(compare("server 0", sent, [sent]))]))
"""
    assert json.loads(run("-c", code)) == [{"w (torch.float32)": [6, 3, 0x7D00]}, ["w (torch.float32)"]]


def test_compute_score_alone(alone):
    alone("compute_score.py")
    code = r"""
from compute_score import compute_score
for answer in ("4", "5"):
    print(compute_score("math", f"2 + 2 = \\boxed{{{answer}}}", "4")["score"])
"""
    assert run("-c", code).split() == ["1.0", "-1.0"]


@pytest.mark.slow
def test_policy_with_algorithm(alone, model, tokenizer):
    """One update makes the better of two responses likelier and the worse one less likely."""
    folder = alone("policy.py")
    config = dataclasses.asdict(config_of(model=write_model(folder / "model", model, tokenizer)))
    (folder / "config.json").write_text(json.dumps(config))
    code = """
import json, types, torch
from causal_lm import logprobs_and_entropy
from policy import Policy, Sample
config = types.SimpleNamespace(**json.load(open("config.json")))
policy = Policy(config, config.model, torch.device("cpu"))
answers = (([8, 9, 1], 1.0), ([10, 1], -1.0))
group = [Sample({}, [5, 6, 7], response_ids=ids, rollout_logprobs=[-1.0] * len(ids), advantage=advantage)
         for ids, advantage in answers]
def logprobs():
    with torch.no_grad():
        sequences = [sample.prompt_ids + sample.response_ids for sample in group]
        better, worse = logprobs_and_entropy(policy.model, sequences, [3, 2], 1.0)[0].sum(1).tolist()
    return better - worse
before = logprobs()
policy.update([group], lr=1e-3)
print(logprobs() > before)
"""
    assert run("-c", code) == "True\n"


@pytest.mark.slow
def test_rollout_with_policy_and_algorithm(alone, model, tokenizer):
    folder = alone("rollout.py")
    write_model(folder / "model", model, tokenizer)
    code = """
from transformers import AutoModelForCausalLM
from causal_lm import can_share_prompts
from policy import Sample
from rollout import rollout_hf
model, ended = AutoModelForCausalLM.from_pretrained("model"), []
samples = [Sample({}, [5, 6, 7]) for _ in range(2)]
rollout_hf(model, samples, max_response_length=4, temperature=1.0, eos_ids=set(), seed=0,
           rollout_batch_size=8, on_finished=ended.append)
lengths = [len(sample.response_ids) for sample in samples]
shares = can_share_prompts(model)
print(lengths, len(ended), len(samples[0].rollout_logprobs), shares)
"""
    assert run("-c", code) == "[4, 4] 2 4 True\n"


@pytest.mark.slow
def test_trajectory_with_rollout_policy_algorithm_and_reward_worker(alone, model, tokenizer):
    folder = alone("trajectory.py")
    write_model(folder / "model", model, tokenizer)
    code = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from policy import Sample
from trajectory import Rollouts
async def twice(trajectory):
    for _ in range(2):
        await trajectory.generate(max_tokens=3)
        trajectory.observe("7")
rollouts = Rollouts(twice, AutoTokenizer.from_pretrained("model"))
rollouts.start()
row = {"prompt": [], "data_source": "d", "reward_model": {"ground_truth": ""}, "extra_info": {}}
sample = Sample(row, [5, 6, 7])
rollouts.roll_out([[sample]], model=AutoModelForCausalLM.from_pretrained("model"), max_response_length=9,
                  temperature=1.0, eos_ids=set(), seed=0, rollout_batch_size=8)
rollouts.close()
print(sample.failure or [int(own) for own in sample.loss_mask])
"""
    assert run("-c", code) == "[1, 1, 1, 0, 1, 1, 1, 0]\n"


def test_credit_with_policy_and_algorithm(alone):
    alone("settings.py", "policy.py", *needs("policy.py")[0])
    code = """
from algorithm import set_advantages
from policy import Sample
from settings import PolicyOptions
def sample(score):
    result = {"reward_score": score, "reward_extra_info": {"score": score}, "status": "ok"}
    return Sample({}, [5], response_ids=[6, 7], result=result)
group = [sample(1.0), sample(0.0), sample(None)]
set_advantages([group], PolicyOptions(model="", advantage="dr_grpo"), decode=str)
print([sample.advantage for sample in group])
"""
    assert run("-c", code) == "[0.5, -0.5, None]\n"


@pytest.mark.slow
def test_plain_grpo_with_policy_rollout_and_algorithm(alone):
    """The script in docs/ learns its task with these files, their settings and a model."""
    folder = alone("rollout.py", "settings.py", *needs("settings.py")[0])
    shutil.copytree(ROOT / "toy/models/policy", folder / "toy/models/policy")
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/plain_grpo.py", folder / "docs")
    rewards = [float(value) for value in re.findall(r"mean reward (\S+),", run("docs/plain_grpo.py"))]
    assert len(rewards) == 20 and rewards[0] < 0.2 and min(rewards[-3:]) > 0.7


def test_prepare_data_with_compute_score(alone):
    folder = alone("prepare_data.py")
    (folder / "files").mkdir()
    write_lines(folder / "files/gsm8k_test.jsonl", {"question": "2 + 2?", "answer": "It is 4.\n#### 4"})
    said = run("prepare_data.py", "--tasks", "gsm8k", "--out-dir", "data", "--source-dir", "files")
    assert "1 rows from gsm8k_test.jsonl" in said and (folder / "data/gsm8k_test.parquet").is_file()


@pytest.mark.slow
def test_metrics_alone(alone):
    alone("run_folder.py")
    code = """
from types import SimpleNamespace
from run_folder import reward_metrics
samples = [SimpleNamespace(result={"reward_score": score, "reward_extra_info": {"acc": score > 0}})
           for score in (1.0, -1.0, 1.0, 1.0)]
print(reward_metrics(samples))
"""
    expected = {"reward/acc": 0.75, "reward/mean": 0.5, "reward/no_verdict": 0.0}
    assert run("-c", code) == f"{expected}\n"


@pytest.mark.slow
def test_lora_alone(alone, model):
    """Only adapters are trained, and they change nothing at first."""
    model.save_pretrained(alone("causal_lm.py") / "model")
    code = """
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM
from causal_lm import add_adapters
model, ids = AutoModelForCausalLM.from_pretrained("model"), torch.arange(5)[None]
before = model(ids).logits
config = SimpleNamespace(model="model", lora_rank=2, lora_alpha=0, lora_targets=("q_proj",), seed=0)
add_adapters(model, config, "model")
learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
same = torch.equal(model(ids).logits, before)
print(len(learning), all(".q_proj.lora_" in name for name in learning), same)
"""
    assert run("-c", code) == "8 True True\n"


def test_command_line_with_reward_worker(alone):
    """The comments of any dataclass are help texts."""
    folder = alone("command_line.py", "reward_worker.py")
    code = """
from dataclasses import dataclass
from command_line import json_object, one_line_errors, parse_command_line

@dataclass
class Config:
    steps: int = 3  # How many steps to take.
    more: str = "{}"  # Further settings, as a JSON object.

config = parse_command_line(Config, description="Take steps.")
with one_line_errors():
    print(config.steps, json_object("more", config.more))
"""
    (folder / "mine.py").write_text(code)
    assert run("mine.py", "--steps", "4", "--more", '{"a": 1}') == "4 {'a': 1}\n"
    assert "How many steps to take." in run("mine.py", "--help")


@pytest.mark.slow
def test_run_folder_alone(alone):
    folder = alone("run_folder.py")
    code = """
from types import SimpleNamespace
from run_folder import Log
config = SimpleNamespace(out_dir=".", total_steps=1, advantage_kwargs="{}", tensorboard=False, wandb=False)
log = Log(config, step=0)
log.metrics({"step": 1, "reward/mean": 0.5})
log.close()
"""
    run("-c", code)
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5}
    assert (folder / "curves.png").stat().st_size > 1000


@pytest.mark.slow
def test_router_alone(alone):
    """The router distributes requests to two scripted servers."""
    alone("router.py")
    with server(None, lambda path: 1) as first, server(None, lambda path: 2) as second:
        urls = [f"http://{first}", f"http://{second}"]
        with serving("router.py", "--port", "0", "--policy", "round_robin", "--workers", *urls) as url:
            answers = [int(get(f"{url}/v1/models")) for _ in range(4)]
    assert sorted(answers) == [1, 1, 2, 2]


def with_stand_in(folder):
    """Write a model and a stand-in for vLLM to the folder."""
    stand_in_for_vllm(folder, STAND_IN)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")


@pytest.mark.slow
def test_vllm_server_alone(alone):
    with_stand_in(alone("genrm_server.py"))
    code = """
import time, urllib.request
from pathlib import Path
from types import SimpleNamespace
from genrm_server import VllmServer
config = SimpleNamespace(
    model="model", served_model_name="judge", log_dir=Path("logs"), device="cpu", dtype="", cpus="", seed=0,
    tensor_parallel_size=1, server_key="key", control=False, sleep_mode=False, task="generate",
    max_model_len=64, vllm_args=())
server = VllmServer(config, 0, 0, 1)
url, end = server.start(), time.monotonic() + 200
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through HTTP_PROXY
while server.alive() and time.monotonic() < end:
    try:
        print(direct.open(url + "/health").status)
        break
    except OSError:
        time.sleep(0.1)
server.stop()
print(server.alive())
"""
    assert run("-c", code).split() == ["200", "False"]


@pytest.mark.slow
def test_genrm_server_with_two(alone):
    with_stand_in(alone("genrm_server.py"))
    command = "genrm_server.py --model model --port 0 --device cpu --num-servers 2 --policy round_robin"
    with serving(*command.split()) as url:
        servers = {json.loads(get(f"{url}/v1/args"))["pids"][0] for _ in range(4)}
    assert len(servers) == 2


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""
ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "ability": "Math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "test", "index": 0},
}


@pytest.mark.slow
def test_reward_loop_with_its_worker(alone, cluster):
    folder = alone("reward_loop.py")
    (folder / "mine.py").write_text(REWARD)
    code = f"""
import contextlib
from reward_loop import RewardOptions, start_rewards
with contextlib.ExitStack() as stack:
    manager = start_rewards(RewardOptions(reward_fn="mine.py:score", num_workers=1), stack)
    results = manager.score_batch([{ROW!r} | {{"response": text}} for text in "45"])
print([(result["reward_score"], result["status"]) for result in results])
"""
    assert run("-c", code, RAY_ADDRESS=cluster).endswith("[(1.0, 'ok'), (0.0, 'ok')]\n")


@pytest.mark.slow
def test_score_file_with_its_five(alone, cluster):
    folder = alone("score_file.py")
    write_lines(folder / "responses.jsonl", *(ROW | {"response": rf"\boxed{{{x}}}"} for x in "45"))
    run(
        "score_file.py",
        "--data",
        "responses.jsonl",
        "--out",
        "scored.jsonl",
        "--num-workers",
        "1",
        "--reward-fn",
        "compute_score.py:compute_score",
        RAY_ADDRESS=cluster,
    )
    lines = lines_of(folder / "scored.jsonl")
    assert [line["reward_score"] for line in lines] == [1.0, -1.0]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_the_top_level_alone_trains_and_says_what_it_cannot_write(rollout, alone, model, tokenizer, cluster):
    """Without folders such as cluster/, the run is complete and has its curves.

    Only the page needs tools/.
    """
    folder = alone("grpo_trainer.py", *(path.name for path in ROOT.glob("*.py")))
    write_model(folder / "model", model, tokenizer)
    stand_in_for_vllm(folder)
    write_lines(folder / "rows.jsonl", ROW)
    command = (
        """grpo_trainer.py --model model --train-file rows.jsonl --out-dir out --total-steps 1
        --train-batch-size 1 --mini-batch-size 1 --group-size 2 --max-response-length 4 --overlong-buffer 0
        --num-workers 1 --device cpu --max-logprob-diff 1e9 --rollout """
        + rollout
    )
    said = run(*command.split(), RAY_ADDRESS=cluster)
    assert "done: out/checkpoints/step_1" in said
    (line,) = [line for line in said.splitlines() if line.startswith("report.html")]
    assert line.startswith("report.html and the merged model were not written, because they need the folders")
    assert json.loads((folder / "out/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    assert (folder / "out/curves.png").is_file() and (folder / "out/checkpoints/step_1").is_dir()


def test_every_part_is_used_above():
    """reward_worker.py is used with reward_loop.py."""
    text = (ROOT / "tests/test_parts.py").read_text()
    used = [name for names in re.findall(r"alone\((.*?)\)", text) for name in re.findall(r"\w+\.py", names)]
    assert {*used, "reward_worker.py"} - set(WHOLE) == set(PARTS)
