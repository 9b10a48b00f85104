"""flexengine cache clear never removes anything outside the cache, or of another program."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.shell import cachedir
from tests.helpers.caches import Cache, K, full


@pytest.fixture
def outside(tmp_path: Path) -> SimpleNamespace:
    """A directory beside the cache with names that items have."""
    folder = tmp_path / "outside"
    (folder / K["a"]).mkdir(parents=True)
    names = [f"{K['a']}/config.json", f"cpu-{K['1']}.so", f"{K['2']}.json", "flexengine-1.spill", "precious"]
    for name in names:
        (folder / name).write_text("precious")
        os.utime(folder / name, (0, 0))
    return SimpleNamespace(folder=folder, intact=lambda: all((folder / n).read_text() == "precious" for n in names))


@pytest.mark.parametrize("folder", ["prepared", "kernels", "hardware", "offload"])
def test_a_folder_that_is_a_link(cache: Cache, outside: SimpleNamespace, folder: str) -> None:
    cache.root.mkdir()
    (cache.root / folder).symlink_to(outside.folder)
    listed = cache("--json")
    assert listed["items"] == []
    assert listed["ignored"] == [{"path": folder, "reason": "a link, which is not followed"}]
    assert cache.clear()["removed"] == []
    assert outside.intact()
    assert (cache.root / folder).is_symlink()


def test_items_that_are_links(cache: Cache, outside: SimpleNamespace) -> None:
    links = {f"prepared/{K['a']}": K["a"], f"prepared/{K['b']}.part": K["a"], f"prepared/{K['c']}.tmp-1": K["a"],
             f"kernels/cpu-{K['1']}.so": f"cpu-{K['1']}.so", "kernels/tmpab12_x9z": K["a"],
             f"hardware/{K['2']}.json": f"{K['2']}.json",
             "offload/flexengine-1.spill": "flexengine-1.spill"}  # fmt: skip
    for link, target in links.items():
        (cache.root / link).parent.mkdir(parents=True, exist_ok=True)
        (cache.root / link).symlink_to(outside.folder / target)
    assert cache.clear()["removed"] == []
    assert {entry["path"] for entry in cache("--json")["ignored"]} == set(links)
    assert outside.intact()
    assert all((cache.root / link).is_symlink() for link in links)


def test_links_inside_an_item_are_removed_and_not_followed(cache: Cache, outside: SimpleNamespace) -> None:
    folder = cache.finished(K["a"], "config.json")
    for number, target in enumerate((outside.folder, outside.folder / "precious", "/", "/nonexistent", folder)):
        (folder / f"link{number}").symlink_to(target)
    assert cache("--json")["bytes"] < 2000  # nothing outside is counted
    assert len(cache.clear()["removed"]) == 1
    assert not folder.exists()
    assert outside.intact()


def test_a_cache_that_is_itself_a_link_is_the_cache(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    cache.root.symlink_to(tmp_path / "disk")
    cache.finished(K["a"], "config.json")
    assert len(cache.clear()["removed"]) == 1
    assert cache.root.is_symlink()


@pytest.mark.parametrize("what", ["item", "folder"])
def test_a_link_that_takes_an_items_place(cache: Cache, outside: SimpleNamespace, what: str) -> None:
    """Between listing and removing."""
    folder = cache.finished(K["a"], "config.json")
    (item,) = cachedir.contents(cache.root).items
    (moved,) = (folder,) if what == "item" else (folder.parent,)
    moved.rename(cache.root / "moved")
    moved.symlink_to(outside.folder / K["a"] if what == "item" else outside.folder)
    with pytest.raises(cachedir.Kept, match="changed since it was listed"):
        cachedir.remove(cache.root, item)
    assert outside.intact()


def test_another_directory_that_takes_an_items_place(cache: Cache) -> None:
    folder = cache.finished(K["a"], "config.json")
    (item,) = cachedir.contents(cache.root).items
    folder.rename(cache.root / "moved")
    other = cache.finished(K["a"], "config.json")
    with pytest.raises(cachedir.Kept, match="changed since it was listed"):
        cachedir.remove(cache.root, item)
    assert (other / "config.json").exists()


def test_a_link_in_place_of_a_lock(cache: Cache, outside: SimpleNamespace) -> None:
    folder = cache.finished(K["a"], "config.json")
    folder.with_suffix(".lock").symlink_to(outside.folder / "new")
    assert cache.clear()["removed"] == []
    assert not (outside.folder / "new").exists()


def test_only_names_that_flexengine_gives(cache: Cache) -> None:
    """A cache set to a directory with other things in it."""
    names = ["thesis.txt", f"{K['a']}/file", "prepared/thesis.txt", f"prepared/{K['a'].upper()}/config.json",
             f"prepared/{K['a'][:-1]}/config.json", f"prepared/{K['b']}", f"prepared/{K['c']}.part",
             f"prepared/{K['d']}.tmp-x/config.json", f"prepared/{K['e']}.backup/config.json", "kernels/cpu.so",
             f"kernels/cpu-{K['1']}.so.bak", f"kernels/cpu-{K['2']}.so/file", "kernels/tmp/file", "hardware/mine.json",
             f"hardware/{K['1']}.json/file", f"hardware/{K['2']}.json.old", "offload/spill",
             "offload/my.spill"]  # fmt: skip
    for name in names:
        cache.file(name, days=100)
    os.mkfifo(cache.root / "prepared" / K["f"])
    os.mkfifo(cache.root / "hardware" / f"{K['f']}.json")
    before = cache.left()
    assert cache.clear()["removed"] == []
    assert cache.left() == before
    assert len(cache("--json")["ignored"]) == len(names) + 2


def test_folders_that_cannot_be_read(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    full(cache)
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path in ("prepared", K["a"]):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(cachedir.os, "open", refuse)
    listed = cache("--json")
    assert {"path": "prepared", "reason": "cannot be read: Permission denied"} in listed["ignored"]
    assert {item["kind"] for item in listed["items"]} == {"kernels", "rates", "leftovers"}
