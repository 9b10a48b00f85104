"""What sets the pace of a chain of stages: a stage, a link between two, or their turns; and what shortens the job."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan.chain import ChainPlan
from flexengine.plan.formatting import clock, count, percent
from flexengine.shell.explain.whatif import MIN_SPEEDUP, Help

BUSY_SHARE = 0.8  # of the job's seconds, in which a stage or a link works if it sets the pace


class ChainPace(NamedTuple):
    """The part of a chain that sets its pace."""

    # "stage"; "link", from stage `number` to the next; or "turns": all parts wait more than 1 - BUSY_SHARE of the job
    part: str
    number: int  # of the stage or link with the most work
    seconds: float  # of its work in the job
    name: str  # the part in words


def _link_name(number: int) -> str:
    return f"the link from stage {number} to {number + 1}"


def pace_of(plan: ChainPlan) -> ChainPace:
    """Return the stage or the link with the most seconds of work; "turns" if that one waits for long."""
    slowest = plan.slowest
    work = plan.stages[slowest].prediction.total_seconds
    found = ChainPace("stage", slowest, work, f"stage {slowest}")
    if plan.link_seconds and (most := max(plan.link_seconds)) > work:
        number = plan.link_seconds.index(most)
        found = ChainPace("link", number, most, _link_name(number))
    return found if found.seconds >= BUSY_SHARE * plan.seconds else found._replace(part="turns")


def pace_line(plan: ChainPlan) -> str:
    """Return the line that says what sets the pace."""
    part, _, seconds, name = pace_of(plan)
    share = percent(min(1.0, seconds / plan.seconds))
    if part != "turns":
        return f"{name} sets the pace: it works {clock(seconds)}, {share} of the job"
    cohorts = count(plan.cohorts, "cohort", "cohorts")
    why = f"; the block has {cohorts} for {len(plan.stages)} stages" if plan.cohorts < len(plan.stages) else ""
    return f"stages wait for each other: {name} has the most work, {clock(seconds)}, {share} of the job{why}"


def job_helps(plan: ChainPlan, one_more: Callable[[], ChainPlan] | None = None) -> list[Help]:
    """Return the changes that make the whole job faster by MIN_SPEEDUP or more, the largest speedup first. Links are
    changed under the same plan, so that their speedups are lower bounds.

    Args:
        one_more: plans the job with one more stage; None to leave this change out.
    """
    after = dict[str, float]()
    if plan.links:
        wide = replace(plan, links=tuple(replace(link, bandwidth=2 * link.bandwidth) for link in plan.links))
        near = replace(plan, links=tuple(replace(link, latency=link.latency / 2) for link in plan.links))
        after |= {"links of twice the bandwidth": wide.seconds, "links of half the latency": near.seconds}
    if one_more is not None:
        with suppress(OutOfMemory, InvalidInput):
            after["one more stage"] = one_more().seconds
    found = [Help(label, plan.seconds / seconds, label == "one more stage") for label, seconds in after.items()]
    return sorted((each for each in found if each.ratio >= MIN_SPEEDUP), key=lambda each: -each.ratio)


def next_lines(plan: ChainPlan) -> list[str]:
    """Return the line that bounds the gain of changing the slowest stage alone: the next part then sets the pace; [] if
    no other part has work."""
    others = {f"stage {rank}": stage.prediction.total_seconds for rank, stage in enumerate(plan.stages)}
    del others[f"stage {plan.slowest}"]
    others |= {_link_name(k): seconds for k, seconds in enumerate(plan.link_seconds)}
    name = max(others, key=others.__getitem__, default="")
    if not name or others[name] <= 0:
        return []
    return [f"  with one of these alone, the job still takes at least {clock(others[name])}, the work of {name}"]
