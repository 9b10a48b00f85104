"""Which tests are slow, in which order files run, and what fails a whole run."""

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers

from flexengine.kernels import build
from tests.helpers import durations
from tests.helpers.durations import (
    FileDurations,
    OncePerProcess,
    cover,
    group,
    ids,
    order,
    read,
    slow,
    speed,
    too_slow,
    write,
)

RECORDED = {
    "a.py": FileDurations(0.2, {"test_long[1]": 5.0, "test_medium": 0.9}),
    "b.py": FileDurations(7.0, {}),
    "c.py": FileDurations(0.0, {f"test_{i}": 0.5 for i in range(40)}),
}
SECONDS = {f"c.py::test_{i}": 0.5 for i in range(40)}


def test_groups_by_file() -> None:
    found = group({"b.py::test_x": 0.1, "a.py::test_y[::]": 2.04, "b.py::test_z": 0.15, "b.py::Test::test": 0.4})
    assert found == {"a.py": FileDurations(0.0, {"test_y[::]": 2.0}), "b.py": FileDurations(0.2, {"Test::test": 0.4})}


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    assert read(path) == {}
    write(RECORDED, path)
    assert read(path) == RECORDED


def test_the_record_of_the_project() -> None:
    record = read()
    assert record
    assert all(value >= durations.MIN_SECONDS for recorded in record.values() for value in recorded.tests.values())


def test_slow_tests() -> None:
    names = ("a.py::test_long[1]", "a.py::test_medium", "a.py::test_new", "b.py::test_x", "new.py::test_x")
    assert [slow(name, RECORDED) for name in names] == [True, False, False, False, False]


@pytest.mark.parametrize("sizes", [(1,), (7,), (2, 3), (5, 2, 3), (4, 4, 1, 4)])
def test_a_cover_has_every_value_of_every_parameter(sizes: tuple[int, ...]) -> None:
    """Of a whole product, a cover needs no more cases than the longest parameter has values."""
    cases = list(itertools.product(*([f"{value}" for value in range(size)] for size in sizes)))
    covered = [cases[i] for i in cover(cases)]
    assert [set(column) for column in zip(*covered, strict=True)] == [set(c) for c in zip(*cases, strict=True)]
    assert len(covered) == max(sizes)


def test_a_cover_of_a_grid_with_gaps() -> None:
    assert cover([("a", "x"), ("b", "x"), ("b", "y"), ("a", "z")]) == {0, 2, 3}


@pytest.mark.parametrize("outer", ["x"])
@pytest.mark.parametrize(("inner", "more"), [("y", 1)])
def test_ids_of_a_grid(request: pytest.FixtureRequest, outer: str, inner: str, more: int) -> None:
    """pytest keeps the ids under a private name, which `ids` reads."""
    assert list(ids(request.node)) == [f"{inner}-{more}", outer]


def test_spare_cases_are_of_grids() -> None:
    def case(name: str, *values: str) -> Any:
        parts = {"callspec": SimpleNamespace(_idlist=values)} if values else {}
        return SimpleNamespace(nodeid=f"a.py::{name}" + "[" * bool(values) + "-".join(values), **parts)

    grid = [case("test_grid", a, b) for a, b in itertools.product("abc", "wxyz")]
    others = [case("test_one"), *(case("test_cases", a) for a in "abc")]
    spare = list(durations.spare([*others, *grid]))
    assert len(spare) == 8
    assert all(item in grid for item in spare)


def test_files_begin_with_the_longest() -> None:
    """Only the tests that run count; files without a record come last, those with most tests first."""
    names = ["d.py::test_1", "e.py::test_1", "e.py::test_2", "a.py::test_medium", "b.py::test_x", "a.py::test_long[1]"]
    assert order(names, RECORDED) == ["b.py", "a.py", "e.py", "d.py"]
    assert order([*names, "c.py::test_1"], RECORDED)[2] == "c.py"
    names.remove("a.py::test_long[1]")
    assert order([*names, *(f"c.py::test_{i}" for i in range(40))], RECORDED)[:3] == ["c.py", "b.py", "a.py"]


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0, 5.0])
def test_machines_of_any_speed_report_the_same(factor: float) -> None:
    """The median of all ratios is the machine's; single outliers move nothing."""
    seconds = {name: value * factor for name, value in SECONDS.items()}
    seconds |= {"c.py::test_0": 100.0, "c.py::test_1": 0.01, "x.py::test_new": 4.5 * factor, "b.py::y": 3.9 * factor}
    assert speed(seconds, RECORDED) == pytest.approx(factor)
    found = too_slow(seconds, [], RECORDED)
    assert found == {"c.py::test_0": pytest.approx(100 / factor), "x.py::test_new": pytest.approx(4.5)}
    assert list(too_slow(seconds, ["x.py::test_new"], RECORDED)) == ["c.py::test_0"]


def test_few_tests_tell_no_speed() -> None:
    assert speed({"c.py::test_1": 5.0, "c.py::test_2": 5.0}, RECORDED) == 1.0


def test_noise_is_tolerated() -> None:
    assert too_slow(SECONDS | {"a.py::test_medium": 3.9}, [], RECORDED) == {}


def test_work_of_whichever_test_comes_first_is_paid_once() -> None:
    assert build.compiled() or not build._compilers()  # before the first test, which may start processes
    assert [call.__name__ for call in (build._build, providers.constants_from_module)] == ["counted"] * 2


def test_what_is_paid_once_is_counted_once() -> None:
    """Nested blocks are part of the outer one, and blocks of several threads count from the first to the last."""
    ticks = itertools.count()
    once = OncePerProcess(lambda: float(next(ticks)))
    with once.counted(), once.counted():
        pass
    assert once.seconds == 1.0
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with once.counted():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with once.counted():
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()
    assert once.seconds == 2.0
    with pytest.raises(KeyError), once.counted():
        raise KeyError
    assert once.seconds == 3.0
