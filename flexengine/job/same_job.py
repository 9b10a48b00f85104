"""Whether a job that is resumed is the one that began: its manifest is compared with that of the journal."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.manifest import INPUT_DIGEST, LOSSY, MODEL_FILES, ONLY_IF_SET

WEIGHTS = "weights"  # the switch whose value may be a format per layer
_APART = frozenset({INPUT_DIGEST, LOSSY, MODEL_FILES})  # each compared by its own function
INFORMATIVE = frozenset({"input", "model"})  # names, not compared: files may be renamed while their bytes stay equal
_ABSENT, _EXACT = "absent", "exact"
# Values, as JSON, of names that a manifest may lack.
_DEFAULTS = {"chat": "false", "score": "false"} | {n: json.dumps(getattr(SamplingParams(), n)) for n in ONLY_IF_SET}
_LONG = 60  # most characters of a value in a message
_MOST_FILES = 4  # most file names in a message


class OtherJob(InvalidInput):
    """A journal holds results of another job."""


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one message per compared value that differs: the input, values in the order of `now`, switches, files.
    was: the stored manifest. now: the resumed job's manifest."""
    before, after = was.get(LOSSY) or {}, now.get(LOSSY) or {}
    switches = [name for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]
    # The value "cache" follows from the switch "cache", whose message is enough.
    skipped = {*INFORMATIVE, *_APART, *switches}
    files = _changed_files(was, now)
    if not files and rewritten(was, now):
        skipped.discard("model")  # only samples of rewritten files were compared, which may be another model's
    names = [name for name in dict.fromkeys((*now, *was)) if name not in skipped]
    absent = object()
    pairs = {name: (was.get(name, absent), now.get(name, absent)) for name in names}
    changed = [name for name, (old, new) in pairs.items() if old != new or type(old) is not type(new)]
    inputs = [
        f"{m.get('input', _ABSENT)}, SHA-256 {str(m.get(INPUT_DIGEST, _ABSENT))[:12]}..."
        for m in (was, now)
        if was.get(INPUT_DIGEST) != now.get(INPUT_DIGEST)
    ]
    return [
        *([f"the input has other contents: was {inputs[0]}, now {inputs[1]}"] if inputs else []),
        *(f"{name}: was {_shown(was, name)}, now {_shown(now, name)}" for name in changed),
        *(_changed_switch(before, after, name) for name in switches),
        *files,
    ]


def rewritten(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the model files whose time has changed and whose contents were compared by samples only."""
    old, new = was.get(MODEL_FILES, {}), now.get(MODEL_FILES, {})
    return [name for name in new if new[name]["sha256"] is None and new[name]["mtime_ns"] != old[name]["mtime_ns"]]


def check_same(was: Mapping[str, Any], now: Mapping[str, Any], journal: object) -> None:
    """Raise OtherJob, with the differences, if results of the two jobs must not be in one output. journal: path of the
    journal, for messages."""
    if was.get("format") != now.get("format"):
        raise OtherJob(
            f"{journal} was begun by another version of flexengine (format {_shown(was, 'format')}, now"
            f" {_shown(now, 'format')}), whose manifest cannot be compared with this version's; finish the job with"
            " that version, give --restart (restart=True in Python) to start over, or name another output"
        )
    if changed := differences(was, now):
        raise OtherJob(
            f"{journal} holds results of another job: {'; '.join(changed)}. Give the same options, input and model to"
            " continue that job, give --restart (restart=True in Python) to start over, or name another output"
        )


def _changed_switch(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> str:
    """Return the message for a switch that differs. Of formats by layer, the first layer that differs is named."""
    was, now = before.get(name), after.get(name)
    if name == WEIGHTS and isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        changed = [(j, old, new) for j, (old, new) in enumerate(zip(was, now, strict=True)) if old != new]
        (layer, old, new), more = changed[0], len(changed) - 1
        others = f", and {more} more layers differ" if more else ""
        return f"{name}: layer {layer} was {old or _EXACT}, now {new or _EXACT}{others}"
    return f"{name}: was {_switch(before, name)}, now {_switch(after, name)}"


def _switch(lossy: Mapping[str, Any], name: str) -> str:
    """Return a lossy switch as text for a message. The calibration text is named by its digest."""
    value = lossy.get(name)
    if value is None:
        return "not given"
    if name == WEIGHTS and isinstance(value, list):
        counts = Counter(each or _EXACT for each in value)
        return " + ".join(f"{count} x {each}" for each, count in counts.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _changed_files(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one message per model file whose size or contents differ, at most _MOST_FILES, and one with the number of
    the others."""
    old, new, messages = was.get(MODEL_FILES, {}), now.get(MODEL_FILES, {}), list[str]()
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            messages.append(f"model file {name} {'is missing' if name in old else 'was added'}")
        elif old[name]["bytes"] != new[name]["bytes"]:
            sizes = f"had {old[name]['bytes']:,} bytes, and has {new[name]['bytes']:,} now"
            messages.append(f"model file {name} {sizes}")
        elif any(old[name][field] != new[name][field] for field in ("sample", "sha256")):
            messages.append(f"model file {name} has other contents of the same size")
    more = [f"{len(messages) - _MOST_FILES} more model files have changed"] if len(messages) > _MOST_FILES else []
    return messages[:_MOST_FILES] + more


def _shown(manifest: Mapping[str, Any], name: str) -> str:
    if name not in manifest:
        return _DEFAULTS.get(name, _ABSENT)
    text = json.dumps(manifest[name])
    return text if len(text) <= _LONG else text[:_LONG] + "..."
