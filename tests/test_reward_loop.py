"""The Reward Loop: every fault is real (killed processes, lost nodes, refused connections)."""

import asyncio
import collections
import concurrent.futures
import contextlib
import gc
import importlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from pathlib import Path
from random import SystemRandom
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

import forked
import reward_loop
import reward_worker
from algorithm import add_length_penalties, overlong_penalty
from policy import Sample
from run_folder import no_verdict_rate
from reward_loop import RewardLoopManager, RewardOptions

ROOT = Path(reward_loop.__file__).parent
FUNCTIONS = Path(__file__).parent / "reward_functions"
FAULTS, GROUPS = f"{FUNCTIONS}/faults.py", f"{FUNCTIONS}/groups.py"


@pytest.fixture(scope="module")
def local_ray(one_ray):
    return one_ray


def make_manager(reward_models=None, reward_kwargs=None, **options):
    options = RewardOptions(reward_kwargs=json.dumps(reward_kwargs or {}), **options)
    return RewardLoopManager(options, reward_models=reward_models)


def with_penalties(results, lengths):
    """Add the trainer's length penalty to results, for responses of these lengths."""
    settings = SimpleNamespace(max_response_length=100, overlong_buffer=20, overlong_factor=1.0)
    samples = [Sample({}, [1], [5] * length, result=result) for result, length in zip(results, lengths)]
    add_length_penalties([samples], settings)
    return [sample.result for sample in samples]


@pytest.fixture
def start(local_ray):
    """Yield start(function, **options), which returns a manager that is shut down after the test."""
    managers = []

    def start_one(function, **options):
        managers.append(make_manager(reward_fn=function, **{"num_workers": 1, "sync_processes": 1} | options))
        return managers[-1]

    yield start_one
    for manager in managers:
        manager.shutdown()


@pytest.mark.slow
def test_each_node_has_a_worker_unless_a_number_is_given(start, monkeypatch):
    """Other tests pass a number, or have one node, on which two workers start."""
    import ray

    alive = [{"Alive": True, "NodeManagerAddress": f"10.0.0.{node}"} for node in range(3)]
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, {"Alive": False}])
    assert len(start(f"{FAULTS}:async_fault", num_workers=0)._workers) == 3


@pytest.mark.slow
def test_a_cluster_without_a_free_cpu_is_named(start, monkeypatch, caplog):
    monkeypatch.setattr(reward_loop, "START_S", 0.0)
    monkeypatch.setattr(reward_loop, "WEDGED_S", 0.0)
    monkeypatch.setattr(reward_loop, "WORKER_CPUS", 1000)
    with pytest.raises(RuntimeError, match="cannot be started: the Ray cluster has no free CPU; end other"):
        start(f"{FAULTS}:async_fault")
    assert "reward workers wait: the Ray cluster has no free CPU" in caplog.text


@pytest.mark.slow
def test_a_grading_process_that_ends_while_it_loads_is_named(start, tmp_path):
    """An old Linux without pidfd_open has the same effect."""
    rule = "def rule(data_source, solution_str, ground_truth, extra_info): return 1.0"
    dies = "import os, sys\nif sys.argv[0].endswith('/reward_worker.py'): os._exit(1)"
    (tmp_path / "rule.py").write_text(f"{dies}\n{rule}\n")
    with pytest.raises(RuntimeError) as refused:
        start(f"{tmp_path}/rule.py:rule")
    begin = (
        "a reward worker cannot be started: OSError: the grading process ended while it loaded --reward-fn;"
    )
    assert str(refused.value).startswith(begin) and "\n" not in str(refused.value)


def test_judges_that_leave_the_workers_no_cpu_are_refused_before_they_start(tmp_path, monkeypatch):
    import ray

    from cluster import placement

    monkeypatch.setattr(reward_loop, "connect_ray", lambda: False)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(placement, "RewardModelManager", lambda *given: pytest.fail("the judges start"))
    (tmp_path / "config.json").write_text("{}")
    models = (f"quick={tmp_path}", f"strict={tmp_path}")
    options = RewardOptions(reward_fn=f"{ROOT}/docs/judges.py:two_judges", genrm=models, genrm_servers=2)
    message = (
        r"^--genrm-servers 2: 4 servers with 0.5 CPUs each leave none of the Ray cluster's 2 CPUs for the re"
    )
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=message):
        reward_loop.start_rewards(options, stack)


@pytest.fixture(scope="module")
def shared(local_ray):
    """Yield shared(function), which returns one manager with two workers for all tests of this function.

    shared.end() shuts all managers down.
    """
    managers = {}

    def start_once(function):
        if function not in managers:
            patience = 4.0 if function == "async_fault" else 60.0  # some tests use functions that hang
            options = dict(num_workers=2, sync_processes=1, timeout=patience)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ROUTER_API_KEY", "old,s3cret\n")  # for a test below
                managers[function] = make_manager(reward_fn=f"{FAULTS}:{function}", **options)
        return managers[function]

    def end():
        while managers:
            managers.popitem()[1].shutdown()

    start_once.end = end
    yield start_once
    end()


class FakeServer:
    """A real HTTP server in a thread.

    handler(request) is an async function, and `requests` has the JSON of all requests.
    """

    def __init__(self, handler, port=0):
        self.handler, self.requests, self.times, self.paths, self.now, self.most = handler, [], [], [], 0, 0
        self.keys = set()
        self.key = None  # set for a server that rejects requests with another key
        self.workers = None  # set for a router: the manager asks for the number of servers
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = RawTestServer(self._handle, port=port)
        asyncio.run_coroutine_threadsafe(self.server.start_server(), self.loop).result()
        self.address = f"127.0.0.1:{self.server.port}"

    async def _handle(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if request.path == "/workers":
            if self.workers is None:
                return web.Response(status=404)
            return web.json_response({"workers": self.workers})
        if request.can_read_body:
            self.requests.append(await request.json())
        self.times.append(time.monotonic())
        self.paths.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self.handler(request)
        finally:
            self.now -= 1

    def stop(self):
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result()
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
    """Respond like a judge that finds no error, in OpenAI's format."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "judge"}]})
    message = {"role": "assistant", "content": "All is well. \\boxed{-1}"}
    choice = {"message": message, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 9}})


def sample(response, ground_truth="1", **columns):
    row = {"data_source": "test", "prompt": [{"role": "user", "content": "1+0?"}], "response": response}
    row |= {
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": {"question": "1+0?", "split": "train"},
    }
    return row | columns


def score_here(samples, reward_fn=None, **options):
    """Score in this process, where only the function and its arguments matter."""
    from played import RewardsHere  # imports the trainer, which scripts of this file do not need

    rewards = RewardsHere(RewardOptions(reward_fn=reward_fn, **options))
    return [rewards.submit(one).result() for one in samples]


def until(condition, seconds=90.0):
    """Wait until condition() is true, and fail the test if this takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


async def until_most(server, number):
    """Wait in a FakeServer until it has this many concurrent requests, but for a minute at most."""
    for _ in range(6000):
        if server.most >= number:
            break
        await asyncio.sleep(0.01)


def alive(pid):
    """Return False for a process that has ended or is a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port():
    """Return a free port that the system does not choose for other processes in the meantime."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().randrange(20000, 30000)))
            return probe.getsockname()[1]


# ---- pure parts


def test_overlong_penalty():
    # The maximum is 100 and the buffer 20: no penalty up to 80, half the factor at 90, all of it at 100.
    found = [overlong_penalty(length, 100, 20, 2.0) for length in (0, 80, 81, 90, 100)]
    assert found == [0.0, 0.0, -0.1, -1.0, -2.0]
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match=f"--overlong-buffer {buffer}: must be between 1 and"):
            overlong_penalty(0, 100, buffer, 1.0)


def test_http_errors_that_may_pass():
    import aiohttp
    import requests

    def answer(status):
        return aiohttp.ClientResponseError(None, (), status=status)

    for status in (400, 404, 422, 600):
        assert not reward_worker.is_retryable(answer(status))
    for status in (408, 429, 500, 503, 520, 529, 530):  # 529: overloaded
        assert reward_worker.is_retryable(answer(status))
    assert reward_worker.is_retryable(aiohttp.ServerDisconnectedError())
    assert reward_worker.is_retryable(aiohttp.ClientPayloadError())  # cut off within the response
    malformed = answer(400)
    malformed.__cause__ = aiohttp.http_exceptions.BadStatusLine("garbage")  # set by aiohttp
    assert reward_worker.is_retryable(malformed)
    response = requests.Response()
    response.status_code = 503
    assert reward_worker.is_retryable(requests.HTTPError(response=response))
    response.status_code = 404
    assert not reward_worker.is_retryable(requests.HTTPError(response=response))
    assert reward_worker.is_retryable(requests.ConnectionError())
    assert reward_worker.is_retryable(requests.exceptions.ChunkedEncodingError())  # the same with requests
    assert reward_worker.is_retryable(ConnectionRefusedError())
    assert not reward_worker.is_retryable(ValueError()) and not reward_worker.is_retryable(TimeoutError())


def outcome(score, **extra):
    return {"reward_score": score, "reward_extra_info": extra}


def test_rate_counts_the_samples_that_needed_a_verdict():
    right, down = outcome(1.0, genrm_status="ok"), outcome(None, genrm_status="http_error")
    wrong, broken = outcome(-1.0, genrm_status="skipped"), outcome(None, error="KeyError")
    assert no_verdict_rate([wrong] * 86 + [down] * 14) == 1.0  # 14 % correct answers, no judge
    assert no_verdict_rate([wrong] * 86 + [down] * 7 + [right] * 7) == 0.5
    assert no_verdict_rate([wrong] * 86 + [broken] * 2 + [right] * 2) == 0.5
    # If a function has no judge, all samples count.
    assert no_verdict_rate([outcome(1.0)] * 3 + [outcome(None)]) == 0.25
    # If the judge only locates the error of a wrong answer, the score needs no verdict.
    asked = [outcome(-1.0, genrm_status=status, acc=False) for status in ("ok", "http_error")]
    assert no_verdict_rate(asked * 43 + [down] * 7 + [right] * 7) == 0.5
    assert no_verdict_rate([wrong]) == no_verdict_rate([]) == 0.0
    assert no_verdict_rate([outcome(None, genrm_status="skipped"), wrong]) == 1.0  # the rule gave no score


