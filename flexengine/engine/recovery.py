"""Recovery of a job that runs out of memory although its plan fitted, or that loses attention workers."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from flexengine.engine.generation import Generation
from flexengine.engine.job import Job
from flexengine.engine.stages import JobResources
from flexengine.errors import InvalidInput, OutOfMemory, RanOut, WorkerLost
from flexengine.places import place_of
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.formatting import count, size
from flexengine.plan.layout import Layout
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.runtime.execute import Shortage

REPLANS = 3  # most replans of one job: after three that did not help, another is unlikely to
RENEWALS = 8  # most losses of attention workers in a row before a row is finished: after them, another is likely


def layout_after(job: Job, workload: Workload, failure: Shortage | WorkerLost, layout: Layout) -> Layout:
    """Return the next layout of a job. After a shortage of memory it has at most half the block; at most REPLANS times.
    After the loss of attention workers it is the same, with new workers.

    Raises:
        RanOut: a smaller block does not help, or the policy was given.
        WorkerLost: workers are lost again and again before a row is finished, or there is no new worker.
    """
    core, planner = job.core, job.planner
    if isinstance(failure, WorkerLost):
        if job.losses > RENEWALS:
            raise failure
        core.machine.renew(failure.place)
        if core.driver is not None:
            core.driver.lost.append(failure.place)
        again = count(job.in_flight, "unfinished row is", "unfinished rows are")
        job.report(f"{failure}; continuing with a new worker; {again} computed again")
        return layout
    if planner.policy is not None:
        raise given_too_large(failure, layout, lambda policy: planner.layout_under(policy, workload))
    if job.replans == REPLANS:
        raise exhausted(failure, layout, job.replans)
    try:
        smaller = planner.smaller(workload, layout, failure.tier, failure.needed, core.resident)
    except OutOfMemory as error:
        raise exhausted(failure, layout, job.replans, error) from error
    job.replans += 1
    job.report(replanned(failure, layout, smaller, job.in_flight, job.replans))
    return smaller


def renewed_worker(job: Job, resources: JobResources, generation: Generation, loss: WorkerLost) -> SweepMonitor:
    """Replace a lost attention worker between two sweeps. The sequences whose KV cache it held wait again. Return what
    compares the sweeps that follow with their prediction. Raise WorkerLost, `loss`, if a second worker is lost, too,
    there is no new one, or stages in other processes hold sequences in flight."""
    core = job.core
    job.note_loss()
    if job.losses > RENEWALS or core.driver is not None:
        raise loss
    stage = resources.own
    watch = job.planner.watch(stage.watch.cost.workload, stage.watch.layout)
    try:
        home = core.renew(stage, loss.place, watch)
    except (WorkerLost, OutOfMemory) as error:
        raise loss from error
    job.take_busy(stage.executor.times.busy)
    again = count(generation.lose(home), "row whose KV cache it held is", "rows whose KV cache it held are")
    job.report(f"{loss}; continuing with a new worker; {again} computed again")
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
    """Return the message for a job that continues with a smaller block. rows: unfinished ones, which are computed
    again. times: replans so far, including this one."""
    tier = lack.tier
    return (f"{lack}; continuing with {shape(new.policy)} instead of {shape(old.policy)}, which books"
            f" {size(new.total(tier))} of {tier} memory instead of {size(old.total(tier))};"
            f" {count(rows, 'unfinished row is', 'unfinished rows are')} computed again"
            f" (replanned {times} of at most {REPLANS} times)")  # fmt: skip


def given_too_large(lack: Shortage, layout: Layout, lay_out: Callable[[Policy], Layout]) -> RanOut:
    """Return the error for a policy that the user gave, as the engine must not change it. lay_out: returns the layout
    of another policy, or raises OutOfMemory or InvalidInput."""
    policy, tier = layout.policy, lack.tier
    message = f"{lack}; the policy has {shape(policy)}, which books {size(layout.total(tier))} of {tier} memory"
    remedy = "; set a smaller prefill_tokens, or move a share of weights or cache to another tier"
    if (half := halved(policy)) is not None:
        with contextlib.suppress(OutOfMemory, InvalidInput):
            booked, fields = lay_out(half).total(tier), f"gpu_batch_size {half.gpu_batch_size} and num_gpu_batches"
            remedy = f"; set {fields} {half.num_gpu_batches}, with which {size(booked)} are booked"
    return RanOut(tier, lack.what, lack.needed, f"{message}{remedy}, or leave the policy to the planner")


def exhausted(lack: Shortage, layout: Layout, times: int, why: OutOfMemory | None = None) -> RanOut:
    """Return the error for a job that replanning cannot help. times: replans so far. why: why there is no smaller plan;
    None if `times` is REPLANS."""
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
