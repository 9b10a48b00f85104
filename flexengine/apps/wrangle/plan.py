"""The plan of a run: all prompts with the examples before their questions, before a model is opened."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexengine.activity import message
from flexengine.apps.tables import read_table
from flexengine.apps.wrangle.pairs import matching_pairs, nearest, schema_pairs
from flexengine.apps.wrangle.questions import CellQuestion, TableQuestions, choices_of, questions_of, targets_of
from flexengine.apps.wrangle.spec import (
    BALANCED,
    DEFAULT_SHOTS,
    GIVEN,
    IMPUTE,
    MATCH,
    MAX_TOKENS,
    NEAREST,
    NO,
    TRANSFORM,
    TRANSFORMATIONS,
    YES,
    Spec,
)
from flexengine.errors import InvalidInput, check_library

ENDS = ("prediction", "confidence", "failure")  # ends of the columns that the output adds


@dataclass(frozen=True)
class WranglePlan:
    """The questions of a run and their prompts."""

    spec: Spec
    asked: TableQuestions  # the table and all its questions
    questions: tuple[CellQuestion, ...]  # questions that are put to the model
    prompts: tuple[str, ...]
    choices: tuple[str, ...]  # answers that are scored; empty if answers are generated

    @property
    def labelled(self) -> bool:
        """Return whether a question has a true answer, so that there are metrics."""
        return any(question.answer is not None for question in self.questions)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the job: one per question, scored if its answers are known, else generated."""
        most = self.spec.max_tokens or MAX_TOKENS[self.spec.task]
        for question, text in zip(self.questions, self.prompts, strict=True):
            about = {"row": question.row, "target": question.target}
            if self.choices:
                end = "" if self.spec.yes_no else "\n"  # of two choices one may begin with the other
                choices = [_glue(question.text) + choice + end for choice in self.choices]
                yield {**about, "context": text, "choices": choices}
            else:
                yield {**about, "prompt": text, "max_tokens": most, "stop": ["\n"], "temperature": 0}


def make_plan(spec: Spec) -> WranglePlan:
    """Read the tables and return the plan. Raise InvalidInput if they cannot be used with these options."""
    if len(spec.tables) == 2 or spec.picks == NEAREST:
        check_library("sklearn", "similarity needs scikit-learn", "wrangle")
    tables = [read_table(name, limit=spec.limit, delimiter=spec.delimiter) for name in spec.tables]
    if len(tables) == 2 and spec.label and not spec.examples:
        fault = f"--label {spec.label!r} names labels of pairs, but two tables are given"
        raise InvalidInput(f"{fault}; give a table of pairs, or --examples with labelled pairs")
    pairs = matching_pairs if spec.task == MATCH else schema_pairs
    table = tables[0] if len(tables) == 1 else pairs(tables[0], tables[1], spec)
    asked = questions_of(table, spec)
    for name in (f"{target}_{end}" for target in targets_of(spec) for end in ENDS):
        if name in table.columns:
            raise InvalidInput(f"{table.name} has a column {name!r}, which the output adds; rename it")
    shown = read_table(spec.examples, "--examples", delimiter=spec.delimiter) if spec.examples else None
    examples = questions_of(shown, spec, True) if shown else None
    choices = choices_of(spec, [asked, examples] if examples else [asked])
    questions, pool = _predicted(spec, asked, examples)
    if spec.group and spec.shots != 0 and (missing := {q.group for q in questions} - {q.group for q in pool}):
        raise InvalidInput(f"group {sorted(missing)[0][:80]!r} has no example; add rows of this group to --examples")
    texts = _with_shots(spec, questions, pool, choices or (YES, NO), own=examples is None)
    if not texts:
        remedy = "give more rows, or lower --shots"
        if spec.task == IMPUTE and not spec.evaluate:
            remedy = f"column {spec.column[0]!r} has no empty cell; --evaluate predicts filled cells and compares"
        raise InvalidInput(f"{table.name} has no row to predict; {remedy}")
    plan = WranglePlan(spec, asked, tuple(texts), tuple(texts.values()), choices)
    if (spec.label or spec.evaluate) and not plan.labelled and not examples:
        none = f"no predicted row of {table.name} has a label in {spec.label!r}"
        raise InvalidInput(f"{none}; metrics need labels: fill the column, or leave --label out")
    files = [*tables, shown] if shown else tables
    if spec.delimiter is not None and not any(each.delimiter for each in files):
        raise InvalidInput("--delimiter is for .csv and .tsv files, and no table is one; leave it out")
    for each in files:
        if each.seeming and len(each.columns) == 1:
            message(f"{each.name} has one column, {each.columns[0]!r}: {each.seeming.replace('they seem', 'it seems')}")
    return plan


def _predicted(
    spec: Spec, asked: TableQuestions, examples: TableQuestions | None
) -> tuple[list[CellQuestion], list[CellQuestion]]:
    """Return the questions to predict, and the examples for shots."""
    impute, everything = spec.task == IMPUTE, asked.questions
    pool = [q for q in everything if q.answer is not None and not (impute and q.cell is None)]
    questions = [q for q in everything if not impute or spec.evaluate or q.cell is None]
    if spec.test is not None:
        rows = sorted({q.row for q in questions if q.answer is not None})
        if spec.test > len(rows):
            raise InvalidInput(f"--test is {spec.test}, but {len(rows)} rows have known answers; give at most so many")
        drawn = set(random.Random(spec.seed).sample(rows, spec.test))
        questions = [q for q in questions if q.row in drawn]
        pool = [q for q in pool if q.row not in drawn]
    return questions, pool if examples is None else examples.questions


def _with_shots(
    spec: Spec, questions: list[CellQuestion], pool: list[CellQuestion], classes: Sequence[str], own: bool
) -> dict[CellQuestion, str]:
    """Return the prompts of the questions that did not become shots.

    Args:
        classes: answers among which BALANCED shots are distributed.
        own: the examples are rows of the table.
    """
    made: dict[CellQuestion, str] = {}
    for group in dict.fromkeys(q.group for q in questions):
        mine, examples = ([q for q in some if q.group == group] for some in (questions, pool))
        by_row = Counter(q.row for q in examples if own)  # there are several if a row has several checked cells
        left_out = max((by_row[q.row] for q in mine), default=0)
        count = shot_count(spec, len(examples), left_out)
        if spec.picks == NEAREST and count:
            shots = list(nearest_shots(spec, mine, examples, count, left_out))
        else:
            shared = chosen(spec, examples, count, classes)
            mine = [question for question in mine if not own or question not in shared]
            shots = [shared] * len(mine)
        for question, some in zip(mine, shots, strict=True):
            before = [shot.text + _glue(shot.text) + (shot.answer or "") for shot in some]
            parts = [*([] if spec.instruction is None else [spec.instruction]), *before, question.text]
            made[question] = "\n\n".join(parts)
    return {question: made[question] for question in questions if question in made}


def _glue(question: str) -> str:
    """Return the text between a question and its answer."""
    return " " if question.endswith("?") else ""


def shot_count(spec: Spec, available: int, left_out: int) -> int:
    """Return the number of shots. Raise InvalidInput if --shots is larger than the number of examples, or there are
    none where they are wanted or needed. left_out: most examples in the row of one question, which NEAREST leaves out;
    0 if examples stand in no row of a question. Else examples would be predicted and compared, so the default takes at
    most half of them."""
    if spec.shots is None:
        count = min(DEFAULT_SHOTS, available // 2 if left_out and spec.picks != NEAREST else available)
        if count == 0 and (spec.pick or spec.examples):
            many = f"--pick {spec.picks} has {available} examples to choose from"
            raise InvalidInput(f"{many}; give more rows with answers, or --shots 0")
        if count == 0 and spec.task == TRANSFORM and not spec.instruction:
            raise InvalidInput(f"transform has no example to show; {TRANSFORMATIONS}")
        return count
    most = available - left_out if spec.picks == NEAREST else available
    if spec.shots > most:
        other = " in other rows" if most < available else ""
        fault = f"--shots is {spec.shots}, but there are {most} examples{other}"
        raise InvalidInput(f"{fault}; give at most so many, or more rows with answers by --examples or in the table")
    return spec.shots


def chosen(spec: Spec, pool: Sequence[CellQuestion], count: int, choices: Sequence[str]) -> list[CellQuestion]:
    """Return the examples that all questions share: the first ones, or drawn with the seed. Raise InvalidInput if an
    answer has too few. choices: allowed answers, for BALANCED."""
    if spec.picks == GIVEN:
        return list(pool[:count])
    rng = random.Random(spec.seed)
    if spec.picks != BALANCED:
        return rng.sample(list(pool), count)
    shots: list[CellQuestion] = []
    for place, choice in enumerate(choices):
        wanted = count // len(choices) + (place < count % len(choices))
        own = [q for q in pool if q.answer == choice]
        if wanted > len(own):
            needs = f"--pick balanced needs {wanted} examples with the answer {choice}, but there are {len(own)}"
            raise InvalidInput(f"{needs}; lower --shots, or pick random")
        shots += rng.sample(own, wanted)
    rng.shuffle(shots)
    return shots


def nearest_shots(
    spec: Spec, questions: Sequence[CellQuestion], pool: Sequence[CellQuestion], count: int, left_out: int
) -> Iterator[list[CellQuestion]]:
    """Yield the most similar examples of each question, the most similar last, where it stands beside the question.
    left_out: most examples in the row of one question, which are left out; 0 if examples stand in other tables."""
    most = min(count + left_out, len(pool))
    found = nearest([q.text for q in questions], [q.text for q in pool], most, spec.similarity)
    for question, neighbours in zip(questions, found, strict=True):
        examples = [pool[number] for number, _ in neighbours if not left_out or pool[number].row != question.row]
        yield examples[:count][::-1]
