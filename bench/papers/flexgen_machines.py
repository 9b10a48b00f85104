"""FlexGen on other machines: where the time goes, speeds of the SSD, an RTX 3090, and Petals over slow networks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from bench.cluster.events import PhaseTask
from bench.papers import flexgen_jobs as jobs
from bench.papers.flexgen_rates import PAPER
from bench.papers.tables import Figure, PaperTable, far
from bench.simulate import simulate
from flexengine.plan.cluster.devices import DECODE, PREFILL
from flexengine.plan.cost import Cost
from flexengine.plan.formatting import digits
from flexengine.plan.layout import lay_out
from flexengine.policy import Policy
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op

# Seconds of one block of OPT-175B without overlap, by phase: the whole, and its parts.
BREAKDOWN = {
    "prefill": {"whole": 2711.0, "compute": 2220.0, "weights read": 768.0, "KV written": 261.0},
    "decode": {"whole": 11315.0, "compute": 1498.0, "weights read": 3047.0, "KV read": 7046.0, "KV written": 124.0},
}  # fmt: skip
WHY_PARTS = {
    ("prefill", "weights read"): "the paper's reads take 7.8 times as long in prefill as in a decode sweep for the same"
    " bytes, so they contain waits; here a transfer is counted alone",
    ("prefill", "KV written"): "618 GB in 261 s are 2.4 GB/s, more than the disk can write (1 GB/s in the paper, 1.4 by"
    " its provider), so part of them stayed in the page cache; here all are written to the disk",
    ("decode", "compute"): "the CPU attends at the 8 GB/s that OPT-30B's rate means; this breakdown leaves it 1,030 s,"
    " 19 GB/s (docs/machines.md)",
    ("decode", "KV read"): "19.8 TB are read at the 2 GB/s that the paper states; the published seconds mean 2.8 GB/s",
    ("decode", "KV written"): "pages of 16 tokens are written again for each new token; FlexGen writes one token",
    ("prefill", "whole"): "the KV cache is written at the disk's speed, see there",
    (
        "decode",
        "weights read",
    ): "half of them come from the disk at the paper's 2 GB/s, and then cross the bus",
    ("decode", "whole"): "reading the KV cache takes longer, see there",
    (
        "decode",
        "GPU busy, %",
    ): "compute has the CPU's attention, as the paper's 13 % have, and it is slower here",
}
DISKS = ((0.5e9, 0.30), (1.0e9, None), (1.6e9, 0.69), (2.0e9, None), (2.65e9, None), (3.5e9, None), (7.0e9, None))
SWEEP_BYTES = 638e9 + 174e9  # read from the disk per decode sweep of FlexGen's block: KV cache, and half of the weights
# FlexGen's block for OPT-30B where 120 GB of RAM hold 69 % of its KV cache.
SPILLED = Policy(48, 3, (0.2, 0.8, 0), (0, 0.69, 0.31), schedule="zigzag", delegate="host")
NETWORKS = ((0.0001, 10e9), (0.01, 1e9), (0.01, 0.1e9), (0.1, 0.1e9))  # seconds of delay, bits per second
# Petals by size: GPUs, and tokens per second and GPU. Six requests at a time, as its benchmark in FlexGen's repository.
PETALS, REQUESTS = {"6.7B": (1, 8.25), "30B": (4, 2.84), "175B": (24, 0.08)}, 6


def breakdown() -> PaperTable:
    """Return the seconds of one block of OPT-175B by phase and kind of work, without overlap."""
    figures = []
    for phase, parts in seconds_by_part().items():
        published = {**BREAKDOWN[phase], "GPU busy, %": {"prefill": 82.0, "decode": 13.0}[phase]}
        parts["GPU busy, %"] = 100 * parts["compute"] / parts["whole"]
        for name, value in published.items():
            why = partial(WHY_PARTS.__getitem__, (phase, name))
            figures.append(far(Figure(f"{phase}: {name}", parts[name], value), why))
    return PaperTable(
        "flexgen-breakdown", "FlexGen: where the time of OPT-175B goes, without overlap", f"{PAPER}, runtime breakdown",
        "seconds of a block of 256 sequences, or per cent", "FlexGen's policy on t4-16gb_208gb_ssd as this engine would"
        " run it, one transfer or computation at a time. Reads count the disk and the bus.", figures,
    )  # fmt: skip


def seconds_by_part() -> dict[str, dict[str, float]]:
    """Return the predicted seconds of one block of FlexGen's policy for OPT-175B by phase and part."""
    model, hardware = jobs.facts("175B"), jobs.machine()
    policy = replace(jobs.suite_policy("175B", 512), slots=1)
    work = jobs.job(512, 32, policy.block_size)
    cost, layout = Cost(model, hardware, work, False), lay_out(model, policy, work, hardware.capacity)
    predicted = cost.predict(layout)
    split = {place: share for name, share in predicted.fractions.items()
             for kind, _, place in [name.partition("@")] if kind == "cache"}  # fmt: skip
    sweeps = cost.sweeps(policy, float(sum(layout.room(tier) for tier in layout.pools)), 1.0)
    phases: dict[str, dict[str, float]] = {}
    for phase, chosen in (("prefill", sweeps.prompt > 0), ("decode", sweeps.prompt <= 0)):
        times = np.where(chosen, sweeps.times, 0.0)
        parts = dict.fromkeys(("compute", "weights read", "KV read", "KV written"), 0.0)
        for lane, by_name in cost.lanes(policy, sweeps, split, layout).items():
            for name, seconds in by_name.items():
                part = _part(lane, name)
                share = predicted.fractions.get(name, 0.0) if name else 1.0
                parts[part] = parts.get(part, 0.0) + float(np.sum(share * seconds * times))
        parts["whole"] = predicted.sweep_seconds[phase] * predicted.counts[phase]
        phases[phase] = parts
    return phases


