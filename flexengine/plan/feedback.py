"""Compare the measured seconds of a job's sweeps with the predicted seconds, lane by lane."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flexengine.plan.cost import Cost
from flexengine.plan.layout import Layout
from flexengine.plan.loading import reading
from flexengine.plan.profile import Profile
from flexengine.plan.rates import timed
from flexengine.plan.sizes import Array
from flexengine.plan.terms import CACHE, HIDDEN, fraction
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.tasks import LOADING

MAX_RELATIVE_ERROR = 0.25  # smaller errors of a lane are tolerated
MIN_JOB_SECONDS, MIN_JOB_SWEEPS = 10.0, 8  # shorter jobs correct no rates
MIN_LANE_SHARE = 0.1  # share of the job's seconds; errors of lanes with less work are ignored
_BATCH_SWEEPS = 512  # sweeps that are priced together


@dataclass(frozen=True)
class LaneSeconds:
    """Seconds of work of one lane."""

    predicted: float  # seconds that the plan predicts for the sweeps that were computed
    measured: float  # seconds that the lane worked


@dataclass(frozen=True)
class PlanReport:
    """The plan's predictions for the sweeps that a job computed, beside the measured seconds."""

    hardware: str  # name of the machine whose rates were used
    measured: bool  # whether these rates, or the model's own, were measured; False for assumed or written ones
    predicted_seconds: float  # predicted seconds of all sweeps
    measured_seconds: float  # measured seconds of all sweeps
    # work by lane. Lanes overlap, so their seconds add up to more than those of the sweeps.
    lanes: Mapping[str, LaneSeconds]

    @property
    def error(self) -> float:
        """Return predicted / measured seconds - 1; 0 if no sweep was computed."""
        return self.predicted_seconds / self.measured_seconds - 1 if self.measured_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = asdict(self)
        lanes = values.pop("lanes")
        return values | {"error": self.error, "lanes": lanes}


