"""Files that fail on purpose: the n-th read, write, fsync, rename or other call on files of a folder fails.

with Failing([folder], Fault(("write",), 3, "ENOSPC")) as calls: ...; calls.made is the number of such calls. A loop
over n = 1, 2, ... that ends when a run makes fewer than n calls therefore lets every call fail once (as the tests of
SQLite do). All file access of Python passes through here, but not that of other libraries (safetensors, Arrow).
"""

import builtins
import errno
import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

READ, WRITE, KEEP, CHANGE = ("read",), ("write", "allocate"), ("fsync",), ("rename", "truncate", "unlink", "mkdir")
OPEN, MEMORY = ("open", "create"), ("memory",)
PROTOCOL = ("create", "write", "allocate", "fsync", "rename", "truncate", "unlink", "mkdir")
ERRORS = ("EIO", "ENOSPC", "EINTR")
CRASHES = ("kill before", "kill within", "kill after")
BLOCK = 4096


@dataclass(frozen=True)
class Fault:
    """What goes wrong: call number `number` (from 1; 0: none) of the given kinds.

    kinds: read, write, fsync, rename, truncate, unlink, mkdir, open (to read), create (open to write), allocate (room
        in a file), memory (room in RAM).
    how: the name of an error number (ENOMEM for memory only), "short" (half is read or written), "slow", or SIGKILL:
        "kill before", "kill within" (half is written) and "kill after".
    lasting: every later call of these kinds goes wrong, too.
    """

    kinds: tuple[str, ...] = ()
    number: int = 0
    how: str = "EIO"
    lasting: bool = False
    seconds: float = 0.02


