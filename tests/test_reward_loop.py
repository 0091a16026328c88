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
from reward_loop import Overlong, RewardLoopManager, RewardOptions, no_verdict_rate, overlong_penalty

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


def make_manager(reward_models=None, overlong=None, reward_kwargs=None, **options):
    options = RewardOptions(reward_kwargs=json.dumps(reward_kwargs or {}), **options)
    return RewardLoopManager(options, reward_models=reward_models, overlong=overlong)


@pytest.fixture
def start(local_ray):
    """start(function, **options) -> a manager that is shut down after the test."""
    managers = []

    def start_one(function, **options):
        managers.append(make_manager(reward_fn=function, **{"num_workers": 1, "sync_processes": 1} | options))
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
    assert reward_loop.retry_delay(ConnectionRefusedError()) == 0.0
    assert reward_loop.retry_delay(ValueError()) is reward_loop.retry_delay(TimeoutError()) is None


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
    rare = reward_loop.RateLimit(per_minute=0.3)  # one in 200 s
    assert rare.wait() == 0
    rare.take()
    assert rare.wait() == pytest.approx(200)
    assert reward_loop.RateLimit(math.inf).wait() == 0


def outcome(score, **extra):
    return {"reward_score": score, "reward_extra_info": extra}


def test_rate_counts_the_samples_that_needed_a_verdict():
    right, down = outcome(1.0, genrm_status="ok"), outcome(None, genrm_status="http_error")
    wrong, broken = outcome(-1.0, genrm_status="skipped"), outcome(None, error="KeyError")
    assert no_verdict_rate([wrong] * 86 + [down] * 14) == 1.0  # 14 % right answers, no judge
    assert no_verdict_rate([wrong] * 86 + [down] * 7 + [right] * 7) == 0.5
    assert no_verdict_rate([wrong] * 86 + [broken] * 2 + [right] * 2) == 0.5
    assert no_verdict_rate([outcome(1.0)] * 3 + [outcome(None)]) == 0.25  # a function without a judge: all samples count
    assert no_verdict_rate([wrong]) == no_verdict_rate([]) == 0.0
    assert no_verdict_rate([outcome(None, genrm_status="skipped"), wrong]) == 1.0  # the rule itself gave none


def test_names_of_several_models():
    assert reward_loop.named("genrm", ("a/b", "rm=c=d", "e")) == {"genrm": "a/b", "rm": "c=d", "genrm2": "e"}
    with pytest.raises(ValueError, match="'rm'"):
        reward_loop.named("genrm", ("rm=a", "rm=b"))


def test_flags_of_the_options_are_the_same_for_every_command_line(capsys):
    import dataclasses

    import tyro

    @dataclasses.dataclass(kw_only=True)
    class Config(RewardOptions):
        model: str
        """Whose name is not inherited."""
        max_no_verdict_rate: float = 0.5

    texts = ["--model", "m", "--num-reward-workers", "3", "--timeout", "5", "--genrm", "a/b", "rm=c/d"]
    config = tyro.cli(Config, args=[*texts, "--reward-model-task", "generate", "classify"])
    assert (config.num_workers, config.timeout, config.genrm, config.max_no_verdict_rate) == (3, 5, ("a/b", "rm=c/d"), 0.5)
    models = config.server_configs(sleep_mode=True)
    assert {name: (model.model, model.task, model.sleep_mode) for name, model in models.items()} == {
        "genrm": ("a/b", "generate", True), "rm": ("c/d", "classify", True)}  # fmt: skip
    assert tyro.cli(Config, args=["--model", "m", "--num-workers", "3", "--reward-timeout", "5"]).num_workers == 3
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Grading processes per worker for a sync function" in shown and "Whose name is not inherited" in shown


# ---- what the function may do

