"""A model in numbers: its tensors, their bytes, and the keys of its measured rates."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

# Neurons of a layer that have room in memory at least, and as a share. Tokens that use more than there is room for are
# computed in parts (`neurons.part_of`), which must be large enough for good rates of reads and products.
LEAST_NEURONS, LEAST_SHARE = 64, 1 / 32
NO_ATTENTION = -1  # the window of a layer without attention


@dataclass(frozen=True)
class TensorFact:
    """Size and format of one weight."""

    name: str  # as in the checkpoint
    elements: int
    stored: int  # bytes per element in the checkpoint
    held: int  # bytes per element on the device
    experts: int = 0  # number of experts in the tensor, 0 if every token uses all of it
    matrix: bool = True  # whether tokens are multiplied by the tensor
    # bytes of the whole tensor if it is encoded, the same on every tier; else 0. An encoded tensor can be split
    # at multiples of `together` rows only.
    encoded: int = 0
    together: int = 16  # rows of an encoded tensor that are encoded together
    form: str = ""  # name of the format, "" for plain
    early: bool = False  # whether its layer uses it before attention only
    most: int = 0  # of an encoded output projection: bytes of `together` rows, of which the last have fewer

    @property
    def rows_together(self) -> int:
        """Return the number of rows that are read together, 1 if the tensor is plain."""
        return self.together if self.encoded else 1

    @cached_property
    def stored_bytes(self) -> int:
        """Return the bytes in the checkpoint, on disk and on the host."""
        return self.encoded or self.elements * self.stored

    @cached_property
    def held_bytes(self) -> int:
        """Return the bytes on the device."""
        return self.encoded or self.elements * self.held

    def used(self, active: int) -> float:
        """Return the elements that one token uses. active: number of experts that it uses."""
        return self.elements * (min(1.0, active / self.experts) if self.experts else 1.0)


@dataclass(frozen=True)
class NeuronFacts:
    """A layer's sparse feed-forward block, whose neurons are read when they become active."""

    neurons: int  # their number
    record: int  # bytes of the weights of one neuron
    form: str  # format of a record
    predictor: int = 0  # bytes of the predictor, which is no weight of the layer; 0 for an oracle
    guess: int = 0  # bytes that are read from memory to tell which neurons become active
    # share of the neurons that 1, 2, ... tokens of different sequences use together; () if not measured.
    unions: tuple[float, ...] = ()
    # share of the neurons that 1, 2, ... successive tokens of a sequence use together, as far as it is known.
    reuse: tuple[float, ...] = ()
    stored: int = 0  # bytes of the weights of one neuron on the disk, if these are others than `record`; else 0
    decoded: int = 0  # bytes of one vector of a neuron after decoding; 0 if records are not encoded
    # whether the neurons are the experts of a mixture, which the router names. Prompts use all of them.
    experts: bool = False

    @property
    def read_bytes(self) -> int:
        """Return the bytes that are read of one neuron."""
        return self.stored or self.record

    @property
    def signature(self) -> str:
        """Return the key of `Hardware.blocks`: equal for blocks whose records are read and computed at equal rates."""
        named = ", named by a predictor" if self.predictor else ""
        return f"{'experts' if self.experts else 'records'} of {self.record} bytes, {self.form}{named}"

    @property
    def least(self) -> int:
        """Return the fewest neurons that memory must have room for."""
        return 1 if self.experts else min(self.neurons, max(LEAST_NEURONS, int(LEAST_SHARE * self.neurons)))


class CacheGroup(NamedTuple):
    """Layers whose queries see equally many tokens, and so have equally many KV pages; or layers with states of equal
    size beside keys and values, whose records are pages that never fill (`schedule.pages`)."""

    window: int | None  # tokens that a query sees, None for all
    layers: tuple[int, ...]  # numbers of the layers; of those with states, ~number
    state: int = 0  # bytes of a record; 0 for keys and values


class TableFacts(NamedTuple):
    """An embedding beside that of the token ids, whose rows are read when tokens use them."""

    nbytes: int  # as stored
    rows: int
    lookups: int  # rows that a token uses
    layer: int | None  # that reads it; None if it is read before the first layer


