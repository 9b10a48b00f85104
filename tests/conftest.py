"""Fixtures of all tests, the environment of the workers, and the order of the test files."""

import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Torch reads both when it is imported, and so does every process that a test starts. Workers share the processor: each
# takes its share of the cores, and none spins while another could compute (two threads each on two cores, spinning,
# take five times as long). Tests of what threads do set their number, as two_threads does.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

import torch

from tests.helpers.families import Family


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a family when first asked for it: families("llama"), or families("llama", torch.float16) as stored."""
    made: dict[tuple[str, torch.dtype], Family] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Family:
        if (name, dtype) not in made:
            made[name, dtype] = Family(name, tmp_path_factory.mktemp(name), dtype)
        return made[name, dtype]

    return get


# Files whose tests take minutes together, the longest first: a worker that has one of them last ends alone.
LONGEST = ("e2e/test_exactness", "e2e/test_architectures", "e2e/test_demo", "kernels/test_cache", "e2e/test_faults",
           "model/test_fused", "engine/test_lossy", "plan/test_explain", "engine/test_planning",
           "worker/test_delegation", "e2e/test_invariance", "plan/test_search", "plan/test_profile", "e2e/test_resume",
           "e2e/test_accounting", "worker/test_topk", "bench/test_harness", "engine/test_recovery")  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --shuffle SEED, which shows whether a file depends on those that ran before it."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files in an order drawn with this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, then those with the most tests; setup.cfg tells xdist to keep to that."""
    tests = Counter(item.path for item in items)
    if (seed := config.getoption("shuffle")) is not None:
        paths = sorted(tests)
        random.Random(seed).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
        return
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(f"{item.path.parent.name}/{item.path.stem}", len(order)), -tests[item.path]))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection of garbage need not go through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread. A tiny model gains nothing from more; a busy machine loses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def run_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels and prepared weights of a test run go to a directory of its own. All workers share it, and
    fixtures of any scope: compiling takes half a minute each time."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = tmp_path_factory.getbasetemp().parent / "cache"
        shared.mkdir(exist_ok=True)
    else:
        shared = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(shared))
        yield shared


@pytest.fixture
def sigint() -> Iterator[None]:
    """SIGINT interrupts, as in a terminal, in this process and in those that the test starts.

    A test run in the background of a script starts with SIGINT ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch and the kernels compute in two threads, however many a worker has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are prepared, in a cache of the test's own."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"
