"""Checkpoints in published quantised forms, and the plain fp32 checkpoint with the numbers that these encode.

Encoders and decoders here are numpy, written from the formats' specifications; they share no code with the package.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
# The tensors of one quantised matrix by suffix of its module's name, and the fp32 numbers that these encode.
Encoded = tuple[dict[str, torch.Tensor], Array]
MATRICES = r"layers\.\d+\..*(proj|_proj_with_mqa|dense|fc1|fc2|w1|w2|w3)\.weight$"


def e4m3_values() -> Array:
    """OCP FP8 E4M3: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; all ones is NaN, and nothing infinite."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)


def nearest(x: Array, values: Array) -> Array:
    """Codes of the nearest values, uint8."""
    order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")
    order = order[np.isfinite(values[order])]
    ordered = values[order]
    right = np.clip(np.searchsorted(ordered, x), 1, len(ordered) - 1)
    right -= np.abs(x - ordered[right - 1]) < np.abs(x - ordered[right])
    return order[right].astype(np.uint8)


def spread(scales: Array, shape: tuple[int, int], block: tuple[int, int]) -> Array:
    """The scale of each element: block (i, j) covers rows i * block[0] and columns j * block[1] onwards."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scales[rows[:, None], columns[None]]


def fp8(
    x: Array, block: tuple[int, int], dtype: torch.dtype = torch.float32, suffix: str = "weight_scale_inv"
) -> Encoded:
    """FP8 with scales of blocks."""
    down, right = -(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])
    top = np.zeros((down, right), np.float32)
    np.maximum.at(top, (np.arange(x.shape[0])[:, None] // block[0], np.arange(x.shape[1])[None] // block[1]), np.abs(x))
    scales = torch.from_numpy(top / 448 + 1e-8).to(dtype)
    if dtype == torch.float8_e8m0fnu:
        scales = torch.from_numpy(np.ceil(np.log2(top / 448 + 1e-8)).astype(np.int32) + 127).to(torch.uint8).view(dtype)
    per = spread(scales.float().numpy(), x.shape, block)
    codes = nearest(x / per, values := e4m3_values())
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), suffix: scales}
    return tensors, values[codes] * per


def quantise(
    source: Path,
    target: Path,
    settings: dict[str, Any],
    encode: Callable[[str, Array], Encoded | None],
    matrices: str = MATRICES,
) -> Path:
    """Write a quantised copy of a plain fp32 checkpoint, and beside it, at the path that is returned, the plain one
    with the numbers that the copy encodes. encode: returns None for a matrix that stays plain."""
    plain, stored, decoded = (
        target.with_name(f"{target.name}-plain"),
        dict[str, torch.Tensor](),
        dict[str, torch.Tensor](),
    )
    tensors = {
        name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    for name, tensor in tensors.items():
        made = encode(name, tensor.float().numpy()) if re.search(matrices, name) else None
        if made is None:
            stored[name] = decoded[name] = tensor
            continue
        stored |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in made[0].items()}
        decoded[name] = torch.from_numpy(np.ascontiguousarray(made[1], dtype=np.float32))
    for folder, content, extra in ((target, stored, {"quantization_config": settings}), (plain, decoded, {})):
        folder.mkdir(parents=True)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        for file in source.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, folder)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | extra))
    return plain


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0], np.float32)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4 = np.concatenate([FP4, -FP4])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, awq/utils/packing_utils.py: output of each nibble of a word


def e8m0(codes: Array) -> Array:
    """OCP MX: 2^(code - 127); 255 is NaN."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127)).astype(np.float32)


