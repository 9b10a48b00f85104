"""How much stages of a chain would gain if each divided its KV cache over device, host and disk in its own way.

python -m bench.pipeline.splits [NAME ...]

All stages of a chain have the cache split of one block, as a gpu_batch's sequences must lie on one tier in each. For
every stage of a plan, this command searches the best policy for its layers alone: with any block, and with blocks up to
the plan's. The slowest stage's seconds over these are a bound of the gain at the plan's layers.
"""

import argparse
from dataclasses import replace

from bench.pipeline.offload import facts_of
from flexengine import shipped
from flexengine.plan.chain import ChainSearch
from flexengine.plan.hardware import Hardware
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import shares

T4, RTX, H100 = "t4-16gb_208gb_ssd", "rtx3090-24gb_128gb", "h100-80gb_512gb"
ROWS, SIZE = 1024, (512, 32)  # rows of a job, and their prompt tokens and tokens to generate
CHAINS = {
    "4 T4, OPT-175B": ("opt-175b", [T4] * 4),
    "4 T4, OPT-30B": ("opt-30b", [T4] * 4),
    "T4 and RTX 3090, OPT-30B": ("opt-30b", [T4, RTX]),
    "T4 and H100, OPT-175B": ("opt-175b", [T4, H100]),
    "RTX 3090, T4 and H100, OPT-175B": ("opt-175b", [RTX, T4, H100]),
}


def bound(name: str) -> list[str]:
    """Return lines about a chain."""
    model, names = CHAINS[name]
    machines = [Hardware.load(shipped.find_file("hardware", each)) for each in names]
    found = ChainSearch(facts_of(model), machines, Workload({SIZE: ROWS}))
    plan = found.plan()
    same, lines = replace(found.options, block=plan.policy.block_size, schedule=plan.policy.schedule), list[str]()
    slowest, alone = 0.0, 0.0
    for stage in plan.stages:
        cost, own = stage.cost, stage.prediction
        made = [search(cost.model, cost.hardware, cost.workload, limits).best for limits in (found.options, same)]
        best = min([own, *made], key=lambda prediction: prediction.total_seconds)
        slowest, alone = max(slowest, own.total_seconds), max(alone, best.total_seconds)
        lines.append(f"  layers {stage.layers}: {own.total_seconds:,.0f} s with {shares(own.policy.cache)},"
                     f" alone {best.total_seconds:,.0f} s with {shares(best.policy.cache)}")  # fmt: skip
    return [f"{name}: job {plan.seconds:,.0f} s, slowest stage {slowest:,.0f} s, alone {alone:,.0f} s", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline.splits", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of chains (default: all): {', '.join(CHAINS)}")
    for name in parser.parse_args().names or CHAINS:
        print("\n".join(bound(name)), flush=True)


if __name__ == "__main__":
    main()
