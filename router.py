"""Put one HTTP address in front of many servers: a router for reward models, independent of training runs.

    python router.py --port 30000 --workers http://a:8000 http://b:8000

The router forwards the paths of --forward and rejects all others, and all requests with an Origin header,
such as the POST requests of web pages. Its own endpoints:
    GET /health                 returns 200 if at least one server is healthy, else 503; needs no key
    GET /workers, /metrics      lists the servers and their state, as JSON or as Prometheus text
    POST /workers {"url": U}    adds a server; needs the servers' key, or else the clients'
    DELETE /workers?url=U       removes a server and lets its requests finish; needs the same key
How the router reacts when a server fails:
    no connection               The server leaves the rotation. The request goes to another server, or waits.
                                If the router lacks ports, files or memory, the server stays in the rotation.
    no response from /health    The server leaves the rotation. Its requests go to other servers. If there is
                                no other server, the requests stay, because the server may only be busy.
    500, 502, 503, 504, or a    The router checks the /health of the server and distinguishes the next two
    broken connection           cases.
      /health is good           The request goes to another server. After --unhealthy-after failures in a row,
                                the server leaves the rotation unless it is the only healthy one.
      /health fails             The server has died, perhaps because of a request. Its requests are therefore
                                retried one per second. A request is rejected with 422 if a second server dies
                                within a second of receiving it, or if a third server dies. Clients must not
                                send such a request again.
    no response to several      If a server answers no request to a path although other servers do, requests
    requests                    that run into a time limit count as failures, even if /health is good. So do
                                requests whose client disconnects, for whatever reason. After
                                --unhealthy-after in a row, the server leaves the rotation, and its remaining
                                requests go to other servers. It returns when its /health has failed in the
                                meantime, as during a restart, when it is added again, or if no other server
                                is healthy.
    any other response          The response is forwarded. Once part of it has been sent, there is no retry.
Unless --mixed-models is set, a server does not join if its models differ from those of the first server.
No POST request is sent twice to a server that is known to be alive. A server returns to the rotation when its
/health responds again. (--health-path may name another path than /health.) If a client disconnects, the
server stops working on the request. Requests with the same X-Session-Id header go to the same server while it
is healthy, regardless of --policy.
Not covered: TLS towards clients, HTTP/2, WebSockets, trailers, "Expect: 100-continue" (with bodies over 1 MB,
curl waits for it for a second), caching, several processes, prefix-aware routing, systems other than Linux.
The router ignores the environment variables HTTP_PROXY and HTTPS_PROXY, so an API must be reachable directly.
Standalone: imports nothing from this repository. genrm_server.py runs SglangGenerate inside vLLM, as a
middleware that answers SGLang's /generate.
"""

import asyncio
import contextlib
import errno
import gc
import hashlib
import hmac
import json
import logging
import math
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal
from urllib.parse import unquote

import aiohttp
import tyro
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

# The help text itself explains an empty default.
Text = Annotated[str, tyro.conf.arg(help_behavior_hint="")]


