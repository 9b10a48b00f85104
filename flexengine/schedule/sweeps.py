"""Admission of sequences by forecast, gpu_batches of every sweep, and removal of ended sequences.

The engine calls `Sweeps.begin` before a sweep and `Sweeps.advance` after it, with the sequences that ended.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flexengine.policy import Policy
from flexengine.schedule.admission import Growing, entrants, peak_pages
from flexengine.schedule.order import Batch, Piece, form_batches, interleaved, split_prompt
from flexengine.schedule.pages import Pool
from flexengine.schedule.place import assign_tiers, count_by_tier

Key = tuple[int | None, str]  # prompt and tier


@dataclass
class Sequence:
    """Token counts of one sequence.

    Attributes:
        id: number of the sequence.
        prompt_tokens: tokens of the prompt.
        max_tokens: most tokens to generate.
        cached: tokens whose KV is stored.
        generated: tokens generated so far.
        home: tier of the KV cache; "" before the sequence enters.
        prompt: number of the prompt; None if no other sequence has the same prompt. Sequences of one prompt that enter
            together share the prompt's pages.
        source: the sequence that computes the shared prompt in the sweep in progress, or holds its pages; else None.
        first: id of the first of the sequences that share the prompt's pages.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    cached: int = 0
    generated: int = 0
    home: str = ""
    prompt: int | None = None
    source: "Sequence | None" = None
    first: int = -1

    @property
    def pending(self) -> int:
        """Number of tokens that the next sweep computes: the prompt, or the last sampled token."""
        return 1 if self.generated else self.prompt_tokens

    def growing(self, follows: bool) -> Growing:
        """Return the forecast of this sequence. follows: whether another sequence counts the shared pages."""
        shared = self.prompt_tokens if follows else 0
        return Growing(self.cached + self.pending, self.max_tokens - self.generated, shared)

    @property
    def peak_tokens(self) -> int:
        """Most tokens ever cached. The KV of the last sampled token is never needed."""
        return self.prompt_tokens + self.max_tokens - 1


