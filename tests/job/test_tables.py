"""Parquet and Arrow files into rows, judged by the library that wrote them."""

import datetime
import decimal
import json
import random

import pytest
from hypothesis import given, settings

from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputFile, InputRows
from flexengine.job.read_tables import arrow_table
from flexengine.job.rows import Request, encode
from tests.helpers.inputs import DEFAULTS, arrow_file, make_tokenizer, written
from tests.helpers.strategies import flipped


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_tables(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    count = 1000
    messages = [None if i % 3 else [{"role": "user", "content": f"hello {i}", "name": None}] for i in range(count)]
    ids = [[1, i % 5] if i % 3 == 1 else None for i in range(count)]
    columns = {
        "prompt": [f"world {i}" if i % 3 == 2 else None for i in range(count)], "messages": messages,
        "prompt_token_ids": ids, "id": list(range(count)), "max_tokens": [None if i % 2 else 7.0 for i in range(count)],
    }  # fmt: skip
    rows = InputRows(arrow_file(tmp_path / f"t{suffix}", pa.table(columns)), limit=900)
    for _ in range(2):
        found = list(rows)
        assert [r.line for r in found] == list(range(1, 901))
        assert [r.fields for r in found] == [{name: columns[name][i] for name in columns} for i in range(900)]
    tokenizer = make_tokenizer()
    requests = [encode(r, tokenizer, 64, DEFAULTS) for r in found]
    assert all(isinstance(r, Request) for r in requests)
    assert {r.sampling.max_tokens for r in requests[::2]} == {7}
    assert {r.sampling.max_tokens for r in requests[1::2]} == {4}
    assert requests[1].prompt_ids == (1, 1)
    assert requests[3].prompt_ids == tuple(tokenizer("user : hello 3")["input_ids"])


def test_streams_as_the_datasets_library_saves_them(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"prompt": ["a", "b"]})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert [r.fields for r in InputRows(tmp_path / "t.arrow")] == [{"prompt": "a"}, {"prompt": "b"}]


def test_prompt_column_of_tables(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"q": ["a", None], "text": [b"caf\xc3\xa9", b"\xff"], "prompt": ["x", "y"]})
    path = arrow_file(tmp_path / "t.parquet", table)
    assert [r.request for r in InputRows(path)] == [r.fields for r in InputRows(path)]
    first, second = InputRows(path, "q")
    assert first.request["prompt"] == "a"
    assert second.error == "line 2: has no 'q', which is to hold the prompt; it has ['prompt', 'q', 'text']"
    first, second = InputRows(path, "text")
    assert first.request["prompt"] == "café"
    assert second.error == "line 2: invalid UTF-8 at byte 0; save the file as UTF-8"
    with pytest.raises(InvalidInput, match=r"no column z; its columns are \['q', 'text', 'prompt'\]"):
        InputRows(path, "z")
    with pytest.raises(InvalidInput, match="no column prompt or messages or prompt_token_ids"):
        InputRows(arrow_file(tmp_path / "u.arrow", pa.table({"a": [1]})))


