"""FlexGen's rates: Table 2 at several lengths, latency against throughput, and the ablation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter

from bench.papers import flexgen_jobs as jobs
from bench.papers.tables import Figure, PaperTable, far
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Prediction
from flexengine.plan.formatting import digits
from flexengine.plan.search import frontier, search
from flexengine.policy import Policy

PAPER = "FlexGen, arXiv 2303.06865"
# Tokens per second by (size, prompt tokens, 4 bits), for 32 new tokens. Those at 256 tokens are from the comments of
# FlexGen's benchmark suite (docs/machines.md).
PUBLISHED = {
    ("6.7B", 256, False): 53.29, ("30B", 256, False): 16.01, ("175B", 256, False): 1.36,
    ("6.7B", 256, True): 56.72, ("30B", 256, True): 16.86, ("175B", 256, True): 2.26,
    ("6.7B", 512, False): 25.26, ("30B", 512, False): 7.32, ("175B", 512, False): 0.69,
    ("6.7B", 512, True): 29.12, ("30B", 512, True): 8.38, ("175B", 512, True): 1.12,
    ("6.7B", 1024, False): 13.72, ("30B", 1024, False): 3.50, ("175B", 1024, False): 0.35,
    ("6.7B", 1024, True): 13.18, ("30B", 1024, True): 3.98, ("175B", 1024, True): 0.42,
}  # fmt: skip
# Of the bus's rate, FlexGen's without CPU attention for OPT-30B: 144 x 32 tokens at 4.03 tok/s, less 242 s of prefill
# (the same at 7.32, less 31 steps at 11.52 tok/s), are 31 steps of 29 s, in which 104.6 GB of cache and 47.4 GB of
# weights cross.
BUS_SHARE = 5.2 / 13.84
LIMIT = 5000.0  # seconds of latency at which the paper compares with DeepSpeed
# DeepSpeed's policy as the paper's suite has it: weights on the host or, for 175B, on the disk, all else on the GPU.
DEEPSPEED = {"30B": Policy(8, 1, (0, 1, 0), schedule="row"), "175B": Policy(2, 1, (0, 0, 1), schedule="row")}
# Shares of the rate with everything: published rates divided by 7.32 and 0.69.
ABLATION = {("30B", "no overlap"): 5.86 / 7.32, ("175B", "no overlap"): 0.59 / 0.69,
            ("30B", "no CPU compute"): 4.03 / 7.32, ("175B", "no CPU compute"): 0.62 / 0.69,
            ("30B", "DeepSpeed's policy"): 1.57 / 7.32, ("175B", "DeepSpeed's policy"): 0.01 / 0.69}  # fmt: skip


def rates(prompt: int, new: int) -> PaperTable:
    """Return the rates of all models at one length, of the planner's policy and, if known, of the suite's. prompt, new:
    tokens in and out."""
    figures = [one for four_bits in (False, True) for size in jobs.SIZES for one in _pair(size, prompt, new, four_bits)]
    where = {256: "comments in FlexGen's benchmark suite", 512: f"{PAPER}, Table 2", 1024: f"{PAPER}, appendix"}
    return PaperTable(
        f"flexgen-{prompt}-{new}", f"FlexGen on a T4: {prompt:,} tokens in, {new} out",
        where[prompt] if new == 32 else f"{PAPER}; none are at hand for these lengths", "generated tokens per second",
        "Predicted for t4-16gb_208gb_ssd: the planner's policy, and FlexGen's own policy as this engine would run it,"
        " with more GPU memory if it then needs it.", figures,
    )  # fmt: skip


def _pair(size: str, prompt: int, new: int, four_bits: bool) -> Iterator[Figure]:
    """Yield the rates of the planner's policy and, if known, of the suite's."""
    name = f"OPT-{size}{', 4 bits' if four_bits else ''}"
    chosen = jobs.best(size, (prompt, new), four_bits)
    if new != 32:
        yield Figure(f"{name}: planner's policy", chosen.tok_s)
        return
    published = PUBLISHED[size, prompt, four_bits]
    given = jobs.suite_priced(size, prompt, new, four_bits)
    planned, own = partial(_why_planned, size, prompt, given, chosen), partial(_why_given, size, prompt, given)
    if four_bits and size == "30B":
        own = partial(_why_kernel, prompt, given, published)
        planned = own
    elif four_bits:
        planned = own = partial(_why_fp32, size, prompt, given)
    yield far(Figure(f"{name}: planner's policy", chosen.tok_s, published), planned)
    yield far(Figure(f"{name}: FlexGen's policy", given.tok_s, published), own)


def _why_planned(size: str, prompt: int, given: Prediction, chosen: Prediction) -> str:
    """Return why the planner's policy differs from the published rate. given: FlexGen's policy."""
    gain = f"FlexGen's policy is predicted at {digits(given.tok_s)}, and the planner's is better:"
    if size == "6.7B":
        return (f"{gain} it streams {chosen.policy.weights[1]:.0%} of the weights from RAM, so that"
                f" {chosen.policy.block_size} sequences, not {given.policy.block_size}, share a read")  # fmt: skip
    return (f"{gain} one gpu_batch enters per sweep (diagonal), so that the CPU and links work while prompts are"
            " computed")  # fmt: skip


def _why_fp32(size: str, prompt: int, given: Prediction) -> str:
    """Return why products with 4-bit weights are slower here."""
    batch = given.policy.gpu_batch_size * prompt
    like = jobs.suite_priced(size, prompt, 32, True, True, jobs.decompressing(jobs.machine()), prefill_tokens=batch)
    return (f"on a T4 this engine multiplies dequantized weights in fp32, without tensor cores; with FlexGen's way"
            f" (16 bits, tensor cores, whole gpu_batches) its policy is predicted at {digits(like.tok_s)}")  # fmt: skip


def _why_kernel(prompt: int, given: Prediction, published: float) -> str:
    """Return why attention over a 4-bit cache is faster here."""
    model, block = jobs.facts("30B"), given.policy.block_size
    elements = 31 * 2 * len(model.layers) * model.hidden * block * (prompt + 16)  # read in all decode steps of a block
    longer = 32 * block / published - 32 * block / given.tok_s
    moved = longer * jobs.machine().elementwise / elements
    return (f"FlexGen decompresses the cache in memory, this engine's kernels (and its CPU) in registers; the published"
            f" rate of FlexGen's policy is as if that moved {moved:.0f} bytes per element read, and plain torch"
            f" operations move up to {jobs.DEQUANTIZED_BYTES}")  # fmt: skip


def _why_given(size: str, prompt: int, given: Prediction) -> str:
    """Return why FlexGen's own policy, in 16 bits, differs from the published rate."""
    if size == "175B":
        fast = jobs.with_disk(jobs.machine(), 2.65e9, 1.4e9)
        rate = jobs.suite_priced(size, prompt, hardware=fast).tok_s
        return (f"the disk is busy {given.busy['disk_read'] / given.seconds:.0%} of the time at the 2 GB/s that the"
                f" paper states; its decoding rate needs 2.63 GB/s, and at the provider's 2.65 GB/s {digits(rate)} is"
                " predicted")  # fmt: skip
    if size == "30B":
        return (f"the CPU attends, busy {given.busy['cpu'] / given.seconds:.0%} of the time at the 8 GB/s of the"
                " hardware file")  # fmt: skip
    step, batch = given.sweep_seconds["decode"], given.policy.block_size
    said = batch * 32 / PUBLISHED[size, prompt, False]
    return (f"a block of {batch} takes {batch * 32 / given.tok_s:.2f} s here, {1000 * step:.0f} ms per decode sweep,"
            f" nearly all for reading weights, and {said:.2f} s in the paper")  # fmt: skip


