"""Doors for guests: parts that a plain job does not use. Each is imported when it is first used."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from flexengine.engine.stages import Stage
from flexengine.lossy import Lossy
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.worker.stage_ports import Ports

GUESTS = {  # module:object, by name
    "attention workers": "flexengine.guests.attention_workers.workers:open_workers",
    "check of attention workers": "flexengine.guests.attention_workers.workers:check_workers",
    "rates of attention workers": "flexengine.guests.attention_workers.attender:measure_workers",
    "driver of stages": "flexengine.guests.stages.remote:Driver",
    "planner of stages": "flexengine.guests.stages.remote:PipelinePlanner",
    "check of stages": "flexengine.guests.stages.remote:check_alike",
}


def guest(name: str) -> Any:
    """Return the object of GUESTS with this name, after importing its module."""
    return resolve_name(GUESTS[name])


class ProcessGroup(ABC):
    """The processes of a pipeline, from the view of one of them."""

    rank: int  # number of this process, and of its stage
    size: int  # number of processes
    local_size: int  # number of processes on this machine
    local_rank: int  # number of this process among them
    names: list[str]  # host and process number of each, for messages

    @abstractmethod
    def exchange(self, key: str, value: str) -> list[str]:
        """Return the values that all processes give, in the order of their ranks. Wait for all of them."""


class StageDriver(ABC):
    """The other stages of a pipeline, from the view of the first one."""

    ports: Ports  # ports of the first stage
    lost: list[str]  # places of attention workers that all stages replace before they prepare the next job
    measured: dict[int, dict[str, Any]]  # by stage, what it measured in the last job, as JSON values

    @abstractmethod
    def prepare(self, policy: Policy, workload: Workload, given: bool, lossy: Lossy) -> Callable[[], Sequence[Stage]]:
        """Let every other stage allocate the memory of a job. Return a function that waits for the stages.

        Args:
            policy: policy of the first stage.
            workload: sizes of the rows.
            given: whether the user gave the policy, so that weights are placed as it says in all stages.
            lossy: the lossy switches.
        """

    @abstractmethod
    def end(self) -> None:
        """End the present job in all stages, early or not. Wait until they have freed its memory."""

    @abstractmethod
    def report(self) -> tuple[dict[str, Any], ...]:
        """Return what the other stages measured in the last job, without spans, in their order."""

    @abstractmethod
    def spans(self) -> dict[str, list[list[Any]]]:
        """Return the rows of the other stages in a trace, by name."""

    @abstractmethod
    def leave(self) -> None:
        """End the processes of the other stages."""
