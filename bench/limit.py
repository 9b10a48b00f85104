"""Run a command in a new memory cgroup (v1 or v2), page cache included, as in a container.

This needs the right to make cgroups (root on most machines); `why_not()` returns the reason if it is missing.
"""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NotPermitted(OSError):
    """No memory cgroup can be made on this machine. The message has the reason."""


@dataclass(frozen=True)
class Kind:
    """Directory of the memory controller of a cgroup version, and its file names for limit and usage."""

    root: Path
    limit: str
    peak: str
    swap: str


V1 = Kind(ROOT / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.memsw.limit_in_bytes")
V2 = Kind(ROOT, "memory.max", "memory.peak", "memory.swap.max")


def _kind() -> Kind:
    if (V1.root / V1.limit).exists():
        return V1
    if (V2.root / "cgroup.controllers").exists():
        return V2
    raise NotPermitted(f"no memory cgroup controller under {ROOT}")


def _parents(kind: Kind) -> Iterator[Path]:
    """Return the groups to try as parent: this process's own (an outer limit then still holds), those above it, the
    root."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(",") if kind is V1 else controllers == "":
                own = kind.root / path.lstrip("/")
                yield from (p for p in (own, *own.parents) if p.is_relative_to(kind.root) and p != kind.root)
    yield kind.root


def _try_group(kind: Kind, parent: Path, limit_bytes: int) -> Path:
    group = parent / f"bench-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    try:
        (group / kind.limit).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # without swap accounting there is nothing to limit
            (group / kind.swap).write_text(str(limit_bytes) if kind is V1 else "0")
        with subprocess.Popen(["sleep", "60"]) as probe:  # v2 may refuse processes in a group that it allowed to make
            try:
                (group / "cgroup.procs").write_text(str(probe.pid))
            finally:
                probe.kill()
    except OSError:
        _remove(group)
        raise
    return group


def _make_group(limit_bytes: int) -> tuple[Kind, Path]:
    kind, reasons = _kind(), []
    for parent in _parents(kind):
        try:
            return kind, _try_group(kind, parent, limit_bytes)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror or error}")
    raise NotPermitted("no memory cgroup can be made: " + "; ".join(reasons))


def _remove(group: Path) -> None:
    for attempt in range(50):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # a process of the group is still exiting, or a child process remains
            if attempt == 10:
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)


def why_not() -> str | None:
    """Return why `run_limited` cannot work on this machine, or None if it can."""
    try:
        _, group = _make_group(2**30)
    except OSError as error:
        return str(error)
    _remove(group)
    return None


def run(
    argv: list[str], stdin: str = "", timeout: float | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run argv in a process group of its own and return (rc, stdout, stderr). On timeout kill the group and raise
    TimeoutExpired."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(stdin, timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def run_limited(
    argv: list[str],
    limit_bytes: int,
    stdin: str = "",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str, str, int | None]:
    """Run argv with at most limit_bytes of memory, page cache included.

    Returns:
        (rc, stdout, stderr, peak_bytes). rc is -9 if the kernel killed the process for memory. peak_bytes includes page
        cache, so a process that reads files reaches the limit without harm; None if the kernel does not report it.

    Raises:
        NotPermitted: no cgroup can be made.
        TimeoutExpired: the command did not end in time.
    """
    kind, group = _make_group(limit_bytes)
    try:
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *argv]
        rc, out, err = run(enter, stdin, timeout, env)
        peak = group / kind.peak
        return rc, out, err, int(peak.read_text()) if peak.exists() else None
    finally:
        _remove(group)
