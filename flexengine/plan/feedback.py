"""What a job really took against what was predicted for the very sweeps it made, lane by lane."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexengine.plan.cost import Cost
from flexengine.plan.layout import Layout
from flexengine.plan.problem import CACHE, HIDDEN, fraction
from flexengine.plan.profile import Array, Profile
from flexengine.schedule.order import Batch
from flexengine.schedule.program import LOADING

TOLERATED = 0.25  # relative error that is let pass
LEAST_SECONDS, LEAST_SWEEPS = 10.0, 8  # of a job, for its error to be called persistent
LEAST_SHARE = 0.1  # of the job's time, for a lane's error to matter
_FLUSH = 512  # sweeps kept before they are priced together


@dataclass(frozen=True)
class _Sweep:
    """A sweep that was made: what it computed and moved, in the units of `Profile`, and where its sequences live."""

    entering: int = 0
    decoding: int = 0
    prompt: int = 0
    cached: int = 0
    loaded: float = 0.0
    stored: float = 0.0
    prompt_loaded: float = 0.0
    prompt_stored: float = 0.0
    homes: tuple[int, ...] = ()  # sequences by place of their cache
    hidden: tuple[int, ...] = ()  # tokens by place of their hidden states
    windows: Mapping[int, int] = field(default_factory=dict)
    pairs: Mapping[int | None, int] = field(default_factory=dict)
    late: Mapping[int | None, int] = field(default_factory=dict)


class Watch:
    """Collects sweeps as they are made; `report` compares. cost: of the job; layout: it runs under."""

    def __init__(self, cost: Cost, layout: Layout) -> None:
        self.cost, self.layout = cost, layout
        self.seconds = self.predicted = 0.0
        self.sweeps = 0
        self.busy: dict[str, float] = {}
        self.expected: dict[str, float] = {}  # seconds of work by lane
        self.slowed: dict[str, float] = {}  # the same with what the other lanes add to it
        self._made: list[_Sweep] = []

    def expect_loading(self, missing: float = 1.0) -> None:
        """Tells that weights that stay will be read in the first sweep, which is longer for it. missing: the share of
        their bytes that is not there yet."""
        reading = missing * self.cost.reading(self.layout)
        self.predicted += self.cost.predict(self.layout, missing).load_seconds
        self.expected[LOADING] = reading
        for lane, others in self.cost.slowing(self.layout.policy).items():
            self.slowed[lane] = self.slowed.get(lane, 0.0) + others.get("disk_read", 0.0) * reading

    def note(self, batches: Sequence[Batch], seconds: float, busy: Mapping[str, float]) -> None:
        """Tells of a sweep: its gpu_batches, the seconds it took, and each lane's seconds of work so far in the job."""
        self._made.append(self._summed(batches))
        self.seconds, self.sweeps, self.busy = self.seconds + seconds, self.sweeps + 1, dict(busy)
        if len(self._made) >= _FLUSH:
            self._price()

    def _summed(self, batches: Sequence[Batch]) -> _Sweep:
        """One pass over the pieces; a prompt counts when its last piece is computed."""
        windows, groups = self.cost.windows, [(g.layers * g.away.page_tokens, g.away) for g in self.cost.pages]
        entering = decoding = prompt = cached = 0
        moved = [[0.0, 0.0], [0.0, 0.0]]  # tokens loaded and stored, for generated tokens and for prompts
        homes, hidden = (dict.fromkeys(self.layout.places, 0) for _ in range(2))
        seen = dict.fromkeys(windows, 0)
        pairs: dict[int | None, int] = dict.fromkeys((None, *windows), 0)
        late = dict(pairs)
        for batch in batches:
            homes[batch.cache_home] += sum(p.final for p in batch.pieces)
            hidden[batch.hidden_home] += batch.tokens
            for piece in batch.pieces:
                end = piece.start + piece.count
                if piece.decodes:
                    decoding, cached = decoding + 1, cached + end
                    for w in windows:
                        seen[w] += min(end, w)
                else:
                    entering, prompt = entering + piece.final, prompt + piece.count
                    for window in pairs:
                        pairs[window] += (found := piece.pairs(window))
                        late[window] += found if piece.start else 0
                if batch.cache_home != "device":
                    tokens = moved[not piece.decodes]
                    for page, pool in groups:
                        tokens[0] += page * pool.num_read(piece.start)
                        tokens[1] += page * pool.num_written(piece.start, end)
        (decode_loaded, decode_stored), (loaded, stored) = moved
        return _Sweep(
            entering, decoding, prompt, cached, decode_loaded + loaded, decode_stored + stored, loaded, stored,
            tuple(homes.values()), tuple(hidden.values()), seen, pairs, late,
        )  # fmt: skip

    def _price(self) -> None:
        """Adds what was predicted for the sweeps collected so far."""
        if not self._made:
            return
        made, self._made = self._made, []

        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=float)

        names = ("entering", "decoding", "prompt", "cached", "loaded", "stored", "prompt_loaded", "prompt_stored")
        sums = {name: column([getattr(s, name) for s in made]) for name in names}
        windows = {w: column([s.windows[w] for s in made]) for w in self.cost.windows}
        seeing = (None, *self.cost.windows)
        pairs, late = ({w: column([getattr(s, name)[w] for s in made]) for w in seeing} for name in ("pairs", "late"))
        policy = self.layout.policy
        homes, hidden = (_shares([getattr(s, name) for s in made]) for name in ("homes", "hidden"))
        away = np.maximum(1 - homes[:, 0], 1e-9)  # page tokens were counted for these alone
        profile = Profile(
            **sums, times=np.ones(len(made)), windows=windows, pairs=pairs, late=late, rows=self.cost.workload.count,
            peak=0.0, counted=away,
        )  # fmt: skip
        lanes = self.cost.lanes(policy, profile, homes.mean(0).tolist(), self.layout)
        split = dict(zip(self.layout.places, homes.mean(0), strict=True))
        fractions: dict[str, Any] = dict(self.cost.realised(self.layout, split))
        for i, tier in enumerate(self.layout.places):
            fractions[fraction(CACHE, tier)], fractions[fraction(HIDDEN, tier)] = homes[:, i] / away, hidden[:, i]
        seconds, work = self.cost.sweep_seconds(lanes, fractions, policy)
        self.predicted += float(seconds.sum())
        for lane, slowed in self.cost.slowed(work, policy).items():
            self.expected[lane] = self.expected.get(lane, 0.0) + float(work[lane].sum())
            self.slowed[lane] = self.slowed.get(lane, 0.0) + float(slowed.sum())

    def report(self) -> dict[str, Any]:
        """For the summary: seconds of all sweeps and of each lane's work, as predicted and as measured."""
        self._price()
        lanes = sorted({*self.busy, *self.expected})
        return {
            "hardware": self.cost.hardware.name,
            "measured": self.cost.hardware.measured,
            "predicted_seconds": self.predicted,
            "measured_seconds": self.seconds,
            "error": self.predicted / self.seconds - 1 if self.seconds else 0.0,
            "lanes": {lane: {"predicted": self.expected.get(lane, 0.0), "measured": self.busy.get(lane, 0.0)}
                      for lane in lanes},
        }  # fmt: skip

    def factors(self) -> dict[str, float]:
        """By lane, how many times the predicted seconds it really took, where that is persistently off by more than
        TOLERATED. A lane that was slowed by others as was to be expected is not off."""
        self._price()
        if self.seconds < LEAST_SECONDS or self.sweeps < LEAST_SWEEPS:
            return {}
        if self.cost.model.topk is not None:
            return {}  # chosen values cross links within the device's tasks, so the links' lanes tell too little
        found = {}
        for lane, least in self.expected.items():
            if lane == LOADING:
                continue
            real = self.busy.get(lane, 0.0)
            nearest = min(max(real, least), self.slowed[lane])
            matters = nearest > 0 and real > 0 and max(real, least) > LEAST_SHARE * self.seconds
            if matters and abs(real / nearest - 1) > TOLERATED:
                found[lane] = real / nearest
        return found


def _shares(counts: Sequence[Sequence[int]]) -> Array:
    """Rows that add up to 1."""
    table = np.array(counts, dtype=float)
    return np.asarray(table / np.maximum(table.sum(1, keepdims=True), 1))
