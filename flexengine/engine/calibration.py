"""Calibration: the exact model reads a text, in an ordinary job, to measure which errors of encoded weights matter."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flexengine import texts
from flexengine.activity import Activity, Listener, activity
from flexengine.config import Result
from flexengine.engine.core import Core
from flexengine.engine.generating import GENERATING
from flexengine.engine.planner import Planner
from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED, Lossy
from flexengine.model.importance import Importances, Recorder, load
from flexengine.model.prepare import prepared
from flexengine.model.shards import save
from flexengine.model.skeleton import Skeleton
from flexengine.model.tokenizer import opening, spread, token_ids
from flexengine.model.verify import Verifier

VERSION = 2  # part of the cache's key: raise it when the computed importances change
ROWS, TOKENS = 32, 256  # stretches of the text, spread evenly over it, and tokens of each
PIECE = 128  # tokens of a prefill chunk, for any memory size: the last bits depend on where a prompt is cut
FILE = "importances.safetensors"
Ids = Sequence[int]
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

        def build(directory: Path) -> None:
            try:
                importances = measured()
            except OSError as error:  # of the checkpoint or the offload directory, not of `directory`
                raise InvalidInput(f"calibrating with {source} failed: {error}") from error
            save(importances, directory / FILE)

        what = json.dumps({"calibration": VERSION, "rows": self.digest, "dtype": str(dtype)})
        label = str(dtype).removeprefix("torch.")
        return load(prepared(source, files, build, what, verifier, label) / FILE)

    def measure(self, skeleton: Skeleton, score: Score) -> dict[str, Tensor]:
        """Return the importances of the matrices of an engine's skeleton.

        Args:
            skeleton: the engine's modules.
            score: the engine's `score`.

        Raises:
            InvalidInput: a stretch cannot be run.
        """
        recorder = Recorder(skeleton)
        with recorder.watching():
            results = score([row[:-1] for row in self.rows], [row[-1:] for row in self.rows])
        if bad := next((r for r in results if r.error is not None), None):
            raise InvalidInput(f"the model cannot read stretch {bad.index} of the text to calibrate with: {bad.error}")
        return recorder.means()


class Calibrator:
    """Importances of the weights of an engine's model, measured once by an engine that runs the exact model."""

    def __init__(self, core: Core, exact_engine: Callable[[Listener], "ExactEngine"]) -> None:
        """Check that the text can be read. Raise InvalidInput if it cannot.

        Args:
            exact_engine: return an engine for the same model with the checkpoint's own weights, which reports to a
                listener.
        """
        self.core, self.exact_engine = core, exact_engine
        self._texts: dict[str, Calibration] = {}  # by name
        self._importances: dict[str, Importances] = {}  # by digest of the text
        if core.lossy.calibrate:
            check(core.lossy.calibrate, core.tokenizer)

    @property
    def text(self) -> Calibration | None:
        """The text to calibrate with; None if nothing is calibrated. Raise InvalidInput if there is too little text."""
        name = self.core.lossy.calibrate
        if name and name not in self._texts:
            self._texts[name] = calibration(name, self.core.tokenizer, self.core.skeleton.context_length)
        return self._texts[name] if name else None

    @property
    def importances(self) -> Importances | None:
        """Importances by which weights are encoded; None if nothing is calibrated. Measured unless they have been."""
        if (text := self.text) is None:
            return None
        if text.digest not in self._importances:
            core = self.core
            measured = text.importances(
                core.source.directory, core.opened.given, core.dtype, self._measure, core.verifier
            )
            self._importances[text.digest] = measured
        return self._importances[text.digest]

    def _measure(self) -> dict[str, Tensor]:
        assert self.text is not None
        tokens = sum(map(len, self.text.rows))
        text = f"calibrating, once for this model and text: the exact model reads {tokens:,} tokens"
        with activity("calibrating", text, level=logging.INFO) as work:

            def follow(record: Activity) -> None:
                if record.name == GENERATING:
                    work.update(record.done, record.total)

            with self.exact_engine(follow) as engine:
                engine.planner.prefill_tokens = PIECE
                return self.text.measure(engine.core.skeleton, engine.score)


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
                           " tokenizer files beside it, or leave calibrate out")  # fmt: skip
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
