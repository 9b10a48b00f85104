"""Which tests are slow, and in which order files run: recorded processor seconds, and the spare cases of grids.

Processor seconds count this process and the children it waited for. They leave out what is paid once per process:
imports, compiled kernels, fixtures of a module or session, and hypothesis' search for constants in all modules. The
kernels are compiled before the first test (`run_cache` in conftest), so no child process of a test compiles them.
"""

import contextlib
import importlib._bootstrap as bootstrap  # type: ignore[import-not-found]
import json
import os
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers

from flexengine.kernels import build

RECORD = Path(__file__).parents[1] / "durations.json"
SLOW_SECONDS = 1.0
MIN_SECONDS = 0.3  # shorter tests are recorded as one sum per file
TOLERANCE = 4.0  # an unmarked test is reported beyond TOLERANCE * SLOW_SECONDS: processors differ in what they do fast
MIN_TESTS = 20  # recorded tests that tell how fast a machine is
# Slow, whatever they take: tests that kill processes, need a browser or a wheel, or test benches and pages.
SLOW_KINDS = (
    "tests/bench/", "tests/docs/test_blocks.py", "tests/docs/test_site.py", "tests/e2e/test_ray.py",
    "tests/e2e/test_wheel.py", "tests/e2e/resume/", "tests/shell/report/test_browser.py",
)  # fmt: skip
PROPERTY = "processor seconds"  # of a report, which takes it from xdist's workers to the controller


@dataclass(frozen=True)
class FileDurations:
    """Processor seconds of one file's tests.

    Attributes:
        rest: sum over the tests below MIN_SECONDS.
        tests: the others, by the part of the id that follows the file.
    """

    rest: float = 0.0
    tests: Mapping[str, float] = field(default_factory=dict)


Durations = Mapping[str, FileDurations]  # by file


def group(seconds: Mapping[str, float]) -> dict[str, FileDurations]:
    """Return durations by file of `seconds` by test id."""
    rest, tests = defaultdict[str, float](float), defaultdict[str, dict[str, float]](dict)
    for nodeid, value in seconds.items():
        file, _, name = nodeid.partition("::")
        if value < MIN_SECONDS:
            rest[file] += value
        else:
            tests[file][name] = round(value, 1)
    return {file: FileDurations(round(rest[file], 1), tests[file]) for file in sorted({*rest, *tests})}


def read(path: Path = RECORD) -> dict[str, FileDurations]:
    """Return the durations in a file, or none if there is no file."""
    if not path.exists():
        return {}
    return {file: FileDurations(**values) for file, values in json.loads(path.read_text()).items()}


def write(durations: Durations, path: Path = RECORD) -> None:
    """Write durations to a file, one line per test."""
    values = {file: {"rest": d.rest, "tests": dict(sorted(d.tests.items()))} for file, d in sorted(durations.items())}
    path.write_text(json.dumps(values, indent=0) + "\n")


def slow(nodeid: str, durations: Durations) -> bool:
    """Return whether a test is recorded with more than SLOW_SECONDS. A test without a record is quick."""
    file, _, name = nodeid.partition("::")
    return file in durations and durations[file].tests.get(name, 0.0) > SLOW_SECONDS


def cover(cases: Sequence[Sequence[str]]) -> set[int]:
    """Return the indices of cases that together have every value of every parameter.

    Greedy: the case with the most values that no chosen case has, the first of equals.

    Args:
        cases: the cases of one test, each with a value per parameter.
    """
    values = [set(enumerate(case)) for case in cases]
    missing, chosen = set[tuple[int, str]]().union(*values), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -i))
        chosen.add(best)
        missing -= values[best]
    return chosen


def ids(item: pytest.Item) -> Sequence[str]:
    """Return the id that each `parametrize` gives a test. pytest has no public name for them."""
    return item.callspec._idlist if hasattr(item, "callspec") else ()


