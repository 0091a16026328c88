"""The reward loop: every fault happens for real (processes are killed, nodes go away, servers refuse connections)."""

import asyncio
import collections
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web

import reward_loop
from reward_loop import Overlong, RewardLoopManager, overlong_penalty

ROOT = Path(reward_loop.__file__).parent
FUNCTIONS = Path(__file__).parent / "reward_functions"
FAULTS = f"{FUNCTIONS}/faults.py"


@pytest.fixture(scope="module")
def local_ray():
    import ray

    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def start(local_ray):
    """start(function, **options) -> a manager that is shut down after the test."""
    managers = []

    def start_one(function, **options):
        managers.append(RewardLoopManager(reward_fn=function, **{"num_workers": 1, "sync_processes": 1} | options))
        return managers[-1]

    yield start_one
    for manager in managers:
        manager.shutdown()


class FakeServer:
    """A real HTTP server in a thread. handler(request) is an async function; `requests` has the JSON bodies that came."""

    def __init__(self, handler, port=0):
        self.handler, self.requests, self.times, self.now, self.most = handler, [], [], 0, 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(port), self.loop).result()

    async def _start(self, port):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    async def _handle(self, request):
        if request.can_read_body:
            self.requests.append(await request.json())
        self.times.append(time.monotonic())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self.handler(request)
        finally:
            self.now -= 1

    def stop(self):
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()


@pytest.fixture
def serve():
    servers = []

    def serve_one(handler, port=0):
        servers.append(FakeServer(handler, port))
        return servers[-1]

    yield serve_one
    for server in servers:
        server.stop()


async def critic(request):
    """A judge that finds no error, in OpenAI's form."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "judge"}]})
    message = {"role": "assistant", "content": "All is well. \\boxed{-1}"}
    choice = {"message": message, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 9}})


def sample(response, ground_truth="1", **columns):
    row = {"data_source": "test", "prompt": [{"role": "user", "content": "1+0?"}], "response": response}
    row |= {"reward_model": {"ground_truth": ground_truth}, "extra_info": {"question": "1+0?", "split": "train"}}
    return row | columns


def until(condition, seconds=30.0):
    """Polls until condition() is true; fails the test if it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- pure parts


def test_overlong_penalty():
    # max 100, buffer 20: nothing to 80, half the factor at 90, the whole at 100
    assert [overlong_penalty(n, 100, 20, 2.0) for n in (0, 80, 81, 90, 100)] == [0.0, 0.0, -0.1, -1.0, -2.0]
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(1, 100, buffer, 1.0)


@pytest.mark.parametrize(
    "error, retry",
    [
        (ConnectionRefusedError(), None),
        (ConnectionError(), 0.0),
        (ValueError(), None),
        (TimeoutError(), None),
    ],
)
def test_retry_delay_plain(error, retry):
    assert reward_loop.retry_delay(error) == (0.0 if isinstance(error, ConnectionError) else retry)


def test_retry_delay_of_http_errors():
    import aiohttp
    import requests

    def answer(status, **headers):
        return aiohttp.ClientResponseError(None, (), status=status, headers=headers)

    assert [reward_loop.retry_delay(answer(status)) for status in (400, 404, 422, 408, 429, 500, 503)] == [None] * 3 + [0.0] * 4
    assert reward_loop.retry_delay(answer(429, **{"Retry-After": "7"})) == 7.0
    assert reward_loop.retry_delay(answer(429, **{"Retry-After": "1e9"})) == 60.0
    assert reward_loop.retry_delay(answer(503, **{"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})) == 0.0
    assert reward_loop.retry_delay(aiohttp.ServerDisconnectedError()) == 0.0
    response = requests.Response()
    response.status_code = 503
    assert reward_loop.retry_delay(requests.HTTPError(response=response)) == 0.0
    assert reward_loop.retry_delay(requests.ConnectionError()) == 0.0


def test_rate_limit_holds_in_every_window(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(reward_loop.time, "monotonic", lambda: now[0])
    limit = reward_loop.RateLimit(per_minute=3)
    taken = []
    while len(taken) < 12:
        if (wait := limit.wait()) == 0:
            limit.take()
            taken.append(now[0])
            now[0] += 7
        else:
            now[0] += wait
    assert all(later - earlier >= 60 for earlier, later in zip(taken, taken[3:]))
    assert taken[:4] == [1000.0, 1007.0, 1014.0, 1060.0]
