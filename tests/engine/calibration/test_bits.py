"""Weights `mixed`: the bits fit the budget at the least harm, and a job keeps them."""

import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, SamplingParams
from flexengine.errors import InvalidInput, size_within
from flexengine.guests import harms as harms_of_layers
from flexengine.guests.calibration import ROWS
from flexengine.guests.harms import CONTEXT, PROBE_ROWS, measured
from flexengine.lossy import BUNDLED
from flexengine.shell.commands import plan, quality
from flexengine.shell.commands.messages import DONE, REFUSED
from flexengine.shell.commands.run import main
from tests.helpers.calibrated import SPREAD
from tests.helpers.families import NEW, prompts_of, reference
from tests.helpers.listening import Heard
from tests.helpers.rounded import rounded

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": prompt} for prompt in prompts_of(601)]
FORMATS = (None, "int8", "int4", "int3")


@pytest.fixture(scope="module")
def model(reader: Any) -> Path:
    directory: Path = reader("llama-tied")
    return directory


@pytest.fixture(scope="module")
def sizes(model: Path) -> Any:
    """Bytes of a layer by format, of all other weights, and of the exact model."""
    layer = {}
    for b in FORMATS:
        with Engine(model, device="sim", lossy=Lossy(weights=(b,) * 4)) as engine:
            layer[b] = sum(t.held_bytes for t in engine.facts.layers[0])
            rest = sum(t.held_bytes for t in engine.facts.tensors) - 4 * layer[b]
    with Engine(model, device="sim") as engine:
        return SimpleNamespace(layer=layer, rest=rest, exact=sum(t.held_bytes for t in engine.facts.tensors))


def mixed(budget: int) -> Lossy:
    return Lossy(weights="mixed", budget=budget)


@pytest.mark.parametrize("held", [("int8", "int4", "int3", "int3"), (None, "int8", "int4", "int3")])
def test_the_least_harm_within_the_budget(model: Path, sizes: Any, held: Any) -> None:
    """Of all 256 choices; and the tokens of transformers with these weights, from several tiers."""
    budget = sizes.rest + sum(sizes.layer[b] for b in held)
    with Engine(model, policy=SPREAD, device="sim", lossy=mixed(budget)) as engine:
        harms = [layer["int3"] for layer in measured(engine.core, engine.calibrator)]
        found = [r.token_ids for r in engine.generate(PROMPTS, GREEDY)]
        formats, importances = engine.lossy.weights, engine.calibrator.importances
        assert sum(t.held_bytes for t in engine.facts.tensors) <= budget
    assert isinstance(formats, tuple)
    columns = importances.columns if importances is not None else None  # None if no format is fitted
    squared_steps = {None: 0.0, "int8": (7 / 255) ** 2, "int4": (7 / 15) ** 2, "int3": 1.0}
    assert min(harms) > 0

    def harm(choice: Any) -> float:
        return float(sum(harms[j] * squared_steps[b] for j, b in enumerate(choice)))

    fitting = [c for c in product(FORMATS, repeat=4) if sizes.rest + sum(sizes.layer[b] for b in c) <= budget]
    assert harm(formats) == pytest.approx(min(map(harm, fitting)), rel=1e-3)
    assert found == reference(rounded(model, formats, columns), prompts_of(601))


