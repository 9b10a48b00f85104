"""The slices of a model between its attentions, and the tensors that cross each cut (Lamina, section 3.1).

Attention of layer j cuts the model: q, k and v leave, the attention output enters, and the tensors that were made
before and are read after must be kept meanwhile. A pass on the meta device finds them: a dispatch mode sees every
operation, so no graph of the model is needed.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexengine.errors import UnsupportedModel, library_faults
from flexengine.model.forward import Attend, Forward, Inputs, Layer, Logits, PausingLayer
from flexengine.model.skeleton import Skeleton

HIDDEN = "hidden states"  # name of the input of a layer
TOKENS = 3  # of the pass

_View = tuple[tuple[int, ...], tuple[int, ...], int, int]  # sizes, strides, offset in elements, bytes of an element


class SlicedTensor(NamedTuple):
    """A tensor of one token."""

    name: str  # q, k, v or output; of kept tensors, the module or the operation that made it
    shape: tuple[int, ...]  # without the dimension of the tokens
    nbytes: int  # bytes that are read


@dataclass(frozen=True)
class Cut:
    """The tensors that cross the cut at the attention of one layer, for one token."""

    sent: tuple[SlicedTensor, ...]  # q, k and v, to attention
    fetched: SlicedTensor  # output of attention
    # Tensors that are made before attention and read after it, such as the residual stream.
    kept: tuple[SlicedTensor, ...]
    window: int | None  # tokens that a query sees, None for all


@dataclass(frozen=True)
class Slices:
    """A model that its n attentions cut into n + 1 slices."""

    cuts: tuple[Cut, ...]  # of every layer
    # Tensors made from token ids and positions alone that slices read, such as rotary cos and sin.
    tables: tuple[SlicedTensor, ...]


def slices_of(skeleton: Skeleton) -> Slices:
    """Return the slices of a whole model on the meta device. Raise UnsupportedModel if its pass fails."""
    if skeleton.mixing or skeleton.choosing:
        which = "states beside keys and values" if skeleton.mixing else "an indexer that chooses keys"
        raise UnsupportedModel(f"{skeleton.name}: layers with {which} are not cut into slices")
    failed = f"{skeleton.name}: the pass that finds its slices failed"
    with library_faults(failed, UnsupportedModel), torch.no_grad():
        return _traced(skeleton)


def _traced(skeleton: Skeleton) -> Slices:
    model, names = skeleton.model, _paths(skeleton.model)
    ids, positions = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    inputs = Inputs(ids, positions, torch.zeros(TOKENS, dtype=torch.int64, device="meta"))
    forward, answer = Forward(model, inputs), None
    moved = list[tuple[tuple[SlicedTensor, ...], SlicedTensor]]()

    def name(module: nn.Module, _: Any, output: Any) -> None:
        for tensor in filter(torch.is_tensor, tree_leaves(output)):
            trace.name(tensor, names.get(module, HIDDEN))

    with _on_meta(model), register_module_forward_hook(name):
        trace = _Trace((*model.parameters(), *model.buffers(), ids, positions, inputs.keep))
        while True:
            with trace, skeleton.invariance:
                event = forward.resume(answer)
            if isinstance(event, Logits):
                break
            answer = skeleton.trial_answer(event)
            if isinstance(event, Layer):
                trace.name(event.hidden, HIDDEN)
            elif isinstance(event, Attend):
                trace.attentions += 1
                sent = tuple(_heads(name, x, 2) for name, x in (("q", event.q), ("k", event.k), ("v", event.v)))
                moved.append((sent, _heads("output", answer, 1)))
    cuts = (Cut(*both, trace.kept(j), skeleton.windows[j]) for j, both in enumerate(moved))
    return Slices(tuple(cuts), trace.tables)


def _heads(name: str, tensor: Tensor, dimension: int) -> SlicedTensor:
    """Return a tensor of all tokens as one token's. dimension: that of the tokens."""
    shape = tuple(n for i, n in enumerate(tensor.shape) if i not in (0, dimension))
    return SlicedTensor(name, shape, tensor.nbytes // TOKENS)


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module in its layer, or in the model; HIDDEN for a layer itself."""
    paths, layer = dict[nn.Module, str](), None
    for path, module in model.named_modules():
        layer = path if isinstance(module, PausingLayer) else layer
        inside = layer is not None and f"{path}.".startswith(f"{layer}.")
        paths[module] = (path[len(layer or "") + 1 :].removeprefix("layer").lstrip(".") if inside else path) or HIDDEN
    return paths


@dataclass
class _Memory:
    """Memory of a tensor and of its views."""

    storage: Any  # kept, as its address is the key
    made: int  # attentions before the memory was made
    of_tokens: bool  # whether the values depend on more than token ids and positions
    name: str  # module or operation that made it
    named: bool = False  # whether `name` is that of a module
    # Attentions before each read, and the view that was read.
    reads: set[tuple[int, _View]] = field(default_factory=set)

    def part(self, attention: int) -> SlicedTensor | None:
        """Return one token's part of the elements that are read after an attention; None if none are."""
        views = {view for before, view in self.reads if before > attention}
        if self.made > attention or not views:
            return None
        elements = set[int]()
        for sizes, strides, offset, _ in views:
            end = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
            elements.update(torch.arange(end).as_strided(sizes, strides, offset).flatten().tolist())
        count = len(elements) // TOKENS
        sizes, _, _, itemsize = max(views)
        shape = [n for n in sizes if n != 1]
        if TOKENS in shape:
            shape.remove(TOKENS)
        if math.prod(shape) != count:  # several views of one memory
            shape = [count]
        return SlicedTensor(self.name, tuple(shape), count * itemsize)


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory was made before an attention and is read after it. known: weights and inputs, left out."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attentions = 0  # so far
        self._known = {_key(tensor): tensor.untyped_storage() for tensor in known}
        self._made: dict[int, _Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        sources = [self._memory(x, "input", of_tokens=True) for x in read if _key(x) not in self._known]
        of_tokens = any(memory.of_tokens for memory in sources)
        if func._schema.is_mutable or not {_key(x) for x in made} <= {_key(x) for x in read}:  # it is no view
            for x in read:
                if (memory := self._made.get(_key(x))) is not None:
                    view = tuple(x.shape), x.stride(), int(x.storage_offset()), x.element_size()
                    memory.reads.add((self.attentions, view))
        for tensor in made:
            if _key(tensor) not in self._known:
                memory = self._memory(tensor, func._schema.name.split("::")[1], of_tokens)
                memory.of_tokens |= of_tokens
        return result

    def name(self, tensor: Tensor, name: str) -> None:
        """Name the memory of a module's output. The innermost module's name stays, unless it is a layer's input."""
        memory = self._made.get(_key(tensor))
        if memory is not None and (name == HIDDEN or not memory.named):
            memory.name, memory.named = name, True

    def kept(self, attention: int) -> tuple[SlicedTensor, ...]:
        """Return the tensors of tokens' values that were made before an attention and read after it."""
        return tuple(filter(None, (m.part(attention) for m in self._made.values() if m.of_tokens)))

    @property
    def tables(self) -> tuple[SlicedTensor, ...]:
        """The tensors made from ids and positions alone that were made before any attention and read after it."""
        return tuple(filter(None, (m.part(m.made) for m in self._made.values() if not m.of_tokens)))

    def _memory(self, tensor: Tensor, name: str, of_tokens: bool) -> _Memory:
        made = _Memory(tensor.untyped_storage(), self.attentions, of_tokens, name)
        return self._made.setdefault(_key(tensor), made)


def _key(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Move the buffers that have values to the meta device while the block runs."""
    buffers = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    for holder, name, buffer in buffers:
        holder[name] = buffer.to("meta")
    try:
        yield
    finally:
        for holder, name, buffer in buffers:
            holder[name] = buffer
