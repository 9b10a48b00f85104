"""flexengine plan --cluster: stages of a pipeline over several devices, as a report and a strategy file."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flexengine import shipped
from flexengine.activity import activity
from flexengine.commands.messages import say
from flexengine.commands.open_engine import load_libraries, open_bare
from flexengine.commands.options import AUTO, Group
from flexengine.commands.parser import refuse_given
from flexengine.commands.written import check_written, write
from flexengine.errors import InvalidInput, ModelNotFound
from flexengine.lossy import ALLOW, QUALITY, Lossy
from flexengine.plan.cluster import file, harm, model, report, whatif
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster
from flexengine.plan.cluster.job import ClusterJob
from flexengine.plan.cluster.model import Format, Model
from flexengine.plan.cluster.search import AUTO as AUTO_METHOD
from flexengine.plan.cluster.search import METHODS, Limits, search
from flexengine.plan.workload import Workload
from flexengine.strategy import FORMATS

if TYPE_CHECKING:
    from flexengine.worker.open_model import OpenModel

THETA, GROUP, SECONDS = 1.0, 1, 60.0
# Options of plan that a cluster plan does not use, and their defaults.
_UNUSED = {"hardware": None, "policy": AUTO, "compare": None, "frontier": False, "latency": None, "plot": None,
           "save_lp": None, "device": "auto", "device_mem": None, "host_mem": None, "offload_dir": None,
           "compute": None, "cache": None, "sparse_attention": None, "flash": None, "sparsify": None,
           "calibrate": False, "calibration_text": None, "slices": False}  # fmt: skip
_DEFAULTS = {"theta": None, "harm": None, "group": None, "method": None, "batch": None, "search_seconds": None}


def add_cluster(group: Group) -> None:
    """Add the options of a cluster plan. None is the default of each, so that one without --cluster is refused."""
    group.add_argument("--cluster", metavar="CLUSTER.json",
                       help="plan a pipeline over the devices of this file, or of a shipped cluster"
                            " (docs/cluster.md); --save then writes a strategy, for run --strategy")  # fmt: skip
    group.add_argument("--theta", type=float, metavar="SECONDS",
                       help=f"seconds that a unit of harm to quality is worth (default: {THETA:g})")  # fmt: skip
    group.add_argument("--harm", metavar="FILE.json",
                       help="harm of each format to quality, by layer (default: assumed from parameters and"
                            " bits)")  # fmt: skip
    group.add_argument(
        "--group", type=int, metavar="N", help=f"decide about N neighbouring layers together (default: {GROUP})"
    )
    group.add_argument("--method", choices=METHODS,
                       help=f"mixed-integer programs, or the bit-transfer heuristic (default: {AUTO_METHOD}, by"
                            " size)")  # fmt: skip
    group.add_argument("--batch", type=int, metavar="N", help="sequences alive at once (default: the fastest number)")
    group.add_argument(
        "--search-seconds", type=float, metavar="SECONDS", help=f"most seconds of the search (default: {SECONDS:g})"
    )


def check_without(args: argparse.Namespace) -> None:
    """Raise InvalidInput if an option of a cluster plan is given without --cluster."""
    refuse_given(args, _DEFAULTS, "is for a plan with --cluster; give --cluster, or leave it out")


def check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if options do not go with --cluster, a value is not allowed, or a file cannot be written."""
    refuse_given(args, _UNUSED, "has no effect with --cluster, whose file describes the devices; leave one out")
    limits = {"theta": 0.0, "group": 1, "batch": 1, "search_seconds": 1e-3}
    for name, least in limits.items():
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')} is {value}; it must be at least {least:g}")
    cluster = shipped.find("clusters", args.cluster)
    read = {"--input": args.input, "--cluster": cluster, "--harm": args.harm, "--config": args.config}
    check_written({"--save": args.save}, read, args.model)


def plan_cluster(args: argparse.Namespace, workload: "Callable[[argparse.Namespace, OpenModel], Workload]") -> None:
    """Plan a pipeline, print the report, and write the strategy. Raise FlexError if no plan fits.

    Args:
        args: options, after `check`.
        workload: returns the rows of the job.
    """
    formats = _formats(args)
    cluster = file.load(shipped.find_file("clusters", args.cluster), lambda name: shipped.find_file("hardware", name))
    load_libraries()
    if args.model is not None:
        args.model = shipped.find("models", args.model)
    models, opened = _models(args, cluster, formats)
    first = next(iter(models.values()))
    if args.harm:
        table = harm.load(args.harm, len(first.layers), formats)
    else:
        table = harm.assumed(first, formats)
        if len(formats) > 1:
            say("harm of formats is assumed: proportional to parameters and 4^-bits, all layers in int4 = 1; --harm"
                " gives measured numbers")  # fmt: skip
    job = ClusterJob.of(workload(args, opened))
    theta = THETA if args.theta is None else args.theta
    task = ClusterTask(cluster, models, job, formats, table, theta, args.group or GROUP)
    limits = Limits(seconds=args.search_seconds or SECONDS, method=args.method or AUTO_METHOD, batch=args.batch)
    with activity("planning", "searching the stages with the shortest predicted time"):
        found = search(task, limits)
        helps = whatif.helps(found, limits)
    if args.json:
        print(json.dumps({"model": opened.source.name} | report.as_json(found, helps), allow_nan=False))
    else:
        print(report.report(found, opened.source.name, helps))
    if args.save:
        write(args.save, found.plan.strategy().text())


def _formats(args: argparse.Namespace) -> tuple[Format, ...]:
    """Return the formats that layers may have. Raise InvalidInput if an allowed name is no format of a layer."""
    if args.weights is not None:
        if args.weights not in FORMATS:
            raise InvalidInput(
                f"--weights is {args.weights}; layers of a pipeline may be in {', '.join(filter(None, FORMATS))}"
            )
        if args.allow is not None or args.quality != "exact":
            raise InvalidInput(
                "--weights fixes the format, but --quality and --allow let the planner choose; leave out one of them"
            )
        return (args.weights,)
    known = {f"{form}-weights": form for form in FORMATS if form}
    given = args.allow.split(",") if args.allow is not None else []
    if wrong := [name for name in given if name not in known]:
        fault = "has no effect with --cluster" if wrong[0] in ALLOW else "is unknown"
        raise InvalidInput(f"--allow {wrong[0]} {fault}; with --cluster it takes {', '.join(known)}")
    names = [*QUALITY[args.quality], *given]
    return (None, *(form for name, form in known.items() if name in names))


def _models(
    args: argparse.Namespace, cluster: Cluster, formats: Sequence[Format]
) -> "tuple[dict[str, Model], OpenModel]":
    """Return the model as each kind of device holds it, and the opened model. No weights are loaded."""
    models: dict[str, Model] = {}
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        try:
            opened = open_bare(args, kind, Lossy())
        except ModelNotFound as error:
            raise ModelNotFound(f"{error}; {shipped.listed('models')}") from error
        facts = {}
        for form in dict.fromkeys((None, *formats, *FORMATS)):
            opened.use(Lossy(weights=form))
            facts[form] = opened.facts
        models[kind] = model.of_facts(facts)
        opened.use(Lossy())
    return models, opened
