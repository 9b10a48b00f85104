"""Small files that take gigabytes in a reader without limits, and how many rows each has."""

import gzip
import io
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

MB = 10**6
GOOD = b'{"prompt": "good"}\n'


class Hostile(NamedTuple):
    """A file. rows: how many rows it has; None if it must be refused as a whole."""

    name: str
    rows: int | None
    write: Callable[[Path], None]


def _pieces(*pieces: tuple[bytes, int]) -> Iterable[bytes]:
    """Yield blocks of about a megabyte: each piece as often as its number says."""
    for piece, count in pieces:
        step = max(1, MB // len(piece))
        for first in range(0, count, step):
            yield piece * min(step, count - first)


def _data(*pieces: bytes | tuple[bytes, int]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        if path.suffix == ".gz":
            file: Any = gzip.open(path, "wb", compresslevel=1)  # noqa: SIM115
        elif path.suffix == ".zst":
            file = import_module("backports.zstd").open(path, "wb")
        else:
            file = path.open("wb")
        with file:
            for block in _pieces(*((p, 1) if isinstance(p, bytes) else p for p in pieces)):
                file.write(block)

    return write


def _line(*inner: bytes | tuple[bytes, int]) -> Callable[[Path], None]:
    """Return the writer of a line of JSON with these bytes between quotes, and a good line."""
    return _data(b'{"prompt": "', *inner, b'"}\n', GOOD)


def _parquet(make: Callable[[], Any], **options: Any) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(pa.table(make()), path, **options)


def _arrow(make: Callable[[], Any], compression: str | None = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content, options = pa.table(make()), pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(path), content.schema, options=options) as file:
            file.write_table(content)

    return write


def _repeated(count: int, size: int) -> dict[str, Any]:
    return {"prompt": pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array(["x" * size]))}


def _fixed() -> dict[str, Any]:
    """Values of one size, of which pyarrow reserves memory for 1024 at once."""
    value = pa.array([b"\0" * 2**21], pa.binary(2**21))
    return {"prompt": ["a"] * 512, "x": value.take(np.zeros(512, np.int32))}


def _one_list(count: int, kind: Any = np.int32) -> dict[str, Any]:
    return {"prompt_token_ids": pa.ListArray.from_arrays([0, count], pa.array(np.full(count, 7, kind)))}


def _uneven(count: int) -> dict[str, Any]:
    """A list of very many values among a hundred thousand small ones."""
    offsets = np.concatenate([np.arange(100_000), [count]]).astype(np.int32)
    return {"prompt_token_ids": pa.ListArray.from_arrays(offsets, pa.array(np.arange(count, dtype=np.int32) % 3))}


def _lists_of_texts() -> dict[str, Any]:
    texts = pa.DictionaryArray.from_arrays(np.zeros(100_000, np.int32), pa.array(["x" * MB]))
    return {"prompt": pa.array(["a"] * 100), "x": pa.ListArray.from_arrays(np.arange(0, 100_001, 1000), texts)}


def _views(count: int, size: int) -> dict[str, Any]:
    buffer = pa.py_buffer(b"x" * size)
    view = np.array([[size, int.from_bytes(b"xxxx", "little"), 0, 0]], np.int32).repeat(count, 0)
    return {"prompt": pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(view.tobytes()), buffer])}


def _list_views(count: int, size: int) -> dict[str, Any]:
    sizes, values = np.full(count, size, np.int32), pa.array(np.zeros(size, np.int32))
    return {"prompt_token_ids": pa.ListViewArray.from_arrays(np.zeros(count, np.int32), sizes, values)}


def _list_of_nulls() -> dict[str, Any]:
    return {"prompt": ["a"], "x": pa.ListArray.from_arrays([0, 2**31 - 1], pa.nulls(2**31 - 1))}


def _runs() -> dict[str, Any]:
    return {"prompt": pa.RunEndEncodedArray.from_arrays([200], ["x" * (40 * MB)])}


def _columns(count: int) -> dict[str, Any]:
    return {"prompt": ["a"] * 50, **{f"c{i}": [1] * 50 for i in range(count)}}


def _beyond(path: Path) -> None:
    """Write an Arrow file whose offsets point beyond its data."""
    _arrow(lambda: {"prompt": ["abcdefgh"] * 4})(path)
    data = path.read_bytes()
    offsets = np.array([0, 8, 16, 24, 32], np.int32).tobytes()
    assert offsets in data
    path.write_bytes(data.replace(offsets, np.array([0, 8, 2**30, 24, 32], np.int32).tobytes()))


def _bad_name(path: Path) -> None:
    """Write an Arrow stream with a column whose name is not UTF-8."""
    out, content = io.BytesIO(), pa.table({"pppp": ["a"], "prompt": ["b"]})
    with pa.ipc.new_stream(out, content.schema) as file:
        file.write_table(content)
    path.write_bytes(out.getvalue().replace(b"pppp", b"p\xffpp"))


