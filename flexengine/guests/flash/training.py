"""Training of a predictor from the recorded inputs and active neurons of one layer (LLM in a flash, section 3.1).

Of every ten stretches, eight are trained on, one chooses (when to stop, the threshold, the rank), and one measures.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.activity import tick
from flexengine.errors import InvalidInput
from flexengine.guests.flash.predictors import PredictionErrors, Predictor
from flexengine.guests.flash.traces import RecordedLayer
from flexengine.records import Limit, check

MIN_STRETCHES = 10
MAX_MISSES = 0.5
ROUNDS, PATIENCE = 20, 4  # most rounds; rounds without fewer false alarms, until training stops
MIN_STEPS = 50  # steps of a round, if a pass over the tokens has fewer
BATCH, RATE, DECAY = 256, 3e-3, 0.01  # tokens of a step, highest learning rate, weight decay
MARGIN = 0.005  # added to the weight of negatives, as in Deja Vu
MIN_RANK, ENOUGH = 32, 0.1  # smallest automatic rank; share of false alarms at which a higher rank is not tried
_FLOOR = 1e-3  # least standard deviation of an input, relative to that of all inputs


@dataclass(frozen=True)
class Settings:
    """How predictors are trained.

    Raises:
        InvalidInput: a number is out of range.
    """

    # Share of the active neurons that may be predicted inactive; each layer's threshold is chosen for it.
    misses: Annotated[float, Limit(math.ulp(0.0), MAX_MISSES), f"above 0 and at most {MAX_MISSES}"] = 0.05
    rank: Annotated[int | None, Limit(1)] = None  # of all layers; None chooses it for each layer
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        check(self, "--")


class Division(NamedTuple):
    """Numbers of the stretches that train, choose and measure. Held out are those that do not train."""

    train: list[int]
    choose: list[int]
    measure: list[int]

    @property
    def held_out(self) -> list[int]:
        return sorted(self.choose + self.measure)


def divide(stretches: int) -> Division:
    """Return the division of the stretches of a text. Raise InvalidInput if there are too few."""
    if stretches < MIN_STRETCHES:
        raise InvalidInput(
            f"there are {stretches} stretches of text; training predictors takes at least"
            f" {MIN_STRETCHES}; give more tokens"
        )
    return Division(*([n for n in range(stretches) if n % 10 in digits] for digits in (range(8), (8,), (9,))))


def ranks(width: int, neurons: int, rank: int | None) -> tuple[int, ...]:
    """Return the ranks to try, until the false alarms are few: 1/32, 1/8 and 1/4 of the width, if none is given."""
    if rank is not None:
        return (min(rank, width, neurons),)
    tried = (max(width // 32, MIN_RANK), max(width // 8, MIN_RANK), max(width // 4, MIN_RANK))
    return tuple(sorted({min(r, width, neurons) for r in tried}))


def train(recorded: RecordedLayer, settings: Settings, device: torch.device) -> tuple[Predictor, PredictionErrors]:
    """Return the predictor of one layer and its errors on the stretches that measure.

    Args:
        recorded: inputs and active neurons of all stretches.
        device: to train on; the predictor is on the CPU.
    """
    parts = divide(len(recorded.x))
    samples, choosing, measuring = (recorded.part(part).flat(device) for part in parts)
    for rank in ranks(recorded.x.shape[-1], recorded.neurons, settings.rank):
        predictor, found = _trained(samples, choosing, rank, settings)
        if found.false_alarms <= ENOUGH:
            break
    return predictor.to(torch.device("cpu")), errors(predictor, measuring)


class _Model(nn.Module):
    """A predictor of standardised inputs, in fp32."""

    def __init__(self, samples: RecordedLayer, rank: int, frequency: Tensor, weight: float) -> None:
        """Args:
        frequency: share of the tokens for which each neuron is active, [neurons].
        weight: of a negative in the loss.
        """
        super().__init__()
        x = samples.x.float()
        self.mean, deviation = x.mean(0), x.std(0)
        self.deviation = deviation.clamp(min=_FLOOR * float(deviation.mean()) + 1e-12)
        width = x.shape[1]
        self.a = nn.Parameter(torch.randn(rank, width, device=x.device) / math.sqrt(width))
        self.b = nn.Parameter(torch.randn(len(frequency), rank, device=x.device) * (0.1 / math.sqrt(rank)))
        odds = frequency / (weight * (1 - frequency))
        self.bias = nn.Parameter(odds.clamp(1e-3, 1e3).log())

    def forward(self, x: Tensor) -> Tensor:
        normal = (x.float() - self.mean) / self.deviation
        return (normal @ self.a.T) @ self.b.T + self.bias

    def predictor(self) -> Predictor:
        """Return the predictor of plain inputs, its matrices in bf16."""
        with torch.no_grad():
            a = self.a / self.deviation
            bias = self.bias - self.b @ (a @ self.mean)
            return Predictor(a.bfloat16().contiguous(), self.b.bfloat16().contiguous(), bias.float())


def _trained(
    samples: RecordedLayer, choosing: RecordedLayer, rank: int, settings: Settings
) -> tuple[Predictor, PredictionErrors]:
    """Return the predictor of the round with the fewest false alarms, with its threshold, and its errors on the samples
    that choose."""
    torch.manual_seed(settings.seed)
    tokens = len(samples.x)
    frequency = _frequency(samples)
    weight = float(frequency.mean()) + MARGIN
    model = _Model(samples, rank, frequency, weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    steps = max(MIN_STEPS, -(-tokens // BATCH))  # of a round
    best: tuple[Predictor, PredictionErrors] | None = None
    best_number = 0
    for number in range(ROUNDS):
        for step in range(steps):
            progress = (number + step / steps) / ROUNDS
            optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * progress))
            _step(model, optimizer, samples, torch.randint(tokens, (BATCH,), device=samples.x.device), weight)
        found = with_threshold(model.predictor(), choosing, settings.misses)
        if best is None or found[1].false_alarms < best[1].false_alarms:
            best, best_number = found, number
        elif number - best_number >= PATIENCE:
            break
    assert best is not None
    return best


def _step(
    model: _Model, optimizer: torch.optim.Optimizer, samples: RecordedLayer, chosen: Tensor, weight: float
) -> None:
    """Make one step of the balanced cross entropy, by its gradient: negatives weigh `weight`, positives 1."""
    with torch.enable_grad():
        scores = model(samples.x[chosen])
    probability = scores.detach().sigmoid_()
    gradient = torch.where(samples.active(chosen), probability - 1, probability.mul_(weight))
    optimizer.zero_grad()
    scores.backward(gradient)
    optimizer.step()
    tick()


def _frequency(samples: RecordedLayer) -> Tensor:
    counts = torch.zeros(samples.neurons, dtype=torch.int64, device=samples.x.device)
    for low in range(0, len(samples.x), BATCH):
        counts += samples.active(slice(low, low + BATCH)).sum(0)
    return (counts.double() / len(samples.x)).float()


def with_threshold(predictor: Predictor, samples: RecordedLayer, misses: float) -> tuple[Predictor, PredictionErrors]:
    """Return a predictor with the highest threshold whose share of misses on the samples is at most `misses`, and its
    errors."""
    with torch.no_grad():
        parts = [slice(low, low + BATCH) for low in range(0, len(samples.x), BATCH)]
        positive = torch.cat([predictor.scores(samples.x[p].float())[samples.active(p)] for p in parts])
    threshold = torch.finfo(torch.float32).max
    if len(positive):
        kept = int(misses * len(positive)) + 1
        lowest = torch.kthvalue(positive, min(kept, len(positive)))[0]
        threshold = float(torch.nextafter(lowest, torch.tensor(-math.inf, device=lowest.device)))
    found = replace(predictor, threshold=threshold)
    return found, errors(found, samples)


def errors(predictor: Predictor, samples: RecordedLayer) -> PredictionErrors:
    """Return the errors of a predictor on some samples."""
    sums = PredictionErrors(0, 0, 0, 0)
    for low in range(0, len(samples.x), BATCH):
        part = slice(low, low + BATCH)
        predicted, labels = predictor.active(samples.x[part].float()), samples.active(part)
        missed = int((labels & ~predicted).sum())
        sums += PredictionErrors(labels.numel(), int(labels.sum()), int(predicted.sum()), missed)
    return sums
