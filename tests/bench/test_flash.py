"""bench.flash: bytes of the ladder, planted activity against transformers' own activations, and rates of a disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bench.flash import __main__ as flash
from bench.flash import disk, ladder
from bench.flash.disk import Disk
from bench.flash.ladder import STEPS, Ladder
from bench.flash.planted import MARGIN, SHAPES, PlantedShape, plant_predictors
from bench.models import make
from flexengine import Engine, Lossy
from flexengine.guests.flash import predictors as trained
from flexengine.guests.flash.predictors import Trained
from flexengine.guests.flash.reader import RecordReader
from flexengine.model.checkpoint import read_checkpoint
from flexengine.tier.memory import aligned_buffer

TINY = SHAPES["opt-tiny"]
TOKENS, SHARE = 40, 0.2


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(TINY, tmp_path_factory.mktemp("planted"), workers=1)


@pytest.fixture
def climbing(planted: Path) -> Ladder:
    """The ladder of the tiny shape."""
    plant_predictors(planted, TINY)
    return ladder.ladder_of(planted, TINY, TOKENS, SHARE, most=TINY.layers)


def predictors(model: Path, shape: PlantedShape) -> Trained:
    """The planted predictors, as an engine loads them."""
    plant_predictors(model, shape)
    with Engine(model, lossy=Lossy(flash="predictors")) as engine:
        assert engine.core.opened.flash.trained is not None
        return engine.core.opened.flash.trained


# ---- planted activity


@torch.no_grad()
def test_activity_is_what_was_planned(planted: Path) -> None:
    """Sequences of random tokens: the mean share, few frequent neurons, and the sets that the predictors name."""
    model = transformers.AutoModelForCausalLM.from_pretrained(planted, dtype=torch.float32).eval()
    seen: dict[int, torch.Tensor] = {}
    for j, layer in enumerate(model.model.decoder.layers):
        layer.fc1.register_forward_hook(lambda _, args, out, j=j: seen.update({j: out.reshape(-1, TINY.ffn)}))
    rows, length = 4, TINY.positions - 16
    model(torch.randint(5, TINY.vocab, (rows, length), generator=torch.Generator().manual_seed(1)))
    codes = model.model.decoder.embed_positions.weight[2 : 2 + length]
    for j, layer in enumerate(predictors(planted, TINY).known):
        true, named = seen[j] > 0, layer.predictor.active(codes).repeat(rows, 1)
        assert float(true.float().mean()) == pytest.approx(TINY.active, rel=0.4)  # codes of 240 positions, correlated
        # Layer norm and noise change scores by 0.11 (standard deviation) in this narrow model, which the margin covers.
        assert float((true & ~named).sum() / true.sum()) < 0.02
        assert float((seen[j][named] > -2 * MARGIN).float().mean()) > 0.97
        often = true.float().mean(0).sort(descending=True).values
        assert float(often[: TINY.ffn // 10].sum() / often.sum()) > 0.3


def test_successive_codes_are_alike(planted: Path) -> None:
    """An autoregressive process: two codes d tokens apart have the correlation kept^d."""
    codes = ladder.read_tensor(read_checkpoint(planted), "model.decoder.embed_positions.weight")[:, : TINY.code].float()
    for apart in (1, 4):
        found = float((codes[apart:] * codes[:-apart]).mean() / (codes**2).mean())
        assert found == pytest.approx(TINY.kept**apart, abs=0.03)


def test_frequencies_follow_the_power_law() -> None:
    """By the thresholds of a large layer: P(score > threshold) falls as rank^-skew, and its mean is `active`."""
    bound = TINY.thresholds(1 << 16, torch.Generator().manual_seed(0)).double()
    often = torch.special.erfc(bound / 2**0.5).mul(0.5).sort(descending=True).values
    assert float(often.mean()) == pytest.approx(TINY.active, rel=0.01)
    assert float(often[4095] / often[16383]) == pytest.approx(4**TINY.skew, rel=0.01)


# ---- ladder


def sets(found: Ladder) -> list[list[set[int]]]:
    """The predicted neurons of each measured layer and token."""
    return [[set(np.flatnonzero(token).tolist()) for token in layer.trace[0]] for layer in found.layers]


def test_bytes_are_those_of_the_arithmetic(climbing: Ladder) -> None:
    steps = ladder.climbed(climbing, turns=1)
    assert list(steps) == list(STEPS)
    for step, each in steps.items():
        assert each["bytes"] == each["arithmetic"] > 0, step
    record, k = climbing.layers[0].bundle.form.nbytes, climbing.window
    named = [len(token) for layer in sets(climbing) for token in layer[k:]]
    new = [len(layer[t] - set().union(*layer[t - k : t])) for layer in sets(climbing) for t in range(k, TOKENS)]
    assert steps["predictor"]["bytes"] == round(TINY.layers * record * np.mean(named))
    assert steps["window"]["bytes"] == steps["bundles"]["bytes"] == round(TINY.layers * record * np.mean(new))
    assert steps["resident"]["bytes"] == TINY.layers * TINY.ffn * TINY.hidden * 2 * 2
    assert steps["naive"]["bytes"] == sum(TINY.nbytes(group) for group in TINY.groups())
    assert steps["window"]["requests"] > steps["bundles"]["requests"]


def test_the_window_is_the_longest_that_fits(climbing: Ladder) -> None:
    def largest(k: int) -> int:
        return max(len(set().union(*layer[t : t + k])) for layer in sets(climbing) for t in range(TOKENS - k + 1))

    assert largest(climbing.window) <= climbing.room == int(SHARE * TINY.ffn) < largest(climbing.window + 1)
    with pytest.raises(ValueError, match=r"more than the share of 1\.0%"):
        ladder.window_of([layer.trace for layer in climbing.layers], 0.01)


def test_halves_are_the_bytes_of_records(climbing: Ladder) -> None:
    """Two reads bring as many bytes as one, each from its half of the file."""
    layer, numbers = climbing.layers[0], np.array([0, 5, TINY.ffn - 1])
    half = layer.halves.form.nbytes
    data = layer.bundle.path.read_bytes()
    parts = ladder.in_halves(layer, numbers)
    target = aligned_buffer(len(parts) * half).view(-1, half)
    with RecordReader([layer.halves], gap=0) as reader:
        nbytes = reader.read(layer.halves, torch.from_numpy(parts), target, torch.arange(len(parts)))
    assert nbytes == len(numbers) * layer.bundle.form.nbytes
    assert target.numpy().tobytes() == b"".join(data[n * half : (n + 1) * half] for n in parts)
    assert [int(n) * half * 2 // len(data) for n in parts] == [0, 0, 0, 1, 1, 1]


def test_faults_of_a_ladder() -> None:
    good = {step: {"seconds": [5.0 - i], "bytes": 7, "arithmetic": 7} for i, step in enumerate(STEPS)}
    assert ladder.faults(good) == []
    wrong = {**good, "window": {"seconds": [3.0], "bytes": 8, "arithmetic": 7}}
    assert ladder.faults(wrong) == ["window: 8 bytes, not 7", "window takes 3 s, predictor 3 s"]


# ---- disk, and the comparison of sides


def test_rates_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READ", 1 << 20)
    monkeypatch.setattr(disk, "THREADS", (1, 4))
    with disk.random_file(tmp_path, 1 / 16) as path:
        assert path.stat().st_size == 64 << 20
        found = disk.measure(Disk(path, np.random.default_rng(0)), disk.Case(16), turns=1)
    assert {name: list(by) for name, by in found.items()} == {"rates": [1, 4], "bundled": [1, 4], "gaps": [16, 32]}
    assert all(value > 0 for by in found.values() for value in by.values())
    assert not path.exists()


def test_drawn_records_rise_and_have_no_neighbours(tmp_path: Path) -> None:
    drawn = Disk(tmp_path, np.random.default_rng(0)).draw(100, 1000, every=2)
    assert len(drawn) == 100
    assert int(np.diff(drawn).min()) >= 2
    assert 0 <= drawn[0] < drawn[-1] < 1000


def test_requests_of_rows() -> None:
    found = flash.requests(8, 512)
    assert [len(row.prompt_token_ids) for row in found] == [8, 104, 32, 128, 56, 152, 80, 176]
    assert [len(row.prompt_token_ids) for row in flash.requests(3, 512)] == [8, 56, 32]
    assert all(5 <= token < 512 for row in found for token in row.prompt_token_ids)
    assert {row.max_tokens for row in found} == {flash.NEW}
    more = [len(row.prompt_token_ids) for row in flash.requests(40, 512)]
    assert sorted(more) == list(range(8, 8 + 40 * 12, 12))


@pytest.mark.usefixtures("own_cache")
def test_planted_predictors_are_found(tmp_path: Path) -> None:
    model = make(TINY, tmp_path, workers=1)
    files = sorted(model.glob("*.safetensors"))
    assert trained.find(files) is None
    planting = plant_predictors(model, TINY)
    assert trained.find(files) == planting == plant_predictors(model, TINY)
