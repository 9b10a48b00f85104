"""Lamina's (arXiv 2405.01814) tables.

Machines are A100 GPUs by their data sheet, some as devices and some as attention workers, as in the paper's tests.
Rates of products follow the law of docs/machines.md with 85 % of the memory's bandwidth and 70 % of the peak; attention
reads at 80 % of the bandwidth. Nothing is counted for Python, launches and all-reduces.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from bench.papers.tables import Figure, PaperTable
from bench.simulate import simulate
from bench.stagger.orders import POOL, fixed, replica_lane, rotational, steady
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, Table, at
from flexengine.plan.workload import Workload
from flexengine.policy import HEADS, PARTITIONS, REQUESTS, Policy
from flexengine.schedule.order import Cell
from flexengine.schedule.tasks import Op, Task
from flexengine.shell.explain.links import least_bandwidth, token_bytes
from flexengine.worker.open_model import open_model

PAPER = "Lamina (arXiv 2405.01814 v1)"
SHAPES = {  # hidden and FFN width, layers, heads, KV heads
    "13B": (5120, 13824, 40, 40, 40),
    "33B": (6656, 17920, 60, 52, 52),
    "65B": (8192, 22016, 80, 64, 64),
    "65B with 8 KV heads": (8192, 22016, 80, 64, 8),
}
PEAK, BANDWIDTH, MEMORY = 312e12, 1.555e12, 36e9  # of an A100 with 40 GB, in FLOP/s, bytes/s and bytes
LINK, ROUND_TRIP = 24.2e9, 33e-6  # of 200 Gb/s InfiniBand with GPUDirect, section 3.3 of the paper
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
SEED, NUMBER, CONTEXT = 1, 10_000, 2048
PROMPT, OUTPUT, SIGMA = 161, 338, 1.0  # mean tokens, and the standard deviation of their logarithm
POOLS = (1, 2, 4, 8)
SIZES, COUNTS = (4, 8, 16, 24, 32, 48, 64, 96, 128), (1, 2, 3, 4, 6, 8, 16)  # shapes of blocks that are tried
BLOCKS = (128, 256, 512, 1024)
TRACE = (
    f"The trace has {NUMBER:,} requests with log-normal lengths: {PROMPT} tokens of a prompt and {OUTPUT}"
    f" generated ones on average, sigma {SIGMA:g}, at most {CONTEXT:,} together, seed {SEED}."
)


@cache
def llama(name: str) -> ModelFacts:
    """Return the facts of a LLaMA model of a name in SHAPES, from a config without weights."""
    hidden, ffn, layers, heads, kv_heads = SHAPES[name]
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": 32000, "max_position_embeddings": CONTEXT, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return open_model(folder, None, "cuda", weights=False).facts


def flat(rate: float) -> Table:
    """Return a table with the same rate everywhere."""
    return ((1.0, rate),)


def machine(gpus: int = 1, workers: int = 0) -> Hardware:
    """Return GPUs that work as one device, and others that are attention workers."""
    rates = tuple((float(rows), gpus / (1 / (0.85 * BANDWIDTH * rows) + 1 / (0.7 * PEAK))) for rows in ROWS)
    names = [f"worker{number}" for number in range(1, workers + 1)]
    attention = 0.8 * BANDWIDTH
    host = {"disk_read": flat(2e9), "disk_write": flat(1e9), "h2d": flat(2.5e10), "d2h": flat(2.5e10)}
    return Hardware(
        name="A100", kind="cuda", device_bytes=int(gpus * MEMORY), host_bytes=64 << 30, disk_bytes=1 << 40, links=host,
        checkpoint_read=flat(2e9), products={"bfloat16": rates}, prompt_attention=flat(0.3 * gpus * PEAK),
        decode_attention=flat(gpus * attention), elementwise=0.8 * gpus * BANDWIDTH, vector_flops=1.95e13 * gpus,
        workers=(int(MEMORY),) * workers, worker_attention=dict.fromkeys(names, attention),
        worker_links=dict.fromkeys(names, LINK), worker_seconds=ROUND_TRIP,
    )  # fmt: skip


@cache
def trace() -> Workload:
    """Return requests with ShareGPT-like lengths (TRACE), in multiples of 16 tokens."""
    rng = np.random.default_rng(SEED)

    def lengths(mean: float) -> list[int]:
        found = rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, NUMBER)
        return [max(16, 16 * round(x / 16)) for x in found]

    pairs = zip(lengths(PROMPT), lengths(OUTPUT), strict=True)
    return Workload.of((min(p, CONTEXT - 16), min(n, CONTEXT - min(p, CONTEXT - 16))) for p, n in pairs)


@cache
def best(name: str, gpus: int, workers: int, partitions: tuple[str, ...] = (REQUESTS, HEADS)) -> Prediction:
    """Return the fastest prediction of the trace over shapes of the block, with the KV cache at the workers, or on the
    device if there are none. partitions: that the workers may have."""
    hardware, facts = machine(gpus, workers), llama(name)
    cost, cached = Cost(facts, hardware, trace()), {"workers": 1.0} if workers else {"device": 1.0}
    fit = [p for p in partitions if p != HEADS or facts.kv_heads % workers == 0] if workers else [REQUESTS]
    shapes = product(SIZES, COUNTS, (1, 2), fit)
    policies = (
        Policy(size, count, cache=cached, slots=slots, partition=partition)  # type: ignore[arg-type]
        for size, count, slots, partition in shapes
    )
    found = list(filter(None, (cost.of(policy, hardware.capacity) for policy in policies)))
    return max(found, key=lambda prediction: prediction.tok_s)


def _extremes(name: str, values: dict[str, float], published: tuple[float, float], why: str) -> Iterator[Figure]:
    """Yield the values, and the smallest and largest of them beside the published ones."""
    for label, value in values.items():
        yield Figure(label, value)
    for label, pick, theirs in (("smallest", min, published[0]), ("largest", max, published[1])):
        figure = Figure(f"{label} {name}", pick(values.values()), theirs)
        yield replace(figure, why=why) if figure.unexplained else figure


def bandwidth() -> PaperTable:
    """Return the least bandwidth that hides transfers behind products."""
    published = {
        ("13B", 1): (4.90, 8.12, 9.08, 10.06),
        ("33B", 2): (5.94, 9.31, 11.56, 12.53),
        ("65B", 4): (7.55, 11.78, 13.92, 15.90),
    }
    one = (
        "Ours takes products to reach 85 % of the memory's bandwidth or 70 % of the peak, more than the paper measured."
    )
    more = "Ours divides products evenly over the GPUs of a device and counts no all-reduce, so they are shorter."
    figures = list[Figure]()
    for (name, gpus), row in published.items():
        facts, rates = llama(name), machine(gpus).products["bfloat16"]
        elements = sum(t.elements for t in facts.tensors)
        for block, theirs in zip(BLOCKS, row, strict=True):
            step = 2 * elements * block / at(rates, block)
            ours = least_bandwidth(token_bytes(facts, REQUESTS, 1), len(facts.layers), block, step) / 1e9
            figure = Figure(f"{name} on {gpus}, block {block}", ours, theirs)
            figures.append(replace(figure, why=one if gpus == 1 else more) if figure.unexplained else figure)
    return PaperTable(
        "lamina-bandwidth", "Lamina: least bandwidth that hides the transfers", f"{PAPER}, section 3.2", "GB/s",
        "By the planner's formula and its rates of matrix products.", figures,
    )  # fmt: skip


def pools() -> PaperTable:
    """Return the trace's throughput with pools of memory devices, relative to the devices alone."""
    why = (
        "The paper's range is over many lengths of context and against vLLM; ours is one trace against the same engine"
        " without workers, and the device's buffers for pages of long prompts bound the block before the pool is full."
    )
    ratios = dict[str, float]()
    for name, gpus in (("13B", 1), ("33B", 2)):
        alone = best(name, gpus, 0).tok_s
        for workers in POOLS:
            ratios[f"{name} on {gpus}, {workers} memory devices"] = best(name, gpus, workers).tok_s / alone
    return PaperTable(
        "lamina-pools", "Lamina: throughput with pools of memory devices", f"{PAPER}, evaluation",
        "throughput / that of the device alone", f"By the planner, at the fastest shape of the block. {TRACE}",
        list(_extremes("gain", ratios, (1.75, 20.5), why)),
    )  # fmt: skip


