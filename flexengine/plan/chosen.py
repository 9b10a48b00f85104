"""What chosen values (`topk`) cost where the KV cache is off the device: `worker.values` and its formula, in the mean.

Keys, and the values of a page that is being filled, come ahead of computing like whole pages. The rest comes when a
layer has chosen, and the device waits for it: row by row from RAM, block by block from disk.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flexengine.places import is_disk
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import CHOSEN
from flexengine.plan.profile import Array, LayerPages, Profile

GAP = 64 << 10  # bytes between rows that a disk reads together, as tier.disk does
PICK = 1e-7  # seconds to find a row, gather it and put it down; assumed, not measured


class Chosen(NamedTuple):
    """By sweep, of all decoding sequences. ahead: what of one layer comes ahead, in whole tokens; full: tokens in full
    pages that attention sees, summed over layers."""

    ahead: Array
    full: Array

    @staticmethod
    def of(sweeps: Profile, pages: Sequence[LayerPages], windows: Mapping[int | None, int]) -> "Chosen":
        """A page is being filled unless the one before is just full; in the mean it is half full.

        Args:
            pages: of each group of layers.
            windows: how many layers see so many tokens.
        """
        held, decoding = np.maximum(sweeps.loaded - sweeps.prompt_loaded, 0.0), sweeps.decoding * sweeps.counted
        sizes = {group.away.window: group.away.page_tokens for group in pages}
        filling = sum(group.layers * (group.away.page_tokens - 1) for group in pages)
        full = np.zeros(held.shape)
        for window, layers in windows.items():
            seen = (sweeps.cached if window is None else sweeps.windows[window]) * sweeps.counted
            size = sizes[window if window in sizes else None]
            full = full + layers * np.maximum(seen - decoding * (size + 1) / 2, 0.0)
        return Chosen((held + np.minimum(held, decoding * filling)) / 2, full)


def wanted(model: ModelFacts, rows: float = 1.0) -> float:
    """How likely some query head of a kv head wants one of `rows` neighbouring values, if they choose by chance."""
    heads = model.heads / model.kv_heads
    return float(1 - (1 - (model.topk or 0.0)) ** (heads * rows))


def waiting(
    model: ModelFacts, hardware: Hardware, home: str, full: Any, at_once: float
) -> tuple[dict[str, Any], Any]:
    """Seconds by lane of loading chosen values, and of handling them on the device's.

    full: tokens in full pages, a number or an array; at_once: of one layer of a gpu_batch.
    """
    half, row = model.kv_token / 2, model.kv_token / 2 / model.kv_heads
    chosen, lanes = full * wanted(model), dict[str, Any]()
    if is_disk(home):
        blocks = wanted(model, max(1.0, (GAP + row) / row))  # rows that are no further apart are read together
        lane, transfer = f"{home}_read", max(1.0, at_once * blocks * half)
        lanes[lane] = full * blocks * half / at(hardware.links[lane], transfer)
    if home == "host" or not hardware.shared:
        transfer = min(float(CHOSEN), max(1.0, at_once * wanted(model) * half))
        lanes["h2d"] = chosen * half / at(hardware.links["h2d"], transfer)
    return lanes, chosen * model.kv_heads * model.kv_pieces * PICK
