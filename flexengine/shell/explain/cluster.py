"""A plan of a cluster as text: stages, formats by layer, memory, bubbles, predicted speed, and changes of the cluster
that would make the job shorter, each planned again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from flexengine.errors import OutOfMemory
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask
from flexengine.plan.cluster.devices import DECODE, PREFILL, Cluster, Link
from flexengine.plan.cluster.file import EXACT_NAME
from flexengine.plan.cluster.job import Format, assumed_harm
from flexengine.plan.cluster.search import Found, Limits, search
from flexengine.plan.formatting import BAR_CHARACTERS, clock, count, digits, percent, size
from flexengine.shell.explain.pace import BUSY_SHARE
from flexengine.shell.explain.whatif import MIN_SPEEDUP, NEARLY_FULL_SHARE, Help

MARKS: dict[Format, str] = {None: "#", "int8": "8", "int4": "4", "int3": "3"}  # one character per layer
LINE = 64  # layers per line of the picture
SECONDS = 4.0  # most seconds to plan one change
GAP = 1e-2
MOST_TYPES = 3  # types that are tried at twice the speed


def report(found: Found, model_name: str, helps: Sequence[Help] = ()) -> str:
    """Return the whole explanation.

    Args:
        found: result of the search.
        model_name: shown in the first line.
        helps: from `cluster_helps`.
    """
    plan = found.plan
    parts = [_head(plan, model_name), _picture(plan), _stages(plan), _memory(plan), _totals(found), _help_lines(helps)]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part)


def _head(plan: ClusterPlan, model_name: str) -> list[str]:
    """Return lines with model, cluster, rows and micro-batches."""
    cluster, job, shape = plan.task.cluster, plan.task.job, plan.shape
    rounds = shape.rounds(job.rows)
    alive = "all at once" if rounds == 1 else f"{shape.batch:,} at once, in {rounds:,} rounds"
    unused = [d.name for d in cluster.devices if d not in plan.devices]
    types = ", ".join(f"{len(cluster.of_type(name))} x {name}" for name in cluster.types)
    lines = [
        f"{model_name} on {cluster.name} ({types})",
        f"{count(job.rows, 'sequence', 'sequences')} of {job.prompt:,} prompt tokens, {job.output:,} tokens generated"
        f" for each (means); {alive}",
        "",
        f"Pipeline    {count(len(plan.devices), 'stage', 'stages')};"
        f" {count(shape.cohorts, 'cohort', 'cohorts')} of {count(shape.decode, 'sequence', 'sequences')},"
        f" each prefilled in parts of {shape.prefill:,}",
    ]
    return lines + ([f"            without layers: {', '.join(unused)}"] if unused else [])


def _picture(plan: ClusterPlan) -> list[str]:
    """Return a character per layer: its format; small letters mark layers whose weights are on the host."""
    shown = sorted({choice.form for choice in plan.choices}, key=lambda form: list(MARKS).index(form))
    legend = "  ".join(f"{MARKS[form]} {form or EXACT_NAME}" for form in shown)
    streamed = any(choice.host for choice in plan.choices)
    lines = [f"Layers      {legend}" + ("  ~ weights on the host, streamed" if streamed else "")]
    width = max(len(device.name) for device in plan.devices)
    for device, (first, end) in zip(plan.devices, plan.layers, strict=True):
        choices = plan.choices[first:end]
        for start in range(0, len(choices), LINE):
            part = choices[start : start + LINE]
            marks = "".join("~" if c.host else MARKS[c.form] for c in part)
            name = device.name if start == 0 else ""
            lines.append(f"  {name:<{width}}  {first + start:>4}..{first + start + len(part) - 1:<4} [{marks}]")
    return lines


def _stages(plan: ClusterPlan) -> list[str]:
    """Return a table of the stages: layers, formats, seconds of a micro-batch, busy shares, and the link after it."""
    priced = plan.priced
    busy = _busy_shares(plan)
    width = max(len("stage"), *(len(d.name) for d in plan.devices))
    kind = max(len("type"), *(len(d.type) for d in plan.devices))
    lines = [
        "Stages      milliseconds of a micro-batch, and busy shares in a round",
        f"  {'stage':<{width}}  {'type':<{kind}}  layers  {'prefill':>9}  {'decode':>9}  {'busy prefill':>12}"
        f"  {'busy decode':>11}  {'link':>7}  formats",
    ]
    for k, (device, (first, end)) in enumerate(zip(plan.devices, plan.layers, strict=True)):
        formats = plan.formats[first:end]
        numbers = ", ".join(f"{form or EXACT_NAME} x {formats.count(form)}" for form in MARKS if form in formats)
        link = digits(1e3 * priced.hop_decode[k]) if k < len(priced.hop_decode) else "-"
        lines.append(
            f"  {device.name:<{width}}  {device.type:<{kind}}  {end - first:>6}  {digits(1e3 * priced.prefill[k]):>9}"
            f"  {digits(1e3 * priced.decode[k]):>9}  {percent(busy[PREFILL][k]):>12}  {percent(busy[DECODE][k]):>11}"
            f"  {link:>7}  {numbers}"
        )
    bubbles = {phase: 1 - sum(shares) / len(shares) for phase, shares in busy.items()}
    idle = f"prefill {percent(bubbles[PREFILL])}, decode {percent(bubbles[DECODE])}, mean of the stages"
    return [*lines, f"  idle (bubbles): {idle}", f"  pace: {', '.join(_paces(plan, busy))}"]


def _paces(plan: ClusterPlan, busy: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield by phase the stage or link that sets the pace; none if all wait for long. busy: shares of the stages."""
    priced, numbers, names = plan.priced, plan.numbers, [device.name for device in plan.devices]
    links = [f"the link from {a} to {b}" for a, b in pairwise(names)]
    hops = {PREFILL: (priced.hop_prefill, numbers.prefills), DECODE: (priced.hop_decode, numbers.cohorts)}
    for (phase, shares), length in zip(busy.items(), priced.passes, strict=True):
        seconds, times = hops[phase]
        of_links = [times * each / length if length else 0.0 for each in seconds[: len(links)]]
        share, name = max(zip([*shares, *of_links], [*names, *links], strict=True), key=itemgetter(0))
        yield (
            f"{name} in {phase} ({percent(min(1.0, share))} busy)"
            if share >= BUSY_SHARE
            else f"none in {phase}, stages wait for each other"
        )


