"""genrm_server.py: quick tests with a stand-in for vLLM (a real HTTP server), and slow tests with vLLM on
CPU.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import forked
import genrm_server
import rollout
from cluster import placement
from cluster.placement import RewardModelManager
from genrm_server import (
    Config,
    ModelServers,
    RouterProcess,
    VllmServer,
    request,
    reserve_port,
    resolve_config,
    split_evenly,
)
from played import stand_in_for_vllm
from policy import Sample
from rollout import PolicyServers, rollout_vllm
from router import Config as RouterConfig
from router import SglangGenerate
from test_reward_loop import alive, critic, free_port, until
from test_reward_loop import serve  # noqa: F401  (a fixture)
from tiny import policy_of

ROOT = Path(__file__).parent.parent
CORE = min(os.sched_getaffinity(0))

# PYTHONPATH makes Python find this stand-in before the real vLLM. Files in the model's folder tell it how to
# misbehave. Like vLLM, it has an "engine" (a separate process that could outlive it) and shared memory.
STAND_IN = """
import glob, json, mmap, os, subprocess, sys, time
from _multiprocessing import SemLock
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
def argument(name): return sys.argv[sys.argv.index(name) + 1]
def told(name): return os.path.exists(os.path.join(argument("--model"), name))
if told("die_at_start"):
    sys.exit("ValueError: these weights do not fit")
engine = subprocess.Popen(["sleep", "1000"])
name = os.urandom(8).hex()  # a server that dies by itself leaves its files, and its number comes again
with open(os.path.dirname(__file__) + "/names", "a") as names:  # by which the test removes them
    names.write(name + "\\n")
with open("/dev/shm/psm_" + name, "wb+") as memory:  # what vLLM leaves when it is killed
    memory.truncate(4096)
    mapped = mmap.mmap(memory.fileno(), 4096)
