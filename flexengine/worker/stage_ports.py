"""Ports: transfer of the hidden states of gpu_batches from one stage of a model to the next.

A stage's worker puts hidden states into port AFTER, in lane "leave". The next stage's worker takes hidden states from
port BEFORE, in lane "enter". A port may move data within a process, or by messages between machines.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from flexengine.errors import InvalidInput
from flexengine.model.skeleton import Skeleton
from flexengine.schedule.ports import AFTER, BEFORE


class Port(ABC):
    """Transfers hidden states from one stage to another, in order."""

    @abstractmethod
    def put(self, batch: int, hidden: Tensor) -> None:
        """Send the hidden states of a gpu_batch. The tensor may be overwritten after the call.

        Args:
            hidden: [1, tokens, hidden], on the device of the sending stage.
        """

    @abstractmethod
    def take(self, batch: int, target: Tensor) -> None:
        """Copy the hidden states of a gpu_batch to `target`. A port between processes waits until they have come.
        target: [1, tokens, hidden], on the device of the receiving stage."""


class Ports(NamedTuple):
    """The ports of one stage."""

    before: Port | None = None  # hidden states enter here; None where the stage begins with the embedding
    after: Port | None = None  # hidden states leave here; None where the stage ends with the head

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ports that are not None."""
        return (BEFORE,) * (self.before is not None) + (AFTER,) * (self.after is not None)

    def check(self, skeleton: Skeleton) -> None:
        """Raise InvalidInput if the model's layers lack a needed port, or have an unused one."""
        needed = (BEFORE,) * skeleton.enters + (AFTER,) * skeleton.leaves
        if self.names != needed:
            first, end = skeleton.layer_range
            raise InvalidInput(
                f"layers {first} to {end - 1} of {skeleton.total} need {_listed(needed)}, but"
                f" {_listed(self.names)} is given; let a chain of stages hold all layers"
            )


NO_PORTS = Ports()


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"port {name!r}" for name in names) or "no port"
