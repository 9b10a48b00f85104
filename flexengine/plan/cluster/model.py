"""A model in the numbers that a cluster plan needs: layers, bytes by format, and the ends of the stack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.facts import ModelFacts
from flexengine.plan.sizes import aligned
from flexengine.plan.stages import shape_name
from flexengine.strategy import BITS

Format = str | None  # format of a layer's matrices, from strategy.FORMATS
Harm = NDArray[np.float64]  # [layers, formats] harm to quality
_PER_HIDDEN, _PER_WIDTH = 9, 4  # elements of temporary tensors per token, as in `plan.sizes.workspace`


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer.

    Attributes:
        bytes: bytes of the layer's weights on a device, by format.
        active: elements of the matrices that one token is multiplied by; fewer than all with experts.
        pair_flop: FLOP of attention per (query, key) pair: 4 per element of the query heads.
        kv_token: bytes that one token adds to the layer's KV cache.
    """

    bytes: Mapping[Format, int]
    active: float
    pair_flop: float
    kv_token: int

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return a value that is equal for layers of equal size."""
        return (tuple(sorted(self.bytes.items(), key=str)), self.active, self.pair_flop, self.kv_token)


@dataclass(frozen=True)
class Model:
    """A model as devices of one kind hold it.

    Attributes:
        name: shape of the model; see `plan.stages.shape_name`.
        layers: in order.
        hidden: elements of a token's hidden state.
        width: elements of the widest activation of a token.
        itemsize: bytes per element of activations.
        vocabulary: number of tokens that the head knows.
        embedding_bytes: bytes of the embedding, and of all else that the first stage needs.
        head_bytes: bytes of the output projection, which the last stage needs.
        head_elements: elements of the output projection.
        tied: whether the head is the embedding.
        facts: by format, the facts of the model in this format; empty if the model was described by hand.
    """

    name: str
    layers: tuple[LayerSizes, ...]
    hidden: int
    width: int
    itemsize: int
    vocabulary: int
    embedding_bytes: int
    head_bytes: int
    head_elements: int
    tied: bool = False
    facts: Mapping[Format, ModelFacts] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Return for each layer the number of its kind. Layers of one kind have equal sizes."""
        if self.facts:
            facts = self.facts[None]
            windows = facts.windows or (None,) * len(facts.layers)
            keys: list[object] = [(facts.signature(j), windows[j]) for j in range(len(facts.layers))]
        else:
            keys = [layer.key for layer in self.layers]
        known: dict[object, int] = {}
        return tuple(known.setdefault(key, len(known)) for key in keys)

    def workspace(self, tokens: int, rows: int, last: bool) -> int:
        """Return the bytes of temporary tensors of a stage.

        Args:
            tokens: tokens that are computed together.
            rows: sequences that are computed together.
            last: whether the stage computes logits.
        """
        activations = tokens * (_PER_HIDDEN * self.hidden + _PER_WIDTH * self.width) * self.itemsize
        return activations + (8 * self.vocabulary * rows if last else 0)

    def hop_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states of some tokens."""
        return tokens * self.hidden * self.itemsize


def of_facts(facts: Mapping[Format, ModelFacts]) -> Model:
    """Return the model with these facts. facts: by format; None, the exact one, must be among them."""
    exact = facts[None]
    layers = []
    for j, tensors in enumerate(exact.layers):
        nbytes = {form: sum(aligned(t.held_bytes) for t in made.layers[j]) for form, made in facts.items()}
        active = sum(t.used(exact.active) for t in tensors if t.matrix)
        layers.append(LayerSizes(nbytes, active, 4.0 * exact.heads * exact.head_dim, exact.kv_token))
    embedding = exact.embedding.held_bytes if exact.embedding else 0
    others = sum(t.held_bytes for t in exact.others)
    output = exact.output
    return Model(shape_name(exact), tuple(layers), exact.hidden, exact.width, exact.itemsize, exact.vocabulary,
                 embedding + others, output.held_bytes if output else 0, output.elements if output else 0,
                 exact.head is None, dict(facts))  # fmt: skip


def assumed_harm(model: Model, formats: Sequence[Format]) -> Harm:
    """Return the assumed harm of each layer in each format: proportional to the layer's parameters and to 4^-bits, the
    square of a code's step; all layers in int4 have harm 1."""
    parts = np.array([layer.active for layer in model.layers])
    factors = np.array([0.0 if form is None else 4.0 ** (4 - BITS[form]) for form in formats])
    harm: Harm = parts[:, None] / parts.sum() * factors
    return harm
