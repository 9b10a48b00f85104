"""Other work of `flexengine plan`.

--cluster: stages of a pipeline over several devices, as a report and a strategy file;
--slices: what crosses the cuts between the layers' attentions and the rest of the model.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.lossy import ALLOWED, EXACT, QUALITY, Lossy
from flexengine.plan.chain import ChainPlan, chain_strategy, plan_chain
from flexengine.plan.cluster import file
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster, links_around
from flexengine.plan.cluster.job import ClusterJob, Format, Harm, Model, assumed_harm
from flexengine.plan.cluster.search import METHODS, Found, Limits, search
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.min_memory import fitting, left_out
from flexengine.plan.mixes import MixedPlan, plan_mixed
from flexengine.plan.sparse import sparse_warning
from flexengine.plan.stages import FORMATS
from flexengine.plan.workload import Workload
from flexengine.shell.commands.messages import say
from flexengine.shell.commands.openers import load_libraries, open_bare
from flexengine.shell.commands.options import OptionTable, check_written, write
from flexengine.shell.commands.parser import GENERAL, check_least, refuse_given
from flexengine.shell.explain import cluster as explain
from flexengine.shell.explain.chain import chain_helps, chain_json, chain_report
from flexengine.shell.explain.pace import job_helps
from flexengine.shell.explain.whatif import SEARCH_SECONDS

if TYPE_CHECKING:
    from flexengine.model.slices import Cut, SlicedTensor, Slices
    from flexengine.worker.open_model import OpenModel

# Options of plan that a cluster plan does not use.
_UNUSED = (
    *("hardware", "policy", "compare", "frontier", "latency", "plot", "save_lp", "slices"),
    *("device", "device_mem", "host_mem", "offload_dir", "compute", "cache", "sparse_attention", "flash", "sparsify"),
    *("calibrate", "calibration_text"),
)
BITS_ONLY = ("theta", "harm", "indicator")  # also let plan --stages choose the format of each layer
CLUSTER_ONLY = (*BITS_ONLY, "group", "method", "batch", "search_seconds")
ABOUT = "a pipeline over several devices; --theta, --harm and --indicator also choose formats of layers for --stages"
# None is the default of each, so that one that is given without --cluster is refused, whatever its value.
CLUSTER = OptionTable(
    f"""
--cluster CLUSTER.json    plan a pipeline over the devices of this file, or of a shipped cluster (docs/cluster.md);
                          --save then writes a strategy, for run --strategy
