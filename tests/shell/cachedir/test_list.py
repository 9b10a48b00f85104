"""flexengine cache: the list of items."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests.flash.bundles import prepare_bundles
from flexengine.guests.flash.feed_forward import find
from flexengine.model.prepare import prepared
from flexengine.model.source import resolve
from flexengine.worker.open_model import open_model
from tests.helpers.caches import DAY, Cache, K, full
from tests.helpers.tiny_gguf import tiny_gguf


def test_no_cache_and_an_empty_one(cache: Cache) -> None:
    assert "0 items, 0 B" in cache()
    assert not cache.root.exists()
    cache.root.mkdir()
    assert cache("--json")["items"] == []
    assert cache.clear()["freed_bytes"] == 0
    assert cache.code == 0


def test_a_cache_that_is_a_file_is_refused(cache: Cache) -> None:
    cache.root.write_text("")
    cache()
    assert cache.code == 2
    assert f"{cache.root} cannot be read" in cache.err


def test_kinds_models_and_sizes(cache: Cache) -> None:
    full(cache)
    found = cache("--json")
    kinds = [(item["kind"], item["model"], item["format"]) for item in found["items"]]
    user = "/models/tiny.gguf"
    assert kinds[:5] == [("models", user, None), ("weights", user, "int4"), ("calibrations", user, "float32"),
                         ("kernels", None, None), ("rates", None, None)]  # fmt: skip
    assert [kind for kind, *_ in kinds[5:]] == ["unfinished"] + 5 * ["leftovers"]
    du = subprocess.run(["du", "-sb", "--apparent-size", cache.root], capture_output=True, text=True).stdout.split()[0]
    folders = sum(p.stat().st_size for p in (cache.root, *cache.root.rglob("*")) if p.is_dir())
    assert found["bytes"] == int(du) - folders
    assert {item["path"] for item in found["items"]} < cache.left()
    assert all(0.99 * DAY < time.time() - item["last_use"] < 1.01 * DAY for item in found["items"])
    assert all(item["busy"] is None for item in found["items"])


@pytest.mark.parametrize("name", ["importances.safetensors", "magnitudes.safetensors", "harms.json", "predictors.json"])
def test_what_was_measured_of_a_model_is_a_calibration(cache: Cache, name: str) -> None:
    cache.finished(K["c"], name, "/models/tiny.gguf")
    assert [item["kind"] for item in cache("--json")["items"]] == ["calibrations"]


def test_the_table(cache: Cache) -> None:
    full(cache)
    lines = cache().splitlines()
    assert lines[0].startswith(f"{cache.root}: 11 items, ")
    head = next(line for line in lines if line.startswith("kind"))
    weights = next(line for line in lines if line.startswith("weights"))
    assert weights[head.index("model") :].startswith("tiny (int4) ")
    assert weights[head.index("last use") :].startswith("1 day ago")
    assert weights[head.index("path") :] == f"prepared/{K['b']}"
    assert lines[-2] == "flexengine cache clear NAME removes one of them, or all of a kind"
    assert lines[-1].startswith("not included: downloads from the hub")


def test_a_model_of_the_hub_has_its_name(cache: Cache) -> None:
    cache.finished(K["a"], "config.json", "/hub/models--org--name/snapshots/0123abcd")
    assert "  org/name  " in cache()


def test_downloads_are_named_and_not_counted(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0").write_bytes(b"x" * 3000)
    (tmp_path / "hub" / "link").symlink_to(blobs / "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = cache("--json")
    assert found["hub"] == {"path": str(tmp_path / "hub"), "bytes": 3000}
    assert found["bytes"] == 0
    cache.clear()
    assert (blobs / "0").stat().st_size == 3000


def test_prepared_weights_of_a_job(cache: Cache, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "small.gguf")
    source = resolve(str(file))
    prepared(source.directory, [file], lambda folder: (folder / "00000.safetensors").touch(), "codes", label="int3")
    found = cache("--json")["items"]
    assert [(item["kind"], item["model"], item["format"]) for item in found] == [
        ("models", str(file), None), ("weights", str(file), "int3")]  # fmt: skip
    assert [item["busy"] for item in found] == 2 * ["in use"]  # by this process


def test_bundles_are_weights(cache: Cache, families: Any) -> None:
    model = open_model(str(families("opt").directory), None, "cpu")
    for kind in ("", "int8"):
        prepare_bundles(model, find(model.skeleton), kind)
    found = cache("--json")["items"]
    assert {(item["kind"], item["model"], item["format"]) for item in found} == {
        ("weights", str(families("opt").directory), f"{kind} bundles") for kind in ("float32", "int8")}  # fmt: skip
    assert {item["busy"] for item in found} == {"in use"}  # by this process


def test_using_what_is_prepared_counts_as_use(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def build(folder: Path) -> None:
        (folder / "config.json").touch()

    made = prepared(tmp_path, [tmp_path / "file"], build)
    os.utime(made, (0, 0))
    assert cache("--older-than", "30d", "--json")["items"]
    assert prepared(tmp_path, [tmp_path / "file"], build) == made
    assert not cache("--older-than", "1h", "--json")["items"]


@pytest.mark.parametrize("note", [b"", b"[1]", b"{", b"[" * 10**5, b'{"source": 5, "label": []}', b"\xff", None])
def test_damaged_notes(cache: Cache, note: bytes | None) -> None:
    folder = cache.finished(K["a"], "config.json")
    (folder / "prepared.json").unlink()
    if note is None:
        os.mkfifo(folder / "prepared.json")
    else:
        (folder / "prepared.json").write_bytes(note)
    assert [item["kind"] for item in cache("--json")["items"]] == ["models"]
    assert cache()
    assert cache.code == 0


def test_names_cannot_write_to_the_terminal(cache: Cache) -> None:
    cache.finished(K["a"], "config.json", "/x/evil\x1b[2J\nname", "\x1b[31m")
    (cache.root / "\x1b[2Jfile").touch()
    text = cache()
    assert "\x1b" not in text
    assert "evil\\x1b[2J\\nname (\\x1b[31m)" in text


def test_notes_in_a_circle_end(cache: Cache) -> None:
    for one, other in ("ab", "ba"):
        cache.finished(K[one], "config.json", os.path.realpath(cache.root / "prepared" / K[other]))
    assert len(cache("--json")["items"]) == 2
