"""Comparison of two suites of HELM: completions, and metrics."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ACCURACY = [json.dumps({"name": name, "split": "test"}) for name in ("exact_match", "exact_match_indicator")]
OF_TIME = ("inference_runtime", "batch_size")  # metrics that are no results; a batch has no time of a request


@dataclass(frozen=True)
class Outcome:
    """How two suites compare.

    Attributes:
        completions: completions of all runs.
        equal_completions: how many of them have the same text and the same tokens.
        metrics: metrics of all runs.
        largest_difference: largest relative difference of a metric; infinite if one side lacks a metric.
        accuracy: exact_match of the test instances, or the metric that takes its place, by run.
    """

    completions: int
    equal_completions: int
    metrics: int
    largest_difference: float
    accuracy: dict[str, float]

    def fault(self) -> tuple[int, float]:
        """Return a number that is larger for a worse outcome."""
        return self.completions - self.equal_completions, self.largest_difference


def compared(ours: Path, theirs: Path) -> Outcome:
    """Compare the suites in two folders, which have the same runs of different models. Raise ValueError if the runs
    differ."""
    mine, other = (dict(_runs(folder)) for folder in (ours, theirs))
    if mine.keys() != other.keys():
        raise ValueError(f"the runs are {sorted(mine)} and {sorted(other)}")
    completions = equal = metrics = 0
    largest = 0.0
    accuracy: dict[str, float] = {}
    for name in sorted(mine):
        pairs = list(zip(_completions(mine[name]), _completions(other[name]), strict=True))
        completions += len(pairs)
        equal += sum(one == two for one, two in pairs)
        one, two = _metrics(mine[name]), _metrics(other[name])
        metrics += len(two)
        largest = max([largest, *(_difference(one.get(key), two.get(key)) for key in one | two)])
        accuracy[name] = next(value for key in _ACCURACY if (value := two.get(key)) is not None)
    return Outcome(completions, equal, metrics, largest, accuracy)


def _runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name, without that of the model, and the folder of each run."""
    for path in folder.glob("benchmark_output/runs/bench/*/stats.json"):
        yield path.parent.name.rpartition("model=")[0], path.parent


def _completions(run: Path) -> list[tuple[str, list[str]]]:
    states = json.loads((run / "scenario_state.json").read_text("utf-8"))["request_states"]
    return [(each["text"], [token["text"] for token in each["tokens"]])
            for state in states for each in state["result"]["completions"]]  # fmt: skip


def _metrics(run: Path) -> dict[str, float | None]:
    """Return the mean of each metric by its name, split and perturbation."""
    stats: list[dict[str, Any]] = json.loads((run / "stats.json").read_text("utf-8"))
    return {json.dumps(each["name"], sort_keys=True): each.get("mean") for each in stats
            if each["name"]["name"] not in OF_TIME}  # fmt: skip


def _difference(one: float | None, two: float | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return abs(one - two) / max(abs(two), 1e-9) if one != two else 0.0
