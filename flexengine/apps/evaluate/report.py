"""The files of an evaluation. They depend on the scenarios and the models only, not on time or interruptions."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flexengine.apps.evaluate.answers import CHOICE, GENERATION, InstanceAnswer
from flexengine.apps.evaluate.bootstrap import LEVEL
from flexengine.apps.evaluate.figures import Draws, Figure
from flexengine.apps.evaluate.instances import Built, Instance
from flexengine.apps.evaluate.metrics import METRICS
from flexengine.apps.evaluate.page import page
from flexengine.apps.evaluate.runs import Run
from flexengine.job.results import encode_fields
from flexengine.job.whole_file import write_whole

RESULTS = ("results.json", "results.csv", "results.html", "instances.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """The contents of the files.

    Attributes:
        version: version of the program.
        runs: the runs; the first is the one that others are compared with.
        scenarios: the scenarios.
        answers: answers to the instances, by run, scenario and instance.
        figures: all figures.
        draws: how intervals were computed.
    """

    version: str
    runs: Sequence[Run]
    scenarios: Sequence[Built]
    answers: Sequence[Sequence[Sequence[InstanceAnswer]]]
    figures: Sequence[Figure]
    draws: Draws


def write_files(evaluation: Evaluation, folder: Path) -> None:
    """Write the files RESULTS."""
    texts = (as_json(evaluation), as_csv(evaluation.figures), page(summary(evaluation)))
    for name, data in zip(RESULTS, [*(text.encode() for text in texts), _instances(evaluation)], strict=True):
        write_whole(folder / name, data)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the results as JSON values."""
    draws = {"level": LEVEL, "resamples": evaluation.draws.resamples, "seed": evaluation.draws.seed}
    runs = [
        {"name": run.name, "model": run.model, "lossy": run.lossy.enabled, "dtype": run.dtype}
        for run in evaluation.runs
    ]
    return {"version": evaluation.version, "bootstrap": draws, "runs": runs,
            "scenarios": [_scenario(built) for built in evaluation.scenarios],
            "results": [asdict(figure) for figure in evaluation.figures]}  # fmt: skip


def as_json(evaluation: Evaluation) -> str:
    """Return the text of results.json."""
    return json.dumps(summary(evaluation), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def _scenario(built: Built) -> dict[str, Any]:
    errors = sum(each.error is not None for each in built.instances)
    return {**built.scenario.described(), "instances": len(built.instances), "unusable": errors,
            "shots": list(built.shots), "sha256": built.digests}  # fmt: skip


def as_csv(figures: Sequence[Figure]) -> str:
    """Return the text of results.csv: a line for each figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Figure)]
    writer.writerow(names)
    writer.writerows([getattr(figure, name) for name in names] for figure in figures)
    return text.getvalue()


def _instances(evaluation: Evaluation) -> bytes:
    """Return the lines of instances.jsonl: the answer of each run to each instance."""
    return b"".join(
        encode_fields({"run": run.name, "scenario": built.scenario.name, **_line(built, instance, answer)})
        for run, of_run in zip(evaluation.runs, evaluation.answers, strict=True)
        for built, answers in zip(evaluation.scenarios, of_run, strict=True)
        for instance, answer in zip(built.instances, answers, strict=True)
    )


def _line(built: Built, instance: Instance, answer: InstanceAnswer) -> dict[str, Any]:
    return {
        "row": instance.number, "line": instance.line, "variant": instance.variant, "context": instance.context,
        **dict(_answer(built.scenario.kind, answer)), "metrics": _metrics(built, answer), "error": answer.error,
    }  # fmt: skip


def _answer(kind: str, answer: InstanceAnswer) -> Iterator[tuple[str, Any]]:
    if answer.error is not None:
        return
    if kind == GENERATION:
        yield from {"text": answer.text, "references": answer.references, "tokens": answer.generated}.items()
        return
    if kind == CHOICE:
        yield from {"choices": answer.choices, "gold": answer.gold}.items()
        if answer.unconditional:
            yield "unconditional_logprobs", answer.unconditional
    yield from {"logprobs": answer.logprobs, "tokens": answer.tokens}.items()


def _metrics(built: Built, answer: InstanceAnswer) -> dict[str, Any]:
    """Return the numbers from which each metric is computed."""
    if answer.error is not None:
        return {}
    numbers = {name: METRICS[name].measure(answer) for name in built.scenario.metrics}
    return {name: list(each) if len(each) > 1 else each[0] for name, each in numbers.items()}
