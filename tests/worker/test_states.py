"""State of each sequence: pages and records are taken, shared and given back."""

import pytest

from flexengine.errors import OutOfMemory
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.cache.pools import Pages, SequenceRecords


def test_a_record_is_that_of_the_source() -> None:
    records = SequenceRecords("device", 2)
    trunk = Sequence(-1, 8, 0)
    first, second, alone = (Sequence(i, 9, 4) for i in range(3))
    first.source = second.source = trunk  # type: ignore[assignment]  # only its id is read
    for sequence in (trunk, first, second, first, alone):  # a sweep may be repeated
        records.claim(sequence, 9)
    assert records.number[-1] == records.number[0] == records.number[1] != records.number[2]
    with pytest.raises(OutOfMemory):
        records.claim(Sequence(3, 9, 4), 9)
    records.release(alone)
    records.release(alone)  # it has none
    records.claim(other := Sequence(4, 9, 4), 9)
    for sequence in (first, other, trunk, second):
        records.release(sequence)
    assert records.number == {}
    records.claim(first := Sequence(5, 9, 4), 9)
    records.claim(Sequence(6, 9, 4), 9)  # both records are free again


def test_a_shared_page_is_free_when_the_last_has_given_it_back() -> None:
    pages = Pages("host", 3)
    held = pages.take(2)
    again = pages.share(held)
    pages.give(held)
    assert (pages.used, [pages.is_shared(page) for page in again]) == (2, [False, False])
    pages.give(again)
    assert pages.used == 0
