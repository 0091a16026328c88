"""One vLLM server: a process that ends with this program, however that ends, and that does nothing without its key.

    VllmServer(config, ...)    builds the command line and starts it; in this process, or as a Ray actor on any node
    WeightFolder(path, ...)    where the servers of a node read the weights of a policy in training; the same
    Process                    any child so kept, such as the router
    KeyGuard                   the key, inside of vLLM

ModelServers in genrm_server.py looks after several of them.
"""

import contextlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def share(things: list, count: int) -> list[list]:
    """Deals `things` (cores) evenly to `count` servers; when there are fewer things than servers, some share one."""
    n = len(things)
    return [things[i * n // count:(i + 1) * n // count] or [things[i % n]] for i in range(count)]


def reserve(host: str, port: int = 0) -> socket.socket:
    """A port for a child: bound, never listening, and kept for good. With SO_REUSEADDR the child can bind it as well, and hardly
    anybody else gets it, neither while the child starts (vLLM takes 20 s to bind) nor while it restarts."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock


# What Process really starts: it leaves a watch behind in its process group and becomes the command. The watch reads a pipe
# that only this program holds open; when that ends, this program is gone, however it went, and the watch kills the group.
# It is forked twice, so that it is nobody's child: neither Ray, which kills its workers' children, nor vLLM meets it.
GUARD = """
import os, signal, sys
if os.fork() == 0:
    if os.fork() == 0:
        os.read(0, 1)
        os.kill(0, signal.SIGKILL)
    os._exit(0)
os.wait()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Process:
    """A child in a process group of its own, with a log file; the whole group ends with it, and with this program."""

    def __init__(self, log: Path):
        self.log, self.child = log, None

    def launch(self, command: list[str], env: dict[str, str]) -> None:
        self.stop(patience=0)  # an engine can outlive its API server
        self.log.parent.mkdir(parents=True, exist_ok=True)  # again: somebody may have tidied up
        with open(self.log, "ab") as file:
            self.log_start = file.tell()
            self.child = subprocess.Popen([sys.executable, "-S", "-c", GUARD, *command], env=env, stdin=subprocess.PIPE,
                                          stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def alive(self) -> bool:
        child = self.child
        return child is not None and child.poll() is None

    def stop(self, patience: float = 5.0) -> None:
        """SIGTERM, `patience` seconds later SIGKILL, to the whole group (vLLM's engine is a process of its own)."""
        child, self.child = self.child, None  # at once: another thread may stop it too
        if child is None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdin.close()

    def last_lines(self) -> str:
        """The end of what the child has written."""
        try:
            output = self.log.read_bytes()[self.log_start:] if self.child else b""
        except OSError as error:
            return f"(cannot be read: {error})"
        return "\n".join(output.decode("utf-8", "replace").splitlines()[-25:]) or "(nothing)"


    def said(self, text: str) -> str:
        """The last line of the child's that has this in it, or nothing."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.is_file() else []
        return next((line for line in reversed(lines) if text in line), "")


class KeyGuard:
    """The servers' --middleware: asks for their key on every path but /health. vLLM's own look at the key leaves out whatever
    is not under /v1: /tokenize, /classify, /metrics, and the control endpoints, with which anybody could swap the weights."""

    def __init__(self, app):
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or scope["path"] == "/health" or hmac.compare_digest(
                dict(scope["headers"]).get(b"authorization", b""), self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "missing or wrong key", "code": 401}}'})
        else:  # websocket
            await send({"type": "websocket.close", "code": 1008})


class VllmServer(Process):
    """One vLLM server on this machine. Used directly, and as a Ray actor by RewardModelManager.

    config: a genrm_server.Config, complete(). On CPU it gets the `part`-th of `parts` shares of the cores, else `gpus` (None:
    CUDA_VISIBLE_DEVICES is right already).
    On another node than `driver_node`, where the router is, it listens on its node's address instead of the loopback.
    """

    def __init__(self, config, index: int, part: int, parts: int, gpus: list[str] | None = None, driver_node: str = ""):
        super().__init__(config.log_dir / f"server_{index}.log")
        self.config, self.index, self.part, self.parts, self.gpus, self.host = config, index, part, parts, gpus, "127.0.0.1"
        if driver_node:  # asked here and not where the actor was made: it may be restarted on another node
            import ray
            if self.node() != driver_node:
                self.host = ray.util.get_node_ip_address()
        self.reserved = reserve(self.host)

    def node(self) -> str:
        """Where this actor is; a restart may have moved it."""
        import ray
        return ray.get_runtime_context().get_node_id()

    def start(self) -> str:
        """Starts the process (again) and returns its URL."""
        config, port = self.config, self.reserved.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model,
                   "--host", self.host, "--port", str(port), "--served-model-name", config.served_model_name,
                   "--tensor-parallel-size", str(config.tensor_parallel_size), "--disable-uvicorn-access-log",
                   "--middleware", "vllm_server.KeyGuard", "--seed", str(config.seed + self.index),
                   "--dtype", config.dtype or ("float32" if config.device == "cpu" else "auto")]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))  # for KeyGuard
        env = dict(os.environ, VLLM_NO_USAGE_STATS="1", VLLM_API_KEY=config.server_key, PYTHONPATH=path)
        if os.path.exists(config.model):
            env["HF_HUB_OFFLINE"] = "1"
        if config.device == "cpu":
            command += ["--enforce-eager"]
            cores = config.cpus.split(",") if config.cpus else sorted(os.sched_getaffinity(0))
            ranks = share(share(cores, self.parts)[self.part], config.tensor_parallel_size)
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
            env["OMP_NUM_THREADS"] = str(len(ranks[0]))
        elif config.sleep_mode:
            command += ["--enable-sleep-mode"]
        if config.control or config.sleep_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # else there is no /sleep and no /collective_rpc
        if self.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if config.task == "classify":
            command += ["--runner", "pooling"]
        if config.max_model_len:
            command += ["--max-model-len", str(config.max_model_len)]
        self.launch([*command, *config.vllm_args], env)
        return f"http://{self.host}:{port}"


class WeightFolder:
    """The model folder of a policy in training, for the servers of one node: used directly, or as a Ray actor on that node.

    It lies in the node's shared memory, where that has room for old and new weights of `size` bytes together, else on disk;
    `path`, the same on all nodes, is a link to it. files: what goes with the weights, {name: content}.
    """

    def __init__(self, path: str, files: dict[str, bytes], size: int):
        shared = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1.1 * size
        self.path, self.folder = Path(path), Path(tempfile.mkdtemp(prefix="policy_", dir="/dev/shm" if shared else None))
        for name, content in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
        self.path.unlink(missing_ok=True)  # of one that has died
        self.path.symlink_to(self.folder)
        # Removes both when the pipe to this process closes because it ends, however it ends. In the background of a shell that
        # is gone: nobody's child, because Ray kills those of its workers.
        rest = 'exec 3<&0; { read _ <&3; rm -rf "$0"; [ -e "$1" ] || rm -f "$1"; } &'  # not another one's link
        self.remover = subprocess.Popen(["sh", "-c", rest, self.folder, path], stdin=subprocess.PIPE, start_new_session=True)

    def add(self, number: int, pack) -> None:
        """Takes one part of new weights, the contents of a safetensors file. Servers do not see it yet."""
        (self.folder / f"model{f'_{number}' if number else ''}.new").write_bytes(memoryview(pack))

    def publish(self) -> None:
        """The parts that came since the last time take the place of the old ones."""
        new = {path: path.with_suffix(".safetensors") for path in self.folder.glob("model*.new")}
        for path in set(self.folder.glob("*.safetensors")) - set(new.values()) if new else ():
            path.unlink()
        for path, target in new.items():
            path.replace(target)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.path.exists():
            self.path.unlink(missing_ok=True)
        self.remover.communicate()
