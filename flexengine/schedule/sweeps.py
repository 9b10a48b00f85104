"""Admission of sequences by forecast, gpu_batches of every sweep, and removal of ended sequences.

A waiting sequence enters the block if the schedule lets it (`entrants`), and if the pages of all live sequences still
fit when each has grown to its end (`peak_pages`).

The engine calls `Sweeps.begin` before a sweep and `Sweeps.advance` after it, with the sequences that ended.

The block may be cut into cohorts, each with sweeps of its own. While one stage of a pipeline computes a sweep of one
cohort, another stage computes a sweep of another cohort. A machine without a pipeline has one cohort.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from flexengine.places import place_of, workers_of
from flexengine.policy import Policy
from flexengine.schedule.batches import Batch, Piece, form_batches, interleaved, split_prompt
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import assign_tiers, cache_homes
from flexengine.schedule.prefixes import Stem, Tokens, stems_above

ON_GRID = "flexengine.schedule.grain:split_on_grid"  # imported for models that keep states beside keys and values
FOREVER = 1 << 32  # sweeps of a common prefix that waiting sequences will share


class Growing(NamedTuple):
    """A sequence, or a common prefix of sequences, in the forecast of KV pages."""

    tokens: int  # tokens cached after the next sweep
    sweeps: int  # sweeps until the sequence, or the last one with the prefix, ends
    # prompt tokens on shared pages, which the entry of a common prefix counts; 0 if none. That prefix ends no earlier.
    shared: int = 0
    grows: int = 1  # tokens added per sweep: 1, or 0 for a common prefix


def entrants(schedule: str, live: int, gpu_batch_size: int, num_gpu_batches: int) -> int:
    """Return the maximum number of sequences that may enter in the next sweep.

    Args:
        schedule: row: a gpu_batch runs to its end before the next one enters. zigzag: a whole block enters together
            when the previous block has ended (FlexGen 4.2). diagonal: at most gpu_batch_size sequences enter per sweep
            (FlexGen appendix A.1). continuous: sequences enter as soon as the block has room.
    """
    block = gpu_batch_size * num_gpu_batches
    if schedule == "row":
        return 0 if live else gpu_batch_size
    if schedule == "zigzag":
        return 0 if live else block
    if schedule == "diagonal":
        return min(gpu_batch_size, block - live)
    return block - live


def peak_pages(sequences: list[Growing], pool: Pool, late: int = 0) -> int:
    """Return the most pages in use if no sequence enters. Shared pages are counted once.

    The number of pages falls only when a sequence or a common prefix ends, so the maximum occurs in the last sweep of
    one of them, or `late` sweeps later.

    Args:
        late: sweeps for which an ended sequence keeps its pages.
    """
    if not sequences:
        return 0
    tokens, sweeps, shared, grows = np.array(sequences).T
    ends = np.unique([sweeps, sweeps + late])[:, None]
    held = pool.held(tokens + (np.minimum(ends, sweeps) - 1) * grows) - pool.num_shared(shared)
    return int(np.where(sweeps + late >= ends, held, 0).sum(axis=1).max())


@dataclass(eq=False)
class Sequence:
    """Token counts of one sequence, or of a common prefix of several (`Trunk`)."""

    id: int
    prompt_tokens: int  # tokens of the prompt
    max_tokens: int  # most tokens to generate
    stem: Stem | None = None  # the longest prefix that it shares; None if it shares none
    scored: int = 0  # last tokens of the prompt, which predict given tokens; 0 if nothing is scored
    # Whether scored tokens, except the first, are computed one after the other, like sampled tokens. So they read the
    # stored KV of all earlier tokens.
    by_step: bool = False
    cached: int = 0  # tokens whose KV is stored
    generated: int = 0  # tokens generated so far
    home: str = ""  # tier of the KV cache; "" before the sequence enters
    source: "Trunk | None" = None  # the trunk whose pages it shares; None if it shares none
    cohort: int = 0  # number of its cohort, from the sweep in which it enters

    @property
    def pending(self) -> int:
        """Number of tokens that the next sweep computes: those of the prompt, or the last sampled token."""
        return 1 if self.generated else self.prompt_tokens - self.cached

    @property
    def level(self) -> int:
        """Number of trunks that the next sweep computes before this sequence."""
        return self.source.level + 1 if self.source and self.source.pending else 0

    @property
    def shared(self) -> int:
        """Number of prompt tokens on pages that a trunk counts."""
        return self.stem.end if self.stem else 0

    @property
    def peak_tokens(self) -> int:
        """Most tokens ever cached. The KV of the last sampled token is never needed."""
        return self.prompt_tokens + self.max_tokens - 1


@dataclass(eq=False)
class Trunk(Sequence):
    """A stem on one tier: its tokens are computed once, and its pages are kept while sequences share them."""

    users: dict[int, Sequence] = field(default_factory=dict)  # live sequences that share it, by id

    @property
    def pending(self) -> int:
        return self.prompt_tokens - self.cached


class Sweeps:
    """The waiting and the live sequences, and the gpu_batches of each sweep.

    A stem is computed in the sweep in which its first sequence enters, in an earlier gpu_batch. Its pages are kept
    until all sequences that share it have ended. If kept pages leave no room for the next sequence, they are freed, and
    the stem is computed again later. Sequences of all cohorts share a stem, as every stage computes sweeps in order.

    Attributes:
        pools: by tier, from near to far, a pool for each group of layers that see equally many tokens.
        cohorts: policies of the cohorts. Together their gpu_batches are those of the block.
        places: by cohort and tier, most sequences whose KV cache is there.
        waiting: sequences that have not entered, or that wait again, by rising id. So those that share a stem are
            adjacent.
        live: sequences that have entered, by id.
        trunks: by stem and tier, the stems whose pages are kept.
        stems: tokens of each trunk that the sweep begun last computes, by its number.
        sweep: number of the sweep begun last.
    """

    def __init__(self, policy: Policy, pools: Mapping[str, tuple[Pool, ...]], cohorts: int = 1) -> None:
        """Form the cohorts. cohorts: most cohorts; a cohort has at least one gpu_batch."""
        self.policy, self.pools, self.cohorts = policy, pools, cut(policy, cohorts)
        self.places = [cache_homes(cohort, pools) for cohort in self.cohorts]
        grain = max((pool.grain for group in pools.values() for pool in group), default=1)
        self._split = split_prompt if grain == 1 else partial(resolve_name(ON_GRID), grain)
        self.waiting: deque[Sequence] = deque()
        self.live: dict[int, Sequence] = {}
        self.trunks: dict[tuple[Stem, str], Trunk] = {}
        self.stems: dict[int, Tokens] = {}
        self.sweep, self._current = -1, 0
        self._entered: WeakKeyDictionary[Stem, int] = WeakKeyDictionary()  # number of a stem's sequences that entered
        self._trunks_made = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.live

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def begin(
        self, claim: Callable[[Sequence, int], None], release: Callable[[Sequence], None] = lambda sequence: None,
        cohort: int = 0,
    ) -> list[Batch]:  # fmt: skip
        """Admit waiting sequences to a cohort, then form the batches of its sweep. Return [] if the cohort is empty.

        Args:
            claim: called with every trunk and live sequence, and its cached tokens after the sweep; takes KV pages for
                them. A trunk is claimed before those that share it.
            release: called with a trunk whose pages are given back.
        """
        self.sweep, self._current = self.sweep + 1, cohort
        self._admit()
        if not self.live and self.trunks:  # kept pages leave no room for the next sequence
            self._free(list(self.trunks), release)
            self._admit()
        if not self.live and self.waiting:  # without its stem, the next sequence takes fewer pages
            self._note_entry(self.waiting[0].stem)
            self.waiting[0].stem = None
            self._admit()
        pending = {trunk: stem for (stem, _), trunk in self.trunks.items() if trunk.pending}
        for sequence in (*pending, *self._members):
            claim(sequence, sequence.cached + sequence.pending)
        batches = self._batches()
        self.stems = {trunk.id: stem.tokens for trunk, stem in pending.items()}
        for trunk in pending:
            trunk.cached = trunk.prompt_tokens
        return batches

    @property
    def _members(self) -> list[Sequence]:
        """The live sequences of the cohort whose sweep was begun last."""
        return [s for s in self.live.values() if s.cohort == self._current]

    def _admit(self) -> None:
        policy, members = self.cohorts[self._current], self._members
        room = entrants(policy.schedule, len(members), policy.gpu_batch_size, policy.num_gpu_batches)
        if len(self.cohorts) > 1:  # few sequences are divided evenly
            room = min(room, -(-(len(self.live) + len(self.waiting)) // len(self.cohorts)) - len(members))
        if not self.waiting or room <= 0:
            return
        counts = {tier: sum(s.home == tier for s in members) for tier in self.pools}
        forecast = {tier: self._forecast(tier) for tier in self.pools}
        while room > 0 and self.waiting and (entry := self._entry(self.waiting[0], counts, forecast)):
            sequence, (home, growing) = self.waiting.popleft(), entry
            self._enter(sequence, home)
            counts[home] += 1
            forecast[home] += growing
            room -= 1

    def _enter(self, sequence: Sequence, home: str) -> None:
        sequence.home, sequence.source = home, self._trunk(sequence.stem, home)
        sequence.cached, sequence.cohort = sequence.shared, self._current
        self._note_entry(sequence.stem)
        for stem in stems_above(sequence.stem):
            self.trunks[stem, home].users[sequence.id] = sequence
        self.live[sequence.id] = sequence

    def _trunk(self, stem: Stem | None, tier: str) -> Trunk | None:
        """Return the trunk of a stem on a tier. Add it, and those above it, if there is none."""
        if stem is None or (stem, tier) in self.trunks:
            return None if stem is None else self.trunks[stem, tier]
        above = self._trunk(stem.above, tier)
        self._trunks_made += 1
        trunk = Trunk(-self._trunks_made, stem.end, 0, stem.above, cached=stem.start, home=tier, source=above)
        self.trunks[stem, tier] = trunk
        return trunk

    def _note_entry(self, stem: Stem | None, count: int = 1) -> None:
        """Count a sequence that enters at its stems, or that waits again. stem: the sequence's longest stem."""
        for each in stems_above(stem):
            self._entered[each] = self._entered.get(each, 0) + count

    def _waits(self, stem: Stem) -> bool:
        return self._entered.get(stem, 0) < stem.sequences

    def _free(self, keys: Iterable[tuple[Stem, str]], release: Callable[[Sequence], None]) -> None:
        for key in keys:
            release(self.trunks.pop(key))

    def _forecast(self, tier: str) -> list[Growing]:
        forecast = []
        for s in self.live.values():
            if s.home == tier:
                forecast.append(Growing(s.cached + s.pending, s.max_tokens - s.generated, s.shared))
        for (stem, home), trunk in self.trunks.items():
            if home == tier:
                last = max((s.max_tokens - s.generated for s in trunk.users.values()), default=0)
                sweeps = FOREVER if self._waits(stem) else last
                forecast.append(Growing(trunk.prompt_tokens, sweeps, trunk.shared, grows=0))
        return forecast

    def _entry(
        self, sequence: Sequence, counts: Mapping[str, int], forecast: Mapping[str, list[Growing]]
    ) -> tuple[str, list[Growing]] | None:
        """Return the first tier with a free place and enough pages at the forecast peak, and the forecast of the
        sequence and of the trunks that it needs there. Return None if there is no such tier. counts: by tier, number of
        live sequences. forecast: by tier, as `_forecast`."""
        # Among attention workers, those in memory come before those with pages in a file, and then the one with the
        # fewest cached tokens first.
        loads = {worker: sum(each.tokens for each in forecast[worker]) for worker in workers_of(self.pools)}
        workers = iter(sorted(loads, key=lambda worker: (worker.filed, loads[worker])))
        for tier in [next(workers) if place_of(tier).worker else tier for tier in self.pools]:
            pools = self.pools[tier]
            # A worker with pages in a file takes what is left of the share of all workers.
            taken = sum(counts[worker] for worker in workers_of(self.pools)) if place_of(tier).filed else counts[tier]
            if taken >= self.places[self._current].get(tier, 0):
                continue
            if any(pool.batch_pages and pool.held(sequence.peak_tokens) > pool.batch_pages for pool in pools):
                continue
            new = [Growing(sequence.prompt_tokens, sequence.max_tokens, sequence.shared)]
            for stem in stems_above(sequence.stem):
                if (stem, tier) not in self.trunks:
                    waits = self._entered.get(stem, 0) + 1 < stem.sequences
                    sweeps = FOREVER if waits else sequence.max_tokens
                    new.append(Growing(stem.end, sweeps, stem.start, grows=0))
            # A cohort's ended sequences keep their pages while the next cohort begins its sweep.
            late = int(len(self.cohorts) > 1)
            if all(peak_pages([*forecast[tier], *new], pool, late) <= pool.pages for pool in pools):
                return tier, new
        return None

    def in_prompt(self, piece: Piece) -> bool:
        """Return whether a piece of the sweep begun last is part of a prompt."""
        return piece.sequence not in self.live or not self.live[piece.sequence].generated

    def _batches(self) -> list[Batch]:
        policy, formed = self.policy, list[tuple[tuple[Piece, ...], str, str]]()
        for tier, pools in self.pools.items():
            trunks = [t for t in self.trunks.values() if t.home == tier and t.pending]
            live = [s for s in self._members if s.home == tier]
            where = policy.attends(tier)
            delegated = [s for s in live if s.generated] if where != "device" else []
            # Buffers limit the pages of a gpu_batch. Pages of delegated sequences pass through no buffer; staging has
            # room for those of any gpu_batch.
            formed += [(batch, tier, where) for batch in self._formed(delegated, ())]
            rest = [s for s in live if not s.generated] if delegated else live
            formed += [(batch, tier, "device") for batch in self._formed([*trunks, *rest], pools)]
        hidden = assign_tiers([sum(p.count for p in batch) for batch, _, _ in formed], policy.activations)
        batches = (Batch(pieces, tier, home, where, policy.queries_first and place_of(where).worker)
                   for (pieces, tier, where), home in zip(formed, hidden, strict=True))  # fmt: skip
        return interleaved(batches)

    def _formed(self, sequences: Iterable[Sequence], pools: tuple[Pool, ...]) -> list[tuple[Piece, ...]]:
        """Return gpu_batches of the sequences' next tokens. Pieces that read KV of other pieces come later."""
        policy, levels = self.policy, defaultdict[int, list[Piece]](list)
        for s in sorted(sequences, key=lambda s: (s.pending > 1, s.cached)):
            if s.generated:
                levels[0].append(Piece(s.id, s.cached, 1, True))
                continue
            level, source = s.level, s.source.id if s.source else None
            steps = max(0, s.scored - 1) if s.by_step else 0
            ends, count = not (isinstance(s, Trunk) or steps), s.pending - steps
            levels[level] += self._split(s.id, s.cached, count, policy.prefill_tokens, ends, source, s.scored - steps)
            for i in range(steps):
                levels[level + i + 1].append(Piece(s.id, s.cached + count + i, 1, i + 1 == steps, scored=1))
        formed = list[tuple[Piece, ...]]()
        for _, pieces in sorted(levels.items()):
            formed += form_batches(pieces, policy.gpu_batch_size, policy.prefill_tokens, pools)
        return formed

    def advance(
        self, batches: list[Batch], ended: set[int], release: Callable[[Sequence], None] = lambda sequence: None
    ) -> list[Sequence]:
        """Record a computed sweep. Return the sequences that leave: those in `ended`, and those at their limit.
        release: called with each sequence that leaves, then with each trunk that no sequence shares any more."""
        for piece in (p for b in batches for p in b.pieces if p.sequence >= 0):
            sequence = self.live[piece.sequence]
            sequence.cached += piece.count
            sequence.generated += piece.final
        gone = [s for s in self.live.values() if s.id in ended or s.generated >= s.max_tokens]
        for sequence in gone:
            self._leave(sequence, release)
        unused = [key for key, trunk in self.trunks.items() if not trunk.users and not self._waits(key[0])]
        self._free(unused, release)
        return gone

    def lose(self, home: str, release: Callable[[Sequence], None] = lambda sequence: None) -> list[Sequence]:
        """Undo the sweep begun last, which broke off, as the KV cache of a place was lost. For one cohort. Return the
        sequences that the place held; they wait again, in their old order.

        Sequences that entered in this sweep wait again: they have no tokens. Others stay, unless with records, which
        change in place: the next sweep computes the same token of each, and writes the same position of its KV cache.

        Args:
            home: place of the lost KV cache.
            release: called with each sequence that waits again, then with each trunk that is lost or was not computed.
        """
        changed = any(pool.is_record for pools in self.pools.values() for pool in pools)
        lost = [s for s in self.live.values() if changed or s.home == home]
        again = [s for s in self.live.values() if changed or s.home == home or not s.generated]
        for sequence in again:
            self._leave(sequence, release)
            self._note_entry(sequence.stem, -1)
            sequence.cached, sequence.generated, sequence.home, sequence.source = 0, 0, "", None
        self._free([key for key, trunk in self.trunks.items() if key[1] == home or trunk.id in self.stems], release)
        self.waiting = deque(sorted([*again, *self.waiting], key=lambda s: s.id))
        return lost

    def _leave(self, sequence: Sequence, release: Callable[[Sequence], None]) -> None:
        del self.live[sequence.id]
        release(sequence)
        for stem in stems_above(sequence.stem):
            del self.trunks[stem, sequence.home].users[sequence.id]

    @property
    def another(self) -> bool:
        """Whether a sweep follows the one begun last, unless end-of-sequence tokens end all sequences."""
        return bool(self.waiting) or any(
            s.max_tokens - s.generated > 1 or s.cohort != self._current for s in self.live.values()
        )


def cut(policy: Policy, cohorts: int) -> list[Policy]:
    """Return the policies of the cohorts of a block: their gpu_batches differ by at most one, and sum to the block's.

    Args:
        policy: policy of the block. With schedule `row` the block is one gpu_batch.
        cohorts: most cohorts.
    """
    batches = policy.block_size // policy.gpu_batch_size
    count = max(1, min(cohorts, batches))
    if count == 1:
        return [policy]
    return [replace(policy, num_gpu_batches=batches // count + (i < batches % count)) for i in range(count)]
