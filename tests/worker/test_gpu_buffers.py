"""What the kernels for a GPU hold while they compute is no more than plan.sizes books. On a CPU, in smaller buffers."""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexengine import Engine, Policy, SamplingParams
from flexengine.kernels import cuda, reference
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.cuda import CudaKernels
from flexengine.lossy import Lossy
from flexengine.model import experts as mixture
from flexengine.plan import sizes
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.workload import Workload
from tests.helpers.families import NEW
from tests.kernels import test_cache as caches
from tests.kernels import test_encoded as matrices

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = 1 << 20
FP32, BF16 = torch.float32, torch.bfloat16
LARGE = Capacity(1 << 40, 1 << 40, 1 << 40, shared=False, staged=True)


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
    """Return the most bytes held at once by a call, without its results."""
    gc.collect()  # Triton's interpreter keeps what a launch was given until then
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
def test_without_triton_weights_are_decoded_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Ampere, whose price in policies/hardware relies on it."""
    torch.manual_seed(0)
    form, decoded = matrices.packed(4, 32, 320, 512), list[int]()
    x, data = torch.randn(300, 512), form.encode(torch.randn(320, 512) / 10)
    dequantize = type(form).dequantize_rows
    monkeypatch.setattr(type(form), "dequantize_rows", lambda f, d, i: decoded.append(len(i)) or dequantize(f, d, i))
    for compute in (None, "int8"):
        out = CudaKernels(fused=False).product(x, data, form, None, compute)
        assert sum(decoded) == 320
        decoded.clear()
        exact = reference.ReferenceKernels().product(x, data, form, None, compute)
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
        decoded.clear()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("topk", [None, 0.25])
@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize("kernels", ["cuda"])
def test_decode_attention_holds(kernels: str, bits: int | None, topk: float | None) -> None:
    cache = caches.cached(bits, 64)
    many = len(caches.LENGTHS) * 8
    q = torch.randn(many, 8, 64)
    tables, lengths = cache.tables.repeat(8, 1), cache.lengths.repeat(8)
    options = AttentionOptions(0.1, topk=topk)
    found = held(
        lambda: CudaKernels().decode_attention(q, cache.pool, tables, lengths, options, cache.form),
        q, tables, lengths, cache.pool,
    )  # fmt: skip
    room = cuda.checks.check_pool(cache.pool, cache.form)
    one = tables.shape[1] * room.page_tokens * 2 * room.kv_heads * room.dim * cuda.GATHERED  # a sequence's, at least
    assert found <= max(SMALL, one) + 65536


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kernels", ["cuda"])
def test_encoding_keys_and_values_holds(kernels: str, bits: int) -> None:
    cache = caches.cached(bits, 64)
    room = cuda.checks.check_pool(cache.pool, cache.form)
    count = min(3000, room.pages * room.page_tokens)
    k, v = torch.randn(2, count, room.kv_heads, room.dim)
    pages = torch.arange(count, dtype=torch.int32) // room.page_tokens
    offsets = torch.arange(count, dtype=torch.int32) % room.page_tokens
    call = lambda: CudaKernels().append(k, v, cache.pool, pages, offsets, cache.form)  # noqa: E731
    assert held(call, k, v, pages, offsets, cache.pool) <= SMALL + 8192


def test_the_plan_books_what_the_kernels_hold() -> None:
    from flexengine.tier import cuda as tier

    assert (sizes.SCRATCH, sizes.GATHERED) == (cuda.BUFFER, cuda.GATHERED)
    assert sizes.CONVERTED == tier.CONVERTED
    tensor = TensorFact("w", 4096 * 4096, 2, 2)
    facts = ModelFacts(((tensor,),), (), tensor, None, 1000, 4096, 11008, 32, 8, 128, 2, gpu=True)
    work = Workload.of([(1000, 24)] * 8)

    def booked(facts: ModelFacts) -> int:
        return lay_out(facts, Policy(gpu_batch_size=8), work, LARGE).account["device"]["workspace"]

    alone = booked(replace(facts, gpu=False))
    assert booked(facts) - alone == sizes.SCRATCH + sizes.CUBLAS
    other = replace(facts, layers=((replace(tensor, stored=4),),))
    assert booked(other) - alone == sizes.SCRATCH + sizes.CUBLAS + sizes.CONVERTED
    rounded = replace(facts, layers=((replace(tensor, form="int4 by int8"),),))
    tokens = min(Policy().prefill_tokens, 8000)
    assert booked(rounded) - alone >= sizes.SCRATCH + sizes.CUBLAS + tokens * 11008 * (1 + 8 / 32)
    gate, down = (TensorFact(n, 16 * size, 2, 2, experts=16) for n, size in (("g", 2 * 512 * 4096), ("d", 512 * 4096)))
    mixed = replace(facts, layers=((tensor, gate, down),), active=4)
    assert booked(mixed) - booked(facts) == tokens * 4 * (4 * 4096 + 2 * 1024) * 2
    near = replace(facts, heads=128, windows=(900,))
    # K and V of each query head, of every prompt beyond the window, and masks of 1,024 queries
    copies = max(1023 * (2 * 128 * 128 * 2 * max(1, tokens // 901) + 1024 * 3), tokens * 2 * 128 * 128 * 2)
    scratch = -(-max(sizes.SCRATCH, copies) // 4096) * 4096
    assert booked(near) - booked(replace(near, gpu=False)) == sizes.CUBLAS + scratch
    chosen = replace(facts, topk=0.1)
    held = 2 * 8 * 128 * 1023 * cuda.GATHERED  # of the one sequence that is gathered at least
    assert booked(chosen) - alone >= max(sizes.SCRATCH, held) + sizes.CUBLAS


@pytest.mark.parametrize("gpu", [True, False])
def test_rows_of_an_embedding_off_a_gpu_are_booked(gpu: bool) -> None:
    tensor, table = TensorFact("w", 64 * 64, 2, 2), TensorFact("e", 1000 * 64, 2, 2)
    facts = ModelFacts(((tensor,),), (), table, None, 1000, 64, 128, 4, 4, 16, 2, gpu=gpu)
    work = Workload.of([(100, 24)] * 8)
    layout = lay_out(facts, Policy(gpu_batch_size=4, num_gpu_batches=2, weights=(0, 1, 0)), work, LARGE)
    assert layout.embedded == layout.account["host"].get("embedding rows", 0)
    wanted = 8 * 100 * 64 * 2  # all prompts enter in one sweep
    assert layout.embedded == (-(-wanted // 4096) * 4096 if gpu else 0)


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [Lossy(), Lossy(weights="int4")], ids=str)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "opt-350m"])
def test_what_passes_through_locked_memory(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, lossy: Lossy
) -> None:  # fmt: skip
    """Rows of the embedding and weights that stay, as beside a GPU, on a simulated device."""
    for module in ("layout", "sizes"):
        monkeypatch.setattr(f"flexengine.plan.{module}.CONVERTED", 8192)
    known, away = families(family), Policy(gpu_batch_size=2, num_gpu_batches=4, weights=(0, 0.5, 0.5))
    found = []
    for gpu in (False, True):
        with Engine(known.directory, policy=away, device="sim", offload_dir=tmp_path, lossy=lossy) as engine:
            engine.core.opened.facts = replace(engine.core.opened.facts, gpu=gpu)
            found.append([r.token_ids for r in engine.generate(known.rows, SamplingParams(NEW, ignore_eos=True))])
            assert engine.layout is not None
            assert bool(engine.layout.embedded) == bool(engine.layout.passing) == gpu
    assert found[0] == found[1]
    if not lossy.weights:
        assert found[1] == known.expected


@pytest.mark.parametrize(("hidden", "wide"), [(256, 64), (64, 192)])
def test_experts_computed_in_one_call_hold_what_is_booked(
    monkeypatch: pytest.MonkeyPatch, hidden: int, wide: int
) -> None:  # fmt: skip
    """transformers' own grouped product, against a loop over tokens and experts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    monkeypatch.setattr(mixture, "has_grouped_product", lambda x: True)
    torch.manual_seed(2)
    experts, active, tokens = 8, 4, 512
    module = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=wide, num_experts=experts))
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.1)
    x, shares = torch.randn(tokens, hidden), torch.rand(tokens, active)
    chosen = torch.stack([torch.randperm(experts)[:active] for _ in range(tokens)])
    peak = held(lambda: mixture._experts(module, x, chosen, shares), x, shares, chosen, *module.parameters())
    parts = [TensorFact(n, p.numel(), 4, 4, experts=experts) for n, p in module.named_parameters()]
    facts = ModelFacts((tuple(parts),), (), parts[0], None, 1, hidden, wide, 1, 1, 1, 4, active=active, gpu=True)
    assert (
        peak <= tokens * active * (4 * facts.hidden + 2 * facts.expert_width) * 4 + 8 * 16 * tokens * active
    )  # and indices
    found = mixture._experts(module, x, chosen, shares)
    for i in range(0, tokens, 37):
        gate, up = (module.gate_up_proj[chosen[i]] @ x[i]).chunk(2, -1)
        each = module.down_proj[chosen[i]] @ (torch.nn.functional.silu(gate) * up)[..., None]
        torch.testing.assert_close(found[i], (each[..., 0] * shares[i, :, None]).sum(0), atol=1e-4, rtol=1e-4)


def test_grouped_prompts_are_copied_for_every_query_head() -> None:
    """Where the fused kernels take no groups, K and V of a gpu_batch's tokens lie there once per query head."""
    tensor = TensorFact("w", 4096 * 4096, 2, 2)
    facts = ModelFacts(((tensor,),), (), tensor, None, 1000, 4096, 11008, 128, 8, 128, 2, gpu=True)
    found = sizes.gpu_buffers(facts, 4096, 1000) - sizes.gpu_buffers(replace(facts, kv_heads=128), 4096, 1000)
    assert found == 4096 * 2 * 128 * 128 * 2 - sizes.SCRATCH


def test_memory_of_every_stream_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream, and jobs have streams of their own; builds without it are served."""
    from flexengine.tier import cuda as tier

    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: called.append("workspaces"), raising=False)
    machine = object.__new__(tier.CudaMachine)
    machine.give_back()
    assert called == ["workspaces", "cache"]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    machine.give_back()
    assert called == ["workspaces", "cache", "cache"]