OUTCOMES = {  # response -> (score, status, part of extra info or of its error text)
    "one": (1.0, "ok", {"score": 1.0}),
    "integer": (2.0, "ok", {"score": 2.0}),
    "true": (1.0, "ok", {"score": 1.0}),
    "acc": (1.0, "ok", {"score": 1.0, "acc": True}),
    "nan_beside": (1.0, "ok", {"score": 1.0, "entropy": None}),
    "other_keys": (0.5, "ok", {"score": 0.5, "pred": "x"}),
    "numpy": (0.5, "ok", {"score": 0.5, "array": [0, 1, 2], "flag": True}),
    "helper": (1.0, "ok", {"from": "helper"}),
    "none": (None, "no_verdict", {"score": None}),
    "score_none": (None, "no_verdict", {"score": None, "acc": True}),
    "nan": (None, "error", "nan"),
    "infinite": (None, "error", "inf"),
    "string": (None, "error", "'1.0'"),
    "list": (None, "error", "[1.0]"),
    "no_score": (None, "error", "no 'score'"),
    "score_string": (None, "error", "'1'"),
    "raise": (None, "error", "KeyError: 'no such thing' (faults.py:"),
    "sys_exit": (None, "error", "SystemExit: 3"),
    "circular": (None, "error", "ircular"),
    "unknown": (None, "error", "KeyError: 'unknown'"),
}


def check_outcomes(responses, results):
    assert len(results) == len(responses)
    for response, result in zip(responses, results):
        score, status, part = OUTCOMES[response]
        assert (result["reward_score"], result["status"]) == (score, status), (response, result)
        extra = result["reward_extra_info"]
        if isinstance(part, str):
            assert part in extra["error"], (response, extra)
        else:
            assert {key: extra[key] for key in part} == part
    assert len({tuple(result["reward_extra_info"]) for result in results}) == 1  # equal keys, missing ones null


@pytest.mark.parametrize("function", ["async_fault", "sync_fault"])
def test_outcomes_become_statuses_in_order(start, function):
    manager = start(f"{FAULTS}:{function}", num_workers=2)
    responses = [*OUTCOMES, "object", *OUTCOMES] * 3
    results = manager.score_batch([sample(response) for response in responses])
    thing = [result for response, result in zip(responses, results) if response == "object"]
    assert [result["status"] for result in thing] == ["ok"] * 3 and "lock" in thing[0]["reward_extra_info"]["thing"]
    kept = [(response, result) for response, result in zip(responses, results) if response != "object"]
    check_outcomes(*zip(*kept))
    assert manager.score_batch([]) == []


def test_async_hangs_are_cut_off_and_nobody_waits_for_them(start):
    manager = start(f"{FAULTS}:async_fault", timeout=1.0)
    finished = []
    responses = ["hang", "one", "hang_stubbornly"] + ["one"] * 40
    results = manager.score_batch([sample(response) for response in responses], lambda index, _: finished.append(index))
    assert [result["status"] for result in results] == ["timeout", "ok", "timeout"] + ["ok"] * 40
    assert set(finished[-2:]) == {0, 2}
    assert manager.score_batch([sample("one")])[0]["status"] == "ok"


def test_sync_blocks_are_cut_off_and_nobody_waits_for_them(start, monkeypatch):
    monkeypatch.setattr(reward_loop, "SLOW_S", 0.2)
    manager = start(f"{FAULTS}:sync_fault", timeout=2.0)
    finished = []
    responses = ["one"] * 50 + ["block"] + ["pid"] * 50 + ["block"] + ["one"] * 50
    results = manager.score_batch([sample(response) for response in responses], lambda index, _: finished.append(index))
    assert [result["status"] for result in results] == ["timeout" if response == "block" else "ok" for response in responses]
    assert sorted(finished) == list(range(len(responses))) and set(finished[-2:]) == {50, 101}


def test_sync_function_that_ends_its_process(start):
    manager = start(f"{FAULTS}:sync_fault")
    responses = ["one"] * 30 + ["os_exit"] + ["one"] * 30 + ["os_exit"]
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["error" if response == "os_exit" else "ok" for response in responses]
    assert "died" in results[30]["reward_extra_info"]["error"]


def test_async_function_that_ends_its_worker(start):
    """The worker dies twice with the sample; then it is alone in a grading process, and its neighbours are all scored."""
    manager = start(f"{FAULTS}:async_fault", num_workers=2)
    responses = ["one"] * 30 + ["os_exit"] + ["one"] * 30
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["ok"] * 30 + ["error"] + ["ok"] * 30


