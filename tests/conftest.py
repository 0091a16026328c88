"""Quick tests first, so that a mistake shows at once; the tests of one file stay together."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models are fastest on one thread, and leave the other cores alone
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["RAY_ADDRESS"] = "local"  # a Ray of the tests' own, whatever cluster happens to run on this machine


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable
