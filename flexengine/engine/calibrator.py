"""What the exact model measures for an engine whose weights are calibrated or whose activations are sparsified."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from flexengine.activity import Activity, Listener, activity
from flexengine.config import Result
from flexengine.engine.core import Core
from flexengine.engine.summary import GENERATING
from flexengine.errors import InvalidInput
from flexengine.lossy import PREDICTORS

if TYPE_CHECKING:
    from flexengine.model.encoding import Importances

# As module:name, which is imported on first use.
CHECK, CALIBRATION = "flexengine.guests.calibration:check", "flexengine.guests.calibration:calibration"
Ids = Sequence[int]
Score = Callable[[list[Ids], list[Ids]], list[Result]]  # `Engine.score` of contexts and continuations
OpenExact = Callable[[Listener], Any]  # opens an `Engine` with the checkpoint's own weights
T = TypeVar("T")


class Calibrator:
    """What the exact model measures of an engine's model, once for a text: the importances of weights, and the
    magnitudes of activations."""

    def __init__(self, core: Core, exact_engine: OpenExact) -> None:
        self.core, self.exact_engine = core, exact_engine
        self._texts: dict[str, Any] = {}  # by name
        self._found: dict[tuple[str, str], Any] = {}  # importances or magnitudes, by digest of the text and kind

    def check(self) -> None:
        """Check that the texts can be read. Raise InvalidInput if they cannot."""
        for name in filter(None, (self.core.lossy.calibrate, self._sparse_name)):
            resolve_name(CHECK)(name, self.core.tokenizer)

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
        text = self.text
        return self._once(text, "importances", text.measure) if text is not None else None

    @property
    def thresholds(self) -> list[float]:
        """Threshold of each layer for sparsified activations; none without. Measured unless they have been."""
        lossy, text = self.core.lossy, self.sparse_text
        if lossy.sparsity is None or text is None:
            return []
        magnitudes = self._once(text, "magnitudes", text.measure_magnitudes)
        made = self.core.opened.flash.trained if lossy.flash == PREDICTORS else None
        if made is not None and made.thresholds_text != text.digest:
            raise InvalidInput(
                f"the predictors of {self.core.source.name} were trained with thresholds of another text"
                f" than {self._sparse_name} has now; train them again with the same --sparsify and"
                " --calibration-text: flexengine flash train MODEL"
            )
        thresholds: list[float] = magnitudes.thresholds(lossy.sparsity[0])
        return thresholds

    def _once(self, text: Any, kind: str, measure: Callable[[Core, Score], Any]) -> Any:
        """Return the importances or magnitudes of a text. kind: the text's method that reads them, or measures them."""
        if (text.digest, kind) not in self._found:
            read = getattr(text, kind)
            self._found[text.digest, kind] = read(self.core, partial(self.reading, text, measure))
        return self._found[text.digest, kind]

    @property
    def switches(self) -> dict[str, Any]:
        """Return the lossy switches that are set. Texts for calibration and for thresholds are named by a digest of
        their tokens, and predictors by a digest of their files."""
        core, text, sparse = self.core, self.text, self.sparse_text
        named = {"calibrate": text.digest} if text is not None else {}
        if sparse is not None:
            named["sparsify"] = f"{core.lossy.sparsify} with thresholds of {sparse.digest}"
        if core.lossy.flash == PREDICTORS and (trained := core.opened.flash.trained) is not None:
            named["flash"] = f"{PREDICTORS} {trained.digest[:16]}"
        return core.lossy.enabled | named

    def reading(self, text: Any, measure: Callable[[Core, Score], T]) -> T:
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
