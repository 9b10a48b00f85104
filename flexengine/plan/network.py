"""Hidden states of a chain of stages on the links between them, and tokens on their way back to the first stage.

A stage sends a gpu_batch while it computes the next one. So of a cohort's sweep, the next stage waits for the last
gpu_batch and the latency, or for all bytes if the link is slower than the stage. The first stage begins a cohort's next
sweep when it has the tokens of the last one, which are few bytes: only the latency of their link counts.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flexengine.plan.cost import Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.workload import Workload

if TYPE_CHECKING:
    from flexengine.plan.cluster.devices import Link


class Hop(NamedTuple):
    """A cohort's sweep on one link."""

    whole: float  # seconds of all its bytes
    last: float  # seconds of its last gpu_batch
    latency: float  # seconds of a message of no bytes

    def arrival(self, free: float, began: float, ended: float) -> tuple[float, float]:
        """Return when the link is free again, and when the last byte is on the other side.

        Args:
            free: time from which on the link is free.
            began, ended: times at which the stage before began and ended the sweep.
        """
        first = ended if self.whole <= self.last else began + (ended - began) * self.last / self.whole
        done = max(max(free, first) + self.whole, ended + self.last)
        return done, done + self.latency

    def longer(self, times: float) -> "Hop":
        """Return as many sweeps in a row as one."""
        return Hop(self.whole * times, self.last * times, self.latency * times)


def tokens_sent(workload: Workload) -> float:
    """Return the tokens whose hidden states pass each link in the whole job."""
    spared = workload.spared
    return sum((p + n - 1 - spared.get((p, n), 0.0)) * times for (p, n), times in workload.sizes.items())


def tokens_by_kind(prediction: Prediction, workload: Workload) -> dict[str, float]:
    """Return the tokens of a mean sweep, by kind: sequences enter ("prefill"), or none does ("decode")."""
    entering, others = prediction.counts["prefill"], prediction.counts["decode"]
    decoding = min(prediction.alive, tokens_sent(workload) / max(1.0, others)) if others else 0.0
    return {"prefill": (tokens_sent(workload) - others * decoding) / max(1.0, entering), "decode": decoding}


def hops_of(
    links: Sequence["Link"], model: ModelFacts, tokens: Mapping[str, float], batches: int, prefill_tokens: int
) -> dict[str, tuple[Hop, ...]]:
    """Return what a cohort's sweep takes on each link, by kind of sweep.

    Args:
        links: from each stage to the next, and from the last one to the first.
        model: any stage's.
        tokens: of a cohort's sweep, by kind.
        batches: gpu_batches of a cohort that decodes.
        prefill_tokens: most tokens of a gpu_batch of prompts.
    """
    hops = dict[str, tuple[Hop, ...]]()
    for kind, count in tokens.items():
        nbytes, parts = count * model.hidden_bytes, max(batches, round(count / prefill_tokens))
        whole = [nbytes / link.bandwidth for link in links[:-1]]
        hops[kind] = tuple(Hop(n, n / parts, link.latency) for n, link in zip(whole, links, strict=False))
    return hops
