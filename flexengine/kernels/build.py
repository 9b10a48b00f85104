"""Build of the native kernels: the C++ sources are compiled on first use, and the library is stored in the cache."""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from flexengine.config import cache_root, mark_used
from flexengine.errors import InvalidInput

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fPIC",
         "-ffp-contract=off")  # else the compiler fuses a * b + c in some loops only, and results depend on the batch
COMPILERS = ("c++", "g++", "clang++")  # names to look for
SECONDS = 300  # limit of one compiler run
QUIET = 5  # seconds of waiting for another process before a message says so

log = logging.getLogger(__name__)


class BuildFailed(Exception):
    """The library could not be built; the message gives the reason in one line."""


def load(*flags: str, sources: Sequence[Path] = ()) -> ctypes.CDLL:
    """Return the library built from `sources`; it is compiled if the cache does not hold it.

    Args:
        flags: for the compiler, in addition to FLAGS.
        sources: C++ files; default: those of the kernels.

    Raises:
        BuildFailed: no compiler could build the library.
    """
    problems = []
    for compiler in _compilers():
        try:
            command = shlex.split(compiler)
            if shutil.which(command[0]) is not None:
                return _load(command, [*FLAGS, *flags], sources or SOURCES)
        except (BuildFailed, OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{compiler}: {error}")
    raise BuildFailed("; ".join(problems) or "no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def compiled() -> Path | None:
    """Return the kernels' library if the cache has it for this machine; None if `load` would compile it."""
    for compiler in _compilers():
        with contextlib.suppress(BuildFailed, OSError, ValueError, subprocess.SubprocessError):
            command = shlex.split(compiler)
            if shutil.which(command[0]) is not None:
                portable = [flag for flag in FLAGS if flag != "-march=native"]
                names = [_name(command, flags, SOURCES) for flags in ([*FLAGS], portable)]
                return next((path for name in names if (path := cache_root() / "kernels" / name).exists()), None)
    return None


def _compilers() -> list[str]:
    """Return the compilers to try: $CXX, if it is set, and the usual names."""
    return list(filter(None, dict.fromkeys([os.environ.get("CXX", ""), *COMPILERS])))


def _load(compiler: list[str], flags: list[str], sources: Sequence[Path]) -> ctypes.CDLL:
    """Return the loaded library.

    If the compiler does not support -march=native, the flag is left out, with a warning. If the cached file cannot be
    loaded, as after a crash, it is built again.
    """
    try:
        library = _build(compiler, flags, sources)
    except BuildFailed as error:
        flags = [flag for flag in flags if flag != "-march=native"]
        library = _build(compiler, flags, sources)
        slow = f"kernels are built for any processor, several times slower than for this one: {error}"
        warnings.warn(slow, RuntimeWarning, stacklevel=2)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(_build(compiler, flags, sources)))


def openmp_runtime() -> str | None:
    """Return the path of the OpenMP library that torch loaded. Linking it gives one thread pool instead of two."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    match = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*)$", maps, re.MULTILINE)
    return match[1] if match else None


def _folder() -> Path:
    """Return the folder to build libraries in: a temporary one of this process if the cache cannot be written."""
    try:
        folder = cache_root() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, InvalidInput) as error:
        log.warning("kernels are built for this process alone, as they cannot be kept: %s; set FLEXENGINE_CACHE to a"
                    " directory that can be written", error)  # fmt: skip
        private = tempfile.mkdtemp(prefix="flexengine-kernels-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)


def _cpu() -> str:
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
            log.warning("compiling kernels into %s: 20 to 60 s", library.parent)
            _compile(compiler, flags, sources, openmp_runtime(), library)
    return library


def _name(compiler: list[str], flags: list[str], sources: Sequence[Path]) -> str:
    """Return the file name of the library, which is a hash of all that it depends on."""
    parts = [_code(sources), _run([*compiler, "--version"]), *flags, str(openmp_runtime()), _cpu()]
    return f"cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


@contextlib.contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Lock the library's folder while the block runs, so that one process builds and the others wait for the library.

    The block runs without the lock after SECONDS of waiting, or if the folder cannot be locked.
    """
    folder, began, announced = os.open(library.parent, os.O_RDONLY), time.monotonic(), False
    try:
        while not library.exists():
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > SECONDS:
                    break
                if waited > QUIET and not announced:
                    announced = True
                    log.warning("waiting for another process that builds kernels: it has locked %s; after %s s they are"
                                " built here as well", library.parent, SECONDS)  # fmt: skip
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(folder)


def _compile(compiler: list[str], flags: list[str], sources: Sequence[Path], openmp: str | None, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = [f"{folder}/{path.stem}.o" for path in sources], f"{folder}/cpu.so"
        pairs = zip(sources, compiled, strict=True)
        _run(*([*compiler, *flags, "-fopenmp", "-c", str(source), "-o", to] for source, to in pairs))
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


def _run(*commands: list[str]) -> str:
    """Run the commands at the same time and return their joined output. Raise BuildFailed with the first error."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipe) for command in commands]  # type: ignore[call-overload]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            lines = errors.strip().splitlines()
            lines = [x for x in lines if "error" in x] or [*lines[-1:], f"exit code {process.returncode}"]
            raise BuildFailed(lines[0])
    return "".join(out for out, _ in outputs)
