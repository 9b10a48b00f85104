"""All facts of `flexengine doctor`, collected, and findings: what stops or slows jobs, each with its remedy."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flexengine import __version__
from flexengine.config import cache_root
from flexengine.plan.formatting import percent, size
from flexengine.shell.cachedir import contents, hub_cache, hub_directory
from flexengine.shell.doctor import machine
from flexengine.shell.doctor.machine import Cpu, Disk, Failed, Software, attempt

STOPS, SLOWS, NOTE = _LEVELS = ("stops", "slows", "note")
MIN_FREE_DISK, MIN_FREE_SHARE = 10**10, 0.05  # bytes and share of a disk below which it is nearly full
MIN_USABLE_MEMORY = 10**9  # bytes; the demo model takes about half of this
_SETTINGS = {"offload": "--offload-dir", "cache": "FLEXENGINE_CACHE", "hub": "HF_HOME"}  # by use of a directory
_TORCH_SECONDS, _MEASURE_SECONDS = 120, 900  # limits of the process that imports torch


@dataclass(frozen=True)
class CacheFacts:
    """The cache directory."""

    path: str
    bytes: int  # of its items
    by_kind: dict[str, int]  # bytes of each kind of item
    leftovers: int  # bytes of killed jobs' files that can be removed
    hub_path: str  # directory of downloads from the hub
    hub_bytes: int  # of the downloads
    problem: str  # why jobs cannot write to the cache; "" if they can


@dataclass(frozen=True)
class Facts:
    """Facts about machine and installation. Failed stands for facts that could not be found out."""

    cpu: Cpu | Failed
    memory: machine.MemoryFacts | Failed
    disks: tuple[Disk | Failed, ...]
    software: Software | Failed
    compilers: tuple[machine.Compiler, ...] | Failed
    cache: CacheFacts | Failed
    engine: dict[str, Any] | Failed  # facts that need torch, as `probe` prints them

    def part(self, name: str) -> Any:
        """Return a part of `engine`; {} if it is missing or failed."""
        value = self.engine.get(name) if isinstance(self.engine, dict) else None
        return {} if value is None or (isinstance(value, dict) and "error" in value) else value

    def to_json(self) -> dict[str, Any]:
        """Return the facts as one JSON-able object."""
        values = {"flexengine": __version__, **asdict(self)}
        return values if isinstance(self.engine, Failed) else values | values.pop("engine")


def collect(offload: Sequence[Path] = (), measure: bool = False, model: str = "") -> Facts:
    """Return all facts.

    Args:
        offload: offload directories; default: the one in the cache.
        measure: measure the rates of the disks and the memory, which takes about ten seconds.
        model: directory or id of a model, whose layers are examined without reading weights; "" for none.
    """
    cached = attempt(cache_root)
    directories = list(offload) or ([] if isinstance(cached, Failed) else [cached / "offload"])
    hub = attempt(hub_directory)
    named = [("cache", cached), *(("offload", path) for path in directories), ("hub", hub), ("current", Path())]
    disks = tuple(attempt(partial(_disk, use, path)) for use, path in named if not isinstance(path, Failed))
    engine = attempt(lambda: _probed(directories, disks, measure, model))
    software, compilers = attempt(machine.software), attempt(machine.compilers)
    return Facts(attempt(machine.cpu), attempt(machine.memory), disks, software, compilers, attempt(_cached), engine)


def _disk(use: str, path: Path) -> Disk:
    try:
        return machine.disk(use, path)
    except Exception as error:
        raise RuntimeError(f"the {use} directory cannot be examined: {error}") from error


def _cached() -> CacheFacts:
    root, (hub, downloads), by_kind = cache_root(), hub_cache(), Counter[str]()
    problem = _unwritable(root)
    try:
        items = contents(root).items
    except OSError as error:
        items, problem = [], problem or f"cannot be read: {error.strerror}"
    for item in items:
        by_kind[item.kind] += item.bytes
    garbage = sum(item.bytes for item in items if item.kind == "leftovers" and not item.busy)
    return CacheFacts(str(root), by_kind.total(), dict(by_kind), garbage, str(hub), downloads, problem)


def _unwritable(root: Path) -> str:
    """Return why no file can be written to the cache, or to a folder in it; "" if files can be written."""
    from flexengine.system.limits import nearest

    places = [root / name for name in ("prepared", "kernels", "hardware") if (root / name).exists()]
    for place in places or [nearest(root)]:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"x")
        except OSError as error:
            return f"{place} cannot be written: {error.strerror or error}"
    return ""


def _probed(offload: Sequence[Path], disks: Sequence[Disk | Failed], measure: bool, model: str) -> dict[str, Any]:
    """Return the facts that need torch, from a process of their own. Raise RuntimeError if the process fails."""
    first = str(offload[0]) if offload else os.devnull
    request = json.dumps({"offload": first, "disks": machine.apart(disks), "measure": measure, "model": model})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "flexengine.shell.doctor.probe", request],
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if measure else subprocess.PIPE,
        timeout=_MEASURE_SECONDS if measure or model else _TORCH_SECONDS,
    )
    if ran.returncode:
        lines = (ran.stderr or "").strip().splitlines() or ["see above"]
        how = f"signal {signal.Signals(-ran.returncode).name}" if ran.returncode < 0 else lines[-1]
        raise RuntimeError(f"torch and the kernels cannot be loaded: {how}")
    values: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return values


# Findings.


@dataclass(frozen=True)
class Finding:
    """One finding."""

    level: str  # STOPS jobs, SLOWS them, or NOTE
    effect: float  # order within a level, the largest first. For SLOWS it is about the factor that jobs may gain
    text: str  # one sentence
    remedy: str = ""  # what to do; "" for nothing

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def stops_jobs(findings: Iterable[Finding]) -> bool:
    """Return whether jobs cannot run because of one of the findings."""
    return any(finding.level == STOPS for finding in findings)


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, the gravest first. Facts that could not be found out, and a check that fails, are findings,
    too."""
    problems: list[Finding] = []
    for name, checks in _CHECKS.items():
        part = getattr(facts, name)
        if isinstance(part, Failed):
            problems.append(_failed(name, part.error))
            continue
        for check in checks:
            try:
                problems += check(part, facts)
            except Exception as error:  # facts of a kind that the check does not expect
                problems.append(Finding(NOTE, 0, f"the check {check.__name__[1:]} failed: {error!r}"))
    return sorted(problems, key=lambda one: (_LEVELS.index(one.level), -one.effect))


