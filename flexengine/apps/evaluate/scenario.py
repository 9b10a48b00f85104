"""Scenarios: what is asked of a model, as YAML files describe it (docs/evaluate.md lists the fields)."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from flexengine.apps.evaluate.metrics import CHOICE, DEFAULT, GENERATION, KINDS, METRICS, PERPLEXITY
from flexengine.apps.evaluate.perturb import Perturbations
from flexengine.apps.evaluate.yaml_fields import FieldLines, read
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
from flexengine.job.delimiters import delimiter_of
from flexengine.job.prompt_template import columns_of
from flexengine.job.remedies import OF_JOB
from flexengine.records import Limit

TEXT, INDEX, LETTER = "text", "index", "letter"
_GROUPS = {  # groups of fields that a kind of scenario has, besides data, prompt, metrics and perturbations
    CHOICE: ("choices", "label", "few_shot"),
    GENERATION: ("label", "few_shot", "generation"),
    PERPLEXITY: (),
}
_ALL_GROUPS = ("choices", "label", "few_shot", "generation")


@dataclass(frozen=True)
class Data:
    """The rows of a scenario."""

    file: str  # .jsonl, .csv, .tsv, .txt, .parquet or .arrow; a relative name is relative to the scenario's file
    limit: Annotated[int | None, Limit(1)] = None  # most rows that are evaluated; None is all
    delimiter: str | None = None  # the character between cells of .csv and .tsv, also of few_shot.file


@dataclass(frozen=True)
class Prompt:
    """The text before an answer: instructions, shots and the template, with separators between them."""

    template: str  # text with columns in braces; in a perplexity scenario this is the text that is scored
    instructions: str = ""  # text before the shots
    separator: str = "\n\n"  # text after the instructions and after each shot
    delimiter: str = " "  # text between a prompt and its answer


@dataclass(frozen=True)
class Choices:
    """The answers among which a model chooses. Exactly one of the first three fields is given."""

    values: tuple[str, ...] = ()  # the same answers for all rows
    column: str | None = None  # column that holds a list of answers (in a table of text: a JSON list)
    columns: tuple[str, ...] = ()  # columns that hold one answer each
    unconditional: str = "Answer:"  # context of the unconditional log probability; "" is the empty context


@dataclass(frozen=True)
class Label:
    """The right answer."""

    column: str  # holds the label; a list of texts, in a generation scenario, allows several answers
    form: str = TEXT  # text: the answer itself; index: its number from 0; letter: A, B, ...


@dataclass(frozen=True)
class FewShot:
    """Rows that are shown with their answers before the prompt, the same for all rows."""

    count: Annotated[int, Limit(1)]
    file: str | None = None  # rows to draw shots from; None draws from the scenario's own, which are then not evaluated
    seed: int = 0  # seed of the draw
    balanced: bool = True  # draw as many rows of each label as possible


@dataclass(frozen=True)
class AnswerGeneration:
    """How answers are generated, greedily."""

    max_tokens: int = 32  # most tokens of an answer
    stop: tuple[str, ...] = ("\n",)  # texts that end an answer


@dataclass(frozen=True)
class Scenario:
    """A scenario. `Label`, `FewShot` and `Perturbations` are None if the file has no such group."""

    kind: Annotated[str, KINDS]
    data: Data
    prompt: Prompt
    name: str = ""  # name in all results; the file's name without its suffix if the file gives none
    choices: Choices = Choices()
    label: Label | None = None
    few_shot: FewShot | None = None
    generation: AnswerGeneration = AnswerGeneration()
    perturbations: Perturbations | None = None
    metrics: tuple[str, ...] = ()  # names in `metrics.METRICS`; those of `metrics.DEFAULT` if the file gives none
    # Lines of the fields, for messages.
    origin: FieldLines = field(default=FieldLines("", {}), compare=False, metadata={"in_file": False})

    def path(self, name: str) -> Path:
        """Return the path of a file that the scenario names."""
        return Path(self.origin.file).parent / name

    def delimiter(self, name: str) -> str | None:
        """Return `data.delimiter` if a file is a table of text, else None."""
        return self.data.delimiter if {".csv", ".tsv"} & set(map(str.lower, Path(name).suffixes)) else None

    def described(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "origin"}


def load(paths: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of some files. Raise InvalidInput if one cannot be used, or if two share a name."""
    scenarios = [_load(Path(path)) for path in paths]
    seen: dict[str, Scenario] = {}
    for scenario in scenarios:
        if (first := seen.setdefault(scenario.name, scenario)) is not scenario:
            raise scenario.origin.fault("name", f"the name {shown(scenario.name)} is that of {first.origin.file}, too;"
                                        " give each scenario a name of its own")  # fmt: skip
    return scenarios


