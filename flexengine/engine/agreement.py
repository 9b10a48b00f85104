"""The values that all results of a job must share: those that the user gave, as its manifest, and those that the first
engine chose, as its settings. Later runs of the job, and other engines that run parts of it, take them over."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexengine import __version__
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.same_job import CHAT, INPUT_DIGEST, MODEL_FILES, SCORE, Manifest, make_manifest
from flexengine.lossy import Lossy

if TYPE_CHECKING:  # it imports torch, which is not needed here
    from flexengine.engine.session import Session

# Names of settings.
LOSSY, CACHE, IMPORTANCES, PREFILL_TOKENS, THRESHOLDS = "lossy", "cache", "importances", "prefill_tokens", "thresholds"
_AGAIN = "give --restart (restart=True in Python) to run the job again"


def engine_part(engine: "Session", known: Manifest) -> dict[str, Any]:
    """Return the values of a manifest that identify the model and its arithmetic.

    Args:
        known: manifest of the run that began the job; empty if there was none.
    """
    return {"version": __version__, **engine.fingerprint(known.get(MODEL_FILES, {}))}


def switches_part(engine: "Session") -> dict[str, Any]:
    """Return the lossy switches of a manifest: those that the user gave, or those that the planner may choose from."""
    allow = engine.options.allow
    return {"allow": sorted(allow)} if allow else engine.switches


def manifest(
    rows: InputRows, params: SamplingParams, engine: Mapping[str, Any], switches: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of a job of a file.

    Args:
        params: sampling parameters of rows without fields of these names.
        engine, switches: see `engine_part` and `switches_part`.
    """
    given: dict[str, Any] = {"input": rows.path.name, INPUT_DIGEST: rows.scan().sha256, "input_format": rows.form,
                             "prompt_column": rows.prompt_column, "output_format": "jsonl"}  # fmt: skip
    if rows.chat:
        given[CHAT] = True
    if rows.score:
        given[SCORE] = True
    return make_manifest(params, given, engine, switches)


def settings_of(engine: "Session", prefill_tokens: int) -> dict[str, Any]:
    """Return the choices of an engine. prefill_tokens: most tokens of a prefill chunk under its policy."""
    importances = engine.calibrator.importances
    fitted = {IMPORTANCES: importances.digest} if importances is not None else {}
    sparse = {THRESHOLDS: thresholds} if (thresholds := engine.calibrator.thresholds) else {}
    return {PREFILL_TOKENS: prefill_tokens, LOSSY: engine.lossy.enabled, CACHE: engine.core.cache_form, **fitted,
            **sparse}  # fmt: skip


def take_over(engine: "Session", settings: Mapping[str, Any]) -> None:
    """Let an engine use the choices with which its job began. `Planner.keep_prefill` takes the size of prefill chunks.
    settings: empty if the job begins now.

    Raises:
        InvalidInput: the engine cannot make the same choices.
    """
    if engine.options.allow and (chosen := settings.get(LOSSY)) is not None:
        engine.use(Lossy(**chosen))
        # A format of the cache that the user gave is compared with the manifest instead.
        if (cache := settings.get(CACHE, "")) and cache != (now := engine.core.cache_form):
            raise InvalidInput(f"this job chose a cache of {cache}, which is {now} now; {_AGAIN}")
    began = settings.get(IMPORTANCES)
    if began is not None and (current := engine.calibrator.importances) is not None and current.digest != began:
        raise InvalidInput(
            f"this job began with weights calibrated to {began}, but the cache no longer has these importances, and"
            f" calibrating again, with other memory or libraries, gave {current.digest}; {_AGAIN}"
        )
    if (thresholds := settings.get(THRESHOLDS)) is not None and thresholds != engine.calibrator.thresholds:
        raise InvalidInput(
            "this job began with other thresholds of sparsified activations than the cache has now: they were removed"
            f" from it, and measuring them again, with other memory or libraries, gave other numbers; {_AGAIN}"
        )
