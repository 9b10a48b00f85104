"""A Hessian indicator, with which LLM-PQ compares its own (arXiv 2403.01136, section 6): for each matrix W of a layer,

    omega[layer, bits] = sum over W of lambda * |Q(W) - W|^2,        lambda the largest eigenvalue of 2 X^T X / n

X are the n inputs of W, and Q(W) are the numbers that the format stores. It takes a matrix of D x D sums for each input
of D columns, where the variance takes two numbers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def hessian_omegas(
    model: Path, rows: Sequence[Sequence[int]], formats: Sequence[str] = ("int8", "int4", "int3")
) -> list[dict[str, float]]:
    """Return omega by layer and format.

    Args:
        model: directory of a checkpoint whose layers are `model.model.layers`.
        rows: token ids of the text.
    """
    import torch
    import transformers

    reader = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    matrices = [[m for m in layer.modules() if isinstance(m, torch.nn.Linear)] for layer in reader.model.layers]
    sums: dict[int, Any] = {}
    count = sum(map(len, rows))

    def add(module: Any, args: Any) -> None:
        x = args[0].flatten(0, -2)
        found = sums.setdefault(id(module), torch.zeros(x.shape[-1], x.shape[-1]))
        found.addmm_(x.t(), x, alpha=2 / count)

    for layer in matrices:
        for matrix in layer:
            matrix.register_forward_pre_hook(add)
    with torch.no_grad():
        for row in rows:
            reader.model(torch.tensor([list(row)]), use_cache=False)
        return [_omega(layer, sums, formats) for layer in matrices]


def _omega(matrices: Sequence[Any], sums: dict[int, Any], formats: Sequence[str]) -> dict[str, float]:
    """Return omega of a layer, by format."""
    import torch

    from flexengine.codec.packed import CODECS, Packed

    total = dict.fromkeys(formats, 0.0)
    for matrix in matrices:
        largest = float(torch.linalg.eigvalsh(sums[id(matrix)])[-1])
        weight = matrix.weight.detach()
        for name in formats:
            form = Packed(CODECS[name], *weight.shape)
            total[name] += largest * float((form.dequantize(form.encode(weight)) - weight).square().sum())
    return total
