"""A chain of stages as text: layers, placement and seconds of each stage, and changes that help the slowest one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from flexengine.plan.candidates import Options
from flexengine.plan.chain import ChainPlan, ChainStage
from flexengine.plan.formatting import clock, count, digits, percent, place_name, size
from flexengine.plan.mixes import MixedPlan
from flexengine.plan.search import waits_for
from flexengine.policy import Policy, shares
from flexengine.shell.explain.pace import next_lines, pace_line, pace_of
from flexengine.shell.explain.text import as_json as prediction_json
from flexengine.shell.explain.text import job_size, lanes_table, machine, memory, placement, policy_words
from flexengine.shell.explain.whatif import SEARCH_SECONDS, Help, helps


class StageLine(NamedTuple):
    """What is said of a stage."""

    layers: tuple[int, ...]  # first layer, and last layer + 1
    policy: Policy
    seconds: float  # of work
    bottleneck: str  # lane with the most work
    forms: Sequence[str | None] = ()  # format of each layer, if formats were chosen by harm


def stage_lines(plans: Sequence[StageLine], ram: bool) -> list[str]:
    """Return a line for each stage. ram: whether device and host are one memory."""
    lines = []
    for rank, ((begin, end, *_), policy, seconds, _, forms) in enumerate(plans):
        split = shares(policy.weights).items()
        weights = ", ".join(f"{percent(share)} {place_name(place, ram)}" for place, share in split if share)
        bits = f" ({form_words(forms)})" if forms else ""
        lines.append(f"  {rank}: layers {begin} to {end - 1}{bits}, weights {weights}, {clock(seconds)} of work")
    return lines


def form_words(forms: Sequence[str | None]) -> str:
    """Return how many layers have each format. forms: of each layer."""
    return ", ".join(f"{number} {form or 'exact'}" for form, number in Counter(forms).items())


def slowest_line(plans: Sequence[StageLine], ram: bool) -> str:
    """Return the line that names the slowest stage, and what it waits for. ram: as for `stage_lines`."""
    rank = max(range(len(plans)), key=lambda rank: plans[rank].seconds)
    fastest = min(plan.seconds for plan in plans)
    spread = percent(1 - fastest / plans[rank].seconds) if plans[rank].seconds else percent(0)
    return (
        f"the job takes at least {clock(plans[rank].seconds)}, the work of stage {rank}, which waits for"
        f" {waits_for(plans[rank].bottleneck, ram)}; the fastest stage has {spread} less work"
    )


def stage_help_lines(rank: int, found: Sequence[Help]) -> list[str]:
    """Return lines with the changes that make the slowest stage faster; [] if there are none. rank: of the stage."""
    return _help_lines(f"would help stage {rank}, the slowest (its work, one change at a time):", found)


def _help_lines(title: str, found: Sequence[Help]) -> list[str]:
    lines = [f"  {each.label}  {'' if each.searched else '>= '}{each.ratio:.2f}x" for each in found]
    return [title, *lines] if lines else []


def chain_helps(plan: ChainPlan, options: Options | None = None, thorough: bool = False) -> list[Help]:
    """Return the changes of the slowest stage's machine, or of its weights, that make its work shorter. thorough:
    search every change, without a limit of time."""
    stage = plan.stages[plan.slowest]
    cost, limits = stage.cost, replace(options or Options(), cohorts=stage.cost.cohorts)
    budget = inf if thorough else SEARCH_SECONDS
    return helps(cost.model, cost.hardware, cost.workload, stage.prediction, limits, budget)


def _machines(plan: ChainPlan) -> str:
    costs = [stage.cost for stage in plan.stages]
    alike = Counter(machine(cost.hardware, costs[0].model) for cost in costs)
    return " + ".join(f"{number} x {name}" for name, number in alike.items())


def chain_report(
    plan: ChainPlan,
    name: str,
    found: Sequence[Help],
    whole: Sequence[Help] = (),
    mixed: MixedPlan | None = None,
    verbose: bool = False,
) -> str:
    """Return the whole explanation.

    Args:
        found: from `chain_helps`.
        whole: from `job_helps`.
        mixed: the formats of the layers, if they were chosen by harm.
        verbose: add placement, memory and lanes of every stage.
    """
    first, slow = plan.stages[0].cost, plan.stages[plan.slowest]
    each = [(stage.layers, stage.prediction) for stage in plan.stages]
    forms = () if mixed is None else mixed.forms
    lines = [StageLine(layers, p.policy, p.total_seconds, p.bottleneck, forms[slice(*layers)]) for layers, p in each]
    shared = first.hardware.shared
    parts = [
        [f"{name} on {_machines(plan)}", job_size(first.workload)],
        policy_words(plan.policy),
        [f"stages (of {count(first.cohorts, 'cohort', 'cohorts')}; weights that stream are read for each)"],
        [
            f"prediction: {digits(plan.tokens_per_second)} tok/s generated; job {clock(plan.seconds)}, of which"
            f" {clock(max(0.0, plan.seconds - slow.prediction.total_seconds))} without work of stage {plan.slowest}",
            pace_line(plan),
            slowest_line(lines, shared),
            *_link_words(plan),
            *(_harm_words(plan, mixed) if mixed is not None else []),
        ],
        [f"memory of stage {plan.slowest}: {_memory(plan)}"],
        [*stage_help_lines(plan.slowest, found), *next_lines(plan)] if found else [],
        _help_lines("would help the whole job (one change at a time):", whole),
    ]
    parts[2] += stage_lines(lines, shared)
    if verbose:
        parts += [_details(rank, stage) for rank, stage in enumerate(plan.stages)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _link_words(plan: ChainPlan) -> list[str]:
    """Return the line about the network; none if links take no time."""
    if not plan.link_seconds:
        return []
    slow = max(range(len(plan.link_seconds)), key=plan.link_seconds.__getitem__)
    nbytes, free = plan.link_seconds[slow] * plan.links[slow].bandwidth, replace(plan, links=()).seconds
    return [
        f"network: {size(nbytes)} of hidden states cross each link; from stage {slow} to {slow + 1} they take"
        f" {clock(plan.link_seconds[slow])}; with links that take no time the job takes {clock(free)}"
    ]


def _harm_words(plan: ChainPlan, mixed: MixedPlan) -> list[str]:
    return [
        f"formats: {form_words(mixed.forms)}; harm {digits(mixed.harm)}, worth {digits(mixed.cost - plan.seconds)} s of"
        f" the cost {digits(mixed.cost)} s"
    ]


def _details(rank: int, stage: ChainStage) -> list[str]:
    """Return placement, memory and seconds by lane of a stage."""
    cost, prediction = stage.cost, stage.prediction
    return [
        f"stage {rank} alone (bytes of its own layers; its sweeps have all cohorts)",
        *placement(cost.model, cost.workload, prediction, cost.hardware.shared),
        *memory(prediction, cost.hardware, verbose=True),
        *lanes_table(prediction, cost.hardware),
    ]


def _memory(plan: ChainPlan) -> str:
    layout = plan.stages[plan.slowest].prediction.layout
    return ", ".join(f"{place} {size(layout.total(place))}" for place in layout.account)


def chain_json(plan: ChainPlan, found: Sequence[Help], whole: Sequence[Help] = ()) -> dict[str, Any]:
    """Return the plan's numbers, for --json. Arguments as for `chain_report`."""
    stages = [
        {"layers": list(stage.layers)} | prediction_json(stage.prediction, stage.cost.hardware) for stage in plan.stages
    ]
    numbers: dict[str, Any] = {
        "tok_s": plan.tokens_per_second,
        "seconds": plan.seconds,
        "slowest": plan.slowest,
        "spread": plan.spread,
        "pace": pace_of(plan)._asdict(),
        "job_helps": [each._asdict() for each in whole],
    }
    numbers |= {"link_seconds": plan.link_seconds} if plan.links else {}
    return numbers | {"stages": stages, "helps": [each._asdict() for each in found]}
