"""What a decoder layer computes, as one small record that the calls of native/layer.py follow.

Another family is a line here: a kind of what kernels/steps.py can compute, with its formula, by which native/reader.py
finds it in a layer.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

POSITIONS = (0, 1, 3000, 70_000, 2_000_000)  # of a trial's tokens; large ones show what grows with positions
CLOSE = 1e-5  # largest relative difference of two tensors that are the same; two orders of summation differ by 5e-7
# Activation functions by their names in kernels.base.ACTS.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "relu_squared": lambda x: functional.relu(x).square(),
}


class Undescribed(Exception):
    """The layer computes something that a `LayerRecord` cannot say."""


class NormRecord(NamedTuple):
    """Norm of the last dimension: weight * (x - mean) / root mean square + bias, with weight + shift for the weight."""

    path: str  # of the module in the layer
    eps: float  # added to the mean of squares
    shift: float
    centred: bool  # whether the mean is subtracted


class HeadsRecord(NamedTuple):
    """How queries, keys or values follow from a projection."""

    path: str  # of the projection
    # How the projection's output has queries, keys and values: "" has one of them, "blocks" all queries, then all keys,
    # then all values, "heads" query, key and value of each head in turn.
    joined: str = ""
    norm: NormRecord | None = None  # norm of each head, or of all heads together if `whole`
    whole: bool = False


class RotaryRecord(NamedTuple):
    """Rotary positions of queries and keys; of their first elements, if there are fewer cosines than elements."""

    pairs: bool  # whether neighbours are turned together instead of elements of the two halves
    angles: str  # the cosine of turned element d of n: "each" has d, "half" d modulo n / 2, "pair" d // 2
    last: bool = False  # whether norms of queries and keys follow the rotary positions


class MlpRecord(NamedTuple):
    """down(act(gate(x)) * up(x)), or down(act(up(x))); or any module."""

    module: str = ""  # path of a module that computes the block, such as experts; then the rest is empty
    up: str = ""  # paths of projections
    gate: str = ""  # "" for none
    down: str = ""
    joined: str = ""  # "gate_up" or "up_gate" if `up` has both halves, in this order; "" if not
    act: str = ""  # see kernels.base.ACTS


class LayerRecord(NamedTuple):
    """A decoder layer. In sequence:

        y = closing[0](x + factors[0] * post[0](attention(norms[0](x))))
        z = closing[1](y + factors[1] * post[1](mlp(norms[1](y))))

    In parallel, the block's input is norms[1](x), or norms[0](x) if `shared`. A norm that is None changes nothing.
    """

    attention: str  # path of the attention module
    q: HeadsRecord
    k: HeadsRecord
    v: HeadsRecord
    out: str  # path of the output projection
    mlp: MlpRecord
    norms: tuple[NormRecord | None, NormRecord | None]
    post: tuple[NormRecord | None, NormRecord | None]
    closing: tuple[NormRecord | None, NormRecord | None]
    factors: tuple[float, float]
    rotary: RotaryRecord | None  # None for other positions
    factor: float  # by which the layer multiplies queries before attention
    alibi: bool  # whether queries and keys have one more element, for ALiBi (adapters.py)
    sinks: str  # name of the attention module's parameter with sinks; "" for none
    parallel: bool
    shared: bool
    outputs: int | None  # length of the tuple that the layer returns; None for a tensor

    @property
    def used(self) -> list[NormRecord]:
        """All norms."""
        inner = (self.q.norm, self.k.norm, self.v.norm)
        return [norm for norm in (*self.norms, *self.post, *self.closing, *inner) if norm is not None]

    @property
    def linear(self) -> list[str]:
        """Paths of all projections."""
        mlp = (self.mlp.up, self.mlp.gate, self.mlp.down)
        return [*dict.fromkeys(path for path in (self.q.path, self.k.path, self.v.path, self.out, *mlp) if path)]

    @property
    def text(self) -> str:
        """The record in a few words."""
        return ", ".join(_words(self))


def _words(record: LayerRecord) -> Iterator[str]:
    joined = {"": "", "blocks": "joined projections", "heads": "projections joined by head"}[record.q.joined]
    halves = "" if record.rotary is None else "rotary pairs" if record.rotary.pairs else "rotary halves"
    activation = "block as a module" if record.mlp.module else f"{record.mlp.act} {'gated' if _gated(record) else ''}"
    yield from filter(None, (joined, halves or ("ALiBi" if record.alibi else ""), activation.strip()))
    yield from (
        text
        for text, is_so in (
            ("head norms", record.q.norm),
            ("post norms", any(record.post)),
            ("norms of sums", any(record.closing)),
            ("parallel", record.parallel),
            ("sinks", record.sinks),
            ("factors", record.factors != (1.0, 1.0)),
        )
        if is_so
    )


def _gated(record: LayerRecord) -> bool:
    return bool(record.mlp.gate or record.mlp.joined)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors have the same numbers but for rounding."""
    if one is None or other is None or one.numel() != other.numel():
        return False
    one, other = one.reshape(-1), other.reshape(-1)
    return bool((one - other).norm() <= CLOSE * other.norm())


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that a Product computes."""
    return isinstance(module, nn.Linear | Conv1D)


def norm_of(module: nn.Module, path: str = "") -> NormRecord | None:
    """Return what a norm computes, tried with its weights on random numbers; None for other modules."""
    weights, own = dict(module.named_parameters()), vars(module)
    if list(module.children()) or is_linear(module) or not weights.keys() <= {"weight", "bias"}:
        return None
    shape = weights["weight"].shape if "weight" in weights else (16,)
    numbers = [x for name, x in own.items() if type(x) is float and 0 <= x < 0.1 and not name.startswith("_")]
    rng = torch.Generator().manual_seed(2)
    trials = [torch.randn(1, 3, *shape, generator=rng) * size for size in (1.0, 1e-3, 30.0)]
    try:
        results = [module(x) for x in trials]
    except Exception:
        return None
    for eps in numbers:
        for shift, centred in ((0.0, False), (1.0, False), (0.0, True), (1.0, True)):
            record = NormRecord(path, eps, shift, centred)
            tried = zip(trials, results, strict=True)
            if all(isinstance(y, Tensor) and same(normed(record, module, x), y) for x, y in tried):
                return record
    return None


def normed(record: NormRecord, module: Any, x: Tensor) -> Tensor:
    """Return a norm of x by its formula."""
    wide, weight, bias = x.double(), getattr(module, "weight", None), getattr(module, "bias", None)
    wide = wide - wide.mean(-1, keepdim=True) if record.centred else wide
    wide = wide * (wide.square().mean(-1, keepdim=True) + record.eps).rsqrt()
    wide = wide if weight is None else wide * (weight.double() + record.shift)
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def angle_index(angles: str, count: int, device: Any = None) -> Tensor | None:
    """Return which of `count` cosines each turned element has; None for its own."""
    if angles == "half":
        return torch.arange(count, device=device).repeat(2)
    return torch.arange(count // 2, device=device).repeat_interleave(2) if angles == "pair" else None


def rotated(record: RotaryRecord, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Return x, [tokens, heads, dim], with rotary positions by their formula; None if sizes do not fit."""
    index = angle_index(record.angles, cos.shape[1])
    cos, sin = ((y if index is None else y[:, index])[:, None] for y in (cos, sin))
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if turned.shape[-1] != cos.shape[-1] or turned.shape[-1] % 2:
        return None
    if record.pairs:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-turned[..., turned.shape[-1] // 2 :], turned[..., : turned.shape[-1] // 2]), -1)
    return torch.cat((turned * cos + other * sin, rest), -1)


def part(y: Any, joined: str, which: str, heads: tuple[int, int, int]) -> Any:
    """Return queries, keys or values of a projection's output.

    Args:
        y: [rows, columns].
        joined: see `HeadsRecord`.
        which: "q", "k" or "v".
        heads: number of query heads, of key/value heads, and elements of a head.

    Returns:
        A view, [rows, heads, dim].
    """
    (queries, others, dim), number = heads, "qkv".index(which)
    if joined == "heads":
        return y.unflatten(1, (queries, 3, dim))[:, :, number]
    counts = (queries, others, others)
    start = dim * sum(counts[:number]) if joined else 0
    return y[:, start : start + dim * counts[number]].unflatten(1, (counts[number], dim))
