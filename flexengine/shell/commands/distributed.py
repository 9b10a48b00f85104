"""Options and processes of jobs on several processes or machines.

A pipeline is several stages on this machine, or those that torchrun started; a fleet is `flexengine run --ray`.
"""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flexengine.config import SamplingParams, started_workers
from flexengine.errors import InvalidInput, check_library, shown
from flexengine.guests.wire.processes import INTERFACE, ranks
from flexengine.shell.commands.messages import VERBOSE, say, verbosity
from flexengine.shell.commands.openers import engine_options, load_libraries, open_engine
from flexengine.shell.commands.options import OptionTable
from flexengine.shell.commands.parser import check_least, refuse_given

if TYPE_CHECKING:
    from flexengine.apps.fleet.job import FleetRunner
    from flexengine.guests.stages.group import PipelineGroup

LAUNCHED = "FLEXENGINE_STAGES"  # environment variable of the processes that --stages starts
MOST_STAGES = 1000
_LOCAL = ("127.0.0.1", "localhost", "::1")
AUTO = "auto"  # --stages: one for each GPU
_PIPELINE = """
--stages N            compute in N processes on this machine, each with a part of the layers; auto for one process for
                      each GPU; on several machines, start this command by torchrun instead (docs/pipeline.md)
--strategy FILE.json  layers, formats and batches of the stages, from flexengine plan --cluster or --stages;
                      starts as many processes as it has stages
--interface NAME      network interface that joins the machines, such as eth0 (default: loopback, so one machine)
"""


def _stages(text: str) -> int | str:
    """Return a number of stages, or AUTO. Raise ArgumentTypeError if the text is neither."""
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither a whole number nor auto") from error


PIPELINE = OptionTable(_PIPELINE, more={"stages": {"type": _stages}})
FLEET = """
--ray ADDRESS   run on the actors of a Ray cluster: auto for the one that runs on this machine, host:port of its head,
                or local to start one here; with --stages, each actor is a group of stages (docs/fleet.md)
--actors N      number of engines, or of groups of stages (default: one for each GPU, or for each machine without GPUs)
--shard-rows N  rows that an actor gets at a time (default: a quarter of its share, at most 2048)
"""


def rank_of(args: argparse.Namespace) -> int:
    """Return the number of this process's stage; 0 for the process that drives the job. Raise InvalidInput if the
    options contradict each other or the environment."""
    stages, launched = args.stages, LAUNCHED in os.environ
    if stages == AUTO and args.ray is not None:
        raise InvalidInput("--stages is auto, which counts the GPUs of one machine; give --ray a number of stages")
    if stages not in (None, AUTO) and not 1 <= stages <= MOST_STAGES:
        raise InvalidInput(f"--stages is {stages}; it must be at least 1 and at most {MOST_STAGES}")
    rank, size = ranks()
    if args.strategy is not None:
        from flexengine.plan.stages import Strategy  # it imports numpy, which --help must not

        args.strategy = Strategy.load(args.strategy)
        count = len(args.strategy.stages)
        if stages not in (None, AUTO, count):
            raise InvalidInput(f"--stages is {stages}, but the strategy has {count} stages; leave out --stages")
        why = f"is {args.policy}, but --strategy has a block of its own; leave out one of them"
        refuse_given(args, ["policy"], why)
        why = "cannot be combined with --strategy, whose stages keep the KV cache; leave out one of them"
        refuse_given(args, ["attention_workers"], why)
        stages = args.stages = count if size == 1 or launched else None
    if stages is not None and size > 1 and not launched:
        fault = f"--stages is {stages}, but WORLD_SIZE is {size}: torchrun started this process as one stage of its own"
        raise InvalidInput(f"{fault}; leave out --stages")
    if args.interface is not None and size == 1 and args.ray is None:
        fault = f"--interface is {args.interface}, but one process, or --stages on one machine, needs none"
        raise InvalidInput(f"{fault}; leave it out, or start this command by torchrun")
    address, here = os.environ.get("MASTER_ADDR", _LOCAL[0]), os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if not (size == 1 or here or args.interface or INTERFACE in os.environ or address in _LOCAL):
        fault = f"{address}, another machine, but stages talk over the loopback interface unless another one is named"
        remedy = "name the interface that joins the machines by --interface, such as eth0"
        raise InvalidInput(f"MASTER_ADDR is {fault}; {remedy}")
    return rank


