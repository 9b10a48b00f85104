"""CSV files into rows, judged by the csv module."""

import csv
import io
import random
import time
from pathlib import Path

import pytest

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job import read_json
from flexengine.job.csv_records import csv_records
from flexengine.job.inputs import InputRows
from flexengine.job.read_tables import parsed_cell
from flexengine.job.rows import Row, encode
from tests.helpers.inputs import DEFAULTS, make_tokenizer, rows_of, written


def test_csv_as_the_csv_module_writes_it(tmp_path):
    rng = random.Random(2)
    pieces = ["a", "é", "€", '"', ",", "\n", "\r\n", "\t", " ", "\x00", "x" * 50, "'", "\\"]
    columns = ["id", "prompt", 'note, "quoted"\nname']
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
        (b"1,a\rb,3", "has a carriage return (CR) that ends no line"),
    ],
)
@pytest.mark.parametrize("after", [b"4,hello,6\n\n7,world,9", b'4,"hel""lo",6\n7,"wor\nld",9\n'])
def test_a_bad_record_is_one_error_row(tmp_path, bad, reason, after):
    rows = rows_of(tmp_path, b"id,prompt,x\n0,hi,0\n" + bad + b"\n" + after, "in.csv")
    kept = {"id": "1", "prompt": "2"} if "cells" in reason else {"id": "1"} if reason == "invalid CSV" else {}
    kept |= {"x": "3", "further_cells": ["4"]} if b"4" in bad else {}
    assert rows[1].fields == kept
    assert [r.fields.get("id") for r in rows] == ["0", kept.get("id"), "4", "7"]
    assert [r.error is None for r in rows] == [True, False, True, True]
    assert rows[1].error.startswith("line 3: ")
    assert reason in rows[1].error
    assert [r.index for r in rows] == [0, 1, 2, 3]


def test_further_cells_replace_no_column(tmp_path):
    (row,) = rows_of(tmp_path, b"prompt,further_cells\na,b,c,d\n", "in.csv", template="{prompt}")
    assert row.fields == {"prompt": "a", "further_cells": "b", "input_further_cells": ["c", "d"]}
    assert row.error == (
        "line 2: has 4 cells, but the header has 2; write quotes around a cell that holds ',', and double its own"
        " quotes; if another character separates the cells, give --delimiter CHARACTER (delimiter=CHARACTER in Python)"
    )
    (row,) = rows_of(tmp_path, b'prompt,id\n"a",1,\n', "in.csv")
    assert row.fields == {"prompt": "a", "id": "1", "further_cells": [""]}


def test_a_record_over_many_lines_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 100)
    rows = rows_of(tmp_path, b'prompt\n"start\n' + b"hello\n" * 50, "in.csv")
    assert [r.line for r in rows] == list(range(2, 53))
    assert [r.error is None for r in rows] == [False, *[True] * 50]
    assert "longer than 100 B" in rows[0].error


def test_a_cell_of_many_lines(tmp_path):
    cell = "".join(f"2024-01-01 10:{i % 60:02d}, started job {i}\n" for i in range(1200))
    data = f'id,prompt\n0,hi\n1,"{cell}"\n2,bye\n'.encode()
    rows = rows_of(tmp_path, data, "in.csv")
    assert [(r.fields, r.line) for r in rows] == [
        ({"id": "0", "prompt": "hi"}, 2),
        ({"id": "1", "prompt": cell}, 3),
        ({"id": "2", "prompt": "bye"}, 1204),
    ]
    # Without its end only the line that opens the cell is lost.
    rows = rows_of(tmp_path, data.replace(b'"\n2', b"\n2"), "in.csv")
    assert [r.line for r in rows] == [*range(2, 1203), 1204]
    assert [r.error is None for r in rows] == [True, False, *[True] * 1200]
    assert "a quoted cell has no end" in rows[1].error


def test_text_after_many_stray_quotes_is_read_again_a_few_times():
    """Each line opens a cell that has no end. Else the time grows with the square of the lines, to hours."""
    data = b'prompt,x\n"x\n' + b'a","c\n' * 20_000
    began = time.process_time()
    records = list(csv_records(io.BufferedReader(io.BytesIO(data)), ",", 2**26))
    assert [line for line, _, _ in records] == list(range(1, 20_003))
    assert all(fault for _, _, fault in records[1:])
    assert time.process_time() - began < 5
    # Records of several lines are read again once the text is new, and quoted cells of one line always.
    more = data + b'"a","b"\n' + b"c,d\n" * 50_000 + b'"a\nb",c\n'
    cells = [cells for _, cells, _ in csv_records(io.BufferedReader(io.BytesIO(more)), ",", 2**18)]
    assert ["a", "b"] in cells
    assert cells[-1] == ["a\nb", "c"]


