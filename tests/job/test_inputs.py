"""Input files into rows. A line is judged by the json and csv modules on that line alone, a table by what wrote it."""

import csv
import datetime
import decimal
import hashlib
import io
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job import inputs, tables
from flexengine.job.inputs import Row, Rows, row_of, survey
from flexengine.job.prompts import Request, encode
from tests.helpers.strategies import flipped, mutated

DEFAULTS = SamplingParams(max_tokens=4)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "hello", "world", "user", ":"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=chat)


def written(tmp_path: Path, data: bytes, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def rows_of(tmp_path: Path, data: bytes, name: str = "in.jsonl", **options) -> list[Row]:
    return list(Rows(written(tmp_path, data, name), **options))


# Lines


def test_lines_and_indices(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \r\n{"prompt": "b", "id": 9}\n{"prompt": "c"}')
    assert [(r.index, r.line, r.fields["prompt"]) for r in rows] == [(0, 1, "a"), (1, 4, "b"), (2, 5, "c")]
    assert rows[1].fields["id"] == 9
    assert all(r.error is None and r.request is r.fields and not r.is_batch for r in rows)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"prompt": "\xff\xfe"}', "UTF-8 at byte 12"),
        (b'{"prompt": "a"', "JSON"),
        (b"[1, 2]", "list"),
        (b'{"seed": ' + b"7" * 5000 + b"}", "invalid JSON: a whole number has over 4,300 digits"),
        (b"null", "NoneType"),
        (b'{"prompt": "a", "x": NaN}', "NaN"),
        (b'{"prompt": "a", "x": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "x": 1e999}', "1e999"),
        (b'{"prompt": "a\x00b"}', "JSON"),
        (b"\x00\x00", "JSON"),
        (b"[" * 100_000, "deep"),
        (b"1" * 5000, "JSON"),
    ],
)
def test_a_bad_line_is_one_error_row(tmp_path, bad, reason):
    rows = rows_of(tmp_path, b'{"prompt": "a"}\n' + bad + b'\n{"prompt": "b"}\n')
    assert [r.index for r in rows] == [0, 1, 2]
    assert [r.error is None for r in rows] == [True, False, True]
    assert rows[1].error.startswith("line 2: ")
    assert reason in rows[1].error
    assert rows[1].fields == {}


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_a_huge_line_is_one_error_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    form = '{"prompt": "%s"}' if name == "in.jsonl" else "%s"
    huge, small = (form % ("x" * n) for n in (3_000_000, 1))
    exact = form % ("x" * (1000 - len(form) + 2))
    head = ["prompt"] if name == "in.csv" else []
    rows = rows_of(tmp_path, "\n".join([*head, small, huge, small, exact, huge]).encode(), name)
    assert [r.error is None for r in rows] == [True, False, True, True, False]
    assert [r.line - len(head) for r in rows] == [1, 2, 3, 4, 5]
    assert all("1,000 bytes" in r.error for r in rows if r.error)


