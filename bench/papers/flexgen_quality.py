"""FlexGen's accuracy table with a small model, and its seven HELM scenarios as a plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.models import demo_model
from bench.papers import flexgen_jobs as jobs
from bench.papers.flexgen_rates import PAPER
from bench.papers.tables import Figure, PaperTable, far
from flexengine import Engine
from flexengine.lossy import Lossy
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.shell.commands.quality import measure, read

# Perplexity on WikiText of OPT-30B and OPT-175B, divided by the exact model's: (4 bits, 4 bits and 10 % of the values).
PERPLEXITY = {"OPT-30B": (12.90 / 12.72, 12.90 / 12.72), "OPT-175B": (10.94 / 10.82, 10.94 / 10.82)}
CHOICES = {
    "4-bit weights and cache": Lossy(weights="int4", cache="int4"),
    "10 % of the values": Lossy(sparse_attention=0.1),
    "4 bits and 10 % of the values": Lossy(weights="int4", cache="int4", sparse_attention=0.1),
}
ROWS, TOKENS = 4, 256  # stretches of text, and tokens of each
TRIALS = 3  # train trials of a scenario: FlexGen's runner repeats each instance with as many sets of examples
PERTURBED = 3  # an MMLU question with its two perturbed versions (data_augmentation=canonical)


@dataclass(frozen=True)
class Scenario:
    """A HELM scenario as FlexGen ran it.

    Attributes:
        instances: of the scenario, from FlexGen's script.
        padded: tokens of a padded prompt. FlexGen pads to a multiple of 256; which one is assumed.
        new: most new tokens, HELM's limit for the scenario.
        minutes: that FlexGen took, from the same script.
        versions: prompts of an instance.
    """

    instances: int
    padded: int
    new: int
    minutes: float
    versions: int = TRIALS


# FlexGen's repository, apps/helm_passed_30b.sh (docs/machines.md).
SCENARIOS = {
    "WikiFact, plaintiff": Scenario(96, 256, 8, 10),
    "WikiFact, instance of": Scenario(850, 256, 8, 55),
    "MMLU, abstract algebra": Scenario(100, 512, 1, 31, TRIALS * PERTURBED),
    "MMLU, US foreign policy": Scenario(100, 512, 1, 33, TRIALS * PERTURBED),
    "synthetic reasoning, pattern match": Scenario(515, 256, 50, 118),
    "synthetic reasoning, natural language": Scenario(515, 512, 20, 100),
    "XSUM": Scenario(518, 1984, 64, 902),
}


def helm() -> PaperTable:
    """Return the planned hours of the seven scenarios with OPT-30B."""
    figures, total = list[Figure](), 0.0
    for name, one in SCENARIOS.items():
        work = Workload({(one.padded, one.new): one.instances * one.versions})
        best = search(jobs.facts("30B"), jobs.machine(), work).best
        hours = best.total_seconds / 3600
        total += hours
        why = partial(_why_scenario, one, hours, best.busy["device"] / best.seconds)
        figures.append(far(Figure(name, hours, one.minutes / 60), why))
    figures.append(far(Figure("all seven", total, 21.0), lambda: _why_all(total)))
    return PaperTable(
        "flexgen-helm", "FlexGen: seven HELM scenarios with OPT-30B on a T4", f"{PAPER}, and the comments"
        " of its script", "hours", "The planner's prediction for t4-16gb_208gb_ssd, with loading. Numbers of prompts"
        " are those of FlexGen's script, three trials of each; prompts count as padded, with lengths assumed as"
        " multiples of 256, and all new tokens up to HELM's limit.", figures,
    )  # fmt: skip


def _why_scenario(one: Scenario, hours: float, device: float) -> str:
    """Return why a scenario takes another time than FlexGen's."""
    tokens = one.instances * one.versions * one.padded
    return (f"FlexGen took {60 * one.minutes / (tokens / 1000):.2g} s per 1,000 padded prompt tokens and the plan"
            f" {3600 * hours / (tokens / 1000):.2g}, in which the GPU computes {device:.0%} of the time; the script's"
            " minutes also hold HELM's own work and the start")  # fmt: skip


def _why_all(total: float) -> str:
    xsum = SCENARIOS["XSUM"]
    return (f"XSUM is {xsum.minutes / 60:.0f} of the 21 hours: FlexGen's block there has 32 sequences, the plan's more,"
            f" with one gpu_batch entering per sweep; the plan takes {total:.1f} hours in all")  # fmt: skip


def quality() -> PaperTable:
    """Return the perplexity of lossy choices divided by the exact model's, measured with SmolLM2-135M."""
    model = str(demo_model())
    text = read(None, ROWS, TOKENS)
    exact, *costs = measure(lambda lossy: Engine(model, lossy=lossy, device="cpu"), text, list(CHOICES.values()))
    figures = []
    for name, cost in zip(CHOICES, costs, strict=True):
        which = {"4-bit weights and cache": 0, "4 bits and 10 % of the values": 1}.get(name)
        ratio = cost.perplexity / exact.perplexity
        if which is None:
            figures.append(Figure(name, ratio))
            continue
        for known, published in PERPLEXITY.items():
            why = partial(_why_quality, ratio, published[which])
            figures.append(far(Figure(f"{name}, beside {known}", ratio, published[which]), why))
    return PaperTable(
        "flexgen-quality", "FlexGen: 4 bits, sparse values, and both", f"{PAPER}, WikiText", "perplexity over"
        " the exact model's", f"Measured with SmolLM2-135M on {ROWS} stretches of {TOKENS} tokens of the bundled text,"
        " by the functions of `flexengine quality`, for want of OPT-30B.", figures,
    )  # fmt: skip


def _why_quality(ratio: float, published: float) -> str:
    return (f"the model has 135 million parameters, its checkpoint 4 bits already, and contexts are at most {TOKENS}"
            f" tokens; which of these counts is not measured here: {100 * (ratio - 1):.1f} % of perplexity here,"
            f" {100 * (published - 1):.1f} % in the paper")  # fmt: skip


TABLES: dict[str, Callable[[], PaperTable]] = {"flexgen-helm": helm, "flexgen-quality": quality}
