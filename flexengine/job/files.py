"""Files of a job: names of streams, checks that no file is written over, and files that appear complete or not at all.

Streams are standard input and output, pipes, devices, and open files (such as /dev/fd/63, from `<(...)`).
"""

import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import BinaryIO

from flexengine.config import cache_root, sync_path
from flexengine.errors import InvalidInput, size, size_within

STDIN = "/dev/stdin"
_NUMBERS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_OPEN_FILE = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")


def descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the number of the open file that a path names, such as 3 for /dev/fd/3; None for other paths."""
    name = os.fspath(path)
    match = _OPEN_FILE.fullmatch(name)
    return int(match[1]) if match else _NUMBERS.get(name)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a pipe, a device or an open file: no file that can be replaced or read twice."""
    if descriptor(path) is not None:
        return True
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def stdout_is_open() -> bool:
    """Return whether standard output can be written to. It cannot after `>&-` in a shell."""
    try:
        os.write(sys.stdout.fileno(), b"")
    except AttributeError:  # Python's own mark of a closed stream: sys.stdout is None
        return False
    except OSError as error:
        return error.errno != errno.EBADF  # None: a stream without a number, such as one in memory; ENOSPC: /dev/full
    return True


def whole_stdout() -> BinaryIO:
    """Return standard output for bytes, of which each write takes all. With PYTHONUNBUFFERED, Python's own stream
    writes fewer bytes to a pipe if a signal arrives meanwhile: the first Ctrl-C of a job, or `fg` after Ctrl-Z."""
    stream = sys.stdout.buffer
    return open(stream.fileno(), "wb", closefd=False) if isinstance(stream, io.RawIOBase) else stream


PathName = str | os.PathLike[str] | None
# Names of files in a model's directory. Others there, such as an earlier trace, may be replaced.
_OF_MODEL = re.compile(
    r".*\.(safetensors|bin|model|tiktoken|jinja|py)|(.*config|.*\.index|tokenizer.*|vocab|special_tokens_map"
    r"|added_tokens)\.json|(vocab|merges)\.txt|SHA256SUMS"
)


def check_not_overwritten(read: Mapping[str, PathName], written: Mapping[str, PathName]) -> None:
    """Raise InvalidInput if a file that is written is also read, or is written twice. Call it before all work.

    Directories, and devices such as /dev/null, may be given more than once.

    Args:
        read: files that are read, by the names that messages use; None if an option is not given.
        written: files that are written, by the names that messages use; None if an option is not given.
    """
    given = {**read, **written}
    paths = {name: Path(os.path.realpath(path)) for name, path in given.items() if path}
    for one, other in combinations(paths, 2):
        same = paths[one] == paths[other] and (paths[one].is_file() or not paths[one].exists())
        if same and (one in written or other in written):
            raise InvalidInput(f"{one} and {other} are one file, {given[one]}; give each a file of its own")


def check_model_kept(model: PathName, written: Mapping[str, PathName]) -> None:
    """Raise InvalidInput if a file that is written would replace a file of the model.

    Args:
        model: a directory or a file; other names, such as hub ids, and None have no files here.
        written: files that are written, by the names that messages use; None if an option is not given.
    """
    if model is None or not os.path.exists(model):
        return
    root = os.path.realpath(model)
    for name, path in written.items():
        if not path or not (target := Path(os.path.realpath(path))).is_file() or not target.is_relative_to(root):
            continue
        if target == Path(root) or _OF_MODEL.fullmatch(target.name):
            raise InvalidInput(f"{name} {path} would replace a file of the model {model}; name another file")


def part_path(output: str | os.PathLike[str]) -> Path:
    """Return the temporary path at which an output file is written before it is renamed."""
    target = Path(output).resolve()
    return target.with_name(target.name + ".part")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing under a temporary name. At the end of the block the file is fsynced and renamed. An
    exception in the block removes it."""
    part, target = part_path(path), Path(path).resolve()
    try:
        part.unlink(missing_ok=True)  # if `part` is a link, the file must not be written to the link's target
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_path(target.parent)


@contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in an OSError of the block, which writes it, and what to free if the disk is full."""
    try:
        yield
    except OSError as error:
        full = full_disk(error, Path(path).resolve().parent)
        reason = f"{error.strerror}: {full}; the same command then continues" if full else error.strerror
        raise OSError(error.errno, f"the file cannot be written: {reason}", str(path)) from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that appears complete or not at all. Raise OSError as `explained` does."""
    with explained(path), whole_file(path) as file:
        file.write(data)


def full_disk(error: OSError, directory: str | os.PathLike[str], needed: int = 0, own: Path | None = None) -> str:
    """Return what a full disk has free and what to free there, as text; "" if the error is not that of a full disk.

    Args:
        directory: directory that was written to.
        needed: about how many bytes are needed there; 0 if unknown.
        own: the job's journal; None if there is none.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    place = Path(directory)
    try:
        free, device = shutil.disk_usage(place).free, place.stat().st_dev
    except OSError:
        return f"the disk of {place} is full; free space there"
    parts = [f"the disk of {place} is full: {size_within(free, up=False)} are free"]
    if needed:
        parts[0] += f", about {size_within(needed)} are needed"
    if error.errno == errno.EDQUOT:
        parts.append("your quota may allow less")
    if own is not None:
        parts.append(f"the journal {own} takes {size(size_of(own))}, and must be kept, as it holds the results")
    with suppress(OSError, InvalidInput):
        root = cache_root()
        if root.stat().st_dev == device and (total := sum(size_of(path) for path in root.rglob("*") if path.is_file())):
            parts.append(f"the cache {root} takes {size(total)}, and may be deleted while no job runs")
    return "; ".join([*parts, "free space there"])


def file_state(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return size, time, device and inode of a file, by which a change is noticed; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    state = file_state(path)
    return state[0] if state else 0
