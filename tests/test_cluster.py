"""A run over several hosts (network namespaces, see hosts.py), one of which is disconnected.

Needs root and `ip`. Scripted servers replace vLLM, but use the real weights of the policy.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from transformers import Qwen2Config

import forked
from hosts import address_of, played_hosts
from test_reward_loop import free_port
from tiny import write_model

ROOT = Path(__file__).parent.parent

# This server replaces vLLM. It samples token by token with the model in its folder, reloads the model on
# request, and finds no error as a judge.
SAMPLING_SERVER = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import torch
from transformers import AutoModelForCausalLM
from policy import Sample
from rollout import rollout_hf
from weight_sync import weight_sums
def argument(name): return sys.argv[sys.argv.index(name) + 1]
def load(): return AutoModelForCausalLM.from_pretrained(argument("--model"), dtype=torch.float32).eval()
torch.set_num_threads(1)
model, lock, asked = load(), threading.Lock(), 0
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        global model, asked
        body, answer = self.rfile.read(int(self.headers.get("Content-Length") or 0)), {}
        with lock:
            if self.path == "/collective_rpc" and b"weight_sums" in body:
                answer = {"results": [weight_sums(model.named_parameters())]}
            elif self.path == "/collective_rpc":
                model = load()
            elif self.path == "/v1/completions":
                body, asked = json.loads(body), asked + 1
                sample = Sample({}, body["prompt"])
                rollout_hf(model, [sample], max_response_length=body["max_tokens"], seed=asked,
                           temperature=body["temperature"] or 0, eos_ids=body["stop_token_ids"],
                           rollout_batch_size=1)
                answer = {"choices": [{"finish_reason": "stop", "token_ids": sample.response_ids,
                                       "logprobs": {"token_logprobs": sample.rollout_logprobs}}]}
            elif self.path == "/v1/chat/completions":
                message = {"content": "All right. \\\\boxed{-1}"}
                answer = {"choices": [{"finish_reason": "stop", "message": message}]}
        answer = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    do_POST = do_GET
    def log_message(self, *arguments): pass
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer((argument("--host"), int(argument("--port"))), Handler).serve_forever()
"""

REWARD = """
import aiohttp
async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    body = {"messages": [{"role": "user", "content": solution_str}]}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=body) as answer:
            judged = (await answer.json())["choices"][0]["message"]["content"]
    return {"score": solution_str.count("a") / (len(solution_str) + 1), "judged": judged.endswith("-1}")}
"""


@pytest.fixture
def hosts(tmp_path):
    """Yield a function that starts a program on one of four hosts."""
    with contextlib.ExitStack() as stack:
        try:
            on = stack.enter_context(played_hosts(tmp_path, SAMPLING_SERVER))
        except PermissionError as error:
            pytest.skip(str(error))
        yield on


