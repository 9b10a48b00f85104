"""Options and jobs of fleets: `flexengine run --ray`."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests.wire.processes import ranks
from flexengine.shell.commands.messages import VERBOSE, verbosity
from flexengine.shell.commands.open_engine import engine_options
from flexengine.shell.commands.parser import check_least, refuse_given

if TYPE_CHECKING:
    from flexengine.apps.fleet.job import FleetRunner

FLEET = """
--ray ADDRESS   run on the actors of a Ray cluster: auto for the one that runs on this machine, host:port of its head,
                or local to start one here; with --stages, each actor is a group of stages (docs/fleet.md)
--actors N      number of engines, or of groups of stages (default: one for each GPU, or for each machine without GPUs)
--shard-rows N  rows that an actor gets at a time (default: a quarter of its share, at most 2048)
"""


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
    if (size := ranks()[1]) > 1:
        raise InvalidInput(
            f"--ray is {args.ray}, but WORLD_SIZE is {size}: torchrun started this process as one of several; start one"
            " process, whose actors Ray starts"
        )
    workers = args.attention_workers
    if workers and isinstance(workers, int):
        raise InvalidInput(
            f"--attention-workers is {workers}, but the engines of --ray are on several machines; start workers with"
            " flexengine serve-attention, and give their addresses"
        )
    if args.interface is not None and (args.stages or 1) == 1:
        raise InvalidInput(
            f"--interface is {args.interface}, but actors of one process need none; leave it out, or give --stages"
        )


@contextmanager
def fleet_runner(
    args: argparse.Namespace, params: SamplingParams, look: "Callable[[], None]"
) -> "Iterator[FleetRunner]":
    """Return a context manager with a fleet that runs the rows. look: called after each shard; may raise an error."""
    try:
        from flexengine.apps.fleet import cluster
    except ImportError as error:
        raise InvalidInput(f'--ray needs Ray Data ({error}); pip install "flexengine[ray]"') from error
    from flexengine.apps.fleet.job import FleetRunner, Recipe

    with cluster.connected(args.ray, verbosity() >= VERBOSE):
        fleet = cluster.RayFleet(args.device, args.actors, args.stages or 1, args.interface)
        options = {"model": args.model, "progress": False, **engine_options(args)}
        recipe = Recipe(options, params, args.chat, folder=os.getcwd())
        yield FleetRunner(fleet, recipe, args.shard_rows, look)
