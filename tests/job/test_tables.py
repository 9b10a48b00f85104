"""Parquet and Arrow files into rows, judged by the library that wrote them."""

import datetime
import decimal
import io
import json
import pickle
import resource
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings

from flexengine.errors import InvalidInput
from flexengine.job import arrow_sizes, read_json, table_process
from flexengine.job.arrow_rows import TableRow, record_of, records_of
from flexengine.job.inputs import InputFile, InputRows
from flexengine.job.memory import row_memory
from flexengine.job.read_tables import arrow_table
from flexengine.job.resume import PendingRows
from flexengine.job.rows import Request, encode
from flexengine.job.table_process import replies
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
    rows = InputRows(arrow_file(tmp_path / f"t{suffix}", pa.table(columns)), limit=900, row_options=True)
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
    assert all(r.request == r.fields for r in InputRows(path))
    first, second = InputRows(path, "q")
    assert first.request["prompt"] == "a"
    assert second.error == "line 2: q is null or NaN, but it is to hold the prompt; give a text"
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


def test_an_option_that_is_no_finite_number_is_an_error_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    values = [float("inf"), float("-inf"), float("nan")]
    path = arrow_file(tmp_path / "t.arrow", pa.table({"prompt": ["a"] * 3, "temperature": values}))
    for options in (True, False):
        rows = list(InputRows(path, row_options=options))
        assert [row.fields for row in rows] == [{"prompt": "a", "temperature": None}] * 3
        made = [encode(row, make_tokenizer(), 64, DEFAULTS) for row in rows]
        assert [isinstance(each, Request) for each in made] == [not options] * 2 + [True]  # NaN is no value
        for value, each in zip(values[:2], made if options else (), strict=False):
            assert f"temperature is {value}; it must be 0 (greedy) or a positive number" in each.error


@pytest.mark.parametrize(
    ("option", "cell"),
    [("logit_bias", {"5": float("inf")}), ("chat_template_kwargs", {"x": float("inf")}),
     ("stop_token_ids", [float("inf")])],
)  # fmt: skip
def test_an_infinity_in_an_option_is_an_error_row(tmp_path, option, cell):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"prompt": ["a"], option: [cell]})
    (row,) = InputRows(arrow_file(tmp_path / "t.arrow", table), row_options=True)
    assert option in encode(row, make_tokenizer(), 64, DEFAULTS).error


def test_cells_that_cannot_be_converted_cost_their_row_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    offsets, data = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")
    prompts = pa.StringArray.from_buffers(3, offsets, data)
    nanoseconds = pa.array([0, 1, 10**18 + 1], pa.timestamp("ns"))
    rows = list(InputRows(arrow_file(tmp_path / "t.arrow", pa.table({"prompt": prompts, "when": nanoseconds}))))
    assert [r.fields.get("prompt") for r in rows] == ["a", None, "b"]
    assert [r.error is None for r in rows] == [True, False, True]
    assert rows[1].error == "line 2: column prompt: invalid UTF-8 at byte 0; save the file as UTF-8"
    assert rows[2].fields["when"] == "2001-09-09T01:46:40.000000001"


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r'pip install "flexengine\[parquet\]"'):
        InputRows(written(tmp_path, b"PAR1", "t.parquet"))


def test_parquet_files_with_flipped_bits(tmp_path):
    """Any flipped bits give rows or InvalidInput."""
    pa = pytest.importorskip("pyarrow")
    whole = arrow_file(tmp_path / "t.parquet", pa.table({"prompt": ["hello"] * 50, "n": [1] * 50})).read_bytes()

    path = tmp_path / "f.parquet"

    def rows_or_an_error(data):
        try:
            rows = list(InputRows(written(tmp_path, data, path.name)))
        except InvalidInput:
            return
        assert [r.index for r in rows] == list(range(len(rows)))

    @given(data=flipped(whole))
    @settings(max_examples=100)
    def here(data):
        """Without another process, whose start takes longer."""
        try:
            parts = [value for kind, value in here_replies(written(tmp_path, data, path.name)) if kind == "rows"]
        except Exception:  # pyarrow raises errors of its own
            return
        assert [row.line for part in parts for row in part] == list(range(1, 1 + sum(map(len, parts))))

    here()
    given(data=flipped(whole))(settings(max_examples=3)(rows_or_an_error))()


