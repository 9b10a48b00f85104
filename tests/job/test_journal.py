"""Journals: what a cut, a flipped bit, a second process or a full disk leave, against a parser of the tests' own."""

import errno
import json
import os
import random
import re
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from flexengine.activity import Activity, reporting
from flexengine.config import Completion, Result
from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.journal import DONE, FAILED, TODO, Journal
from flexengine.job.resume import open_job
from tests.helpers.strategies import flipped

MANIFEST = {"model": "m", "seed": 3}
ROWS = 49  # with the manifest 50 records


def result(index: int, generator: random.Random) -> Result:
    error = f"line {index}: \ud800 no" if index % 7 == 3 else None
    text = "".join(generator.choice("ab\n\0\u2028ż😀\ud800") for _ in range(generator.randrange(9)))
    return Result(index, text, [generator.randrange(600) for _ in range(2)], "stop", 4, 5, error)


def write(path: Path, order: list[int], seed: int = 0) -> list[Result]:
    generator = random.Random(seed)
    results = [result(index, generator) for index in order]
    with Journal(path) as journal:
        journal.begin(MANIFEST, 1234)
        for r in results:
            journal.add(r)
    return results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.journal"


@pytest.fixture
def written(path: Path) -> list[Result]:
    order = list(range(ROWS))
    random.Random(5).shuffle(order)
    return write(path, order)


def parse(data: bytes) -> list[Any]:
    """Return the records up to the first bad one. Written from the description of the format, not from its code."""
    found = []
    for line in re.findall(rb"[^\n]*\n", data):
        match = re.fullmatch(rb"([0-9a-f]{8}) ([^\n]*)\n", line)
        if match is None or int(match[1], 16) != zlib.crc32(match[2]):
            break
        found.append(json.loads(match[2]))
    return found


