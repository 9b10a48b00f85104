"""Thresholds of sparsified activations are quantiles of what transformers computes, and are measured once."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexengine import Engine, Lossy, Policy
from flexengine.engine.calibrator import Calibrator
from flexengine.errors import InvalidInput
from flexengine.guests import calibration
from flexengine.guests.calibration import Calibration
from flexengine.lossy import BUNDLED
from tests.helpers.calibrated import SPREAD

SHARES = (0.3, 0.7, 0.95)


@torch.no_grad()
def by_transformers(model: Any, rows: Any) -> list[np.ndarray]:
    """Return, by layer, the magnitudes of the activations of these rows."""
    found: list[list[np.ndarray]] = []
    hooks = []
    for number, act in enumerate(m for name, m in model.named_modules() if name.endswith((".act_fn", ".act"))):
        found.append([])
        hooks.append(act.register_forward_hook(
            lambda _, args, out, number=number: found[number].append(out.abs().numpy().ravel())))  # fmt: skip
    for row in rows:
        model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return [np.concatenate(layer) for layer in found]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
def test_thresholds_are_quantiles_of_activations(families: Any, reader: Any, family: str, own_cache: Path) -> None:
    directory = reader(family)
    with Engine(directory, lossy=Lossy(sparsify=SHARES[0])) as engine:
        text = engine.calibrator.sparse_text
        assert text is not None
        sizes = by_transformers(families(family).model, [row[:-1] for row in text.rows])
        for share in SHARES:
            engine.use(Lossy(sparsify=share))
            assert len(engine.calibrator.thresholds) == 4
            for own, threshold in zip(sizes, engine.calibrator.thresholds, strict=True):
                assert threshold == pytest.approx(np.quantile(own, share), rel=1e-2)
                assert np.mean(own < threshold) == pytest.approx(share, abs=3e-3)
    with Engine(directory, policy=SPREAD, device="sim") as engine:
        read = Calibration(text.rows).measure_magnitudes(engine.core, engine.score)
    assert read.thresholds(SHARES[-1]) == pytest.approx(
        [np.quantile(own, SHARES[-1]) for own in sizes], rel=1e-2)  # fmt: skip


def test_they_are_measured_once_for_a_text(
    reader: Any, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For all shares, weights and modes. Another text is measured for itself."""
    caplog.set_level(logging.INFO, "flexengine")
    directory, text = reader("llama"), tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number. " for number in range(4000)))
    found = []
    for lossy in (Lossy(sparsify=0.5), Lossy(sparsify=0.8), Lossy(sparsify=0.5, weights="int8"),
                  Lossy(sparsify=0.5, flash="oracle"), Lossy(sparsify=0.5, calibrate=BUNDLED),
                  Lossy(sparsify=0.5, calibrate=str(text))):  # fmt: skip
        with Engine(directory, lossy=lossy) as engine:
            engine.prepare()
            assert engine.calibrator.importances is None
            found.append([block.act.threshold for block in engine.core.opened.flash.feed_forward])
            assert found[-1] == engine.calibrator.thresholds
    assert found[1][0] > found[0][0]
    assert found[2:5] == [found[0]] * 3
    assert found[5] != found[0]
    labels = [json.loads(file.read_text())["label"] for file in cache.glob("*/prepared.json")]
    assert labels.count("magnitudes, float32") == 2


def test_the_exact_model_is_read(reader: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other switches are."""
    seen: list[Lossy] = []
    own = Calibration.measure_magnitudes

    def watched(self: Calibration, core: Any, score: Any) -> Any:
        seen.append(score.__self__.lossy)
        return own(self, core, score)

    monkeypatch.setattr(Calibration, "measure_magnitudes", watched)
    lossy = Lossy("int4", cache="int8", sparsify=0.5, flash="oracle")
    with Engine(reader("llama"), policy=Policy(2, 2), lossy=lossy) as engine:
        engine.prepare()
    assert seen == [Lossy()]


def test_a_job_with_other_thresholds_does_not_continue(
    reader: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache was cleared, and measuring again gave other numbers."""
    directory, prompts, output = reader("llama"), tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n' * 2)
    with Engine(directory, lossy=Lossy(sparsify=0.5)) as engine:
        engine.run_job(prompts, output, limit=1)
    own = Calibrator.thresholds.fget
    assert own is not None
    monkeypatch.setattr(Calibrator, "thresholds", property(lambda self: [x * 1.01 for x in own(self)]))
    with (
        Engine(directory, lossy=Lossy(sparsify=0.5)) as engine,
        pytest.raises(InvalidInput, match=r"this job began with other thresholds .* give restart=True"),
    ):
        engine.run_job(prompts, output)


def test_short_texts_are_refused(reader: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    with (
        Engine(reader("llama"), lossy=Lossy(sparsify=0.5, calibrate=str(text))) as engine,
        pytest.raises(InvalidInput, match=r"has 9 tokens; calibrating takes 1,\d\d\d; give a longer text"),
    ):
        engine.generate([{"prompt_token_ids": [5]}])
    assert calibration.ROWS == 32