def here_replies(path):
    """Return what the other process would send of a file."""
    return replies(str(path), path.suffix[1:], None, 0, 0, 256, 1)


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


def test_times_of_nanoseconds_and_of_unknown_zones(tmp_path):
    pa = pytest.importorskip("pyarrow")
    fine = pa.array([1, None], pa.time64("ns"))
    zoned = pa.array([10**9, None], pa.timestamp("s", "Mars/Phobos"))
    columns = {
        "prompt": ["a", "b"],
        "fine": fine,
        "list": pa.array([[1], []], pa.list_(pa.time64("ns"))),
        "large": pa.array([[1], None], pa.large_list(pa.time64("ns"))),
        "pair": pa.array([[1, None], [2, 3]], pa.list_(pa.time64("ns"), 2)),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.time64("ns"))),
        "struct": pa.array([{"a": [{"b": 1}]}, None], pa.struct([("a", pa.list_(pa.struct([("b", fine.type)])))])),
        "name": pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int32()), fine[:1]),
        "zoned": zoned,
    }
    for suffix in (".parquet", ".arrow"):
        first, second = InputRows(arrow_file(tmp_path / f"t{suffix}", pa.table(columns)))
        assert first.fields["fine"] == "00:00:00.000000001"
        assert first.fields["list"] == first.fields["large"] == ["00:00:00.000000001"]
        assert first.fields["pair"] == ["00:00:00.000000001", None]
        assert first.fields["map"] == [["k", "00:00:00.000000001"]]
        assert first.fields["struct"] == {"a": [{"b": "00:00:00.000000001"}]}
        assert first.fields["name"] == "00:00:00.000000001"
        assert first.fields["zoned"] == "2001-09-09T01:46:40+00:00"
        assert (second.fields["fine"], second.fields["zoned"], second.error) == (None, None, None)
        assert (second.fields["large"], second.fields["map"], second.fields["struct"]) == (None, None, None)


@pytest.mark.parametrize(
    ("unit", "zone", "value", "text"),
    [
        ("ns", "Europe/Berlin", 1_700_000_000_123_456_789, "2023-11-14T23:13:20.123456789+01:00"),
        ("ns", "+05:30", 1_700_000_000_123_456_789, "2023-11-15T03:43:20.123456789+05:30"),
        ("ns", "Mars/Phobos", 1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456789+00:00"),
        ("ns", None, 1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456789"),
        ("ns", None, -1, "1969-12-31T23:59:59.999999999"),
        ("ns", "Europe/Berlin", 1_700_000_000_000_000_000, "2023-11-14T23:13:20+01:00"),
        ("us", "Europe/Berlin", 1_700_000_000_123_456, "2023-11-14T23:13:20.123456+01:00"),
        ("ms", "America", -1, "1969-12-31T23:59:59.999000+00:00"),
        ("s", "UTC", 0, "1970-01-01T00:00:00+00:00"),
    ],
)
def test_timestamps_have_all_digits_and_their_zone(unit, zone, value, text):
    pa = pytest.importorskip("pyarrow")
    times = pa.array([value, None], pa.timestamp(unit, zone))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), times)
    found = list(records_of(pa.record_batch({"t": times, "l": lists})))
    assert found == [{"t": text, "l": [text]}, {"t": None, "l": [None]}]


def test_durations_have_all_digits():
    pa = pytest.importorskip("pyarrow")
    for unit, value, text in [("ns", 86_401_000_000_001, "1 day, 0:00:01.000000001"), ("us", 250, "0:00:00.000250"),
                              ("ns", -1, "-1 day, 23:59:59.999999999"), ("s", 86_401, "1 day, 0:00:01")]:  # fmt: skip
        assert list(records_of(pa.record_batch({"d": pa.array([value], pa.duration(unit))}))) == [{"d": text}]


