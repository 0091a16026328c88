"""One vLLM server: a process that ends with this program, however that ends, and does nothing without a key.

    VllmServer(config, ...)    builds the command line and starts it; used directly, or as a Ray actor
    Process                    any child so kept, such as the router
    KeyGuard, Generate         inside of vLLM: the key, and SGLang's /generate

ModelServers in genrm_server.py looks after several of them. Needs none of our other files; Linux only.
"""

import contextlib
import hmac
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = str(Path(__file__).parent)


def share(things: list, count: int) -> list[list]:
    """Deals `things` (cores) evenly to `count` servers; where there are fewer things, some share one."""
    n = len(things)
    return [things[i * n // count:(i + 1) * n // count] or [things[i % n]] for i in range(count)]


def reserve(host: str, port: int = 0) -> socket.socket:
    """A port for a child: bound, never listening, kept for good. With SO_REUSEADDR the child can bind it, and
    hardly anybody else gets it, neither before that (vLLM takes 20 s) nor between restarts."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock


# What Process starts: it leaves a watch in its process group and becomes the command. The watch ends the
# group when this program has ended (forked twice, as Ray kills children). GUARD_CORES are the command's.
GUARD = """
import os, select, sys
here, parent, folder, *command = sys.argv[1:]
watched = os.pidfd_open(os.getppid())
sys.path.insert(0, here)
from vllm_server import end_group, shared_memory
if os.getppid() != int(parent):
    sys.exit("the program that started this has ended")
if os.fork() == 0:
    if os.fork() == 0:
        select.select([watched], [], [])
        end_group(os.getpgrp(), folder, shared_memory(os.getpgrp()))
    os._exit(0)
os.wait()
if cores := os.environ.get("GUARD_CORES"):
    os.sched_setaffinity(0, map(int, cores.replace("|", ",").split(",")))
os.execv(command[0], command)
"""


def shared_memory(group: int) -> list[str]:
    """The files of the shared memory that the processes of this group have."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if os.getpgid(int(maps.parent.name)) == group:
                found += re.findall(r"/dev/shm/[^/\s]+$", maps.read_text(), re.MULTILINE)
    return found


def end_group(group: int, folder: str, memory: list[str]) -> None:
    """SIGKILL for a process group, after the removal of what it would leave behind."""
    for name in memory:
        Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Process:
    """A child in a process group of its own, with a log; the group ends with it, and with this program."""

    def __init__(self, log: Path, command: list[str], env: dict[str, str], url: str = ""):
        self.log, self.command, self.env, self.url = log, command, env, url
        self.log_start, self.child = 0, None

    def start(self) -> str:
        """Starts it (again) and returns its URL."""
        self.stop(patience=0)  # an engine can outlive its API server
        self.log.parent.mkdir(parents=True, exist_ok=True)  # again: somebody may have tidied up
        with open(self.log, "ab") as file:
            self.log_start, self.folder = file.tell(), tempfile.mkdtemp(prefix="vllm_")
            guard = [sys.executable, "-S", "-c", GUARD, HERE, str(os.getpid()), self.folder]
            self.child = subprocess.Popen(
                [*guard, *self.command], env=self.env | {"TMPDIR": self.folder}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        return self.url

    def alive(self) -> bool:
        return (child := self.child) is not None and child.poll() is None

    def stop(self, patience: float = 5.0) -> None:
        """SIGTERM, `patience` seconds later SIGKILL to the whole group (vLLM's engine is a process, too)."""
        child, self.child = self.child, None  # at once: another thread may stop it too
        if child:
            memory = shared_memory(child.pid)  # vLLM does not remove all of it
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience)
            end_group(child.pid, self.folder, memory)
            child.wait()

    def last_lines(self, text: str = "", count: int = 25) -> str:
        """The last lines that the child has written since it was started, and that have this in them."""
        written = self.log.read_bytes() if self.log.exists() else b""  # somebody may have tidied up
        lines = written[self.log_start:].decode("utf-8", "replace").splitlines()
        return "\n".join([line for line in lines if text in line][-count:])

    def said(self, text: str) -> str:
        """The last line of the child's that has this in it, or nothing."""
        return self.last_lines(text, 1)


class KeyGuard:
    """The servers' --middleware: asks for their key on every path but /health. vLLM's own look at the key is
    for /v1 alone, not for /tokenize, /metrics, and the control endpoints, which can swap the weights."""

    def __init__(self, app):
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] != "/health" and not hmac.compare_digest(
                dict(scope["headers"]).get(b"authorization", b""), self.expected):
            from starlette.responses import JSONResponse
            app = JSONResponse({"error": {"message": "missing or wrong key", "code": 401}}, 401)
        await app(scope, receive, send)


class Generate:
    """The other --middleware: SGLang's POST /generate, which vLLM does not have, by way of /v1/completions.
    {"text" or "input_ids": one or a list, "sampling_params": {"max_new_tokens": 128, ...}} -> {"text",
    "output_ids", "meta_info"} or a list of them. Errors are those of /v1/completions. Left out: streams."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/generate":
            return await self.app(scope, receive, send)
        from starlette import requests, responses
        bodies, messages = [await requests.Request(scope, receive).body()], []
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # else /v1/completions refuses it
            asked = json.loads(bodies[0])
            params = {"max_new_tokens": 128} | (asked.get("sampling_params") or {})
            prompt = asked.get("input_ids") or asked.get("text")
            params |= dict(prompt=prompt, max_tokens=params.pop("max_new_tokens"), return_token_ids=True)
            bodies = [json.dumps(params).encode()]

        async def give():
            return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

        async def keep(message):
            messages.append(message)
        await self.app(scope | {"path": "/v1/completions"}, give, keep)
        status, body = messages[0]["status"], b"".join(message.get("body", b"") for message in messages)
        if status == 200:
            full = json.loads(body)
            answers = [dict(text=one["text"], output_ids=(ids := one["token_ids"]), meta_info=dict(
                id=full["id"], finish_reason={"type": one["finish_reason"]}, completion_tokens=len(ids),
                prompt_tokens=len(one["prompt_token_ids"]))) for one in full["choices"]]
            many = len(answers) > 1 or isinstance(prompt, list) and not isinstance(prompt[0], int)
            body = json.dumps(answers if many else answers[0])
        await responses.Response(body, status, media_type="application/json")(scope, receive, send)


class VllmServer(Process):
    """One vLLM server on this machine, of a genrm_server.Config that is complete(). On CPU it gets the
    `part`-th of `parts` shares of the cores, on GPU those in `gpus` ("": all it sees). On another node than
    `driver_node`, where the router is, it listens on its node's address."""

    def __init__(self, config, index: int, part: int, parts: int, gpus: str = "", driver_node: str = ""):
        host = "127.0.0.1"
        if driver_node and self.node() != driver_node:  # asked here: a restart may move the actor
            import ray
            host = ray.util.get_node_ip_address()
        self.reserved = reserve(host)
        port = self.reserved.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model,
                   "--host", host, "--port", str(port), "--served-model-name", config.served_model_name,
                   "--tensor-parallel-size", str(config.tensor_parallel_size), "--disable-uvicorn-access-log",
                   "--middleware", "vllm_server.Generate", "--middleware", "vllm_server.KeyGuard",
                   "--seed", str(config.seed + index)]
        env = dict(os.environ, VLLM_NO_USAGE_STATS="1", VLLM_API_KEY=config.server_key,
                   PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{HERE}")  # for the middleware
        env |= {"HF_HUB_OFFLINE": "1"} if os.path.exists(config.model) else {}
        if config.device == "cpu":
            command += ["--dtype", config.dtype or "float32", "--enforce-eager"]
            cores = config.cpus.split(",") if config.cpus else sorted(os.sched_getaffinity(0))
            ranks = share(share(cores, parts)[part], config.tensor_parallel_size)
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no process more; starts 8 s sooner
            env["GUARD_CORES"] = "|".join(",".join(map(str, rank)) for rank in ranks)
            env["VLLM_CPU_OMP_THREADS_BIND"] = env["GUARD_CORES"]  # read for several ranks alone
            env["OMP_NUM_THREADS"] = str(len(ranks[0]))
        else:
            command += ["--dtype", config.dtype or "auto"] + ["--enable-sleep-mode"] * config.sleep_mode
            if config.gpu_share < 1 and "--gpu-memory-utilization" not in config.vllm_args:
                command += ["--gpu-memory-utilization", str(config.gpu_share)]
            env |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        env |= {"VLLM_SERVER_DEV_MODE": "1"} if config.control or config.sleep_mode else {}  # /collective_rpc
        command += ["--runner", "pooling"] * (config.task == "classify")
        command += ["--max-model-len", str(config.max_model_len)] * (config.max_model_len > 0)
        command += config.vllm_args
        super().__init__(config.log_dir / f"server_{index}.log", command, env, f"http://{host}:{port}")

    def node(self) -> str:
        """Where this actor is."""
        import ray
        return ray.get_runtime_context().get_node_id()
