"""Bits per layer on the demo model: which harm ranks layers as their measured cost does, and what mixes of bits cost.

python -m bench.bits [layers] [mixes] [plans] [--rows 8] [--tokens 256] [--formats int3 int4] [--out bits.jsonl]

layers  One layer at a time gets encoded weights (calibrated, as jobs encode them) in transformers' own model. Its cost
        is the increase of the negative log-likelihood of the sample text, in nats per token, and the divergence from
        the exact model's probabilities, which has the same meaning and less noise. One JSON line per format: costs,
        harms as the engine measures them, errors weighted by importances, LLM-PQ's indicator with both roundings,
        Spearman's rank correlation of each with the costs, that of random orders, and that of two halves of the text,
        which shows the noise of the costs. Harms and costs are of different texts.
mixes   The engine with mixed bits, for budgets of several bits on average; choices by the engine's measure, by
        LLM-PQ's indicators and at random; the same bytes spent on the first layers, or on the KV cache. One JSON line
        per choice.
plans   `quality --harm`, `plan --cluster --harm` and `quality --layer-bits`, one after the other: two devices hold the
        layers at several bits on average; formats by measured harm, LLM-PQ's variance, a Hessian and at random, and
        the uniform format. One JSON line per indicator and average, with nll and perplexity.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import harness
from bench.bits.errors import ERRORS, weighted_errors
from bench.bits.layers import Layered
from bench.bits.mixes import OURS, Choice, choices
from bench.bits.plans import costs_of, indicators, planned
from bench.bits.variance import omegas
from bench.harness import Record
from bench.models import demo_model

FORMATS = ("int3", "int4")
AVERAGES = (3.5, 4.0, 5.0, 6.0)
COSTS = ("more", "divergence")  # both in nats per token
PARTS = ("layers", "mixes", "plans")
ORDERS = 1000  # random orders of layers
PACKAGES = ("python", "torch", "transformers", "flexengine", "highspy")


@dataclass(frozen=True)
class Case:
    """What a record measures: a part, a format or the average bits, and the text's stretches."""

    part: str
    name: str
    rows: int
    tokens: int
    bits: float | None = None


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    order = sorted(values)
    return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 + 1 for v in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    return statistics.correlation(ranks(one), ranks(other))


def by_chance(costs: Sequence[float]) -> Record:
    """Return the mean correlation of random orders with the costs, and the one that 5 % of them exceed."""
    draw = random.Random(0)
    found = sorted(spearman(draw.sample(range(len(costs)), len(costs)), costs) for _ in range(ORDERS))
    return {"mean": statistics.fmean(found), "exceeded_by_5_percent": found[int(0.95 * ORDERS)]}


def stretches(engine: Any, rows: int, tokens: int) -> list[tuple[int, ...]]:
    """Return stretches of the sample text, as `flexengine quality` takes them."""
    from flexengine.shell.commands import quality

    return quality.stretches(quality.read(None, rows, tokens), engine.core.tokenizer, None)


def harms_of(engine: Any) -> dict[str, list[dict[str, float]]]:
    """Return harms by measure, layer and format: the engine's, and LLM-PQ's, on the text of calibration."""
    from flexengine.guests.harms import measured

    ours = measured(engine.core, engine.calibrator)
    return {OURS: ours, **omegas(demo_model(), engine.calibrator.text.rows)}


# One layer at a time.


def layers(rows: int, tokens: int, formats: Sequence[str]) -> list[Record]:
    """Return a record for each format."""
    from flexengine import Engine, Lossy

    with Engine(device="cpu", lossy=Lossy("mixed", budget="100M")) as engine:
        importances = engine.calibrator.importances
        assert importances is not None
        columns = importances.columns
        model = Layered(demo_model(), stretches(engine, rows, tokens))
        every = range(len(model.layers))
        measured = {codec: [_one(model, layer, codec, columns) for layer in every] for codec in formats}
        harms = harms_of(engine)
    records = []
    for codec, found in measured.items():
        own = {name: [harm[codec] for harm in by_layer] for name, by_layer in harms.items()}
        own |= {name: [errors[k] for _, errors in found] for k, name in enumerate(ERRORS)}
        records.append(ranked(Case("layers", codec, rows, tokens), [costs for costs, _ in found], own))
    return records


