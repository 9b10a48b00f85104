"""JSON over several lines, judged by json.loads of the whole file."""

import io
import json
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.errors import InvalidInput
from flexengine.job import read_json
from flexengine.job.inputs import InputRows
from flexengine.job.read_json import elements, is_document
from tests.helpers.inputs import rows_of, written

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=8), st.sampled_from([None, 1, "\t"]), st.booleans(), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_elements_of_an_array(values, indent, ascii_only, step):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_json, "_STEP", step)
        found = list(elements(io.BytesIO(b"\xef\xbb\xbf \n" + data), 10**6, Path("in.json")))
    assert [json.loads(raw.decode("utf-8", "surrogatepass")) for _, raw in found] == values
    assert [line for line, _ in found] == sorted(line for line, _ in found)


@given(st.lists(VALUES, min_size=1, max_size=8), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_documents_one_after_the_other(values, step):
    whole = [{"value": value} for value in values]
    data = "\n".join(json.dumps(value, indent=2) for value in whole).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_json, "_STEP", step)
        assert [json.loads(raw) for _, raw in elements(io.BytesIO(data), 10**6, Path("in.json"))] == whole


@pytest.mark.parametrize("name", ["in.json", "in.jsonl", "in.ndjson"])
@pytest.mark.parametrize("indent", [None, 2])
def test_rows_of_an_array(tmp_path, name, indent):
    data = [{"prompt": "a", "id": 1}, {"prompt": "b\n", "n": 2}, {"messages": [{"role": "user", "content": "ü"}]}]
    rows = rows_of(tmp_path, json.dumps(data, indent=indent, ensure_ascii=False).encode(), name)
    assert [row.fields for row in rows] == data
    assert [row.index for row in rows] == [0, 1, 2]
    assert [row.line for row in rows] == ([1, 1, 1] if indent is None else [2, 6, 10])
    assert all(row.error is None for row in rows)


def test_a_bad_element_is_one_error_row(tmp_path):
    text = '[{"prompt": "a"},\n 17,\n {"x": 1e999},\n {"s": ' + "9" * 5000
    text += '},\n "text", {"p": "\x01"}, {"prompt": "b"}]'
    rows = rows_of(tmp_path, text.encode(), "in.json")
    assert rows[2].fields == {"x": None}  # as Infinity
    reasons = {1: "holds a number", 3: "over 4,300 digits", 4: "holds a string", 5: "Invalid control character"}
    assert [row.error is None for row in rows] == [number not in reasons for number in range(7)]
    for number, reason in reasons.items():
        assert reason in rows[number].error
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 5, 5]
    (row,) = rows_of(tmp_path, b'[{"prompt": "\xff"}]', "in.json")
    assert row.error == "line 1: invalid UTF-8 at byte 12; save the file as UTF-8"


def test_batch_lines_in_an_array(tmp_path):
    lines = [{"custom_id": c, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}} for c in "xyx"]
    rows = InputRows(written(tmp_path, json.dumps(lines, indent=1).encode(), "in.json"))
    assert [row.custom_id for row in rows] == ["x", "y", "x"]
    with pytest.raises(InvalidInput, match=r"'x' \(lines 2 and 18\)"):
        rows.scan()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"prompt": "a"},\n{"prompt": "b"', "line 2: invalid JSON: Expecting ',' delimiter"),
        ('[{"prompt": "a"},\n{"prompt": "b', "line 2: invalid JSON: Unterminated string"),
        ('[{"prompt": "a"}\n', "line 2: the array has no end, so the file is cut short"),
        ('[{"prompt": "a"}\n{"prompt": "b"}]', "line 2: a comma is missing between two rows"),
        ('[{"prompt": "a"},\n]', "line 2: invalid JSON: Expecting value"),
        ('[{"prompt": "a"}]\n\n{"prompt": "b"}', "line 3: text follows the array"),
        ('[{"prompt": "a",\n\n "x": }]', "line 3: invalid JSON: Expecting value"),
        ('[{"prompt": ' + "[" * 100_000, "line 1: invalid JSON: nested too deeply"),
        ('{\n "prompt": "a"\n}\n{\n "prompt" "b"}', "line 5: invalid JSON: Expecting ':' delimiter"),
    ],
)
def test_a_file_that_cannot_be_read_on_is_refused_with_its_line(tmp_path, text, words):
    path = written(tmp_path, text.encode(), "in.json")
    with pytest.raises(InvalidInput, match="repair the file, or write one JSON object per line") as refused:
        list(InputRows(path))
    assert str(refused.value).startswith(f"input {path}, {words}")


