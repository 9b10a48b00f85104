"""Seconds of attention in one layer: measured for the model's own shape, or derived from the machine's plain rates.

The shape is the number of query heads per KV head, the head width, the format of the cache and the window. For a shape
without measurements, these rules hold:

decode      Reading takes kv_token bytes per cached token at `decode_attention` (on the host: `host_attention`).
            Computing takes 2 FLOP per query head of the group for each element of K and V, and DEQUANTIZE_FLOP more if
            the element is encoded, at `vector_flops` (`host_flops`). The slower of reading and computing counts.
prompt      `prompt_attention` at the length of the prompt, for every shape.
continued   `prompt_attention` at the number of tokens cached before.
call        0 s: `cell_seconds` includes the call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexengine.places import WORKERS, is_worker, workers_in_memory
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, Table, at, values_at
from flexengine.plan.page_size import EXTENT
from flexengine.plan.paging import Array

DEQUANTIZE_FLOP = 4.0  # per encoded element: unpack, scale, add the minimum


@dataclass(frozen=True)
class Attention:
    """Seconds of attention in the layers with one window.

    Attributes:
        window: tokens that a query of these layers sees, None for all.
    """

    model: ModelFacts
    hardware: Hardware
    window: int | None = None

    @cached_property
    def measured(self) -> Mapping[str, Table]:
        """Return the tables measured for this shape, or {} if there are none."""
        return self.hardware.attention.get(self.model.attention_signature(self.window), {})

    @property
    def call(self) -> float:
        """Return the seconds of one call with almost nothing to read."""
        table = self.measured.get("call")
        return table[0][1] if table else 0.0

    def decode(self, tokens: Array | float, length: Array | float, place: str = "device") -> Array:
        """Return the seconds of decode attention.

        Args:
            tokens: cached tokens that all sequences together read.
            length: cached tokens of one sequence, about.
            place: place that computes; see `Policy.attends`.
        """
        return self._read(self._rates(place), tokens, length)

    def prompt(self, pairs: Array | float, length: float) -> Array:
        """Return the seconds of attention in prompts, or in their first chunks.

        Args:
            pairs: (query, key) pairs.
            length: tokens of one prompt or chunk, about.
        """
        return self._pairs(self.measured.get("prompt", self.hardware.prompt_attention), pairs, length)

    def continued(self, pairs: Array | float, past: float) -> Array:
        """Return the seconds of attention in later chunks of prompts.

        Args:
            pairs: (query, key) pairs.
            past: tokens of the prompt cached before, about.
        """
        return self._pairs(self.measured.get("continued", self.hardware.prompt_attention), pairs, past)

    def _pairs(self, table: Table, pairs: Array | float, length: float) -> Array:
        flop = 4.0 * self.model.heads * self.model.head_dim * np.asarray(pairs, dtype=float)
        return np.asarray(flop / at(table, max(length, 1.0)))

    def _read(self, table: Table, tokens: Array | float, length: Array | float) -> Array:
        rate = values_at(table, np.maximum(length, 1.0))
        return np.asarray(np.asarray(tokens, dtype=float) * self.model.kv_token / rate)

    def _rates(self, place: str) -> Table:
        """Return (cached tokens of a sequence, bytes of KV per second) of decode attention that a place computes.

        If the place's rate is unknown, it is assumed equal to the rate of moving the KV to the device. Place "workers"
        is all attention workers together: each holds an equal part of every sequence, so the slowest one counts.
        """
        hardware = self.hardware
        if place == WORKERS or is_worker(place):
            moved = at(hardware.links["h2d"], EXTENT)
            workers = workers_in_memory(hardware.places) if place == WORKERS else (place,)
            return ((1.0, len(workers) * min(hardware.worker_attention.get(worker, moved) for worker in workers)),)
        if place == "device":
            return self.measured.get("decode") or self._derived(hardware.decode_attention, hardware.vector_flops)
        plain, flops = (hardware.host_attention, hardware.host_flops) if place == "host" else (None, 0.0)
        plain = plain or at(hardware.links["h2d"], EXTENT)
        return self.measured.get(place) or self._derived(((1.0, plain),), flops)

    def _derived(self, plain: Table, flops: float) -> Table:
        """Return (cached tokens of a sequence, bytes of KV per second) by the rule for decode above.

        Args:
            plain: the same table as memory limits it.
            flops: FLOP per second as computing limits it, 0 if not known.
        """
        if not flops:
            return plain
        model = self.model
        element_flop = 2.0 * model.heads / model.kv_heads + (DEQUANTIZE_FLOP if model.kv_pieces > 1 else 0.0)
        limit = flops * model.kv_token / (2 * model.kv_heads * model.head_dim * element_flop)
        return tuple((x, min(rate, limit)) for x, rate in plain)
