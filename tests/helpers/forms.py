"""Tests that every format of weights must pass, and a toy format: one file, registered by one line."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from flexengine.codec.forms import Form, make_form
from flexengine.errors import InvalidInput
from flexengine.kernels import load
from flexengine.kernels.reference import ReferenceKernels


@dataclass(frozen=True)
class Thirds(Form):
    """A sign and a scale per row: v = scale * code for codes -1, 0 and 1. Three rows are encoded together."""

    rows: int
    columns: int
    step: ClassVar[int] = 3

    @property
    def name(self) -> str:
        return "thirds"

    @property
    def step_bytes(self) -> int:
        return 3 * (4 + self.columns)

    def encode(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        if not bool(x.isfinite().all()):
            raise InvalidInput("thirds cannot hold numbers that are not finite")
        wide = torch.nn.functional.pad(x.float(), (0, 0, 0, -len(x) % 3))
        scale = wide.abs().amax(1, keepdim=True)
        codes = torch.where(scale > 0, wide / scale, 0.0).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1).flatten()

    def decode(self, data: Tensor, ids: Tensor) -> Tensor:
        rows = data.view(-1, 4 + self.columns)[ids]
        return rows[:, :4].contiguous().view(torch.float32) * rows[:, 4:].contiguous().view(torch.int8).float()


class FormConformance:
    """Subclasses give the name of a format."""

    form: ClassVar[str]
    shapes: ClassVar[tuple[tuple[int, int], ...]] = ((1, 64), (7, 130), (33, 64), (300, 96))

    def matrices(self) -> list[tuple[Form, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [(make_form(self.form, *shape), torch.randn(shape, generator=generator)) for shape in self.shapes]

    def test_bytes_are_those_said(self) -> None:
        for form, x in self.matrices():
            data = form.encode(x)
            assert (data.dtype, data.shape) == (torch.uint8, (form.nbytes,))
            assert form.nbytes == -(-form.rows // form.step) * form.step_bytes
            assert torch.equal(form.encode(x.clone()), data)

    def test_steps_of_rows_lie_one_after_the_other(self) -> None:
        """So a matrix can be encoded, read and computed in parts."""
        for form, x in self.matrices():
            parts = [form.with_rows(len(part)).encode(part) for part in x.split(form.step)]
            assert torch.equal(torch.cat(parts), form.encode(x))
            assert all(part.nbytes == form.step_bytes for part in parts)

    def test_rows_are_those_of_the_matrix(self) -> None:
        for form, x in self.matrices():
            data = form.encode(x)
            whole = form.dequantize(data)
            assert (whole.dtype, whole.shape) == (torch.float32, x.shape)
            ids = torch.randint(form.rows, (9,))
            assert torch.equal(form.dequantize_rows(data, ids), whole[ids])
            assert torch.equal(load().encoded_rows(data, form, ids), whole[ids])

    def test_numbers_that_are_representable_come_back(self) -> None:
        for form, x in self.matrices():
            once = form.dequantize(form.encode(x))
            assert float((once - x).square().mean()) < float(x.square().mean())
            assert torch.equal(form.dequantize(form.encode(torch.zeros_like(x))), torch.zeros_like(x))

    def test_products_are_those_with_the_decoded_matrix(self) -> None:
        """By every set of kernels, and by row whatever rows share the batch."""
        for form, x in self.matrices():
            data, inputs, bias = form.encode(x), torch.randn(5, form.columns), torch.randn(form.rows)
            exact = inputs.double() @ form.dequantize(data).double().T + bias
            for kernels in (load(), ReferenceKernels()):
                found = kernels.product(inputs, data, form, bias)
                torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
                assert torch.equal(kernels.product(inputs[2:4], data, form, bias), found[2:4])

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite_are_refused(self, bad: float) -> None:
        for form, x in self.matrices():
            x[0, 5] = bad
            with pytest.raises(InvalidInput):
                form.encode(x)
