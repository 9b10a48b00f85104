"""Fixtures of all tests, the environment of the workers, and the order of the test files."""

import contextlib
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Torch reads both when it is imported, and so does every process that a test starts. Workers share the processor: each
# takes its share of the cores, and none spins while another could compute (two threads each on two cores, spinning,
# take five times as long). Tests of what threads do set their number, as two_threads does.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))

import torch

from flexengine.activity import display
from flexengine.kernels import build, load
from flexengine.kernels.cpu import NativeKernels
from tests.helpers import durations
from tests.helpers.families import Family
from tests.helpers.skeletons import reuse

# Tests compare all that a command prints, on machines of any speed: work prints no line because it lasts.
display.QUICK_SECONDS = display.LINE_SECONDS = float("inf")


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a family on first use: families("llama"), or families("llama", torch.float16) for
    16 bits."""
    made: dict[tuple[str, torch.dtype], Family] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Family:
        if (name, dtype) not in made:
            with durations.ONCE.counted():
                made[name, dtype] = Family(name, tmp_path_factory.mktemp(name), dtype)
        return made[name, dtype]

    return get


GARBAGE = 50_000  # new objects between two collections of garbage; Python's default is 700


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --shuffle SEED, which shows whether a file depends on those that ran before it, and --record-durations."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files in an order drawn with this seed")
    parser.addoption("--record-durations", action="store_true", help="run all tests, and write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(durations.Recorder(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first: a worker that has one of them last ends alone. An option of pytest-xdist in the
    settings keeps this order."""
    files = durations.order([item.nodeid for item in items], durations.read())
    if (seed := config.getoption("shuffle")) is not None:
        files.sort()
        random.Random(seed).shuffle(files)
    places = {file: place for place, file in enumerate(files)}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported and tests are collected, as all of these stay to the end, and later
    seldom, and without these. It takes a fifth of the collection of tests and 7 % of the planner's tests else."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    gc.enable()
    return result


def _computing_with(count: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread. A tiny model gains nothing from more; a busy machine loses."""
    yield from _computing_with(1)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Compute with three threads, on any machine."""
    yield from _computing_with(3)


# A slow machine fails no test, and a fixture may serve all examples of a test. Examples are drawn with the same seed in
# every run, but hypothesis also draws constants that it finds in the project's loaded modules: other files before a
# test, or a changed constant in any module, give other examples.
settings.register_profile(
    "flexengine", derandomize=True, database=None, deadline=None, max_examples=50, print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
settings.load_profile("flexengine")

HERE = Path(__file__).parent
BUILT = HERE.parent / "build" / "test-kernels"  # git ignores it
KEPT = 12  # libraries: three builds of four versions of the kernels


def share_kernels(folder: Path) -> None:
    """Let a cache in `folder` use the kernels that earlier tests compiled.

    Compiling takes a minute of two cores. A library's name is a hash of its sources, compiler, flags and processor, so
    a library that exists is the one that would be compiled again.
    """
    BUILT.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another worker was first
        (folder / "kernels").symlink_to(BUILT)


@pytest.fixture(scope="session", autouse=True)
def run_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache directory of this run, one for all workers, with the kernels of all runs. They are compiled now if they
    are missing, so that no test counts as slow because a process that it starts is the first to need them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "cache"
    share_kernels(folder)
    for old in sorted(BUILT.glob("*.so"), key=os.path.getmtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(folder))
        with contextlib.suppress(build.BuildFailed):  # without a compiler
            if build.compiled() is None:
                build.load()
        yield folder


@pytest.fixture(scope="session", autouse=True)
def skeletons() -> Iterator[None]:
    """Engines of one process try a model once per config. With many opened engines this is a tenth of a run's time."""
    with pytest.MonkeyPatch.context() as patch:
        reuse(patch)
        yield


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("FLEXENGINE_")}


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    """No test leaves environment variables of the package to tests after it, which may run in another process."""
    before = _settings()
    yield
    after = _settings()
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before


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
def native(two_threads: None) -> NativeKernels:
    """The kernels in C++, in two threads. Random numbers begin with seed 0."""
    torch.manual_seed(0)
    found = load()
    if not isinstance(found, NativeKernels):
        pytest.skip("no native kernels")
    return found


@pytest.fixture
def left_threads() -> Callable[[], list[threading.Thread]]:
    """Return a function that returns the threads of the package that began in this test and still run. Connections that
    other tests ended may keep a thread for some seconds."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name.startswith("flexengine-") and t not in before]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of one test. It begins with the compiled kernels of all tests and nothing else."""
    share_kernels(tmp_path / "cache")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cache(own_cache: Path) -> Path:
    """The directory of prepared weights in the cache of one test."""
    return own_cache / "prepared"
