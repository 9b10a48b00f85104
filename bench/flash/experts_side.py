"""A side of bench.flash.experts: reads a Job on stdin, prints one JSON line with bytes and seconds of a decode sweep.

The job's options are `guessing` (whether experts of the next layer are read early), `right` (share of the named experts
that are left as the router names them; others are replaced by random ones) and `most_share` (share of a layer's experts
up to which they are loaded on demand into slots, where flash is off).
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from bench.harness import Job, Record, report
from bench.peers.flexengine_side import run


def summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the sums of counts of several blocks."""
    return {name: sum(each[name] for each in counts) for name in (counts[0] if counts else ())}


def worth(guesses: dict[str, int]) -> Record:
    """Return counts of guesses with the shares of the chosen and of the missing experts that they named."""
    shares = {"guessed": ("right", "chosen"), "missing_guessed": ("found", "missing")}
    return guesses | {n: guesses[part] / guesses[whole] for n, (part, whole) in shares.items() if guesses.get(whole)}


def worsened(choose: Callable[[Any, Any], Any], right: float) -> Callable[[Any, Any], Any]:
    """Return `Router.choose` with random experts in place of a share 1 - right of the named ones."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def worse(router: Any, hidden: Any) -> Any:
        named, experts = choose(router, hidden), router.module.weight.shape[0]
        other = torch.randint(experts, named.shape, generator=generator)
        return torch.where(torch.rand(named.shape, generator=generator) < right, named, other)

    return worse


class Choices:
    """The experts that the tokens of decode sweeps chose.

    Args:
        rows: tokens of such a sweep; its prompts have more.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._chosen: dict[int, list[Any]] = {}  # by block, [tokens, active] of each call

    def note(self, block: Any, chosen: Any) -> None:
        """Note the choice of a call of a block."""
        if len(chosen) == self._rows:
            self._chosen.setdefault(id(block), []).append(chosen.clone())

    def report(self) -> Record:
        """Return how many different experts each layer used, and the share of a token's experts that the token before
        chose."""
        distinct, same = list[int](), list[float]()
        for calls in self._chosen.values():
            distinct.append(len({expert for chosen in calls for expert in chosen.flatten().tolist()}))
            same += [float((b[:, :, None] == a[:, None]).any(-1).float().mean()) for a, b in pairwise(calls)]
        return {"distinct": distinct, "repeated": statistics.mean(same)} if same else {}


def main() -> None:
    """Run one job."""
    job = Job.from_json(sys.stdin.read())
    from bench.flash.counted import CountedBlock
    from flexengine.guests.flash import expert_blocks
    from flexengine.guests.flash.expert_blocks import ExpertBlock, ExpertBlocks, Router
    from flexengine.plan import neurons
    from flexengine.worker.worker import Worker

    ExpertBlocks.guessing = job.options.get("guessing", True)
    neurons.MAX_CHOSEN_SHARE = job.options.get("most_share", neurons.MAX_CHOSEN_SHARE)
    begin, close, compute = Worker.begin, ExpertBlocks.close, ExpertBlock.__call__
    choices = Choices(len(job.requests))
    sweeps, blocks = list[tuple[float, int]](), list[Any]()  # time and bytes read when each sweep begins

    def beginning(worker: Worker, *args: Any) -> None:
        sweeps.append((time.perf_counter(), worker.weights.machine.disk.bytes_read))
        begin(worker, *args)

    def closing(of_job: ExpertBlocks) -> None:
        blocks.extend(of_job.blocks)
        close(of_job)

    def computing(block: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
        choices.note(block, chosen)
        return compute(block, hidden, chosen, weights)

    if (right := job.options.get("right")) is not None:
        setattr(Router, "choose", worsened(Router.choose, right))  # noqa: B010
    setattr(ExpertBlock, "__call__", computing)  # noqa: B010
    setattr(expert_blocks, "ExpertBlock", CountedBlock)  # noqa: B010
    setattr(Worker, "begin", beginning)  # noqa: B010 - a method is replaced
    setattr(ExpertBlocks, "close", closing)  # noqa: B010
    ran = run(job)
    taken = [(now[0] - last[0], now[1] - last[1]) for last, now in pairwise(sweeps[1:])]
    more = worth(summed([asdict(block.guesses) for block in blocks]))
    more |= summed([asdict(block.counts) for block in blocks]) | choices.report()
    if taken:
        more |= {"sweep_seconds": statistics.median(s for s, _ in taken),
                 "sweep_bytes": statistics.mean(n for _, n in taken)}  # fmt: skip
    report(**ran, **more)


if __name__ == "__main__":
    main()
