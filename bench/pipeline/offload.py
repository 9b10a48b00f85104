"""FlexGen's Table 3: one machine that offloads beside several, as planned.

python -m bench.pipeline.offload [--models opt-6.7b opt-30b opt-175b] [--machines 1 4]
"""

import argparse
from functools import cache
from typing import NamedTuple

from flexengine import shipped
from flexengine.lossy import Lossy
from flexengine.plan.candidates import Options
from flexengine.plan.chain import ChainPlan, plan_chain, sweep_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.workload import Workload

T4 = "t4-16gb_208gb_ssd"
PROMPT, NEW = 512, 32  # tokens
ROWS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of one block
BLOCKS = 4


class Rates(NamedTuple):
    """Tokens per second of a job of blocks of equal sequences, and how they were planned."""

    prefill: float  # prompt tokens
    decode: float  # tokens after the first of each sequence
    total: float  # generated tokens, over the seconds of prefill and decoding
    plan: ChainPlan


@cache
def facts_of(name: str) -> ModelFacts:
    """Return a shipped model in float16, as a GPU holds it."""
    from flexengine.worker.open_model import Trust, open_model

    return open_model(shipped.find("models", name), "auto", "cuda", Trust(), weights=False, lossy=Lossy()).facts


def rates_of(model: str, machines: int, blocks: int = BLOCKS, hardware: str = T4) -> Rates:
    """Return the rates of so many machines, each with a stage, under the block with which the job is shortest.

    All sequences of a block enter together, as in FlexGen, so that prefill and decoding are told apart. A cohort's
    prefill on the slowest stage is followed by the next one's; before and after, stages idle (the bubble).

    Args:
        model: a shipped shape, such as opt-175b.
        blocks: of the job. The bubble is at its beginning and end only, so that prefill is faster with more of them.
        hardware: a shipped machine.
    """
    machine = Hardware.load(shipped.find_file("hardware", hardware))
    made = (block_rates(facts_of(model), [machine] * machines, rows, blocks) for rows in ROWS)
    return max((rates for rates in made if rates is not None), key=lambda rates: rates.total)


def block_rates(model: ModelFacts, machines: list[Hardware], rows: int, blocks: int = 1) -> Rates | None:
    """Return the rates of blocks of so many sequences; None if so many do not enter together."""
    options = Options(stores_from=float("inf"), schedule="zigzag")  # a block enters together
    plan = plan_chain(model, machines, Workload({(PROMPT, NEW): rows}), options)
    if plan.policy.block_size < rows or plan.stages[0].prediction.counts["prefill"] > 1:
        return None
    each = [stage.prediction for stage in plan.stages]
    counts, sweeps = each[0].counts, {kind: [sweep_of(p, kind) for p in each] for kind in ("prefill", "decode")}
    prefill, decode = (
        blocks * counts[kind] * max(by) + (sum(by) - max(by)) / len(each) * (kind == "prefill")
        for kind, by in sweeps.items()
    )
    rows *= blocks
    return Rates(rows * PROMPT / prefill, rows * (NEW - 1) / decode, rows * NEW / (prefill + decode), plan)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline.offload", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["opt-6.7b", "opt-30b", "opt-175b"])
    parser.add_argument("--machines", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    args = parser.parse_args()
    for model in args.models:
        for machines in args.machines:
            made = rates_of(model, machines, args.blocks)
            layers = [end - first for first, end in (stage.layers for stage in made.plan.stages)]
            print(f"{model}, {machines}: prefill {made.prefill:.1f}, decode {made.decode:.2f}, total {made.total:.2f}"
                  f" tok/s; layers {layers}, {made.plan.policy}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
