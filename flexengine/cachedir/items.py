"""List the items of the cache directory. Only names that flexengine gives are items; links are never followed.

| folder | items | kind |
|---|---|---|
| prepared | <key>/ | models, weights (encoded, or bundles of neurons) or calibrations, by its files |
| | <key>.part/ | unfinished: a job continues with it |
| | <key>.tmp-<pid>/ | leftovers |
| kernels | cpu-<key>.so | kernels |
| | tmp<8 characters>/ | leftovers: a killed compilation |
| hardware | <key>.json | rates |
| | <key>.<8 characters> | leftovers |
| offload | flexengine-<...>.spill, flexengine-<...>.measuring | leftovers |
"""

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flexengine.cachedir.open_files import open_files
from flexengine.model.files import is_snapshot
from flexengine.model.prepare import NOTE

KINDS = ("models", "weights", "calibrations", "kernels", "rates", "unfinished", "leftovers")
PREPARED = ("models", "weights", "calibrations")  # kinds of finished directories
FOLDERS = ("prepared", "kernels", "hardware", "offload")
MIN_LEFTOVER_SECONDS = 600.0  # unlocked temporary files that are younger may be in use; compiling has a limit of 300 s
IN_USE, WRITTEN, YOUNG, MOUNT = "in use", "being written", "written lately", "holds a mount"
_KEY, _RANDOM = r"[0-9a-f]{32}", r"[a-z0-9_]{8}"
_NAMES: dict[str, dict[str, tuple[str, bool]]] = {  # by folder and pattern: (kind, whether it is a directory)
    "prepared": {_KEY: ("", True), rf"{_KEY}\.part": ("unfinished", True), rf"{_KEY}\.tmp-\d+": ("leftovers", True)},
    "kernels": {rf"cpu-{_KEY}\.so": ("kernels", False), rf"tmp{_RANDOM}": ("leftovers", True)},
    "hardware": {rf"{_KEY}\.json": ("rates", False), rf"{_KEY}\.{_RANDOM}": ("leftovers", False)},
    "offload": {r"flexengine-.+\.(spill|measuring)": ("leftovers", False)},
}
_LOCK = rf"{_KEY}\.lock"  # never removed: all processes must lock the same inode
_MAX_NOTE_BYTES = 1 << 20
_MAX_SOURCES = 4  # steps from encoded weights over a converted model to the user's model
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class CacheItem:
    """Something that flexengine made in the cache.

    Attributes:
        kind: one of KINDS.
        folder: one of FOLDERS.
        file: name in the folder.
        source: path of the model that it was made from; "" if there is none, or it is not known.
        label: format of the data, such as "int4"; "" if there is none.
        bytes: bytes of all files.
        used: time of last use in seconds since 1970.
        busy: why it cannot be removed now: IN_USE, WRITTEN, YOUNG or MOUNT; "" if it can.
        inode: (device, inode) of the file or directory.
    """

    kind: str
    folder: str
    file: str
    source: str
    label: str
    bytes: int
    used: float
    busy: str
    inode: tuple[int, int]

    @property
    def name(self) -> str:
        """Return the first 8 characters of the key, or the file's name if it has no key."""
        match = re.search(_KEY, self.file)
        return match[0][:8] if match else self.file

    @property
    def model(self) -> str:
        """Return the model's name: the last part of `source`, or the repository of a download from the hub."""
        path = Path(self.source)
        if is_snapshot(path):
            return path.parent.parent.name.removeprefix("models--").replace("--", "/")
        return path.name.removesuffix(".gguf")


@dataclass(frozen=True)
class Contents:
    """The cache directory.

    Attributes:
        root: the directory.
        items: in the order of KINDS, the latest used ones first.
        ignored: (path below the root, reason) of everything else, which is never removed.
    """

    root: Path
    items: tuple[CacheItem, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclass
class _Scan:
    """State of one listing: when it began, and what other processes have open."""

    began: float = field(default_factory=time.time)
    opened: set[str] = field(default_factory=open_files)
    items: list[CacheItem] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)


