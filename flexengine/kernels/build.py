"""Build of the native kernels: the C++ sources are compiled on first use, and the library is stored in the cache."""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from flexengine.activity import activity, advance, message, tick
from flexengine.config import cache_root, mark_used
from flexengine.errors import InvalidInput
from flexengine.system.limits import usable_memory
from flexengine.system.openmp import openmp_runtime

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
NATIVE = "-march=native"
FUSED = "-ffp-contract=off"  # else the compiler fuses a * b + c in some loops only, and results depend on the batch
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fPIC", FUSED)
COMPILERS = ("c++", "g++", "clang++")  # names to look for
SECONDS = 300  # limit of one compiler run
SOURCE_MEMORY = 400_000_000  # bytes that a compiler takes for one file
POLL = 0.25  # seconds between two looks at running compilers


class BuildFailed(Exception):
    """The library could not be built; the message gives the reason in one line."""


def load(*flags: str, sources: Sequence[Path] = ()) -> ctypes.CDLL:
    """Return the library built from `sources`; it is compiled if the cache does not hold it. Raise BuildFailed if no
    compiler could build the library.

    Args:
        flags: for the compiler, in addition to FLAGS.
        sources: C++ files; default: those of the kernels.
    """
    problems = []
    for command in _compilers():
        try:
            return _load(command, [*FLAGS, *flags], sources or SOURCES)
        except (BuildFailed, OSError, subprocess.SubprocessError) as error:
            problems.append(f"{shlex.join(command)}: {error}")
    raise BuildFailed("; ".join(problems) or "no C++ compiler was found ($CXX, c++, g++, clang++); install g++")


def compiled() -> Path | None:
    """Return the kernels' library if the cache has it for this machine; None if `load` would compile it."""
    portable = [flag for flag in FLAGS if flag != NATIVE]
    for command in _compilers():
        with contextlib.suppress(BuildFailed, OSError, subprocess.SubprocessError):
            names = [_name(command, flags, SOURCES) for flags in ([*FLAGS], portable)]
            return next((path for name in names if (path := cache_root() / "kernels" / name).exists()), None)
    return None


def _compilers() -> list[list[str]]:
    """Return the commands of the compilers that exist: $CXX, if it is set, and the usual names."""
    commands = []
    for name in dict.fromkeys([os.environ.get("CXX", ""), *COMPILERS]):
        with contextlib.suppress(ValueError):  # no words of a shell
            commands.append(shlex.split(name))
    return [command for command in commands if command and shutil.which(command[0])]


def _load(compiler: list[str], flags: list[str], sources: Sequence[Path]) -> ctypes.CDLL:
    """Return the loaded library.

    If the compiler does not support -march=native, the flag is left out, with a message. If the cached file cannot be
    loaded, as after a crash, it is built again.
    """
    try:
        library = _build(compiler, flags, sources)
    except BuildFailed as error:
        flags = [flag for flag in flags if flag != NATIVE]
        library = _build(compiler, flags, sources)
        message("kernels are compiled for any CPU, several times slower than for this one, as the compiler refuses"
                f" -march=native: {error}", logging.WARNING)  # fmt: skip
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(_build(compiler, flags, sources)))