def batch_sizes() -> PaperTable:
    """Return the number of sequences that decode together, with and without memory devices."""
    why = (
        "The paper's range is over many lengths of context; ours is one trace, and the device's buffers for pages of"
        " long prompts and for paused passes bound the block before the pool is full."
    )
    ratios, counts = dict[str, float](), list[Figure]()
    for name, gpus in (("13B", 1), ("33B", 2)):
        alone = best(name, gpus, 0).alive
        counts.append(Figure(f"{name} on {gpus} alone, sequences", alone))
        for workers in POOLS:
            alive = best(name, gpus, workers).alive
            counts.append(Figure(f"{name} on {gpus}, {workers} memory devices, sequences", alive))
            ratios[f"{name} on {gpus}, {workers} memory devices, ratio"] = alive / alone
    figures = [*counts, *_extremes("ratio", ratios, (10.7, 64.0), why)]
    return PaperTable(
        "lamina-batches", "Lamina: batch sizes with memory devices", f"{PAPER}, evaluation", "sequences, and ratios",
        f"By the planner: sequences in a mean sweep at the fastest block. {TRACE}", figures,
    )  # fmt: skip


def partitions() -> PaperTable:
    """Return bytes on the wire, and the trace's throughput, by partition."""
    name, figures = "13B", list[Figure]()
    for partition in PARTITIONS:
        for workers in (2, 4, 8):
            published = 4 * 2 * SHAPES[name][0] if partition in (REQUESTS, HEADS) else None
            nbytes = token_bytes(llama(name), partition, workers)
            figures.append(Figure(f"{partition}, {workers} memory devices, bytes", nbytes, published))
    for partition in PARTITIONS:
        for workers in (2, 4, 8):
            ours = best(name, 1, workers, (partition,)).tok_s
            figures.append(Figure(f"{partition}, {workers} memory devices, tokens/s", ours))
    return PaperTable(
        "lamina-partitions", "Lamina: attention divided by requests, heads or tokens", f"{PAPER}, sections 3.2 and 3.4",
        "bytes of a token and layer, and tokens/s", f"By the planner, LLaMA-13B on one A100. {TRACE}", figures,
    )  # fmt: skip