def test_names_of_several_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-4/judge").mkdir(parents=True)
    assert reward_loop.named("genrm", ("./a=b", "rm=c=d")) == {"genrm": "./a=b", "rm": "c=d"}
    assert reward_loop.named("genrm", ("lr=1e-4/judge",)) == {"genrm": "lr=1e-4/judge"}
    assert reward_loop.named("genrm", ("rm=lr=1e-4/judge",)) == {"rm": "lr=1e-4/judge"}
    for twice in (("rm=a", "rm=b"), ("a", "b")):
        with pytest.raises(ValueError, match="another model has the same name; pass NEW_NAME="):
            reward_loop.named("genrm", twice)


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
    assert (config.num_workers, config.timeout, config.genrm, config.max_no_verdict_rate) == (
        3,
        5,
        ("a/b", "rm=c/d"),
        0.5,
    )
    models = config.server_configs(sleep_mode=True)
    assert {name: (model.model, model.task, model.sleep_mode) for name, model in models.items()} == {
        "genrm": ("a/b", "generate", True),
        "rm": ("c/d", "classify", True),
    }
    assert (
        tyro.cli(Config, args=["--model", "m", "--num-workers", "3", "--reward-timeout", "5"]).num_workers
        == 3
    )
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Number of grading processes per worker" in shown and "Whose name is not inherited" in shown


# ---- what the function may do

