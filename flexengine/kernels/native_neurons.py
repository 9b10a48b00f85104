"""Native kernels for records of neurons."""

import ctypes
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from flexengine.codec.cache import WIDEST
from flexengine.codec.records import PLAIN, RecordForm
from flexengine.kernels import checks, structs
from flexengine.kernels.operands import in_rows, is_native
from flexengine.kernels.reference import ReferenceKernels
from flexengine.kernels.structs import CODES, bound

BLOCK = 64  # bytes of a block of plain numbers in neurons.h


class NativeNeurons(ReferenceKernels):
    """The kernels of neurons.h, see base.Kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        names = ("record_products", "record_sum", "record_elements")
        self._record_products, self._record_sum, self._record_elements = (bound(library, x, c_int64) for x in names)

    def record_vectors(self, records: Tensor, form: RecordForm, index: int) -> Tensor:
        if form.coded is None or not is_native(records) or not _in_blocks(form):
            return super().record_vectors(records, form, index)
        out = torch.empty((len(records), form.width), dtype=torch.float32, device="cpu")
        checks.check_records(out, form.width, records, places := torch.arange(len(records)), form, index)
        self._with_records(self._record_elements, out, records, places, form, index, out=out)
        return out

    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, bias: Tensor | None = None
    ) -> Tensor:
        if not is_native(x, records, places) or not _in_blocks(form):
            return super().record_products(x, records, places, form, index, bias)
        checks.check_record_products(x, records, places, form, index, bias)
        bias = None if bias is None else bias.contiguous()
        out = torch.empty((len(x), len(places)), dtype=torch.float32, device="cpu")
        self._with_records(self._record_products, x, records, places, form, index, out=out, bias=bias)
        return out.to(x.dtype)

    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, start: Tensor | None = None
    ) -> Tensor:
        if not is_native(a, records, places) or not _in_blocks(form):
            return super().record_sum(a, records, places, form, index, start)
        checks.check_record_sum(a, records, places, form, index, start)
        start = None if start is None else start.contiguous()
        out = torch.empty((len(a), form.width), dtype=torch.float32, device="cpu")
        scratch = torch.empty(sum((4 * rows + 8) * (len(places) + 2) for rows in (len(a), 1)), dtype=torch.uint8)
        self._with_records(self._record_sum, a, records, places, form, index, out=out, scratch=scratch, start=start)
        return out

    @staticmethod
    def _with_records(
        function: Any, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int,
        **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        """Call a function of neurons.cpp.

        Args:
            x, records, places, form, index: as in `record_products` and `record_sum`.
            tensors: out, bias, scratch and start of struct Records.
        """
        rows, places, out = in_rows(x.float()), places.contiguous(), tensors["out"]
        assert out is not None
        given = {"x": rows, "records": records, "places": places, **tensors}
        call = structs.RecordsArgs(
            rows=len(rows), n=len(places), room=len(records), nbytes=form.nbytes, shift=index * form.vector_bytes,
            width=form.width, x_row=rows.stride(0), out_row=out.stride(0), threads=torch.get_num_threads(),
            kind=CODES[PLAIN[form.kind]] if form.coded is None else form.coded.bits * 16,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()},
        )  # fmt: skip
        if bad := function(ctypes.addressof(call)):
            raise checks.bad_place(places, bad - 1, records)


def _in_blocks(form: RecordForm) -> bool:
    """Return whether vectors are whole blocks of their format in neurons.h. Other widths, which are rare, are not."""
    if form.coded is not None:
        return form.coded.group == WIDEST[form.coded.bits]
    return form.width * PLAIN[form.kind].itemsize % BLOCK == 0
