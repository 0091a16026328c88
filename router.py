"""One HTTP address in front of many servers: a router for reward models that has to last a training run.

    python router.py --port 30000 --workers http://a:8000 http://b:8000
    curl http://127.0.0.1:30000/v1/models          # any method and body goes to one of the servers, streams as they come

Servers that fail leave the rotation, and come back when their /health answers again. A client that goes away stops the
server's work. What is not among --forward is refused: control calls such as /sleep go to the servers themselves. The
router's own endpoints:
    GET /health                 200 while at least one server is healthy, else 503; never asks for a key
    GET /workers                the servers and their state
    POST /workers {"url": U}    adds a server (or brings back one that is draining); asks for the servers' key, if there is one
    DELETE /workers?url=U       takes a server out of the rotation; it is forgotten when its last request has ended; the same
    GET /metrics                Prometheus text

How an attempt is judged:
    an answer, also 500         passed on, never retried (at a 500 the router looks at /health)
    502-504, a cut connection   counts against the server, and another one is asked, but none twice; after --unhealthy-after
                                in a row the server leaves, unless it is the last one: a poisonous prompt cannot empty
                                the rotation
    no connection               nobody has seen the request: the server leaves at once, and the request goes elsewhere or waits
Nothing is retried once part of an answer has gone out: then the connection is cut, so that the client sees it.

While no server is healthy requests wait in line, up to --queue-timeout; they are let in as fast as the servers that come
back answer, so the first of them does not get the whole line.

Left out: TLS towards clients, HTTP/2, WebSockets, trailers, caching, several router processes, prefix-aware routing.
"""

import asyncio
import bisect
import contextlib
import gc
import hmac
import itertools
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
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal
from urllib.parse import unquote

import aiohttp
import tyro
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

try:
    import uvloop
except ImportError:  # slower without it, otherwise the same
    uvloop = None


@dataclass
class Config:
    """One HTTP address in front of many servers."""

    workers: tuple[str, ...] = ()
    """Base URLs of the servers, such as http://10.0.0.2:8000."""
    allow_empty: bool = False
    """Start without servers; they are added later through POST /workers."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 opens the router to the network: set an API key then."""
    port: int = 30000
    """Port to listen on; 0 lets the system choose (it is printed)."""
    forward: tuple[str, ...] = ("/v1", "/v2", "/inference", "/generate", "/classify", "/pooling", "/score", "/rerank", "/embed",
                                "/embeddings", "/tokenize", "/detokenize")
    """Paths that are passed on, with all that is below them (never with ..); / is everything, also what controls a server."""
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    """round_robin takes servers in turn; least_loaded the one with the fewest requests in flight (answers of uneven length)."""
    max_attempts: int = 4
    """How many servers one request is tried on."""
    unhealthy_after: int = 3
    """Failures in a row after which a server leaves the rotation."""
    health_interval: float = 5.0
    """Seconds between two looks at each server's /health (any status below 500 is healthy)."""
    queue_timeout: float = 0.0
    """Seconds a request waits for a healthy server when there is none; 0 answers 503 at once."""
    request_timeout: float = 3600.0
    """Seconds one request may take in all, retries included; then 504. A critique of 16k tokens takes minutes."""
    connect_timeout: float = 5.0
    """Seconds one connection to a server may take; then another server is asked, and 504 if none can be reached in time."""
    max_body_mib: int = 64
    """Largest request body in MiB; above it 413."""
    api_key: str = ""
    """Key that clients send as "Authorization: Bearer KEY" (/health excepted). Empty: the environment variable ROUTER_API_KEY,
    which is the better place, as it does not show in the process list."""
    server_key: str = ""
    """Key that the servers ask for, sent in place of the client's. Empty: the environment variable ROUTER_SERVER_KEY; without
    either the client's goes on."""

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        urls = [clean_url(url) for url in self.workers]
        if len(set(urls)) != len(urls):
            raise ValueError(f"--workers {' '.join(self.workers)}: the same server is given twice; name each once")
        if not urls and not self.allow_empty:
            raise ValueError("--workers: no server given; name at least one URL, or pass --allow-empty to add them later")
        least = dict(port=0, max_attempts=1, unhealthy_after=1, max_body_mib=1, health_interval=0.01, request_timeout=0.01,
                     connect_timeout=0.01, queue_timeout=0)
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {lowest}")
        if not self.forward or not all(path.startswith("/") for path in self.forward):
            raise ValueError(f"--forward {' '.join(self.forward)}: name at least one path, each with a slash before it: /v1")
        if self.port > 65535:
            raise ValueError(f"--port {self.port}: must be at most 65535")


