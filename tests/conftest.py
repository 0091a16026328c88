"""The order of the tests, and fixtures with a tiny model."""

import importlib.metadata
import os
import random
import signal
import sys
from pathlib import Path

import pytest

import forked

# The files that take more than a minute, the longest first.
LONGEST = """reward_loop genrm_server trajectory lora grpo_trainer cluster policy_group changes rollout
    compute_score stages router toy_world score_file placement end_to_end""".split()

# Tiny models are fastest on one thread, which also leaves the other cores free.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Stand-ins for vLLM serve on a CPU, even if vLLM's build for GPUs is installed.
installed = importlib.metadata.version
importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else installed(name)
# The tests start their own Ray, even if a cluster is running on this machine.
os.environ["RAY_ADDRESS"] = "local"
# It starts workers only when they are needed, and collects no metrics.
os.environ["RAY_prestart_worker_first_driver"] = os.environ["RAY_enable_metrics_collection"] = "0"

# A background job of a script ignores Ctrl-C, and so would the scripts that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Let the workers of xdist fork their scripts from one process of each kind."""
    if config.getoption("numprocesses", None):  # of the main process
        for kind in forked.IMPORTED:
            forked.address(kind)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Fork the workers of xdist as well."""
    path = forked.on_path(Path(forked.address()).parent)
    for spec in specs:
        spec.python = f"{path.partition(os.pathsep)[0]}/python"


def pytest_collection_modifyitems(items):
    """Run quick tests first, so that mistakes show early.

    If several files run in parallel, files with slow tests come first, and the longest of them at the very
    start, so that quick ones fill the gaps at the end.
    """
    slow = {item for item in items if item.get_closest_marker("slow")}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        items.sort(key=lambda item: item in slow)  # stable
        return
    files = {item.path for item in slow}
    longest = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (longest.get(item.path.name, len(longest)), item.path not in files))


@pytest.fixture(scope="session", autouse=True)
def in_the_repository():
    """Tests name files relative to the repository, wherever pytest was started."""
    os.chdir(forked.ROOT)


@pytest.fixture(autouse=True)
def process_as_before():
    """Undo what a run in this process changes: hook, signal handlers, sys.path and the number of threads.

    The hook is pytest's, which reports exceptions in destructors. More than one thread would slow down all
    later tests.
    """
    hook, path = sys.unraisablehook, sys.path.copy()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    sys.unraisablehook, sys.path[:] = hook, path
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left():
    """A Ray cluster that is left running would disturb the tests of the next file."""
    yield
    ray = sys.modules.get("ray")
    assert not (ray and ray.is_initialized()), "a test of this file left its Ray behind"


@pytest.fixture(scope="module")
def small_ray():
    """Let Ray start in this process with fewer processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        forked.small_ray(patch.setattr)
        yield


@pytest.fixture(scope="module")
def one_ray(small_ray):
    """Share one Ray cluster among all runs of a file, including those in other processes.

    vLLM's servers of these runs are forked.
    """
    import ray

    import reward_loop

    with pytest.MonkeyPatch.context() as patch:
        for name, value in forked.servers(os.environ).items():
            patch.setenv(name, value)
        reward_loop.connect_ray()
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(one_ray):
    """Return the address of the file's Ray cluster."""
    return one_ray.get_runtime_context().gcs_address


@pytest.fixture(scope="session")
def tokenizer():
    from toy import warm_start  # imported late, because the main process of xdist runs no tests

    return warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))


@pytest.fixture(scope="session")
def model(tokenizer):
    from toy import warm_start

    return warm_start.new_model(len(tokenizer), seed=0).eval()
