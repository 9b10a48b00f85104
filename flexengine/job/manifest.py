"""What a job's results depend on: a flat record kept in its journal and compared before a job goes on.

Not in it is what results do not depend on: where tensors lie (policy, memory sizes, offload directory), how many rows
are asked for, the trace. So a job may go on with other memory or a larger --limit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput

FORMAT = 2
MODEL_FILES = "model_files"
INPUT_DIGEST = "input_sha256"
LOSSY = "lossy"
_APART = frozenset({INPUT_DIGEST, LOSSY, MODEL_FILES})  # compared by a function of its own
INFORMATIVE = frozenset({"input", "model"})  # names, for people: both may be renamed as long as their bytes stay
_ABSENT = "absent"
_LONG = 60  # characters of a value in a message
_MOST_FILES = 4  # named in a message

Manifest = dict[str, Any]


def make_manifest(
    sampling: SamplingParams, given: Mapping[str, Any], engine: Mapping[str, Any], lossy: Mapping[str, Any]
) -> Manifest:
    """The manifest of a job: name -> JSON value.

    sampling: the job's defaults. given: what identifies its input and output. engine: what identifies the model and
    its arithmetic. lossy: switches that trade quality for speed, by name.
    """
    parts = ({"format": FORMAT}, given, engine, asdict(sampling), {LOSSY: dict(lossy)})
    manifest = {name: value for part in parts for name, value in part.items()}
    plain: Manifest = json.loads(json.dumps(manifest))  # as it will be read back: a tuple becomes a list
    return plain


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One message per compared value that differs: values in the order of `now`, then switches, then files."""
    before, after = was.get(LOSSY) or {}, now.get(LOSSY) or {}
    switches = [name for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]
    told = {*INFORMATIVE, *_APART, *switches}  # a switch says more than the cache's format, which follows from it
    files = _changed_files(was, now)
    if not files and rewritten(was, now):
        told.discard("model")  # of files written anew only samples were compared: they may be those of another model
    names = [name for name in dict.fromkeys((*now, *was)) if name not in told]
    return [
        *_changed_input(was, now),
        *(f"{name}: was {_shown(was, name)}, now {_shown(now, name)}" for name in names if not _equal(was, now, name)),
        *(f"{name}: was {_switch(before, name)}, now {_switch(after, name)}" for name in switches),
        *files,
    ]


def rewritten(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the model files whose time has changed and of whose contents only samples were compared."""
    old, new = was.get(MODEL_FILES, {}), now.get(MODEL_FILES, {})
    return [name for name in new if new[name]["sha256"] is None and new[name]["mtime_ns"] != old[name]["mtime_ns"]]


def check_same(was: Mapping[str, Any], now: Mapping[str, Any], journal: object) -> None:
    """Raises InvalidInput, listing what differs, if results of the two jobs may not stand in one output."""
    if was.get("format") != now.get("format"):
        raise InvalidInput(
            f"{journal} was begun by another version of flexengine (format {_shown(was, 'format')}, now"
            f" {_shown(now, 'format')}), which describes a job and its model in another way, so that they cannot be"
            " compared; finish it with that version, give --restart to start over, or name another --output"
        )
    if changed := differences(was, now):
        raise InvalidInput(
            f"{journal} holds results of another job: {'; '.join(changed)}."
            " Give what it was given to go on with it, --restart to start over, or name another --output"
        )


def _changed_input(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One message if the input's bytes are others; digests alone would tell a user little."""
    if was.get(INPUT_DIGEST) == now.get(INPUT_DIGEST):
        return []
    old, new = (f"{m.get('input', _ABSENT)}, SHA-256 {str(m.get(INPUT_DIGEST, _ABSENT))[:12]}..." for m in (was, now))
    return [f"the input has other contents: was {old}, now {new}"]


def _switch(lossy: Mapping[str, Any], name: str) -> str:
    """A lossy switch for a message; a text to calibrate with is known by its digest."""
    value = lossy.get(name)
    if value is None:
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _changed_files(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One message per model file that is another, at most `_MOST_FILES`; their times do not count."""
    old, new = was.get(MODEL_FILES, {}), now.get(MODEL_FILES, {})
    found = [(name, _change(old.get(name), new.get(name))) for name in sorted({*old, *new})]
    said = [f"model file {name} {change}" for name, change in found if change]
    more = [f"{len(said) - _MOST_FILES} more model files have changed"] if len(said) > _MOST_FILES else []
    return said[:_MOST_FILES] + more


def _change(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """What has become of a file; empty if its size and contents are the same."""
    if old is None or new is None:
        return "was not there, and is now" if old is None else "is missing"
    if old["bytes"] != new["bytes"]:
        return f"had {old['bytes']:,} bytes, and has {new['bytes']:,} now"
    return "" if all(old[name] == new[name] for name in ("sample", "sha256")) else "has other contents of the same size"


def _equal(was: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    return name in was and name in now and bool(was[name] == now[name]) and type(was[name]) is type(now[name])


def _shown(manifest: Mapping[str, Any], name: str) -> str:
    if name not in manifest:
        return _ABSENT
    text = json.dumps(manifest[name])
    return text if len(text) <= _LONG else text[:_LONG] + "..."
