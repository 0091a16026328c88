"""The order of the tests, and a tiny model."""

import os
import random
import sys

import pytest

# tiny models are fastest on one thread, and leave the other cores alone
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# a Ray of the tests' own, whatever cluster happens to run on this machine
os.environ["RAY_ADDRESS"] = "local"

from toy import warm_start  # after the environment is set


def pytest_collection_modifyitems(items):
    """Quick tests first, so that a mistake shows at once. Where two files run at a time, those with slow
    tests first: the quick ones fill what is left at the end."""
    slow = {item for item in items if item.get_closest_marker("slow")}
    files = {item.path for item in slow}
    beside = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: item.path not in files if beside else item in slow)  # stable


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left():
    """The next file's tests would find it in their way."""
    yield
    ray = sys.modules.get("ray")
    assert not (ray and ray.is_initialized()), "a test of this file left its Ray behind"


@pytest.fixture(scope="session")
def tokenizer():
    return warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))


@pytest.fixture(scope="session")
def model(tokenizer):
    return warm_start.new_model(len(tokenizer), seed=0).eval()
