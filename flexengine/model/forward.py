"""A forward pass as a coroutine: unmodified `transformers` modules that pause where the engine has work to do.

The model is built on the meta device and runs inside a greenlet. It pauses

    Rows      where rows of weights are read that may be off the device; the ids of the rows are known only here
    Layer     before decoder layer j, with the hidden states: bind its weights, then go on
    Attend    inside layer j, with q, k, v: give me the attention output
    Head      before rows of the output projection: give me these rows (and their bias)

The schedule decides which pass is resumed (docs/architecture.md 4).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import greenlet
from torch import Tensor, nn
from transformers import AttentionInterface

from flexengine.errors import UnsupportedModel

ATTENTION = "flexengine"
_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
# Passed by some modules, and without effect on one packed, causal, inference-only forward.
_HARMLESS = {"dropout", "is_causal", "position_ids", "output_attentions", "use_cache", "cache_position",
             "logits_to_keep"}  # fmt: skip


EMBEDDING = -1  # the `layer` of rows that are read before the first layer


class Rows(NamedTuple):
    """Rows of weights that the pass reads next. A row is one index of a tensor's first dimension.

    The answer for an embedding is a pair: a tensor with the rows, and for each id its row in that tensor. For experts
    the answer is None: the pass reads them where the module's parameters are bound.

    Attributes:
        layer: decoder layer, or EMBEDDING.
        tensors: names of the parameters. The ids hold for each of them.
        ids: int64, of any shape, in any order, with repeats.
    """

    layer: int
    tensors: tuple[str, ...]
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    index: int
    hidden: Tensor  # [1, tokens, hidden]


class Attend(NamedTuple):
    layer: int
    q: Tensor  # [1, heads, tokens, head_dim]
    k: Tensor  # [1, kv_heads, tokens, head_dim]
    v: Tensor  # [1, kv_heads, tokens, value_dim]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    mask: Tensor | None = None  # only ever a marker, in a trial pass (masks.py)


class Head(NamedTuple):
    chunk: int


class Logits(NamedTuple):
    """The end of the pass. values: [1, kept tokens, vocabulary]."""

    values: Tensor


Pause = Rows | Layer | Attend | Head | Logits


def pause(event: Any) -> Any:
    """Leave the forward pass with an event. Return the answer with which the pass is resumed."""
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError("a flexengine model runs only inside Forward")
    return parent.switch(event)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"its attention passes {', '.join(unknown)}, which the engine does not honour")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return pause(Attend(layer, query, key, value, scale, sliding_window, softcap, s_aux, attention_mask)), None


AttentionInterface.register(ATTENTION, attend)


class PausingLayer(nn.Module):
    """A decoder layer that waits for its weights.

    Attributes:
        index: number of the layer. A layer with a negative number returns its input (layer_range.py).
        outputs: number of values that a layer with a negative number returns; None if it returns a tensor, not a tuple.
    """

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.layer, self.index = layer, index
        self.outputs: int | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models ask their layers for e.g. attention_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.index < 0:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            return hidden if self.outputs is None else (hidden, *[None] * (self.outputs - 1))
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = pause(Layer(self.index, kwargs["hidden_states"]))
        else:
            args = (pause(Layer(self.index, args[0])), *args[1:])
        return self.layer(*args, **kwargs)


class PausingEmbedding(nn.Module):
    """An embedding that gets only the rows it needs; scaling and the like stay the module's own."""

    def __init__(self, embedding: nn.Embedding, name: str) -> None:
        """name: of the table among the model's parameters."""
        super().__init__()
        self.embedding, self.name = embedding, name
        embedding.padding_idx = None  # matters to gradients only, and is checked against the rows at hand

    def forward(self, ids: Tensor) -> Any:
        rows, ids = pause(Rows(EMBEDDING, (self.name,), ids))
        self.embedding._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        try:
            return self.embedding(ids)
        finally:  # hold no rows between passes, not even their storage; but models ask the table where it is
            self.embedding._parameters["weight"] = nn.Parameter(rows.new_empty(0, rows.shape[1]), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A table without rows, for those who ask for its dtype or device."""
        return self.embedding.weight


class PausingHead(nn.Module):
    """The output projection, `chunks` runs of vocabulary rows one after another."""

    def __init__(self, vocabulary: int, chunks: int, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self.vocabulary, self.chunks, self.linear, self.bias = vocabulary, chunks, linear, None

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor | None = None
        done = 0
        for chunk in range(self.chunks):
            part = self.linear(hidden, *pause(Head(chunk)))  # weight, bias, form
            if part.shape[-1] == self.vocabulary:
                return part
            if logits is None:
                logits = part.new_empty((*part.shape[:-1], self.vocabulary))
            logits[..., done : done + part.shape[-1]] = part
            done += part.shape[-1]
        assert logits is not None
        return logits


@dataclass
class Inputs:
    """Packed tokens of one gpu_batch: ids and positions `[1, tokens]`, keep `[n]` = tokens whose logits are wanted."""

    ids: Tensor
    positions: Tensor
    keep: Tensor


class _Pass(greenlet.greenlet):  # type: ignore[misc]
    """positions: of the pass's tokens, for attention that needs them beyond what modules are told (adapters.py)."""

    positions: Tensor


class Forward:
    """One pass of one gpu_batch. It belongs to the thread that first resumes it."""

    def __init__(self, model: nn.Module, inputs: Inputs, mode: AbstractContextManager[Any] | None = None) -> None:
        """mode: active while the model runs, and only then."""
        self._model, self.inputs, self._mode = model, inputs, mode
        self._greenlet: Any = None

    def _run(self) -> Logits:
        inputs = self.inputs
        out = self._model(
            input_ids=inputs.ids, position_ids=inputs.positions, use_cache=False, logits_to_keep=inputs.keep
        )
        return Logits(out.logits)

    def resume(self, value: Any = None) -> Pause:
        """Goes on to the next pause, answering the last one with `value`."""
        with self._mode or nullcontext():
            if self._greenlet is None:
                self._greenlet = _Pass(self._run)
                self._greenlet.positions = self.inputs.positions
                event: Pause = self._greenlet.switch()
            else:
                event = self._greenlet.switch(value)
        return event

    def end(self) -> None:
        """Unwinds a pass that has paused and is not to go on; else its frames and tensors would never be freed."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()
