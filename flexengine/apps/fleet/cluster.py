"""A Ray cluster: its actors, placement groups for groups of stages, and the shards that Ray Data gives them."""

import logging
import os
import pickle
import secrets
import signal
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flexengine.apps.fleet.guard import LOCAL, check_guarded
from flexengine.apps.fleet.job import (
    Description,
    Failure,
    FleetMember,
    Recipe,
    ShardAnswer,
    failure_of,
    open_engine,
    this_member,
)
from flexengine.apps.fleet.space import FleetMachine, Share, Space, space_for
from flexengine.errors import FlexError, InvalidInput, MemberFailed
from flexengine.guests.stages.group import PipelineGroup
from flexengine.guests.stages.server import StageServer
from flexengine.guests.wire.processes import SECRET, SECRET_FILE, STAGES_SECRET

AUTO = "auto"  # address: the Ray that runs on this machine
CONNECT_SECONDS = 10.0
PLACE_SECONDS = 600.0  # until the stages of a group must have a place
MOST_GROUPS = 4  # groups of stages that may be lost with one shard
MOST_DEATHS = 10  # of actors that run one shard; it may be the reason, as when it needs too much memory
_CLIENT = "ray://"
Address = tuple[str, int, str]  # host and port, and the secret of a group of stages


@contextmanager
def connected(address: str, verbose: bool = False) -> Iterator[None]:
    """Return a context manager in which this process uses a cluster. address: "local" starts a Ray on this machine,
    "auto" takes the one that runs here; else host:port. Raise InvalidInput if there is no cluster at this address, or
    if it is open to other machines; see `guard`."""
    if address.startswith(_CLIENT):
        fault = f"--ray is {address}, but a client of Ray cannot give shards to actors"
        raise InvalidInput(f"{fault}; run this command on a machine of the cluster, with --ray auto")
    if address not in (LOCAL, AUTO):
        _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    more: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, log_to_driver=verbose, logging_level=logging.WARNING if verbose else logging.ERROR, **more)
    except (ConnectionError, ValueError, RuntimeError, AssertionError) as error:
        wrong = f"--ray is {address}, which cannot be joined: {_line(error)}; this machine must belong to the cluster"
        raise InvalidInput(f"{wrong}: give auto for the Ray that runs here, or local to start one") from error
    finally:
        for number, handler in own.items():  # ray.init sets a handler of its own
            signal.signal(number, handler)
    try:
        check_guarded(address, [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])
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
        fault = f"--ray is {address}, where nothing answers ({error.strerror or error})"
        remedy = "give the address that `ray start` printed, auto for the Ray on this machine, or local to start one"
        raise InvalidInput(f"{fault}; {remedy}") from error


def _machine(node: Any) -> FleetMachine:
    return FleetMachine(*(int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU", "memory")))


class RayFleet:
    """The actors of the cluster to which this process is connected. Arguments and errors: see `space_for`."""

    def __init__(self, device: str, actors: int | None, stages: int, interface: str | None) -> None:
        machines = [_machine(node) for node in ray.nodes() if node["Alive"]]
        self._space = space_for([machine for machine in machines if machine.cpus], device, actors, stages, interface)
        self.actors = self._space.actors

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
        """Yield the answers to all shards, in any order. Ray repeats shards of actors that are lost. shards: see
        `job.shards`."""
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
    error in a constructor would not reach the user as it is."""

    def __init__(self, recipe: Recipe, space: Space) -> None:
        _enter(recipe)
        self.recipe, self.space = recipe, space
        self._member: FleetMember | StageGroup | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the answer to a shard, in a table of one row, as Ray Data passes it."""
        (shard,) = table["shard"].to_pylist()
        answer = self._answer("run", shard)
        return pa.table({"answer": pa.array([pickle.dumps(answer)], pa.large_binary())})

    def describe(self, sample: bytes) -> Description | Failure:
        """See `FleetMember.describe`."""
        found: Description | Failure = self._answer("describe", sample)
        self._close()
        if self.space.stages > 1:
            remove_placement_group(own_placement(self.space))
        return found

    def _answer(self, method: str, given: bytes) -> Any:
        """Return what a method of `FleetMember` returns. If a stage is lost meanwhile, call it again with a new group
        of stages."""
        for _ in range(MOST_GROUPS):
            try:
                if self._member is None and self.space.stages > 1:
                    self._member = StageGroup(self.recipe, self.space)
                elif self._member is None:
                    self._member = FleetMember(self.recipe, share=share_here(self.recipe, self.space))
            except MemberFailed as error:
                return failure_of(error)
            member = self._member
            found = member.answer(method, given) if isinstance(member, StageGroup) else getattr(member, method)(given)
            if not isinstance(found, Failure):
                return found
            self._close()
            if not found.lost:
                return found
        return replace(found, message=f"{MOST_GROUPS} groups of stages were lost: {found.message}")

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
            fault = f"the cluster had no space for a group of {space.stages} stages within {PLACE_SECONDS:g} s"
            raise MemberFailed(f"{fault}; its processors or GPUs are used by others, or a machine is lost")
        self._stages = [
            ray.remote(StageActor).options(
                num_cpus=space.cpus, num_gpus=space.gpus, max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank),
            ).remote(recipe, rank, space)
            for rank in range(space.stages)
        ]  # fmt: skip
        self._serving: list[Any] | None = None

    def answer(self, method: str, given: bytes) -> Any:
        """Return what a method of the first stage's `FleetMember` returns, or a Failure if any stage dies or fails
        meanwhile."""
        first, *others = self._stages
        try:
            if self._serving is None:
                address = ray.get(first.address.remote())
                self._serving = [stage.serve.remote(address) for stage in others]
            ready, _ = ray.wait([first.answer.remote(method, given), *self._serving])
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


class StageActor:
    """A stage: one process of a pipeline. The first one has the fleet's member. space: number of stages, and the
    network interface that joins them."""

    def __init__(self, recipe: Recipe, rank: int, space: Space) -> None:
        _enter(recipe)
        self.recipe, self.rank, self.space = recipe, rank, space
        self.share = share_here(recipe, space)
        self._address: Address | None = None
        self._member: FleetMember | None = None

    def address(self) -> Address:
        """Return where the stages of the group meet. Called for the first stage."""
        host = ray.util.get_node_ip_address() if self.space.interface else "127.0.0.1"
        with socket.socket() as free:
            free.bind((host, 0))
            self._address = (host, free.getsockname()[1], secrets.token_hex(32))
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

    def answer(self, method: str, given: bytes) -> Any:
        """Return what a method of `FleetMember` returns. Called for the first stage."""
        if self._member is None:
            assert self._address is not None
            try:
                self._member = FleetMember(self.recipe, self._join(self._address), self.share)
            except FlexError as error:
                return failure_of(error)
        return getattr(self._member, method)(given)

    def _join(self, address: Address) -> PipelineGroup:
        """Return the group, after all stages have joined."""
        # Each process sees its own GPU only, as if it were alone on its machine.
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.space.stages), "LOCAL_RANK": "0",
                       "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
                       STAGES_SECRET: address[2]}  # fmt: skip
        return PipelineGroup(self.space.interface)


def _enter(recipe: Recipe) -> None:
    """Make the command's working directory that of this process, if this machine has it, and its secret, too."""
    if recipe.secret:
        os.environ.pop(SECRET_FILE, None)
        os.environ[SECRET] = recipe.secret
    if os.path.isdir(recipe.folder):
        os.chdir(recipe.folder)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
