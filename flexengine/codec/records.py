"""Records of neurons: all weights of one neuron of a feed-forward block, side by side (LLM in a flash, section 3.2).

A block computes down(act(first(x))), or down(act(first(x)) * up(x)) if it is gated. Neuron i has row i of `first`, row
i of `up` if there is one, and column i of `down`: 2 or 3 vectors of `width` elements. One read brings them all.

    record    vector of first, vector of up (gated only), vector of down, zeros up to a multiple of ALIGN bytes

An encoded vector is a panel of one token, see codec.cache: codes, scales, minima.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.errors import InvalidInput

ALIGN = 512  # bytes; direct reads of most disks begin and end at multiples of this
PLAIN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CODED = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class RecordForm:
    """Format of the records of one layer. Raise InvalidInput if the kind is unknown, or the width does not fit it."""

    kind: str  # format of a vector, from PLAIN or CODED
    width: int  # elements of a vector, the model's hidden size; a multiple of 8 if encoded
    gated: bool = False  # whether a record has a vector of `up`

    def __post_init__(self) -> None:
        if self.kind not in (*PLAIN, *CODED):
            raise InvalidInput(f"records of kind {self.kind!r}; it must be one of {', '.join((*PLAIN, *CODED))}")
        if self.width < 1 or (self.kind in CODED and self.width % 8):
            fault = f"records of {self.width} {self.kind} elements"
            raise InvalidInput(f"{fault}; a width of encoded vectors must be a multiple of 8")

    @property
    def vectors(self) -> int:
        """Vectors of a record."""
        return 3 if self.gated else 2

    @property
    def down(self) -> int:
        """Index of the vector of `down`; `first` has index 0, and `up` 1."""
        return self.vectors - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of vectors, which are fp32 when they are decoded."""
        return PLAIN.get(self.kind, torch.float32)

    @cached_property
    def coded(self) -> CacheFormat | None:
        """Format of an encoded vector, as of one token of one head; None if it is plain."""
        return CacheFormat(CODED[self.kind], 1, 1, self.width) if self.kind in CODED else None

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return self.coded.panel_bytes if self.coded else self.width * PLAIN[self.kind].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a record, with padding."""
        return -(-self.vectors * self.vector_bytes // ALIGN) * ALIGN

    def encode(self, *matrices: Tensor) -> Tensor:
        """Return records, uint8 [n, nbytes]. matrices: `first`, `up` if gated, and the transpose of `down`: [n, width]
        each."""
        assert len(matrices) == self.vectors
        records = torch.zeros(len(matrices[0]), self.nbytes, dtype=torch.uint8)
        for index, matrix in enumerate(matrices):
            if self.coded is None:
                data = matrix.to(PLAIN[self.kind]).contiguous().view(torch.uint8)
            else:
                codes, *halves = self.coded.encode(matrix)
                data = torch.cat([codes, *(half.contiguous().view(torch.uint8) for half in halves)], 1)
            self._vector(records, index).copy_(data)
        return records

    def vectors_of(self, records: Tensor, index: int) -> Tensor:
        """Return one vector of each record [n, width], in the dtype of plain vectors: a view of `records` then. Encoded
        vectors become fp32. records: uint8 [n, nbytes]. index: of the vector."""
        data = self._vector(records, index)
        if self.coded is None:
            return data.view(PLAIN[self.kind])
        codes, halves = data[:, : self.coded.row_bytes], data[:, self.coded.row_bytes :].contiguous()
        scale, minimum = halves.view(torch.float16).view(len(records), 2, -1).unbind(1)
        return self.coded.dequantize(codes.contiguous(), scale, minimum)

    def decode(self, records: Tensor, index: int) -> Tensor:
        """Return one vector of each record, fp32 [n, width]; arguments as in `vectors_of`."""
        return self.vectors_of(records, index).float()

    def _vector(self, records: Tensor, index: int) -> Tensor:
        return records[:, index * self.vector_bytes : (index + 1) * self.vector_bytes]
