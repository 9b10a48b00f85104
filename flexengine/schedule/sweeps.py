"""Sweep after sweep: admission by forecast, re-formed gpu_batches, departures. Pure bookkeeping, no tensors, no clock.

The engine tells it what was sampled; `simulate` lets every sequence run to its limit.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flexengine.policy import TIERS, Policy
from flexengine.schedule.order import Batch, Growing, Piece, entrants, form_batches, pages_for, peak_pages, split_prompt
from flexengine.schedule.place import place


@dataclass
class Sequence:
    """One prompt and what it generates, in numbers. `cached`: tokens whose KV is stored; `home`: tier of that KV."""

    id: int
    prompt_tokens: int
    max_tokens: int
    cached: int = 0
    generated: int = 0
    home: str = ""
    pages: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens the coming sweep computes: the prompt, or the last sampled token."""
        return 1 if self.generated else self.prompt_tokens

    @property
    def growing(self) -> Growing:
        return Growing(self.cached + self.pending, self.max_tokens - self.generated)

    @property
    def peak_tokens(self) -> int:
        """Most tokens ever cached; the last sampled token's KV is never needed."""
        return self.prompt_tokens + self.max_tokens - 1


@dataclass(frozen=True)
class Pool:
    """Page pool of one tier as admission sees it: pages per layer, tokens per page, most pages of one gpu_batch."""

    pages: int
    page_tokens: int
    batch_pages: int | None = None


class Sweeps:
    """The sequences waiting and alive, and the batches of each sweep."""

    def __init__(self, policy: Policy, pools: dict[str, Pool]) -> None:
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
        """Admits who may enter, then forms the sweep's batches; `claim(sequence, pages)` gives it its pages."""
        self.sweep += 1
        policy = self.policy
        room = entrants(policy.schedule, len(self.live), policy.gpu_batch_size, policy.num_gpu_batches)
        there = {tier: [s.growing for s in self.live.values() if s.home == tier] for tier in self.pools}
        while room > 0 and self.waiting and (home := self._home_for(self.waiting[0], there)):
            sequence = self.waiting.popleft()
            sequence.home = home
            self.live[sequence.id] = sequence
            there[home].append(sequence.growing)
            room -= 1
        for sequence in self.live.values():
            claim(sequence, pages_for(sequence.cached + sequence.pending, self.pools[sequence.home].page_tokens))
        return self._batches()

    def _home_for(self, sequence: Sequence, there: dict[str, list[Growing]]) -> str | None:
        """The tier that can take it in, if any. there: who lives in each."""
        for tier, pool in self.pools.items():
            if len(there[tier]) >= self.places[tier]:
                continue
            if pool.batch_pages and pages_for(sequence.peak_tokens, pool.page_tokens) > pool.batch_pages:
                continue
            if peak_pages([*there[tier], sequence.growing], pool.page_tokens) <= pool.pages:
                return tier
        return None

    def _batches(self) -> list[Batch]:
        policy, formed = self.policy, list[tuple[tuple[Piece, ...], str, bool]]()
        for tier, pool in self.pools.items():
            there = sorted((s for s in self.live.values() if s.home == tier), key=lambda s: (s.pending > 1, s.cached))
            delegated = [s for s in there if s.generated] if policy.delegate and tier == "host" else []
            # Pages of delegated sequences pass through no buffer, which is what bounds those of a gpu_batch.
            formed += [(batch, tier, True) for batch in self._formed(delegated, replace(pool, batch_pages=None))]
            rest = [s for s in there if not s.generated] if delegated else there
            formed += [(batch, tier, False) for batch in self._formed(rest, pool)]
        hidden = place([sum(p.count for p in batch) for batch, _, _ in formed], policy.activations)
        return [Batch(pieces, tier, home, where) for (pieces, tier, where), home in zip(formed, hidden, strict=True)]

    def _formed(self, sequences: list[Sequence], pool: Pool) -> list[tuple[Piece, ...]]:
        policy, pieces = self.policy, list[Piece]()
        for s in sequences:
            pieces += split_prompt(s.id, s.cached, s.pending, policy.prefill_tokens)
        return form_batches(pieces, policy.gpu_batch_size, policy.prefill_tokens, pool.page_tokens, pool.batch_pages)

    def advance(self, batches: list[Batch], ended: set[int]) -> list[Sequence]:
        """Books one computed sweep; returns who left: sequences in `ended` and those at their limit."""
        for piece in (p for b in batches for p in b.pieces):
            sequence = self.live[piece.sequence]
            sequence.cached += piece.count
            sequence.generated += piece.final
        gone = [s for s in self.live.values() if s.id in ended or s.generated >= s.max_tokens]
        for sequence in gone:
            del self.live[sequence.id]
        return gone

    @property
    def another(self) -> bool:
        """Whether a sweep after the one in progress is foreseen (end-of-sequence tokens apart)."""
        return bool(self.waiting) or any(s.max_tokens - s.generated > 1 for s in self.live.values())