def test_each_sample_has_its_own_extra_info(start):
    manager = start(f"{FAULTS}:mutates")
    shared = {"list": ["a"]}
    results = manager.score_batch([sample("", ground_truth=str(index), extra_info=shared) for index in range(8)])
    assert [result["reward_extra_info"]["seen"] for result in results] == [["a", str(index)] for index in range(8)]
    assert shared == {"list": ["a"]}


@pytest.mark.parametrize("function", ["takes_step", "async_takes_step", "takes_anything"])
def test_step_and_seconds(start, function):
    """`step` comes to functions with such a parameter and stands in extra_info; a result says how long the function took."""
    manager = start(f"{FAULTS}:{function}")
    row = sample("0.3", step=7)
    with_step, without = manager.score_batch([row, sample("0")])
    assert with_step["reward_extra_info"]["seen"] == [None if function == "takes_anything" else 7, 7]
    assert without["reward_extra_info"]["seen"] == [None, None] and row["extra_info"].get("step") is None
    assert 0.3 <= with_step["seconds"] < 3 and 0 <= without["seconds"] < 0.3


def test_overlong_shaping(start):
    manager = start(f"{FAULTS}:sync_fault", overlong=Overlong(100, 20, 1.0))
    results = manager.score_batch([sample("one", response_length=80), sample("one", response_length=95), sample("none", response_length=95)])
    assert [result["reward_score"] for result in results] == [1.0, 0.25, None]
    assert [result["reward_extra_info"]["score"] for result in results] == [1.0, 1.0, None]
    assert [result["reward_extra_info"]["overlong"] for result in results] == [False, True, True]
    with pytest.raises(ValueError, match="response_length"):
        manager.score_batch([sample("one")])


# ---- one by one


def test_score_one_from_many_loops_and_threads(start):
    manager = start(f"{FAULTS}:async_fault", num_workers=2)
    answers = {}

    def use(name):
        async def ask():
            names = [name] * 20
            return await asyncio.gather(*(manager.score_one(sample("other_keys", extra_info={"who": who})) for who in names))

        answers[name] = asyncio.run(ask())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for results in answers.values():
        assert all(0 <= result.pop("seconds") < 10 for result in results)
    expected = {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "pred": "x"}, "status": "ok"}
    assert answers == {number: [expected] * 20 for number in range(4)}


def test_score_one_does_not_wait_for_a_slower_neighbour_and_shutdown_ends_it(start):
    manager = start(f"{FAULTS}:async_fault")

    async def ask():
        slow = asyncio.create_task(manager.score_one(sample("hang")))
        quick = await asyncio.gather(*(manager.score_one(sample("one")) for _ in range(5)))
        assert [result["status"] for result in quick] == ["ok"] * 5 and not slow.done()
        gone = asyncio.create_task(manager.score_one(sample("hang")))
        await asyncio.sleep(0)
        gone.cancel()  # a caller that goes away disturbs nobody
        assert (await manager.score_one(sample("one")))["status"] == "ok"
        await asyncio.to_thread(manager.shutdown)
        with pytest.raises(RuntimeError, match="shut down"):
            await slow

    asyncio.run(asyncio.wait_for(ask(), 60))
    manager.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        manager.score_batch([sample("one")])


def test_colocate_wakes_the_models_and_puts_them_to_sleep_again(start, serve):
    class Models:
        router_addresses = {"genrm": serve(critic).address}
        calls = []

        def wake_up(self):
            self.calls.append("wake")

        def sleep(self):
            self.calls.append("sleep")

    models = Models()
    manager = start(f"{ROOT}/compute_score.py:compute_score_fapo", reward_models=models)
    results = manager.score_batch([sample("\\boxed{1}")] * 3)
    assert [result["reward_score"] for result in results] == [1.0] * 3
    with pytest.raises(ValueError):
        manager.score_batch([{}])
    assert models.calls == ["wake", "sleep"] * 2


