"""Output files: order, fields, atomic appearance."""

import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.config import Completion, Result
from flexengine.errors import InvalidInput
from flexengine.job.files import part_path, whole_file
from flexengine.job.openai import batch_line
from flexengine.job.results import check_output, encode_row, journal_path, line_encoder
from flexengine.job.resume import PrintedJob
from flexengine.job.rows import Row

FIELDS = ["index", "generated_text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error"]


def pair(index: int, text: str | None = "ok", /, error: str | None = None, **fields):
    row = Row(index, index + 1, {"prompt": f"p{index}", **fields})
    return row, Result(index, text, [index], None if error else "stop", 2, 1, error)


class GivenRows(list[Row]):
    """Rows of an input that needs no file."""

    def scan(self) -> Any:
        return SimpleNamespace(total=len(self))


@contextmanager
def printing(rows: Iterable[Row], output: str | None = None) -> Iterator[tuple[PrintedJob, io.BytesIO]]:
    """Open the job of these rows, whose results are written to a device, or to a stream in place of stdout."""
    stream = io.BytesIO()
    job = PrintedJob(GivenRows(rows), output)  # type: ignore[arg-type]
    job.begin(lambda known: known, "m")
    with redirect_stdout(SimpleNamespace(buffer=stream)), job:  # type: ignore[type-var]
        yield job, stream


def lines_of(pairs):
    """Return the lines that are printed for (row, result) pairs that finish in this order."""
    with printing(sorted((row for row, _ in pairs), key=lambda r: r.index)) as (job, stream):
        for _, result in pairs:
            job.take(result)
    return stream.getvalue().splitlines(keepends=True)


@given(order=st.permutations(range(50)))
@settings(max_examples=20)
def test_input_order_whatever_the_finish_order(order):
    pairs = [pair(i, error="bad" if i % 7 == 0 else None, id=f"x{i}") for i in range(50)]
    ours = [{name: vars(result)[name] for name in FIELDS} for _, result in pairs]
    expected = [{"prompt": f"p{i}", "id": f"x{i}", **fields} for i, fields in enumerate(ours)]
    with printing(row for row, _ in pairs) as (job, stream):
        for i in order:
            job.take(pairs[i][1])
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == expected
    assert list(lines[0]) == ["prompt", "id", *FIELDS]
    assert (job.done, job.failed) == (42, 8)


def test_lines_are_written_as_soon_as_it_is_their_turn():
    pairs = [pair(index) for index in range(4)]
    seen = []
    with printing(row for row, _ in pairs) as (job, stream):
        for index in (1, 0, 3, 2):
            job.take(pairs[index][1])
            seen.append(len(stream.getvalue().splitlines()))
    assert seen == [0, 2, 2, 4]


def test_our_fields_win():
    """Own fields of these names are kept under other names."""
    (written,) = lines_of([pair(0, error="line 1: no", index="theirs", token_ids=[7], kept={"a": [1]}, input_index=4)])
    line = json.loads(written)
    assert line["index"] == 0
    assert line["token_ids"] == [0]
    assert line["error"] == "line 1: no"
    assert line["kept"] == {"a": [1]}
    assert (line["input_index"], line["input_input_index"], line["input_token_ids"]) == ("theirs", 4, [7])


def test_logprobs_and_samples_only_if_there_are_any():
    row = Row(0, 1, {"prompt": "p"})
    entry = {"token_id": 4, "token": "x", "logprob": -0.25, "top_logprobs": []}
    sample = Completion("a", [4], "stop", [entry])
    plain, with_logprobs, with_samples = (
        json.loads(line_encoder("m", 0)(row, result))
        for result in (Result(0, "a"), Result(0, "a", logprobs=[entry]), Result(0, "a", samples=[sample, sample]))
    )
    assert list(plain) == ["prompt", *FIELDS]
    assert list(with_logprobs) == ["prompt", *FIELDS, "logprobs"]
    assert with_logprobs["logprobs"] == [entry]
    assert list(with_samples) == ["prompt", *FIELDS, "samples"]
    made = {"generated_text": "a", "token_ids": [4], "finish_reason": "stop", "logprobs": [entry]}
    assert with_samples["samples"] == [made, made]


def test_results_of_an_earlier_job_are_kept_under_other_names():
    """An output may be an input."""
    row = Row(0, 1, {"prompt": "p", "samples": [1], "logprobs": [{"token_id": 3}], "error": "old", "token_ids": [7]})
    line = json.loads(line_encoder("m", 0)(row, Result(0, "a")))
    assert not {"samples", "logprobs"} & set(line)
    assert (line["error"], line["token_ids"]) == (None, [])
    assert {f"input_{name}": value for name, value in row.fields.items() if name != "prompt"}.items() <= line.items()
    again = json.loads(line_encoder("m", 0)(Row(0, 1, line), Result(0, "b")))
    assert (again["input_generated_text"], again["input_error"], again["input_input_error"]) == ("a", None, "old")


