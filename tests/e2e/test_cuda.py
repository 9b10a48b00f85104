"""On a GPU: its kernels against the plain ones on a CPU; the exactness grid, in fp32 and bf16. Else skips visibly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.kernels.base import AttentionOptions
from flexengine.kernels.cuda import CudaKernels, triton_module
from flexengine.kernels.reference import ReferenceKernels
from tests.e2e.test_exactness import GRID
from tests.helpers.builds import attended
from tests.helpers.families import FAMILIES, LENGTHS, NEW, make_checkpoint, prompts_of
from tests.kernels import test_cache as caches
from tests.kernels import test_encoded as matrices

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DEVICE = "cuda"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SETS = {"triton": CudaKernels(), "torch": CudaKernels(fused=False)}
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(len(GRID)))
def test_fp32(families: Any, tmp_path: Path, family: str, case: int) -> None:
    known = families(family)
    fields, overlap = GRID[case]
    options = dict(device="cuda", device_mem="2G", host_mem="2G", dtype="float32", offload_dir=tmp_path)
    with Engine(known.directory, policy=Policy(**fields), overlap=overlap, **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(0, len(GRID), 3))
def test_bf16(tmp_path: Path, family: str, case: int) -> None:
    """bf16 sums depend on the batch, so near ties may fall either way: every token must be within rounding of the
    largest logit that transformers computes at that place, and nearly all must be that largest one.

    Near ties of routers change logits by more than rounding, in transformers, too: its own two attention functions
    give logits that differ by up to 31 % of their range. So here every token goes through all experts."""
    model = make_checkpoint(family, tmp_path / "model")
    if experts := getattr(model.config, "num_local_experts", None):
        model.config.num_experts_per_tok = experts
        model.config.save_pretrained(tmp_path / "model")
        model = type(model).from_pretrained(tmp_path / "model")
    model = model.to("cuda", torch.bfloat16)
    prompts = prompts_of(601)
    fields, overlap = GRID[case]
    options = dict(device="cuda", device_mem="2G", host_mem="2G", dtype="bfloat16", offload_dir=tmp_path)
    with Engine(tmp_path / "model", policy=Policy(**fields), overlap=overlap, **options) as engine:
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    best = 0
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt + result.token_ids], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(result.token_ids, device="cuda")[:, None])[:, 0]
        top = logits.max(dim=1).values
        assert (top - chosen <= 0.04 * (top - logits.min(dim=1).values)).all()
        best += int((top == chosen).sum())
    assert best >= 0.9 * NEW * len(LENGTHS)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_neurons_on_demand(families: Any, tmp_path: Path, family: str, share: float) -> None:
    known = families(family)
    options = dict(device="cuda", device_mem="2G", host_mem="2G", dtype="float32", offload_dir=tmp_path)
    with Engine(known.directory, policy=Policy(3, 2, neurons=share), lossy=Lossy(flash="oracle"), **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


@pytest.fixture(params=SETS)
def kernel(request: pytest.FixtureRequest) -> CudaKernels:
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        assert triton_module(DEVICE) is not None  # it warns of what hinders it
    return SETS[request.param]


def there(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("options", caches.OPTIONS[::4], ids=str)
@pytest.mark.parametrize(("bits", "dim", "group", "dtype", "held"), [
    (None, 128, 1, FP32, FP32), (None, 128, 1, BF16, BF16), (None, 80, 4, FP32, FP32), (None, 128, 8, BF16, BF16),
    (None, 20, 3, FP16, FP16), (None, 256, 2, BF16, FP16), (None, 64, 4, FP32, BF16), (8, 128, 1, BF16, None),
    (4, 128, 1, FP32, None), (4, 80, 1, FP16, None), (4, 128, 4, BF16, None), (2, 96, 3, FP32, None),
    (2, 64, 8, FP16, None), (8, 16, 2, BF16, None),
])  # fmt: skip
def test_decode(
    kernel: CudaKernels, bits: int | None, dim: int, group: int, dtype: torch.dtype, held: torch.dtype | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    cache = caches.cached(bits, dim)
    q, options = torch.randn(len(caches.LENGTHS), 2 * group, dim).to(dtype), caches.given(options, 2 * group)
    sinks, pool = options.pop("sinks", None), cache.pool if held is None else cache.pool.to(held)
    how = AttentionOptions(dim**-0.5, sinks=sinks, **options)
    expected, logs = attended(ReferenceKernels(), q.float(), pool, cache.tables, cache.lengths, how, cache.form)
    moved = there(q, pool, cache.tables, cache.lengths)
    where = *moved, how._replace(sinks=there(sinks)[0]), cache.form
    found, lse = attended(kernel, *where)
    assert found.dtype == dtype
    assert torch.equal(found, kernel.decode_attention(*where))  # the same bits again
    exact = 1e-5 if dtype == FP32 else 4 * torch.finfo(dtype).eps
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.cpu().float(), expected, atol=exact * size, rtol=exact)
    torch.testing.assert_close(lse.cpu(), logs, atol=exact, rtol=exact)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("group", [1, 4])
def test_a_sequence_does_not_depend_on_the_rest(bits: int | None, group: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    cache, q = caches.cached(bits, 128), torch.randn(len(caches.LENGTHS), 2 * group, 128)
    q, pool, tables, lengths = there(q, cache.pool, cache.tables, cache.lengths)
    whole = SETS["triton"].decode_attention(q, pool, tables, lengths, AttentionOptions(0.1), form=cache.form)
    for i, length in enumerate(caches.LENGTHS):
        one, pages = slice(i, i + 1), -(-length // 32)
        alone = SETS["triton"].decode_attention(
            q[one], pool, tables[one, :pages], lengths[one], AttentionOptions(0.1), form=cache.form
        )
        assert torch.equal(alone, whole[one])


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("shape", [(37, 200), (2064, 4096)])
@pytest.mark.parametrize(("bits", "group", "dtype"), [
    (8, 64, BF16), (4, 64, BF16), (4, 32, FP16), (3, 128, BF16), (2, 32, FP32), (2, 64, FP16)
])  # fmt: skip
def test_product(
    kernel: CudaKernels, bits: int, group: int, shape: tuple[int, int], dtype: torch.dtype, compute: Any
) -> None:
    torch.manual_seed(0)
    form = matrices.packed(bits, group, *shape)
    x, bias = torch.randn(300, shape[1]).to(dtype), torch.randn(shape[0])
    data, moved, added = there(form.encode(torch.randn(shape) / 10), x, bias)
    exact = ReferenceKernels().product(x.float(), data.cpu(), form, bias, compute)
    rounding = torch.finfo(dtype).eps
    share = 1e-6 if compute or dtype == torch.float32 else rounding
    slack = x.float().abs() @ form.dequantize(data.cpu()).abs().T * share
    for rows in (1, 17, 64, 300):
        found = kernel.product(moved[:rows], data, form, added, compute)
        assert found.dtype == dtype
        error = (found.cpu().float() - exact[:rows]).abs()
        assert (error <= slack[:rows] + 2 * rounding * (exact[:rows].abs() + bias.abs()) + 1e-5).all(), rows