def latency() -> PaperTable:
    """Return rates under latency limits, and the multiple of DeepSpeed's rate at the paper's limit."""
    figures = []
    for size in ("30B", "175B"):
        found = search(jobs.facts(size), jobs.machine(), jobs.job(512, 32), Options(frontier=True))
        curve = frontier(found)
        shares = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the way from the quickest point to the last one, in logarithms
        wanted = [curve[0].latency * (curve[-1].latency / curve[0].latency) ** share for share in shares]
        points = [max((p for p in curve if p.latency <= most * 1.001), key=attrgetter("tok_s")) for most in wanted]
        for p in {id(p): p for p in points}.values():
            figures.append(Figure(f"OPT-{size}, {p.latency:,.0f} s, block of {p.policy.block_size}", p.tok_s))
    limited = jobs.best("175B", options=Options(latency_limit=LIMIT)).tok_s
    figures.append(Figure(f"OPT-175B, at most {LIMIT:,.0f} s: multiple of DeepSpeed's policy",
                          limited / _deepspeed("175B"), 40.0))  # fmt: skip
    return PaperTable(
        "flexgen-latency", "FlexGen: latency against throughput", f"{PAPER}, latency against throughput",
        "generated tokens per second", "Predicted for t4-16gb_208gb_ssd with 512 tokens in and 32 out. Latency is the"
        " mean time of a sequence from entry to end. Points of the frontier, from the quickest to the fastest.",
        figures,
    )  # fmt: skip