def test_batch_lines_answer_batch_lines():
    fields = {"custom_id": "c1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    row, result = Row(0, 1, fields, request={"prompt": "p"}, custom_id="c1"), Result(0, "żó", [1], "stop", 3, 1)
    line = line_encoder("m", 77)(row, result)
    assert json.loads(line) == batch_line(row, result, "m", 77)
    assert line.endswith(b"\n")
    assert json.loads(line)["response"]["body"]["created"] == 77


def test_numbers_that_json_has_not_are_null():
    entry = {"token_id": 4, "token": "x", "logprob": float("-inf"), "top_logprobs": []}
    (line,) = lines_of([(Row(0, 1, {}), Result(0, "\ud800ż", samples=[Completion("a", [4], "stop", [entry])]))])
    assert json.loads(line, parse_constant=pytest.fail)["samples"][0]["logprobs"][0]["logprob"] is None
    assert json.loads(line)["generated_text"] == "\ud800ż"


def test_text_is_plain_utf8_and_half_surrogates_are_escaped():
    first, second = lines_of([pair(0, "zażółć 😀\n\u2028"), pair(1, "ok", note="\ud800")])
    assert "zażółć 😀" in first.decode("utf-8")
    assert json.loads(first)["generated_text"] == "zażółć 😀\n\u2028"
    assert json.loads(second.decode("utf-8"))["note"] == "\ud800"


def test_fields_that_are_no_json_cost_only_themselves():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for line in lines_of([pair(0, note=object()), pair(1, note=deep)]):
        value = json.loads(line)
        assert list(value) == FIELDS
        assert "left out" in value["error"]


def test_lost_and_doubled_rows_are_noticed():
    rows = [pair(i)[0] for i in range(3)]
    with pytest.raises(RuntimeError, match="row 0 of 3"), printing(rows) as (job, _):
        job.take(Result(1))
    with pytest.raises(RuntimeError, match="row 1 of 3"), printing(rows) as (job, _):
        job.take(Result(0))
    with printing(rows) as (job, _):
        for index in (0, 2):
            job.take(Result(index))
            with pytest.raises(RuntimeError, match="twice"):
                job.take(Result(index))
        job.take(Result(1))


def test_a_device_is_written_directly():
    with printing([pair(0)[0]], "/dev/null") as (job, stream):
        job.take(Result(0))
    assert stream.getvalue() == b""
    assert not os.path.isfile("/dev/null")
    assert journal_path("/dev/null") is journal_path(None) is None


# The output file.


def put(out, pairs):
    with whole_file(out) as file:
        for row, result in pairs:
            file.write(encode_row(row, result))


def test_an_output_appears_whole(tmp_path):
    out = tmp_path / "out.jsonl"
    pairs = [pair(i, id=i) for i in range(3)]
    seen = []

    def finished():
        for each in pairs:
            seen.append(sorted(os.listdir(tmp_path)))
            yield each

    put(out, finished())
    assert seen == [["out.jsonl.part"]] * 3
    assert out.read_bytes() == b"".join(lines_of(pairs))
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_an_exception_leaves_the_old_output_and_nothing_else(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with pytest.raises(ZeroDivisionError):
        put(out, (pair(i) if i < 2 else 1 / 0 for i in range(3)))
    assert out.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_an_empty_job_makes_an_empty_file(tmp_path):
    put(tmp_path / "out.jsonl", [])
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_link_stays_what_it_is(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "real" / "data.jsonl")
    check_output(link)
    put(link, [pair(0)])
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "data.jsonl").read_text())["index"] == 0
    assert journal_path(link) == tmp_path / "real" / "data.jsonl.journal"
    assert part_path(link) == tmp_path / "real" / "data.jsonl.part"


def test_check_output(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(source)
    check_output(None, source)
    check_output(tmp_path / "out.jsonl", source)
    for bad, word in ((tmp_path, "directory"), (tmp_path / "no" / "out.jsonl", "does not exist"),
                      (source, "input"), (tmp_path / "link.jsonl", "input"),
                      (f"{tmp_path}/../{tmp_path.name}/in.jsonl", "input")):  # fmt: skip
        with pytest.raises(InvalidInput, match=word):
            check_output(bad, source)
    assert source.read_text() == "{}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInput, match="not writable"):
        check_output(tmp_path / "out.jsonl")
