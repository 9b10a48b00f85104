"""Scales of quantised checkpoints, read and checked once for the same files: a large model has many GB of them."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from flexengine.config import cache_root
from flexengine.model.checkpoint import Origin
from flexengine.model.prepare import file_marks, make_private
from flexengine.model.quantised.matrices import SCALE_KINDS, check_scales

_SETTLED = 3.0  # seconds after a change in which another change may leave the same times; nothing is noted then


def check_once(names: Iterable[str], tensors: Mapping[str, Origin]) -> None:
    """Check scales as `check_scales`, unless the cache has a note that those of the same files are finite. Raise
    BadCheckpoint if one is not."""
    origins = {name: tensors[name] for name in sorted(names)}
    files, began = sorted({origin.runs[0].path for origin in origins.values()}), time.time()
    note, changed = _note(origins, files), max(map(_changed, files), default=began)
    if note.exists():
        return
    check_scales(origins, tensors)
    if began - changed > _SETTLED and note == _note(origins, files):
        with suppress(OSError):  # the cache cannot be written: the next call checks again
            make_private(note.parent)
            note.touch()


def _note(origins: Mapping[str, Origin], files: Iterable[Path]) -> Path:
    """Return the file that exists in the cache once these scales are checked."""
    places = [(name, SCALE_KINDS.get(origin.dtype), origin.runs) for name, origin in origins.items()]
    content = repr([{str(file): file_marks(file) for file in files}, places])
    return cache_root() / "prepared" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.scales"


def _changed(file: Path) -> float:
    about = file.stat()
    return max(about.st_mtime, about.st_ctime)