OUTCOMES = {  # response -> (score, status, part of the extra info or of the error text)
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
    "no_score": (None, "error", "'missing from the result'"),
    "score_string": (None, "error", "'1'"),
    "own_penalty": (None, "error", "the key overlong_penalty belongs to the trainer's length penalty"),
    "raise": (None, "error", "KeyError: 'no such thing' (faults.py:"),
    "terminal": (None, "error", r"ValueError: cannot read \x1b[2J\nstep 9/10 reward 1.000 (faults.py:"),
    "unprintable": (None, "error", "Unprintable: <exception str() failed> (faults.py:"),
    "sys_exit": (None, "error", "SystemExit: 3"),
    "library": (None, "error", "char 1) (faults.py:"),
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


@pytest.mark.parametrize("function", ["async_fault", "sync_fault"])
def test_outcomes_become_statuses_in_order(shared, function):
    manager = shared(function)
    responses = [*OUTCOMES, "object", *OUTCOMES] * 3
    results = manager.score_batch([sample(response) for response in responses])
    thing = [result for response, result in zip(responses, results) if response == "object"]
    assert [result["status"] for result in thing] == ["ok"] * 3 and "lock" in thing[0]["reward_extra_info"][
        "thing"
    ]
    kept = [(response, result) for response, result in zip(responses, results) if response != "object"]
    check_outcomes(*zip(*kept))
    assert manager.score_batch([]) == []


@pytest.mark.slow
def test_async_hangs_are_cut_off_and_nobody_waits_for_them(shared):
    manager, finished = shared("async_fault"), []
    responses = ["hang", "one", "hang_stubbornly"] + ["one"] * 40
    results = manager.score_batch(
        [sample(response) for response in responses], lambda index, _: finished.append(index)
    )
    assert [result["status"] for result in results] == ["timeout", "ok", "timeout"] + ["ok"] * 40
    assert set(finished[-2:]) == {0, 2}
    assert manager.score_batch([sample("one")])[0]["status"] == "ok"


@pytest.mark.slow
def test_what_python_cannot_read_back_costs_its_own_sample(start):
    """A function may lift Python's limits in its process, but they still apply in the driver."""
    responses = ["one", "digits", "one", "depth", "one"]
    results = start(f"{FAULTS}:sync_fault").score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["ok", "error", "ok", "error", "ok"]
    assert "cannot be parsed: ValueError" in results[1]["reward_extra_info"]["error"]
    assert "cannot be parsed: RecursionError" in results[3]["reward_extra_info"]["error"]


def test_a_function_gets_the_columns_that_it_names():
    """In test_what_a_function_of_groups_is_given, the manager rejects a row without such a column."""
    rows = [sample("x", response_length=7), sample("x")]
    results = score_here(rows, f"{FAULTS}:names_columns")
    seen = [result["reward_extra_info"]["seen"] for result in results]
    assert seen == [[rows[0]["prompt"], 7], [rows[0]["prompt"], None]]


def test_an_exception_in_a_result_shows_no_headers(start):
    """Its repr may contain all headers of a request, and therefore a key."""
    (result,) = start(f"{FAULTS}:returns_an_exception").score_batch([sample("x")])
    assert result["status"] == "no_verdict"
    why = result["reward_extra_info"]["why"]
    assert why.startswith("ClientResponseError: 401") and "s3cret" not in why


@pytest.mark.slow
def test_sync_blocks_are_cut_off_and_nobody_waits_for_them(start):
    manager = start(f"{FAULTS}:sync_fault", timeout=8.0, sync_processes=3)
    finished = []
    responses = ["one"] * 50 + ["block"] + ["pid"] * 50 + ["block"] + ["one"] * 50
    results = manager.score_batch(
        [sample(response) for response in responses], lambda index, _: finished.append(index)
    )
    assert [result["status"] for result in results] == [
        "timeout" if response == "block" else "ok" for response in responses
    ]
    assert sorted(finished) == list(range(len(responses))) and set(finished[-2:]) == {50, 101}


@pytest.mark.slow
def test_processes_for_a_sync_function(start, tmp_path):
    """By default, there is one per core, or four if there is a judge to wait for."""
    cases = {2: {}, 8: {"router_address": ("h:1",)}, 3: {"sync_processes": 3}}
    futures = []
    for most, options in cases.items():
        folder = tmp_path / str(most)
        folder.mkdir()
        options = {"sync_processes": 0, "max_in_flight": 100} | options
        manager = start(f"{FAULTS}:waits_until_released", reward_kwargs={"folder": str(folder)}, **options)
        futures += [manager.submit(sample("x")) for _ in range(12)]

    def processes():
        return [len(list((tmp_path / str(most)).iterdir())) for most in cases]

    until(lambda: all(found >= most for found, most in zip(processes(), cases)))
    time.sleep(2)  # long enough for more processes to start
    assert processes() == [*cases]
    for most in cases:
        (tmp_path / str(most) / "released").touch()
    assert {future.result(60)["status"] for future in futures} == {"ok"}


@pytest.mark.slow
def test_sync_functions_and_event_loops(start, shared):
    for manager, response in ((shared("sync_fault"), "own_loop"), (start(f"{FAULTS}:looks_sync"), "x")):
        results = manager.score_batch([sample(response)] * 3)
        assert [result["status"] for result in results] == ["ok"] * 3
        assert all(result["reward_extra_info"].get("loops", 1) == 1 for result in results)


@pytest.mark.slow
def test_a_grading_process_that_hangs_while_it_starts(start, tmp_path, monkeypatch):
    """The file loads once, but not again after its process has died."""
    body = f"import os, time\nif os.path.exists('{tmp_path}/mark'):\n    time.sleep(3600)\n"
    body += f"def ask(solution_str, **_):\n    open('{tmp_path}/mark', 'w').close()\n    os._exit(1)\n"
    (tmp_path / "asking.py").write_text(body)
    monkeypatch.setattr(reward_worker, "START_S", 6.0)
    (result,) = start(f"{tmp_path}/asking.py:ask").score_batch([sample("x")])
    assert result["status"] == "timeout" and "no result within 6 s" in result["reward_extra_info"]["error"]


@pytest.mark.parametrize("function", ["sync_fault", "async_fault"])
def test_workers_get_the_key_and_many_open_files(shared, function):
    """The cluster was started without the key.

    It comes from the manager's environment and is not stored anywhere.
    """
    manager = shared(function)
    found = manager.score_batch([sample("environment")])[0]["reward_extra_info"]
    assert found["key"] == "s3cret" and found["files"] == found["most_files"]
    assert "s3cret" not in repr(manager.job) + repr(manager.options)


@pytest.mark.slow
def test_sync_function_that_ends_its_process(shared):
    manager = shared("sync_fault")
    responses = ["one"] * 30 + ["os_exit"] + ["one"] * 30 + ["os_exit"]
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == [
        "error" if response == "os_exit" else "ok" for response in responses
    ]
    assert "died" in results[30]["reward_extra_info"]["error"]


def test_a_grading_process_that_dies_between_two_samples_costs_none(shared):
    manager = shared("sync_fault")
    pid = manager.score_batch([sample("pid")])[0]["reward_extra_info"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    assert [result["status"] for result in manager.score_batch([sample("one")] * 2)] == [
        "ok"
    ] * 2  # one per worker


@pytest.mark.slow
def test_the_time_limit_covers_a_sample_that_the_process_does_not_read(start):
    """The sample is larger than the pipe's buffer, so sending it blocks."""
    manager = start(f"{FAULTS}:sync_fault", timeout=3.0)
    pid = manager.score_batch([sample("pid")])[0]["reward_extra_info"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    result = manager.submit(sample("x" * 1_000_000)).result(30)
    assert result["status"] == "timeout" and "no result within 3 s" in result["reward_extra_info"]["error"]
    assert not alive(pid) and manager.score_batch([sample("one")])[0]["status"] == "ok"


@pytest.mark.slow
def test_async_function_that_ends_its_worker(shared):
    """The worker dies twice with the sample.

    Then the sample runs alone in a process, which dies four times.
    """
    manager = shared("async_fault")
    responses = ["one"] * 30 + ["os_exit"] + ["one"] * 30
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["ok"] * 30 + ["error"] + ["ok"] * 30
    assert "died or hung 6 times" in results[30]["reward_extra_info"]["error"]


@pytest.mark.slow
def test_sys_exit_in_a_task_costs_its_own_sample(start):
    """A SystemExit in a task ends the event loop, which is noticed long before the time limit.

    In a grading process, the loop would raise it again for the next sample.
    """
    manager = start(f"{FAULTS}:async_fault", timeout=3600.0)
    texts = ["one"] * 9 + ["exit_in_a_task"] + ["one"] * 9
    futures = [manager.submit(sample(text)) for text in texts]
    results = [future.result(600) for future in futures]
    assert [result["status"] for result in results] == ["ok"] * 9 + ["error"] + ["ok"] * 9
    assert results[9]["reward_score"] is None


@pytest.mark.slow
def test_a_function_that_cancels_all_tasks_costs_its_own_sample(start):
    """The other calls are repeated at once, and the worker's own `collect` as well."""
    manager = start(f"{FAULTS}:async_fault", timeout=3600.0)
    texts = ["one_later"] * 9 + ["cancel_all_tasks"] + ["one_later"] * 9
    futures = [manager.submit(sample(text)) for text in texts]
    results = [future.result(600) for future in futures]
    assert [result["status"] for result in results] == ["ok"] * 9 + ["error"] + ["ok"] * 9
    assert "CancelledError" in results[9]["reward_extra_info"]["error"]


def test_each_sample_has_its_own_extra_info(shared):
    info = {"list": ["a"]}
    samples = [sample("mutates", ground_truth=str(index), extra_info=info) for index in range(8)]
    results = shared("sync_fault").score_batch(samples)
    assert [result["reward_extra_info"]["seen"] for result in results] == [
        ["a", str(index)] for index in range(8)
    ]
    assert info == {"list": ["a"]}


@pytest.mark.slow
@pytest.mark.parametrize("function", ["takes_step", "async_takes_step", "takes_anything"])
def test_step_and_seconds(start, function):
    """Functions that name `step` get it as an argument, and it is in extra_info.

    Each result contains its duration.
    """
    manager = start(f"{FAULTS}:{function}")
    row = sample("1.01", step=7)  # seconds of sleep; uvloop's timers may end a millisecond early
    with_step, without = manager.score_batch([row, sample("0")])
    assert with_step["reward_extra_info"]["seen"] == [None if function == "takes_anything" else 7, 7]
    assert without["reward_extra_info"]["seen"] == [None, None] and row["extra_info"].get("step") is None
    assert without["seconds"] >= 0 and with_step["seconds"] >= 1.0  # A busy machine may take any time.


@pytest.mark.parametrize("function", ["sync_fault", "async_fault"])
def test_overlong_shaping_and_no_time_limit(start, function):
    manager = start(f"{FAULTS}:{function}", timeout=float("inf"))
    returned = manager.score_batch([sample(response) for response in ("one", "one", "none", "raise")])
    results = with_penalties(returned, [80, 95, 95, 95])
    assert results.pop()["reward_score"] is None  # An error gets no number, either.
    assert [result["reward_score"] for result in returned] == [1.0, 1.0, None, None]  # These are unchanged.
    assert not any("overlong" in result["reward_extra_info"] for result in returned)
    assert [result["reward_score"] for result in results] == [1.0, 0.25, None]
    assert [result["reward_extra_info"]["score"] for result in results] == [1.0, 1.0, None]
    assert [result["reward_extra_info"]["overlong"] for result in results] == [False, True, True]
    assert [result["reward_extra_info"]["overlong_penalty"] for result in results] == [0.0, -0.75, -0.75]
    assert [result["status"] for result in results] == ["ok", "ok", "no_verdict"]


# ---- all samples of a prompt at once

OF_GROUPS = [  # responses -> scores and statuses, or their common error
    (["a", "none", "nan", "dict"], [(4.0, "ok"), (None, "no_verdict"), (None, "error"), (1.0, "ok")]),
    (["array", "a", "b"], [(0.0, "ok"), (0.5, "ok"), (1.0, "ok")]),
    (["alone"], [(1.0, "ok")]),
    (["raise", "a"], "KeyError: 'no such thing' (groups.py:"),
    (["number", "a"], "1.0, which is not a list of scores"),
    (["nothing", "a"], "None, which is not a list of scores"),
    (["by_place", "a"], "{0: 0.5, 1: 0.5}, which is not a list of scores"),
    (["set", "a"], "{0.0, 1.0}, which is not a list of scores"),
    (["short", "a", "b"], "2 scores for 3 responses"),
    (["hang", "a"], "no result within 4 s"),
    (["os_exit", "a"], "died"),
]


@pytest.mark.slow
@pytest.mark.parametrize("function", ["async_group", "sync_group"])
def test_a_group_is_one_call_whose_failure_costs_that_group_alone(start, function):
    manager, tried = start(f"{GROUPS}:{function}", timeout=4.0), OF_GROUPS
    if function == "async_group":  # this would end a whole worker, as with single samples
        tried = OF_GROUPS[:-1]
    places = [(number, place) for number, (texts, _) in enumerate(tried) for place in range(len(texts))]
    places.sort(key=lambda place: place[::-1])  # interleave the samples of all groups
    results = manager.score_batch([sample(OF_GROUPS[n][0][i], group=f"g{n}") for n, i in places])
    for (number, place), result in zip(places, results):
        texts, expected = OF_GROUPS[number]
        if isinstance(expected, str):
            assert result["reward_score"] is None and expected in result["reward_extra_info"]["error"]
            assert result["status"] == ("timeout" if "hang" in texts else "error")
        else:
            assert (result["reward_score"], result["status"]) == expected[place]
    assert len({id(result["reward_extra_info"]) for result in results}) == len(results)
    # A list with one text is a text, and another list is an error.
    futures = manager.submit_group([sample("ab"), sample(["dict"])])
    assert [future.result(60)["reward_score"] for future in futures] == [2.0, 1.0]
    futures = manager.submit_group([sample("ab"), sample(["a", "b"])])
    assert [future.result(60)["status"] for future in futures] == ["error"] * 2


def test_what_a_function_of_groups_is_given(start):
    manager = start(f"{GROUPS}:sees")
    other = [{"role": "user", "content": "2+0?"}]
    rows = [sample(text, response_length=length, step=3) for text, length in (("a", 90), ("bb", 10))]
    rows.insert(1, sample("ccc", response_length=20, prompt=other))
    rows.append(sample("dd", response_length=30, ground_truth="2"))  # a different task with the same prompt
    results = manager.score_batch(rows)
    prompt = rows[0]["prompt"]
    info = rows[0]["extra_info"] | {"num_turns": 2, "rollout_reward_scores": {}}
    assert [result["reward_extra_info"]["seen"] for result in results] == [
        ["test", ["a", "bb"], "1", info | {"step": 3}, prompt, [90, 10], 3],
        ["test", ["ccc"], "1", info, other, [20], None],
        ["test", ["a", "bb"], "1", info | {"step": 3}, prompt, [90, 10], 3],
        ["test", ["dd"], "2", info, prompt, [30], None],
    ]
    rewards = [result["reward_score"] for result in with_penalties(results, [90, 20, 10, 30])]
    assert rewards == [1 - 0.5, 3.0, 2.0, 2.0]  # separate penalties
    assert "changed" not in rows[0]["extra_info"]
    together = [future.result(30) for future in manager.submit_group(rows[:2])]  # the caller defines groups
    assert [result["reward_extra_info"]["seen"][1] for result in together] == [["a", "ccc"]] * 2
    assert manager.submit(rows[0]).result(30)["reward_extra_info"]["seen"][1] == ["a"]
    del rows[3]["prompt"]
    with pytest.raises(KeyError, match="prompt"):
        manager.score_batch(rows)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        manager.submit(rows[3])
    with pytest.raises(ValueError, match="no column 'response_length'"):
        manager.submit_group([rows[0], sample("a")])


@pytest.mark.slow
def test_a_group_is_one_call_for_limits_and_retries(start, serve, tmp_path):
    async def busy_at_first(request):
        status = 429 if len(server.requests) == 1 else 200
        await until_most(server, 2)
        await asyncio.sleep(0.05)
        return web.Response(status=status)

    server, body = serve(busy_at_first), ASK.replace("solution_str", "solution_strs")
    body = body.replace('{"score": 1.0, "said": await response.text()}', "[1.0 for _ in solution_strs]")
    options = dict(router_address=(server.address,), http_retries=1, max_in_flight=2)
    manager = start(write_function(tmp_path, body), **options)
    results = manager.score_batch([sample(str(number), group=number % 5) for number in range(20)])
    assert [result["status"] for result in results] == ["ok"] * 20 and server.most == 2
    assert len(server.requests) == 6  # five groups, one of which was retried
    assert all(len(request["text"]) == 4 for request in server.requests)


# ---- calls for single samples


@pytest.mark.slow
def test_a_response_that_is_not_a_text_is_an_error_and_not_a_wrong_answer(start, caplog):
    """Data sets store one text, one message, or several of either in this column."""
    manager = start("compute_score.py:compute_score")
    right = "\\boxed{1}"
    message = {"role": "assistant", "content": right}
    texts = [right, [right], [message]]
    others = [[right, right], [message, message], [], None, 1, message, [{"content": [right]}], [[right]]]
    results = manager.score_batch([sample(response) for response in texts + others])
    assert [result["status"] for result in results] == ["ok"] * 3 + ["error"] * 8
    assert [result["reward_score"] for result in results] == [1.0] * 3 + [None] * 8
    said = [result["reward_extra_info"]["error"] for result in results[3:]]
    assert all("column response: " in text and "one string per row" in text for text in said)
    assert "column response: ['\\\\boxed{1}'" in caplog.text


def test_score_one_from_many_loops_and_threads(shared):
    manager = shared("async_fault")
    answers = {}

    def use(name):
        async def ask():
            names = [name] * 20
            return await asyncio.gather(
                *(manager.score_one(sample("other_keys", extra_info={"who": who})) for who in names)
            )

        answers[name] = asyncio.run(ask())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for results in answers.values():
        assert all(result.pop("seconds") >= 0 for result in results)
    expected = {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "pred": "x"}, "status": "ok"}
    assert answers == {number: [expected] * 20 for number in range(4)}


def test_a_workers_answer_that_comes_just_as_the_loop_ends_does_not_keep_it_going():
    """In Python 3.11, asyncio.wait_for returns the result and forgets that it was cancelled."""
    import ray

    async def end():
        answer, never = (asyncio.get_running_loop().create_future() for _ in range(2))
        calls = [never, answer]
        collect = SimpleNamespace(remote=lambda arrived: calls.pop())
        worker = reward_loop.Worker(SimpleNamespace(collect=collect), "life")
        manager = object.__new__(RewardLoopManager)
        manager.job = SimpleNamespace(timeout=60.0, is_async=True)
        manager._ray, manager._wake, manager._loop = ray, asyncio.Event(), asyncio.get_running_loop()
        serving = asyncio.create_task(manager._collect_from(worker))
        await asyncio.sleep(0)
        answer.set_result(("life", {}))
        serving.cancel()
        await asyncio.wait({serving}, timeout=1)
        assert serving.cancelled()

    asyncio.run(end())


def test_references_are_kept_if_calls_fail_or_ray_is_down(monkeypatch):
    """Ray ends the process if a reference is freed while Ray shuts down."""
    import ray

    class Reference:
        def __init__(self, error):
            self.error = error

        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            if self.error:
                raise self.error
            return "result"

    made = []

    def remote(error):
        made.append(weakref.ref(reference := Reference(error)))
        return reference

    worker = reward_loop.Worker(SimpleNamespace(collect=SimpleNamespace(remote=remote)), "life")

    async def use():
        with pytest.raises(ConnectionError):
            await worker.call("collect", ConnectionError())
        cancelled = asyncio.create_task(worker.call("collect", None))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        for is_up in (False, True):
            monkeypatch.setattr(ray, "is_initialized", lambda: is_up)
            assert await worker.call("collect", None) == "result"

    asyncio.run(use())
    gc.collect()
    assert [reference() is not None for reference in made] == [True, True, True, False]


@pytest.mark.slow
def test_score_one_does_not_wait_for_a_slower_neighbour_and_shutdown_ends_it(start):
    manager = start(f"{FAULTS}:async_fault")

    async def ask():
        slow = asyncio.create_task(manager.score_one(sample("hang")))
        quick = await asyncio.gather(*(manager.score_one(sample("one")) for _ in range(5)))
        assert [result["status"] for result in quick] == ["ok"] * 5 and not slow.done()
        gone = asyncio.create_task(manager.score_one(sample("hang")))
        await asyncio.sleep(0)
        gone.cancel()  # a cancelled caller does not affect others
        assert (await manager.score_one(sample("one")))["status"] == "ok"
        await asyncio.to_thread(manager.shutdown)
        with pytest.raises(RuntimeError, match="shut down"):
            await slow

    asyncio.run(asyncio.wait_for(ask(), 60))
    manager.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        manager.score_batch([sample("one")])


class SleepingModels:
    """Stand in for a RewardModelManager whose models sleep, and record the calls."""

    def __init__(self, address):
        self.router_addresses = {"genrm": address}
        self.calls = []

    def check(self):
        pass

    def wake_up(self):
        self.calls.append("wake")

    def sleep(self):
        self.calls.append("sleep")


@pytest.mark.slow
def test_colocate_wakes_the_models_and_puts_them_to_sleep_again(start, serve):
    models = SleepingModels(serve(critic).address)
    manager = start(f"{ROOT}/compute_score.py:compute_score_fapo", reward_models=models)
    results = manager.score_batch([sample("\\boxed{1}")] * 3)
    assert [result["reward_score"] for result in results] == [1.0] * 3
    with pytest.raises(ValueError):
        manager.score_batch([{}])
    assert models.calls == ["wake", "sleep"] * 2


@pytest.mark.parametrize("name", ["judge", "other", None])
def test_a_model_that_a_started_judge_does_not_serve_is_named(serve, monkeypatch, caplog, name):
    monkeypatch.setattr(RewardLoopManager, "_start_workers", lambda self, addresses: 1 / 0)
    options = dict(
        reward_fn=f"{ROOT}/docs/judges.py:votes", reward_kwargs={"genrm_model": name} if name else {}
    )
    with pytest.raises(ZeroDivisionError):
        make_manager(SleepingModels(serve(critic).address), **options)
    assert ("no server lists the model other; choose one of judge" in caplog.text) == (name == "other")


def test_ctrl_c_does_not_wait_until_the_models_sleep(start, serve):
    """Sleeping waits for the calls in progress, and a batch system may kill the run before they end."""
    models = SleepingModels(serve(critic).address)

    def interrupt(index, result):
        raise KeyboardInterrupt

    manager = start(f"{FAULTS}:sync_fault", reward_models=models)
    with pytest.raises(KeyboardInterrupt):
        manager.score_batch([sample("one")] * 3, interrupt)
    assert models.calls == ["wake"]
    assert len(manager.score_batch([sample("one")])) == 1  # The program may catch the interrupt.
    assert models.calls == ["wake", "wake", "sleep"]


def test_a_model_without_servers_ends_the_calls_with_its_reason(start, serve):
    """Otherwise, each sample would wait for its time limit."""

    class Models:
        router_addresses = {"genrm": serve(critic).address}
        is_lost = threading.Event()

        def check(self):
            if self.is_lost.is_set():
                raise RuntimeError("[genrm] server 0 would serve another model")

    manager = start(f"{FAULTS}:async_fault", reward_models=Models())
    waiting = manager.submit(sample("hang"))
    Models.is_lost.set()
    with pytest.raises(RuntimeError, match="^.genrm. server 0 would serve another model$"):
        waiting.result(60)


@pytest.mark.slow
def test_start_rewards_starts_the_models_and_ends_all(local_ray, serve, tmp_path, monkeypatch):
    from cluster import placement

    events = []

    class Models:
        def __init__(self, configs, reservation):
            self.router_addresses = dict.fromkeys(configs, serve(critic).address)
            events.append(
                [
                    (name, config.task, config.num_servers, config.sleep_mode)
                    for name, config in configs.items()
                ]
            )

        def check(self):
            pass

        def __getattr__(self, name):
            return lambda: events.append(name)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(placement, "RewardModelManager", Models)
    function = f"{ROOT}/compute_score.py:compute_score_fapo"
    options = RewardOptions(reward_fn=function, genrm=(f"judge={tmp_path}",), genrm_servers=2)
    with contextlib.ExitStack() as stack:
        manager = reward_loop.start_rewards(options, stack, sleep_mode=True)
        assert len(manager._workers) == 2  # there is one node
        assert manager.score_batch([sample("\\boxed{1}")])[0]["reward_score"] == 1.0
    assert (
        events == [[("judge", "generate", 2, True)], "wake_up", "sleep", "shutdown"]
        and local_ray.is_initialized()
    )
    with pytest.raises(RuntimeError, match="shut down"):
        manager.submit(sample("x"))


# ---- invalid settings


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reward_fn": "nowhere.py:f"}, "nowhere.py does not exist"),
        ({"reward_fn": "compute_score"}, "must be FILE.py:NAME"),
        ({"reward_fn": f"{ROOT}/README.md:f"}, "must be FILE.py:NAME"),
        ({"reward_fn": f"{FAULTS}:nothing"}, "no function nothing; it defines act, sync_fault"),
        (
            {"reward_fn": f"{FAULTS}:sync_fault", "reward_kwargs": {"penlty": 1}},
            "unexpected keyword argument 'penlty'.; pass or correct --reward-kwargs",
        ),
        (
            {"reward_fn": f"{FAULTS}:sync_fault", "reward_kwargs": {"ground_truth": 1}},
            "multiple values .* 'ground_truth'",
        ),
        ({"reward_fn": f"{FAULTS}:with_marks"}, "missing a required argument: 'folder'"),
        ({"reward_fn": f"{FAULTS}:of_trl"}, "missing .* 'prompts'.*docs/reward_functions.md"),
        ({"reward_fn": f"{FAULTS}:of_math_dapo"}, "unexpected .* 'data_source'.*docs/reward_functions.md"),
        ({"reward_fn": f"{FAULTS}:takes_no_extra_info"}, "unexpected keyword argument 'extra_info'"),
        ({"reward_fn": f"{GROUPS}:takes_both"}, "missing a required argument: 'solution_str'"),
        ({"reward_fn": f"{GROUPS}:notes_calls"}, "missing a required argument: 'file'"),
        (
            {"reward_fn": f"{FUNCTIONS}/verl_gsm8k_judge.py:compute_score_gsm8k"},
            "missing .* 'reward_router_address'",
        ),
        ({"router_address": ("127.0.0.1:1",)}, "--reward-fn: the default does not query"),
        ({"router_address": ("127.0.0.1:1",), "reward_model_task": ("classify",)}, "reward-model-tokenizer"),
        ({"num_workers": -1}, "--num-workers -1: must be at least 0"),
        ({"max_no_verdict_rate": -0.1}, "--max-no-verdict-rate -0.1"),
        ({"router_address": ("http://h:1",)}, "host:port"),
        ({"router_address": ("h:1",), "genrm": ("a/b",)}, "pass only one"),
        ({"router_address": ("a=h:1", "b=h:2"), "reward_model_task": ("generate",) * 3}, "one per reward"),
        (
            {"genrm": ("./nothing",), "reward_fn": f"{FAULTS}:sync_fault"},
            "--genrm ./nothing: must be a folder with config.json",
        ),
        (
            {"genrm": ("a/b",), "genrm_vllm_args": '--x "y'},
            "--genrm-vllm-args .*: cannot be split into arguments .No closing quotation",
        ),
        ({"genrm": ("a/b",), "genrm_gpu_share": 2.0}, "^--genrm-gpu-share 2.0: must be above 0 and at"),
        (
            {"genrm": ("a/b",), "genrm_gpu_share": 0.5, "genrm_tensor_parallel": 2},
            "^--genrm-gpu-share 0.5: a server with several GPUs",
        ),
        ({"genrm_servers": 2}, "--genrm-servers 2: has no effect without --genrm"),
        ({"genrm_gpu_share": 0.5}, "--genrm-gpu-share 0.5: has no effect without --genrm"),
        ({"genrm_cpus": "0"}, "--genrm-cpus 0: has no effect without --genrm"),
        ({"genrm_vllm_args": "--x"}, "--genrm-vllm-args --x: has no effect without --genrm"),
        # Nobody starts the classifier, and the rule must not score instead.
        (
            {"reward_model_task": ("classify",)},
            "-task classify: has no effect without a reward model .--genrm",
        ),
        (
            {"reward_model_task": ("classify",), "reward_fn": f"{FAULTS}:sync_fault"},
            "-task classify: has no effect without a reward model",
        ),
        ({"reward_model_tokenizer": "t"}, "-tokenizer t: has no effect without a reward model"),
        (
            {"reward_model_tokenizer": "/nowhere", "router_address": ("127.0.0.1:1",)},
            "--reward-model-tokenizer /nowhere: must be a folder with a tokenizer, or a Hub name",
        ),
        ({"timeout": -1}, "--timeout -1: must"),
        ({"max_rpm": 0}, "--max-rpm 0: must"),
    ],
)
def test_wrong_settings_are_told_at_start(local_ray, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_manager(**{"num_workers": 1} | options)
    assert "\n" not in str(caught.value)


CHILDREN = ["child returns", "child raises", "child exits", "child ends"]


@pytest.mark.slow
def test_forks_and_noise_of_the_function_give_no_other_sample_a_score(shared):
    """A forked child that returns from the function would answer for the next sample, and for all samples
    after it.
    """
    responses = [*CHILDREN, "child writes", "", "noise", "noise1 [[]]\n", "noise\0\0\0\5", ""] * 2
    samples = [sample(response, ground_truth=str(index)) for index, response in enumerate(responses)]
    results = shared("forks").score_batch(samples)
    for index, (response, result) in enumerate(zip(responses, results)):
        if response in ("noise1 [[]]\n", "noise\0\0\0\5"):  # this sample loses only its own result
            assert result["status"] == "error" and result["reward_score"] is None
            assert "died or hung 6 times" in result["reward_extra_info"]["error"]
        else:
            assert result["reward_score"] == float(index)


@pytest.mark.slow
def test_an_async_function_that_forks_gives_no_other_sample_a_score(shared):
    responses = [*CHILDREN, ""] * 4
    samples = [sample(response, ground_truth=str(index)) for index, response in enumerate(responses)]
    results = shared("forks_async").score_batch(samples)
    assert [result["reward_score"] for result in results] == [float(index) for index in range(len(samples))]


EDITED = """
import os, weight_of_a_rule
{kind}def rule(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "die" and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os._exit(1)
    from parts_of_a_rule import later
    return weight_of_a_rule.WEIGHT + later.WEIGHT
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_run_scores_with_one_version_of_its_function(start, tmp_path, caplog, kind):
    """If the function was edited, whatever loads it again, such as a new process, gives no score."""
    (tmp_path / "parts_of_a_rule").mkdir()
    (tmp_path / "weight_of_a_rule.py").write_text("WEIGHT = 1.0\n")
    (tmp_path / "parts_of_a_rule" / "later.py").write_text("WEIGHT = 1.0\n")
    (tmp_path / "rule.py").write_text(EDITED.format(kind=kind, mark=str(tmp_path / "mark")))
    manager = start(f"{tmp_path}/rule.py:rule")
    for edited in ("rule.py", "weight_of_a_rule.py", "parts_of_a_rule/later.py"):
        assert manager.score_batch([sample("one")])[0]["reward_score"] == 2.0
        original = (tmp_path / edited).read_text()
        (tmp_path / edited).write_text(original.replace("1.0", "100.0") + "def unfinished(:\n")
        results = manager.score_batch([sample("die"), *[sample("one")] * 4])
        assert {result["reward_score"] for result in results} <= {2.0, None}
        (last,) = manager.score_batch([sample("one")])
        assert last["status"] == "error" and f"{tmp_path / edited} has changed" in caplog.text
        (tmp_path / edited).write_text(original)  # the remedy in the message
        (tmp_path / "mark").unlink()
        if kind:  # only a new worker loads the file again
            manager.shutdown()
            manager = start(f"{tmp_path}/rule.py:rule")
    assert manager.score_batch([sample("one")])[0]["reward_score"] == 2.0


LATER = """
{kind}def rule(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "unloaded":
        return 0.0
    import decimal, rules_of_later
    return rules_of_later.WEIGHT
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_file_that_a_call_imports_after_an_edit_scores_nothing(start, tmp_path, kind):
    (tmp_path / "rules_of_later.py").write_text("WEIGHT = 1.0\n")
    (tmp_path / "rule.py").write_text(LATER.format(kind=kind))
    early, late = start(f"{tmp_path}/rule.py:rule"), start(f"{tmp_path}/rule.py:rule")
    assert early.score_batch([sample("x")])[0]["reward_score"] == 1.0
    assert late.score_batch([sample("unloaded")])[0]["reward_score"] == 0.0
    (tmp_path / "rules_of_later.py").write_text("WEIGHT = 100.0\n")
    assert early.score_batch([sample("x")])[0]["reward_score"] == 1.0  # this worker has the old version
    for text in ("x", "unloaded", "x"):
        (result,) = late.score_batch([sample(text)])
        assert result["status"] == "error", result
        assert "rules_of_later.py has changed since the run began" in result["reward_extra_info"]["error"]
    (tmp_path / "rules_of_later.py").write_text("WEIGHT = 1.0\n")
    (result,) = late.score_batch([sample("x")])
    assert result["reward_score"] == (None if kind else 1.0)  # only another process can load it again


def test_the_files_of_a_function_are_those_that_python_would_import(tmp_path):
    """A folder without __init__.py gives way to a package of the same name, and is a package otherwise."""
    (tmp_path / "toy").mkdir()  # only data
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/one.py").touch()
    (tmp_path / "rule.py").write_text("from toy import toy_world\nimport parts.one, json, nothing.there")
    found = {str(Path(file)) for file in reward_worker.fingerprints(f"{tmp_path}/rule.py")}
    assert {f"{tmp_path}/rule.py", f"{tmp_path}/parts/one.py", f"{ROOT}/toy/toy_world.py"} <= found
    assert f"{ROOT}/compute_score.py" in found  # toy_world imports it
    (tmp_path / "toy/__init__.py").touch()
    found = set(reward_worker.fingerprints(f"{tmp_path}/rule.py"))
    assert found == {f"{tmp_path}/{name}" for name in ("rule.py", "parts/one.py", "toy/__init__.py")}


def test_a_changed_file_is_noticed_behind_a_link(tmp_path, monkeypatch):
    helper = tmp_path / "there/helper_behind_a_link.py"
    helper.parent.mkdir()
    helper.write_text("WEIGHT = 1.0\n")
    (tmp_path / "link").symlink_to("there")
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    code = "def rule(**_):\n    import helper_behind_a_link\n    return helper_behind_a_link.WEIGHT\n"
    (tmp_path / "rule.py").write_text(code)
    job = RewardOptions(reward_fn=f"{tmp_path}/rule.py:rule").make_job()
    job.files |= reward_worker.fingerprints(str(helper))
    scorer = reward_worker.Scorer(job)
    helper.write_text("WEIGHT = 100.0\n")
    with asyncio.Runner() as runner:
        result = scorer.score_sync(pickle.dumps({}), runner)
    assert b"there/helper_behind_a_link.py has changed since the run began" in result


NAMESAKES = """
import compute_score, run_folder
from cluster import servers
from toy import mine
{kind}def rule(data_source, solution_str, ground_truth, extra_info):
    import reward_worker
    from tools import later
    return run_folder.WEIGHT + servers.WEIGHT + mine.WEIGHT + later.WEIGHT + reward_worker.WEIGHT
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "async "])
def test_modules_of_the_user_may_have_the_names_of_ours(start, tmp_path, kind):
    import run_folder
    import toy

    weights = ["run_folder", "cluster/servers", "toy/mine", "tools/later", "reward_worker"]
    for place, name in enumerate(weights):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        if file.parent != tmp_path:  # otherwise, a package with the same name takes precedence
            (file.parent / "__init__.py").touch()
        file.write_text(f"WEIGHT = {10**place}\n")
    (tmp_path / "rewards.py").write_text(NAMESAKES.format(kind=kind))
    path = sys.path.copy()
    (result,) = start(f"{tmp_path}/rewards.py:rule").score_batch([sample("one")])
    assert result["reward_score"] == 11111.0, result
    assert sys.modules["run_folder"] is run_folder and sys.modules["toy"] is toy and sys.path == path
    assert importlib.import_module("tools.view_run") and importlib.import_module("cluster.placement")


def test_what_verl_always_sets_is_there(tmp_path):
    file = tmp_path / "turns.py"
    file.write_text(
        "def rule(data_source, solution_str, ground_truth, extra_info):\n"
        "    rewards = extra_info['rollout_reward_scores']\n"
        "    return float(extra_info['num_turns'] + len(rewards) + 100 * extra_info.get('step', 0))\n"
    )
    turns = [{"who": "policy", "text": "one"}] * 4
    samples = [sample("one"), sample("one", num_turns=6), sample("one", turns=turns)]
    # As in verl, they replace the row's own values, which are None in Parquet if only other rows have them.
    stored = {"num_turns": None, "rollout_reward_scores": [1.0]}
    samples += [one | {"extra_info": stored} for one in samples]
    samples.append(samples[-1] | {"rollout_info": {"num_turns": 9}})  # what a rollout function stored
    samples.append(sample("one", step=3, extra_info={"step": 7}))  # A run adds its step.
    scores = [result["reward_score"] for result in score_here(samples, f"{file}:rule")]
    assert scores == [2.0, 6.0, 5.0] * 2 + [9.0, 302.0]


def test_samples_of_a_group_have_the_same_prompt_source_label_and_number():
    one = {"prompt": "?", "data_source": "a", "reward_model": {"ground_truth": "1"}}
    others = [{"prompt": "!"}, {"data_source": "b"}, {"reward_model": {"ground_truth": "2"}}, {"group": 1}]
    rows = [one, *(one | other for other in others)]
    assert reward_loop.by_group([*rows, *rows]) == [[number, number + 5] for number in range(5)]


def test_a_loopback_address_is_rejected_if_workers_are_on_other_machines(start, local_ray, monkeypatch):
    node = {"Alive": True, "NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 1.0}}
    nodes = local_ray.nodes()
    monkeypatch.setattr(local_ray, "nodes", lambda: [*nodes, node])
    with pytest.raises(ValueError, match="--router-address 127.0.0.1:1: workers on other nodes cannot reach"):
        start(f"{FAULTS}:sync_fault", router_address=("127.0.0.1:1",))


def test_a_file_that_cannot_be_loaded(local_ray, tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="nothing_of_this_name"):
        make_manager(reward_fn=f"{tmp_path}/bad.py:f", num_workers=1)


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_grading_process_that_cannot_load_its_function_ends_without_a_traceback(tmp_path, capfd, error):
    (tmp_path / "broken.py").write_text(f"raise {error.__name__}('no licence')\n")
    job = reward_worker.Job(f"{tmp_path}/broken.py:f", {}, {}, None, False, False, 9.0)
    grader = reward_worker.Grader(SimpleNamespace(job=job))
    with pytest.raises(ValueError, match="no licence"):
        grader.open()
    assert grader.process.wait(60) == 0
    grader.pipe.close()
    assert capfd.readouterr().err == ""


def test_a_default_timeout_of_the_function_does_not_end_a_grading_process(tmp_path):
    """The module of an async function may set it in the worker."""
    (tmp_path / "one.py").write_text("def f(): return 1.0\n")
    job = reward_worker.Job(f"{tmp_path}/one.py:f", {}, {}, None, False, False, 9.0)
    grader = reward_worker.Grader(SimpleNamespace(job=job))
    socket.setdefaulttimeout(60)
    try:
        grader.open()
    finally:
        socket.setdefaulttimeout(None)
    time.sleep(0.1)  # The process waits for a sample.
    assert json.loads(grader.ask(0, pickle.dumps({}), 60)) == [[[1.0, {"score": 1.0}, "ok"]], False]
    grader.close()


# ---- judges, limits, retries


def test_default_rule(start):
    manager = start(None)
    results = manager.score_batch([sample("\\boxed{1}"), sample("\\boxed{2}")])
    assert [(result["reward_score"], result["reward_extra_info"]["acc"]) for result in results] == [
        (1.0, True),
        (-1.0, False),
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return the path of a small tokenizer with a BOS token in its chat template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "?": 1}, "?")), bos_token="<s>"
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    return str(folder)


def test_a_router_that_rejects_the_key_ends_the_start(serve, monkeypatch):
    async def locked(request):
        return web.Response(status=401)

    monkeypatch.setenv("ROUTER_API_KEY", "old,wrong,\n")
    server = serve(locked)
    options = dict(reward_fn="compute_score.py:compute_score_fapo", router_address=(server.address,))
    with pytest.raises(
        RuntimeError, match=f"{server.address}: wrong or missing key; set .*ROUTER_SERVER_KEY"
    ):
        make_manager(**options)
    assert server.keys == {"Bearer wrong"}
    for key in ("old\ns3cret", "s3cret\u00e9"):
        monkeypatch.setenv("ROUTER_API_KEY", key)
        with pytest.raises(
            ValueError, match="ROUTER_API_KEY: a key contains white space or a non-A"
        ) as error:
            make_manager(**options)
        assert "s3cret" not in str(error.value)


def test_a_router_that_rejects_the_key_ends_the_start_whatever_asks_it(serve, tokenizer, monkeypatch):
    monkeypatch.setenv("ROUTER_API_KEY", "wrong")
    free, locked = serve(critic).address, serve(critic)
    locked.key = "s3cret"
    fapo = {"reward_fn": f"{ROOT}/compute_score.py:compute_score_fapo", "router_address": (locked.address,)}
    classify = {"reward_model_task": ("classify",), "reward_model_tokenizer": tokenizer}
    for options in (
        fapo | {"reward_kwargs": {"genrm_model": "judge"}},
        fapo | {"reward_kwargs": {"genrm_model": "judge"}, "max_in_flight": 9},
        fapo | {"router_address": (f"first={free}", f"second={locked.address}")},
        classify | {"router_address": (locked.address,)},
    ):
        with pytest.raises(RuntimeError, match=f"{locked.address}: wrong or missing key"):
            make_manager(num_workers=1, **options)


def test_a_look_up_without_a_key_has_no_header_for_it(serve, monkeypatch):
    """Some gateways reject an empty key."""
    monkeypatch.delenv("ROUTER_API_KEY", raising=False)
    server = serve(critic)
    assert reward_loop.served_models({"genrm": server.address}) == {"genrm": "judge None"}
    assert server.keys == {None}


async def classifier(request):
    """Score a text by its length."""
    body = await request.json()
    return web.json_response({"data": [{"probs": [len(body["input"]) / 100]}]})


@pytest.mark.slow
def test_discriminative_model_without_a_function(serve, tokenizer, monkeypatch):
    monkeypatch.setenv("ROUTER_API_KEY", "old,s3cret\n")
    server = serve(classifier)
    options = {
        "router_address": (server.address,),
        "reward_model_task": ("classify",),
        "reward_model_tokenizer": tokenizer,
    }
    results = score_here([sample("good"), sample("\\boxed{1}")], **options)
    assert server.keys == {"Bearer s3cret"}
    assert [body["input"] for body in server.requests] == [
        "<s>[user]1+0?[assistant]good",
        "<s>[user]1+0?[assistant]\\boxed{1}",
    ]
    assert all(
        body["add_special_tokens"] is False and body["use_activation"] is False for body in server.requests
    )
    assert [result["reward_score"] for result in results] == [0.28, 0.33]
    assert [result["reward_extra_info"]["acc"] for result in results] == [False, True]
    assert [result["status"] for result in results] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("has_tekken", [False, True])
def test_tokenizers_give_token_ids_as_functions_for_verl_expect(tokenizer, tmp_path, has_tekken):
    """A folder's own chat template is used, also next to the tekken.json of a Mistral model."""
    if has_tekken:
        from tiny import add_tekken  # here, because it imports torch

        tokenizer = shutil.copytree(tokenizer, tmp_path / "mistral")
        add_tekken(tokenizer)
    body = "def ask(solution_str, reward_model_tokenizer, **_):\n"
    body += "    messages = [{'role': 'user', 'content': solution_str}]\n"
    body += "    ids = reward_model_tokenizer.apply_chat_template(messages, tokenize=True)\n"
    body += "    return {'score': 1.0, 'ids': ids}\n"
    options = {"router_address": ("127.0.0.1:1",), "reward_model_tokenizer": str(tokenizer)}
    (result,) = score_here([sample("hello")], write_function(tmp_path, body), **options)
    assert result["reward_extra_info"]["ids"] == [0, 1]


def test_the_tokenizer_is_the_judges_own_where_the_function_needs_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def tokenizer_of(function, **options):
        return RewardOptions(reward_fn=function, **options).make_job().tokenizer

    judge, path = f"{FUNCTIONS}/verl_gsm8k_judge.py:compute_score_gsm8k", str(tmp_path)
    assert tokenizer_of(judge, genrm=(path, "other=x/y")) == path
    assert tokenizer_of(judge, genrm=(path,), reward_model_tokenizer="given/name") == "given/name"
    assert tokenizer_of(None, genrm=(path,), reward_model_task=("classify",)) == path
    # As in verl, a function that names the parameter gets the tokenizer, even if it has a default.
    body = "async def ask(solution_str, reward_model_tokenizer=None, **_): return 1.0\n"
    assert tokenizer_of(write_function(tmp_path, body), genrm=(path,)) == path
    # These functions do not need a tokenizer.
    own = ("compute_score.py:compute_score_fapo", "toy/toy_world.py:compute_score_fapo")
    for function in (f"{ROOT}/{own[0]}", f"{ROOT}/{own[1]}", f"{GROUPS}:passes_settings_on"):
        assert tokenizer_of(function, genrm=(path,)) is None
    assert tokenizer_of(judge, router_address=("h:1",)) is None


def test_the_model_is_looked_up_for_functions_with_one_judge_only(tmp_path):
    """A function of several judges may pass its `genrm_model` to each of them."""
    begin = "def ask(data_source, solution_str, ground_truth, extra_info, genrm_model=None"
    for further, left_open in (("", True), (", reward_router_addresses=None", False)):
        function = write_function(tmp_path, f"{begin}{further}):\n    return 1.0\n")
        job = RewardOptions(reward_fn=function, router_address=("a=h:1", "b=h:2")).make_job()
        assert ("genrm_model" in job.kwargs) is left_open


AILING = {"url": "http://a:1", "healthy": False, "why": "/health returned 503"}


@pytest.mark.parametrize(
    "workers, problem",
    [
        ([AILING | {"healthy": True}, AILING], ""),
        ([AILING], "http://a:1: /health returned 503"),
        ([AILING | {"why": ""}], ""),  # not checked yet
        ([], "there are none"),
        (["http://a:1"], ""),  # another router
    ],
)
def test_a_router_without_a_healthy_server_is_named_at_the_start(serve, caplog, workers, problem):
    server = serve(critic)
    server.workers = workers
    assert reward_loop.count_servers(server.address) == max(1, len(workers))
    said = f"--router-address {server.address}: no server is healthy ("
    assert (said in caplog.text) is bool(problem) and problem in caplog.text


@pytest.mark.slow
def test_samples_in_flight_follow_the_number_of_servers(start, shared, serve, tmp_path, caplog):
    async def slow(request):
        await until_most(server, reward_loop.IN_FLIGHT_PER_SERVER + 1)
        await asyncio.sleep(0.2)
        return web.Response(text="ok")

    server = serve(slow)
    server.workers = [{"url": "http://a:1"}] * 3
    manager = start(write_function(tmp_path, ASK), router_address=(server.address,))
    manager.score_batch([sample("x")] * 1000)
    assert manager.max_in_flight == 3 * reward_loop.IN_FLIGHT_PER_SERVER
    assert reward_loop.IN_FLIGHT_PER_SERVER < server.most <= manager.max_in_flight
    # Without a router, one server is assumed.
    for address, warning in ((serve(critic).address, ""), (f"127.0.0.1:{free_port()}", "no response yet")):
        caplog.clear()
        manager = start(write_function(tmp_path, ASK), router_address=(address,))
        assert manager.max_in_flight == reward_loop.IN_FLIGHT_PER_SERVER
        assert warning in caplog.text and bool(warning) == bool(caplog.text)
    assert shared("sync_fault").max_in_flight == 2048


@pytest.mark.slow
def test_the_judges_name_is_looked_up_once_for_all_workers(start, serve):
    """Otherwise, another model that the address serves later could judge the rest of the run."""
    names, card = ["judge"], {"max_model_len": 4096}

    async def judge(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [card | {"id": name} for name in names]})
        return await critic(request)

    server = serve(judge)
    options = dict(function=f"{ROOT}/compute_score.py:compute_score_fapo", router_address=(server.address,))
    manager = start(**options, num_workers=2)
    names[:] = ["zeta", "alpha"]
    results = manager.score_batch([sample(f"{number}\n\n\\boxed{{1}}") for number in range(6)])
    assert {result["status"] for result in results} == {"ok"}
    assert [request["model"] for request in server.requests] == ["judge"] * 6
    assert not any("max_tokens" in request for request in server.requests)  # the default exceeds the context
    assert server.paths.count("/v1/models") == 1

    message = r"serves several models \(alpha, zeta\); choose one .*'{\"genrm_model\": \"alpha\"}'"
    with pytest.raises(ValueError, match=message):
        start(**options)
    server.requests.clear()
    manager = start(**options, reward_kwargs={"genrm_model": "zeta", "genrm_max_tokens": 9})
    assert manager.score_batch([sample("\\boxed{1}")])[0]["status"] == "ok"
    assert [(request["model"], request["max_tokens"]) for request in server.requests] == [("zeta", 9)]
    assert server.paths.count("/v1/models") == 2

    card["root"] = "/models/judge"  # Both are names of one model.
    assert start(**options).job.kwargs["genrm_model"] == "alpha"


VETO = """
import compute_score as fapo
async def ask(data_source, solution_str, ground_truth, extra_info, reward_router_addresses, **settings):
    sample = (data_source, solution_str, ground_truth, extra_info)
    asked = [fapo.compute_score_fapo(*sample, address) for address in reward_router_addresses.values()]
    return (await asyncio.gather(*asked))[-1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["votes", "two_judges", "rubric", "veto"])
def test_each_judge_keeps_its_name_whatever_function_asks_it(start, serve, tmp_path, name):
    """A worker that is restarted, or is not asked before, would find the other model."""
    cards = {}

    async def judge(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [cards[request.transport.get_extra_info("sockname")[1]]]})
        return await critic(request)

    quick, strict = serve(judge), serve(judge)
    for server, model in ((quick, "small"), (strict, "large")):
        cards[server.server.port] = {"id": model, "max_model_len": 4096}
    function = f"{ROOT}/docs/judges.py:{name}" if name != "veto" else write_function(tmp_path, VETO)
    addresses = (f"quick={quick.address}", f"strict={strict.address}")
    manager = start(function, router_address=addresses)
    for card in cards.values():
        card["id"] = "other"
    manager.score_batch([sample(f"{number}\n\n\\boxed{{1}}") for number in range(3)])
    asks_both = name in ("two_judges", "veto")
    assert {request["model"] for request in quick.requests} == {"small"}
    assert {request["model"] for request in strict.requests} == ({"large"} if asks_both else set())
    assert not any("max_tokens" in request for request in quick.requests if name != "rubric")
    assert quick.paths.count("/v1/models") == 1 and strict.paths.count("/v1/models") == asks_both


@pytest.mark.parametrize(
    ("name", "settings", "at"),
    [
        ("votes", {}, "quick"),
        ("votes", {"on_no_verdict": "rule"}, "quick"),
        ("votes", {"genrm_model": "b"}, ""),
        ("audited", {"second": {"genrm_model": "b"}}, "quick"),
        ("two_judges", {}, "quick"),
        ("two_judges", {"strict": {"genrm_model": "b"}}, "quick"),
        ("two_judges", {"genrm_model": "b"}, ""),
        ("two_judges", {"one": True}, "strict"),
        ("two_judges", {"one": True, "strict": {"genrm_model": "b"}}, ""),
        ("own", {}, ""),
    ],
)
def test_one_of_several_models_must_be_chosen_whatever_function_asks(
    serve, tmp_path, monkeypatch, name, settings, at
):
    """Functions written for other frameworks, which have no `check_row`, may name the model themselves."""
    settings = dict(settings)
    first = [{"id": "a"}] if settings.pop("one", False) else [{"id": "a"}, {"id": "b"}]

    async def quick(request):
        return web.json_response({"data": first})

    async def strict(request):
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    class Started(Exception):
        pass

    def start_workers(self, addresses):
        raise Started

    monkeypatch.setattr(RewardLoopManager, "_start_workers", start_workers)
    servers = {"quick": serve(quick), "strict": serve(strict)}
    function = f"{ROOT}/docs/judges.py:{name}" if name != "own" else write_function(tmp_path, VETO)
    options = dict(
        reward_fn=function,
        reward_kwargs=settings,
        router_address=tuple(f"{key}={server.address}" for key, server in servers.items()),
    )
    if not at:
        with pytest.raises(Started):
            make_manager(**options)
        return
    with pytest.raises(
        ValueError, match=rf"{servers[at].address}: the server serves several models \(a, b\)"
    ):
        make_manager(**options)


@pytest.mark.slow
def test_functions_in_verls_style_run_unchanged(start, serve, tokenizer, caplog):
    async def judge(request):
        body = await request.json()
        if body["model"] != "judge":  # vLLM's answer for a name that is not the served one
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        mark = 10 if "good" in body["messages"][0]["content"] else 2
        return web.json_response({"choices": [{"message": {"content": f"Let me see.\n\n{mark}"}}]})

    judged = f"{FUNCTIONS}/verl_gsm8k_judge.py:compute_score_gsm8k"  # It leaves its tokenizer unused.
    manager = start(judged, router_address=(serve(judge).address,))
    results = manager.score_batch([sample("good"), sample("bad")])
    assert [(result["reward_score"], result["reward_extra_info"]["acc"]) for result in results] == [
        (10.0, True),
        (2.0, False),
    ]

    options = {"router_address": (serve(classifier).address,), "reward_model_tokenizer": tokenizer}
    samples = [sample("#### 1"), sample("#### 2")]
    results = score_here(samples, f"{FUNCTIONS}/verl_rule_with_disrm.py:compute_score", **options)
    assert [result["reward_score"] for result in results] == [pytest.approx(1 + 27 / 100), 0.0]
    assert results[1]["reward_extra_info"] == {"score": 0.0, "acc": False}

    # A simple rule also works while a model is running.
    assert "reward_router_address" not in caplog.text
    results = start(f"{FUNCTIONS}/verl_sync_rule.py:compute_score", **options).score_batch(samples)
    assert [result["reward_score"] for result in results] == [1.0, 0.0]
    assert (
        "verl_sync_rule.py:compute_score: does not take reward_router_address, so it asks no" in caplog.text
    )


def write_function(folder, body, name="ask"):
    path = folder / "asking.py"
    path.write_text("import asyncio, aiohttp\n" + body)
    return f"{path}:{name}"


ASK = """
async def ask(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_router_addresses
):
    address = reward_router_addresses.get(data_source, reward_router_address)
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"http://{address}/", json={"text": solution_str}) as response:
            return {"score": 1.0, "said": await response.text()}
