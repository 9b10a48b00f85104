"""Scenarios: what is asked of a model, as YAML files describe it. docs/evaluate.md lists the fields."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flexengine.apps.evaluate.metrics import CHOICE, DEFAULT, GENERATION, KINDS, METRICS, PERPLEXITY
from flexengine.apps.evaluate.perturb import Perturbations
from flexengine.apps.evaluate.templates import columns_of
from flexengine.apps.evaluate.yaml_fields import FieldLines, read
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, shown
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
    """The rows of a scenario.

    Attributes:
        file: .jsonl, .csv, .tsv, .txt, .parquet or .arrow; a relative name is relative to the scenario's file.
        limit: most rows that are evaluated; None is all.
    """

    file: str
    limit: Annotated[int | None, Limit(1)] = None


@dataclass(frozen=True)
class Prompt:
    """The text before an answer: instructions, shots and the template, with separators between them.

    Attributes:
        template: text with columns in braces. In a perplexity scenario this is the text that is scored.
        instructions: text before the shots.
        separator: text after the instructions and after each shot.
        delimiter: text between a prompt and its answer.
    """

    template: str
    instructions: str = ""
    separator: str = "\n\n"
    delimiter: str = " "


@dataclass(frozen=True)
class Choices:
    """The answers among which a model chooses. Exactly one of the first three fields is given.

    Attributes:
        values: the same answers for all rows.
        column: column that holds a list of answers (in a table of text: a JSON list).
        columns: columns that hold one answer each.
        unconditional: context of the unconditional log probability; "" is the empty context.
    """

    values: tuple[str, ...] = ()
    column: str | None = None
    columns: tuple[str, ...] = ()
    unconditional: str = "Answer:"


@dataclass(frozen=True)
class Label:
    """The right answer.

    Attributes:
        column: column that holds the label. A list of texts, in a generation scenario, allows several answers.
        form: text: the answer itself; index: its number from 0; letter: A, B, ...
    """

    column: str
    form: str = TEXT


@dataclass(frozen=True)
class FewShot:
    """Rows that are shown with their answers before the prompt, the same for all rows.

    Attributes:
        count: number of shots.
        file: rows to draw shots from; None draws them from the scenario's own rows, which are then not evaluated.
        seed: seed of the draw.
        balanced: draw as many rows of each label as possible.
    """

    count: Annotated[int, Limit(1)]
    file: str | None = None
    seed: int = 0
    balanced: bool = True


@dataclass(frozen=True)
class AnswerGeneration:
    """How answers are generated, greedily.

    Attributes:
        max_tokens: most tokens of an answer.
        stop: texts that end an answer.
    """

    max_tokens: int = 32
    stop: tuple[str, ...] = ("\n",)


@dataclass(frozen=True)
class Scenario:
    """A scenario. `Label`, `FewShot` and `Perturbations` are None if the file has no such group.

    Attributes:
        kind: one of KINDS.
        name: name in all results; the file's name without its suffix if the file gives none.
        metrics: names in `metrics.METRICS`; those of `metrics.DEFAULT` if the file gives none.
        origin: lines of the fields, for messages.
    """

    kind: Annotated[str, KINDS]
    data: Data
    prompt: Prompt
    name: str = ""
    choices: Choices = Choices()
    label: Label | None = None
    few_shot: FewShot | None = None
    generation: AnswerGeneration = AnswerGeneration()
    perturbations: Perturbations | None = None
    metrics: tuple[str, ...] = ()
    origin: FieldLines = field(default=FieldLines("", {}), compare=False, metadata={"in_file": False})

    def path(self, name: str) -> Path:
        """Return the path of a file that the scenario names."""
        return Path(self.origin.file).parent / name

    def described(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {f.name: _json(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "origin"}


def _json(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


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
    _check_groups(scenario)
    _check_numbers(scenario)
    _check_texts(scenario)
    _check_lists(scenario)
    labelled = scenario.label is not None
    metrics = scenario.metrics or DEFAULT[scenario.kind, labelled or scenario.kind == PERPLEXITY]
    _check_metrics(scenario, metrics)
    return dataclasses.replace(scenario, metrics=metrics)


def _check_groups(scenario: Scenario) -> None:
    """Raise InvalidInput if a group has no effect in this kind of scenario, or one that it needs is missing."""
    kind, origin = scenario.kind, scenario.origin
    allowed = _GROUPS[kind]
    for group in _ALL_GROUPS:
        if group in origin.lines and group not in allowed:
            raise origin.fault(group, f"{group} has no effect in a scenario of kind {kind}; remove it")
    if kind == PERPLEXITY:
        for name in ("instructions", "separator", "delimiter"):
            if f"prompt.{name}" in origin.lines:
                raise origin.fault(f"prompt.{name}", f"prompt.{name} has no effect in a scenario of kind {kind},"
                                   " whose whole text is the template; remove it")  # fmt: skip
    choices = scenario.choices
    ways = [name for name in ("values", "column", "columns") if getattr(choices, name)]
    if kind == CHOICE and len(ways) != 1:
        raise origin.fault(
            "choices", f"choices has {', '.join(ways) or 'none'} of values, column and columns; give exactly one"
        )
    for name in ("values", "columns"):
        if ways == [name] and len(given := getattr(choices, name)) < 2:
            raise origin.fault(f"choices.{name}", f"choices.{name} has {len(given)} entry; give at least 2")
    if not all(choices.values):
        raise origin.fault("choices.values", "choices.values holds an empty text, which no token stands for; remove it")
    if len(set(choices.values)) < len(choices.values):
        raise origin.fault("choices.values", "choices.values holds a text twice; remove one")
    if scenario.few_shot is not None and scenario.label is None:
        raise origin.fault("few_shot", "few_shot shows rows with their answers; give label, or remove few_shot")


def _check_numbers(scenario: Scenario) -> None:
    try:
        SamplingParams(max_tokens=scenario.generation.max_tokens, stop=scenario.generation.stop)
    except InvalidInput as error:
        raise scenario.origin.fault("generation", f"generation: {error}") from error
    if scenario.perturbations is not None and not scenario.perturbations.named():
        raise scenario.origin.fault("perturbations", "perturbations: none is on; set typos, lower_case, extra_space or"
                                    " contractions")  # fmt: skip


def _check_texts(scenario: Scenario) -> None:
    origin, label = scenario.origin, scenario.label
    if not scenario.name.strip() or any(not c.isprintable() for c in scenario.name):
        raise origin.fault("name", f"name is {shown(scenario.name)}; it must be printable text of at least 1 character")
    try:
        columns = columns_of(scenario.prompt.template)
    except InvalidInput as error:
        raise origin.fault("prompt.template", f"prompt.template: {error}") from error
    if not columns:
        raise origin.fault(
            "prompt.template",
            "prompt.template has no column in braces, so all rows would be alike; add one, such as {question}",
        )
    forms = (TEXT, INDEX, LETTER) if scenario.kind == CHOICE else (TEXT,)
    if label is not None and label.form not in forms:
        raise origin.fault(
            "label.form",
            f"label.form is {shown(label.form)}; in a scenario of kind {scenario.kind} it must be {' or '.join(forms)}",
        )


def _check_lists(scenario: Scenario) -> None:
    """Raise InvalidInput if a list is empty, which would otherwise mean the same as no list."""
    perturbed = scenario.perturbations.columns if scenario.perturbations else ()
    for name, given in (("metrics", scenario.metrics), ("perturbations.columns", perturbed)):
        if name in scenario.origin.lines and not given:
            raise scenario.origin.fault(name, f"{name} is an empty list; name at least one, or remove it")


def _check_metrics(scenario: Scenario, metrics: Sequence[str]) -> None:
    known = [name for name, metric in METRICS.items() if metric.kind == scenario.kind]
    for name in metrics:
        if name not in known:
            raise scenario.origin.fault(
                "metrics", f"metrics holds {shown(name)}; for the kind {scenario.kind} choose from {', '.join(known)}"
            )
        if METRICS[name].needs_label and scenario.label is None:
            free = [other for other in known if not METRICS[other].needs_label]
            raise scenario.origin.fault("metrics", f"the metric {name} needs labels; give label with the column that"
                                        f" holds them, or choose from {', '.join(free)}")  # fmt: skip
    if len(set(metrics)) < len(metrics):
        raise scenario.origin.fault("metrics", "metrics names a metric twice; remove one")