def _one(
    model: Layered, layer: int, codec: str, columns: Mapping[str, Any]
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return the costs of one encoded layer, and its weighted errors."""
    from flexengine.codec.packed import CODECS, Packed

    exact = {name: weight.detach() for name, weight in model.matrices(layer)}
    forms = {name: Packed(CODECS[codec], *matrix.shape) for name, matrix in exact.items()}
    encoded = {name: form.dequantize(form.encode(exact[name], columns[name])) for name, form in forms.items()}
    costs, errors = model.costs(layer, encoded), weighted_errors(exact, encoded, columns)
    print(f"{codec}, layer {layer}: costs {costs}, errors {errors}", flush=True)
    return costs, errors


def ranked(case: Case, costs: Sequence[Sequence[tuple[float, float]]], harms: Mapping[str, Sequence[float]]) -> Record:
    """Return the record of a format.

    Args:
        costs: by layer and stretch, the increase and the divergence.
        harms: by measure and layer.
    """
    more, divergence = ([statistics.fmean(pair[k] for pair in layer) for layer in costs] for k in (0, 1))
    errors = [statistics.stdev(pair[0] for pair in layer) / len(layer) ** 0.5 for layer in costs]
    halves = {what: _halves([[pair[k] for pair in layer] for layer in costs]) for k, what in enumerate(COSTS)}
    correlations = {
        what: {name: spearman(harm, measured) for name, harm in harms.items()}
        | {"random": by_chance(measured), "halves of the text": halves[what]}
        for what, measured in zip(COSTS, (more, divergence), strict=True)
    }
    return {
        **harness.header("bits", case, [{"versions": _versions()}]),
        "spearman": correlations | {"divergence with more": spearman(divergence, more)},
        "more": more, "more_error": errors, "divergence": divergence, "harms": dict(harms),
    }  # fmt: skip


def _halves(costs: Sequence[Sequence[float]]) -> float:
    """Return the correlation of the costs on every second stretch with those on the others: no harm can be expected to
    correlate with the costs much better. costs: by layer and stretch."""
    one, other = ([statistics.fmean(layer[start::2]) for layer in costs] for start in (0, 1))
    return spearman(one, other)


def _versions() -> Record:
    return {name: version for name, version in harness.versions().items() if name in PACKAGES}


# Mixed bits.


def mixes(rows: int, tokens: int, averages: Sequence[float], seeds: int) -> list[Record]:
    """Measure all choices, and return a record for each."""
    from flexengine import Engine, Lossy
    from flexengine.guests.bits import Bits
    from flexengine.lossy import BUNDLED
    from flexengine.shell.commands import quality

    with Engine(device="cpu", lossy=Lossy("mixed", budget="100M")) as engine:
        bits, harms = Bits(engine.core, engine.calibrator), harms_of(engine)
    wanted = list(choices(bits, harms, averages, seeds))
    for name in ("int3", "int4", "int8"):
        nbytes = bits.rest + sum(layer[name] for layer in bits.layers)
        wanted.append(Choice("uniform", float(name.removeprefix("int")), nbytes,
                             Lossy(name, calibrate=BUNDLED if name != "int8" else None)))  # fmt: skip
    for one in [c for c in wanted if (c.name, c.bits) in ((OURS, 5.0), ("uniform", 4.0))]:
        wanted.append(replace(one, name=f"{one.name}, int4 cache", lossy=replace(one.lossy, cache="int4")))
    unique = list(dict.fromkeys(choice.lossy for choice in wanted))
    text = quality.read(None, rows, tokens)
    costs = {}
    for cost in quality.measure(lambda lossy: Engine(device="cpu", lossy=lossy), text, unique):
        costs[cost.lossy] = cost
        print(quality.brief(cost), flush=True)
    return [_mix(choice, costs[choice.lossy], rows, tokens) for choice in wanted]


def _mix(choice: Choice, cost: Any, rows: int, tokens: int) -> Record:
    weights = choice.lossy.weights
    return {
        **harness.header("bits", Case("mixes", choice.name, rows, tokens, choice.bits), [{"versions": _versions()}]),
        "budget": choice.budget, "weights": list(weights) if isinstance(weights, tuple) else weights,
        "cache": choice.lossy.cache, "nll": cost.nll, "more": cost.more, "error": cost.error, "same": cost.same,
        "weight_bytes": cost.weights, "kv_token_bytes": cost.cache,
    }  # fmt: skip


# Plans over two devices.


def plans(rows: int, tokens: int, averages: Sequence[float], model: str | None = None) -> list[Record]:
    """Return a record for each indicator and average number of bits. model: None is the demo model."""
    found = indicators(model)
    chosen = [(bits, name, formats) for bits in averages for name, formats in planned(found, model, bits)]
    costs = costs_of(model, [formats for _, _, formats in chosen], rows, tokens)
    return [
        {
            **harness.header("bits", Case("plans", name, rows, tokens, bits), [{"versions": _versions()}]),
            "weights": list(formats), "nll": costs[formats].nll, "more": costs[formats].more,
            "error": costs[formats].error, "perplexity": costs[formats].perplexity,
            "exact_perplexity": costs[None].perplexity, "seconds": dict(found.seconds).get(name),
        }
        for bits, name, formats in chosen
    ]  # fmt: skip


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description="bits per layer: harms against measured costs, and mixes")
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=harness.at_least_one, default=8, help="stretches of text (default 8)")
    parser.add_argument("--tokens", type=harness.at_least_one, default=256, help="tokens of each (default 256)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--averages", nargs="+", type=float, default=list(AVERAGES))
    parser.add_argument("--seeds", type=int, default=2, help="random choices of a budget (default 2)")
    parser.add_argument("--out", default="bits.jsonl", help="file for the records, under bench/results/")
    args = parser.parse_args()
    parts: dict[str, Callable[[], list[Record]]] = {
        "layers": lambda: layers(args.rows, args.tokens, args.formats),
        "mixes": lambda: mixes(args.rows, args.tokens, args.averages, args.seeds),
        "plans": lambda: plans(args.rows, args.tokens, args.averages),
    }
    for part in args.parts:
        for record in parts[part]():
            harness.emit(record, args.out)


if __name__ == "__main__":
    main()