def test_a_row_of_spaces_is_a_row():
    found = list(csv_records(io.BufferedReader(io.BytesIO(b"prompt\n \n\n\r\na\n")), ",", 1000))
    assert found == [(1, ["prompt"], None), (2, [" "], None), (5, ["a"], None)]


def test_records_are_those_of_the_csv_module():
    rng, same = random.Random(5), 0
    for _ in range(20_000):
        text = "".join(rng.choices(["a", "b", '"', '"', '""', ",", ",", "\n", "\r\n", "\r", " ", "é", "\0"], k=8))
        found = list(csv_records(io.BufferedReader(io.BytesIO(text.encode())), ",", 1000))
        try:
            wanted = [record for record in csv.reader(io.StringIO(text, newline=""), strict=True) if record]
        except csv.Error:
            assert any(fault for _, _, fault in found)
            continue
        if all(fault is None for _, _, fault in found):
            assert [cells for _, cells, _ in found] == wanted
            same += 1
        else:
            assert "\r" in text  # as a line end, the module reads it
    assert same > 5000


def test_csv_headers(tmp_path):
    header = b"question,id\na,1\n"
    assert [r.request for r in rows_of(tmp_path, header, "in.csv", prompt_column="question")] == [
        {"id": "1", "prompt": "a"}
    ]
    assert rows_of(tmp_path, b"prompt\n", "in.csv") == []
    refused = (
        (header, None, r"no column prompt; its columns are \['question', 'id'\].*--prompt-column"),
        (header, "text", "no column text"),
        (header, "messages", "no column messages"),
        (b"prompt,id,prompt\n", None, r"several columns named \['prompt'\]"),
        (b"id;prompt\n1;a\n", None, r"separated by ';'; give --delimiter ';' \(delimiter=';' in Python\)"),
        (b"id\tprompt\n1\ta\n", None, r"separated by tabs; give --delimiter '\\t' \(delimiter='\\t' in Python\)"),
        (b"Prompt,id\n", None, r"--prompt-column Prompt \(prompt_column='Prompt' in Python\)"),
        (b"", None, "empty"),
        (b"\n\n", None, "empty"),
        (b"prompt,\xff\n", None, "header.*line 1 invalid UTF-8"),
        (b'prompt,"x\n', None, "header.*line 1 invalid CSV"),
    )
    for data, column, words in refused:
        with pytest.raises(InvalidInput, match=words):
            InputRows(written(tmp_path, data, "in.csv"), prompt_column=column)


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
        ("min_tokens", {"2": 2, "2.0": 2}, ["two"]),
        ("bad_words", {"02": ["02"], '["a", [5]]': ["a", [5]]}, ["[a]"]),
        ("logit_bias", {'{"5": -1}': {"5": -1}, "": None}, ["five", "{5: 1}"]),
        ("chat_template_kwargs", {'{"a": false}': {"a": False}}, ["a"]),
        ("add_generation_prompt", {"false": False}, ["no"]),
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


CHAT = '"[{""role"": ""user"", ""content"": ""hello""}]"'


def test_messages_and_token_ids_in_cells(tmp_path):
    """JSON, in a column that is named for it; an empty cell is no value. Other cells are error rows with the remedy."""
    printed = "\"[{'role': 'user', 'content': 'hello'}]\""
    cells = (f'{CHAT},"[{{""type"": ""function""}}]"', f"{CHAT},", f"{printed},", "Nice.,", '"{""role"": 1}",', ',"[]"')
    text = "messages,tools\n" + "\n".join(cells)
    rows = rows_of(tmp_path, text.encode(), "in.csv", prompt_column="messages")
    chat = [{"role": "user", "content": "hello"}]
    assert rows[0].request == {"messages": chat, "tools": [{"type": "function"}]}
    assert rows[1].request == {"messages": chat, "tools": None}
    assert encode(rows[1], make_tokenizer(), 64, DEFAULTS).prompt_ids == (3, 4, 1)
    assert rows[0].fields["messages"] == '[{"role": "user", "content": "hello"}]'
    assert rows[2].error.endswith("(char 2); write it with json.dumps")
    assert rows[3].error.startswith("line 5: messages is 'Nice.', which is no JSON list: ")
    texts = "; if its cells are texts, give --template '{messages}' (template='{messages}' in Python)"
    assert rows[3].error.endswith(texts)
    assert rows[4].error.endswith("which is no JSON list: it is an object; write it with json.dumps")
    assert "messages is null or NaN, so missing" in encode(rows[5], make_tokenizer(), 64, DEFAULTS).error
    (row,) = rows_of(tmp_path, b'prompt_token_ids\n"[1, 2]"\n', "in.csv", prompt_column="prompt_token_ids")
    assert row.request == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize(("cell", "remedy"), [
    (CHAT, r"--prompt-column messages \("), ("\"[{'role': 'user'}]\"", r"--prompt-column messages \("),
    ("I like it", r"if its cells are texts, give --template '\{messages\}' \("),
])  # fmt: skip
def test_the_remedy_for_a_column_of_messages(tmp_path, cell, remedy):
    with pytest.raises(InvalidInput, match=rf"no column prompt; its columns are \['messages'\]: .*{remedy}"):
        rows_of(tmp_path, f"messages\n{cell}\n".encode(), "in.csv")
    (row,) = rows_of(tmp_path, f"messages\n{cell}\n".encode(), "in.csv", template="{messages}")
    assert row.error is None


