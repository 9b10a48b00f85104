"""Explain a prediction as text: policy, placement of the data, memory, the bottleneck, and what would help."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from flexengine.errors import FlexError, OutOfMemory
from flexengine.places import DEVICE, DISK, MOST_DISKS, MOST_WORKERS, place_names, worker_names
from flexengine.plan import neurons, records, tables
from flexengine.plan.cost import Cost, Prediction, busiest
from flexengine.plan.delegation import chosen_share
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import BAR_CHARACTERS, clock, count, digits, lane_name, percent, place_name, size
from flexengine.plan.hardware import Hardware, Table, at
from flexengine.plan.rates import origin
from flexengine.plan.search import KINDS, holder, kind_bytes, waits_for
from flexengine.plan.terms import CACHE, WEIGHTS, fraction, routes
from flexengine.plan.workload import Workload
from flexengine.policy import ALL_CACHE, Policy
from flexengine.shell.explain.formats import form_words
from flexengine.shell.explain.links import price_words, worker_words
from flexengine.shell.explain.stagger import sharing_words
from flexengine.shell.explain.whatif import Help

PLACE_MARKS: dict[str, str] = dict(zip(place_names(MOST_DISKS), "#=.:,;-+*~", strict=True))
PLACE_MARKS |= dict.fromkeys((*worker_names(MOST_WORKERS), *worker_names(MOST_WORKERS, MOST_WORKERS)), "w")
SCHEDULES = {
    "row": "a gpu_batch enters when the one before has ended",
    "zigzag": "a whole block enters when the one before has ended",
    "diagonal": "one gpu_batch enters per sweep",
    "continuous": "a sequence enters as soon as another ends",
}
LINE = 110  # characters of a line with several shares
MAX_FRONTIER_LINES = 20


# The parts of the report.


def report(
    model_name: str, model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction,
    helps: Sequence[Help] | None = None, verbose: bool = False, alone: bool = True,
) -> str:  # fmt: skip
    """Return the whole explanation, about 30 lines.

    Args:
        helps: from `whatif.helps`; None leaves this part out.
        verbose: list the bytes of each purpose on a line of its own.
        alone: whether no other stage uses the attention workers; else lines on their links and pace are left out, as
            they describe whole engines.
    """
    words = worker_words(model, hardware, workload, prediction) if alone else []
    parts = [
        [f"{model_name} on {machine(hardware, model)}", job_size(workload), *form_words(model), *model.as_modules],
        [*policy_words(prediction.policy), *topk_words(model, prediction), *records.words(model), *tables.words(model)],
        placement(model, workload, prediction, hardware.shared),
        [*memory(prediction, hardware, verbose), *neuron_words(model, prediction)],
        lanes_table(prediction, hardware),
        bottleneck(model, hardware, workload, prediction),
        [*words, *sharing_words(model, hardware, prediction)] if words else [],
        [*totals(prediction), *price_words(model, hardware, workload, prediction)],
        [] if helps is None else help_lines(helps),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part)


def machine(hardware: Hardware, model: ModelFacts | None = None) -> str:
    """Return the machine's name, kind and origin of its rates, for a plan of a model."""
    words = origin(hardware, model) if model else "measured" if hardware.measured else "not measured"
    return f"{hardware.name} ({hardware.kind}, {words})"


def job_size(workload: Workload) -> str:
    """Return the number of sequences, one per sample of a row, and their sizes."""
    if not workload.count:
        return "no sequences"
    prompts, outputs = zip(*workload.sizes, strict=True)
    number = count(workload.count, "sequence", "sequences")
    each = " for each" if workload.count > 1 else ""
    return f"{number} of {_range(prompts)} prompt tokens, at most {_range(outputs)} tokens generated{each}"


