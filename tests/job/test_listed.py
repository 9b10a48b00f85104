"""Messages that name columns or fields of a file have a bounded length, whatever the file holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexengine.apps.tables import FileTable, read_records
from flexengine.apps.wrangle.pairs import common_columns
from flexengine.errors import InvalidInput, bracketed, cut, listed
from flexengine.job.arrow_rows import record_of
from flexengine.job.columns import answered
from flexengine.job.inputs import InputFile, InputRows
from flexengine.job.prompt_template import filled, unknown_column
from flexengine.job.python_arguments import refuse_table
from flexengine.job.row_fields import FieldNotes, RowRules, data_columns, misspelt, subject
from flexengine.job.rows import Row, encode
from flexengine.records import known_fields
from tests.helpers.inputs import DEFAULTS, batch_fields, make_tokenizer, rows_of, written

LONG, MOST = "x" * 5000, 2000  # a name, and most characters of a message
NAMES = [f"column {i}" for i in range(10_000)]
WIDE = [LONG + str(i) for i in range(30)]


def csv(folder: Path, *rows: list[str]) -> Path:
    return written(folder, "".join(",".join(row) + "\n" for row in rows).encode(), "in.csv")


def test_names_as_text() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c"], last=", ") == "a, b, c"
    assert listed(["a", "it's"], quoted=True) == "'a' and \"it's\""
    assert bracketed(["a", "b"]) == str(["a", "b"])
    assert listed(["", "b"]) == " and b"
    some = ", ".join(NAMES[:12])
    assert listed(NAMES) == f"{some} and 9,988 others"
    assert listed(NAMES[:13]) == f"{some} and column 12"
    assert listed(NAMES[:14], last=", ") == f"{some} and 2 others"
    assert listed([1, "\ud800"]) == "1 and \\ud800"
    assert cut("x" * 81) == "x" * 76 + " ..."
    assert {len(each) for each in listed(WIDE[:12], last=", ").split(", ")} == {100}


@pytest.mark.parametrize("names", [NAMES, WIDE], ids=["many", "long"])
@pytest.mark.parametrize("refuse", [
    lambda names, path: InputRows(csv(path, names)),
    lambda names, path: InputRows(csv(path, [*names, *names])),
    lambda names, path: InputRows(csv(path, [*names, "a"]), names[0] + "y"),
    lambda names, path: InputRows(csv(path, names), template="{a}"),
    lambda names, path: InputRows(csv(path, names, ["two words"] * len(names))),
    lambda names, path: read_records(InputFile(csv(path, [*names, *names])), "t"),
    lambda names, path: RowRules(column=names[0] + "y").request(dict.fromkeys(names, 1)),
    lambda names, path: RowRules(column=names[0]).request(dict.fromkeys(names)),
    lambda names, path: filled(f"{{{names[0]}}}", dict.fromkeys(names)),
    lambda names, path: known_fields(dict.fromkeys(names), ["a"], "policy"),
    lambda names, path: FileTable("t.csv", "csv", tuple(names), ()).check_has([names[0] + "y"], "--column"),
    lambda names, path: common_columns(names, ["a"], "one and two"),
    lambda names, path: common_columns(names, names, "one and two", ["a"]),
    lambda names, path: refuse_table("prompts", pytest.importorskip("pandas").DataFrame(columns=names)),
    lambda names, path: answered(dict.fromkeys(names, 5), DEFAULTS, lambda rows: []),
    lambda names, path: answered({name: np.zeros(i) for i, name in enumerate(names)}, DEFAULTS, lambda rows: []),
])  # fmt: skip
def test_refusals(tmp_path: Path, refuse: Callable[[list[str], Path], Any], names: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        refuse(names, tmp_path)
    assert len(str(error.value).replace(str(tmp_path), "")) < MOST


@pytest.mark.parametrize("names", [NAMES, WIDE], ids=["many", "long"])
def test_notes_and_errors_of_rows(tmp_path: Path, names: list[str]) -> None:
    fields, tokenizer = dict.fromkeys(names, "1"), make_tokenizer()
    rows = [
        Row(0, 1, fields),
        *rows_of(tmp_path, json.dumps(batch_fields() | {"body": {"prompt": "hi", **fields}}).encode()),
        *rows_of(tmp_path, json.dumps(batch_fields() | {"body": {"prompt": "hi", "messages": [fields]}}).encode()),
    ]
    encoded = [encode(row, tokenizer, 64, DEFAULTS) for row in rows]
    errors = [each.error or "" for each in encoded if isinstance(each, Row)]
    assert len(errors) == len(rows)
    errors += [record_of(1, {name: ValueError("wrong") for name in names}, None).fault or ""]
    notes = FieldNotes(RowRules(template=f"{{{names[0]}}}"), False)
    notes.add(Row(0, 1, {"prompt": "a", **{f"input_{'input_' * i}error": 1 for i in range(9)}, **fields}))
    errors += [*notes.lines(1), unknown_column("a", names), subject("column", names), misspelt(fields)]
    errors += [data_columns([f"max{'_' * i}token" for i in range(50)])]
    assert all(0 < len(each) < MOST for each in errors), [len(each) for each in errors]


def test_ids_that_repeat(tmp_path: Path) -> None:
    lines = [json.dumps(batch_fields() | {"custom_id": f"{i // 2}{LONG[:500]}"}) for i in range(40)]
    with pytest.raises(InvalidInput, match="every custom_id must be unique") as error:
        InputRows(written(tmp_path, "\n".join(lines).encode())).scan()
    assert len(str(error.value)) < MOST
