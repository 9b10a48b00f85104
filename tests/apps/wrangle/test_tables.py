"""Tables: read from all formats, and written with further columns."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexengine.apps.tables import (
    Added,
    cell_text,
    check_output,
    holds_table,
    read_table,
    serialised,
    write_table,
)
from flexengine.errors import InvalidInput
from tests.apps.wrangle.helpers import written
from tests.helpers.inputs import arrow_file

TEXT = 'name,city\n"a, b",x\nshort\n"c\nd",\n'
ADDED = [Added("p", ["Yes", None, 'q"']), Added("c", [-0.5, None, -1e-7], number=True)]


def test_text(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "t.csv", TEXT))
    assert table.columns == ("name", "city")
    assert [r.fields for r in table.records] == [
        {"name": "a, b", "city": "x"},
        {"name": "short"},
        {"name": "c\nd", "city": ""},
    ]
    assert [r.line for r in table.records] == [2, 3, 4]
    assert table.records[1].fault.startswith("has 1 cells, but the header has 2; ")
    assert table.place(2).endswith("t.csv, line 4")
    assert len(read_table(str(tmp_path / "t.csv"), limit=1).records) == 1


@pytest.mark.parametrize(("name", "delimiter"), [("o.csv", ","), ("o.tsv", "\t")])
def test_text_is_written(tmp_path: Path, name: str, delimiter: str) -> None:
    text = TEXT if delimiter == "," else 'name\tcity\na, b\tx\nshort\n"c\nd"\t\n'
    table = read_table(written(tmp_path, f"t.{name[2:]}", text))
    write_table(str(tmp_path / name), table, ADDED)
    with (tmp_path / name).open(newline="") as file:
        rows = list(csv.reader(file, delimiter=delimiter))
    assert rows == [["name", "city", "p", "c"], ["a, b", "x", "Yes", "-0.5"], ["short", "", "", ""],
                    ["c\nd", "", 'q"', "-1e-07"]]  # fmt: skip
    assert not (tmp_path / f"{name}.part").exists()


def test_json_lines(tmp_path: Path) -> None:
    write_table(str(tmp_path / "o.jsonl"), read_table(written(tmp_path, "t.csv", TEXT)), ADDED)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert lines[0] == {"name": "a, b", "city": "x", "p": "Yes", "c": -0.5}
    assert lines[1] == {"name": "short", "p": None, "c": None}


def test_compressed(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(TEXT.encode()))
    table = read_table(str(tmp_path / "t.csv.gz"))
    assert len(table.records) == 3
    check_output("o.csv", table.form)


def test_cells_of_rows_with_too_many_are_written(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "t.csv", "name,city,,\nBob,Oslo,call back,\nCy,,see note,urgent\nEd,Rom,,\n"))
    unnamed = "has a cell in column 3, which has no name"
    assert [record.fault for record in table.records] == [unnamed, unnamed, None]
    write_table(str(tmp_path / "o.csv"), table, [Added("p", [None, None, "Yes"])])
    with (tmp_path / "o.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["name", "city", "further_cells", "p"],
            ["Bob", "Oslo", '["call back", ""]', ""],
            ["Cy", "", '["see note", "urgent"]', ""],
            ["Ed", "Rom", "", "Yes"],
        ]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_arrow(tmp_path: Path, suffix: str) -> None:
    """All columns keep their types, also those that JSON has no values for."""
    made = pa.table({"n": pa.array([1, None, 3], pa.int16()), "b": [b"\xff", b"", None], "t": ["x", "y", None]})
    arrow_file(tmp_path / f"t.{suffix}", made)
    table = read_table(str(tmp_path / f"t.{suffix}"))
    assert [r.fields["n"] for r in table.records] == [1, None, 3]
    write_table(out := str(tmp_path / f"o.{suffix}"), table, ADDED)
    found = pq.read_table(out) if suffix == "parquet" else pa.ipc.open_file(out).read_all()
    expected = made.append_column("p", pa.array(ADDED[0].values)).append_column("c", pa.array(ADDED[1].values))
    assert found.equals(expected)
    limited = read_table(str(tmp_path / f"t.{suffix}"), limit=2)
    write_table(out, limited, [Added("c", [None, None], number=True)])
    found = pq.read_table(out) if suffix == "parquet" else pa.ipc.open_file(out).read_all()
    assert found.num_rows == 2
    assert found.schema.field("c").type == pa.float64()


def test_arrow_stream(tmp_path: Path) -> None:
    made = pa.table({"t": ["x", "y"]})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)
    assert read_table(str(tmp_path / "t.arrow")).as_arrow().equals(made)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow"])
def test_an_edited_output_is_noticed(tmp_path: Path, suffix: str) -> None:
    arrow_file(tmp_path / "t.arrow", pa.table({"n": [1, 2, 3]}))
    texts = suffix in ("csv", "jsonl")
    table = read_table(written(tmp_path, "t.csv", TEXT) if texts else str(tmp_path / "t.arrow"))
    write_table(out := str(tmp_path / f"o.{suffix}"), table, ADDED)
    assert holds_table(out, table, ADDED)
    Path(out).write_bytes(Path(out).read_bytes() + b"\n")
    assert not holds_table(out, table, ADDED)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("t.json", "{}", "table .*t.json has suffix '.json'; accepted are .csv, .tsv, .parquet"),
    ("t.parquet.gz", "x", "has suffix '.gz'"), ("t.csv", "", "has no header line"), ("t.csv", "a,b\n", "has no rows"),
    ("t.csv", "a,a\n1,2\n", "has several columns named 'a'; rename them"), ("t.csv", "a,\n1,2\n", "without a name"),
    ("t.parquet", "no", "cannot be read as .parquet"), ("missing/t.csv", None, "cannot be read"),
])  # fmt: skip
def test_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        written(tmp_path, name, text)
    with pytest.raises(InvalidInput, match=message):
        read_table(str(tmp_path / name))


@pytest.mark.parametrize(("name", "form"), [
    ("o.parquet", "csv"), ("o.csv", "arrow"), ("o", "csv"), ("o.csv.gz", "csv"),
])  # fmt: skip
def test_output_of_another_format(name: str, form: str) -> None:
    with pytest.raises(InvalidInput, match="the output has the format of the table"):
        check_output(name, form)


def test_doubled_columns_of_a_parquet_file(tmp_path: Path) -> None:
    arrow_file(tmp_path / "t.parquet", pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["x", "x"]))
    with pytest.raises(InvalidInput, match="has several columns named 'x'; rename them"):
        read_table(str(tmp_path / "t.parquet"))


def test_columns_with_another_separator(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "t.csv", "name;city\na;b\n"))
    with pytest.raises(InvalidInput, match="its columns are name;city: they seem to be separated by ';'"):
        table.check_has(["city"], "--column")


@pytest.mark.parametrize(("value", "text"), [
    ("a", "a"), ("", None), ("  ", None), (None, None), (float("nan"), None), (0, "0"), (1.5, "1.5"), (True, "true"),
    ("two\r\n lines", "two lines"), (["a", 1], '["a", 1]'), (" a ", " a "),
])  # fmt: skip
def test_cell_text(value: object, text: str | None) -> None:
    assert cell_text(value) == text


def test_serialised() -> None:
    cells = {"name": "arts deli", "phone": None, "stars": 4, "left out": "x"}
    assert serialised(cells, ["stars", "name", "phone"], "nan") == "stars: 4. name: arts deli. phone: nan"
    assert serialised(cells, ["phone"], "") == "phone: "
    assert serialised({"a_x": "1"}, ["x"], "nan", "a_") == "x: 1"
