"""One HTTP address in front of many servers: a router for reward models that has to last a training run.

    python router.py --port 30000 --workers http://a:8000 http://b:8000
    curl http://127.0.0.1:30000/v1/models          # any path, method and body goes to one of the servers

What it does: spreads requests (round robin, or fewest in flight), passes bodies, headers, status codes and streams
through unchanged, retries on another server what a server failed to answer, takes failing servers out of the rotation
and puts them back when their /health answers again, and stops a server's work when the client has gone away.

Its own endpoints; everything else belongs to the servers:
    GET /health                 200 while at least one server is healthy, else 503; never asks for a key
    GET /workers                the servers and their state
    POST /workers {"url": U}    adds a server (or brings back one that is draining)
    DELETE /workers?url=U       takes a server out of the rotation; it is forgotten when its last request has ended
    GET /metrics                Prometheus text
    POST /sleep, /wake_up, ...  (EVERY_SERVER below) go to all servers, the answer lists what each of them said

How an attempt is judged:
    below 500, 501, 505 ...     an answer: passed on once, never retried
    connection error, 502-504   the server's fault: it counts against the server, and another one is asked
    500                         another server is asked, each at most once; it counts against the server only when another
                                one could answer, so one poisonous prompt cannot empty the rotation
Nothing is retried once part of an answer has gone out: then the connection is cut, so that the client sees it.

Left out: TLS towards clients, HTTP/2, WebSockets, trailers, caching, several router processes, prefix-aware routing.
"""

import asyncio
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
    health_timeout: float = 10.0
    """Seconds a server may take to answer /health; a busy one is slow."""
    queue_timeout: float = 0.0
    """Seconds a request waits for a healthy server when there is none; 0 answers 503 at once."""
    request_timeout: float = 3600.0
    """Seconds one request may take in all, retries included; then 504. A critique of 16k tokens takes minutes."""
    connect_timeout: float = 5.0
    """Seconds one connection to a server may take; then another server is asked, and 504 if none can be reached in time."""
    max_body_mib: int = 64
    """Largest request body in MiB; above it 413."""
    drain_timeout: float = 8.0
    """Seconds that requests in flight get to end after Ctrl-C or SIGTERM."""
    api_key: str = ""
    """Key that clients send as "Authorization: Bearer KEY" (/health excepted); passed on to the servers. Empty: the environment
    variable ROUTER_API_KEY, which is the better place, as it does not show in the process list."""

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        # Not in __post_init__: tyro would draw a box around the message, and it should be one line.
        urls = [clean_url(url) for url in self.workers]
        if len(set(urls)) != len(urls):
            raise ValueError(f"--workers {' '.join(self.workers)}: the same server is given twice; name each once")
        if not urls and not self.allow_empty:
            raise ValueError("--workers: no server given; name at least one URL, or pass --allow-empty to add them later")
        least = dict(port=0, max_attempts=1, unhealthy_after=1, max_body_mib=1, health_interval=0.01, health_timeout=0.01,
                     request_timeout=0.01, connect_timeout=0.01, queue_timeout=0, drain_timeout=0)
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {lowest}")
        if self.port > 65535:
            raise ValueError(f"--port {self.port}: must be at most 65535")


def clean_url(text) -> str:
    """A server's base URL without the slash at its end. ValueError if it is not one."""
    example = "write it like http://10.0.0.2:8000"
    if not isinstance(text, str) or not text.startswith(("http://", "https://")):
        raise ValueError(f"server URL {text!r}: does not begin with http:// or https://; {example}")
    try:
        url = URL(text)
        good = url.host and url.port and not (url.query_string or url.fragment or url.user or url.password)
    except ValueError as error:
        raise ValueError(f"server URL {text!r}: {error}; {example}") from None
    if not good or not re.fullmatch(r"[\w.:/\[\]%~-]+", text, re.ASCII):
        raise ValueError(f"server URL {text!r}: needs a host, maybe a port and a path, and nothing else; {example}")
    return str(url).rstrip("/")


