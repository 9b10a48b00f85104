"""A model in numbers: its tensors, their bytes, and the names under which its rates are kept."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

ENCODED_ROWS = 16  # of a matrix that lie together when it is encoded


@dataclass(frozen=True)
class TensorFact:
    """elements: how many; stored, held: bytes per element in the checkpoint and on the device.

    experts: how many experts share it, 0 if every token uses all of it. matrix: whether tokens are multiplied by it.
    encoded: bytes of all of it, on every tier, if it is kept in a codec's form, which `form` names; else 0. Then rows
    can be taken apart by ENCODED_ROWS only.
    """

    name: str
    elements: int
    stored: int
    held: int
    experts: int = 0
    matrix: bool = True
    encoded: int = 0
    form: str = ""

    @cached_property
    def stored_bytes(self) -> int:
        return self.encoded or self.elements * self.stored

    @cached_property
    def held_bytes(self) -> int:
        return self.encoded or self.elements * self.held


class CacheGroup(NamedTuple):
    """Layers whose queries see equally many tokens; their KV pages are counted together.

    Attributes:
        window: tokens that a query sees, None for all.
        layers: numbers of the layers.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A model, or a range of its layers, in numbers. layers: tensors per layer in order; others: outside layers;
    head rows: vocabulary.

    itemsize: bytes per element in the compute dtype; width: widest activation of a layer; embedding: None where hidden
    states enter from layers before the range; head: None when tied. leaves: whether hidden states leave to layers after
    the range, so that there is no head.
    kv_form: name of the format that K and V are kept in, "" if they are kept as they are computed.
    kv_kept: bytes one token adds to one layer's KV cache, if it is not kept as it is computed; kv_pieces: places in a
    page where parts of its K of one head lie; centred: whether mean keys are apart; topk: share of the
    past values that attention reads, None for all.
    scratch: bytes that the kernels' attention of prompts takes beside its arguments and result.
    kind: model type; active: experts that one token uses; windows: per layer, tokens its attention sees (None: all),
    () where all see all; softcap: number that attention's scores stay below, None for no limit. gpu: whether a GPU
    computes.
    """

    layers: tuple[tuple[TensorFact, ...], ...]
    others: tuple[TensorFact, ...]
    embedding: TensorFact | None
    head: TensorFact | None
    vocabulary: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    kind: str = ""
    active: int = 0
    windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    kv_kept: int = 0
    kv_pieces: int = 1
    centred: bool = False
    topk: float | None = None
    scratch: int = 0
    kv_form: str = ""
    gpu: bool = False
    leaves: bool = False

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
        """Bytes one token adds to one layer's KV cache."""
        return self.kv_kept or 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def sent(self) -> int:
        """Bytes one token's queries, key and value take on their way to delegated attention."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim * self.itemsize

    @property
    def fetched(self) -> int:
        """Bytes one token's attention takes on its way back."""
        return self.heads * self.head_dim * self.itemsize

    @cached_property
    def tensors(self) -> tuple[TensorFact, ...]:
        """Every weight."""
        return (*(t for layer in self.layers for t in layer), *self.others, *self.edges)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of all weights in their files."""
        return sum(t.stored_bytes for t in self.tensors)

    @cached_property
    def rounds_activations(self) -> bool:
        """Whether some products round activations to 8 bits."""
        return any(t.form.endswith("by int8") for t in self.tensors)

    @cached_property
    def converts_weights(self) -> bool:
        """Whether some weights have another dtype on the device than in the checkpoint."""
        return any(t.stored != t.held and not t.encoded for t in self.tensors)

    @cached_property
    def expert_width(self) -> int:
        """Columns of the widest matrix of one expert that is held plain; 0 if there is none."""
        plain = (t for t in self.tensors if t.experts and not t.encoded)
        return max((t.elements // t.experts // self.hidden for t in plain), default=0)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each layer, the first whose tensors have the same bytes."""
        first: dict[tuple[tuple[int, int], ...], int] = {}
        sizes = (tuple((t.held_bytes, t.stored_bytes) for t in layer) for layer in self.layers)
        return tuple(first.setdefault(size, j) for j, size in enumerate(sizes))

    @cached_property
    def groups(self) -> tuple[tuple[TensorFact, ...], ...]:
        """The weights that have a home: of each layer, then the edges, each alone."""
        return (*self.layers, *((t,) for t in self.edges))

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Names of the weights of `groups`, one after the other."""
        return tuple(t.name for group in self.groups for t in group)

    @cached_property
    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each weight of `groups`."""
        return tuple(tuple(t.elements for t in group) for group in self.groups)

    @cached_property
    def experts(self) -> tuple[TensorFact, ...]:
        """The weights of all layers that experts share."""
        return tuple(t for layer in self.layers for t in layer if t.experts)

    def cache_groups(self, longest: int) -> tuple[CacheGroup, ...]:
        """Return the layers grouped by window, in the order of their first layers.

        Args:
            longest: tokens of the longest sequence; a window of as many counts as none.
        """
        return _grouped(self.windows or (None,) * len(self.layers), longest)

    @property
    def edges(self) -> list[TensorFact]:
        """The output projection (the embedding, where they are tied), then an embedding of its own. A range of layers
        has those of them that it uses."""
        return [t for t in (self.head, self.embedding) if t is not None]

    def signature(self, layer: int) -> str:
        """The same for layers whose computing takes the same time: under it `Hardware.layers` has the measured one."""
        tensors = sorted(((t.elements, t.form or t.held, t.experts, t.matrix) for t in self.layers[layer]), key=repr)
        shape = (self.kind, self.hidden, self.width, self.heads, self.kv_heads, self.head_dim, self.itemsize)
        return f"{self.kind or 'layer'} {hashlib.sha256(repr((shape, self.active, tensors)).encode()).hexdigest()[:16]}"

    def attention_signature(self, window: int | None = None) -> str:
        """Return the key of `Hardware.attention`: equal for layers whose attention runs at equal rates. window: tokens
        that the layer sees, None for all."""
        kept = self.kv_form or f"{8 * self.itemsize}-bit"
        shape = f"{self.heads // self.kv_heads} queries per KV head of {self.head_dim}, {kept}"
        seen = (f", window {window}" if window else "") + (", soft cap" if self.softcap else "")
        return shape + seen + (f", topk {self.topk:g}" if self.topk is not None else "")

    @property
    def head_signature(self) -> str:
        """The same for output projections that take the same time; "" where hidden states leave."""
        if (head := self.output) is None:
            return ""
        return f"{self.vocabulary}x{self.hidden} held in {head.form or f'{head.held} bytes'}"


@lru_cache(maxsize=256)
def _grouped(windows: tuple[int | None, ...], longest: int) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with these windows. Cached: the policy search requests the same ones often."""
    groups: dict[int | None, list[int]] = {}
    for j, window in enumerate(windows):
        groups.setdefault(None if window is not None and window >= longest else window, []).append(j)
    return tuple(CacheGroup(window, tuple(layers)) for window, layers in groups.items())
