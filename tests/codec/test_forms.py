"""Every format of weights passes the same class; one that is registered by a line holds the weights of a model."""

import pytest
import torch

from flexengine.codec import forms
from flexengine.codec.packed import Packed
from flexengine.codec.scaled import Scaled
from flexengine.errors import InvalidInput
from flexengine.kernels.base import kernels_of
from tests.helpers.forms import FormConformance, Thirds


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forms.FORMS, "thirds", "tests.helpers.forms:Thirds")  # the line


class TestInt8(FormConformance):
    form = "int8"


class TestInt4(FormConformance):
    form = "int4"


class TestInt3(FormConformance):
    form = "int3"


class TestInt2(FormConformance):
    form = "int2"


class TestThirds(FormConformance):
    form = "thirds"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"no format 'int5' of weights; known are int8, int4, .*, thirds"):
        forms.make_form("int5", 4, 64)


def test_kernels_are_looked_up_by_format_and_device() -> None:
    packed = forms.make_form("int4", 16, 64)
    assert isinstance(packed, Packed)
    kernels = kernels_of(type(packed), "cpu")
    assert kernels is not None
    assert kernels.rows is not None
    assert kernels_of(Thirds, "cpu") is kernels_of(Thirds, "cuda") is None


def test_wide_matrices_are_decoded_in_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory of a product in torch has the same bound for all widths."""
    form, counts, decode = forms.make_form("w4-128", 20, 1 << 17), list[int](), Scaled.decode
    monkeypatch.setattr(Scaled, "decode", lambda own, data, ids: counts.append(len(ids)) or decode(own, data, ids))
    data = torch.randint(0, 64, (form.nbytes,), dtype=torch.uint8)
    right = form.dequantize(data)
    assert counts == [8, 8, 4]
    monkeypatch.setattr(forms, "SCRATCH", 1 << 30)
    assert torch.equal(form.dequantize(data), right)
    assert counts[3:] == [20]
