"""flexengine plan --cluster: stages of a pipeline over several devices, as a report and a strategy file."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flexengine import shipped
from flexengine.activity import activity
from flexengine.errors import InvalidInput
from flexengine.lossy import ALLOW, QUALITY, Lossy
from flexengine.plan.cluster import file
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster
from flexengine.plan.cluster.job import ClusterJob, Format, Model, assumed_harm
from flexengine.plan.cluster.search import METHODS, Limits, search
from flexengine.plan.workload import Workload
from flexengine.shell.commands.messages import say
from flexengine.shell.commands.open_engine import load_libraries, open_bare
from flexengine.shell.commands.options import OptionTable
from flexengine.shell.commands.parser import check_least, refuse_given
from flexengine.shell.commands.written import check_written, write
from flexengine.shell.explain import cluster as explain
from flexengine.strategy import FORMATS

if TYPE_CHECKING:
    from flexengine.worker.open_model import OpenModel

# Options of plan that a cluster plan does not use.
_UNUSED = (
    *("hardware", "policy", "compare", "frontier", "latency", "plot", "save_lp", "slices"),
    *("device", "device_mem", "host_mem", "offload_dir", "compute", "cache", "sparse_attention", "flash", "sparsify"),
    *("calibrate", "calibration_text"),
)
CLUSTER_ONLY = ("theta", "harm", "group", "method", "batch", "search_seconds")
# None is the default of each, so that one that is given without --cluster is refused, whatever its value.
CLUSTER = OptionTable(
    f"""
--cluster CLUSTER.json    plan a pipeline over the devices of this file, or of a shipped cluster (docs/cluster.md);
                          --save then writes a strategy, for run --strategy
--theta SECONDS           seconds that a unit of harm to quality is worth (default: {ClusterTask.theta:g})
--harm FILE.json          harm of each format to quality, by layer (default: assumed from parameters and bits)
--group N                 decide about N neighbouring layers together (default: {ClusterTask.group})
--method                  mixed-integer programs, or the bit-transfer heuristic (default: {Limits.method}, by size)
--batch N                 sequences alive at once (default: the fastest number)
--search-seconds SECONDS  most seconds of the search (default: {Limits.seconds:g})
""",
    more={"method": {"choices": METHODS}},
)


def check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if options do not go with --cluster, a value is not allowed, or a file cannot be written."""
    refuse_given(args, _UNUSED, "has no effect with --cluster, whose file describes the devices; leave one out")
    check_least(args, theta=0, group=1, batch=1, search_seconds=1e-3)
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
    models, opened = _models(args, cluster, formats)
    first = next(iter(models.values()))
    if args.harm:
        table = file.load_harm(args.harm, len(first.kinds), formats)
    else:
        table = assumed_harm(first, formats)
        if len(formats) > 1:
            rule = "proportional to parameters and 4^-bits, all layers in int4 = 1"
            say(f"harm of formats is assumed: {rule}; --harm gives measured numbers")
    job = ClusterJob(workload(args, opened))
    theta = ClusterTask.theta if args.theta is None else args.theta
    task = ClusterTask(cluster, models, job, formats, table, theta, args.group or ClusterTask.group)
    seconds, method = args.search_seconds or Limits.seconds, args.method or Limits.method
    limits = Limits(seconds=seconds, method=method, batch=args.batch)
    with activity("planning", "searching the stages with the shortest predicted time"):
        found = search(task, limits)
        helps = explain.cluster_helps(found, limits)
    if args.json:
        print(json.dumps({"model": opened.source.name} | explain.as_json(found, helps), allow_nan=False))
    else:
        print(explain.report(found, opened.source.name, helps))
    if args.save:
        write(args.save, found.plan.strategy().text())


def _formats(args: argparse.Namespace) -> tuple[Format, ...]:
    """Return the formats that layers may have. Raise InvalidInput if an allowed name is no format of a layer."""
    if args.weights is not None:
        if args.weights not in FORMATS:
            known = ", ".join(filter(None, FORMATS))
            raise InvalidInput(f"--weights is {args.weights}; layers of a pipeline may be in {known}")
        why = "lets the planner choose, but --weights fixes the format; leave out one of them"
        refuse_given(args, ("allow", "quality"), why)
        return (args.weights,)
    by_name = {f"{form}-weights": form for form in FORMATS if form}
    given = args.allow.split(",") if args.allow is not None else []
    if wrong := next((name for name in given if name not in by_name), None):
        fault = "has no effect with --cluster" if wrong in ALLOW else "is unknown"
        raise InvalidInput(f"--allow {wrong} {fault}; with --cluster it takes {', '.join(by_name)}")
    names = [*QUALITY[args.quality], *given]
    return (None, *(form for name, form in by_name.items() if name in names))


def _models(
    args: argparse.Namespace, cluster: Cluster, formats: Sequence[Format]
) -> "tuple[dict[str, Model], OpenModel]":
    """Return the model as each kind of device holds it, and the opened model. No weights are loaded."""
    models: dict[str, Model] = {}
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        opened = open_bare(args, kind, Lossy())
        facts = {}
        for form in dict.fromkeys((None, *formats, *FORMATS)):
            opened.use(Lossy(weights=form))
            facts[form] = opened.facts
        models[kind] = Model(facts)
        opened.use(Lossy())
    return models, opened
