"""Input files into rows. A line is judged by the json and csv modules on that line alone."""

import dataclasses
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job import csv_records as csv_module
from flexengine.job import read_json
from flexengine.job.inputs import InputRows
from flexengine.job.rows import Request, Row, encode, row_of
from tests.helpers.inputs import DEFAULTS, batch_fields, make_tokenizer, rows_of, written


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
        (b"[1, 2]", "holds an array; a row must be an object"),
        (b'"text"', "holds a string; a row"),
        (b"true", "holds true or false; a row"),
        (b"17.5", "holds a number; a row"),
        (b'{"seed": ' + b"7" * 5000 + b"}", "invalid JSON: a whole number has over 4,300 digits"),
        (b"null", "holds null; a row must be an object"),
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


def test_nan_is_no_value(tmp_path: Path) -> None:
    """As pandas and Python write it; Parquet files are read alike."""
    data = b'{"prompt": "a", "x": NaN, "y": [Infinity, -Infinity], "NaN": "Infinity"}\n'
    for name, text in (("a.jsonl", data), ("b.json", b"[" + data + b"]")):
        (row,) = rows_of(tmp_path, text, name)
        assert row.fields == {"prompt": "a", "x": None, "y": [None, None], "NaN": "Infinity"}
        assert encode(row, make_tokenizer(), 9, DEFAULTS).sampling == DEFAULTS
    (row,) = rows_of(tmp_path, b'{"prompt": NaN}')
    assert encode(row, make_tokenizer(), 9, DEFAULTS).error.startswith("line 1: prompt is null or NaN, so missing;")


def test_a_number_beyond_the_range_of_a_float_is_null_as_data(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, b'{"prompt": "a", "x": [1e400, -1e999, 1e308], "y": NaN}')
    assert row.fields == {"prompt": "a", "x": [None, None, 1e308], "y": None}
    assert encode(row, make_tokenizer(), 9, DEFAULTS).sampling == DEFAULTS


@pytest.mark.parametrize("name", ["Infinity", "-Infinity", "1e400"])
def test_an_option_that_is_no_finite_number_is_an_error_row(tmp_path: Path, name: str) -> None:
    """Of each parameter that takes a number, alone or within it; also in batch lines, and of other programs."""
    fields = {name: value for name, value in vars(DEFAULTS).items() if type(value) in (int, float)}
    cells = dict.fromkeys([*fields, "logprobs", "max_new_tokens"], name)
    inner = f'{{"5": {name}}}'
    cells |= {"logit_bias": inner, "chat_template_kwargs": inner, "stop_token_ids": f"[{name}]"}
    for option, cell in cells.items():
        (row,) = rows_of(tmp_path, f'{{"prompt": "a", "x": NaN, "{option}": {cell}}}'.encode())
        assert row.fields["x"] is None
        error = encode(row, make_tokenizer(), 9, DEFAULTS).error
        assert error.startswith(f"line 1: {option}")
        assert option == "chat_template_kwargs" or f" is {float(name)}; " in error
    line = json.dumps(batch_fields()).replace('"hi"', f'"hi", "temperature": {name}').encode()
    assert "line 1: temperature is " in encode(*rows_of(tmp_path, line), make_tokenizer(), 9, DEFAULTS).error


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_a_huge_line_is_one_error_row(tmp_path, monkeypatch, name):
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    form = '{"prompt": "%s"}' if name == "in.jsonl" else "%s"
    huge, small = (form % ("x" * n) for n in (3_000_000, 1))
    exact = form % ("x" * (1000 - len(form) + 2))
    head = ["prompt"] if name == "in.csv" else []
    rows = rows_of(tmp_path, "\n".join([*head, small, huge, small, exact, huge]).encode(), name)
    assert [r.error is None for r in rows] == [True, False, True, True, False]
    assert [r.line - len(head) for r in rows] == [1, 2, 3, 4, 5]
    assert all("1.00 kB" in r.error for r in rows if r.error)