@pytest.mark.slow
def test_ranks_judge_and_servers_on_different_machines_one_of_which_is_cut_off(
    hosts, tmp_path, model, tokenizer
):
    policy, rows, out = (
        write_model(tmp_path / "policy", model, tokenizer),
        tmp_path / "rows.jsonl",
        tmp_path / "run",
    )
    for number in range(16):
        row = {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"{number} + 1"}],
            "extra_info": {"index": number},
            "reward_model": {"ground_truth": str(number + 1)},
        }
        with open(rows, "a") as file:
            file.write(json.dumps(row) + "\n")
    (tmp_path / "score.py").write_text(REWARD)
    run = hosts(
        "h1",
        f"{tmp_path}/python",
        "grpo_trainer.py",
        "--model",
        policy,
        "--genrm",
        policy,
        "--train-file",
        str(rows),
        "--out-dir",
        str(out),
        "--reward-fn",
        f"{tmp_path}/score.py:compute_score",
        "--policy-ranks",
        "2",
        "--rollout",
        "vllm",
        "--total-steps",
        "12",
        "--train-batch-size",
        "4",
        "--mini-batch-size",
        "2",
        "--group-size",
        "4",
        "--max-response-length",
        "16",
        "--overlong-buffer",
        "0",
        "--save-every",
        "2",
        "--lr",
        "1e-3",
        "--num-workers",
        "1",
        log=tmp_path / "run.log",
    )

    def lines():
        path = out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def said():
        return (tmp_path / "run.log").read_text()

    end = time.monotonic() + 600
    while len(lines()) < 5:
        assert run.poll() is None and time.monotonic() < end, said()
        time.sleep(0.2)
    ranks = re.findall(r"1 on ([\d.]+)", re.search(r"policy: 2 ranks, (.*)", said())[1])
    assert len(set(ranks)) == 2 and address_of("h1") not in ranks
    subprocess.run(["ip", "link", "set", f"h{ranks[1].rpartition('.')[2]}out", "down"], check=True)
    while run.poll() is None and time.monotonic() < end + 600:
        time.sleep(0.5)
    assert run.returncode == 0, said()
    assert "a rank of the policy died" in said() and "(attempt 1 of --max-restarts 3)" in said()
    assert [line["step"] for line in lines()] == list(range(13)) and lines()[-1]["actor/restarts"] == 1
    # The servers always had the ranks' weights.
    assert all(line["rollout/logprob_diff"] < 1e-4 for line in lines()[1:])
    assert all(line["reward/judged"] == 1.0 for line in lines()[1:])  # by the judge, on its own host
    assert len({line["actor/grad_norm"] for line in lines()[1:] if "actor/grad_norm" in line}) > 8