def _range(values: Iterable[int]) -> str:
    low, high = min(numbers := list(values)), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def policy_words(policy: Policy) -> list[str]:
    """Return lines that describe block shape, schedule, slots and delegation."""
    batches = 1 if policy.schedule == "row" else policy.num_gpu_batches
    shape = f"{count(batches, 'gpu_batch', 'gpu_batches')} of {count(policy.gpu_batch_size, 'sequence', 'sequences')}"
    each = " each" if batches > 1 else ""
    overlap = "the next layer is loaded while one is computed"
    if policy.half_layers:
        overlap = "one for the weights up to attention, one for the others of a layer"
    if policy.slots == 1:
        overlap = "transfers wait for computing, and computing waits for transfers"
    lines = [
        f"Policy      block of {policy.block_size:,}: {shape}, at most {policy.prefill_tokens:,} tokens{each}",
        f"            schedule {policy.schedule}: {SCHEDULES[policy.schedule]}",
        f"            {count(policy.slots, 'slot', 'slots')} for streamed weights: {overlap}",
    ]
    if policy.delegates:
        where = "on the host"
        if policy.delegate == ALL_CACHE:
            where = "off the device" if policy.cache[1] else "on a disk"
        lines.append(f"            attention is delegated: the CPU computes it for sequences whose cache is {where}")
    if policy.queries_first:
        lines.append("            queries go first: workers attend to cached tokens while keys and values are computed")
    return lines


def topk_words(model: ModelFacts, prediction: Prediction) -> list[str]:
    """Return a line on how chosen values (`topk`) are loaded from a KV cache off the device, if there are any."""
    attends = prediction.policy.attends
    moved = {p: x for p, x in prediction.shares(CACHE).items() if p != DEVICE and attends(p) == DEVICE}
    if model.topk is None or not sum(moved.values()):
        return []
    share = percent(chosen_share(model))
    return [f"            all keys of the KV cache are prefetched; the device waits for {share} of the values"]


def placement(model: ModelFacts, workload: Workload, prediction: Prediction, shared: bool) -> list[str]:
    """Return a bar per kind of data with its shares of the places, after rounding to tensors and sequences."""
    places = prediction.layout.places
    sizes = kind_bytes(model, workload, prediction)
    lines = []
    for kind, name in KINDS.items():
        shares = prediction.shares(name)
        named = {p: f"{holder(prediction, p, shared)} {percent(share)}" for p, share in shares.items() if share > 0}
        if kind == "weights" and DISK in named:
            named[DISK] += " (in the checkpoint's files)"
        where = ", ".join(named.values())
        bar = f"  {kind:<14}{size(sizes[kind]):>8}  [{_stacked(shares)}]  "
        lines += wrap(bar + where, LINE, subsequent_indent=" " * len(bar), break_on_hyphens=False)
    used = [p for p in places if not shared or p != "host" or prediction.fractions.get("weights@host", 0.0) > 0]
    return ["Placement   " + "  ".join(f"{PLACE_MARKS[p] * 3} {place_name(p, shared)}" for p in used), *lines]


def _stacked(shares: Mapping[str, float]) -> str:
    """Return a bar with marks of each tier in proportion to its share, at least one for a share above 0."""
    total = sum(shares.values()) or 1.0
    counts = {t: max(1, round(BAR_CHARACTERS * share / total)) if share > 0 else 0 for t, share in shares.items()}
    largest = max(counts, key=lambda t: counts[t])
    counts[largest] += BAR_CHARACTERS - sum(counts.values()) if any(counts.values()) else 0
    return "".join(PLACE_MARKS[t] * n for t, n in counts.items()).ljust(BAR_CHARACTERS)


def tiers(prediction: Prediction, hardware: Hardware) -> list[tuple[str, dict[str, int], int | None]]:
    """Return (name, bytes by purpose, capacity) of each memory. Without a GPU, RAM is one memory."""
    account, capacity = prediction.layout.account, hardware.capacity
    if not hardware.shared:
        return [(place, account[place], capacity.limits[place]) for place in hardware.places]
    ram = Counter(account["device"])
    ram.update(account["host"])
    others = [(place, account[place], capacity.limits[place]) for place in hardware.places if place.staged]
    return [("RAM", ram, capacity.device), *others]


def memory(prediction: Prediction, hardware: Hardware, verbose: bool = False) -> list[str]:
    """Return a bar per memory of its bytes against its capacity, and its bytes by purpose, the largest first."""
    lines = ["Memory"]
    for name, account, limit in tiers(prediction, hardware):
        used = sum(account.values())
        filled = ""
        if limit is not None:
            bar = ("#" * round(BAR_CHARACTERS * used / limit)).ljust(BAR_CHARACTERS)
            filled = f"  [{bar}] {percent(used / limit)}"
        of = "no limit" if limit is None else f"of {size(limit)}"
        lines.append(f"  {name:<8}{size(used):>8} {of:<12}{filled}")
        purposes = sorted(account.items(), key=lambda item: -item[1])
        if verbose:
            lines += [f"    {what:<20}{n:>20,} bytes" for what, n in purposes]
        elif purposes:
            row = ""
            for part in (f"{what} {size(n)}" for what, n in purposes):
                if row and len(row) + len(part) + 2 > 110:
                    lines.append(f"    {row}")
                    row = ""
                row += f", {part}" if row else part
            lines.append(f"    {row}")
    return lines


