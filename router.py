"""One HTTP address in front of many servers: a router for reward models that has to last a training run.

    python router.py --port 30000 --workers http://a:8000 http://b:8000
    curl http://127.0.0.1:30000/v1/models          # any path, method and body goes to one of the servers

Servers that fail leave the rotation, and come back when their /health answers again. A client that goes away stops the
server's work. The router's own endpoints; everything else passes through unchanged, streams as they come:
    GET /health                 200 while at least one server is healthy, else 503; never asks for a key
    GET /workers                the servers and their state
    POST /workers {"url": U}    adds a server (or brings back one that is draining)
    DELETE /workers?url=U       takes a server out of the rotation; it is forgotten when its last request has ended
    GET /metrics                Prometheus text
    POST /sleep, /wake_up, ...  (EVERY_SERVER below) go to all servers, the answer lists what each of them said

How an attempt is judged:
    below 500, 501, 505 ...     an answer: passed on once, never retried
    no connection, 502-504      the server's fault: it counts against the server, and another one is asked
    500                         another server is asked, each at most once; it counts against the server only when another
                                one could answer, so one poisonous prompt cannot empty the rotation
Nothing is retried once part of an answer has gone out: then the connection is cut, so that the client sees it.

Left out: TLS towards clients, HTTP/2, WebSockets, trailers, caching, several router processes, prefix-aware routing.
"""

import asyncio
import bisect
import hmac
import itertools
import json
import logging
import math
import os
import random
import re
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

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
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    """round_robin takes servers in turn; least_loaded the one with the fewest requests in flight (answers of uneven length)."""
    max_attempts: int = 4
    """How often one request is tried in total."""
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
    """Key that clients send as "Authorization: Bearer KEY" (/health excepted); passed on to the servers. Empty: the environment
    variable ROUTER_API_KEY, which is the better place, as it does not show in the process list."""

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
        if self.port > 65535:
            raise ValueError(f"--port {self.port}: must be at most 65535")


def clean_url(text) -> str:
    """A server's base URL without the slash at its end. ValueError if it is not one."""
    try:
        url = URL(str(text)) if re.fullmatch(r"https?://[\w.:/\[\]%~-]+", str(text), re.ASCII) else None
    except ValueError:  # such as a port above 65535
        url = None
    if url and url.host and url.port:
        return str(url).rstrip("/")
    raise ValueError(f"server URL {text!r}: needs http:// or https://, a host, maybe a port and a path, and nothing else; write "
                     "it like http://10.0.0.2:8000")


EVERY_SERVER = {"/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc"}  # vLLM's controls
RETRIED = {500, 502, 503, 504}
LOG = logging.getLogger("router")  # aiohttp's report of unhandled exceptions, less one traceback per malformed request
LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
BUFFERED = 1 << 20  # bytes; a longer answer, or one of unknown length, is streamed and so cannot be retried
BODY_SECONDS = 120  # for a request's body to arrive: clients that stop halfway, or send chunks nobody can read
HEALTH_SECONDS = 10  # for a server to answer /health: a busy one is slow
DRAIN_SECONDS = 8  # for requests in flight to end after Ctrl-C or SIGTERM
BUCKETS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1200)  # seconds, of the latency histogram
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
NOT_TO_SERVER = HOP_BY_HOP | {"host", "content-length", "expect"}  # the client session writes its own