def test_messages_that_are_run_as_text_are_named(tmp_path, caplog):
    caplog.set_level("INFO", "flexengine")
    for cell, told in ((CHAT, 1), ("[1] a", 0), ("hello", 0)):
        caplog.clear()
        assert len(rows_of(tmp_path, f"prompt\n{cell}\n".encode(), "in.csv")) == 1
        assert caplog.text.count("column prompt holds messages in JSON, which are run as text") == told


def written_cells(tmp_path: Path, column: str, cell: str) -> list[Row]:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["prompt", column], ["hello", cell]])
    return rows_of(tmp_path, text.getvalue().encode(), "in.csv", row_options=True)


def test_values_out_of_range_are_refused_by_encode(tmp_path):
    (row,) = written_cells(tmp_path, "temperature", "nan")
    assert "line 2: temperature is nan" in encode(row, make_tokenizer(), 64, DEFAULTS).error


def test_kinds_of_sampling_fields_are_known():
    assert {name: parsed_cell(name, "") for name in SamplingParams.__dataclass_fields__} == dict.fromkeys(
        SamplingParams.__dataclass_fields__
    )


def test_rows_of_a_csv_file_are_scored(tmp_path):
    """An empty cell is no value, and choices are a JSON list; a row with a prompt generates."""
    data = b'context,continuation,choices,prompt\nx, y,,\n,,"["" a"", "" b""]",\nx,,,hi\nx,,[1,\n'
    rows = rows_of(tmp_path, data, "in.csv", score=True)
    assert [row.is_scored for row in rows[:3]] == [True, True, False]
    assert {name: value for name, value in rows[0].request.items() if value is not None} == {
        "context": "x", "continuation": " y"}  # fmt: skip
    assert rows[1].request["choices"] == [" a", " b"]
    assert rows[1].fields["choices"] == '[" a", " b"]'
    assert rows[2].request["prompt"] == "hi"
    assert rows[3].error.startswith("line 5: choices is '[1', which is no JSON list: Expecting ',' delimiter")
    assert [row.is_scored for row in rows_of(tmp_path, b"text\nhello\n", "in.csv", score=True)] == [True]


@pytest.mark.parametrize(
    ("record", "fault"),
    [('7,"say \\"hi\\", x",c', "',' expected after '\"'"), ('7,"no end,c', "a quoted cell has no end")],
)
def test_a_stray_quote_names_the_remedy_and_keeps_the_cells_before(tmp_path, record, fault):
    rows = rows_of(tmp_path, f"id,prompt,x\n{record}\n8,b,c\n".encode(), "in.csv")
    assert [row.fields for row in rows] == [{"id": "7"}, {"id": "8", "prompt": "b", "x": "c"}]
    remedy = 'double each quote inside a quoted cell (""), as a backslash is text here'
    assert rows[0].error.startswith(f"line 2: invalid CSV: {fault}; {remedy}")


def test_all_byte_order_marks_at_the_beginning_are_left_out(tmp_path):
    for start in ("", "sep=;\n"):
        mark = start[4:5] or ","
        text = f"\ufeff\ufeff{start}id{mark}prompt\n1{mark}\ufeffa\n"
        (row,) = rows_of(tmp_path, text.encode(), "in.csv")
        assert row.fields == {"id": "1", "prompt": "\ufeffa"}
    for name, line in (("in.txt", "a"), ("in.jsonl", '{"prompt": "a"}')):
        (row,) = rows_of(tmp_path, f"\ufeff\ufeff\ufeff{line}".encode(), name)
        assert row.fields == {"prompt": "a"}
