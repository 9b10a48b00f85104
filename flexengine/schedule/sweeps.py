"""Sweep after sweep: admission by forecast, re-formed gpu_batches, departures. Pure bookkeeping, no tensors, no clock.

The engine tells it what was sampled; `simulate` lets every sequence run to its limit.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flexengine.policy import TIERS, Policy
from flexengine.schedule.order import Batch, Growing, Piece, entrants, form_batches, peak_pages, split_prompt
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import place


@dataclass
class Sequence:
    """One prompt and what it generates, in numbers.

    Attributes:
        cached: tokens whose KV is stored.
        home: tier of that KV.
        pages: page ids of each pool of that tier.
        copied: of each pool, the shared page whose tokens the page being filled begins with; -1: none.
        prompt: number of its prompt, None if no other sequence has it. Sequences of one prompt that enter together
            share the prompt's pages.
        source: the sequence that computes this one's prompt in the coming sweep, if another does.
        first: id of the first of the sequences that share the prompt's pages.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    cached: int = 0
    generated: int = 0
    home: str = ""
    pages: list[list[int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    prompt: int | None = None
    source: "Sequence | None" = None
    first: int = -1

    @property
    def pending(self) -> int:
        """Tokens the coming sweep computes: the prompt, or the last sampled token."""
        return 1 if self.generated else self.prompt_tokens

    def growing(self, follows: bool) -> Growing:
        """Return how it will grow. follows: whether another sequence counts the pages that they share."""
        shared = self.prompt_tokens if follows else 0
        return Growing(self.cached + self.pending, self.max_tokens - self.generated, shared)

    @property
    def peak_tokens(self) -> int:
        """Most tokens ever cached; the last sampled token's KV is never needed."""
        return self.prompt_tokens + self.max_tokens - 1


class Sweeps:
    """The sequences waiting and alive, and the batches of each sweep.

    Attributes:
        pools: by tier, a pool for each group of layers that see equally many tokens.
    """

    def __init__(self, policy: Policy, pools: Mapping[str, tuple[Pool, ...]]) -> None:
        self.policy, self.pools = policy, pools
        homes = place([1] * policy.block_size, policy.cache)
        self.places = {tier: homes.count(tier) for tier in TIERS}
        self.waiting: deque[Sequence] = deque()
        self.live: dict[int, Sequence] = {}
        self.sweep = -1

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.live

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def begin(self, claim: Callable[[Sequence, int], None]) -> list[Batch]:
        """Admit waiting sequences, then form the sweep's batches.

        Args:
            claim: called with every live sequence and its cached tokens after the sweep; takes the pages for them.
        """
        self.sweep += 1
        policy = self.policy
        room = entrants(policy.schedule, len(self.live), policy.gpu_batch_size, policy.num_gpu_batches)
        there = {tier: self._growing(tier) for tier in self.pools}
        sources: dict[tuple[int | None, str], Sequence] = {}  # by prompt and tier: who computes it
        while room > 0 and self.waiting and (home := self._home_for(self.waiting[0], there, sources)):
            sequence = self.waiting.popleft()
            sequence.home, sequence.source = home, sources.get((sequence.prompt, home))
            sequence.first = sequence.source.id if sequence.source else sequence.id
            if sequence.prompt is not None:
                sources.setdefault((sequence.prompt, home), sequence)
            self.live[sequence.id] = sequence
            there[home].append(sequence.growing(sequence.source is not None))
            room -= 1
        for sequence in self.live.values():
            claim(sequence, sequence.cached + sequence.pending)
        return self._batches()

    def _growing(self, tier: str) -> list[Growing]:
        """Return how the live sequences of a tier will grow. Sequences that share pages have as many sweeps left: the
        first of those that are alive counts the pages."""
        firsts, found = set[int](), list[Growing]()
        for sequence in self.live.values():
            if sequence.home == tier:
                found.append(sequence.growing(sequence.first in firsts))
                firsts.add(sequence.first)
        return found

    def _home_for(
        self, sequence: Sequence, there: dict[str, list[Growing]], sources: Mapping[tuple[int | None, str], Sequence]
    ) -> str | None:
        """Return the first tier with a free place and enough pages at the forecast peak, or None.

        Args:
            there: by tier, the sequences that live there.
            sources: by prompt and tier, the sequences that compute a prompt in the coming sweep.
        """
        for tier, pools in self.pools.items():
            if len(there[tier]) >= self.places[tier]:
                continue
            if any(pool.batch_pages and pool.held(sequence.peak_tokens) > pool.batch_pages for pool in pools):
                continue
            growing = sequence.growing((sequence.prompt, tier) in sources)
            if all(peak_pages([*there[tier], growing], pool) <= pool.pages for pool in pools):
                return tier
        return None

    @property
    def joining(self) -> list[Sequence]:
        """The sequences whose prompt another computes in the sweep in progress."""
        return [s for s in self.live.values() if s.source is not None]

    def _batches(self) -> list[Batch]:
        policy, formed = self.policy, list[tuple[tuple[Piece, ...], str, bool]]()
        for tier, pools in self.pools.items():
            computed = (s for s in self.live.values() if s.home == tier and s.source is None)
            there = sorted(computed, key=lambda s: (s.pending > 1, s.cached))
            delegated = [s for s in there if s.generated] if policy.delegate and tier == "host" else []
            # Pages of delegated sequences pass through no buffer, which is what bounds those of a gpu_batch.
            formed += [(batch, tier, True) for batch in self._formed(delegated, ())]
            rest = [s for s in there if not s.generated] if delegated else there
            formed += [(batch, tier, False) for batch in self._formed(rest, pools)]
        hidden = place([sum(p.count for p in batch) for batch, _, _ in formed], policy.activations)
        return [Batch(pieces, tier, home, where) for (pieces, tier, where), home in zip(formed, hidden, strict=True)]

    def _formed(self, sequences: list[Sequence], pools: tuple[Pool, ...]) -> list[tuple[Piece, ...]]:
        policy, pieces = self.policy, list[Piece]()
        for s in sequences:
            pieces += split_prompt(s.id, s.cached, s.pending, policy.prefill_tokens)
        return form_batches(pieces, policy.gpu_batch_size, policy.prefill_tokens, pools)

    def advance(self, batches: list[Batch], ended: set[int]) -> list[Sequence]:
        """Books one computed sweep; returns who left: sequences in `ended` and those at their limit."""
        for piece in (p for b in batches for p in b.pieces):
            sequence = self.live[piece.sequence]
            sequence.cached += piece.count
            sequence.generated += piece.final
        for sequence in self.joining:
            assert sequence.source is not None
            sequence.cached, sequence.generated = sequence.source.cached, sequence.source.generated
            sequence.source = None
        gone = [s for s in self.live.values() if s.id in ended or s.generated >= s.max_tokens]
        for sequence in gone:
            del self.live[sequence.id]
        return gone

    @property
    def another(self) -> bool:
        """Whether a sweep after the one in progress is foreseen (end-of-sequence tokens apart)."""
        return bool(self.waiting) or any(s.max_tokens - s.generated > 1 for s in self.live.values())
