"""Options of `flexengine wrangle`: those of all tasks, with defaults and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from flexengine.errors import InvalidInput, shown

MATCH, IMPUTE, DETECT, SCHEMA, TRANSFORM = TASKS = ("match", "impute", "detect", "schema", "transform")
GIVEN, RANDOM, BALANCED, NEAREST = PICKS = ("given", "random", "balanced", "nearest")
CHARACTER, TOKEN = SIMILARITIES = ("character", "token")
YES, NO = "Yes", "No"
YES_NO = (MATCH, DETECT, SCHEMA)  # tasks whose answer is Yes or No
MAX_TOKENS = {MATCH: 3, DETECT: 3, SCHEMA: 3, IMPUTE: 10, TRANSFORM: 32}  # tokens of a generated answer
DEFAULT_SHOTS = 10
DEFAULT_TOP = 5  # candidates of a row
TRANSFORMATIONS = (
    "give --examples FILE with the columns input and output, --label COLUMN with at least two known"
    " results, or --instruction TEXT"
)
_TAKEN_BY = {
    "column": (IMPUTE, DETECT, TRANSFORM), "show": (MATCH, IMPUTE, DETECT), "top": (MATCH, SCHEMA),
    "values": (SCHEMA,), "noun": (MATCH,),
    "error": (DETECT,), "alone": (DETECT,), "missing": (MATCH, IMPUTE, DETECT, SCHEMA), "choice": (IMPUTE,),
    "closed": (IMPUTE,), "evaluate": (IMPUTE,), "group": (TRANSFORM,), "generate": YES_NO,
}  # fmt: skip
_MOST_TABLES = {MATCH: 2, SCHEMA: 2}
_LEAST = {"top": 1, "values": 0, "shots": 0, "test": 1, "max_tokens": 1, "limit": 1}


@dataclass(frozen=True)
class Spec:
    """Options of one run."""

    task: str  # one of TASKS
    tables: tuple[str, ...]  # names of the input files
    column: tuple[str, ...] = ()  # columns that are imputed, checked or transformed
    show: tuple[str, ...] = ()  # columns that prompts show; empty shows all
    label: str | None = None  # column of true answers
    evaluate: bool = False  # predict the filled cells of an imputed column, and compare
    test: int | None = None  # number of labelled rows that are predicted; None predicts all
    examples: str | None = None  # file of rows with answers, for shots
    shots: int | None = None  # examples in a prompt; None is up to DEFAULT_SHOTS
    pick: str | None = None  # how shots are chosen, one of PICKS; None is GIVEN for a file of examples, else RANDOM
    seed: int = 1234  # seed of `pick` and `test`
    similarity: str = CHARACTER  # what counts as similar, one of SIMILARITIES
    top: int | None = None  # candidates per row or column; None: match DEFAULT_TOP, schema all
    values: int = 5  # values of a column in its description
    noun: str = "Product"  # name of an entity in prompts
    error: str = "an error"  # the error that is searched for, in words
    alone: bool = False  # show the checked cell without its row
    missing: str = "nan"  # text of an empty cell
    choice: tuple[str, ...] = ()  # allowed answers
    closed: bool = False  # the allowed answers are the values in the column
    group: str | None = None  # column with the name of a transformation
    generate: bool = False  # generate Yes or No instead of scoring both
    instruction: str | None = None  # text before the shots
    max_tokens: int | None = None  # most tokens of a generated answer; None is MAX_TOKENS of the task
    delimiter: str | None = None  # the character between cells of .csv and .tsv; None is that of the format
    limit: int | None = None  # only the first rows of each table; None is all

    @property
    def yes_no(self) -> bool:
        """Return whether the answer is Yes or No."""
        return self.task in YES_NO

    @property
    def scored(self) -> bool:
        """Return whether the known answers are scored; else answers are generated."""
        return (self.yes_no and not self.generate) or bool(self.choice) or self.closed

    @property
    def picks(self) -> str:
        """Return how shots are chosen."""
        return self.pick or (GIVEN if self.examples else RANDOM)


def make_spec(task: str | None, tables: tuple[str, ...], given: Mapping[str, Any]) -> Spec:
    """Return the options of a run. Raise InvalidInput if the task is unknown, an option is not for this task, a number
    is out of range, or options exclude each other. given: options by name. None, False and an empty list stand for an
    option that is not given."""
    if task not in TASKS:
        raise InvalidInput(f"no task is given; write flexengine wrangle {'|'.join(TASKS)} TABLE -o OUTPUT")
    given = {name: value for name, value in given.items() if value not in (None, []) and value is not False}
    used: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
    for name, value in used.items():
        if task not in (takers := _TAKEN_BY.get(name, TASKS)):
            wrong = f"{_option(name)} has no effect on {task}"
            raise InvalidInput(f"{wrong}; it is for {' and '.join(takers)}; leave it out")
        if name in _LEAST and value < _LEAST[name]:
            raise InvalidInput(f"{_option(name)} is {value}; it must be at least {_LEAST[name]}")
    spec = Spec(task, tables, **used)
    faults = chain(_faults_of_tables(spec, used), _faults_of_answers(spec), _faults_of_shots(spec, used))
    if (fault := next(faults, None)) is not None:
        raise InvalidInput(fault)
    return spec


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _faults_of_tables(spec: Spec, used: Mapping[str, Any]) -> Iterator[str]:
    most = _MOST_TABLES.get(spec.task, 1)
    if not 1 <= len(spec.tables) <= most:
        allowed = "a table of pairs, or two tables" if most == 2 else "one table"
        yield f"{spec.task} has {len(spec.tables)} tables; it takes {allowed}"
    for name in ("top", "values"):
        if name in used and len(spec.tables) == 1:
            yield f"--{name} makes pairs from two tables, but one table of pairs is given; leave it out"
    if len(spec.column) > 1 and spec.task != DETECT:
        yield f"--column is given {len(spec.column)} times; {spec.task} takes one column; leave out the others"
    if spec.task in (IMPUTE, TRANSFORM) and not spec.column:
        yield f"no column is given; name the column to {spec.task} by --column NAME"
    for option, names in (("--column", spec.column), ("--show", spec.show)):
        if double := next((name for name in names if names.count(name) > 1), None):
            yield f"{option} {shown(double)} is given twice; give it once"
    if spec.alone and not spec.column:
        yield "--alone shows single cells, but no --column is given; name the columns to check"
    if spec.alone and spec.show:
        yield "--alone hides the row, and --show names its columns; leave out one of them"


def _faults_of_answers(spec: Spec) -> Iterator[str]:
    if spec.choice and spec.closed:
        yield "--choice lists the answers, and --closed takes them from the column; leave out one of them"
    if len(set(spec.choice)) != len(spec.choice) or any(not choice.strip() for choice in spec.choice):
        listed = ", ".join(map(repr, spec.choice))
        yield f"--choice is given as {listed}; each choice must be given once, and must not be empty"
    if len(spec.choice) == 1:
        yield f"--choice {shown(spec.choice[0])} is the only one; give at least two"
    if spec.max_tokens is not None and spec.scored:
        generate = ", or give --generate" if spec.yes_no else ""
        yield f"--max-tokens has no effect, as the known answers are scored; leave it out{generate}"
    if spec.test is not None and not (spec.label or spec.evaluate):
        evaluate = " or --evaluate" if spec.task == IMPUTE else ""
        yield f"--test draws rows with known answers; give --label COLUMN{evaluate}"


def _faults_of_shots(spec: Spec, used: Mapping[str, Any]) -> Iterator[str]:
    for name in ("examples", "pick"):
        if spec.shots == 0 and name in used:
            yield f"{_option(name)} has no effect with --shots 0; leave out one of them"
    if spec.picks == GIVEN and not spec.examples:
        yield "--pick given takes the first rows of a file; give it by --examples"
    if spec.picks == BALANCED and not (spec.yes_no or spec.choice or spec.closed):
        known = "give them by --choice or --closed, or pick random" if spec.task == IMPUTE else "pick random"
        yield f"--pick balanced needs known answers; {known}"
    if "seed" in used and spec.test is None and (spec.picks not in (RANDOM, BALANCED) or spec.shots == 0):
        yield "--seed has no effect, as nothing is drawn at random; leave it out"
    compared = len(spec.tables) == 2 and (spec.top is not None or spec.task == MATCH)
    if "similarity" in used and not compared and (spec.picks != NEAREST or spec.shots == 0):
        pairs = "--top" if spec.task == SCHEMA and len(spec.tables) == 2 else "two tables"
        yield f"--similarity has no effect without {pairs} or --pick nearest; leave it out"
    if spec.task == TRANSFORM and not spec.instruction:
        if spec.shots == 0:
            yield "transform with --shots 0 needs an instruction; give --instruction TEXT"
        if not spec.examples and not spec.label:
            yield f"transform needs examples or an instruction; {TRANSFORMATIONS}"