def clean_url(text) -> str:
    """A server's base URL without the slash at its end. ValueError if it is not one."""
    with contextlib.suppress(ValueError):  # such as a port above 65535
        if re.fullmatch(r"https?://[\w.:/\[\]%~-]+", str(text), re.ASCII) and (url := URL(str(text))).host and url.port:
            return str(url).rstrip("/")
    raise ValueError(f"server URL {text!r}: needs http:// or https://, a host, maybe a port and a path: http://10.0.0.2:8000")


def read_key(given: str, variable: str) -> str:
    """A key as it was given, or from the environment. ValueError where not every client and server could send it."""
    key = (given or os.environ.get(variable, "")).strip()  # a secret's file may end with a newline
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable}: the key has characters that are not plain ASCII; take another one")
    return key


def warn_if_open(host: str, api_key: str) -> str:
    """What to say where the network can reach a router that asks for no key; else nothing."""
    if api_key or host == "localhost" or re.fullmatch(r"127\.[\d.]+|::1", host):
        return ""
    return f"WARNING: --host {host} is open to the network and no key is asked for; set ROUTER_API_KEY here and for the clients"


FAILED = {502, 503, 504}
FIRST_IN = 32  # of those who wait in line, for a server that comes back; then two for each of its answers
LOG = logging.getLogger("router")  # aiohttp's report of unhandled exceptions, less one traceback per malformed request
LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
BUFFERED = 1 << 20  # bytes; a longer answer, or one of unknown length, is streamed and so cannot be retried
BODY_SECONDS = 120  # for a request's body to arrive: clients that stop halfway, or send chunks nobody can read
HEALTH_SECONDS = 10  # for a server to answer /health: a busy one is slow
DRAIN_SECONDS = 8  # for requests in flight to end after Ctrl-C or SIGTERM
BUCKETS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1200)  # seconds, of the latency histogram
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
NOT_TO_SERVER = HOP_BY_HOP | {"host", "content-length", "expect"}  # `forward` writes its own
PARSING = dict(auto_decompress=False, max_line_size=1 << 16, max_field_size=1 << 16)  # both ways: as it comes, long headers


@dataclass(eq=False)
class Worker:
    """One server and what is known about it."""

    url: str
    address: aiohttp.ClientRequest | None = None  # by which the pool of connections knows it
    healthy: bool = False
    why: str = ""  # it is healthy, or not
    room: int = 0  # requests it may have in flight while others wait in line
    draining: bool = False
    turn: int = 0  # when it was last chosen: round robin is "least recently chosen"
    in_flight: int = 0
    failed_in_a_row: int = 0  # requests
    polls_failed: int = 0  # looks at /health, in a row
    look: asyncio.Task | None = None  # at /health, out of turn
    requests: int = 0
    failures: int = 0
    retries: int = 0  # attempts that this server got because another attempt had failed
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def describe(self) -> dict:
        return {key: getattr(self, key) for key in "url healthy why draining in_flight requests failures retries".split()}


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full: no reason to stop
        print(f"{time.strftime('%H:%M:%S')} router: {text}", file=sys.stderr, flush=True)


