"""Calibration: the exact model reads a text, in an ordinary job, to measure which errors of encoded weights matter, and
which magnitudes activations have, for the thresholds of sparsified activations."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flexengine import texts
from flexengine.activity import Activity, Listener, activity
from flexengine.config import Result
from flexengine.engine.core import Core
from flexengine.engine.generating import GENERATING
from flexengine.engine.planner import Planner
from flexengine.errors import InvalidInput
from flexengine.flash import magnitudes
from flexengine.flash.magnitudes import Magnitudes
from flexengine.flash.trained import THRESHOLDS_TEXT
from flexengine.lossy import BUNDLED, PREDICTORS, Lossy
from flexengine.model.importance import Importances, Recorder, load
from flexengine.model.prepare import prepared
from flexengine.model.shards import save
from flexengine.model.tokenizer import opening, spread, token_ids
from flexengine.model.verify import Verifier

VERSION = 2  # part of the cache's key: raise it when the computed importances change
MAGNITUDES_VERSION = 1  # likewise
ROWS, TOKENS = 32, 256  # stretches of the text, spread evenly over it, and tokens of each
PIECE = 128  # tokens of a prefill chunk, for any memory size: the last bits depend on where a prompt is cut
FILE, MAGNITUDES = "importances.safetensors", "magnitudes.safetensors"
Ids = Sequence[int]
T = TypeVar("T")
Score = Callable[[list[Ids], list[Ids]], list[Result]]  # `Engine.score` of contexts and continuations


@dataclass(frozen=True)
class Calibration:
    """The stretches of text that the exact model reads.

    Attributes:
        rows: token ids, one tuple per stretch.
        digest: hex digest of the token ids.
    """

    rows: tuple[tuple[int, ...], ...]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:32]

    def importances(
        self, source: Path, files: Sequence[Path], dtype: torch.dtype, measured: Callable[[], dict[str, Tensor]],
        verifier: Verifier | None = None,
    ) -> Importances:  # fmt: skip
        """Return the importances of a model, from the cache if they have been measured before.

        Args:
            source: the model's directory.
            files: the model's files, which are part of the cache's key.
            dtype: dtype of the activations.
            measured: measure the importances.
            verifier: compares prepared files with their checksums; None if none are compared.

        Raises:
            InvalidInput: `measured` raised OSError. Its other errors are raised unchanged.
        """
        key = {"calibration": VERSION, "rows": self.digest, "dtype": str(dtype)}

        def build(directory: Path) -> None:
            save(_explained_read(source, measured), directory / FILE)

        return load(prepared(source, files, build, json.dumps(key), verifier, _short(dtype)) / FILE)

    def magnitudes(
        self, source: Path, files: Sequence[Path], dtype: torch.dtype, measured: Callable[[], Magnitudes],
        verifier: Verifier | None = None,
    ) -> Magnitudes:  # fmt: skip
        """Return the magnitudes of a model's activations. Arguments and errors as of `importances`."""
        key = {"magnitudes": MAGNITUDES_VERSION, "rows": self.digest, "dtype": str(dtype)}

        def build(directory: Path) -> None:
            _explained_read(source, measured).write(directory / MAGNITUDES)

        made = prepared(source, files, build, json.dumps(key), verifier, f"magnitudes, {_short(dtype)}")
        return magnitudes.load(made / MAGNITUDES)

    def measure(self, core: Core, score: Score) -> dict[str, Tensor]:
        """Return the importances of the matrices of an engine's model.

        Args:
            core: the engine's core.
            score: the engine's `score`.

        Raises:
            InvalidInput: a stretch cannot be run.
        """
        recorder = Recorder(core.skeleton)
        self._read(recorder.watching(), score)
        return recorder.means()

    def measure_magnitudes(self, core: Core, score: Score) -> Magnitudes:
        """Return the magnitudes of the activations of an engine's model. Arguments and errors as of `measure`."""
        recorder = magnitudes.Recorder([block for block in core.opened.found if block])
        self._read(recorder.watching(), score)
        return recorder.magnitudes()

    def _read(self, watching: AbstractContextManager[None], score: Score) -> None:
        with watching:
            results = score([row[:-1] for row in self.rows], [row[-1:] for row in self.rows])
        if bad := next((r for r in results if r.error is not None), None):
            raise InvalidInput(f"the model cannot read stretch {bad.index} of the text to calibrate with: {bad.error}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _explained_read(source: Path, measured: Callable[[], T]) -> T:
    """Return what was measured. Raise InvalidInput if a file of the model cannot be read or written."""
    try:
        return measured()
    except OSError as error:  # of the checkpoint or the offload directory, not of the cache's directory
        raise InvalidInput(f"calibrating with {source} failed: {error}") from error


class Calibrator:
    """What the exact model measures of an engine's model, once for a text: the importances of weights, and the
    magnitudes of activations."""

    def __init__(self, core: Core, exact_engine: Callable[[Listener], "ExactEngine"]) -> None:
        """Check that the text can be read. Raise InvalidInput if it cannot.

        Args:
            exact_engine: return an engine for the same model with the checkpoint's own weights, which reports to a
                listener.
        """
        self.core, self.exact_engine = core, exact_engine
        self._texts: dict[str, Calibration] = {}  # by name
        self._importances: dict[str, Importances] = {}  # by digest of the text
        self._magnitudes: dict[str, Magnitudes] = {}  # likewise
        for name in filter(None, (core.lossy.calibrate, self._sparse_name)):
            check(name, core.tokenizer)

    @property
    def _sparse_name(self) -> str | None:
        return self.core.lossy.sparsity[1] if self.core.lossy.sparsity else None

    @property
    def text(self) -> Calibration | None:
        """The text to calibrate weights with; None if none are calibrated. Raise InvalidInput if there is too little
        text."""
        lossy = self.core.lossy
        return self._text(lossy.calibrate) if lossy.fitted or not lossy.decided else None

    @property
    def sparse_text(self) -> Calibration | None:
        """The text for the thresholds of sparsified activations; None if there are none. Raise as `text`."""
        return self._text(self._sparse_name)

    def _text(self, name: str | None) -> Calibration | None:
        if name and name not in self._texts:
            self._texts[name] = calibration(name, self.core.tokenizer, self.core.skeleton.context_length)
        return self._texts[name] if name else None

    @property
    def importances(self) -> Importances | None:
        """Importances by which weights are encoded; None if nothing is calibrated. Measured unless they have been."""
        if (text := self.text) is None:
            return None
        if text.digest not in self._importances:
            self._importances[text.digest] = text.importances(*self._model, partial(self._measure, text, text.measure),
                                                              self.core.verifier)  # fmt: skip
        return self._importances[text.digest]

    @property
    def thresholds(self) -> list[float]:
        """Threshold of each layer for sparsified activations; none without. Measured unless they have been."""
        sparsity, text = self.core.lossy.sparsity, self.sparse_text
        if sparsity is None or text is None:
            return []
        if text.digest not in self._magnitudes:
            measured = partial(self._measure, text, text.measure_magnitudes)
            self._magnitudes[text.digest] = text.magnitudes(*self._model, measured, self.core.verifier)
        self._check_trained(text)
        return self._magnitudes[text.digest].thresholds(sparsity[0])

    def _check_trained(self, text: Calibration) -> None:
        """Raise InvalidInput if the predictors in use were trained with thresholds of another text."""
        made = self.core.opened.trained
        if made is None or self.core.lossy.flash != PREDICTORS or made.about.get(THRESHOLDS_TEXT) == text.digest:
            return
        raise InvalidInput(f"the predictors of {self.core.source.name} were trained with thresholds of another text"
                           f" than {self._sparse_name} has now; train them again with the same --sparsify and"
                           " --calibration-text: flexengine flash train MODEL")  # fmt: skip

    @property
    def _model(self) -> tuple[Path, Sequence[Path], torch.dtype]:
        return self.core.source.directory, self.core.opened.given, self.core.dtype

    def _measure(self, text: Calibration, measure: Callable[[Core, Score], T]) -> T:
        """Return what `measure`, of the text, returns for an engine of the exact model."""
        tokens = sum(map(len, text.rows))
        about = f"calibrating, once for this model and text: the exact model reads {tokens:,} tokens"
        with activity("calibrating", about, level=logging.INFO) as work:

            def follow(record: Activity) -> None:
                if record.name == GENERATING:
                    work.update(record.done, record.total)

            with self.exact_engine(follow) as engine:
                engine.planner.prefill_tokens = PIECE
                return measure(engine.core, engine.score)


class ExactEngine(Protocol):
    """The part of `Engine` that measurements with the exact model use."""

    core: Core
    planner: Planner

    def use(self, lossy: Lossy) -> None: ...

    def __enter__(self) -> "ExactEngine": ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

    @property
    def score(self) -> Score: ...


def check(name: str, tokenizer: Any) -> None:
    """Raise InvalidInput if there is no tokenizer or the file cannot be opened. Read at most one byte.

    Args:
        name: name of a UTF-8 file, or BUNDLED.
        tokenizer: None if the checkpoint has none.
    """
    if tokenizer is None:
        raise InvalidInput("the checkpoint has no tokenizer, so it cannot read a text to calibrate with; put its"
                           " tokenizer files beside it, or leave calibrate and sparsify out")  # fmt: skip
    if name != BUNDLED:
        if Path(name).is_fifo() or Path(name).is_char_device():
            raise InvalidInput(f"{name}, to calibrate with, is a pipe or a device, but it must be read more than once;"
                               " give a UTF-8 text file")  # fmt: skip
        with _explained(name), Path(name).open("rb") as file:
            file.read(1)


def calibration(name: str, tokenizer: Any, context: int | None) -> Calibration:
    """Return the stretches of a text.

    Args:
        name: name of a UTF-8 file, or BUNDLED.
        tokenizer: None if the checkpoint has none.
        context: most tokens of a sequence; None if there is no limit.

    Raises:
        InvalidInput: there is no tokenizer, the text cannot be read, or it is too short.
    """
    check(name, tokenizer)
    begin, ids = opening(tokenizer), token_ids(tokenizer, read(name), special=False)
    length = min(TOKENS, context or TOKENS) - len(begin)
    rows = spread(begin, ids, ROWS, length)
    if not rows:
        raise InvalidInput(f"{name} has {len(ids):,} tokens; calibrating takes {ROWS * length:,}; give a longer text,"
                           " or leave the name out to use the bundled text")  # fmt: skip
    return Calibration(tuple(map(tuple, rows)))


def read(name: str) -> str:
    """Return the text of a UTF-8 file, or the bundled text. Raise InvalidInput if the file cannot be read."""
    if name == BUNDLED:
        return texts.calibration()
    with _explained(name):
        return Path(name).read_text(encoding="utf-8")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{name}, to calibrate with, cannot be read as UTF-8 text: {error}") from error
