"""Parquet and Arrow files into rows, judged by the library that wrote them."""

import datetime
import decimal
import json
import random

import pytest
from hypothesis import given, settings

from flexengine.errors import InvalidInput
from flexengine.job import arrow_messages, arrow_sizes, parquet_pages, read_json, read_tables
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


def test_times_of_nanoseconds_and_of_unknown_zones(tmp_path):
    pa = pytest.importorskip("pyarrow")
    fine = pa.array([1, None], pa.time64("ns"))
    zoned = pa.array([10**9, None], pa.timestamp("s", "Mars/Phobos"))
    columns = {
        "prompt": ["a", "b"],
        "fine": fine,
        "list": pa.array([[1], []], pa.list_(pa.time64("ns"))),
        "zoned": zoned,
    }
    for suffix in (".parquet", ".arrow"):
        first, second = InputRows(arrow_file(tmp_path / f"t{suffix}", pa.table(columns)))
        assert first.fields["fine"] == "00:00:00.000000001"
        assert first.fields["list"] == ["00:00:00.000000001"]
        assert first.fields["zoned"] == "2001-09-09T01:46:40+00:00"
        assert (second.fields["fine"], second.fields["zoned"], second.error) == (None, None, None)


def test_a_column_name_that_is_not_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    data = arrow_file(tmp_path / "t.arrow", pa.table({"pppp": ["a"], "prompt": ["b"]})).read_bytes()
    with pytest.raises(InvalidInput, match=r"cannot be read as \.arrow: 'utf-8' codec"):
        InputRows(written(tmp_path, data.replace(b"pppp", b"p\xffpp"), "u.arrow"))


def test_offsets_beyond_the_data_are_damage(tmp_path):
    pa, np = pytest.importorskip("pyarrow"), pytest.importorskip("numpy")
    data = arrow_file(tmp_path / "t.arrow", pa.table({"prompt": ["abcdefgh"] * 4})).read_bytes()
    right, wrong = (np.array([0, 8, x, 24, 32], np.int32).tobytes() for x in (16, 2**30))
    with pytest.raises(InvalidInput, match="is damaged after row 0"):
        list(InputRows(written(tmp_path, data.replace(right, wrong), "u.arrow")))


def test_a_list_of_nulls_takes_memory_though_the_file_has_no_bytes_of_it(tmp_path):
    pa = pytest.importorskip("pyarrow")
    count = 2**31 - 1
    nulls = pa.ListArray.from_arrays([0, 2, count], pa.nulls(count))
    path = arrow_file(tmp_path / "t.arrow", pa.table({"prompt": ["a", "b"], "x": nulls}))
    assert path.stat().st_size < 5000
    first, second = InputRows(path)
    assert first.fields == {"prompt": "a", "x": [None, None]}
    assert second.error.startswith("line 2: is longer than 67,108,864 bytes, or has over 2,097,152 values")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_above_the_limit_is_one_error_row(tmp_path, monkeypatch, suffix):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(arrow_sizes, "PART_BYTES", 500)
    table = pa.table({"prompt": ["a", "b" * 990, "c", "d", "e"], "x": [[1], [], [1] * 40, [1] * 20, []]})
    rows = list(InputRows(arrow_file(tmp_path / f"t{suffix}", table)))
    assert [row.error is None for row in rows] == [True, False, False, True, True]
    assert rows[1].error.startswith("line 2: is longer than ")
    assert [row.fields.get("prompt") for row in rows] == ["a", None, None, "d", "e"]


def sizes_of(path, number=0):
    parquet = pytest.importorskip("pyarrow.parquet").ParquetFile(path)
    with open(path, "rb") as file:
        (group,) = parquet_pages._row_groups(file)
        depth = parquet.schema.column(number).max_repetition_level
        return parquet_pages._chunk(file.fileno(), group[1][number][3], depth)


