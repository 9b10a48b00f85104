"""Files of hostile rows in every format, by a seed, and what independent parsers find in them."""

import csv
import datetime
import decimal
import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet

from flexengine.job.inputs import InputRows

COLUMNS = ("id", "prompt", "x")
TEXTS = (
    "",
    "a",
    " ",
    "é",
    "€",
    "😀",
    '"',
    '""',
    "'",
    ",",
    ";",
    "\t",
    "\n",
    "\r\n",
    "\\",
    "\\u0041",
    "\x00",
    "\x1f",
    "\x7f",
    "\u2028",
    "\ufeff",
    "{",
    "}",
    "[",
    "]",
    ":",
    "null",
    "NaN",
    "-1",
    "1e999",
    "<|endoftext|>",
    "{{ x }}",
    "../x",
    "=1+1",
    "a" * 300,
    "\u202eabc",
    "e\u0301",
    "1" * 50,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    2**63,
    2**64,
    0.5,
    1e308,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"a": {"a": []}},
    "x",
)
# JSON lines that are no usable row by themselves.
BAD_JSON = (
    b"{",
    b"}",
    b"[]",
    b"null",
    b"1",
    b'"a"',
    b"{'prompt': 1}",
    b'{"prompt": "a",}',
    b'{"prompt": NaN}',
    b'{"prompt": 1e999}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "a\tb"}',
    b'{"prompt": "a"} x',
    b"\x00",
    b"{" * 5000,
    b"[" * 100_000,
    b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"a": "\xed\xa0\x80"}',
    b"{\"a\": '\\x'}",
    b"\xfe\xff",
    b'{"prompt"',
    b"//",
    b'{"a": -Infinity}',
    b'{"a": 01}',
    b'{"a": .5}',
)
# CSV lines that are no record of three cells.
BAD_CSV = (
    b"  ",
    b"1",
    b"1{d}2",
    b"1{d}2{d}3{d}4",
    b"1{d}\xff{d}3",
    b'1{d}"a"b{d}3',
    b"1{d}a\rb{d}3",
    b'1{d}"a" {d}3',
    b"\xff",
    b'""',
    b"\x00",
    b'1{d}"\xc3"{d}3',
    b'"a"b"c"{d}{d}',
)


class Found(NamedTuple):
    """A row as one reader sees it.

    Attributes:
        prompt: its prompt, also of a row with a fault; None if it has none that is text, or it cannot be read.
        readable: whether it has no fault of the file's format.
    """

    prompt: str | None
    readable: bool


def text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.choice((0, 1, 1, 2, 5, 20))))


def is_row(line: bytes) -> bool:
    """Return whether Python's json module reads a JSON object in a line. NaN, Infinity and numbers beyond a float's
    range are null."""
    try:
        return isinstance(json.loads(line.decode("utf-8"), parse_constant=lambda _: None), dict)
    except (ValueError, RecursionError):
        return False


def _object(rng: random.Random) -> dict[str, Any]:
    fields = {text(rng): rng.choice(VALUES) for _ in range(rng.randrange(3))}
    return {**fields, "prompt": text(rng) if rng.random() < 0.9 else rng.choice(VALUES)}


def _prompt(fields: Any) -> str | None:
    prompt = fields.get("prompt")
    return prompt if isinstance(prompt, str) else None


def json_lines(rng: random.Random, rows: int) -> tuple[bytes, list[Found]]:
    # A file that begins like one in UTF-16 is refused as a whole.
    lines, found = [b'{"prompt": "a"}'], [Found("a", True)]
    while len(found) < rows:
        line = json.dumps(_object(rng), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        if rng.random() < 0.3:
            line = rng.choice(BAD_JSON)
        elif rng.random() < 0.1:
            at = rng.randrange(len(line))
            line = line[:at] + bytes([rng.choice((0, 34, 44, 92, 125, 128, 255))]) + line[at + 1 :]
        blank = rng.random() < 0.1
        lines.append(rng.choice((b"", b" ", b"\t \r")) if blank else line)
        if not blank and line.strip():
            good = is_row(line)
            found.append(Found(_prompt(json.loads(line)) if good else None, good))
    return rng.choice((b"", b"\xef\xbb\xbf")) + b"\n".join(lines), found


def json_array(rng: random.Random, rows: int) -> tuple[bytes, list[Found]]:
    objects = [_object(rng) for _ in range(rows)]
    data = json.dumps(objects, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 0, 2))).encode()
    return data, [Found(_prompt(fields), True) for fields in json.loads(data)]


def lines_of_text(rng: random.Random, rows: int) -> tuple[bytes, list[Found]]:
    lines = [text(rng).encode() + rng.choice((b"", b"", b"\xff")) for _ in range(rows)]
    data = b"\n".join(lines)
    kept = [line.rstrip(b"\r") for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    readable = [_decoded(line) for line in kept]
    return data, [Found(line, line is not None) for line in readable]


def _decoded(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def table_of_text(rng: random.Random, rows: int, delimiter: str) -> tuple[bytes, list[Found]]:
    """Return records as the csv module writes them, among lines that it refuses or that have other cells."""
    parts, found = [delimiter.join(COLUMNS).encode() + b"\n"], list[Found]()
    while len(found) < rows:
        if rng.random() < 0.2:
            line = rng.choice(BAD_CSV).replace(b"{d}", delimiter.encode())
            parts.append(line + b"\n")
            kept = line.startswith(f"1{delimiter}2".encode())  # cells of a row with too few or too many stay
            found.append(Found("2" if kept else None, False))
        elif rng.random() < 0.1:
            parts.append(rng.choice((b"\n", b"\r\n")))
        else:
            out = io.StringIO(newline="")
            quoting: Any = rng.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL))
            csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=rng.choice(("\n", "\r\n"))).writerow(
                [text(rng), text(rng) * rng.choice((1, 1, 50)), text(rng)]
            )
            (record,) = csv.reader(io.StringIO(out.getvalue(), newline=""), delimiter=delimiter, strict=True)
            parts.append(out.getvalue().encode())
            found.append(Found(record[1], True))
    return b"".join(parts), found


