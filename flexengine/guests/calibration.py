"""Calibration: the exact model reads a text, in an ordinary job, to measure which errors of encoded weights matter,
which magnitudes activations have, for the thresholds of sparsified activations, and how many bits each layer needs."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from flexengine import texts
from flexengine.activity import activity, message, tick
from flexengine.codec.packed import CODECS
from flexengine.config import Result
from flexengine.engine.calibrator import Calibrator, Score
from flexengine.engine.core import Core
from flexengine.errors import BadCheckpoint, BudgetTooSmall, InvalidInput, size_within
from flexengine.guests.flash import traces
from flexengine.guests.flash.traces import Magnitudes
from flexengine.lossy import BUNDLED, Lossy, weights_text
from flexengine.model.encoding import ImportanceRecorder, Importances, encoded, forms, load_importances
from flexengine.model.files import config_digest
from flexengine.model.prepare import prepared
from flexengine.model.shards import save
from flexengine.model.tokenizer import excerpts
from flexengine.plan.lp import Format, Layer, Option, adabits
from flexengine.worker.open_model import OpenModel

VERSION = 2  # part of the cache's key: raise it when the computed importances change
MAGNITUDES_VERSION = 1  # likewise
ROWS, TOKENS = 32, 256  # stretches of the text, spread evenly over it, and tokens of each
PIECE = 128  # tokens of a prefill chunk, for any memory size: the last bits depend on where a prompt is cut
FILE, MAGNITUDES = "importances.safetensors", "magnitudes.safetensors"
HARMS_VERSION = 1  # part of the cache's key: raise it when the measured harms change
FORMATS: tuple[Format, ...] = (None, "int8", "int4", "int3")  # formats that a layer may get
PROBE = "int3"  # format whose harm is measured: of those that a layer may get, it has the least noise
PROBE_ROWS = 4  # stretches of the calibration text that are scored
CONTEXT = 8  # first tokens of a stretch, which are not scored
HARMS = "harms.json"
UNREAD = "{}, to calibrate with, cannot be read as UTF-8 text"
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """The stretches of text that the exact model reads."""

    rows: tuple[tuple[int, ...], ...]  # token ids, one tuple per stretch
    prefill_tokens: ClassVar[int] = PIECE  # tokens of a prefill chunk when the model reads the text

    @cached_property
    def digest(self) -> str:
        """Hex digest of the token ids."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:32]

    def importances(self, core: Core, measured: Callable[[], dict[str, Tensor]]) -> Importances:
        """Return the importances of an engine's model, from the cache if they have been measured before. measured:
        measure the importances; its OSErrors become InvalidInput, its other errors are raised unchanged."""
        return load_importances(self._prepared(core, ("calibration", VERSION), FILE, measured, save))

    def magnitudes(self, core: Core, measured: Callable[[], Magnitudes]) -> Magnitudes:
        """Return the magnitudes of the activations of an engine's model. Arguments and errors as of `importances`."""
        kind = "magnitudes", MAGNITUDES_VERSION
        return traces.load(self._prepared(core, kind, MAGNITUDES, measured, Magnitudes.write))

    def _prepared(
        self, core: Core, kind: tuple[str, int], file: str, measured: Callable[[], T], write: Callable[[T, Path], None]
    ) -> Path:
        """Return a file of the cache, after writing it if it does not exist. kind: what is in it, and its version."""

        def build(directory: Path) -> None:
            with _explained(f"calibrating with {core.source.directory} failed"):  # not for the cache's directory
                found = measured()
            write(found, directory / file)

        key = _key(core, {kind[0]: kind[1], "rows": self.digest})
        label = f"{kind[0]}, " * (file != FILE) + str(core.dtype).removeprefix("torch.")
        return prepared(core.source.directory, core.opened.given, build, key, core.verifier, label) / file

    def measure(self, core: Core, score: Score) -> dict[str, Tensor]:
        """Return the importances of an engine's matrices. Raise InvalidInput if a stretch cannot be run."""
        recorder = ImportanceRecorder(core.skeleton)
        self._watch(recorder.watching(), score)
        return recorder.means()

    def measure_magnitudes(self, core: Core, score: Score) -> Magnitudes:
        """Return the magnitudes of the activations of an engine's model. Arguments and errors as of `measure`."""
        recorder = traces.MagnitudeRecorder([block for block in core.opened.flash.feed_forward if block])
        self._watch(recorder.watching(), score)
        return recorder.magnitudes()

    def _watch(self, watching: AbstractContextManager[None], score: Score) -> None:
        with watching:
            check_read(score([row[:-1] for row in self.rows], [row[-1:] for row in self.rows]))


