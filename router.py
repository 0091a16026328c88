"""One HTTP address in front of many servers: a router for reward models that has to last a training run.

    python router.py --port 30000 --workers http://a:8000 http://b:8000

A client that goes away stops its server's work. What is not among --forward is refused. Own endpoints:
    GET /health                 200 while at least one server is healthy, else 503; never asks for a key
    GET /workers, /metrics      the servers and their state; Prometheus text
    POST /workers {"url": U}    adds a server; asks for the servers' key, as does
    DELETE /workers?url=U       which takes one out; what it is at goes on
How an attempt is judged:
    no connection               no server has seen the request: this one leaves, the request goes on or waits
    /health stays silent        the server leaves, its requests go on: that is no death
    500, 502-504, a cut         /health is asked:
    connection                  it is good: another server is asked; after --unhealthy-after such failures in
                                a row one leaves, unless it is the last
                                it is not: the server has died, perhaps of the request, and leaves. What it
                                was at goes on one a second; whose next server dies within a second, or whose
                                third one dies, is refused with 422: it is not to be sent again
    any other answer            is passed on; once a part of it is out, there is no retry
None that lives is asked twice. One that leaves comes back when its /health answers.
Requests with the same X-Session-Id header go to the same server while it is healthy, whatever --policy says.
Left out: TLS towards clients, HTTP/2, WebSockets, trailers, "Expect: 100-continue" (curl waits a second for
it with bodies over 1 MB), caching, several processes, prefix-aware routing, systems other than Linux.
Needs none of our other files.
"""

import asyncio
import contextlib
import errno
import gc
import hashlib
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
from functools import partial
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
    host: str = "127.0.0.1"  # Address to listen on. 0.0.0.0 opens it to the network: set an API key then.
    port: int = 30000  # Port to listen on; 0 lets the system choose (it is printed).
    # Paths that are passed on, with all below them; / is everything.
    forward: tuple[str, ...] = ("/v1", "/generate", "/classify", "/pooling", "/score", "/rerank",
                                "/tokenize", "/detokenize")
    policy: Literal["round_robin", "least_loaded"] = "round_robin"  # In turn, or to the least busy server.
    max_attempts: int = 3  # How many servers one request is sent to.
    unhealthy_after: int = 3  # Failures in a row after which a server leaves the rotation.
    health_interval: float = 5.0  # Seconds between two looks at /health (any status below 500 is healthy).
    # Seconds a request waits while no server is healthy, and in a line if its server died of something; 0:
    # 503 at once, and no line, so the harmless beside a prompt that kills servers may be refused with it.
    queue_timeout: float = 180.0
    request_timeout: float = 3600.0  # Seconds until a request must be answered, retries included; then 504.
    max_body_mib: int = 64  # Largest request body in MiB; above it 413.
    # Key that clients send as Bearer token; old,new accepts both. Empty: ROUTER_API_KEY, which ps hides.
    api_key: str = ""
    server_key: str = ""  # Key sent to servers. Empty: ROUTER_SERVER_KEY, else the client's goes on.

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        for name in ("max_attempts", "unhealthy_after", "max_body_mib", "health_interval", "request_timeout"):
            if getattr(self, name) <= 0:
                self.refuse(name, "must be above 0")
        if self.queue_timeout < 0:
            self.refuse("queue_timeout", "must be at least 0")
        if not 0 <= self.port <= 65535:
            self.refuse("port", "must be from 0 to 65535")

    def refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: {remedy}")


def clean_url(text) -> str:
    """A server's base URL without the slash or /v1 at its end. ValueError if it is not one."""
    if not re.fullmatch(r"https?://[\w\[][\w.:/\[\]%~-]*", str(text), re.ASCII):
        raise ValueError(f"server URL {text!r}: write it as http://10.0.0.2:8000")
    return str(URL(text)).rstrip("/").removesuffix("/v1")  # requests bring their own /v1


def read_key(given: str, variable: str) -> str:
    """A key as given, or from the environment; of several the ones that are not empty."""
    keys = (given or os.environ.get(variable, "")).split(",")
    return ",".join(key.strip() for key in keys if key.strip())  # a secret's file may end with a newline


def address_of(host: str, port) -> str:
    """HOST:PORT as it stands in a URL."""
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"{host}:{port}"


def warn_if_open(host: str, api_key: str, say) -> None:
    """Says so where the network can reach a router that asks for no key."""
    if not api_key and not re.fullmatch(r"localhost|127\.[\d.]+|::1", host):
        say(f"WARNING: --host {host} is open to the network and no key is asked for; set ROUTER_API_KEY")


