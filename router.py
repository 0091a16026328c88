"""One HTTP address in front of many servers: a router for reward models that has to last a training run.

    python router.py --port 30000 --workers http://a:8000 http://b:8000

A server that fails leaves the rotation, and comes back when its /health answers again. A client that goes
away stops its work. What is not among --forward is refused. Own endpoints:
    GET /health                 200 while at least one server is healthy, else 503; never asks for a key
    GET /workers, /metrics      the servers and their state; Prometheus text
    POST /workers {"url": U}    adds a server; asks for the servers' key, as does
    DELETE /workers?url=U       which takes one out; what it is at goes on
How an attempt is judged:
    no connection               no server has seen the request: this one leaves, the request goes on or waits
    502-504                     counts against the server, and another one is asked
    500, a cut connection       /health is asked:
        it is good              one more is asked, no third; it counts against the first if the second answers
        it is not               the server has died and leaves. What it was at waits for another one in a line
                                that moves once a second, so that no more than one kills the next one
    any other answer            is passed on; once a part of it is out, there is no retry
None that lives is asked twice. After --unhealthy-after failures in a row one leaves, unless it is the last.
Left out: TLS towards clients, HTTP/2, WebSockets, trailers, caching, several processes, prefix-aware
routing, systems other than Linux. Needs none of our other files.
"""

import asyncio
import contextlib
import errno
import gc
import hmac
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

import aiohttp
import tyro
import uvloop
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL


@dataclass
class Config:
    """One HTTP address in front of many servers."""

    workers: tuple[str, ...] = ()  # Base URLs of the servers, such as http://10.0.0.2:8000.
    allow_empty: bool = False  # Start without servers; they are added later through POST /workers.
    host: str = "127.0.0.1"  # Address to listen on. 0.0.0.0 opens it to the network: set an API key then.
    port: int = 30000  # Port to listen on; 0 lets the system choose (it is printed).
    # Paths that are passed on, with all below them; / is everything.
    forward: tuple[str, ...] = ("/v1", "/v2", "/inference", "/generate", "/classify", "/pooling", "/score",
                                "/rerank", "/embed", "/embeddings", "/tokenize", "/detokenize")
    policy: Literal["round_robin", "least_loaded"] = "round_robin"  # In turn, or to the least busy server.
    max_attempts: int = 4  # How many servers one request is sent to.
    unhealthy_after: int = 3  # Failures in a row after which a server leaves the rotation.
    health_interval: float = 5.0  # Seconds between two looks at /health (any status below 500 is healthy).
    queue_timeout: float = 0.0  # Seconds a request waits while no server is healthy; 0 answers 503 at once.
    max_waiting: int = 20000  # Requests that may wait like that; above it 503 at once.
    request_timeout: float = 3600.0  # Seconds until a request must be answered, retries included; then 504.
    connect_timeout: float = 5.0  # Seconds a connection to a server may take; then another server is asked.
    max_body_mib: int = 64  # Largest request body in MiB; above it 413.
    api_key: str = ""  # Key that clients send as Bearer token. Empty: ROUTER_API_KEY, which ps does not show.
    server_key: str = ""  # Key sent to servers. Empty: ROUTER_SERVER_KEY, else the client's goes on.

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        for name in ("max_attempts", "unhealthy_after", "max_body_mib",
                     "health_interval", "request_timeout", "connect_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                self.refuse(name, "must be above 0")
        if not 0 <= self.port <= 65535:
            self.refuse("port", "must be from 0 to 65535")
        if not (self.workers or self.allow_empty):
            self.refuse("workers", "name a server, or pass --allow-empty")
        if {path[:1] for path in self.forward} != {"/"}:
            self.refuse("forward", "name paths such as /v1")

    def refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: {remedy}")


def clean_url(text) -> str:
    """A server's base URL without the slash at its end. ValueError if it is not one."""
    with contextlib.suppress(ValueError):  # such as a port above 65535
        if re.fullmatch(r"https?://[\w.:/\[\]%~-]+", str(text), re.ASCII):
            url = URL(text)
            if url.host and url.port:
                return str(url).rstrip("/")
    raise ValueError(f"server URL {text!r}: needs http:// or https:// and a host: http://10.0.0.2:8000")


def read_key(given: str, variable: str) -> str:
    """A key as given, or from the environment. ValueError where not every client and server could send it."""
    key = (given or os.environ.get(variable, "")).strip()  # a secret's file may end with a newline
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable}: the key has characters that are not plain ASCII; take another one")
    return key


