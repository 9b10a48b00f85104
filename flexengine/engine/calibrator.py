"""What the exact model measures for an engine whose weights are calibrated or whose activations are sparsified."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from flexengine.activity import Activity, Listener, activity
from flexengine.config import Result
from flexengine.engine.core import Core
from flexengine.engine.sweep_reports import GENERATING
from flexengine.errors import InvalidInput
from flexengine.lossy import PREDICTORS

if TYPE_CHECKING:
    from flexengine.model.importance import Importances

# As module:name, which is imported on first use.
CHECK, CALIBRATION = "flexengine.guests.calibration:check", "flexengine.guests.calibration:calibration"
BITS = "flexengine.guests.calibration:Bits"  # chooses the formats of layers, for weights that are `mixed`
Ids = Sequence[int]
Score = Callable[[list[Ids], list[Ids]], list[Result]]  # `Engine.score` of contexts and continuations
OpenExact = Callable[[Listener], Any]  # opens an `Engine` with the checkpoint's own weights
T = TypeVar("T")


class Calibrator:
    """What the exact model measures of an engine's model, once for a text: the importances of weights, and the
    magnitudes of activations."""

    def __init__(self, core: Core, exact_engine: OpenExact) -> None:
        """Check that the text can be read. Raise InvalidInput if it cannot."""
        self.core, self.exact_engine = core, exact_engine
        self._texts: dict[str, Any] = {}  # by name
        self._importances: dict[str, Importances] = {}  # by digest of the text
        self._magnitudes: dict[str, Any] = {}  # likewise
        for name in filter(None, (core.lossy.calibrate, self._sparse_name)):
            resolve_name(CHECK)(name, core.tokenizer)

    @property
    def _sparse_name(self) -> str | None:
        return self.core.lossy.sparsity[1] if self.core.lossy.sparsity else None

    @property
    def text(self) -> Any:
        """The `Calibration` text of weights; None if none are calibrated. Raise InvalidInput if there is too little
        text."""
        lossy = self.core.lossy
        return self._text(lossy.calibrate) if lossy.fitted or not lossy.decided else None

    @property
    def sparse_text(self) -> Any:
        """The text for the thresholds of sparsified activations; None if there are none. Raise as `text`."""
        return self._text(self._sparse_name)

    def _text(self, name: str | None) -> Any:
        if name and name not in self._texts:
            calibration = resolve_name(CALIBRATION)
            self._texts[name] = calibration(name, self.core.tokenizer, self.core.skeleton.context_length)
        return self._texts[name] if name else None

    @property
    def importances(self) -> "Importances | None":
        """Importances by which weights are encoded; None if nothing is calibrated. Measured unless they have been."""
        if (text := self.text) is None:
            return None
        if text.digest not in self._importances:
            measured = partial(self._measure, text, text.measure)
            self._importances[text.digest] = text.importances(self.core, measured)
        return self._importances[text.digest]

    @property
    def thresholds(self) -> list[float]:
        """Threshold of each layer for sparsified activations; none without. Measured unless they have been."""
        sparsity, text = self.core.lossy.sparsity, self.sparse_text
        if sparsity is None or text is None:
            return []
        if text.digest not in self._magnitudes:
            measured = partial(self._measure, text, text.measure_magnitudes)
            self._magnitudes[text.digest] = text.magnitudes(self.core, measured)
        self._check_trained(text)
        thresholds: list[float] = self._magnitudes[text.digest].thresholds(sparsity[0])
        return thresholds

    def _check_trained(self, text: Any) -> None:
        """Raise InvalidInput if the predictors in use were trained with thresholds of another text."""
        made = self.core.opened.flash.trained if self.core.lossy.flash == PREDICTORS else None
        if made is None or made.thresholds_text == text.digest:
            return
        raise InvalidInput(
            f"the predictors of {self.core.source.name} were trained with thresholds of another text"
            f" than {self._sparse_name} has now; train them again with the same --sparsify and"
            " --calibration-text: flexengine flash train MODEL"
        )

    def _measure(self, text: Any, measure: Callable[[Core, Score], T]) -> T:
        """Return what `measure`, of the text, returns for an engine of the exact model."""
        tokens = sum(map(len, text.rows))
        about = f"calibrating, once for this model and text: the exact model reads {tokens:,} tokens"
        with activity("calibrating", about, level=logging.INFO) as work:

            def follow(record: Activity) -> None:
                if record.name == GENERATING:
                    work.update(record.done, record.total)

            with self.exact_engine(follow) as engine:
                engine.planner.prefill_tokens = text.prefill_tokens
                return measure(engine.core, engine.score)
