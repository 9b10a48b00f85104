"""A forward pass as a coroutine: unmodified `transformers` modules that pause for work of the engine.

The model is built on the meta device and runs inside a greenlet. Each pause has an event, and `Forward.resume` passes
the answer:

    event     pause                                                     answer
    Rows      before rows of weights that may be off the device         see `Rows`
    Layer     before decoder layer j; its weights must be bound now     hidden states, None to skip the layer
    Query     in layer j, before keys and values, if queries go first   none
    Attend    in layer j, at attention, unless it uses `Pass.paged`     [1, tokens, heads, value_dim]
    Mix       in layer j, at a module with a state (mixers.py)          `mixers.StateRecords`, or None in a trial
    Head      before a chunk of rows of the output projection           (weight rows, bias or None, format or None)
    Logits    end of the pass                                           none

The schedule decides which pass is resumed (docs/architecture.md 4).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from flexengine.errors import UnsupportedModel
from flexengine.kernels.paged import PagedAttention
from flexengine.model.sample import LogitStep

if TYPE_CHECKING:
    from flexengine.model.scores import Scores

ATTENTION = "flexengine"
OUTSIDE = "a flexengine model runs only inside Forward"  # message of an error
# Passed by some modules, without effect on a packed, causal forward pass without gradients.
_HARMLESS = {"dropout", "is_causal", "position_ids", "output_attentions"}
_HARMLESS |= {"use_cache", "cache_position", "logits_to_keep"}
EMBEDDING = -1  # `Rows.layer` of rows that are read before the first layer


class Rows(NamedTuple):
    """Rows of weights that the pass reads next. A row is one index of a tensor's first dimension.

    For an embedding, the answer is a tensor with the rows, and the index in this tensor for each id. For experts, the
    answer is None: the pass reads rows of the bound parameters.
    """

    layer: int  # or EMBEDDING
    tensors: tuple[str, ...]  # names of the parameters; the same rows of each are read
    ids: Tensor  # int64, of any shape, unsorted, with repeats: numbers of the rows


@dataclass(frozen=True, slots=True)
class Layer:
    """Pause before the decoder layer `index`, or after the last layer of a range."""

    index: int
    hidden: Tensor  # [1, tokens, hidden], input of the layer; of several residual streams, see `Skeleton.hidden_shape`


class Attend(NamedTuple):
    """Pause at the attention of a layer. scale, window, softcap, sinks: as in `kernels.base.Kernels`."""

    layer: int
    q: Tensor  # [1, heads, tokens, head_dim]
    k: Tensor  # [1, kv_heads, tokens, head_dim]
    v: Tensor  # [1, kv_heads, tokens, value_dim]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    mask: Tensor | None = None  # only in a trial pass (build.py)
    choice: Any = None  # `adapters.sparse.ChosenKeys` if tokens see chosen keys only, or `adapters.inkling.ByDistance`


class Query(NamedTuple):
    """Pause at the queries of a layer, before its keys and values are computed (queries.py). The pause at attention
    follows. attend: k and v have their shapes, but no values."""

    attend: Attend


class Mix:
    """Pause at a module that mixes the tokens of each sequence through a state."""


class Head(NamedTuple):
    """Pause before a chunk of rows of the output projection. chunk: number of the chunk."""

    chunk: int


class Logits(NamedTuple):
    """The end of the pass. values: [1, kept tokens, vocabulary]; without the tokens that are scored."""

    values: Tensor


Pause = Rows | Layer | Query | Attend | Mix | Head | Logits


class Queried(Exception):
    """Ends the run of an attention module that computes queries only."""


class Elsewhere(Exception):
    """Ends a layer at its attention: another process computes the rest of it (guests/replicas)."""


def pause(event: Any) -> Any:
    """Pause the forward pass with an event. Return the answer that the pass is resumed with."""
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError(OUTSIDE)
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
    """Pause for attention, and return its output: the attention function of all modules (`AttentionInterface`).

    Raise UnsupportedModel if the module passes an option that the engine does not support.
    """
    choice = next((others.pop(name) for name, value in [*others.items()] if hasattr(value, "attended")), None)
    if unknown := sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS):
        raise UnsupportedModel(f"its attention passes {', '.join(unknown)}, which the engine does not support")
    if (known := getattr(greenlet.getcurrent(), "attended", None)) is not None:
        this_pass().attended = None
        return known, None
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    event = Attend(layer, query, key, value, scale, sliding_window, softcap, s_aux, attention_mask, choice)
    if choice is not None:
        return choice.attended(event), None
    if getattr(greenlet.getcurrent(), "only_queries", False):
        pause(Query(event))
        raise Queried
    return pause(event), None


AttentionInterface.register(ATTENTION, attend)


class PausingLayer(nn.Module):
    """A decoder layer that pauses before it computes. One with a negative number returns its input (layer_range.py)."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.layer, self.index = layer, index
        self.outputs: int | None = None  # length of the tuple that is returned if modules do not return it
        self.native: Any = None  # computes the layer, and layers after it, by native kernels; None if modules do

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models read e.g. attention_type of layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if self.index < 0:
            return self._returned(hidden)
        current, positions = this_pass(), kwargs.get("position_embeddings")
        joined = hidden is current.output and positions is current.positions
        if self.index < current.computed:
            if not joined:
                raise RuntimeError(f"layer {self.index} was computed ahead with another input than its own")
            return self._returned(hidden)
        current.output = None
        entered = pause(Layer(self.index, hidden))
        if entered is None:
            return self._returned(hidden)
        if self.native is not None:
            self.native.joined = joined or (current.rotates and self.native.joined)
        try:
            if self.native is not None and self.native.usable(entered, positions):
                count, current.output = self.native(entered, positions)
                current.positions, current.computed = positions, self.index + count
                return self._returned(current.output)
            if "hidden_states" in kwargs:
                return self.layer(*args, **(kwargs | {"hidden_states": entered}))
            return self.layer(entered, *args[1:], **kwargs)
        except Elsewhere:
            return self._returned(hidden)

    def _returned(self, hidden: Any) -> Any:
        """Return hidden states as the layer returns them."""
        return hidden if self.outputs is None else (hidden, *[None] * (self.outputs - 1))