def _failed(name: str, error: str) -> Finding:
    if name == "engine":
        return Finding(STOPS, 90, error, "install torch and flexengine again, in a fresh environment")
    level, effect = (STOPS, 80) if name in ("torch", "kernels", "model") else (STOPS if name == "cache" else NOTE, 5)
    return Finding(level, effect, f"{name} cannot be examined: {error}")


# Checks. Each takes a part of the facts, and all facts.


def _engine(engine: Mapping[str, Any], facts: Facts) -> Iterator[Finding]:
    for name, part in engine.items():
        if isinstance(part, dict) and "error" in part:
            yield _failed(name, part["error"])
    torch = facts.part("torch")
    if torch.get("onednn") is False and facts.part("kernels").get("name") == "reference":
        text = f"torch {torch['version']} was built without oneDNN, which plain torch kernels need"
        yield Finding(STOPS, 85, text, "apt install g++, or install pip's build of torch for Linux")
    if torch and engine.get("rates") is None:
        text = "this machine's rates are not measured yet: a job does so if that may shorten it"
        yield Finding(NOTE, 12, text, "flexengine measure")


def _layers(_: Mapping[str, Any], facts: Facts) -> Iterator[Finding]:
    for text in facts.part("model").get("as_modules", ()):
        yield Finding(SLOWS, 1.15, f"{facts.part('model')['name']}: {text}")


def _libraries(software: Software, _: Facts) -> Iterator[Finding]:
    if not software.system.startswith("Linux"):
        yield Finding(STOPS, 99, f"the system is {software.system}; flexengine runs on Linux")
    for library in software.libraries:
        wanted, installed = f"{library.name}{library.allowed}", f"{library.name} {library.version}"
        if library.version is None:
            yield Finding(STOPS, 100, f"{library.name} is missing", f"pip install '{wanted}'")
        elif not library.fits:
            text = f"{installed} is not among the versions that flexengine supports ({library.allowed})"
            yield Finding(NOTE, 60, text, f"pip install '{wanted}'")
        elif not library.tested:
            text = f"{installed} is newer than the newest tested version, {machine.NEWEST_TESTED[library.name]}"
            yield Finding(NOTE, 20, text)


def _cache(cache: CacheFacts, _: Facts) -> Iterator[Finding]:
    if cache.problem:
        remedy = "set FLEXENGINE_CACHE to a directory that can be written"
        yield Finding(STOPS, 70, f"the cache cannot be used: {cache.problem}", remedy)
    if cache.leftovers:
        text = f"killed jobs have left {size(cache.leftovers)} in the cache"
        yield Finding(NOTE, 10, text, "flexengine cache clear leftovers")


