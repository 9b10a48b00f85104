"""Triton's decoders of quantised safetensors weights, run by `test_triton.py` in an interpreter."""

import pytest
import torch

from tests.kernels.test_parted import BY_INPUTS, SCALED, case, same

pytest.importorskip("triton", reason="needs triton")
from flexengine.kernels import triton_parts

NAMES = [name for name in [*SCALED, *BY_INPUTS] if name[:5] not in ("gptq3", "fp8-2")]
TYPES = [name for name in NAMES if name not in ("w8-64", "w4-32-byteszeros", "mxfp8-32-f16", "gptq4-1280-f32")]


@pytest.mark.skipif(not triton_parts.INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cuda"])
def test_decodes_as_numpy(device: str, name: str) -> None:
    """Bit by bit, also special scales and codes; in parts of rows."""
    rows, columns = (96, 640) if name in BY_INPUTS else (68, 1100 if name.endswith("s4") else 640)
    columns = 1280 if "1280" in name else columns
    for special in (False, True):
        form, data, right = case(name, rows, columns, special)
        matrix = triton_parts.matrix_of(data.clone(), form)  # type: ignore[arg-type]
        assert matrix is not None
        assert same(triton_parts.dequantize(matrix, slice(0, rows), torch.float32), right)
        assert same(triton_parts.dequantize(matrix, slice(16, rows - 3), torch.float32), right[16 : rows - 3])
        assert same(triton_parts.dequantize(matrix, slice(0, 16), torch.float16), right[:16].half())
