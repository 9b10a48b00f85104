"""The slices of a model between its attentions, and the tensors that cross each cut (Lamina, section 3.1).

Attention of layer j cuts the model: q, k and v leave, the attention output enters, and the tensors that were made
before and are read after must be kept meanwhile. A pass on the meta device finds them: a dispatch mode sees every
operation, so no graph of the model is needed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexengine.errors import UnsupportedModel
from flexengine.model.forward import Attend, Forward, Inputs, Layer, Logits, PausingLayer
from flexengine.model.skeleton import Skeleton

HIDDEN = "hidden states"  # name of the input of a layer
TOKENS = 3  # of the pass

_View = tuple[tuple[int, ...], tuple[int, ...], int, int]  # sizes, strides, offset in elements, bytes of an element


class SlicedTensor(NamedTuple):
    """A tensor of one token.

    Attributes:
        name: q, k, v or output; of kept tensors, the module or the operation that made it.
        shape: without the dimension of the tokens.
        nbytes: bytes that are read.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Cut:
    """The tensors that cross the cut at the attention of one layer, for one token.

    Attributes:
        sent: q, k and v, to attention.
        fetched: output of attention.
        kept: tensors that are made before attention and read after it, such as the residual stream.
        window: tokens that a query sees, None for all.
    """

    sent: tuple[SlicedTensor, ...]
    fetched: SlicedTensor
    kept: tuple[SlicedTensor, ...]
    window: int | None

    @property
    def sent_bytes(self) -> int:
        """Bytes of q, k and v."""
        return sum(part.nbytes for part in self.sent)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept meanwhile."""
        return sum(part.nbytes for part in self.kept)


@dataclass(frozen=True)
class Slices:
    """A model that its n attentions cut into n + 1 slices.

    Attributes:
        cuts: of every layer.
        tables: tensors made from token ids and positions alone that slices read, such as rotary cos and sin. Weights,
            ids and positions are not among them.
    """

    cuts: tuple[Cut, ...]
    tables: tuple[SlicedTensor, ...]


def slices_of(skeleton: Skeleton) -> Slices:
    """Return the slices of a whole model on the meta device. Raise UnsupportedModel if its pass fails."""
    try:
        with torch.no_grad():
            return _traced(skeleton)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{skeleton.name}: the pass that finds its slices failed ({error or type(error).__name__})"
        ) from error


def _traced(skeleton: Skeleton) -> Slices:
    ids, positions = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    inputs = Inputs(ids, positions, torch.zeros(TOKENS, dtype=torch.int64, device="meta"))
    trace, moved, answer = _Trace(), list[tuple[tuple[SlicedTensor, ...], SlicedTensor]](), None
    forward = Forward(skeleton.model, inputs, _Both(trace, skeleton.invariance))
    with _on_meta(skeleton.model), _naming(skeleton.model, trace):
        trace.know((*skeleton.model.parameters(), *skeleton.model.buffers(), ids, positions, inputs.keep))
        while not isinstance(event := forward.resume(answer), Logits):
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


class _Both:
    """Context manager of two modes that can be entered again."""

    def __init__(self, *modes: Any) -> None:
        self._modes = modes

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for mode in self._modes:
            self._stack.enter_context(mode)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


@dataclass
class _Memory:
    """Memory of a tensor and of its views.

    Attributes:
        storage: kept, as its address is the key.
        made: attentions before the memory was made.
        of_tokens: whether the values depend on more than token ids and positions.
        name: module or operation that made it.
        named: whether `name` is that of a module.
        views: by attention that lies between making and reading, the views that are read.
    """

    storage: Any
    made: int
    of_tokens: bool
    name: str
    named: bool
    views: dict[int, set[_View]]


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory was made before an attention and is read after it.

    Attributes:
        attentions: attentions so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attentions = 0
        self._known: dict[int, Any] = {}  # storages
        self._made: dict[int, _Memory] = {}

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors out of the trace: weights and inputs."""
        self._known.update((_key(tensor), tensor.untyped_storage()) for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        sources = [self._memory(x, "input", of_tokens=True) for x in read if _key(x) not in self._known]
        of_tokens = any(memory.of_tokens for memory in sources)
        is_view = not func._schema.is_mutable and {_key(x) for x in made} <= {_key(x) for x in read}
        if not is_view:
            for tensor in read:
                self._note(tensor)
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
        crossing = (m for m in self._made.values() if m.of_tokens and attention in m.views)
        return tuple(_part(memory.name, memory.views[attention]) for memory in crossing)

    @property
    def tables(self) -> tuple[SlicedTensor, ...]:
        """The tensors made from ids and positions alone that were made before any attention and read after it."""
        crossing = (m for m in self._made.values() if not m.of_tokens and m.views)
        return tuple(_part(memory.name, set().union(*memory.views.values())) for memory in crossing)

    def _memory(self, tensor: Tensor, name: str, of_tokens: bool) -> _Memory:
        made = _Memory(tensor.untyped_storage(), self.attentions, of_tokens, name, False, defaultdict(set))
        return self._made.setdefault(_key(tensor), made)

    def _note(self, tensor: Tensor) -> None:
        memory = self._made.get(_key(tensor))
        if memory is not None:
            view = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size()
            for attention in range(memory.made, self.attentions):
                memory.views[attention].add(view)


def _key(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _part(name: str, views: set[_View]) -> SlicedTensor:
    """Return one token's part of the elements that some views of a memory read."""
    elements = []
    for sizes, strides, offset, _ in views:
        at = torch.tensor(offset)
        for size, stride in zip(sizes, strides, strict=True):
            at = at[..., None] + stride * torch.arange(size)
        elements.append(at.reshape(-1))
    count = int(torch.cat(elements).bincount().count_nonzero()) // TOKENS
    sizes, _, _, itemsize = max(views)
    shape = [n for n in sizes if n != 1]
    if TOKENS in shape:
        shape.remove(TOKENS)
    if math.prod(shape) != count:  # several views of one memory
        shape = [count]
    return SlicedTensor(name, tuple(shape), count * itemsize)


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


@contextmanager
def _naming(model: nn.Module, trace: _Trace) -> Iterator[None]:
    """Name the outputs of all modules of the model while the block runs: by their path in the layer."""

    def hook_of(path: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in filter(torch.is_tensor, tree_leaves(output)):
                trace.name(tensor, path)

        return hook

    layers = {path: module for path, module in model.named_modules() if isinstance(module, PausingLayer)}
    hooks = []
    for path, module in model.named_modules():
        layer = next((name for name in layers if f"{path}.".startswith(f"{name}.")), None)
        inside = path[len(layer) + 1 :].removeprefix("layer").lstrip(".") if layer is not None else path
        hooks.append(module.register_forward_hook(hook_of(inside or HIDDEN)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