def warn_if_open(host: str, api_key: str, say) -> None:
    """Says so where the network can reach a router that asks for no key."""
    if not api_key and not re.fullmatch(r"localhost|127\.[\d.]+|::1", host):
        say(f"WARNING: --host {host} is open to the network and no key is asked for; set ROUTER_API_KEY")


FAILED = {500, 502, 503, 504}
NO_FILES = {errno.EMFILE, errno.ENFILE}  # too many files are open here: no server's doing
IN_LINE = 128  # a server with so many requests takes none from the line: the first one back must not get all
BUFFERED = 1 << 20  # bytes; an answer that is longer, or of unknown length, is streamed and cannot be retried
BODY_SECONDS = 120  # for a request's body to arrive
HEALTH_SECONDS = 10  # for a server to answer /health: a busy one is slow
IDLE_SECONDS = 75  # for a client's connection to bring a whole header
ALONE_SECONDS = 1.0  # a prompt that kills its server does so within that time
DRAIN_SECONDS = 8  # for requests in flight to end after Ctrl-C or SIGTERM
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
NEW_BODY = HOP_BY_HOP | {"host", "content-length", "expect"}  # aiohttp writes its own
PARSING = dict(auto_decompress=False, max_line_size=1 << 16, max_field_size=1 << 16)  # both ways: as it comes


@dataclass(eq=False)
class Worker:
    """One server and what is known about it."""
    url: str
    healthy: bool = False
    why: str = ""  # it is healthy, or not
    turn: float = 0.0  # when it was last chosen: round robin is "least recently chosen"
    in_flight: int = 0
    failed_in_a_row: int = 0  # requests
    doubts: int = 0  # failures since its last answer that the request may have brought about
    polls_failed: int = 0  # looks at /health, in a row
    requests: int = 0
    failures: int = 0
    retries: int = 0  # attempts that this server got because another attempt had failed
    seconds: float = 0.0  # of all attempts


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full: no reason to stop
        print(f"{time.strftime('%H:%M:%S')} router: {text}", file=sys.stderr, flush=True)