@pytest.mark.parametrize("packing", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_sizes_of_rows_are_found_in_the_pages(tmp_path, monkeypatch, packing, version):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_pages, "READ_BYTES", 0)  # look at every page
    rng = random.Random(f"{packing} {version}")
    for number in range(8):
        top = rng.choice((1, 3, 300, 5000))
        lists = [[rng.randrange(rng.choice((1, 50_000)))] * rng.randrange(top) for _ in range(rng.randrange(1, 300))]
        nested = [[part[:2], part] for part in lists]
        texts = [["x" * rng.randrange(100)] * rng.randrange(4) for _ in lists]
        pq.write_table(
            pa.table({"flat": lists, "deep": nested, "texts": texts}),
            tmp_path / "t.parquet",
            compression=packing,
            use_dictionary=number % 2 == 0,
            data_page_size=rng.choice((100, 10_000)),
            data_page_version=version,
        )
        assert sizes_of(tmp_path / "t.parquet").values == max(1, *map(len, lists), 1)
        # An empty list takes a place in the levels.
        assert sizes_of(tmp_path / "t.parquet", 1).values == max(max(1, len(a)) + max(1, len(b)) for a, b in nested)
        found = sizes_of(tmp_path / "t.parquet", 2)
        longest = max((len(text) for row in texts for text in row), default=0)
        assert found.cell == (longest if number % 2 == 0 else 0)
        assert found.values == max(1, *map(len, texts), 1)
        assert found.row >= (0 if number % 2 == 0 else max(sum(map(len, row)) for row in texts))


def test_few_rows_are_read_at_a_time_and_a_group_that_is_too_large_is_error_rows(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = ["a", *["x" * 10_000] * 300, *["b"] * 301]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "t.parquet", row_group_size=301)
    file = pq.ParquetFile(tmp_path / "t.parquet")
    for most, rows in ((2**28, 256), (10_100 * 10, 8), (15_000, 1), (5000, 0)):
        monkeypatch.setattr(parquet_pages, "READ_BYTES", most)
        monkeypatch.setattr(parquet_pages, "MOST_READ_BYTES", 2 * most)
        assert list(parquet_pages.batch_rows(tmp_path / "t.parquet", file.schema)) == [(301, rows), (301, 256)]
        read = list(InputRows(tmp_path / "t.parquet"))
        assert [row.fields.get("prompt") for row in read] == (texts if rows else [None] * 301 + ["b"] * 301)
    assert "its row group or batch takes over" in read[0].error


@pytest.mark.parametrize("new", ["new_file", "new_stream"])
@pytest.mark.parametrize("packing", ["zstd", "lz4", None])
def test_sizes_of_arrow_batches_are_known_before_they_are_read(tmp_path, monkeypatch, new, packing):
    pa = pytest.importorskip("pyarrow")
    texts = ["a"] * 50 + ["x" * 1000] * 50 + ["b"] * 20
    table = pa.table({"prompt": texts, "kind": pa.array(texts).dictionary_encode(), "n": [[1, 2]] * 120})
    options = pa.ipc.IpcWriteOptions(compression=packing)
    with getattr(pa.ipc, new)(str(tmp_path / "t.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=50)
    found = list(arrow_messages.messages(tmp_path / "t.arrow"))
    assert [message.rows for message in found if not message.is_dictionary] == [50, 50, 20]
    assert [message.rows for message in found if message.is_dictionary] == [3]
    if packing is None:
        assert {message.size for message in found} == {0}
        return
    assert found[2].size > 50_000 > found[1].size
    monkeypatch.setattr(read_tables, "MOST_READ_BYTES", 20_000)
    rows = list(InputRows(tmp_path / "t.arrow"))
    assert [row.fields.get("prompt") for row in rows] == ["a"] * 50 + [None] * 50 + ["b"] * 20
    assert rows[50].error.startswith("line 51: its row group or batch takes over ")
    monkeypatch.setattr(read_tables, "MOST_READ_BYTES", 200)
    with pytest.raises(InvalidInput, match="its dictionaries take over 100 bytes"):
        list(InputRows(tmp_path / "t.arrow"))