"""


def test_several_reward_models_by_name(serve, tmp_path):
    async def first(request):
        return web.Response(text="first")

    async def second(request):
        return web.Response(text="second")

    addresses = (f"a={serve(first).address}", f"b={serve(second).address}")
    samples = [sample("x", data_source=name) for name in ("a", "b", "other")]
    results = score_here(samples, write_function(tmp_path, ASK), router_address=addresses)
    assert [result["reward_extra_info"]["said"] for result in results] == ["first", "second", "first"]


def test_a_function_can_pass_on_what_it_is_given():
    """A function with `**settings` gets those of one model, even if several are running."""
    options = dict(router_address=("h:1", "rm=h:2"), reward_kwargs='{"a": 1}')
    (result,) = score_here([sample("x")], f"{GROUPS}:passes_settings_on", **options)
    given = ["a", "reward_model_tokenizer", "reward_router_address"]
    assert result["reward_extra_info"]["settings"] == given


@pytest.mark.slow
def test_concurrency_is_limited_over_all_workers(start, serve, tmp_path):
    async def slow(request):
        await until_most(server, 3)
        await asyncio.sleep(0.05)
        return web.Response(text="ok")

    server = serve(slow)
    options = dict(router_address=(server.address,), num_workers=2, max_in_flight=3)
    manager = start(write_function(tmp_path, ASK), **options)
    results = manager.score_batch([sample("x")] * 30)
    assert {result["status"] for result in results} == {"ok"} and server.most == 3 == manager.max_in_flight


@pytest.mark.slow
def test_requests_per_minute_are_evenly_paced_over_all_workers(start, serve, tmp_path):
    async def quick(request):
        return web.Response(text="ok")

    server = serve(quick)
    options = dict(router_address=(server.address,), num_workers=2, max_rpm=600)  # one per 0.1 s
    manager = start(write_function(tmp_path, ASK), **options)
    begun = time.monotonic()
    results = manager.score_batch([sample("x")] * 13)
    times = [moment for moment, path in zip(server.times, server.paths) if path == "/"]
    assert {result["status"] for result in results} == {"ok"} and len(times) == 13
    # No request is sent before its turn, so there are no bursts.
    assert all(moment - begun > 0.1 * number - 0.01 for number, moment in enumerate(times))


@pytest.mark.slow
def test_http_errors_are_retried_where_it_helps_and_only_so_often(start, serve, tmp_path):
    seen = collections.Counter()

    async def flaky(request):
        text = (await request.json())["text"]
        seen[text] += 1
        if text == "busy" and seen[text] < 2:
            return web.Response(status=429)
        if text == "bad request":
            return web.Response(status=400)
        return web.Response(status=500 if text == "broken" else 200, text="ok")

    server = serve(flaky)
    manager = start(write_function(tmp_path, ASK), router_address=(server.address,), http_retries=1)
    results = manager.score_batch([sample("busy"), sample("bad request"), sample("broken"), sample("fine")])
    assert [result["status"] for result in results] == ["ok", "error", "error", "ok"]
    assert (
        "400" in results[1]["reward_extra_info"]["error"]
        and "500" in results[2]["reward_extra_info"]["error"]
    )
    assert seen == {"busy": 2, "bad request": 1, "broken": 2, "fine": 1}


# ---- processes that die


@pytest.mark.slow
def test_workers_and_grading_processes_are_killed_mid_batch(start, tmp_path):
    """SIGKILL ends a worker and a grading process.

    Still, all samples are scored in order, with one result each.
    """
    # The files are named after the pid of a grading process or a worker.
    for function in (
        "with_marks",
        "async_with_marks",
    ):
        folder = tmp_path / function
        folder.mkdir()
        manager = start(f"{FAULTS}:{function}", num_workers=2, reward_kwargs={"folder": str(folder)})
        finished, victims = [], []

        def on_result(index, result):
            finished.append(index)
            if len(finished) == 10:  # in the manager's thread, while samples are running
                victims.append(int(next(iter(folder.iterdir())).name))
                os.kill(victims[0], signal.SIGKILL)

        samples = [sample("0.02" if index < 20 else "0.1", ground_truth=str(index)) for index in range(60)]
        results = manager.score_batch(samples, on_result)
        assert [result["reward_score"] for result in results] == [float(index) for index in range(60)]
        assert sorted(finished) == list(range(60))
        assert not alive(victims[0])
        manager.shutdown()


@pytest.mark.slow
def test_nothing_is_left_running(start, tmp_path):
    """Grading processes end with their worker, even if they block and even if the worker is killed."""
    manager = start(f"{FAULTS}:with_marks", reward_kwargs={"folder": str(tmp_path)})
    running = threading.Thread(
        target=lambda: pytest.raises(RuntimeError, manager.score_batch, [sample("3600")] * 2)
    )
    running.start()
    until(lambda: list(tmp_path.iterdir()))
    assert all(alive(int(path.name)) for path in tmp_path.iterdir())
    manager.shutdown()
    running.join(30)
    assert not running.is_alive()
    until(lambda: not any(alive(int(path.name)) for path in tmp_path.iterdir()))


@pytest.mark.slow
def test_blocked_event_loop_of_a_worker(start, monkeypatch, caplog):
    """An async function that blocks also blocks its worker.

    The worker is restarted, and its samples are tried alone.
    """
    monkeypatch.setattr(reward_loop, "BLOCKED_S", 2.0)
    monkeypatch.setattr(reward_loop, "WEDGED_S", 3.0)
    manager = start(f"{FAULTS}:async_fault", num_workers=2, timeout=2.0)
    blocking = ["block", "block_in_a_task", "block_all_threads"]
    responses = ["one"] * 10 + blocking + ["one"] * 10
    results = manager.score_batch([sample(response) for response in responses])
    assert [result["status"] for result in results] == ["ok"] * 10 + ["timeout"] * 3 + ["ok"] * 10
    for result in results[10:13]:
        assert "the grading process was killed" in result["reward_extra_info"]["error"]
    assert "does not respond: its async reward function blocks" in caplog.text


@pytest.mark.slow
def test_neighbours_of_one_that_blocks_are_scored(start, monkeypatch, caplog):
    manager = start(f"{FAULTS}:blocks", timeout=6.0)
    manager.score_batch([sample(f"not a number: {number}") for number in range(12)])
    assert caplog.text.count("a sample got no score") == 10  # Other warnings are still logged.
    monkeypatch.setattr(reward_loop, "BLOCKED_S", 2.0)
    results = manager.score_batch([sample(text) for text in ["2"] * 10 + ["-4"] * 2])
    assert [result["status"] for result in results] == ["ok"] * 12
    assert "does not respond: its async reward function blocks" in caplog.text


@pytest.mark.slow
def test_a_function_that_is_not_async_is_not_blamed_for_a_slow_worker(start, monkeypatch, caplog):
    monkeypatch.setattr(reward_loop, "BLOCKED_S", 0.5)
    assert start(f"{FAULTS}:stop_worker").score_batch([sample("2")])[0]["status"] == "ok"
    assert "a reward worker does not respond: the machine seems to be overloaded" in caplog.text


SMALL_RAY = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
import forked
forked.small_ray()
"""