def neuron_words(model: ModelFacts, prediction: Prediction) -> list[str]:
    """Return a line on the neurons, or experts, that a gpu_batch of decoding rows uses and reads; [] if all are in
    memory as other weights."""
    blocks = [block for block in model.blocks if block is not None]
    if not blocks:
        return []
    policy, nbytes = prediction.policy, [block.neurons * block.read_bytes for block in blocks]
    rows, total = max(1.0, min(policy.gpu_batch_size, prediction.alive)), sum(nbytes)
    shares = [float(neurons.Use(block).used(np.asarray([rows]))[0]) for block in blocks]
    used = sum(share * n for share, n in zip(shares, nbytes, strict=True)) / total
    read = neurons.reads(model, policy, rows)
    what = "experts" if all(block.experts for block in blocks) else "neurons"
    guessed = "" if all(block.experts or len(block.reuse) > 1 for block in blocks) else " (assumed)"
    return [
        f"  {what}  {100 * policy.neurons:.1f} % of {size(total)} in memory; a token of"
        f" {count(round(rows), 'sequence', 'sequences')} uses {100 * used:.1f} %{guessed} and reads"
        f" {100 * read / total:.2f} %: {size(read)}"
    ]


def lanes_table(prediction: Prediction, hardware: Hardware) -> list[str]:
    """Return a table with the seconds of a mean sweep of each kind, and of each lane's work in this sweep."""
    used = [lane for lane in hardware.lanes if any(by.get(lane, 0) > 0 for by in prediction.lanes.values())]
    names = [lane_name(lane, hardware.shared) for lane in used]
    widths = [max(16, len(name) + 2) for name in names]
    lines = ["Seconds       sweeps  one sweep" + "".join(f"{name:>{w}}" for name, w in zip(names, widths, strict=True))]
    for kind, by in prediction.lanes.items():
        if prediction.counts[kind] > 0:
            cells = "".join(f"{_seconds(by.get(lane, 0.0)):>{w}}" for lane, w in zip(used, widths, strict=True))
            times = prediction.counts[kind]
            many = f"{times:,.0f}" if times >= 9.95 else f"{times:.1f}"
            lines.append(f"  {kind:<10}{many:>8}{_seconds(prediction.sweep_seconds[kind]):>11}{cells}")
    return lines


def _seconds(seconds: float) -> str:
    return "-" if seconds <= 0 else f"{seconds:,.2f}" if seconds >= 9.995 else f"{seconds:.3g}"


# The bottleneck.


def bottleneck(model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction) -> list[str]:
    """Return a sentence per kind of sweep, the kind that takes most of the job first."""
    spent = {kind: prediction.counts[kind] * s for kind, s in prediction.sweep_seconds.items()}
    total = sum(spent.values()) or 1.0
    order = sorted((kind for kind in spent if spent[kind] > 0), key=lambda kind: -spent[kind])
    cost = Cost(model, hardware, workload)
    lines = []
    for k, kind in enumerate(order):
        line = f"{kind} ({percent(spent[kind] / total)} of the job) {_waits(cost, prediction, kind)}"
        first = f"{'' if k else 'Bottleneck':<12}"
        lines += wrap(line, LINE, initial_indent=first, subsequent_indent=" " * 12, break_on_hyphens=False)
    return lines


def _waits(cost: Cost, prediction: Prediction, kind: str) -> str:
    """Return what sweeps of one kind wait for: their longest lane, its share of the sweep, and the data it carries."""
    by, sweep = prediction.lanes[kind], prediction.sweep_seconds[kind]
    lane = busiest(by)
    what = waits_for(lane, cost.hardware.shared)
    if lane == "device" and any(cost.model.blocks):
        what += " and reads of neurons"
    share = by[lane] / sweep
    text = f"waits for {what}: busy {percent(min(1.0, share))} of a sweep"
    if lane not in ("device", "cpu"):
        text += ", carrying " + ", ".join(f"{n} {percent(x)}" for n, x in carried(cost, prediction, kind, lane).items())
    if prediction.policy.slots == 1 and share < 0.95:
        text += "; with one slot every lane waits for the others"
    elif share < 0.95:
        alone = kind == "decode" or max(cost.slowed(by, prediction.policy).values()) >= 0.95 * sweep
        rest = "lanes that slow each other take the rest" if alone else "pages wait while prompts are computed"
        text += f"; {rest}"
    return text