def _deepspeed(size: str) -> float:
    return jobs.priced(size, DEEPSPEED[size], jobs.job(512, 32)).tok_s


def ablation() -> PaperTable:
    """Return the share of the rate that is left without a feature."""
    figures = []
    for size in ("30B", "175B"):
        whole = jobs.best(size).tok_s
        left = {"no overlap": jobs.best(size, options=Options(overlap=False)).tok_s,
                "no CPU compute": jobs.best(size, hardware=replace(jobs.machine(), host_attention=0.0)).tok_s,
                "DeepSpeed's policy": _deepspeed(size)}  # fmt: skip
        for name, rate in left.items():
            figure = Figure(f"OPT-{size}, {name}", rate / whole, ABLATION[size, name])
            figures.append(far(figure, partial(_why_ablation, size, name, whole, rate)))
    return PaperTable(
        "flexgen-ablation", "FlexGen: without overlap, without CPU attention, with DeepSpeed's policy",
        f"{PAPER}, ablation", "shares of the rate with everything", "Predicted for t4-16gb_208gb_ssd with 512 tokens in"
        " and 32 out; the planner searches anew without the feature.", figures,
    )  # fmt: skip


def _why_ablation(size: str, name: str, whole: float, rate: float) -> str:
    if name == "no overlap":
        kept = jobs.suite_priced(size, 512, overlap=False).tok_s / jobs.suite_priced(size, 512).tok_s
        own = ("; and the parts of FlexGen's run without overlap add up to 14,964 s, but it took 14,026 s, so that some"
               " overlapped") if size == "175B" else ""  # fmt: skip
        return (f"the planner's diagonal schedule overlaps prompts with decoding's reads and CPU attention, so more is"
                f" lost; FlexGen's zig-zag block keeps {kept:.2f} of its rate here{own}")  # fmt: skip
    if name == "no CPU compute":
        slow = replace(jobs.with_bus(jobs.machine(), BUS_SHARE), host_attention=0.0)
        return (f"FlexGen's rates without the CPU mean that 152 GB per decode step cross the bus at 5.2 of its"
                f" 13.8 GB/s; with such a bus, {jobs.best(size, hardware=slow).tok_s / whole:.2f} is left here"
                )  # fmt: skip
    published = {"30B": "1.57", "175B": "0.01, one digit"}[size]
    return (f"DeepSpeed's policy is predicted at {digits(rate)} tok/s (published: {published}), but the rate with"
            f" everything, {digits(whole)}, is the planner's")  # fmt: skip


LENGTHS = ((512, 32), (1024, 32), (256, 32), (128, 128), (512, 8))
TABLES: dict[str, Callable[[], PaperTable]] = {
    **{f"flexgen-{prompt}-{new}": partial(rates, prompt, new) for prompt, new in LENGTHS},
    "flexgen-latency": latency,
    "flexgen-ablation": ablation,
}