def error_response(status: int, message: str, **headers: str) -> web.Response:
    """An error of the router itself, in the shape OpenAI clients know; it ends the connection (a body may be unread)."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    response = web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response.force_close()
    return response


def end_to_end(headers, dropped: set[str]) -> list[tuple[str, str]]:
    """The headers that go on: all but those about this one connection."""
    if connection := headers.get("Connection"):
        dropped = dropped | {name.strip().lower() for name in connection.split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def keepalive_socket(address_info) -> socket.socket:
    """A socket on which a machine that lost its power is noticed within a minute, however long an answer may take."""
    sock = socket.socket(*address_info[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # names differ outside Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


class Router:
    """The router as an object: `port = await router.start()`, later `await router.stop()`. ValueError for a bad Config."""

    def __init__(self, config: Config):
        config.check()
        self.config = config
        self.api_key = read_key(config.api_key, "ROUTER_API_KEY")
        self.server_key = read_key(config.server_key, "ROUTER_SERVER_KEY")
        self.workers = {url: Worker(url) for url in map(clean_url, config.workers)}
        self.forwarded = tuple(path.rstrip("/") + "/" for path in config.forward)
        self.order = attrgetter("in_flight", "turn") if config.policy == "least_loaded" else attrgetter("turn")
        self.begun: dict[asyncio.Task, float] = {}  # when each request came that is not answered
        self.turns = itertools.count(1)
        # Who waits for a server: the first in line holds the lock, and looks again whenever the event is set.
        self.waiting, self.line, self.news = 0, asyncio.Lock(), asyncio.Event()

    async def start(self) -> int:
        """Looks at every server once, opens the port and returns it. OSError if the port cannot be had."""
        config, loop = self.config, asyncio.get_running_loop()
        pool = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, socket_factory=keepalive_socket,
                                    keepalive_timeout=3)  # vLLM closes idle connections after 5 s: be earlier
        self.session = aiohttp.ClientSession(connector=pool, timeout=aiohttp.ClientTimeout(sock_connect=config.connect_timeout))
        # The low-level server: no URL dispatcher between the socket and `handle`, and the handler of a client that
        # goes away is cancelled, which closes the connection to the server, which stops generating.
        server = web.Server(
            self.handle, handler_cancellation=True, access_log=None, logger=LOG, **PARSING,
            request_factory=lambda *parts: web.BaseRequest(*parts, loop, client_max_size=config.max_body_mib << 20))
        self.runner = web.ServerRunner(server, shutdown_timeout=DRAIN_SECONDS / 2)  # aiohttp waits twice
        await self.runner.setup()
        await asyncio.gather(*map(self.look_at, self.workers.values()))
        self.tasks = [asyncio.create_task(self.poll_forever()), asyncio.create_task(self.end_late_requests())]
        try:
            await web.TCPSite(self.runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await self.stop()
            raise OSError(f"--host {config.host} --port {config.port}: cannot listen there ({error.strerror or error})") from None
        if warning := warn_if_open(config.host, self.api_key):
            say(warning)
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Takes no new requests, waits up to DRAIN_SECONDS for those in flight, then ends them."""
        await self.runner.cleanup()
        for task in self.tasks:
            task.cancel()
        await self.session.close()

    async def look_at(self, worker: Worker) -> None:
        """Asks one server for its health and draws the consequence."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self.session.get(worker.url + "/health", allow_redirects=False) as answer:
                fine, why = answer.status < 500, f"/health answers {answer.status}"
        except Exception as error:  # whatever it is, it is not health; and the poller must never die
            fine, why = False, f"/health: {describe_error(error)}"
        worker.polls_failed = 0 if fine else worker.polls_failed + 1
        if fine or not worker.why or worker.polls_failed >= self.config.unhealthy_after:
            self.set_health(worker, fine, why)

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await asyncio.gather(*map(self.look_at, self.workers.values()))

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy != healthy or not worker.why:
            worker.healthy, worker.why, worker.room, worker.failed_in_a_row = healthy, why, FIRST_IN, 0
            self.news.set()
            say(f"{worker.url} is {'' if healthy else 'not '}in the rotation ({why})")

    def blame(self, worker: Worker, why: str) -> None:
        """Counts a failure that the request may have brought about itself: for that the last server does not leave."""
        worker.failed_in_a_row += 1
        if worker.failed_in_a_row >= self.config.unhealthy_after and any(
                other.healthy and not other.draining for other in self.workers.values() if other is not worker):
            self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row, the last: {why}")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here: key, own endpoints, or on to a server."""
        path = request.rel_url.raw_path
        if path == "/health":
            healthy = sum(worker.healthy and not worker.draining for worker in self.workers.values())
            return web.json_response({"status": "ok" if healthy else "no healthy server", "healthy": healthy,
                                      "servers": len(self.workers), "waiting": self.waiting}, status=200 if healthy else 503)
        # Who may name a server may have the servers' key sent there.
        key = self.server_key if self.server_key and path == "/workers" and request.method != "GET" else self.api_key
        if key and not hmac.compare_digest(
                request.headers.get("Authorization", "").encode("utf-8", "surrogateescape"), b"Bearer " + key.encode()):
            return error_response(401, "missing or wrong API key: send 'Authorization: Bearer KEY'", WWW_Authenticate="Bearer")
        if path == "/metrics":
            return self.get_metrics()
        asked = unquote(path) + "/"
        if path != "/workers" and not (path[:1] == "/" and asked.startswith(self.forwarded) and "/../" not in asked):
            return error_response(404, f"{path}: not forwarded (--forward {' '.join(self.config.forward)}); calls that control a "
                                       "server go to the server itself")
        task = asyncio.current_task()
        self.begun[task] = time.monotonic()
        try:
            if "Expect" in request.headers and request.version >= (1, 1):
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it with large bodies
            # A body that is there at once is below any limit: aiohttp stops reading ahead long before that.
            body = request.content.read_nowait() if request.content.is_eof() else \
                await asyncio.wait_for(request.read(), BODY_SECONDS)
            return await (self.serve_workers if path == "/workers" else self.forward)(request, body)
        except TimeoutError:
            return error_response(408, f"the request body did not arrive within {BODY_SECONDS} s")
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"request body above {self.config.max_body_mib} MiB (--max-body-mib)")
        except asyncio.CancelledError:
            if task in self.begun:  # the client has gone away, or the router ends
                raise
            return error_response(504, f"no complete answer within {self.config.request_timeout:g} s (--request-timeout)")
        finally:
            self.begun.pop(task, None)

    async def end_late_requests(self) -> None:
        """One timer for all: asyncio.timeout for each of them takes a tenth of a request's CPU time."""
        while True:
            await asyncio.sleep(min(1.0, self.config.request_timeout / 20))
            late = time.monotonic() - self.config.request_timeout
            for task in [task for task, begun in self.begun.items() if begun < late]:
                del self.begun[task]
                task.cancel()

    def take(self, tried=(), in_line: bool = False) -> Worker | None:
        """A place on the next healthy server by the policy that was not tried; for those in line one with room."""
        ready = [worker for worker in self.workers.values() if worker.healthy and not worker.draining and worker not in tried
                 and not (in_line and worker.in_flight >= worker.room)]
        worker = min(ready, key=self.order, default=None)
        if worker:
            worker.turn = next(self.turns)
            worker.in_flight += 1
        return worker

    async def choose(self, tried: list[Worker]) -> Worker | None:
        """A place on a server; a request that no server has seen yet waits in line for it, up to queue_timeout."""
        worker = self.take(tried) if tried or not self.waiting else None
        if worker or tried or not self.config.queue_timeout:
            return worker
        self.waiting += 1
        try:
            async with asyncio.timeout(self.config.queue_timeout), self.line:
                while not (worker := self.take(in_line=True)):
                    self.news.clear()
                    await self.news.wait()
                return worker
        except TimeoutError:
            return self.take()  # room or not
        finally:
            self.waiting -= 1

    async def forward(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Tries servers until one answers. Cancelled when the time is up, or the client has gone away."""
        # Written and read on the pool's connections by hand: session.request() builds URL, headers, body, task and answer anew
        # for what is only passed on, and takes more CPU time than all the rest.
        headers = end_to_end(request.headers, NOT_TO_SERVER | {"authorization"} if self.server_key else NOT_TO_SERVER)
        if self.server_key:
            headers.append(("Authorization", f"Bearer {self.server_key}"))
        if body or request.method not in ("GET", "HEAD", "OPTIONS"):
            headers.append(("Content-Length", len(body)))
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers)
        tried = []  # servers that this request was sent to
        failed_answer = None  # the last 502-504 of a server: passed on if nothing better comes
        status, problem = 503, "no healthy server"
        for attempt in range(self.config.max_attempts):
            worker = await self.choose(tried)
            if not worker:
                break
            host, slash, base = worker.url.partition("://")[2].partition("/")
            head = f"{request.method} {slash}{base}{request.rel_url.raw_path_qs} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"
            worker.retries += attempt > 0
            worker.requests += 1
            begun = time.monotonic()
            connection = response = None
            try:
                worker.address = worker.address or aiohttp.ClientRequest("GET", URL(worker.url))
                connection = await self.session.connector.connect(worker.address, [], self.session.timeout)
                server = connection.protocol
                server.set_response_params(skip_payload=request.method == "HEAD", read_until_eof=True, **PARSING)
                if not connection.closed:  # else read() says why
                    server.transport.writelines((head.encode("utf-8", "surrogateescape"), body))
                answer, content = await server.read()
                while answer.code < 200:  # such as 103 Early Hints
                    answer, content = await server.read()
                passed_on = dict(status=answer.code, reason=answer.reason, headers=end_to_end(answer.headers, HOP_BY_HOP))
                failed, length = answer.code in FAILED, int(answer.headers.get("Content-Length", BUFFERED + 1))
                if failed or request.method == "HEAD" or length <= BUFFERED:
                    response = web.Response(body=content.read_nowait() if content.is_eof() else await content.read(), **passed_on)
                else:
                    response = web.StreamResponse(**passed_on)
                    await response.prepare(request)
                    async for chunk in content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                connection.release()
                if answer.code == 500 and (worker.look is None or worker.look.done()):
                    worker.look = asyncio.create_task(self.look_at(worker))  # its engine may be dead
                if not failed:
                    worker.failed_in_a_row = 0
                    worker.room += 1
                    return response
                failed_answer = response
                tried.append(worker)
                worker.failures += 1
                self.blame(worker, f"answers {answer.code}")
            except (aiohttp.ClientError, HttpProcessingError, OSError, asyncio.CancelledError) as error:
                cancelled = isinstance(error, asyncio.CancelledError)  # the client has gone, the time is up, or the router ends
                why = "no complete answer in time" if cancelled else describe_error(error)
                status, problem = 504 if isinstance(error, TimeoutError) else 503, f"{worker.url}: {why}"
                client_is_there = request.transport is not None and not request.transport.is_closing()
                part_is_out = response is not None and response.prepared
                if client_is_there:
                    worker.failures += 1
                    if connection is None and not cancelled:
                        self.set_health(worker, False, why)
                    else:
                        tried.append(worker)
                        self.blame(worker, why)
                    if part_is_out:
                        request.transport.abort()
                if part_is_out or not client_is_there or cancelled:
                    raise asyncio.CancelledError from error
            finally:
                if connection:
                    connection.close()  # if it was not released
                spent = time.monotonic() - begun
                worker.in_flight -= 1
                worker.seconds += spent
                worker.histogram[bisect.bisect_left(BUCKETS, spent)] += 1
                if worker.draining and not worker.in_flight:
                    self.workers.pop(worker.url)
                self.news.set()
        return failed_answer or error_response(status, f"no server could answer: {problem}",
                                               Retry_After=str(math.ceil(self.config.health_interval)))

    async def serve_workers(self, request: web.BaseRequest, body: bytes) -> web.Response:
        if request.method == "GET":
            return web.json_response({"workers": [worker.describe() for worker in self.workers.values()]})
        if request.method not in ("POST", "DELETE"):
            return error_response(405, f"{request.method} /workers: use GET, POST or DELETE", Allow="GET, POST, DELETE")
        try:
            url = clean_url(json.loads(body)["url"] if request.method == "POST" else request.rel_url.query["url"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # broken JSON and broken UTF-8 are ValueErrors
            return error_response(400, 'write POST /workers {"url": "http://host:port"} or DELETE /workers?url=http://host:port'
                                       f" ({describe_error(error)})")
        if request.method == "POST":
            worker = self.workers.setdefault(url, Worker(url))
            worker.draining = False
            await self.look_at(worker)
            self.news.set()
            return web.json_response(worker.describe())
        if url not in self.workers:
            return error_response(404, f"DELETE /workers: {url} is not one of the servers")
        worker = self.workers[url]
        worker.draining = True
        say(f"{url} leaves ({worker.in_flight} in flight)")
        if not worker.in_flight:
            self.workers.pop(url)
        return web.json_response(worker.describe(), status=202 if worker.in_flight else 200)

    def get_metrics(self) -> web.Response:
        lines = []
        for name, kind, key, what in (
                ("router_requests_total", "counter", "requests", "Attempts sent to this server."),
                ("router_failures_total", "counter", "failures", "Attempts not answered, or with 502, 503 or 504."),
                ("router_retries_total", "counter", "retries", "Attempts sent here because another attempt had failed."),
                ("router_in_flight", "gauge", "in_flight", "Requests this server is working on."),
                ("router_healthy", "gauge", "healthy", "1 while the server is in the rotation.")):
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            lines += [f'{name}{{worker="{w.url}"}} {int(getattr(w, key))}' for w in self.workers.values()]
        name = "router_latency_seconds"
        lines += [f"# HELP {name} Seconds per attempt, from sending to the end of the answer.", f"# TYPE {name} histogram"]
        for w in self.workers.values():
            counts = itertools.accumulate(w.histogram)
            lines += [f'{name}_bucket{{worker="{w.url}",le="{edge}"}} {count}' for edge, count in zip((*BUCKETS, "+Inf"), counts)]
            lines += [f'{name}_sum{{worker="{w.url}"}} {w.seconds:.6f}', f'{name}_count{{worker="{w.url}"}} {sum(w.histogram)}']
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def serve(config: Config) -> None:
    """Runs until SIGINT or SIGTERM, then drains."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router = Router(config)
    print(f"router listening at http://{config.host}:{await router.start()} ({len(router.workers)} servers)", flush=True)
    gc.freeze()  # what is there now stays; looking through it, and for cycles at every turn, costs a tenth of the speed
    gc.set_threshold(50_000)
    await stop.wait()
    await router.stop()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # two files per request in flight; 1,024 is the usual limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
            runner.run(serve(tyro.cli(Config)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
