"""What a decoder layer computes, as one small record that the calls of native/layer.py follow.

Another family is a line here: a kind of what kernels/steps.py can compute, with its formula, by which native/reader.py
finds it in a layer.
"""

from collections.abc import Callable
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
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": functional.softplus}


class Undescribed(Exception):
    """The layer computes something that a `LayerRecord` cannot say."""


class NormRecord(NamedTuple):
    """Norm of the last dimension: weight * (x - mean) / root mean square + bias, with weight + shift for the weight."""

    path: str  # of the module in the layer
    eps: float  # added to the mean of squares
    shift: float
    centred: bool  # whether the mean is subtracted


class LatentRecord(NamedTuple):
    """What the input of a projection is computed from: norm(first elements of path(x)), for x the input of attention.
    The norm has as many elements as the projection has inputs."""

    path: str  # of the first projection
    norm: NormRecord


class HeadsRecord(NamedTuple):
    """How queries, keys or values follow from a projection."""

    path: str  # of the projection
    # How the projection's output has queries, keys and values: "" has one of them, "blocks" all queries, then all keys,
    # then all values, "heads" query, key and value of each head in turn, "nested" the first elements of the key, and
    # the value, of each head in turn; the last elements of the key are those of path `latent` that it does not norm,
    # the same ones in each head. "groups" has groups of heads in turn, each with all its queries, values and keys.
    joined: str = ""
    norm: NormRecord | None = None  # norm of each head, or of all heads together if `whole`
    whole: bool = False
    clip: float = 0.0  # limit of absolute values, after the norm; 0 for none
    factor: float = 1.0  # of values
    latent: LatentRecord | None = None  # None if the projection's input is that of attention
    groups: int = 1


class RotaryRecord(NamedTuple):
    """Rotary positions of queries and keys; of their first elements, if there are fewer cosines than elements."""

    pairing: str  # which elements are turned together, see kernels.steps.PAIRINGS
    # The cosine of turned element d of n: of n cosines, "each" has d, "pair" d // 2, "first" d modulo n / 2; of n / 2
    # cosines, "half" has d modulo n / 2, "two" d // 2.
    angles: str
    last: bool = False  # whether norms of queries and keys follow the rotary positions
    given: str = "cos, sin"  # what the layer gets, or "sin, cos", or "cos, -sin"
    end: bool = False  # whether the last elements are turned instead of the first


class OutGateRecord(NamedTuple):
    """Attention's output is multiplied by act(path(x)), for x the input of attention."""

    path: str  # of a projection, which has a number for each element, or one for each head
    act: str  # name in GATES


class MlpRecord(NamedTuple):
    """down(act(gate(x)) * up(x)), or down(act(up(x))); or any module."""

    module: str = ""  # path of a module that computes the block, such as experts; then the rest is empty
    up: str = ""  # paths of projections
    gate: str = ""  # "" for none
    down: str = ""
    joined: str = ""  # "gate_up" or "up_gate" if `up` has both halves, in this order; "" if not
    act: str = ""  # see kernels.base.ACTS
    norm: NormRecord | None = None  # of the input of `down`
    beside: str = ""  # with a module: path of another one with the same input, whose output is added


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
    alibi: bool  # whether queries and keys have one more element, for ALiBi (adapters/alibi.py)
    sinks: str  # name of the attention module's parameter with sinks; "" for none
    parallel: bool
    shared: bool
    outputs: int | None  # length of the tuple that the layer returns; None for a tensor
    out_norm: NormRecord | None = None  # of attention's output
    out_gate: OutGateRecord | None = None

    @property
    def latents(self) -> list[LatentRecord]:
        """What inputs of projections are computed from."""
        return [heads.latent for heads in (self.q, self.k, self.v) if heads.latent is not None]

    @property
    def used(self) -> list[NormRecord]:
        """All norms."""
        inner = [self.q.norm, self.k.norm, self.v.norm, self.out_norm, self.mlp.norm]
        inner += [latent.norm for latent in self.latents]
        return [norm for norm in (*self.norms, *self.post, *self.closing, *inner) if norm is not None]

    @property
    def linear(self) -> list[str]:
        """Paths of all projections."""
        paths = (self.q.path, self.k.path, self.v.path, *(latent.path for latent in self.latents), self.out)
        more = (self.out_gate.path if self.out_gate else "", self.mlp.up, self.mlp.gate, self.mlp.down)
        return [*dict.fromkeys(path for path in (*paths, *more) if path)]

    @property
    def blocks(self) -> list[str]:
        """Paths of the modules that compute the block after attention."""
        return [path for path in (self.mlp.module, self.mlp.beside) if path]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors have the same numbers but for rounding."""
    if one is None or other is None or one.numel() != other.numel():
        return False
    one, other = one.reshape(-1), other.reshape(-1)
    return bool((one - other).norm() <= CLOSE * other.norm())


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that a Product computes."""
    return isinstance(module, nn.Linear | Conv1D)


