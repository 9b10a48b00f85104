"""Seconds of loading chosen values (`topk`) from a KV cache off the device: the mean of the formula in `worker.values`.

Keys are loaded before a layer is computed, like whole pages; so are the values of a page that is not full. All other
values are loaded after the layer has chosen them, and the device waits: row by row from RAM, block by block from disk.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.layout import CHOSEN
from flexengine.plan.pages import Array
from flexengine.plan.prediction import CACHE
from flexengine.plan.terms import Sweeping, Term, routes

MAX_GAP_BYTES = 128 << 10  # rows at most this far apart share one disk read; equal to GAP in tier/disk.py
PICK_SECONDS = 1e-7  # to find a row, gather it and store it; assumed, not measured


class Chosen(NamedTuple):
    """Tokens of all decoding sequences, by sweep."""

    ahead: Array  # loaded before a layer is computed, per layer. A key without its value counts half.
    full: Array  # in full pages that attention sees, summed over layers

    @staticmethod
    def of(data: Sweeping) -> "Chosen":
        """Return the tokens of the sweeps of a policy. The last page of a sequence is assumed half full."""
        sweeps, pages, windows = data.sweeps, data.pages, data.rates.windows
        held, decoding = np.maximum(sweeps.loaded - sweeps.prompt_loaded, 0.0), sweeps.decoding * sweeps.counted
        sizes = {group.away.window: group.away.page_tokens for group in pages}
        filling = sum(group.layers * (group.away.page_tokens - 1) for group in pages)
        full = np.zeros(held.shape)
        for window, layers in windows.items():
            seen = sweeps.cached[window] * sweeps.counted
            size = sizes[window if window in sizes else None]
            full = full + layers * np.maximum(seen - decoding * (size + 1) / 2, 0.0)
        return Chosen((held + np.minimum(held, decoding * filling)) / 2, full)


def chosen_share(model: ModelFacts, rows: float = 1.0) -> float:
    """Return the probability that a query head of a kv head chooses one of `rows` neighbouring values.

    Choices are assumed random and independent.
    """
    heads = model.heads / model.kv_heads
    return float(1 - (1 - (model.topk or 0.0)) ** (heads * rows))


def waiting(
    model: ModelFacts, hardware: Hardware, home: str, full: Any, batch_tokens: float
) -> tuple[dict[str, Any], Any]:
    """Return the seconds of loading chosen values, by lane, and the seconds in which the device gathers their rows.

    Args:
        home: tier of the KV cache.
        full: tokens in full pages, a float or an array.
        batch_tokens: tokens in full pages of one gpu_batch in one layer.
    """
    half, row = model.kv_token / 2, model.kv_token / 2 / model.kv_heads  # bytes of a token's values; of one kv head's
    chosen, lanes = full * chosen_share(model), dict[str, Any]()
    if place_of(home).disk:
        share = chosen_share(model, max(1.0, (MAX_GAP_BYTES + row) / row))  # of the values, gaps included
        lane, transfer = place_of(home).lanes[0], max(1.0, batch_tokens * share * half)
        lanes[lane] = full * share * half / at(hardware.links[lane], transfer)
    if home == "host" or not hardware.shared:
        transfer = min(float(CHOSEN), max(1.0, batch_tokens * chosen_share(model) * half))
        lanes["h2d"] = chosen * half / at(hardware.links["h2d"], transfer)
    return lanes, chosen * model.kv_heads * model.kv_pieces * PICK_SECONDS


def terms(data: Sweeping, overlaps: bool) -> Iterator[Term]:
    """Yield the terms of chosen values. overlaps: whether lanes work at the same time; if not, the device waits for
    every load, and these waits need no term."""
    sweeps, full = data.sweeps, Chosen.of(data).full
    total = float((sweeps.times * sweeps.decoding).sum()) * len(data.model.layers)
    at_once = float((sweeps.times * full).sum()) / max(1e-9, total) * data.policy.gpu_batch_size
    for place in routes(data.hardware).load:
        if data.policy.attends(place) != "device":  # values are not loaded to the device
            continue
        lanes, handling = waiting(data.model, data.hardware, place, full, at_once)
        for lane, seconds in lanes.items():
            yield Term(lane, CACHE, place, seconds)
        yield Term("device", CACHE, place, handling + (sum(lanes.values()) if overlaps else 0.0))