FAILED = {500, 502, 503, 504}
NO_FILES = {errno.EMFILE, errno.ENFILE}  # the router's own lack, which is no server's fault
BUFFERED = 1 << 20  # bytes; an answer that is longer, or of unknown length, is streamed and cannot be retried
CONNECT_SECONDS = 5  # for a connection to a server; then another server is asked
HEALTH_SECONDS = 10  # for a server to answer /health: a busy one is slow
ALONE_SECONDS = 1.0  # a prompt that kills its server does so within that time
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
NEW_BODY = HOP_BY_HOP | {"host", "content-length", "expect"}  # aiohttp writes its own


@dataclass(eq=False)
class Worker:
    """One server and what is known about it."""
    url: str
    healthy: bool = False
    why: str = ""  # it is healthy, or not
    turn: float = 0.0  # when it was last chosen: round robin is "least recently chosen"
    in_flight: int = 0
    failed_in_a_row: int = 0  # requests
    polls_failed: int = 0  # looks at /health, in a row
    is_silent: bool = False  # /health gave no answer at the last look
    requests: int = 0
    failures: int = 0
    retries: int = 0  # requests that it got because another server had failed
    seconds: float = 0.0  # of all attempts


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full: no reason to stop
        print(f"{time.strftime('%H:%M:%S')} router: {text}", file=sys.stderr, flush=True)


