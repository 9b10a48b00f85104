"""Tables of pairs: common columns, and pairs made from two tables (blocking) by TF-IDF and cosine, with scikit-learn
(extra "wrangle")."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flexengine.activity import message
from flexengine.apps.tables import FileTable, cell_text
from flexengine.apps.wrangle.spec import DEFAULT_TOP, TOKEN, Spec
from flexengine.errors import InvalidInput, listed, shown
from flexengine.job.arrow_rows import TableRow
from flexengine.job.pandas_index import is_nameless
from flexengine.plan.formatting import count

LEFT, RIGHT, SIMILARITY = "left_", "right_", "similarity"
_MAX_CELLS = 2**22  # similarities in memory at a time
_Neighbour = tuple[int, float]  # number of a text, and its similarity
_Pair = tuple[int, int, float]  # row of the first table, row of the second, similarity


def nearest(queries: Sequence[str], texts: Sequence[str], count: int, kind: str) -> Iterator[list[_Neighbour]]:
    """Yield the nearest texts of each query, the most similar first: their numbers, and the cosines of the TF-IDF
    vectors, from 0 to 1. Equally similar texts keep their order. kind: CHARACTER compares sequences of three
    characters, TOKEN compares words."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    cut = {"token_pattern": r"\w+"} if kind == TOKEN else {"analyzer": "char_wb", "ngram_range": (3, 3)}
    vectorizer = TfidfVectorizer(**cut)
    try:
        vectorizer.fit([*queries, *texts])
    except ValueError as error:  # no text has a word
        raise InvalidInput("no row has a text to compare; give tables with text in their common columns") from error
    mine, other = vectorizer.transform(queries), vectorizer.transform(texts).T.tocsc()
    step = max(1, _MAX_CELLS // len(texts))
    for first in range(0, len(queries), step):
        similarities = (mine[first : first + step] @ other).toarray().round(9)
        for row in similarities:
            least = np.partition(row, -count)[-count] if count < len(row) else 0.0
            enough = np.flatnonzero(row >= least)
            best = enough[np.argsort(-row[enough], kind="stable")][:count]
            yield [(int(i), float(row[i])) for i in best]


def common_columns(
    left: Sequence[str], right: Sequence[str], names: str, show: Sequence[str] = (), seeming: str = ""
) -> list[str]:
    """Return the columns that both sides have, in the order of the left side. Raise InvalidInput if there is none, or
    one of `show` is not common.

    Args:
        names: names of the two sides, for messages.
        show: only these columns; empty is all.
        seeming: as of a `FileTable` that seems to have another delimiter.
    """
    common = [column for column in left if column in right and not is_nameless(column)]
    if not common:
        first, second = (listed(columns, last=", ") or "none" for columns in (left, right))
        fault = f"{names} have no common column: the first has {first}, the second has {second}"
        remedy = f": {seeming}" if seeming else "; rename columns so that what is compared has one name"
        raise InvalidInput(f"{fault}{remedy}")
    for column in show:
        if column not in common:
            known = listed(common, last=", ")
            raise InvalidInput(f"--show {shown(column)} is no common column of {names}; common are {known}")
    return list(show) or common


def sides(table: FileTable) -> tuple[list[str], list[str]]:
    """Return the columns of a table of pairs that begin with left_, and those that begin with right_, without these
    beginnings."""
    left, right = ([c.removeprefix(p) for c in table.columns if c.startswith(p) and c != p] for p in (LEFT, RIGHT))
    return left, right


def matching_pairs(left: FileTable, right: FileTable, spec: Spec) -> FileTable:
    """Return the candidate pairs of two tables: for each row of the first, the most similar rows of the second, with a
    similarity above 0. Raise InvalidInput if the tables have no common column, or there is no candidate.

    Columns are those of the first table with left_, those of the second with right_, and similarity. A row that cannot
    be read follows the pairs, as a row with a fault that names its file and line.
    """
    seeming = next((f"columns of {each.name}: {each.seeming}" for each in (left, right) if each.seeming), "")
    columns = common_columns(left.columns, right.columns, f"{left.name} and {right.name}", spec.show, seeming)
    mine, other = (
        [
            " ".join(filter(None, (cell_text(record.fields.get(c)) for c in columns if not record.fault)))
            for record in table.records
        ]
        for table in (left, right)
    )
    pairs = [
        (i, j, similarity)
        for i, neighbours in enumerate(nearest(mine, other, spec.top or DEFAULT_TOP, spec.similarity))
        for j, similarity in neighbours
        if similarity > 0
    ]
    if not pairs:
        none = f"no row of {left.name} is similar to a row of {right.name} in the columns {listed(columns, last=', ')}"
        raise InvalidInput(f"{none}; compare other columns by --show")
    found = {i for i, _, _ in pairs}
    if alone := [record.line or i for i, record in enumerate(left.records) if i not in found and not record.fault]:
        rows = f"{count(len(alone), 'row', 'rows')} of {left.name}, such as that of line {alone[0]},"
        message(f"{rows} {'is' if len(alone) == 1 else 'are'} similar to no row of {right.name}, and in no pair")
    return _joined(left, right, pairs)


def _joined(left: FileTable, right: FileTable, pairs: Sequence[_Pair]) -> FileTable:
    columns = (*(LEFT + c for c in left.columns), *(RIGHT + c for c in right.columns), SIMILARITY)
    faults = [(table, row) for table in (left, right) for row, record in enumerate(table.records) if record.fault]
    records = []
    for number, (i, j, similarity) in enumerate(pairs, start=1):
        cells = {LEFT + name: value for name, value in left.records[i].fields.items()}
        cells |= {RIGHT + name: value for name, value in right.records[j].fields.items()}
        records.append(TableRow(number, {**cells, SIMILARITY: similarity}))
    for table, row in faults:
        side, record = LEFT if table is left else RIGHT, table.records[row]
        cells = {side + name: value for name, value in record.fields.items()}
        records.append(TableRow(0, cells, f"{table.place(row)}: {record.fault}"))
    arrow = _joined_arrow(left, right, pairs, faults)
    return FileTable(
        f"{left.name} x {right.name}", left.form, columns, tuple(records), arrow, left.delimiter, stated=left.stated
    )


def _joined_arrow(
    left: FileTable, right: FileTable, pairs: Sequence[_Pair], faults: Sequence[tuple[FileTable, int]]
) -> Any:
    if left.arrow is None:
        return None
    import pyarrow as pa

    cells: dict[str, Any] = {}
    for side, (prefix, table) in enumerate(((LEFT, left), (RIGHT, right))):
        rows = [*(pair[side] for pair in pairs), *(row if of is table else None for of, row in faults)]
        taken = table.as_arrow().take(pa.array(rows, pa.int64()))  # None takes a row of nulls
        cells |= {prefix + name: taken.column(name) for name in taken.column_names}
    similarities = [*(pair[2] for pair in pairs), *[None] * len(faults)]
    return pa.table({**cells, SIMILARITY: pa.array(similarities, pa.float64())})


def schema_pairs(left: FileTable, right: FileTable, spec: Spec) -> FileTable:
    """Return the pairs of a column of the first table and one of the second, with the columns left_column, left_values,
    right_column, right_values and, with --top, similarity."""
    mine, other = (_descriptions(table, spec.values) for table in (left, right))
    extra = [SIMILARITY] if spec.top is not None else []
    columns = tuple(side + c for side in (LEFT, RIGHT) for c in mine[0]) + tuple(extra)
    found: Iterable[list[_Neighbour]] = [[(j, 0.0) for j in range(len(other))]] * len(mine)
    if spec.top is not None:
        queries, texts = ([" ".join(one.values()) for one in side] for side in (mine, other))
        found = nearest(queries, texts, spec.top, spec.similarity)
    rows = [
        [*mine[i].values(), *other[j].values(), similarity][: len(columns)]
        for i, neighbours in enumerate(found)
        for j, similarity in neighbours
    ]
    records = tuple(TableRow(n, dict(zip(columns, row, strict=True))) for n, row in enumerate(rows, start=1))
    return FileTable(
        f"{left.name} x {right.name}", left.form, columns, records, delimiter=left.delimiter, stated=left.stated
    )


def _descriptions(table: FileTable, count: int) -> list[dict[str, str]]:
    """Return name and first different values of each column."""
    made = []
    for column in (each for each in table.columns if not is_nameless(each)):
        texts = (cell_text(record.fields.get(column)) for record in table.records)
        values = list(dict.fromkeys(text for text in texts if text is not None))[:count]
        made.append({"column": column} | ({"values": ", ".join(values)} if count else {}))
    return made
