"""A Ray cluster: its actors, placement groups for groups of stages, and the shards that Ray Data gives them."""

import logging
import os
import pickle
import signal
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flexengine.apps.fleet.member import Description, Failure, FleetMember, Recipe, ShardAnswer, failure_of, this_member
from flexengine.apps.fleet.space import FleetMachine, Share, Space, space_for
from flexengine.apps.fleet.stage import FleetStage
from flexengine.errors import InvalidInput, MemberFailed

LOCAL, AUTO = "local", "auto"  # addresses: a Ray that this process starts, and the one that runs on this machine
CONNECT_SECONDS = 10.0
PLACE_SECONDS = 600.0  # until the stages of a group must have a place
MOST_GROUPS = 4  # groups of stages that may be lost with one shard
MOST_DEATHS = 10  # of actors that run one shard; it may be the reason, as when it needs too much memory
_CLIENT = "ray://"


@contextmanager
def connected(address: str, verbose: bool = False) -> Iterator[None]:
    """Return a context manager in which this process uses a cluster.

    Args:
        address: "local" starts a Ray on this machine, "auto" takes the one that runs here; else host:port.
        verbose: print messages of the actors.

    Raises:
        InvalidInput: there is no cluster at this address.
    """
    if address.startswith(_CLIENT):
        raise InvalidInput(
            f"--ray is {address}, but a client of Ray cannot give shards to actors; run this command on"
            " a machine of the cluster, with --ray auto"
        )
    if address not in (LOCAL, AUTO):
        _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    more: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, log_to_driver=verbose, logging_level=logging.WARNING if verbose else logging.ERROR, **more)
    except (ConnectionError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInput(
            f"--ray is {address}, which cannot be joined: {reason[0]}; this machine must belong to the"
            " cluster: give auto for the Ray that runs here, or local to start one"
        ) from error
    finally:
        for number, handler in own.items():  # ray.init sets a handler of its own
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise InvalidInput if nothing listens at an address. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise InvalidInput(f"--ray is {address}; it must be auto, local, or host:port")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise InvalidInput(
            f"--ray is {address}, where nothing answers ({error.strerror or error}); give the address"
            " that `ray start` printed, auto for the Ray on this machine, or local to start one"
        ) from error


def machines() -> list[FleetMachine]:
    """Return the machines of the cluster that are alive and compute."""
    found = [_machine(node) for node in ray.nodes() if node["Alive"]]
    return [machine for machine in found if machine.cpus]


def _machine(node: Any) -> FleetMachine:
    return FleetMachine(*(int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU", "memory")))


class RayFleet:
    """The actors of a cluster.

    Attributes:
        actors: number of actors.
    """

    def __init__(self, space: Space) -> None:
        self._space, self.actors = space, space.actors

    @classmethod
    def of(cls, device: str, actors: int | None, stages: int, interface: str | None) -> "RayFleet":
        """Return the fleet of the cluster to which this process is connected. Arguments and errors: see
        `space_for`."""
        return cls(space_for(machines(), device, actors, stages, interface))

    def describe(self, recipe: Recipe, sample: bytes) -> Description | Failure:
        """Return what an actor says of its engine; see `FleetMember.describe`. The actor ends with the call."""
        actor = ray.remote(FleetActor).options(**_resources(self._space), max_restarts=MOST_DEATHS,
                                           max_task_retries=MOST_DEATHS).remote(recipe, self._space)  # fmt: skip
        try:
            found: Description | Failure = ray.get(actor.describe.remote(sample))
            return found
        except RayError as error:
            return Failure("an actor", f"it cannot open the model: {_line(error)}", running=True)
        finally:
            ray.kill(actor)

    def answers(self, recipe: Recipe, shards: Iterable[bytes]) -> Iterator[ShardAnswer | Failure]:
        """Yield the answers to all shards, in any order. Ray repeats shards of actors that are lost.

        Args:
            shards: see `fleet.shards`.
        """
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "`ray_remote_args`")  # 2.64 may take max_task_retries in another way
        tables = [ray.put(pa.table({"shard": pa.array([shard], pa.large_binary())})) for shard in shards]
        dataset = ray.data.from_arrow_refs(tables).map_batches(
            FleetActor,
            batch_size=1,
            batch_format="pyarrow",
            zero_copy_batch=True,
            # One task in flight: a queue of an actor would hold shards that another actor could run.
            compute=ray.data.ActorPoolStrategy(size=self.actors, max_tasks_in_flight_per_actor=1),
            fn_constructor_args=(recipe, self._space),
            max_task_retries=MOST_DEATHS,
            **_resources(self._space),
        )
        try:
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for answer in table["answer"].to_pylist():
                    yield pickle.loads(answer)
        except RayError as error:
            yield Failure("Ray", f"a shard cannot be run: {_line(error)}", running=True)


def _resources(space: Space) -> dict[str, Any]:
    """Return the resources of a FleetActor. The stages of a group have their own."""
    return {"num_cpus": space.cpus, "num_gpus": space.gpus} if space.stages == 1 else {"num_cpus": 0}


class FleetActor:
    """An actor of the fleet: an engine, or the owner of a group of stages. It is opened when it is first used, as an
    error in a constructor would not reach the user as it is.

    Args:
        recipe: what the engine is made of.
        space: number of its stages, and their resources.
    """

    def __init__(self, recipe: Recipe, space: Space) -> None:
        _enter(recipe)
        self.recipe, self.space = recipe, space
        self._member: FleetMember | StageGroup | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the answer to a shard, in a table of one row, as Ray Data passes it."""
        (shard,) = table["shard"].to_pylist()
        answer = self._first_found(lambda member: member.run(shard))
        return pa.table({"answer": pa.array([pickle.dumps(answer)], pa.large_binary())})

    def describe(self, sample: bytes) -> Description | Failure:
        """See `FleetMember.describe`."""
        found: Description | Failure = self._first_found(lambda member: member.describe(sample))
        self._close()
        if self.space.stages > 1:
            remove_placement_group(own_placement(self.space))
        return found

    def _first_found(self, call: Callable[[Any], Any]) -> Any:
        """Return what a call returns. If a stage is lost meanwhile, call again with a new group of stages."""
        for _ in range(MOST_GROUPS):
            try:
                self._member = self._member or self._opened()
            except MemberFailed as error:
                return failure_of(error)
            found = call(self._member)
            if not isinstance(found, Failure):
                return found
            self._close()
            if not found.lost:
                return found
        return replace(found, message=f"{MOST_GROUPS} groups of stages were lost: {found.message}")

    def _opened(self) -> "FleetMember | StageGroup":
        if self.space.stages > 1:
            return StageGroup(self.recipe, self.space)
        return FleetMember(self.recipe, share=share_here(self.recipe, self.space))

    def _close(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None


def share_here(recipe: Recipe, space: Space) -> Share:
    """Return the part of this machine that a process of the fleet may use."""
    here = ray.get_runtime_context().get_node_id()
    machine = next(_machine(node) for node in ray.nodes() if node["NodeID"] == here)
    return space.share(machine, recipe.options.get("device") or "auto")


class StageGroup:
    """The stages of one actor, each an actor of its own in a placement group. They end with the process that owns this
    object."""

    def __init__(self, recipe: Recipe, space: Space) -> None:
        placement = own_placement(space)
        if not ray.wait([placement.ready()], timeout=PLACE_SECONDS)[0]:
            raise MemberFailed(
                f"the cluster had no space for a group of {space.stages} stages within {PLACE_SECONDS:g}"
                " s; its processors or GPUs are used by others, or a machine is lost"
            )
        self._stages = [
            ray.remote(StageActor).options(
                num_cpus=space.cpus, num_gpus=space.gpus, max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank),
            ).remote(recipe, rank, space)
            for rank in range(space.stages)
        ]  # fmt: skip
        self._serving: list[Any] | None = None

    def describe(self, sample: bytes) -> Description | Failure:
        """See `FleetMember.describe`."""
        found: Description | Failure = self._call("describe", sample)
        return found

    def run(self, shard: bytes) -> ShardAnswer | Failure:
        """See `FleetMember.run`."""
        found: ShardAnswer | Failure = self._call("run", shard)
        return found

    def _call(self, method: str, *given: Any) -> Any:
        """Return what the first stage returns, or a Failure if any stage dies or fails meanwhile."""
        first, *others = self._stages
        try:
            if self._serving is None:
                address = ray.get(first.address.remote())
                self._serving = [stage.serve.remote(address) for stage in others]
            found = getattr(first, method).remote(*given)
            ready, _ = ray.wait([found, *self._serving])
            answer = ray.get(ready[0])
        except RayActorError as error:
            return Failure(this_member(), f"a stage died: {_line(error)}", running=True, lost=True)
        return answer or Failure(this_member(), "a stage ended early", running=True, lost=True)

    def close(self) -> None:
        """End all stages. The next group of this actor takes their place."""
        for stage in self._stages:
            with suppress(RayActorError):
                ray.kill(stage)


def own_placement(space: Space) -> PlacementGroup:
    """Return the placement group of this actor. Ray removes it when the job ends, not when the actor's process dies and
    Ray starts it again, so it has the actor's name, and the new process finds it."""
    name = f"flexengine {ray.get_runtime_context().get_actor_id()}"
    try:
        return get_placement_group(name)
    except ValueError:  # there is none
        bundle = {"CPU": space.cpus} | ({"GPU": space.gpus} if space.gpus else {})
        strategy = "PACK" if space.interface else "STRICT_PACK"
        return placement_group([bundle] * space.stages, strategy, name)


class StageActor(FleetStage):
    """A stage, which asks Ray for its address and for the processes beside it."""

    def __init__(self, recipe: Recipe, rank: int, space: Space) -> None:
        _enter(recipe)
        host = ray.util.get_node_ip_address() if space.interface else "127.0.0.1"
        super().__init__(recipe, rank, space, host, share_here(recipe, space))


def _enter(recipe: Recipe) -> None:
    """Make the command's working directory that of this process, if this machine has it."""
    if os.path.isdir(recipe.folder):
        os.chdir(recipe.folder)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