def _key(core: Core, parts: dict[str, Any]) -> str:
    """Return the key of what was computed with an engine's model, besides its weights. parts: of this kind."""
    return json.dumps({**parts, "config": config_digest(core.opened.given), "dtype": str(core.dtype)})


def check_read(results: Sequence[Result]) -> None:
    """Raise InvalidInput if a stretch of the text could not be run."""
    if bad := next((r for r in results if r.error is not None), None):
        raise InvalidInput(f"the model cannot read stretch {bad.index} of the text to calibrate with: {bad.error}")


def check(name: str, tokenizer: Any) -> None:
    """Raise InvalidInput if there is no tokenizer or the file cannot be opened. Read at most one byte. Arguments as of
    `calibration`."""
    if tokenizer is None:
        raise InvalidInput(
            "the checkpoint has no tokenizer, so it cannot read a text to calibrate with; put its"
            " tokenizer files beside it, or leave calibrate and sparsify out"
        )
    if name != BUNDLED:
        if Path(name).is_fifo() or Path(name).is_char_device():
            raise InvalidInput(
                f"{name}, to calibrate with, is a pipe or a device, but it must be read more than once;"
                " give a UTF-8 text file"
            )
        with _explained(UNREAD.format(name)), Path(name).open("rb") as file:
            file.read(1)


def calibration(name: str, tokenizer: Any, context: int | None) -> Calibration:
    """Return the stretches of a text. Raise InvalidInput if there is no tokenizer, the text cannot be read, or it is
    too short.

    Args:
        name: name of a UTF-8 file, or BUNDLED.
        tokenizer: None if the checkpoint has none.
        context: most tokens of a sequence; None if there is no limit.
    """
    check(name, tokenizer)
    remedy = "give a longer text, or leave the name out to use the bundled text"
    length = min(TOKENS, context or TOKENS)
    return Calibration(tuple(excerpts(tokenizer, name, read(name), ROWS, length, "calibrating takes", remedy)))


def read(name: str) -> str:
    """Return the text of a UTF-8 file, or the bundled text. Raise InvalidInput if the file cannot be read."""
    if name == BUNDLED:
        return texts.calibration()
    with _explained(UNREAD.format(name)):
        return Path(name).read_text(encoding="utf-8")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{what}: {error}") from error


class Bits:
    """Weights `mixed`: the format of every layer is chosen such that the weights fit a budget at the least harm.

    The harm of a format to a layer is measured for PROBE: stretches of the calibration text are scored with this layer
    encoded and the others exact. With changes d of the tokens' log probabilities,

        harm = mean(d^2) / 2        nats per token

    This estimates the divergence from the exact model's probabilities, and has less noise than mean(d). Harms of other
    formats follow from the squared steps of their codes. plan/lp.py chooses. Harms are stored in the cache.

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
                f"the budget is {size_within(self.budget, up=False)}, but the weights of {core.source.name} take"
                f" at least {size_within(least)}, with all layers in {FORMATS[-1]}, and embedding and output"
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
            with _explained(f"measuring harms with {core.source.directory} failed"):
                self._measure(text.rows[:: ROWS // PROBE_ROWS], importances, directory / HARMS)

        key = _key(core, {"harms": HARMS_VERSION, "importances": importances.digest, "format": PROBE})
        path = prepared(core.source.directory, core.opened.given, build, key, core.verifier, "harms") / HARMS
        if len(found := _harms_in(path)) != core.skeleton.total:
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

            exact, found = scores(plain), _harms_in(file)
            work.advance(len(found))
            for layer in range(len(found), total):
                changed = scores((*plain[:layer], PROBE, *plain[layer + 1 :]))
                found.append(sum((a - b) ** 2 for a, b in zip(changed, exact, strict=True)) / (2 * len(exact)))
                part = file.with_suffix(".writing")  # the file is whole at any time
                part.write_text(json.dumps(found), encoding="utf-8")
                part.rename(file)
                work.advance(1)


def _harms_in(file: Path) -> list[float]:
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
