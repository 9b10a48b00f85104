"""Questions of a table, by task: one per row, or one per checked cell. They are those of Narayan et al., Can Foundation
Models Wrangle Your Data? (arXiv 2205.09911)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flexengine.apps.tables import FileTable, cell_text, serialised
from flexengine.apps.wrangle.pairs import LEFT, RIGHT, common_columns, sides
from flexengine.apps.wrangle.spec import DETECT, MATCH, NO, SCHEMA, TASKS, YES, Spec
from flexengine.errors import InvalidInput, listed, shown
from flexengine.job.pandas_index import is_nameless
from flexengine.plan.formatting import count

_LABELS = {"yes": YES, "true": YES, "1": YES, "1.0": YES, "no": NO, "false": NO, "0": NO, "0.0": NO}
_LABEL_WORDS = "Yes, No, true, false, 1 or 0"
MAX_CHOICES = 1000  # values of a column that --closed accepts


@dataclass(frozen=True)
class CellQuestion:
    """One question to the model."""

    row: int  # number of the table's row
    target: str  # name of the answer; the output's columns begin with it
    text: str  # the question, without shots; "" if all cells that it would show, or those of one side, are empty
    answer: str | None = None  # the true answer; None if it is unknown
    cell: str | None = None  # text of the imputed cell; None if it is empty
    group: str = ""


class TableQuestions(NamedTuple):
    """The questions of a table."""

    table: FileTable
    questions: list[CellQuestion]
    faults: dict[int, str]  # reason by row for rows that cannot be read, or have nothing to ask about


def questions_of(table: FileTable, spec: Spec, examples: bool = False) -> TableQuestions:
    """Return the questions of a table. examples: the table holds examples, so every row must have an answer. Raise
    InvalidInput if a column is missing, a label is not allowed, or an example has no answer or cannot be read."""
    asked = list(_BUILDERS[spec.task](table, spec, examples))
    questions = [question for question in asked if question.text]
    reasons = {row: record.fault for row, record in enumerate(table.records) if record.fault}
    side = " of one side" if spec.task in (MATCH, SCHEMA) else ""
    nothing = f"all cells that the question would show{side} are empty"
    reasons |= {question.row: nothing for question in asked if not question.text}
    lines = {row: table.records[row].line for row in reasons}
    faults = {row: f"line {lines[row]}: {why}" if lines[row] else why for row, why in sorted(reasons.items())}
    if examples and faults:
        raise InvalidInput(f"--examples {table.name}, {next(iter(faults.values()))}; correct it")
    for question in questions:
        if examples and question.answer is None:
            lacks = f"{table.place(question.row)}: there is no answer for {question.target}"
            raise InvalidInput(f"--examples {lacks}; give it, or leave the row out")
    return TableQuestions(table, questions, faults)


def choices_of(spec: Spec, all_asked: Sequence[TableQuestions]) -> tuple[str, ...]:
    """Return the answers that are scored, () if answers are generated. all_asked: questions of the table, and of the
    examples if there are any. Raise InvalidInput if the answer of a row is not allowed, or --closed finds too few or
    too many values."""
    if not spec.scored:
        return ()
    if spec.yes_no:
        return YES, NO
    known = {q.cell for asked in all_asked for q in asked.questions if q.cell is not None}
    choices = spec.choice or tuple(sorted(known))
    if not 2 <= len(choices) <= MAX_CHOICES:
        fault = f"--closed: column {shown(spec.column[0])} has {count(len(choices), 'value', 'values')}"
        raise InvalidInput(f"{fault}; it must have 2 to {MAX_CHOICES}; leave --closed out to generate answers")
    more = "list the answers by --choice instead of --closed" if spec.closed else "give it as a --choice, too"
    for asked in all_asked:
        for question in asked.questions:
            if question.answer is not None and question.answer not in choices:
                place = asked.table.place(question.row)
                allowed = f"allowed are {listed(choices, last=', ')}"
                raise InvalidInput(f"{place}: the answer is {shown(question.answer)}; {allowed}; correct it, or {more}")
    return choices


def targets_of(spec: Spec) -> tuple[str, ...]:
    """Return the names of the answers."""
    if spec.task == DETECT:
        return tuple(f"{column}_error" for column in spec.column) or ("error",)
    return spec.column or (spec.task,)


# One function per task. Each yields the questions of all rows that can be read.


def _match(table: FileTable, spec: Spec, examples: bool) -> Iterator[CellQuestion]:
    names = f"the left_ and right_ columns of {table.name}"
    columns = common_columns(*sides(table), names, spec.show, table.seeming and f"its columns: {table.seeming}")
    label, noun = _label(table, spec, spec.label, examples), spec.noun
    for row, record in table.readable():
        left, right = (serialised(record.fields, columns, spec.missing, side) for side in (LEFT, RIGHT))
        text = f"{noun} A is {left}. {noun} B is {right}. Are {noun} A and {noun} B the same?"
        text = text if all(_shows_any(record.fields, columns, side) for side in (LEFT, RIGHT)) else ""
        yield CellQuestion(row, MATCH, text, label(row))


def _schema(table: FileTable, spec: Spec, examples: bool) -> Iterator[CellQuestion]:
    columns = sides(table)
    plain = {"left", "right"} <= set(table.columns)
    if not plain and not all(columns):
        must = "it must have the columns left and right, or columns that begin with left_ and right_"
        known = f"its columns are {table.known_columns()}"
        raise InvalidInput(f"{table.name} has no descriptions of attributes: {must}; {known}")
    label = _label(table, spec, spec.label, examples)
    for row, record in table.readable():
        if plain:
            left, right = (cell_text(record.fields[side]) for side in ("left", "right"))
        else:
            left, right = (
                serialised(record.fields, names, spec.missing, side) if _shows_any(record.fields, names, side) else None
                for side, names in zip((LEFT, RIGHT), columns, strict=True)
            )
        text = f"A is {left}. B is {right}. Are A and B the same? Yes or No?"
        yield CellQuestion(row, SCHEMA, text if left and right else "", label(row))


def _impute(table: FileTable, spec: Spec, examples: bool) -> Iterator[CellQuestion]:
    (column,) = spec.column
    table.check_has([column], "--column")
    shown = _shown(table, spec, {column, spec.label})
    truth = None if examples else spec.label
    if truth is not None:
        table.check_has([truth], "--label")
    for row, record in table.readable():
        cell = cell_text(record.fields[column])
        text = f"{serialised(record.fields, shown, spec.missing)}. What is the {column}?"
        if not _shows_any(record.fields, shown):
            if cell is not None and not spec.evaluate:
                continue  # no example
            text = ""
        cell = cell and cell.strip()
        true = None if truth is None else cell_text(record.fields[truth])
        yield CellQuestion(row, column, text, cell if true is None else true.strip(), cell)


def _detect(table: FileTable, spec: Spec, examples: bool) -> Iterator[CellQuestion]:
    table.check_has(spec.column, "--column")
    if not spec.column:
        shown = _shown(table, spec, {spec.label})
        label = _label(table, spec, spec.label, examples)
        for row, record in table.readable():
            text = f"{serialised(record.fields, shown, spec.missing)}\n\nIs there {spec.error} in this row?"
            text = text if _shows_any(record.fields, shown) else ""
            yield CellQuestion(row, "error", text, label(row))
        return
    names = {c: f"{c}_{spec.label}" if spec.label else None for c in spec.column}
    labels = {c: _label(table, spec, name, examples) for c, name in names.items()}
    shown = [] if spec.alone else _shown(table, spec, set(names.values()))
    for row, record in table.readable():
        before = "" if spec.alone else f"{serialised(record.fields, shown, spec.missing)}\n\n"
        for column, target in zip(spec.column, targets_of(spec), strict=True):
            value = cell_text(record.fields[column]) or spec.missing
            text = f"{before}Is there {spec.error} in {column}: {value}?"
            asks = spec.alone or _shows_any(record.fields, [*shown, column])
            yield CellQuestion(row, target, text if asks else "", labels[column](row))


def _transform(table: FileTable, spec: Spec, examples: bool) -> Iterator[CellQuestion]:
    (target,) = spec.column
    column, answer = ("input", "output") if examples else (target, spec.label)
    options = {"--column": column, "--label": answer, "--group": spec.group}
    for option, name in options.items():
        if name is not None:
            table.check_has([name], "--examples: column" if examples else option)
    for row, record in table.readable():
        cell = cell_text(record.fields[column])
        group = "" if spec.group is None else cell_text(record.fields[spec.group]) or ""
        true = cell_text(record.fields[answer]) if answer else None
        text = f"input:{cell or ''}\noutput:" if cell is not None or examples else ""
        yield CellQuestion(row, target, text, true and true.strip(), group=group)


_BUILDERS = dict(zip(TASKS, (_match, _impute, _detect, _schema, _transform), strict=True))


def _shows_any(cells: Mapping[str, Any], columns: Iterable[str], prefix: str = "") -> bool:
    """Return whether a cell that a question shows is not empty; see `serialised`."""
    return any(cell_text(cells[prefix + column]) is not None for column in columns)


def _shown(table: FileTable, spec: Spec, hidden: set[str | None]) -> list[str]:
    """Return the columns that a prompt shows. Raise InvalidInput if there is none, or --show names a hidden one."""
    table.check_has(spec.show, "--show")
    for column in spec.show:
        if column in hidden:
            raise InvalidInput(f"--show {column!r} is the answer; leave it out")
    if shown := list(spec.show) or [c for c in table.columns if c not in hidden and not is_nameless(c)]:
        return shown
    fault = f"{table.name} has no column beside {listed((c for c in hidden if c), last=', ')}"
    raise InvalidInput(f"{fault}; a prompt must show at least one")


def _label(table: FileTable, spec: Spec, name: str | None, examples: bool) -> Callable[[int], str | None]:
    """Return a function that returns the label of a row, Yes, No or None. name: column of the labels; None if there is
    none. With a file of examples, only that file needs the column. Raise InvalidInput if the column is missing, or a
    label is not allowed."""
    if examples and name is None:
        raise InvalidInput("--examples needs --label, the column with the answers of the examples")
    if name is None or (not examples and spec.examples and name not in table.columns):
        return lambda row: None
    table.check_has([name], "--label")
    labels = dict[int, str]()
    for row, record in enumerate(table.records):
        text = None if record.fault else cell_text(record.fields[name])
        if text is not None:
            if text.strip().lower() not in _LABELS:
                must = f"a label must be {_LABEL_WORDS}, or empty if it is unknown"
                raise InvalidInput(f"{table.place(row)}: {name} is {shown(text)}; {must}")
            labels[row] = _LABELS[text.strip().lower()]
    return labels.get