def _part(lane: str, name: str) -> str:
    """Return the part of the work of a lane. name: of the fraction of a kind of data, "" for none."""
    if lane in ("device", "cpu"):
        return "compute"
    written = lane in ("d2h", "disk_write")
    return {"weights": "weights read", "cache": "KV written" if written else "KV read"}.get(name.partition("@")[0], "")


def disks() -> PaperTable:
    """Return the rates of OPT-175B by the speed of the disk."""
    figures = []
    for read, published in DISKS:
        machine = jobs.with_disk(jobs.machine(), read, min(read, 1e9))
        own = jobs.suite_priced("175B", 512, hardware=machine).tok_s
        name = f"{read / 1e9:g} GB/s read"
        figures.append(far(Figure(f"{name}: FlexGen's policy", own, published), partial(_why_disk, read, published)))
        figures.append(Figure(f"{name}: planner's policy", jobs.best("175B", hardware=machine).tok_s))
    return PaperTable(
        "flexgen-disks", "FlexGen: OPT-175B by the speed of the SSD", f"{PAPER}, ablation of the disk",
        "generated tokens per second", "Predicted for t4-16gb_208gb_ssd with 512 tokens in and 32 out, and other speeds"
        " of the disk; it writes as fast as it reads, at most 1 GB/s.", figures,
    )  # fmt: skip


def _why_disk(read: float, published: float | None) -> str:
    assert published is not None
    prefill = BREAKDOWN["prefill"]["whole"]
    most = 256 * 32 / (prefill + 31 * SWEEP_BYTES / read)
    needed = SWEEP_BYTES * 31 / (256 * 32 / published - prefill)
    return (f"with 812 GB to read per decode sweep, {read / 1e9:g} GB/s limit this policy to {digits(most)} tok/s after"
            f" the paper's own prefill; the published rate needs {needed / 1e9:.2f} GB/s, so part of it came"
            " from the page cache or the disk was faster")  # fmt: skip


