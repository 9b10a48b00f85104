"""What the kernels for a GPU hold while they compute is no more than plan.gpu books. On a CPU, with smaller buffers."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import test_cache_kernels as caches
import test_encoded as matrices
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexengine.kernels import cuda, reference
from flexengine.kernels.cuda import CudaKernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = 1 << 20
FP32, BF16 = torch.float32, torch.bfloat16


class Held(TorchDispatchMode):
    """peak: most bytes, at any time, of storages that were made since this was entered."""

    def __init__(self, *known: torch.Tensor | None) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {x.untyped_storage()._cdata for x in known if x is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._sizes = {key: value for key, value in self._sizes.items() if not value[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                self._sizes.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._sizes.values()))
        return out


def held(call: Callable[[], Any], *known: torch.Tensor | None) -> int:
    """Bytes held at once by a call, but for its results."""
    with torch.no_grad(), Held(*known) as watch:
        out = call()
    return watch.peak - sum(x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "BUFFER", SMALL)
    monkeypatch.setattr(reference, "WIDENED", SMALL // 8)
    if INTERPRETED:
        from flexengine.kernels import triton_attention, triton_codes

        for module, name in ((triton_attention, "BUFFER"), (triton_codes, "BUFFER"), (triton_codes, "DECODED")):
            monkeypatch.setattr(module, name, SMALL)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize(("rows", "shape", "dtype"), [
    (1, (4096, 64), BF16), (64, (8192, 64), BF16), (64, (320, 512), FP32), (300, (2048, 256), BF16),
    (200, (48, 2048), BF16),
])  # fmt: skip
@pytest.mark.parametrize("kernels", ["cuda"])
def test_products_hold(kernels: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, compute: Any) -> None:
    torch.manual_seed(0)
    form = matrices.packed(4, 32, *shape)
    x, bias = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0])
    data = form.encode(torch.randn(shape) / 10)
    codes = rows * shape[1] * (1 + 8 / 32) if compute == "int8" else 0  # with the scale and the sum of each group
    found = held(lambda: CudaKernels().product(x, data, form, bias, compute), x, data, bias)
    assert found <= SMALL + codes + 8192


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("topk", [None, 0.25])
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize("kernels", ["cuda"])
def test_decode_attention_holds(kernels: str, bits: int | None, topk: float | None) -> None:
    cache = caches.cached(bits, 64)
    many = len(caches.LENGTHS) * 8
    q = torch.randn(many, 8, 64)
    tables, lengths = cache.tables.repeat(8, 1), cache.lengths.repeat(8)
    found = held(
        lambda: CudaKernels().decode(q, cache.pool, tables, lengths, 0.1, form=cache.form, topk=topk),
        q, tables, lengths, cache.pool,
    )  # fmt: skip
    room = cuda.base.check_pool(cache.pool, cache.form)
    one = tables.shape[1] * room.page_tokens * 2 * room.kv_heads * room.dim * cuda.GATHERED  # a sequence's, at least
    assert found <= max(SMALL, one) + 65536


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kernels", ["cuda"])
def test_encoding_keys_and_values_holds(kernels: str, bits: int) -> None:
    cache = caches.cached(bits, 64)
    room = cuda.base.check_pool(cache.pool, cache.form)
    count = min(3000, room.pages * room.page_tokens)
    k, v = torch.randn(2, count, room.kv_heads, room.dim)
    pages = torch.arange(count, dtype=torch.int32) // room.page_tokens
    offsets = torch.arange(count, dtype=torch.int32) % room.page_tokens
    call = lambda: CudaKernels().append(k, v, cache.pool, pages, offsets, cache.form)  # noqa: E731
    assert held(call, k, v, pages, offsets, cache.pool) <= SMALL + 8192
