"""Embeddings beside that of the token ids, of whose rows a pass needs few: those of n-grams in layers of Qwen4-Exp (90
GB), and those of inputs of layers in Gemma 3n and 4.

Such a table is no weight that is loaded: its rows stay in the checkpoint's files, and a pass reads those of its tokens
when it computes the module.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.model.adapters import become


class Table(NamedTuple):
    """An embedding whose rows stay in the checkpoint."""

    module: Any  # a `ReadsRows`
    shape: tuple[int, ...]  # rows, elements of a row
    layer: int | None  # number in the whole model of the layer that reads it; None if the decoder does


class ReadsRows:
    """Mixin of an embedding. Its forward may scale what it looks up."""

    # Returns rows with some numbers, rising, in RAM: [n, width] in the compute dtype. None if there are no weights:
    # then rows are zeros.
    read: Callable[[list[int]], Tensor] | None = None
    lookups = 1  # rows that a token needs; known after a trial

    def forward(self: Any, ids: Tensor) -> Any:
        table = self._parameters["weight"]
        if ids.is_meta:
            self.lookups = max(1, ids.numel() // ids.shape[1])
            rows, index = table.new_empty(ids.numel(), table.shape[1], device="meta"), ids
        elif self.read is None:
            rows, index = table.new_zeros(1, table.shape[1], device=ids.device), torch.zeros_like(ids)
        else:
            numbers, index = torch.unique(ids.cpu(), return_inverse=True)
            rows, index = self.read(numbers.tolist()).to(ids.device), index.to(ids.device)
        self._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        try:
            return super().forward(index)  # type: ignore[misc]
        finally:
            self._parameters["weight"] = table


def table_of(module: Any, layer: int | None) -> Table:
    """Let an embedding read its rows."""
    module.padding_idx = None  # only for gradients; torch would compare it with the number of rows
    become(module, ReadsRows)
    return Table(module, tuple(module.weight.shape), layer)
