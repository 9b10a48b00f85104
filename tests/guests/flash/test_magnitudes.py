"""Histograms of magnitudes and their quantiles, against numpy's quantiles of the values themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flexengine.errors import BadCheckpoint
from flexengine.guests.flash import traces
from flexengine.guests.flash.traces import SHARES, Magnitudes, histogram, load


def values(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.silu(torch.randn(50, 999, generator=generator) * 10.0 ** (seed - 2))


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_quantiles(seed: int) -> None:
    drawn = values(seed)
    counts = torch.stack([histogram(part) for part in drawn.split(7)]).sum(0)  # in any pieces
    made = Magnitudes(traces._quantiles(counts.numpy())[None])
    sizes = drawn.abs().numpy().ravel()
    for share in (0.05, 0.3, 0.5, 0.7123, 0.9, 0.99):
        (threshold,) = made.thresholds(share)
        assert threshold == pytest.approx(np.quantile(sizes, share), rel=5e-3)
        assert np.mean(sizes < threshold) == pytest.approx(share, abs=2e-3)


def test_counts() -> None:
    counts = histogram(torch.tensor([[0.0, -0.0, 1.0], [-1.0, 1.001, -2.0]]))
    assert counts[counts > 0].tolist() == [2, 3, 1]  # 1.001 is in the bin of 1, whose bounds differ by 1/256
    assert torch.equal(histogram(torch.tensor([0.5, -3.0]).bfloat16()), histogram(torch.tensor([0.5, 3.0])))


def test_shares_of_values_that_are_mostly_equal() -> None:
    quantiles = traces._quantiles(histogram(torch.tensor([0.0] * 9 + [4.0])).numpy())
    assert len(quantiles) == len(SHARES)
    assert quantiles[0] == 0
    assert max(quantiles[:900]) < 1e-30
    assert 4 <= quantiles[950] <= quantiles[-1] <= 4 * (1 + 1 / 256)
    assert (np.diff(quantiles) >= 0).all()


def test_files(tmp_path: Path) -> None:
    made = Magnitudes(np.sort(np.random.default_rng(0).random((3, len(SHARES)), np.float32)))
    file = tmp_path / "magnitudes.safetensors"
    made.write(file)
    assert load(file).thresholds(0.7) == made.thresholds(0.7)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(BadCheckpoint, match=r"magnitudes\.safetensors cannot be read: .*remove its directory"):
        load(file)
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        load(tmp_path / "missing")
