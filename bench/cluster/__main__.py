"""Stages of pipelines over unequal devices: the planner against simpler ones, virtual time, and published numbers.

python -m bench.cluster toys [--out cluster.jsonl]
python -m bench.cluster skewed [--out cluster.jsonl]
python -m bench.cluster large [--out cluster.jsonl]
python -m bench.cluster published [--clusters 3 4] [--out cluster.jsonl]
python -m bench.cluster regressions [--turns 3] [--out cluster.jsonl]

`toys`: the program and the bit transfer against brute force on 20 random instances. `skewed`: five skewed clusters,
tokens per second in virtual time against even and PipeEdge-like stages. `large`: 64 layers on six devices of three
types, harm different in every layer: seconds of the search. `published`: LLM-PQ's clusters with its workload; rates are
rooflines by hand (policies/clusters), so only ratios between plans may be compared with its numbers.
`regressions`: errors of the seconds of a layer on shapes that were not fitted, on this CPU.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench import harness
from bench.cluster import baselines
from bench.cluster.cases import LARGE, PUBLISHED, SKEWED, Published, decoder, uniform_job
from bench.cluster.held_out import held_out
from bench.cluster.plans import SECONDS, no_more_harm, paper_task, simulated, task
from bench.cluster.toys import INSTANCES, brute_force, instance
from bench.harness import Record
from flexengine.plan.cluster.case_costs import price
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask
from flexengine.plan.cluster.devices import Cluster
from flexengine.plan.cluster.program import solve
from flexengine.plan.cluster.search import PROGRAM, TRANSFER, Found, Limits, search
from flexengine.plan.cluster.transfer import transfer
from flexengine.plan.stages import FORMATS

PARTS = ("toys", "skewed", "large", "published", "regressions")


@dataclass(frozen=True)
class Named:
    """Case of a record."""

    part: str
    name: str


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def paper_seconds(plan: ClusterPlan) -> float:
    """Return the seconds of the job by LLM-PQ's objective (equation 4). It counts links only if one is the slowest
    part, and leaves out that a sequence's next token waits for its last one."""
    p, m = plan.priced, plan.numbers
    slow = [max(*stages, *hops, 0.0) for stages, hops in ((p.prefill, p.hop_prefill), (p.decode, p.hop_decode))]
    prefill, decode = (m.prefills - 1) * slow[0] + sum(p.prefill), (m.cohorts - 1) * m.steps * slow[1] + sum(p.decode)
    return m.rounds * (prefill + decode)


def priced(plan: ClusterPlan | None) -> Record | None:
    """Return the figures of a plan; None if none fits."""
    if plan is None:
        return None
    seconds, tokens = simulated(plan), plan.task.job.rows * plan.task.job.output
    return {
        "tok_s": tokens / seconds, "seconds": seconds, "objective_error": plan.priced.seconds / seconds - 1,
        "harm": plan.priced.harm, "cost": plan.priced.cost, "batch": plan.shape.batch, "decode": plan.shape.decode,
        "prefill": plan.shape.prefill, "layers": [list(each) for each in plan.layers],
        "devices": [d.name for d in plan.devices],
        "formats": {form or "exact": plan.formats.count(form) for form in dict.fromkeys(plan.formats)},
    }  # fmt: skip


def timed(made: ClusterTask, limits: Limits | None = None) -> tuple[Found, Record]:
    """Return the result of a search, and its figures."""
    began = time.process_time()
    found = search(made, limits)
    return found, {"cpu_seconds": time.process_time() - began, **searched(found)}


def searched(found: Found) -> Record:
    """Return the figures of a search."""
    return {"search_seconds": found.seconds, "solved": found.solved, "bounded": found.bounded, "gap": found.gap,
            "method": found.method}  # fmt: skip


def record(part: str, name: str, **values: object) -> Record:
    """Return a record of the bench."""
    versions = {"versions": harness.versions()}
    head = harness.header("cluster", Named(part, name), [versions])
    return {**head, "part": part, **values}


def toys() -> Record:
    """Return the costs of program and bit transfer over those of brute force."""
    ratios, moved, seconds, infeasible = [], [], [], 0
    for seed in range(INSTANCES):
        numbers = instance(seed)
        best = brute_force(numbers)
        began = time.perf_counter()
        answer = solve(numbers, gap=0.0)
        seconds.append(time.perf_counter() - began)
        if answer is None:
            infeasible += math.isinf(best)
            continue
        ratios.append(price(numbers, answer.stage_of, answer.choice_of).cost / best)
        if (other := transfer(numbers)) is not None:
            moved.append(price(numbers, other.stage_of, other.choice_of).cost / best)
    say(f"toys: program / brute force {min(ratios):.6f} to {max(ratios):.6f}, transfer median"
        f" {statistics.median(moved):.3f}, worst {max(moved):.3f}")  # fmt: skip
    return record("toys", "20 instances", solved=len(ratios), infeasible=infeasible,
                  program={"min": min(ratios), "max": max(ratios)}, program_seconds=statistics.median(seconds),
                  transfer={"solved": len(moved), **(harness.stats(moved) or {})})  # fmt: skip


