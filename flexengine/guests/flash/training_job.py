"""Training of predictors: the model reads a text, in an ordinary job, and each layer's predictor is trained on the
inputs and active neurons of its feed-forward block."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexengine.activity import activity
from flexengine.engine.core import Core
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.guests.flash import predictors as trained
from flexengine.guests.flash.feed_forward import FeedForward
from flexengine.guests.flash.predictors import LayerPredictor, PredictionErrors, Trained
from flexengine.guests.flash.traces import RecordedLayer, TraceRecorder, sharing
from flexengine.guests.flash.training import MIN_STRETCHES, Settings, divide, train
from flexengine.model.prepare import prepared
from flexengine.model.tokenizer import opening, spread, token_ids

VERSION = 1  # part of the cache's key: raise it when the trained predictors change
STRETCH, MIN_STRETCH = 128, 8  # tokens of a stretch of the text, if the context holds them, and fewest
# Above this share of active neurons flash mode cannot gain: it then reads at least half of the bytes, in pieces of a
# few KiB, and disks read such pieces at half of their sequential rate or less.
MAX_ACTIVE = 0.5
PROBE = 2  # stretches that are read first, to measure the share of active neurons


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

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:32]


def cut(name: str, content: str, tokenizer: Any, context: int | None, tokens: int) -> TrainingText:
    """Return the stretches of a text, spread evenly over it.

    Args:
        name: of the text, for messages.
        tokenizer: None if the checkpoint has none.
        context: most tokens of a sequence; None if there is no limit.
        tokens: of all stretches together.

    Raises:
        InvalidInput: there is no tokenizer, or the text is too short.
    """
    if tokenizer is None:
        raise InvalidInput(
            "the checkpoint has no tokenizer, so it cannot read a text; put its tokenizer files beside it"
        )
    begin, ids = opening(tokenizer), token_ids(tokenizer, content, special=False)
    length = min(STRETCH + 1, context or STRETCH + 1)  # with the token that is not computed
    count = tokens // (length - 1)
    if length <= MIN_STRETCH or count < MIN_STRETCHES:
        each = max(length - 1, MIN_STRETCH)
        raise InvalidInput(
            f"training takes at least {MIN_STRETCHES} stretches of {each} tokens, but {tokens:,} tokens in a context"
            f" of {context} are given; give {MIN_STRETCHES * each:,} tokens or more"
        )
    rows = spread(begin, ids, count, length - len(begin))
    if not rows:
        needed = count * (length - len(begin))
        raise InvalidInput(
            f"{name} has {len(ids):,} tokens; {count} stretches take {needed:,}; give fewer tokens, or a longer text"
        )
    unique = {tuple(row[:-1]): tuple(row) for row in rows}
    if len(unique) < MIN_STRETCHES:
        raise InvalidInput(f"{name} repeats itself: only {len(unique)} of {count} stretches differ; give another text")
    return TrainingText(name, tuple(unique.values()))


def sparse_blocks(core: Core) -> tuple[FeedForward | None, ...]:
    """Return the block of each layer that has a sparse one, else None. Raise UnsupportedModel if no layer has one."""
    found = core.opened.flash.feed_forward
    if not any(found):
        raise UnsupportedModel(
            f"{core.source.name} has no feed-forward block that flash mode knows, with one row of a"
            " matrix for each neuron"
        )
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
    about: dict[str, Any] = {"text": text.name, "text_sha256": text.digest, "tokens": _tokens(text), **asdict(settings)}
    if (sparse_text := engine.calibrator.sparse_text) is not None:
        about |= {trained.SPARSITY: list(core.lossy.sparsity or ()), trained.THRESHOLDS_TEXT: sparse_text.digest}
    checkpoint = trained.checkpoint_key(files)

    def build(directory: Path) -> None:
        try:
            made = Trained(_trained(engine, text, settings, blocks, directory), about)
            _check_named(made.errors, settings, core.source.name)
        except InvalidInput:
            with contextlib.suppress(OSError):
                directory.rmdir()
            raise
        trained.write(made, checkpoint, directory)

    what = json.dumps({"predictors": VERSION, "files": trained.VERSION, "dtype": str(core.dtype), **about})
    sparse = "" if core.lossy.sparsify is None else f" of {core.lossy.sparsify:.1%} sparsified neurons"
    label = f"predictors{sparse}, {settings.misses:.1%} misses"
    directory = prepared(core.source.directory, files, build, what, core.verifier, label)
    os.utime(directory / trained.ABOUT)  # `trained.find` takes the latest
    return trained.load(directory, checkpoint, blocks)


def _tokens(text: TrainingText) -> int:
    return sum(map(len, text.stretches))


def _trained(
    engine: Engine, text: TrainingText, settings: Settings, blocks: Sequence[FeedForward | None], folder: Path
) -> tuple[LayerPredictor | None, ...]:
    """Return the predictor of each layer. folder: of temporary files."""
    sparse, device = [block for block in blocks if block], engine.core.machine.compute
    with TraceRecorder(sparse, text.stretches, folder) as recorder:
        _read(engine, text, recorder)
        engine.core.drop_weights()
        what = f"training the predictors of {len(sparse)} layers, once for this model and text"
        made = list[LayerPredictor]()
        with activity("training", what, len(sparse), "layers", logging.INFO) as work:
            for number in range(len(sparse)):
                made.append(_layer(recorder.recorded(number), settings, device))
                work.advance(1)
    each = iter(made)
    return tuple(next(each) if block else None for block in blocks)


def _read(engine: Engine, text: TrainingText, recorder: TraceRecorder) -> None:
    """Let the model read the text. Raise InvalidInput if too many neurons are active."""
    rows, core = text.rows, engine.core
    engine.planner.prefill_tokens = len(rows[0]) - 1
    kind = "sparsified" if core.lossy.sparsify is not None else "exact"
    what = f"reading {_tokens(text):,} tokens with the {kind} model, to record which neurons are active"
    with activity("recording", what, len(rows), "stretches", logging.INFO) as work, recorder.watching():
        for part in (rows[:PROBE], rows[PROBE:]):
            results = engine.score([row[:-1] for row in part], [row[-1:] for row in part])
            if bad := next((r for r in results if r.error is not None), None):
                raise InvalidInput(f"the model cannot read a stretch of {text.name}: {bad.error}")
            _check_active(float(np.mean(recorder.shares)), core)
            work.advance(len(part))


def _check_active(mean: float, core: Core) -> None:
    if mean > MAX_ACTIVE:
        sparsify = core.lossy.sparsify
        trained_so = "use a checkpoint that was trained to be sparse (ReLU-fied)"
        remedy = trained_so if sparsify is None else f"raise --sparsify, which is {sparsify}"
        raise InvalidInput(
            f"{mean:.1%} of the neurons of {core.source.name} are active for a token; above {MAX_ACTIVE:.0%}, reading"
            f" only these takes no less time than reading all; {remedy}, or run without flash mode"
        )


def _check_named(errors: PredictionErrors, settings: Settings, name: str) -> None:
    if errors.predicted_share > MAX_ACTIVE:
        raise InvalidInput(
            f"predictors that miss {errors.misses:.1%} of the active neurons of {name} name"
            f" {errors.predicted_share:.1%} of all neurons for a token; above {MAX_ACTIVE:.0%}, reading only these"
            f" takes no less time than reading all; allow more misses than {settings.misses:g} (--misses), raise"
            " --rank, or let flash be oracle"
        )


def _layer(recorded: RecordedLayer, settings: Settings, device: torch.device) -> LayerPredictor:
    """Return the predictor of one layer, with statistics of the stretches that it was not trained on."""
    predictor, errors = train(recorded, settings, device)
    held_out = recorded.part(divide(len(recorded.x)).held_out)
    predicted = np.stack([predictor.active(x.float()).numpy() for x in held_out.x])
    return LayerPredictor(predictor, errors, sharing(held_out.active().numpy()), sharing(predicted))