def gpu_3090() -> PaperTable:
    """Return rates on an RTX 3090, and which of its parts decides whether it beats the T4."""
    t4, own = jobs.machine(), jobs.machine("rtx3090-24gb_128gb")
    machines = {
        "T4": t4, "RTX 3090": own, "RTX 3090, disk of the T4": jobs.with_disk(own, 2.0e9, 1.0e9),
        "RTX 3090, disk of 0.5 GB/s": jobs.with_disk(own, 0.5e9, 0.5e9),
        "RTX 3090, CPU attention of the T4": replace(own, host_attention=t4.host_attention),
        "RTX 3090, RAM of the T4": replace(own, host_bytes=t4.host_bytes),
        "RTX 3090, GPU of the T4": replace(t4, host_bytes=own.host_bytes, links={**own.links, "h2d": t4.links["h2d"]},
                                           checkpoint_read=own.checkpoint_read),
    }  # fmt: skip
    figures, spilled = list[Figure](), jobs.with_disk(machines["RTX 3090, CPU attention of the T4"], 0.5e9, 0.5e9)
    for size in jobs.SIZES:
        found = {name: jobs.best(size, hardware=machine).tok_s for name, machine in machines.items()}
        why = _why_3090(size, found)
        figures += [Figure(f"OPT-{size}: {name}", rate, None, why if name == "RTX 3090" else "")
                    for name, rate in found.items()]  # fmt: skip
    rate = jobs.priced("30B", SPILLED, jobs.job(512, 32, 4 * SPILLED.block_size), spilled).tok_s
    name = "RTX 3090, disk of 0.5 GB/s, CPU attention of the T4, FlexGen's block"
    figures.append(Figure(f"OPT-30B: {name}", rate, None, "FlexGen's 144 sequences and 80 % of the weights take 153 GB,"
                          " so on a machine of 120 GB a third of the cache is on the disk"))  # fmt: skip
    return PaperTable(
        "flexgen-3090", "FlexGen: an RTX 3090 beside the T4", f"{PAPER}, appendix, which has the 3090 behind the T4 for"
        " 30B and 175B; its figures are not at hand", "generated tokens per second", "Predicted for rtx3090-24gb_128gb"
        " with 512 tokens in and 32 out, and with one part exchanged at a time.", figures,
    )  # fmt: skip


def _why_3090(size: str, found: dict[str, float]) -> str:
    times = {name: rate / found["T4"] for name, rate in found.items()}
    if size == "6.7B":
        return "all fits into 24 GB, and the memory of the 3090 is 2.9 times as fast"
    if size == "175B":
        return (f"the disk decides: the shipped 3090 has one of 3.5 GB/s, the T4 of 2, and is predicted"
                f" {times['RTX 3090']:.2f} times as fast; with the T4's disk {times['RTX 3090, disk of the T4']:.2f}"
                f" times, and with one of 0.5 GB/s {times['RTX 3090, disk of 0.5 GB/s']:.2f} times, behind as in the"
                " paper")  # fmt: skip
    return (f"predicted {times['RTX 3090']:.2f} times as fast as the T4, mostly as its CPU is assumed to attend at"
            f" 30 GB/s where the T4's does at 8 (with 8, {times['RTX 3090, CPU attention of the T4']:.2f} times),"
            " and as the planner's block fits into 120 GB of RAM; FlexGen's does not, see the last line")  # fmt: skip


# Petals: every GPU holds a range of layers, and a request passes all GPUs for every token, over the network.