def _busy_shares(plan: ClusterPlan) -> dict[str, list[float]]:
    """Return by phase the share of its time in which each stage works, by the objective's times."""
    priced, numbers = plan.priced, plan.numbers
    first, step = priced.passes
    return {
        PREFILL: [numbers.prefills * s / first if first else 0.0 for s in priced.prefill],
        DECODE: [numbers.cohorts * s / step if step else 0.0 for s in priced.decode],
    }


def _memory(plan: ClusterPlan) -> list[str]:
    """Return a bar per device of its bytes against its capacity, and the bytes on the host."""
    lines, width = ["Memory"], max(len(device.name) for device in plan.devices)
    for k, device in enumerate(plan.devices):
        used, host = plan.priced.memory[k], plan.priced.host[k]
        bar = ("#" * round(BAR_CHARACTERS * used / device.memory)).ljust(BAR_CHARACTERS)
        also = f"  host {size(host)} of {size(device.host_memory)}" if host else ""
        lines.append(
            f"  {device.name:<{width}} {size(used):>8} of {size(device.memory):<8} [{bar}]"
            f" {percent(used / device.memory)}{also}"
        )
    return lines


def _totals(found: Found) -> list[str]:
    """Return lines with throughput, harm, and how the plan was found."""
    plan = found.plan
    simulated = plan.simulated_seconds
    checked = "" if simulated is None else f"; {clock(simulated)} in virtual time, micro-batch by micro-batch"
    how = "mixed-integer programs" if found.method == "program" else "bit transfers"
    return [
        f"Prediction  {digits(plan.tokens_per_second)} tok/s generated; job {clock(plan.priced.seconds)}{checked}",
        f"            harm of formats {digits(plan.priced.harm)}, times theta {plan.task.theta:g} ="
        f" {digits(plan.task.theta * plan.priced.harm)} s of the cost {digits(plan.priced.cost)} s",
        f"            {found.solved:,} {how} after {found.bounded:,} bounds, in {clock(found.seconds)};"
        f" at most {100 * found.gap:.2g} % above the best cost",
    ]


def _help_lines(helps: Sequence[Help]) -> list[str]:
    """Return lines with the changes that would help, and the speedup of the job."""
    width = max((len(h.label) for h in helps), default=0)
    lines = [f"  {h.label:<{width}}  {h.ratio:.2f}x" for h in helps]
    return ["Would help  (the whole job, one change at a time, each planned again)", *lines] if helps else []