def replace(path: Path, data: bytes) -> None:
    """Write a new file. A file system may sync a file at once that was truncated and written again, which is slow."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def held(journal: Journal) -> dict[int, Result]:
    """Return the results in a journal, row by row."""
    there = [index for index in range(ROWS) if journal.state(index) != TODO]
    return {r.index: r for r in journal.results(there)}


def test_the_format(path: Path, written: list[Result]) -> None:
    records = parse(path.read_bytes())
    local = datetime.fromtimestamp(1234).isoformat()
    assert records[0] == {"manifest": MANIFEST, "created": 1234, "local": local}
    assert [r["index"] for r in records[1:]] == [r.index for r in written]
    for record, known in zip(records[1:], written, strict=True):
        assert {"index": known.index, **record["result"]} == {k: v for k, v in vars(known).items() if v is not None}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_read_again(path: Path, written: list[Result]) -> None:
    before = path.read_bytes()
    with Journal(path) as journal:
        assert (journal.manifest, journal.created, journal.dropped_bytes, journal.damaged) == (MANIFEST, 1234, 0, False)
        assert list(journal.results(range(ROWS))) == sorted(written, key=lambda r: r.index)
        assert [journal.state(i) for i in range(ROWS + 1)] == [
            *(FAILED if i % 7 == 3 else DONE for i in range(ROWS)), TODO]  # fmt: skip
        assert (journal.count(DONE, ROWS), journal.count(FAILED, ROWS), journal.count(FAILED, 4)) == (42, 7, 1)
        assert journal.finished(5) == bytes([1, 1, 1, 1, 1])
        assert journal.finished(5, retry_failed=True) == bytes([1, 1, 1, 0, 1])
    assert path.read_bytes() == before


def test_all_fields_of_a_result_come_back(path: Path) -> None:
    logprobs = [{"token_id": 1, "token": "x", "logprob": float("-inf"), "top_logprobs": [{"logprob": -0.1}]}]
    samples = [Completion("a", [1], "stop", logprobs), Completion(None, [], None)]
    given = Result(0, None, [7], "length", 3, 1, None, logprobs, samples)
    with Journal(path) as journal:
        journal.begin(MANIFEST, 0)
        journal.add(given)
        assert list(journal.results(range(1))) == [given]
    with Journal(path) as journal:
        assert list(journal.results(range(1))) == [given]


@pytest.mark.slow
def test_cut_at_every_byte(path: Path, written: list[Result]) -> None:
    data = path.read_bytes()
    assert len(parse(data)) == 50
    ends = [match.end() for match in re.finditer(rb"\n", data)]
    for length in range(len(data) + 1):
        replace(path, data[:length])
        whole = [end for end in ends if end <= length]
        with Journal(path) as journal:
            assert journal.manifest == (MANIFEST if whole else None)
            assert held(journal) == {r.index: r for r in written[: max(len(whole) - 1, 0)]}
            assert (journal.dropped_bytes, journal.damaged) == (length - max(whole, default=0), False)
            assert path.stat().st_size == max(whole, default=0)
        assert path.exists() == bool(whole)


def test_flipped_bits(path: Path, written: list[Result]) -> None:
    data = path.read_bytes()
    known = {r.index: r for r in written}

    @given(hurt=flipped(data))
    @settings(max_examples=500)
    def keeps_what_is_whole(hurt: bytes) -> None:
        replace(path, hurt)
        good = parse(hurt)
        with Journal(path) as journal:
            found = held(journal)
            assert found.items() <= known.items()
            assert len(found) == max(len(good) - 1, 0)
            assert journal.dropped_bytes == len(data) - journal._end > 0
            assert journal.damaged == (b"\n" in hurt[journal._end :])

    keeps_what_is_whole()


def test_garbage_is_refused_and_left_alone(path: Path) -> None:
    for data in (b"my notes\n", b"\0" * 4096, b"{}\n", b"0123456\n", bytes(range(256))):
        path.write_bytes(data)
        with pytest.raises(InvalidInput, match=r"is no journal .*name another output"):
            Journal(path)
        assert path.read_bytes() == data


def test_a_job_goes_on_after_a_torn_record(path: Path) -> None:
    write(path, [2, 0])
    whole = path.read_bytes()
    path.write_bytes(whole + b'1234abcd {"index":1,"res')
    with Journal(path) as journal:
        journal.add(Result(1, "one"))
        assert [r.index for r in journal.results(range(3))] == [0, 1, 2]
    assert path.read_bytes().startswith(whole)
    assert len(parse(path.read_bytes())) == 4
    assert parse(path.read_bytes())[-1]["index"] == 1


def test_the_last_record_of_a_row_counts(path: Path) -> None:
    write(path, [3, 0])
    with Journal(path) as journal:
        assert journal.state(3) == FAILED
        journal.add(Result(3, "now"))
        assert journal.state(3) == DONE
    with Journal(path) as journal:
        assert journal.state(3) == DONE
        assert held(journal)[3] == Result(3, "now")


def test_output_is_up_to_date_until_a_row_is_added(path: Path) -> None:
    """The size of the last output stays known, so that an edit of it is noticed."""
    steps: list[tuple[Callable[[Journal], object], tuple[object, bool, bool]]] = [
        (lambda journal: None, (None, True, False)),
        (lambda journal: journal.add_output(2, 70), ((2, 70), False, True)),
        (lambda journal: journal.add(Result(1)), ((2, 70), True, True)),
        (lambda journal: journal.add_output(2, 80), ((2, 80), False, True)),
        (lambda journal: journal.forget_output(), (None, False, True)),
        (lambda journal: journal.restart(), (None, False, False)),
    ]
    write(path, [0, 1])
    for step, expected in steps:
        with Journal(path) as journal:
            step(journal)
            assert (journal.output, journal.outdated, journal.wrote) == expected
        if journal.manifest is not None:
            with Journal(path) as journal:
                assert (journal.output, journal.outdated, journal.wrote) == expected


def test_settings_come_back(path: Path) -> None:
    write(path, [0])
    with Journal(path) as journal:
        assert journal.settings == {}
        journal.set({"prefill_tokens": 64})
    with Journal(path) as journal:
        assert journal.settings == {"prefill_tokens": 64}
        journal.restart()
        assert journal.settings == {}


def test_records_of_a_later_version_are_passed_over(path: Path) -> None:
    write(path, [0, 1])
    with path.open("ab") as file:
        body = b'{"something new":[1]}'
        file.write(b"%08x %b\n" % (zlib.crc32(body), body))
    with Journal(path) as journal:
        assert (journal.dropped_bytes, journal.damaged) == (0, False)
        journal.add(Result(2))
    assert [r.get("index") for r in parse(path.read_bytes())] == [None, 0, 1, None, 2]


def test_restart(path: Path) -> None:
    write(path, [0, 1])
    with Journal(path) as journal:
        journal.restart()
        assert (journal.manifest, journal.state(0), path.stat().st_size) == (None, TODO, 0)
        journal.begin({"new": 1}, 5)
    with Journal(path) as journal:
        assert (journal.manifest, journal.created, journal.count(DONE, 2)) == ({"new": 1}, 5, 0)


def test_a_row_that_was_never_finished_is_noticed(path: Path) -> None:
    write(path, [0, 2])
    with Journal(path) as journal, pytest.raises(RuntimeError, match="row 1 was never finished"):
        list(journal.results(range(3)))


def test_a_record_changed_behind_our_back_is_noticed(path: Path) -> None:
    write(path, [0, 1])
    with Journal(path) as journal:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(OSError, match="row 1 has changed"):
            list(journal.results(range(2)))


HOLDER = """
import sys
from pathlib import Path
from flexengine.job.journal import Journal
with Journal(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_pid_of_the_first(path: Path) -> None:
    write(path, [0])
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=Path(__file__).parents[2]) as first:  # fmt: skip
        assert first.stdout
        assert first.stdout.readline() == b"locked\n"
        who = f"process {first.pid}" if Path("/proc/locks").exists() else "another process"
        with pytest.raises(InvalidInput, match=f"{who} is writing this output already"):
            Journal(path)
        first.kill()
    with Journal(path) as journal:  # the lock dies with its process
        assert journal.state(0) == DONE


