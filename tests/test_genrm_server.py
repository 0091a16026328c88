"""genrm_server.py: quick tests with a stand-in for vLLM (a real HTTP server in real processes), slow ones with vLLM on CPU."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import genrm_server
from genrm_server import Config, ModelServers, RewardModelManager, http, share
from rollout import PolicyServers
from tiny import policy_of

ROOT = Path(__file__).parent.parent

# Found before the real vLLM through PYTHONPATH. Files in the model's folder tell it how to misbehave. Like vLLM it has an
# "engine", a process of its own that would outlive it.
STAND_IN = '''
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
def argument(name): return sys.argv[sys.argv.index(name) + 1]
def told(name): return os.path.exists(os.path.join(argument("--model"), name))
if told("die_at_start"):
    sys.exit("ValueError: these weights do not fit")
engine = subprocess.Popen(["sleep", "1000"])
calls = []
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        calls.append(self.path)
        while self.path == "/health" and told("hang"):
            time.sleep(0.05)
        if self.path == "/slow":
            time.sleep(0.5)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        env = {k: v for k, v in os.environ.items() if k.startswith(("VLLM", "CUDA", "HF_", "OMP"))}
        body = json.dumps({"argv": sys.argv[1:], "env": env, "pids": [os.getpid(), engine.pid], "calls": calls}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *arguments): pass
class Server(ThreadingHTTPServer):
    request_queue_size = 128
Server((argument("--host"), int(argument("--port"))), Handler).serve_forever()
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A model folder, served by the stand-in."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{ROOT}")
    monkeypatch.setattr(genrm_server, "WATCH_EVERY", 0.1)
    monkeypatch.setattr(genrm_server, "HEALTH_TIMEOUT", 0.3)
    monkeypatch.setattr(genrm_server, "RESTART_DELAY", 0.1)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def settings(folder, **changes):
    return Config(**(dict(model=str(folder), port=0, device="cpu", log_dir=folder.parent / "logs") | changes))


@contextmanager
def running(config, **more):
    servers = ModelServers(config, **more)
    try:
        yield servers
    finally:
        servers.shutdown()


def ask(url, path="/args", api_key=""):
    status, text = http("GET", url + path, api_key=api_key, timeout=30)
    assert status == 200, (status, text)
    return json.loads(text)


def router_workers(servers):
    return json.loads(servers.call_router("GET", "/workers")[1])["workers"]


def until(condition, limit=30):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def alive(pid):
    """False for a process that is gone or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def port_is_free(url):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", int(url.rpartition(":")[2])))
            sock.listen()
        except OSError:
            return False
    return True


# ---- what the servers are started with -----------------------------------------------------------------------------------