def table(rng: random.Random, rows: int) -> tuple[pa.Table, list[Found]]:
    """Return a table of hostile types. Some prompts are not UTF-8, some times beyond the years 1 to 9999."""
    prompts = [rng.choice((None, b"\xff", b"a\xc3")) if rng.random() < 0.2 else text(rng).encode() for _ in range(rows)]
    packed = pa.array(prompts, pa.binary())
    column = pa.StringArray.from_buffers(rows, packed.buffers()[1], packed.buffers()[2], packed.buffers()[0])
    moment, names = datetime.datetime(2024, 2, 29, 12), [text(rng) for _ in range(3)]
    far = [rng.choice((0, 2**50, -(2**50), None)) for _ in range(rows)]
    columns = {
        "prompt": column,
        "zone": pa.array([rng.randrange(-(2**40), 2**40) for _ in range(rows)], pa.timestamp("ms", "Mars/Phobos")),
        "far": pa.array(far, pa.timestamp("s")),
        "fine": pa.array([rng.randrange(86_400 * 10**9) for _ in range(rows)], pa.time64("ns")),
        "kind": pa.array([rng.choice(names) for _ in range(rows)]).dictionary_encode(),
        "deep": pa.array([[[{"a": text(rng), "b": [rng.random()]}]] * rng.randrange(3) for _ in range(rows)]),
        "money": pa.array([decimal.Decimal(rng.randrange(10**9)) for _ in range(rows)], pa.decimal128(38, 10)),
        "raw": pa.array([rng.choice((None, b"", b"\xff\x00")) for _ in range(rows)]),
        "when": pa.array([moment] * rows, pa.timestamp("us", "UTC")),
        "odd": pa.array([rng.choice((float("nan"), float("-inf"), 1.5)) for _ in range(rows)]),
        "nothing": pa.nulls(rows),
    }
    read = [None if p is None else _decoded(p) for p in prompts]
    good = [(p is None) == (text is None) and not seconds for p, text, seconds in zip(prompts, read, far, strict=True)]
    return pa.table(columns), [Found(text, fine) for text, fine in zip(read, good, strict=True)]


Make = Callable[[random.Random, int], tuple[Any, list[Found]]]
MAKERS: dict[str, Make] = {
    "jsonl": json_lines,
    "json": json_array,
    "txt": lines_of_text,
    "csv": lambda r, n: table_of_text(r, n, ","),
    "tsv": lambda r, n: table_of_text(r, n, "\t"),
    "parquet": table,
    "arrow": table,
    "feather": table,
}


def write(path: Path, content: Any, rng: random.Random) -> None:
    """Write bytes, compressed as the name says, or a table."""
    if isinstance(content, bytes):
        if path.suffix == ".zst":
            content = import_module("backports.zstd").compress(content)
        path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    elif path.suffix == ".parquet":
        packing = rng.choice(("none", "snappy", "zstd", "gzip", "lz4", "brotli"))
        pyarrow.parquet.write_table(
            content,
            path,
            compression=packing,
            row_group_size=rng.choice((1, 50, 10**6)),
            store_schema=True,
            data_page_version=rng.choice(("1.0", "2.0")),
            use_dictionary=rng.random() < 0.5,
        )
    else:
        options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "zstd", "lz4")))
        new = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
        with new(str(path), content.schema, options=options) as writer:
            writer.write_table(content, max_chunksize=rng.choice((1, 50, 10**6)))


def differences(seed: int, rows: int, each: int, folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Write files of `each` rows, read them, and yield each file's name, its rows, and what differs from the other
    parser. There are `rows` rows in all."""
    done = number = 0
    while done < rows:
        for name, make in MAKERS.items():
            rng = random.Random(f"{seed} {number}")
            content, expected = make(rng, each)
            packed = isinstance(content, bytes) and rng.choice(("", ".gz", ".zst"))
            path = folder / f"{number}.{name}{packed or ''}"
            write(path, content, rng)
            yield path.name, len(expected), _differing(path, expected)
            path.unlink()
            done, number = done + len(expected), number + 1


def _differing(path: Path, expected: list[Found]) -> list[str]:
    with InputRows(path) as source:
        rows = list(source)
    faults = [f"{len(rows)} rows, not {len(expected)}"] if len(rows) != len(expected) else []
    for index, (row, right) in enumerate(zip(rows, expected, strict=False)):
        json.dumps(row.fields, allow_nan=False)
        seen = Found(_prompt(row.fields), row.error is None)
        if row.index != index or seen != right:
            faults.append(f"row {index}: {seen}, not {right} ({row.error})")
    return faults[:5]