@dataclass(frozen=True)
class ModelFacts:
    """A model, or a range of its layers, in numbers."""

    layers: tuple[tuple[TensorFact, ...], ...]  # tensors of each layer
    others: tuple[TensorFact, ...]  # tensors outside the layers, embedding and head
    embedding: TensorFact | None  # the embedding table, None if hidden states enter from layers before the range
    head: TensorFact | None  # the output projection, None if it is tied to the embedding
    vocabulary: int  # rows of the head
    hidden: int  # elements of a token's hidden state
    width: int  # elements of the widest activation of a token in a layer
    heads: int
    kv_heads: int
    head_dim: int  # elements of one head
    itemsize: int  # bytes per element in the compute dtype
    kind: str = ""  # model type of the config
    active: int = 0  # number of experts that one token uses
    # per layer, tokens that a query sees (None: all), or NO_ATTENTION; () if every layer sees all
    windows: tuple[int | None, ...] = ()
    # per layer, bytes of a sequence's states beside keys and values, rounded up to ALIGN; () if no layer has any
    states: tuple[int, ...] = ()
    grain: int = 1  # prompts are cut at multiples of this number of tokens
    # of modules with states: most bytes of temporary tensors for each prompt token, most tokens of a call; the same for
    # each sequence that decodes; and most bytes that a sequence's decode step reads and writes
    mixing: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    # keys that a token sees in layers with an indexer, which are those without a window; heads of the indexer, and
    # elements of each; () if there are none
    choosing: tuple[int, ...] = ()
    always_chooses: bool = False  # whether tokens of short rows see chosen keys, too
    # numbers of layers whose tokens see the keys that a layer before chose; of the whole model, also in a range
    inherits: frozenset[int] = frozenset()
    entry_tokens: int = 0  # tokens of a row for which a token sees one key more than those of `choosing`; 0: none
    added: int = 0  # numbers that attention adds to a token's scores (adapters/inkling.py); 0 for none
    softcap: float | None = None  # limit of attention scores, None for no limit
    kv_kept: int = 0  # bytes that one token adds to one layer's KV cache if K and V are encoded; else 0
    kv_pieces: int = 1  # number of places in a page that hold parts of one head's K of a token
    centred: bool = False  # whether mean keys are stored apart from the keys
    topk: float | None = None  # share of the past values that attention reads, None for all
    rounded: bool = False  # whether attention of prompts multiplies numbers rounded to bf16
    scratch: int = 0  # bytes of scratch memory of prompt attention, without arguments and result
    drawing: int = 0  # threads that draw tokens, each with scratch memory; 0 on a GPU
    kv_form: str = ""  # name of the format of K and V, "" for the compute dtype
    gpu: bool = False  # whether a GPU computes
    leaves: bool = False  # whether hidden states leave to layers after the range, so that there is no head
    embedding_stays: bool = True  # whether layers may read values of the embedding beside hidden states
    queries_apart: bool = True  # whether queries can be computed before keys and values
    as_modules: tuple[str, ...] = ()  # texts: which layers run as modules of transformers, and why; () if none does
    # per layer, its block whose neurons are read when they become active, if any; () if no layer has one. Their
    # weights are not among `layers`.
    blocks: tuple[NeuronFacts | None, ...] = ()
    tables: tuple[TableFacts, ...] = ()  # embeddings whose rows stay in the checkpoint; they are no weights here
    held: int = (
        0  # bytes of a token in a paused pass beside hidden states, if they are more than `sizes.paused` assumes
    )
    streams: int = 1  # residual streams: hidden states between layers have as many times `hidden` elements per token

    @property
    def alone(self) -> bool:
        """Return whether the device alone computes attention and what belongs to it: states, or an indexer."""
        return bool(self.states or self.choosing or self.added)

    def most_read(self, window: int | None) -> int | None:
        """Return the most keys that attention of a token reads in layers with a window; None for all."""
        return self.choosing[0] if window is None and self.choosing else window

    def chooses(self, longest: int) -> bool:
        """Return whether tokens of sequences of up to `longest` tokens see chosen keys only."""
        return bool(self.choosing) and (self.always_chooses or longest > self.choosing[0])

    @property
    def output(self) -> TensorFact | None:
        """The output projection; None where hidden states leave."""
        return None if self.leaves else self.head or self.embedding

    @property
    def logits(self) -> int:
        """Bytes of the logits of one token; 0 where hidden states leave."""
        return 0 if self.leaves else 4 * self.vocabulary

    @property
    def kv_token(self) -> int:
        """Return the bytes that one token adds to one layer's KV cache."""
        return self.kv_kept or 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of one token's hidden states between layers."""
        return self.hidden_width * self.itemsize

    @property
    def hidden_width(self) -> int:
        """Return the elements of one token's hidden states between layers."""
        return self.streams * self.hidden

    @property
    def sent(self) -> int:
        """Return the bytes of one token's queries, key and value, sent to delegated attention."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim * self.itemsize

    @property
    def fetched(self) -> int:
        """Return the bytes of one token's attention output, fetched from delegated attention, or of its queries."""
        return self.heads * self.head_dim * self.itemsize

    @cached_property
    def tensors(self) -> tuple[TensorFact, ...]:
        """Return all weights: those of the layers, the others, head and embedding."""
        return (*(t for layer in self.layers for t in layer), *self.others, *self.edges)

    @cached_property
    def stored_bytes(self) -> int:
        """Return the bytes of all weights in the checkpoint."""
        return sum(t.stored_bytes for t in self.tensors)

    @cached_property
    def expert_width(self) -> int:
        """Return the columns of the widest matrix of one expert that is not encoded; 0 if there is none."""
        plain = (t for t in self.tensors if t.experts and not t.encoded)
        return max((t.elements // t.experts // self.hidden for t in plain), default=0)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Return, for each layer, the first layer whose tensors have the same bytes."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        sizes = (tuple((t.held_bytes, t.stored_bytes) for t in layer) for layer in self.layers)
        return tuple(first.setdefault(size, j) for j, size in enumerate(sizes))

    @cached_property
    def groups(self) -> tuple[tuple[TensorFact, ...], ...]:
        """Return the groups in which weights are assigned to tiers: one per layer, then head and embedding."""
        return (*self.layers, *((t,) for t in self.edges))

    @cached_property
    def divisible(self) -> bool:
        """Return whether halves of layers can be loaded apart: the weights that are used up to attention, and the
        others."""
        return not (self.experts or self.blocks) and all(any(t.early for t in layer) for layer in self.layers)

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Return the names of the weights of all `groups`, in order."""
        return tuple(t.name for group in self.groups for t in group)

    @cached_property
    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return the elements of each weight, by group of `groups`."""
        return tuple(tuple(t.elements for t in group) for group in self.groups)

    @cached_property
    def experts(self) -> tuple[TensorFact, ...]:
        """Return the weights of experts, of all layers."""
        return tuple(t for layer in self.layers for t in layer if t.experts)

    def cache_groups(self, longest: int) -> tuple[CacheGroup, ...]:
        """Return the layers grouped by window, in the order of their first layers.

        Args:
            longest: tokens of the longest sequence. A window of at least as many tokens counts as None.
        """
        return _grouped(self.windows or (None,) * len(self.layers), self.states, longest)

    @cached_property
    def attended(self) -> tuple[int | None, ...]:
        """Return, for each layer with attention, the tokens that a query sees (None: all)."""
        return tuple(w for w in self.windows or (None,) * len(self.layers) if w != NO_ATTENTION)

    @property
    def edges(self) -> list[TensorFact]:
        """Return the head and the embedding, or the embedding alone if both are tied. A range of layers has those of
        them that it uses."""
        return [t for t in (self.head, self.embedding) if t is not None]

    def signature(self, layer: int) -> str:
        """Return the key of `Hardware.layers`: equal for layers that take equal time."""
        tensors = sorted(((t.elements, t.form or t.held, t.experts, t.matrix) for t in self.layers[layer]), key=repr)
        shape = (self.kind, self.hidden, self.width, self.heads, self.kv_heads, self.head_dim, self.itemsize)
        return f"{self.kind or 'layer'} {hashlib.sha256(repr((shape, self.active, tensors)).encode()).hexdigest()[:16]}"

    @property
    def joins(self) -> bool:
        """Return whether one call of kernels may compute several layers with this KV cache, as `Cache.paged` says."""
        return self.topk is None and not (self.centred or self.states)

    def fused_signature(self, layer: str) -> str:
        """Return the key of `Hardware.fused`. layer: signature of a layer."""
        return f"{layer} with {self.attention_signature()}"

    def attention_signature(self, window: int | None = None) -> str:
        """Return the key of `Hardware.attention`: equal for layers whose attention runs at equal rates.

        Args:
            window: tokens that a query sees, None for all.
        """
        cache_format = self.kv_form or f"{8 * self.itemsize}-bit"
        shape = f"{self.heads // self.kv_heads} queries per KV head of {self.head_dim}, {cache_format}"
        seen = (f", window {window}" if window else "") + (", soft cap" if self.softcap else "")
        seen += ", rounded" if self.rounded else ""
        return shape + seen + (f", topk {self.topk:g}" if self.topk is not None else "")

    @property
    def head_signature(self) -> str:
        """Return the key of `Hardware.heads`: equal for output projections that take equal time; "" if there is no
        head."""
        if (head := self.output) is None:
            return ""
        return f"{self.vocabulary}x{self.hidden} held in {head.form or f'{head.held} bytes'}"

    @cached_property
    def signatures(self) -> frozenset[str]:
        """Return all keys of this model's layers, head and attention."""
        layers = {self.signature(j) for j in range(len(self.layers))}
        heads = {self.head_signature} if self.output is not None else set()
        return frozenset(layers | heads | {self.attention_signature(window) for window in self.attended})


@lru_cache(maxsize=256)
def _grouped(windows: tuple[int | None, ...], states: tuple[int, ...], longest: int) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with these windows and states. Cached: the policy search
    requests the same groups often."""
    groups: dict[tuple[int | None, int], list[int]] = {}
    for j, window in enumerate(windows):
        if window != NO_ATTENTION:
            groups.setdefault((None if window is not None and window >= longest else window, 0), []).append(j)
    for j, state in enumerate(states):
        if state:
            groups.setdefault((None, state), []).append(~j)
    return tuple(CacheGroup(window, tuple(layers), state) for (window, state), layers in groups.items())
