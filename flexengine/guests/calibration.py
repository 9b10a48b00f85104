"""Calibration: the exact model reads a text, in an ordinary job, to measure which errors of encoded weights matter,
which magnitudes activations have, for the thresholds of sparsified activations, and how many bits each layer needs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from flexengine import texts
from flexengine.config import Result
from flexengine.engine.calibrator import Score
from flexengine.engine.core import Core
from flexengine.errors import InvalidInput
from flexengine.guests.flash import traces
from flexengine.guests.flash.traces import Magnitudes
from flexengine.lossy import BUNDLED
from flexengine.model.encoding import ImportanceRecorder, Importances, load_importances
from flexengine.model.files import config_digest
from flexengine.model.prepare import prepared
from flexengine.model.shards import save
from flexengine.model.tokenizer import excerpts

VERSION = 2  # part of the cache's key: raise it when the computed importances change
MAGNITUDES_VERSION = 1  # likewise
ROWS, TOKENS = 32, 256  # stretches of the text, spread evenly over it, and tokens of each
PIECE = 128  # tokens of a prefill chunk, for any memory size: the last bits depend on where a prompt is cut
FILE, MAGNITUDES = "importances.safetensors", "magnitudes.safetensors"
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
            with explained(f"calibrating with {core.source.directory} failed"):  # not for the cache's directory
                found = measured()
            write(found, directory / file)

        key = model_key(core, {kind[0]: kind[1], "rows": self.digest})
        label = f"{kind[0]}, " * (file != FILE) + str(core.dtype).removeprefix("torch.")
        return prepared(core.source.directory, core.opened.given, build, key, core.verifier, label) / file

    def measure(self, core: Core, score: Score) -> dict[str, Tensor]:
        """Return the importances of an engine's matrices. Raise InvalidInput if a stretch cannot be run."""
        recorder = ImportanceRecorder(core.skeleton)
        self.watch(recorder.watching(), score)
        return recorder.means()

    def measure_magnitudes(self, core: Core, score: Score) -> Magnitudes:
        """Return the magnitudes of the activations of an engine's model. Arguments and errors as of `measure`."""
        recorder = traces.MagnitudeRecorder([block for block in core.opened.flash.feed_forward if block])
        self.watch(recorder.watching(), score)
        return recorder.magnitudes()

    def watch(self, watching: AbstractContextManager[None], score: Score) -> None:
        """Read the text within a context that records. Raise InvalidInput if a stretch cannot be run."""
        with watching:
            check_read(score([row[:-1] for row in self.rows], [row[-1:] for row in self.rows]))


def model_key(core: Core, parts: dict[str, Any]) -> str:
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
        fault = "the checkpoint has no tokenizer, so it cannot read a text to calibrate with"
        raise InvalidInput(f"{fault}; put its tokenizer files beside it, or leave calibrate and sparsify out")
    if name != BUNDLED:
        if Path(name).is_fifo() or Path(name).is_char_device():
            fault = f"{name}, to calibrate with, is a pipe or a device, but it must be read more than once"
            raise InvalidInput(f"{fault}; give a UTF-8 text file")
        with explained(UNREAD.format(name)), Path(name).open("rb") as file:
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
    with explained(UNREAD.format(name)):
        return Path(name).read_text(encoding="utf-8")


@contextmanager
def explained(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{what}: {error}") from error
