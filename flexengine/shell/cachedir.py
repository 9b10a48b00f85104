"""The cache directory: the items that flexengine made in it, and their removal. Nothing outside it is touched.

Only names that flexengine gives are items; links are never followed. Items are removed with locks.

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

The file `secret` (`guests.wire.secret`) is no item: running processes may have read it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
_SMALL = rf"{_KEY}\.(lock|sha256|scales)"  # never removed: all processes must lock the same inode; the others stay true
_MAX_NOTE_BYTES = 1 << 20
_MAX_SOURCES = 4  # steps from encoded weights over a converted model to the user's model
FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW  # flags with which folders of the cache are opened


@dataclass(frozen=True)
class CacheItem:
    """Something that flexengine made in the cache."""

    kind: str  # one of KINDS
    folder: str  # one of FOLDERS
    file: str  # name in the folder
    source: str  # path of the model that it was made from; "" if there is none, or it is not known
    label: str  # format of the data, such as "int4"; "" if there is none
    bytes: int  # of all files
    used: float  # time of last use in seconds since 1970
    busy: str  # why it cannot be removed now: IN_USE, WRITTEN, YOUNG or MOUNT; "" if it can
    inode: tuple[int, int]  # (device, inode) of the file or directory

    @property
    def key(self) -> str:
        """Return the key in the file's name; "" if it has none."""
        match = re.search(_KEY, self.file)
        return match[0] if match else ""

    @property
    def name(self) -> str:
        """Return the first 8 characters of the key, or the file's name if it has no key."""
        return self.key[:8] or self.file

    @property
    def model(self) -> str:
        """Return the model's name: the last part of `source`, or the repository of a download from the hub."""
        path = Path(self.source)
        if is_snapshot(path):
            return path.parent.parent.name.removeprefix("models--").replace("--", "/")
        return path.name.removesuffix(".gguf")


def open_files() -> set[str]:
    """Return the paths of all files that processes of this user have open or mapped. Other processes are left out if
    the system does not show their files."""
    paths: set[str] = set()
    with suppress(OSError):
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                for number in os.listdir(f"/proc/{process}/fd"):
                    with suppress(OSError):
                        paths.add(os.readlink(f"/proc/{process}/fd/{number}"))
            with suppress(OSError):
                mapped = Path(f"/proc/{process}/maps").read_bytes().split(b"\n")
                parts = (line.split(maxsplit=5) for line in mapped)
                paths |= {os.fsdecode(part[5]) for part in parts if len(part) == 6}
    return paths


@dataclass
class Contents:
    """The cache directory, at one moment."""

    root: Path
    items: list[CacheItem] = field(default_factory=list)  # in the order of KINDS, the latest used ones first
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (path below the root, reason): never removed
    began: float = field(default_factory=time.time)
    opened: set[str] = field(default_factory=open_files)  # files that processes have open


@contextmanager
def opened(name: str | Path, flags: int = 0, place: int | None = None) -> Iterator[int]:
    """Open a file or directory, and close it after the block.

    Args:
        flags: more flags for os.open.
        place: descriptor of the directory that holds it; None if `name` is a path.
    """
    handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600, dir_fd=place)
    try:
        yield handle
    finally:
        os.close(handle)


def contents(root: Path) -> Contents:
    """Return the items of a cache directory; none if it does not exist. Raise OSError if the directory cannot be
    read."""
    found = Contents(root)
    try:
        with opened(root, os.O_DIRECTORY) as top:
            for entry in sorted(os.scandir(top), key=lambda e: e.name):
                if entry.name in FOLDERS and entry.is_dir(follow_symlinks=False):
                    _list_folder(found, top, entry.name)
                elif entry.name != "secret":
                    found.ignored.append((entry.name, _foreign(entry)))
    except FileNotFoundError:
        return found
    prepared = os.path.realpath(root / "prepared")
    made = {os.path.join(prepared, item.file): item.source for item in found.items if item.folder == "prepared"}
    for i, item in enumerate(found.items):
        source = item.source
        for _ in range(_MAX_SOURCES):
            source = made.get(source) or source
        found.items[i] = replace(item, source=source)
    found.items.sort(key=lambda item: (KINDS.index(item.kind), -item.used, item.file))
    return found


def _list_folder(found: Contents, top: int, folder: str) -> None:
    try:
        with opened(folder, FOLDER, top) as place:
            for entry in os.scandir(place):
                if folder != "prepared" or not re.fullmatch(_SMALL, entry.name):
                    _list_entry(found, folder, place, entry)
    except OSError as error:
        found.ignored.append((folder, f"cannot be read: {error.strerror}"))


