"""Instances of a scenario: prompts with their answers, made of the rows of its files."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from flexengine.apps.evaluate.metrics import CHOICE
from flexengine.apps.evaluate.perturb import ORIGINAL
from flexengine.apps.evaluate.scenario import INDEX, TEXT, Label, Scenario
from flexengine.apps.tables import FileTable, read_records
from flexengine.errors import InvalidInput, json_kind, listed, shown
from flexengine.job.arrow_rows import TableRow
from flexengine.job.inputs import InputFile, InputRows
from flexengine.job.prompt_template import columns_of, filled, text_of
from flexengine.job.read_tables import seeming
from flexengine.job.remedies import Remedies
from flexengine.job.rows import without_place

_REMEDIES = Remedies("give data.delimiter: {0}, or begin the file with the line sep={1}", "name it .{0}")


@dataclass(frozen=True)
class Instance:
    """One prompt of a scenario."""

    number: int  # number of the row in its file, from 0
    line: int  # line on which the row starts, from 1
    variant: str = ORIGINAL  # ORIGINAL, or the name of a perturbation
    context: str = ""  # the prompt with instructions and shots, or the text of a perplexity scenario
    choices: tuple[str, ...] = ()
    gold: int | None = None  # number of the right choice; None if the scenario has no labels
    references: tuple[str, ...] = ()  # right answers of a generation scenario
    error: str | None = None  # why the row cannot be run; None if it can


@dataclass(frozen=True)
class Built:
    """A scenario and its instances: the variants of a row follow each other, the original first."""

    scenario: Scenario
    instances: tuple[Instance, ...]
    shots: tuple[int, ...]  # numbers of the rows that are shown
    digests: dict[str, str]  # SHA-256 of each file that was read, by the name that the scenario gives it


def build(scenario: Scenario) -> Built:
    """Return the instances of a scenario. Raise InvalidInput if a file cannot be read, lacks a column, or has a label
    outside the choices; there are too few rows for the shots, or none is left to evaluate."""
    columns = columns_of(scenario.prompt.template)
    table = _table(scenario, "data.file", scenario.data.file, columns)
    pool, files = table, [scenario.data.file]
    if scenario.few_shot is not None and scenario.few_shot.file is not None:
        files.append(scenario.few_shot.file)
        pool = _table(scenario, "few_shot.file", files[1], columns)
    digests = {name: hashlib.sha256(scenario.path(name).read_bytes()).hexdigest() for name in files}
    shots = _shots(scenario, pool)
    used = {row.number for row in shots} if len({*digests.values()}) == 1 else set()  # few_shot.file may be data.file
    rows = [(number, row) for number, row in enumerate(table.records) if number not in used][: scenario.data.limit]
    if not rows:
        text = f"few_shot takes all {len(used)} rows of {table.name}, so none is evaluated"
        raise scenario.origin.fault("few_shot.count", f"{text}; lower few_shot.count, or name another few_shot.file")
    prompt, instances = scenario.prompt, list[Instance]()
    parts = [prompt.instructions] if prompt.instructions else []
    parts += [shot.context + prompt.delimiter + _answer(shot) for shot in shots]
    before = "".join(part + prompt.separator for part in parts)
    for number, row in rows:
        copies = {ORIGINAL: row.fields}
        if scenario.perturbations is not None:
            copies |= scenario.perturbations.copies(row.fields, columns, number)
        for variant, fields in copies.items():
            made = _instance(scenario, table, number, fields)
            context = before + made.context if made.error is None else ""
            instances.append(replace(made, variant=variant, context=context))
    return Built(scenario, tuple(instances), tuple(row.number for row in shots), digests)


def read_table(path: Path, delimiter: str | None = None) -> FileTable:
    """Return the rows of a file. A .txt file has one column, text, with a line in each row. Raise InvalidInput if the
    file cannot be read, has an unknown format, or has no rows. delimiter: as for `InputFile`."""
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is no file; name a .jsonl, .csv, .tsv, .txt, .parquet or .arrow file")
    seems = ""
    with closing(InputFile(path, delimiter=delimiter, remedies=_REMEDIES)) as source:
        form = source.form
        if form in ("jsonl", "txt"):
            found = []
            with InputRows(path, form=form) as lines:
                for row in lines:
                    fields = {"text": row.fields["prompt"]} if form == "txt" and row.error is None else row.fields
                    # Errors that only concern prompts do not count: any object is a row here.
                    fault = None if fields or row.error is None else without_place(row.error)
                    found.append(TableRow(row.line, fields, fault))
            rows = tuple(found)
            columns = tuple(dict.fromkeys(name for row in rows for name in row.fields))
        else:
            columns, rows = read_records(source, str(path))
            seems = seeming(columns, source)
    if not rows:
        raise InvalidInput(f"{path} has no rows; name a file with at least one")
    return FileTable(str(path), form, columns, rows, seeming=seems)


def _table(scenario: Scenario, field: str, name: str, columns: Iterable[str]) -> FileTable:
    try:
        table = read_table(scenario.path(name), scenario.delimiter(name))
    except InvalidInput as error:
        raise scenario.origin.fault(field, f"{field}: {error}") from error
    needed = [("prompt.template", column) for column in columns]
    choices, label, perturbed = scenario.choices, scenario.label, scenario.perturbations
    needed += [("choices.column", choices.column)] if choices.column else []
    needed += [("choices.columns", column) for column in choices.columns]
    needed += [("label.column", label.column)] if label else []
    for place, column in needed:
        if column not in table.columns:
            lacks = f"{place} names the column {shown(column)}, which {table.name} does not have"
            raise scenario.origin.fault(place, f"{lacks}; choose from {table.known_columns()}")
    place = "perturbations.columns"
    for column in perturbed.columns if perturbed else ():
        if column not in columns:
            lacks = f"{place} names {shown(column)}, which is not in prompt.template"
            raise scenario.origin.fault(place, f"{lacks}; choose from {listed(columns, last=', ')}")
    return table


def _shots(scenario: Scenario, pool: FileTable) -> list[Instance]:
    if (few := scenario.few_shot) is None:
        return []
    made = [_instance(scenario, pool, number, row.fields) for number, row in enumerate(pool.records)]
    usable = [each for each in made if each.error is None]
    if len(usable) < few.count:
        text = f"few_shot.count is {few.count}, but {pool.name} has {len(usable)} usable rows"
        raise scenario.origin.fault("few_shot.count", f"{text}; lower it or name a larger file")
    fixed = scenario.kind != CHOICE or bool(scenario.choices.values)  # else labels are the places of the right choices
    labels = [_answer(each) if fixed else str(each.gold) for each in usable]
    return [usable[number] for number in draw(labels, few.count, few.seed, few.balanced)]


def _answer(instance: Instance) -> str:
    return instance.choices[instance.gold] if instance.gold is not None else instance.references[0]


def draw(labels: Sequence[str], count: int, seed: int, balanced: bool) -> list[int]:
    """Return the numbers of `count` rows, in the order in which they are shown.

    If balanced, labels take turns, the most frequent first and those of equal count in random order, until each has
    been drawn as often as it occurs. So the numbers of rows of two labels differ by at most one, unless a label has too
    few rows.
    """
    random = Random(seed)
    groups: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        groups.setdefault(label if balanced else "", []).append(number)
    queues = list(groups.values())
    random.shuffle(queues)  # the sort keeps this order among labels of equal count
    queues.sort(key=len, reverse=True)
    for queue in queues:
        random.shuffle(queue)
    chosen = [number for turn in zip_longest(*queues) for number in turn if number is not None][:count]
    random.shuffle(chosen)
    return chosen


def _instance(scenario: Scenario, table: FileTable, number: int, fields: dict[str, Any]) -> Instance:
    """Return the instance of a row, without what comes before its prompt; with an error if a value is missing. Raise
    InvalidInput if the label is a list or none of the choices, as the whole column may be read wrongly then. fields:
    values of the template, possibly perturbed. Choices and labels are those of the row."""
    row, label, choice = table.records[number], scenario.label, scenario.kind == CHOICE
    if choice and label and not row.fault and isinstance(value := row.fields.get(label.column), list):
        fault = f"{table.place(number)}: the label in column {label.column} is {shown(value)}"
        raise InvalidInput(f"{fault}; a {CHOICE} row has one right answer: text or a number")
    try:
        if row.fault is not None:
            raise InvalidInput(row.fault)
        context = filled(scenario.prompt.template, fields)
        choices = _choices(scenario, row.fields) if choice else ()
        answers = () if label is None else _answers(label, row.fields)
    except InvalidInput as error:
        return Instance(number, row.line, error=f"line {row.line}: {error}")
    gold = _gold(label, answers[0], choices, table.place(number)) if choice and label else None
    return Instance(number, row.line, ORIGINAL, context, choices, gold, () if choice else answers)


def _choices(scenario: Scenario, row: dict[str, Any]) -> tuple[str, ...]:
    given = scenario.choices
    if given.values:
        return given.values
    found = _list(row, given.column) if given.column else [text_of(row, column) for column in given.columns]
    if len(found) < 2:
        raise InvalidInput(f"the choices are {shown(found)}; there must be at least 2")
    return tuple(found)


def _list(row: dict[str, Any], column: str) -> list[str]:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidInput(f"column {column} is {shown(row[column])}; it must be a list of texts") from None
    if not isinstance(value, list):
        raise InvalidInput(f"column {column} is {json_kind(value)}; it must be a list of texts")
    return [text_of({column: each}, column) for each in value]


def _answers(label: Label, row: dict[str, Any]) -> tuple[str, ...]:
    value = row.get(label.column)
    found = _list(row, label.column) if isinstance(value, list) else [text_of(row, label.column)]
    if not found:
        raise InvalidInput(f"column {label.column} is empty; it must hold the right answer")
    return tuple(found)


def _gold(label: Label, text: str, choices: tuple[str, ...], place: str) -> int:
    count, allowed = len(choices), choices
    if label.form == INDEX:
        allowed, text = tuple(map(str, range(count))), text.strip().removesuffix(".0")
    elif label.form != TEXT:
        allowed, text = tuple(chr(ord("A") + number) for number in range(count)), text.strip().upper()
    if text not in allowed:
        names = listed(allowed, True, ", ") if label.form == TEXT else f"{allowed[0]} to {allowed[-1]}"
        fault = f"{place}: the label in column {label.column} is {shown(text)}"
        raise InvalidInput(f"{fault}; with label.form {label.form} and {count} choices it must be one of {names}")
    return allowed.index(text)
