"""The files of an evaluation. They depend on the scenarios and the models only, not on time or interruptions."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flexengine.apps.evaluate.figures import LEVEL, Draws, Figure
from flexengine.apps.evaluate.instances import Built, Instance
from flexengine.apps.evaluate.metrics import CHOICE, GENERATION, METRICS, InstanceAnswer
from flexengine.apps.evaluate.runs import Run
from flexengine.job.files import write_whole
from flexengine.job.results import encode_fields

RESULTS = ("results.json", "results.csv", "results.html", "instances.jsonl")
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Evaluation:
    """The contents of the files."""

    version: str
    runs: Sequence[Run]  # the runs; the first is the one that others are compared with
    scenarios: Sequence[Built]
    answers: Sequence[Sequence[Sequence[InstanceAnswer]]]  # answers to the instances, by run, scenario and instance
    figures: Sequence[Figure]
    draws: Draws


def write_files(evaluation: Evaluation, folder: Path) -> None:
    """Write the files RESULTS. A line of instances.jsonl is the answer of a run to an instance."""
    values = summary(evaluation)
    as_json = json.dumps(values, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    texts = [text.encode() for text in (as_json, as_csv(evaluation.figures), page(values))]
    instances = b"".join(
        encode_fields({"run": run.name, "scenario": built.scenario.name, **_line(built, instance, answer)})
        for run, of_run in zip(evaluation.runs, evaluation.answers, strict=True)
        for built, answers in zip(evaluation.scenarios, of_run, strict=True)
        for instance, answer in zip(built.instances, answers, strict=True)
    )
    for name, data in zip(RESULTS, [*texts, instances], strict=True):
        write_whole(folder / name, data)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the results as JSON values."""
    draws = {"level": LEVEL, **asdict(evaluation.draws)}
    runs = [
        {"name": run.name, "model": run.model, "lossy": run.lossy.enabled, "dtype": run.dtype}
        for run in evaluation.runs
    ]
    scenarios = [
        {
            **built.scenario.described(),
            "instances": len(built.instances),
            "unusable": sum(each.error is not None for each in built.instances),
            "shots": list(built.shots),
            "sha256": built.digests,
        }
        for built in evaluation.scenarios
    ]
    results = [asdict(figure) for figure in evaluation.figures]
    return {
        "version": evaluation.version, "bootstrap": draws, "runs": runs, "scenarios": scenarios, "results": results,
    }  # fmt: skip


def as_csv(figures: Sequence[Figure]) -> str:
    """Return the text of results.csv: a line for each figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Figure)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, figures))
    return text.getvalue()


def page(summary: dict[str, Any]) -> str:
    """Return results.html, a page without references to other files. Jinja escapes all text. summary: as in
    results.json."""
    tables, count = [], len(summary["runs"])  # a line of a scenario's table has the figures of all runs
    for scenario in summary["scenarios"]:
        own = [figure for figure in summary["results"] if figure["scenario"] == scenario["name"]]
        tables.append((scenario, [own[begin : begin + count] for begin in range(0, len(own), count)]))
    source = files("flexengine.apps.evaluate").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "signed": signed}
    return environment.from_string(source).render(s=summary, tables=tables)


def number(value: float | None) -> str:
    """Return a number with 4 significant digits after the point; "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return text.replace("-", MINUS)


def signed(value: float | None) -> str:
    """Return a number with its sign."""
    return number(value) if value is None or value < 0 else f"+{number(value)}"


def _line(built: Built, instance: Instance, answer: InstanceAnswer) -> dict[str, Any]:
    """Return an instance with its answer, and the numbers from which each metric is computed."""
    place = {"row": instance.number, "line": instance.line, "variant": instance.variant, "context": instance.context}
    if answer.error is not None:
        return {**place, "metrics": {}, "error": answer.error}
    numbers = {name: METRICS[name].measure(answer) for name in built.scenario.metrics}
    metrics = {name: list(each) if len(each) > 1 else each[0] for name, each in numbers.items()}
    own: dict[str, Any] = {"choices": answer.choices, "gold": answer.gold} if built.scenario.kind == CHOICE else {}
    if answer.unconditional:
        own["unconditional_logprobs"] = answer.unconditional
    own |= {"logprobs": answer.logprobs, "tokens": answer.tokens}
    if built.scenario.kind == GENERATION:
        own = {"text": answer.text, "references": answer.references, "tokens": answer.generated}
    return {**place, **own, "metrics": metrics, "error": None}