def _compilers(compilers: Sequence[machine.Compiler], facts: Facts) -> Iterator[Finding]:
    if _variable(facts, "FLEXENGINE_KERNELS") == "reference":
        return
    kernels = facts.part("kernels")
    working = [compiler for compiler in compilers if compiler.works]
    if not working:
        broken = "".join(f" ({c.command} {c.version})" for c in compilers)
        yield Finding(SLOWS, 5, f"no C++ compiler{broken}: attention runs several times slower", "apt install g++")
    elif kernels and not kernels["compiled"]:
        yield Finding(NOTE, 30, "the kernels are not compiled yet: the first job compiles them (one to two minutes)")
    elif kernels.get("simd") == 0 and isinstance(facts.cpu, Cpu) and "AVX2" in facts.cpu.features:
        compiler = f"{working[0].command} ({working[0].version})"
        text = f"{compiler} has built kernels without this CPU's vector instructions"
        yield Finding(SLOWS, 4, text, "install a newer g++, or set CXX to one")


def _gpu(_: Mapping[str, Any], facts: Facts) -> Iterator[Finding]:
    torch = facts.part("torch")
    if not torch:
        return
    present = _nvidia()
    if facts.part("gpus"):
        if isinstance(facts.software, Software) and facts.software.extras.get("triton") is None:
            text = "triton is missing: kernels on the GPU run in plain torch, several times slower"
            yield Finding(SLOWS, 6, text, "pip install triton")
    elif torch["hip_build"]:
        text = f"torch is a ROCm build ({torch['hip_build']}), but no GPU is visible: jobs run on the CPU"
        yield Finding(NOTE, 40, text)
    elif torch["cuda_build"] and present:
        hidden = _variable(facts, "CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} may hide it" if hidden is not None else "nvidia-smi may say why"
        yield Finding(SLOWS, 20, "this machine has an NVIDIA GPU, but torch cannot use it: jobs run on the CPU", why)
    elif torch["cuda_build"]:
        text = f"torch is a CUDA build ({torch['cuda_build']}), but no GPU is visible: jobs run on the CPU"
        yield Finding(NOTE, 40, text, "in a container: give it the GPU (docker run --gpus all)")
    elif present:
        text = f"this machine has an NVIDIA GPU, but torch {torch['version']} is built for CPUs only"
        yield Finding(SLOWS, 20, text, "install torch for CUDA (pytorch.org has the command)")


def _nvidia() -> bool:
    """Return whether the driver of an NVIDIA GPU is loaded."""
    gpus = Path("/proc/driver/nvidia/gpus")
    return gpus.is_dir() and any(gpus.iterdir())


def _cpu(cpu: Cpu, _: Facts) -> Iterator[Finding]:
    if cpu.machine in ("x86_64", "AMD64") and "AVX2" not in cpu.features:
        text = f"the CPU ({cpu.model}) has no AVX2: kernels use portable code, several times slower"
        yield Finding(SLOWS, 3, text, "if this is a virtual machine, give it the CPU type of its host")
    if cpu.usable < cpu.cores:
        text = f"this process may run on {cpu.usable} of {cpu.cores} cores"
        remedy = "widen its CPU affinity (taskset, cpuset, docker run --cpuset-cpus)"
        yield Finding(SLOWS, cpu.cores / cpu.usable, text, remedy)
    if cpu.quota is not None and cpu.quota < cpu.usable:
        text = f"a cgroup limits this process to {cpu.quota:g} of {cpu.usable} cores"
        yield Finding(SLOWS, cpu.usable / cpu.quota, text, "raise it (docker run --cpus, systemd CPUQuota)")


def _threads(cpu: Cpu, facts: Facts) -> Iterator[Finding]:
    threads, cores = facts.part("torch").get("threads"), min(cpu.usable, cpu.quota or cpu.usable)
    if threads is None:
        return
    name = next((name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if _variable(facts, name) is not None), None)
    setting = f"{name}={_variable(facts, name)}: " if name else ""
    if threads > max(1.0, cores) and cpu.quota is not None:
        text = f"{setting}torch computes in {threads} threads, but may use {cores:g} cores"
        yield Finding(SLOWS, 1.5, text, f"set OMP_NUM_THREADS={max(1, int(cores))}")
    elif name and threads < int(cores):
        text = f"{setting}torch computes in {threads} of {cores:g} cores"
        yield Finding(SLOWS, cores / threads, text, f"unset {name}")


def _memory(memory: machine.MemoryFacts, _: Facts) -> Iterator[Finding]:
    if memory.limit is not None:
        below = " and below the free RAM" if memory.limit < memory.free else ""
        share = percent(memory.limit / memory.total)
        text = f"a cgroup limits memory to {size(memory.limit)}, {share} of the RAM{below}"
        yield Finding(SLOWS, 1.2, text, "raise it (docker run --memory, systemd MemoryMax)")
    if memory.usable < MIN_USABLE_MEMORY:
        yield Finding(SLOWS, 1.4, f"only {size(memory.usable)} of memory can be used now", "end other programs")
    elif memory.usable < 0.5 * min(memory.limit or memory.total, memory.total):
        yield Finding(NOTE, 35, f"other programs use more than half of the memory: {size(memory.usable)} are free")
    if memory.swap_used > 0.05 * memory.total:
        swapped = size(memory.swap_used)
        yield Finding(NOTE, 25, f"{swapped} of memory are swapped out: other programs need more RAM than there is")
    if memory.huge_pages == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(SLOWS, 1.05, "transparent huge pages are off, so page faults take longer", remedy)


def _disks(examined: Sequence[Disk | Failed], _: Facts) -> Iterator[Finding]:
    disks = []
    for each in examined:
        if isinstance(each, Failed):
            yield Finding(NOTE, 5, each.error)
        else:
            disks.append(each)
            yield from _directory(each)
    for device in dict.fromkeys(each.device for each in disks):
        together = [each for each in disks if each.device == device]
        yield from _device([each for each in together if each.use in _SETTINGS and (each.exists or each.use != "hub")])
        one = together[0]
        if one.free < MIN_FREE_DISK and one.free < MIN_FREE_SHARE * one.total and not one.in_ram:
            text = f"the disk of {one.path} is nearly full: {size(one.free)} of {size(one.total)} are free"
            yield Finding(NOTE, 50, text, "flexengine cache lists what can be cleared")


def _directory(disk: Disk) -> Iterator[Finding]:
    where = f"the {disk.use} directory {disk.path}"
    in_ram = f"{where} is on {disk.filesystem}, which is RAM"
    if disk.in_ram and disk.use == "offload":
        text = f"{in_ram}: what is offloaded takes memory"
        yield Finding(SLOWS, 1.3, text, "set --offload-dir to a directory on a disk")
    elif disk.in_ram and disk.use == "cache":
        text = f"{in_ram}: prepared weights take memory"
        yield Finding(SLOWS, 1.25, text, "set FLEXENGINE_CACHE to a directory on a disk")
    if disk.use == "offload" and not disk.writable:
        text = f"{where} cannot be written: nothing is offloaded to disk"
        yield Finding(NOTE, 45, text, "set --offload-dir to a directory that can be written")


def _device(disks: Sequence[Disk]) -> Iterator[Finding]:
    """Yield whether a device is slow. disks: the directories on it that can be moved."""
    if not disks or not (disks[0].network or disks[0].rotational):
        return
    uses = list(dict.fromkeys(each.use for each in disks))
    where = f"the director{'y' if len(uses) == 1 else 'ies'} for {' and '.join(uses)}"
    kind = f"a network file system ({disks[0].filesystem})" if disks[0].network else "a hard disk"
    remedy = f"set {', '.join(_SETTINGS[use] for use in uses)} to directories on a local SSD"
    yield Finding(SLOWS, 2.5, f"{where}: {disks[0].path} is on {kind}", remedy)


def _environment(software: Software, facts: Facts) -> Iterator[Finding]:
    if _variable(facts, "FLEXENGINE_KERNELS") == "reference":
        text = "FLEXENGINE_KERNELS=reference: kernels run in plain torch, several times slower"
        yield Finding(SLOWS, 5, text, "unset it")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        value = software.environment.get(name, "")
        if value.upper() in ("1", "ON", "YES", "TRUE"):
            yield Finding(NOTE, 15, f"{name}={value}: models that are not in the hub's cache cannot be downloaded")
    chosen = _variable(facts, "ATEN_CPU_CAPABILITY") or _variable(facts, "ONEDNN_MAX_CPU_ISA")
    if chosen:
        yield Finding(SLOWS, 1.1, f"ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA limits torch to {chosen}", "unset it")
    extras = software.extras.items()
    missing = [f"{name} ({machine.EXTRAS[name]})" for name, found in extras if not found and name not in machine.APART]
    if missing:
        yield Finding(NOTE, 1, f"optional libraries are missing: {', '.join(missing)}", "pip install what you need")


def _variable(facts: Facts, name: str) -> str | None:
    return facts.software.environment.get(name) if isinstance(facts.software, Software) else None


_CHECKS: dict[str, Sequence[Callable[[Any, Facts], Iterator[Finding]]]] = {  # by the part of the facts that they need
    "engine": (_engine, _gpu, _layers),
    "cpu": (_cpu, _threads),
    "memory": (_memory,),
    "software": (_libraries, _environment),
    "compilers": (_compilers,),
    "cache": (_cache,),
    "disks": (_disks,),
}