EVERY_SERVER = {"/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc"}  # vLLM's controls
RETRIED = {500, 502, 503, 504}
LOG = logging.getLogger("router")  # aiohttp's report of unhandled exceptions, less one traceback per malformed request
LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
BUFFERED = 1 << 20  # bytes; a longer answer, or one of unknown length, is streamed and so cannot be retried
BODY_SECONDS = 120  # for a request's body to arrive: clients that stop halfway, or send chunks nobody can read
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
    """An error of the router itself, in the shape OpenAI clients know."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})


def end_to_end(headers, dropped: set[str]) -> list[tuple[str, str]]:
    """The headers that go on: all but those about this one connection."""
    connection = headers.get("Connection")
    if connection:
        dropped = dropped | {name.strip().lower() for name in connection.split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


class Router:
    """The router as an object: `port = await router.start()`, later `await router.stop()`. ValueError for a bad Config."""

    def __init__(self, config: Config):
        config.check()
        self.config = config
        self.api_key = config.api_key or os.environ.get("ROUTER_API_KEY", "")
        self.workers = {url: Worker(url) for url in map(clean_url, config.workers)}
        self.turns = itertools.count(1)
        self.some_healthy = asyncio.Event()
        self.active = 0  # requests being answered
        self.stopping = False

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Looks at every server once, opens the port and returns it. OSError if the port cannot be had."""
        config = self.config
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, socket_factory=keepalive_socket,
                                         keepalive_timeout=3)  # vLLM closes idle connections after 5 s: be earlier
        self.session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=1 << 16, max_field_size=1 << 16)

        def make_request(message, payload, protocol, writer, task):
            return web.BaseRequest(message, payload, protocol, writer, task, loop,
                                   client_max_size=config.max_body_mib << 20)

        loop = asyncio.get_running_loop()
        # The low-level server: no URL dispatcher between the socket and `handle`, and the handler of a client that
        # goes away is cancelled, which closes the connection to the server, which stops generating.
        server = web.Server(self.handle, request_factory=make_request, handler_cancellation=True, auto_decompress=False,
                            access_log=None, logger=LOG, max_line_size=1 << 16, max_field_size=1 << 16)
        self.runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await self.runner.setup()
        try:
            site = web.TCPSite(self.runner, config.host, config.port, backlog=1024)
            await asyncio.gather(*(self.look_at(worker) for worker in self.workers.values()))
            await site.start()
        except OSError as error:
            await self.session.close()
            await self.runner.cleanup()
            raise OSError(f"--host {config.host} --port {config.port}: cannot listen there ({error.strerror or error}); "
                          "choose another one") from None
        self.poller = asyncio.create_task(self.poll_forever())
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Takes no new requests, waits up to drain_timeout for those in flight, then ends them."""
        self.stopping = True
        self.poller.cancel()
        for site in list(self.runner.sites):
            await site.stop()
        deadline = time.monotonic() + self.config.drain_timeout
        while self.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.runner.cleanup()
        await self.session.close()

    # ---- health --------------------------------------------------------------------------------------------------------

    async def look_at(self, worker: Worker) -> None:
        """Asks one server for its health and draws the consequence."""
        try:
            timeout = aiohttp.ClientTimeout(total=self.config.health_timeout, connect=self.config.connect_timeout)
            async with self.session.get(worker.url + "/health", timeout=timeout, allow_redirects=False) as answer:
                fine, why = answer.status < 500, f"/health answers {answer.status}"
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:  # ValueError: a name DNS cannot hold
            fine, why = False, f"/health: {describe_error(error)}"
        if not fine:
            worker.polls_failed += 1
            if worker.polls_failed >= self.config.unhealthy_after:
                self.set_health(worker, False, why)
        else:
            worker.polls_failed = 0
            if not worker.healthy:
                worker.failed_in_a_row = 0
                self.set_health(worker, True, why)

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            try:
                await asyncio.gather(*(self.look_at(worker) for worker in self.workers.values()))
            except Exception:  # without this loop no server would ever come back: report it and go on
                LOG.exception("looking at the servers failed")

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy != healthy:
            worker.healthy = healthy
            say(f"{worker.url} {'is in the rotation' if healthy else 'left the rotation'} ({why})")
        self.update_event()

    def update_event(self) -> None:
        if any(worker.healthy and not worker.draining for worker in self.workers.values()):
            self.some_healthy.set()
        else:
            self.some_healthy.clear()

    def blame(self, worker: Worker, why: str) -> None:
        worker.failed_in_a_row += 1
        if worker.failed_in_a_row >= self.config.unhealthy_after:
            self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row, the last: {why}")

    # ---- requests ------------------------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here: key, own endpoints, or on to a server."""
        path = request.raw_path.partition("?")[0]
        if path == "/health":
            return self.get_health()
        if self.api_key:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, b"Bearer " + self.api_key.encode()):
                return error_response(401, "missing or wrong API key: send 'Authorization: Bearer KEY'",
                                      WWW_Authenticate="Bearer")
        if self.stopping:
            response = error_response(503, "the router is shutting down", Retry_After="5")
            response.force_close()
            return response
        self.active += 1
        try:
            async with asyncio.timeout(self.config.request_timeout):
                if path == "/workers":
                    return await self.serve_workers(request)
                if path == "/metrics":
                    return self.get_metrics()
                if request.method == "CONNECT":
                    return error_response(405, "CONNECT is not supported", Allow="GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS")
                body = await self.read_body(request)
                if path in EVERY_SERVER and request.method == "POST":
                    return await self.ask_every_server(request, body)
                return await self.forward(request, body)
        except TimeoutError:
            return error_response(504, f"no complete answer within {self.config.request_timeout:g} s (--request-timeout)")
        except (web.HTTPRequestEntityTooLarge, web.HTTPRequestTimeout) as error:
            response = error_response(error.status, f"request body above {self.config.max_body_mib} MiB (--max-body-mib)"
                                      if error.status == 413 else f"the request body did not arrive within {BODY_SECONDS} s")
            response.force_close()
            return response
        finally:
            self.active -= 1

    async def read_body(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > self.config.max_body_mib << 20:
            raise web.HTTPRequestEntityTooLarge(self.config.max_body_mib << 20)
        if "Expect" in request.headers and request.version >= (1, 1):
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it with large bodies
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read() if request.can_read_body else b""
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    def choose(self, tried: list[Worker], suspects: list[Worker]) -> Worker | None:
        """The next healthy server by the policy: none that answered 500 to this request, one not tried yet if there is any."""
        ready = [worker for worker in self.workers.values() if worker.healthy and not worker.draining]
        if tried:
            ready = [worker for worker in ready if worker not in suspects]
            ready = [worker for worker in ready if worker not in tried] or ready
        if not ready:
            return None
        if self.config.policy == "least_loaded":
            worker = min(ready, key=lambda worker: (worker.in_flight, worker.turn))
        else:
            worker = min(ready, key=lambda worker: worker.turn)
        worker.turn = next(self.turns)
        return worker

    async def forward(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Tries servers until one answers. TimeoutError comes from the caller's deadline."""
        raw = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs  # absolute form: rare
        headers = end_to_end(request.headers, NOT_TO_SERVER)
        tried: list[Worker] = []
        suspects: list[Worker] = []  # answered 500
        failed_answer = None  # the last 5xx of a server: passed on if nothing better comes
        problem = "no healthy server"
        timed_out = False
        for attempt in range(self.config.max_attempts):
            if attempt:
                await asyncio.sleep(random.uniform(0, min(2.0, 0.05 * 2**attempt)))
            worker = self.choose(tried, suspects)
            if worker is None and not suspects and await self.wait_for_server():
                worker = self.choose(tried, suspects)
            if worker is None:
                break
            tried.append(worker)
            worker.retries += attempt > 0
            worker.requests += 1
            worker.in_flight += 1
            begun = time.monotonic()
            response = None
            try:
                async with self.session.request(request.method, URL(worker.url + raw, encoded=True), headers=headers,
                                                data=body or None, allow_redirects=False) as answer:
                    passed_on = end_to_end(answer.headers, HOP_BY_HOP)
                    length = answer.content_length
                    if answer.status in RETRIED or request.method == "HEAD" or length is not None and length <= BUFFERED:
                        whole = web.Response(body=await answer.read(), status=answer.status, reason=answer.reason,
                                             headers=passed_on)
                        if answer.status in RETRIED:
                            failed_answer, problem = whole, f"{worker.url} answers {answer.status}"
                            worker.failures += 1
                            if answer.status == 500:
                                suspects.append(worker)
                            else:
                                self.blame(worker, f"answers {answer.status}")
                            continue
                        response = whole
                    else:
                        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed_on)
                        await response.prepare(request)
                        async for chunk in answer.content.iter_any():
                            await response.write(chunk)
                        await response.write_eof()
                worker.failed_in_a_row = 0
                for suspect in suspects:
                    self.blame(suspect, "answers 500 to what another server could answer")
                return response
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the client has gone away") from error
                problem = f"{worker.url}: {describe_error(error)}"
                timed_out = isinstance(error, TimeoutError)
                worker.failures += 1
                self.blame(worker, describe_error(error))
                if response is not None and response.prepared:
                    raise ConnectionResetError("the server failed in the middle of its answer") from error
            except asyncio.CancelledError:  # the client has gone away, or the time is up, or the router ends
                if request.transport is not None and not request.transport.is_closing():
                    worker.failures += 1
                    if not self.stopping:
                        self.blame(worker, "no complete answer in time")
                    if response is not None and response.prepared:
                        request.transport.abort()
                raise
            finally:
                spent = time.monotonic() - begun
                worker.in_flight -= 1
                worker.seconds += spent
                worker.histogram[next((i for i, edge in enumerate(BUCKETS) if spent <= edge), len(BUCKETS))] += 1
                if worker.draining and not worker.in_flight:
                    self.forget(worker)
        if failed_answer is not None:
            return failed_answer
        retry_after = str(math.ceil(self.config.health_interval))
        return error_response(504 if timed_out else 503, f"no server could answer: {problem}", Retry_After=retry_after)

    async def wait_for_server(self) -> bool:
        """Waits up to queue_timeout for a healthy server."""
        try:
            async with asyncio.timeout(self.config.queue_timeout):
                await self.some_healthy.wait()
            return True
        except TimeoutError:
            return False

    async def ask_every_server(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """One control call to all servers; the status is the worst of theirs."""
        headers = end_to_end(request.headers, NOT_TO_SERVER)

        async def ask(worker):
            try:
                async with self.session.post(URL(worker.url + request.raw_path, encoded=True), headers=headers,
                                             data=body or None) as answer:
                    return answer.status, (await answer.read()).decode("utf-8", "replace")
            except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                return 502, describe_error(error)

        workers = [worker for worker in self.workers.values() if not worker.draining]
        if not workers:
            return error_response(503, "no server")
        results = await asyncio.gather(*(ask(worker) for worker in workers))
        answers = {worker.url: {"status": status, "body": text} for worker, (status, text) in zip(workers, results)}
        return web.json_response({"servers": answers}, status=max(status for status, _ in results))

    # ---- own endpoints -------------------------------------------------------------------------------------------------

    def get_health(self) -> web.Response:
        healthy = sum(worker.healthy and not worker.draining for worker in self.workers.values())
        good = healthy > 0 and not self.stopping
        return web.json_response({"status": "ok" if good else "no healthy server", "healthy": healthy,
                                  "servers": len(self.workers)}, status=200 if good else 503)

    async def serve_workers(self, request: web.BaseRequest) -> web.Response:
        if request.method == "GET":
            return web.json_response({"workers": [worker.describe() for worker in self.workers.values()]})
        try:
            if request.method == "POST":
                body = json.loads(await self.read_body(request))
                if not isinstance(body, dict):
                    raise ValueError('the body must be {"url": "http://host:port"}')
                url = clean_url(body.get("url"))
            elif request.method == "DELETE":
                url = clean_url(request.rel_url.query.get("url"))
            else:
                return error_response(405, f"{request.method} /workers: use GET, POST or DELETE", Allow="GET, POST, DELETE")
        except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 are ValueErrors
            return error_response(400, f"{request.method} /workers: {error}")
        worker = self.workers.get(url)
        if request.method == "DELETE":
            if worker is None:
                return error_response(404, f"DELETE /workers: {url} is not one of the servers")
            worker.draining = True
            self.update_event()
            say(f"{url} is draining ({worker.in_flight} in flight)")
            if not worker.in_flight:
                self.forget(worker)
            return web.json_response(worker.describe(), status=202 if worker.in_flight else 200)
        if worker is None:
            worker = self.workers[url] = Worker(url)
        worker.draining = False
        await self.look_at(worker)
        self.update_event()
        return web.json_response(worker.describe())

    def forget(self, worker: Worker) -> None:
        if self.workers.get(worker.url) is worker:
            del self.workers[worker.url]
            say(f"{worker.url} is gone")

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


def keepalive_socket(address_info) -> socket.socket:
    """A socket on which a machine that lost its power is noticed within a minute, however long an answer may take."""
    family, kind, proto = address_info[:3]
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
        if hasattr(socket, option):  # names differ outside Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


async def serve(config: Config) -> None:
    """Runs until SIGINT or SIGTERM, then drains."""
    router = Router(config)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = await router.start()
    print(f"router listening at http://{config.host}:{port} ({len(router.workers)} servers)", flush=True)
    await stop.wait()
    await router.stop()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # two files per request in flight; 1,024 is the usual limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        config = tyro.cli(Config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
            runner.run(serve(config))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