class SweepMonitor:
    """Predicted and measured seconds of a running job.

    Attributes:
        seconds, predicted: seconds of all finished sweeps, measured and predicted.
        sweeps: number of finished sweeps.
        busy: measured seconds of work by lane.
        expected: predicted seconds of work by lane.
        slowed: predicted seconds of work by lane, with crosstalk of the other lanes.
    """

    def __init__(self, cost: Cost, layout: Layout) -> None:
        self.cost, self.layout = cost, layout
        self.seconds = self.predicted = 0.0
        self.sweeps = 0
        self.busy: dict[str, float] = {}
        self.expected: dict[str, float] = {}
        self.slowed: dict[str, float] = {}
        # Counts of finished sweeps, their sequences by place of the KV cache, their tokens by place of hidden states.
        self._unpriced: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = []

    def expect_loading(self, missing: float = 1.0) -> None:
        """Add the predicted seconds of reading the missing share of the resident weights in the first sweep."""
        seconds = missing * reading(self.cost.hardware, self.layout)
        self.predicted += self.cost.predict(self.layout, missing).load_seconds
        self.expected[LOADING] = seconds
        for lane, others in self.cost.slowing(self.layout.policy).items():
            self.slowed[lane] = self.slowed.get(lane, 0.0) + others.get("disk_read", 0.0) * seconds

    def note(self, batches: Sequence[Batch], seconds: float, busy: Mapping[str, float]) -> None:
        """Add a finished sweep of these gpu_batches.

        Args:
            seconds: measured seconds of the sweep.
            busy: by lane, seconds of work since the job began.
        """
        cached, hidden = (dict.fromkeys(self.layout.places, 0) for _ in range(2))
        for batch in batches:
            cached[batch.cache_home] += sum(piece.final for piece in batch.pieces)
            hidden[batch.hidden_home] += batch.tokens
        self._unpriced.append((self._counted(batches), tuple(cached.values()), tuple(hidden.values())))
        self.seconds, self.sweeps, self.busy = self.seconds + seconds, self.sweeps + 1, dict(busy)
        if len(self._unpriced) >= _BATCH_SWEEPS:
            self._price()

    def _counted(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Return the counts of a sweep by field of `Profile`. A prompt enters when its last piece is computed."""
        prompts = [piece for batch in batches for piece in batch.pieces if not piece.decodes]
        ends = [piece.start + 1 for batch in batches for piece in batch.pieces if piece.decodes]
        windows = (None, *self.cost.windows)
        pairs, late = (
            {w: float(sum(p.pairs(w) for p in some)) for w in windows}
            for some in (prompts, [p for p in prompts if p.start])
        )
        off_device = [piece for batch in batches if batch.cache_home != "device" for piece in batch.pieces]
        loaded, stored = self._moved(off_device)
        prompt_loaded, prompt_stored = self._moved([piece for piece in off_device if not piece.decodes])
        return dict(
            entering=sum(p.final for p in prompts), decoding=len(ends), prompt=sum(p.count for p in prompts),
            cached={w: float(sum(min(end, w or end) for end in ends)) for w in windows}, loaded=loaded, stored=stored,
            prompt_loaded=prompt_loaded, prompt_stored=prompt_stored, pairs=pairs, late=late,
            logits=sum(p.logits - p.final for batch in batches for p in batch.pieces),
        )  # fmt: skip

    def _moved(self, pieces: Sequence[Piece]) -> tuple[float, float]:
        """Return the tokens of KV pages loaded and stored for pieces of sequences with cache off the device."""
        loaded = stored = 0.0
        for layers, _, pool in self.cost.pages:
            page_tokens = layers * pool.page_tokens
            loaded += page_tokens * sum(pool.num_read(p.start) for p in pieces)
            stored += page_tokens * sum(pool.num_written(p.start, p.start + p.count) for p in pieces)
        return loaded, stored

    def _price(self) -> None:
        if not self._unpriced:
            return
        counts, cached, hidden = zip(*self._unpriced, strict=True)
        self._unpriced = []
        layout, policy = self.layout, self.layout.policy
        cache_shares, hidden_shares = _shares(cached), _shares(hidden)
        away = np.maximum(1 - cache_shares[:, 0], 1e-9)  # page tokens were counted only for caches off the device
        profile = Profile.stacked(counts, self.cost.workload.count, away)
        split = dict(zip(layout.places, cache_shares.mean(0).tolist(), strict=True))
        lanes = self.cost.lanes(policy, profile, split, layout)
        fractions: dict[str, Any] = dict(self.cost.realised(layout, split))
        for i, tier in enumerate(layout.places):
            fractions[fraction(CACHE, tier)] = cache_shares[:, i] / away
            fractions[fraction(HIDDEN, tier)] = hidden_shares[:, i]
        seconds, work = self.cost.sweep_seconds(lanes, fractions, policy)
        self.predicted += float(seconds.sum())
        for lane, slowed in self.cost.slowed(work, policy).items():
            self.expected[lane] = self.expected.get(lane, 0.0) + float(work[lane].sum())
            self.slowed[lane] = self.slowed.get(lane, 0.0) + float(slowed.sum())

    def report(self) -> PlanReport:
        """Return predicted and measured seconds, of all sweeps and of each lane's work, for the job's summary."""
        self._price()
        hardware, names = self.cost.hardware, sorted({*self.busy, *self.expected})
        lanes = {lane: LaneSeconds(self.expected.get(lane, 0.0), self.busy.get(lane, 0.0)) for lane in names}
        measured = hardware.measured or timed(hardware, self.cost.model)
        return PlanReport(hardware.name, measured, self.predicted, self.seconds, lanes)

    def factors(self) -> dict[str, float]:
        """Return measured / predicted seconds of each lane whose error is above MAX_RELATIVE_ERROR.

        A lane's prediction is the range from its own work to its work with crosstalk. The nearest end counts.
        """
        self._price()
        if self.seconds < MIN_JOB_SECONDS or self.sweeps < MIN_JOB_SWEEPS:
            return {}
        if self.cost.model.topk is not None:
            return {}  # the device's tasks load chosen values, so the links' lanes lack these seconds
        ratios = {}
        for lane, alone in self.expected.items():
            if lane == LOADING:
                continue
            measured = self.busy.get(lane, 0.0)
            nearest = min(max(measured, alone), self.slowed[lane])
            matters = nearest > 0 and measured > 0 and max(measured, alone) > MIN_LANE_SHARE * self.seconds
            if matters and abs(measured / nearest - 1) > MAX_RELATIVE_ERROR:
                ratios[lane] = measured / nearest
        return ratios


def _shares(counts: Sequence[Sequence[int]]) -> Array:
    """Return the counts divided by the sum of their row; rows of zeros stay zeros."""
    table = np.array(counts, dtype=float)
    return np.asarray(table / np.maximum(table.sum(1, keepdims=True), 1))
