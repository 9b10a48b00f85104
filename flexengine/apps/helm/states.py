"""Scenario states of HELM with results. This module runs inside HELM, and needs nothing but HELM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutorError
from helm.common.request import GeneratedOutput, RequestResult, Token

from flexengine.apps.helm.requests import digest_of

Results = Mapping[str, Mapping[str, Any]]  # of requests, by their digests


def requests_of(state: ScenarioState) -> list[dict[str, Any]]:
    """Return the requests of a state."""
    return [dataclasses.asdict(each.request) for each in state.request_states]


def helm_result(found: Mapping[str, Any]) -> RequestResult:
    """Return HELM's form of a result that `results.result_of` made."""
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
