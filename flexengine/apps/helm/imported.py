"""A runner of HELM that takes results from the files that `flexengine helm import` has completed.

helm-run --runner-class-name flexengine.apps.helm.imported.ImportedRunner ...

It needs nothing but HELM, so that flexengine may be installed beside HELM without its own dependencies.
"""

import json
from pathlib import Path
from typing import Any

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor, ExecutorError
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner

from flexengine.apps.helm.requests import STATE, digest_of
from flexengine.apps.helm.states import Results, with_results


class ImportedExecutor(Executor):  # type: ignore[misc]
    """Gives requests the results of the present run.

    Attributes:
        results: results of the present run.
    """

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
            raise ExecutorError(
                f"There is no {path}: call helm-run with --dry-run, then flexengine helm export, run and import."
            )
        states = json.loads(path.read_text(encoding="utf-8"))["request_states"]
        found = {digest_of(each["request"]): each["result"] for each in states if "result" in each}
        if not found:
            raise ExecutorError(f"{path} has no results: call flexengine helm import.")
        self.executor.results = found
        super().run_one(run_spec)
