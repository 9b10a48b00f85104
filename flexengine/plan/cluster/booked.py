"""Bytes of a stage besides its layers, as the layout of a single machine books them."""

from dataclasses import replace

from flexengine.plan.capacity import Capacity
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import READING, lay_out
from flexengine.plan.sizes import ALIGN, READ, READ_BUFFERS, SHORT_READ, SHORT_READERS, aligned
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

MOST_READING = aligned(READ_BUFFERS * READ) + SHORT_READERS * aligned(SHORT_READ + 2 * ALIGN)


def stage_facts(facts: ModelFacts, first: int, end: int) -> ModelFacts:
    """Return the facts of layers `first` to `end` - 1, with the embedding or the head if they are at an end."""
    begins, ends = first == 0, end == len(facts.layers)
    head = facts.head or (None if begins else facts.embedding)
    return replace(
        facts, layers=facts.layers[first:end], windows=facts.windows[first:end], leaves=not ends,
        embedding=facts.embedding if begins else None, head=head if ends else None,
        others=facts.others if begins or ends else (),
    )  # fmt: skip


def cohort_policy(rows: int, tokens: int) -> Policy:
    """Return the policy of a stage that computes cohorts of `rows` sequences, at most `tokens` tokens together."""
    return Policy(gpu_batch_size=rows, num_gpu_batches=1, prefill_tokens=tokens)


def fixed_bytes(facts: ModelFacts, workload: Workload, policy: Policy, shared: bool, ends: tuple[bool, bool]) -> int:
    """Return the device bytes of a stage besides weights and KV cache of its layers.

    Args:
        facts: the whole model.
        workload: rows of the job.
        policy: the stage's policy, with all data on the device.
        shared: whether host and device are one memory.
        ends: whether the stage has the first and the last layer of the model.
    """
    begins, finishes = ends
    one = replace(facts, layers=facts.layers[:1], windows=facts.windows[:1])
    made = stage_facts(one, 0, 1)
    if not begins:
        made = replace(made, embedding=None, head=facts.head or facts.embedding)
    if not finishes:
        made = replace(made, head=None, leaves=True)
    if not (begins or finishes):
        made = replace(made, others=())
    layout = lay_out(made, policy, workload, Capacity(None, None, None, shared, not shared))
    weights = sum(aligned(t.held_bytes) for t in made.layers[0])
    rest = layout.total("device") - weights - layout.account["device"].get("KV cache", 0)
    if not shared:
        return rest
    # Read buffers grow with the stage's weights up to this size.
    return rest - layout.account["device"].get(READING, 0) + MOST_READING
