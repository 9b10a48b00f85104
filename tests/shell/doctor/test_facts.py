"""Facts about the machine, compared with what the system says, and of machines made of files."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers.models.beam.configuration_beam import BeamConfig
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config

from flexengine import kernels
from flexengine.kernels import build
from flexengine.kernels.cpu import NativeKernels
from flexengine.measure import links, store
from flexengine.shell.doctor import probe
from flexengine.shell.doctor.machine import (
    _NEEDED,
    COMPILERS,
    NEWEST_TESTED,
    Failed,
    attempt,
    compilers,
    cpu,
    disk,
    memory,
    software,
)
from flexengine.tier.machine import make_machine
from tests.helpers.measuring import hardware
from tests.helpers.tiny_models import tiny_config

# Processor and memory.


def put(root: Path, files: dict[str, str]) -> Path:
    """Write files below a directory that stands for the system's root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_processor() -> None:
    found = cpu()
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}).stdout
    assert found.model in lscpu
    assert found.usable == len(os.sched_getaffinity(0))
    assert found.cores == os.cpu_count()
    assert ("AVX2" in found.features) == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


def test_affinity() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cpu().usable == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("line", "features"), [
    ("flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile avx512_bf16", ("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16",
                                                                      "AMX")),
    ("flags\t\t: fpu avx2 avx_vnni", ("AVX2", "AVX VNNI")), ("flags\t\t: fpu sse2 xavx2", ()),
    ("Features\t: fp asimd sve bf16 i8mm", ("NEON", "SVE", "I8MM", "BF16")), ("", ()),
])  # fmt: skip
def test_other_processors(tmp_path: Path, line: str, features: tuple[str, ...]) -> None:
    root = put(tmp_path, {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: A CPU: B\n{line}\n\nprocessor\t: 1\nmodel name\t: C\n",
        "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
    })  # fmt: skip
    found = cpu(root)
    assert (found.model, found.features, found.quota) == ("A CPU: B", features, 2.5)


def test_this_memory() -> None:
    found = memory()
    meminfo = {key: int(value.split()[0]) * 1024 for key, value in
               (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())}  # fmt: skip
    assert found.total == meminfo["MemTotal"]
    assert found.swap == meminfo["SwapTotal"]
    assert found.free == pytest.approx(meminfo["MemAvailable"], rel=0.1)
    assert 0 < found.usable <= found.total