@contextlib.contextmanager
def pipeline(args: argparse.Namespace) -> Iterator["PipelineGroup | None"]:
    """Yield the group of processes that this one drives or belongs to; None for a single process. With --stages, start
    the other processes, and end them at the end."""
    stages = 1 if LAUNCHED in os.environ else _counted(args) if args.stages == AUTO else args.stages or 1
    look: Callable[[], None] = lambda: None  # noqa: E731
    with contextlib.ExitStack() as stack:
        if stages > 1:
            from flexengine.guests.wire.processes import local_stages
            from flexengine.model.source import named_layers
            from flexengine.plan.stages import stage_layers

            if (layers := named_layers(args.model)) is not None:  # else each stage compares its own
                stage_layers(layers, frozenset(), 0, stages, args.strategy)
            os.environ[LAUNCHED] = str(stages)
            stack.callback(os.environ.pop, LAUNCHED)
            look = stack.enter_context(local_stages(stages, ["-m", "flexengine", *args.command]))
        if ranks()[1] == 1:
            yield None
            return
        load_libraries()
        from flexengine.guests.stages.group import PipelineGroup

        group = PipelineGroup(args.interface, look)
        stack.callback(group.close)
        yield group


def _counted(args: argparse.Namespace) -> int:
    """Return the number of stages for --stages auto, and say it: one for each GPU, at most one for each layer."""
    from flexengine.model.source import named_layers

    gpus = 0
    if args.device in (AUTO, "cuda"):
        load_libraries()
        from flexengine.tier.cuda import visible_gpus

        gpus = visible_gpus()
    layers = named_layers(args.model) or gpus
    stages = max(1, min(gpus, layers))
    found = f"{gpus} GPUs" if gpus > 1 else "1 GPU" if gpus else "no GPU is used"
    why = f" for {layers} layers" if gpus > layers else ""
    processes = f"{stages} processes compute" if stages > 1 else "one process computes"
    say(f"--stages auto: {found}{why}, so {processes}")
    return stages


def serve(args: argparse.Namespace) -> None:
    """Carry out the orders of the driver, as one stage of a pipeline, until the driver ends the job."""
    with pipeline(args) as group:
        assert group is not None
        from flexengine.guests.stages.server import StageServer

        with open_engine(args, group=group) as engine:
            StageServer(engine, group).run()


def check_fleet(args: argparse.Namespace) -> None:
    """Raise InvalidInput if the options of a fleet contradict others."""
    if args.ray is None:
        for name in ("actors", "shard_rows"):
            why = f"is {getattr(args, name)}, but it is an option of fleets; give --ray ADDRESS, too, or leave it out"
            refuse_given(args, [name], why)
        return
    check_least(args, actors=1, shard_rows=1)
    one = ("dry_run", "trace", "report")
    refuse_given(args, one, "shows one engine, and has no effect with --ray; remove one of them")
    if args.engines > 1:
        raise InvalidInput(f"--engines is {args.engines}, but --ray has engines of its own; leave out one of them")
    if (size := ranks()[1]) > 1:
        fault = f"--ray is {args.ray}, but WORLD_SIZE is {size}: torchrun started this process as one of several"
        raise InvalidInput(f"{fault}; start one process, whose actors Ray starts")
    if started_workers(args.attention_workers) is not None:
        why = f"is {args.attention_workers}, but the engines of --ray are on several machines"
        remedy = "start workers with flexengine serve-attention, and give their addresses"
        refuse_given(args, ["attention_workers"], f"{why}; {remedy}")
    if (args.stages or 1) == 1:
        why = f"is {args.interface}, but actors of one process need none; leave it out, or give --stages"
        refuse_given(args, ["interface"], why)


@contextlib.contextmanager
def fleet_runner(args: argparse.Namespace, params: SamplingParams, look: Callable[[], None]) -> "Iterator[FleetRunner]":
    """Return a context manager with a fleet that runs the rows. look: called after each shard; may raise an error."""
    from flexengine.apps.fleet import guard

    guard.prepare(args.ray)
    check_library("ray.data", "--ray needs Ray Data", "ray")
    from flexengine.apps.fleet import cluster
    from flexengine.apps.fleet.job import FleetRunner, Recipe
    from flexengine.guests.wire.secret import given_secret

    with cluster.connected(args.ray, verbosity() >= VERBOSE):
        fleet = cluster.RayFleet(args.device, args.actors, args.stages or 1, args.interface)
        options = {"model": args.model, "progress": False, **engine_options(args)}
        recipe = Recipe(options, params, args.chat, folder=os.getcwd(), secret=given_secret())
        yield FleetRunner(fleet, recipe, args.shard_rows, look)
