"""Weights `mixed`: the format of every layer is chosen such that the weights fit a budget at the least harm.

The harm of a format to a layer is measured for PROBE: stretches of the calibration text are scored with this layer
encoded and the others exact. With changes d of the tokens' log probabilities,

    harm = mean(d^2) / 2        nats per token

This estimates the divergence from the exact model's probabilities, and has less noise than mean(d). Harms of other
formats follow from the squared steps of their codes. plan/bits.py chooses. Harms are stored in the cache.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flexengine.activity import activity, message, tick
from flexengine.codec.packed import CODECS
from flexengine.engine.calibrator import Calibrator
from flexengine.engine.core import Core
from flexengine.errors import BadCheckpoint, BudgetTooSmall, InvalidInput
from flexengine.guests.calibration import PIECE, ROWS, check_read
from flexengine.lossy import Lossy, weights_text
from flexengine.model.encoding import encoded, forms
from flexengine.model.importance import Importances
from flexengine.model.prepare import prepared
from flexengine.plan.bits import Format, Layer, Option, adabits
from flexengine.worker.open_model import OpenModel

VERSION = 1  # part of the cache's key: raise it when the measured harms change
FORMATS: tuple[Format, ...] = (None, "int8", "int4", "int3")  # formats that a layer may get
PROBE = "int3"  # format whose harm is measured: of those that a layer may get, it has the least noise
PROBE_ROWS = 4  # stretches of the calibration text that are scored
CONTEXT = 8  # first tokens of a stretch, which are not scored
FILE = "harms.json"


class Bits:
    """Chooses the formats of an engine's layers.

    Attributes:
        budget: most bytes of all weights on the device.
        exact: bytes of the exact model's weights.
        rest: bytes of the weights outside the layers. Embedding and output projection are encoded.
        layers: bytes of each layer, by format.
    """

    def __init__(self, core: Core, calibrator: Calibrator) -> None:
        """Compare the budget with the model. No weights are read. Raise BudgetTooSmall if the smallest formats take
        more than the budget."""
        assert isinstance(core.lossy.budget, int)
        self.core, self.calibrator, self.budget = core, calibrator, core.lossy.budget
        integers = core.lossy.compute == "int8"  # multiplies codes, so that every layer must have some
        every = {b: (b,) * core.skeleton.total for b in FORMATS if b is not None or not integers}
        usable = [b for b, weights in every.items() if core.opened.refusal(_with(core.lossy, weights)) is None]
        facts, found = core.facts, {b: _bytes(core.opened, b) for b in usable}
        self.exact = sum(tensor.held_bytes for tensor in facts.tensors)
        self.layers = [{b: sizes[j] for b, (sizes, _) in found.items()} for j in range(len(facts.layers))]
        self.rest = min(rest for _, rest in found.values())
        least = self.rest + sum(min(sizes.values()) for sizes in self.layers)
        if self.budget < (min(least, self.exact) if None in found else least):
            raise BudgetTooSmall(
                f"the budget is {self.budget:,} bytes, but the weights of {core.source.name} take"
                f" at least {least:,}, with all layers in {FORMATS[-1]}, and embedding and output"
                " projection in int8; raise the budget"
            )

    def chosen(self) -> Lossy:
        """Return the switches with the chosen format of each layer, and report them. Calibrate, and measure harms,
        unless the cache has both. Exact weights are chosen if the budget holds them."""
        lossy = self.core.lossy
        if self.budget >= self.exact and None in self.layers[0]:
            message(f"weights stay exact: they take {_mb(self.exact)}, and the budget is {_mb(self.budget)}")
            return _with(lossy, None)
        options: list[Layer] = [
            {b: Option(nbytes, harm * step_ratio(b) if b is not None else 0.0) for b, nbytes in sizes.items()}
            for sizes, harm in zip(self.layers, self.harms(), strict=True)
        ]
        found = adabits(options, self.budget - self.rest)
        assert found is not None  # the budget was compared before
        nbytes = self.rest + sum(self.layers[j][b] for j, b in enumerate(found))
        message(f"bits per layer: {weights_text(found)}, {_mb(nbytes)} of weights; the budget is {_mb(self.budget)}")
        return _with(lossy, found)

    def harms(self) -> list[float]:
        """Return the harm of PROBE to each layer, measured unless the cache has it. Raise as a job of the model."""
        core, importances, text = self.core, self.calibrator.importances, self.calibrator.text
        assert importances is not None
        assert text is not None

        def build(directory: Path) -> None:
            try:
                self._measure(text.rows[:: ROWS // PROBE_ROWS], importances, directory / FILE)
            except OSError as error:  # of the checkpoint or the offload directory, too
                raise InvalidInput(f"measuring harms with {core.source.directory} failed: {error}") from error

        key = {"harms": VERSION, "importances": importances.digest, "format": PROBE, "dtype": str(core.dtype)}
        path = prepared(core.source.directory, core.opened.given, build, json.dumps(key), core.verifier, "harms") / FILE
        if len(found := _read(path)) != core.skeleton.total:
            raise BadCheckpoint(
                f"{path} does not hold the harms of {core.skeleton.total} layers; remove its directory to measure again"
            )
        return found

    def _measure(self, rows: Sequence[tuple[int, ...]], importances: Importances, file: Path) -> None:
        """Write the harms of PROBE to a file, which holds those of the first layers after an interruption. One job of
        the exact model's engine measures one layer."""
        core, total = self.core, self.core.skeleton.total
        source = core.source.directory, core.opened.given, core.opened.locations
        probe = encoded(*source, forms(core.skeleton, PROBE), importances, core.verifier)
        plain: tuple[Format, ...] = (None,) * total
        tokens = sum(map(len, rows))
        text = f"measuring the harm of {PROBE} to {total} layers, once for this model and text: {tokens:,} tokens each"
        with (
            activity("measuring", text, total, "layers", logging.INFO) as work,
            self.calibrator.exact_engine(lambda _: tick()) as engine,
        ):
            engine.planner.prefill_tokens = PIECE

            def scores(formats: tuple[Format, ...]) -> list[float]:
                engine.use(Lossy(weights=formats))
                opened = engine.core.opened
                opened.origins = opened.locations | {name: probe[name] for name in opened.forms}
                results = engine.score([row[:CONTEXT] for row in rows], [row[CONTEXT:] for row in rows])
                check_read(results)
                return [place["logprob"] for result in results for place in result.logprobs or ()]

            exact, found = scores(plain), _read(file)
            work.advance(len(found))
            for layer in range(len(found), total):
                changed = scores((*plain[:layer], PROBE, *plain[layer + 1 :]))
                found.append(sum((a - b) ** 2 for a, b in zip(changed, exact, strict=True)) / (2 * len(exact)))
                part = file.with_suffix(".writing")  # the file is whole at any time
                part.write_text(json.dumps(found), encoding="utf-8")
                part.rename(file)
                work.advance(1)