def run_script(body, **environment):
    """Run Python code in a separate process with a separate Ray cluster, and return its output."""
    body = SMALL_RAY + textwrap.dedent(body)
    environment = os.environ | {"RAY_ADDRESS": "local"} | environment
    ended = forked.run(["-c", body], env=environment, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.slow
def test_a_ray_that_was_killed_that_loses_calls_and_that_is_shut_down():
    """One run meets them all.

    A killed Ray leaves its address behind, and Ray would try for minutes to connect to it. Then the terminal
    is closed, and all its processes get a SIGHUP. Then Ray loses one call in ten on its way, and as many
    results. In the end, the program shuts Ray down under the manager.
    """
    fault = {"num_failures": -1, "req_failure_prob": 10, "resp_failure_prob": 10, "in_flight_failure_prob": 0}
    # The path is short, because sockets are in it.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        Path(folder, "ray").mkdir()
        Path(folder, "ray/ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
        said = run_script(
            f"""
            import ray
            from test_reward_loop import *
            hang_ups = []
            signal.signal(signal.SIGHUP, lambda *_: hang_ups.append(1))
            begun = time.monotonic()
            reward_loop.connect_ray()
            print("connected in time:", time.monotonic() - begun < 90)  # Ray itself gives up after minutes
            os.killpg(0, signal.SIGHUP)
            reward_loop.GIVE_UP_AFTER = 100
            manager = make_manager(reward_fn="{FAULTS}:async_fault", num_workers=2)
            for _ in range(15):
                results = manager.score_batch([sample("one")] * 5)
                assert [result["status"] for result in results] == ["ok"] * 5
            slow = manager.submit(sample("hang"))
            time.sleep(1)
            ray.shutdown()
            for act in (lambda: manager.score_batch([sample("one")]), lambda: slow.result(30)):
                try:
                    act()
                except RuntimeError as error:
                    print("refused:", error)
            manager.shutdown()
            print("another Ray:", ray.is_initialized())  # as some calls would start one
            print("hang-ups:", len(hang_ups))
            """,
            RAY_ADDRESS="",
            RAY_TMPDIR=folder,
            RAY_ENABLE_AUTO_CONNECT="1",
            RAY_testing_rpc_failure=json.dumps({"CoreWorkerService.grpc_client.PushTask": fault}),
        )
    assert "Ray: started a cluster for this run," in said and "connected in time: True" in said
    assert said.count("refused: Ray was shut down") == 2 and "another Ray: False" in said
    assert "hang-ups: 1" in said


@pytest.mark.slow
def test_files_of_the_working_directory_do_not_replace_ours_in_actors(cluster, tmp_path):
    (tmp_path / "compute_score.py").write_text("raise RuntimeError('a file of the user')")
    (tmp_path / "mine.py").write_text("")
    code = f"""
        import sys
        sys.path.append({str(ROOT)!r})
        import reward_loop, ray
        reward_loop.connect_ray()
        @ray.remote
        def files():
            import compute_score, mine
            return compute_score.__file__, mine.__file__
        print(*ray.get(files.remote()))
    """
    script = ["-c", textwrap.dedent(code)]
    ended = forked.run(script, cwd=tmp_path, env=os.environ | {"RAY_ADDRESS": cluster}, timeout=100)
    assert ended.stdout.endswith(f"{ROOT}/compute_score.py {tmp_path}/mine.py\n"), ended


def replace_ray(monkeypatch, init):
    """Replace ray.init. The module itself stays as it is: shared managers ask it whether Ray is running."""
    import ray

    stand_in = SimpleNamespace(is_initialized=lambda: False, init=init, core=ray.core)
    monkeypatch.setitem(sys.modules, "ray", stand_in)


@pytest.mark.parametrize(
    ("address", "error", "problem", "remedy"),
    [
        (
            "local",
            "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /scratch/job",
            "Ray: its folder for temporary files has a path that is too long for sockets (OSError: validate",
            "; set RAY_TMPDIR to a short path, such as /tmp (by default, Ray uses TMPDIR)",
        ),
        (
            "local",
            "[Errno 13] Permission denied: '/.ray'",
            "Ray: it cannot write to ~/.ray (OSError: [Errno 13] Permission denied: '/.ray'",
            "; set HOME to a writable folder",
        ),
        (
            "local",
            "The current node timed out during startup. This could happen because\nsome of the raylet failed",
            "Ray: it did not start within its time limit of 30 s (OSError: The current node timed out",
            "; the machine is probably busy: start again when it has a free CPU core",
        ),
        (
            "local",
            "No space left on device",
            "Ray: it cannot start a cluster on this machine (OSError: No space left on device",
            "; see the logs in /tmp/ray/session_latest/logs (or in RAY_TMPDIR or TMPDIR)",
        ),
        (
            "10.0.0.1:6379",
            "Version mismatch",
            "Ray: cannot join the cluster at 10.0.0.1:6379 (OSError: Version mismatch",
            "; set RAY_ADDRESS=local to start a private cluster",
        ),
    ],
)
def test_why_ray_cannot_be_used_and_what_to_do(monkeypatch, address, error, problem, remedy):
    def fails(*_, **settings):
        raise OSError(error)

    monkeypatch.setenv("RAY_ADDRESS", address)
    replace_ray(monkeypatch, fails)
    with pytest.raises(RuntimeError) as refused:
        reward_loop.connect_ray()
    text = str(refused.value)
    assert text.startswith(problem) and text.endswith(remedy) and "\n" not in text


def test_a_terminal_that_is_closed_while_ray_starts_ends_the_run_afterwards(monkeypatch):
    """The processes of Ray are started meanwhile, and must outlive the terminal."""
    hang_ups = []

    def fails(*_, **settings):
        subprocess.run(["sh", "-c", "kill -HUP $$"], check=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
        assert not hang_ups
        raise OSError("for the test")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    replace_ray(monkeypatch, fails)
    before = signal.signal(signal.SIGHUP, lambda *_: hang_ups.append(1))
    try:
        with pytest.raises(RuntimeError, match="for the test"):
            reward_loop.connect_ray()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert hang_ups == [1]


def test_rays_processes_get_only_their_own_gpus_also_if_the_environment_says_otherwise(monkeypatch):
    """Scripts of other frameworks, and Ray itself for the driver of a job, set this variable."""
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

    def fails(*_, **settings):
        raise OSError(f"all GPUs: {os.environ.get(name)}")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv(name, "1")
    replace_ray(monkeypatch, fails)
    with pytest.raises(RuntimeError, match="all GPUs: None"):
        reward_loop.connect_ray()


def test_other_users_cannot_read_rays_token(monkeypatch, tmp_path):
    """With the token, they could run code as this user."""
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()

    def writes(*_, **settings):
        token.write_text("secret")
        raise OSError("for the test")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("HOME", str(tmp_path))
    replace_ray(monkeypatch, writes)
    with pytest.raises(RuntimeError, match="for the test"):
        reward_loop.connect_ray()
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("of_another_user", "problem"), [(0, "join the cluster"), (1, "start a cluster")])
def test_only_a_cluster_of_this_user_is_joined(monkeypatch, of_another_user, problem):
    """Reward functions would run as the other user, with the keys of the run."""
    from ray._private import services

    def fails(*_, **settings):
        raise OSError("for the test")

    address, user = f"127.0.0.1:{free_port()}", os.getuid() + of_another_user
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: address)
    monkeypatch.setattr(os, "getuid", lambda: user)
    replace_ray(monkeypatch, fails)
    command = ["raylet", "-c", "read _", f"--gcs-address={address}"]  # looks like a process of a cluster
    services.find_gcs_addresses.cache_clear()
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE):
        with pytest.raises(RuntimeError, match=f"cannot {problem}"):
            reward_loop.connect_ray()


