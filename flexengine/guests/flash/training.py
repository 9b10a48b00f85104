"""Training of predictors (LLM in a flash, section 3.1): the model reads a text, in an ordinary job, and each layer's
predictor is trained on the inputs and active neurons of its feed-forward block.

Of every ten stretches, eight are trained on, one chooses (when to stop, the threshold, the rank), and one measures.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from flexengine.activity import activity, tick
from flexengine.engine.core import Core
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.guests.flash import predictors as trained
from flexengine.guests.flash.feed_forward import Blocks, FeedForward
from flexengine.guests.flash.predictors import LayerPredictor, PredictionErrors, Predictor, Trained
from flexengine.guests.flash.traces import RecordedLayer, TraceRecorder, sharing
from flexengine.model.prepare import prepared
from flexengine.model.tokenizer import excerpts
from flexengine.records import Limit, check

VERSION = 1  # part of the cache's key: raise it when the trained predictors change
STRETCH, MIN_STRETCH = 128, 8  # tokens of a stretch of the text, if the context holds them, and fewest
# Above this share of active neurons flash mode cannot gain: it then reads at least half of the bytes, in pieces of a
# few KiB, and disks read such pieces at half of their sequential rate or less.
MAX_ACTIVE = 0.5
PROBE = 2  # stretches that are read first, to measure the share of active neurons
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
    """How predictors are trained. Raise InvalidInput if a number is out of range."""

    # Share of the active neurons that may be predicted inactive; each layer's threshold is chosen for it.
    misses: Annotated[float, Limit(math.ulp(0.0), MAX_MISSES), f"above 0 and at most {MAX_MISSES}"] = 0.05
    rank: Annotated[int | None, Limit(1)] = None  # of all layers; None chooses it for each layer
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        check(self, "--")


def divide(stretches: int) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of the stretches that train, choose and measure, of MIN_STRETCHES or more."""
    train, choose, measure = ([n for n in range(stretches) if n % 10 in digits] for digits in (range(8), (8,), (9,)))
    return train, choose, measure


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
        predictor, found = _best_round(samples, choosing, rank, settings)
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

    def step(self, optimizer: torch.optim.Optimizer, samples: RecordedLayer, chosen: Tensor, weight: float) -> None:
        """Make one step of the balanced cross entropy, by its gradient: negatives weigh `weight`, positives 1."""
        with torch.enable_grad():
            scores = self(samples.x[chosen])
        probability = scores.detach().sigmoid_()
        gradient = torch.where(samples.active(chosen), probability - 1, probability.mul_(weight))
        optimizer.zero_grad()
        scores.backward(gradient)
        optimizer.step()
        tick()

    def predictor(self) -> Predictor:
        """Return the predictor of plain inputs, its matrices in bf16."""
        with torch.no_grad():
            a = self.a / self.deviation
            bias = self.bias - self.b @ (a @ self.mean)
            return Predictor(a.bfloat16().contiguous(), self.b.bfloat16().contiguous(), bias.float())


def _best_round(
    samples: RecordedLayer, choosing: RecordedLayer, rank: int, settings: Settings
) -> tuple[Predictor, PredictionErrors]:
    """Return the predictor of the round with the fewest false alarms, with its threshold, and its errors on the samples
    that choose."""
    torch.manual_seed(settings.seed)
    tokens = len(samples.x)
    counts = torch.zeros(samples.neurons, dtype=torch.int64, device=samples.x.device)
    for low in range(0, tokens, BATCH):
        counts += samples.active(slice(low, low + BATCH)).sum(0)
    frequency = (counts.double() / tokens).float()
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
            model.step(optimizer, samples, torch.randint(tokens, (BATCH,), device=samples.x.device), weight)
        found = with_threshold(model.predictor(), choosing, settings.misses)
        if best is None or found[1].false_alarms < best[1].false_alarms:
            best, best_number = found, number
        elif number - best_number >= PATIENCE:
            break
    assert best is not None
    return best


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


@dataclass(frozen=True)
class TrainingText:
    """The stretches of text that the model reads."""

    name: str  # for messages
    # Token ids, one tuple per stretch, all of one length. The last token of each is not computed.
    rows: tuple[tuple[int, ...], ...]

    @property
    def stretches(self) -> list[tuple[int, ...]]:
        """The tokens that are computed."""
        return [row[:-1] for row in self.rows]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.stretches))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:32]


def cut(name: str, content: str, tokenizer: Any, context: int | None, tokens: int) -> TrainingText:
    """Return the stretches of a text, spread evenly over it. Raise InvalidInput if there is no tokenizer, or the text
    is too short.

    Args:
        name: of the text, for messages.
        tokenizer: None if the checkpoint has none.
        context: most tokens of a sequence; None if there is no limit.
        tokens: of all stretches together.
    """
    length = min(STRETCH + 1, context or STRETCH + 1)  # with the token that is not computed
    count = tokens // (length - 1)
    if length <= MIN_STRETCH or count < MIN_STRETCHES:
        each = max(length - 1, MIN_STRETCH)
        raise InvalidInput(
            f"training takes at least {MIN_STRETCHES} stretches of {each} tokens, but {tokens:,} tokens in a context"
            f" of {context} are given; give {MIN_STRETCHES * each:,} tokens or more"
        )
    remedy = "give fewer tokens, or a longer text"
    rows = excerpts(tokenizer, name, content, count, length, f"{count} stretches take", remedy)
    unique = {row[:-1]: row for row in rows}
    if len(unique) < MIN_STRETCHES:
        raise InvalidInput(f"{name} repeats itself: only {len(unique)} of {count} stretches differ; give another text")
    return TrainingText(name, tuple(unique.values()))


