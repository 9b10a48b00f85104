"""Formats of checkpoints made by GPTQ and AWQ, whose matrices lie input by input: codes of 32 bits together.

An encoded matrix is the bytes of its tensors, one after the other: qweight, qzeros, scales and, of GPTQ with inputs in
the order of their importance, g_idx. An element is (code - zero point) * scale of its group of inputs, exact in fp32
for scales of 16 bits.

* GPTQ (AutoGPTQ, GPTQModel): qweight int32 [in * bits / 32, out], whose codes are a string of bits down the inputs, the
  lowest first; qzeros int32 [groups, out * bits / 32], likewise along the outputs. Stored zero points are less by 1 in
  its first version. g_idx int32 [in]: the group of each input.
* AWQ "gemm" (AutoAWQ): qweight int32 [in, out / 8]; codes of outputs 8 n + j begin at bit AWQ_BITS[j]; qzeros int32
  [groups, out / 8] likewise.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from flexengine.codec.layouts import SCALE_KINDS, PartsLayout, beyond
from flexengine.codec.scaled import SCALES, Undivided
from flexengine.errors import InvalidInput

AWQ_BITS = (0, 16, 4, 20, 8, 24, 12, 28)


@dataclass(frozen=True)
class ByInputs(Undivided):
    """Format of a matrix that lies input by input."""

    rows: int
    columns: int
    kind: str  # "gptq" or "awq"
    bits: int  # 2, 3, 4 or 8; of AWQ 4
    width: int  # columns of a group; of ordered ones, of most groups
    less: int = 0  # what stored zero points are less than zero points
    ordered: bool = False  # whether g_idx has the group of each column
    scales: str = "f16"  # key of SCALES

    def __post_init__(self) -> None:
        unit = 32 // self.bits if self.bits != 3 else 32
        if self.columns % (unit if self.kind == "gptq" else 1) or self.rows % unit or min(self.rows, self.columns) < 1:
            raise InvalidInput(f"a matrix [{self.rows}, {self.columns}] in {self.name} needs multiples of {unit}")

    @property
    def name(self) -> str:
        more = ("zeros" if self.less else "", "ordered" * self.ordered, self.scales * (self.scales != "f16"))
        return "-".join(filter(None, (f"{self.kind}{self.bits}", str(self.width), *more)))

    @property
    def groups(self) -> int:
        """Number of groups of columns."""
        return -(-self.columns // self.width)

    @property
    def sizes(self) -> tuple[int, ...]:
        codes, zeros = self.columns * self.rows * self.bits // 8, self.groups * self.rows * self.bits // 8
        order = (4 * self.columns,) if self.ordered else ()
        return codes, zeros, self.groups * self.rows * SCALES[self.scales][0], *order

    @cached_property
    def layout(self) -> PartsLayout | None:
        together = {3: 32}.get(self.bits, 32 // self.bits) if self.kind == "gptq" else 4  # columns of one group
        if self.width % together and self.groups > 1 and not self.ordered:
            return None
        zeros, scales, *order = accumulate(self.sizes[:-1])
        return PartsLayout(
            f"{self.kind}{self.bits}",
            not self.ordered and (self.groups == 1 or self.width % 32 == 0),
            self.columns,
            right=self.width if self.groups > 1 else beyond(self.columns),
            cells=self.groups,
            scales=scales,
            zeros=zeros,
            order=order[0] if order else 0,
            scale_kind=SCALE_KINDS.index(self.scales),
            less=self.less,
        )

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        weight, zeros, scales, *order = torch.split(data.view(-1), [*self.sizes])
        words = _words(weight).view(-1, self.rows if self.kind == "gptq" else self.rows // 8)
        if self.kind == "gptq":
            codes = _down(words.index_select(1, ids), self.bits, self.columns)
            points = _along(_words(zeros).view(self.groups, -1).t(), self.bits, ids).t()
        else:
            codes, points = (_awq(x, ids) for x in (words, _words(zeros).view(self.groups, -1)))
        each = SCALES[self.scales][1](scales.clone()).view(self.groups, -1)[:, ids]
        points, x = (points + self.less).float(), codes.float()
        if order or self.columns % self.width:
            given = torch.arange(self.columns, device=data.device) // self.width
            group = _words(order[0]).clamp(0, self.groups - 1) if order else given
            return x.sub_(points[group]).mul_(each[group]).t().contiguous()
        groups = x.view(self.groups, self.width, -1)
        return groups.sub_(points[:, None]).mul_(each[:, None]).view(self.columns, -1).t().contiguous()


def _words(data: Tensor) -> Tensor:
    """Return bytes as int32; they may begin at any byte."""
    aligned = data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    return (data if aligned else data.clone()).view(torch.int32)


def _down(words: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` codes of strings of bits, int32 [codes, n]. words: int32 [words, n], a string in each column."""
    if bits == 3:
        return _along(words, bits, torch.arange(count, device=words.device))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)[:, None]
    return (words[:, None] >> shifts & (1 << bits) - 1).flatten(0, 1)


def _along(words: Tensor, bits: int, ids: Tensor) -> Tensor:
    """Return codes `ids` of strings of bits, int32 [codes, n]. words: int32 [words, n], a string in each column."""
    first = ids * bits
    word, shift = first // 32, (first % 32).int()[:, None]
    mask = (1 << bits) - 1
    codes = words[word] >> shift & mask
    if bits == 3:  # some codes end in the next word; the sign was copied into the bits that are missing
        room = 32 - shift
        after = words[(word + 1).clamp(max=len(words) - 1)]
        codes = torch.where(room < bits, codes & (1 << room) - 1 | after << room, codes) & mask
    return codes


def _awq(words: Tensor, ids: Tensor) -> Tensor:
    """Return codes of outputs, int32 [rows of words, n]. words: int32 [n, outputs / 8]."""
    bits = torch.tensor(AWQ_BITS, dtype=torch.int32, device=words.device)
    return words.index_select(1, ids // 8) >> bits[ids % 8] & 15


def named(name: str, rows: int, columns: int) -> ByInputs:
    """Return the format of this name. Raise InvalidInput if there is none."""
    family, _, rest = name.partition("-")
    width, *more = rest.split("-")
    kind, bits = family.rstrip("2348"), family[-1:]
    scales = next((word for word in more if word in SCALES), "f16")
    if not (width.isdigit() and int(width)) or kind not in ("gptq", "awq"):
        raise InvalidInput(f"there is no format {name!r} of weights")
    return ByInputs(rows, columns, kind, int(bits), int(width), int("zeros" in more), "ordered" in more, scales)
