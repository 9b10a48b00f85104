"""A row's results are bit for bit the same with any other rows, batches, schedules and placements."""

from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.job.rows import Row

pytestmark = pytest.mark.usefixtures("two_threads")
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
SHAPES: list[dict[str, Any]] = [
    dict(gpu_batch_size=1, num_gpu_batches=1),
    dict(gpu_batch_size=3, num_gpu_batches=2, schedule="diagonal"),
    dict(gpu_batch_size=5, num_gpu_batches=1, weights=(0, 0, 1), cache=(0.5, 0, 0.5)),
]


def answers(engine: Engine, rows: list[Row], params: SamplingParams = PARAMS) -> dict[int, Any]:
    results = list(engine.stream(rows, params))
    assert [r.error for r in results] == [None] * len(rows)
    return {r.index: (r.token_ids, r.logprobs, r.samples) for r in results}


CASES = [
    *((family, torch.float32)
      for family in ("llama", "opt-350m", "gpt2", "gemma2", "mixtral", "qwen3-moe", "gpt-oss", "bloom")),
    *((family, torch.bfloat16) for family in ("llama", "opt-350m", "gemma2", "gpt-oss")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logprobs_do_not_depend_on_the_company(families: Any, tmp_path: Any, family: str, dtype: torch.dtype) -> None:
    known = families(family, dtype)
    rows = [Row(i, 0, row) for i, row in enumerate(known.rows)]
    with Engine(known.directory, policy=Policy(gpu_batch_size=8, num_gpu_batches=1), device="cpu") as engine:
        whole = answers(engine, rows)
        for some in ([rows[0]], [rows[2]], rows[3:5], rows[::2]):
            assert answers(engine, some) == {row.index: whole[row.index] for row in some}
    for shape in (SHAPES[CASES.index((family, dtype)) % 2], SHAPES[2]):
        with Engine(known.directory, policy=Policy(**shape), device="cpu", offload_dir=tmp_path) as engine:
            assert answers(engine, rows) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_rows_at_once_change_nothing(families: Any, dtype: torch.dtype) -> None:
    """More rows than any kernel takes at a time: long prompts beside single tokens, samples side by side."""
    known = families("llama", dtype)
    generator = torch.Generator().manual_seed(3)
    lengths = [200, 3, 150, 77, 1, 2, 120, 31] * 4
    ids = [torch.randint(3, 601, (n,), generator=generator).tolist() for n in lengths]
    rows = [Row(i, 0, {"prompt_token_ids": p}) for i, p in enumerate(ids)]
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0, temperature=0.9, n=2)
    with Engine(known.directory, policy=Policy(gpu_batch_size=64, num_gpu_batches=1), device="cpu") as engine:
        whole = answers(engine, rows, params)
        for some in (rows[:1], rows[4:6], rows[7:20]):
            assert answers(engine, some, params) == {row.index: whole[row.index] for row in some}


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "mish", "relu2",
                                  "sigmoid", "laplace", "tanh", "elu", "softplus"])  # fmt: skip
def test_activations(name: str) -> None:
    """Activations alone and among others, at widths that are no multiple of a vector."""
    import transformers.activations

    from flexengine.model.linear import Invariance, Product

    function = {"elu": torch.nn.functional.elu, "softplus": torch.nn.functional.softplus}.get(name)
    function = function or transformers.activations.ACT2FN[name]
    torch.manual_seed(1)
    for width in (36, 37, 99, 1001):
        x = torch.randn(600, width) * 3
        with Invariance(Product(torch.float32)):
            whole = function(x)
            assert all(torch.equal(function(x[:m]), whole[:m]) for m in (1, 2, 3, 5, 17, 100, 333))
