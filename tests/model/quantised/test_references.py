"""Numbers of quantised checkpoints against other programs: transformers' own loading, and packages where installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from flexengine.codec.forms import make_form
from flexengine.model.encoding import read_part
from flexengine.worker.open_model import open_model
from tests.helpers.families import make_checkpoint
from tests.helpers.quantised import blocks_of_4_bits, fp8, int8, nvfp4, packed, quantise
from tests.model.quantised.test_tokens import gpt_oss

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]


def same_parameters(path: Path, model: Any) -> None:
    """Every parameter that is quantised has the numbers that another program has loaded."""
    opened = open_model(str(path), None, "cpu")
    assert opened.stored_forms
    for name, form in opened.stored_forms.items():
        origin, right = opened.locations[name], model.get_parameter(name).float()
        found = read_part(origin, 0, 4 * right.numel())
        if form.transposed:
            right = right.transpose(-1, -2)
        assert torch.equal(found.view(right.shape), right), name


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_fp8_as_transformers_loads_it(tmp_path: Path, family: str) -> None:
    """transformers divides shapes, so blocks must fill the matrices there: 16 divides all of them."""
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
    make_checkpoint(family, tmp_path / "made")
    quantise(tmp_path / "made", tmp_path / "model", settings, lambda n, x: fp8(x, (16, 16)))
    same_parameters(
        tmp_path / "model", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    )


def test_mxfp4_as_transformers_loads_it(tmp_path: Path) -> None:
    path, _ = gpt_oss(tmp_path)
    same_parameters(path, transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def normal(*shape: int) -> Any:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def test_packages_read_what_the_helpers_write() -> None:
    """compressed-tensors rounds to the type of its scales: these are made fp32 here."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    def scheme(**weights: Any) -> Any:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    x = normal(48, 96)
    for bits, symmetric in (4, True), (4, False), (8, False):
        tensors, right = packed(x, bits, 32, symmetric)
        tensors["weight_scale"] = tensors["weight_scale"].float()
        own = scheme(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32)
        assert np.array_equal(PackedQuantizationCompressor.decompress(tensors, own)["weight"].numpy(), right)
    for bits in (4, 8):  # zero points of whole matrices are not packed
        own = scheme(num_bits=bits, type="int", symmetric=False, strategy="tensor")
        plain = {"weight": torch.from_numpy(x), "weight_scale": torch.tensor([6.4 / 2**bits])}
        plain["weight_zero_point"] = torch.tensor([-3], dtype=torch.int8)
        made = PackedQuantizationCompressor.compress(plain, own)
        numbers = PackedQuantizationCompressor.decompress(made, own)["weight"]
        parts = [made[name].contiguous() for name in ("weight_packed", "weight_scale", "weight_zero_point")]
        data = torch.cat([part.view(-1).view(torch.uint8) for part in parts])
        assert torch.equal(make_form(f"w{bits}-tensor-f32-byteszeros", *x.shape).dequantize(data), numbers)
    tensors, right = int8(x)
    args = QuantizationArgs(num_bits=8, type="int", strategy="channel")
    assert np.array_equal(dequantize(tensors["weight"], tensors["weight_scale"].float(), args=args).numpy(), right)
    tensors, right = nvfp4(x, True)
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], *x.shape, dtype=torch.float32)
    scale, whole = tensors["weight_scale"].float(), tensors["weight_global_scale"]
    found = dequantize(codes, scale, args=args, global_scale=whole, dtype=torch.float32)
    assert np.array_equal(found.numpy(), right)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_reads_what_the_helpers_write(kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    tensors, right = blocks_of_4_bits(normal(48, 128), kind, nested)
    state = functional.QuantState.from_dict({k: v for k, v in tensors.items() if k != "weight"}, torch.device("cpu"))
    assert np.array_equal(functional.dequantize_4bit(tensors["weight"], state).float().numpy().reshape(48, 128), right)
