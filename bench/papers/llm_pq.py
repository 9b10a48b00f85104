"""LLM-PQ's (arXiv 2403.01136) tables.

Plans are those of `flexengine plan --cluster` for the clusters in policies/clusters, whose rates are rooflines by hand,
so only ratios between plans are compared.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from bench.cluster.cases import PUBLISHED, Published
from bench.papers.tables import Figure, PaperTable

if TYPE_CHECKING:
    from bench.bits.plans import Formats, Indicators
    from flexengine.plan.cluster.costs import ClusterPlan

Plans = dict[str, "ClusterPlan | None"]
PAPER = "LLM-PQ, arXiv 2403.01136"
DEVICES = ("V100", "A100", "3 T4, V100", "3 P100, V100", "4 T4, 2 V100", "2 V100, 2 A100", "4 V100, 4 A100",
           "4 V100, 2 A800", "4 T4", "4 V100", "4 A800")  # fmt: skip
ROWS, HOST_BYTES, HOST_LINK = 32, 64 << 30, 1.2e10  # hosts are assumed: the paper gives no RAM per device
THETAS = (0.0, *(2.0**k for k in range(-6, 14)))  # seconds per unit of harm that are tried
OURS, EDGE, UNIFORM, FLEXGEN, ADABITS = "ours", "PipeEdge", "uniform", "FlexGen in 8 bits", "pure adabits"
# Published tokens per second of LLM-PQ over those of a baseline, by cluster; PipeEdge's are in `PUBLISHED`. On cluster
# 1 Uniform reaches LLM-PQ's speed; FlexGen in 8 bits reaches 63.74 on cluster 1, and 10.21 on 9.
RATIOS = {(1, UNIFORM): 1.0, (1, FLEXGEN): 55.57 / 63.74, (9, FLEXGEN): 7.85 / 10.21}
MEAN_GAIN = 2.26
WHY_ONE = (
    "A single device leaves a partition no choice, and in the cluster file all formats have equal FLOP per second."
)
WHY_GAIN = (
    "The published gains are of measured kernels, and clusters of one device show a gain that no partition explains;"
    " ours come from partition, formats and micro-batches alone, as all formats have equal FLOP per second here (at"
    " half the rates for 8 bits, ours rises from 1.24x to 1.64x on cluster 6)."
)
WHY_FLEXGEN = (
    "The paper measured FlexGen's own kernels; here both have the same rooflines, and FlexGen's fastest plan in 8 bits"
    " computes the 32 sequences in two rounds, as their KV cache does not fit beside the weights."
)


def name_of(case: Published) -> str:
    """Return a cluster's number, devices and model."""
    return f"{case.number} ({DEVICES[case.number - 1]}; {case.model.upper()})"


@cache
def plans_of(number: int, prompt: int, output: int) -> Plans:
    """Return our plan and those of the baselines on a cluster of the paper; None where none fits.

    Ours has no more harm than PipeEdge's, or than the uniform one if PipeEdge's does not fit.
    """
    from bench.cluster import baselines
    from bench.cluster.plans import no_more_harm, paper_task

    made = paper_task(PUBLISHED[number - 1], prompt, output)
    with_hosts = tuple(replace(d, host_memory=HOST_BYTES, host_link=HOST_LINK) for d in made.cluster.devices)
    edge, uniform = baselines.pipe_edge(made, ROWS), baselines.uniform(made, ROWS)
    limit = edge or uniform
    return {
        OURS: no_more_harm(made, limit, THETAS) if limit else None,
        EDGE: edge,
        UNIFORM: uniform,
        FLEXGEN: baselines.flexgen_int8(replace(made, cluster=replace(made.cluster, devices=with_hosts)), ROWS),
        ADABITS: baselines.adabits(made, ROWS),
    }


def ratios(case: Published, plans: Plans) -> Iterator[tuple[str, float]]:
    """Yield the baselines that fit, and the virtual seconds of each over those of our plan."""
    from bench.cluster.plans import simulated

    ours = plans[OURS]
    for name, plan in plans.items():
        if name == FLEXGEN and not case.model.startswith("opt"):
            continue  # FlexGen computes OPT only
        if name != OURS and plan is not None and ours is not None:
            yield name, simulated(plan) / simulated(ours)


