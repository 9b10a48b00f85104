"""Every format of weights passes the same class; one that is registered by a line holds the weights of a model."""

import pytest

from flexengine.codec import forms
from flexengine.codec.packed import Packed
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
