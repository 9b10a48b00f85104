"""bench.published: smaller models and limits have a sixteenth of the bytes; FlexGen's policies fit and run there."""

from pathlib import Path
from typing import Any

import pytest

from bench import published
from bench.published import LOSSY, Run
from flexengine import shipped
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.policy import Policy
from flexengine.worker.open_model import open_model


def full(run: Run) -> Any:
    """The facts of the whole model in 16 bits."""
    model = shipped.find("models", run.name.removesuffix("-4bit"))
    return open_model(model, "float16", "cuda", weights=False, lossy=Lossy(**LOSSY[run.name])).facts


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
def test_bytes_are_a_sixteenth(name: str) -> None:
    run = Run(name)
    small, large, (prompt, new) = published.facts_of(run), full(run), run.tokens
    weights = [sum(t.stored_bytes for layer in facts.layers for t in layer) for facts in (small, large)]
    assert weights[0] == pytest.approx(weights[1] / 16, rel=0.01)
    cached = [(prompt + new - 1) * small.kv_token, (512 + 31) * large.kv_token]
    assert cached[0] == pytest.approx(cached[1] / 16, rel=0.065)
    assert len(small.layers) == len(large.layers)
    buffers = [run.policy.prefill_tokens * small.hidden * small.itemsize, 2048 * large.hidden * large.itemsize]
    assert buffers[0] == buffers[1] / 16
    assert run.limits(small) == {"device": 15_400_000_000 // 16, "host": 200_000_000_000 // 16}


@pytest.mark.parametrize("name", LOSSY)
def test_the_policy_is_as_given(name: str) -> None:
    made, given = Run(name).policy.to_json(), Policy.load(shipped.find("policies", name)).to_json()
    assert {field for field in made if made[field] != given[field]} == {"prefill_tokens"}


@pytest.mark.parametrize("name", LOSSY)
def test_each_fits_as_planned_with_its_whole_block(name: str) -> None:
    found = published.planned(Run(name))
    assert found["fits"]
    assert all(found["bytes"][tier] <= limit for tier, limit in found["limits"].items())
    assert found["alive"] == 1.0 or name == "opt-175b-4bit"  # docs/machines.md


def test_layers_that_are_left_out_take_their_bytes_from_the_limits() -> None:
    """Layers of OPT-30B: a fifth of the weights on the device, the rest and the cache on the host."""
    whole, part = Run("opt-30b"), Run("opt-30b", layers=10)
    facts = published.facts_of(part)
    limits = whole.limits(published.facts_of(whole)), part.limits(facts)
    weights, cache = 38 * (12 * 1792**2 + 13 * 1792) * 2, 38 * 144 * 64 * 2 * 1792 * 4
    assert limits[0]["device"] - limits[1]["device"] == pytest.approx(0.2 * weights, rel=1e-3)
    assert limits[0]["host"] - limits[1]["host"] == pytest.approx(0.8 * weights + cache, rel=1e-3)


def test_heads_are_divided_or_refused() -> None:
    assert Run("opt-30b").shape.heads == 14
    with pytest.raises(ValueError, match="56 heads of opt-30b cannot be divided by 5"):
        _ = Run("opt-30b", 5).shape
    with pytest.raises(InvalidInput):
        _ = Run("opt-30b", 4096).policy


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale", "layers"), [
    ("opt-6.7b", 8, 2), ("opt-6.7b-4bit", 8, 2), ("opt-30b", 4, 2), ("opt-30b-4bit", 4, 1), ("opt-175b", 4, 1),
    ("opt-175b-4bit", 4, 2),
])  # fmt: skip
def test_it_runs_within_the_limits(tmp_path: Path, name: str, scale: int, layers: int) -> None:
    """The whole block in as many sweeps as tokens, with the tokens of transformers. Of OPT-175B in 4 bits, the few
    sequences that find no room enter when the others have ended."""
    run = Run(name, scale, layers)
    found = published.measured(run, tmp_path, checked=3)
    assert found["fits"], found
    assert all(found["peak_bytes"][tier] <= limit for tier, limit in found["limits"].items())
    assert found["sweeps"] == run.tokens[1] * (2 if name == "opt-175b-4bit" else 1)
    assert found["rows_equal"] == found["rows_checked"] == min(3, run.policy.block_size)
    assert found["different_rows"] > run.policy.block_size / 2  # the prompts matter
    assert (found["busy"].get("cpu", 0) > 0) == run.policy.delegates