def clusters() -> PaperTable:
    """Return our tokens per second over each baseline's, prompts of 512 tokens."""
    figures, gains = [], []
    for case in PUBLISHED:
        for name, ratio in ratios(case, plans_of(case.number, 512, 100)):
            published, why = RATIOS.get((case.number, name)), WHY_FLEXGEN
            if name == EDGE and case.pipe_edge and case.llm_pq:
                published, why = case.llm_pq / case.pipe_edge, WHY_GAIN if case.number > 2 else WHY_ONE
                gains.append(ratio)
            figures.append(explained(f"{name_of(case)}, over {name}", ratio, published, why))
    figures.append(explained("mean over PipeEdge, clusters 1 to 8", statistics.fmean(gains), MEAN_GAIN, WHY_GAIN))
    title, how = "LLM-PQ: eleven clusters against simpler planners", CLUSTERS_HOW.format(512, 100)
    return PaperTable("llm-pq-clusters", title, f"{PAPER}, tables 4 and 5", OVER, how, figures)


OVER = "tokens/s of our plan over those of another planner"
CLUSTERS_HOW = (
    "Ours are plans in virtual time: 32 sequences of {} prompt tokens, {} generated. Our plan is the fastest that was"
    " found with no more assumed harm than PipeEdge's; PipeEdge and uniform use the most exact format that fits; a"
    " planner without a plan that fits is left out."
)


def short_prompts() -> PaperTable:
    """Return the same for prompts of 128 tokens."""
    figures = [
        Figure(f"{name_of(case)}, over {name}", ratio)
        for case in PUBLISHED
        for name, ratio in ratios(case, plans_of(case.number, 128, 200))
    ]
    how = CLUSTERS_HOW.format(128, 200)
    return PaperTable("llm-pq-short-prompts", "LLM-PQ: short prompts", f"{PAPER} (not at hand)", OVER, how, figures)


def explained(name: str, ours: float, published: float | None, why: str) -> Figure:
    """Return a figure; with the reason if it is far from the published one."""
    figure = Figure(name, ours, published)
    return replace(figure, why=why) if figure.unexplained else figure


# The optimiser.

ABLATION = f"{PAPER}, the ablation of its optimiser"
GROUPED, SINGLE, TRANSFERRED = "groups of 2 layers", "layer by layer", "bit transfer"
# Published tokens per second and seconds of the search, by cluster and method
SOLVERS = {
    3: {GROUPED: (39.70, 1.1), SINGLE: (39.70, 3.3), TRANSFERRED: (35.17, 5.4)},
    4: {GROUPED: (14.72, 12.3), SINGLE: (13.93, 204.6), TRANSFERRED: (14.94, 2.0)},
    6: {GROUPED: (39.56, 2.7), SINGLE: (44.93, 19.1), TRANSFERRED: (28.45, 7.7)},
    10: {GROUPED: (16.64, 59.3), SINGLE: (17.57, 127.3), TRANSFERRED: (17.97, 2.1)},
}
WHY_SECONDS = (
    "The paper's program has a 0/1 variable for each layer, device and format, and Gurobi solves one for each order and"
    " micro-batch; ours has whole numbers of layers by device and format, solved by HiGHS, and bounds leave out most"
    " cases (docs/cluster.md)."
)
WHY_TRANSFER = (
    "Our bit transfer has a second start in the fastest formats and more kinds of changes than the paper's, and the"
    " plan that both are compared with has another theta: ours weighs harm with 1 second per unit."
)
WHY_GROUPS = (
    "The published plan that is decided layer by layer is slower than that of groups, and its programs have a limit of"
    " 60 s; ours ended within 0.1 % of the best cost."
)


