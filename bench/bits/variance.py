"""LLM-PQ's variance indicator (arXiv 2403.01136, theorem 1), from a pass of transformers' own model over a text.

    omega[layer, bits] = sum over the layer's matrices W of D * S(bits)^2 * G(X)

D is the number of inputs of W, S = (max W - min W) / (2^bits - 1) the step of a code, X the inputs of W, and

    G(X) = Var[X] / 4                   deterministic rounding
    G(X) = (E[X]^2 + Var[X]) / 6        stochastic rounding
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BITS = {"int8": 8, "int4": 4, "int3": 3}
ROUNDINGS = ("deterministic", "stochastic")


@dataclass
class Inputs:
    """Moments of all inputs of a matrix: their number, sum, and sum of squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, x: Any) -> None:
        """Add a tensor of inputs."""
        wide = x.double()
        self.count += x.numel()
        self.total += float(wide.sum())
        self.squares += float(wide.square().sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        return self.squares / self.count - self.mean**2


def factor(inputs: Inputs, rounding: str) -> float:
    """Return G(X)."""
    if rounding == "deterministic":
        return inputs.variance / 4
    return (inputs.mean**2 + inputs.variance) / 6


def omegas(model: Path, rows: Sequence[Sequence[int]]) -> dict[str, list[dict[str, float]]]:
    """Return omega by rounding, layer and format.

    Args:
        model: directory of a checkpoint whose layers are `model.model.layers`.
        rows: token ids of the text.
    """
    import torch
    import transformers

    reader = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    matrices = [[m for m in layer.modules() if isinstance(m, torch.nn.Linear)] for layer in reader.model.layers]
    seen = {id(m): Inputs() for layer in matrices for m in layer}
    for layer in matrices:
        for matrix in layer:
            matrix.register_forward_pre_hook(lambda module, args: seen[id(module)].add(args[0]))
    with torch.no_grad():
        for row in rows:
            reader.model(torch.tensor([list(row)]), use_cache=False)

    def omega(matrix: Any, bits: int, rounding: str) -> float:
        step = float(matrix.weight.detach().max() - matrix.weight.detach().min()) / (2**bits - 1)
        return float(matrix.in_features * step**2 * factor(seen[id(matrix)], rounding))

    return {
        rounding: [
            {name: sum(omega(m, bits, rounding) for m in layer) for name, bits in BITS.items()} for layer in matrices
        ]
        for rounding in ROUNDINGS
    }