def _list_entry(found: Contents, folder: str, place: int, entry: os.DirEntry[str]) -> None:
    name = f"{folder}/{entry.name}"
    try:
        if item := _item(found, folder, place, entry):
            found.items.append(item)
        else:
            found.ignored.append((name, _foreign(entry)))
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError as error:
        found.ignored.append((name, f"cannot be read: {error.strerror}"))


def _item(found: Contents, folder: str, place: int, entry: os.DirEntry[str]) -> CacheItem | None:
    """Return the item of a directory entry; None if flexengine gives no such name to such a file."""
    named = [each for pattern, each in _NAMES[folder].items() if re.fullmatch(pattern, entry.name)]
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
    return replace(item, busy=MOUNT if mounted else _busy(found, place, item))


def _prepared(place: int, name: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of a finished directory and the object in its note, {} if it has none."""
    note = None
    with opened(name, FOLDER, place) as directory:
        files = set(os.listdir(directory))
        with suppress(OSError, ValueError, RecursionError), opened(NOTE, os.O_NOFOLLOW, directory) as handle:
            if stat.S_ISREG(os.fstat(handle).st_mode):
                note = json.loads(os.read(handle, _MAX_NOTE_BYTES))
    kind = "models" if "config.json" in files else "weights"
    if files & {"importances.safetensors", "magnitudes.safetensors", "harms.json", "predictors.json"}:
        kind = "calibrations"
    return kind, note if isinstance(note, dict) else {}


def _busy(found: Contents, place: int, item: CacheItem) -> str:
    if item.kind in PREPARED:
        return IN_USE if locked(item.file, place, os.O_DIRECTORY) else ""
    if item.folder == "prepared":
        return WRITTEN if locked(f"{item.key}.lock", place) else ""
    path = os.path.realpath(found.root / item.folder / item.file)
    if any(name == path or name.startswith(f"{path}/") for name in found.opened):
        return IN_USE
    return YOUNG if item.kind == "leftovers" and found.began - item.used < MIN_LEFTOVER_SECONDS else ""


def locked(name: str, place: int, flags: int = 0) -> bool:
    """Return whether a process holds a lock on a file or directory in `place`, or it cannot be found out; False if it
    does not exist."""
    try:
        with opened(name, os.O_NOFOLLOW | flags, place) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
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


def _foreign(entry: os.DirEntry[str]) -> str:
    return "a link, which is not followed" if entry.is_symlink() else "unknown, and never removed"


# Removal.


class Kept(Exception):
    """An item was not removed; the message gives the reason."""


def remove(root: Path, item: CacheItem) -> None:
    """Remove an item of the cache directory `root`.

    A prepared directory is renamed while it is locked, so that no job finds a part of it, and then removed. If this
    process is killed meanwhile, the next job that prepares something removes the rest.

    Raises:
        Kept: a process uses or writes the item, or it has changed since it was listed.
        OSError: it cannot be removed.
    """
    if item.busy:
        raise Kept(item.busy)
    try:
        with opened(root, os.O_DIRECTORY) as top, opened(item.folder, FOLDER, top) as place:
            _check_same(place, item)
            if item.folder == "prepared":
                _remove_prepared(place, item)
            elif item.kind == "leftovers" and item.folder == "kernels":
                shutil.rmtree(item.file, dir_fd=place)
            else:
                os.unlink(item.file, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise Kept("changed since it was listed") from error
        raise


def _remove_prepared(place: int, item: CacheItem) -> None:
    garbage = f"{item.key}.tmp-{os.getpid()}"
    with opened(f"{item.key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, place) as lock:
        _lock(lock, WRITTEN)
        with opened(item.file, FOLDER, place) as directory:
            _lock(directory, IN_USE)
            _check_same(place, item)
            if item.file != garbage:
                shutil.rmtree(garbage, ignore_errors=True, dir_fd=place)
                os.rename(item.file, garbage, src_dir_fd=place, dst_dir_fd=place)
        shutil.rmtree(garbage, dir_fd=place)


def _lock(handle: int, reason: str) -> None:
    """Take the exclusive lock of a file or directory until it is closed. Raise Kept with the reason if another process
    holds a lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Kept(reason) from error


def _check_same(place: int, item: CacheItem) -> None:
    about = os.stat(item.file, dir_fd=place, follow_symlinks=False)
    if (about.st_dev, about.st_ino) != item.inode:
        raise Kept("changed since it was listed")


# The cache of the hub's client, which flexengine reads and never clears.


def hub_directory() -> Path:
    """Return the directory in which the hub's client keeps downloads."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"), "hub")
    return Path(HF_HUB_CACHE)


def hub_cache() -> tuple[Path, int]:
    """Return the directory and the bytes of all downloads. Links, which lead to files among them, are not counted."""
    directory = hub_directory()
    path = os.path.realpath(directory)
    return directory, measured(None, path)[0] if os.path.isdir(path) else 0
