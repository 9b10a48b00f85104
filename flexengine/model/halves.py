"""Decoder layers as two calls of native kernels: all before attention in one, all after it in the other.

    before   norm, queries | keys | values, rotary positions
    after    output projection + residual, norm, gate | up, activation, down projection + residual

A layer is recognised by the names and classes of its modules. A trial with small random weights then compares the two
calls with transformers' own modules, which shows that the layer connects its modules in this way. Other layers, dtypes
other than fp32, GPUs, and passes that watch or replace modules use the modules.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import greenlet
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.errors import FlexError
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.steps import Steps
from flexengine.model.forward import ATTENTION, Attend, Pass, PausingLayer, attend
from flexengine.model.fused import ACTS, use_fused
from flexengine.model.linear import FastLinear, Product, unwatched, use_fast_linear

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
# Sizes of a trial, by the names of a config's fields.
_SMALL = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_TOKENS = 3  # of a trial
_CLOSE = 1e-4  # largest relative difference in a trial; two orders of summation differ by less


class Halves:
    """The two calls of one layer.

    Attributes:
        options: scaling, window and softcap that the layer's attention module passes to the attention function.
        trial: shows whether the layer computes so; None in a trial.
    """

    def __init__(self, layer: Any, options: dict[str, Any], trial: "Trial | None") -> None:
        self.attention, self.mlp, self.options, self.trial = layer.self_attn, layer.mlp, options, trial
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        modules = list(layer.modules())
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in modules]
        self._head_norms = self.attention._modules.keys() >= _HEAD_NORMS

    def usable(self, hidden: Tensor, positions: Any) -> bool:
        """Return whether the calls can replace the modules now.

        Args:
            hidden: [1, tokens, hidden], input of the layer.
            positions: argument `position_embeddings` of the layer.
        """
        if hidden.dtype != torch.float32 or hidden.device.type != "cpu" or type(positions) is not tuple:
            return False
        if getattr(greenlet.getcurrent(), "queries_first", False) or type(self.mlp.act_fn).__name__ not in ACTS:
            return False
        cos, sin = positions
        if not cos.shape == sin.shape == (1, hidden.shape[1], self.attention.head_dim) or cos.dtype != hidden.dtype:
            return False
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return False
        return self.trial is None or self.trial.succeeded

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Return the layer's output [1, tokens, hidden]. Arguments as in `usable`."""
        kernel = cast(NativeKernels, kernels.load())
        x = hidden[0]
        with unwatched():
            q, k, v = self._before(kernel.steps(), x, *(angles[0].contiguous() for angles in positions))
        attended, _ = attend(self.attention, q, k, v, None, **self.options)
        del q, k, v
        with unwatched():
            return self._after(kernel.steps(), x, attended.reshape(x.shape[0], -1))[None]

    def _before(self, steps: Steps, x: Tensor, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
        attention = self.attention
        normed = _norm(steps, x, self.before)
        q, k, v = (_product(steps, normed, module, beside=i > 0).view(x.shape[0], -1, attention.head_dim)
                   for i, module in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)))  # fmt: skip
        if self._head_norms:
            q, k = (_norm(steps, y.flatten(0, 1), module, beside).view(y.shape)
                    for y, module, beside in ((q, attention.q_norm, False), (k, attention.k_norm, True)))  # fmt: skip
        q, k = steps.rotate(q, cos, sin), steps.rotate(k, cos, sin, beside=True)
        steps.run()
        return (y.transpose(0, 1)[None] for y in (q, k, v))

    def _after(self, steps: Steps, x: Tensor, attended: Tensor) -> Tensor:
        mlp = self.mlp
        x = _product(steps, attended, self.attention.o_proj, residual=x)
        normed = _norm(steps, x, self.after)
        gate, up = _product(steps, normed, mlp.gate_proj), _product(steps, normed, mlp.up_proj, beside=True)
        steps.gate(gate, up, ACTS[type(mlp.act_fn).__name__])
        x = _product(steps, gate, mlp.down_proj, residual=x)
        steps.run()
        return x


def _norm(steps: Steps, x: Tensor, module: Any, beside: bool = False) -> Tensor:
    eps, shift = module.rms
    return steps.norm(x, module.weight, getattr(module, eps), shift, beside)


def _product(
    steps: Steps, x: Tensor, module: FastLinear, residual: Tensor | None = None, beside: bool = False
) -> Tensor:
    return module.product.add_to(steps, x, module, residual, beside)