# ---- wrong settings


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reward_fn": "nowhere.py:f"}, "no file"),
        ({"reward_fn": "compute_score"}, "FILE:NAME"),
        ({"reward_fn": f"{FAULTS}:nothing"}, "no function 'nothing'"),
        ({"reward_fn": f"{FAULTS}:sync_fault", "reward_kwargs": {"penlty": 1}}, "'penlty' is not a parameter"),
        ({"reward_fn": f"{FAULTS}:with_marks"}, "needs 'folder'"),
        ({"reward_fn": f"{FUNCTIONS}/verl_gsm8k_judge.py:compute_score_gsm8k"}, "needs 'reward_router_address'"),
        ({"router_address": ("127.0.0.1:1",)}, "needs a function"),
        ({"router_address": ("127.0.0.1:1",), "reward_model_task": ("classify",)}, "reward_model_tokenizer"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"max_no_verdict_rate": -0.1}, "max_no_verdict_rate is -0.1"),
        ({"router_address": ("http://h:1",)}, "host:port"),
        ({"router_address": ("h:1",), "genrm": ("a/b",)}, "one of them"),
        ({"router_address": ("h:1", "h:2"), "reward_model_task": ("generate",) * 3}, "one for each"),
        ({"genrm": ("./nothing",), "reward_fn": f"{FAULTS}:sync_fault"}, "no such folder"),
        ({"genrm_servers": 2}, "give genrm"),
        ({"timeout": -1}, "timeout is -1"),
        ({"max_rpm": 0}, "max_rpm is 0"),
        ({"overlong": Overlong(10, 20)}, "buffer is 20"),
    ],
)
def test_wrong_settings_are_told_at_start(local_ray, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_manager(**{"num_workers": 1} | options)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_loaded(local_ray, tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="nothing_of_this_name"):
        make_manager(reward_fn=f"{tmp_path}/bad.py:f", num_workers=1)


# ---- judges, limits, retries


def test_default_rule(start):
    manager = start(None)
    results = manager.score_batch([sample("\\boxed{1}"), sample("\\boxed{2}")])
    assert [(result["reward_score"], result["reward_extra_info"]["acc"]) for result in results] == [(1.0, True), (-1.0, False)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small tokenizer on disk with a BOS token in its chat template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "?": 1}, "?")), bos_token="<s>")
    fast.chat_template = "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
    return str(folder)


async def classifier(request):
    """Scores a text by its length."""
    body = await request.json()
    return web.json_response({"data": [{"probs": [len(body["input"]) / 100]}]})


@pytest.mark.slow
def test_discriminative_model_without_a_function(start, serve, tokenizer):
    server = serve(classifier)
    options = {"router_address": (server.address,), "reward_model_task": ("classify",), "reward_model_tokenizer": tokenizer}
    results = start(None, **options).score_batch([sample("good"), sample("better")])
    assert [body["input"] for body in sorted(server.requests, key=str)] == [
        "<s>[user]1+0?[assistant]better",
        "<s>[user]1+0?[assistant]good",
    ]
    assert all(body["add_special_tokens"] is False and body["use_activation"] is False for body in server.requests)
    assert [result["reward_score"] for result in results] == [0.28, 0.3]
    assert [result["status"] for result in results] == ["ok", "ok"]


@pytest.mark.slow
def test_functions_in_verls_style_run_unchanged(start, serve, tokenizer):
    async def judge(request):
        body = await request.json()
        mark = 10 if "good" in body["messages"][0]["content"] else 2
        return web.json_response({"choices": [{"message": {"content": f"Let me see.\n\n{mark}"}}]})

    addresses = {"router_address": (serve(judge).address,), "reward_model_tokenizer": tokenizer}
    manager = start(f"{FUNCTIONS}/verl_gsm8k_judge.py:compute_score_gsm8k", **addresses)
    results = manager.score_batch([sample("good"), sample("bad")])
    assert [(result["reward_score"], result["reward_extra_info"]["acc"]) for result in results] == [(10.0, True), (2.0, False)]
    manager.shutdown()

    addresses["router_address"] = (serve(classifier).address,)
    manager = start(f"{FUNCTIONS}/verl_rule_with_disrm.py:compute_score", **addresses)
    results = manager.score_batch([sample("#### 1"), sample("#### 2")])
    assert [result["reward_score"] for result in results] == [pytest.approx(1 + 27 / 100), 0.0]
    assert results[1]["reward_extra_info"] == {"score": 0.0, "acc": False, "rm_score": None}
    manager.shutdown()

    manager = start(f"{FUNCTIONS}/verl_sync_rule.py:compute_score", **addresses)  # a plain rule beside a running model
    assert [result["reward_score"] for result in manager.score_batch([sample("#### 1"), sample("#### 2")])] == [1.0, 0.0]


