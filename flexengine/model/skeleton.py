"""A model without weights: its modules on the meta device, divided into units (build.py makes one)."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.codec.forms import WeightFormat
from flexengine.model.checkpoint import Loading
from flexengine.model.config import context_of
from flexengine.model.forward import Attend, Forward, Head, Inputs, Layer, Logits, Mix, Pause, PausingHead, Query
from flexengine.model.linear import FastConv1D, FastLinear, Invariance, Product, is_experts

TRIAL_TOKENS = 13  # a number that is not that of heads, experts or other parts of a model


class ParamRef(NamedTuple):
    """Reference to one parameter or buffer: attribute `name` of `module`, which has this shape."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]

    @property
    def holder(self) -> dict[str, Any]:
        """The module's dict, of parameters or buffers, that holds the tensor."""
        parameters: dict[str, Any] = self.module._parameters  # type: ignore[assignment]
        return parameters if self.name in parameters else self.module._buffers

    @property
    def linear(self) -> bool:
        """Whether it is the weight of a linear layer, which only a Product reads."""
        return self.name == "weight" and isinstance(self.module, FastLinear)

    @property
    def matrix(self) -> tuple[int, int, int, bool] | None:
        """Experts (0 for a single matrix), output channels and inputs of what a Product reads, and whether it is stored
        as [in, out]; None for other parameters. Matrices of experts are stacked."""
        if len(self.shape) == 3 and is_experts(self.module):
            (count, *shape), turned = self.shape, bool(self.module.is_transposed)
        elif self.name == "weight" and isinstance(self.module, FastLinear | FastConv1D):
            count, shape, turned = 0, [*self.shape], isinstance(self.module, FastConv1D)
        else:
            return None
        rows, columns = reversed(shape) if turned else shape
        return count, rows, columns, turned

    def bind(self, tensor: Tensor) -> None:
        """Make `tensor` the module's parameter or buffer."""
        self.holder[self.name] = tensor