def use_halves(model: Any, attends: dict[int, Attend]) -> None:
    """Let layers compute as two calls if they are recognised. Their trials follow when they are first used.

    Args:
        model: with pausing layers, fast linear and fused modules.
        attends: by layer, its pause at attention in a pass on the meta device.
    """
    trials: dict[Any, Trial] = {}
    for module in [m for m in model.modules() if isinstance(m, PausingLayer)]:
        layer: Any = module.layer
        event = attends[module.index]
        if _recognised(layer) and event.sinks is None:
            kind = type(layer), _settings(layer)
            trial = trials.setdefault(kind, Trial(type(layer), model.config, layer.self_attn.layer_idx))
            module.halves = Halves(layer, _options(event), trial)


def _options(event: Attend) -> dict[str, Any]:
    return {"scaling": event.scale, "sliding_window": event.window, "softcap": event.softcap}


def _recognised(layer: Any) -> bool:
    """Return whether a layer has the modules that the calls compute, and no other ones."""

    def names(module: nn.Module) -> set[str]:
        return {name for name, child in module.named_children() if any(True for _ in child.parameters())}

    if names(layer) != _LAYER or names(layer.mlp) != _MLP or names(layer.self_attn) - _HEAD_NORMS != _ATTENTION:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if len(names(attention) & _HEAD_NORMS) == 1 or any(True for _ in layer.buffers()):
        return False
    linear = [getattr(attention, name) for name in _ATTENTION] + [getattr(mlp, name) for name in _MLP]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in names(attention) & _HEAD_NORMS]
    own = {name for part in (layer, attention, mlp) for name, _ in part.named_parameters(recurse=False)}
    return not own and all(type(m) is FastLinear for m in linear) and all(hasattr(m, "rms") for m in norms) and (
        type(getattr(mlp, "act_fn", None)).__name__ in ACTS and hasattr(attention, "head_dim"))  # fmt: skip


def _settings(layer: Any) -> tuple[Any, ...]:
    """Return the plain attributes of all modules of a layer except its number: layers with equal ones compute alike."""
    return tuple((name, key, value) for name, module in layer.named_modules() for key, value in vars(module).items()
                 if isinstance(value, bool | int | float | str) and key != "layer_idx")  # fmt: skip


class Trial:
    """Comparison of the two calls with a small layer of transformers, of the same class and settings.

    Args:
        kind: class of the layer.
        config: the model's configuration.
        index: number of the layer.
    """

    def __init__(self, kind: Any, config: Any, index: int) -> None:
        self._kind, self._config, self._index = kind, config, index

    @cached_property
    def succeeded(self) -> bool:
        """Whether native kernels are at hand, and both compute the same but for rounding."""
        try:
            return isinstance(kernels.load(), NativeKernels) and self._compare()
        except FlexError:
            raise
        except Exception:  # the layer needs what a trial does not have
            return False

    def _compare(self) -> bool:
        rng = torch.Generator().manual_seed(0)
        own, width = self._small(rng)
        ours = copy.deepcopy(own)
        use_fast_linear(ours, Product(torch.float32))
        use_fused(ours)
        if not _recognised(ours):
            return False
        x, cos, sin = (torch.randn(1, _TOKENS, n, generator=rng) for n in (width, *2 * [own.self_attn.head_dim]))
        event, theirs = _run(lambda: own(x.clone(), position_embeddings=(cos, sin)))
        halves = Halves(ours, _options(event), None)
        found, result = _run(lambda: halves(x.clone(), (cos, sin)))
        pairs = [*zip(event[1:4], found[1:4], strict=True), (theirs, result)]
        return all(a.shape == b.shape and float((a - b).norm() / a.norm()) < _CLOSE for a, b in pairs)

    def _small(self, rng: torch.Generator) -> tuple[Any, int]:
        """Return a small layer with random weights, and the width of its input."""
        config = copy.deepcopy(self._config.get_text_config())
        for name, size in _SMALL.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, size)
        config._attn_implementation = ATTENTION
        layer = self._kind(config, self._index).float().eval().requires_grad_(False)
        for tensor in layer.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=rng) * (0.3 if tensor.dim() > 1 else 1.0))
        return layer, config.hidden_size


def _run(layer: Callable[[], Tensor]) -> tuple[Attend, Tensor]:
    """Return the pause at attention and the output of a layer. Attention answers with random numbers."""
    current = Pass(layer)
    event = current.switch()
    rng = torch.Generator().manual_seed(1)
    return event, current.switch(torch.randn(1, _TOKENS, event.q.shape[1], event.v.shape[-1], generator=rng))