@pytest.mark.slow
def test_workers_that_ray_kills_for_memory_are_out_of_memory(tmp_path):
    """Ray restarts them forever. Here, its memory monitor finds every machine too full."""
    rule = "async def rule(data_source, solution_str, ground_truth, extra_info): return 1.0"
    load = f"import sys, time\ntime.sleep(0 if 'driver' in sys.argv else 30)\n{rule}\n"
    (tmp_path / "rule.py").write_text(load)
    code = f"""
        import reward_loop
        sys.argv.append("driver")
        reward_loop.GIVE_UP_AFTER = 1
        options = reward_loop.RewardOptions(reward_fn="{tmp_path}/rule.py:rule", num_workers=1)
        reward_loop.RewardLoopManager(options)
    """
    environment = os.environ | {
        "RAY_memory_usage_threshold": "0.001",
        # A look at all processes of a busy machine takes seconds more, but workers load even longer.
        "RAY_memory_monitor_refresh_ms": "1000",
        "RAY_ADDRESS": "local",
    }
    ended = forked.run(["-c", SMALL_RAY + textwrap.dedent(code)], env=environment, timeout=300)
    line = ended.stderr.rpartition("\nRuntimeError: ")[2]
    assert ended.returncode == 1, ended
    assert "a reward worker cannot be started: out of memory. Ray reports: " in line
    assert "GB used" in line and "pass --num-workers 1" in line


