"""The character between cells: as a first line states it, and what is said about a table that seems to have another."""

from pathlib import Path

import pytest

from flexengine.apps.evaluate import instances
from flexengine.apps.tables import Added, read_table, write_table
from flexengine.errors import InvalidInput
from flexengine.job.delimiters import stated_delimiter
from flexengine.job.inputs import InputRows
from tests.helpers.inputs import rows_of, written

BOM = "\ufeff"
GERMAN = 'Nr;Größe;Bewertung\r\n1;25,3;"schön; ja"\r\n'


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\nid;prompt\n1;a\n",
        '"sep=;"\r\nid;prompt\r\n1;a\r\n',
        "SEP=;\r\nid;prompt\r\n1;a\r\n",
        f"{BOM}sep=;\r\nid;prompt\r\n1;a\r\n",
        f"sep=;\n{BOM}id;prompt\n1;a\n",
        f'{BOM}"sep=;"\n{BOM}"id";"prompt"\n1;a\n',
        "sep=;;\nid;prompt\n1;a\n",
        '"sep=;";\nid;prompt\n1;a\n',
        "sep=\t\nid\tprompt\n1\ta\n",
        "sep=\\t\nid\tprompt\n1\ta\n",
        "sep=|\nid|prompt\n1|a\n",
        "sep=§\nid§prompt\n1§a\n",
        "sep=,\nid,prompt\n1,a\n",
    ],
)
def test_a_first_line_states_the_delimiter(tmp_path: Path, text: str) -> None:
    for name in ("in.csv", "in.tsv"):
        (row,) = rows_of(tmp_path, text.encode(), name)
        assert (row.fields, row.line, row.error) == ({"id": "1", "prompt": "a"}, 3, None)
        assert read_table(str(tmp_path / name)).columns == ("id", "prompt")


def test_what_a_first_line_states_counts_more_than_the_option(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flexengine")
    for delimiter, told in ((None, 0), (";", 0), (",", 1)):
        caplog.clear()
        with InputRows(written(tmp_path, b"sep=;\nid;prompt\n1;a\n", "in.csv"), delimiter=delimiter) as rows:
            assert [row.prompt for row in rows] == ["a"]
            assert rows.settings["delimiter"] == ";"
        assert caplog.text.count("states ';' in its first line; ',' is not used for it") == told


def test_a_second_such_line_is_the_header(tmp_path: Path) -> None:
    assert read_table(str(written(tmp_path, b"sep=;\nsep=,\n1\n", "in.csv"))).columns == ("sep=,",)


def test_an_output_states_what_its_table_stated(tmp_path: Path) -> None:
    path, out = written(tmp_path, b"sep=;\nid;price\n1;2,5\n", "in.csv"), tmp_path / "out.csv"
    write_table(str(out), read_table(str(path)), [Added("new", ["x"])])
    assert out.read_text() == "sep=;\nid;price;new\n1;2,5;x\n"
    assert read_table(str(out)).columns == ("id", "price", "new")
    plain = written(tmp_path, b"id;price\n1;2,5\n", "plain.csv")
    write_table(str(out), read_table(str(plain), delimiter=";"), [])
    assert out.read_text() == "id;price\n1;2,5\n"


@pytest.mark.parametrize(
    "line", [b"sep=", b"sep=x\n", b"sep=_", b"separator=;", b"sep=;prompt", b"prompt", b"sep=\xff"]
)
def test_lines_that_state_nothing(line: bytes) -> None:
    assert stated_delimiter(line) is None


DOORS = {
    "run": "give --delimiter {0} (delimiter={0} in Python)",
    "wrangle": "give --delimiter {0}, or begin the file with the line sep={1}",
    "evaluate": "give data.delimiter: {0}, or begin the file with the line sep={1}",
}


def told(door: str, path: Path, delimiter: str | None) -> str:
    """Return what a command says about the columns of a table, or why it refuses the table."""
    try:
        if door == "run":
            InputRows(path, delimiter=delimiter)
        table = read_table(str(path), delimiter=delimiter) if door == "wrangle" else None
        return (table or instances.read_table(path, delimiter)).known_columns()
    except InvalidInput as error:
        return str(error)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "data", "delimiter", "mark"),
    [
        ("in.tsv", b"id,text\n1,a\n", None, ","),
        ("in.csv", b"id,text\n1,a\n", ";", ","),
        ("in.csv", b"id;text\n1;a\n", None, ";"),
        ("in.csv", b"id|text\n1|a\n", None, "|"),
        ("in.csv", b"id\ttext\n1\ta\n", None, "\\t"),
        ("in.csv", b"Preis, EUR;id;text\n1;2;a\n", None, ";"),
        ("in.csv", b'"id";"text"\n1;a\n', None, ";"),
        ("in.tsv", b'"id","text"\n1,a\n', None, ","),
        ("in.csv", GERMAN.encode("cp1252"), None, ";"),
    ],
)
def test_the_remedy_is_one_that_the_command_has(
    tmp_path: Path, door: str, name: str, data: bytes, delimiter: str | None, mark: str
) -> None:
    text = told(door, written(tmp_path, data, name), delimiter)
    assert "seem to be separated by " + {"\\t": "tabs"}.get(mark, f"'{mark}'") in text
    assert text.endswith(DOORS[door].format(f"'{mark}'", mark))
    repaired = told(door, tmp_path / name, mark)
    assert "seem to be" not in repaired
    assert ("iconv" in repaired) == (b"\xf6" in data)


@pytest.mark.parametrize("door", DOORS)
def test_tables_of_one_column_and_other_formats(tmp_path: Path, door: str) -> None:
    for name in ("in.csv", "in.tsv"):
        assert "seem" not in told(door, written(tmp_path, b"text\na; b\n", name), None)
        assert [row.prompt for row in rows_of(tmp_path, b"prompt\nc\n", name)] == ["c"]
    form = told(door, written(tmp_path, b"PAR1\0", "in.csv"), None).partition("a Parquet file; ")[2]
    assert form == (
        "give --input-format parquet (input_format='parquet' in Python)" if door == "run" else "name it .parquet"
    )


def test_an_unnamed_column_without_cells_is_none(tmp_path: Path) -> None:
    """As of a separator at the end of each line."""
    table = read_table(str(written(tmp_path, b"id;text;\n1;a;\n2;b\n", "in.csv")), delimiter=";")
    assert table.columns == ("id", "text")
    assert [record.fields for record in table.records] == [{"id": "1", "text": "a"}, {"id": "2", "text": "b"}]
    with pytest.raises(InvalidInput, match="has a column without a name, number 3; name it"):
        read_table(str(written(tmp_path, b"id,text,\n1,a,x\n", "in.csv")))