def skewed(cluster: Cluster) -> Record:
    """Return the chosen plan, the simpler plans, the heuristic's, and the seconds of the paper's objective."""
    job = uniform_job(64, 512, 100)
    made = task(cluster, decoder("24 layers of 4096", 24, 4096, 16384, 32000), job, FORMATS, 0.1)
    best, figures = timed(made, Limits(seconds=SECONDS))
    quick, quick_figures = timed(made, Limits(method=TRANSFER, seconds=SECONDS))
    others = {"uniform": baselines.uniform(made), "pipe_edge": baselines.pipe_edge(made)}
    alike = {f"ours, no more harm than {name}": no_more_harm(made, plan) for name, plan in others.items() if plan}
    rates = {name: priced(plan) for name, plan in {"ours": best.plan, **others, **alike}.items()}
    ratios = {}
    for name in others:
        for ours in ("ours", f"ours, no more harm than {name}"):
            a, b = rates.get(ours), rates[name]
            ratios[f"{ours} / {name}"] = a["tok_s"] / b["tok_s"] if a and b else None
    say(f"{cluster.name}: {ratios}, transfer {quick.plan.priced.cost / best.plan.priced.cost:.4f}")
    return record("skewed", cluster.name, ratios=ratios, plans=rates, search=figures,
                  transfer={"plan": priced(quick.plan), "cost_ratio": quick.plan.priced.cost / best.plan.priced.cost,
                            **quick_figures},
                  paper_form={"objective_error": paper_seconds(best.plan) / simulated(best.plan) - 1})  # fmt: skip


def large(cluster: Cluster) -> Record:
    """Return the seconds of both methods for 64 layers on six devices."""
    job = uniform_job(32, 512, 100)
    made = task(cluster, decoder("64 layers of 8192", 64, 8192, 32768, 50272), job, FORMATS, 1.0)
    program, figures = timed(made, Limits(method=PROGRAM, batch=32, seconds=SECONDS))
    quick, quick_figures = timed(made, Limits(method=TRANSFER, batch=32, seconds=SECONDS))
    grouped, grouped_figures = timed(replace(made, group=2), Limits(method=PROGRAM, batch=32, seconds=SECONDS))
    ratio = quick.plan.priced.cost / program.plan.priced.cost
    say(f"large: {figures}; transfer {quick_figures}, cost {ratio:.4f}")
    return record("large", cluster.name, program={"plan": priced(program.plan), **figures},
                  transfer={"plan": priced(quick.plan), "cost_ratio": ratio, **quick_figures},
                  group_of_2={"plan": priced(grouped.plan), **grouped_figures})  # fmt: skip


def published(case: Published) -> Record:
    """Return our plan and simpler plans on a cluster of LLM-PQ, beside its published rates."""
    made = paper_task(case, 512, 100)
    cluster = made.cluster
    best, figures = timed(made, Limits(batch=32, seconds=SECONDS))
    hosts = replace(cluster, devices=tuple(replace(d, host_memory=64 << 30, host_link=1.2e10) for d in cluster.devices))
    exact = search_or_none(replace(made, cluster=hosts, formats=(None,), harm=made.harm[:, :1]))
    others = {"uniform": baselines.uniform(made, 32), "pipe_edge": baselines.pipe_edge(made, 32)}
    plans = {name: priced(plan) for name, plan in {"ours": best.plan, **others}.items()}
    edge = plans["pipe_edge"]
    gain = plans["ours"]["tok_s"] / edge["tok_s"] if plans["ours"] and edge else None
    theirs = case.llm_pq / case.pipe_edge if case.llm_pq and case.pipe_edge else None
    ours = plans["ours"]["tok_s"] if plans["ours"] else 0.0
    say(f"cluster {case.number}: {ours:.1f} tok/s, {gain} x pipe_edge; published {case.llm_pq}, {theirs} x; {figures}")
    return record("published", f"llm-pq-{case.number} {case.model}", plans=plans, search=figures,
                  gain_over_pipe_edge=gain, exact_with_64_gib_host_each=priced(exact.plan) if exact else None,
                  published={"pipe_edge": case.pipe_edge, "llm_pq": case.llm_pq, "gain": theirs})  # fmt: skip


def search_or_none(made: ClusterTask) -> Found | None:
    """Return the search's result; None if no plan fits."""
    from flexengine.errors import OutOfMemory

    try:
        return search(made, Limits(batch=32, seconds=SECONDS))
    except OutOfMemory:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="default: all parts")
    parser.add_argument("--clusters", type=int, nargs="+", default=[case.number for case in PUBLISHED])
    parser.add_argument("--turns", type=int, default=3, help="of regressions")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args(argv)
    if "toys" in args.parts:
        harness.emit(toys(), args.out)
    if "skewed" in args.parts:
        for cluster in SKEWED:
            harness.emit(skewed(cluster), args.out)
    if "large" in args.parts:
        harness.emit(large(LARGE), args.out)
    if "published" in args.parts:
        for case in PUBLISHED:
            if case.number in args.clusters:
                harness.emit(published(case), args.out)
    if "regressions" in args.parts:
        found = held_out(args.turns)
        for form, phases in found["formats"].items():
            say(f"{form}: " + ", ".join(f"{phase} {each['mean']:.1%} mean, {each['most']:.1%} most"
                                        for phase, each in phases.items()))  # fmt: skip
        harness.emit(record("regressions", f"hidden {found['hidden']}", **found), args.out)


if __name__ == "__main__":
    main()