def test_an_unused_journal_leaves_no_file(path: Path) -> None:
    with Journal(path), pytest.raises(InvalidInput, match="is writing this output already"):
        Journal(path)
    assert not path.exists()


def test_a_journal_removed_while_waiting_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the other process removes the file: the lock would be on a file without a name."""
    import fcntl

    real, calls = fcntl.flock, []

    def flock(file: int, how: int) -> None:
        if not calls:
            path.unlink()
        calls.append(file)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Journal(path) as journal:
        journal.begin(MANIFEST, 0)
        assert os.path.samestat(os.fstat(journal._file), path.stat())
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_cannot_be_a_journal(path: Path, kind: str) -> None:
    {"directory": path.mkdir, "link": lambda: path.symlink_to("/etc/passwd"), "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(InvalidInput, match="journal"):
        Journal(path)


@pytest.mark.parametrize("room", [0, 1, 8, 30])
def test_a_full_disk_leaves_a_valid_journal(path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """One write of `room` bytes succeeds, then none: earlier records stay whole, and the job can continue."""
    write(path, [0, 1])
    before, real = path.read_bytes(), os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        left = len(before) + room - offset
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:left], offset)

    with Journal(path) as journal:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            journal.add(Result(2, "a long text " * 10))
        assert path.read_bytes() == before
        assert journal.state(2) == TODO
        monkeypatch.undo()
        journal.add(Result(2, "now"))
    assert len(parse(path.read_bytes())) == 4


def test_fsync_when_due(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.job import journal as module

    now, synced = [1000.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.os, "fsync", lambda file: synced.append(now[0]))
    with Journal(path) as journal:
        journal.begin(MANIFEST, 0)
        synced.clear()
        for index in range(40):  # a sweep every 0.1 s
            now[0] += 0.1
            journal.add(Result(index))
            journal.sync(at_once=False)
        assert len(synced) in (3, 4)
        assert min(b - a for a, b in pairwise(synced)) >= 1 - 1e-9
        count = len(synced)
        journal.sync()
        journal.sync()  # nothing new to be put there
        assert len(synced) <= count + 1


def test_a_listener_that_raises_leaves_no_locked_journal(path: Path, written: list[Result]) -> None:
    def fail(report: Activity) -> None:
        if report.name == "message":
            raise ZeroDivisionError

    replace(path, path.read_bytes()[:-9] + b"0" * 8 + b"\n")
    (prompts := path.with_name("in.jsonl")).write_text('{"prompt": "a"}\n' * ROWS)
    with InputRows(prompts) as rows:
        with reporting(fail), pytest.raises(ZeroDivisionError):
            open_job(rows, path.with_name("out.jsonl"))
        with open_job(rows, path.with_name("out.jsonl")) as job:
            assert job.done + job.failed == ROWS - 1
