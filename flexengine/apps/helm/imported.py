"""A runner of HELM that takes results from the files that `flexengine helm import` has completed.

helm-run --runner-class-name flexengine.apps.helm.imported.ImportedRunner ...

It needs nothing but HELM, so that flexengine may be installed beside HELM without its own dependencies.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor, ExecutorError
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.common.request import GeneratedOutput, RequestResult, Token

from flexengine.apps.helm.requests import STATE, digest_of

Results = Mapping[str, Mapping[str, Any]]  # of requests, by their digests


def requests_of(state: ScenarioState) -> list[dict[str, Any]]:
    """Return the requests of a state."""
    return [dataclasses.asdict(each.request) for each in state.request_states]


def helm_result(found: Mapping[str, Any]) -> RequestResult:
    """Return HELM's form of a result that `requests.result_of` made."""
    completions = [
        GeneratedOutput(each["text"], each["logprob"], [Token(**token) for token in each["tokens"]])
        for each in found["completions"]
    ]
    return RequestResult(**{**found, "completions": completions})


def with_results(state: ScenarioState, results: Results) -> ScenarioState:
    """Return a state with results. Raise ExecutorError, as HELM's executor, if a request has none, or has failed."""
    done = []
    for each, request in zip(state.request_states, requests_of(state), strict=True):
        found = results.get(digest_of(request))
        if found is None or not found["success"]:
            why = "There is no result." if found is None else found["error"]
            raise ExecutorError(f"{why} Request: {each.request}")
        done.append(dataclasses.replace(each, result=helm_result(found)))
    return dataclasses.replace(state, request_states=done)


class ImportedExecutor(Executor):  # type: ignore[misc]
    """Gives requests the results of the present run."""

    results: Results = {}

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        """Return the state with results. Raise ExecutorError if a request has none, or has failed."""
        return with_results(scenario_state, self.results)


class ImportedRunner(Runner):  # type: ignore[misc]
    """Computes metrics of imported results."""

    def __init__(self, execution_spec: Any, *options: Any, **named: Any) -> None:
        super().__init__(execution_spec, *options, **named)
        self.executor = ImportedExecutor(execution_spec)

    def run_one(self, run_spec: RunSpec) -> None:
        """Run with the results in the run's STATE. Raise ExecutorError if there are none."""
        path = Path(self._get_run_path(run_spec)) / STATE
        if not path.exists():
            fault = f"There is no {path}"
            raise ExecutorError(f"{fault}: call helm-run with --dry-run, then flexengine helm export, run and import.")
        states = json.loads(path.read_text(encoding="utf-8"))["request_states"]
        found = {digest_of(each["request"]): each["result"] for each in states if "result" in each}
        if not found:
            raise ExecutorError(f"{path} has no results: call flexengine helm import.")
        self.executor.results = found
        super().run_one(run_spec)
