"""The plan of a run: all prompts with the examples before their questions, before a model is opened."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexengine.apps.wrangle import prompts
from flexengine.apps.wrangle.pairs import check_library, matching_pairs, nearest, schema_pairs
from flexengine.apps.wrangle.questions import CellQuestion, TableQuestions, choices_of, questions_of
from flexengine.apps.wrangle.spec import (
    BALANCED,
    DEFAULT_SHOTS,
    GIVEN,
    IMPUTE,
    MATCH,
    MAX_TOKENS,
    NEAREST,
    TRANSFORM,
    TRANSFORMATIONS,
    Spec,
)
from flexengine.apps.wrangle.tables import read_table
from flexengine.errors import InvalidInput

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
                glue = prompts.glue(question.text)
                yield {**about, "context": text, "choices": [glue + choice + end for choice in self.choices]}
            else:
                yield {**about, "prompt": text, "max_tokens": most, "stop": ["\n"], "temperature": 0, "logprobs": 0}


def make_plan(spec: Spec) -> WranglePlan:
    """Read the tables and return the plan. Raise InvalidInput if they cannot be used with these options."""
    if len(spec.tables) == 2 or spec.picks == NEAREST:
        check_library()
    tables = [read_table(name, limit=spec.limit) for name in spec.tables]
    if len(tables) == 2 and spec.label and not spec.examples:
        raise InvalidInput(
            f"--label {spec.label!r} names labels of pairs, but two tables are given; give a table of pairs, or"
            " --examples with labelled pairs"
        )
    pairs = matching_pairs if spec.task == MATCH else schema_pairs
    table = tables[0] if len(tables) == 1 else pairs(tables[0], tables[1], spec)
    asked = questions_of(table, spec)
    for name in (f"{target}_{end}" for target in asked.targets for end in ENDS):
        if name in table.columns:
            raise InvalidInput(f"{table.name} has a column {name!r}, which the output adds; rename it")
    examples = None
    if spec.examples:
        examples = questions_of(read_table(spec.examples, "--examples"), spec, examples=True)
    choices = choices_of(spec, [asked, *([examples] if examples else [])])
    questions, pool = _predicted(spec, asked, examples)
    if spec.group and spec.shots != 0 and (missing := {q.group for q in questions} - {q.group for q in pool}):
        raise InvalidInput(f"group {sorted(missing)[0]!r} has no example; add rows of this group to --examples")
    classes = choices or (prompts.YES, prompts.NO)
    questions, texts = _with_shots(spec, questions, pool, classes, own=examples is None)
    if not questions:
        remedy = "give more rows, or lower --shots"
        if spec.task == IMPUTE and not spec.evaluate:
            remedy = f"column {spec.column[0]!r} has no empty cell; --evaluate predicts filled cells and compares"
        raise InvalidInput(f"{table.name} has no row to predict; {remedy}")
    plan = WranglePlan(spec, asked, tuple(questions), tuple(texts), choices)
    if (spec.label or spec.evaluate) and not plan.labelled and not examples:
        raise InvalidInput(
            f"no predicted row of {table.name} has a label in {spec.label!r}; metrics need labels: fill"
            " the column, or leave --label out"
        )
    return plan


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
            left_out = set(shared) if own else set()
            mine = [question for question in mine if question not in left_out]
            shots = [shared] * len(mine)
        for question, some in zip(mine, shots, strict=True):
            pairs = [(shot.text, shot.answer or "") for shot in some]
            made[question] = prompts.prompt(spec.instruction, pairs, question.text)
    left = [question for question in questions if question in made]
    return left, [made[question] for question in left]


def shot_count(spec: Spec, available: int, left_out: int) -> int:
    """Return the number of shots.

    Args:
        left_out: most examples in the row of one question, which NEAREST leaves out; 0 if examples stand in no row of a
            question. Else examples would be predicted and compared, so the default takes at most half of them.

    Raises:
        InvalidInput: --shots is larger than the number of examples, or there are none where they
            are wanted or needed.
    """
    if spec.shots is None:
        count = min(DEFAULT_SHOTS, available // 2 if left_out and spec.picks != NEAREST else available)
        if count == 0 and (spec.pick or spec.examples):
            raise InvalidInput(
                f"--pick {spec.picks} has {available} examples to choose from; give more rows with"
                " answers, or --shots 0"
            )
        if count == 0 and spec.task == TRANSFORM and not spec.instruction:
            raise InvalidInput(f"transform has no example to show; {TRANSFORMATIONS}")
        return count
    most = available - left_out if spec.picks == NEAREST else available
    if spec.shots > most:
        other = " in other rows" if most < available else ""
        raise InvalidInput(
            f"--shots is {spec.shots}, but there are {most} examples{other}; give at most so many, or"
            " more rows with answers by --examples or in the table"
        )
    return spec.shots


def most_of_a_row(questions: Sequence[CellQuestion], pool: Sequence[CellQuestion]) -> int:
    """Return the largest number of examples in the row of one question. There are several if a row has several checked
    cells."""
    counts = Counter(q.row for q in pool)
    return max((counts[q.row] for q in questions), default=0)


def chosen(spec: Spec, pool: Sequence[CellQuestion], count: int, choices: Sequence[str]) -> list[CellQuestion]:
    """Return the examples that all questions share: the first ones, or drawn with the seed. choices: allowed answers,
    for BALANCED.

    Raises:
        InvalidInput: an answer has too few examples.
    """
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
            raise InvalidInput(
                f"--pick balanced needs {wanted} examples with the answer {choice}, but there are"
                f" {len(own)}; lower --shots, or pick random"
            )
        shots += rng.sample(own, wanted)
    rng.shuffle(shots)
    return shots


def nearest_shots(
    spec: Spec, questions: Sequence[CellQuestion], pool: Sequence[CellQuestion], count: int, own: bool
) -> Iterator[list[CellQuestion]]:
    """Yield the most similar examples of each question, the most similar last, where it stands beside the question.
    own: examples are rows of the questions' own table. Examples of a question's own row are left out."""
    spare = most_of_a_row(questions, pool) if own else 0
    texts = [q.text for q in pool]
    found = nearest([q.text for q in questions], texts, min(count + spare, len(pool)), spec.similarity)
    for question, neighbours in zip(questions, found, strict=True):
        examples = [pool[n.number] for n in neighbours if not (own and pool[n.number].row == question.row)]
        yield examples[:count][::-1]