def as_json(found: Found, helps: Sequence[Help] = ()) -> dict[str, Any]:
    """Return the plan's numbers."""
    plan, priced = found.plan, found.plan.priced
    busy = _busy_shares(plan)
    return {
        "cluster": plan.task.cluster.name, "rows": plan.task.job.rows, "prompt_tokens": plan.task.job.prompt,
        "output_tokens": plan.task.job.output, "batch": plan.shape.batch, "rounds": plan.numbers.rounds,
        "tok_s": plan.tokens_per_second, "seconds": priced.seconds, "simulated_seconds": plan.simulated_seconds,
        "harm": priced.harm, "theta": plan.task.theta, "cost": priced.cost, "gap": found.gap,
        "search_seconds": found.seconds, "solved": found.solved, "bounded": found.bounded, "method": found.method,
        "stages": [
            {"device": device.name, "type": device.type, "layers": list(plan.layers[k]),
             "memory_bytes": priced.memory[k], "host_bytes": priced.host[k], "capacity_bytes": device.memory,
             "prefill_seconds": priced.prefill[k], "decode_seconds": priced.decode[k],
             "busy": {phase: shares[k] for phase, shares in busy.items()}}
            for k, device in enumerate(plan.devices)
        ],
        "strategy": plan.strategy().to_json(),
        "helps": [{"label": h.label, "ratio": h.ratio} for h in helps],
    }  # fmt: skip


def cluster_helps(found: Found, limits: Limits) -> list[Help]:
    """Return the changes that make the job at least 3 % shorter, the best first. found: the plan. limits: of the plan's
    search; each change is planned in at most SECONDS."""
    brief = replace(limits, seconds=min(SECONDS, limits.seconds), gap=max(GAP, limits.gap))
    made = []
    for label, task in _changes(found.plan):
        try:
            seconds = search(task, brief).plan.priced.seconds
        except OutOfMemory:
            continue
        if (ratio := found.plan.priced.seconds / seconds) >= MIN_SPEEDUP:
            made.append(Help(label, ratio))
    return sorted(made, key=lambda h: -h.ratio)


def _changes(plan: ClusterPlan) -> Iterator[tuple[str, ClusterTask]]:
    """Yield changes, and the task with each of them."""
    task, cluster, priced = plan.task, plan.task.cluster, plan.priced
    slow = max(range(len(plan.devices)), key=lambda k: priced.decode[k] * plan.numbers.cohorts + priced.prefill[k])
    kind = plan.devices[slow].type
    for name in dict.fromkeys((kind, *cluster.types[:MOST_TYPES])):
        yield f"{name} twice as fast", replace(task, cluster=_doubled(cluster, name, "speed"))
    names = {device.name for device in cluster.devices}
    name = next(f"{kind}+{k}" for k in range(1, len(names) + 2) if f"{kind}+{k}" not in names)
    more = (*cluster.devices, replace(plan.devices[slow], name=name))
    yield f"one more {kind}", replace(task, cluster=replace(cluster, devices=more))
    full = max(range(len(plan.devices)), key=lambda k: priced.memory[k] / plan.devices[k].memory)
    if priced.memory[full] >= NEARLY_FULL_SHARE * plan.devices[full].memory:
        name = plan.devices[full].type
        yield f"{name} with twice the memory", replace(task, cluster=_doubled(cluster, name, "memory"))
    if len(plan.devices) > 1:
        pairs = {pair: _ten_times(link) for pair, link in cluster.pairs.items()}
        faster = replace(cluster, within=_ten_times(cluster.within), between=_ten_times(cluster.between), pairs=pairs)
        yield "links ten times as fast", replace(task, cluster=faster)
    if any(choice.host for choice in plan.choices):
        hosts = tuple(replace(d, host_link=2 * d.host_link) for d in cluster.devices)
        yield "links from host to device twice as fast", replace(task, cluster=replace(cluster, devices=hosts))
    fewer = next((form for form in ("int8", "int4", "int3") if form not in task.formats), None)
    if fewer is not None and all(fewer in model.facts for model in task.models.values()):
        formats = (*task.formats, fewer)
        table = assumed_harm(task.model, formats)
        yield f"layers in {fewer} allowed (lossy)", replace(task, formats=formats, harm=table)


def _doubled(cluster: Cluster, kind: str, field: str) -> Cluster:
    """Return the cluster with twice the number in a field of all devices of a type."""
    doubled = (replace(d, **{field: 2 * getattr(d, field)}) if d.type == kind else d for d in cluster.devices)
    return replace(cluster, devices=tuple(doubled))


def _ten_times(link: Link) -> Link:
    return Link(10 * link.bandwidth, link.latency / 10)
