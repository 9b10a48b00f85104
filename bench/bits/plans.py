"""Plans over two devices, chosen by each indicator of harm, and what their formats cost on real text.

The devices hold the layers at some bits on average and no more. So `flexengine plan --cluster --harm` with a large
theta chooses the least harm that fits, and its strategy's formats are measured as `quality --layer-bits` does.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.bits.hessian import hessian_omegas
from bench.bits.mixes import OURS, Harms, random_harms
from bench.bits.variance import omegas

VARIANCE, HESSIAN, RANDOM, UNIFORM = "variance", "Hessian", "random", "uniform"
THETA = 1e4  # seconds that the harm of int4 in all layers is worth: harm alone decides
ALLOWED = "int8-weights,int4-weights,int3-weights"
Formats = tuple[str | None, ...]


@dataclass(frozen=True)
class Indicators:
    """Harms of a model, by the name of their indicator, the directory of its checkpoint, and seconds.

    Attributes:
        file: content of the file that `flexengine quality --harm` writes.
        harms: all indicators, by layer and format.
        seconds: of the passes of transformers' own model over the calibration text, by indicator.
    """

    directory: Path
    file: dict[str, Any]
    harms: Mapping[str, Harms]
    seconds: Mapping[str, float]


def indicators(model: str | None = None) -> Indicators:
    """Return the indicators of a model whose layers are `model.model.layers`. model: None is the demo model.

    The measured harms and the variance are those of `flexengine quality --harm`, from the cache if it has them.
    """
    from flexengine import Engine, Lossy
    from flexengine.lossy import BUNDLED
    from flexengine.shell.commands.quality_harm import harm_of

    with Engine(model, device="cpu", lossy=Lossy("int3", calibrate=BUNDLED)) as engine:
        file = harm_of(engine)
        directory, text = engine.core.source.directory, engine.calibrator.text
    assert text is not None
    seconds, began = {}, time.perf_counter()
    omegas(directory, text.rows)
    seconds[VARIANCE], began = time.perf_counter() - began, time.perf_counter()
    hessian = hessian_omegas(directory, text.rows)
    seconds[HESSIAN] = time.perf_counter() - began
    harms = {OURS: file["layers"], VARIANCE: file["variance"], HESSIAN: hessian,
             RANDOM: random_harms(file["layers"], 0)}  # fmt: skip
    return Indicators(directory, file, harms, seconds)


def cluster_json(model: str | None, bits: float) -> dict[str, Any]:
    """Return a cluster file of two devices whose memory holds half of the layers each at `bits` on average, with the
    KV cache of one sequence of 64 tokens, and nothing more."""
    from flexengine import shipped
    from flexengine.lossy import Lossy
    from flexengine.plan.cluster import file
    from flexengine.plan.cluster.costs import ClusterTask, Costs
    from flexengine.plan.cluster.job import Model, Shape, assumed_harm
    from flexengine.plan.stages import FORMATS
    from flexengine.worker.open_model import open_model

    made = {
        "types": {"small": {"memory": "1TiB", "flops": 1e11, "bandwidth": 1e10, "kind": "cpu"}},
        "devices": [{"type": "small", "name": f"small-{k}"} for k in (1, 2)],
        "links": {"within": {"bandwidth": 1e9}},
    }
    opened, facts = open_model(shipped.find("models", model) if model else None, "auto", "cpu", weights=False), {}
    for form in FORMATS:
        opened.use(Lossy(weights=form))
        facts[form] = opened.facts
    held = Model(facts)
    cluster = file.from_json(made, "cluster")
    task = ClusterTask(cluster, {"cpu": held}, _job(), FORMATS, assumed_harm(held, FORMATS))
    numbers = Costs(task).numbers(cluster.devices, Shape(1, 1, 1))
    column = {form: c for c, form in enumerate(FORMATS)}
    below, above = ("int3", "int4") if bits <= 4 else ("int4", "int8")
    low, high = float(below[3:]), float(above[3:])
    share, half = (bits - low) / (high - low), (numbers.units + 1) // 2
    for j, units in enumerate((numbers.classes[:half], numbers.classes[half:])):
        a, b = (sum(numbers.memory[j, k, column[form]] for k in units) for form in (below, above))
        made["devices"][j]["memory"] = int(numbers.fixed_memory[j] + a + share * (b - a)) + 1  # type: ignore[index]
    return made


def _job() -> Any:
    from bench.cluster.cases import uniform_job

    return uniform_job(1, 32, 32)


def planned(found: Indicators, model: str | None, bits: float) -> Iterator[tuple[str, Formats]]:
    """Yield each indicator's name and the formats of the layers that `flexengine plan --cluster --harm` chooses by it,
    then those of whole bits without an indicator, if there are such."""
    from flexengine.plan.stages import Strategy
    from flexengine.shell.commands import plan

    with tempfile.TemporaryDirectory() as folder:
        cluster, harm, strategy = (Path(folder) / name for name in ("cluster.json", "harm.json", "strategy.json"))
        cluster.write_text(json.dumps(cluster_json(model, bits)))
        for name, table in found.harms.items():
            own = found.file if name in (OURS, VARIANCE) else {"layers": table}
            harm.write_text(json.dumps(own))
            theta = THETA / sum(layer["int4"] for layer in table)
            words = [*([model] if model else []), "--cluster", cluster, "--harm", harm, "--allow", ALLOWED, "--theta",
                     theta, "--rows", 1, "--prompt-tokens", 32, "--max-tokens", 32, "--batch", 1, "--save", strategy,
                     "--quiet", "--json", *(["--indicator", VARIANCE] if name == VARIANCE else [])]  # fmt: skip
            assert _quietly(plan.main, [str(word) for word in words]) == 0
            yield name, Strategy.load(str(strategy)).weights
    if bits in (3, 4, 8):
        yield UNIFORM, (f"int{bits:.0f}",) * len(found.file["layers"])


def _quietly(main: Any, words: list[str]) -> int:
    """Return the status of a command, whose output is dropped."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        return int(main(words))


def costs_of(model: str | None, chosen: Sequence[Formats], rows: int, tokens: int) -> dict[Formats | None, Any]:
    """Return what formats of layers cost on the sample text (quality_choices.LossyCost), by formats; None is the exact
    model. Each is measured once."""
    from flexengine import Engine, Lossy
    from flexengine.lossy import BUNDLED, EXACT
    from flexengine.shell.commands import quality

    plain = {formats: Lossy(weights=formats) for formats in chosen}
    switches = {formats: replace(one, calibrate=BUNDLED) if one.fitted else one for formats, one in plain.items()}
    text = quality.read(None, rows, tokens)
    measured = {c.lossy: c for c in quality.measure(lambda lossy: Engine(model, device="cpu", lossy=lossy), text,
                                                    list(dict.fromkeys(switches.values())))}  # fmt: skip
    return {None: measured[EXACT]} | {formats: measured[lossy] for formats, lossy in switches.items()}