@dataclass
class Config:
    """Put one HTTP address in front of many servers."""

    workers: tuple[str, ...] = ()  # Base URLs of the servers, such as http://10.0.0.2:8000.
    host: str = "127.0.0.1"  # Address to listen on. 0.0.0.0 opens it to the network: set an API key then.
    port: int = 30000  # Port to listen on. 0: choose a free port and print it.
    # Paths to forward, including all paths below them. /: forward every path.
    forward: tuple[str, ...] = (
        "/v1",
        "/generate",
        "/inference/v1/generate",
        "/classify",
        "/pooling",
        "/score",
        "/rerank",
        "/tokenize",
        "/detokenize",
    )
    # How the router chooses a server: each in turn, or the one with the fewest running requests.
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    # Maximum number of servers that get the same request. Servers that cannot be reached do not count.
    max_attempts: int = 3
    unhealthy_after: int = 3  # Number of consecutive failures after which a server leaves the rotation.
    health_interval: float = 5.0  # Time between health checks, in seconds. A status below 500 is healthy.
    # Path of the servers for health checks. Choose a cheap one: some gateways query a model for every request
    # to /health.
    health_path: str = "/health"
    health_timeout: float = 10.0  # Time limit for a health check, in seconds. Busy servers respond slowly.
    # Let servers join even if their /v1/models differ. A request may then reach a server with another model.
    # Use it if the same model has different paths on the servers.
    mixed_models: bool = False
    # Maximum time, in seconds, that a request waits for a healthy server, or to be retried after its server
    # died (one such retry per second). 0: return 503 immediately and retry without pauses. Harmless requests
    # may then be rejected along with a request that kills servers.
    queue_timeout: float = 180.0
    request_timeout: float = 3600.0  # Time limit for a request and its retries, in seconds. Then: status 504.
    max_body_mib: int = 64  # Maximum size of a request body, in MiB. Larger bodies get status 413.
    # Key that clients must send as a bearer token, or several accepted keys separated by commas. Empty: the
    # environment variable ROUTER_API_KEY, which the process list does not show, or no key if it is unset.
    api_key: Text = ""
    # Key that the router sends to the servers. Empty: the value of ROUTER_SERVER_KEY, or the client's key.
    server_key: Text = ""

    def check(self) -> None:
        """Raise ValueError if a setting is invalid."""
        for name in (
            "max_attempts",
            "unhealthy_after",
            "max_body_mib",
            "health_interval",
            "health_timeout",
            "request_timeout",
        ):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(self, name)}: must be above 0 and finite")
        if not self.queue_timeout >= 0:
            raise ValueError(f"--queue-timeout {self.queue_timeout}: must be at least 0")
        if not re.fullmatch(r"/[!-~]*", self.health_path):
            raise ValueError(f"--health-path {self.health_path!r}: must start with / and have no spaces")
        for path in self.forward:
            if not path.startswith("/"):
                raise ValueError(f"--forward {path}: must start with /")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: must be between 0 and 65535")


def clean_url(text) -> str:
    """Return a server's base URL without a slash or /v1 at its end. Raise ValueError if it is not a URL."""
    with contextlib.suppress(ValueError):  # for example, the port is above 65535
        if re.fullmatch(r"https?://[\w\[][\w.:/\[\]%~-]*", str(text), re.ASCII):
            return str(URL(text)).rstrip("/").removesuffix("/v1")  # The paths of requests contain /v1.
    raise ValueError(f"server URL {text!r}: must look like http://10.0.0.2:8000")


def read_key(given: str, variable: str) -> str:
    """Return the nonempty keys in `given`, or else in the environment variable, joined by commas.

    Raises ValueError if a key contains white space or is not ASCII. (A key file may end with a newline.)
    """
    keys = [key.strip() for key in (given or os.environ.get(variable, "")).split(",")]
    if re.search(r"[^!-~]", "".join(keys)):
        problem = "a key contains white space or a non-ASCII character; separate keys with commas"
        raise ValueError(f"{variable} or its flag: {problem}")
    return ",".join(filter(None, keys))


def read_server_key(given: str) -> str:
    """Return the key for the servers, from `given` or else from ROUTER_SERVER_KEY.

    Raises ValueError if there are several keys.
    """
    key = read_key(given, "ROUTER_SERVER_KEY")
    if "," in key:
        raise ValueError("ROUTER_SERVER_KEY or its flag: must be one key without commas")
    return key


def address_of(host: str, port) -> str:
    """Return HOST:PORT in the form that URLs need."""
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"{host}:{port}"


def warn_if_open(host: str, api_key: str, say) -> None:
    """Print a warning if the network can reach a router that does not require a key."""
    if not api_key and not re.fullmatch(r"localhost|127\.[\d.]+|::1", host):
        say(f"WARNING: --host {host} opens the router to the network without a key; set ROUTER_API_KEY")


# This text follows a flag in an error.
OF_ROUTER = "of router.py (genrm_server.py: in --router-args; with --genrm, serve the judge separately)"
# A server that dies returns these. All other statuses, such as 429 and 501, are answers of a living server.
FAILED = {500, 502, 503, 504}
LACKS = {  # errors for which the router's machine is to blame, not a server
    errno.EMFILE: "out of file descriptors; raise the limit (ulimit -n)",
    errno.ENFILE: "out of file descriptors; raise the limit (sysctl fs.file-max)",
    errno.EADDRNOTAVAIL: "out of local ports; widen their range (sysctl net.ipv4.ip_local_port_range)",
    errno.ENOBUFS: "out of memory for sockets",
    errno.ENOMEM: "out of memory for sockets",
}
BUFFERED = 1 << 20  # bytes; a longer response, or one of unknown length, is streamed without retries
CONNECT_TIMEOUT = 5  # time limit for connecting to a server, in seconds; then another server is tried
# After 30 s, a probe every 10 s; the third that gets no response breaks the connection.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
MAX_HEADER = 1 << 16  # bytes; gateways and their clients may send long cookies or tokens
ALONE_SECONDS = 1.0  # A prompt that kills its server does so within this time.
CLOCK_ERROR = 0.01  # seconds by which the clocks of asyncio and `time` may differ
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
NEW_BODY = HOP_BY_HOP | {"host", "content-length", "expect"}  # aiohttp writes these headers itself.


