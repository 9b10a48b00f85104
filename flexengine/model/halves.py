"""Decoder layers as two calls of native kernels: all before attention in one, all after it in the other.

    before   norm, queries | keys | values, rotary positions
    after    output projection + residual, norm, gate | up, activation, down projection + residual

A layer is recognised by the names and classes of its modules. A trial with small random weights then compares the two
calls with transformers' own modules, which shows that the layer connects its modules in this way. Other layers, dtypes
other than fp32, GPUs, and passes that watch or replace modules use the modules.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import greenlet
import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.errors import FlexError
from flexengine.kernels.base import Decoding
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.recorded import Recorded
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
PART = 512  # rows that a call computes, so that what it writes stays in the CPU's caches
MOST_CALLS = 64  # recorded calls that layers of equal settings keep
_CLOSE = 1e-4  # largest relative difference in a trial; two orders of summation differ by less


class Bound(NamedTuple):
    """The weights of a layer as they are bound now.

    Attributes:
        parameters: the modules' weights and biases; None for no bias.
        packed: by linear module, whether its weight is reordered.
        biases: by linear module, its bias in fp32; None for none.
        given: the tensors that the calls read.
        addresses: of these.
        format: number of their shapes and formats in `Kind.formats`.
    """

    parameters: list[Any]
    packed: list[bool]
    biases: dict[FastLinear, Tensor | None]
    given: list[Tensor]
    addresses: list[int]
    format: int


class Kind:
    """What layers of equal settings share.

    Attributes:
        trial: shows whether they compute so; None in a trial.
        calls: recorded calls by half, shapes and format of the weights, in the order of their recording.
        formats: numbers of shapes and formats of a layer's weights.
        block: memory for intermediate results, as large as a call has needed. Fresh memory for every call would cost
            page faults.
    """

    def __init__(self, trial: "Trial | None") -> None:
        self.trial, self.calls, self.formats = trial, dict[Hashable, Recorded](), dict[Hashable, int]()
        self.block = torch.empty(0, dtype=torch.uint8)

    def call(self, key: Hashable, record: Callable[[], Recorded]) -> Recorded:
        """Return the call with a key. If there is none, record it."""
        if (found := self.calls.get(key)) is None:
            if len(self.calls) >= MOST_CALLS:
                del self.calls[next(iter(self.calls))]
            found = self.calls[key] = record()
        return found


class Halves:
    """The two calls of one layer. They are recorded once per shape, as adding their steps takes as long as small
    products.

    Attributes:
        options: scaling, window and softcap that the layer's attention module passes to the attention function.
        kind: what the layer shares with others.
    """

    def __init__(self, layer: Any, options: dict[str, Any], kind: Kind) -> None:
        self.attention, self.mlp, self.options, self.kind = layer.self_attn, layer.mlp, options, kind
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        modules = list(layer.modules())
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in modules]
        self._head_norms = self.attention._modules.keys() >= _HEAD_NORMS
        self._linear: list[FastLinear] = [m for m in modules if isinstance(m, FastLinear)]
        with_weights = [m._parameters for m in modules if m._parameters.get("weight") is not None]
        self._parameters = [(parameters, name) for parameters in with_weights for name in parameters]
        self._bound: Bound | None = None

    def usable(self, hidden: Tensor, positions: Any) -> bool:
        """Return whether the calls can replace the modules now.

        Args:
            hidden: [1, tokens, hidden], input of the layer.
            positions: argument `position_embeddings` of the layer.
        """
        with unwatched():
            if hidden.dtype != torch.float32 or hidden.device.type != "cpu" or type(positions) is not tuple:
                return False
            cos, sin = positions
            shape = (1, hidden.shape[1], self.attention.head_dim)
            if not cos.shape == sin.shape == shape or cos.dtype != torch.float32:
                return False
        if getattr(greenlet.getcurrent(), "queries_first", False) or self._act_name not in ACTS:
            return False
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return False
        return self.kind.trial is None or self.kind.trial.succeeded

    @property
    def _act_name(self) -> str:
        return type(self.mlp.act_fn).__name__

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Return the layer's output [1, tokens, hidden]. Arguments as in `usable`."""
        with unwatched():
            x = hidden[0]
            given = (x, *(angles[0].contiguous() for angles in positions))
            if (decoding := self._decoding(len(x))) is not None:
                (out,) = self._run(self._whole, given, decoding)
                return out[None]
            q, k, v = (y.transpose(0, 1)[None] for y in self._run(self._before, given))
        attended, _ = attend(self.attention, q, k, v, None, **self.options)
        del q, k, v
        with unwatched():
            (out,) = self._run(self._after, (x, attended.reshape(x.shape[0], -1)))
            return out[None]

    def _decoding(self, rows: int) -> Decoding | None:
        """Return the pages of the layer if one call can compute all of it."""
        found: Decoding | None = getattr(greenlet.getcurrent(), "decoding", None)
        if found is None or rows > PART:
            return None
        dim, attention = self.attention.head_dim, self.attention
        sizes = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim, dim
        return found if (found.heads, found.room.kv_heads, found.room.dim) == sizes else None

    def _run(
        self, part: Callable[..., list[Tensor]], given: Sequence[Tensor], decoding: Decoding | None = None
    ) -> list[Tensor]:
        """Run `_before`, `_after` or `_whole`, some rows at a time. Return its results, [rows, ...].

        Args:
            part: the method.
            given: its arguments, [rows, ...].
            decoding: the last argument of `_whole`, for at most PART rows.
        """
        bound, rows = self._bind(), len(given[0])
        pages = [] if decoding is None else [x for x in decoding if isinstance(x, Tensor)]
        options: list[Any] = [] if decoding is None else [x for x in decoding if not isinstance(x, Tensor)]
        options += [(x.shape, x.dtype) for x in pages[:2]]  # pool and tables
        threads, parts = torch.get_num_threads(), -(-rows // PART)
        results = list[Tensor]()
        for number in range(parts):
            low, high = rows * number // parts, rows * (number + 1) // parts
            some = given if parts == 1 else [x[low:high] for x in given]

            def record(some: Sequence[Tensor] = some) -> Recorded:
                steps = cast(NativeKernels, kernels.load()).steps()
                more = [] if decoding is None else [decoding]
                return steps.recorded((*some, *pages, *bound.given), part(steps, bound, *some, *more))

            key = (part.__name__, high - low, *(x.stride() for x in some), *options, bound.format, threads)
            call = self.kind.call(key, record)
            if not results:
                results = [torch.empty((rows, *shape[1:]), dtype=dtype) for shape, dtype in call.results]
            if self.kind.block.nbytes < call.nbytes:
                self.kind.block = torch.empty(call.nbytes, dtype=torch.uint8)
            to = [*(x[low:] for x in results), self.kind.block]
            call.run([*(x.data_ptr() for x in (*some, *pages)), *bound.addresses, *(x.data_ptr() for x in to)])
        return results

    def release(self) -> None:
        """Drop the references to weights, and the block of all layers of this kind."""
        self._bound, self.kind.block = None, torch.empty(0, dtype=torch.uint8)

    def _bind(self) -> Bound:
        """Return the weights that the modules have now."""
        parameters, packed = [holder[name] for holder, name in self._parameters], [m.packed for m in self._linear]
        old = self._bound
        if old and old.packed == packed and all(a is b for a, b in zip(parameters, old.parameters, strict=True)):
            return old
        biases: dict[FastLinear, Tensor | None]
        biases = {m: None if m.bias is None else m.bias.float() for m in self._linear}
        given = [holder[name] for holder, name in self._parameters if name == "weight"]
        given += [bias for bias in biases.values() if bias is not None]
        formats = [(m.forms.get("weight"), m.packed, biases[m] is None) for m in self._linear]
        key = (self._act_name, *((x.shape, x.stride(), x.dtype) for x in given), *formats)
        number = self.kind.formats.setdefault(key, len(self.kind.formats))
        self._bound = Bound(parameters, packed, biases, given, [x.data_ptr() for x in given], number)
        return self._bound

    def _before(self, steps: Steps, bound: Bound, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        attention = self.attention
        normed = _norm(steps, x, self.before)
        q, k, v = (self._product(steps, bound, normed, module, beside=i > 0).view(x.shape[0], -1, attention.head_dim)
                   for i, module in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)))  # fmt: skip
        if self._head_norms:
            q, k = (_norm(steps, y.flatten(0, 1), module, beside).view(y.shape)
                    for y, module, beside in ((q, attention.q_norm, False), (k, attention.k_norm, True)))  # fmt: skip
        return [steps.rotate(q, cos, sin), steps.rotate(k, cos, sin, beside=True), v]

    def _after(self, steps: Steps, bound: Bound, x: Tensor, attended: Tensor) -> list[Tensor]:
        mlp = self.mlp
        x = self._product(steps, bound, attended, self.attention.o_proj, residual=x)
        normed = _norm(steps, x, self.after)
        gate = self._product(steps, bound, normed, mlp.gate_proj)
        up = self._product(steps, bound, normed, mlp.up_proj, beside=True)
        steps.gate(gate, up, ACTS[self._act_name])
        return [self._product(steps, bound, gate, mlp.down_proj, residual=x)]

    def _whole(
        self, steps: Steps, bound: Bound, x: Tensor, cos: Tensor, sin: Tensor, decoding: Decoding
    ) -> list[Tensor]:
        q, k, v = self._before(steps, bound, x, cos, sin)
        attended = steps.append_and_attend(q, k, v, decoding, self.options["scaling"], self.options["softcap"])
        return self._after(steps, bound, x, attended.flatten(1))

    @staticmethod
    def _product(
        steps: Steps, bound: Bound, x: Tensor, module: FastLinear, residual: Tensor | None = None, beside: bool = False
    ) -> Tensor:
        return module.product.add_to(steps, x, module, bound.biases[module], residual, beside)


def _norm(steps: Steps, x: Tensor, module: Any, beside: bool = False) -> Tensor:
    eps, shift = module.rms
    return steps.norm(x, module.weight, getattr(module, eps), shift, beside)


def use_halves(model: Any, attends: dict[int, Attend]) -> None:
    """Let layers compute as two calls if they are recognised. Their trials follow when they are first used.

    Args:
        model: with pausing layers, fast linear and fused modules.
        attends: by layer, its pause at attention in a pass on the meta device.
    """
    kinds: dict[Any, Kind] = {}
    for module in [m for m in model.modules() if isinstance(m, PausingLayer)]:
        layer: Any = module.layer
        event = attends[module.index]
        if _recognised(layer) and event.sinks is None:
            key = type(layer), _settings(layer)
            kind = kinds.setdefault(key, Kind(Trial(type(layer), model.config, layer.self_attn.layer_idx)))
            module.halves = Halves(layer, _options(event), kind)


def release(model: Any) -> None:
    """Drop what layers keep from call to call: memory for intermediate results, and references to weights."""
    for module in model.modules():
        if isinstance(module, PausingLayer) and module.halves is not None:
            module.halves.release()


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
        halves = Halves(ours, _options(event), Kind(None))
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