@dataclass
class Skeleton:
    """A model without weights, or a range of its layers (layer_range.py)."""

    model: Any  # a transformers.PreTrainedModel on the meta device, with pausing modules
    config: Any  # configuration of transformers
    name: str  # class and directory of the model, for messages
    layers: list[dict[str, ParamRef]]  # per decoder layer of the range, its parameters by name
    others: dict[str, ParamRef]  # parameters outside layers, embedding and head
    embedding: tuple[str, tuple[int, ...]]  # name and shape of the embedding's weight
    head: tuple[str, tuple[int, ...]]  # name and shape of the output projection's weight
    head_bias: str | None  # name of the output projection's bias, None if there is none
    tied: bool  # whether head and embedding are one tensor
    width: int  # elements per token of the widest activation of a layer
    head_module: PausingHead  # module in place of the output projection
    product: Product  # computes the model's matrix products
    invariance: Invariance  # see `mode`
    loading: Loading  # renames and conversions of the checkpoint
    # Embeddings beside that of the token ids whose rows stay in the checkpoint (tables.py), by name: a `tables.Table`.
    tables: dict[str, Any] = field(default_factory=dict)
    hidden_shape: tuple[int, ...] = ()  # of hidden states between layers, with -1 for the number of tokens
    held: int = (
        0  # bytes that a paused pass holds for each token beside hidden states; 0 if it is what `paused` assumes
    )
    heads: int = 0  # query heads
    # Shape of K, and of V, of a token in the KV cache; all layers are padded to the largest (`Cache.prepared`).
    kv_heads: int = 0
    head_dim: int = 0
    # By layer, number of tokens that a query sees; None for all.
    windows: dict[int, int | None] = field(default_factory=dict)
    mixing: Any = None  # a `mixers.Mixing`, if modules keep a state for each sequence beside keys and values
    chunk: int | None = None  # most tokens of a row that sees all of them, if tokens of longer ones see some only
    added: int = 0  # numbers that attention adds to a token's scores, by distance and head (adapters/inkling.py)
    choosing: int = 0  # keys that a token sees in layers with an indexer (adapters/sparse.py); 0 without such layers
    always_chooses: bool = False  # whether tokens of short rows see chosen keys, too
    inherits: set[int] = field(default_factory=set)  # layers that see keys which a layer before chose, of all layers
    entry_tokens: int = 0  # tokens for which a later token sees one key more, if layers choose none (deepseek_v4.py)
    # By layer that native kernels do not compute, the reason (native/recognise.py).
    as_modules: dict[int, str] = field(default_factory=dict)
    forms: dict[str, WeightFormat] = field(default_factory=dict)  # format of each encoded parameter, by name
    total: int = 0  # number of decoder layers of the whole model
    first: int = 0  # number of `layers[0]` in the whole model
    early: frozenset[str] = frozenset()  # parameters of layers that are used before attention only; none if unknown
    embedding_stays: bool = True  # whether layers may read values of the embedding beside hidden states
    queries_apart: bool = False  # whether queries can be computed before keys and values (queries.py)

    @property
    def layer_range(self) -> tuple[int, int]:
        """First layer, and last layer + 1, in the whole model."""
        return self.first, self.first + len(self.layers)

    @property
    def hidden_width(self) -> int:
        """Elements per token of hidden states between layers: those of all residual streams."""
        return -math.prod(self.hidden_shape)

    @property
    def enters(self) -> bool:
        """Whether hidden states enter from earlier layers."""
        return self.first > 0

    @property
    def leaves(self) -> bool:
        """Whether hidden states leave to later layers."""
        return self.layer_range[1] < self.total

    def mode(self, device: torch.device) -> Invariance | None:
        """Return the torch function mode of a forward pass on a device.

        None on a GPU: there a token's last bits depend on its batch in any case, and a mode would only delay the
        queueing of kernels.
        """
        return self.invariance if device.type == "cpu" else None

    @property
    def module_words(self) -> tuple[str, ...]:
        """Texts that say which layers run as modules of transformers, not as calls of native kernels, and why."""
        count, texts = len(self.layers), list[str]()
        reasons = [why for layer, why in self.as_modules.items() if layer < count]  # a range ends before others
        for reason in dict.fromkeys(reasons):
            some = reasons.count(reason)
            texts.append(f"{some} of {count} layers run as modules of transformers, which is slower: {reason}")
        return tuple(texts)

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter that the checkpoint must hold, by name."""
        names = {name: slot.shape for layer in (*self.layers, self.others) for name, slot in layer.items()}
        names |= {name: table.shape for name, table in self.tables.items()}
        if not self.enters:
            names[self.embedding[0]] = self.embedding[1]
        if not self.leaves:
            names[self.output] = self.head[1]
            if self.head_bias:
                names[self.head_bias] = self.head[1][:1]
        return names

    @property
    def output(self) -> str:
        """Name of the output projection's weight: the embedding's, where they are tied."""
        return self.embedding[0] if self.tied else self.head[0]

    @property
    def matrices(self) -> set[str]:
        """Names of the parameters that only a Product or an embedding reads: they can keep their stored dtype."""
        slots = [item for group in (*self.layers, self.others) for item in group.items()]
        read = {n for n, slot in slots if slot.matrix is not None and not slot.matrix[3]}
        return read | {self.embedding[0], self.head[0]}

    @property
    def experts(self) -> dict[str, int]:
        """Number of experts of each parameter that holds the matrices of experts."""
        matrices = ((n, slot.matrix) for layer in self.layers for n, slot in layer.items())
        return {n: matrix[0] for n, matrix in matrices if matrix is not None and matrix[0]}

    @property
    def active(self) -> int:
        """Number of experts that one token uses; 0 for a model without experts. Configs have several names for it."""
        config = self.config.get_text_config()
        names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
        counts = (n for name in names if isinstance(n := getattr(config, name, None), int))
        return next(counts, 1) if self.experts else 0

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of a sequence; None if the config does not state it."""
        stated = context_of(self.config)
        return stated if self.chunk is None else min(self.chunk, stated or self.chunk)

    def use_forms(self, forms: dict[str, WeightFormat]) -> None:
        """Set the format of every encoded weight on its module."""
        self.forms = forms
        for layer in self.layers:
            for name, slot in layer.items():
                others = {n: form for n, form in getattr(slot.module, "forms", {}).items() if n != slot.name}
                own = {slot.name: forms[name].packed} if name in forms else {}
                slot.module.forms = {**others, **own}  # type: ignore[assignment]

    def trial(self, skipped: Collection[int] = ()) -> Iterator[Pause]:
        """Run `TRIAL_TOKENS` packed tokens on the meta device. Yield each pause, and the logits. skipped: layers to
        skip."""
        ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.int64, device="meta")
        forward, answer = Forward(self.model, Inputs(ids, ids, ids[0, :2]), self.invariance), None
        try:
            while not isinstance(event := forward.resume(answer), Logits):
                yield event
                skips = isinstance(event, Layer) and event.index in skipped
                answer = None if skips else self.trial_answer(event)
            yield event
        finally:
            forward.end()

    def trial_answer(self, event: Any) -> Any:
        """Return the answer to a pause of a pass on the meta device, where weights and attention have no values."""
        if isinstance(event, Layer):  # hidden states that enter a range of layers do not depend on the embedding
            return event.hidden if event.index else event.hidden.detach()
        if isinstance(event, Query | Mix):
            return None
        if isinstance(event, Attend):
            return event.q.new_empty(1, event.q.shape[2], event.q.shape[1], event.v.shape[-1])
        shape = self.head[1] if isinstance(event, Head) else self.embedding[1]
        weight = torch.empty(shape, device="meta", dtype=self.model.dtype)
        return (weight, None, None) if isinstance(event, Head) else (weight, event.ids)