@cache
def _mark_of(openmp: str | None) -> str:
    """Return the name and digest of an OpenMP library: the kernels are linked to a library of this name."""
    if openmp is None:
        return ""
    with open(openmp, "rb") as file:
        return f"{Path(openmp).name} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _folder() -> Path:
    """Return the folder to build libraries in: a temporary one of this process if the cache cannot be written."""
    try:
        folder = cache_root() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, InvalidInput) as error:
        message(f"compiled kernels cannot be kept for the next run: {error}; set FLEXENGINE_CACHE to a directory that"
                " can be written", logging.WARNING)  # fmt: skip
        private = tempfile.mkdtemp(prefix="flexengine-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)


def cpu_type() -> str:
    """Return a text that identifies the CPU type, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))


def _code(sources: Sequence[Path]) -> str:
    headers = sorted(Path(__file__).parent.glob("*.h"))  # sources other than the kernels' include them too
    return "\0".join(path.read_text() for path in (*sources, *headers))


@cache
def version() -> str:
    """Return a hash of the kernels' sources. Kernels of the same version compute bitwise the same results."""
    return hashlib.sha256(_code(SOURCES).encode()).hexdigest()[:12]


def _build(compiler: list[str], flags: list[str], sources: Sequence[Path]) -> Path:
    """Return the path of the library, after compiling it if it is missing.

    The file is written under a temporary name and renamed, so several processes can build it at the same time. A lock
    on the folder avoids this where the file system supports locks.
    """
    name = _name(compiler, flags, sources)
    with contextlib.suppress(OSError, InvalidInput):
        if (library := cache_root() / "kernels" / name).exists():
            mark_used(library)
            return library
    library = _folder() / name
    with _alone(library):
        if not library.exists():
            text = "compiling kernels for this CPU, once per machine (one to two minutes)"
            with activity("compiling", text, len(sources), "files", logging.INFO):
                _compile(compiler, flags, sources, openmp_runtime(), library)
    return library


def _name(compiler: list[str], flags: list[str], sources: Sequence[Path]) -> str:
    """Return the file name of the library, which is a hash of all that it depends on. Names and directories of the
    compiler and of the OpenMP library are left out, as environments have equal ones at several places."""
    first = _run([*compiler, "--version"]).partition("\n")[0].partition(" ")[2]  # g++ (Debian 12.2.0-14) 12.2.0
    parts = [_code(sources), first, *compiler[1:], *flags, _mark_of(openmp_runtime()), cpu_type()]
    return f"cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Lock the library's folder while the block runs, so that one process builds and the others wait for the library.

    The block runs without the lock after SECONDS of waiting, or if the folder cannot be locked.
    """
    folder = os.open(library.parent, os.O_RDONLY)
    try:
        if not library.exists() and not _locked(folder):
            text = (f"waiting for another process that compiles kernels (at most {SECONDS} s; it has locked"
                    f" {library.parent})")  # fmt: skip
            began = time.monotonic()
            with activity("waiting", text, level=logging.INFO):
                while not library.exists() and not _locked(folder) and time.monotonic() - began <= SECONDS:
                    tick()
                    time.sleep(0.05)
        yield
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    """Lock a folder. Return False if another process has locked it, True also if it cannot be locked."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _compile(compiler: list[str], flags: list[str], sources: Sequence[Path], openmp: str | None, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = [f"{folder}/{path.stem}.o" for path in sources], f"{folder}/cpu.so"
        pairs = zip(sources, compiled, strict=True)
        commands = [[*compiler, *flags, "-fopenmp", "-c", str(source), "-o", to] for source, to in pairs]
        together = max(1, usable_memory() // SOURCE_MEMORY)
        for first in range(0, len(commands), together):
            _run(*commands[first : first + together], ended=advance)
        link = [*compiler, "-shared", *compiled, "-o", linked]
        try:
            if openmp is None:
                raise BuildFailed("torch has loaded no OpenMP library")
            _run([*link, openmp, "-Wl,--no-undefined"])
        except BuildFailed:
            _run([*link, "-fopenmp"])
        with open(linked, "rb") as written:
            os.fsync(written.fileno())
        os.replace(linked, library)


def _run(*commands: list[str], ended: Callable[[], object] = tick) -> str:
    """Run the commands at the same time and return their joined output. ended: called when a command has ended.

    Raises:
        BuildFailed: a command failed; the message is its first error.
        TimeoutExpired: a command runs for more than SECONDS.
    """
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipe) for command in commands]  # type: ignore[call-overload]
    outputs, began = dict[int, tuple[str, str]](), time.monotonic()
    try:
        while len(outputs) < len(running):
            for number, process in enumerate(running):
                if number not in outputs:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        outputs[number] = process.communicate(timeout=POLL)
                        ended()
                    tick()
            if time.monotonic() - began > SECONDS:
                raise subprocess.TimeoutExpired(running[0].args, SECONDS)
    finally:
        for process in running:
            process.kill()
    for number, process in enumerate(running):
        if process.returncode:
            lines = outputs[number][1].strip().splitlines()
            lines = [x for x in lines if "error" in x] or [*lines[-1:], f"exit code {process.returncode}"]
            raise BuildFailed(lines[0])
    return "".join(outputs[number][0] for number in range(len(running)))
