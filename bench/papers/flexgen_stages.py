"""FlexGen's Table 3: four machines with a T4 each, and one."""

from collections.abc import Callable, Iterator
from functools import cache, partial

from bench.papers import flexgen_jobs as jobs
from bench.papers.flexgen_rates import PAPER
from bench.papers.flexgen_rates import PUBLISHED as SINGLE
from bench.papers.tables import Figure, PaperTable, far
from bench.pipeline.offload import BLOCKS, NEW, PROMPT, Rates, block_rates, facts_of
from flexengine.plan.formatting import digits

FOUR = 4
LINK = 1.25e9  # bytes per second between two machines
# Published tokens per second: four machines in all, and decoding only; one machine decoding only.
PUBLISHED = {"6.7B": (201.1, 764.7, 38.3), "30B": (23.61, 48.94, 11.52), "175B": (2.33, 3.86, 0.83)}
# Sequences of a block that are tried, by size and number of machines.
ROWS = {
    ("6.7B", 1): (4, 8, 16), ("6.7B", FOUR): (64, 128, 192),
    ("30B", 1): (128, 192, 256), ("30B", FOUR): (256, 384, 512),
    ("175B", 1): (256, 384), ("175B", FOUR): (192, 256, 384),
}  # fmt: skip


@cache
def rates(size: str, machines: int) -> Rates:
    """Return the rates under the block with which a job of `BLOCKS` blocks is shortest."""
    made = (block_rates(facts_of(f"opt-{size.lower()}"), [jobs.machine()] * machines, rows, BLOCKS)
            for rows in ROWS[size, machines])  # fmt: skip
    return max((each for each in made if each is not None), key=lambda each: each.total)


def four_machines() -> PaperTable:
    """Return the rates of four machines, in all and while decoding, of one while decoding, and what four gain."""
    figures = [figure for size in jobs.SIZES for figure in _figures(size)]
    shared = max(link_share(size, rates(size, FOUR).total) for size in jobs.SIZES)
    return PaperTable(
        "flexgen-table3", "FlexGen: four machines with a T4 each", f"{PAPER}, Table 3", "generated tokens per second",
        f"Planned for t4-16gb_208gb_ssd with {PROMPT} tokens in and {NEW} out, as by `plan --stages`: {BLOCKS} zig-zag"
        f" blocks, the best of two or three sizes. Links between machines are not counted: at {8 * LINK / 1e9:g}"
        f" Gbit/s, hidden states take at most {100 * shared:.1f} % of the time, while stages compute.", figures,
    )  # fmt: skip


def _figures(size: str) -> Iterator[Figure]:
    total, decode, alone = PUBLISHED[size]
    four, one = rates(size, FOUR), rates(size, 1)
    yield far(Figure(f"OPT-{size}, 4 machines", four.total, total), partial(_why_total, size, four))
    yield far(Figure(f"OPT-{size}, 4 machines, decoding", four.decode, decode), partial(_why_four, size, four))
    yield far(Figure(f"OPT-{size}, 1 machine, decoding", one.decode, alone), partial(_why_one, size, one))
    gain = Figure(f"OPT-{size}, 4 machines over 1, decoding", four.decode / one.decode, decode / alone)
    yield far(gain, lambda: "both rates differ, see there")
    prefills = _prefill(total, decode), _prefill(SINGLE[size, PROMPT, False], alone)
    gain = Figure(f"OPT-{size}, 4 machines over 1, prefill", four.prefill / one.prefill, prefills[0] / prefills[1])
    yield far(gain, partial(_why_prefill, *prefills, four, one))


def link_share(size: str, total: float) -> float:
    """Return the share of the time in which hidden states cross a link. total: generated tokens per second."""
    return total * (PROMPT + NEW - 1) / NEW * jobs.facts(size).hidden_bytes / LINK


def _prefill(total: float, decode: float) -> float:
    """Return the prompt tokens per second that published rates mean: of all generated tokens, and while decoding."""
    return PROMPT / (NEW / total - (NEW - 1) / decode)


def _why_prefill(four: float, one: float, made: Rates, alone: Rates) -> str:
    return (f"the published rates mean {digits(four)} and {digits(one)} prompt tokens/s; here they are"
            f" {digits(made.prefill)} and {digits(alone.prefill)}, as {BLOCKS} blocks follow each other")  # fmt: skip


def _why_total(size: str, made: Rates) -> str:
    total, decode, _ = PUBLISHED[size]
    said, own = NEW / total - (NEW - 1) / decode, PROMPT / made.prefill
    return (f"by the published rates a prompt takes {digits(said)} s of four machines beside decoding, {digits(own)} s"
            f" here, where {BLOCKS} blocks follow each other, so that machines wait at the beginning and the end only;"
            f" and decoding is {made.decode / decode:.2f} times as fast, see there")  # fmt: skip


def _kv(size: str) -> float:
    """Return the mean bytes of a sequence's KV cache while it decodes."""
    model = jobs.facts(size)
    return model.kv_token * len(model.layers) * (PROMPT + NEW / 2)


def _why_four(size: str, made: Rates) -> str:
    read = _kv(size) * PUBLISHED[size][1] / FOUR / 1e9
    policy = made.plan.policy
    if size == "175B":
        return (f"with all KV cache on the disks, as in FlexGen's policy for one machine, the published rate reads"
                f" {read:.2f} GB/s of it on each, what a disk gives; here {policy.cache[1]:.0%} of it are in the RAM"
                " that no weights take")  # fmt: skip
    return (f"at the published rate each machine attends to {read:.2f} GB/s of KV cache; here a block has"
            f" {policy.block_size} sequences")  # fmt: skip


def _why_one(size: str, made: Rates) -> str:
    policy = made.plan.policy
    if size == "6.7B":
        return (f"the plan streams {policy.weights[1]:.0%} of the weights from RAM, so that {policy.block_size}"
                " sequences, not 2, share a read")  # fmt: skip
    if size == "175B":
        return "the disk reads 2 GB/s in the hardware file; the published rate needs 2.63"
    return f"the plan's block has {policy.block_size} sequences, not 144"


TABLES: dict[str, Callable[[], PaperTable]] = {"flexgen-table3": four_machines}
