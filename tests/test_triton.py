"""Triton's kernels without a GPU: interpreted, against what every set of kernels must do; and compiled for one."""

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.codec.cache import CacheForm
from flexengine.kernels.base import Room

triton = pytest.importorskip("triton", reason="needs triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flexengine.kernels import triton_attention as attention  # noqa: E402

H100 = GPUTarget("cuda", 90, 32)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
# A choice of the cases that CudaKernels must pass, as an interpreter takes its time.
ATTENTION = (
    "test_kernels.py::TestKernels::test_page_sizes[cuda-4]",
    "test_kernels.py::TestKernels::test_options[cuda-{'window': 50, 'softcap': 1.0, 'sinks': True}]",
    "test_kernels.py::TestKernels::test_query_dtype_and_strides",
    "test_kernels.py::TestKernels::test_result_does_not_depend_on_the_rest",
    "test_kernels.py::TestKernels::test_long_sequences_and_extreme_scores[cuda-2500]",
    "test_kernels.py::TestKernels::test_decode[cuda-20-1-dtype1]",
    "test_kernels.py::TestKernels::test_empty_batch",
    "test_cache_kernels.py::TestEncodedCache::test_decode[cuda-8-128-4]",
    "test_cache_kernels.py::TestEncodedCache::test_decode[cuda-4-80-1]",
    "test_cache_kernels.py::TestEncodedCache::test_decode[cuda-2-96-3]",
    "test_cache_kernels.py::TestEncodedCache::test_query_dtype",
    "test_cache_kernels.py::TestEncodedCache::test_what_cannot_be_held_stays_in_its_sequence",
    "test_cache_kernels.py::TestDecode::test_halves_merge_to_the_whole[cuda-fp32]",
)


def interpreted(cases: tuple[str, ...]) -> None:
    """Runs tests of CudaKernels on a CPU with TRITON_INTERPRET=1, which must be set before kernels are defined."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "cuda", "-W", "error::RuntimeWarning"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [*command, *(str(here / case) for case in cases)], env=environment, cwd=here.parent, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    if "only 0-dimensional arrays can be converted" in out.stdout:
        pytest.skip("this Triton's interpreter cannot count with this numpy")
    assert out.returncode == 0, out.stdout[-4000:] + out.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", out.stdout)[0]) >= len(cases)
    assert "skipped" not in out.stdout


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    """A kernel for an H100. types: of its other parameters, as "*fp32" or "i32"; all pointers at multiples of 16."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, aligned)
    return triton.compile(source, target=H100, options={"num_warps": warps})


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_attention_interpreted() -> None:
    interpreted(ATTENTION)


@pytest.mark.parametrize(("dim", "group", "bits", "dtype"), [
    (128, 1, None, torch.bfloat16), (128, 8, None, torch.float16), (80, 71, None, torch.float32),
    (128, 1, 4, torch.float32), (96, 4, 4, torch.bfloat16), (64, 4, 2, torch.float16), (256, 2, 8, torch.bfloat16),
])  # fmt: skip
def test_attention_compiles(dim: int, group: int, bits: int | None, dtype: torch.dtype) -> None:
    form = None if bits is None else CacheForm(bits, 8, 32, dim)
    pool = torch.uint8 if form else dtype
    tile = attention.tiles(Room(10, 8, 32, dim), 8 * group, form, dtype, pool)
    assert tile is not None
    types = dict(
        q_at=f"*{NAMES[dtype]}", pool_at=f"*{NAMES[pool]}", halves_at="*fp16" if form else f"*{NAMES[pool]}",
        tables_at="*i32", lengths_at="*i32", partial_at="*fp32", lse_at="*fp32", q_token="i32", q_head="i32",
        table="i32", spans="i32", scale="fp32", window="i32", softcap="fp32",
    )  # fmt: skip
    constants = dict(CAPPED=True, SPAN=attention.SPAN, WIDEN=False, **asdict(tile))
    found = compiled(attention.span_kernel, types, constants, 4)
    assert ("mma" in found.asm["ptx"]) == tile.NARROW * tile.DOT
    assert "tf32" not in found.asm["ptx"]
    assert found.metadata.shared <= 96 << 10  # so that two fit an H100, and one most others


def test_merging_compiles() -> None:
    types = dict(
        lengths_at="*i32", partial_at="*fp32", partial_lse_at="*fp32", sinks_at="*bf16", out_at="*bf16", lse_at="*fp32",
        spans="i32", window="i32", heads="i32",
    )  # fmt: skip
    compiled(attention.merge_kernel, types, dict(DIM=80, COLUMNS=128, SINKS=True, SPAN=attention.SPAN), 1)


def test_what_attention_is_left_to_torch() -> None:
    room = Room(4, 2, 16, 64)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert attention.tiles(room._replace(dim=512), 2, None, fp32, fp32) is None
    assert attention.tiles(room, 2, None, torch.float64, fp32) is None
    for q, pool, narrow in ((bf16, bf16, True), (fp32, bf16, False), (bf16, torch.float16, False)):
        tile = attention.tiles(room, 8, None, q, pool)
        assert tile is not None
        assert narrow == tile.NARROW