def spare(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of grids that the quick tier does without: a test with several `parametrize` runs there with
    every value of each, and in the full tier with their product."""
    grids = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if len(ids(item)) > 1:
            grids[item.nodeid.partition("[")[0]].append(item)
    for grid in grids.values():
        chosen = cover([ids(item) for item in grid])
        yield from (item for i, item in enumerate(grid) if i not in chosen)


def order(nodeids: Iterable[str], durations: Durations) -> list[str]:
    """Return the files of some tests, those first whose tests take longest, then those with the most tests."""
    seconds, count = defaultdict[str, float](float), defaultdict[str, int](int)
    for nodeid in nodeids:
        file, _, name = nodeid.partition("::")
        count[file] += 1
        if file in durations:
            seconds[file] += durations[file].tests.get(name, 0.0)
    for file in count:
        seconds[file] += durations[file].rest if file in durations else 0.0
    return sorted(count, key=lambda file: (-seconds[file], -count[file]))


def speed(seconds: Mapping[str, float], durations: Durations) -> float:
    """Return how many times slower this run was than the recorded one: the median over recorded tests, or 1 if these
    are too few."""
    ratios = []
    for nodeid, value in seconds.items():
        file, _, name = nodeid.partition("::")
        if file in durations and name in durations[file].tests:
            ratios.append(value / durations[file].tests[name])
    return statistics.median(ratios) if len(ratios) >= MIN_TESTS else 1.0


def too_slow(seconds: Mapping[str, float], marked: Iterable[str], durations: Durations) -> dict[str, float]:
    """Return the tests without a mark that are slow, with their seconds on the recording machine."""
    slower, marks = speed(seconds, durations), set(marked)
    return {
        nodeid: value / slower
        for nodeid, value in seconds.items()
        if nodeid not in marks and value / slower > TOLERANCE * SLOW_SECONDS
    }


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class OncePerProcess:
    """Processor seconds of work that is done once per process, whichever test comes first."""

    def __init__(self, clock: Callable[[], float] = processor_seconds) -> None:
        self.seconds, self._clock, self._depth, self._lock = 0.0, clock, 0, threading.Lock()
        self._began = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block. Blocks within it, or at the same time in another thread, are not counted twice."""
        with self._lock:
            if not self._depth:
                self._began = self._clock()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    self.seconds += self._clock() - self._began

    def count_calls(self, owner: Any, name: str) -> None:
        """Count all calls of a function from now on."""
        call = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            with self.counted():
                return call(*args, **options)

        setattr(owner, name, counted)


ONCE = OncePerProcess()


class Recorder:
    """Plugin that marks slow tests, measures all tests, and names the slow tests without a mark after a whole run.

    They do not fail the run: a machine with other work can count seconds that a test never takes elsewhere.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.durations = config, read()
        by_name = all("::" in name for name in config.args) and config.args_source is pytest.Config.ArgsSource.ARGS
        if config.option.record_durations or (by_name and config.option.markexpr == "not slow"):
            config.option.markexpr = ""  # slow tests that are named run
        self.whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr
        self.seconds = dict[str, float]()
        self.failed, self.marked = set[str](), set[str]()
        self._began = 0.0
        ONCE.count_calls(bootstrap, "_find_and_load")
        ONCE.count_calls(build, "_build")
        if hasattr(providers, "constants_from_module"):  # a private name
            ONCE.count_calls(providers, "constants_from_module")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark slow tests and the spare cases of grids, before those without a wanted mark are left out."""
        quick = []
        for item in items:
            if item.nodeid.startswith(SLOW_KINDS) or slow(item.nodeid, self.durations):
                item.add_marker("slow")
            else:
                quick.append(item)
        for item in spare(quick):
            item.add_marker("slow")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        with contextlib.nullcontext() if fixturedef.scope == "function" else ONCE.counted():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._began = processor_seconds() - ONCE.seconds
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            seconds = processor_seconds() - ONCE.seconds - self._began
            marked = item.get_closest_marker("slow") is not None
            report.user_properties.append((PROPERTY, (seconds, marked)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.seconds[report.nodeid], marked = value  # type: ignore[misc]
                self.marked |= {report.nodeid} if marked else set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            return
        passed = {nodeid: value for nodeid, value in self.seconds.items() if nodeid not in self.failed}
        if self.config.option.record_durations:
            write(({} if self.whole else self.durations) | group(passed))  # without files that are gone

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.whole or self.config.option.record_durations:
            return
        passed = {nodeid: value for nodeid, value in self.seconds.items() if nodeid not in self.failed}
        for nodeid, value in too_slow(passed, self.marked, self.durations).items():
            terminalreporter.line(
                f"{nodeid} took {value:.1f} processor seconds, a test of the quick tier at most {SLOW_SECONDS:g}: mark"
                " it as slow, make it cheaper, or record all tests (--record-durations)",
                yellow=True,
            )
