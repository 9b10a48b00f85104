"""Adapters for families whose modules compute attention themselves: they call a registered attention function instead.

ALiBi (Press et al., 2022, section 3) adds slope * distance to every score. Up to a constant per query, which cancels in
the softmax, this equals slope * position of the key. So k gets one more dimension, which holds slope * position as
transformers rounds it to the dtype, and q one that holds 1 / the scale of scores. The cache and the kernels need no
change.
"""

import math
from functools import cache
from types import MethodType
from typing import Any

import greenlet
import torch
from torch import Tensor


def adapt(config: Any, model: Any, attend: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS` by `attend`, an attention
    function. config: of the model."""
    kind = config.model_type
    for module in model.modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "_attn"):
            module._attn = MethodType(_scores(kind, module, attend), module)
        elif type(module).__name__ == "BloomAttention":
            module.forward = MethodType(_bloom(attend), module)


def _scores(kind: str, module: Any, attend: Any) -> Any:
    """Return a replacement for `_attn` of GPT-J, CodeGen and GPT-Neo; q, k, v are [1, heads, tokens, head_dim]."""
    scale = 1.0 if kind == "gpt_neo" else 1 / float(math.sqrt(module.head_dim))
    local = kind == "gpt_neo" and module.attention_type == "local"
    window = module.config.window_size if local else None
    if not hasattr(module, "layer_idx") or module.layer_idx is None:
        module.layer_idx = module.layer_id

    def attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out, _none = attend(self, query, key, value, None, scaling=scale, sliding_window=window)
        return out.transpose(1, 2), None

    return attn


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of every head: a falling geometric series. If `heads` is no power of two, every second term
    of the next finer series follows."""
    whole = 2 ** int(math.log2(heads))
    base = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return base + [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


@cache  # a tensor made from a list would synchronise a GPU with the host in every call
def _slopes(heads: int, device: torch.device) -> Tensor:
    return torch.tensor(slopes(heads), dtype=torch.float64, device="cpu").to(device, torch.float32)


def _bloom(attend: Any) -> Any:
    def forward(self: Any, hidden: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = self._reshape(self.query_key_value(hidden))
        scale = self.inv_norm_factor
        positions = greenlet.getcurrent().inputs.positions.float()  # type: ignore[attr-defined]
        bias = (_slopes(self.num_heads, k.device)[:, None] * positions.view(1, -1)).to(k.dtype)
        q = torch.cat([q, q.new_full((*q.shape[:3], 1), 1 / scale)], -1)
        k = torch.cat([k, bias.view(1, *bias.shape, 1)], -1)
        out, _none = attend(self, q, k, v, None, scaling=scale)
        return self.dense(out.flatten(2)) + residual, None

    return forward
