"""Seconds of attention in one layer: measured for the model's own shape, or derived from the machine's plain rates.

The shape is the number of query heads per KV head, the head width, the format of the cache and the window. A shape that
was not measured follows these rules:

decode      Reading takes kv_token bytes per cached token at `decode_attention` (on the host: `host_attention`).
            Computing takes 2 FLOP per query head of the group for each element of K and V, and DEQUANTIZE more if the
            element is encoded, at `vector_flops` (`host_flops`). The slower of the two counts.
prompt      `prompt_attention` at the length of the prompt, for every shape.
continued   `prompt_attention` at the number of tokens cached before.
call        Nothing: it is part of `cell_seconds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, Table, at, values_at
from flexengine.plan.profile import Array
from flexengine.plan.sizes import EXTENT

DEQUANTIZE = 4.0  # FLOP per encoded element: unpack, scale, add the minimum


@dataclass(frozen=True)
class Attention:
    """Attention of the layers of a model that see `window` tokens (None: all)."""

    model: ModelFacts
    hardware: Hardware
    window: int | None = None

    @cached_property
    def measured(self) -> Mapping[str, Table]:
        """Tables measured for this shape; {} if there are none."""
        return self.hardware.attention.get(self.model.attention_signature(self.window), {})

    @property
    def call(self) -> float:
        """Seconds of one call with almost nothing to read."""
        table = self.measured.get("call")
        return table[0][1] if table else 0.0

    def decode(self, tokens: Array | float, length: Array | float, place: str = "device") -> Array:
        """Return seconds of decode steps.

        Args:
            tokens: cached tokens read in all.
            length: cached tokens of a sequence.
            place: place that computes; see `Policy.attends`.
        """
        return self._read(self._rates(place), tokens, length)

    def prompt(self, pairs: Array | float, length: float) -> Array:
        """Return seconds of (query, key) pairs of fresh prompts, or first pieces, of about `length` tokens."""
        return self._pairs(self.measured.get("prompt", self.hardware.prompt_attention), pairs, length)

    def continued(self, pairs: Array | float, past: float) -> Array:
        """Return seconds of pairs of pieces that continue a prompt after about `past` tokens."""
        return self._pairs(self.measured.get("continued", self.hardware.prompt_attention), pairs, past)

    def _pairs(self, table: Table, pairs: Array | float, length: float) -> Array:
        flop = 4.0 * self.model.heads * self.model.head_dim * np.asarray(pairs, dtype=float)
        return np.asarray(flop / at(table, max(length, 1.0)))

    def _read(self, table: Table, tokens: Array | float, length: Array | float) -> Array:
        rate = values_at(table, np.maximum(length, 1.0))
        return np.asarray(np.asarray(tokens, dtype=float) * self.model.kv_token / rate)

    def _rates(self, place: str) -> Table:
        """Return (cached tokens of a sequence, bytes of KV per second) of decode steps that a place computes. A place
        of unknown speed is assumed to be as slow as moving the bytes."""
        hardware = self.hardware
        if place == "device":
            return self.measured.get("decode") or self._derived(hardware.decode_attention, hardware.vector_flops)
        plain, flops = (hardware.host_attention, hardware.host_flops) if place == "host" else (None, 0.0)
        plain = plain or at(hardware.links["h2d"], EXTENT)
        return self.measured.get(place) or self._derived(((1.0, plain),), flops)

    def _derived(self, plain: Table, flops: float) -> Table:
        """Return bytes of KV per second: see the rule for decode above."""
        if not flops:
            return plain
        model = self.model
        each = 2.0 * model.heads / model.kv_heads + (DEQUANTIZE if model.kv_pieces > 1 else 0.0)
        most = flops * model.kv_token / (2 * model.kv_heads * model.head_dim * each)
        return tuple((x, min(rate, most)) for x, rate in plain)