def carried(cost: Cost, prediction: Prediction, kind: str, lane: str) -> dict[str, float]:
    """Return the shares of a link's seconds in a mean sweep by kind of data: weights, and all else.

    All weights off the device cross the links once per sweep.
    """
    hardware, f = cost.hardware, prediction.fractions
    table = hardware.weight_rates(lane)
    passing = [place for place, lanes in routes(hardware).load.items() if lane in lanes]
    share = sum(f.get(fraction(WEIGHTS, place), 0.0) for place in passing)
    seconds = share * cost.streamed_bytes / at(table, max(1.0, cost.unit_bytes))
    weights = min(1.0, seconds / prediction.lanes[kind][lane])
    others = [name for name in ("KV cache", "hidden states") if f.get(fraction(KINDS[name], "device"), 1.0) < 1]
    shares = {"weights": weights, " and ".join(others) or "other": 1 - weights}
    return {name: x for name, x in shares.items() if x > 0.0005}


def totals(prediction: Prediction) -> list[str]:
    """Return lines with throughput, seconds and latency of the job."""
    alive = f"{prediction.alive:,.0f} of at most {prediction.policy.block_size:,} alive in a mean sweep; each takes"
    number = count(prediction.rows, "sequence", "sequences")
    said = f"{number}, {alive}" if prediction.rows > 1 else "the sequence takes"
    return [
        f"Prediction  {digits(prediction.tok_s)} tok/s generated; job {clock(prediction.seconds)},"
        f" plus {clock(prediction.load_seconds)} for loading resident weights in the first sweep",
        f"            {said} {clock(prediction.latency)} from entry to end",
    ]


def help_lines(helps: Sequence[Help]) -> list[str]:
    """Return lines with the changes that would help, and the speedup of the whole job, loading included."""
    width = max((len(h.label) for h in helps), default=0)
    lines = [f"  {h.label:<{width}}  {'  ' if h.searched else '>='}{h.ratio:.2f}x" for h in helps]
    if any(not h.searched for h in helps):
        lines.append("  >= is a lower bound from a few policies, as time ran out; --verbose has no time limit")
    if not helps:
        lines = ["  no change makes the job 3 % shorter"]
    return ["Would help  (the whole job with loading, one change at a time)", *lines]


# Several policies.


def compare(entries: Sequence[tuple[str, Prediction | FlexError]], hardware: Hardware) -> str:
    """Return a table of named policies by falling tok/s. Policies that do not fit come last, with the reason."""
    fitting = [(name, p) for name, p in entries if isinstance(p, Prediction)]
    fitting.sort(key=lambda entry: -entry[1].tok_s)
    width = max([len("policy"), *(len(name) for name, _ in entries)])
    lines = [f"rank  {'policy':<{width}}{'tok/s':>10}{'job':>12}{'prefill sweep':>15}{'decode sweep':>14}  bottleneck"]
    for rank, (name, p) in enumerate(fitting, 1):
        sweeps = [_seconds(p.sweep_seconds[kind]) for kind in ("prefill", "decode")]
        lines.append(
            f"{rank:>4}  {name:<{width}}{digits(p.tok_s):>10}{clock(p.seconds):>12}{sweeps[0]:>15}"
            f"{sweeps[1]:>14}  {lane_name(p.bottleneck, hardware.shared)}"
        )
    for name, error in entries:
        if isinstance(error, OutOfMemory):
            over = size(error.needed + error.used - error.capacity)
            why = f"does not fit: needs {over} more than the {size(error.capacity)} of {error.tier} memory"
            lines.append(f"   -  {name:<{width}}  {why}")
        elif isinstance(error, FlexError):
            lines.append(f"   -  {name:<{width}}  {' '.join(str(error).split())}")
    return "\n".join(lines)


