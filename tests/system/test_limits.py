"""Memory and disk that a process may use: cgroups, folders in RAM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.system import limits
from flexengine.tier import machine
from flexengine.tier.machine import make_machine

# Limits.


def group(folder: Path, version: int, limit: str, used: int, cache: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nactive_file 9\n")


def root_of(tmp_path: Path, lines: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    return tmp_path


def test_cgroup_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(tmp_path, "0::/user.slice/job\n")
    base = root / "sys/fs/cgroup"
    group(base / "user.slice/job", 2, "max", 500, 0)
    group(base / "user.slice", 2, "4000", 1500, 300)
    group(base / "other", 2, "10", 5, 0)
    assert limits.cgroup_memory(root) == [(4000, 1200)]
    group(base / "user.slice/job", 2, "3000", 900, 1000)  # more cache than use is no debt
    assert limits.cgroup_memory(root) == [(3000, 0), (4000, 1200)]
    for free, usable in ((10**6, 2800), (700, 700)):
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert limits.usable_memory(root) == usable
    for ram, total in ((10**6, 3000), (700, 700)):
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda ram=ram: SimpleNamespace(total=ram))
        assert limits.total_memory(root) == total


def test_cgroup_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(tmp_path, "12:cpu,cpuacct:/job\n9:memory:/docker/job\n1:name=systemd:/init\n0::/docker/job\n")
    base = root / "sys/fs/cgroup/memory"
    group(base / "docker/job", 1, "9000", 2500, 500)
    group(base / "docker", 1, str(2**63 - 4096), 1, 0)
    group(base, 1, "8000", 100, 0)
    group(base.parent, 1, "7", 7, 0)  # outside the hierarchy
    assert limits.cgroup_memory(root) == [(9000, 2000), (8000, 100)]
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert limits.usable_memory(root) == 7000


def test_cgroup_seen_from_inside_a_container(tmp_path: Path) -> None:
    """/proc names the path outside; what is mounted is the container's own group."""
    root = root_of(tmp_path, "4:memory:/docker/0123abc\n")
    group(root / "sys/fs/cgroup/memory", 1, "5000", 1000, 0)
    assert limits.cgroup_memory(root) == [(5000, 1000)]


def test_no_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.cgroup_memory(tmp_path) == []
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=12345))
    assert limits.usable_memory(tmp_path) == 12345
    root = root_of(tmp_path, "0::/x\n")
    (root / "sys/fs/cgroup/x").mkdir(parents=True)
    (root / "sys/fs/cgroup/x/memory.max").write_text("100\n")  # no memory.current beside it
    assert limits.cgroup_memory(root) == []


@pytest.mark.parametrize(("lines", "files", "cores"), [
    ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
    ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
    ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
    ("4:memory:/a\n2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
    ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
    ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "x\n"}, None),
    ("2:cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "1\n", "cpu/a/cpu.cfs_period_us": "1\n"}, None),
])  # fmt: skip
def test_cores_of_cgroups(tmp_path: Path, lines: str, files: dict[str, str], cores: float | None) -> None:
    root = root_of(tmp_path, lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert limits.cgroup_cores(root) == cores


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize(("given", "ram", "disk"), [(None, 8050, 1150), (4000, 4000, 5200), (9199, 9199, 8.192)])
def test_an_offload_directory_in_ram_takes_from_the_same_memory(
    kind: str, given: int | None, ram: int, disk: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise data offloaded to this "disk" would use RAM until the job is killed. Sizes in thousands of bytes."""
    mounts = [SimpleNamespace(fstype="tmpfs", mountpoint=str(tmp_path / place)) for place in ("not there", ".")]
    given = given and 1000 * given
    monkeypatch.setattr(machine, "usable_memory", lambda: 10_000_000)
    for there in (mounts, mounts[:1]):
        monkeypatch.setattr(limits.psutil, "disk_partitions", lambda all, there=there: there)
        made = make_machine(kind, given, None, [tmp_path / "not" / "yet"])
        disk_bytes = made.capacity.disk
        assert disk_bytes == made.disk.ledger.capacity
        assert disk_bytes == 1000 * disk if there is mounts else disk_bytes > 10_000_000
        if kind == "cpu":
            assert made.capacity.device == (1000 * ram if there is mounts else given or 9_200_000)
        made.close()


def test_usable_disk_of_a_folder_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def usage(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(free=4321)

    monkeypatch.setattr(limits.shutil, "disk_usage", usage)
    assert limits.usable_disk(tmp_path / "a" / "b") == 4321
    assert asked == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []
