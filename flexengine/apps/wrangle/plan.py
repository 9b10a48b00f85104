"""The plan of a run: all prompts, before a model is opened."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexengine.apps.wrangle import prompts
from flexengine.apps.wrangle.pairs import matching_pairs, schema_pairs
from flexengine.apps.wrangle.questions import CellQuestion, TableQuestions, choices_of, questions_of, without
from flexengine.apps.wrangle.shots import chosen, most_of_a_row, nearest_shots, shot_count
from flexengine.apps.wrangle.similar import check_library
from flexengine.apps.wrangle.spec import IMPUTE, MATCH, MAX_TOKENS, NEAREST, Spec
from flexengine.apps.wrangle.tables import WrangleTable, read_table
from flexengine.errors import InvalidInput

ENDS = ("prediction", "confidence", "failure")  # ends of the columns that the output adds


@dataclass(frozen=True)
class WranglePlan:
    """The questions of a run and their prompts.

    Attributes:
        spec: the options.
        asked: the table and all its questions.
        questions: questions that are put to the model.
        prompts: their prompts.
        choices: answers that are scored; empty if answers are generated.
    """

    spec: Spec
    asked: TableQuestions
    questions: tuple[CellQuestion, ...]
    prompts: tuple[str, ...]
    choices: tuple[str, ...]

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
                glue = prompts.glue(question.text)
                yield {**about, "context": text, "choices": [glue + choice + end for choice in self.choices]}
            else:
                yield {**about, "prompt": text, "max_tokens": most, "stop": ["\n"], "temperature": 0, "logprobs": 0}


def make_plan(spec: Spec) -> WranglePlan:
    """Read the tables and return the plan. Raise InvalidInput if they cannot be used with these options."""
    if len(spec.tables) == 2 or spec.picks == NEAREST:
        check_library()
    table = _table(spec)
    asked = questions_of(table, spec)
    _check_names(table, asked)
    examples = None
    if spec.examples:
        examples = questions_of(read_table(spec.examples, "--examples"), spec, examples=True)
    choices = choices_of(spec, [asked, *([examples] if examples else [])])
    questions, pool = _predicted(spec, asked, examples)
    if spec.group and spec.shots != 0:
        _check_groups(questions, pool)
    classes = choices or (prompts.YES, prompts.NO)
    questions, texts = _with_shots(spec, questions, pool, classes, own=examples is None)
    if not questions:
        raise InvalidInput(f"{table.name} has no row to predict; {_nothing(spec)}")
    plan = WranglePlan(spec, asked, tuple(questions), tuple(texts), choices)
    if (spec.label or spec.evaluate) and not plan.labelled and not examples:
        raise InvalidInput(
            f"no predicted row of {table.name} has a label in {spec.label!r}; metrics need labels: fill"
            " the column, or leave --label out"
        )
    return plan


def _nothing(spec: Spec) -> str:
    if spec.task == IMPUTE and not spec.evaluate:
        return f"column {spec.column[0]!r} has no empty cell; --evaluate predicts filled cells and compares"
    return "give more rows, or lower --shots"


def _table(spec: Spec) -> WrangleTable:
    tables = [read_table(name, limit=spec.limit) for name in spec.tables]
    if len(tables) == 1:
        return tables[0]
    if spec.label and not spec.examples:
        raise InvalidInput(
            f"--label {spec.label!r} names labels of pairs, but two tables are given; give a table of"
            " pairs, or --examples with labelled pairs"
        )
    return (matching_pairs if spec.task == MATCH else schema_pairs)(tables[0], tables[1], spec)


def _check_names(table: WrangleTable, asked: TableQuestions) -> None:
    for name in (f"{target}_{end}" for target in asked.targets for end in ENDS):
        if name in table.columns:
            raise InvalidInput(f"{table.name} has a column {name!r}, which the output adds; rename it")


def _predicted(
    spec: Spec, asked: TableQuestions, examples: TableQuestions | None
) -> tuple[list[CellQuestion], list[CellQuestion]]:
    """Return the questions to predict, and the examples for shots."""
    everything = asked.questions
    labelled = [q for q in everything if q.answer is not None]
    pool = [q for q in labelled if q.cell is not None] if spec.task == IMPUTE else labelled
    questions = everything if spec.task != IMPUTE or spec.evaluate else [q for q in everything if q.cell is None]
    if spec.test is not None:
        rows = sorted({q.row for q in questions if q.answer is not None})
        if spec.test > len(rows):
            raise InvalidInput(f"--test is {spec.test}, but {len(rows)} rows have known answers; give at most so many")
        drawn = set(random.Random(spec.seed).sample(rows, spec.test))
        questions = [q for q in questions if q.row in drawn]
        pool = [q for q in pool if q.row not in drawn]
    return questions, pool if examples is None else examples.questions


def _check_groups(questions: Sequence[CellQuestion], pool: Sequence[CellQuestion]) -> None:
    missing = {q.group for q in questions} - {q.group for q in pool}
    if missing:
        raise InvalidInput(f"group {sorted(missing)[0]!r} has no example; add rows of this group to --examples")


def _with_shots(
    spec: Spec, questions: list[CellQuestion], pool: list[CellQuestion], classes: Sequence[str], own: bool
) -> tuple[list[CellQuestion], list[str]]:
    """Return the questions without those that became shots, and their prompts.

    Args:
        classes: answers among which BALANCED shots are distributed.
        own: the examples are rows of the table.
    """
    made: dict[CellQuestion, str] = {}
    for group in dict.fromkeys(q.group for q in questions):
        mine, examples = ([q for q in some if q.group == group] for some in (questions, pool))
        count = shot_count(spec, len(examples), most_of_a_row(mine, examples) if own else 0)
        if spec.picks == NEAREST and count:
            shots = list(nearest_shots(spec, mine, examples, count, own))
        else:
            shared = chosen(spec, examples, count, classes)
            mine = without(mine, shared) if own else mine
            shots = [shared] * len(mine)
        made |= {question: _prompt(spec, some, question) for question, some in zip(mine, shots, strict=True)}
    left = [question for question in questions if question in made]
    return left, [made[question] for question in left]


def _prompt(spec: Spec, shots: Sequence[CellQuestion], question: CellQuestion) -> str:
    pairs = [(shot.text, shot.answer or "") for shot in shots]
    return prompts.prompt(spec.instruction, pairs, question.text)