def test_harms_are_measured_with_one_layer_encoded(model: Path) -> None:
    """By transformers: half the mean square of the changes of log probabilities, with embedding and head in 8 bits."""
    with Engine(model, device="sim", lossy=mixed(10**6)) as engine:
        found = [layer["int3"] for layer in measured(engine.core, engine.calibrator)]
        assert engine.calibrator.importances is not None
        assert engine.calibrator.text is not None
        columns, rows = engine.calibrator.importances.columns, engine.calibrator.text.rows[:: ROWS // PROBE_ROWS]

    def logprobs(*codecs: str | None) -> torch.Tensor:
        changed, ids = rounded(model, codecs, columns), torch.tensor(rows)
        with torch.no_grad():
            scores = changed(ids).logits[:, CONTEXT - 1 : -1].double().log_softmax(-1)
        return scores.gather(2, ids[:, CONTEXT:, None])

    exact = logprobs(None, None, None, None)
    for layer, harm in enumerate(found):
        changed = logprobs(*("int3" if j == layer else None for j in range(4)))
        assert harm == pytest.approx(float((changed - exact).square().mean() / 2), rel=1e-3)


def test_an_interrupted_measurement_continues(model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the importances, the exact scores and those of two layers; the exact scores are computed again."""
    real, calls = harms_of_layers.check_read, list[int]()

    def counted(results: Any) -> None:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        real(results)

    monkeypatch.setattr(harms_of_layers, "check_read", counted)
    with Engine(model, device="sim", lossy=mixed(150_000)) as engine, pytest.raises(KeyboardInterrupt):
        engine.choose_bits()
    calls[:] = [0] * 10
    with Engine(model, device="sim", lossy=mixed(150_000)) as engine:
        engine.choose_bits()
    assert len(calls) == 10 + 1 + 2


def test_budgets_that_are_too_small_or_hold_the_exact_model(model: Path, sizes: Any, families: Any) -> None:
    least = sizes.rest + 4 * sizes.layer["int3"]
    with pytest.raises(
        InvalidInput, match=f"{size_within(least - 1, up=False)}, but the weights of llama-tied take at least"
    ):
        Engine(model, device="sim", lossy=mixed(least - 1))
    heard = Heard()
    with Engine(model, device="sim", lossy=mixed(sizes.exact), progress=heard) as engine:
        assert [r.token_ids for r in engine.generate(PROMPTS, GREEDY)] == families("llama-tied").expected
        assert engine.lossy == Lossy()
    assert [line for line in heard.messages if "weights stay exact: they take" in line]
    with Engine(model, device="sim", lossy=mixed(least)) as engine:
        engine.choose_bits()
        assert engine.lossy == Lossy(weights=("int3",) * 4, calibrate=BUNDLED)
    with Engine(model, device="sim", lossy=mixed(sizes.exact - 1)) as engine:  # embedding and head in 8 bits suffice
        engine.choose_bits()
        assert engine.lossy == Lossy(weights=(None,) * 4)
    with Engine(model, device="sim", lossy=Lossy("mixed", compute="int8", budget=sizes.exact)) as engine:
        engine.choose_bits()
        assert engine.lossy == Lossy(weights=("int8",) * 4, compute="int8")


def test_a_model_without_a_tokenizer(families: Any) -> None:
    with pytest.raises(InvalidInput, match="no tokenizer"):
        Engine(families("llama-tied").directory, device="sim", lossy=mixed(10**6))


@pytest.mark.slow
def test_a_job_goes_on_with_its_bits(model: Path, sizes: Any, own_cache: Path, tmp_path: Path, capsys: Any) -> None:
    """With the same budget, also after the cache was emptied; or with the file of its bits; not with other bits."""
    source, file = tmp_path / "in.jsonl", tmp_path / "bits.json"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n' * 4)
    words = [str(source), "--model", str(model), "--max-tokens", "2", "--device", "sim",
             "--output", str(tmp_path / "out.jsonl")]  # fmt: skip
    budget = str(sizes.rest + 2 * (sizes.layer["int8"] + sizes.layer["int3"]))
    text = tmp_path / "text.txt"
    text.write_text("some words of a text. " * 40)
    measured = ["--weights", "mixed", "--budget", budget, "--save-bits", str(file), "--rows", "2", "--tokens", "40"]
    assert quality.main([str(model), "--device", "sim", "--text", str(text), *measured]) == DONE
    out = capsys.readouterr()
    assert f"--weights mixed --budget {budget}" in out.out
    assert main([*words, "--weights", "mixed", "--budget", budget, "--limit", "1"]) == DONE
    assert "bits per layer: " in capsys.readouterr().err
    assert main([*words, "--weights", "mixed", "--budget", "10M", "--limit", "2"]) == REFUSED
    assert "weights: was " in capsys.readouterr().err
    shutil.rmtree(own_cache / "prepared")
    assert main([*words, "--weights", "mixed", "--budget", budget, "--limit", "2"]) == DONE
    assert main([*words, "--layer-bits", str(file), "--calibrate"]) == DONE
    assert "2 of 4 rows were done before" in capsys.readouterr().err


def test_commands_that_cannot_choose_bits(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert plan.main([str(model), "--weights", "mixed", "--budget", "1M"]) == REFUSED
    assert "quality --weights mixed --budget 1M --save-bits bits.json" in capsys.readouterr().err
    assert quality.main([str(model), "--weights", "int4", "--save-bits", str(tmp_path / "x.json")]) == REFUSED
    assert "give --weights mixed, too" in capsys.readouterr().err
    assert quality.main([str(model), "--weights", "int4", "--budget", "1M"]) == REFUSED
    assert "no choice has mixed weights" in capsys.readouterr().err