def frontier_text(predictions: Sequence[Prediction], rows: int = MAX_FRONTIER_LINES) -> str:
    """Return a table of predictions: latency, tok/s, block, mean sequences alive, splits. rows: most lines. Of more
    predictions, lines in equal steps and the last one are shown."""
    step = -(-(len(predictions) - 1) // max(1, rows - 1)) or 1
    shown = [p for i, p in enumerate(predictions) if i % step == 0 or i == len(predictions) - 1]

    def splits(prediction: Prediction) -> str:
        """Return the realised percentages of weights, KV cache and hidden states by place, such as w 3/15/82."""
        rows = {kind: "/".join(f"{100 * x:.0f}" for x in prediction.shares(kind).values()) for kind in KINDS.values()}
        return "  ".join(f"{kind[0]} {row}" for kind, row in rows.items())

    lines = [f"{'latency':>10}{'tok/s':>10}{'block':>8}{'alive':>8}  schedule    slots  device/host/disk % of w, c, h"]
    lines += [
        f"{clock(p.latency):>10}{digits(p.tok_s):>10}{p.policy.block_size:>8,}{digits(p.alive):>8}"
        f"  {p.policy.schedule:<12}{p.policy.slots:>5}  {splits(p)}"
        for p in shown
    ]
    if len(shown) < len(predictions):
        lines.append(f"  ({len(predictions) - len(shown)} more policies between these)")
    return "\n".join(lines)


def as_json(prediction: Prediction, hardware: Hardware) -> dict[str, Any]:
    """Return the prediction as a JSON object: seconds, bytes and shares, named as in `Prediction`."""
    plain = {name: value for name, value in vars(prediction).items() if name not in ("policy", "layout")}
    memory = {name: {"bytes": booked, "capacity": limit} for name, booked, limit in tiers(prediction, hardware)}
    first = {"policy": prediction.policy.to_json(), "tok_s": prediction.tok_s, "bottleneck": prediction.bottleneck}
    return first | plain | {"memory": memory}


# A machine.


def hardware_text(hardware: Hardware) -> str:
    """Return a table of a machine's capacities and rates, at most one line per table of rates."""
    shared = hardware.shared
    limits = [("RAM" if shared and p == "device" else p, limit) for p, limit in hardware.capacity.limits.items()]
    limits = [item for item in limits if not (shared and item[0] == "host")]
    rows = [(f"{name} capacity", "no limit" if limit is None else size(limit)) for name, limit in limits]
    rows += [(lane_name(lane, shared), _points(table, size, size, "/s")) for lane, table in hardware.links.items()]
    rows.append(("model files", _points(hardware.checkpoint_read, size, size, "/s")))
    rows += [(f"products {dtype}", _points(t, "{:,.0f}".format, _flops, "")) for dtype, t in hardware.products.items()]
    rows.append(("prompt attention", _points(hardware.prompt_attention, "{:,.0f}".format, _flops, "")))
    rows.append(("decode attention", _points(hardware.decode_attention, "{:,.0f}".format, size, "/s")))
    rows += [("host attention", f"{size(hardware.host_attention)}/s")] if hardware.host_attention else []
    rows.append(("elementwise", f"{size(hardware.elementwise)}/s"))
    for what in ("cell", "task", "sweep", "sequence"):
        rows.append((f"one {what}", f"{getattr(hardware, f'{what}_seconds') * 1e6:,.1f} microseconds"))
    for lane, others in hardware.crosstalk.items():
        slowed = ", ".join(f"by {percent(x)} of {lane_name(other, shared)}" for other, x in others.items() if x)
        rows += [(f"{lane_name(lane, shared)} slowed", slowed)] if slowed else []
    rows += [("new RAM", f"{size(hardware.touch)}/s")] if hardware.touch else []
    rows += [("RAM freed lately", f"{size(hardware.touch_freed)}/s")] if hardware.touch_freed else []
    layers, heads = count(len(hardware.layers), "layer", "layers"), count(len(hardware.heads), "head", "heads")
    rows.append(("measured for models", f"{layers}, {heads}"))
    return "\n".join([machine(hardware), *(f"  {name:<22}{text}" for name, text in rows)])


def _points(table: Table, x_text: Callable[[float], str], y_text: Callable[[float], str], per: str) -> str:
    """Return at most four points of a table as text, the first and the last included."""
    chosen = sorted({round(i * (len(table) - 1) / 3) for i in range(4)})
    points = [(x_text(table[i][0]), y_text(table[i][1])) for i in chosen]
    return f"{points[0][1]}{per}" if len(points) == 1 else ", ".join(f"{y}{per} at {x}" for x, y in points)


def _flops(rate: float) -> str:
    return f"{digits(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{digits(rate / 1e9)} GFLOP/s"
