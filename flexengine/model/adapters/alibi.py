"""Adapters for BLOOM and MPT, whose modules compute attention with ALiBi themselves.

ALiBi (Press et al., 2022, section 3) adds slope * distance to every score. Up to a constant per query, which cancels in
the softmax, this equals slope * position of the key. So k gets one more dimension, which holds slope * position as
transformers rounds it to the dtype, and q one that holds 1 / the scale of scores. The cache and the kernels need no
change.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexengine.model.adapters import become, positions, slopes
from flexengine.model.forward import attend

_PIECES = 3  # 16-bit numbers whose sum is an fp32 number, nearly


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    for module in model.modules():
        if mixin := {"BloomAttention": BloomScores, "MptAttention": MptScores, "MptModel": MptPlain}.get(
            type(module).__name__
        ):
            become(module, mixin)


@cache
def slopes_on(device: torch.device, heads: int) -> Tensor:
    """Return `slopes` as fp32 [heads]. A tensor made from a list on a GPU would make the host wait for it."""
    return torch.from_numpy(np.array(slopes(heads))).float().to(device, non_blocking=True)


def biases(heads: int, device: torch.device) -> Tensor:
    """Return slope * position of every head and token of the pass, fp32 [heads, tokens]."""
    return slopes_on(device, heads)[:, None] * positions().float()


def biased(q: Tensor, k: Tensor, columns: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """Return q and k, [1, heads, tokens, dim], with more dimensions, whose products are factor * the columns' sum.

    columns: [heads, tokens] each, in the dtype of k.
    """
    q = torch.cat([q, q.new_full((*q.shape[:3], len(columns)), factor)], -1)
    return q, torch.cat([k, *(column.view(1, *column.shape, 1) for column in columns)], -1)


class BloomScores:
    """Attention of BLOOM."""

    def forward(self: Any, hidden: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = self._reshape(self.query_key_value(hidden))
        scale = self.inv_norm_factor
        q, k = biased(q, k, [biases(self.num_heads, k.device).to(k.dtype)], 1 / scale)
        out, _none = attend(self, q, k, v, None, scaling=scale)
        return self.dense(out.flatten(2)) + residual, None


class MptScores:
    """Attention of MPT, whose biases are fp32 in every dtype: k holds each as a sum of numbers of its dtype."""

    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        mixed, scale = self.Wqkv(hidden_states), self.softmax_scale
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        # In fp32 as BLOOM's, and as native layers write them: one sequence's keys may be of both.
        rest, unit, pieces, columns = biases(self.n_heads, k.device), 1 / scale, 1, list[Tensor]()
        if k.dtype != torch.float32:
            unit, pieces = 2.0 ** round(-math.log2(scale)), _PIECES  # near 1 / scale, and exact in every dtype
            rest = rest / (scale * unit)
        for _piece in range(pieces):
            columns.append(rest.to(k.dtype))
            rest = rest - columns[-1].float()
        q, k = biased(q, k, columns, unit)
        out, _none = attend(self, q, k, v, None, scaling=scale)
        return self.out_proj(out.flatten(2)), None


class MptPlain:
    """Decoder of MPT without tensors of biases and masks, of [max_seq_len] and [tokens, tokens]."""

    def build_mpt_alibi_tensor(self, *_: Any, **__: Any) -> None:
        """Return none."""

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        # transformers returns a mask of 4 dimensions as it is; without one it fails, as it makes none here.
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        return super().forward(input_ids, *args, **(kwargs | {"attention_mask": mask}))  # type: ignore[misc]