def _read(file: Path) -> list[float]:
    """Return the harms in a file; none if it does not exist or holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, float) for each in found) else []


def step_ratio(codec: str) -> float:
    """Return the squared step of a format's codes relative to that of PROBE, for equal ranges."""
    levels, own = (2 ** CODECS[b].bits - 1 for b in (PROBE, codec))
    return float((levels / own) ** 2)


def _bytes(opened: OpenModel, codec: Format) -> tuple[list[int], int]:
    """Return the bytes of each layer, and those of all other weights, with all layers in one format."""
    facts, made = opened.facts, forms(opened.skeleton, (codec,) * opened.skeleton.total)
    sizes = {t.name: made[t.name].nbytes if t.name in made else t.held_bytes for t in facts.tensors}
    layers = [sum(sizes[t.name] for t in layer) for layer in facts.layers]
    return layers, sum(sizes[t.name] for t in (*facts.others, *facts.edges))


def _with(lossy: Lossy, weights: tuple[Format, ...] | None) -> Lossy:
    """Return the switches with these weights, without the budget, and without calibration if nothing needs it."""
    plain = replace(lossy, weights=weights, budget=None, calibrate=None)
    needed = plain.fitted or plain.sparsify is not None
    return replace(plain, calibrate=lossy.calibrate) if needed else plain


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