def _load(path: Path) -> Scenario:
    scenario, origin = read(path, Scenario)
    scenario = dataclasses.replace(scenario, origin=origin, name=scenario.name or path.stem)
    labelled = scenario.label is not None or scenario.kind == PERPLEXITY
    metrics = scenario.metrics or DEFAULT[scenario.kind, labelled]
    faults = (
        _group_faults(scenario),
        _choice_faults(scenario),
        _value_faults(scenario),
        _metric_faults(scenario, metrics),
    )
    for field_name, text in chain(*faults):
        raise origin.fault(field_name, text)
    return dataclasses.replace(scenario, metrics=metrics)


# The faults of a scenario: the name of a field, and the message.


def _group_faults(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield groups that have no effect in this kind of scenario, and the choices if one is needed."""
    kind, given = scenario.kind, scenario.origin.lines
    for group in _ALL_GROUPS:
        if group in given and group not in _GROUPS[kind]:
            yield group, f"{group} has no effect in a scenario of kind {kind}; remove it"
    for name in ("instructions", "separator", "delimiter"):
        if kind == PERPLEXITY and f"prompt.{name}" in given:
            why = f"has no effect in a scenario of kind {kind}, whose whole text is the template; remove it"
            yield f"prompt.{name}", f"prompt.{name} {why}"


def _choice_faults(scenario: Scenario) -> Iterator[tuple[str, str]]:
    choices = scenario.choices
    ways = [name for name in ("values", "column", "columns") if getattr(choices, name)]
    if scenario.kind == CHOICE and len(ways) != 1:
        listed = ", ".join(ways) or "none"
        yield "choices", f"choices has {listed} of values, column and columns; give exactly one"
    for name in ("values", "columns"):
        if ways == [name] and len(texts := getattr(choices, name)) < 2:
            yield f"choices.{name}", f"choices.{name} has {len(texts)} entry; give at least 2"
    if not all(choices.values):
        yield "choices.values", "choices.values holds an empty text, which no token stands for; remove it"
    if len(set(choices.values)) < len(choices.values):
        yield "choices.values", "choices.values holds a text twice; remove one"


def _value_faults(scenario: Scenario) -> Iterator[tuple[str, str]]:
    label, perturbed = scenario.label, scenario.perturbations
    if scenario.few_shot is not None and label is None:
        yield "few_shot", "few_shot shows rows with their answers; give label, or remove few_shot"
    names = (scenario.data.file, (scenario.few_shot and scenario.few_shot.file) or "")
    try:
        delimiter_of(scenario.data.delimiter, ",", OF_JOB)
        if scenario.data.delimiter is not None and not any(map(scenario.delimiter, names)):
            yield "data.delimiter", "data.delimiter is for .csv and .tsv files, and no file is one; remove it"
    except InvalidInput as error:
        yield "data.delimiter", f"data.delimiter: {error}"
    try:
        SamplingParams(max_tokens=scenario.generation.max_tokens, stop=scenario.generation.stop)
    except InvalidInput as error:
        yield "generation", f"generation: {error}"
    if perturbed is not None and not perturbed.named():
        yield "perturbations", "perturbations: none is on; set typos, lower_case, extra_space or contractions"
    if not scenario.name.strip() or not scenario.name.isprintable():
        yield "name", f"name is {shown(scenario.name)}; it must be printable text of at least 1 character"
    try:
        if not columns_of(scenario.prompt.template):
            why = "has no column in braces, so all rows would be alike; add one, such as {question}"
            yield "prompt.template", f"prompt.template {why}"
    except InvalidInput as error:
        yield "prompt.template", f"prompt.template: {error}"
    forms = (TEXT, INDEX, LETTER) if scenario.kind == CHOICE else (TEXT,)
    if label is not None and label.form not in forms:
        must = f"in a scenario of kind {scenario.kind} it must be {' or '.join(forms)}"
        yield "label.form", f"label.form is {shown(label.form)}; {must}"
    # An empty list would mean the same as no list.
    for name, texts in (("metrics", scenario.metrics), ("perturbations.columns", perturbed and perturbed.columns)):
        if name in scenario.origin.lines and not texts:
            yield name, f"{name} is an empty list; name at least one, or remove it"


def _metric_faults(scenario: Scenario, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    known = [name for name, metric in METRICS.items() if metric.kind == scenario.kind]
    for name in metrics:
        if name not in known:
            choose = f"for the kind {scenario.kind} choose from {', '.join(known)}"
            yield "metrics", f"metrics holds {shown(name)}; {choose}"
        elif METRICS[name].needs_label and scenario.label is None:
            free = ", ".join(other for other in known if not METRICS[other].needs_label)
            labels = f"give label with the column that holds them, or choose from {free}"
            yield "metrics", f"the metric {name} needs labels; {labels}"
    if len(set(metrics)) < len(metrics):
        yield "metrics", "metrics names a metric twice; remove one"
