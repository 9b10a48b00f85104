"""A runner of HELM that gives all requests of a suite to the engine at once.

helm-run --runner-class-name flexengine.apps.helm.runner.FlexRunner ...

HELM's own runner prepares, executes and measures one run after the other. Here each run is a greenlet: it prepares its
requests and stops where HELM would execute them. When all runs have stopped, the requests of each deployment are one
job, and the runs continue with its results.
"""

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dacite
from greenlet import getcurrent, greenlet
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor, ExecutorError
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner, RunnerError
from helm.common.hierarchical_logger import hlog, htrack_block
from helm.common.request import RequestResult

from flexengine.apps.helm.batch import rows_of, run_batch
from flexengine.apps.helm.engines import encoding_of, engine_of
from flexengine.apps.helm.plugin import CLIENT
from flexengine.apps.helm.requests import digest_of
from flexengine.apps.helm.results import result_of

Results = dict[str, dict[str, Any]]  # of requests, by their digests
FOLDER = "flexengine"  # in HELM's output path: the files of jobs


class StoppingExecutor(Executor):  # type: ignore[misc]
    """Hands the requests of a run to the greenlet that began it, and returns what that greenlet sends back."""

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        """Return the state with results. States of dry runs and of other clients are executed at once, by HELM."""
        if self.execution_spec.dry_run or _arguments(scenario_state) is None:
            return super().execute(scenario_state)
        results: Results = getcurrent().parent.switch(scenario_state)
        return with_results(scenario_state, results)


class FlexRunner(Runner):  # type: ignore[misc]
    """Runs a suite with one job per deployment."""

    def __init__(self, execution_spec: Any, output_path: str, suite: str, *options: Any, **named: Any) -> None:
        super().__init__(execution_spec, output_path, suite, *options, **named)
        self.executor = StoppingExecutor(execution_spec)
        self._folder = Path(output_path) / FOLDER / suite

    def run_all(self, run_specs: list[RunSpec]) -> None:
        """Run a suite. Raise as HELM's runner."""
        failed: dict[str, None] = {}
        waiting: list[tuple[RunSpec, greenlet, ScenarioState]] = []

        def attempt(spec: RunSpec, what: str, step: Callable[[], Any]) -> Any:
            with htrack_block(f"{what} {spec.name}"):
                try:
                    return step()
                except Exception:
                    if self.exit_on_error:
                        raise
                    hlog(f"Error when running {spec.name}:\n{traceback.format_exc()}")
                    failed[spec.name] = None

        for spec in run_specs:
            run = greenlet(self.run_one)
            state = attempt(spec, "Preparing", lambda run=run, spec=spec: run.switch(spec))
            if not run.dead:
                waiting.append((spec, run, state))
        with htrack_block(f"Computing the requests of {len(waiting)} runs"):
            results = self._compute([state for _, _, state in waiting])
        for spec, run, state in waiting:
            own = results[state.adapter_spec.model_deployment]
            attempt(spec, "Measuring", lambda run=run, own=own: run.switch(own))
        if failed:
            raise RunnerError(f"Failed runs: [{', '.join(map(repr, failed))}]")

    def _compute(self, states: Sequence[ScenarioState]) -> dict[str, Results]:
        """Return the results of all requests, by deployment."""
        by_deployment: dict[str, list[ScenarioState]] = {}
        for state in states:
            by_deployment.setdefault(state.adapter_spec.model_deployment, []).append(state)
        return {name: self._compute_one(name, own) for name, own in by_deployment.items()}

    def _compute_one(self, deployment: str, states: Sequence[ScenarioState]) -> Results:
        arguments = _arguments(states[0])
        assert arguments is not None
        requests = {digest_of(given): given for state in states for each in state.request_states
                    for given in [dataclasses.asdict(each.request)]}  # fmt: skip
        encoding = encoding_of(arguments)
        rows = rows_of(requests.values(), encoding)
        total = sum(len(state.request_states) for state in states)
        hlog(f"{deployment}: {total} requests of {len(states)} runs, {len(rows)} different ones, in one job")
        output = run_batch(engine_of(arguments), rows, self._folder, arguments)
        return {digest: result_of(request, output[digest], encoding) for digest, request in requests.items()}


def _arguments(state: ScenarioState) -> dict[str, Any] | None:
    """Return the arguments of a state's deployment; None if its client is not this engine's."""
    spec = get_model_deployment(state.adapter_spec.model_deployment).client_spec
    return dict(spec.args) if spec.class_name == CLIENT else None


def with_results(state: ScenarioState, results: Results) -> ScenarioState:
    """Return a state with results. Raise ExecutorError if a request has none, or has failed."""
    done = []
    for each in state.request_states:
        found = results.get(digest_of(dataclasses.asdict(each.request)))
        if found is None or not found["success"]:
            why = "There is no result." if found is None else found["error"]
            raise ExecutorError(f"{why} Request: {each.request}")
        done.append(dataclasses.replace(each, result=dacite.from_dict(RequestResult, found)))
    return dataclasses.replace(state, request_states=done)
