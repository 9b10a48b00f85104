"""Recovery of a job that runs out of memory although its plan fitted, or that loses attention workers."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from flexengine.engine.core import Core
from flexengine.engine.generation import Generation
from flexengine.engine.planner import Planner
from flexengine.engine.stages import JobResources
from flexengine.engine.state import JobState
from flexengine.errors import InvalidInput, OutOfMemory, RanOut, WorkerLost
from flexengine.places import place_of
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.formatting import count
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.shortage import Shortage

REPLANS = 3  # most replans of one job: after three that did not help, another is unlikely to
RENEWALS = 8  # most losses of attention workers in a row before a row is finished: after them, another is likely


class Recovery:
    """Chooses how a job continues after failures."""

    def __init__(self, core: Core, planner: Planner, workload: Workload, state: JobState) -> None:
        self._core, self._planner, self._workload, self._state = core, planner, workload, state
        self._replans = 0

    def layout_after(self, failure: Shortage | WorkerLost, layout: Layout) -> Layout:
        """Return the next layout. After a shortage of memory it has at most half the block; at most REPLANS times.
        After the loss of attention workers it is the same, with new workers.

        Raises:
            RanOut: a smaller block does not help, or the policy was given.
            WorkerLost: workers are lost again and again before a row is finished, or there is no new worker.
        """
        core, planner, workload, state = self._core, self._planner, self._workload, self._state
        if isinstance(failure, WorkerLost):
            if state.losses > RENEWALS:
                raise failure
            core.machine.renew(failure.place)
            if core.driver is not None:
                core.driver.lost.append(failure.place)
            state.report(renewed(failure, state.rows))
            return layout
        if planner.policy is not None:
            raise given_too_large(failure, layout, lambda policy: planner.layout_under(policy, workload))
        if self._replans == REPLANS:
            raise exhausted(failure, layout, self._replans)
        try:
            smaller = planner.smaller(workload, layout, failure.tier, failure.needed, core.resident)
        except OutOfMemory as error:
            raise exhausted(failure, layout, self._replans, error) from error
        self._replans += 1
        state.report(replanned(failure, layout, smaller, state.rows, self._replans))
        return smaller


def renewed_worker(
    core: Core, planner: Planner, resources: JobResources, generation: Generation, state: JobState, loss: WorkerLost
) -> SweepMonitor:
    """Replace a lost attention worker between two sweeps. The sequences whose KV cache it held wait again. Return what
    compares the sweeps that follow with their prediction.

    Raises:
        WorkerLost: `loss`, if a second worker is lost, too, there is no new one, or stages in other processes hold
            sequences in flight.
    """
    state.note_loss()
    if state.losses > RENEWALS or core.driver is not None:
        raise loss
    stage = resources.own
    watch = planner.watch(stage.watch.cost.workload, stage.layout)
    try:
        home = core.renew(stage, loss.place, watch)
    except (WorkerLost, OutOfMemory) as error:
        raise loss from error
    state.take_busy(stage.executor.times.busy)
    state.report(renewed(loss, generation.lose(home), whole=False))
    return watch


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
        whole: whether these are all unfinished rows; else those whose KV cache is lost.
    """
    again = count(rows, "unfinished row is", "unfinished rows are")
    if not whole:
        again = count(rows, "row whose KV cache it held is", "rows whose KV cache it held are")
    return f"{loss}; continuing with a new worker; {again} computed again"


def given_too_large(lack: Shortage, layout: Layout, lay_out: Callable[[Policy], Layout]) -> RanOut:
    """Return the error for a policy that the user gave, as the engine must not change it.

    Args:
        lay_out: return the layout of another policy, or raise OutOfMemory or InvalidInput.
    """
    policy, tier = layout.policy, lack.tier
    message = f"{lack}; the policy has {shape(policy)}, which books {layout.total(tier):,} bytes of {tier} memory"
    remedy = "; set a smaller prefill_tokens, or move a share of weights or cache to another tier"
    if (half := halved(policy)) is not None:
        with contextlib.suppress(OutOfMemory, InvalidInput):
            booked, fields = lay_out(half).total(tier), f"gpu_batch_size {half.gpu_batch_size} and num_gpu_batches"
            remedy = f"; set {fields} {half.num_gpu_batches}, with which {booked:,} are booked"
    return RanOut(tier, lack.what, lack.needed, f"{message}{remedy}, or leave the policy to the planner")


def exhausted(lack: Shortage, layout: Layout, times: int, why: OutOfMemory | None = None) -> RanOut:
    """Return the error for a job that replanning cannot help.

    Args:
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