@cache
def searched(number: int, method: str) -> tuple[float, float]:
    """Return the tokens per second of a plan in virtual time, and the CPU seconds of its search."""
    from bench.cluster.plans import paper_task, simulated
    from flexengine.plan.cluster.search import PROGRAM, TRANSFER, Limits, search

    made = replace(paper_task(PUBLISHED[number - 1], 512, 100), group=2 if method == GROUPED else 1)
    began = time.process_time()
    found = search(made, Limits(method=TRANSFER if method == TRANSFERRED else PROGRAM, batch=ROWS))
    return ROWS * 100 / simulated(found.plan), time.process_time() - began


def solver_seconds() -> PaperTable:
    """Return the seconds of the search by three methods."""
    figures = [
        explained(f"{name_of(PUBLISHED[number - 1])}, {method}", searched(number, method)[1], published[1], WHY_SECONDS)
        for number, methods in SOLVERS.items()
        for method, published in methods.items()
    ]
    how = "Ours are CPU seconds of the whole search on this machine."
    return PaperTable("llm-pq-solver", "LLM-PQ: seconds of the search", ABLATION, "seconds", how, figures)


def solver_plans() -> PaperTable:
    """Return the tokens per second of the plans of two methods over those of the third."""
    figures = []
    for number, methods in SOLVERS.items():
        for method, why in ((GROUPED, WHY_GROUPS), (TRANSFERRED, WHY_TRANSFER)):
            ratio = searched(number, method)[0] / searched(number, SINGLE)[0]
            published = methods[method][0] / methods[SINGLE][0]
            figures.append(explained(f"{name_of(PUBLISHED[number - 1])}, {method}", ratio, published, why))
    unit, how = (
        "tokens/s over those of the plan that is decided layer by layer",
        "Ours are plans in virtual time, theta 1.",
    )
    return PaperTable("llm-pq-solver-plans", "LLM-PQ: plans of faster searches", ABLATION, unit, how, figures)


# Quality, on a small real model.

TEXT_ROWS, TEXT_TOKENS = 6, 256
PERPLEXITY = {"random": 11.04, "Hessian": 10.75, "variance": 10.75}  # published: cluster 9, OPT-30B
PAPER_BITS = 4.0  # on average, about those of cluster 9: our pure adabits has 42 of 48 layers in int4 there
HESSIAN_SECONDS = {"OPT-66B": 25625 / 434.8, "OPT-30B": 15670.9 / 215.6}
# Published perplexities by cluster: of PipeEdge, and of LLM-PQ
PERPLEXITIES = {1: (11.78, 11.23), 2: (11.38, 11.23), 3: (10.70, 10.70), 4: (10.78, 10.70), 5: (10.50, 10.40),
                6: (10.34, 10.31), 7: (10.97, 10.90), 8: (10.97, 10.90)}  # fmt: skip
ON_TEXT = f"the demo model (SmolLM2-135M) on {TEXT_ROWS} x {TEXT_TOKENS} tokens of the sample text"
WHY_INDICATOR = (
    "The variance ranks the demo model's layers hardly better than chance (Spearman 0.19, docs/lossy.md): it gives a"
    " few layers 8 bits and pays with 3 bits in others, where random harms leave int4 everywhere."
)
WHY_HESSIAN = (
    "The demo model's matrices have 576 or 1,536 columns, OPT-66B's 9,216 or 36,864, and the Hessian's additional work"
    " grows with the square of the columns."
)


@cache
def harms() -> "Indicators":
    """Return the harms of the demo model."""
    from bench.bits.plans import indicators

    return indicators()


def measured(chosen: Sequence["Formats"]) -> dict[Any, Any]:
    """Return what formats of layers cost on the text, by formats."""
    from bench.bits.plans import costs_of

    return costs_of(None, chosen, TEXT_ROWS, TEXT_TOKENS)


