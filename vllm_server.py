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
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


def share(things: list, count: int) -> list[list]:
    """Deals `things` (cores) evenly to `count` servers; where there are fewer things, some share one."""
    n = len(things)
    return [things[i * n // count:(i + 1) * n // count] or [things[i % n]] for i in range(count)]


def reserve(host: str, port: int = 0) -> socket.socket:
    """A port for a child: bound, never listening, kept for good. With SO_REUSEADDR the child can bind it, and
    hardly anybody else gets it, neither before that (vLLM takes 20 s) nor between restarts."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


# What Process starts: it leaves a watch in its process group and becomes the command. The watch ends the
# group when this program has ended (forked twice, as Ray kills children). GUARD_CORES are the command's.
GUARD = """
import os, select, sys
here, parent, folder, *command = sys.argv[1:]
watched = os.pidfd_open(os.getppid())
sys.path.insert(0, here)
from vllm_server import end_group
if os.getppid() != int(parent):
    sys.exit("the program that started this has ended")
os.mkdir(folder, 0o700)
if os.fork() == 0:
    if os.fork() == 0:
        select.select([watched], [], [])
        end_group(os.getpgrp(), folder)
    os._exit(0)
os.wait()
if cores := os.environ.get("GUARD_CORES"):
    os.sched_setaffinity(0, map(int, cores.replace("|", ",").split(",")))
os.execv(command[0], command)
"""


def end_group(group: int, folder: str) -> None:
    """SIGKILL for a process group, after the removal of what it would leave behind: the folder, and the files
    of the shared memory that its processes have mapped. Those are told by their inodes: a semaphore's file
    has another name than when it was mapped."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if os.getpgid(int(maps.parent.name)) == group:
                inodes.update(re.findall(r"(\d+) +/dev/shm/", maps.read_text()))
    for file in os.scandir("/dev/shm"):
        if str(file.inode()) in inodes:
            Path(file.path).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Process:
    """A child in a process group of its own, with a log; the group ends with it, and with this program."""

    def __init__(self, log: Path, command: list[str], env: dict[str, str], url: str = ""):
        self.log = log
        self.command = command
        self.env = env
        self.url = url
        self.log_start = 0
        self.child = None

    def start(self) -> str:
        """Starts it (again) and returns its URL."""
        self.stop()  # an engine can outlive its API server
        self.log.parent.mkdir(parents=True, exist_ok=True)  # again: somebody may have tidied up
        # For sockets, whose whole names must be short. Made by the guard, once it sees to its removal.
        self.folder = f"/tmp/vllm_{secrets.token_hex(4)}"
        guard = [sys.executable, "-S", "-c", GUARD, HERE, str(os.getpid()), self.folder]
        with open(self.log, "ab") as file:
            self.log_start = file.tell()
            self.child = subprocess.Popen(
                guard + self.command,
                env=self.env | {"TMPDIR": self.folder},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self.url

    def alive(self) -> bool:
        child = self.child
        return child is not None and child.poll() is None

    def stop(self) -> None:
        """SIGKILL to the whole group: vLLM's engine is a process, too, and there is nothing to save."""
        child = self.child
        self.child = None  # at once: another thread may stop it too
        if child:
            end_group(child.pid, self.folder)
            child.wait()

    def last_lines(self, text: str = "", count: int = 25) -> str:
        """The last lines that the child has written since it was started, and that have this in them."""
        written = self.log.read_bytes()[self.log_start:]
        lines = written.decode("utf-8", "replace").splitlines()
        return "\n".join([line for line in lines if text in line][-count:])


class KeyGuard:
    """The servers' --middleware: asks for their key on every path but /health. vLLM's own look at the key is
    for /v1 alone, not for /tokenize, /metrics, and the control endpoints, which can swap the weights."""

    def __init__(self, app):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                from starlette.responses import PlainTextResponse
                app = PlainTextResponse("missing or wrong key", 401)
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
        from starlette.requests import Request
        from starlette.responses import Response
        asked = as_completion(await Request(scope, receive).body())
        bodies = [json.dumps(asked).encode()]
        messages = []

        async def give():
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await receive()

        async def keep(message):
            messages.append(message)

        await self.app(scope | {"path": "/v1/completions"}, give, keep)
        status = messages[0]["status"]
        body = b"".join(message.get("body", b"") for message in messages)
        if status == 200 and body != b"null":  # as where the client has gone
            answers = as_sglang(json.loads(body))
            prompt = asked["prompt"]
            several = isinstance(prompt, list) and not isinstance(prompt[0], int)
            if not several and len(answers) == 1:
                answers = answers[0]
            body = json.dumps(answers)
        await Response(body, status, media_type="application/json")(scope, receive, send)


def as_completion(body: bytes) -> dict:
    """SGLang's request as one for /v1/completions, which refuses it where this is none."""
    try:
        asked = json.loads(body)
        params = {"max_new_tokens": 128} | (asked.get("sampling_params") or {})
        params["max_tokens"] = params.pop("max_new_tokens")
        params["prompt"] = asked.get("input_ids") or asked.get("text")
    except (ValueError, TypeError, AttributeError):
        return {}
    return params | {"return_token_ids": True}


def as_sglang(completion: dict) -> list[dict]:
    """The answer of /v1/completions in SGLang's shape."""
    answers = []
    for choice in completion["choices"]:
        answer = {
            "text": choice["text"],
            "output_ids": choice["token_ids"],
            "meta_info": {
                "id": completion["id"],
                "finish_reason": {"type": choice["finish_reason"]},
                "completion_tokens": len(choice["token_ids"]),
                "prompt_tokens": len(choice["prompt_token_ids"]),
            },
        }
        answers.append(answer)
    return answers


class VllmServer(Process):
    """One vLLM server on this machine, of a genrm_server.Config that is complete(). On CPU it gets the
    `part`-th of `parts` shares of the cores, on GPU those in `gpus` ("": all it sees). On another node than
    `driver_node`, where the router is, it listens on its node's address."""

    def __init__(self, config, index: int, part: int, parts: int, gpus: str = "", driver_node: str = ""):
        self.host = "127.0.0.1"
        if driver_node and self.node() != driver_node:  # asked here: a restart may move the actor
            import ray
            self.host = ray.util.get_node_ip_address()
        self.reserved = reserve(self.host)
        port = self.reserved.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", config.model,
            "--host", self.host,
            "--port", str(port),
            "--served-model-name", config.served_model_name,
            "--tensor-parallel-size", str(config.tensor_parallel_size),
            "--disable-uvicorn-access-log",
            "--middleware", "vllm_server.Generate",
            "--middleware", "vllm_server.KeyGuard",
            "--seed", str(config.seed + index),
        ]  # fmt: skip
        env = dict(os.environ)
        env["VLLM_NO_USAGE_STATS"] = "1"
        env["VLLM_API_KEY"] = config.server_key
        env["PYTHONPATH"] = env.get("PYTHONPATH", "") + os.pathsep + HERE  # for the middleware
        if os.path.exists(config.model):
            env["HF_HUB_OFFLINE"] = "1"
        if config.control or config.sleep_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # /collective_rpc, /sleep
        if config.device == "cpu":
            command += ["--dtype", config.dtype or "float32", "--enforce-eager"]
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no process more; starts 8 s sooner
            cores = deal_cores(config, part, parts)
            env["GUARD_CORES"] = "|".join(map(",".join, cores))
            env["VLLM_CPU_OMP_THREADS_BIND"] = env["GUARD_CORES"]  # read for several processes alone
            env["OMP_NUM_THREADS"] = str(len(cores[0]))
        else:
            command += ["--dtype", config.dtype or "auto"]
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = gpus
            if config.sleep_mode:
                command.append("--enable-sleep-mode")
            if config.gpu_share < 1:
                command += ["--gpu-memory-utilization", str(config.gpu_share)]
        if config.task == "classify":
            command += ["--runner", "pooling"]
        if config.max_model_len:
            command += ["--max-model-len", str(config.max_model_len)]
        command += config.vllm_args
        log = config.log_dir / f"server_{index}.log"
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        super().__init__(log, command, env, f"http://{host}:{port}")

    def node(self) -> str:
        """Where this actor is."""
        import ray
        return ray.get_runtime_context().get_node_id()

    def gpu(self) -> tuple[str, str]:
        """The machine and its GPUs that this server is on."""
        return self.host, self.env.get("CUDA_VISIBLE_DEVICES", "")


def deal_cores(config, part: int, parts: int) -> list[list[str]]:
    """The cores of each of a server's processes. ValueError where one of --cpus is not there."""
    here = [str(core) for core in sorted(os.sched_getaffinity(0))]
    cores = config.cpus.split(",") if config.cpus else here
    for core in cores:
        if core not in here:
            raise ValueError(f"--cpus {config.cpus}: no core {core} here; there are {','.join(here)}")
    return share(share(cores, parts)[part], config.tensor_parallel_size)
