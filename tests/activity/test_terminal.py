"""Bars on a terminal of any width, and plain lines elsewhere."""

import io
import logging
import subprocess
import sys

import pytest

from flexengine.activity import Activity, activity, message, minutes, reporting
from flexengine.activity import display as module
from flexengine.activity.display import Display, amount, facts
from tests.helpers.terminal import on_terminal

SCRIPT = """
import logging, threading, time
from flexengine import activity as module
from flexengine.activity import activity, message, reporting
from flexengine.activity.display import Display
module.INTERVAL = 0.0
with reporting(Display()):
    with activity("converting", "converting x, once", 1000, "B", logging.INFO) as work:
        for i in range(10):
            work.advance(100)
            if i == 5:
                message("in the middle")
                with activity("hashing", "hashing y", 30, "rows") as inner:
                    inner.update(15, details=("a" * 12, "b" * 12, "c" * 12))
    with activity("planning", "planning"):
        pass
assert threading.active_count() == 1
"""


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_bars_fit_the_terminal_and_disappear(columns: int) -> None:
    """Facts are left out from the last one on; none is cut."""
    screen = on_terminal(["-c", SCRIPT], columns)
    assert screen.code == 0
    assert screen.lines == ["flexengine: converting x, once", "flexengine: in the middle"]
    bars = [frame.rstrip() for frame in screen.frames if not frame.startswith("flexengine: ")]
    assert len(bars) > 10
    assert max(map(len, bars)) < columns
    (inner,) = [bar for bar in bars if bar.startswith("hashing  50%")]
    shown = [letter * 12 in inner for letter in "abc"]
    assert shown == sorted(shown, reverse=True)
    assert sum(shown) == {20: 0, 40: 1, 80: 3, 200: 3}[columns]
    assert all(inner.count(letter) in (0, 12) for letter in "bc")


def test_the_outer_bar_comes_back() -> None:
    screen = on_terminal(["-c", SCRIPT], 80)
    names = [frame.split()[0] for frame in screen.frames if not frame.startswith("flexengine: ")]
    order = [name for i, name in enumerate(names) if names[i - 1] != name or not i]
    assert order == ["converting", "hashing", "converting", "planning"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("flexengine.activity.time.monotonic", lambda: now[0])
    monkeypatch.setattr(module, "QUICK_SECONDS", 2.0)
    monkeypatch.setattr(module, "LINE_SECONDS", 10.0)
    return now


def test_plain_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """At the start, every ten seconds, and at the end."""
    with reporting(Display()), activity("converting", "converting x, once", 40, "rows", logging.INFO) as work:
        for _ in range(40):
            clock[0] += 1.0
            work.advance()
    assert capsys.readouterr().err.splitlines() == [
        "flexengine: converting x, once",
        "flexengine: converting: 25%, 10 of 40 rows, 0:10, 0:30 left",
        "flexengine: converting: 50%, 20 of 40 rows, 0:20, 0:20 left",
        "flexengine: converting: 75%, 30 of 40 rows, 0:30, 0:10 left",
        "flexengine: converting: 100%, 40 of 40 rows, 0:40, 0:00 left",
        "flexengine: converting: done in 0:40",
    ]


def test_quick_work_prints_no_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Work that is not announced has a line when it has lasted, and its end one."""
    with reporting(Display()):
        with activity("planning", "searching") as work:
            clock[0] += 1.9
            work.update()
        assert capsys.readouterr().err == ""
        with activity("planning", "searching") as work:
            clock[0] += 2.1
            work.update()
        assert capsys.readouterr().err == "flexengine: searching\nflexengine: planning: done in 0:02\n"


def test_all_ends(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The end of quick work, too, with its text if that was not printed at the start."""
    display = Display()
    display.all_ends = True
    with reporting(display):
        with activity("planning", "searching"):
            clock[0] += 0.25
        with activity("converting", "converting x", level=logging.INFO):
            clock[0] += 61.0
        with pytest.raises(LookupError), activity("reading", "reading x"):
            raise LookupError
    assert capsys.readouterr().err.splitlines() == [
        "flexengine: searching: done in 0.25 s", "flexengine: converting x", "flexengine: converting: done in 1:01",
    ]  # fmt: skip


def test_no_line_says_that_failed_work_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(Display()), pytest.raises(LookupError), activity("reading", "reading x", level=logging.INFO):
        raise LookupError
    assert capsys.readouterr().err == "flexengine: reading x\n"


def test_levels_of_messages(capsys: pytest.CaptureFixture[str]) -> None:
    for level in (logging.DEBUG, logging.INFO):
        with reporting(Display(level)):
            for text, own in (("plan", logging.DEBUG), ("said", logging.INFO), ("slow", logging.WARNING)):
                message(text, own)
        words = ["flexengine: plan"] * (level == logging.DEBUG) + ["flexengine: said", "flexengine: slow"]
        assert capsys.readouterr().err.splitlines() == words


def test_a_closed_stream_fails_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with reporting(Display()), activity("reading", "reading", level=logging.INFO) as work:
        work.advance()
        message("lost")


def test_a_process_without_a_standard_error() -> None:
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, SCRIPT]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b""


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [(0, 538.1e6, "B", "0.0 of 538.1 MB"), (1.5e9, None, "B", "1.5 GB"), (999, 2e12, "B", "0.0 of 2.0 TB"),
     (500, 900, "B", "0.5 of 0.9 kB"), (1234, 5678, "rows", "1,234 of 5,678 rows"), (3, None, "files", "3 files")],
)  # fmt: skip
def test_amounts(done: float, total: float | None, unit: str, text: str) -> None:
    assert amount(done, total, unit) == text


def test_times() -> None:
    assert [minutes(x) for x in (0.4, 59.6, 61, 3599, 3600, 86_400)] == [
        "0:00", "1:00", "1:01", "59:59", "1:00:00", "24:00:00"
    ]  # fmt: skip


def test_remaining_time_needs_a_finished_part() -> None:
    def told(done: float, total: float | None, seconds: float) -> list[str]:
        return facts(Activity("a", "", done, total, "rows"), seconds)

    assert told(0, 100, 10.0) == ["0 of 100 rows", "0:10"]
    assert told(25, 100, 10.0) == ["25 of 100 rows", "0:10", "0:30 left"]
    assert told(25, 100, module.MIN_ETA_SECONDS / 2) == ["25 of 100 rows", "0:01"]
    assert told(2, 4, 10.0) == ["2 of 4 rows", "0:10"]  # too coarse
    assert told(7, None, 10.0) == ["7 rows", "0:10"]