def error_response(status: int, message: str) -> web.Response:
    """An error of the router itself, as OpenAI clients know it."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    return web.json_response(body, status=status)


def end_to_end(headers, dropped: set[str]) -> CIMultiDict:
    """The headers that go on: all but those about this one connection."""
    kept = CIMultiDict(headers)
    for name in dropped:
        kept.popall(name, None)
    return kept


def weight_of(session: str, url: str) -> bytes:
    """Rendezvous hashing: a session belongs to the server with the largest of these."""
    return hashlib.sha256(f"{session} {url}".encode("utf-8", "surrogateescape")).digest()


def describe(error: Exception) -> str:
    return str(error) or repr(error)


class Connector(aiohttp.TCPConnector):
    """Connections to servers. One that holds bytes that nobody asked for is not used again.

    Such bytes, for example a late 408 for an idle connection, would become the answer to the next request.
    """

    async def connect(self, *arguments, **options):
        while True:
            connection = await super().connect(*arguments, **options)
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
        self.told_of_files = False
        self.suspects = asyncio.Lock()  # who has it may ask next
        self.news = asyncio.Event()

    async def start(self) -> int:
        """Looks at every server once, opens the port and returns it. OSError if it cannot be had."""
        config = self.config
        loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            connector=Connector(limit=0, keepalive_timeout=1),  # uvicorn's is 5 s, and may be late
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS),
            auto_decompress=False,
        )
        server = web.Server(  # without a URL dispatcher
            self.handle,
            request_factory=partial(web.BaseRequest, loop=loop, client_max_size=config.max_body_mib << 20),
            handler_cancellation=True,  # when a client goes away its server's work ends
            access_log=None,
            auto_decompress=False,
        )
        self.runner = web.ServerRunner(server, shutdown_timeout=4.0)  # aiohttp waits twice
        await self.runner.setup()
        await self.look_at_all()
        self.poller = asyncio.create_task(self.poll_forever())
        await web.TCPSite(self.runner, config.host, config.port, backlog=1024).start()
        warn_if_open(config.host, self.api_key, say)
        return self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Takes no new requests, waits up to 8 s for those in flight, then ends them."""
        await self.runner.cleanup()
        self.poller.cancel()
        await self.session.close()

    async def poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await self.look_at_all()

    async def look_at_all(self) -> None:
        await asyncio.gather(*map(self.look_at, self.workers.values()))

    async def ask_health(self, worker: Worker) -> tuple[bool, str]:
        """Whether a server is healthy, and what says so."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                async with self.session.get(worker.url + "/health", allow_redirects=False) as answer:
                    worker.is_silent = False
                    if answer.status == 200:
                        return True, "/health is good"
                    return answer.status < 500, f"/health answers {answer.status}"
        except Exception as error:  # whatever it is, it is not health; and the poller must never die
            worker.is_silent = isinstance(error, TimeoutError)
            known = worker.healthy and self.lacks_files(error)  # then the server stays as it was
            return known, f"/health: {describe(error)}"

    def lacks_files(self, error: Exception) -> bool:
        """Whether the router could open no connection because it has no file descriptor left."""
        if getattr(error, "errno", None) not in NO_FILES:
            return False
        if not self.told_of_files:
            self.told_of_files = True
            say("WARNING: no file descriptor is left, requests wait for one; raise the limit (ulimit -n)")
        return True

    async def look_at(self, worker: Worker) -> None:
        """Asks one server for its health and draws the consequence."""
        healthy, why = await self.ask_health(worker)
        if healthy:
            worker.polls_failed = 0
            self.set_health(worker, True, why)
        else:
            worker.polls_failed += 1
            if worker.polls_failed >= self.config.unhealthy_after or not worker.why:
                self.set_health(worker, False, why)
                for limit in self.limits.pop(worker, ()):  # what hangs there is asked elsewhere
                    with contextlib.suppress(RuntimeError):  # its own time ends just now
                        limit.reschedule(0)

    def set_health(self, worker: Worker, healthy: bool, why: str) -> None:
        if worker.healthy == healthy and worker.why:
            return
        worker.healthy = healthy
        worker.why = why
        worker.failed_in_a_row = 0
        self.news.set()  # to all that wait now
        self.news.clear()
        state = "in" if healthy else "not in"
        say(f"{worker.url} is {state} the rotation ({why})")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request comes through here."""
        response = await self.respond(request)
        if response.status >= 400 and request.path == "/generate":
            # Functions written for SGLang look for keys of a dict, whatever the status: this is none.
            response.text = json.dumps(response.body.decode("utf-8", "replace"))
            response.headers.pop("Content-Encoding", None)
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
        known = [hmac.compare_digest(given, b"Bearer " + one.encode()) for one in key.split(",")]
        if key and not any(known):
            return error_response(401, "missing or wrong API key: send 'Authorization: Bearer KEY'")
        if path == "/metrics":
            return web.Response(text=self.metrics())
        is_forwarded = (path + "/").startswith(self.forwarded) and ".." not in unquote(path)
        if path != "/workers" and not is_forwarded:
            return error_response(404, f"{path}: not among the paths of --forward")
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"request body above {self.config.max_body_mib} MiB (--max-body-mib)")
        if path == "/workers":
            return await self.serve_workers(request, body)
        return await self.forward(request, body)

    def metrics(self) -> str:
        """Prometheus' text. failures: attempts without an answer, or with one of FAILED."""
        lines = [f"router_waiting {self.waiting}"]
        for name in ("requests_total", "failures_total", "retries_total", "seconds_total",
                     "in_flight", "healthy"):
            for worker in self.workers.values():
                value = float(getattr(worker, name.removesuffix("_total")))
                lines.append(f'router_{name}{{worker="{worker.url}"}} {value}')
        return "\n".join(lines) + "\n"

    def take(self, tried, session: str) -> Worker | None:
        """A place on a healthy server that was not tried: the session's own, or the next one."""
        ready = [one for one in self.workers.values() if one.healthy and one not in tried]
        if not ready:
            return None
        if session:  # when a server leaves or comes, only the sessions on that one move
            worker = max(ready, key=lambda one: weight_of(session, one.url))
        elif self.config.policy == "least_loaded":
            worker = min(ready, key=lambda one: (one.in_flight, one.turn))
        else:
            worker = min(ready, key=lambda one: one.turn)
        worker.turn = time.monotonic()
        worker.in_flight += 1
        return worker

    async def choose(self, tried: list[Worker], suspect: bool, deadline: float, session: str):
        """A place on a server. What no living one has seen may wait for it.

        Suspects, whose server has died, wait in a line that lets in one every ALONE_SECONDS."""
        patience = min(self.config.queue_timeout, deadline - time.monotonic())
        line = contextlib.nullcontext()
        if suspect:
            line = self.suspects
        else:
            worker = self.take(tried, session)
            if worker or tried:
                return worker
        self.waiting += 1
        try:
            async with asyncio.timeout(patience), line:
                if suspect:
                    await asyncio.sleep(ALONE_SECONDS)
                while True:
                    worker = self.take(tried, session)
                    if worker:
                        return worker
                    await self.news.wait()
        except TimeoutError:
            return self.take(tried, session)
        finally:
            self.waiting -= 1

    def headers_for_servers(self, request) -> CIMultiDict:
        headers = end_to_end(request.headers, NEW_BODY)
        if self.server_key:
            headers["Authorization"] = f"Bearer {self.server_key}"
        return headers

    async def forward(self, request, body: bytes) -> web.StreamResponse:
        """Asks servers until one answers."""
        config = self.config
        deadline = time.monotonic() + config.request_timeout
        headers = self.headers_for_servers(request)
        tried = []  # living servers that have seen the request
        deaths = 0  # of servers that had it
        attempts = 0
        answer, problem = None, "no healthy server"
        session = request.headers.get("X-Session-Id", "")
        while attempts < config.max_attempts:
            worker = await self.choose(tried, deaths > 0, deadline, session)
            if not worker:
                break
            if attempts:
                worker.retries += 1
            begun = time.monotonic()
            expelled = broken = False
            try:
                answer = await self.ask(worker, request, headers, body, deadline)
                if answer.status not in FAILED:
                    worker.failed_in_a_row = 0
                    return answer
                problem = f"{worker.url} answers {answer.status}"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{worker.url}: {describe(error)}"
                if self.lacks_files(error):
                    await asyncio.sleep(0.2)  # until earlier requests have returned theirs
                    continue
                if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                    worker.failures += 1
                    self.set_health(worker, False, problem)
                    continue  # no server has seen the request
                expelled = isinstance(error, TimeoutError)  # or its time has ended, which is asked first
                broken = not expelled
            ended = time.monotonic()
            if ended >= deadline - 0.01:  # clocks differ; nobody's fault: one that hangs leaves by its health
                return error_response(504, f"no answer within --request-timeout {config.request_timeout:g}")
            attempts += 1
            worker.failures += 1
            if expelled and worker.is_silent:
                continue  # its server has left because /health was silent: that is no death
            if worker.polls_failed or not (await self.ask_health(worker))[0]:
                self.set_health(worker, False, f"{problem}, and /health fails")
                if worker.is_silent and not broken:
                    continue
                deaths += 1
                if deaths > 2 or (deaths > 1 and ended - begun < ALONE_SECONDS):
                    return error_response(422, f"{deaths} servers died of this request, the last: {problem}")
            else:
                tried.append(worker)
                worker.failed_in_a_row += 1
                last = sum(one.healthy for one in self.workers.values()) == 1
                if worker.failed_in_a_row >= config.unhealthy_after and not last:
                    self.set_health(worker, False, f"{worker.failed_in_a_row} failures in a row: {problem}")
        if answer:
            return answer
        response = error_response(503, f"no server could answer: {problem}")
        response.headers["Retry-After"] = str(math.ceil(config.health_interval))
        return response

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
                if answer.status >= 400 or (answer.content_length or math.inf) <= BUFFERED:
                    content = await answer.read()
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
            raise asyncio.CancelledError from error  # cuts the client's connection
        finally:
            self.limits[worker].discard(limit)
            worker.in_flight -= 1
            worker.seconds += time.monotonic() - begun

    async def serve_workers(self, request, body: bytes) -> web.Response:
        if request.method == "GET":
            return web.json_response({"workers": [vars(worker) for worker in self.workers.values()]})
        try:
            if request.method == "DELETE":
                worker = self.workers.pop(clean_url(request.rel_url.query["url"]))
            else:
                url = clean_url(json.loads(body)["url"])
                worker = self.workers.setdefault(url, Worker(url))
                await self.look_at(worker)
        except (ValueError, KeyError, TypeError) as error:  # broken UTF-8 is a ValueError
            usage = 'write POST /workers {"url": "http://host:port"} or DELETE /workers?url=http://host:port'
            return error_response(400, f"{usage} ({describe(error)})")
        return web.json_response(vars(worker))


