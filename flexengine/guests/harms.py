"""How much formats of a layer's weights harm the model's results: measured harms, and LLM-PQ's variance indicator.

Harm is measured for PROBE: stretches of the calibration text are scored with one layer encoded and the others exact.
With changes d of the tokens' log probabilities,

    harm = mean(d^2) / 2        nats per token

This estimates the divergence from the exact model's probabilities, and has less noise than mean(d). Harms of other
formats follow from the squared steps of their codes.

The indicator (arXiv 2403.01136, theorem 1, deterministic rounding) needs one pass for all layers:

    omega[layer, bits] = sum over the layer's matrices W of D * S(bits)^2 * Var[X] / 4

D is the number of columns of W, S = (max W - min W) / (2^bits - 1) the step of a code, and X are the inputs of W. An
expert, which the paper does not have, counts by the share of tokens that reach it. Both are stored in the cache.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flexengine.activity import activity, tick
from flexengine.codec.forms import WeightFormat
from flexengine.codec.packed import CODECS
from flexengine.engine.calibrator import Calibrator, Score
from flexengine.engine.core import Core
from flexengine.errors import BadCheckpoint
from flexengine.guests.calibration import PIECE, ROWS, check_read, explained, model_key
from flexengine.lossy import Lossy
from flexengine.model.encoding import ImportanceRecorder, Importances, encoded, forms, pieces
from flexengine.model.prepare import prepared
from flexengine.model.skeleton import Skeleton
from flexengine.plan.lp import Format

HARMS_VERSION = 1  # part of the cache's key: raise it when the measured harms change
VARIANCE_VERSION = 1  # likewise
PROBE = "int3"  # format whose harm is measured: of those that a layer may get, it has the least noise
PROBE_ROWS = 4  # stretches of the calibration text that are scored
CONTEXT = 8  # first tokens of a stretch, which are not scored
FILE = "harms.json"
ENCODED = ("int8", "int4", "int3")  # formats that have a harm
Harms = list[dict[str, float]]  # by layer and format


def measured(core: Core, calibrator: Calibrator) -> Harms:
    """Return the harm of each format to each layer, measured unless the cache has it. Raise as a job of the model."""
    importances, text = calibrator.importances, calibrator.text
    assert importances is not None
    assert text is not None
    key = {"harms": HARMS_VERSION, "importances": importances.digest, "format": PROBE}
    rows = text.rows[:: ROWS // PROBE_ROWS]
    found = _stored(core, key, partial(_measure, core, calibrator, rows, importances))
    return [{codec: harm * step_ratio(codec) for codec in ENCODED} for harm in found]


def variance(core: Core, calibrator: Calibrator) -> Harms:
    """Return LLM-PQ's variance indicator of each format and layer, unless the cache has it from a pass of the exact
    model over the calibration text and its checkpoint. Raise as a job of the model."""
    text = calibrator.text
    assert text is not None

    def build(file: Path) -> None:
        def moments(exact: Core, score: Score) -> dict[str, list[float]]:
            recorder = MomentRecorder(exact.skeleton)
            text.watch(recorder.watching(), score)
            return recorder.weighted_variances()

        found, chosen = calibrator.reading(text, moments), forms(core.skeleton, PROBE)
        matrices = ({name: chosen[name] for name in layer if name in chosen} for layer in core.skeleton.layers)
        _write(file, [_indicator(core, layer, found) for layer in matrices])

    found = _stored(core, {"variance": VARIANCE_VERSION, "rows": text.digest}, build)
    return [{codec: omega / (2 ** CODECS[codec].bits - 1) ** 2 for codec in ENCODED} for omega in found]


def _stored(core: Core, key: dict[str, Any], write: Callable[[Path], None]) -> list[float]:
    """Return a number for each layer from a file of the cache. write: write it if it is not there."""

    def build(directory: Path) -> None:
        with explained(f"measuring harms with {core.source.directory} failed"):
            write(directory / FILE)

    label = next(iter(key))
    directory = prepared(core.source.directory, core.opened.given, build, model_key(core, key), core.verifier, label)
    if len(found := _numbers_in(directory / FILE)) != core.skeleton.total:
        fault = f"{directory / FILE} does not hold the {label} of {core.skeleton.total} layers"
        raise BadCheckpoint(f"{fault}; remove its directory to measure again")
    return found


def _measure(
    core: Core, calibrator: Calibrator, rows: Sequence[tuple[int, ...]], importances: Importances, file: Path
) -> None:
    """Write the harms of PROBE to a file, which holds those of the first layers after an interruption. One job of
    the exact model's engine measures one layer."""
    total = core.skeleton.total
    source = core.source.directory, core.opened.given, core.opened.locations
    probe = encoded(*source, forms(core.skeleton, PROBE), importances, core.verifier)
    plain: tuple[Format, ...] = (None,) * total
    tokens = sum(map(len, rows))
    text = f"measuring the harm of {PROBE} to {total} layers, once for this model and text: {tokens:,} tokens each"
    with (
        activity("measuring", text, total, "layers", logging.INFO) as work,
        calibrator.exact_engine(lambda _: tick()) as engine,
    ):
        engine.planner.prefill_tokens = PIECE

        def scores(formats: tuple[Format, ...]) -> list[float]:
            engine.use(Lossy(weights=formats))
            opened = engine.core.opened
            stored = opened.stored_forms
            opened.origins = opened.in_formats(
                {n: probe[n] for n, form in opened.forms.items() if form != stored.get(n)}
            )
            results = engine.score([row[:CONTEXT] for row in rows], [row[CONTEXT:] for row in rows])
            check_read(results)
            return [place["logprob"] for result in results for place in result.logprobs or ()]

        exact, found = scores(plain), _numbers_in(file)
        work.advance(len(found))
        for layer in range(len(found), total):
            changed = scores((*plain[:layer], PROBE, *plain[layer + 1 :]))
            found.append(sum((a - b) ** 2 for a, b in zip(changed, exact, strict=True)) / (2 * len(exact)))
            _write(file, found)
            work.advance(1)