@dataclass(eq=False)
class Worker:
    """One server and what is known about it."""

    url: str
    healthy: bool = False
    draining: bool = False
    turn: int = 0  # when it was last chosen: round robin is "least recently chosen"
    in_flight: int = 0
    failed_in_a_row: int = 0  # requests
    polls_failed: int = 0  # looks at /health, in a row
    requests: int = 0
    failures: int = 0
    retries: int = 0  # attempts that this server got because another attempt had failed
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def describe(self) -> dict:
        keys = ("url", "healthy", "draining", "in_flight", "requests", "failures", "retries")
        return {key: getattr(self, key) for key in keys}


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def say(text: str) -> None:
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
        self.api_key = config.api_key or os.environ.get("ROUTER_API_KEY", "")
        self.workers = {url: Worker(url) for url in map(clean_url, config.workers)}
        self.turns = itertools.count(1)

    async def start(self) -> int:
        """Looks at every server once, opens the port and returns it. OSError if the port cannot be had."""
        config, loop = self.config, asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, socket_factory=keepalive_socket,
                                           keepalive_timeout=3),  # vLLM closes idle connections after 5 s: be earlier
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, max_line_size=1 << 16, max_field_size=1 << 16,
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"))
        # The low-level server: no URL dispatcher between the socket and `handle`, and the handler of a client that
        # goes away is cancelled, which closes the connection to the server, which stops generating.
        server = web.Server(self.handle, handler_cancellation=True, auto_decompress=False, access_log=None, logger=LOG,
                            max_line_size=1 << 16, max_field_size=1 << 16, request_factory=lambda *parts: web.BaseRequest(
                                *parts, loop, client_max_size=config.max_body_mib << 20))
        self.runner = web.ServerRunner(server, shutdown_timeout=DRAIN_SECONDS / 2)  # aiohttp waits twice
        await self.runner.setup()
        await asyncio.gather(*map(self.look_at, self.workers.values()))
        self.poller = asyncio.create_task(self.poll_forever())
        try:
            await web.TCPSite(self.runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await self.stop()
            raise OSError(f"--host {config.host} --port {config.port}: cannot listen there ({error.strerror or error}); "
                          "choose another one") from None
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Takes no new requests, waits up to DRAIN_SECONDS for those in flight, then ends them."""
        self.poller.cancel()
        await self.runner.cleanup()
        await self.session.close()

    async def look_at(self, worker: Worker) -> None:
        """Asks one server for its health and draws the consequence."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS, connect=self.config.connect_timeout)
            async with self.session.get(worker.url + "/health", timeout=timeout, allow_redirects=False) as answer:
                fine, why = answer.status < 500, f"/health answers {answer.status}"
        except Exception as error:  # whatever it is, it is not health; and the poller must never die
            fine, why = False, f"/health: {describe_error(error)}"
        worker.polls_failed = 0 if fine else worker.polls_failed + 1
        if fine and not worker.healthy:
            worker.failed_in_a_row = 0
            self.set_health(worker, True, why)
        elif worker.polls_failed >= self.config.unhealthy_after:
            self.set_health(worker, False, why)

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await asyncio.gather(*map(self.look_at, self.workers.values()))

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy != healthy:
            worker.healthy = healthy
            say(f"{worker.url} {'is in the rotation' if healthy else 'left the rotation'} ({why})")

    def blame(self, worker: Worker, why: str) -> None:
        worker.failed_in_a_row += 1
        if worker.failed_in_a_row >= self.config.unhealthy_after:
            self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row, the last: {why}")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here: key, own endpoints, or on to a server."""
        path = request.rel_url.raw_path
        if path == "/health":
            healthy = sum(worker.healthy and not worker.draining for worker in self.workers.values())
            return web.json_response({"status": "ok" if healthy else "no healthy server", "healthy": healthy,
                                      "servers": len(self.workers)}, status=200 if healthy else 503)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self.api_key and not hmac.compare_digest(given, b"Bearer " + self.api_key.encode()):
            return error_response(401, "missing or wrong API key: send 'Authorization: Bearer KEY'", WWW_Authenticate="Bearer")
        if path == "/metrics":
            return self.get_metrics()
        if not path.startswith("/"):  # CONNECT host:port, OPTIONS *
            return error_response(405, f"{request.method}: ask for a path, such as /v1/models", Allow="GET, POST")
        try:
            async with asyncio.timeout(self.config.request_timeout):
                if "Expect" in request.headers and request.version >= (1, 1):
                    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it with large bodies
                try:
                    async with asyncio.timeout(BODY_SECONDS):
                        body = await request.read()
                except TimeoutError:
                    return error_response(408, f"the request body did not arrive within {BODY_SECONDS} s")
                if path == "/workers":
                    return await self.serve_workers(request, body)
                if path in EVERY_SERVER and request.method == "POST":
                    return await self.ask_every_server(request, body)
                return await self.forward(request, body)
        except TimeoutError:
            return error_response(504, f"no complete answer within {self.config.request_timeout:g} s (--request-timeout)")
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"request body above {self.config.max_body_mib} MiB (--max-body-mib)")

    async def choose(self, tried: list[Worker], suspects: list[Worker]) -> Worker | None:
        """The next healthy server by the policy: none that answered 500 to this request, one not tried yet if there is any.

        Waits up to queue_timeout for one; None if there is none.
        """
        deadline = time.monotonic() + self.config.queue_timeout
        while not (ready := [w for w in self.workers.values() if w.healthy and not w.draining and w not in suspects]):
            if suspects or time.monotonic() >= deadline:
                return None
            await asyncio.sleep(0.1)
        least_loaded = self.config.policy == "least_loaded"
        worker = min([w for w in ready if w not in tried] or ready, key=lambda w: (w.in_flight if least_loaded else 0, w.turn))
        worker.turn = next(self.turns)
        return worker

    async def forward(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Tries servers until one answers. TimeoutError comes from the caller's deadline."""
        headers = end_to_end(request.headers, NOT_TO_SERVER)
        tried, suspects = [], []  # the suspects answered 500
        failed_answer = None  # the last 5xx of a server: passed on if nothing better comes
        status, problem = 503, "no healthy server"
        for attempt in range(self.config.max_attempts):
            if attempt:
                await asyncio.sleep(random.uniform(0, min(2.0, 0.05 * 2**attempt)))
            worker = await self.choose(tried, suspects)
            if not worker:
                break
            tried.append(worker)
            worker.retries += attempt > 0
            worker.requests += 1
            worker.in_flight += 1
            begun = time.monotonic()
            response = None
            try:
                async with self.session.request(request.method, URL(worker.url + request.rel_url.raw_path_qs, encoded=True),
                                                headers=headers, data=body or None, allow_redirects=False) as answer:
                    passed_on = dict(status=answer.status, reason=answer.reason, headers=end_to_end(answer.headers, HOP_BY_HOP))
                    failed, length = answer.status in RETRIED, answer.content_length
                    if failed or request.method == "HEAD" or length is not None and length <= BUFFERED:
                        response = web.Response(body=await answer.read(), **passed_on)
                    else:
                        response = web.StreamResponse(**passed_on)
                        await response.prepare(request)
                        async for chunk in answer.content.iter_any():
                            await response.write(chunk)
                        await response.write_eof()
                if not failed:
                    worker.failed_in_a_row = 0
                    for suspect in suspects:
                        self.blame(suspect, "answers 500 to what another server could answer")
                    return response
                failed_answer = response
                worker.failures += 1
                if answer.status == 500:
                    suspects.append(worker)
                else:
                    self.blame(worker, f"answers {answer.status}")
            except (aiohttp.ClientError, OSError, asyncio.CancelledError) as error:
                # Cancelled: the client has gone away, or the time is up, or the router ends.
                status, problem = 504 if isinstance(error, TimeoutError) else 503, f"{worker.url}: {describe_error(error)}"
                client_is_there = request.transport is not None and not request.transport.is_closing()
                part_is_out = response is not None and response.prepared
                if client_is_there:
                    worker.failures += 1
                    self.blame(worker, describe_error(error))
                    if part_is_out:
                        request.transport.abort()
                if part_is_out or not client_is_there or isinstance(error, asyncio.CancelledError):
                    raise asyncio.CancelledError from error
            finally:
                spent = time.monotonic() - begun
                worker.in_flight -= 1
                worker.seconds += spent
                worker.histogram[bisect.bisect_left(BUCKETS, spent)] += 1
                if worker.draining and not worker.in_flight:
                    self.workers.pop(worker.url)
        if failed_answer is not None:
            return failed_answer
        retry_after = str(math.ceil(self.config.health_interval))
        return error_response(status, f"no server could answer: {problem}", Retry_After=retry_after)

    async def ask_every_server(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """One control call to all servers; the status is the worst of theirs."""
        headers = end_to_end(request.headers, NOT_TO_SERVER)

        async def ask(worker):
            try:
                url = URL(worker.url + request.rel_url.raw_path_qs, encoded=True)
                async with self.session.post(url, headers=headers, data=body or None) as answer:
                    return {"status": answer.status, "body": (await answer.read()).decode("utf-8", "replace")}
            except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a name DNS cannot hold
                return {"status": 502, "body": describe_error(error)}

        workers = [worker for worker in self.workers.values() if not worker.draining]
        answers = await asyncio.gather(*map(ask, workers))
        return web.json_response({"servers": {worker.url: answer for worker, answer in zip(workers, answers)}},
                                 status=max((answer["status"] for answer in answers), default=503))

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
                ("router_failures_total", "counter", "failures", "Attempts not answered, or with 500, 502, 503 or 504."),
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