def test_text_files(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbfhello \n\n{"not": json}\r\n\xff\na\x00b\nlast', "in.txt")
    texts = [{"prompt": "hello "}, {"prompt": '{"not": json}'}, {}, {"prompt": "a\x00b"}, {"prompt": "last"}]
    assert [r.fields for r in rows] == texts
    assert [r.line for r in rows] == [1, 3, 4, 5, 6]
    assert rows[2].error == "line 4: invalid UTF-8 at byte 0; save the file as UTF-8"


def test_prompt_column_of_json_lines(tmp_path):
    lines = [{"q": "a", "prompt": "no"}, {"prompt": "b"}, {"q": None}, {"q": "c", "messages": [], "n": 2}, {"q": 1}]
    rows = rows_of(tmp_path, "\n".join(map(json.dumps, lines)).encode(), prompt_column="q")
    assert [r.fields for r in rows] == lines
    assert [r.error is None for r in rows] == [True, False, False, True, True]
    assert [rows[i].request for i in (0, 3)] == [{"prompt": "a"}, {"prompt": "c", "n": 2}]
    assert rows[1].error == "line 2: has no 'q', which is to hold the prompt; it has ['prompt']"
    assert encode(rows[4], make_tokenizer(), 64, DEFAULTS).error == "line 5: prompt is a number; it must be a string"
    ids = rows_of(tmp_path, b'{"prompt": "a", "prompt_token_ids": [1]}', prompt_column="prompt_token_ids")
    assert encode(ids[0], None, 64, DEFAULTS) == Request(0, (1,), DEFAULTS)


@pytest.mark.parametrize(
    ("name", "data"),
    [("in.txt", b"a\nb\n"), ("in.csv", b"prompt,x\na,1\nb,2\n"), ("in.tsv", b"prompt\na\nb\n"),
     ("in.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n'), ("in.json", b'[{"prompt": "a"}, {"prompt": "b"}]')],
)  # fmt: skip
def test_chat_marks_every_row_and_changes_nothing_else(tmp_path, name, data):
    plain, chat = rows_of(tmp_path, data, name), rows_of(tmp_path, data, name, chat=True)
    assert [(row.chat, row.prompt) for row in chat] == [(True, "a"), (True, "b")]
    assert [dataclasses.replace(row, chat=False) for row in chat] == plain
    with (tmp_path / name).open("rb") as file:  # as a stream
        stream = InputRows(f"/dev/fd/{file.fileno()}", form=InputRows(tmp_path / name).form, chat=True)
        assert list(stream) == chat


# Files
def test_rows_are_read_anew_every_time(tmp_path):
    rows = InputRows(written(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    first, second = iter(rows), iter(rows)
    assert next(first) == next(second)
    assert list(rows) == [next(iter(rows)), next(first)]


def test_limit(tmp_path):
    data = b'{"prompt": "a"}\n\n' * 5
    assert [len(rows_of(tmp_path, data, limit=n)) for n in (0, 3, 99, 2**70, None)] == [0, 3, 5, 5, 5]


def test_digest_is_that_of_the_whole_file(tmp_path):
    data = random.Random(1).randbytes(3 * 2**20 + 17)
    assert InputRows(written(tmp_path, data, "in.txt"), limit=1).scan().sha256 == hashlib.sha256(data).hexdigest()


def test_unusable_files_are_refused_at_once(tmp_path):
    (tmp_path / "x.docx").write_text("a")
    (tmp_path / "x").write_text("a")
    (tmp_path / "dir.jsonl").mkdir()
    cases = (("x.docx", ".jsonl"), ("gone.jsonl", "No such file"), ("dir.jsonl", "directory"), ("x", ".txt"))
    for name, word in cases:
        with pytest.raises(InvalidInput, match=word):
            InputRows(tmp_path / name)
    with pytest.raises(InvalidInput, match="no columns"):
        InputRows(written(tmp_path, b"a", "in.txt"), prompt_column="prompt")


def test_a_changed_file_is_refused(tmp_path):
    path = written(tmp_path, b'{"prompt": "a"}\n')
    rows = InputRows(path)
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
    with InputRows(pipe) as rows:
        writer.join()
        assert [r.fields["prompt"] for r in rows] == [r.fields["prompt"] for r in rows] == ["a", "b"]
        assert rows.scan().sha256 == hashlib.sha256(data).hexdigest()
        copies = [fd for fd in Path("/proc/self/fd").iterdir() if str(fd.resolve()).startswith(str(spool))]
        assert [copy.stat().st_mode & 0o077 for copy in copies] == [0]  # prompts may be private
        assert list(spool.iterdir()) == []  # no name, so that a killed process leaves nothing
    assert not any(str(fd.resolve()).startswith(str(spool)) for fd in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("redirected", ["pipe", "file"])
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_json_lines_from_where_it_stands(tmp_path, name, redirected):
    data = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    code = "import sys; from flexengine.job.inputs import InputRows; rows = InputRows(sys.argv[1])\n" + (
        "print([[row.fields['prompt'] for row in rows] for _ in range(2)], rows.scan().sha256)"
    )
    (file := tmp_path / "some").write_bytes(b"a header that somebody else has read\n" + data)
    with file.open("rb", buffering=0) as stream:
        stream.seek(-len(data), os.SEEK_END)
        source = {"stdin": stream} if redirected == "file" else {"input": data}
        said = subprocess.run([sys.executable, "-c", code, name], capture_output=True, check=True, **source).stdout
    assert said.decode().split("\n")[0] == f"[['a', 'b'], ['a', 'b']] {hashlib.sha256(data).hexdigest()}"


def test_one_line_that_is_an_array_is_one_bad_row(tmp_path):
    rows = list(InputRows(written(tmp_path, b'\xef\xbb\xbf[1, 2]\n{"prompt": "a"}\n', "in.json")))
    assert [row.error is None for row in rows] == [False, True]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr(csv_module, "_MOST_DEAD", 500)  # the rows are dead ends as CSV

    def peak(rows: int) -> int:
        path = written(tmp_path, b"prompt\n" + b'{"prompt": "' + b"a" * 80 + b'"}\n' * rows, name)
        tracemalloc.start()
        assert sum(1 for _ in InputRows(path)) >= rows
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    assert peak(20_000) < 1.2 * peak(1000) + 100_000


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.jsonl.gz"])
def test_blank_lines_are_counted(tmp_path, name):
    blank = b"\n" * 30_000 + b" \r\n" * 10_001 + b"  \n"
    if name == "in.csv":  # spaces are a cell
        blank = blank.replace(b" ", b"")
    data = b'prompt\n{"prompt": 1}\n' + blank + b'{"prompt": 2}\n\n{"prompt": 3}\n' + blank
    rows = rows_of(tmp_path, gzip.compress(data) if name.endswith("gz") else data, name)
    assert [row.line for row in rows][-3:] == [2, 40_005, 40_007]


def test_a_row_of_too_many_values_is_one_error_row(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "MAX_VALUES", 100)
    rows = [{"prompt": '[,\\"' * 500}, {"prompt": "a", "x": [1] * 120}, {"prompt": "b", "x": [1] * 90}]
    data = "\n".join(map(json.dumps, rows)).encode()
    assert [row.error for row in rows_of(tmp_path, data)] == [None, "line 2: has over 100 values", None]
    monkeypatch.setattr(csv_module, "MAX_VALUES", 100)
    data = b"a,prompt\n" + b"x," * 200 + b'\n"1",b\n'
    assert [row.error for row in rows_of(tmp_path, data, "in.csv")] == ["line 2: has over 100 cells", None]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_a_row_of_wide_characters_is_bounded_in_memory(tmp_path, monkeypatch, name):
    """One character beyond U+FFFF makes each of a text 4 bytes wide."""
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    texts = ["a" * 900, "a" * 900 + "é", "a" * 900 + "😀", "a" * 400 + "😀", "😀" * 220, "ł" * 480]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) if name == "in.jsonl" else text for text in texts]
    lines = [f'"{line[:10]}\n{line[10:]}"' for line in lines] if name == "in.csv" else lines
    rows = rows_of(tmp_path, "\n".join([*["prompt"] * (name == "in.csv"), *lines]).encode(), name)
    over = [row.error is not None for row in rows]
    assert over == [False, False, True, False, False, False]
    (row,) = rows_of(tmp_path, b"\0" * 500, "in.txt")
    assert row.error == "line 1: takes over 2.00 kB in memory, with 500 control characters; shorten it"
    assert "takes over 2.00 kB in memory, with characters of 4 bytes each" in rows[2].error


# InputRows that are scored
def test_row_of():
    assert row_of("hi", 2) == Row(2, 0, {"prompt": "hi"})
    assert row_of({"prompt_token_ids": [1]}, 0).fields == {"prompt_token_ids": [1]}
    assert row_of(17, 5).error.endswith(
        "is a number; it must be a string or an object with the fields of a row, such as prompt_token_ids"
    )


def test_rows_without_the_prompt_column_are_scored(tmp_path):
    rows = rows_of(tmp_path, b'{"q": "hi"}\n{"text": "x", "prompt": "data"}\n{"a": 1}\n', prompt_column="q", score=True)
    assert [row.is_scored for row in rows] == [False, True, True]
    assert [row.error for row in rows] == [None, None, None]


def test_lines_of_text_are_no_texts_to_score(tmp_path):
    with pytest.raises(InvalidInput, match=r"--score \(score=True in Python\) scores no prompts; give texts"):
        rows_of(tmp_path, b"hello\n", "in.txt", score=True)