def _indicator(core: Core, matrices: Mapping[str, WeightFormat], variances: Mapping[str, Sequence[float]]) -> float:
    """Return the indicator of a layer for codes of step max W - min W. variances: of each matrix, by name."""
    total = 0.0
    for name, form in matrices.items():
        low, high = ([sign * float("inf")] * max(1, form.count) for sign in (1, -1))
        for piece in pieces(name, core.opened.locations[name], form):
            low[piece.number] = min(low[piece.number], float(piece.rows.min()))
            high[piece.number] = max(high[piece.number], float(piece.rows.max()))
        tick()
        for a, b, var in zip(low, high, variances[name], strict=True):
            total += form.packed.columns * (b - a) ** 2 * var / 4
    return total


class MomentRecorder(ImportanceRecorder):
    """Also sums the inputs themselves."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton)
        self._totals = {name: [0.0] * len(tokens) for name, tokens in self._tokens.items()}

    def _note(self, name: str, number: int, x: Tensor) -> None:
        super()._note(name, number, x)
        self._totals[name][number] += float(x.double().sum())

    def weighted_variances(self) -> dict[str, list[float]]:
        """Return the variance of all inputs of each matrix, times the share of tokens that reach it, which is 1 but for
        experts; 0 for one that no token reaches."""
        result, most = {}, max(n for tokens in self._tokens.values() for n in tokens)
        for name, sums in self._sums.items():
            squares, columns = sums.sum((0, 2)).tolist(), sums.shape[-1]
            tokens, totals = self._tokens[name], self._totals[name]
            result[name] = [
                (square / (n * columns) - (total / (n * columns)) ** 2) * n / most if n else 0.0
                for square, total, n in zip(squares, totals, tokens, strict=True)
            ]
        return result


def _write(file: Path, numbers: Sequence[float]) -> None:
    part = file.with_suffix(".writing")  # the file is whole at any time
    part.write_text(json.dumps(numbers), encoding="utf-8")
    part.rename(file)


def _numbers_in(file: Path) -> list[float]:
    """Return the numbers in a file; none if it does not exist or holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, float) for each in found) else []


def step_ratio(codec: str) -> float:
    """Return the squared step of a format's codes relative to that of PROBE, for equal ranges."""
    levels, own = (2 ** CODECS[b].bits - 1 for b in (PROBE, codec))
    return float((levels / own) ** 2)