def test_text_files(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbfhello \n\n{"not": json}\r\n\xff\na\x00b\nlast', "in.txt")
    texts = [{"prompt": "hello "}, {"prompt": '{"not": json}'}, {}, {"prompt": "a\x00b"}, {"prompt": "last"}]
    assert [r.fields for r in rows] == texts
    assert [r.line for r in rows] == [1, 3, 4, 5, 6]
    assert rows[2].error == "line 4: invalid UTF-8 at byte 0"


def test_prompt_column_of_json_lines(tmp_path):
    lines = [{"q": "a", "prompt": "no"}, {"prompt": "b"}, {"q": None}, {"q": "c", "messages": [], "n": 2}, {"q": 1}]
    rows = rows_of(tmp_path, "\n".join(map(json.dumps, lines)).encode(), prompt_column="q")
    assert [r.fields for r in rows] == lines
    assert [r.error is None for r in rows] == [True, False, False, True, True]
    assert [rows[i].request for i in (0, 3)] == [{"prompt": "a"}, {"prompt": "c", "n": 2}]
    assert rows[1].error == "line 2: has no 'q', which is to hold the prompt; it has ['prompt']"
    assert encode(rows[4], make_tokenizer(), 64, DEFAULTS).error == "line 5: prompt is int; it must be a string"
    ids = rows_of(tmp_path, b'{"prompt": "a", "prompt_token_ids": [1]}', prompt_column="prompt_token_ids")
    assert encode(ids[0], None, 64, DEFAULTS) == Request(0, (1,), DEFAULTS)


# Files


def test_rows_are_read_anew_every_time(tmp_path):
    rows = Rows(written(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    first, second = iter(rows), iter(rows)
    assert next(first) == next(second)
    assert list(rows) == [next(iter(rows)), next(first)]


def test_limit(tmp_path):
    data = b'{"prompt": "a"}\n\n' * 5
    assert [len(rows_of(tmp_path, data, limit=n)) for n in (0, 3, 99, 2**70, None)] == [0, 3, 5, 5, 5]


def test_digest_is_that_of_the_whole_file(tmp_path):
    data = random.Random(1).randbytes(3 * 2**20 + 17)
    assert Rows(written(tmp_path, data, "in.txt"), limit=1).sha256() == hashlib.sha256(data).hexdigest()


def test_unusable_files_are_refused_at_once(tmp_path):
    (tmp_path / "x.xlsx").write_text("a")
    (tmp_path / "x").write_text("a")
    (tmp_path / "dir.jsonl").mkdir()
    cases = (("x.xlsx", ".jsonl"), ("gone.jsonl", "No such file"), ("dir.jsonl", "directory"), ("x", ".txt"))
    for name, word in cases:
        with pytest.raises(InvalidInput, match=word):
            Rows(tmp_path / name)
    with pytest.raises(InvalidInput, match="no columns"):
        Rows(written(tmp_path, b"a", "in.txt"), prompt_column="prompt")


def test_a_changed_file_is_refused(tmp_path):
    path = written(tmp_path, b'{"prompt": "a"}\n')
    rows = Rows(path)
    assert len(list(rows)) == 1
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(InvalidInput, match="has changed"):
        iter(rows)
    path.unlink()
    with pytest.raises(InvalidInput, match="has changed"):
        iter(rows)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_copied_and_can_be_read_again(tmp_path, monkeypatch):
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spool))
    data = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    os.mkfifo(pipe := tmp_path / "in.jsonl")
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    with Rows(pipe) as rows:
        writer.join()
        assert [r.fields["prompt"] for r in rows] == [r.fields["prompt"] for r in rows] == ["a", "b"]
        assert rows.sha256() == hashlib.sha256(data).hexdigest()
        (copy,) = spool.iterdir()
        assert copy.stat().st_mode & 0o077 == 0  # prompts may be private
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("redirected", ["pipe", "file"])
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_json_lines_from_where_it_stands(tmp_path, name, redirected):
    data = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    code = "import sys; from flexengine.job.inputs import Rows; rows = Rows(sys.argv[1])\n" + (
        "print([[row.fields['prompt'] for row in rows] for _ in range(2)], rows.sha256())"
    )
    (file := tmp_path / "some").write_bytes(b"a header that somebody else has read\n" + data)
    with file.open("rb", buffering=0) as stream:
        stream.seek(-len(data), os.SEEK_END)
        source = {"stdin": stream} if redirected == "file" else {"input": data}
        said = subprocess.run([sys.executable, "-c", code, name], capture_output=True, check=True, **source).stdout
    assert said.decode().split("\n")[0] == f"[['a', 'b'], ['a', 'b']] {hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("name", ["in a.json", "in.jsonl"])
@pytest.mark.parametrize("text", [b'[{"prompt": "a"}]', b'\xef\xbb\xbf \n [\n{"prompt": "a"},\n{"prompt": "b"}]\n'])
def test_a_json_array_is_refused_with_what_makes_lines_of_it(tmp_path, text, name):
    file = written(tmp_path, text, name)
    with pytest.raises(InvalidInput, match="is a JSON array; rows are one JSON object per line") as refused:
        Rows(file)
    made = f"{file.with_suffix('')}-rows.jsonl"
    assert f"jq -c '.[]' {shlex.quote(str(file))} > {shlex.quote(made)}" in str(refused.value)


def test_one_line_that_is_an_array_is_one_bad_row(tmp_path):
    rows = list(Rows(written(tmp_path, b'\xef\xbb\xbf[1, 2]\n{"prompt": "a"}\n', "in.json")))
    assert [row.error is None for row in rows] == [False, True]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    def peak(rows: int) -> int:
        path = written(tmp_path, b"prompt\n" + b'{"prompt": "' + b"a" * 80 + b'"}\n' * rows, name)
        tracemalloc.start()
        assert sum(1 for _ in Rows(path)) >= rows
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    assert peak(20_000) < 1.2 * peak(1000) + 100_000


# CSV and TSV


def test_csv_as_the_csv_module_writes_it(tmp_path):
    rng = random.Random(2)
    pieces = ["a", "é", "€", '"', ",", "\n", "\r\n", "\t", " ", "\x00", "x" * 50, "'", "\\"]
    columns = ["id", "prompt", "note, \"quoted\"\nname"]
    cells = [["".join(rng.choices(pieces, k=rng.randrange(6))) for _ in columns] for _ in range(300)]
    for name, delimiter in (("in.csv", ","), ("in.tsv", "\t")):
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([columns, *cells])
        rows = rows_of(tmp_path, b"\xef\xbb\xbf" + text.getvalue().encode(), name)
        assert [list(r.fields.values()) for r in rows] == cells
        assert all(list(r.fields) == columns and r.error is None for r in rows)
        lines = [3]  # the header takes two
        for record in cells[:-1]:
            lines.append(lines[-1] + 1 + sum(cell.count("\n") for cell in record))
        assert [r.line for r in rows] == lines
        assert [r.request["prompt"] for r in rows] == [c[1] for c in cells]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"1,2", "has 2 cells, but the header has 3"),
        (b"1,2,3,4", "has 4 cells"),
        (b"1,\xff,3", "UTF-8 at byte 2"),
        (b'1,"\xff\nx",3', "UTF-8 at byte 3"),
        (b'1,"open,3', "invalid CSV"),
        (b'1,"a"b,3', "invalid CSV"),
        (b"1,a\rb,3", "new-line character seen in unquoted field"),
    ],
)
@pytest.mark.parametrize("after", [b"4,hello,6\n\n7,world,9", b'4,"hel""lo",6\n7,"wor\nld",9\n'])
def test_a_bad_record_is_one_error_row(tmp_path, bad, reason, after):
    rows = rows_of(tmp_path, b"id,prompt,x\n0,hi,0\n" + bad + b"\n" + after, "in.csv")
    assert [r.fields.get("id") for r in rows] == ["0", None, "4", "7"]
    assert [r.error is None for r in rows] == [True, False, True, True]
    assert rows[1].error.startswith("line 3: ")
    assert reason in rows[1].error
    assert [r.index for r in rows] == [0, 1, 2, 3]