def test_an_element_has_the_length_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    fits = '[{"prompt": "%s"}]' % ("x" * 986)
    assert len(rows_of(tmp_path, fits.encode(), "in.json")) == 1
    for text in (fits.replace("xx", "xxx", 1), '[{"prompt": "' + "x" * 3_000_000):
        with pytest.raises(InvalidInput, match=r"line 1: the row is longer than 1\.00 kB"):
            rows_of(tmp_path, text.encode(), "in.json")


def test_memory_does_not_grow_with_the_array(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "in.json"
    path.write_text(json.dumps([{"prompt": f"{rng.getrandbits(10_000):x}"} for _ in range(4000)], indent=1))
    size = path.stat().st_size
    tracemalloc.start()
    assert sum(1 for _ in InputRows(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2 > 4_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[{", True), (" \n[\n {", True), ("[]", True), ("[ ]\n", True), ("[\n", True), ('["a",\n', False),
     ("[1, 2]\n", False), ('{"prompt": "a"}\n{"prompt": "b"}', False), ('{\n  "prompt": 1', True),
     ('{\n{"prompt": "a"}', False),
     ("{}", False), ("", False), ("[]\n[]", False), ('{"a": 1,\n"b": 2}', False)],
)  # fmt: skip
def test_what_is_json_over_several_lines(text, expected):
    assert is_document(io.BytesIO(text.encode())) == expected


@pytest.mark.parametrize("orient", ["columns", "index", "split", "tight", "table", "values", "records", "lines"])
def test_a_table_as_pandas_writes_it(tmp_path, orient, monkeypatch):
    """Is refused, if it has no rows; also if it is too large to be read."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "id": [1, 2]})
    options = {"orient": "records", "lines": True} if orient == "lines" else {"orient": orient}
    text = json.dumps(frame.to_dict(orient=orient)) if orient == "tight" else frame.to_json(**options)
    if orient in ("records", "lines"):
        assert [row.fields["prompt"] for row in rows_of(tmp_path, text.encode(), "in.json")] == ["a", "b"]
        return
    paths = [written(tmp_path, text.encode(), name) for name in ("in.json", "in.jsonl")]
    if orient != "values":
        paths.append(written(tmp_path, json.dumps(json.loads(text), indent=1).encode(), "indented.json"))
    for path in paths:
        with pytest.raises(InvalidInput) as refused:
            InputRows(path)
        assert str(refused.value) == FRAME.format(path)
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 20)
    with pytest.raises(InvalidInput, match="whole table"):
        InputRows(paths[0])


FRAME = (
    "input {} holds a whole table, as df.to_json() of pandas writes it; write a row per line instead:"
    ' df.to_json("rows.jsonl", orient="records", lines=True)'
)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"prompt": {"x": "a"}, "id": {"x": 1}}', True),  # an index of names
        ('{"prompt": {}, "id": {}}', True),
        ('{"0": "a", "1": "b"}', True),  # a Series
        ('{"name": "prompt", "index": [0, 1], "data": ["a", "b"]}', True),
        ('{"meta": {"0": 1}, "prompt": "a"}', False),
        ('{"meta": {"0": 1}, "messages": [{"role": "user", "content": "a"}]}', False),
        ('{"prompt": {"0": "a"}, "id": 1}', False),
        ('{"prompt": {"0": "a"}}\n{"prompt": "b"}', False),
        ('{"meta": {"a": 1}, "prompt": "b', False),
        ('{"data": [1], "prompt": "b"}', False),
        ('{"data": [1], "index": [2], "prompt_token_ids": [5]}', False),
        ('{"data": [1], "schema": {}, "messages": [{"role": "user", "content": "a"}]}', False),
        ('{"data": [1], "index": [2], "text": "a"}', False),
        ('{"context": "a", "choices": ["b", "c"], "data": [1], "schema": {}}', False),
        ('{"messages": {"role": "user", "content": "a"}}', False),
        ('{"prompt": {"0": "a", "1": "b"}}', True),
        ('{"index": 5, "prompt": "b', False),
        ("[]", False),
        ("{}", False),
    ],
)
def test_which_only_rows_are_tables(tmp_path, text, refused):
    if refused:
        with pytest.raises(InvalidInput, match="holds a whole table"):
            rows_of(tmp_path, text.encode(), "in.json")
    else:
        rows_of(tmp_path, text.encode(), "in.json")


def test_a_column_named_0_is_a_prompt(tmp_path):
    (row,) = rows_of(tmp_path, b'{"0": "a"}', "in.json", prompt_column="0")
    assert row.request == {"prompt": "a"}


def test_an_empty_array_has_no_rows(tmp_path):
    assert rows_of(tmp_path, b"[]\n", "in.json") == rows_of(tmp_path, b"[\n]", "in.json") == []