def orders() -> PaperTable:
    """Return how busy devices are in both orders, and their ratio."""
    figures = list[Figure]()
    for n, published in ((2, 0.5), (3, 0.67), (4, 0.75), (5, 0.8), (8, 0.875)):
        paces = {}
        for name, order in (("fixed", fixed(n)), ("rotational", rotational(n))):
            seconds = {Op.COMPUTE: 1.0, Op.ATTEND: 1 / (n - 1), Op.LEAVE: 0.0}
            window = 10 * (n - 1)
            forecast = simulate(order.program(3 * window), lambda task, s=seconds: s[task.op])  # type: ignore[misc]
            found = steady(forecast.spans, window, 2 * window)
            paces[name] = order.batches / found.period
            busy = published if name == "fixed" else 1.0
            figures.append(Figure(f"{name}, n = {n}, devices busy", found.busy[replica_lane(0)], busy))
            figures.append(Figure(f"{name}, n = {n}, pool busy", found.busy[POOL], busy))
        ratio = paces["rotational"] / paces["fixed"]
        figures.append(Figure(f"rotational / fixed, n = {n}, throughput", ratio, n / (n - 1)))
    return PaperTable(
        "lamina-orders", "Lamina: rotational against fixed order", f"{PAPER}, section 3.3",
        "shares of time, and ratios", "In virtual time, with attention of 1 / (n - 1) of a slice.", figures,
    )  # fmt: skip


