"""A runner of HELM that gives all requests of a suite to the engine at once.

helm-run --runner-class-name flexengine.apps.helm.runner.FlexRunner ...

HELM's own runner prepares, executes and measures one run after the other. Here each run is a greenlet: it prepares its
requests and stops where HELM would execute them. When all runs have stopped, the requests of each deployment are one
job, and the runs continue with its results.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from greenlet import getcurrent, greenlet
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner, RunnerError
from helm.common.hierarchical_logger import hlog, htrack_block

from flexengine.apps.helm.exchange import Row, decisive, encoding_of, engine_of, rows_of, run_batch
from flexengine.apps.helm.imported import Results, requests_of, with_results
from flexengine.apps.helm.plugin import CLIENT
from flexengine.apps.helm.requests import ID, digest_of, result_of

FOLDER = "flexengine"  # in HELM's output path: the files of jobs


@dataclass(frozen=True)
class Stopped:
    """A run that waits for results of its requests."""

    deployment: str
    arguments: dict[str, Any]
    requests: list[dict[str, Any]]
    rows: list[Row]


class StoppingExecutor(Executor):  # type: ignore[misc]
    """Sends the requests of a run to the greenlet that began it, and takes their results from there."""

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        """Return the state with results. States of dry runs and of other clients are executed at once, by HELM.

        Raises:
            InvalidInput: the engine cannot serve a request.
            ExecutorError: a request has failed.
        """
        deployment = scenario_state.adapter_spec.model_deployment
        spec = get_model_deployment(deployment).client_spec
        if self.execution_spec.dry_run or spec.class_name != CLIENT:
            return super().execute(scenario_state)
        arguments, requests = dict(spec.args), requests_of(scenario_state)
        rows = rows_of(requests, encoding_of(arguments))
        results: Results = getcurrent().parent.switch(Stopped(deployment, arguments, requests, rows))
        return with_results(scenario_state, results)


class FlexRunner(Runner):  # type: ignore[misc]
    """Runs a suite with one job per deployment."""

    def __init__(self, execution_spec: Any, output_path: str, suite: str, *options: Any, **named: Any) -> None:
        super().__init__(execution_spec, output_path, suite, *options, **named)
        self.executor = StoppingExecutor(execution_spec)
        self._folder = Path(output_path) / FOLDER / suite

    def run_all(self, run_specs: list[RunSpec]) -> None:
        """Run a suite.

        Raises:
            RunnerError: runs have failed, the others are finished.
            Exception: the error of the first run that fails, with --exit-on-error.
        """
        failed: list[str] = []
        waiting: list[tuple[str, greenlet, Stopped]] = []
        for spec in run_specs:
            run = greenlet(self.run_one)
            stopped = self._step("Preparing", spec.name, partial(run.switch, spec), failed)
            if isinstance(stopped, Stopped):
                waiting.append((spec.name, run, stopped))
        runs: dict[str, list[Stopped]] = {}
        for _, _, stopped in waiting:
            runs.setdefault(stopped.deployment, []).append(stopped)
        with htrack_block(f"Computing the requests of {len(waiting)} runs"):
            results = {deployment: self._compute(deployment, own) for deployment, own in runs.items()}
        for name, run, stopped in waiting:
            self._step("Measuring", name, partial(run.switch, results[stopped.deployment]), failed)
        if failed:
            raise RunnerError(f"Failed runs: [{', '.join(failed)}]")

    def _step(self, what: str, name: str, step: Callable[[], Any], failed: list[str]) -> Any:
        """Return what the greenlet of a run sends next. If the run fails, add its name to `failed`, or raise its error
        with --exit-on-error."""
        try:
            with htrack_block(f"{what} {name}"):
                return step()
        except Exception:
            if self.exit_on_error:
                raise
            hlog(f"Error when running {name}:\n{traceback.format_exc()}")
            failed.append(name)
            return None

    def _compute(self, deployment: str, runs: Sequence[Stopped]) -> Results:
        arguments = runs[0].arguments
        encoding = encoding_of(arguments)
        rows = {row[ID]: row for run in runs for row in run.rows}
        requests = {digest_of(request): request for run in runs for request in run.requests}
        total = sum(len(run.requests) for run in runs)
        hlog(f"{deployment}: {total} requests of {len(runs)} runs, {len(rows)} different ones, are one job")
        output = run_batch(engine_of(arguments), list(rows.values()), self._folder, decisive(arguments))
        return {digest: result_of(request, output[digest], encoding) for digest, request in requests.items()}
