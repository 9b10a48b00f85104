"""What is said, and what may be done, when memory that a plan counted on is not there while a job runs."""

from collections.abc import Callable
from dataclasses import replace

from flexengine.errors import InvalidInput, OutOfMemory, RanOut
from flexengine.plan.layout import Layout
from flexengine.plan.words import count
from flexengine.policy import Policy
from flexengine.runtime.shortage import Shortage

REPLANS = 3  # of one job: what is short after that will be short again


def halved(policy: Policy) -> Policy | None:
    """The policy with half the block; None if that is a single sequence."""
    if policy.num_gpu_batches > 1:
        return replace(policy, num_gpu_batches=policy.num_gpu_batches // 2)
    if policy.gpu_batch_size > 1:
        return replace(policy, gpu_batch_size=policy.gpu_batch_size // 2)
    return None


def shape(policy: Policy) -> str:
    """A block in words."""
    batches = count(policy.num_gpu_batches, "gpu_batch", "gpu_batches")
    return f"a block of {policy.block_size} ({batches} of {policy.gpu_batch_size})"


def replanned(found: Shortage, old: Layout, new: Layout, rows: int, times: int) -> str:
    """What people are told when a job goes on with a smaller block."""
    tier = found.tier
    return (f"{found}; going on with {shape(new.policy)} instead of {shape(old.policy)}, which books"
            f" {new.total(tier):,} bytes there instead of {old.total(tier):,};"
            f" {count(rows, 'unfinished row is', 'unfinished rows are')} computed again"
            f" (replanned {times} of at most {REPLANS} times)")  # fmt: skip


def given_too_large(found: Shortage, layout: Layout, lay_out: Callable[[Policy], Layout]) -> RanOut:
    """For a policy somebody gave, which is not ours to change. lay_out: gives another's layout, or raises."""
    policy, tier = layout.policy, found.tier
    message = f"{found}; the policy asks for {shape(policy)}, which books {layout.total(tier):,} bytes there"
    message += _smaller(policy, tier, lay_out)
    return RanOut(tier, found.what, found.needed, f"{message}, or leave the policy to the planner")


def _smaller(policy: Policy, tier: str, lay_out: Callable[[Policy], Layout]) -> str:
    least = "; set a smaller prefill_tokens, or move a share of weights or cache to another tier"
    less = halved(policy)
    if less is None:
        return least
    try:
        booked = lay_out(less).total(tier)
    except (OutOfMemory, InvalidInput):
        return least
    fields = f"gpu_batch_size {less.gpu_batch_size} and num_gpu_batches {less.num_gpu_batches}"
    return f"; set {fields}, with which {booked:,} are booked"


def exhausted(found: Shortage, layout: Layout, times: int, why: OutOfMemory | None = None) -> RanOut:
    """When replanning did not help, or (why) there is no smaller plan."""
    tried = f" after it was made smaller {count(times, 'time', 'times')}" if times else ""
    message = f"{found}, with {shape(layout.policy)}{tried}"
    if why is not None:
        message += f", and there is no smaller plan: {why}"
    where = "--device-mem" if found.tier == "device" else "--host-mem"
    message += f"; free memory that others hold, or give a smaller {where} than what is free"
    return RanOut(found.tier, found.what, found.needed, message)