class Generate:
    """Answer SGLang's POST /generate, which vLLM does not have, by way of /v1/completions.

    The request is {"text" or "input_ids": one prompt or a list, "sampling_params": {"max_new_tokens": 128,
    ...}}; the answer is {"text", "output_ids", "meta_info"}, or a list of them. Errors are those of
    /v1/completions. Not covered: streams.
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
        if status == 200 and body != b"null":  # vLLM answers null if the client has gone.
            answers = sglang_answers(json.loads(body))
            prompt = completion["prompt"]
            is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
            if not is_batch and len(answers) == 1:
                answers = answers[0]
            body = json.dumps(answers)
        await Response(body, status, media_type="application/json")(scope, receive, send)


def completion_request(body: bytes) -> dict:
    """Translate SGLang's request for /v1/completions, or return {}, which /v1/completions rejects."""
    try:
        given = json.loads(body)
        params = {"max_new_tokens": 128} | (given.get("sampling_params") or {})
        params["max_tokens"] = params.pop("max_new_tokens")
        params["prompt"] = given.get("input_ids") or given.get("text")
    except (ValueError, TypeError, AttributeError):
        return {}
    return params | {"return_token_ids": True}


def sglang_answers(completion: dict) -> list[dict]:
    """Translate an answer of /v1/completions into SGLang's, one for each choice."""
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
    """Runs until SIGINT or SIGTERM, then drains."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    router = Router(config)
    try:
        port = await router.start()
        address = address_of(config.host, port)
        print(f"router listening at http://{address} ({len(router.workers)} servers)", flush=True)
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