def test_a_time_beyond_the_range_of_python_is_an_error_row():
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.timestamp("s"), pa.timestamp("s", "Europe/Berlin"), pa.timestamp("us"), pa.duration("s"), pa.date64()]
    for kind in kinds:
        far = pa.array([2**62], pa.int64()).view(kind)
        first = next(records_of(pa.record_batch({"when": far})))
        fault = record_of(1, first, None).fault
        assert fault.startswith(f"column when: {2**62} of type {kind} is beyond the range of Python's dates and times;")


def test_a_time_of_nanoseconds_without_a_text_is_a_fault_of_its_cell():
    pa = pytest.importorskip("pyarrow")
    times = pa.array([1, 24 * 3600 * 10**9], pa.time64("ns"))
    union = pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [times])
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), times[:1])
    first, second = records_of(pa.record_batch({"union": union, "run": runs, "n": [1, 2]}))
    assert first == {"union": "00:00:00.000000001", "run": "00:00:00.000000001", "n": 1}
    assert str(second["union"]) == "86400000000000 ns is no time of day"
    assert record_of(2, second, None).fault == "column union: 86400000000000 ns is no time of day"


def test_a_column_name_that_is_not_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    data = arrow_file(tmp_path / "t.arrow", pa.table({"pppp": ["a"], "prompt": ["b"]})).read_bytes()
    with pytest.raises(InvalidInput, match=r"cannot be read as \.arrow: 'utf-8' codec"):
        InputRows(written(tmp_path, data.replace(b"pppp", b"p\xffpp"), "u.arrow"))


def test_a_list_of_nulls_takes_memory_though_the_file_has_no_bytes_of_it(tmp_path):
    pa = pytest.importorskip("pyarrow")
    count = 2**31 - 1
    nulls = pa.ListArray.from_arrays([0, 2, count], pa.nulls(count))
    path = arrow_file(tmp_path / "t.arrow", pa.table({"prompt": ["a", "b"], "x": nulls}))
    assert path.stat().st_size < 5000
    first, second = InputRows(path)
    assert first.fields == {"prompt": "a", "x": [None, None]}
    assert second.error.startswith("line 2: is longer than 64 MiB, or has over 2,097,152 values; divide it")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_above_the_limit_is_one_error_row(tmp_path, monkeypatch, suffix):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(arrow_sizes, "PART_BYTES", 500)
    table = pa.table({"prompt": ["a", "b" * 990, "c", "d", "e"], "x": [[1], [], [1] * 40, [1] * 20, []]})
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    sent = here_replies(arrow_file(tmp_path / f"t{suffix}", table))
    rows = [row for kind, value in sent if kind == "rows" for row in value]
    assert [row.fault is None for row in rows] == [True, False, False, True, True]
    assert rows[1].fault.startswith("is longer than ")
    assert [row.fields.get("prompt") for row in rows] == ["a", None, None, "d", "e"]
    assert resource.getrlimit(resource.RLIMIT_CPU) == limits  # of this process; the other one sets its own