def contents(root: Path) -> Contents:
    """Return the items of a cache directory; none if it does not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    scan = _Scan()
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Contents(root)
    try:
        for entry in sorted(_scandir(top), key=lambda e: e.name):
            if entry.name in FOLDERS and entry.is_dir(follow_symlinks=False):
                _list_folder(scan, root, top, entry.name)
            else:
                scan.ignored.append((entry.name, _foreign(entry)))
    finally:
        os.close(top)
    items = [replace(item, source=_origin(item.source, root, scan.items)) for item in scan.items]
    items.sort(key=lambda item: (KINDS.index(item.kind), -item.used, item.file))
    return Contents(root, tuple(items), tuple(scan.ignored))


def key_of(file: str) -> str:
    """Return the key in the name of an item of `prepared`."""
    return file.partition(".")[0]


def _list_folder(scan: _Scan, root: Path, top: int, folder: str) -> None:
    try:
        place = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=top)
    except OSError as error:
        scan.ignored.append((folder, f"cannot be read: {error.strerror}"))
        return
    try:
        for entry in _scandir(place):
            if folder == "prepared" and re.fullmatch(_LOCK, entry.name):
                continue
            try:
                item = _item(scan, root, folder, place, entry)
            except FileNotFoundError:
                continue  # another process has removed it
            except OSError as error:
                scan.ignored.append((f"{folder}/{entry.name}", f"cannot be read: {error.strerror}"))
                continue
            if item is None:
                scan.ignored.append((f"{folder}/{entry.name}", _foreign(entry)))
            else:
                scan.items.append(item)
    finally:
        os.close(place)


def _item(scan: _Scan, root: Path, folder: str, place: int, entry: os.DirEntry[str]) -> CacheItem | None:
    """Return the item of a directory entry; None if flexengine gives no such name to such a file."""
    named = [found for pattern, found in _NAMES[folder].items() if re.fullmatch(pattern, entry.name)]
    about = os.stat(entry.name, dir_fd=place, follow_symlinks=False)
    if not named or not (stat.S_ISDIR if named[0][1] else stat.S_ISREG)(about.st_mode):
        return None
    kind, is_directory = named[0]
    size, mounted, newest = measured(place, entry.name) if is_directory else (about.st_size, False, about.st_mtime)
    note: dict[str, Any] = {}
    if kind == "":
        (kind, note), newest = _prepared(place, entry.name), about.st_mtime
    source, label = (str(note.get(name) or "") for name in ("source", "label"))
    inode = (about.st_dev, about.st_ino)
    item = CacheItem(kind, folder, entry.name, source, label, size, newest, "", inode)
    mounted |= about.st_dev != os.fstat(place).st_dev
    return replace(item, busy=MOUNT if mounted else _busy(scan, root, place, item))


def _prepared(place: int, name: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of a finished directory and its note."""
    directory = os.open(name, _READ | os.O_DIRECTORY, dir_fd=place)
    try:
        files = {entry.name for entry in _scandir(directory)}
        note = _read_note(directory)
    finally:
        os.close(directory)
    if files & {"importances.safetensors", "magnitudes.safetensors", "harms.json", "predictors.json"}:
        return "calibrations", note
    return ("models" if "config.json" in files else "weights"), note


def _read_note(directory: int) -> dict[str, Any]:
    """Return the object in the note of a prepared directory; {} if it has none."""
    try:
        handle = os.open(NOTE, _READ, dir_fd=directory)
    except OSError:
        return {}
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return {}
        note = json.loads(os.read(handle, _MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(handle)
    return note if isinstance(note, dict) else {}


def _busy(scan: _Scan, root: Path, place: int, item: CacheItem) -> str:
    if item.kind in PREPARED:
        return IN_USE if locked(item.file, place, os.O_DIRECTORY) else ""
    if item.folder == "prepared":
        return WRITTEN if locked(f"{key_of(item.file)}.lock", place) else ""
    path = os.path.realpath(root / item.folder / item.file)
    if any(name == path or name.startswith(f"{path}/") for name in scan.opened):
        return IN_USE
    return YOUNG if item.kind == "leftovers" and scan.began - item.used < MIN_LEFTOVER_SECONDS else ""


def locked(name: str, place: int, flags: int = 0) -> bool:
    """Return whether a process holds a lock on a file or directory, or it cannot be found out.

    Args:
        name: in the directory `place`; False if it does not exist.
        flags: for os.open.
    """
    try:
        handle = os.open(name, _READ | flags, dir_fd=place)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def measured(place: int | None, name: str) -> tuple[int, bool, float]:
    """Return the bytes of all files below a directory, whether another file system is mounted in it, and the time of
    the last change. place: descriptor of the directory that holds it; None if `name` is a path."""
    total, newest = 0, 0.0
    device = os.stat(name, dir_fd=place, follow_symlinks=False).st_dev
    mounted = False
    for _, folders, files, handle in os.fwalk(name, dir_fd=place, follow_symlinks=False):
        here = os.fstat(handle)
        mounted |= here.st_dev != device
        newest = max(newest, here.st_mtime)
        for file in (*files, *folders):
            with suppress(OSError):
                about = os.stat(file, dir_fd=handle, follow_symlinks=False)
                mounted |= about.st_dev != device
                newest = max(newest, about.st_mtime)
                total += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return total, mounted, newest


def _origin(source: str, root: Path, items: list[CacheItem]) -> str:
    """Return the user's model of a source, which may itself be a converted model in the cache."""
    prepared = os.path.realpath(root / "prepared")
    known = {os.path.join(prepared, item.file): item.source for item in items if item.folder == "prepared"}
    for _ in range(_MAX_SOURCES):
        if not known.get(source):
            break
        source = known[source]
    return source


def _scandir(place: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(place) as entries:
        yield from entries


def _foreign(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link, which is not followed"
    return "unknown, and never removed"
