"""Training through the engine: inputs and active neurons are those of transformers, and other models are refused."""

import string
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.guests.flash import traces, training
from flexengine.guests.flash.traces import TraceRecorder
from flexengine.guests.flash.training import Settings, TrainingText, cut, divide, predictors, sparse_blocks
from tests.helpers.relu import CONTEXT, LAYERS, NEURONS, WIDTH, make_relu
from tests.helpers.tokenizers import byte_tokenizer

TOKENS = CONTEXT - 1  # computed tokens of a stretch
CONTENT = " ".join(f"{word}{number}" for number, word in enumerate(string.ascii_letters * 8))
POLICIES = {
    "resident": Policy(gpu_batch_size=4, num_gpu_batches=2),
    "streamed": Policy(gpu_batch_size=3, num_gpu_batches=2, weights=(0.3, 0.3, 0.4), cache=(0.4, 0.3, 0.3)),
    "one": Policy(gpu_batch_size=1, num_gpu_batches=1, weights=(0.0, 0.0, 1.0)),
}


def text(stretches: int = 12) -> TrainingText:
    return cut("a text", CONTENT, byte_tokenizer(), CONTEXT, stretches * TOKENS)


@torch.no_grad()
def by_transformers(model: Any, stretches: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of fc1 and active neurons of each layer, [stretches, tokens, ...]."""
    found: list[Any] = []
    hooks = [
        layer.fc1.register_forward_hook(lambda _, args, out: found.append((args[0].clone(), out > 0)))
        for layer in model.model.decoder.layers
    ]
    model(torch.tensor(stretches))
    for hook in hooks:
        hook.remove()
    shape = len(stretches), TOKENS, -1
    return [(x.view(shape), active.view(shape)) for x, active in found]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", [LAYERS, traces.IN_MEMORY])  # one byte each: on disk
def test_recorded_is_what_transformers_computes(
    policy: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "IN_MEMORY", memory)
    model, read = make_relu(tmp_path), text()
    expected = by_transformers(model, read.stretches)
    with Engine(tmp_path, device="sim", policy=POLICIES[policy], prefix_sharing=False) as engine:
        engine.planner.prefill_tokens = TOKENS
        blocks = [block for block in sparse_blocks(engine.core) if block]
        with closing(TraceRecorder(blocks, read.stretches, tmp_path)) as recorder:
            with recorder.watching():
                engine.score([row[:-1] for row in read.rows], [row[-1:] for row in read.rows])
            for number, (x, active) in enumerate(expected):
                recorded = recorder.recorded(number)
                torch.testing.assert_close(recorded.x.float(), x, rtol=2e-3, atol=2e-3)
                assert (recorded.active() != active).float().mean() < 1e-3
                assert recorder.shares[number] == pytest.approx(float(active.float().mean()), abs=1e-3)
    assert list(tmp_path.glob("tmp*")) == []  # the files have no names


def test_stretches() -> None:
    made = text()
    assert {len(row) for row in made.rows} == {CONTEXT}
    assert len(set(made.stretches)) == len(made.rows) == 12
    assert all(row[0] == 0 and 0 not in row[1:] for row in made.rows)
    for tokens, message in ((5 * TOKENS, "give 320 tokens or more"), (10**6, "a longer text")):
        with pytest.raises(InvalidInput, match=message):
            cut("a text", CONTENT, byte_tokenizer(), CONTEXT, tokens)
    with pytest.raises(InvalidInput, match="repeats itself"):
        cut("a text", "a" * 5000, byte_tokenizer(), CONTEXT, 20 * TOKENS)
    with pytest.raises(InvalidInput, match="no tokenizer"):
        cut("a text", CONTENT, None, CONTEXT, 20 * TOKENS)


@pytest.mark.parametrize(("family", "words"), [("llama", "SiLUActivation"), ("mixtral", "no feed-forward block")])
def test_other_activations_are_refused(families: Any, family: str, words: str) -> None:
    with Engine(families(family).directory) as engine, pytest.raises(UnsupportedModel, match=words):
        sparse_blocks(engine.core)


def test_predictors_are_trained_once(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_relu(tmp_path)
    read = text(20)
    with Engine(tmp_path, prefix_sharing=False) as engine:
        made = predictors(engine, read, Settings(rank=8))
    active = torch.cat([a for _, a in by_transformers(model, read.stretches)], dim=-1).float()
    assert made.errors.active_share == pytest.approx(float(active[divide(20)[2]].mean()), abs=2e-3)
    assert [layer.errors.total for layer in made.known] == [2 * TOKENS * NEURONS] * LAYERS
    assert [layer.predictor.rank for layer in made.known] == [8] * LAYERS
    assert made.nbytes == LAYERS * (2 * 8 * (WIDTH + NEURONS) + 4 * NEURONS)
    monkeypatch.delattr(training, "TraceRecorder")  # nothing is recorded again
    with Engine(tmp_path, prefix_sharing=False) as engine:
        again = predictors(engine, read, Settings(rank=8))
        engine.use(Lossy(flash="predictors"))
        found = engine.core.opened.flash.trained
    assert found is not None
    assert (again.directory, again.errors) == (made.directory, made.errors)
    assert (found.directory, found.errors) == (made.directory, made.errors)


def test_without_predictors(own_cache: Path, tmp_path: Path) -> None:
    make_relu(tmp_path)
    with Engine(tmp_path) as engine, pytest.raises(InvalidInput, match="flexengine flash train"):
        engine.use(Lossy(flash="predictors"))


def test_predictors_that_name_most_neurons_are_refused(cache: Path, tmp_path: Path) -> None:
    """Under half of the neurons are active, but a predictor of rank 1 that misses few names more."""
    model = make_relu(tmp_path, shift=-0.3)
    settings = Settings(misses=0.002, rank=1)
    refused = pytest.raises(InvalidInput, match=r"miss .* name (5\d|[6-9]\d|100)\.\d% of all neurons.*0\.002")
    shares = [active.float().mean() for _, active in by_transformers(model, text().stretches)]
    assert torch.stack(shares).mean() < training.MAX_ACTIVE
    with Engine(tmp_path, prefix_sharing=False) as engine, refused:
        predictors(engine, text(), settings)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_dense_models_are_refused_with_their_share(cache: Path, tmp_path: Path) -> None:
    """Before most of the text is read; nothing stays in the cache."""
    model = make_relu(tmp_path, shift=1.0)
    probed = by_transformers(model, text().stretches[: training.PROBE])
    share = torch.stack([active.float().mean() for _, active in probed]).mean()
    refused = pytest.raises(InvalidInput, match=rf"{share:.1%}.*ReLU-fied")
    with Engine(tmp_path, prefix_sharing=False) as engine, refused:
        predictors(engine, text(), Settings())
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
