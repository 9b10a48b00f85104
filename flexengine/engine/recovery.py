"""Recovery of a job that runs out of memory although its plan fitted, or that loses attention workers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from flexengine.engine.core import Core
from flexengine.engine.planner import Planner
from flexengine.engine.state import JobState
from flexengine.errors import InvalidInput, OutOfMemory, RanOut, WorkerLost
from flexengine.places import place_of
from flexengine.plan.formatting import count
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.shortage import Shortage

REPLANS = 3  # most replans of one job: after three that did not help, another is unlikely to
RENEWALS = 8  # most losses of attention workers in a row before a row is finished: after them, another is likely


class Recovery:
    """The layouts under which a job runs, one after the other. `recover` must be called before the next one is taken.

    Args:
        core: the opened model.
        planner: makes smaller layouts.
        workload: workload of the job.
        layout: the first layout.
        state: state of the job.
    """

    def __init__(self, core: Core, planner: Planner, workload: Workload, layout: Layout, state: JobState) -> None:
        self._core, self._planner, self._workload, self._state = core, planner, workload, state
        self._layout, self._replans = layout, 0

    def __iter__(self) -> Iterator[Layout]:
        while True:
            yield self._layout

    def recover(self, failure: Shortage | WorkerLost) -> None:
        """Choose the next layout. After a shortage of memory it has at most half the block; at most REPLANS times.
        After the loss of attention workers it is the same, with new workers.

        Raises:
            RanOut: a smaller block does not help, or the policy was given.
            WorkerLost: workers are lost again and again before a row is finished, or there is no new worker.
        """
        if isinstance(failure, WorkerLost):
            if self._state.losses > RENEWALS:
                raise failure
            self._core.renew_worker(failure.place)
            self._state.report(renewed(failure, self._state.rows))
        else:
            self._layout = self._smaller(failure)

    def _smaller(self, lack: Shortage) -> Layout:
        planner, workload, layout = self._planner, self._workload, self._layout
        if planner.policy is not None:
            raise given_too_large(lack, layout, lambda policy: planner.layout_under(policy, workload))
        if self._replans == REPLANS:
            raise exhausted(lack, layout, self._replans)
        try:
            smaller = planner.smaller(workload, layout, lack.tier, lack.needed, self._core.resident)
        except OutOfMemory as error:
            raise exhausted(lack, layout, self._replans, error) from error
        self._replans += 1
        self._state.report(replanned(lack, layout, smaller, self._state.rows, self._replans))
        return smaller


def halved(policy: Policy) -> Policy | None:
    """Return the policy with half the block; None if the block is a single sequence."""
    if policy.num_gpu_batches > 1:
        return replace(policy, num_gpu_batches=policy.num_gpu_batches // 2)
    if policy.gpu_batch_size > 1:
        return replace(policy, gpu_batch_size=policy.gpu_batch_size // 2)
    return None


def shape(policy: Policy) -> str:
    """Return a block's shape as text."""
    batches = count(policy.num_gpu_batches, "gpu_batch", "gpu_batches")
    return f"a block of {policy.block_size} ({batches} of {policy.gpu_batch_size})"


def replanned(lack: Shortage, old: Layout, new: Layout, rows: int, times: int) -> str:
    """Return the message for a job that continues with a smaller block.

    Args:
        lack: the shortage of memory.
        rows: unfinished rows, which are computed again.
        times: replans so far, including this one.
    """
    tier = lack.tier
    return (f"{lack}; continuing with {shape(new.policy)} instead of {shape(old.policy)}, which books"
            f" {new.total(tier):,} bytes of {tier} memory instead of {old.total(tier):,};"
            f" {count(rows, 'unfinished row is', 'unfinished rows are')} computed again"
            f" (replanned {times} of at most {REPLANS} times)")  # fmt: skip


def renewed(loss: WorkerLost, rows: int, whole: bool = True) -> str:
    """Return the message for a job that continues with a new attention worker.

    Args:
        loss: the loss of the worker.
        rows: rows that are computed again.
        whole: whether these are all unfinished rows; else those whose KV cache is lost.
    """
    again = count(rows, "unfinished row is", "unfinished rows are")
    if not whole:
        again = count(rows, "row whose KV cache it held is", "rows whose KV cache it held are")
    return f"{loss}; continuing with a new worker; {again} computed again"


def given_too_large(lack: Shortage, layout: Layout, lay_out: Callable[[Policy], Layout]) -> RanOut:
    """Return the error for a policy that the user gave, as the engine must not change it.

    Args:
        lack: the shortage of memory.
        layout: the layout under the given policy.
        lay_out: return the layout of another policy, or raise OutOfMemory or InvalidInput.
    """
    policy, tier = layout.policy, lack.tier
    message = f"{lack}; the policy has {shape(policy)}, which books {layout.total(tier):,} bytes of {tier} memory"
    message += _smaller(policy, tier, lay_out)
    return RanOut(tier, lack.what, lack.needed, f"{message}, or leave the policy to the planner")


def _smaller(policy: Policy, tier: str, lay_out: Callable[[Policy], Layout]) -> str:
    """Return the remedy: half the block if that can be laid out, else other fields of the policy."""
    others = "; set a smaller prefill_tokens, or move a share of weights or cache to another tier"
    half = halved(policy)
    if half is None:
        return others
    try:
        booked = lay_out(half).total(tier)
    except (OutOfMemory, InvalidInput):
        return others
    fields = f"gpu_batch_size {half.gpu_batch_size} and num_gpu_batches {half.num_gpu_batches}"
    return f"; set {fields}, with which {booked:,} are booked"


def exhausted(lack: Shortage, layout: Layout, times: int, why: OutOfMemory | None = None) -> RanOut:
    """Return the error for a job that replanning cannot help.

    Args:
        lack: the last shortage of memory.
        layout: the last layout.
        times: replans so far.
        why: why there is no smaller plan; None if `times` is REPLANS.
    """
    tried = f" after it was made smaller {count(times, 'time', 'times')}" if times else ""
    message = f"{lack}, with {shape(layout.policy)}{tried}"
    if why is not None:
        message += f", and there is no smaller plan: {why}"
    if place_of(lack.tier).worker:
        message += "; end other engines that use the worker, or give it a larger --worker-mem"
    else:
        option = "--device-mem" if lack.tier == "device" else "--host-mem"
        message += f"; end other programs that use memory, or set {option} to less than the free memory"
    return RanOut(lack.tier, lack.what, lack.needed, message)