def write_function(folder, body, name="ask"):
    path = folder / "asking.py"
    path.write_text("import asyncio, aiohttp\n" + body)
    return f"{path}:{name}"


ASK = """
async def ask(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_router_addresses):
    address = reward_router_addresses[data_source] if data_source in reward_router_addresses else reward_router_address
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"http://{address}/", json={"text": solution_str}) as response:
            return {"score": 1.0, "said": await response.text()}
"""


def test_several_reward_models_by_name(start, serve, tmp_path):
    async def first(request):
        return web.Response(text="first")

    async def second(request):
        return web.Response(text="second")

    addresses = (f"a={serve(first).address}", f"b={serve(second).address}")
    manager = start(write_function(tmp_path, ASK), router_address=addresses)
    results = manager.score_batch([sample("x", data_source=name) for name in ("a", "b", "other")])
    assert [result["reward_extra_info"]["said"] for result in results] == ["first", "second", "first"]


@pytest.mark.slow
def test_concurrency_is_limited_over_all_workers(start, serve, tmp_path):
    async def slow(request):
        await asyncio.sleep(0.05)
        return web.Response(text="ok")

    for option in ("max_concurrency", "max_in_flight"):
        server = serve(slow)
        manager = start(write_function(tmp_path, ASK), router_address=(server.address,), num_workers=2, **{option: 3})
        results = manager.score_batch([sample("x")] * 30)
        assert {result["status"] for result in results} == {"ok"} and server.most == 3
        manager.shutdown()


@pytest.mark.slow
def test_requests_per_minute_are_limited_over_all_workers(start, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_loop, "RATE_WINDOW_S", 0.5)  # 600 a minute = 5 in any half second

    async def quick(request):
        return web.Response(text="ok")

    for limits in ({"max_rpm": 600}, {"max_tpm": 60_000, "tokens_per_call": 100}):
        server = serve(quick)
        manager = start(write_function(tmp_path, ASK), router_address=(server.address,), num_workers=2, **limits)
        results = manager.score_batch([sample("x")] * 13)
        assert {result["status"] for result in results} == {"ok"} and len(server.times) == 13
        # Calls 0 and 5 leave the manager 0.5 s apart; 0.25 s allows for a slow way to the server.
        assert all(later - earlier > 0.25 for earlier, later in zip(server.times, server.times[5:]))
        manager.shutdown()


def test_http_errors_are_retried_where_it_helps_and_only_so_often(start, serve, tmp_path):
    seen = collections.Counter()

    async def flaky(request):
        text = (await request.json())["text"]
        seen[text] += 1
        if text == "busy" and seen[text] < 2:
            return web.Response(status=429, headers={"Retry-After": "0"})
        if text == "bad request":
            return web.Response(status=400)
        return web.Response(status=500 if text == "broken" else 200, text="ok")

    server = serve(flaky)
    manager = start(write_function(tmp_path, ASK), router_address=(server.address,), http_retries=1)
    results = manager.score_batch([sample("busy"), sample("bad request"), sample("broken"), sample("fine")])
    assert [result["status"] for result in results] == ["ok", "error", "error", "ok"]
    assert "400" in results[1]["reward_extra_info"]["error"] and "500" in results[2]["reward_extra_info"]["error"]
    assert seen == {"busy": 2, "bad request": 1, "broken": 2, "fine": 1}


# ---- processes and nodes that die


