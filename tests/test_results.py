"""Output files: order, fields, atomic appearance."""

import io
import json
import os
import random
from contextlib import ExitStack

import pytest

from flexengine.config import Result
from flexengine.errors import FlexError, InvalidInput
from flexengine.job.prompts import Row
from flexengine.job.results import ResultWriter, check_output

FIELDS = ["index", "generated_text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error"]


def pair(index: int, text: str | None = "ok", /, error: str | None = None, **fields):
    row = Row(index, index + 1, {"prompt": f"p{index}", **fields})
    return row, Result(index, text, [index], None if error else "stop", 2, 1, error)


@pytest.mark.parametrize("seed", range(5))
def test_input_order_whatever_the_finish_order(tmp_path, seed):
    out = tmp_path / "out.jsonl"
    pairs = [pair(i, error="bad" if i % 7 == 0 else None, id=f"x{i}") for i in range(50)]
    expected = [{"prompt": f"p{i}", "id": f"x{i}", **vars(result)} for i, (_, result) in enumerate(pairs)]
    random.Random(seed).shuffle(pairs)
    with ResultWriter(out) as writer:
        for row, result in pairs:
            writer.write(row, result)
        assert not out.exists()
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert lines == expected
    assert list(lines[0]) == ["prompt", "id", *FIELDS]
    assert (writer.done, writer.failed) == (42, 8)
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_lines_are_written_as_soon_as_it_is_their_turn(tmp_path):
    part = tmp_path / "out.jsonl.part"
    seen = []
    with ResultWriter(tmp_path / "out.jsonl") as writer:
        for index in (1, 0, 3, 2):
            writer.write(*pair(index))
            seen.append(len(part.read_bytes().splitlines()))
    assert seen == [0, 2, 2, 4]


def test_our_fields_win():
    stream = io.BytesIO()
    with ResultWriter(None, stream) as writer:
        writer.write(*pair(0, error="line 1: no", index="theirs", token_ids="theirs", kept={"a": [1]}))
    line = json.loads(stream.getvalue())
    assert line["index"] == 0
    assert line["token_ids"] == [0]
    assert line["error"] == "line 1: no"
    assert line["kept"] == {"a": [1]}


def test_text_is_plain_utf8_and_half_surrogates_are_escaped():
    stream = io.BytesIO()
    with ResultWriter(None, stream) as writer:
        writer.write(*pair(0, "zażółć 😀\n\u2028"))
        writer.write(*pair(1, "ok", note="\ud800"))
    first, second = stream.getvalue().split(b"\n")[:2]
    assert "zażółć 😀" in first.decode("utf-8")
    assert json.loads(first)["generated_text"] == "zażółć 😀\n\u2028"
    assert json.loads(second.decode("utf-8"))["note"] == "\ud800"


def test_fields_that_are_no_json_cost_only_themselves():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    stream = io.BytesIO()
    with ResultWriter(None, stream) as writer:
        writer.write(*pair(0, note=object()))
        writer.write(*pair(1, note=deep))
    for line in stream.getvalue().splitlines():
        value = json.loads(line)
        assert list(value) == FIELDS
        assert "left out" in value["error"]
    assert (writer.done, writer.failed) == (0, 2)


def test_an_exception_leaves_the_old_output_and_the_part(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyError))
        writer = stack.enter_context(ResultWriter(out))
        writer.write(*pair(0))
        writer.write(*pair(2))
        raise KeyError
    assert out.read_text() == "old"
    assert [json.loads(line)["index"] for line in (tmp_path / "out.jsonl.part").read_text().splitlines()] == [0]


def test_lost_and_doubled_rows_are_noticed(tmp_path):
    with pytest.raises(FlexError, match="row 0"), ResultWriter(tmp_path / "out.jsonl") as writer:
        writer.write(*pair(1))
    assert not (tmp_path / "out.jsonl").exists()
    with ResultWriter(None, io.BytesIO()) as writer:
        for index in (0, 2):
            writer.write(*pair(index))
            with pytest.raises(FlexError, match="twice"):
                writer.write(*pair(index))
        writer.write(*pair(1))


def test_an_empty_job_makes_an_empty_file(tmp_path):
    with ResultWriter(tmp_path / "out.jsonl"):
        pass
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_symlinks_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "real" / "data.jsonl")
    for target in (link, "/dev/null"):
        check_output(target)
        with ResultWriter(target) as writer:
            writer.write(*pair(0))
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "data.jsonl").read_text())["index"] == 0
    assert not os.path.isfile("/dev/null")


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
