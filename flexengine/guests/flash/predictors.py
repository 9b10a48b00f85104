"""Predictors of active neurons: a low-rank product in place of the first matrix of a feed-forward block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from flexengine.model.linear import Product


@dataclass(frozen=True)
class Predictor:
    """Predicts which neurons of one layer are active, from the input of its feed-forward block.

    The scores are b (a x) + bias. A neuron is predicted active if its score is above the threshold. On a CPU the scores
    of a token are bitwise independent of the other tokens.

    Attributes:
        a: [rank, width]; None for an oracle, which computes the activations: b is the block's first matrix.
        b: [neurons, rank]; of an oracle [neurons, width].
        bias: [neurons], fp32 on a CPU; None for zeros.
        threshold: the same for all neurons.
    """

    a: Tensor | None
    b: Tensor
    bias: Tensor | None = None
    threshold: float = 0.0

    @property
    def neurons(self) -> int:
        return len(self.b)

    @property
    def width(self) -> int:
        """Elements of an input."""
        return (self.b if self.a is None else self.a).shape[1]

    @property
    def rank(self) -> int:
        """Rows of `a`; 0 for an oracle."""
        return 0 if self.a is None else len(self.a)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that are not None, by name."""
        found = {"a": self.a, "b": self.b, "bias": self.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return a copy of the predictor on a device, in a dtype; None keeps the dtypes, as on a CPU."""
        moved: dict[str, Any] = {name: tensor.to(device, dtype, copy=True) for name, tensor in self.tensors.items()}
        return replace(self, **moved)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores [tokens, neurons] in x's dtype. x: [tokens, width], input of the block."""
        product = Product(x.dtype)
        return product(x if self.a is None else product(x, self.a), self.b, self.bias)

    def active(self, x: Tensor) -> Tensor:
        """Return the predicted neurons, bool [tokens, neurons]. x: [tokens, width], input of the block."""
        return self.scores(x) > self.threshold


@dataclass(frozen=True)
class PredictionErrors:
    """Counts of the predictions for some tokens, in neurons.

    Attributes:
        total: tokens times neurons.
        active: of these, the active ones.
        predicted: those predicted active.
        missed: active, but predicted inactive.
    """

    total: int
    active: int
    predicted: int
    missed: int

    def __add__(self, other: "PredictionErrors") -> "PredictionErrors":
        return PredictionErrors(
            self.total + other.total, self.active + other.active,
            self.predicted + other.predicted, self.missed + other.missed,
        )  # fmt: skip

    @property
    def misses(self) -> float:
        """Missed neurons per active one."""
        return self.missed / self.active if self.active else 0.0

    @property
    def false_alarms(self) -> float:
        """Share of the inactive neurons that are predicted active."""
        inactive = self.total - self.active
        return (self.predicted - self.active + self.missed) / inactive if inactive else 0.0

    @property
    def active_share(self) -> float:
        return self.active / self.total if self.total else 0.0

    @property
    def predicted_share(self) -> float:
        return self.predicted / self.total if self.total else 0.0