@dataclass(frozen=True)
class Swarm:
    """GPUs with equal parts of a model. Times are in seconds.

    Attributes:
        gpus: their number.
        prefill, decode: of one request on one GPU.
        sent_prefill, sent_decode: of a request's hidden states on a GPU's connection.
        delay: of the network.
        overhead: on each GPU per request and token, beside computing.
    """

    gpus: int
    prefill: float
    decode: float
    sent_prefill: float
    sent_decode: float
    delay: float
    overhead: float = 0.0

    def tasks(self, requests: int, new: int) -> Iterator[PhaseTask]:
        """Yield the tasks of some requests. A GPU and its connection serve one request at a time; delays overlap."""
        for token in range(new):
            phase = DECODE if token else PREFILL
            compute, sent = (self.decode, self.sent_decode) if token else (self.prefill, self.sent_prefill)
            for request in range(requests):
                one = (("request", request),)
                for gpu in range(self.gpus):
                    cell = Cell(token, gpu, request)
                    yield PhaseTask(Op.COMPUTE, cell, f"GPU {gpu}", one, one, phase, compute + self.overhead)
                    yield PhaseTask(Op.LEAVE, cell, f"link {gpu}", one, one, phase, sent)
                    yield PhaseTask(Op.ENTER, cell, f"delay {request}", one, one, phase, self.delay)

    def rate(self, requests: int = REQUESTS, new: int = 32) -> float:
        """Return the tokens per second and GPU, in virtual time."""
        seconds = simulate(self.tasks(requests, new), lambda task: task.seconds).seconds
        return requests * new / seconds / self.gpus


@cache
def _alone(size: str) -> tuple[float, float]:
    """Return the seconds of prefill and of a decode step of one request, on a T4 that holds all layers."""
    large = replace(jobs.machine(), device_bytes=10**12)
    predicted = jobs.priced(size, Policy(1, 1, schedule="row"), jobs.job(512, 32, 1), large)
    return predicted.sweep_seconds["prefill"] * predicted.counts["prefill"], predicted.sweep_seconds["decode"]


def swarm(size: str, delay: float, bits: float, overhead: float = 0.0) -> Swarm:
    """Return a swarm of T4 GPUs. bits: per second of each connection; others as in `Swarm`."""
    gpus, hidden = PETALS[size][0], jobs.facts(size).hidden
    prefill, decode = _alone(size)
    token = 8 * 2 * hidden / bits  # hidden states of one token, 16 bits each
    return Swarm(gpus, prefill / gpus, decode / gpus, 512 * token, token, delay, overhead)


def petals() -> PaperTable:
    """Return the rates of Petals by network, beside one GPU with FlexGen's offloading."""
    figures = []
    for size, (gpus, published) in PETALS.items():
        for delay, bits in NETWORKS:
            name = f"OPT-{size}, {gpus} T4, {1000 * delay:g} ms, {bits / 1e9:g} Gbit/s"
            here = published if delay < 0.001 else None
            figure = Figure(f"{name}: Petals", swarm(size, delay, bits).rate(), here)
            figures.append(far(figure, partial(_why_petals, size, published)))
        figures.append(Figure(f"OPT-{size}, one T4, no network: planner's policy", jobs.best(size).tok_s))
    return PaperTable(
        "flexgen-petals", "FlexGen and Petals under delay and bandwidth", f"{PAPER}, Table 2 and section 6.3",
        "generated tokens per second and GPU", "Virtual time of six requests of one sequence, 512 tokens in and 32 out,"
        " that pass all GPUs of a swarm for every token; the seconds of a GPU are the planner's for a T4, in 16 bits."
        " The published rates were measured in one cloud; networks are those of FlexGen's guide.", figures,
    )  # fmt: skip


def _why_petals(size: str, published: float) -> str:
    """Return the overhead per GPU and token with which the published rate would come out."""
    low, high, network = 0.0, 1.0, NETWORKS[0]
    for _ in range(12):
        middle = (low + high) / 2
        slow = swarm(size, *network, middle).rate() < published
        low, high = (low, middle) if slow else (middle, high)
    return (f"these sums have no remote calls, 8-bit products or Python of Petals; its published rate comes out with"
            f" {1000 * high:.0f} ms more per GPU and token")  # fmt: skip


TABLES: dict[str, Callable[[], PaperTable]] = {
    "flexgen-breakdown": breakdown,
    "flexgen-disks": disks,
    "flexgen-3090": gpu_3090,
    "flexgen-petals": petals,
}