def test_memory_with_a_limit(tmp_path: Path) -> None:
    root = put(tmp_path, {
        "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "4000000\n",
        "sys/fs/cgroup/job/memory.current": "3000000\n", "sys/fs/cgroup/job/memory.stat": "inactive_file 1000000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    })  # fmt: skip
    found = memory(root)
    assert (found.limit, found.limit_used, found.usable, found.huge_pages) == (4000000, 2000000, 2000000, "madvise")
    put(root, {"sys/fs/cgroup/job/memory.max": str(2**50)})
    assert (memory(root).limit, memory(root).limit_used) == (None, None)  # above the RAM


# Disks.


def test_a_directory_here(tmp_path: Path) -> None:
    found = disk("cache", tmp_path / "not" / "yet")
    df = subprocess.run(["df", "--output=fstype,target,size", "-B1", tmp_path], capture_output=True, text=True).stdout
    filesystem, mount, size = df.splitlines()[1].split()
    assert (found.filesystem, found.mount, found.total) == (filesystem, mount, int(size))
    assert found.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert (found.exists, found.writable) == (False, True)
    assert found.device == tmp_path.stat().st_dev
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_directory_in_ram() -> None:
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    assert disk("offload", Path("/dev/shm")).in_ram == (kinds.get("/dev/shm") == "tmpfs")


def test_a_directory_that_cannot_be_written() -> None:
    assert not disk("cache", Path("/proc/nowhere")).writable
    assert not disk("cache", Path("/dev/null/x")).writable


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/none rw
30 22 8:17 / {0} rw - xfs /dev/none2 rw
31 30 0:55 / {0}/nfs\\040share rw shared:5 - nfs4 server:/x rw
32 30 0:56 / {0}/covered rw - ext4 /dev/none rw
33 30 0:57 / {0}/covered rw - tmpfs tmpfs rw
34 30 0:58 / {0}/mountpoint rw - btrfs pool rw
"""


def mounted(tmp_path: Path) -> tuple[Path, Path]:
    """Return a directory with mounts in it, and the root that describes them."""
    place = tmp_path / "place"
    for name in ("nfs share", "covered", "mountpoint", "mountpoint2"):
        (place / name).mkdir(parents=True)
    return place, put(tmp_path / "root", {"proc/self/mountinfo": MOUNTS.format(place)})


def test_mounts(tmp_path: Path) -> None:
    place, root = mounted(tmp_path)
    kinds = {"": ("xfs", False, False), "nfs share/deep": ("nfs4", False, True), "covered": ("tmpfs", True, False),
             "mountpoint/x": ("btrfs", False, False), "mountpoint2": ("xfs", False, False)}  # fmt: skip
    for name, expected in kinds.items():
        found = disk("cache", place / name, root)
        assert (found.filesystem, found.in_ram, found.network) == expected, name
    assert disk("cache", Path("/"), root).mount == "/"
    (place / "link").symlink_to(place / "nfs share")
    assert disk("cache", place / "link" / "x", root).network


@pytest.mark.parametrize(("name", "says", "flags", "turns"), [
    ("sdb", "1", "fpu", True), ("sdb", "0", "fpu", False), ("sdb", "1", "fpu hypervisor", None),
    ("sdb", "0", "hypervisor", False), ("vdb", "1", "fpu", None), ("nvme0n1", "0", "fpu", False),
])  # fmt: skip
@pytest.mark.parametrize("partition", [True, False])
def test_disks_that_turn(tmp_path: Path, name: str, says: str, flags: str, turns: bool | None, partition: bool) -> None:
    place, root = mounted(tmp_path)
    put(root, {f"sys/devices/{name}/queue/rotational": f"{says}\n", f"sys/devices/{name}/{name}1/partition": "1\n",
               "proc/cpuinfo": f"flags\t: {flags}\n"})  # fmt: skip
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/8:17").symlink_to(root / "sys/devices" / name / (f"{name}1" if partition else ""))
    assert disk("cache", place, root).rotational is turns
    assert disk("cache", place / "nfs share", root).rotational is None


# Software.


def test_versions() -> None:
    found = software()
    by_name = {library.name: library for library in found.libraries}
    assert set(by_name) >= {"torch", "transformers", "safetensors", "numpy", "psutil"}
    assert {name: library.version for name, library in by_name.items()} == {n: metadata.version(n) for n in by_name}
    assert all(library.fits for library in found.libraries)
    assert by_name["torch"].allowed
    assert found.python == ".".join(map(str, sys.version_info[:3]))


def test_the_newest_tested_versions_are_those_of_these_tests() -> None:
    """Raise NEWEST_TESTED when the tests pass with newer versions."""
    assert [library.name for library in software().libraries if not library.tested] == []
    assert set(NEWEST_TESTED) <= {library.name for library in software().libraries}


def test_a_checkout_that_is_not_installed_knows_the_libraries_that_setup_cfg_names() -> None:
    found = configparser.ConfigParser()
    found.read(Path(__file__).parents[3] / "setup.cfg")
    required = re.findall(r"^[A-Za-z_0-9]+", found["options"]["install_requires"], re.MULTILINE)
    assert "tqdm" in required
    assert {*required, "tokenizers"} == set(_NEEDED.split())  # transformers requires tokenizers


@pytest.mark.parametrize(("version", "fits", "tested"), [
    ("2.8.1", False, True), ("2.9", True, True), ("2.13.0+cpu", True, True), ("2.13.9", True, True),
    ("2.14.0", None, False), (None, False, True),
])  # fmt: skip
def test_versions_against_the_metadata(
    monkeypatch: pytest.MonkeyPatch, version: str | None, fits: bool | None, tested: bool
) -> None:
    real = metadata.version

    def other(name: str) -> str:
        if name == "torch" and version is None:
            raise metadata.PackageNotFoundError(name)
        return str(version) if name == "torch" else real(name)

    monkeypatch.setattr("flexengine.shell.doctor.machine.metadata.version", other)
    (found,) = (library for library in software().libraries if library.name == "torch")
    assert (found.version, found.tested) == (version, tested)
    assert fits is None or found.fits is fits


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.delenv("CXX", raising=False)
    found = software().environment
    assert found["OMP_NUM_THREADS"] == "3"
    assert "CXX" not in found
    assert "secret" not in str(found)


def test_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILERS == build.COMPILERS
    for name, text in {"g++": "echo 'g++ 1.2'; echo more", "clang++": "echo broken >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "'")
    assert [(c.command, c.version, c.works) for c in compilers()] == [
        ("'", "no command: No closing quotation", False), ("g++", "g++ 1.2", True),
        ("clang++", "broken", False)]  # fmt: skip
    monkeypatch.setenv("CXX", "g++ -m32")
    assert [c.command for c in compilers()] == ["g++ -m32", "g++", "clang++"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX")
    assert compilers() == ()


# Facts that need torch.


def test_other_facts_are_found_without_torch(tmp_path: Path) -> None:
    """A damaged torch may end the process that imports it, so `doctor` imports it in a process of its own."""
    code = "import sys; from pathlib import Path; from flexengine.shell.doctor import facts, machine\n"
    code += f"machine.cpu(), machine.memory(), machine.disk('offload', Path({str(tmp_path)!r}))\n"
    code += f"facts._unwritable(Path({str(tmp_path)!r}))\n"
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_torch_and_kernels() -> None:
    found = probe.torch_facts()
    assert (found["version"], found["threads"]) == (torch.__version__, torch.get_num_threads())
    assert found["cuda_available"] == torch.cuda.is_available()
    facts = probe.kernel_facts()
    if facts["compiled"]:
        assert Path(facts["library"]).read_bytes()[:4] == b"\x7fELF"
        assert facts["simd"] in (0, 256, 512)


def test_kernels_that_are_not_compiled_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not compiled to find that out."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    monkeypatch.delenv("FLEXENGINE_KERNELS", raising=False)
    native = any(compiler.works for compiler in compilers())
    assert (probe.kernel_facts()["name"], probe.kernel_facts()["compiled"]) == (
        "native" if native else "reference", False)  # fmt: skip
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert probe.kernel_facts()["name"] == "reference"
    assert list(tmp_path.iterdir()) == []


def test_measured_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each disk; nothing is left in the directories."""
    for name in ("COPY_SECONDS", "SPILL_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(links, name, 0.005)
    for name in ("COPIED", "SPILLED", "WRITTEN", "TOUCHED"):
        monkeypatch.setattr(links, name, 16 << 20)
    monkeypatch.setattr(links, "READS", (1 << 20,))
    directories = [tmp_path / "one", tmp_path / "two"]
    found = probe.facts(directories[0], directories, measure=True, model="")
    rates = found["measured"]
    assert list(rates["disks"]) == list(map(str, directories))
    numbers = [rates["touch"], rates["h2d"], *(x for each in rates["disks"].values() for x in each.values())]
    assert len(numbers) == 7
    assert all(number > 0 for number in numbers)
    assert list(tmp_path.iterdir()) == []
    assert probe.facts(directories[0], [], measure=False, model="")["measured"] is None


@pytest.mark.slow
def test_layers_of_a_model(families: Any, tmp_path: Path) -> None:
    """All of a LLaMA are computed by native kernels, none of a Beam."""
    found = probe.model_facts(str(families("llama").directory))
    assert (found["layers"], found["native"], found["as_modules"]) == (4, 4, [])
    tiny_config(BeamConfig).save_pretrained(tmp_path)
    found = probe.model_facts(str(tmp_path))
    assert (found["layers"], found["native"]) == (4, 0)
    assert all("layers run as modules of transformers" in text for text in found["as_modules"])
    assert sum(int(text.split()[0]) for text in found["as_modules"]) == 4
    assert "error" in probe.facts(tmp_path, [], measure=False, model="no/such-model")["model"]


def test_modules_with_states(tmp_path: Path) -> None:
    """The words of a job that computes in fp32 on a CPU."""
    tiny_config(Lfm2Config).save_pretrained(tmp_path)
    found = probe.model_facts(str(tmp_path))["as_modules"]
    words = ", which kernels change" if isinstance(kernels.load(), NativeKernels) else ""
    assert any(text.endswith(f"they keep a state beside keys and values{words}") for text in found)


def test_stored_rates(own_cache: Path) -> None:
    """Of the machine with the default offload directory, as jobs have it."""
    kernels.load()  # the rates belong to kernels
    offload = own_cache / "offload"
    assert probe.facts(offload, [own_cache], measure=False, model="")["rates"] is None
    machine = make_machine("cpu", None, None, [offload])
    key = store.key_of(machine, torch.bfloat16, [own_cache])
    machine.close()
    store.save_rates(store.key_of(machine, torch.float32, []), hardware(touch=7.0))
    found = probe.facts(offload, [own_cache], measure=False, model="")["rates"]
    assert found["disks"] == {str(offload): {"read": 4.0, "write": 4.0, "checkpoint_read": 4.0}}
    assert (found["h2d"], found["touch"], found["flops"]) == (4.0, 7.0, {"float32": 4.0})
    assert time.time() - found["when"] < 60
    store.save_rates(key, hardware(touch=9.0))
    assert probe.facts(offload, [own_cache], measure=False, model="")["rates"]["touch"] == 9.0  # the latest


def test_a_probe_that_fails() -> None:
    assert attempt(lambda: 5) == 5
    assert attempt(lambda: {}["x"]) == Failed("KeyError: 'x'")