QWEN_32B = dict(
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
)
QWEN_7B = dict(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
QWEN_4B = dict(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
TWO_NODES = ["--policy-ranks", "8", "--rollout-servers", "3", "--genrm-servers", "2"]


@pytest.mark.slow
def test_the_recipes_fit_on_the_machines_that_they_name(tmp_path, tokenizer):
    """Plan each recipe in a growing Ray cluster that claims to have the GPUs: test where Ray places what, and
    the memory of each GPU.
    """
    tokenizer.save_pretrained(tmp_path)
    row = {
        "data_source": "d",
        "prompt": [{"role": "user", "content": "1"}],
        "reward_model": {"ground_truth": "1"},
        "extra_info": {},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    cases = [
        ("genrm_4b", QWEN_4B, 1, []),
        ("fapo_7b", QWEN_7B, 1, []),
        ("baseline_7b", QWEN_7B, 1, []),
        ("fapo_32b", QWEN_32B, 2, TWO_NODES),
        ("fapo_32b", QWEN_32B, 4, []),
        ("baseline_32b", QWEN_32B, 4, []),
    ]
    for number, (_, shape, _, _) in enumerate(cases):
        config = Qwen2Config(
            vocab_size=152064, max_position_embeddings=32768, tie_word_embeddings=shape is QWEN_4B, **shape
        )
        config.save_pretrained(tmp_path / str(number))
        tokenizer.save_pretrained(tmp_path / str(number))
    script = f"""
import sys
import tempfile
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import ray
import torch
from ray.cluster_utils import Cluster
import forked
import run
from tools import plan_run
from test_recipes import commands, parse
run.check_room = lambda *_, **__: None  # of the disk
torch.version.cuda = "13.0"  # as a build of PyTorch that can use the GPUs
forked.small_ray()
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=8, num_gpus=8, include_dashboard=False))
ray.init(cluster.address, logging_level="error", log_to_driver=False)
for number, (name, nodes, more) in enumerate({[(name, nodes, more) for name, _, nodes, more in cases]!r}):
    while len(ray.nodes()) < nodes:
        cluster.add_node(num_cpus=8, num_gpus=8)
    rows = ["--train-file", {str(tmp_path / "rows.jsonl")!r}, "--val-file", {str(tmp_path / "rows.jsonl")!r}]
    _, arguments = next(commands(open({str(ROOT)!r} + f"/recipes/{{name}}.sh").read()))
    folder = {str(tmp_path)!r} + f"/{{number}}"
    more += ["--model", folder, "--out-dir", folder + "_run", *rows]
    print("RECIPE", flush=True)
    config = parse("tools.plan_run", arguments + more).resolved(ray.cluster_resources()["GPU"])
    print(plan_run.report(config, len(run.Run(config).train_rows)))
ray.shutdown()
cluster.shutdown()
"""
    ended = forked.run(["-c", script], timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(ended.stdout)
    said = ended.stdout.split("RECIPE")[1:]
    for (name, shape, nodes, more), text in zip(cases, said, strict=True):
        assert "80.0 GB on each of" in text and text.rstrip().endswith(": it fits"), (name, text)
        assert text.count("policy server 0") == text.count("rank 0") == 1 and text.count(
            "genrm 0"
        ) == name.startswith("fapo")
        assert len(re.findall(r"^[\d.]+: ", text, re.M)) >= 1
    assert "policy server 5 (2 GPUs)" in said[4] and "rank 15" in said[4] and "rank 8" not in said[3]


@pytest.mark.slow
def test_a_run_as_a_ray_job(tmp_path, model, tokenizer):
    """Submit a run with `ray job submit` and recipes/runtime_env.yaml: the scripts are uploaded, and the run
    joins the cluster of the job.
    """
    policy, out, bin = (
        write_model(tmp_path / "policy", model, tokenizer),
        tmp_path / "run",
        Path(sys.executable).parent,
    )
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": "1 + 1"}],
            "reward_model": {"ground_truth": "2"},
            "extra_info": {},
        }
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str)\n"
    )
    ports = [free_port() for _ in range(3)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # as for users
    env |= dict(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="token of the test " + "x" * 20,
        PATH=f"{bin}:{os.environ['PATH']}",
    )
    session = tempfile.mkdtemp(prefix="ray_")  # a short path, because it contains sockets
    start = [str(bin / "ray"), "start", "--head", f"--port={ports[0]}", f"--dashboard-port={ports[1]}"]
    start += ["--num-cpus=2", f"--dashboard-agent-listen-port={ports[2]}", f"--temp-dir={session}"]
    start += ["--disable-usage-stats", "--block"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    head = subprocess.Popen(start, env=env, **quiet)
    submit = [
        str(bin / "ray"),
        "job",
        "submit",
        "--address",
        f"http://127.0.0.1:{ports[1]}",
        "--runtime-env",
        "recipes/runtime_env.yaml",
        "--working-dir",
        ".",
        "--",
        "python",
        "grpo_trainer.py",
        "--model",
        policy,
        "--train-file",
        str(tmp_path / "rows.jsonl"),
        "--out-dir",
        str(out),
        "--reward-fn",
        f"{tmp_path}/score.py:compute_score",
        "--total-steps",
        "1",
        "--train-batch-size",
        "2",
        "--mini-batch-size",
        "2",
        "--max-response-length",
        "16",
        "--overlong-buffer",
        "0",
        "--num-workers",
        "1",
    ]
    try:
        end = time.monotonic() + 400
        while (done := subprocess.run(submit, capture_output=True, text=True, env=env, cwd=ROOT)).returncode:
            starting = (
                "No available agent" in done.stderr
                or "Failed to connect" in done.stderr
                or "ConnectionError" in done.stderr
            )
            assert starting and time.monotonic() < end, done.stdout[-2000:] + done.stderr[-2000:]
            if head.poll() is not None:  # Ray does not wait long enough for a busy machine.
                head = subprocess.Popen(start, env=env, **quiet)
            time.sleep(1)
    finally:
        # SIGTERM would start half a minute of draining.
        for process in [
            *psutil.Process(head.pid).children(recursive=True),
            head,
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        shutil.rmtree(session, ignore_errors=True)
    assert "Ray: joined the cluster at" in done.stdout and "succeeded" in done.stdout
    assert (out / "checkpoints" / "step_1" / "model.safetensors").is_file()