@dataclass(eq=False)
class Worker:
    """A server and its state in the router. GET /workers shows these fields."""

    url: str
    healthy: bool = False
    why: str = ""  # why the server is healthy or not; empty before the first health check
    turn: float = 0.0  # when the server was last chosen; round robin takes the least recent one
    models: tuple[str, ...] = ()  # what the server's /v1/models listed when the server last wanted to join
    in_flight: int = 0  # number of requests that the server is working on
    failed_in_a_row: int = 0  # number of consecutive requests that failed
    polls_failed: int = 0  # number of consecutive health checks that failed
    is_silent: bool = False  # whether the last health check timed out
    hangs: bool = False  # whether the server left because it answers no requests; it has to be restarted
    requests: int = 0
    failures: int = 0  # number of attempts that got no response or a status in FAILED
    retries: int = 0  # number of requests that came here after another server had failed
    seconds: float = 0.0  # total duration of all attempts


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # A closed terminal or a full disk must not stop the router.
        print(f"{time.strftime('%m-%d %H:%M:%S')} router: {text}", file=sys.stderr, flush=True)


def is_well_formed(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def error_response(status: int, message: str) -> web.Response:
    """Return an error response in the form that OpenAI clients expect."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    return web.json_response(body, status=status)


def forwarded_headers(headers, dropped: set[str]) -> CIMultiDict:
    """Return all headers except the `dropped` ones."""
    kept = CIMultiDict(headers)
    for name in dropped:
        kept.popall(name, None)
    return kept


def session_weight(session_id: str, url: str) -> bytes:
    """Return a server's weight for rendezvous hashing, which chooses the server with the largest weight."""
    return hashlib.sha256(f"{session_id} {url}".encode("utf-8", "surrogateescape")).digest()


def error_text(error: Exception) -> str:
    return str(error) or repr(error)


def open_socket(address) -> socket.socket:
    """Open a socket whose connection breaks after a minute if the server's machine has vanished."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened


class Connector(aiohttp.TCPConnector):
    """A connector that discards connections with unread bytes.

    Such bytes, e.g. a late 408 for an idle connection, would be taken for the response to the next request.
    """

    async def connect(self, *arguments, **options):
        while True:
            connection = await super().connect(*arguments, **options)
            if not connection.protocol.should_close:
                return connection
            connection.close()


class Router:
    """The router: `port = await router.start()` starts it, and `await router.stop()` stops it."""

    def __init__(self, config: Config):
        config.check()
        self.config = config
        self.api_key = read_key(config.api_key, "ROUTER_API_KEY")
        self.server_key = read_server_key(config.server_key)
        self.workers = {url: Worker(url) for url in map(clean_url, config.workers)}
        # A request is of the kind (worker, path).
        self.answered = {}  # kind -> when the latest answer came, and how many seconds it took
        self.unanswered = defaultdict(int)  # kind -> number of such requests since then
        self.models = ()  # the models that each server has to list, which are those of the first one to join
        self.forwarded = tuple(path.rstrip("/") + "/" for path in config.forward)
        self.time_limits = {}  # the asyncio.timeout of each running request -> its worker
        self.waiting = 0
        self.warnings = set()  # values of LACKS that have been printed
        self.suspects = asyncio.Lock()  # Only the request with this lock may be retried after a death.
        self.health_changed = asyncio.Event()

    async def start(self) -> int:
        """Check all servers, open the port and return its number. Raise OSError if the port is taken."""
        config = self.config
        loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            # Servers close idle connections after 5 s.
            connector=Connector(limit=0, keepalive_timeout=1, socket_factory=open_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT),
            auto_decompress=False,
            max_field_size=MAX_HEADER,
        )
        # The traceback of a malformed request quotes the line, which may contain a key.
        logging.getLogger("aiohttp.server").addFilter(is_well_formed)
        server = web.Server(  # faster than web.Application, which has a URL dispatcher
            self.handle,
            request_factory=partial(web.BaseRequest, loop=loop, client_max_size=config.max_body_mib << 20),
            handler_cancellation=True,  # If a client disconnects, its request is cancelled on the server.
            access_log=None,
            auto_decompress=False,
            max_field_size=MAX_HEADER,
        )
        self.runner = web.ServerRunner(server, shutdown_timeout=4.0)  # aiohttp waits twice this long.
        await self.runner.setup()
        workers = [*self.workers.values()]
        # The order of --workers, not of the responses, decides which models the router serves.
        healths = await asyncio.gather(*map(self.get_health, workers))
        for worker, health in zip(workers, healths):
            self.note_health(worker, *health)
        self.poller = asyncio.create_task(self.poll_forever())
        try:
            await web.TCPSite(self.runner, config.host, config.port, backlog=1024).start()
        except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
            where = f"--host {config.host} --port {config.port}"
            why = getattr(error, "strerror", str(error)).rpartition("): ")[2]  # asyncio repeats the address.
            raise OSError(f"{where}: cannot open this port ({why}); pass another --port or --host") from None
        warn_if_open(config.host, self.api_key, say)
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop accepting requests, wait up to 8 s for running requests, then cancel them."""
        await self.runner.cleanup()
        self.poller.cancel()
        await self.session.close()

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await self.poll_all()

    async def poll_all(self) -> None:
        # Older answers say nothing about a running request.
        oldest = time.monotonic() - self.config.request_timeout
        self.answered = {kind: answer for kind, answer in self.answered.items() if answer[0] > oldest}
        # A removed server is checked as long as it has requests, which may hang.
        await asyncio.gather(*map(self.poll, {*self.workers.values(), *self.time_limits.values()}))

    async def get_health(self, worker: Worker, may_join: bool = True) -> tuple[bool, str]:
        """Query a server for its health, and for its models if it may join. Return (is healthy, why)."""
        path, limit = self.config.health_path, self.config.health_timeout
        try:
            async with asyncio.timeout(limit):
                async with self.session.get(worker.url + path, allow_redirects=False) as answer:
                    worker.is_silent = False
                    healthy, why = answer.status < 500, f"{path} returned {answer.status}"
                # A server that did not respond may have been restarted with another model.
                may_join = may_join and (worker.polls_failed or not worker.healthy)
                if healthy and may_join and not self.config.mixed_models:
                    path = "/v1/models"
                    worker.models = await self.get_models(worker)
                return healthy, why
        except Exception as error:  # All errors count as unhealthy, and none may end the poller.
            worker.is_silent = isinstance(error, TimeoutError)
            if type(error) is TimeoutError:  # not one of aiohttp's, such as a time limit for connecting
                remedy = "if it is slow, raise --health-timeout or choose another --health-path"
                return False, f"{path} did not respond within {limit:g} s; {remedy}"
            stays_healthy = worker.healthy and self.lacks_something(error)  # The server is not to blame.
            return stays_healthy, f"{path}: {error_text(error)}"

    async def get_models(self, worker: Worker) -> tuple[str, ...]:
        """Return the names and paths of the models that a server lists. Servers of other kinds list none."""
        key = self.server_key or self.api_key.rpartition(",")[2]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = worker.url + "/v1/models"
        async with self.session.get(url, headers=headers, allow_redirects=False) as answer:
            body = await answer.read()
        if answer.status not in (200, 404):
            say(f"WARNING: {url} returned {answer.status}, so nobody notices if its models are others")
        models = []
        try:
            for model in json.loads(body)["data"]:
                name = str(model["id"])
                root = model.get("root")
                if root and str(root) != name:
                    name += f" ({root})"
                models.append(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            return ()
        return tuple(sorted(models))

    def find_other_models(self, worker: Worker) -> str:
        """Return why the models of a server keep the server out of the rotation, or an empty string."""
        if not worker.models or worker.models == self.models or self.workers.get(worker.url) is not worker:
            return ""
        # The list of a gateway may change, which matters only if other servers could get a request.
        is_same_gateway = len(self.workers) == 1 and set(self.models) & set(worker.models)
        if not self.models or is_same_gateway:
            self.models = worker.models
            return ""
        theirs, ours = ", ".join(worker.models), ", ".join(self.models)
        return (
            f"its models ({theirs:.200}) differ from those of the first server ({ours:.200}); start one "
            "router per model, or pass --mixed-models if any server may answer any request"
        )

    def lacks_something(self, error: Exception) -> bool:
        """Return whether the router lacks file descriptors, ports or memory for a connection."""
        lack = LACKS.get(getattr(error, "errno", None))
        if lack and lack not in self.warnings:
            self.warnings.add(lack)
            say(f"WARNING: requests have to wait, because the router is {lack}")
        return lack is not None

    async def poll(self, worker: Worker) -> None:
        """Check the health of one server, and add it to the rotation or remove it."""
        self.note_health(worker, *await self.get_health(worker))

    def note_health(self, worker: Worker, healthy: bool, why: str) -> None:
        """Add a server to the rotation or remove it, according to a health check."""
        if healthy:
            worker.polls_failed = 0
            other_models = self.find_other_models(worker)
            if other_models and worker.why != other_models:
                worker.why = ""  # This makes `set_health` print the new reason.
            if worker.hangs and self.healthy_workers():
                return
            worker.hangs = False
            self.set_health(worker, not other_models, other_models or why)
        else:
            if not worker.is_silent:
                worker.hangs = False  # The server has ended. It returns when it has been restarted.
            worker.polls_failed += 1
            if worker.polls_failed >= self.config.unhealthy_after or not worker.why:
                self.set_health(worker, False, why)
                # Without another server, a server that is only busy should finish its requests.
                if any(not one.polls_failed for one in self.healthy_workers()):
                    self.move_requests(worker)

    def move_requests(self, worker: Worker) -> None:
        """Take the requests away from a server that hangs, so that `forward` sends them to other servers."""
        for limit, other in self.time_limits.items():
            if other is worker:
                with contextlib.suppress(RuntimeError):  # The limit may be expiring already.
                    limit.reschedule(0)

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy == healthy and worker.why:
            return
        worker.healthy = healthy
        worker.why = why
        worker.failed_in_a_row = 0
        self.health_changed.set()  # This wakes up all waiting requests.
        self.health_changed.clear()
        state = "in" if healthy else "not in"
        say(f"{worker.url} is {state} the rotation ({why})")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request. Errors from /generate are returned as plain text."""
        response = await self.respond(request)
        if response.status >= 400 and request.path == "/generate":
            # Functions written for SGLang read keys of the response without checking its status. They could
            # mistake a dict with an error for a result, whereas a string makes them fail.
            response.text = json.dumps(response.body.decode("utf-8", "replace"))
            response.headers.pop("Content-Encoding", None)
            response.content_type = "text/plain"
        return response

    async def respond(self, request) -> web.StreamResponse:
        """Check the key, then serve an endpoint of the router or forward the request."""
        path = request.rel_url.raw_path
        if path == "/health":
            healthy = len(self.healthy_workers())
            hanging = sum(worker.hangs for worker in self.workers.values())
            state = {
                "healthy": healthy,
                "servers": len(self.workers),
                "waiting": self.waiting,
                "hanging": hanging,
            }
            return web.json_response(state, status=200 if healthy else 503)
        changes_servers = path == "/workers" and request.method != "GET"
        key = self.api_key
        if changes_servers and self.server_key:
            key = self.server_key  # Otherwise a client could add its own server, which would get the key.
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        known = [hmac.compare_digest(given, b"Bearer " + one.encode()) for one in key.split(",")]
        if key and not any(known):
            return error_response(401, "missing or wrong API key; send 'Authorization: Bearer KEY'")
        if "Origin" in request.headers:  # Only browsers send it. A page could use the servers and their key.
            return error_response(403, "a web page must not use the router")
        if path == "/metrics":
            return web.Response(text=self.metrics())
        is_forwarded = (path + "/").startswith(self.forwarded) and ".." not in unquote(path)
        if path != "/workers" and not is_forwarded:
            return error_response(404, f"{path} is not forwarded; add the path to --forward {OF_ROUTER}")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            size = self.config.max_body_mib
            message = f"the request body is larger than {size} MiB; raise --max-body-mib {OF_ROUTER}"
            return error_response(413, message)
        if path == "/workers":
            return await self.serve_workers(request, body)
        return await self.forward(request, body)

    def metrics(self) -> str:
        """Return the state of the servers as Prometheus text."""
        lines = [f"router_waiting {self.waiting}"]
        for name in (
            "requests_total",
            "failures_total",
            "retries_total",
            "seconds_total",
            "in_flight",
            "healthy",
        ):
            for worker in self.workers.values():
                value = float(getattr(worker, name.removesuffix("_total")))
                lines.append(f'router_{name}{{worker="{worker.url}"}} {value}')
        return "\n".join(lines) + "\n"

    def healthy_workers(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.healthy]

    def acquire(self, tried, session_id: str) -> Worker | None:
        """Choose a healthy server that is not in `tried`, or return None. Count the request as in flight."""
        ready = [one for one in self.healthy_workers() if one not in tried]
        if not ready:
            return None
        if session_id:  # With rendezvous hashing, only sessions of a server that joins or leaves move.
            worker = max(ready, key=lambda one: session_weight(session_id, one.url))
        elif self.config.policy == "least_loaded":
            worker = min(ready, key=lambda one: (one.in_flight, one.turn))
        else:
            worker = min(ready, key=lambda one: one.turn)
        worker.turn = time.monotonic()
        worker.in_flight += 1
        return worker

    async def choose(self, tried: list, avoided: list, suspect: bool, deadline: float, session_id: str):
        """Choose a server as `acquire` does, but let some requests wait. Return None if there is no server.

        An `avoided` server is chosen only if there is no other one.

        A request that has not reached a living server may wait for one. A request whose server died is a
        suspect and waits for a lock: one suspect is sent every ALONE_SECONDS, to find the request that kills
        servers. A suspect without a server releases the lock.
        """
        timeout_s = min(self.config.queue_timeout, deadline - time.monotonic())
        lock = contextlib.nullcontext()
        if suspect:
            lock = self.suspects
        else:
            worker = self.acquire(tried + avoided, session_id) or self.acquire(tried, session_id)
            if worker or tried:
                return worker
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    async with lock:
                        if suspect:
                            await asyncio.sleep(ALONE_SECONDS)
                        worker = self.acquire(tried, session_id)
                    if worker:
                        return worker
                    await self.health_changed.wait()  # without the lock, which others can use
        except TimeoutError:
            return self.acquire(tried, session_id)
        finally:
            self.waiting -= 1

    async def forward(self, request, body: bytes) -> web.StreamResponse:
        """Send the request to one server after another until a server responds."""
        config = self.config
        deadline = time.monotonic() + config.request_timeout
        headers = forwarded_headers(request.headers, NEW_BODY)
        if self.server_key:
            headers["Authorization"] = f"Bearer {self.server_key}"
        session_id = request.headers.get("X-Session-Id", "")
        tried = []  # living servers that have seen the request
        avoided = []  # the server for which the router lacked a connection, if any
        fates = []  # what became of each server that has seen the request (see `diagnose_failure`)
        answer, problem = None, ""
        while len(fates) < config.max_attempts:
            worker = await self.choose(tried, avoided, "dead" in fates, deadline, session_id)
            if not worker:
                break
            if fates:
                worker.retries += 1
            begun = time.monotonic()
            error = None
            try:
                answer = await self.send(worker, request, headers, body, deadline)
                if answer.status not in FAILED:
                    worker.failed_in_a_row = 0
                    return answer
                problem = f"{worker.url} returned {answer.status}"
            except (aiohttp.ClientError, OSError) as caught:
                error = caught
                problem = f"{worker.url}: {error_text(error)}"
            seconds = time.monotonic() - begun
            fate = await self.diagnose_failure(worker, error, problem, deadline)
            if fate == "late":
                remedy = f"raise --request-timeout {OF_ROUTER}"
                return error_response(504, f"no response within {config.request_timeout:g} s; {remedy}")
            if fate == "lacking" and not session_id:
                avoided = [worker]  # A lack of ports may concern only connections to this server.
            if fate in ("lacking", "unreachable"):
                continue  # No server has seen the request.
            fates.append(fate)
            if fate == "alive":
                tried.append(worker)
            deaths = fates.count("dead")
            if fate == "dead" and (deaths > 2 or (deaths > 1 and seconds < ALONE_SECONDS)):
                text = f"the request killed {deaths} servers (last: {problem}); do not send it again"
                return error_response(422, text)
        if answer:
            return answer
        if not problem:
            states = "; ".join(f"{worker.url}: {worker.why}" for worker in self.workers.values())
            problem = f"no server is healthy ({states or 'there are none'})"
        response = error_response(503, f"no server could answer the request: {problem}")
        response.headers["Retry-After"] = str(math.ceil(config.health_interval))
        return response

    async def diagnose_failure(self, worker: Worker, error: Exception | None, problem: str, deadline) -> str:
        """Find out why a server failed a request, and update the server's health.

        Returns:
            lacking: The router lacks something for a connection.
            unreachable: The server accepts no connection.
            late: The time limit of the request has passed.
            alive: The server is alive, or has answered although its health check fails. It may hang.
            dead: The server has died, perhaps because of the request.
            silent: The request and the server's health check timed out, which does not count as a death.
        """
        if self.lacks_something(error):
            await asyncio.sleep(0.2)  # Requests that finish in the meantime free what is lacking.
            return "lacking"
        if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
            worker.failures += 1
            self.set_health(worker, False, problem)
            return "unreachable"
        if time.monotonic() >= deadline - CLOCK_ERROR:
            return "late"
        worker.failures += 1
        # The server hangs, or the keepalive probes of the connection got no response.
        timed_out = isinstance(error, TimeoutError) or getattr(error, "errno", 0) == errno.ETIMEDOUT
        if timed_out and worker.hangs:
            return "alive"
        if worker.polls_failed or not (await self.get_health(worker, may_join=False))[0]:
            self.set_health(worker, False, f"{problem}, and its health check fails")
            if worker.is_silent and not error:  # The server answered; only its health check is slow.
                return "alive"
            return "silent" if worker.is_silent and timed_out else "dead"
        worker.failed_in_a_row += 1
        is_last = len(self.healthy_workers()) == 1
        if worker.failed_in_a_row >= self.config.unhealthy_after and not is_last:
            self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row: {problem}")
        return "alive"

    def note_answer(self, kind: tuple[Worker, str], begun: float) -> None:
        """Remember that the server answers requests to the path, for `count_unanswered`."""
        now = time.monotonic()
        self.answered[kind] = now, now - begun
        self.unanswered.pop(kind, None)

    def count_unanswered(self, kind: tuple[Worker, str], begun: float) -> None:
        """Count a request that ran out of time. After --unhealthy-after in a row, the server leaves.

        The request counts if its server has answered no request to the path since it began, whereas another
        server has, in less than half of that time. Otherwise, all servers may be slow, or the client may be
        cancelling its requests. Some clients send one request after the other. Answers of another server
        therefore count as well if they came up to that long before the request began, unless this server
        also answered in that period.
        """
        worker, path = kind
        since = begun
        waited = time.monotonic() - begun
        never = (-math.inf, 0.0)
        latest, _ = self.answered.get(kind, never)
        if latest > begun or not worker.healthy:
            return
        if latest < begun - waited:
            since -= waited
        others = [self.answered.get((one, path), never) for one in self.healthy_workers()]
        if not any(latest > since and seconds < waited / 2 for latest, seconds in others):
            return
        worker.failures += 1
        self.unanswered[kind] += 1
        if self.unanswered[kind] >= self.config.unhealthy_after:
            count = self.unanswered.pop(kind)
            worker.hangs = True
            self.set_health(
                worker,
                False,
                f"it hangs: {count} requests in a row to {path} got no answer "
                "although other servers answered; restart the server",
            )
            self.move_requests(worker)

    async def send(self, worker: Worker, request, headers, body: bytes, deadline: float):
        """Send the request to a server and return the response. A long response is streamed to the client.

        Raises aiohttp.ClientError and OSError.
        """
        worker.requests += 1
        begun = time.monotonic()
        kind = worker, request.rel_url.raw_path
        response = None
        url = URL(worker.url + request.rel_url.raw_path_qs, encoded=True)
        limit = asyncio.timeout(deadline - begun)  # `poll` ends it early if the server is unhealthy.
        self.time_limits[limit] = worker
        call = self.session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        )
        try:
            async with limit, call as answer:
                start = {"status": answer.status, "reason": answer.reason}
                if answer.status >= 400 or (answer.content_length or math.inf) <= BUFFERED:
                    content = await answer.read()
                    if answer.status < 400:  # Servers reject requests even if their engine hangs.
                        self.note_answer(kind, begun)
                    kept = forwarded_headers(answer.headers, NEW_BODY)
                    return web.Response(**start, body=content, headers=kept)
                response = web.StreamResponse(**start, headers=forwarded_headers(answer.headers, HOP_BY_HOP))
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    self.note_answer(kind, begun)
                    await response.write(chunk)
                await response.write_eof()
                return response
        except asyncio.CancelledError:  # The client has disconnected, perhaps because of a time limit.
            self.count_unanswered(kind, begun)
            raise
        except (aiohttp.ClientError, OSError) as error:
            if time.monotonic() >= deadline - CLOCK_ERROR:
                self.count_unanswered(kind, begun)
            if response is None:
                raise
            raise asyncio.CancelledError from error  # This closes the client's connection.
        finally:
            del self.time_limits[limit]
            worker.in_flight -= 1
            worker.seconds += time.monotonic() - begun

    async def serve_workers(self, request, body: bytes) -> web.Response:
        """Answer /workers: list, add or remove servers."""
        if request.method == "GET":
            return web.json_response({"workers": [vars(worker) for worker in self.workers.values()]})
        try:
            if request.method == "DELETE":
                url = clean_url(request.rel_url.query["url"])
                if url not in self.workers:
                    raise ValueError(f"there is no server {url}")
                worker = self.workers.pop(url)
                if not any(one.models == self.models for one in self.workers.values()):
                    self.models = ()
            else:
                url = clean_url(json.loads(body)["url"])
                worker = self.workers.setdefault(url, Worker(url))
                worker.hangs = False  # It may have been restarted between two health checks.
                await self.poll(worker)
        except (ValueError, KeyError, TypeError) as error:  # Broken UTF-8 is a ValueError.
            usage = 'send POST /workers {"url": "http://host:port"} or DELETE /workers?url=http://host:port'
            return error_response(400, f"invalid request ({error_text(error)}); {usage}")
        return web.json_response(vars(worker))


class SglangGenerate:
    """A middleware for vLLM's server that answers SGLang's POST /generate by calling /v1/completions.

    The request is {"text" or "input_ids": one prompt or a list, "sampling_params": {"max_new_tokens": 128,
    ...}}. The response is {"text", "output_ids", "meta_info"}, or a list of these for a list of prompts.
    Errors of /v1/completions are returned unchanged. Not covered: streaming.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/generate":
            return await self.app(scope, receive, send)
        from starlette.requests import Request
        from starlette.responses import Response

        completion = completion_request(await Request(scope, receive).body())
        bodies = [json.dumps(completion).encode()]
        messages = []

        async def receive_completion():
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await receive()

        async def collect(message):
            messages.append(message)

        await self.app(scope | {"path": "/v1/completions"}, receive_completion, collect)
        status = messages[0]["status"]
        body = b"".join(message.get("body", b"") for message in messages)
        if status == 200 and body != b"null":  # vLLM returns null if the client has disconnected.
            answers = sglang_answers(json.loads(body))
            prompt = completion["prompt"]
            is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
            if not is_batch and len(answers) == 1:
                answers = answers[0]
            body = json.dumps(answers)
        await Response(body, status, media_type="application/json")(scope, receive, send)


def completion_request(body: bytes) -> dict:
    """Translate an SGLang request into one for /v1/completions, or return {}, which vLLM rejects."""
    try:
        given = json.loads(body)
        params = {"max_new_tokens": 128} | (given.get("sampling_params") or {})
        params["max_tokens"] = params.pop("max_new_tokens")
        params["prompt"] = given.get("input_ids") or given.get("text")
    except (ValueError, TypeError, AttributeError):
        return {}
    return params | {"return_token_ids": True}


def sglang_answers(completion: dict) -> list[dict]:
    """Translate a response of /v1/completions into SGLang responses, one for each choice."""
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


async def serve(config: Config) -> None:
    """Run until SIGINT or SIGTERM, then let running requests finish."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router = Router(config)
    try:
        port = await router.start()
        address = address_of(config.host, port)
        print(f"router listening at http://{address} ({len(router.workers)} servers)", flush=True)
        gc.freeze()  # Repeated garbage collection of these objects costs a fifth of the throughput.
        gc.set_threshold(50_000)
        await stop.wait()
    finally:
        await router.stop()


def cli(config, doc: str | None, **options):
    """Parse this script's command line, with further options of tyro.cli.

    --help shows the first two paragraphs of `doc`, the script's docstring.
    """
    if {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback.
    about = "\n\n".join((doc or "").split("\n\n")[:2])  # With python -OO, there are no docstrings.
    prog = f"python {sys.argv[0]}"
    return tyro.cli(config, prog=prog, description=about, config=[tyro.conf.DisallowNone], **options)


if __name__ == "__main__":
    # Each running request needs two file descriptors, and the usual limit is 1,024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        uvloop.run(serve(cli(Config, __doc__)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
