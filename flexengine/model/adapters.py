"""Families that compute attention themselves: their attention modules are made to ask for it as the others do.

ALiBi (Press et al., 2022, section 3) adds slope * distance to every score. Up to a constant per query, which softmax
does not see, that is slope * position of the key; so it is one more dimension: queries get the slope there, keys their
position, and the cache and its kernels stay as they are.
"""

import math
from functools import cache
from types import MethodType
from typing import Any

import greenlet
import torch
from torch import Tensor

from flexengine.errors import UnsupportedModel

ADAPTED = {"bloom", "codegen", "gpt_neo", "gptj"}


def adapt(model: Any, attend: Any) -> None:
    """Prepares a model of a family in ADAPTED. attend: what transformers calls an attention function."""
    kind = model.config.model_type
    if kind == "bloom" and model.dtype != torch.float32:
        raise UnsupportedModel(f"BLOOM's positions do not fit {model.dtype}; compute it with dtype float32")
    for module in model.modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "_attn"):
            module._attn = MethodType(_scores(kind, module, attend), module)
        elif type(module).__name__ == "BloomAttention":
            module.forward = MethodType(_bloom(attend), module)


def _scores(kind: str, module: Any, attend: Any) -> Any:
    """In place of the method that GPT-J, CodeGen and GPT-Neo give q, k and v, [1, heads, tokens, head_dim]."""
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
    """ALiBi's slope of every head: a falling geometric series; with a number of heads that is no power of two, every
    other term of the next finer series follows."""
    whole = 2 ** int(math.log2(heads))
    base = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return base + [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


@cache
def _slopes(heads: int) -> Tensor:
    """The slopes in fp64, in RAM."""
    return torch.tensor(slopes(heads), dtype=torch.float64, device="cpu")


def _bloom(attend: Any) -> Any:
    made: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # a GPU waits for what comes from a list

    def forward(self: Any, hidden: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = self._reshape(self.query_key_value(hidden))
        scale = self.inv_norm_factor
        slope = made.get((q.device, q.dtype))
        if slope is None:
            slope = made[q.device, q.dtype] = _slopes(self.num_heads).to(q.device, q.dtype)
        slope = slope / scale
        positions = greenlet.getcurrent().positions.to(k.dtype)  # type: ignore[attr-defined]
        q = torch.cat([q, slope.view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
        k = torch.cat([k, positions.view(1, 1, -1, 1).expand(*k.shape[:3], 1)], -1)
        out, _none = attend(self, q, k, v, None, scaling=scale)
        return self.dense(out.flatten(2)) + residual, None

    return forward