@pytest.mark.slow
def test_workers_and_grading_processes_are_killed_mid_batch(start, tmp_path):
    """SIGKILL to a worker and to a grading process: all samples are scored, in order, one result each."""
    for function in ("with_marks", "async_with_marks"):  # marked with the pid of a grading process, of a worker
        folder = tmp_path / function
        folder.mkdir()
        manager = start(f"{FAULTS}:{function}", num_workers=2, reward_kwargs={"folder": str(folder)})
        finished, victims = [], []

        def on_result(index, result):
            finished.append(index)
            if len(finished) == 10:  # in the manager's own thread: samples are certainly on their way
                victims.append(int(next(iter(folder.iterdir())).name))
                os.kill(victims[0], signal.SIGKILL)

        samples = [sample("0.02" if index < 20 else "0.1", ground_truth=str(index)) for index in range(60)]
        results = manager.score_batch(samples, on_result)
        assert [result["reward_score"] for result in results] == [float(index) for index in range(60)]
        assert sorted(finished) == list(range(60))
        assert not alive(victims[0])
        manager.shutdown()


def test_nothing_is_left_running(start, tmp_path):
    """Grading processes end with their worker, even one that blocks, and even when the worker is killed."""
    manager = start(f"{FAULTS}:with_marks", reward_kwargs={"folder": str(tmp_path)})
    running = threading.Thread(target=lambda: pytest.raises(RuntimeError, manager.score_batch, [sample("3600")] * 2))
    running.start()
    until(lambda: len(list(tmp_path.iterdir())) == 1)
    (pid,) = [int(path.name) for path in tmp_path.iterdir()]
    assert alive(pid)
    manager.shutdown()
    running.join(30)
    assert not running.is_alive()
    until(lambda: not alive(pid))


@pytest.mark.slow
def test_blocked_event_loop_of_a_worker(start, monkeypatch):
    """An async function that blocks holds up its whole worker: that worker is replaced, and the culprit found alone."""
    monkeypatch.setattr(reward_loop, "WEDGED_S", 3.0)
    monkeypatch.setattr(reward_loop, "HEARTBEAT_S", 1.0)
    manager = start(f"{FAULTS}:async_fault", num_workers=2, timeout=2.0)
    responses = ["one"] * 10 + ["block"] + ["one"] * 10
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["ok"] * 10 + ["timeout"] + ["ok"] * 10


@pytest.mark.slow
def test_a_node_goes_away(tmp_path):
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    manager = None
    try:
        second = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        manager = make_manager(
            reward_fn=f"{FAULTS}:async_with_marks", reward_kwargs={"folder": str(tmp_path)}, num_workers=2, sync_processes=1
        )
        finished = []

        def on_result(index, result):
            finished.append(index)
            if len(finished) == 20:
                threading.Thread(target=cluster.remove_node, args=(second, False)).start()

        # The long ones are certainly under way on both nodes when the node goes.
        samples = [sample("0.01" if index < 40 else "5", ground_truth=str(index)) for index in range(200)]
        results = manager.score_batch(samples, on_result)
        assert [result["reward_score"] for result in results] == [float(index) for index in range(200)]
        assert sorted(finished) == list(range(200))
        assert len(list(tmp_path.iterdir())) >= 2
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, 60)
        assert [result["status"] for result in manager.score_batch([sample("0")] * 10)] == ["ok"] * 10
    finally:
        if manager:
            manager.shutdown()
        ray.shutdown()
        cluster.shutdown()


