"""Adapters for models whose states are no part of a cache: attributes of modules (RecurrentGemma), and lists that
layers hand on (RWKV, xLSTM).

A module here reads and writes its states by the calls that modules with a cache of transformers have, so `mixers` finds
it. A state that is missing means the beginning of a sequence. Modules have no numbers, as a view holds one layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from flexengine.model.adapters import become
from flexengine.model.linear import Product

_FP32 = torch.float32


def adapt(config: Any, model: Any) -> None:
    """Replace the modules with states of a model, or of a layer. config: of the model."""
    mixins = {"RecurrentGemmaRecurrentBlock": GriffinBlock, "RecurrentGemmaRglru": GatedUnit}
    mixins |= {"RwkvBlock": RwkvLayer, "xLSTMLayer": MatrixMemory, "xLSTMBackend": PreciseMemory}
    for module in model.modules():
        kind = type(module).__name__
        if mixin := mixins.get(kind):
            become(module, mixin)
        if kind == "RwkvModel":
            module.layers_are_rescaled = True  # `RwkvLayer` does it
        elif kind == "xLSTMLayer":
            module.chunk_size = config.chunk_size
        elif kind == "xLSTMModel":
            config.max_inference_chunksize = 1 << 40  # prompts are cut into pieces anyway


class GriffinBlock:
    """Recurrent block of RecurrentGemma: a convolution, and a gated linear recurrence (De et al., 2024, section 2)."""

    def forward(self: Any, input_states: Tensor, cache: Any = None, **_: Any) -> tuple[Tensor, None]:
        y = self.act_fn(self.linear_y(input_states))
        x, conv = self.linear_x(input_states).transpose(1, 2), self.conv_1d
        before, kept = cache.get_conv_state(0), self.conv1d_width - 1
        x = cache.update_conv_state(x, 0, conv_kernel_size=kept)
        if before is None:
            x = nn.functional.pad(x[..., -input_states.shape[1] :], (kept, 0))
        if input_states.shape[1] == 1:  # a decode step, or a whole prompt
            x = (torch.sum(x * conv.weight[:, 0, :], dim=-1) + conv.bias)[..., None]
        else:
            x = nn.functional.conv1d(x, conv.weight, conv.bias, groups=conv.groups)
        x, state = self.rg_lru(x.transpose(1, 2), cache.get_recurrent_state(0))
        cache.update_recurrent_state(state, 0)
        return self.linear_out(x * y), None


class GatedUnit:
    """RG-LRU of RecurrentGemma, whose gates are a product for each head. The state is [sequences, lru_width], fp32."""

    uses_product = True
    product = Product(_FP32)  # `use_product` sets the model's

    def _gate(self: Any, x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], self.num_attention_heads, self.block_width).unbind(2)
        outs = [self.product(h, w.t(), b) for h, w, b in zip(heads, weights, biases, strict=True)]
        return torch.sigmoid(torch.cat(outs, -1))

    def forward(self: Any, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        input_gate = self._gate(x, self.input_gate_weight, self.input_gate_bias)
        gate = self._gate(x, self.recurrent_gate_weight, self.recurrent_gate_bias)
        log_gate = -8.0 * gate * nn.functional.softplus(self.recurrent_param)
        gate, factor = torch.exp(log_gate), torch.sqrt(1 - torch.exp(2 * log_gate))
        if state is None:  # the first token enters as it is
            state, factor = torch.zeros(x[:, 0].shape, dtype=_FP32, device=x.device), factor.clone()
            factor[:, 0] = 1
        added, outs = x * input_gate * factor.type(x.dtype), list[Tensor]()
        for t in range(x.shape[1]):
            state = gate[:, t].type(_FP32) * state + added[:, t].type(_FP32)
            outs.append(state.type(x.dtype))
        return torch.stack(outs, 1), state


class RwkvLayer:
    """Layer of RWKV 4 (Peng et al., 2023, section 4). Its states are the last token's inputs of both blocks, and
    numerator, denominator and exponent of the sum, in fp32, [sequences, hidden] each.

    transformers divides the weights of two projections before the first pass. Here their outputs are divided, by a
    power of two, which gives the same bits: weights may be loaded many times.
    """

    def forward(self: Any, hidden: Tensor, cache: Any = None, **_: Any) -> tuple[Tensor, None, None]:
        states = [cache.get_recurrent_state(0, number) for number in range(5)]
        if states[0] is None:
            size = self.attention.attention_hidden_size
            zero = torch.zeros(len(hidden), size, dtype=_FP32, device=hidden.device)
            states = [torch.zeros_like(hidden[:, 0])] * 2 + [zero, zero, zero - 1e30]
        hidden = self.pre_ln(hidden) if self.layer_id == 0 else hidden
        x, every = self.ln1(hidden), self.config.rescale_every
        divisor, block = 2 ** (self.layer_id // every) if every > 0 else 1, self.attention
        key, value, receptance = _with_last(block, x, states[0], ("key", "value", "receptance"))
        decays = block.time_decay, block.time_first
        out, sums = rwkv_linear_attention_cpu(*decays, key, value, states[2:], return_state=True)
        hidden = hidden + block.output(torch.sigmoid(receptance) * out) / divisor
        y, block = self.ln2(hidden), self.feed_forward
        key, receptance = _with_last(block, y, states[1], ("key", "receptance"))
        value = block.value(torch.square(torch.relu(key))) / divisor
        for number, state in enumerate((x[:, -1], y[:, -1], *sums)):
            cache.update_recurrent_state(state, 0, number)
        return hidden + torch.sigmoid(receptance) * value, None, None


def _with_last(block: Any, x: Tensor, last: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    """Return projections of RWKV, by their names in a block, of x mixed with the token before. last: before the first,
    [sequences, hidden]."""
    before = torch.cat([last[:, None], x[:, :-1]], 1)
    shares = [(name, getattr(block, f"time_mix_{name}")) for name in names]
    return [getattr(block, name)(x * share + before * (1 - share)) for name, share in shares]


class MatrixMemory:
    """mLSTM layer of xLSTM (Beck et al., 2024, section 2.3). Its states are memory, normalizer and exponent."""

    def forward(self: Any, x: Tensor, cache: Any = None) -> tuple[Tensor, None]:
        before = [cache.get_recurrent_state(0, number) for number in range(3)]
        out, states = super().forward(x, None if before[0] is None else tuple(before))  # type: ignore[misc]
        for number, state in enumerate(states):
            cache.update_recurrent_state(state, 0, number)
        return out, None


class PreciseMemory:
    """Products of mLSTM with its states, in fp32. In 16 bits, transformers rounds states where a call ends, so that
    tokens depended on the pieces of a prompt."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Any]:
        x = {"query": query.float(), "key": key.float(), "value": value.float()}
        out, states = super().forward(**x, **rest)  # type: ignore[misc]
        return out.to(query.dtype), states