class Sweeps:
    """The waiting and the live sequences, and the gpu_batches of each sweep.

    Samples of one prompt that enter together compute the prompt once. The prompt's pages are kept while more of its
    samples wait. Samples that enter later share the kept pages and only decode.

    Attributes:
        pools: by tier, a pool for each group of layers that see equally many tokens.
        places: by tier, most sequences whose KV cache is there.
        waiting: sequences that have not entered, in order.
        live: sequences that have entered, by id.
        kept: by prompt and tier, a sequence that holds the pages of a prompt but is not computed.
        joined: live sequences that entered in this sweep with the pages of a kept prompt. Their first token is already
            sampled.
        sweep: number of the sweep in progress.
    """

    def __init__(self, policy: Policy, pools: Mapping[str, tuple[Pool, ...]]) -> None:
        self.policy, self.pools = policy, pools
        self.places = count_by_tier(policy.block_size, policy.cache)
        self.waiting: deque[Sequence] = deque()
        self.live: dict[int, Sequence] = {}
        self.kept: dict[Key, Sequence] = {}
        self.joined: list[Sequence] = []
        self.sweep = -1

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.live

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def begin(
        self, claim: Callable[[Sequence, int], None], release: Callable[[Sequence], None] = lambda sequence: None
    ) -> list[Batch]:
        """Admit waiting sequences, then form the sweep's batches.

        Args:
            claim: called with every live sequence and its cached tokens after the sweep; takes KV pages for them.
            release: called with a sequence of `kept`; gives its pages back.
        """
        self.sweep += 1
        sources = self._admit()
        if not self.live and self.kept:  # kept pages leave no room for the next sequence
            self._forget(list(self.kept), release)
            sources = self._admit()
        for sequence in self.live.values():
            claim(sequence, sequence.cached + sequence.pending)
        for sequence in self.joined:
            sequence.source = None
        self._keep(sources, claim)
        self._forget([key for key in self.kept if not self._more_of(key[0])], release)
        return self._batches()

    def _admit(self) -> dict[Key, Sequence]:
        """Let waiting sequences enter while there is room. Return those that compute a prompt of several samples."""
        policy, self.joined = self.policy, []
        room = entrants(policy.schedule, len(self.live), policy.gpu_batch_size, policy.num_gpu_batches)
        sources: dict[Key, Sequence] = {}
        if not self.waiting:
            return sources
        live_by_tier = {tier: self._growing(tier) for tier in self.pools}
        while room > 0 and self.waiting and (home := self._home_for(self.waiting[0], live_by_tier, sources)):
            sequence = self.waiting.popleft()
            key, sequence.home = (sequence.prompt, home), home
            if key in self.kept:
                self.joined.append(sequence)
                sequence.cached, sequence.generated = sequence.prompt_tokens, 1
            sequence.source = sources.get(key) or self.kept.get(key)
            sequence.first = sequence.source.first if sequence.source else sequence.id
            if sequence.prompt is not None and sequence.source is None:
                sources[key] = sequence
            self.live[sequence.id] = sequence
            live_by_tier[home].append(sequence.growing(sequence.source is not None))
            room -= 1
        return sources

    def _more_of(self, prompt: int | None) -> bool:
        """Return whether the next waiting sequence is another sample of a prompt."""
        return bool(self.waiting) and prompt is not None and self.waiting[0].prompt == prompt

    def _keep(self, sources: Mapping[Key, Sequence], claim: Callable[[Sequence, int], None]) -> None:
        """Keep the pages of prompts with waiting samples, if there is room."""
        for key, source in sources.items():
            if not self._more_of(source.prompt) or source.max_tokens < 2:
                continue
            first, (_, tier) = source.id, key
            self.kept[key] = Sequence(-1 - first, source.prompt_tokens, 1, home=tier, source=source, first=first)
            growing = self._growing(tier)
            if all(self._fits(growing, tier, pool) for pool in self.pools[tier]):
                claim(self.kept[key], source.prompt_tokens)
            else:
                del self.kept[key]

    def _forget(self, keys: list[Key], release: Callable[[Sequence], None]) -> None:
        for key in keys:
            release(self.kept.pop(key))

    def _growing(self, tier: str) -> list[Growing]:
        """Return the forecasts of a tier's live sequences. The last sequence to leave counts the pages that several
        share. `_fits` counts kept pages."""
        samples = [s for s in self.live.values() if s.prompt is not None]
        counting = {s.first: s.id for s in sorted(samples, key=lambda s: s.max_tokens - s.generated)}
        counting |= {s.first: s.id for s in self.kept.values()}
        return [s.growing(counting.get(s.first, s.id) != s.id) for s in self.live.values() if s.home == tier]

    def _home_for(
        self, sequence: Sequence, live_by_tier: dict[str, list[Growing]], sources: Mapping[Key, Sequence]
    ) -> str | None:
        """Return the first tier with a free place and enough pages at the forecast peak, or None.

        Args:
            sequence: waits to enter.
            live_by_tier: forecasts of the live sequences.
            sources: sequences that compute a prompt in the next sweep.
        """
        for tier, pools in self.pools.items():
            if len(live_by_tier[tier]) >= self.places.get(tier, 0):
                continue
            if any(pool.batch_pages and pool.held(sequence.peak_tokens) > pool.batch_pages for pool in pools):
                continue
            growing = sequence.growing((sequence.prompt, tier) in sources)
            if (sequence.prompt, tier) in self.kept:
                growing = Growing(sequence.prompt_tokens + 1, sequence.max_tokens - 1, sequence.prompt_tokens)
            if all(self._fits([*live_by_tier[tier], growing], tier, pool) for pool in pools):
                return tier
        return None

    def _fits(self, growing: list[Growing], tier: str, pool: Pool) -> bool:
        """Return whether a pool has enough pages for growing sequences and for kept prompts."""
        kept = sum(pool.held(s.prompt_tokens) for s in self.kept.values() if s.home == tier)
        return peak_pages(growing, pool) + kept <= pool.pages

    @property
    def joining(self) -> list[Sequence]:
        """Sequences, also of `kept`, whose prompt another sequence computes in the sweep in progress."""
        return [s for s in (*self.live.values(), *self.kept.values()) if s.source is not None]

    def first_tokens(self) -> dict[int, list[int]]:
        """Return, by id of each sequence that computes a shared prompt, the ids of the other samples of this prompt.
        Their first tokens are sampled from the same logits."""
        sharing: dict[int, list[int]] = {}
        for s in self.joining:
            assert s.source is not None
            others = [w.id for w in self.waiting if w.prompt == s.source.prompt] if s.id < 0 else [s.id]
            sharing.setdefault(s.source.id, []).extend(others)
        return sharing

    def _batches(self) -> list[Batch]:
        policy, formed = self.policy, list[tuple[tuple[Piece, ...], str, str]]()
        for tier, pools in self.pools.items():
            computed = (s for s in self.live.values() if s.home == tier and s.source is None)
            ordered = sorted(computed, key=lambda s: (s.pending > 1, s.cached))
            where = policy.attends(tier)
            delegated = [s for s in ordered if s.generated] if where != "device" else []
            # Buffers limit the pages of a gpu_batch. Pages of delegated sequences pass through no buffer.
            formed += [(batch, tier, where) for batch in self._formed(delegated, ())]
            rest = [s for s in ordered if not s.generated] if delegated else ordered
            formed += [(batch, tier, "device") for batch in self._formed(rest, pools)]
        hidden = assign_tiers([sum(p.count for p in batch) for batch, _, _ in formed], policy.activations)
        batches = (Batch(pieces, tier, home, where) for (pieces, tier, where), home in zip(formed, hidden, strict=True))
        return interleaved(batches)

    def _formed(self, sequences: list[Sequence], pools: tuple[Pool, ...]) -> list[tuple[Piece, ...]]:
        policy, pieces = self.policy, list[Piece]()
        for s in sequences:
            pieces += split_prompt(s.id, s.cached, s.pending, policy.prefill_tokens)
        return form_batches(pieces, policy.gpu_batch_size, policy.prefill_tokens, pools)

    def advance(self, batches: list[Batch], ended: set[int]) -> list[Sequence]:
        """Record a computed sweep. Return the sequences that leave: those in `ended`, and those at their limit."""
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
        """Whether another sweep follows, unless end-of-sequence tokens end all sequences."""
        return bool(self.waiting) or any(s.max_tokens - s.generated > 1 for s in self.live.values())
