"""One job for all scenarios: the rows of its input, and the answers in its results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexengine.apps.evaluate.instances import Built, Instance
from flexengine.apps.evaluate.metrics import CHOICE, GENERATION, METRICS, InstanceAnswer
from flexengine.apps.evaluate.scenario import Scenario
from flexengine.job.results import logprob_of
from flexengine.job.rows import without_place

Row = Mapping[str, Any]


def rows_of(scenarios: Sequence[Built]) -> list[dict[str, Any]]:
    """Return the rows of the job: one for each instance without error, and one for each list of choices that is scored
    after the unconditional context. Rows of one scenario follow each other, so that their shots are shared."""
    return [row for built in scenarios for row in _rows(built)]


def _rows(built: Built) -> Iterator[dict[str, Any]]:
    scenario = built.scenario
    runnable = [each for each in built.instances if each.error is None]
    for instance in runnable:
        names = {"scenario": scenario.name, "row": instance.number, "variant": instance.variant}
        yield names | _request(scenario, instance)
    if any(METRICS[name].unconditional for name in scenario.metrics):
        for choices in dict.fromkeys(each.choices for each in runnable):
            yield {"scenario": scenario.name, "context": scenario.choices.unconditional,
                   "choices": _continuations(scenario, choices)}  # fmt: skip


def _request(scenario: Scenario, instance: Instance) -> dict[str, Any]:
    if scenario.kind == CHOICE:
        return {"context": instance.context, "choices": _continuations(scenario, instance.choices)}
    if scenario.kind == GENERATION:
        generation = scenario.generation
        return {"prompt": instance.context, "max_tokens": generation.max_tokens, "stop": list(generation.stop)}
    return {"text": instance.context}


def _continuations(scenario: Scenario, choices: Sequence[str]) -> list[str]:
    return [scenario.prompt.delimiter + choice for choice in choices]


def answers_of(scenarios: Sequence[Built], results: Sequence[Row]) -> list[list[InstanceAnswer]]:
    """Return the answers to the instances of each scenario.

    Args:
        results: the rows with the fields of the job's output, in the order of `rows_of`.
    """
    left = iter(results)
    return [_answers(built, [next(left) for _ in _rows(built)]) for built in scenarios]


def _answers(built: Built, results: Sequence[Row]) -> list[InstanceAnswer]:
    own = iter(row for row in results if "variant" in row)
    alone = {tuple(row["choices"]): row for row in results if "variant" not in row}
    return [
        InstanceAnswer(error=each.error) if each.error is not None else _answer(built.scenario, each, next(own), alone)
        for each in built.instances
    ]


def _answer(
    scenario: Scenario, instance: Instance, result: Row, alone: Mapping[tuple[str, ...], Row]
) -> InstanceAnswer:
    after = alone.get(tuple(_continuations(scenario, instance.choices)))
    for row in (result, after):
        if row is not None and row["error"] is not None:
            # The engine names lines of the job's input, which the user did not write.
            return InstanceAnswer(error=f"line {instance.line}: {without_place(row['error'])}")
    if scenario.kind == GENERATION:
        return InstanceAnswer(
            text=result["generated_text"], generated=result["completion_tokens"], references=instance.references
        )
    scores = result["scores"]
    return InstanceAnswer(
        choices=instance.choices or (instance.context,),
        logprobs=tuple(map(logprob_of, scores)),
        tokens=tuple(score["tokens"] for score in scores),
        unconditional=tuple(map(logprob_of, after["scores"])) if after is not None else (),
        gold=instance.gold,
    )
