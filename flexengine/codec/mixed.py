"""Matrices whose rows have several formats, such as fused gate and up projections of a GGUF file."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.codec.forms import Form, make_form
from flexengine.errors import InvalidInput


@dataclass(frozen=True)
class Mixed(Form):
    """Format of a matrix that consists of other matrices, one after the other."""

    rows: int
    columns: int
    parts: tuple[Form, ...]  # formats of the matrices, in order; their rows sum to `rows`

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def block_columns(self) -> int:
        return max(part.block_columns for part in self.parts)

    @property
    def step_bytes(self) -> int:
        raise NotImplementedError("rows of several formats have no size in common")

    @property
    def in_steps(self) -> bool:
        return all(part.in_steps for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        raise InvalidInput(f"{self.name} is a format of files; encode weights as int8 or fewer bits")

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), self.columns, device=data.device)
        for row, part, own_data in self.apart(data):
            own = ((ids >= row) & (ids < row + part.rows)).nonzero()[:, 0]
            if len(own):
                out[own] = part.decode(own_data, ids[own] - row)
        return out

    def matrices(self) -> Iterator[tuple[int, int, Form]]:
        row = start = 0
        for part in self.parts:
            yield row, start, part
            row, start = row + part.rows, start + part.nbytes

    def apart(self, data: Tensor) -> Iterator[tuple[int, Form, Tensor]]:
        """Yield first row, format and bytes of each matrix."""
        for row, start, part in self.matrices():
            yield row, part, data[start : start + part.nbytes]


def halves(name: str, rows: int, columns: int) -> Mixed:
    """Return the format of a matrix whose rows have formats of FORMS, as "q4_k+q6_k": each has as many rows."""
    names = name.split("+")
    counts = [rows // len(names)] * (len(names) - 1)
    counts.append(rows - sum(counts))
    parts = (make_form(part, count, columns) for part, count in zip(names, counts, strict=True))
    return Mixed(rows, columns, tuple(parts))