def repeated_text(pa, count, size):
    return pa.table(
        {"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * size]))}
    )


@pytest.mark.slow
def test_rows_that_take_much_if_read_at_once_are_read_one_by_one(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    pq.write_table(repeated_text(pa, 20, 5 * 2**20), path, compression="zstd")
    assert path.stat().st_size < 10_000
    with InputRows(path, memory=1) as rows:
        assert {len(row.fields["prompt"]) for row in rows} == {5 * 2**20}
        assert 2**26 < rows.reading < 2**28
    fixed = pa.array([b"\0" * 2**19], pa.binary(2**19))
    table = pa.table({"prompt": ["a"] * 300, "x": pa.DictionaryArray.from_arrays([0] * 300, fixed)})
    pq.write_table(table.set_column(1, "x", table["x"].cast(fixed.type)), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 5000
    rows = list(InputRows(path, memory=1))  # pyarrow reserves 1024 values, even to read one
    assert [row.index for row in rows if "takes too much memory or time to be read" in row.error] == list(range(300))


def test_memory_of_a_row_follows_its_size_and_its_values():
    """Its bytes, its text in the width of its widest character, and its fields; without fields it may have had any."""
    for size in (2**21, 2**24):
        text, length = "x" * (size - 15), size
        assert 1 <= row_memory(length, {"prompt": text}) / (6 * length) < 1.001
        assert 1 <= row_memory(length, {"a": "\U0001f600", "prompt": text}) / (12 * length) < 1.001
        assert row_memory(length, {}) == min(24 * length, 320 * 2**20)
    escapes = 2**20 * "\U0001f600"
    assert row_memory(2**26, {"x": escapes}) < 2 * (2**26 + 2**27 + 5 * 2**20)
    row = {"x": [[] for _ in range(1000)]}
    assert row_memory(3000, row) - row_memory(3000, {"x": []}) > 2 * 1000 * (sys.getsizeof([]) + 8)


@pytest.mark.parametrize("template", [None, "{a}\n{a}", "q {a} {a} {a}"])
@pytest.mark.parametrize("cell", ["x", "\u00e9", "\U0001f600"])
def test_reading_long_rows_takes_what_is_counted(tmp_path, template, cell):
    """Two rows, as the next one is read while one is used; with the texts that a template makes of them."""
    text = cell * (2**21 // len(cell.encode()))
    line = json.dumps({"a": text, "prompt": ""} if template else {"prompt": text}, ensure_ascii=False)
    path = written(tmp_path, f"{line}\n{line}\n".encode())
    with InputRows(path, template=template) as rows:
        tracemalloc.start()
        assert [row.error for row in rows] == [None, None]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= rows.reading < 4 * peak


def test_memory_of_reading(tmp_path):
    """A quarter of the given memory is the limit; the plan reserves what was taken."""
    pa = pytest.importorskip("pyarrow")
    assert [table_process.most_bytes(m) >> 20 for m in (None, 1, 2**29, 2**30, 2**40)] == [512, 64, 128, 256, 512]
    with InputRows(written(tmp_path, b'{"prompt": "' + b"a" * 2**20 + b'"}\n')) as rows:
        assert len(list(rows)) == 1
        assert 4 * 2**20 < rows.reading < 7 * 2**20
    with InputRows(written(tmp_path, b'{"prompt": "a"}\n' * 100)) as rows:
        assert rows.scan().total == 100
        assert rows.reading == 0
    with InputRows(arrow_file(tmp_path / "t.parquet", pa.table({"prompt": ["a", "b"]})), limit=1) as rows:
        assert len(list(rows)) == 1
        assert 2**24 < rows.reading < 2**27  # of the process and its libraries
        assert PendingRows(rows, b"", readers=2).reading == 2 * rows.reading


@pytest.mark.slow
def test_a_group_or_batch_that_is_too_large_is_error_rows(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = ["a", "b", "x" * 2**26 + "yz", *["c"] * 3]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "t.parquet", row_group_size=3, compression="zstd")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    table = pa.table({"prompt": texts, "n": pa.array(["k"] * 6)})
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new(str(tmp_path / f"{new.__name__}.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=3)
    for name in ("t.parquet", "new_file.arrow", "new_stream.arrow"):
        rows = list(InputRows(tmp_path / name, memory=1))
        assert [row.fields.get("prompt") for row in rows] == [None] * 3 + ["c"] * 3
        assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6]
        assert rows[0].error.startswith("line 1: its row group or batch takes too much memory or time to be read")


@pytest.mark.parametrize("deltas", [False, True])
def test_batches_of_a_stream_are_left_out_and_their_dictionaries_are_not(tmp_path, deltas):
    """Dictionaries of later batches replace or extend those before."""
    pa = pytest.importorskip("pyarrow")
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=deltas)
    batches = []
    for i in range(4):
        words = [f"w{j}" for j in range(3 + i)] if deltas else [f"{i // 2} {j}" for j in range(3)]
        kinds = pa.DictionaryArray.from_arrays(pa.array([k % 3 for k in range(9)] + [len(words) - 1]), words)
        batches.append(pa.record_batch({"prompt": kinds, "x": [f"{i}"] * 10}))
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    expected = [row for batch in pa.ipc.open_stream(str(tmp_path / "t.arrow")) for row in batch.to_pylist()]
    for first in range(5):
        sent = replies(str(tmp_path / "t.arrow"), "arrow", None, first, 0, 256, 1)
        assert [row.fields for kind, value in sent if kind == "rows" for row in value] == expected[10 * first :]


def test_a_batch_of_a_stream_that_is_too_large_costs_its_rows_alone(tmp_path):
    """Else it would have to be decompressed for the dictionaries of the batches behind it."""
    pa = pytest.importorskip("pyarrow")
    texts, kinds = ["a", "x" * 2**26 + "yz", "b"], pa.array(["k", "l", "k"]).dictionary_encode()
    table = pa.table({"prompt": texts, "kind": kinds})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1)
    rows = list(InputRows(tmp_path / "t.arrow", memory=1))
    assert [(row.line, row.fields.get("kind"), row.error is None) for row in rows] == [
        (1, "k", True),
        (2, None, False),
        (3, "k", True),
    ]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_reading_continues_at_the_first_row_that_was_not_sent(tmp_path, monkeypatch, suffix):
    """The process is aborted after its first rows: fewer are read at a time."""
    pa = pytest.importorskip("pyarrow")
    path, sizes = arrow_file(tmp_path / f"t{suffix}", pa.table({"prompt": list(map(str, range(900)))})), []
    program = (
        "import os, sys\nfrom flexengine.job import table_process as p\nplain = p.replies\n"
        "def replies(*args):\n"
        "    for reply in plain(*args):\n"
        "        yield reply\n"
        "        if reply[0] == 'rows' and args[5] == 256: os.abort()\n"
        "p.replies = replies\np._serve(*sys.argv[1:])"
    )
    plain = table_process.started

    def started(module, most, request, **options):
        sizes.append(pickle.loads(bytes.fromhex(request))[2:5])
        with monkeypatch.context() as patch:
            popen = subprocess.Popen
            patch.setattr(subprocess, "Popen", lambda a, **o: popen([*a[:2], "-c", program, *a[4:]], **o))
            return plain(module, most, request, **options)

    monkeypatch.setattr(table_process, "started", started)
    rows = list(InputRows(path))
    assert [row.index for row in rows] == list(range(900))
    assert [row.fields["prompt"] for row in rows] == list(map(str, range(900)))
    assert sizes == [(0, 0, 256), (0, 256, 16)]


@pytest.mark.parametrize(("good", "fails"), [((5, 9), False), ((), True)], ids=["some", "none"])
def test_groups_that_are_too_large_do_not_end_a_file(tmp_path, monkeypatch, good, fails):
    """The next group begins with the number of rows of the last attempt. Only ends one after another count. A process
    that sends a group is no end, so a file with any number of groups that are too large is read to its last one."""
    units, steps = 14, []

    class Process:
        def __init__(self, module, most, request, **options):
            _, _, unit, _, size, line = pickle.loads(bytes.fromhex(request))
            steps.append((unit, size))
            self.stdout = io.BytesIO()
            replies = [("names", ["prompt"]), ("unit", (unit, 1))]
            while unit in good:
                replies += [("rows", [TableRow(line, {"prompt": str(unit)})]), ("unit", (unit := unit + 1, 1))]
                line += 1
            for reply in replies if unit < units else [*replies[:-1], ("end", None)]:
                pickle.dump(reply, self.stdout)
            self.stdout.seek(0)

        wait = kill = lambda self: 1

    monkeypatch.setattr(table_process, "started", Process)
    monkeypatch.setattr(table_process, "MOST_ENDS", 8)
    (tmp_path / "t.parquet").write_bytes(b"")
    found = table_process.table_rows(InputFile(tmp_path / "t.parquet"), None)
    if fails:
        with pytest.raises(ValueError, match="8 row groups or batches one after another are too large"):
            list(found)
        assert steps == [(0, 256), (0, 16), *[(unit, 1) for unit in range(6)]]
        return
    _, *rows = found
    assert [row.line for row in rows] == list(range(1, units + 1))
    assert [row.line - 1 for row in rows if row.fault is None] == list(good)
    assert steps[:8] == [(0, 256), (0, 16), (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert steps[8:10] == [(6, 16), (6, 1)]