def test_values_that_json_has_not(tmp_path):
    pa = pytest.importorskip("pyarrow")
    noon, zone = datetime.datetime(2024, 2, 29, 12, 30, 15, 250), datetime.timezone(datetime.timedelta(hours=2))
    expected = {
        "ts": (pa.array([noon], pa.timestamp("us")), "2024-02-29T12:30:15.000250"),
        "zoned": (pa.array([noon.replace(tzinfo=zone)], pa.timestamp("us", "UTC")), "2024-02-29T10:30:15.000250+00:00"),
        "date": (pa.array([noon.date()]), "2024-02-29"),
        "time": (pa.array([noon.time()], pa.time64("us")), "12:30:15.000250"),
        "span": (pa.array([datetime.timedelta(days=1, seconds=1)]), "1 day, 0:00:01"),
        "money": (pa.array([decimal.Decimal("12.50")]), "12.50"),
        "raw": (pa.array([b"\x00\xff"]), "AP8="),
        "nan": (pa.array([float("nan")]), None),
        "inf": (pa.array([float("-inf")]), None),
        "float": (pa.array([0.1]), 0.1),
        "whole": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        "flag": (pa.array([True]), True),
        "list": (pa.array([[noon.date(), None]]), ["2024-02-29", None]),
        "struct": (pa.array([{"x": decimal.Decimal("1.0"), "y": [b"a"]}]), {"x": "1.0", "y": ["YQ=="]}),
        "map": (pa.array([[("k", 1.5)]], pa.map_(pa.string(), pa.float64())), [["k", 1.5]]),
        "kind": (pa.array(["red"]).dictionary_encode(), "red"),
        "nothing": (pa.nulls(1), None),
    }
    table = pa.table({"prompt": ["a"], **{name: array for name, (array, _) in expected.items()}})
    for suffix in (".parquet", ".arrow"):
        (row,) = InputRows(arrow_file(tmp_path / f"t{suffix}", table))
        assert row.error is None
        assert {name: row.fields[name] for name in expected} == {name: value for name, (_, value) in expected.items()}
        json.dumps(row.fields, allow_nan=False)


def test_cells_that_cannot_be_converted_cost_their_row_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    offsets, data = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")
    prompts = pa.StringArray.from_buffers(3, offsets, data)
    nanoseconds = pa.array([0, 1, 10**18 + 1], pa.timestamp("ns"))
    rows = list(InputRows(arrow_file(tmp_path / "t.arrow", pa.table({"prompt": prompts, "when": nanoseconds}))))
    assert [r.fields.get("prompt") for r in rows] == ["a", None, "b"]
    assert [r.error is None for r in rows] == [True, False, True]
    assert rows[1].error.startswith("line 2: column prompt: 'utf-8' codec")
    assert rows[2].fields["when"].endswith("00000001")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_tables(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefgh ", k=50)) for _ in range(2000)]
    whole = arrow_file(tmp_path / f"t{suffix}", pa.table({"prompt": texts})).read_bytes()
    for cut in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        with pytest.raises(InvalidInput, match=suffix):
            InputRows(written(tmp_path, whole[:cut], f"cut{suffix}"))
    middle = whole[: len(whole) // 2] + bytes(2000) + whole[len(whole) // 2 + 2000 :]
    try:
        found = f"{len(list(InputRows(written(tmp_path, middle, f'hole{suffix}'))))} rows"
    except InvalidInput as error:
        found = str(error)
    assert found == "2000 rows" or "is damaged after row" in found  # pyarrow need not notice that values changed


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r'pip install "flexengine\[parquet\]"'):
        InputRows(written(tmp_path, b"PAR1", "t.parquet"))


def test_parquet_files_with_flipped_bits(tmp_path):
    """Any flipped bits give rows or InvalidInput."""
    pa = pytest.importorskip("pyarrow")
    whole = arrow_file(tmp_path / "t.parquet", pa.table({"prompt": ["hello"] * 50, "n": [1] * 50})).read_bytes()

    @given(data=flipped(whole))
    @settings(max_examples=200)
    def rows_or_an_error(data):
        try:
            rows = list(InputRows(written(tmp_path, data, "f.parquet")))
        except InvalidInput:
            return
        assert [r.index for r in rows] == list(range(len(rows)))

    rows_or_an_error()


def test_bytes_are_text_where_text_is_read(tmp_path):
    """Some programs write text without marking it as such. A table of anything has bytes that are no text, too."""
    pa = pytest.importorskip("pyarrow")
    path = arrow_file(tmp_path / "t.parquet", pa.table({"text": [b"caf\xc3\xa9", b"\xff"], "b": [b"a", b"\xff"]}))
    first, second = InputRows(path, score=True)
    assert (first.request, first.is_scored) == ({"text": "café", "b": "YQ=="}, True)
    assert second.error == "line 2: invalid UTF-8 at byte 0; save the file as UTF-8"
    found = list(arrow_table(InputFile(path), None)[1])
    assert [record.fields for record in found] == [{"text": "café", "b": "a"}, {"text": "/w==", "b": "/w=="}]
    assert [record.fault for record in found] == [None, None]
