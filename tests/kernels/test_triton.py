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

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import make_form
from flexengine.codec.packed import Groupwise, Packed
from flexengine.kernels.paged import Room

triton = pytest.importorskip("triton", reason="needs triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flexengine.kernels import triton_attention as attention  # noqa: E402
from flexengine.kernels import triton_codes as codes  # noqa: E402
from flexengine.kernels import triton_parts as parts  # noqa: E402
from tests.kernels.test_triton_parts import TYPES  # noqa: E402

H100, A100 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
# A choice of the cases that CudaKernels must pass, as an interpreter takes its time.
ATTENTION = (
    "test_kernels.py::TestKernels::test_page_sizes[cuda-4]",
    "test_kernels.py::TestKernels::test_options[cuda-{'window': 50, 'softcap': 1.0, 'sinks': True}]",
    "test_kernels.py::TestKernels::test_query_dtype_and_strides",
    "test_kernels.py::TestKernels::test_result_does_not_depend_on_the_rest",
    "test_kernels.py::TestKernels::test_decode[cuda-20-1-dtype5]",
    "test_kernels.py::TestKernels::test_empty_batch",
    "test_cache.py::TestEncodedCache::test_options_and_page_sizes[cuda-5-{'window': 40}]",
    "test_cache.py::TestEncodedCache::test_decode[cuda-4-64-1]",
    "test_cache.py::TestEncodedCache::test_decode[cuda-4-80-4]",
    "test_cache.py::TestEncodedCache::test_query_dtype[cuda-dtype0]",
    "test_cache.py::TestEncodedCache::test_what_cannot_be_held_stays_in_its_sequence",
    "test_cache.py::TestDecode::test_halves_merge_to_the_whole[cuda-fp32]",
)
PRODUCTS = (
    *(f"test_encoded.py::TestProduct::test_16_bits[cuda-{bits}-{dtype}]" for bits in (2, 3, 4, 8) for dtype in
      ("dtype0", "dtype1")),
    *(f"test_encoded.py::TestProduct::test_{kind}[cuda-{case}]" for kind in ("fp32", "int8") for case in
      ("3-32-shape3", "4-64-shape7", "8-128-shape11", "2-64-shape1")),
    "test_encoded.py::TestProduct::test_the_largest_codes",
    "test_encoded.py::TestProduct::test_shapes_and_strides",
    "test_encoded.py::TestProduct::test_data_may_begin_anywhere[cuda-3-int8]",
    "test_encoded.py::TestProduct::test_what_is_not_finite_stays_in_its_row[cuda-5-nan]",
    "test_encoded.py::TestProduct::test_misfits_are_refused",
)  # fmt: skip
PARTS = tuple(f"test_parted.py::test_{kind}[cuda-{name}]" for kind in ("fp32", "16_bits") for name in (
    "fp8-128x128", "nvfp4-16-divides", "mxfp4-32", "w4-128", "w8-128-packedzeros", "gptq4-64-zeros-ordered", "awq4-128",
))  # fmt: skip
DECODED = tuple(f"test_triton_parts.py::test_decodes_as_numpy[cuda-{name}]" for name in TYPES)


def interpreted(cases: tuple[str, ...]) -> None:
    """Runs tests of CudaKernels on a CPU with TRITON_INTERPRET=1, which must be set before kernels are defined."""
    here = Path(__file__).parent
    options = ["-n", "0", "-m", "", "-k", "cuda", "-W", "error:kernels run in plain torch"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(here / case) for case in cases)], env=environment,
        cwd=here.parents[1], capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    if "only 0-dimensional arrays can be converted" in out.stdout:
        pytest.skip("this Triton's interpreter cannot count with this numpy")
    assert out.returncode == 0, out.stdout[-4000:] + out.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", out.stdout)[0]) >= len(cases)
    assert "skipped" not in out.stdout


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, divisible: bool = True,
    spilled: int = 16, target: Any = H100,
) -> Any:  # fmt: skip
    """Return a kernel compiled, for an H100 by default, in the variant that a launch with such arguments compiles.

    Args:
        types: of its other parameters, as "*fp32" or "i32". All pointers are multiples of 16.
        divisible: whether integers are, too, as the sizes of most models. A launch asks this of each integer that the
            kernel does not exempt.
        spilled: most bytes of registers that are spilled.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    kinds = {"*", "i"} if divisible else {"*"}
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params
               if types.get(p.name, " ")[0] in kinds and not p.do_not_specialize}  # fmt: skip
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, aligned)
    found = triton.compile(source, target=target, options={"num_warps": warps})
    cubin = Path(os.environ["TRITON_CACHE_DIR"], "kernel.cubin")
    cubin.write_bytes(found.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert int(re.findall(r"STACK:(\d+)", usage)[0]) <= spilled, usage
    return found


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "cases", [ATTENTION, PRODUCTS, PARTS, DECODED], ids=["attention", "products", "parts", "decoded"]
)
def test_interpreted(cases: tuple[str, ...]) -> None:
    interpreted(cases)


@pytest.mark.parametrize(("dim", "group", "bits", "dtype"), [
    (128, 1, None, torch.bfloat16), (128, 8, None, torch.float16), (80, 71, None, torch.float32),
    (128, 1, 4, torch.float32), (96, 4, 4, torch.bfloat16), (64, 4, 2, torch.float16), (256, 2, 8, torch.bfloat16),
    (128, 4, 8, torch.bfloat16),
])  # fmt: skip
def test_attention_compiles(dim: int, group: int, bits: int | None, dtype: torch.dtype) -> None:
    form = None if bits is None else CacheFormat(bits, 8, 32, dim)
    pool = torch.uint8 if form else dtype
    tile = attention.tiles(Room(10, 8, 32, dim), 8 * group, form, dtype, pool)
    assert tile is not None
    types = dict(
        q_at=f"*{NAMES[dtype]}", pool_at=f"*{NAMES[pool]}", halves_at="*fp16" if form else f"*{NAMES[pool]}",
        tables_at="*i32", lengths_at="*i32", partial_at="*fp32", lse_at="*fp32", q_token="i32", q_head="i32",
        table="i32", spans="i32", scale="fp32", window="i32", softcap="fp32",
    )  # fmt: skip
    constants = dict(CAPPED=True, SPAN=attention.SPAN, WIDEN=False, **asdict(tile))
    # On an H200 one warp was the fastest. Triton 3.9 spills 80 bytes of it, 3.6 at most 16, and both none of two warps.
    newer = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
    spilled = 80 if newer and tile.warps == 1 and tile.NARROW and tile.COLUMNS == 128 else 16
    found = compiled(attention.span_kernel, types, constants, tile.warps, spilled=spilled)
    assert ("mma" in found.asm["ptx"]) == tile.NARROW * tile.DOT
    assert "tf32" not in found.asm["ptx"]
    assert found.metadata.shared <= 96 << 10  # so that two fit an H100, and one most others


def test_merging_compiles() -> None:
    types = dict(
        lengths_at="*i32", partial_at="*fp32", partial_lse_at="*fp32", sinks_at="*bf16", out_at="*bf16", lse_at="*fp32",
        spans="i32", window="i32", heads="i32",
    )  # fmt: skip
    compiled(attention.merge_kernel, types, dict(DIM=80, COLUMNS=128, SINKS=True, SPAN=attention.SPAN), 1)


POINTERS = dict(data_at="*u8", halves_at="*fp16")
COUNTS = dict.fromkeys(("count", "rows", "columns", "right", "stride", "groups"), "i32")


@pytest.mark.parametrize(("bits", "group", "dtype"), [
    (8, 128, torch.float32), (4, 64, torch.bfloat16), (3, 32, torch.float16), (2, 128, torch.bfloat16),
])  # fmt: skip
def test_decoding_weights_compiles(bits: int, group: int, dtype: torch.dtype) -> None:
    types = dict(POINTERS, out_at=f"*{NAMES[dtype]}", rows="i32", columns="i32", right="i32")
    compiled(codes.decode_kernel, types, dict(BITS=bits, GROUP=group, BLOCKS=codes.BLOCKS), 4)


@pytest.mark.parametrize(("bits", "group", "rows", "x"), [
    (8, 64, 1, "bf16"), (4, 64, 64, "bf16"), (4, 128, 1, "fp16"), (3, 32, 20, "fp16"), (2, 64, 64, "bf16"),
    (8, 64, 1000, "i8"), (4, 64, 1, "i8"), (3, 32, 20, "i8"),
])  # fmt: skip
def test_products_compile(bits: int, group: int, rows: int, x: str) -> None:
    size = codes.sizes(rows, Packed(Groupwise("test", bits, group), 4096, 4096))
    types = dict(POINTERS, **COUNTS, x_at=f"*{x}", worth_at="*fp32", sums_at="*fp32", out_at="*fp32")
    constants = dict(BITS=bits, GROUP=group, BLOCKS=codes.BLOCKS, TILE=size.rows, INT8=x == "i8", WIDEN=False)
    for divisible in (True, False) if rows == 20 else (True,):
        assert "mma" in compiled(codes.product_kernel, types, constants, 4, divisible).asm["ptx"]


PART_NAMES = ("fp8-128x128", "mxfp4-32", "nvfp4-16-divides", "w4-128-packedzeros", "w8-row-signed",
              "gptq4-128-zeros-ordered", "gptq2-128", "awq4-128")  # fmt: skip
SCALES = {"f32": "*fp32", "f16": "*fp16", "bf16": "*i16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PART_NAMES)
@pytest.mark.parametrize(("rows", "target"), [(None, H100), (64, H100), (64, A100)])
def test_products_with_parts_compile(name: str, rows: int | None, target: Any) -> None:
    form: Any = make_form(name, 4096, 4096)
    matrix = parts.matrix_of(torch.zeros(form.nbytes, dtype=torch.uint8), form)
    assert matrix is not None
    sizes = ("columns", "stride", "down", "right", "own_stride", "cell_stride", "cells", "rows")
    types = dict.fromkeys(sizes, "i32") | dict(codes_at="*u8", zeros_at="*u8", groups_at="*i32", factor_at="*fp32")
    types |= dict(scales_at=SCALES.get(matrix.places.SCALES, "*u8"), out_at="*bf16" if rows is None else "*fp32")
    constants = parts._constants(matrix.places)
    if rows is None:
        compiled(parts.decode_parts, types | dict(first="i32", count="i32"), constants, 4)
        return
    types |= dict(x_at="*bf16", count="i32", tiles="i32")
    constants |= dict(TILE=parts.tiles_of(rows, 4096, 4096)[0], WIDEN=False)
    assert "mma" in compiled(parts.product_parts, types, constants, 4, target=target).asm["ptx"]


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 2048])
@pytest.mark.parametrize("shape", [(1, 33), (4096, 4096), (50272, 2048), (4096, 16384)])
def test_sizes_cover_all_groups(shape: tuple[int, int], rows: int) -> None:
    form = Packed(Groupwise("test", 4, 64), *shape)
    size = codes.sizes(rows, form)
    assert (size.runs - 1) * size.groups < form.blocks[1] <= size.runs * size.groups
    assert 16 <= size.rows <= 64
    assert size.runs * min(rows, 64) <= 1024  # partial sums stay few beside the weights


def test_what_attention_is_left_to_torch() -> None:
    room = Room(4, 2, 16, 64)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert attention.tiles(room._replace(dim=512), 2, None, fp32, fp32) is None
    assert attention.tiles(room, 2, None, torch.float64, fp32) is None
    for q, pool, narrow in ((bf16, bf16, True), (fp32, bf16, False), (bf16, torch.float16, False)):
        tile = attention.tiles(room, 8, None, q, pool)
        assert tile is not None
        assert narrow == tile.NARROW