def test_a_record_over_many_lines_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 100)
    rows = rows_of(tmp_path, b'prompt\n"start\n' + b"hello\n" * 50, "in.csv")
    assert [r.line for r in rows] == list(range(2, 53))
    assert [r.error is None for r in rows] == [False, *[True] * 50]
    assert "longer than 100 bytes" in rows[0].error


def test_csv_headers(tmp_path):
    header = b"question,id\na,1\n"
    assert [r.request for r in rows_of(tmp_path, header, "in.csv", prompt_column="question")] == [
        {"id": "1", "prompt": "a"}
    ]
    assert rows_of(tmp_path, b"prompt\n", "in.csv") == []
    refused = (
        (header, None, r"no column prompt; its columns are \['question', 'id'\].*--prompt-column"),
        (header, "text", "no column text"),
        (header, "messages", "cannot hold messages"),
        (b"prompt,id,prompt\n", None, r"several columns named \['prompt'\]"),
        (b"", None, "empty"),
        (b"\n\n", None, "empty"),
        (b"prompt,\xff\n", None, "header.*line 1 invalid UTF-8"),
        (b'prompt,"x\n', None, "header.*line 1 invalid CSV"),
    )
    for data, column, words in refused:
        with pytest.raises(InvalidInput, match=words):
            Rows(written(tmp_path, data, "in.csv"), prompt_column=column)