def norm_of(module: nn.Module, path: str = "", size: int = 16) -> NormRecord | None:
    """Return what a norm computes, tried with its weights on random numbers; None for other modules. size: elements
    that it gets, if it has no weights."""
    weights, own = dict(module.named_parameters()), vars(module)
    if list(module.children()) or is_linear(module) or not weights.keys() <= {"weight", "bias"}:
        return None
    shape = weights["weight"].shape if "weight" in weights else (size,)
    numbers = [x for name, x in own.items() if type(x) is float and 0 <= x < 0.1 and not name.startswith("_")]
    numbers += [x for x in (1e-5, 1e-6) if x not in numbers]
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


def angle_pair(positions: Any) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors of an argument `position_embeddings`, as of cosines and sines: real and imaginary parts of
    complex numbers. Return None if it is something else."""
    if isinstance(positions, Tensor) and positions.is_complex():
        return positions.real, positions.imag
    pair = type(positions) is tuple and len(positions) == 2 and all(isinstance(x, Tensor) for x in positions)
    return positions if pair else None


def cosines_and_sines(record: RotaryRecord, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [tokens, turned], one for each turned element. first, second: as a layer gets them."""
    cos, sin = (second, first) if record.given == "sin, cos" else (first, second)
    sin = -sin if record.given == "cos, -sin" else sin
    count = cos.shape[1] // (2 if record.angles in ("pair", "first") else 1)
    if record.angles in ("half", "first"):
        return cos[:, :count].repeat(1, 2), sin[:, :count].repeat(1, 2)
    if record.angles in ("pair", "two"):
        return cos[:, :count].repeat_interleave(2, 1), sin[:, :count].repeat_interleave(2, 1)
    return cos, sin


def rotated(record: RotaryRecord, x: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """Return x, [tokens, heads, dim], with rotary positions by their formula; None if sizes do not fit. first, second:
    as in `cosines_and_sines`."""
    cos, sin = (y[:, None] for y in cosines_and_sines(record, first, second))
    size = cos.shape[-1]
    if size % 2 or size > x.shape[-1]:
        return None
    start = x.shape[-1] - size if record.end else 0
    turned = x[..., start : start + size]
    if record.pairing == "pairs":
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        if record.pairing == "pairs to halves":
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
        other = torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), -1)
    return torch.cat((x[..., :start], turned * cos + other * sin, x[..., start + size :]), -1)


def part(y: Any, joined: str, which: str, heads: tuple[int, int, int], groups: int = 1) -> Any:
    """Return queries, keys or values of a projection's output.

    Args:
        y: [rows, columns].
        joined, groups: see `HeadsRecord`.
        which: "q", "k" or "v".
        heads: number of query heads, of key/value heads, and elements of a head; with "nested", those that it has.

    Returns:
        A view, [rows, heads, dim]; with "groups", [rows, groups, heads / groups, dim].
    """
    (queries, others, dim), number = heads, "qkv".index(which)
    if joined == "heads":
        return y.unflatten(1, (queries, 3, dim))[:, :, number]
    if joined == "groups":
        return y.unflatten(1, (groups, 3, queries // groups, dim))[:, :, "qvk".index(which)]
    if joined == "nested":
        each = y.unflatten(1, (others, y.shape[1] // others))
        return each[..., :dim] if which == "k" else each[..., each.shape[2] - dim :]
    counts = (queries, others, others)
    start = dim * sum(counts[:number]) if joined else 0
    return y[:, start : start + dim * counts[number]].unflatten(1, (counts[number], dim))