def string(codes: Array, bits: int) -> Array:
    """Codes of each column as a string of bits down the rows, in words of 32 bits: int32 [rows * bits / 32, n]."""
    flags = (codes.T[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(codes.shape[1], -1)
    flags = np.pad(flags, ((0, 0), (0, -flags.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(flags, axis=1, bitorder="little").view("<i4").T)


def codes_of(words: Array, bits: int, count: int) -> Array:
    """The codes that `string` packs: int64 [count, n]."""
    flags = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
    parts = flags[:, : count * bits].reshape(words.shape[1], count, bits)
    return (parts.astype(np.int64) << np.arange(bits)).sum(-1).T


def awq_words(codes: Array) -> Array:
    """Codes of 4 bits, [n, outputs], in words: int32 [n, outputs / 8]."""
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint32)
    words = sum(eight[..., output] << np.uint32(4 * nibble) for nibble, output in enumerate(AWQ_ORDER))
    return np.asarray(words, np.uint32).view(np.int32)


def awq_codes(words: Array) -> Array:
    """The codes that `awq_words` packs."""
    codes = np.empty((*words.shape, 8), np.int64)
    for nibble, output in enumerate(AWQ_ORDER):
        codes[..., output] = words.view(np.uint32) >> np.uint32(4 * nibble) & 15
    return codes.reshape(len(words), -1)


def integers(x: Array, bits: int, width: int, dtype: torch.dtype) -> tuple[Array, Array, torch.Tensor]:
    """Codes [rows, columns], zero points [rows, groups] and scales [rows, groups] of x, in groups of columns."""
    rows, columns = x.shape
    groups = np.pad(x, ((0, 0), (0, -columns % width)), mode="edge").reshape(rows, -1, width)
    low, high, most = groups.min(-1), groups.max(-1), 2**bits - 1
    scales = torch.from_numpy((high - low) / most + 1e-6).to(dtype)
    each = scales.float().numpy()
    zeros = np.clip(np.round(-low / each), 1, most - 1).astype(np.int64)
    codes = np.clip(np.round(groups / each[..., None]) + zeros[..., None], 0, most).astype(np.int64)
    return codes.reshape(rows, -1)[:, :columns], zeros, scales


def gptq(
    x: Array, bits: int, width: int, version: int = 1, order: Array | None = None, symmetric: bool = False
) -> Encoded:
    """GPTQ: x is [out, in]. order: group of each input, for desc_act."""
    columns = x.shape[1]
    group = np.arange(columns) // width if order is None else order
    rank = np.argsort(group, kind="stable")  # inputs of a group side by side
    codes, zeros, scales = integers(x[:, rank], bits, width, torch.float16)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    codes = codes[:, np.argsort(rank)]
    tensors = {
        "qweight": torch.from_numpy(string(codes.T, bits)),
        "qzeros": torch.from_numpy(np.ascontiguousarray(string(zeros - (version == 1), bits).T)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    each = scales.float().numpy()
    return tensors, each[:, group] * (codes - zeros[:, group]).astype(np.float32)


def awq(x: Array, width: int) -> Encoded:
    """AWQ gemm: x is [out, in]."""
    codes, zeros, scales = integers(x, 4, width, torch.float16)
    tensors = {
        "qweight": torch.from_numpy(awq_words(codes.T)),
        "qzeros": torch.from_numpy(awq_words(zeros.T)),
        "scales": scales.T.contiguous(),
    }
    group = np.arange(x.shape[1]) // width
    return tensors, scales.float().numpy()[:, group] * (codes - zeros[:, group]).astype(np.float32)


def packed(x: Array, bits: int, width: int, symmetric: bool) -> Encoded:
    """compressed-tensors pack-quantized, scales in bf16; width 0: of whole rows."""
    codes, zeros, scales = integers(x, bits, width or x.shape[1], torch.bfloat16)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    tensors = {
        "weight_packed": torch.from_numpy(np.ascontiguousarray(string(codes.T, bits).T)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(x.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(string(zeros, bits))
    group = np.arange(x.shape[1]) // (width or x.shape[1])
    return tensors, scales.float().numpy()[:, group] * (codes - zeros[:, group]).astype(np.float32)


def int8(x: Array) -> Encoded:
    """compressed-tensors int-quantized: a scale in bf16 for each row."""
    scales = torch.from_numpy(np.abs(x).max(1, keepdims=True) / 127).to(torch.bfloat16)
    codes = np.clip(np.round(x / scales.float().numpy()), -128, 127).astype(np.int8)
    return {"weight": torch.from_numpy(codes), "weight_scale": scales}, codes * scales.float().numpy()


def fp4_bytes(codes: Array) -> torch.Tensor:
    """Two codes in a byte, the first one in the low bits."""
    return torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)


def nvfp4(x: Array, divides: bool) -> Encoded:
    """NVFP4 of compressed-tensors (the fp32 scale of the matrix divides) or of ModelOpt (it multiplies)."""
    groups = x.reshape(len(x), -1, 16)
    top = np.abs(groups).max(-1)
    whole = np.float32(448 * 6 / np.abs(x).max()) if divides else np.float32(np.abs(x).max() / (448 * 6))
    stored = nearest(top / 6 * whole if divides else top / 6 / whole, e4m3_values())
    each = e4m3_values()[stored]
    each = each / whole if divides else each * whole
    codes = nearest(groups / np.where(each == 0, 1, each)[..., None], E2M1)
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    tensors = {
        names[0]: fp4_bytes(codes.reshape(x.shape)),
        "weight_scale": torch.from_numpy(stored).view(torch.float8_e4m3fn),
        names[1]: torch.tensor([whole]) if divides else torch.tensor(whole),
    }
    return tensors, (E2M1[codes] * each[..., None]).reshape(x.shape)


def llm_int8(x: Array) -> Encoded:
    """bitsandbytes LLM.int8: code * SCB * fp32(1 / 127)."""
    top = np.abs(x).max(1).astype(np.float32)
    codes = np.clip(np.round(x / top[:, None] * 127), -127, 127).astype(np.int8)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(top),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.astype(np.float32) * top[:, None] * np.float32(7.874015718698502e-3)


def blocks_of_4_bits(x: Array, kind: str = "nf4", nested: bool = False) -> Encoded:
    """bitsandbytes NF4 (QLoRA, appendix E) or FP4, with blocks of 64 numbers that may cross rows."""
    flat = np.pad(x.reshape(-1), (0, -x.size % 64)).reshape(-1, 64)
    top = np.abs(flat).max(1).astype(np.float32)
    about = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(x.shape)}
    tensors = dict[str, torch.Tensor]()
    if nested:
        offset = float(top.mean())
        table = np.linspace(-1, 1, 256, dtype=np.float32) ** 3
        groups = np.pad(top - np.float32(offset), (0, -len(top) % 256)).reshape(-1, 256)
        most = np.abs(groups).max(1)
        codes = nearest((groups / most[:, None]).reshape(-1)[: len(top)], table)
        top = table[codes] * most[np.arange(len(top)) // 256] + np.float32(offset)
        about |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {"weight.nested_absmax": torch.from_numpy(most), "weight.nested_quant_map": torch.from_numpy(table)}
    table = NF4 if kind == "nf4" else FP4
    codes4 = nearest(flat / np.where(top == 0, 1, top)[:, None], table).reshape(-1)
    halves = codes4[: x.size].reshape(-1, 2)
    tensors |= {
        "weight": torch.from_numpy(halves[:, 0] << 4 | halves[:, 1])[:, None],
        "weight.absmax": torch.from_numpy(codes if nested else top),
        "weight.quant_map": torch.tensor(table),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8),
    }
    return tensors, (table[codes4.reshape(-1, 64)] * top[:, None]).reshape(-1)[: x.size].reshape(x.shape)


def mxfp4(x: Array) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """Bytes [..., 16], scales and numbers of stacks in MXFP4. x: [..., columns]."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scales = np.clip(np.floor(np.log2(np.abs(groups).max(-1) + 1e-30)) - 2 + 127, 0, 254).astype(np.uint8)
    each = e8m0(scales)[..., None]
    codes = nearest(groups / each, E2M1)
    return fp4_bytes(codes), torch.from_numpy(scales), (E2M1[codes] * each).reshape(x.shape)