semaphore = SemLock(1, 1, 1, "/mp-" + name, False)  # its file is mapped under another name
open(os.environ["TMPDIR"] + "/socket", "w").close()
def load():  # returns the checksums of a policy server's weights
    sums = {}
    if "weight_sync.WorkerExtension" not in sys.argv:
        return sums
    for path in glob.glob(argument("--model") + "/*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        for weight in header.keys() - {"__metadata__"}:
            start, end = header[weight]["data_offsets"]
            total = sum(memoryview(data[start:end]).cast("H")) % 2**16
            sums[weight + " (torch.float32)"] = [(end - start) // 4, 1, total]
    return sums
calls, held = [], load()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        global held
        given, key = self.headers.get("Authorization"), os.environ["VLLM_API_KEY"]
        if self.path != "/health" and given != "Bearer " + key:
            return self.answer(401, {"error": "no key"})
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = self.path == "/collective_rpc" and body and json.loads(body)["method"]
        calls.append(f"{self.path} {method}" if method else self.path)
        if told(die := "die_of" + self.path.partition("?")[0].replace("/", "_")):
            try:
                os.unlink(os.path.join(argument("--model"), die))  # one server, once
                os._exit(1)
            except FileNotFoundError:
                pass
        if told("loses_spaces") and self.path == "/tokenize":
            return self.answer(200, {"tokens": [5, 6]})
        if told("loses_spaces") and self.path == "/detokenize":
            return self.answer(200, {"prompt": "Is3+4=7?Yes,itis."})
        if told("refuse" + self.path.partition("?")[0].replace("/", "_")):
            return self.answer(400, {"error": "will not"})
        while self.path == "/health" and told("hang"):
            time.sleep(0.05)
        while self.path == "/v1/slow" and (told("slow") or told(f"slow_{os.getpid()}")):
            time.sleep(0.05)
        if method == "reload_weights" and not told("lose_reload"):
            held = load()
        told_of = ("VLLM", "CUDA", "HF_", "OMP", "PYTHON", "TMPDIR", "TORCH")
        env = {k: v for k, v in os.environ.items() if k.startswith(told_of)}
        pids = [os.getpid(), engine.pid]
        cores = sorted(os.sched_getaffinity(0))
        seen = {"argv": sys.argv[1:], "env": env, "pids": pids, "calls": calls, "cores": cores, "name": name}
        if method == "weight_sums":
            seen = {"results": [held]}
        self.answer(200, seen)
    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *arguments): pass
class Server(ThreadingHTTPServer):
    request_queue_size = 128
Server((argument("--host"), int(argument("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a model folder that the stand-in serves."""
    monkeypatch.setenv("PYTHONPATH", stand_in_for_vllm(tmp_path / "path", STAND_IN))
    monkeypatch.setattr(genrm_server, "WATCH_EVERY", 0.1)
    monkeypatch.setattr(genrm_server, "HEALTH_TIMEOUT", 0.3)
    monkeypatch.setattr(genrm_server, "RESTART_DELAY", 0.1)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    yield model
    for names in tmp_path.glob("path/vllm/entrypoints/openai/names"):
        for name in names.read_text().split():
            for kind in ("psm_", "sem.mp-"):
                Path("/dev/shm", kind + name).unlink(missing_ok=True)


def settings(folder, **changes):
    return Config(**(dict(model=str(folder), port=0, device="cpu", log_dir=folder.parent / "logs") | changes))


@contextmanager
def running(config, **more):
    servers = ModelServers(config, **more)
    try:
        yield servers
    finally:
        servers.shutdown()


def test_a_server_whose_tokenizer_loses_spaces_does_not_join(stand_in):
    (stand_in / "loses_spaces").touch()
    reads = "reads 'Is 3 + 4 = 7? Yes, it is.' as 'Is3+4=7?Yes,itis.'; set \"tokenizer_class\" to"
    with pytest.raises(RuntimeError, match=re.escape(reads)):
        ModelServers(settings(stand_in))


@contextmanager
def serving(servers):
    try:
        yield servers
    finally:
        servers.shutdown()


def ask(url, path="/v1/args", api_key=""):
    """Return what the stand-in reports about itself. `url` is the router's, or a server's with its key."""
    status, text = request("GET", url + path, api_key=api_key, timeout=30)
    assert status == 200, (status, text)
    return json.loads(text)


def told(servers, number=0):
    """Return what one of the servers reports about itself, without the router."""
    return ask(servers.slots[number].url, api_key=servers.config.server_key)


def restarts_of(servers):
    return sum(slot.restarts for slot in servers.slots)


def router_workers(servers):
    url, key = servers.router.url + "/workers", servers.config.server_key
    status, text = request("GET", url, api_key=key, timeout=30)
    return json.loads(text)["workers"] if status == 200 else []  # the router may be restarting


def descendants(process):
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def port_is_free(url):
    try:
        with reserve_port("127.0.0.1", int(url.rpartition(":")[2])) as sock:
            sock.listen()
    except OSError:
        return False
    return True


# ---- what the servers are started with -----------------------------------------------------------


@pytest.mark.parametrize(
    "said, status, text",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff!", 200, "\ufffd!"),
        (b"HTTP/1.1 503 No\r\n\r\nnot yet", 503, "not yet"),  # until the connection ends
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", 0, "IncompleteRead: "),
        (b"SSH-2.0\r\n", 0, "BadStatusLine: "),
        (b"", 0, "RemoteDisconnected: "),
        (None, 0, "TimeoutError: "),
    ],
)
def test_a_small_request_has_a_status_or_says_why_not(said, status, text, monkeypatch):
    """Test various servers. Proxies in the environment must not be used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    asked = []

    def answer():
        with listener.accept()[0] as connection:
            asked.append(connection.recv(1000))
            while not asked[0].endswith(b"}"):  # head and body may arrive separately
                asked[0] += connection.recv(1000)
            if said is None:
                asked.append(connection.recv(1000))  # until the other side closes the connection
            else:
                connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/sleep?level=1"
        found = request("POST", url, {"a": 1}, "key", timeout=30.0 if said else 1.0)
        thread.join(10)
    assert found[0] == status and found[1].startswith(text), found
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /sleep?level=1 HTTP/1.1\r\n") and b"Bearer key" in head
    assert body == b'{"a": 1}' and asked[1:] in ([], [b""])
    assert request("GET", url)[0] == 0  # nothing is listening any more


def test_a_control_call_is_made_to_all_servers_at_once(monkeypatch):
    """This includes many servers, because a run waits while their weights are replaced."""
    servers = object.__new__(ModelServers)
    servers.slots = [genrm_server.ServerSlot(f"server {i}", None, Path(), joined=1) for i in range(100)]
    together = threading.Barrier(100)
    monkeypatch.setattr(ModelServers, "post_control", lambda self, slot, path, body: together.wait(20))
    servers.post_control_all("/collective_rpc")


def test_sleep_waits_as_long_as_a_request_may_run(monkeypatch):
    servers = object.__new__(ModelServers)
    servers.config = SimpleNamespace(server_key="key")
    servers.slots = [genrm_server.ServerSlot("server 0", None, Path(), "http://127.0.0.1:1", joined=1)]
    limits = {}

    def time_out(method, url, body=None, api_key="", timeout=5.0):
        limits[url] = timeout
        return (200, "") if url.endswith("/health") else (0, "TimeoutError: timed out")

    monkeypatch.setattr(genrm_server, "request", time_out)
    with pytest.raises(
        RuntimeError, match=r"server 0: POST /sleep.*failed \(time limit: \d{4} s\): .*timed out"
    ):
        servers.post_control_all(genrm_server.SLEEP)
    assert limits["http://127.0.0.1:1" + genrm_server.SLEEP] > RouterConfig.request_timeout


def test_a_reset_that_fails_in_a_response_with_status_200_is_an_error(monkeypatch):
    """vLLM reports in this way that a store of keys and values still has those of the old weights."""
    servers = object.__new__(ModelServers)
    servers.config = SimpleNamespace(server_key="key")
    servers.slots = [genrm_server.ServerSlot("server 0", None, Path(), "http://127.0.0.1:1", joined=1)]
    monkeypatch.setattr(genrm_server, "request", lambda *arguments: (200, '{"success":false}'))
    with pytest.raises(RuntimeError, match=r"server 0: POST /reset_prefix_cache\?.*failed .*success"):
        servers.post_control_all(*rollout.RELOAD[1])


def test_cores_are_shared_out():
    assert split_evenly([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert split_evenly([4, 5, 6], 2) == [[4], [5, 6]]
    assert split_evenly([7], 3) == [[7], [7], [7]]


def test_a_key_with_white_space_is_rejected_without_being_shown(stand_in, monkeypatch):
    monkeypatch.setenv("ROUTER_API_KEY", "old\ns3cret")  # a key file with two lines
    with pytest.raises(ValueError, match="ROUTER_API_KEY .*white space") as error:
        ModelServers(settings(stand_in))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "key, problem", [("s3cret new", "white space"), ("s3cret\u00e9", "ASCII"), ("s3cret,new", "one key")]
)
def test_a_servers_key_that_no_server_accepts_is_rejected_without_being_shown(stand_in, key, problem):
    with pytest.raises(ValueError, match=f"ROUTER_SERVER_KEY or its flag: .*{problem}") as error:
        resolve_config(settings(stand_in, server_key=key))
    assert "s3cret" not in str(error.value)
    assert resolve_config(settings(stand_in, server_key="s3cret\n")).server_key == "s3cret"


def test_a_server_that_the_router_rejects_ends_the_start(stand_in, monkeypatch, capfd):
    def with_another_key(config):
        return RouterProcess(replace(config, server_key="another"))

    monkeypatch.setattr(genrm_server, "RouterProcess", with_another_key)
    monkeypatch.setattr(genrm_server, "HEALTH_TIMEOUT", 30.0)
    servers = ModelServers(settings(stand_in), wait=False)
    until(lambda: "router rejected server 0 (status 401: " in capfd.readouterr().out)
    time.sleep(0.5)
    assert "rejected" not in capfd.readouterr().out  # It is said once.
    servers.config.startup_timeout = 0.5
    with pytest.raises(RuntimeError, match=r"server 0 did not join the router within 0\.5 s; the last lines"):
        servers.wait_ready()


def test_joining_waits_longer_than_the_router_checks_health(stand_in, monkeypatch):
    limits = []

    def note_limit(method, url, body=None, api_key="", timeout=5.0):
        if method == "POST" and url.endswith("/workers"):
            limits.append(timeout)
        return request(method, url, body, api_key, timeout)

    monkeypatch.setattr(genrm_server, "request", note_limit)
    with running(settings(stand_in)):
        pass
    assert min(limits) > RouterConfig.health_timeout


def test_cpu_servers(stand_in, monkeypatch):
    monkeypatch.setenv("ROUTER_API_KEY", "old,s3cret\n")  # as in a key file; the servers get the new one
    allowed = os.sched_getaffinity(0)
    cores = [min(allowed), max(allowed)]
    config = settings(
        stand_in,
        num_servers=2,
        cpus=",".join(map(str, cores)),
        served_model_name="judge",
        max_model_len=512,
        vllm_args=("--max-num-seqs", "7"),
    )
    with running(config) as servers:
        assert request("GET", f"http://{servers.router_address}/workers")[0] == 401  # the key is required
        assert "least_loaded" in psutil.Process(servers.router.server.child.pid).cmdline()
        for number in range(2):
            seen = told(servers, number)
            line = " ".join(seen["argv"])
            assert f"--model {stand_in} --host 127.0.0.1" in line and "--served-model-name judge" in line
            assert (
                "--dtype float32 --enforce-eager" in line
                and "--max-model-len 512" in line
                and "--runner" not in line
            )
            assert line.endswith("--max-num-seqs 7") and "s3cret" not in line
            env = seen["env"]
            assert env["VLLM_CPU_OMP_THREADS_BIND"] == str(cores[number]) and env["OMP_NUM_THREADS"] == "1"
            assert seen["cores"] == [cores[number]] and env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            assert env["TORCH_COMPILE_DISABLE"] == "1"
            assert (
                env["VLLM_API_KEY"] == "s3cret"
                and env["HF_HUB_OFFLINE"] == "1"
                and "VLLM_SERVER_DEV_MODE" not in env
            )
        router = f"http://{servers.router_address}"
        assert {ask(router, api_key=key)["pids"][0] for key in ("old", "s3cret")} == {
            told(servers, number)["pids"][0] for number in range(2)
        }


def test_the_router_gets_the_arguments_that_its_errors_name(stand_in):
    with running(settings(stand_in)) as servers:
        status, text = request("GET", f"http://{servers.router_address}/other")
        assert status == 404 and "--forward of router.py (genrm_server.py: in --router-args" in text
    with running(settings(stand_in, router_args="--forward /v1 /other")) as servers:
        assert ask(f"http://{servers.router_address}", "/other")["calls"]
    for args, flag in (("--port=1", "--port"), ("--max_attempts 1 --server_key hush", "--server-key")):
        with pytest.raises(ValueError, match=f"--router-args {flag}: pass {flag} to genrm_server.py itself"):
            settings(stand_in, router_args=args).check()
    for args, message in (
        ("--max-attempts 0", "--router-args: --max-attempts 0: must be above 0 and finite"),
        ("--forward v1", "--router-args: --forward v1: must start with /"),
        ("--no-such-flag 1", "--router-args: router.py does not accept them; see python router.py --help"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            settings(stand_in, router_args=args).check()


@pytest.mark.slow
def test_servers_that_share_a_gpu(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with running(settings(stand_in, num_servers=3, device="cuda", gpu_share=0.4)) as servers:
        seen = [told(servers, number) for number in range(3)]
        assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen] == ["4", "4", "5"]
        assert all("--gpu-memory-utilization 0.4" in " ".join(one["argv"]) for one in seen)
    given = ("--gpu-memory-utilization", "0.2")
    with running(settings(stand_in, device="cuda", gpu_share=0.4, vllm_args=given)) as servers:
        assert told(servers)["argv"][-2:] == ["--gpu-memory-utilization", "0.2"]  # vLLM uses the last one


def test_a_gpu_that_torch_cannot_use_is_not_passed_over(stand_in, monkeypatch):
    """The CPU is chosen if PyTorch is a build for CPUs, or if CUDA_VISIBLE_DEVICES is empty."""
    program = stand_in.parent / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    assert resolve_config(settings(stand_in, device="auto")).device == "cpu"
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert resolve_config(settings(stand_in, device="auto")).device == "cpu"
    monkeypatch.setattr("torch.version.cuda", "13.0")
    remedies = "install a vLLM version for this GPU driver .*, or requirements-cpu.txt in another environment"
    with pytest.raises(ValueError, match=f"nvidia-smi shows a GPU that torch .* cannot use; {remedies}"):
        resolve_config(settings(stand_in, device="auto"))
    assert resolve_config(settings(stand_in)).device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_config(settings(stand_in, device="auto")).device == "cpu"


def test_a_build_of_vllm_for_gpus_serves_nothing_on_a_cpu(stand_in, monkeypatch):
    """It would use a GPU regardless of --device."""
    monkeypatch.setattr("importlib.metadata.version", {"vllm": "0.32.0"}.get)
    remedies = "pass --device cuda, or install requirements-cpu.txt in another environment"
    with pytest.raises(ValueError, match=f"--device cpu: vLLM 0.32.0 runs only on GPUs; {remedies}"):
        ModelServers(settings(stand_in))
    with pytest.raises(ValueError, match="runs only on GPUs; pass --rollout hf or --device cuda, or install"):
        settings(stand_in, flag_prefix="rollout-").check()
    with pytest.raises(
        ValueError, match="^vLLM 0.32.0 runs only on GPUs, but PyTorch finds none; make one vis"
    ):
        resolve_config(settings(stand_in, device="auto"))
    assert resolve_config(settings(stand_in, device="cuda")).device == "cuda"
    monkeypatch.setattr("importlib.metadata.version", {"vllm": "0.32.0+cpu"}.get)
    assert resolve_config(settings(stand_in)).device == "cpu"


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(model="./nowhere"), "--model ./nowhere"),
        (dict(model="name"), "--model name"),
        (dict(num_servers=0), "--num-servers 0"),
        (dict(cpus="0;1"), "--cpus 0;1: CPU core 0;1 is not available"),
        (
            dict(cpus=f"{CORE},4099"),
            f"--cpus {CORE},4099: CPU core 4099 is not available; choose from {CORE}",
        ),
        (dict(cpus="4099", flag_prefix="rollout-"), "--rollout-cpus 4099: CPU core 4099 is not available"),
        (dict(port=-1), "--port -1"),
        (dict(queue_timeout=-1.0), "--queue-timeout -1.0: must be at least 0"),
        (dict(startup_timeout=float("nan")), "--startup-timeout nan: must be at least 0"),
        (
            dict(device="cuda", num_servers=2),
            "--num-servers 2: not enough GPUs (visible: 7); pass a lower number",
        ),
        (dict(gpu_share=0.5, tensor_parallel_size=2), "--gpu-share 0.5: a server with several GPUs"),
        (dict(gpu_share=0), "--gpu-share 0: must be above 0 and at most 1"),
        (dict(gpu_share=1.5), "--gpu-share 1.5: must be"),
    ],
)
def test_bad_settings(stand_in, changes, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ValueError, match=re.escape(expected)):
        ModelServers(settings(stand_in, **changes))


def test_the_folder_of_a_run_is_no_model(tmp_path):
    for name in ("config.json", "starts.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"--model .*must be a folder .*of a run: checkpoints/step_N"):
        Config(str(tmp_path)).check()


# ---- deaths and restarts


@pytest.mark.slow
def test_a_killed_server_loses_no_request_and_comes_back(stand_in, capfd):
    with running(settings(stand_in, num_servers=2)) as servers, ThreadPoolExecutor(32) as pool:
        victim = told(servers)["pids"]
        (stand_in / "slow").touch()
        asked = [pool.submit(ask, f"http://{servers.router_address}", "/v1/slow") for _ in range(32)]
        until(lambda: sum(worker["in_flight"] for worker in router_workers(servers)) == 32)
        os.kill(victim[0], signal.SIGKILL)
        (stand_in / "slow").unlink()
        assert len([one.result() for one in asked]) == 32
        until(lambda: restarts_of(servers) == 1 and all(slot.joined for slot in servers.slots))
        new = told(servers)["pids"]
        assert new != victim and not alive(victim[1])  # its engine was not left behind
        assert {ask(f"http://{servers.router_address}")["pids"][0] for _ in range(4)} == {
            new[0],
            told(servers, 1)["pids"][0],
        }
        pids = new  # killed in time but not waited for: the engine is an orphan now
    until(lambda: not any(map(alive, pids)) and all(port_is_free(slot.url) for slot in servers.slots))
    servers.shutdown()  # a second call does nothing
    output = capfd.readouterr().out
    assert "server 0 died; restarting in 0.1 s" in output and output.count("server 0 ready at") == 2


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_given_up_loudly_and_the_other_one_goes_on(stand_in, capfd, monkeypatch):
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 2)
    with running(settings(stand_in, num_servers=2)) as servers:
        (stand_in / "die_at_start").touch()
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: servers.slots[0].given_up)
        servers.check()
        assert ask(f"http://{servers.router_address}")
        until(lambda: len(router_workers(servers)) == 1)
        assert re.search(r"GIVING UP: server 0 died.*\n.*these weights do not fit", capfd.readouterr().out)


@pytest.mark.slow
def test_a_server_that_would_load_other_files_does_not_join(stand_in, capfd):
    """The next judge has been trained into the same folder when one of two servers restarts."""
    weights = stand_in / "model.safetensors"
    weights.write_text("1st judge")
    with running(settings(stand_in, num_servers=2)) as servers:
        first, second = servers.slots
        (stand_in / "notes.log").touch()  # not a file of the model
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers) == 1 and first.joined)
        before = weights.stat()
        weights.write_text("2nd judge")  # of the same size
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: first.given_up)
        servers.check()
        until(lambda: [worker["url"] for worker in router_workers(servers)] == [second.url])
        output = capfd.readouterr().out
        assert "GIVING UP: server 0 would serve another model than the first servers did: " in output
        assert f"{stand_in}: model.safetensors has changed; write another model to " in output
        shutil.rmtree(stand_in)
        os.kill(told(servers, 1)["pids"][0], signal.SIGKILL)
        until(lambda: second.given_up)
        assert "server 1 would serve another model" in second.given_up
        assert f"{stand_in}: the folder has no files of a model" in second.given_up
        with pytest.raises(RuntimeError, match="server 0 would serve .* start again to serve the new files$"):
            servers.check()


def test_files_that_change_while_they_are_loaded_are_noticed(stand_in):
    (stand_in / "hang").touch()
    with running(settings(stand_in), wait=False) as servers:
        (slot,) = servers.slots
        until(lambda: slot.server.alive())
        (stand_in / "tokenizer.json").write_text("{}")
        (stand_in / "hang").unlink()
        with pytest.raises(RuntimeError, match="server 0 would serve .*: tokenizer.json is new; "):
            servers.wait_ready()


@pytest.mark.slow
def test_a_link_that_is_changed_does_not_change_the_model(stand_in):
    link = stand_in.parent / "latest"
    link.symlink_to(stand_in)
    with running(settings(link)) as servers:
        link.unlink()
        link.symlink_to(shutil.copytree(stand_in, stand_in.parent / "next"))
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers) == 1 and servers.slots[0].joined)
        told_now = told(servers)["argv"]
        assert told_now[told_now.index("--model") + 1] == str(stand_in)
        assert told_now[told_now.index("--served-model-name") + 1] == str(link)


@pytest.mark.parametrize(
    ("now", "sizes_only", "difference"),
    [
        ({"config.json": [2, 10], "a.safetensors": [4, 10]}, False, ""),
        ({"config.json": [2, 11], "a.safetensors": [4, 11]}, True, ""),
        ({"config.json": [2, 11], "a.safetensors": [4, 11]}, False, "a.safetensors has changed"),
        ({"config.json": [3, 10], "a.safetensors": [4, 10]}, True, "config.json has changed"),
        ({"config.json": [2, 10]}, True, "a.safetensors is missing"),
        ({}, True, "the folder has no files of a model"),
    ],
)
def test_copies_on_two_nodes_may_differ_in_times_only(now, sizes_only, difference):
    before = {"config.json": [2, 10], "a.safetensors": [4, 10]}
    assert genrm_server.changed_file(before, now, sizes_only) == difference


@pytest.mark.slow
def test_servers_on_two_nodes_have_the_same_files(stand_in):
    """Played: the second server finds a copy on its node, with other times and later with another size."""
    with running(settings(stand_in, num_servers=2)) as servers:
        slot = servers.slots[1]
        config_file = {"config.json": [2, 1]}
        slot.server.model_files = lambda: ("10.0.0.2", dict(config_file))
        os.kill(told(servers, 1)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers) == 1 and slot.joined)
        slot.server.model_files = lambda: ("10.0.0.3", {"config.json": [3, 1]})
        os.kill(told(servers, 1)["pids"][0], signal.SIGKILL)
        until(lambda: slot.given_up)
        expected = ": on 10.0.0.3, compared with the node of the first server, config.json has changed; "
        assert expected in slot.given_up


@pytest.mark.slow
def test_deaths_and_hangs_of_a_server_that_was_ready_do_not_add_up(stand_in, monkeypatch):
    """For example, a sample may kill the engine each time it is sent."""
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 2)
    with running(settings(stand_in)) as servers:
        (slot,) = servers.slots
        for number in range(1, 4):
            os.kill(told(servers)["pids"][0], signal.SIGKILL)
            until(lambda: restarts_of(servers) == number and slot.joined)
        victim = told(servers)["pids"]
        monkeypatch.setattr(genrm_server, "HANG_SECONDS", 0.5)
        (stand_in / "hang").touch()
        until(lambda: not any(map(alive, victim)))
        monkeypatch.setattr(genrm_server, "HANG_SECONDS", 180.0)
        (stand_in / "hang").unlink()
        until(lambda: slot.joined)
        servers.check()


@pytest.mark.slow
def test_what_was_waited_for_however_long_is_no_death(stand_in, monkeypatch):
    """Examples are a disk that was full for days, and a judge that could not start next to the trainer.

    Afterwards, a server may die as often as any other before the service gives up on it.
    """
    with running(settings(stand_in)) as servers:
        (slot,) = servers.slots
        logs = servers.config.log_dir
        shutil.rmtree(logs)
        logs.touch()  # now no log can be written
        monkeypatch.setattr(genrm_server, "RESTART_DELAY", 0.0)
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: slot.restarts > 1100)  # in practice at intervals of a minute
        (stand_in / "die_at_start").touch()
        logs.unlink()
        until(lambda: slot.log.is_file() and "do not fit" in slot.log.read_text())
        (stand_in / "die_at_start").unlink()
        until(lambda: slot.joined or slot.given_up)
        assert slot.joined, slot.given_up


def test_a_failing_start_names_the_log_and_its_last_lines(stand_in):
    (stand_in / "die_at_start").touch()
    with pytest.raises(
        RuntimeError, match=r"(?s)server 0 died; the last lines of .*server_0\.log.*these weights do not fit"
    ):
        ModelServers(settings(stand_in))


def test_the_first_error_is_shown_although_the_last_one_is_far_below(stand_in):
    """The log has the form of vLLM's, whose API server fails after the engine's process has."""
    mark = "(EngineCore pid=7) ERROR 11-28 05:10:48 [core.py:1510] "
    cause = mark + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"
    log = ["INFO 11-28 05:10:31 [core.py:133] (max_error=1, on_error: Exception)", mark + "Traceback", cause]
    log += [f'  File "utils.py", line {number}, in launch' for number in range(60)]
    log.append("RuntimeError: Engine core initialization failed. See root cause above.")
    stand_in.joinpath("said.txt").write_text("\n".join(log))
    code = "import sys; from pathlib import Path; print(Path(sys.argv[1]).read_text())"
    command = [sys.executable, "-c", code, f"{stand_in}/said.txt"]
    child = genrm_server.Process(stand_in / "log", command, dict(os.environ))
    child.start()
    child.child.wait()
    first, dots, *last = child.failure_lines().splitlines()
    assert (first, dots) == (cause, "[...]") and last == log[-25:]
    stand_in.joinpath("said.txt").write_text("\n".join(log[:5]))
    child.start()
    child.child.wait()
    assert child.failure_lines().splitlines() == log[:5]
    child.stop()


def test_a_start_names_the_logs_before_a_server_is_ready(stand_in, capfd):
    (stand_in / "hang").touch()
    config = settings(stand_in, num_servers=2)
    with running(config, name="genrm", wait=False):
        said = capfd.readouterr().out
        assert f"[genrm] servers are starting (2); their logs are in {config.log_dir}" in said


def test_a_start_that_takes_too_long(stand_in):
    (stand_in / "hang").touch()
    with pytest.raises(RuntimeError, match=r"not ready after \d+\.\d s; raise --startup-timeout"):
        ModelServers(settings(stand_in, startup_timeout=0.5))
    with pytest.raises(RuntimeError, match=r"not ready after \d+\.\d s; the last"):  # no flag to recommend
        ModelServers(settings(stand_in, startup_timeout=0.5, flag_prefix="genrm-"))


@pytest.mark.slow
def test_a_server_is_not_in_the_router_before_it_joins_again(stand_in, monkeypatch):
    """This holds although the router has missed that the server left."""
    lost, found, services = [], [], []

    def lose(method, url, *args, **more):
        if method == "DELETE" and not lost:
            lost.append(url)
            return 0, "TimeoutError: timed out"
        return request(method, url, *args, **more)

    def before_joining(slot):
        found.extend(map(router_workers, services))

    with running(settings(stand_in), before_joining=before_joining) as servers:
        monkeypatch.setattr(genrm_server, "request", lose)
        services.append(servers)
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers) == 1 and servers.slots[0].joined)
    assert lost and found == [[]]


@pytest.mark.slow
def test_a_killed_router_comes_back_at_its_address_with_its_servers(stand_in):
    with running(settings(stand_in, num_servers=2)) as servers:
        address = servers.router_address
        servers.router.server.child.kill()
        until(lambda: request("GET", f"http://{address}/health")[0] == 200)
        until(lambda: len(router_workers(servers)) == 2)
        assert servers.router_address == address and ask(f"http://{address}")


@pytest.fixture
def four_on_two_gpus(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    return settings(stand_in, num_servers=4, device="cuda", gpu_share=0.4)


@pytest.mark.slow
def test_servers_that_share_a_gpu_start_one_after_the_other(four_on_two_gpus):
    """This also holds after deaths.

    vLLM computes its memory use from the free memory before and after its start.
    """
    starting, at_once = set(), []

    def gpu_of(slot):
        return slot.server.env["CUDA_VISIBLE_DEVICES"]

    def before_starting(slot):
        at_once.extend(other for other in starting if gpu_of(other) == gpu_of(slot))
        starting.add(slot)

    def before_joining(slot):
        time.sleep(0.2)
        starting.discard(slot)

    hooks = dict(before_starting=before_starting, before_joining=before_joining)
    with running(four_on_two_gpus, **hooks) as servers:
        assert not at_once
        for number in (0, 1):
            os.kill(told(servers, number)["pids"][0], signal.SIGKILL)
        until(lambda: [slot.restarts for slot in servers.slots] == [1, 1, 0, 0])
        until(lambda: all(slot.joined for slot in servers.slots))
        assert not at_once


@pytest.mark.slow
def test_servers_that_share_no_gpu_start_together(four_on_two_gpus):
    started = []

    def wait_for_the_other_gpus(slot):
        until(lambda: {"server 0", "server 1"} & set(started) and {"server 2", "server 3"} & set(started))

    def before_starting(slot):
        started.append(slot.name)

    hooks = dict(before_starting=before_starting, before_joining=wait_for_the_other_gpus)
    with running(four_on_two_gpus, **hooks):
        assert len(started) == 4


@pytest.mark.slow
def test_a_server_whose_engine_hangs_behind_a_good_health_is_restarted(stand_in, capfd):
    with running(settings(stand_in, num_servers=2, api_key="k")) as servers:
        victim = told(servers, 1)["pids"][0]
        (stand_in / f"slow_{victim}").touch()
        statuses = []

        def is_restarted():
            url = f"http://{servers.router_address}/v1/slow"
            statuses.append(request("GET", url, api_key="k", timeout=1.0)[0])
            return servers.slots[1].restarts

        until(is_restarted)
        assert statuses.count(0) >= 3 and set(statuses) == {0, 200}
        until(lambda: all(slot.joined for slot in servers.slots))
        assert [slot.restarts for slot in servers.slots] == [0, 1]
        assert told(servers, 1)["pids"][0] != victim
        said = "server 1 hangs: its engine answers no requests (see the router's log); restarting"
        assert said in capfd.readouterr().out and "hangs: 3 requests" in servers.router.log.read_text()


@pytest.mark.slow
def test_a_router_that_hangs_is_restarted(stand_in, monkeypatch, capfd):
    port, missed = free_port(), []

    def late(method, url, *args, **more):
        if url == f"http://127.0.0.1:{port}/health" and len(missed) < 6:  # as if no core were free
            return missed.append(url) or (0, "timed out")
        if url.endswith("/health") and f":{port}/" not in url:  # Only the router hangs.
            more["timeout"] = 30.0
        return request(method, url, *args, **more)

    monkeypatch.setattr(genrm_server, "request", late)
    with running(settings(stand_in, num_servers=2, port=port)) as servers:
        hanging = servers.router.server.child.pid
        os.kill(hanging, signal.SIGSTOP)
        monkeypatch.setattr(genrm_server, "HANG_SECONDS", 1.0)
        until(lambda: not alive(hanging))
        monkeypatch.setattr(genrm_server, "HANG_SECONDS", 30.0)
        until(
            lambda: (
                all(worker["healthy"] for worker in router_workers(servers))
                and len(router_workers(servers)) == 2
            )
        )
        assert ask(f"http://{servers.router_address}") and restarts_of(servers) == 0
        assert "router hangs: /health has not responded for" in capfd.readouterr().out


@pytest.mark.slow
def test_a_foreign_program_on_the_routers_port_stops_nothing_but_the_router(stand_in, capfd, monkeypatch):
    with running(settings(stand_in, num_servers=2)) as servers:
        host, _, port = servers.router_address.partition(":")
        monkeypatch.setattr(genrm_server, "RESTART_DELAY", 3.0)  # the other program gets the port first
        child = servers.router.server.child
        child.kill()
        child.wait()
        with socket.create_server((host, int(port)), backlog=0):  # it does not respond either
            monkeypatch.setattr(genrm_server, "RESTART_DELAY", 0.1)
            os.kill(told(servers)["pids"][0], signal.SIGKILL)
            until(lambda: restarts_of(servers) == 1)
            until(lambda: servers.slots[0].url and request("GET", servers.slots[0].url + "/health")[0] == 200)
            until(
                lambda: (
                    "router died" in capfd.readouterr().out
                    and "address already in use" in servers.router.log.read_text()
                )
            )
        until(lambda: request("GET", f"http://{servers.router_address}/health")[0] == 200)
        until(lambda: len(router_workers(servers)) == 2)
        assert ask(f"http://{servers.router_address}")


@pytest.mark.slow
def test_a_foreign_program_on_the_port_of_a_dead_server_is_not_taken_for_it(stand_in, serve, monkeypatch):
    with running(settings(stand_in)) as servers:
        monkeypatch.setattr(genrm_server, "WATCH_EVERY", 2.0)  # the other program gets the port first
        time.sleep(0.2)
        pid, port = told(servers)["pids"][0], int(servers.slots[0].url.rpartition(":")[2])
        os.kill(pid, signal.SIGKILL)
        until(lambda: port_is_free(servers.slots[0].url))
        other = serve(critic, port)
        until(lambda: restarts_of(servers))
        other.stop()
        until(lambda: servers.slots[0].joined and ask(f"http://{servers.router_address}"))


def test_a_server_of_another_user_does_not_join(stand_in, monkeypatch):
    """The other user has taken the port while the server was loading, and would get its key."""
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with running(settings(stand_in), wait=False) as servers:
        slot = servers.slots[0]
        until(lambda: slot.url and request("GET", slot.url + "/health")[0] == 200)
        time.sleep(1)
        assert not slot.joined and set(told(servers)["calls"]) == {"/health", "/v1/args"}
        assert not servers.router.ready
        monkeypatch.setattr(os, "getuid", lambda: own)
        servers.wait_ready()


@pytest.mark.slow
def test_a_deleted_log_folder_stops_nothing(stand_in, capfd, monkeypatch):
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 2)
    with running(settings(stand_in, num_servers=2)) as servers:
        logs = servers.config.log_dir
        shutil.rmtree(logs)
        victims = told(servers)["pids"][0], servers.router.server.child.pid
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        until(
            lambda: (
                restarts_of(servers) == 1
                and all(slot.joined == servers.router.restarts + 1 == 2 for slot in servers.slots)
            )
        )
        assert (logs / "server_0.log").is_file() and (logs / "router.log").is_file()
        shutil.rmtree(logs)
        logs.touch()  # now no log can be written, which does not count as a death of the server
        os.kill(told(servers, 1)["pids"][0], signal.SIGKILL)
        until(lambda: servers.slots[1].restarts >= 3)
        assert not servers.slots[1].given_up and "server 1 failed (FileExistsError" in capfd.readouterr().out
        logs.unlink()
        until(lambda: servers.slots[1].joined)


@pytest.mark.slow
def test_the_servers_have_a_key_that_nobody_sees(stand_in):
    with running(settings(stand_in)) as servers:
        key = servers.config.server_key
        assert len(key) > 30 and not servers.config.api_key and key not in repr(servers.config)
        assert request("GET", servers.slots[0].url + "/health")[0] == 200
        assert request("GET", servers.slots[0].url + "/v1/args")[0] == 401
        # The router has the key; its clients need none.
        assert request("GET", f"http://{servers.router_address}/v1/args")[0] == 200
        url = f"http://{servers.router_address}/workers"
        assert request("POST", url, {"url": "http://127.0.0.1:1"})[0] == 401
        seen = told(servers)
        middleware = [
            name for option, name in zip(seen["argv"], seen["argv"][1:]) if option == "--middleware"
        ]
        assert middleware[-1] == "genrm_server.KeyGuard"  # vLLM calls the last one first
        assert str(ROOT) in seen["env"]["PYTHONPATH"].split(os.pathsep)
        processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
        assert str(stand_in) in processes and key not in processes
        assert not any(key in log.read_text() for log in servers.config.log_dir.iterdir())


def ask_guard(scope_type, path, *headers):
    """Return what KeyGuard lets through: b"in" comes from the app behind it."""
    sent = []

    async def app(scope, receive, send):
        sent.append("in")

    async def send(message):
        sent.append(message.get("status", message["type"]))

    asyncio.run(genrm_server.KeyGuard(app)(dict(type=scope_type, path=path, headers=headers), None, send))
    return sent[0]


def test_the_key_guard(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    right, wrong = (b"authorization", b"Bearer k"), (b"authorization", b"Bearer kk")
    assert (
        ask_guard("http", "/health")
        == ask_guard("http", "/sleep", right)
        == ask_guard("websocket", "/x", right)
        == "in"
    )
    for path in ("/sleep", "/v1/models", "/health/", "/Health", "", "/metrics"):
        assert (
            ask_guard("http", path)
            == ask_guard("http", path, wrong)
            == ask_guard("http", path, (b"x", b"Bearer k"))
            == 401
        )
    assert ask_guard("websocket", "/v1/realtime") == 401
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(KeyError):  # no server is better than an open one
        genrm_server.KeyGuard(None)


def test_generate_is_no_error_where_the_client_has_gone():
    """In this case vLLM returns null. A traceback each time would make the log hard to read after a crash."""
    answers = []

    async def vllm(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    async def receive():
        return {"type": "http.request", "body": b'{"text": "1 + 1 ="}'}

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    asyncio.run(SglangGenerate(vllm)(scope, receive, send))
    assert answers[-1]["body"] == b"null"


@pytest.mark.slow
def test_a_router_open_to_the_network_without_a_key_is_told_of(stand_in, capfd):
    with running(settings(stand_in, host="0.0.0.0")):
        assert (
            "WARNING: --host 0.0.0.0 opens the router to the network without a key" in capfd.readouterr().out
        )
    with running(settings(stand_in, host="0.0.0.0", api_key="k")):
        assert "WARNING" not in capfd.readouterr().out


@pytest.mark.slow
def test_policy_servers_get_the_weights_at_every_sync_and_after_every_restart(stand_in, tokenizer, capfd):
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    from toy import warm_start

    shape = warm_start.new_model(len(tokenizer), seed=0).config
    shape.tie_word_embeddings = True
    policy = policy_of(LlamaForCausalLM(shape))
    model = policy.model
    servers = PolicyServers(policy, tokenizer, settings(stand_in, num_servers=2, seed=5))
    try:
        assert "/dev/shm" not in capfd.readouterr().out
        assert servers.folder.path.parent == Path("/dev/shm")
        for number in range(2):
            seen = told(servers.service, number)
            assert (
                f"--seed {5 + number} " in " ".join(seen["argv"])
                and seen["env"]["VLLM_SERVER_DEV_MODE"] == "1"
            )
            assert [call for call in seen["calls"] if "_rpc" in call] == ["/collective_rpc weight_sums"]
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        servers.sync()
        served = load_file(servers.folder.path / "model.safetensors")
        assert torch.equal(served["lm_head.weight"], model.lm_head.weight) and set(served) == set(
            model.state_dict()
        )
        assert json.loads((servers.folder.path / "config.json").read_text())["tie_word_embeddings"] is False
        assert model.config.tie_word_embeddings  # the trainer's model is unchanged
        for number in range(2):
            calls = [
                call
                for call in told(servers.service, number)["calls"]
                if call.startswith(("/collective", "/reset"))
            ]
            assert calls == [
                "/collective_rpc weight_sums",
                "/collective_rpc reload_weights",
                "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
                "/collective_rpc weight_sums",
            ]
        os.kill(told(servers.service)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers.service) == 1 and len(router_workers(servers.service)) == 2)
        # This happened before it joined, because the weights may have changed.
        assert "/collective_rpc reload_weights" in told(servers.service)["calls"]
        (servers.folder.path / "die_of_collective_rpc").touch()
        before_joining, looked = servers.service.before_joining, threading.Event()
        servers.service.before_joining = lambda slot: looked.wait() and before_joining(slot)
        servers.sync()  # one of the servers dies during the call
        # One server has the new weights; the other has the old ones or none.
        until(lambda: len(router_workers(servers.service)) == 1)
        looked.set()
        until(
            lambda: restarts_of(servers.service) >= 2 and all(slot.joined for slot in servers.service.slots)
        )
        reloads = "/collective_rpc reload_weights"
        assert all(reloads in told(servers.service, number)["calls"] for number in range(2))
        (servers.folder.path / "lose_reload").touch()
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 1e-6)  # a change that hardly shows in log-probabilities
        lost = r"server 0 .*: did not load the policy's weights: 2 of 39 checksums differ, .* resume the run"
        with pytest.raises(RuntimeError, match=lost):
            servers.sync()
        (servers.folder.path / "lose_reload").unlink()
        servers.sync()
        # A restarted server does not join with other weights.
        (_, weight), joined = next(iter(servers.sums.items())), restarts_of(servers.service)
        weight[2] += 1
        os.kill(told(servers.service)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers.service) > joined + 1)
        assert not servers.service.slots[0].joined
        weight[2] -= 1
        until(lambda: servers.service.slots[0].joined)
        (servers.folder.path / "refuse_collective_rpc").touch()
        with pytest.raises(RuntimeError, match="server 0: POST /collective_rpc failed .*400.: .*will not"):
            servers.sync()
        (servers.folder.path / "refuse_collective_rpc").unlink()
        (servers.folder.path / "die_of_collective_rpc").touch()
        servers.sync()
    finally:
        servers.shutdown()
    assert not servers.folder.path.exists()


@pytest.mark.slow
def test_a_run_whose_servers_reject_checksums_at_its_start_goes_on_without_them(
    stand_in, tokenizer, model, monkeypatch, capfd
):
    """A refusal after a server has returned checksums ends the run (see the test above)."""
    files = rollout.model_files
    refuse = {"refuse_collective_rpc": b""}
    monkeypatch.setattr(rollout, "model_files", lambda *arguments: files(*arguments) | refuse)
    policy = policy_of(copy.deepcopy(model))
    with serving(PolicyServers(policy, tokenizer, settings(stand_in, num_servers=2))) as servers:
        (line,) = [line for line in capfd.readouterr().out.splitlines() if "checksums" in line]
        refused = r"WARNING: no checksums .*server [01]: POST /collective_rpc failed .*400.: .*will not"
        assert re.search(refused, line) and servers.kept == set()
        (servers.folder.path / "refuse_collective_rpc").unlink()
        servers.sync()
        os.kill(told(servers.service)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers.service) == 1 and len(router_workers(servers.service)) == 2)
        calls = [told(servers.service, number)["calls"] for number in range(2)]
        rpc = [call for call in sum(calls, []) if call.startswith("/collective_rpc")]
        assert set(rpc) == {"/collective_rpc weight_sums", "/collective_rpc reload_weights"}
        assert rpc.count("/collective_rpc weight_sums") == 1  # at the start; the other server was restarted
        assert "checksums" not in capfd.readouterr().out


@pytest.mark.slow
def test_weights_that_go_through_the_disk_are_told_of(stand_in, tokenizer, model, monkeypatch, capfd):
    """Other weights go through /dev/shm (see the test above)."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with serving(PolicyServers(policy_of(copy.deepcopy(model)), tokenizer, settings(stand_in))) as servers:
        (line,) = [line for line in capfd.readouterr().out.splitlines() if "/dev/shm" in line]
        assert "policy servers: " in line and str(servers.folder.path.parent) in line


@pytest.mark.slow
def test_rollouts_wait_for_no_policy_servers_that_were_given_up(stand_in, tokenizer, model, monkeypatch):
    """Otherwise, the router would hold each attempt for --queue-timeout, which is 15 minutes in a run."""
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 1)
    policy = policy_of(copy.deepcopy(model))
    with serving(PolicyServers(policy, tokenizer, settings(stand_in, queue_timeout=5.0))) as servers:
        servers.check()
        (servers.folder.path / "die_at_start").touch()
        os.kill(told(servers.service)["pids"][0], signal.SIGKILL)
        options = dict(max_response_length=4, temperature=1.0, eos_ids=(), rollout_batch_size=1)
        with pytest.raises(RuntimeError, match="all servers failed too often"):
            rollout_vllm(servers, [Sample({}, [1])], **options)


@pytest.mark.slow
def test_a_server_that_died_of_a_call_to_all_and_is_back_before_the_others_answer_ends_nothing(
    stand_in, monkeypatch
):
    """The call is one of a weight sync.

    The other server responds once the first one is ready to join again.
    """
    with running(settings(stand_in, num_servers=2)) as servers:
        dying, other = servers.slots
        ask = servers.post_control

        def ask_one(slot, path, body=None):
            if slot is other:
                until(lambda: dying.restarts == 1 and request("GET", dying.url + "/health")[0] == 200)
                return ask(slot, path, body)
            os.kill(told(servers)["pids"][0], signal.SIGKILL)
            return ask(slot, path, body)

        monkeypatch.setattr(servers, "post_control", ask_one)
        with servers.lock:
            servers.post_control_all("/collective_rpc", {"method": "reload_weights"})
        until(lambda: dying.joined and other.joined)
        assert dying.restarts == 1


@pytest.mark.slow
def test_a_service_on_ipv6_prints_an_address_that_can_be_used(stand_in):
    with contextlib.closing(socket.socket(socket.AF_INET6)) as there:
        try:
            there.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    process = start_command(stand_in, "--host", "::1")
    try:
        router, _ = read_addresses(process)
        assert router.startswith("http://[::1]:") and ask(router)["argv"]
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_gpu_servers_and_a_classifier_sleep_and_wake(stand_in, monkeypatch):
    with running(settings(stand_in, sleep_mode=True)) as servers:
        servers.sleep()
        servers.sleep(False)  # this call has no effect
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-6f,7")
    config = settings(
        stand_in, num_servers=2, device="cuda", tensor_parallel_size=2, task="classify", sleep_mode=True
    )
    with running(config) as servers:
        seen = [told(servers, number) for number in range(2)]
        assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen] == ["3,5", "GPU-6f,7"]
        assert "--runner pooling" in " ".join(seen[0]["argv"]) and "--enable-sleep-mode" in seen[0]["argv"]
        assert "--dtype auto" in " ".join(seen[0]["argv"]) and seen[0]["env"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert "--gpu-memory-utilization" not in seen[0]["argv"]
        servers.sleep()
        assert all(genrm_server.SLEEP in told(servers, number)["calls"] for number in range(2))
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: not servers.slots[0].joined)
        time.sleep(1.0)
        assert restarts_of(servers) == 0  # it must not use the trainer's memory
        servers.sleep(False)
        until(lambda: restarts_of(servers) == 1 and servers.slots[0].joined)
        assert genrm_server.SLEEP not in told(servers)["calls"] and "/wake_up" in told(servers, 1)["calls"]
        (stand_in / "hang").touch()
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: restarts_of(servers) == 2)
        servers.sleep()  # while the server starts
        (stand_in / "hang").unlink()
        until(lambda: servers.slots[0].joined)
        assert genrm_server.SLEEP in told(servers)["calls"]
        servers.sleep(False)
        assert all("/wake_up" in told(servers, number)["calls"] for number in range(2))
        # Clients of the router cannot call this.
        assert request("POST", f"http://{servers.router_address}/sleep")[0] == 404


@pytest.mark.slow
def test_sleep_and_wake_with_servers_that_are_dead_or_die_of_it(stand_in, monkeypatch, capfd):
    monkeypatch.setattr(genrm_server, "MAX_DEATHS", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with running(settings(stand_in, num_servers=2, device="cuda", sleep_mode=True)) as servers:

        def all_joined():
            return all(slot.joined for slot in servers.slots)

        (stand_in / "die_of_sleep").touch()
        servers.sleep()
        until(lambda: sum(slot.joined for slot in servers.slots) == 1)
        (sleeping,) = [number for number, slot in enumerate(servers.slots) if slot.joined]
        assert genrm_server.SLEEP in told(servers, sleeping)["calls"]
        os.kill(told(servers, sleeping)["pids"][0], signal.SIGKILL)
        servers.sleep(False)
        until(lambda: restarts_of(servers) >= 2 and all_joined())
        for number in range(2):  # it may have joined and slept before the others woke up
            calls = told(servers, number)["calls"]
            assert [call for call in calls if call in (genrm_server.SLEEP, "/wake_up")][-1:] != [
                genrm_server.SLEEP
            ]
        servers.sleep()
        (stand_in / "die_at_start").touch()  # as if the trainer were using its memory
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: not all_joined())
        restarts = restarts_of(servers)
        time.sleep(1.0)
        assert restarts_of(servers) == restarts
        (stand_in / "die_at_start").unlink()
        servers.sleep(False)
        until(all_joined)
        (stand_in / "refuse_wake_up").touch()
        with pytest.raises(RuntimeError, match="server 0: POST /wake_up failed .*400.: .*will not"):
            servers.sleep(False)
        assert not any(slot.given_up for slot in servers.slots)


@pytest.mark.slow
def test_on_a_shared_gpu_the_trainer_waits_until_a_server_that_is_loading_sleeps(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with running(settings(stand_in, device="cuda", gpu_share=0.4, sleep_mode=True)) as servers:
        (slot,) = servers.slots
        (stand_in / "hang").touch()
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: slot.restarts == 1 and slot.loading)
        with ThreadPoolExecutor() as pool:
            sleeping = pool.submit(servers.sleep)
            time.sleep(1)
            is_early = sleeping.done()
            (stand_in / "hang").unlink()
            sleeping.result(timeout=60)
        assert not is_early and genrm_server.SLEEP in told(servers)["calls"]
        servers.sleep(False)
        until(lambda: slot.ready)


@pytest.mark.slow
def test_a_server_that_is_not_ready_in_time_leaves_no_process_while_the_others_sleep(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = settings(stand_in, device="cuda", gpu_share=0.4, sleep_mode=True)
    with running(config) as servers:
        (slot,) = servers.slots
        servers.config.startup_timeout = 2.0
        (stand_in / "hang").touch()
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: slot.restarts == 1 and slot.loading)
        servers.sleep()
        assert not slot.loading and not slot.server.alive()
        (stand_in / "hang").unlink()
        servers.config.startup_timeout = 60.0
        servers.sleep(False)
        until(lambda: slot.ready)


@pytest.mark.slow
def test_a_server_that_fell_asleep_before_it_could_join_is_awake_when_it_joins(stand_in, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    rejects = []

    def reject(method, url, *args, **more):
        if rejects and url.endswith("/workers"):
            return 0, "ConnectionRefusedError"  # as if the router were restarting
        return request(method, url, *args, **more)

    def sleeps_and_wakes():
        status, text = request("GET", slot.url + "/v1/args", api_key=servers.config.server_key)
        calls = json.loads(text)["calls"] if status == 200 else []  # the server may be starting
        return [call for call in calls if call in (genrm_server.SLEEP, "/wake_up")]

    with running(settings(stand_in, device="cuda", sleep_mode=True)) as servers:
        (slot,) = servers.slots
        monkeypatch.setattr(genrm_server, "request", reject)
        (stand_in / "hang").touch()
        os.kill(told(servers)["pids"][0], signal.SIGKILL)
        until(lambda: slot.restarts == 1)
        servers.sleep()  # while the server starts
        rejects.append(True)
        (stand_in / "hang").unlink()
        until(lambda: genrm_server.SLEEP in sleeps_and_wakes())
        servers.sleep(False)
        rejects.clear()
        until(lambda: slot.joined)
        assert sleeps_and_wakes()[-1] == "/wake_up"


# ---- the command line ----------------------------------------------------------------------------


def start_command(model, *arguments, before=()):
    return subprocess.Popen(
        [
            *before,
            sys.executable,
            str(ROOT / "genrm_server.py"),
            "--model",
            str(model),
            "--port",
            "0",
            "--device",
            "cpu",
            "--log-dir",
            str(model.parent / "logs"),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_addresses(process):
    """Return the router's URL and the servers' URLs once all are ready."""
    urls = []
    for line in process.stdout:
        if found := re.match(r"server \d+ ready at (http://\S+) after \d+ s", line):
            urls.append(found[1])
        if found := re.match(r"router ready at (http://\S+) \((\d+) servers\)", line):
            assert int(found[2]) == len(urls)
            return found[1], urls
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(stand_in, number):
    process = start_command(stand_in, "--num-servers", "2", "--", "--max-num-seqs", "9")
    try:
        router, urls = read_addresses(process)
        seen = ask(router)
        assert seen["argv"][-2:] == ["--max-num-seqs", "9"]
        sockets = Path(seen["env"]["TMPDIR"])
        memory, semaphore = (Path("/dev/shm", kind + seen["name"]) for kind in ("psm_", "sem.mp-"))
        assert memory.exists() and semaphore.exists() and sockets.exists()
        pids = descendants(process)
        assert len(pids) == 5  # the router, two servers, their engines
        process.send_signal(number)
        process.wait(120)
        assert process.returncode == (-9 if number == signal.SIGKILL else 0)
        until(lambda: not any(map(alive, pids)) and all(map(port_is_free, [router, *urls])))
        assert not memory.exists() and not semaphore.exists() and not sockets.exists()
    finally:
        process.kill()


KILLED_EARLY = """
import os, sys
from pathlib import Path
from genrm_server import Process
Process(Path(sys.argv[1], "log"), [sys.executable, "-c", "pass"], dict(os.environ)).start()
os.kill(os.getpid(), 9)
"""


def test_a_program_killed_before_its_child_has_begun_leaves_no_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    subprocess.run([sys.executable, "-c", KILLED_EARLY, str(tmp_path)], env=env, cwd=ROOT)
    until(lambda: "the program that started this process has ended" in (tmp_path / "log").read_text())
    until(lambda: not any(str(tmp_path) in " ".join(child.cmdline()) for child in processes()))
    assert not list((tmp_path / "tmp").iterdir())


def processes():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            process.cmdline()
            yield process


FORKS = """
import os, sys, time
from genrm_server import Config, ModelServers
servers = ModelServers(Config(sys.argv[1], port=0, device="cpu", log_dir=sys.argv[1] + "/../logs"))
if os.fork():
    print(servers.router_address, flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_a_fork_of_the_program_keeps_no_server_alive(stand_in):
    program = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(stand_in)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        address = next(line for line in program.stdout if re.match(r"[\d.]+:\d+$", line)).strip()
        pids = ask(f"http://{address}")["pids"]
        program.kill()
        program.wait()
        until(lambda: not any(map(alive, pids)))
    finally:
        os.killpg(program.pid, signal.SIGKILL)  # this kills the fork


def test_what_a_child_said_is_that_of_this_start(tmp_path, stand_in):
    log = tmp_path / "a.log"
    log.write_text("WARNING: of an earlier run\n")
    command = [sys.executable, "-c", "print('WARNING: of this one')"]
    child = genrm_server.Process(log, command, dict(os.environ))
    child.start()
    until(lambda: not child.alive())
    assert child.last_line("WARNING") == "WARNING: of this one" == child.failure_lines()
    assert not child.last_line("earlier")
    child.stop()


def test_a_log_has_no_colours(tmp_path):
    """With FORCE_COLOR, Python 3.13 and newer would colour tracebacks, which then match no pattern."""
    code = "import os; print(os.environ['PYTHON_COLORS'])"
    child = genrm_server.Process(
        tmp_path / "log", [sys.executable, "-c", code], os.environ | {"FORCE_COLOR": "1"}
    )
    child.start()
    until(lambda: not child.alive())
    assert child.failure_lines() == "0"  # This wins over FORCE_COLOR.
    child.stop()


def test_files_of_the_user_do_not_replace_ours_in_a_child(tmp_path, monkeypatch):
    for name in ("genrm_server.py", "router.py"):
        (tmp_path / name).write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import router; print(router.__file__)"]
    child = genrm_server.Process(tmp_path / "log", command, os.environ | {"PYTHONPATH": str(tmp_path)})
    child.start()
    until(lambda: not child.alive())
    assert child.failure_lines() == f"{ROOT}/router.py"
    child.stop()


def test_a_child_has_a_folder_although_tmp_is_read_only(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", "import os; print(os.environ['TMPDIR'])"]
    child = genrm_server.Process(tmp_path / "log", command, dict(os.environ))
    child.start()
    until(lambda: not child.alive())
    assert child.failure_lines() == child.folder and Path(child.folder).parent == tmp_path
    child.stop()
    assert not Path(child.folder).exists()


MAPS = """
import mmap, sys, time
maps = []
for path in sys.argv[1:]:
    with open(path, "wb+") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("problem", ["a name that is not UTF-8", "a file of another user", "no /dev/shm"])
def test_a_group_is_killed_whatever_its_processes_have_mapped(tmp_path, monkeypatch, problem):
    memory = Path("/dev/shm", "psm_" + os.urandom(8).hex())
    odd = os.fsdecode(b"\xff") if problem == "a name that is not UTF-8" else "file"
    command = [sys.executable, "-c", MAPS, str(memory), str(tmp_path / odd)]
    child = genrm_server.Process(tmp_path / "a.log", command, dict(os.environ))
    child.start()
    pid = child.child.pid
    try:
        until(lambda: child.last_line("mapped"))
        if problem == "a file of another user":

            def refuse(path, **more):
                raise PermissionError(1, "Operation not permitted", str(path))

            monkeypatch.setattr(os, "unlink", refuse)
        elif problem == "no /dev/shm":
            scandir = os.scandir
            without = {"/dev/shm": "/dev/shm/missing"}
            monkeypatch.setattr(os, "scandir", lambda path: scandir(without.get(path, path)))
        child.stop()
        assert not alive(pid) and memory.exists() == (problem != "a name that is not UTF-8")
    finally:
        monkeypatch.undo()
        memory.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def test_two_services_of_one_folder_have_two_folders_of_logs(stand_in):
    folders = [resolve_config(settings(stand_in, log_dir=None, port=port)).log_dir for port in (30000, 30001)]
    assert folders == [Path("outputs/genrm_logs").absolute() / port for port in ("30000", "30001")]


@pytest.mark.slow
def test_under_nohup_it_outlives_its_terminal(stand_in):
    process = start_command(stand_in, before=("nohup",))
    try:
        router, _ = read_addresses(process)
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        victim = ask(router)["pids"][0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: request("GET", router + "/health")[0] == 200 and ask(router)["pids"][0] != victim)
        assert process.poll() is None
    finally:
        process.kill()


@pytest.mark.slow
def test_exit_codes(stand_in):
    process = start_command(stand_in, "--num-servers", "0")
    assert (
        process.communicate(timeout=120)[1] == "error: --num-servers 0: must be at least 1\n"
        and process.returncode == 2
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_command(stand_in, "--port", str(taken.getsockname()[1]))
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 2 and error.count("\n") == 1 and "cannot open this port" in error
    (stand_in / "die_at_start").touch()
    process = start_command(stand_in)
    assert "these weights do not fit" in process.communicate(timeout=120)[1] and process.returncode == 1


@pytest.mark.parametrize("ends", ["before anything else", "when the judge would be served"])
def test_a_demo_refuses_a_port_that_another_one_has(tmp_path, serve, ends):
    """Otherwise, it would be judged by the other demo's judge."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    kept = tmp_path / "outputs/demo_seed0/of an earlier demo"
    kept.mkdir(parents=True)
    script = "bash recipes/toy_demo.sh"
    if ends != "before anything else":
        script = "source recipes/toy_runs.sh; serve_judge model logs; echo served"
    env = os.environ | {"PORT": serve(critic).address.rpartition(":")[2]}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and kept.exists()
    line = f"error: PORT={env['PORT']}: the port is taken, perhaps by another demo; run PORT="
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1 and not done.stdout


# ---- with the real vLLM --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, model, tokenizer, small_ray):
    """Yield the process and URLs of a router with two generative servers, and a classifier's manager."""
    import ray
    import torch
    from transformers import LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    models = folder / "generate", folder / "classify"
    for path, a_model in zip(models, (model, LlamaForSequenceClassification(config))):
        a_model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_ADDRESS", "local")  # start a separate Ray, even if one is running
        for name, value in forked.servers(os.environ).items():
            monkeypatch.setenv(name, value)
        # The first server starts as for users.
        monkeypatch.setenv("FORKED_after_first", str(folder / "first"))
        process = start_command(models[0], "--num-servers", "2", "--served-model-name", "judge")
        try:
            addresses = read_addresses(process)  # starting all at once would starve other tests
            ray.init(include_dashboard=False, logging_level="warning")
            config = Config(
                model=str(models[1]),
                task="classify",
                port=0,
                device="cpu",
                log_dir=folder,
                served_model_name="rm",
            )
            manager = RewardModelManager({"rm": config})
            try:
                yield process, *addresses, manager
            finally:
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
    status, text = request(
        "POST",
        f"http://{manager.router_addresses['rm']}/classify",
        {"model": "rm", "input": texts, "use_activation": False},
        timeout=60,
    )
    assert status == 200, text
    assert [one["probs"][0] for one in json.loads(text)["data"]] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 1e-3  # otherwise the comparison would prove nothing


@pytest.mark.slow
def test_vllm_asks_for_the_servers_key_on_every_path_and_the_router_sends_it(vllm):
    process, router, urls, manager = vllm
    send = functools.partial(request, timeout=60)
    classifier, key = manager.models["rm"].slots[0].url, manager.models["rm"].config.server_key
    for url in (*urls, classifier):
        assert send("GET", url + "/health")[0] == 200
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("POST", "/classify"),
            ("GET", "/metrics"),
            ("POST", "/collective_rpc"),
            ("GET", "/docs"),
            ("OPTIONS", "/v1/models"),
            ("GET", "/health/"),
        ):
            assert send(method, url + path)[0] == 401
            assert send(method, url + path, api_key="wrong")[0] == 401
    assert send("GET", classifier + "/v1/models", api_key=key)[0] == 200
    assert send("POST", classifier + "/tokenize", {"prompt": "x"}, api_key=key)[0] == 200
    assert send("POST", router + "/tokenize", {"prompt": "x"})[0] == 200
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
    }
    status, text = send("POST", router + "/v1/chat/completions", body)
    assert status == 200 and text.count("data: ") > 2 and text.endswith("data: [DONE]\n\n")
    everything = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
    assert urls[0].rpartition(":")[2] in everything and key not in everything
    assert not any(key in log.read_text() for log in manager.models["rm"].config.log_dir.iterdir())


@pytest.mark.slow
def test_vllm_answers_generate_as_sglang_does(vllm, tokenizer):
    """Send requests like a reward function for SGLang: the chat template's ids to /generate; then read
    `text`.
    """
    process, router, urls, _ = vllm
    messages, sampling = (
        [{"role": "user", "content": "Is it so?"}],
        {"max_new_tokens": 12, "temperature": 0.0},
    )

    def generate(**body):
        status, text = request("POST", router + "/generate", body, timeout=60)
        return status, json.loads(text)

    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    status, answer = generate(input_ids=ids, sampling_params=sampling)
    assert (
        status == 200
        and tokenizer.decode(answer["output_ids"], skip_special_tokens=True) == answer["text"] != ""
    )
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(ids) and meta["completion_tokens"] == len(answer["output_ids"]) <= 12
    assert meta["finish_reason"]["type"] in ("stop", "length") and meta["id"]
    body = {"model": "judge", "messages": messages, "max_tokens": 12, "temperature": 0.0}
    chat = json.loads(request("POST", router + "/v1/chat/completions", body, timeout=60)[1])
    assert chat["choices"][0]["message"]["content"] == answer["text"]
    text = tokenizer.decode(ids)
    assert generate(text=text, sampling_params=sampling)[1]["output_ids"] == answer["output_ids"]
    status, both = generate(input_ids=[ids, ids[:-1]], sampling_params=sampling)
    assert status == 200 and len(both) == 2 and both[0]["text"] == answer["text"]
    assert (
        generate(input_ids=ids, sampling_params={"max_new_tokens": 1})[1]["meta_info"]["finish_reason"][
            "type"
        ]
        == "length"
    )
    for body in (
        {},
        {"input_ids": []},
        {"text": "x", "sampling_params": {"temperature": -1}},
        {"text": "x", "sampling_params": 3},
        {"input_ids": ids * 9999},
        {"text": "x", "sampling_params": {"max_new_tokens": -1}},
    ):
        status, error = generate(**body)
        assert 400 <= status < 500 and error and isinstance(error, str), (body, status, error)
    assert request("POST", urls[0] + "/generate", {"text": "x"})[0] == 401


@pytest.fixture(scope="module")
def one_killed(vllm):
    """Return the responses to 32 requests, 16 per server, during which one server was killed."""
    process, router, urls, _ = vllm
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 100,
        "ignore_eos": True,
    }

    def judge(_):
        return request("POST", f"{router}/v1/chat/completions", body, timeout=300)

    servers = [
        next(child for child in map(psutil.Process, descendants(process)) if port in child.cmdline())
        for port in (url.rpartition(":")[2] for url in urls)
    ]
    engines = [engine for server in servers for engine in server.children(recursive=True)]
    with ThreadPoolExecutor(32) as pool:
        for engine in engines:  # otherwise a quick engine might finish early
            engine.suspend()
        asked = [pool.submit(judge, i) for i in range(32)]
        until(lambda: {worker["in_flight"] for worker in ask(router, "/workers")["workers"]} == {16})
        servers[0].kill()
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()
        return [one.result() for one in asked]


@pytest.mark.slow
def test_vllm_two_servers_one_killed_with_32_requests_in_flight(vllm, one_killed):
    process, router, urls, _ = vllm
    assert [status for status, _ in one_killed] == [200] * 32
    assert all(json.loads(text)["usage"]["completion_tokens"] == 100 for _, text in one_killed)
    assert sum(worker["retries"] for worker in ask(router, "/workers")["workers"]) >= 1  # requests were hit


# ---- in Ray, with the stand-in; the killed server restarts in the meantime

DRIVER = """
import sys, time
import ray
sys.path.append("tests")
import forked
forked.small_ray()
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
from cluster.placement import RewardModelManager
from genrm_server import Config
def config(**more):
    return Config(sys.argv[1], port=0, device="cpu", cpus="0,1", log_dir=sys.argv[1] + "/../logs", **more)
for _ in range(2):
    manager = RewardModelManager({"genrm": config(num_servers=2), "rm": config(task="classify")})
    addresses = manager.router_addresses
    print("up", addresses["genrm"], addresses["rm"], flush=True)
    manager.sleep()
    sys.stdin.readline()
    manager.shutdown()
    manager.shutdown()
    print("down", flush=True)
"""


@pytest.mark.slow
def test_named_models_in_ray(stand_in):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(stand_in)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def started():
        """Return the addresses of genrm and rm, and the processes of the three servers."""
        line = next(line for line in driver.stdout if line.startswith("up"))
        _, genrm, rm = line.split()
        return genrm, rm, [ask(f"http://{address}")["pids"] for address in (genrm, genrm, rm)]

    def healthy(address):
        status, text = request("GET", f"http://{address}/health", timeout=30)
        return json.loads(text)["healthy"] if status else 0

    try:
        genrm, rm, pids = started()
        assert len({pid for pair in pids for pid in pair}) == 6
        assert "pooling" in ask(f"http://{rm}")["argv"] and "pooling" not in ask(f"http://{genrm}")["argv"]
        os.kill(pids[0][0], signal.SIGKILL)  # kill a server and another one's actor: both come back
        os.kill(psutil.Process(pids[2][0]).ppid(), signal.SIGKILL)
        until(lambda: not alive(pids[0][1]) and not alive(pids[2][1]))
        until(lambda: healthy(rm) == 1 and healthy(genrm) == 2)
        pids = [pid for address in (genrm, genrm, rm) for pid in ask(f"http://{address}")["pids"]]
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert next(line for line in driver.stdout if line.startswith("down"))
        # The servers were killed in time, but their engines are orphans now.
        until(lambda: not any(map(alive, pids)))
        assert request("GET", f"http://{genrm}/health")[0] == 0
        genrm, rm, pids = started()  # now the driver crashes
        driver.kill()
        until(lambda: not any(alive(pid) for pair in pids for pid in pair))
        until(lambda: request("GET", f"http://{genrm}/health")[0] == 0)
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.slow
def test_servers_in_ray_end_with_ray(stand_in, monkeypatch):
    """The last calls to Ray are kept, because freeing them could end the process."""
    import ray

    class Reference:
        def __init__(self, result):
            self.result = result

    class Actor:
        def __init__(self, server):
            self.server = server

        def __getattr__(self, name):
            return SimpleNamespace(remote=functools.partial(self.remote, name))

        def remote(self, name, *args):
            reference = Reference(getattr(self.server, name)(*args))
            made[is_ending.is_set()].append(weakref.ref(reference))
            return reference

    def get(reference):
        if is_ending.is_set():
            raise ConnectionError
        return reference.result

    def start_servers(models, reservation):
        return {name: [Actor(VllmServer(config, 0, 0, 1))] for name, config in models.items()}

    made, is_ending, is_down, at_exit = {False: [], True: []}, threading.Event(), threading.Event(), []
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "is_initialized", lambda: not is_down.is_set())
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(placement, "start_servers", start_servers)
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("atexit.unregister", at_exit.remove)
    manager = RewardModelManager({"genrm": settings(stand_in)}, SimpleNamespace(close=lambda: None))
    try:
        assert at_exit == [manager.shutdown]
        servers = manager.models["genrm"]
        manager.check()
        is_ending.set()
        servers.slots[0].server.server.stop()
        until(lambda: made[True])
        is_down.set()
        until(lambda: not any(thread.is_alive() for thread in servers.threads))
        assert not servers.router.server.alive() and restarts_of(servers) < 5
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            manager.check()
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            ModelServers(settings(stand_in), servers=[Actor(None)])
        gc.collect()
        assert all(call() for call in made[True]) and not any(call() for call in made[False])
    finally:
        manager.shutdown()
    assert not at_exit


NODES = """
import sys, time
import ray
from ray.cluster_utils import Cluster
import genrm_server
import rollout
from cluster import placement
genrm_server.RESTART_DELAY, genrm_server.MAX_DEATHS = 0.1, 2
sys.path.append("tests")
import forked
forked.small_ray()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
node = cluster.add_node(num_cpus=1)
config = genrm_server.Config(sys.argv[1], port=0, device="cpu", cpus="0", log_dir=sys.argv[1] + "/../logs")
manager = placement.RewardModelManager({"genrm": config})
slot = manager.models["genrm"].slots[0]
def ask():
    return genrm_server.request("GET", f"http://{manager.router_addresses['genrm']}/v1/args")[0]
def wait_for(condition):
    end = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
print("\\nhost", slot.url, ask(), flush=True)
cluster.remove_node(node)
wait_for(lambda: not slot.joined)
time.sleep(8)  # no node has room: nothing is counted, nothing given up
print("\\nalone", slot.joined, bool(slot.given_up), flush=True)
cluster.add_node(num_cpus=1)
wait_for(lambda: slot.joined)
print("\\nback", slot.url, ask(), bool(slot.given_up), flush=True)
manager.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_server_whose_node_dies_waits_for_another_node(stand_in):
    driver = forked.run(["-c", NODES, str(stand_in)], timeout=900)
    lines = [
        line.split() for line in driver.stdout.splitlines() if line.startswith(("host", "alone", "back"))
    ]
    assert [line[0] for line in lines] == ["host", "alone", "back"], driver.stdout + driver.stderr
    (_, before, *first), (_, *alone), (_, after, *last) = lines
    assert first == ["200"] and alone == ["0", "False"] and last == ["200", "False"] and after != before
    assert "127.0.0.1" not in before + after  # on a different node from the router's


@pytest.mark.slow
def test_vllm_killed_server_comes_back_by_itself_and_nothing_is_left_at_the_end(vllm, one_killed):
    process, router, urls, _ = vllm
    until(lambda: ask(router, "/health")["healthy"] == 2, 500)
    assert {worker["url"] for worker in ask(router, "/workers")["workers"]} == set(urls)
    pids = descendants(process)
    process.terminate()
    process.wait(120)
    until(lambda: not any(map(alive, pids)) and all(map(port_is_free, [router, *urls])))
