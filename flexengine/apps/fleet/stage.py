"""A stage of a group: a process of a pipeline. The first one has the fleet's member. Nothing here knows Ray."""

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from flexengine.apps.fleet.member import Description, Failure, FleetMember, Recipe, ShardAnswer, failure_of, open_engine
from flexengine.apps.fleet.space import Share, Space
from flexengine.errors import FlexError
from flexengine.guests.stages.group import PipelineGroup
from flexengine.guests.stages.server import StageServer

Address = tuple[str, int]
T = TypeVar("T")


class FleetStage:
    """One process of a pipeline.

    Args:
        recipe: what the engine is made of.
        rank: number of the stage.
        space: number of stages, and the network interface that joins them.
        host: address of this machine, for the other stages.
        share: part of this machine that the stage may use.
    """

    def __init__(self, recipe: Recipe, rank: int, space: Space, host: str, share: Share) -> None:
        self.recipe, self.rank, self.space, self.host, self.share = recipe, rank, space, host, share
        self._address: Address | None = None
        self._member: FleetMember | None = None

    def address(self) -> Address:
        """Return host and port at which the stages of the group meet. Called for the first stage."""
        with socket.socket() as free:
            free.bind((self.host, 0))
            self._address = (self.host, free.getsockname()[1])
        return self._address

    def serve(self, address: Address) -> Failure | None:
        """Carry out the orders of the first stage until it ends the job."""
        try:
            group = self._join(address)
            try:
                with open_engine(self.recipe, group, self.share) as engine:
                    StageServer(engine, group).run()
            finally:
                group.close()
        except Exception as error:
            return failure_of(error)
        return None

    def describe(self, sample: bytes) -> Description | Failure:
        """See `FleetMember.describe`. Called for the first stage."""
        return self._by_member(lambda member: member.describe(sample))

    def run(self, shard: bytes) -> ShardAnswer | Failure:
        """See `FleetMember.run`. Called for the first stage."""
        return self._by_member(lambda member: member.run(shard))

    def _by_member(self, call: Callable[[FleetMember], T]) -> T | Failure:
        if self._member is None:
            assert self._address is not None
            try:
                self._member = FleetMember(self.recipe, self._join(self._address), self.share)
            except FlexError as error:
                return failure_of(error)
        return call(self._member)

    def _join(self, address: Address) -> PipelineGroup:
        """Return the group, after all stages have joined."""
        # Each process sees its own GPU only, as if it were alone on its machine.
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.space.stages), "LOCAL_RANK": "0",
                       "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}  # fmt: skip
        return PipelineGroup(self.space.interface)
