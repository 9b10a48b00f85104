"""What is planned in the cluster planner's bench, and plans under a limit of harm."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from bench.cluster.cases import Published, uniform_job
from bench.cluster.events import Pipeline
from flexengine import shipped
from flexengine.plan.cluster import file
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask
from flexengine.plan.cluster.devices import Cluster
from flexengine.plan.cluster.job import ClusterJob, Format, Model, assumed_harm
from flexengine.plan.cluster.search import Limits, search
from flexengine.plan.stages import FORMATS

SECONDS = 600.0  # most seconds of a search; other processes may take most of the processor
ROWS = 32  # sequences of LLM-PQ's workload


def task(
    cluster: Cluster, made: Model, job: ClusterJob, formats: Sequence[Format], theta: float, uneven: bool = True
) -> ClusterTask:
    """Return a task. uneven: harm differs by layer, by a factor of up to 10."""
    table = assumed_harm(made, formats)
    if uneven:
        table = table * np.random.default_rng(1).uniform(0.3, 3.0, (len(made.kinds), 1))
    return ClusterTask(cluster, {"cuda": made}, job, tuple(formats), table, theta)


def simulated(plan: ClusterPlan) -> float:
    """Return the seconds of the job in virtual time."""
    return Pipeline.of(plan).simulate().seconds * plan.numbers.rounds


def no_more_harm(made: ClusterTask, other: ClusterPlan, thetas: Sequence[float] = ()) -> ClusterPlan | None:
    """Return a plan with as many live rows and no more harm than another plan.

    Args:
        thetas: seconds per unit of harm, rising; the first that gives such a plan counts. Default: the task's, doubled
            until it does.
    """
    for theta in thetas or [made.theta * 2.0**k for k in range(20)]:
        plan = search(replace(made, theta=theta), Limits(batch=other.shape.batch, seconds=SECONDS)).plan
        if plan.priced.harm <= other.priced.harm * (1 + 1e-9):
            return plan
    return None


@cache
def shape(name: str) -> Model:
    """Return a shipped model as a GPU holds it."""
    from flexengine.lossy import Lossy
    from flexengine.worker.open_model import open_model

    opened = open_model(shipped.find("models", name), "auto", "cuda", weights=False)
    facts = {}
    for form in FORMATS:
        opened.use(Lossy(weights=form))
        facts[form] = opened.facts
    return Model(facts)


def paper_task(case: Published, prompt: int, output: int) -> ClusterTask:
    """Return the task of one of LLM-PQ's clusters.

    Args:
        prompt, output: tokens of each of its 32 sequences.
    """
    cluster = file.load(shipped.find_file("clusters", f"llm-pq-{case.number}"))
    return task(cluster, shape(case.model), uniform_job(ROWS, prompt, output), FORMATS, 1.0, uneven=False)