def test_cores_are_shared_out():
    assert share([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert share([4, 5, 6], 2) == [[4], [5, 6]]
    assert share([7], 3) == [[7], [7], [7]]


def test_cpu_servers(stand_in, monkeypatch):
    monkeypatch.setenv("ROUTER_API_KEY", "s3cret")
    config = settings(stand_in, num_servers=2, cpus="0,1", served_model_name="judge", max_model_len=512,
                      vllm_args=("--max-num-seqs", "7"))
    with running(config) as servers:
        assert http("GET", f"http://{servers.router_address}/workers")[0] == 401  # the key is asked for
        for number, url in enumerate(servers.server_urls):
            seen = ask(url)
            line = " ".join(seen["argv"])
            assert f"--model {stand_in} --host 127.0.0.1" in line and "--served-model-name judge" in line
            assert "--dtype float32 --enforce-eager" in line and "--max-model-len 512" in line and "--runner" not in line
            assert line.endswith("--max-num-seqs 7") and "s3cret" not in line
            env = seen["env"]
            assert env["VLLM_CPU_OMP_THREADS_BIND"] == str(number) and env["OMP_NUM_THREADS"] == "1"
            assert env["VLLM_API_KEY"] == "s3cret" and env["HF_HUB_OFFLINE"] == "1" and "VLLM_SERVER_DEV_MODE" not in env
        assert {ask(f"http://{servers.router_address}", api_key="s3cret")["pids"][0] for _ in range(2)} == \
            {ask(url)["pids"][0] for url in servers.server_urls}


def test_gpu_servers_and_a_classifier(stand_in):
    config = settings(stand_in, num_servers=2, device="cuda", gpus="3,5,6,7", tensor_parallel_size=2, task="classify",
                      sleep_mode=True)
    with running(config) as servers:
        seen = [ask(url) for url in servers.server_urls]
        assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen] == ["3,5", "6,7"]
        assert "--runner pooling" in " ".join(seen[0]["argv"]) and "--enable-sleep-mode" in seen[0]["argv"]
        assert "--dtype auto" in " ".join(seen[0]["argv"]) and seen[0]["env"]["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize("changes, expected", [
    (dict(model="./nowhere"), "--model ./nowhere"), (dict(model="name"), "--model name"),
    (dict(num_servers=0), "--num-servers 0"), (dict(cpus="0;1"), "--cpus 0;1"), (dict(port=-1), "--port -1"),
    (dict(startup_timeout=0), "--startup-timeout"),
    (dict(device="cuda", gpus="0", num_servers=2), "needs 2 GPUs, there are 1")])
def test_bad_settings(stand_in, changes, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        ModelServers(settings(stand_in, **changes))


# ---- life and death --------------------------------------------------------------------------------------------------------

def test_a_killed_server_loses_no_request_and_comes_back(stand_in, capfd):
    with running(settings(stand_in, num_servers=2)) as servers, ThreadPoolExecutor(32) as pool:
        victim = ask(servers.server_urls[0])["pids"]
        asked = [pool.submit(ask, f"http://{servers.router_address}", "/slow") for _ in range(32)]
        until(lambda: sum(worker["in_flight"] for worker in router_workers(servers)) == 32)
        os.kill(victim[0], signal.SIGKILL)
        assert len([one.result() for one in asked]) == 32
        until(lambda: servers.restarts == 1 and all(slot.state == "ready" for slot in servers.slots))
        new = ask(servers.server_urls[0])["pids"]
        assert new != victim and not alive(victim[1])  # its engine was not left behind
        assert {ask(f"http://{servers.router_address}")["pids"][0] for _ in range(4)} == \
            {new[0], ask(servers.server_urls[1])["pids"][0]}
        pids = new  # killed in time, but not waited for: the engine is nobody's child now
    until(lambda: not any(map(alive, pids)) and all(map(port_is_free, servers.server_urls)), limit=5)
    servers.shutdown()  # a second time does nothing
    output = capfd.readouterr().out
    assert "server 0 died; restarting in 0.1 s" in output and output.count("server 0 ready at") == 2


def test_a_hanging_server_is_restarted(stand_in, monkeypatch):
    monkeypatch.setattr(genrm_server, "HANG_SECONDS", 0.5)
    with running(settings(stand_in)) as servers:
        victim = ask(servers.server_urls[0])["pids"]
        (stand_in / "hang").touch()
        until(lambda: servers.slots[0].deaths)
        (stand_in / "hang").unlink()
        assert not any(map(alive, victim))
        until(lambda: servers.slots[0].state == "ready")


def test_a_server_that_keeps_dying_is_given_up_loudly_and_the_other_one_goes_on(stand_in, capfd, monkeypatch):
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 2)
    with running(settings(stand_in, num_servers=2)) as servers:
        (stand_in / "die_at_start").touch()
        os.kill(ask(servers.server_urls[0])["pids"][0], signal.SIGKILL)
        until(lambda: servers.slots[0].state == "given up")
        assert not servers.given_up() and ask(f"http://{servers.router_address}")
        assert len(router_workers(servers)) == 1
        assert re.search(r"GIVING UP on server 0.*\n.*these weights do not fit", capfd.readouterr().out)


