"""Hostile safetensors and GGUF headers: refused as the library refuses them, quickly."""

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model import gguf_header
from flexengine.model.checkpoint import read_checkpoint, read_header
from tests.helpers.hostile import damaged, refused_or_loaded

# --- safetensors headers
DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL"}  # those the engine knows


def shard(file: Path, header: Any, data: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return file


def entry(begin: int, end: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(("header", "reason"), [
    ({"a": entry(0, 8), "b": entry(0, 8)}, "overlaps"), ({"a": entry(0, 8), "b": entry(4, 8)}, "overlaps"),
    ({"a": entry(4, 8)}, "gap"), ({"a": entry(0, 4)}, "4 bytes after the last"), ({}, "8 bytes after the last"),
    ({"a": entry(0, 0, [0]), "b": entry(4, 8)}, "gap"), ({"a": entry(0, 12)}, "truncated"),
    (b'{"a": %s, "a": %s}' % (json.dumps(entry(0, 4)).encode(), json.dumps(entry(4, 8)).encode()), "twice"),
    (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "twice"),
    ({"a": entry(0, 8, [True, 2])}, "shape"), ({"a": entry(0, 8, [2.0])}, "shape"),
    ({"a": entry(0, 8, [2**63, 0])}, "shape"),
    ({"a": entry(0, 8, [1] * 10**5)}, "shape"), ({"a": entry(0, 8, [10**4000, 0])}, "shape"),
    (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', "NaN"), (b"[" * 10**6, "header"),
    ('{"a": 1}'.encode("utf-16"), "header"), (b"\xff\xfe{}", "header"), (b"[]", "header"), (b"null", "header"),
    (b'{"a": null}', "header"), ({"a": {**entry(0, 8), "dtype": ["F32"]}}, "header"),
])  # fmt: skip
def test_tensors_fill_their_file_one_after_the_other(tmp_path: Path, header: Any, reason: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"x\.safetensors.*{reason}"):
        read_header(shard(tmp_path / "x.safetensors", header))


def test_empty_tensors_are_no_overlap(tmp_path: Path) -> None:
    header = {"a": entry(0, 0, [0]), "b": entry(0, 8), "c": entry(8, 8, [3, 0]), "__metadata__": {"format": "pt"}}
    found = read_header(shard(tmp_path / "x.safetensors", header))
    assert {name: stored.shape for name, stored in found.items()} == {"a": (0,), "b": (2,), "c": (3, 0)}


def library_reads(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as shard_file:
            return {shard_file.get_slice(name).get_dtype() for name in shard_file.keys()} <= DTYPES  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, OverflowError):
        return False


def test_damaged_headers_are_judged_as_the_library_judges_them(tmp_path: Path) -> None:
    """600 damaged headers: those the safetensors library refuses are refused here, and no others."""
    good = tmp_path / "good.safetensors"
    save_file({f"layers.{i}.w": torch.ones(i, 3, dtype=torch.float16) for i in range(8)}, good, {"format": "pt"})
    data, rng, bad, refused = good.read_bytes(), random.Random(11), tmp_path / "x.safetensors", 0
    most = 8 + struct.unpack("<Q", data[:8])[0]
    assert len(read_header(good)) == 8
    for _ in range(600):
        bad.write_bytes(damaged(data, rng, most))
        no = refused_or_loaded(lambda: read_header(bad))
        assert no != library_reads(bad)
        refused += no
    assert 300 < refused < 600


def test_damaged_indexes(families: Any, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    families("llama").model.save_pretrained(directory, max_shard_size="40KB")
    index = directory / "model.safetensors.index.json"
    good, rng, refused = index.read_bytes(), random.Random(12), 0
    assert len(read_checkpoint(directory)) == len(json.loads(good)["weight_map"])
    for _ in range(300):
        index.write_bytes(damaged(good, rng, len(good)))
        refused += refused_or_loaded(lambda: read_checkpoint(directory))
    assert 100 < refused < 300


# --- GGUF headers
def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_info(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_file(tensors: list[bytes], values: list[bytes], counts: Any = None, data: int = 64) -> bytes:
    tensor_count, value_count = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, value_count) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def scalar(key: str, value: int, kind: int = 4) -> bytes:
    return text(key) + struct.pack("<I" + {4: "I", 10: "Q"}[kind], kind, value)


GOOD = [tensor_info("a"), tensor_info("b", offset=32)]
HOSTILE_GGUF = {
    "values 2^60": gguf_file(GOOD, [], (2, 2**60)), "tensors 2^60": gguf_file(GOOD, [], (2**60, 0)),
    "values 2^64-1": gguf_file(GOOD, [], (2, 2**64 - 1)), "many values": gguf_file([], [], (0, 999_999), 10**7),
    "many tensors": gguf_file([], [], (999_999, 0), 10**7),
    "long key": gguf_file(GOOD, [struct.pack("<Q", 2**62) + b"k"]),
    "long name": gguf_file([struct.pack("<Q", 2**63)], []),
    "long text": gguf_file(GOOD, [text("k") + struct.pack("<IQ", 8, 2**63)]),
    "17 MB of text": gguf_file(GOOD, [text("k") + struct.pack("<I", 8) + text("a" * 17 * 2**20)]),
    "long array": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 4, 2**62)]),
    "long array of texts": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 8, 2**61)]),
    "nested arrays": gguf_file(GOOD, [text("k") + struct.pack("<IIQ", 9, 9, 1) * 1000]),
    "unknown kind": gguf_file(GOOD, [text("k") + struct.pack("<I", 77)]),
    "same key": gguf_file(GOOD, [scalar("k", 1), scalar("k", 2)]),
    "same name": gguf_file([tensor_info("a"), tensor_info("a", offset=32)], []),
    "overlap": gguf_file([tensor_info("a"), tensor_info("b", offset=28)], []),
    "same place": gguf_file([tensor_info("a"), tensor_info("b")], []),
    "far away": gguf_file([tensor_info("a", offset=2**63)], []), "beyond": gguf_file([tensor_info("a", (17,))], []),
    "no dims": gguf_file([tensor_info("a", ())], []), "5 dims": gguf_file([tensor_info("a", (1, 1, 1, 1, 2))], []),
    "2^32 dims": gguf_file([text("a") + struct.pack("<I", 2**32 - 1)], []),
    "huge dims": gguf_file([tensor_info("a", (2**63, 2**63, 2**63, 2**63))], []),
    "zero dim": gguf_file([tensor_info("a", (0, 2**60))], []), "no type": gguf_file([tensor_info("a", kind=999)], []),
    "half a block": gguf_file([tensor_info("a", kind=2)], []),
    "alignment 0": gguf_file(GOOD, [scalar("general.alignment", 0)]),
    "alignment 3": gguf_file(GOOD, [scalar("general.alignment", 3)]),
    "alignment 2^63": gguf_file(GOOD, [scalar("general.alignment", 2**63, 10)]),
    "alignment text": gguf_file(GOOD, [text("general.alignment") + struct.pack("<I", 8) + text("32")]),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_GGUF)
def test_hostile_gguf_headers_fail_fast(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.gguf").write_bytes(HOSTILE_GGUF[case])
    tracemalloc.start()
    try:
        with pytest.raises((BadCheckpoint, UnsupportedModel), match=r"x\.gguf"):  # of other versions: unsupported
            gguf_header.read_header(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_harmless_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf_file(GOOD, [scalar("k", 5)]))
    header = gguf_header.read_header(tmp_path / "x.gguf")
    assert header.values == {"k": 5}
    assert [(tensor.name, tensor.shape) for tensor in header.tensors] == [("a", (8,)), ("b", (8,))]
