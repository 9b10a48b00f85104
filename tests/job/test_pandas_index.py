"""Indexes of pandas in Parquet and Arrow files: each value of an index that holds data is in the rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.apps.tables import Added, FileTable, read_table, write_table
from flexengine.apps.wrangle.pairs import common_columns
from flexengine.apps.wrangle.questions import questions_of
from flexengine.apps.wrangle.spec import Spec
from flexengine.config import Result
from flexengine.errors import InvalidInput
from flexengine.job.arrow_rows import TableRow
from flexengine.job.inputs import InputRows
from flexengine.job.pandas_index import RangeColumn, is_nameless, range_column
from flexengine.job.python_arguments import refuse_table
from flexengine.job.results import encode_row
from flexengine.job.table_process import replies
from tests.helpers.inputs import arrow_file

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
TEXTS = [f"text {i}" for i in range(5)]
NAMELESS, SECOND = "__index_level_0__", "__index_level_1__"
DAYS = [f"2024-01-0{i}T00:00:00" for i in range(1, 6)]
SUFFIXES = (".parquet", ".arrow", ".stream")


def frame(index: Any = None, **columns: Any) -> Any:
    return pd.DataFrame({"prompt": TEXTS, **columns}, index=index)


def numbers(start: int, step: int = 1, name: Any = None) -> Any:
    return pd.RangeIndex(start, start + step * len(TEXTS), step, name=name)


def stored(folder: Path, table: Any, suffix: str = ".parquet") -> Path:
    """Write a DataFrame or a pyarrow.Table, in several row groups or batches."""
    made, path = table if isinstance(table, pa.Table) else pa.Table.from_pandas(table), folder / f"in{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(made, path, row_group_size=2)
    else:
        writer = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, writer(sink, made.schema) as file:
            file.write_table(made, max_chunksize=2)
    return path


def found(path: Path) -> RangeColumn | None:
    """Return the `RangeColumn` that the reading process sends for a file; None if it sends none."""
    form = "parquet" if path.suffix == ".parquet" else "arrow"
    index: RangeColumn | None
    kind, (names, index) = next(replies(str(path), form, None, 0, 0, 256, 1))
    assert kind == "names"
    assert "prompt" in names
    return index


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_range_is_a_column_unless_it_is_the_default(tmp_path: Path, suffix: str) -> None:
    for table, expected in {
        "named": (frame(numbers(0, name="review_id")), ("review_id", 0, 1)),
        "later": (frame(numbers(7)), (NAMELESS, 7, 1)),
        "steps": (frame(numbers(1, 3)), (NAMELESS, 1, 3)),
        "backwards": (frame(numbers(4, -1)), (NAMELESS, 4, -1)),
        "filtered": (frame().loc[[1, 3]], (NAMELESS, 1, 2)),
        "sliced": (frame()[2:], (NAMELESS, 2, 1)),
        "empty name": (frame(numbers(0, name="")), ("", 0, 1)),
        "number": (frame(numbers(0, name=5)), ("5", 0, 1)),
        "of results": (frame(numbers(0, name="error")), ("error", 0, 1)),
        "of a column": (frame(numbers(0, name="prompt")), (NAMELESS, 0, 1)),
        "taken": (frame(numbers(3), **{NAMELESS: 1}), (f"_{NAMELESS}", 3, 1)),
        "long": (frame(numbers(0, name="x" * 5000)), ("x" * 5000, 0, 1)),
        "one row": (frame()[3:4], (NAMELESS, 3, 1)),
        "default": (frame(), None),
        "empty": (frame()[:0], None),
        "first": (frame()[:2], None),
    }.values():
        assert found(stored(tmp_path, table, suffix)) == expected


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_indexes_that_are_columns_of_the_file(tmp_path: Path, suffix: str) -> None:
    indexes: dict[str, tuple[Any, dict[str, Any]]] = {
        "texts": (pd.Index(list("abcde"), name="key"), {"key": list("abcde")}),
        "nameless": (pd.Index([1, 1, 5, 6, 8]), {NAMELESS: [1, 1, 5, 6, 8]}),
        "dates": (pd.date_range("2024-01-01", periods=5, name="day"), {"day": DAYS}),
        "gaps": (pd.Index([1.5, None, 2, 3, 4], name="x"), {"x": [1.5, None, 2.0, 3.0, 4.0]}),
        "levels": (pd.MultiIndex.from_product([[1], TEXTS], names=["a", None]), {"a": [1] * 5, SECOND: TEXTS}),
        "categories": (pd.CategoricalIndex(list("ababa"), name="c"), {"c": list("ababa")}),
    }
    for index, columns in indexes.values():
        path = stored(tmp_path, frame(index), suffix)
        assert found(path) is None
        sent = replies(str(path), "parquet" if suffix == ".parquet" else "arrow", None, 0, 0, 256, 1)
        rows = [row.fields for kind, value in sent if kind == "rows" for row in value]
        assert {name: [row[name] for row in rows] for name in rows[0]} == {"prompt": TEXTS, **columns}


def test_a_range_of_another_length_is_none_as_in_pandas(tmp_path: Path) -> None:
    """pyarrow keeps the metadata when it filters or joins tables."""
    made = pa.Table.from_pandas(frame(numbers(5, name="review_id")))
    for table in (made.slice(1, 2), pa.concat_tables([made, made])):
        for suffix in SUFFIXES:
            path = stored(tmp_path, table, suffix)
            assert found(path) is None
        assert table.to_pandas().index.name is None


def metadata(**given: Any) -> bytes:
    index = {"kind": "range", "name": "r", "start": 0, "stop": 5, "step": 1} | given
    return json.dumps({"index_columns": [index]}).encode()


@pytest.mark.parametrize("value", [
    None, b"", b"{", b"\xff\xfe", b"null", b"[]", b"5", b"[" * 100_000, b'{"index_columns": null}', b"9" * 5000,
    b'{"index_columns": []}', b'{"index_columns": [null]}', b'{"index_columns": ["prompt"]}', b'{"index_columns": 5}',
    b'{"index_columns": [{}]}', b'{"index_columns": [{"kind": "range"}]}', metadata(kind="other"), metadata(kind=[1]),
    metadata(start=None), metadata(start="0"), metadata(start=0.0), metadata(stop=1e400), metadata(stop=[5]),
    metadata(step=0), metadata(start=10**30, stop=10**30 + 5), metadata(start=-(2**63), stop=-(2**63) + 5),
    metadata(stop=4), metadata(stop=-5), metadata(name=None), b'{"index_columns": [{"a": 1}, {"b": 2}]}',
])  # fmt: skip
def test_damaged_metadata_are_no_index(value: bytes | None) -> None:
    schema = SimpleNamespace(metadata=None if value is None else {b"pandas": value}, names=["prompt"])
    assert range_column(schema, lambda: 5) is None


def test_odd_names_and_faults_while_counting() -> None:
    for name, expected in ((["a", 1], "['a', 1]"), (True, "True"), ({"a": 1}, "{'a': 1}"), ("prompt", NAMELESS)):
        schema = SimpleNamespace(metadata={b"pandas": metadata(name=name)}, names=["prompt"])
        assert range_column(schema, lambda: 5) == (expected, 0, 1)

    def fails() -> int:
        raise MemoryError

    assert range_column(schema, fails) is None
    assert [is_nameless(name) for name in (NAMELESS, "___index_level_12__", "index")] == [True, True, False]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_the_output_can_be_joined_with_the_frame(tmp_path: Path, suffix: str) -> None:
    """As the command does it: another process reads the file, and results are lines of JSON."""
    table = frame(numbers(10, 5, name="index"), label=range(5))
    with InputRows(stored(tmp_path, table, suffix)) as rows:
        lines = [json.loads(encode_row(row, Result(row.index))) for row in rows]
        said = list(rows.scan().notes)
    assert said == [
        "the pandas index, which is no column of the file, is kept as column 'index'",
        "the output has the input's index as input_index, beside its own fields",
    ]
    output = pd.DataFrame(lines).set_index("input_index")
    joined = table.join(output[["prompt", "index"]].add_suffix("_out"))
    assert list(output.index) == list(table.index) == [10, 15, 20, 25, 30]
    assert list(joined["prompt_out"]) == TEXTS
    assert list(joined["index_out"]) == list(range(5))


def test_damaged_metadata_end_no_job(tmp_path: Path) -> None:
    for value in (b"{", metadata(start="x"), b"[" * 100_000):
        made = pa.table({"prompt": TEXTS}).replace_schema_metadata({b"pandas": value, b"\xff": b"\xff"})
        with InputRows(arrow_file(tmp_path / "in.parquet", made)) as rows:
            assert [row.fields for row in rows] == [{"prompt": text} for text in TEXTS]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_that_are_written_again_have_the_index_as_column(tmp_path: Path, suffix: str) -> None:
    table = read_table(str(stored(tmp_path, frame(numbers(3, name="id")), suffix)), limit=2)
    assert table.columns == ("prompt", "id")
    assert table.as_arrow().to_pydict() == {"prompt": TEXTS[:2], "id": [3, 4]}
    write_table(out := str(tmp_path / f"out{suffix}"), table, [Added("x", ["p", "q"])])
    again = pd.read_parquet(out) if suffix == ".parquet" else pa.ipc.open_file(out).read_pandas()
    assert again.to_dict("list") == {"prompt": TEXTS[:2], "id": [3, 4], "x": ["p", "q"]}
    assert list(again.index) == [0, 1]


def test_the_remedy_for_a_frame_keeps_its_index(tmp_path: Path) -> None:
    for table, kept in (
        (frame(), False), (frame()[:2], False), (frame(numbers(0, name="id")), True), (frame(numbers(2)), True),
        (frame(pd.Index(list("abcde"))), True), (frame().loc[[4, 0]], True), (frame()[:0], False),
        (frame(pd.MultiIndex.from_product([[1], TEXTS])), True), (pa.table({"a": [1]}), None),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as error:
            refuse_table("input", table, file=True)
        if kept is not None:
            assert ("df.to_parquet('rows.parquet')" in str(error.value)) is kept
            assert ('df.to_json("rows.jsonl", orient="records", lines=True)' in str(error.value)) is not kept


def test_prompts_of_tables_show_no_index_without_a_name() -> None:
    columns = [NAMELESS, "review_id", "city", SECOND]
    assert common_columns(columns, columns, "one and two") == ["review_id", "city"]
    table = FileTable("t.parquet", "parquet", tuple(columns), (TableRow(1, dict.fromkeys(columns, "x")),))
    spec = Spec("impute", ("t.parquet",), column=("city",), evaluate=True)
    assert questions_of(table, spec).questions[0].text == "review_id: x. What is the city?"
