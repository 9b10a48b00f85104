"""Options and jobs of fleets: `flexengine run --ray`."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from flexengine.commands.messages import VERBOSE, say, verbosity
from flexengine.commands.open_engine import engine_options
from flexengine.commands.options import Group, named
from flexengine.commands.progress import RowErrors, last_line, verified_line
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.parallel.environment import ranks

if TYPE_CHECKING:
    from flexengine.job.interrupt import Interrupts
    from flexengine.job.resume import Job

_OWN = ("actors", "shard_rows")  # options that need --ray
_NOT = ("dry_run", "trace", "report")  # options of one engine


def add_fleet(group: Group) -> None:
    """Add the options of a fleet."""
    group.add_argument("--ray", type=named, metavar="ADDRESS",
                       help="run on the actors of a Ray cluster: auto for the one that runs on this machine, host:port"
                            " of its head, or local to start one here; with --stages, each actor is a group of stages"
                            " (docs/fleet.md)")  # fmt: skip
    group.add_argument("--actors", type=int, metavar="N",
                       help="number of engines, or of groups of stages (default: one for each GPU, or for each machine"
                            " without GPUs)")  # fmt: skip
    group.add_argument("--shard-rows", type=int, metavar="N",
                       help="rows that an actor gets at a time (default: a quarter of its share, at most"
                            " 2048)")  # fmt: skip


def check_fleet(args: argparse.Namespace) -> None:
    """Raise InvalidInput if the options of a fleet contradict others."""
    if args.ray is None:
        if given := next((name for name in _OWN if getattr(args, name) is not None), None):
            raise InvalidInput(f"--{given.replace('_', '-')} is {getattr(args, given)}, but it is an option of"
                               " fleets; give --ray ADDRESS, too, or leave it out")  # fmt: skip
        return
    for name in _OWN:
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidInput(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if given := next((name for name in _NOT if getattr(args, name)), None):
        raise InvalidInput(f"--{given.replace('_', '-')} shows one engine, and has no effect with --ray; remove one of"
                           " them")  # fmt: skip
    if (size := ranks()[1]) > 1:
        raise InvalidInput(f"--ray is {args.ray}, but WORLD_SIZE is {size}: torchrun started this process as one of"
                           " several; start one process, whose actors Ray starts")  # fmt: skip
    workers = getattr(args, "attention_workers", 0)
    if workers and isinstance(workers, int):
        raise InvalidInput(f"--attention-workers is {workers}, but the engines of --ray are on several machines; start"
                           " workers with flexengine serve-attention, and give their addresses")  # fmt: skip
    if args.interface is not None and (args.stages or 1) == 1:
        raise InvalidInput(f"--interface is {args.interface}, but actors of one process need none; leave it out, or"
                           " give --stages")  # fmt: skip


def run_fleet(
    args: argparse.Namespace, job: "Job", params: SamplingParams, interrupts: "Interrupts"
) -> dict[str, Any]:
    """Run the rows that remain on a fleet, write the output file, and return the summary as JSON values, as
    `run_job.run_job` does for one engine."""
    try:
        from flexengine.apps.fleet import cluster
    except ImportError as error:
        raise InvalidInput(f'--ray needs Ray Data ({error}); pip install "flexengine[ray]"') from error
    from flexengine.apps.fleet.job import FleetJob
    from flexengine.apps.fleet.member import Recipe

    errors = RowErrors()
    with cluster.connected(args.ray, verbosity() >= VERBOSE):
        fleet = cluster.RayFleet.of(args.device, args.actors, args.stages or 1, args.interface)
        options = {"model": args.model, "progress": False, **engine_options(args)}
        recipe = Recipe(options, params, args.chat, folder=os.getcwd())
        running = FleetJob(fleet, job, recipe, args.shard_rows)
        remain = running.begin()
        if running.about is not None and running.about.verified:
            say(verified_line(dict(running.about.verified)))
        if remain:
            for result in running.results(interrupts.check):
                errors.note(result)
    summary = running.end()
    say(last_line(job, args.output, summary if running.ran else {}))
    return summary