class Failing:
    """Context manager in which files below `folders` fail.

    Attributes:
        made: number of calls of the fault's kinds so far.
        counts: calls by kind and file name.
        struck: the call that failed first. `tell` is called with it before it fails.
    """

    def __init__(self, folders: Sequence[Path], fault: Fault, tell: Callable[[str], None] = lambda call: None) -> None:
        self.tell = tell
        self.roots = tuple(str(folder.resolve()) for folder in folders)
        self.fault, self.made, self.counts, self.struck = fault, 0, Counter[str](), ""
        self._lock, self._real = threading.Lock(), dict[tuple[Any, str], Any]()

    def _strikes(self, kind: str, place: Any) -> bool:
        name = place if kind == "memory" else _path(place)
        if kind != "memory" and not name.startswith(self.roots):
            return False
        fault, call = self.fault, f"{kind} {_short_name(name)}"
        with self._lock:
            self.counts[call] += 1
            if kind not in fault.kinds:
                return False
            self.made += 1
            if not fault.number or self.made < fault.number or (self.made > fault.number and not fault.lasting):
                return False
            if not self.struck:
                self.struck = call
                self.tell(call)
        if fault.how == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.how == "slow":
            time.sleep(fault.seconds)
        return True

    def _raise(self, *names: Any) -> None:
        if self.fault.how in ERRORS:
            number = getattr(errno, self.fault.how)
            first = names[0] if names else None
            raise OSError(number, os.strerror(number), *((first, None, names[1]) if len(names) == 2 else names[:1]))

    def named(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that takes paths."""

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            struck = self._strikes(kind, path)
            if struck:
                self._raise(os.fspath(path), *(map(os.fspath, rest[:1]) if kind == "rename" else ()))
            try:
                return real(path, *rest, **more)
            finally:
                self._after(struck)

        return call

    def opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            kind = "create" if flags & os.O_CREAT else "open"
            struck = self._strikes(kind, path)
            if struck:
                self._raise(os.fspath(path))
            try:
                return real(path, flags, *rest, **more)
            finally:
                self._after(struck)

        return call

    def numbered(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call on an open file that moves no bytes."""

        def call(file: Any, *rest: Any) -> Any:
            struck = self._strikes(kind, file)
            if struck:
                self._raise()
            try:
                return real(file, *rest)
            finally:
                self._after(struck)

        return call

    def moving(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap os.read, write, pread, pwrite, preadv or pwritev, whose second argument has the bytes to move."""

        def call(file: int, what: Any, *rest: Any) -> Any:
            if not self._strikes(kind, file):
                return real(file, what, *rest)
            self._raise()
            cut = self.fault.how in ("short", "kill within")
            try:
                return real(file, _half(what) if cut else what, *rest)
            finally:
                self._after(True)

        return call

    def _after(self, struck: bool) -> None:
        if struck and self.fault.how in ("kill within", "kill after"):
            os.kill(os.getpid(), signal.SIGKILL)

    def opened(self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
               errors: str | None = None, newline: str | None = None, closefd: bool = True,
               opener: Any = None) -> Any:  # fmt: skip
        """Return the same as io.open, over a raw file whose reads and writes are counted."""
        if not _path(file).startswith(self.roots):
            return self._real[io, "open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
        kind = "create" if set(mode) & set("wxa") else "open"
        struck = not isinstance(file, int) and self._strikes(kind, file)
        if struck:
            self._raise(os.fspath(file))
        raw = _Raw(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        self._after(struck)
        if buffering == 0:
            return raw
        wanted: Any = io.BufferedRandom if "+" in mode else io.BufferedReader if kind == "open" else io.BufferedWriter
        buffered = wanted(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def allocated(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*sizes: Any, **more: Any) -> Any:
            if self._strikes("memory", "memory") and self.fault.how == "ENOMEM":
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
            return real(*sizes, **more)

        return call

    def __enter__(self) -> "Failing":
        made = {
            **{(os, name): self.moving("read", getattr(os, name)) for name in ("read", "pread", "preadv")},
            **{(os, name): self.moving("write", getattr(os, name)) for name in ("write", "pwrite", "pwritev")},
            **{(os, name): self.numbered("fsync", getattr(os, name)) for name in ("fsync", "fdatasync")},
            **{(os, name): self.named("rename", getattr(os, name)) for name in ("rename", "replace")},
            **{(os, name): self.named("unlink", getattr(os, name)) for name in ("unlink", "remove", "rmdir")},
            (os, "mkdir"): self.named("mkdir", os.mkdir),
            (os, "ftruncate"): self.numbered("truncate", os.ftruncate),
            (os, "posix_fallocate"): self.numbered("allocate", os.posix_fallocate),
            (os, "open"): self.opening(os.open),
            (io, "open"): self.opened,
            (builtins, "open"): self.opened,
        }
        if "memory" in self.fault.kinds:
            import torch

            made[torch, "empty"] = self.allocated(torch.empty)
        for (owner, name), replacement in made.items():
            self._real[owner, name] = getattr(owner, name)
            setattr(owner, name, replacement)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (owner, name), real in self._real.items():
            setattr(owner, name, real)


class _Raw(io.FileIO):
    """An open file whose reads and writes are counted."""

    def __init__(self, failing: Failing, *how: Any) -> None:
        super().__init__(*how)
        self._write = failing.moving("write", lambda _, data: io.FileIO.write(self, data))
        self._into = failing.moving("read", lambda _, target: io.FileIO.readinto(self, target))

    def write(self, data: Any) -> Any:
        return self._write(self.fileno(), data)

    def readinto(self, target: Any) -> Any:
        return self._into(self.fileno(), target)

    def read(self, size: int | None = -1) -> Any:
        return io.RawIOBase.read(self, -1 if size is None else size)

    def readall(self) -> Any:
        return io.RawIOBase.readall(self)


def _path(place: Any) -> str:
    """Return the absolute path of a file, given by name or descriptor; "" if it has none."""
    if isinstance(place, int):
        try:
            return os.readlink(f"/proc/self/fd/{place}").removesuffix(" (deleted)")
        except OSError:
            return ""
    try:
        return os.path.abspath(os.fsdecode(place))
    except TypeError:
        return ""


def _short_name(path: str) -> str:
    name = os.path.basename(path)
    return "spill" if name.endswith(".spill") or name.startswith("#") else name  # "#123" is a file without a name


def _half(what: Any) -> Any:
    """Return half of the bytes to move, in whole blocks if there are several, and at least one."""
    if isinstance(what, int):
        return max(1, what // 2)
    if isinstance(what, list):
        return [_half(what[0])]
    view = memoryview(what).cast("B")
    half = len(view) // 2
    return view[: half // BLOCK * BLOCK or half or len(view)]
