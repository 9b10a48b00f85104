"""KV pages of a model's layers, and how many of them prefill moves."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.facts import ModelFacts
from flexengine.plan.page_size import page_tokens
from flexengine.schedule.pages import Pool

Array = NDArray[np.float64]


class LayerPages(NamedTuple):
    """Pages of the layers that see equally many tokens.

    Attributes:
        layers: share of all layers.
        device, away: pools on the device and off it; only their page sizes and windows count.
    """

    layers: float
    device: Pool
    away: Pool


@dataclass(frozen=True)
class ModelPages:
    """KV pages of a model.

    Attributes:
        groups: one per group of layers.
        share: share of the sequences whose cache is off the device.
        batch: sequences of a gpu_batch, which loads a page that they share once.
    """

    groups: tuple[LayerPages, ...]
    share: float
    batch: int = 1


def layer_pages(model: ModelFacts, longest: int) -> tuple[LayerPages, ...]:
    """Return the pages of a model's layers. longest: tokens of the longest sequence."""
    return tuple(
        LayerPages(
            len(group.layers) / len(model.layers),
            *(
                Pool(0, page_tokens(model, tier, longest, group.window), None, group.window)
                for tier in ("device", "host")
            ),
        )
        for group in model.cache_groups(longest)
    )


def moved_pages(pool: Pool, prompts: Array, prefill_tokens: int) -> tuple[Array, Array]:
    """Return the numbers of pages that prefill in pieces loads and stores, in one layer, by prompt.

    Args:
        prompts: tokens of each prompt.
        prefill_tokens: most tokens of a piece.
    """
    before = np.ceil(prompts / prefill_tokens) - 1  # whole pieces before the last
    starts = np.arange(0, before.max() + 1) * prefill_tokens
    read, written = pool.num_read(starts), pool.num_written(starts, starts + prefill_tokens)
    last, index = pool.num_written(before * prefill_tokens, prompts), before.astype(int)
    return np.cumsum(read)[index], (np.cumsum(written) - written)[index] + last
