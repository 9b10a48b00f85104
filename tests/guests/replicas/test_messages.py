"""Bodies of messages between engines that take turns."""

import pytest
import torch
from torch import Tensor

from flexengine.guests.replicas.messages import SliceInput, SliceResult, packed_tensors, unpacked_tensors
from flexengine.guests.wire.link import Broken


def body(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def test_values_and_tensors_come_back() -> None:
    """Of all dtypes and shapes, also of parts that are not contiguous."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, 3, 5, 7).transpose(1, 2), torch.randn(2, 3).to(torch.bfloat16), torch.arange(5)[None],
        torch.randn(0, 4), torch.randn(1, 1).to(torch.float16),
    ]  # fmt: skip
    given = SliceResult(2, 17, 0.125, None)
    values, found = unpacked_tensors(body(list(packed_tensors(given, tensors))), SliceResult)
    assert values == given
    for before, after in zip(tensors, found, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_short_body_is_refused(cut: int) -> None:
    whole = body(list(packed_tensors(SliceInput(1, 2, True), [torch.randn(4, 4)])))
    with pytest.raises(Broken):
        unpacked_tensors(whole[:cut], SliceInput)


def test_other_values_are_refused() -> None:
    whole = body(list(packed_tensors(SliceInput(1, 2, True), [])))
    with pytest.raises(Broken):
        unpacked_tensors(whole, SliceResult)
    whole[:8] = torch.tensor([1 << 40]).view(torch.uint8)
    with pytest.raises(Broken):
        unpacked_tensors(whole, SliceInput)
