"""guests.flash.reader: pieces against the bytes, their order, stops and errors with a disk that waits at each call."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexengine.guests.flash import reader
from flexengine.guests.flash.reader import ExpertReads, Pair, pieces
from flexengine.tier.base import Region

PIECE = 64  # bytes
SECONDS = 30


class Disk:
    """Regions of tensors. Each call waits until `go` lets it end, and is noted when it begins."""

    def __init__(self) -> None:
        self.began: queue.Queue[list[Pair]] = queue.Queue()
        self.may_end: queue.Queue[BaseException | None] = queue.Queue()

    def load_all(self, pairs: list[Pair]) -> None:
        self.began.put(pairs)
        if (error := self.may_end.get(timeout=SECONDS)) is not None:
            raise error
        for region, target in pairs:
            target.copy_(region.place[region.start : region.start + region.nbytes].view(region.dtype))

    def next(self) -> tuple[int, int]:
        """Wait until a call begins. Return the first byte that it reads, and the number of its bytes."""
        pairs = self.began.get(timeout=SECONDS)
        return pairs[0][0].start, sum(region.nbytes for region, _ in pairs)

    def go(self, error: BaseException | None = None) -> None:
        self.may_end.put(error)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE", PIECE)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def reads(disk: Disk) -> Iterator[ExpertReads]:
    made: Any = disk
    found = ExpertReads(made, None)
    yield found
    disk.go()
    found.close()


def expert(start: int, count: int) -> tuple[list[Pair], Tensor, Tensor]:
    """Return one pair of `count` pieces at byte `start`, its target, and the expected content."""
    source = torch.arange(start + count * PIECE).to(torch.uint8)
    target = torch.zeros(count * PIECE, dtype=torch.uint8)
    return [(Region(source, start, count * PIECE, torch.uint8), target)], target, source[start:]


@pytest.mark.parametrize("sizes", [[10], [64], [65], [30, 30, 30], [200, 8, 8, 130], [64, 64], []])
def test_pieces(sizes: list[int]) -> None:
    """Pieces are at most PIECE bytes, and together they are all elements in order."""
    starts = [1000 * i for i in range(len(sizes))]
    pairs = [(Region(None, start, 2 * n, torch.int16), torch.zeros(n)) for start, n in zip(starts, sizes, strict=True)]
    found = list(pieces(pairs))
    assert all(0 < sum(region.nbytes for region, _ in run) <= PIECE for run in found)
    covered = [byte for run in found for region, _ in run for byte in range(region.start, region.start + region.nbytes)]
    assert covered == [s + i for s, n in zip(starts, sizes, strict=True) for i in range(2 * n)]
    for run in found:
        for _, target in run:
            target += 1
    assert all(torch.equal(target, torch.ones_like(target)) for _, target in pairs)


def test_a_needed_read_is_one_call(disk: Disk, reads: ExpertReads) -> None:
    pairs, target, expected = expert(0, 5)
    read = reads.begin(pairs)
    assert disk.next() == (0, 5 * PIECE)
    disk.go()
    read.done.result(SECONDS)
    assert torch.equal(target, expected)


def test_an_early_read_stops_between_pieces(disk: Disk, reads: ExpertReads) -> None:
    early, _, _ = expert(0, 5)
    needed, target, expected = expert(1000, 2)
    wrong = reads.begin(early, early=True)
    assert disk.next() == (0, PIECE)
    disk.go()
    assert disk.next() == (PIECE, PIECE)
    reads.stop(wrong)
    assert wrong.nbytes == 2 * PIECE
    read = reads.begin(needed)
    disk.go()
    assert disk.next() == (1000, 2 * PIECE)
    disk.go()
    read.done.result(SECONDS)
    assert torch.equal(target, expected)
    assert not wrong.done.done()
    assert disk.began.empty()


def test_a_needed_read_waits_for_one_piece_of_an_early_read(disk: Disk, reads: ExpertReads) -> None:
    early, target, expected = expert(0, 3)
    guessed = reads.begin(early, early=True)
    assert disk.next() == (0, PIECE)
    needed = reads.begin(expert(1000, 2)[0])
    disk.go()
    assert disk.next() == (1000, 2 * PIECE)
    disk.go()
    needed.done.result(SECONDS)
    for i in (1, 2):
        assert disk.next() == (i * PIECE, PIECE)
        disk.go()
    guessed.done.result(SECONDS)
    assert torch.equal(target, expected)


def test_a_right_guess_goes_on(disk: Disk, reads: ExpertReads) -> None:
    """After its piece, and after reads that were needed before it, but before other early ones."""
    first, target, expected = expert(0, 4)
    guessed, other = reads.begin(first, early=True), reads.begin(expert(2000, 1)[0], early=True)
    assert disk.next() == (0, PIECE)
    needed = reads.begin(expert(1000, 2)[0])
    reads.need(guessed)
    assert guessed.nbytes == PIECE
    for call in ((1000, 2 * PIECE), (PIECE, 3 * PIECE), (2000, PIECE)):
        disk.go()
        assert disk.next() == call
    disk.go()
    for read in (guessed, other, needed):
        read.done.result(SECONDS)
    assert torch.equal(target, expected)
    reads.need(guessed)
    reads.stop(guessed)
    assert guessed.nbytes == 4 * PIECE


@pytest.mark.parametrize("early", [False, True])
def test_an_error_ends_its_read_only(disk: Disk, reads: ExpertReads, early: bool) -> None:
    bad = reads.begin(expert(0, 3)[0], early)
    good = reads.begin(expert(1000, 1)[0], early)
    disk.next()
    disk.go(OSError("planted"))
    assert disk.next() == (1000, PIECE)
    disk.go()
    good.done.result(SECONDS)
    with pytest.raises(OSError, match="planted"):
        bad.done.result(SECONDS)
    assert disk.began.empty()


def test_an_error_of_a_stopped_read_is_dropped(disk: Disk, reads: ExpertReads) -> None:
    wrong = reads.begin(expert(0, 3)[0], early=True)
    disk.next()
    reads.stop(wrong)
    disk.go(OSError("planted"))
    read = reads.begin(expert(1000, 1)[0])
    assert disk.next() == (1000, PIECE)
    disk.go()
    read.done.result(SECONDS)


def test_closing_ends_after_the_piece_that_is_read(disk: Disk) -> None:
    made: Any = disk
    reads = ExpertReads(made, None)
    reads.begin(expert(0, 100)[0], early=True)
    reads.begin(expert(0, 100)[0], early=True)
    disk.next()
    disk.go()
    disk.next()
    disk.go()
    disk.go()  # for a piece that may begin before the queue is closed
    reads.close()
    assert disk.began.qsize() <= 1