def sparse_blocks(core: Core) -> tuple[FeedForward | None, ...]:
    """Return the block of each layer that has a sparse one, else None. Raise UnsupportedModel if no layer has one."""
    found = core.opened.flash.feed_forward
    if not any(found):
        fault = f"{core.source.name} has no feed-forward block that flash mode knows"
        raise UnsupportedModel(f"{fault}, with one row of a matrix for each neuron")
    if not any(block.sparse for block in found if block):
        names = sorted({block.activation for block in found if block})
        raise UnsupportedModel(
            f"the activation of {core.source.name} is {', '.join(names)}, which is 0 for no neuron; flash mode needs a"
            " ReLU model, such as OPT or a ReLU-fied checkpoint, or --sparsify SHARE, such as 0.7, which is lossy"
        )
    return tuple(block if block and block.sparse else None for block in found)


def predictors(engine: Engine, text: TrainingText, settings: Settings) -> Trained:
    """Return the predictors of an engine's model, from the cache if they were trained before.

    Raises:
        InvalidInput: too many neurons are active, or a stretch cannot be run.
        UnsupportedModel: the model has no sparse feed-forward block.
        OutOfMemory: the disk has no room for the inputs.
    """
    core = engine.core
    blocks = sparse_blocks(core)
    files = core.opened.given
    about: dict[str, Any] = {"text": text.name, "text_sha256": text.digest, "tokens": text.tokens, **asdict(settings)}
    if (sparse_text := engine.calibrator.sparse_text) is not None:
        about |= {trained.SPARSITY: list(core.lossy.sparsity or ()), trained.THRESHOLDS_TEXT: sparse_text.digest}
    checkpoint = trained.checkpoint_key(files)

    def build(directory: Path) -> None:
        try:
            made = Trained(_trained(engine, text, settings, blocks, directory), about)
            if (errors := made.errors).predicted_share > MAX_ACTIVE:
                raise InvalidInput(
                    f"predictors that miss {errors.misses:.1%} of the active neurons of {core.source.name} name"
                    f" {errors.predicted_share:.1%} of all neurons for a token; above {MAX_ACTIVE:.0%}, reading only"
                    f" these takes no less time than reading all; allow more misses than {settings.misses:g}"
                    " (--misses), raise --rank, or let flash be oracle"
                )
        except InvalidInput:
            with contextlib.suppress(OSError):
                directory.rmdir()
            raise
        trained.write(made, checkpoint, directory)

    made_with = {"predictors": VERSION, "files": trained.VERSION, "checkpoint": checkpoint, "dtype": str(core.dtype)}
    what = json.dumps({**made_with, **about})
    sparse = "" if core.lossy.sparsify is None else f" of {core.lossy.sparsify:.1%} sparsified neurons"
    label = f"predictors{sparse}, {settings.misses:.1%} misses"
    directory = prepared(core.source.directory, files, build, what, core.verifier, label)
    os.utime(directory / trained.ABOUT)  # `trained.find` takes the latest
    return trained.load(directory, checkpoint, blocks)


def _trained(
    engine: Engine, text: TrainingText, settings: Settings, blocks: Blocks, folder: Path
) -> tuple[LayerPredictor | None, ...]:
    """Return the predictor of each layer, with statistics of the stretches that it was not trained on. folder: of
    temporary files."""
    sparse, device = [block for block in blocks if block], engine.core.machine.compute
    with contextlib.closing(TraceRecorder(sparse, text.stretches, folder)) as recorder:
        _read(engine, text, recorder)
        engine.core.drop_weights()
        what = f"training the predictors of {len(sparse)} layers, once for this model and text"
        made = list[LayerPredictor]()
        with activity("training", what, len(sparse), "layers", logging.INFO) as work:
            for number in range(len(sparse)):
                recorded = recorder.recorded(number)
                predictor, errors = train(recorded, settings, device)
                _, choose, measure = divide(len(recorded.x))
                held_out = recorded.part(sorted(choose + measure))
                predicted = np.stack([predictor.active(x.float()).numpy() for x in held_out.x])
                true = sharing(held_out.active().numpy())
                made.append(LayerPredictor(predictor, errors, true, sharing(predicted)))
                work.advance(1)
    each = iter(made)
    return tuple(next(each) if block else None for block in blocks)


def _read(engine: Engine, text: TrainingText, recorder: TraceRecorder) -> None:
    """Let the model read the text. Raise InvalidInput if too many neurons are active."""
    rows, core = text.rows, engine.core
    engine.planner.prefill_tokens = len(rows[0]) - 1
    kind, remedy = "exact", "use a checkpoint that was trained to be sparse (ReLU-fied)"
    if core.lossy.sparsify is not None:
        kind, remedy = "sparsified", f"raise --sparsify, which is {core.lossy.sparsify}"
    what = f"reading {text.tokens:,} tokens with the {kind} model, to record which neurons are active"
    with activity("recording", what, len(rows), "stretches", logging.INFO) as work, recorder.watching():
        for part in (rows[:PROBE], rows[PROBE:]):
            results = engine.score([row[:-1] for row in part], [row[-1:] for row in part])
            if bad := next((r for r in results if r.error is not None), None):  # its index is that in the part
                raise InvalidInput(f"the model cannot read a stretch of {text.name}: {bad.error}")
            if (mean := float(np.mean(recorder.shares))) > MAX_ACTIVE:
                raise InvalidInput(
                    f"{mean:.1%} of the neurons of {core.source.name} are active for a token; above {MAX_ACTIVE:.0%},"
                    f" reading only these takes no less time than reading all; {remedy}, or run without flash mode"
                )
            work.advance(len(part))