# ---- judges that go down, and the command line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fapo", "raises"])
def test_judge_is_down_for_20_seconds(start, serve, tmp_path, kind):
    """No sample is lost, and none is paid as if the judge had found it flawless."""

    async def finds_a_flaw(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "judge"}]})
        choice = {"message": {"role": "assistant", "content": "\\boxed{0}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 9}})

    port = free_port()
    function = f"{ROOT}/compute_score.py:compute_score_fapo" if kind == "fapo" else write_function(tmp_path, ASK)
    manager = start(function, num_workers=2, router_address=(f"127.0.0.1:{port}",))
    comes_back = threading.Timer(20, lambda: serve(finds_a_flaw, port))
    comes_back.start()
    results = manager.score_batch([sample("\\boxed{1}")] * 50)
    comes_back.join()
    assert len(results) == 50
    if kind == "raises":
        assert {result["status"] for result in results} == {"ok"}
    else:  # a flaw is found, or there is no verdict: never the full reward
        assert {(result["reward_score"], result["status"]) for result in results} <= {(0.0, "ok"), (None, "no_verdict")}
        assert all(result["reward_extra_info"]["acc"] for result in results)
    assert manager.score_batch([sample("\\boxed{1}")])[0]["status"] == "ok"


def write_responses(path, count, response="one"):
    path.write_text("".join(json.dumps(sample(response, ground_truth=str(index))) + "\n" for index in range(count)))
    return path


def command_line(*arguments, **options):
    """Runs the script as a user does -> CompletedProcess."""
    command = [sys.executable, str(ROOT / "reward_loop.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, **options)


def test_command_line_errors_are_one_line_and_exit_2(tmp_path):
    good = write_responses(tmp_path / "good.jsonl", 2)
    (tmp_path / "no_response.jsonl").write_text('{"data_source": "x", "reward_model": {"ground_truth": "1"}}\n')
    (tmp_path / "broken.jsonl").write_text("{}\n{\n")
    (tmp_path / "no_truth.jsonl").write_text('{"data_source": "x", "reward_model": {"ground_truth": null}, "response": "r"}\n')
    (tmp_path / "no_text.jsonl").write_text('{"data_source": "x", "reward_model": {"ground_truth": "1"}, "response": 5}\n')
    (tmp_path / "fake.parquet").write_text("PAR?")
    out = tmp_path / "out.jsonl"
    cases = [  # in this process, as Ray need not start
        (dict(data=tmp_path / "none.jsonl", out=out), "no such file"),
        (dict(data=tmp_path / "no_response.jsonl", out=out), "row 0: no 'response'"),
        (dict(data=tmp_path / "broken.jsonl", out=out), "line 2"),
        (dict(data=tmp_path / "no_truth.jsonl", out=out), "row 0: reward_model is {'ground_truth': None}; it must be a dict"),
        (dict(data=tmp_path / "no_text.jsonl", out=out), "row 0: response is 5; it must be a string"),
        (dict(data=tmp_path / "fake.parquet", out=out), "parquet"),
        (dict(data=tmp_path / "good.txt", out=out), ".jsonl"),
        (dict(data=good, out=tmp_path / "out.csv"), ".parquet or .jsonl"),
        (dict(data=good, out=out, reward_kwargs="{"), "not JSON"),
        (dict(data=good, out=out, reward_kwargs="[]"), "JSON object"),
        (dict(data=good, out=out, router_address=("http://h:1",)), "host:port"),
        (dict(data=good, out=out, max_response_length=100), "'response_length'"),
        (dict(data=good, out=out, reward_fn="none.py:f"), "no file"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, OSError)) as caught:
            reward_loop.run(reward_loop.Config(**options))
        assert message in str(caught.value) and "\n" not in str(caught.value), options
    for arguments in (("--data", tmp_path / "none.jsonl", "--out", out), ("--data", good, "--out", out, "--no-such-flag", 1)):
        ended = command_line(*arguments)
        assert ended.returncode == 2 and ended.stderr.strip() and not ended.stdout and "Traceback" not in ended.stderr
    assert not out.exists()


@pytest.mark.slow
def test_command_line_scores_a_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    responses = ["acc", "other_keys", "raise", "none"] * 5
    rows = [sample(response, score=1) for response in responses]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "responses.parquet")
    arguments = ["--data", tmp_path / "responses.parquet", "--reward-fn", f"{FAULTS}:sync_fault", "--max-no-verdict-rate", "0.5"]
    for name in ("scored.parquet", "scored.jsonl"):
        ended = command_line(*arguments, "--out", tmp_path / name)
        assert ended.returncode == 0, ended.stderr
        assert "scored 20 samples" in ended.stdout and "ok 10, no_verdict 5, timeout 0, error 5" in ended.stdout
        assert "mean reward: 0.75" in ended.stdout and "accuracy: 1.0000 of 5" in ended.stdout
        assert sorted(path.name for path in tmp_path.iterdir() if "partial" in path.name or "tmp" in path.name) == []
    table = pyarrow.parquet.read_table(tmp_path / "scored.parquet")
    assert table.column_names == [*rows[0], "reward_score", "status", "reward_extra_info"]
    assert table.schema.field("reward_score").type == pyarrow.float64() and table["reward_score"].null_count == 10
    written = table.to_pylist()
    assert [row["reward_score"] for row in written] == [1.0, 0.5, None, None] * 5
    assert [row["status"] for row in written] == ["ok", "ok", "error", "no_verdict"] * 5
    assert [json.loads(row["reward_extra_info"]) for row in written[:2]] == [
        {"score": 1.0, "acc": True, "pred": None, "error": None},
        {"score": 0.5, "acc": None, "pred": "x", "error": None},
    ]
    assert [json.loads(line) for line in (tmp_path / "scored.jsonl").open()] == written


@pytest.mark.slow
def test_command_line_stops_when_the_judge_stays_down_and_resumes(tmp_path, serve):
    port = free_port()
    data = tmp_path / "responses.jsonl"
    rows = [sample("\\boxed{1}" if index % 2 else "\\boxed{2}") for index in range(40)]  # every second one asks the judge
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "scored.jsonl"
    arguments = ["--data", data, "--out", out, "--reward-fn", write_function(tmp_path, HALF), "--router-address", f"127.0.0.1:{port}"]
    arguments += ["--http-retries", "0"]
    ended = command_line(*arguments)
    assert ended.returncode == 1 and "have no score" in ended.stderr and "--max-no-verdict-rate 0.2" in ended.stderr
    assert not out.exists()
    ended = command_line(*arguments)
    assert ended.returncode == 2 and "--resume" in ended.stderr

    # The run may have stopped before any of the samples that ask no judge was noted down; all that were are kept.
    noted = [json.loads(line) for line in (tmp_path / "scored.jsonl.partial.jsonl").read_text().splitlines()[1:] if line]
    kept = sum("-1.0" in json.dumps(line) for line in noted)
    server = serve(critic, port)
    ended = command_line(*arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert (f"resuming: {kept} of 40" in ended.stdout) == (kept > 0) and len(server.requests) == 20
    scored = [json.loads(line) for line in out.open()]
    assert [row["reward_score"] for row in scored] == [-1.0, 1.0] * 20
    assert {row["status"] for row in scored} == {"ok"}


HALF = """
async def ask(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    if ground_truth not in solution_str:
        return -1.0
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json={}) as response:
            return 1.0
"""


@pytest.mark.slow
def test_command_line_goes_on_after_a_kill(tmp_path):
    data = write_responses(tmp_path / "responses.jsonl", 200, response="0.05")
    out, marks = tmp_path / "scored.jsonl", tmp_path / "marks"
    marks.mkdir()
    arguments = ["--data", data, "--out", out, "--reward-fn", f"{FAULTS}:with_marks", "--reward-kwargs", json.dumps({"folder": str(marks)})]
    running = subprocess.Popen([sys.executable, str(ROOT / "reward_loop.py"), *map(str, arguments)], start_new_session=True)
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    until(lambda: partial.exists() and partial.read_text().count("\n") > 30, 60)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    with partial.open("a") as file:
        file.write('[7, {"reward_sc')  # a line cut off by the kill
    ended = command_line(*arguments, "--resume", "--reward-kwargs", json.dumps({"folder": str(tmp_path)}))
    assert ended.returncode == 2 and "another run" in ended.stderr
    ended = command_line(*arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert "resuming" in ended.stdout
    again = int(ended.stdout.split("scored ")[1].split()[0])
    assert 0 < again <= 170  # the header and at least 30 results were on disk
    assert [json.loads(line)["reward_score"] for line in out.open()] == [float(index) for index in range(200)]
    assert not partial.exists()