--theta SECONDS           seconds that a unit of harm to quality is worth (default: {ClusterTask.theta:g})
--harm FILE.json          harm of each format to quality, by layer (default: assumed from parameters and bits)
--indicator               which numbers of --harm count: measured, or LLM-PQ's variance (default: measured)
--group N                 decide about N neighbouring layers together (default: {ClusterTask.group})
--method                  mixed-integer programs, or the bit-transfer heuristic (default: {Limits.method}, by size)
--batch N                 sequences alive at once (default: the fastest number)
--search-seconds SECONDS  most seconds of the search (default: {Limits.seconds:g})
""",
    more={"method": {"choices": METHODS}, "indicator": {"choices": tuple(file.INDICATORS)}},
)


def check_cluster(args: argparse.Namespace) -> None:
    """Raise InvalidInput if options do not go with --cluster, a value is not allowed, or a file cannot be written."""
    refuse_given(args, _UNUSED, "has no effect with --cluster, whose file describes the devices; leave one out")
    check_bits(args)
    check_least(args, group=1, batch=1, search_seconds=1e-3)
    cluster = shipped.find("clusters", args.cluster)
    check_written(args, {"--save": args.save}, {"--input": args.input, "--cluster": cluster, "--harm": args.harm})


def check_bits(args: argparse.Namespace) -> None:
    """Raise InvalidInput if --indicator is given without --harm, --theta is negative, or formats that a plan of
    --stages chooses are fixed."""
    if args.indicator and not args.harm:
        raise InvalidInput(f"--indicator {args.indicator} says which numbers of --harm count; give --harm, too")
    check_least(args, theta=0)
    if chooses_bits(args):
        _formats(args)


def chooses_bits(args: argparse.Namespace) -> bool:
    """Return whether a plan of --stages chooses the format of each layer, by harm."""
    return args.stages is not None and any(getattr(args, name) is not None for name in BITS_ONLY)


def _harm(args: argparse.Namespace, model: Model, formats: Sequence[Format]) -> Harm:
    """Return the harm by layer and format, of the file or assumed."""
    if args.harm:
        return file.load_harm(args.harm, len(model.kinds), formats, args.indicator or "measured")
    if len(formats) > 1:
        rule = "proportional to parameters and 4^-bits, all layers in int4 = 1"
        say(f"harm of formats is assumed: {rule}; flexengine quality --harm FILE measures it, and --harm reads it")
    return assumed_harm(model, formats)


def plan_cluster(args: argparse.Namespace, workload: "Callable[[argparse.Namespace, OpenModel], Workload]") -> None:
    """Plan a pipeline, print the report, and write the strategy. Raise FlexError if no plan fits. args: options, after
    `check_cluster`. workload: returns the rows of the job."""
    formats = _formats(args)
    cluster = file.load(shipped.find_file("clusters", args.cluster), lambda name: shipped.find_file("hardware", name))
    load_libraries()
    models, opened = _models(args, cluster, formats)
    first = next(iter(models.values()))
    table = _harm(args, first, formats)
    job = ClusterJob(workload(args, opened))
    theta = ClusterTask.theta if args.theta is None else args.theta
    task = ClusterTask(cluster, models, job, formats, table, theta, args.group or ClusterTask.group)
    seconds, method = args.search_seconds or Limits.seconds, args.method or Limits.method
    limits = Limits(seconds=seconds, method=method, batch=args.batch)
    with activity("planning", "searching the stages with the shortest predicted time"):
        found, chain = searched(task, limits)
        helps = explain.cluster_helps(found, limits) if found else []
    if chain is not None:
        say("stages use host and disk tiers; --group and --method have no part in this plan")
        say_chain(args, opened, chain.chain, names=[device.name for device in task.cluster.devices], mixed=chain)
        return
    assert found is not None
    if args.json:
        print(json.dumps({"model": opened.source.name} | explain.as_json(found, helps), allow_nan=False))
    else:
        print(explain.report(found, opened.source.name, helps))
    if args.save:
        write(args.save, found.plan.strategy().text())


def searched(task: ClusterTask, limits: Limits) -> tuple[Found | None, MixedPlan | None]:
    """Return the plan of a cluster with all KV cache on its devices, and the plan of stages with host and disk tiers if
    that one is predicted to be faster. Raise FlexError if neither fits.

    Only devices with hardware files have these tiers. Such stages are in the order of the file.
    """
    machines = [machine for device in task.cluster.devices if (machine := device.machine) is not None]
    found, refused, chain = None, None, None
    try:
        found = search(task, limits)
    except OutOfMemory as error:
        refused = error
    devices = task.cluster.devices
    # Devices of one node would share its RAM and disk, and other kinds of devices hold a model in other dtypes.
    nodes = {device.node or str(rank) for rank, device in enumerate(devices)}
    alike = len({device.kind for device in devices}) == 1 and len(nodes) == len(devices)
    if alike and len(machines) == len(devices) and limits.batch is None:
        rows = task.job.workload
        links = [task.cluster.link(a, b) for a, b in pairwise([*devices, devices[0]])] if len(devices) > 1 else []
        with suppress(OutOfMemory, InvalidInput):
            chain = plan_mixed(
                task.model, task.formats, task.harm, task.theta, lambda m: plan_chain(m, machines, rows, links=links)
            )
    if chain is None and refused is not None:
        raise refused
    if found is not None and chain is not None:
        chain = chain if chain.cost < found.plan.priced.cost else None
    return found, chain


def chain_seconds(args: argparse.Namespace, opened: "OpenModel", hardware: Hardware, workload: Workload) -> float:
    """Return the predicted seconds of --stages equal machines. Raise OutOfMemory if no plan fits."""
    return plan_chain(
        opened.facts, [hardware] * args.stages, workload, links=links_around(args.stage_link, args.stages)
    ).seconds


def plan_stages(
    args: argparse.Namespace, opened: "OpenModel", hardware: Hardware, workload: Workload, lossy: Lossy
) -> None:
    """Plan a chain of equal machines, print the report, and write the strategy. Raise FlexError if no plan fits."""
    machines, bits = [hardware] * args.stages, chooses_bits(args)
    links = links_around(args.stage_link, args.stages)
    formats = _formats(args) if bits else ()
    model = _by_format(opened, formats) if bits else Model({None: opened.facts})
    table = _harm(args, model, formats) if bits else assumed_harm(model, formats)
    theta = ClusterTask.theta if args.theta is None else args.theta

    def chain(facts: ModelFacts, part: Workload, more: int = 0) -> ChainPlan:
        around = links + links[:1] * more  # all are alike
        return plan_chain(facts, machines + [hardware] * more, part, links=around)

    def planned(part: Workload) -> ChainPlan | MixedPlan:
        if bits:
            return plan_mixed(model, formats, table, theta, lambda facts: chain(facts, part))
        return chain(opened.facts, part)

    began = monotonic()
    with activity("planning", "searching the stages with the shortest predicted time"):
        plan, largest, why = fitting(workload, planned)
    brief = args.verbose or monotonic() - began <= SEARCH_SECONDS
    if text := left_out(workload, largest, why):
        say(text)
    if isinstance(plan, MixedPlan):
        say_chain(args, opened, plan.chain, lossy, mixed=plan)
        return
    part = plan.stages[0].cost.workload
    say_chain(args, opened, plan, lossy, one_more=(lambda: chain(opened.facts, part, 1)) if brief else None)


def say_chain(
    args: argparse.Namespace,
    opened: "OpenModel",
    plan: ChainPlan,
    lossy: Lossy = EXACT,
    names: Sequence[str] = (),
    mixed: MixedPlan | None = None,
    one_more: Callable[[], ChainPlan] | None = None,
) -> None:
    """Print the report of a chain, and write its strategy.

    Args:
        names: of the devices of a cluster.
        mixed: the formats of the layers, if they were chosen by harm; None for those of `lossy`.
        one_more: as for `job_helps`.
    """
    slow = plan.stages[plan.slowest]
    if warning := sparse_warning(slow.cost, slow.prediction):
        say(warning)
    found, whole = chain_helps(plan, thorough=args.verbose), job_helps(plan, one_more)
    hardware = plan.stages[0].cost.hardware
    name = f"{opened.source.name} ({lossy})" if lossy else opened.source.name
    forms = [lossy.weights] * len(opened.facts.layers) if isinstance(lossy.weights, str | None) else lossy.weights
    if mixed is not None:
        forms = mixed.forms
    head: dict[str, Any] = {"model": opened.source.name, "lossy": lossy.enabled, "hardware": hardware.name}
    head |= {"devices": names} if names else {}
    head |= {"formats": forms, "harm": mixed.harm, "cost": mixed.cost} if mixed is not None else {}
    if args.json:
        print(json.dumps(head | chain_json(plan, found, whole), allow_nan=False))
    else:
        print(chain_report(plan, name, found, whole, mixed, args.verbose))
    if args.save:
        write(args.save, chain_strategy(plan, opened.facts, forms, names).text())


def _formats(args: argparse.Namespace) -> tuple[Format, ...]:
    """Return the formats that layers may have. Raise InvalidInput if an allowed name is no format of a layer, or if
    harm is given for --stages, but there is one format."""
    what = "--cluster" if args.cluster is not None else f"--{next(n for n in BITS_ONLY if n in args.changed)}"
    fixed = next((name for name in ("weights", "layer_bits") if getattr(args, name) is not None), None)
    if fixed and args.cluster is None:
        remedy = "which fixes them; leave one out"
        raise InvalidInput(
            f"{what} chooses formats of layers, but {args.changed[fixed]} is {getattr(args, fixed)}, {remedy}"
        )
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
        fault = f"has no effect with {what}" if wrong in ALLOWED else "is unknown"
        raise InvalidInput(f"--allow {wrong} {fault}; with {what} it takes {', '.join(by_name)}")
    names = [*QUALITY[args.quality], *given]
    formats = (None, *(form for name, form in by_name.items() if name in names))
    if args.cluster is None and len(formats) == 1:
        remedy = "give --quality small, or --allow int8-weights,int4-weights"
        raise InvalidInput(f"{what} chooses formats of layers, but all are exact; {remedy}")
    return formats


def _models(
    args: argparse.Namespace, cluster: Cluster, formats: Sequence[Format]
) -> "tuple[dict[str, Model], OpenModel]":
    """Return the model as each kind of device holds it, and the opened model. No weights are loaded."""
    models: dict[str, Model] = {}
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        opened = open_bare(args, Lossy(), kind)
        models[kind] = _by_format(opened, formats)
    return models, opened


def _by_format(opened: "OpenModel", formats: Sequence[Format]) -> Model:
    """Return the sizes of an opened model in each format, beside the present lossy switches."""
    facts, before = {}, opened.lossy
    for form in dict.fromkeys((None, *formats, *FORMATS)):
        opened.use(replace(before, weights=form))
        facts[form] = opened.facts
    opened.use(before)
    return Model(facts)


# Slices.

# Options of plan that go with --slices; those of a cluster plan are refused for themselves.
_OF_MODEL = ("model", "dtype", "device", "trust_remote_code", "allow_symlinks")
WITH_SLICES = (*_OF_MODEL, "hardware", "slices", "json", *GENERAL, *CLUSTER_ONLY)
_ROW = "    {:<18}{:<24}{:<12}{:>12}"  # where to, name, shape, bytes


def print_slices(args: argparse.Namespace, opened: "OpenModel") -> None:
    """Print the slices of a model, or with --json their numbers. Raise UnsupportedModel if it cannot be sliced."""
    from flexengine.model.slices import slices_of

    found = slices_of(opened.skeleton)
    values = as_json(found, opened)
    print(json.dumps(values) if args.json else "\n".join(_text(values, found, opened)))


def as_json(found: "Slices", opened: "OpenModel") -> dict[str, Any]:
    """Return the slices as a JSON object. All bytes are those of one token."""

    def parts(*tensors: "SlicedTensor") -> list[dict[str, Any]]:
        return [{"name": part.name, "shape": part.shape, "bytes": part.nbytes} for part in tensors]

    layers = defaultdict["Cut", list[int]](list)  # of each different cut
    for layer, cut in enumerate(found.cuts):
        layers[cut].append(layer)
    cuts = [
        {
            "layers": numbers,
            "window": cut.window,
            "sent": parts(*cut.sent),
            "fetched": parts(cut.fetched)[0],
            "kept": parts(*cut.kept),
        }
        for cut, numbers in layers.items()
    ]
    return {
        "model": opened.source.name,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "slices": len(found.cuts) + 1,
        "cuts": cuts,
        "tables": parts(*found.tables),
        "sent_bytes": sum(part.nbytes for cut in found.cuts for part in cut.sent),
        "fetched_bytes": sum(cut.fetched.nbytes for cut in found.cuts),
    }


def _text(values: dict[str, Any], found: "Slices", opened: "OpenModel") -> Iterator[str]:
    """Yield the lines of the report. values: as `as_json` returns them."""
    count = len(found.cuts)
    yield f"{values['model']} in {values['dtype']}: the attentions of {count} layers cut it into {count + 1} slices"
    yield ""
    yield "  slice 0: embedding, and layer 0 up to q, k and v"
    if count > 1:
        yield f"  slice i, from 1 to {count - 1}: layer i - 1 after its attention, and layer i up to q, k and v"
    yield f"  slice {count}: layer {count - 1} after its attention, and the head"
    yield ""
    yield _ROW.format("", "tensor", "of a token", "bytes")
    for cut in values["cuts"]:
        yield f"  {_layers(cut['layers'])}" + (f", window of {cut['window']:,} tokens" if cut["window"] else "")
        ways = {"to attention": cut["sent"], "from attention": [cut["fetched"]], "kept": cut["kept"]}
        for way, parts in ways.items():
            for i, part in enumerate(parts):
                shape = " x ".join(f"{n:,}" for n in part["shape"]) or "1"
                yield _ROW.format("" if i else way, part["name"], shape, f"{part['bytes']:,}")
    yield ""
    yield from _totals(values["sent_bytes"], values["fetched_bytes"], found, opened)


def _layers(numbers: list[int]) -> str:
    """Return layer numbers as text, such as layers 0-29."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def _totals(sent: int, fetched: int, found: "Slices", opened: "OpenModel") -> Iterator[str]:
    """Yield the bytes of all layers, and of the tables that slices read beside what crosses."""
    yield f"All layers, per token: {sent:,} bytes to attention, {fetched:,} from it, {sent + fetched:,} together"
    if formula := _formula(found, opened):
        yield f"  = {formula}"
    facts, count = opened.facts, len(found.cuts)
    padded = (facts.sent + facts.fetched) * count
    if padded != sent + fetched:
        to_width = f"{facts.heads} heads and {facts.kv_heads} KV heads of every layer to {facts.head_dim} elements"
        yield f"  flexengine pads {to_width}, and moves {padded:,} bytes"
    kept = max(sum(part.nbytes for part in cut.kept) for cut in found.cuts)
    yield f"Kept while attention runs: at most {kept:,} bytes per token"
    if tables := Counter((part.name, part.nbytes) for part in found.tables):
        named = ", ".join((f"{n} x " if n > 1 else "") + f"{name} ({size:,})" for (name, size), n in tables.items())
        yield f"Beside these, slices read tables made from token ids and positions alone (bytes per token): {named}"


def _formula(found: "Slices", opened: "OpenModel") -> str:
    """Return Lamina's formula of the bytes of all layers (section 3.2), or "" if layers differ or heads have several
    widths."""
    shapes = {(*(part.shape for part in cut.sent), cut.fetched.shape) for cut in found.cuts}
    (q, k, v, out), *others = shapes
    if others or k != v or q != out or q[1] != k[1]:
        return ""
    group, e = q[0] // k[0], opened.dtype.itemsize
    form = "4 e d L" if group == 1 else "(2 + 2/G) e d L"
    grouped = "" if group == 1 else f", G {group} query heads per KV head"
    return f"{form}, with e {e} bytes, d {q[0] * q[1]:,}, L {len(found.cuts)} layers{grouped}"