@pytest.mark.parametrize(
    ("column", "good", "bad"),
    [
        ("max_tokens", {"7": 7, "7.0": 7, " 7 ": 7, "": None, "-3": -3}, ["seven", "7.5", "1e3", "٧", "1_000", "true"]),
        ("seed", {"18446744073709551615": 2**64 - 1}, ["0x10", "9" * 5000]),
        ("n", {"2": 2}, ["two"]),
        ("logprobs", {"0": 0, "": None}, ["true", "[1]"]),
        ("top_k", {"50": 50}, ["-"]),
        ("temperature", {"0.5": 0.5, "1": 1.0, "1e-1": 0.1, "": None}, ["hot", "0,5"]),
        ("top_p", {".9": 0.9}, ["90%"]),
        ("ignore_eos", {"true": True, "False": False, "": None}, ["1", "yes", "[]"]),
        ("stop", {"###": ["###"], '["a", "b"]': ["a", "b"], "\n": ["\n"], "true": ["true"]}, ["[", "[a]"]),
        ("stop_token_ids", {"5": [5], "[5, 6]": [5, 6], "": None}, ["five", "5 6", "[5"]),
    ],
)
def test_sampling_fields_in_csv_cells(tmp_path, column, good, bad):
    for cell, value in good.items():
        (row,) = written_cells(tmp_path, column, cell)
        assert row.error is None
        assert row.fields[column] == cell  # goes to the output as it came
        assert row.request[column] == value
        assert type(row.request[column]) is type(value)
    for cell in bad:
        (row,) = written_cells(tmp_path, column, cell)
        assert row.error.startswith(f"line 2: column {column} is ")


def written_cells(tmp_path: Path, column: str, cell: str) -> list[Row]:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["prompt", column], ["hello", cell]])
    return rows_of(tmp_path, text.getvalue().encode(), "in.csv")


def test_values_out_of_range_are_refused_by_encode(tmp_path):
    (row,) = written_cells(tmp_path, "temperature", "nan")
    assert "line 2: temperature is nan" in encode(row, make_tokenizer(), 64, DEFAULTS).error


# Parquet and Arrow


def arrow_file(path: Path, table) -> Path:
    pa = pytest.importorskip("pyarrow")
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=300)
    elif path.suffix == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


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
    rows = Rows(arrow_file(tmp_path / f"t{suffix}", pa.table(columns)), limit=900)
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
    assert [r.fields for r in Rows(tmp_path / "t.arrow")] == [{"prompt": "a"}, {"prompt": "b"}]


def test_prompt_column_of_tables(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"q": ["a", None], "text": [b"caf\xc3\xa9", b"\xff"], "prompt": ["x", "y"]})
    path = arrow_file(tmp_path / "t.parquet", table)
    assert [r.request for r in Rows(path)] == [r.fields for r in Rows(path)]
    first, second = Rows(path, "q")
    assert first.request["prompt"] == "a"
    assert second.error == "line 2: has no 'q', which is to hold the prompt; it has ['prompt', 'q', 'text']"
    first, second = Rows(path, "text")
    assert first.request["prompt"] == "café"
    assert second.error == "line 2: invalid UTF-8 at byte 0"
    with pytest.raises(InvalidInput, match=r"no column z; its columns are \['q', 'text', 'prompt'\]"):
        Rows(path, "z")
    with pytest.raises(InvalidInput, match="no column prompt or messages or prompt_token_ids"):
        Rows(arrow_file(tmp_path / "u.arrow", pa.table({"a": [1]})))


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
        (row,) = Rows(arrow_file(tmp_path / f"t{suffix}", table))
        assert row.error is None
        assert {name: row.fields[name] for name in expected} == {name: value for name, (_, value) in expected.items()}
        json.dumps(row.fields, allow_nan=False)


