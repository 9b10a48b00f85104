"""Batch lines among plain ones, and mutated lines of every kind of file."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.rows import Request, Row, encode
from tests.helpers.inputs import DEFAULTS, make_tokenizer, rows_of, written
from tests.helpers.strategies import mutated


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
    assert InputRows(written(tmp_path, "\n".join(map(json.dumps, lines)).encode())).scan().total == 5
    lines.append(batch("a", n=0))  # refused for another reason, but answered under its id
    rows = InputRows(written(tmp_path, "\n\n".join(map(json.dumps, lines)).encode()))
    with pytest.raises(InvalidInput, match=r"'a' \(lines 1 and 11\)"):
        rows.scan()


# Mutations
def judge(line: bytes) -> bool:
    """Return whether a line is a JSON object by the standard library's default reading, which takes NaN, too."""
    try:
        return isinstance(json.loads(line.strip(b"\r\n").decode("utf-8")), dict)
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