def test_a_failing_start_names_the_log_and_its_last_lines(stand_in):
    (stand_in / "die_at_start").touch()
    with pytest.raises(RuntimeError, match=r"(?s)server 0 died while starting.*server_0\.log.*these weights do not fit"):
        ModelServers(settings(stand_in))


def test_a_start_that_takes_too_long(stand_in):
    (stand_in / "hang").touch()
    with pytest.raises(RuntimeError, match=r"not ready after 0\.5 s \(--startup-timeout\)"):
        ModelServers(settings(stand_in, startup_timeout=0.5))


def test_a_killed_router_comes_back_at_its_address_with_its_servers(stand_in):
    with running(settings(stand_in, num_servers=2)) as servers:
        address = servers.router_address
        servers.router_process.child.kill()
        until(lambda: http("GET", f"http://{address}/health")[0] == 200)
        until(lambda: len(router_workers(servers)) == 2)
        assert servers.router_address == address and ask(f"http://{address}")


def test_policy_servers_get_the_weights_at_every_sync_and_after_every_restart(stand_in, tokenizer, monkeypatch):
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    import toy_world

    shape = toy_world.new_model(len(tokenizer), seed=0).config
    shape.tie_word_embeddings = True
    policy = policy_of(LlamaForCausalLM(shape))
    model = policy.model
    servers = PolicyServers(policy, tokenizer, settings(stand_in, num_servers=2, seed=5))
    try:
        for number, url in enumerate(servers.servers.server_urls):
            told = ask(url)
            assert f"--seed {5 + number} " in " ".join(told["argv"]) and told["env"]["VLLM_SERVER_DEV_MODE"] == "1"
            assert not any(call.startswith("/collective_rpc") for call in told["calls"])
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        servers.sync(policy)
        served = load_file(servers.folder / "model.safetensors")
        assert torch.equal(served["lm_head.weight"], model.lm_head.weight) and set(served) == set(model.state_dict())
        assert json.loads((servers.folder / "config.json").read_text())["tie_word_embeddings"] is False
        assert model.config.tie_word_embeddings  # the trainer's own is as it was
        for url in servers.servers.server_urls:
            calls = [call for call in ask(url)["calls"] if call.startswith(("/collective_rpc", "/reset_prefix_cache"))]
            assert calls == ["/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
        os.kill(ask(servers.servers.server_urls[0])["pids"][0], signal.SIGKILL)
        until(lambda: servers.servers.restarts == 1 and len(router_workers(servers.servers)) == 2)
        assert "/collective_rpc" in ask(servers.servers.server_urls[0])["calls"]  # before it joined: weights may have changed
        monkeypatch.setattr(servers.servers, "call_router", lambda *_, **__: (0, "refused"))
        with pytest.raises(RuntimeError, match="policy server router: POST /collective_rpc failed .0.: refused"):
            servers.sync(policy)
    finally:
        monkeypatch.undo()
        servers.shutdown()
    assert not servers.folder.exists()


def test_sleep_and_wake(stand_in, capfd):
    with running(settings(stand_in)) as servers:
        assert [servers.sleep(), servers.wake_up(), servers.sleep()] == [False] * 3  # harmless
        assert capfd.readouterr().out.count("sleep and wake do nothing here: vLLM cannot on CPU") == 1
    with running(settings(stand_in, num_servers=2, device="cuda", gpus="0,1", sleep_mode=True)) as servers:
        assert servers.sleep()
        assert all("/sleep?level=1" in ask(url)["calls"] for url in servers.server_urls)
        os.kill(ask(servers.server_urls[0])["pids"][0], signal.SIGKILL)
        until(lambda: servers.restarts == 1 and servers.slots[0].state == "ready")
        assert "/sleep?level=1" in ask(servers.server_urls[0])["calls"]  # it must not take the trainer's memory
        assert servers.wake_up()
        assert all("/wake_up" in ask(url)["calls"] for url in servers.server_urls)
        assert http("POST", f"http://{servers.router_address}/sleep")[0] == 200  # the same from outside


# ---- the command line --------------------------------------------------------------------------------------------------------

def start_command(model, *arguments):
    return subprocess.Popen([sys.executable, str(ROOT / "genrm_server.py"), "--model", str(model), "--port", "0",
                             "--device", "cpu", "--log-dir", str(model.parent / "logs"), *arguments],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_addresses(process):
    """(router's URL, servers' URLs) once all is ready."""
    urls = []
    for line in process.stdout:
        if found := re.match(r"server \d+ ready at (http://\S+) after \d+ s", line):
            urls.append(found[1])
        if found := re.match(r"router ready at (http://\S+) \((\d+) servers\)", line):
            assert int(found[2]) == len(urls)
            return found[1], urls
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(stand_in, number):
    process = start_command(stand_in, "--num-servers", "2", "--", "--max-num-seqs", "9")
    router, urls = read_addresses(process)
    assert ask(router)["argv"][-2:] == ["--max-num-seqs", "9"]
    pids = descendants(process.pid)
    assert len(pids) == 5  # the router, two servers, their engines
    process.send_signal(number)
    process.wait(30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 0)
    until(lambda: not any(map(alive, pids)) and all(map(port_is_free, [router, *urls])), limit=10)


def test_exit_codes(stand_in):
    process = start_command(stand_in, "--num-servers", "0")
    assert process.communicate(timeout=30)[1] == "error: --num-servers 0: must be at least 1\n" and process.returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_command(stand_in, "--port", str(taken.getsockname()[1]))
        error = process.communicate(timeout=30)[1]
        assert process.returncode == 2 and error.count("\n") == 1 and "cannot listen there" in error
    (stand_in / "die_at_start").touch()
    process = start_command(stand_in)
    assert "these weights do not fit" in process.communicate(timeout=30)[1] and process.returncode == 1


# ---- with the real vLLM --------------------------------------------------------------------------------------------------------

def build_tiny_model(folder, classify=False):
    """A Llama of 2 layers over single bytes, never trained. Head size 32: vLLM's CPU attention has no smaller one."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
                         tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    if classify:
        config.num_labels = 1
    (LlamaForSequenceClassification if classify else LlamaForCausalLM)(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """(process, router's URL, servers' URLs) of two generative servers, and a manager of a classifier; started together."""
    import ray
    folder = tmp_path_factory.mktemp("vllm")
    models = build_tiny_model(folder / "generate"), build_tiny_model(folder / "classify", classify=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_ADDRESS", "local")  # a Ray of its own, though another one may be running
        process = start_command(models[0], "--num-servers", "2", "--served-model-name", "judge")
        try:
            config = Config(model=str(models[1]), task="classify", port=0, device="cpu", log_dir=folder, served_model_name="rm")
            manager = RewardModelManager({"rm": config})
            yield process, *read_addresses(process), manager
            manager.shutdown()
        finally:
            process.kill()
            ray.shutdown()


@pytest.mark.slow
def test_vllm_classifier_in_ray_scores_as_transformers_does(vllm):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    process, router, urls, manager = vllm
    model = manager.models["rm"].config.model
    texts = ["The answer is 4.", "no", "Paragraph one.\n\nParagraph two is longer, and it ends here."]
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        expected = [scorer(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    status, text = http("POST", f"http://{manager.router_address}/classify",
                        {"model": "rm", "input": texts, "use_activation": False}, timeout=60)
    assert status == 200, text
    assert [one["probs"][0] for one in json.loads(text)["data"]] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 1e-3  # else the comparison would say nothing


@pytest.fixture(scope="module")
def one_killed(vllm):
    """The answers to 32 requests, 16 on each server, of which one was killed."""
    process, router, urls, _ = vllm
    body = {"model": "judge", "messages": [{"role": "user", "content": "x"}], "max_tokens": 800, "ignore_eos": True}

    def judge(_):
        return http("POST", f"{router}/v1/chat/completions", body, timeout=300)

    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(judge, i) for i in range(32)]
        until(lambda: [worker["in_flight"] for worker in ask(router, "/workers")["workers"]] == [16, 16])
        victim = next(pid for pid in descendants(process.pid)
                      if urls[0].rpartition(":")[2] in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        os.kill(victim, signal.SIGKILL)
        return [one.result() for one in asked]


@pytest.mark.slow
def test_vllm_two_servers_one_killed_with_32_requests_in_flight(vllm, one_killed):
    process, router, urls, _ = vllm
    assert [status for status, _ in one_killed] == [200] * 32
    assert all(json.loads(text)["usage"]["completion_tokens"] == 800 for _, text in one_killed)
    assert sum(worker["retries"] for worker in ask(router, "/workers")["workers"]) >= 1  # it did hit requests


# ---- in Ray, with the stand-in; meanwhile the killed server restarts ---------------------------------------------------------

DRIVER = """
import sys, time
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
from genrm_server import Config, RewardModelManager
def config(**more): return Config(model=sys.argv[1], port=0, device="cpu", cpus="0,1", log_dir=sys.argv[1] + "/../logs", **more)
for _ in range(2):
    manager = RewardModelManager({"genrm": config(num_servers=2), "rm": config(task="classify")})
    addresses = manager.router_addresses
    print("up", addresses["genrm"], addresses["rm"], manager.router_address, manager.sleep(), flush=True)
    sys.stdin.readline()
    manager.shutdown()
    manager.shutdown()
    print("down", flush=True)
"""


@pytest.mark.slow
def test_named_models_in_ray(stand_in):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(stand_in)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)

    def started():
        """(address of genrm, of rm, the processes of the three servers)"""
        line = next(line for line in driver.stdout if line.startswith("up"))
        _, genrm, rm, first, slept = line.split()
        assert first == genrm and slept == "False"
        return genrm, rm, [ask(f"http://{address}")["pids"] for address in (genrm, genrm, rm)]

    def healthy(address):
        return json.loads(http("GET", f"http://{address}/health")[1])["healthy"]

    try:
        genrm, rm, pids = started()
        assert len({pid for pair in pids for pid in pair}) == 6
        assert "pooling" in ask(f"http://{rm}")["argv"] and "pooling" not in ask(f"http://{genrm}")["argv"]
        os.kill(pids[0][0], signal.SIGKILL)  # a server dies, and the actor of another one: both come back
        os.kill(int(Path(f"/proc/{pids[2][0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        until(lambda: not alive(pids[0][1]) and not alive(pids[2][1]))
        until(lambda: healthy(rm) == 1 and healthy(genrm) == 2)
        pids = [pid for address in (genrm, genrm, rm) for pid in ask(f"http://{address}")["pids"]]
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert next(line for line in driver.stdout if line.startswith("down"))
        until(lambda: not any(map(alive, pids)), limit=5)  # killed in time, but the engines are nobody's children now
        assert http("GET", f"http://{genrm}/health")[0] == 0
        genrm, rm, pids = started()  # and now the driver crashes
        driver.kill()
        until(lambda: not any(alive(pid) for pair in pids for pid in pair), limit=10)
        assert http("GET", f"http://{genrm}/health")[0] == 0
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.slow
def test_vllm_killed_server_comes_back_by_itself_and_nothing_is_left_at_the_end(vllm, one_killed):
    process, router, urls, _ = vllm
    until(lambda: ask(router, "/health")["healthy"] == 2, limit=500)
    assert {worker["url"] for worker in ask(router, "/workers")["workers"]} == set(urls)
    pids = descendants(process.pid)
    process.terminate()
    process.wait(30)
    until(lambda: not any(map(alive, pids)) and all(map(port_is_free, [router, *urls])), limit=10)