def test_cells_that_cannot_be_converted_cost_their_row_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    offsets, data = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")
    prompts = pa.StringArray.from_buffers(3, offsets, data)
    nanoseconds = pa.array([0, 1, 10**18 + 1], pa.timestamp("ns"))
    rows = list(Rows(arrow_file(tmp_path / "t.arrow", pa.table({"prompt": prompts, "when": nanoseconds}))))
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
            Rows(written(tmp_path, whole[:cut], f"cut{suffix}"))
    middle = whole[: len(whole) // 2] + bytes(2000) + whole[len(whole) // 2 + 2000 :]
    try:
        found = f"{len(list(Rows(written(tmp_path, middle, f'hole{suffix}'))))} rows"
    except InvalidInput as error:
        found = str(error)
    assert found == "2000 rows" or "is damaged after row" in found  # pyarrow need not notice that values changed


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r'pip install "flexengine\[parquet\]"'):
        Rows(written(tmp_path, b"PAR1", "t.parquet"))


# Batches


def batch(custom_id: str, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", **body}}


def test_batch_lines_are_told_from_plain_ones(tmp_path):
    lines = [
        batch("a", max_tokens=3), {"prompt": "hello", "url": "http://x", "body": "text"}, {"prompt": "world"},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions"}, {**batch("c"), "method": "GET"},
        {"prompt": "hello", "custom_id": "mine", "method": "plain"},
    ]  # fmt: skip
    data = "\n".join(map(json.dumps, lines)).encode() + b"\n{broken"
    rows = rows_of(tmp_path, data)
    assert [r.custom_id for r in rows] == ["a", None, None, "b", "c", None, ""]
    assert [r.error is None for r in rows] == [True, True, True, False, False, True, False]
    assert rows[0].request == {"prompt": "hello", "max_tokens": 3}
    assert [r.fields for r in rows] == [*lines, {}]
    data = b"{broken\n" + "\n".join(map(json.dumps, (lines[1], lines[0]))).encode()
    plain_first = rows_of(tmp_path, data)
    assert [r.custom_id for r in plain_first] == [None, None, "a"]
    named = rows_of(tmp_path, b'{"url": "/v1/x", "body": "hello"}', prompt_column="body")
    assert [r.request for r in named] == [{"url": "/v1/x", "prompt": "hello"}]


def test_survey_counts_rows_and_refuses_repeated_ids(tmp_path):
    lines = [batch("a"), {"prompt": "x", "custom_id": "a"}, batch("b"), batch("", n=0), batch("")]
    assert survey(Rows(written(tmp_path, "\n".join(map(json.dumps, lines)).encode()))) == 5
    lines.append(batch("a", n=0))  # refused for another reason, but answered under its id
    rows = Rows(written(tmp_path, "\n\n".join(map(json.dumps, lines)).encode()))
    with pytest.raises(InvalidInput, match=r"'a' \(lines 1 and 11\)"):
        survey(rows)


# Rows


def test_row_of():
    assert row_of("hi", 2) == Row(2, 0, {"prompt": "hi"})
    assert row_of({"prompt_token_ids": [1]}, 0).fields == {"prompt_token_ids": [1]}
    assert row_of(17, 5).error == "prompt 5: is int; it must be a string or a row (dict)"


# Mutations


def judge(line: bytes) -> bool:
    """Whether a line is a JSON object by RFC 8259, by the standard library's default reading plus its NaN rule."""
    try:
        value = json.loads(line.strip(b"\r\n").decode("utf-8"))
        return isinstance(value, dict) and not ({"NaN", "Infinity", "-Infinity"} & set(str(value).split()))
    except ValueError:
        return False


PLAIN = b'{"prompt": "hello \xe2\x82\xac world", "max_tokens": 3, "id": 12.5, "tags": ["a", null]}'
CHAT = (
    b'{"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "n": 2,'
    b' "messages": [{"role": "user", "content": "hello \xe2\x82\xac"}], "max_tokens": 3, "stop": ["x"]}}'
)
FORMS = [
    ("in.jsonl", PLAIN, b"", b""), ("in.jsonl", json.dumps(batch("r-1", top_p=0.5, logprobs=2)).encode(), b"", b""),
    ("in.jsonl", CHAT, b"", b""), ("in.txt", b"hello \xe2\x82\xac world", b"", b""),
    ("in.csv", b"hello \xe2\x82\xac world,3,0.5,7", b"prompt,max_tokens,temperature,id\n", b'"'),
    ("in.tsv", b"hello \xe2\x82\xac world\t3\t0.5\t7", b"prompt\tmax_tokens\ttemperature\tid\n", b'"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "good", "head", "without"), FORMS, ids=range(len(FORMS)))
def test_mutated_lines(tmp_path, name, good, head, without):
    """Every line gives one row; nothing raises; an error always names its line. (With quotes in them, CSV lines can
    join: those have a test of their own.)"""
    tokenizer, refused = make_tokenizer(), list[int]()

    @given(lines=st.lists(mutated(good), min_size=1, max_size=40))
    def every_line_is_a_row(lines):
        lines = [*(line.replace(without or b"\n", b"'") for line in lines), good]
        first = 1 + head.count(b"\n")
        blank = b" \r\n" if head else None
        numbers = [n for n, line in enumerate(lines, first) if line.strip(blank)]
        rows = rows_of(tmp_path, head + b"\n".join(lines), name)
        assert [r.index for r in rows] == list(range(len(numbers)))
        assert [r.line for r in rows] == numbers
        assert all(r.error is None or r.error.startswith(f"line {r.line}: ") for r in rows)
        requests = [encode(row, tokenizer, 64, DEFAULTS) for row in rows]
        assert all(isinstance(r, Request) or r.error.startswith(f"line {r.line}: ") for r in requests)
        assert [r.index for r in requests] == list(range(len(numbers)))
        assert isinstance(requests[-1], Request)
        refused.append(sum(isinstance(r, Row) for r in requests))

    every_line_is_a_row()
    assert sum(refused) > 20


@given(lines=st.lists(mutated(PLAIN), min_size=1, max_size=40))
def test_json_lines_are_judged_as_by_the_json_module(tmp_path, lines):
    rows = rows_of(tmp_path, b"\n".join(lines))
    lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    assert [r.error is None for r in rows] == [judge(line) for line in lines if line.strip()]


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
def test_mutated_csv_records_with_quotes(tmp_path, name):
    """A broken record never takes more than the records it has joined: between mutated records stand whole ones, and
    after the last broken one everything is read."""
    delimiter = {"in.csv": b",", "in.tsv": b"\t"}[name]
    whole = delimiter.join([b'"hello ""world"" \xe2\x82\xac"', b"3", b'"a, b"', b"7"])
    head = delimiter.join([b"prompt", b"max_tokens", b"note", b"id"]) + b"\n"
    read = list[int]()

    @given(broken=mutated(whole))
    @settings(max_examples=300)
    def the_whole_ones_are_read(broken):
        rows = rows_of(tmp_path, head + b"\n".join([whole, broken, whole, whole, whole]), name)
        assert rows[0].error is None
        assert 3 <= len(rows) <= 5
        assert [r.index for r in rows] == list(range(len(rows)))
        assert all(a.line < b.line for a, b in pairwise(rows))
        assert rows[-1].line in (4, 5, 6)
        assert all(r.error is None or r.error.startswith(f"line {r.line}: ") for r in rows)
        read.append(sum(r.error is None and r.fields["note"] == "a, b" for r in rows[1:]))

    the_whole_ones_are_read()
    assert sum(read) > 0.9 * 3 * len(read)


def test_parquet_files_with_flipped_bits(tmp_path):
    """Rows or InvalidInput, whatever the bits."""
    pa = pytest.importorskip("pyarrow")
    whole = arrow_file(tmp_path / "t.parquet", pa.table({"prompt": ["hello"] * 50, "n": [1] * 50})).read_bytes()

    @given(data=flipped(whole))
    @settings(max_examples=200)
    def rows_or_an_error(data):
        try:
            rows = list(Rows(written(tmp_path, data, "f.parquet")))
        except InvalidInput:
            return
        assert [r.index for r in rows] == list(range(len(rows)))

    rows_or_an_error()


def test_kinds_of_sampling_fields_are_known():
    assert {name: tables.parsed_cell(name, "") for name in SamplingParams.__dataclass_fields__} == dict.fromkeys(
        SamplingParams.__dataclass_fields__
    )
