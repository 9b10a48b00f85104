"""LLM-PQ's variance indicator, and files of harm."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.bits.variance import omegas
from flexengine import Engine, Lossy
from flexengine.engine.core import Core
from flexengine.guests.harms import ENCODED, MomentRecorder, measured, variance
from flexengine.lossy import BUNDLED
from flexengine.plan.cluster.file import load_harm

FITTED = Lossy("int3", calibrate=BUNDLED)


@pytest.mark.slow
def test_the_indicator_is_that_of_transformers(reader: Any) -> None:
    """By another pass, over all but the last token of each stretch, which no job reads; and it stays in the cache."""
    model = reader("llama-tied")
    with Engine(model, device="cpu", lossy=FITTED) as engine:
        found, text = variance(engine.core, engine.calibrator), engine.calibrator.text
        assert text is not None
        assert variance(engine.core, engine.calibrator) == found
    expected = omegas(model, [row[:-1] for row in text.rows])["deterministic"]
    for layer, omega in zip(found, expected, strict=True):
        assert layer == pytest.approx({name: omega[name] for name in ENCODED}, rel=1e-4)


@pytest.mark.slow
def test_experts_count_by_the_tokens_that_reach_them(reader: Any) -> None:
    """Each moment by the inputs that hooks saw; a token of 2 chosen experts of 4 reaches half of them."""
    seen: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    class Keeping(MomentRecorder):
        def _note(self, name: str, number: int, x: Tensor) -> None:
            super()._note(name, number, x)
            seen[name, number].append(x.reshape(-1, x.shape[-1]).double())

    def keep(core: Core, score: Any) -> MomentRecorder:
        recorder = Keeping(core.skeleton)
        text.watch(recorder.watching(), score)
        return recorder

    with Engine(reader("mixtral"), device="cpu", lossy=FITTED) as engine:
        text = engine.calibrator.text
        assert text is not None
        found = engine.calibrator.reading(text, keep).weighted_variances()
    tokens = max(sum(map(len, parts)) for parts in seen.values())
    experts = [name for name, variances in found.items() if len(variances) > 1]
    assert experts
    for name, variances in found.items():
        shares = []
        for number, own in enumerate(variances):
            x = torch.cat(seen[name, number])
            shares.append(len(x) / tokens)
            assert own == pytest.approx(float(x.var(correction=0)) * shares[-1], rel=1e-6)
        assert sum(shares) == pytest.approx(2 if name in experts else 1)


@pytest.mark.slow
def test_the_command_writes_what_plans_read(reader: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flexengine.shell.commands import quality

    model, file = reader("llama-tied"), tmp_path / "harm.json"
    assert quality.main([str(model), "--device", "cpu", "--harm", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:4] == ["layer", "int8", "int4", "int3"]
    assert len(shown) == 1 + 4
    with Engine(model, device="cpu", lossy=FITTED) as engine:
        harms = {
            "measured": measured(engine.core, engine.calibrator),
            "variance": variance(engine.core, engine.calibrator),
        }
    for indicator, layers in harms.items():
        table = load_harm(file, 4, (None, *ENCODED), indicator).tolist()
        assert table == [pytest.approx([0.0, *(layer[name] for name in ENCODED)], rel=1e-5) for layer in layers]
    assert json.loads(file.read_text())["model"] == model.name
    assert quality.main([str(model), "--device", "cpu", "--harm", str(file), "--save", str(tmp_path / "q.json")]) == 2
    assert "--save is for choices, but with --harm only those that are given" in capsys.readouterr().err