def indicator_table(averages: Sequence[float] = (PAPER_BITS, 3.5, 5.0)) -> PaperTable:
    """Return the perplexity of plans by each indicator."""
    from bench.bits.plans import VARIANCE, planned

    chosen = {(bits, name): formats for bits in averages for name, formats in planned(harms(), None, bits)}
    costs = measured(list(chosen.values()))
    figures = []
    for (bits, name), formats in chosen.items():
        ratio = costs[formats].perplexity / costs[chosen[bits, VARIANCE]].perplexity
        known = name in PERPLEXITY and bits == PAPER_BITS
        published = PERPLEXITY[name] / PERPLEXITY[VARIANCE] if known else None
        figures.append(explained(f"{bits:g} bits, {name}", ratio, published, WHY_INDICATOR))
    how = (
        f"Ours are of {ON_TEXT}, whose exact perplexity is {costs[None].perplexity:.1f}: plans for two devices that"
        " hold the layers at some bits on average, by `plan --cluster --harm`."
    )
    return PaperTable("llm-pq-indicators", "LLM-PQ: indicators", f"{PAPER}, cluster 9 with OPT-30B",
                      "perplexity over that of the variance indicator", how, figures)  # fmt: skip


def indicator_seconds() -> PaperTable:
    """Return how much longer a Hessian takes than the variance."""
    from bench.bits.plans import HESSIAN, VARIANCE

    ratio = harms().seconds[HESSIAN] / harms().seconds[VARIANCE]
    figures = [
        explained(f"Hessian over variance, {name}", ratio, known, WHY_HESSIAN)
        for name, known in HESSIAN_SECONDS.items()
    ]
    return PaperTable("llm-pq-indicator-seconds", "LLM-PQ: seconds of the indicators", PAPER, "seconds over seconds",
                      "Ours is one ratio, of the demo model (SmolLM2-135M) on 8,192 tokens.", figures)  # fmt: skip


def spread_over(formats: Sequence[str | None], table: Sequence[dict[str, float]]) -> "Formats":
    """Return formats for another model: as large a share of its layers in each format, rounded, and the fewest bits for
    the layers of least harm.

    Args:
        formats: of the layers of a plan.
        table: harms of the other model, by layer and format.
    """
    from flexengine.plan.stages import BITS

    rising = sorted(formats, key=lambda form: BITS[form])
    layers = len(table)
    places = [min(len(rising) - 1, math.floor((j + 0.5) * len(rising) / layers)) for j in range(layers)]
    order = sorted(range(layers), key=lambda j: table[j]["int4"])
    found: dict[int, str | None] = {layer: rising[place] for layer, place in zip(order, places, strict=True)}
    return tuple(found[j] for j in range(layers))


def perplexities() -> PaperTable:
    """Return the perplexity of our plans over that of PipeEdge's."""
    from bench.bits.mixes import OURS as MEASURED

    table, chosen = harms().harms[MEASURED], {}
    for number in PERPLEXITIES:
        plans = plans_of(number, 512, 100)
        ours, edge = plans[OURS], plans[EDGE]
        if ours and edge:
            chosen[number] = [spread_over(plan.formats, table) for plan in (ours, edge)]
    costs = measured([formats for pair in chosen.values() for formats in pair])
    figures = []
    for number, (ours_formats, edge_formats) in chosen.items():
        ratio = costs[ours_formats].perplexity / costs[edge_formats].perplexity
        of_edge, of_paper = PERPLEXITIES[number]
        figures.append(explained(name_of(PUBLISHED[number - 1]), ratio, of_paper / of_edge, ""))
    how = (
        f"Ours are of {ON_TEXT}, with as large a share of its layers in each format as in the plan for the large model,"
        " and the fewest bits for the layers of least measured harm."
    )
    return PaperTable("llm-pq-perplexity", "LLM-PQ: perplexity of the plans", f"{PAPER}, table 4",
                      "perplexity of our plan over that of PipeEdge's", how, figures)  # fmt: skip


TABLES: dict[str, Callable[[], PaperTable]] = {
    "llm-pq-clusters": clusters,
    "llm-pq-short-prompts": short_prompts,
    "llm-pq-solver": solver_seconds,
    "llm-pq-solver-plans": solver_plans,
    "llm-pq-indicators": indicator_table,
    "llm-pq-indicator-seconds": indicator_seconds,
    "llm-pq-perplexity": perplexities,
}