def pausing_layers(model: nn.Module) -> list[PausingLayer]:
    """Return the layers with a number of 0 or more, in order."""
    layers = [module for module in model.modules() if isinstance(module, PausingLayer) and module.index >= 0]
    return sorted(layers, key=lambda layer: layer.index)


class PausingEmbedding(nn.Module):
    """An embedding whose table has only the rows of the current tokens. The module still applies scaling."""

    def __init__(self, embedding: nn.Embedding, name: str) -> None:
        super().__init__()
        self.embedding, self.name = embedding, name  # name: the table's among the model's parameters
        embedding.padding_idx = None  # only for gradients; torch would compare it with the number of rows

    def forward(self, ids: Tensor) -> Any:
        rows, ids = pause(Rows(EMBEDDING, (self.name,), ids))
        self.embedding._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        try:
            embedded, current = self.embedding(ids), this_pass()
            current.embedded = None if current.recycles else embedded
            return embedded
        finally:  # free the rows, but keep a table: models read its device
            self.embedding._parameters["weight"] = nn.Parameter(rows.new_empty(0, rows.shape[1]), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A table without values, for modules that read its dtype or device. Rows are NaN: a module may choose between
        one and other numbers, such as that of padding for the tokens of an image."""
        table, inputs = self.embedding.weight, getattr(greenlet.getcurrent(), "inputs", None)
        row = table.new_full((1, table.shape[1]), math.nan, device=inputs.ids.device if inputs else None)
        return row.expand(self.embedding.num_embeddings, -1)


class PausingHead(nn.Module):
    """The output projection, computed in `chunks` chunks of vocabulary rows.

    Its last input rows are those of the tokens that the pass scores (`Inputs.scores`), if any. Their logits are added
    to the scores part by part, and not returned. Only scores need `step`, as the model applies it to the rest.
    """

    def __init__(self, vocabulary: int, chunks: int, linear: Any, step: LogitStep) -> None:
        super().__init__()
        self.vocabulary, self.chunks, self.linear, self.bias = vocabulary, chunks, linear, None  # linear: a Product
        self.step = step
        self.selects = False  # whether the model knows no `logits_to_keep`, so that the rows of all tokens come

    @property
    def weight(self) -> Tensor:
        """A table without rows, for modules that read its dtype."""
        return torch.empty(0, dtype=self.linear.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.step.given is not None:
            return self.step.given
        current: Any = greenlet.getcurrent()
        current.output = current.positions = current.embedded = None
        scores, kept = current.inputs.scores, current.inputs.keep
        if hidden.shape[1] == current.inputs.ids.shape[1] != len(kept):  # in the trial pass at the latest
            self.selects = True
        hidden = hidden[:, kept] if self.selects else hidden
        count = hidden.shape[1] - (len(scores) if scores else 0)
        hidden, scored = hidden[:, :count], hidden[:, count:]
        logits, first = hidden, 0  # first: vocabulary row
        for chunk in range(self.chunks):
            weights = pause(Head(chunk))  # weight, bias, form
            part: Tensor = self.linear(hidden, *weights)
            for row, some in scores.parts(scored) if scores else ():
                scores.add(self.step(self.linear(some, *weights))[0], row, first)
            if part.shape[-1] == self.vocabulary:
                return part
            if not first:
                logits = part.new_empty((*part.shape[:-1], self.vocabulary))
            logits[..., first : first + part.shape[-1]] = part
            first += part.shape[-1]
        return logits


@dataclass
class Inputs:
    """Packed tokens of one gpu_batch."""

    ids: Tensor  # int64 [1, tokens]
    positions: Tensor  # int64 [1, tokens]
    keep: Tensor  # int64 [n], indices of the tokens to compute logits for; last, those of the tokens that are scored
    scores: "Scores | None" = None  # receives the logits of the tokens that are scored; None if there are none
    # Bool [tokens], in RAM: tokens whose neurons are predicted in blocks of records (neurons.py); the others use all
    # neurons. None if no token's are.
    predicted: Tensor | None = None


class Pass(greenlet.greenlet):  # type: ignore[misc]
    """The greenlet of a forward pass."""

    inputs: Inputs  # of the pass, for modules that do not get them (model/adapters)
    queries_first = False  # whether it also pauses at queries (queries.py)
    only_queries = False  # whether the present run of an attention module computes queries only
    # Output of the query projection, from the first to the second run of an attention module.
    queries: Tensor | None = None
    block: Tensor | None = None  # output of a feed-forward block of records, until the block's last module returns it
    # Attention of the next layer, and of layers after it, which need not pause at attention. They differ in nothing but
    # `pool`. If it is empty, the next layer must pause at attention.
    paged: Sequence[PagedAttention] = ()
    computed = 0  # number of the layer after the last one that calls of kernels (native/layer.py) have computed
    output: Tensor | None = None  # output of this layer before; None if modules compute it
    positions: Any = None  # position embeddings that this layer before got
    embedded: Tensor | None = None  # output of the embedding, if hidden states leave the device between layers
    rotates = False  # whether other processes compute some slices (guests/replicas); no layer is joined then
    attended: Tensor | None = None  # attention of the next layer, if it is known before its queries
    choice: Any = None  # keys that the last indexer chose (adapters/sparse.py)
    recycles = False  # whether outputs of layers may be in memory that is used again (kernels/recycled.py)

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__(run)
        self.gr_context = copy_context()  # else reports of the pass have no listener


def this_pass() -> Pass:
    """Return the pass that runs. Raise RuntimeError outside of one."""
    if not isinstance(current := greenlet.getcurrent(), Pass):
        raise RuntimeError(OUTSIDE)
    return current


class Forward:
    """A forward pass of one gpu_batch. Only the thread that first resumes the pass can resume or end it."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        mode: AbstractContextManager[Any] | None = None,
        queries_first: bool = False,
        recycles: bool = False,
        rotates: bool = False,
    ) -> None:
        """Make a pass without starting it. mode: entered while the model runs. queries_first: whether it pauses at
        queries (`queries.use_queries_first` prepares the model). recycles, rotates: see `Pass`; the first not if memory
        of outputs is freed while the pass is paused."""
        self._model, self.inputs, self._mode = model, inputs, mode
        self._settings = {"inputs": inputs, "queries_first": queries_first, "recycles": recycles, "rotates": rotates}
        self._greenlet: Any = None
        self.records: Callable[[], Any] | None = None  # returns the answer to a `Mix`; without it the pass pauses

    def _run(self) -> Logits:
        packed = {"input_ids": self.inputs.ids, "position_ids": self.inputs.positions}
        return Logits(self._model(**packed, use_cache=False, logits_to_keep=self.inputs.keep).logits)

    def resume(self, value: Any = None, paged: Sequence[PagedAttention] = ()) -> Pause:
        """Run to the next pause, and return its event.

        Args:
            value: the answer to the last event.
            paged: see `Pass`. The event tells how many were used: it is the pause after the layers that are
                computed. If none was, it is an `Attend`.
        """
        with self._mode or nullcontext():
            if self._greenlet is None:
                self._greenlet = Pass(self._run)
                vars(self._greenlet).update(self._settings)
                event: Pause = self._greenlet.switch()
            else:
                self._greenlet.paged = paged
                event = self._greenlet.switch(value)
            while isinstance(event, Mix) and self.records is not None:
                event = self._greenlet.switch(self.records())
        return event

    def finish(self, hidden: Tensor, attended: Tensor) -> Pause:
        """Compute the layer at whose start the pass is paused, with its attention. Return the next pause.

        Args:
            hidden: as for `resume`.
            attended: [1, tokens, heads, value_dim].
        """
        self._greenlet.attended = attended
        return self.resume(hidden)

    def leave_layer(self) -> Pause:
        """Leave the layer at whose attention the pass is paused: its output is computed elsewhere. Return the next
        pause, whose hidden states have no meaning."""
        with self._mode or nullcontext():
            event: Pause = self._greenlet.throw(Elsewhere)
        return event

    def free_embedding(self) -> None:
        """Free the memory of the embedding's output, which frames of a paused pass refer to."""
        if self._greenlet.embedded is not None:
            self._greenlet.embedded.untyped_storage().resize_(0)
            self._greenlet.embedded = None

    def end(self) -> None:
        """Unwind a paused pass, to free its frames and tensors."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()
            self._greenlet.output, self._greenlet.positions, self._greenlet.paged = None, None, ()
            self._greenlet.embedded = self._greenlet.choice = None