_ZSTD = {"compression": "zstd"}
FILES = (
    Hostile("text.jsonl", 2, _line((b"word ", 12 * MB))),
    Hostile("wide.jsonl", 2, _line(b"\xf0\x9f\x98\x80", (b"word ", 12 * MB))),
    Hostile("escapes.jsonl", 2, _line((b"\\ud83d\\ude00", 5 * MB))),
    Hostile("lists.jsonl", 2, _data(b'{"x": [', (b"[],", 20 * MB), b"[]]}\n", GOOD)),
    Hostile("numbers.jsonl", 2, _data(b'{"prompt_token_ids": [', (b"300,", 15 * MB), b"1]}\n", GOOD)),
    Hostile("keys.jsonl", 2, _data(b'{"prompt": "a"', (b',"a":{}', 9 * MB), b"}\n", GOOD)),
    Hostile("deep.jsonl", 2, _data((b"[", 30 * MB), b"\n", GOOD)),
    Hostile("digits.jsonl", 2, _data(b'{"prompt": ', (b"9", 60 * MB), b"}\n", GOOD)),
    Hostile("long.jsonl", 2, _line((b"word ", 80 * MB))),
    Hostile("blank.jsonl", 1, _data((b"\n", 50 * MB), GOOD)),
    Hostile("spaces.jsonl", 1, _data((b" \r\n", 20 * MB), GOOD)),
    Hostile("bomb.jsonl.gz", 2, _line((b"word ", 200 * MB))),
    Hostile("bomb.jsonl.zst", 2, _line((b"word ", 200 * MB))),
    Hostile("members.jsonl.gz", 200_000, _data((GOOD, 200_000))),
    Hostile("text.json", 2, _data(b'[\n{"prompt": "', (b"word ", 12 * MB), b'"},', GOOD, b"]")),
    Hostile("lists.json", None, _data(b'[{"x": [', (b"[],", 20 * MB), b"[]]},", GOOD, b"]")),
    Hostile("open.json", None, _data(b'[\n{"prompt": "', (b"word ", 60 * MB))),
    Hostile("deep.json", None, _data(b"[\n", (b'{"a":', 5 * MB))),
    Hostile("long.txt", 2, _data((b"word ", 60 * MB), b"\ngood\n")),
    Hostile("zeros.txt", 1, _data((b"\0", 60 * MB))),
    Hostile("lines.csv", 2, _data(b'prompt\n"', (b"a, b\n", 12 * MB), b'"\ngood\n')),
    Hostile("stray.csv", 2, _data(b'prompt\n"', (b"\n", 200 * MB), b"good\n")),
    Hostile("open.csv", 20_001, _data(b'prompt,x\n"x\n', (b'a","c\n', 20_000))),
    Hostile("commas.csv", 2, _data(b"prompt\n", (b"ab,", 20 * MB), b"\ngood\n")),
    Hostile("quotes.csv", 2, _data(b'prompt\n"', (b'""', 30 * MB), b'"\ngood\n')),
    Hostile("header.csv", None, _data((b"ab,", 20 * MB), b"\ngood\n")),
    Hostile("bomb.csv.gz", 2, _data(b"prompt\n", (b"x", 1000 * MB), b"\ngood\n")),
    Hostile("stray.tsv", 200_000, _data(b"prompt\tid\n", (b'"a\t"b\n', 200_000))),
    Hostile("dictionary.parquet", 256, _parquet(lambda: _repeated(256, 40 * MB), **_ZSTD)),
    Hostile("list.parquet", 1, _parquet(lambda: _one_list(200 * MB))),
    Hostile("pages.parquet", 1, _parquet(lambda: _one_list(200 * MB), data_page_version="2.0", **_ZSTD)),
    Hostile("flags.parquet", 1, _parquet(lambda: _one_list(200 * MB, np.bool_), use_dictionary=False, **_ZSTD)),
    Hostile("uneven.parquet", 100_000, _parquet(lambda: _uneven(100 * MB), **_ZSTD)),
    Hostile("cell.parquet", 2, _parquet(lambda: {"prompt": ["x" * (300 * MB), "good"]}, use_dictionary=False, **_ZSTD)),
    Hostile("texts.parquet", 100, _parquet(_lists_of_texts, **_ZSTD)),
    Hostile(
        "prefix.parquet",
        300,
        _parquet(
            lambda: {"prompt": pa.array(["x" * (5 * MB)]).take(np.zeros(300, np.int32))},
            use_dictionary=False,
            column_encoding={"prompt": "DELTA_BYTE_ARRAY"},
            **_ZSTD,
        ),
    ),
    Hostile("fixed.parquet", 512, _parquet(_fixed, store_schema=False, **_ZSTD)),
    Hostile("wide.parquet", 50, _parquet(lambda: _columns(20_000))),
    Hostile("dictionary.arrow", 200, _arrow(lambda: _repeated(200, 40 * MB), "zstd")),
    Hostile("batch.arrow", 4, _arrow(lambda: {"prompt": ["x" * (200 * MB)] * 4}, "zstd")),
    Hostile("nulls.arrow", 1, _arrow(_list_of_nulls)),
    Hostile("views.arrow", 30, _arrow(lambda: _views(30, 40 * MB))),  # 1.2 GB of text
    Hostile("list_views.arrow", 300, _arrow(lambda: _list_views(300, 20 * MB))),
    Hostile("runs.arrow", 200, _arrow(_runs)),
    Hostile("beyond.arrow", None, _beyond),
    Hostile("name.arrow", None, _bad_name),
)
