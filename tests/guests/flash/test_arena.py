"""The memory of a layer's records, against a dict of neurons that knows nothing of rows."""

import numpy as np
import pytest

from bench.flash.ladder import WindowArena
from flexengine.guests.flash.neurons import Arena
from tests.helpers.arenas import held

TRACES = 4_000


class Known:
    """Neurons in memory, with the step of their last use: what should be there, in plain words."""

    def __init__(self, room: int, window: int | None) -> None:
        self.room, self.window, self.used, self.step = room, window, dict[int, int](), 0

    def fetch(self, neurons: set[int]) -> set[int] | None:
        missing = neurons - set(self.used)
        if len(neurons) > self.room:
            return None
        self.step += 1
        self.used.update(dict.fromkeys(neurons & set(self.used), self.step))
        if self.window is not None:
            gone = [n for n, last in self.used.items() if last <= self.step - self.window]
            for n in gone:
                del self.used[n]
        self.used.update(dict.fromkeys(missing, self.step))
        return missing


@pytest.mark.parametrize("part", range(4))
def test_arena_against_a_dict(part: int) -> None:
    random = np.random.default_rng(part)
    for _ in range(TRACES // 4):
        neurons, room = int(random.integers(1, 40)), int(random.integers(1, 30))
        window = int(random.integers(1, 6)) if random.random() < 0.5 else None
        arena = Arena(neurons, room) if window is None else WindowArena(neurons, room, window)
        known = Known(room, window)
        row_of = dict[int, int]()  # what a reader of the answers alone would know
        for _ in range(int(random.integers(1, 12))):
            wanted = np.flatnonzero(random.random(neurons) < random.random())
            expected = known.fetch(set(wanted.tolist()))
            if expected is None:
                continue
            found = arena.fetch(wanted)
            assert found.neurons.tolist() == sorted(expected)
            assert len(set(found.rows.tolist())) == len(expected)
            row_of = {n: row for n, row in row_of.items() if row not in found.rows}
            row_of.update(zip(found.neurons.tolist(), found.rows.tolist(), strict=True))
            assert arena.rows(wanted).tolist() == [row_of[n] for n in wanted.tolist()]  # nothing wanted was overwritten
            inside = set(held(arena).tolist())
            assert inside <= set(known.used)
            assert len(inside) == min(len(known.used), room)
            gone = [known.used[n] for n in set(known.used) - inside]
            free = [known.used[n] for n in inside]
            assert not gone or max(gone) <= min(free, default=known.step)  # the least recently used left
            for n in set(known.used) - inside:
                del known.used[n]


def test_a_window_reads_what_the_arithmetic_says() -> None:
    """New neurons per token = s_agg(k + 1) - s_agg(k): the unions of k + 1 and of k successive tokens."""
    random, neurons, tokens, window = np.random.default_rng(0), 200, 60, 5
    active = random.random((tokens, neurons)) < np.linspace(0.01, 0.3, neurons)
    arena = WindowArena(neurons, neurons, window)
    read = [len(arena.fetch(np.flatnonzero(active[t])).neurons) for t in range(tokens)]
    for t in range(window, tokens):
        longer, shorter = active[t - window : t + 1].any(0).sum(), active[t - window : t].any(0).sum()
        assert read[t] == longer - shorter


def test_more_neurons_than_rows_come_in_parts() -> None:
    arena = Arena(10, 3)
    arena.fetch(np.array([8, 9]))
    for part in (np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([6])):
        arena.fetch(part)
        assert set(part.tolist()) <= set(held(arena).tolist())
    assert held(arena).tolist() == [4, 5, 6]


@pytest.mark.parametrize(("room", "each"), [(2, 1), (3, 1), (17, 8), (64, 32), (100, 7), (400, 50)])
def test_overlapping_runs(room: int, each: int) -> None:
    """The rows of a run stay while the next one is fetched, and neurons in memory are read again only if they are more
    than the rows that two runs leave."""
    random = np.random.default_rng(room)
    for _ in range(30):
        arena = Arena(1000, room)
        arena.fetch(np.sort(random.choice(1000, int(random.integers(room + 1)), replace=False)))
        wanted = np.sort(random.choice(1000, int(random.integers(room + 1, 1001)), replace=False))
        kept = min(room - 2 * each, len(np.intersect1d(held(arena), wanted)))
        runs, read, before = arena.overlapping(wanted, each), 0, np.empty(0, np.int64)
        assert np.concatenate(runs).tolist() == wanted.tolist()
        for run in runs:
            rows = arena.rows(before)
            missing = arena.fetch(run)
            assert len(missing.neurons) <= each
            assert arena.rows(before).tolist() == rows.tolist()
            assert not np.intersect1d(missing.rows, rows).size
            assert (arena.rows(run) >= 0).all()
            read, before = read + len(missing.neurons), run
        assert read <= len(wanted) - kept
        assert len(runs) <= -(-(len(wanted) - kept) // each)


def test_reserved_neurons_leave_last() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        room = int(random.integers(1, 12))
        arena = Arena(20, room)
        for _ in range(5):
            wanted = np.flatnonzero(random.random(20) < 0.6)
            arena.reserve(wanted, len(wanted))
            for at, neuron in enumerate(wanted):
                before, later = set(held(arena).tolist()), set(wanted[at + 1 :].tolist())
                assert len(arena.fetch(wanted[at : at + 1]).neurons) == (neuron not in before)
                gone, stayed = before - set(held(arena).tolist()), before & set(held(arena).tolist())
                assert not gone & later or stayed <= later