def error_response(status: int, message: str, **headers: str) -> web.Response:
    """An error of the router itself, as OpenAI clients know it."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    response = web.json_response(body, status=status, headers=headers)
    response.force_close()  # the request's body may be unread
    return response


def end_to_end(headers, dropped: set[str]) -> CIMultiDict:
    """The headers that go on: all but those about this one connection."""
    kept = CIMultiDict(headers)
    for name in [*dropped, *headers.get("Connection", "").split(",")]:
        kept.popall(name.strip(), None)
    return kept


def describe(error: Exception) -> str:
    return str(error) or repr(error)


class Connector(aiohttp.TCPConnector):
    async def connect(self, *args, **options):
        """A connection on which no bytes came that nobody asked for: they would be the next answer."""
        while True:
            connection = await super().connect(*args, **options)
            if not connection.protocol.should_close:
                return connection
            connection.close()


class Router:
    """The router as an object: `port = await router.start()`, in the end `await router.stop()`."""

    def __init__(self, config: Config):
        config.check()
        self.config = config
        self.api_key = read_key(config.api_key, "ROUTER_API_KEY")
        self.server_key = read_key(config.server_key, "ROUTER_SERVER_KEY")
        self.workers = {url: Worker(url) for url in map(clean_url, config.workers)}
        self.forwarded = tuple(path.rstrip("/") + "/" for path in config.forward)
        self.limits = defaultdict(set)  # worker -> time limits of what it is at
        self.waiting = 0
        self.line = asyncio.Lock()  # the first in line has it
        self.suspects = asyncio.Lock()  # the same for those whose server died
        self.news = asyncio.Event()

    async def start(self) -> int:
        """Looks at every server once, opens the port and returns it. OSError if it cannot be had."""
        config = self.config
        loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            connector=Connector(limit=0, keepalive_timeout=1),  # uvicorn's is 5 s, and it may look late
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(connect=config.connect_timeout),
            **PARSING,
        )

        def as_request(*parts) -> web.BaseRequest:
            return web.BaseRequest(*parts, loop, client_max_size=config.max_body_mib << 20)

        server = web.Server(  # without a URL dispatcher
            self.handle,
            request_factory=as_request,
            handler_cancellation=True,  # when a client goes away its server's work ends
            keepalive_timeout=IDLE_SECONDS,
            access_log=None,
            **PARSING,
        )
        self.runner = web.ServerRunner(server, shutdown_timeout=DRAIN_SECONDS / 2)  # aiohttp waits twice
        await self.runner.setup()
        await self.look_at_all()
        self.poller = asyncio.create_task(self.poll_forever())
        await web.TCPSite(self.runner, config.host, config.port, backlog=1024).start()
        warn_if_open(config.host, self.api_key, say)
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Takes no new requests, waits up to DRAIN_SECONDS for those in flight, then ends them."""
        await self.runner.cleanup()
        self.poller.cancel()
        await self.session.close()

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await self.look_at_all()

    async def look_at_all(self) -> None:
        await asyncio.gather(*map(self.look_at, self.workers.values()))

    async def ask_health(self, worker: Worker) -> str:
        """What is wrong with a server; nothing if it is healthy."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                async with self.session.get(worker.url + "/health", allow_redirects=False) as answer:
                    if answer.status < 500:
                        return ""
                    return f"/health answers {answer.status}"
        except Exception as error:  # whatever it is, it is not health; and the poller must never die
            if worker.healthy and getattr(error, "errno", 0) in NO_FILES:
                return ""  # as far as is known
            return f"/health: {describe(error)}"

    async def look_at(self, worker: Worker) -> None:
        """Asks one server for its health and draws the consequence."""
        problem = await self.ask_health(worker)
        if not problem:
            worker.polls_failed = 0
            self.set_health(worker, True, "/health is good")
            return
        worker.polls_failed += 1
        if worker.polls_failed >= self.config.unhealthy_after or not worker.why:
            self.set_health(worker, False, problem)
            while self.limits[worker]:  # what hangs there is asked elsewhere
                self.limits[worker].pop().reschedule(0)

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy == healthy and worker.why:
            return
        worker.healthy = healthy
        worker.why = why
        worker.failed_in_a_row = 0
        self.news.set()
        state = "in" if healthy else "not in"
        say(f"{worker.url} is {state} the rotation ({why})")

    def blame(self, worker: Worker, why: str) -> None:
        """A failure that the request may have brought about: for that the last server does not leave."""
        worker.failed_in_a_row += 1
        last = sum(worker.healthy for worker in self.workers.values()) == 1
        if worker.failed_in_a_row >= self.config.unhealthy_after and not last:
            self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row, the last: {why}")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here."""
        response = await self.respond(request)
        if response.status >= 400 and request.path == "/generate":
            # Functions written for SGLang look for keys of a dict, whatever the status: this is none.
            response.text = json.dumps(response.text)
            response.content_type = "text/plain"
        return response

    async def respond(self, request) -> web.StreamResponse:
        """Checks the key; then one of our own endpoints answers, or a server."""
        path = request.rel_url.raw_path
        if path == "/health":
            healthy = sum(worker.healthy for worker in self.workers.values())
            state = {"healthy": healthy, "servers": len(self.workers), "waiting": self.waiting}
            return web.json_response(state, status=200 if healthy else 503)
        key = self.api_key
        if path == "/workers" and request.method != "GET" and self.server_key:
            key = self.server_key  # who may name a server may have that key sent there
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if key and not hmac.compare_digest(given, b"Bearer " + key.encode()):
            return error_response(401, "missing or wrong API key: send 'Authorization: Bearer KEY'")
        if path == "/metrics":
            return web.Response(text=self.metrics())
        whole = unquote(path) + "/"
        is_forwarded = path[:1] == "/" and whole.startswith(self.forwarded) and "/../" not in whole
        if path != "/workers" and not is_forwarded:
            return error_response(404, f"{path}: not forwarded (--forward {' '.join(self.config.forward)})")
        try:
            if "Expect" in request.headers:  # curl waits for it with large bodies
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            return error_response(408, f"the request body did not arrive within {BODY_SECONDS} s")
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"request body above {self.config.max_body_mib} MiB (--max-body-mib)")
        if path == "/workers":
            return await self.serve_workers(request, body)
        return await self.forward(request, body)

    def metrics(self) -> str:
        """Prometheus' text. failures: attempts without an answer, or with one of FAILED."""
        lines = ["# TYPE router_waiting gauge", f"router_waiting {self.waiting}"]
        for name in ("requests_total", "failures_total", "retries_total", "seconds_total",
                     "in_flight", "healthy"):
            lines.append(f"# TYPE router_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            for worker in self.workers.values():
                value = float(getattr(worker, name.removesuffix("_total")))
                lines.append(f'router_{name}{{worker="{worker.url}"}} {value}')
        return "\n".join(lines) + "\n"

    def take(self, tried=(), room: float = math.inf) -> Worker | None:
        """A place on the next healthy server that was not tried and has fewer than `room` requests."""
        ready = [one for one in self.workers.values()
                 if one.healthy and one.in_flight < room and one not in tried]
        if not ready:
            return None

        def order(one: Worker) -> tuple:
            doubts = one.doubts if tried else 0  # who asks again shall not meet another one that fails
            load = one.in_flight if self.config.policy == "least_loaded" else 0
            return doubts, load, one.turn

        worker = min(ready, key=order)
        worker.turn = time.monotonic()
        worker.in_flight += 1
        return worker

    async def choose(self, tried: list[Worker], suspect: bool, deadline: float) -> Worker | None:
        """A place on a server. What no living one has seen may wait in line for it.

        Suspects, whose server has died, have a line that lets in one every ALONE_SECONDS."""
        patience = min(self.config.queue_timeout, deadline - time.monotonic())
        if tried or patience <= 0:
            return self.take(tried)
        line = self.suspects if suspect else self.line
        if not suspect and not line.locked():
            worker = self.take()
            if worker:
                return worker
        if self.waiting >= self.config.max_waiting:
            return None
        self.waiting += 1
        try:
            async with asyncio.timeout(patience), line:
                if suspect:
                    await asyncio.sleep(ALONE_SECONDS)
                while True:
                    worker = self.take(room=IN_LINE)
                    if worker:
                        return worker
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            return self.take()  # room or not
        finally:
            self.waiting -= 1

    async def forward(self, request, body: bytes) -> web.StreamResponse:
        """Asks servers until one answers."""
        config = self.config
        deadline = time.monotonic() + config.request_timeout
        headers = end_to_end(request.headers, NEW_BODY)
        if self.server_key:
            headers["Authorization"] = f"Bearer {self.server_key}"
        tried = []  # living servers that have seen the request
        doubted = {}  # those of them that may have failed because of it, and how
        deaths = 0  # of servers that may have died of it
        attempts = 0
        answer, status, problem = None, 503, ""
        while attempts < config.max_attempts and len(doubted) + deaths < 2:
            worker = await self.choose(tried, deaths > 0, deadline)
            if not worker:
                break
            if problem:
                worker.retries += 1
            begun = time.monotonic()
            doubt = True
            try:
                answer = await self.ask(worker, request, headers, body, deadline)
                if answer.status not in FAILED:
                    worker.failed_in_a_row = worker.doubts = 0
                    for other, why in doubted.items():
                        self.blame(other, why)
                    return answer
                problem = f"{worker.url} answers {answer.status}"
                doubt = answer.status == 500
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{worker.url}: {describe(error)}"
                if getattr(error, "errno", 0) in NO_FILES:
                    break
                status = 504 if isinstance(error, TimeoutError) else 503
                if time.monotonic() >= deadline:  # nobody's fault: one that hangs leaves by its health
                    problem = f"no answer within {config.request_timeout:g} s (--request-timeout)"
                    break
                if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                    worker.failures += 1
                    self.set_health(worker, False, problem)
                    continue  # no server has seen the request
            lasted = time.monotonic() - begun
            attempts += 1
            worker.failures += 1
            if not doubt:
                tried.append(worker)
                self.blame(worker, problem)
                continue
            worker.doubts += 1
            if worker.polls_failed or await self.ask_health(worker):
                self.set_health(worker, False, f"{problem}, and /health fails")
                if not deaths or lasted < ALONE_SECONDS:
                    deaths += 1
            else:
                tried.append(worker)
                doubted[worker] = problem
        if answer:
            return answer
        why = f"no server could answer: {problem or 'no healthy server'}"
        return error_response(status, why, **{"Retry-After": str(math.ceil(config.health_interval))})

    async def ask(self, worker: Worker, request, headers, body: bytes, deadline: float):
        """One server's answer; a long one has been passed on already. Raises aiohttp's errors and OSError."""
        worker.requests += 1
        begun = time.monotonic()
        response = None
        url = URL(worker.url + request.rel_url.raw_path_qs, encoded=True)
        limit = asyncio.timeout(deadline - begun)  # and the end when the server leaves by its health
        self.limits[worker].add(limit)
        asked = self.session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False)
        try:
            async with limit, asked as answer:
                start = {"status": answer.status, "reason": answer.reason}
                short = (answer.content_length or math.inf) <= BUFFERED and request.method != "HEAD"
                if short or answer.status >= 400:
                    content = await (answer.read() if short else answer.content.read(BUFFERED))
                    return web.Response(**start, body=content, headers=end_to_end(answer.headers, NEW_BODY))
                response = web.StreamResponse(**start, headers=end_to_end(answer.headers, HOP_BY_HOP))
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError) as error:
            if response is None or not response.prepared:
                raise
            if request.transport and not request.transport.is_closing():  # the client has not gone away
                if time.monotonic() < deadline:
                    worker.failures += 1
                    self.blame(worker, f"{worker.url}: {describe(error)}")
                request.transport.abort()
            raise asyncio.CancelledError from error
        finally:
            self.limits[worker].discard(limit)
            worker.in_flight -= 1
            worker.seconds += time.monotonic() - begun
            self.news.set()

    async def serve_workers(self, request, body: bytes) -> web.Response:
        if request.method == "GET":
            return web.json_response({"workers": [vars(worker) for worker in self.workers.values()]})
        if request.method not in ("POST", "DELETE"):
            return error_response(405, f"{request.method} /workers: use GET, POST or DELETE")
        try:
            asked = json.loads(body) if request.method == "POST" else request.rel_url.query
            url = clean_url(asked["url"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # broken UTF-8 is a ValueError
            usage = 'write POST /workers {"url": "http://host:port"} or DELETE /workers?url=http://host:port'
            return error_response(400, f"{usage} ({describe(error)})")
        if request.method == "POST":
            worker = self.workers.setdefault(url, Worker(url))
            await self.look_at(worker)
        elif url in self.workers:
            worker = self.workers.pop(url)
        else:
            return error_response(404, f"DELETE /workers: {url} is not one of the servers")
        return web.json_response(vars(worker))


async def serve(config: Config) -> None:
    """Runs until SIGINT or SIGTERM, then drains."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router = Router(config)
    try:
        port = await router.start()
        print(f"router listening at http://{config.host}:{port} ({len(router.workers)} servers)", flush=True)
        gc.freeze()  # what is there stays: looking through it for cycles takes a fifth of the speed
        gc.set_threshold(50_000)
        await stop.wait()
    finally:
        await router.stop()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # two files a request; 1,024 is the usual limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        uvloop.run(serve(tyro.cli(Config)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