def pipelining() -> PaperTable:
    """Return what a second gpu_batch that takes turns with the first gains, by the size of the first."""
    facts, halves, more = llama("13B"), list[Figure](), dict[str, float]()
    hardware = replace(machine(1, 8), workers=(10**12,) * 8, device_bytes=10**12)  # every block has room

    def seconds(size: int, count: int) -> float:
        cost = Cost(facts, hardware, Workload({(512, 128): size * count}))
        return decode_seconds(cost, Policy(size, count, cache={"workers": 1.0}, partition=HEADS))  # type: ignore[arg-type]

    for block in BLOCKS:
        one = seconds(block, 1)
        halves.append(Figure(f"{block} sequences in two gpu_batches", one / seconds(block // 2, 2)))
        more[f"a second gpu_batch beside {block} sequences"] = 2 * one / seconds(block, 2)
    why = "Gain is at most (t_m + t_a) / max(t_m, t_a), so it depends on the context and the pool."
    return PaperTable(
        "lamina-pipelining", "Lamina: two gpu_batches that take turns", f"{PAPER}, section 3.3",
        "throughput / that of one gpu_batch",
        "By the planner: decode sweeps of LLaMA-13B on one A100 and 8 memory devices, contexts of 512 to 640 tokens."
        " The published range stands beside the gain of a second gpu_batch of the same size.",
        [*halves, *_extremes("gain", more, (1.13, 1.63), why)],
    )  # fmt: skip


def decode_seconds(cost: Cost, policy: Policy) -> float:
    """Return the seconds of a mean decode sweep."""
    prediction = cost.of(policy, cost.hardware.capacity)
    assert prediction is not None, policy
    return prediction.sweep_seconds["decode"]


def queries_first() -> PaperTable:
    """Return the latency that sending queries first saves."""
    published = {"65B": 0.132, "65B with 8 KV heads": 0.035}
    why = (
        "Each question costs a worker 33 us here, and there are two of them if queries go first; an A100 computes keys"
        " and values in less than that unless they are as wide as queries. The paper measured H100 and H20 GPUs."
    )
    figures = list[Figure]()
    for name, theirs in published.items():
        saved = dict[int, float]()
        for block in (16, 64, 256):
            # Latency alone counts here, so every block has room.
            hardware = replace(machine(4, 2), workers=(10**12,) * 2, device_bytes=10**12)
            cost = Cost(llama(name), hardware, Workload({(1024, 128): block}))
            policy = Policy(block, 1, cache={"workers": 1.0}, partition=HEADS)  # type: ignore[arg-type]
            before, after = (decode_seconds(cost, replace(policy, queries_first=first)) for first in (False, True))
            saved[block] = 1 - after / before
            figures.append(Figure(f"{name}, block {block}", saved[block]))
        figure = Figure(f"{name}, most", max(saved.values()), theirs)
        figures.append(replace(figure, why=why) if figure.unexplained else figure)
    return PaperTable(
        "lamina-queries", "Lamina: queries sent before keys and values", "Lamina (arXiv 2405.01814 v2), section 3.4",
        "share of a step's latency that is saved",
        "By the planner: a decode sweep with one gpu_batch on four A100s, contexts of 1,024 to 1,152 tokens.", figures,
    )  # fmt: skip


def pieces(count: int) -> Iterator[Task]:
    """Yield the tasks of one layer of a gpu_batch whose attention is cut into pieces: each piece is sent, attended to
    and fetched on a lane of its own, while others are under way."""
    yield Task(Op.COMPUTE, Cell(0, 0, 0), "device", (), ("queries",))
    for k in range(count):
        cell = Cell(0, 0, k)
        yield Task(Op.SEND, cell, "send", ("queries",), (("sent", k),))
        yield Task(Op.ATTEND, cell, POOL, (("sent", k),), (("attended", k),))
        yield Task(Op.FETCH, cell, "fetch", (("attended", k),), (("fetched", k),))


def breakdown() -> PaperTable:
    """Return the parts of a decode step's latency, and what cutting it into pieces hides."""
    name, context, figures = "13B", 1500, list[Figure]()
    facts, layers = llama(name), len(llama(name).layers)
    elements = sum(t.elements for t in facts.tensors)
    for block in (128, 256, 512):
        products = 2 * elements * block / at(machine().products["bfloat16"], block)
        attention = block * context * facts.kv_token * layers / (0.8 * BANDWIDTH)
        figures.append(Figure(f"one A100, block {block}: attention", attention / (products + attention), 0.8))
    # One device, three memory devices that divide the heads: sent are queries, keys and values, fetched is the output.
    figures += _pieces_of(facts, 256, context, 3)
    return PaperTable(
        "lamina-latency", "Lamina: parts of a decode step's latency", f"{PAPER}, sections 3.2 and 3.5", "shares",
        f"LLaMA-13B at {context:,} cached tokens: rates of the planner, and the virtual clock for a layer whose"
        " attention is cut into pieces. The paper says more than 80 % beyond about 1,500 tokens, and up to 62.2 and"
        " 16.2 %.", figures,
    )  # fmt: skip


def _pieces_of(facts: ModelFacts, block: int, context: int, workers: int) -> Iterator[Figure]:
    """Yield the parts of a layer's latency with memory devices, and the best of several numbers of pieces."""
    elements, layers = sum(t.elements for t in facts.tensors), len(facts.layers)
    products = 2 * elements * block / at(machine().products["bfloat16"], block) / layers
    down, up = (block * nbytes / (workers * LINK) for nbytes in (facts.sent, facts.fetched))
    attention = block * context * facts.kv_token / (workers * 0.8 * BANDWIDTH)

    def latency(count: int) -> float:
        fixed_part = {Op.SEND: ROUND_TRIP / 2, Op.FETCH: ROUND_TRIP / 2}
        work = {Op.COMPUTE: products * count, Op.SEND: down, Op.ATTEND: attention, Op.FETCH: up}
        return simulate(pieces(count), lambda task: work[task.op] / count + fixed_part.get(task.op, 0.0)).seconds

    whole, fastest = latency(1), min(range(1, 17), key=latency)
    moving = down + up + ROUND_TRIP
    for part, seconds in (("products", products), ("network", moving), ("attention", attention)):
        yield Figure(f"{workers} memory devices, block {block}: {part}", seconds / whole)
    yield Figure(f"best number of pieces, block {block}", fastest)
    saved = whole - latency(fastest)
    why = (
        "Hiding 62.2 % saves 16.2 % if the network is a quarter of the latency; at 24.2 GB/s and 33 us for each memory"
        f" device it is {100 * moving / whole:.0f} % here."
    )
    for label, ours, theirs in (("network hidden", saved / moving, 0.622), ("latency saved", saved / whole, 0.162)):
        figure = Figure(f"pieces, block {block}: {label}", ours, theirs)
        yield replace(figure, why=why) if figure.unexplained else figure


TABLES: dict[str, Callable[[], PaperTable]] = {
    "lamina-bandwidth": bandwidth,
    "lamina-pools": pools,
    "lamina-batches": batch_sizes,
    "lamina-partitions": partitions,
    "lamina-orders": orders,
    "lamina-pipelining": pipelining,
    "lamina-queries": queries_first,
    "lamina-latency": breakdown,
}
