"""Memory of results that is used again."""

import gc
import weakref

import torch

from flexengine.kernels.recycled import ALIGNED, SMALL, Recycled


def test_memory_is_used_again_once_no_tensor_is_in_it() -> None:
    memory = Recycled()
    first = memory.empty((300, 100))
    second = memory.empty((300, 100))
    assert not first.data_ptr() % ALIGNED
    assert abs(first.data_ptr() - second.data_ptr()) >= first.nbytes
    address, view = first.data_ptr(), first[10:20].T
    del first
    third = memory.empty((300, 100))
    assert abs(third.data_ptr() - address) >= third.nbytes  # the view is still there
    del view
    again = memory.empty((100, 300))
    assert again.data_ptr() == address
    assert memory.empty((90, 4), torch.int64).data_ptr() not in (address, third.data_ptr())  # small
    del again
    half = memory.empty((400, 100), torch.bfloat16)
    assert half.data_ptr() == address


def test_the_smallest_block_that_fits_is_taken() -> None:
    memory = Recycled()
    blocks = [memory.empty((count, SMALL), torch.uint8) for count in (3, 1, 2)]
    addresses = [x.data_ptr() for x in blocks]
    del blocks
    two, one = memory.empty((2, SMALL), torch.uint8), memory.empty((SMALL,), torch.uint8)
    assert [two.data_ptr(), one.data_ptr()] == [addresses[2], addresses[1]]


def test_a_larger_tensor_replaces_a_free_block() -> None:
    memory = Recycled()
    for count in range(1, 50):
        one, other = memory.empty((count, SMALL)), memory.empty((count, SMALL))
        one.fill_(1)
        other.fill_(2)
        assert torch.equal(one + 1, other)
        del one, other
    assert len(memory._free) == 2


def test_released_memory_is_freed_with_its_tensors() -> None:
    memory = Recycled()
    kept, gone = memory.empty((SMALL,)), memory.empty((SMALL,))
    kept.fill_(3)
    del gone
    (free,) = (weakref.ref(block) for block in memory._free)
    blocks = weakref.ref(memory._free[0].base) if memory._free[0].base is not None else free
    memory.release()
    assert bool((kept == 3).all())
    del kept
    assert memory._free == []
    gc.collect()
    assert free() is None
    assert blocks() is None