# ---- judges that are down


@pytest.mark.slow
def test_judge_is_down_for_some_seconds(start, serve, tmp_path):
    """No sample is lost, and none is rewarded as if the judge had found no flaw."""

    async def finds_a_flaw(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "judge"}]})
        choice = {"message": {"role": "assistant", "content": "\\boxed{0}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 9}})

    port = free_port()
    options = dict(num_workers=2, router_address=(f"127.0.0.1:{port}",))
    fapo = start(f"{ROOT}/compute_score.py:compute_score_fapo", **options)
    raises = start(write_function(tmp_path, ASK), **options)
    comes_back = threading.Timer(5, lambda: serve(finds_a_flaw, port))
    comes_back.start()
    waiting = [[manager.submit(sample("\\boxed{1}")) for _ in range(50)] for manager in (fapo, raises)]
    judged, answered = ([future.result(300) for future in futures] for futures in waiting)
    comes_back.join()
    assert {result["status"] for result in answered} == {"ok"}
    # A flaw or no verdict, but never the full reward.
    found = {(result["reward_score"], result["status"]) for result in judged}
    assert found <= {(0.0, "ok"), (None, "no_verdict")}
    assert all(result["reward_extra_info"]["acc"] for result in judged)
    for manager in (fapo, raises):
        assert manager.score_batch([sample("\\boxed{1}")])[0]["status"] == "ok"


# ---- nodes that die; this ends the Ray of the other tests


@pytest.mark.slow
def test_a_node_goes_away(shared, tmp_path, monkeypatch, capfd):
    """In the beginning, there is no node with CPUs, and the manager waits for one."""
    import ray
    from ray.cluster_utils import Cluster

    shared.end()  # If managers are running while Ray shuts down, Ray may end this process.
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    manager = None
    try:
        reward_loop.connect_ray()
        said = capfd.readouterr().out
        assert f"Ray: joined the cluster at {cluster.address} (" in said and "with 0 CPUs" in said
        options = dict(num_workers=2, sync_processes=1, reward_kwargs={"folder": str(tmp_path)})
        with concurrent.futures.ThreadPoolExecutor() as pool:
            starting = pool.submit(make_manager, reward_fn=f"{FAULTS}:async_with_marks", **options)
            time.sleep(3)
            assert not starting.done()
            nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
            manager = starting.result()
        cluster.wait_for_nodes()
        finished = []

        def on_result(index, result):
            finished.append(index)
            if len(finished) == 20:
                threading.Thread(target=cluster.remove_node, args=(nodes[1], False)).start()

        # The long samples are running on both nodes when the node disappears.
        samples = [sample("0.01" if index < 40 else "5", ground_truth=str(index)) for index in range(200)]
        results = manager.score_batch(samples, on_result)
        assert [result["reward_score"] for result in results] == [float(index) for index in range(200)]
        assert sorted(finished) == list(range(200))
        assert len(list(tmp_path.iterdir())) >= 2
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60)
        assert [result["status"] for result in manager.score_batch([sample("0")] * 10)] == ["ok"] * 10
    finally:
        if manager:
            manager.shutdown()
        ray.shutdown()
        cluster.shutdown()
