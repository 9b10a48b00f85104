"""GPTQ (AutoGPTQ, GPTQModel) in 2, 3, 4 or 8 bits, and AWQ "gemm" in 4; see `codec.by_inputs` for the layouts.

Labels of GPTQ files lie about the version of zero points, so these decide: of symmetric files all zero points are half
of the range, so the stored ones are that (version 2) or one less (version 1). Of others the label decides; a largest
code in version 1 has been added to with and without a carry by different programs, so such files are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flexengine.codec.by_inputs import ByInputs
from flexengine.codec.forms import WeightFormat
from flexengine.errors import BadCheckpoint, UnsupportedModel, shown
from flexengine.model.checkpoint import Origin
from flexengine.model.files import AGAIN, PLAIN
from flexengine.model.quantised.matrices import SCALE_KINDS, Matrix, values_of

_LABELS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 0}  # what stored zero points are less by
_AMBIGUOUS = "programs read such files in different ways"


def matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint made by GPTQ."""
    label, bits, width = settings.get("checkpoint_format"), settings.get("bits"), settings.get("group_size", -1)
    if label not in _LABELS:
        raise UnsupportedModel(f"quantization_config: checkpoint_format is {shown(label)}; gptq and gptq_v2 are read")
    if bits not in (2, 3, 4, 8) or type(width) is not int or not (width == -1 or width > 0):
        fault = f"quantization_config: bits is {shown(bits)} and group_size {shown(width)}"
        raise UnsupportedModel(f"{fault}; 2, 3, 4 and 8 bits with groups, or -1, are read; {PLAIN}")
    if settings.get("dynamic"):
        raise UnsupportedModel(f"quantization_config: dynamic sets bits by module, which is not read; {PLAIN}")
    for module in _modules(tensors):
        rows, columns, groups = _sizes(module, tensors, bits)
        own = columns if width == -1 else width
        if groups != -(-columns // own):
            raise _unfit(module, tensors, f"{-(-columns // own)} groups of {own} columns")
        zeros = values_of(tensors[f"{module}.qzeros"])
        less = _less(module, zeros, bits, bool(settings.get("sym")), _LABELS[label])
        ordered, others = _order(module, tensors, columns, own, settings)
        form = ByInputs(rows, columns, "gptq", bits, own, less, ordered, _scale_kind(module, tensors))
        yield _matrix(module, form, others)


def awq_matrices(tensors: Mapping[str, Origin], settings: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield the matrices of a checkpoint made by AWQ."""
    bits, version = settings.get("bits", settings.get("w_bit")), str(settings.get("version") or "gemm").lower()
    width, points = settings.get("group_size", settings.get("q_group_size")), settings.get("zero_point", True)
    if bits != 4 or version != "gemm" or points is not True or type(width) is not int or not (width == -1 or width > 0):
        stated = f"bits {shown(bits)}, version {shown(version)}, group_size {shown(width)}, zero_point {shown(points)}"
        raise UnsupportedModel(f"quantization_config: {stated}; 4 bits, gemm, with zero points are read; {PLAIN}")
    for module in _modules(tensors):
        columns, rows = tensors[f"{module}.qweight"].shape[0], tensors[f"{module}.qweight"].shape[1] * 8
        own = columns if width == -1 else width
        groups = tensors[f"{module}.scales"].shape[0]
        if groups != -(-columns // own) or tensors[f"{module}.qzeros"].shape != (groups, rows // 8):
            raise _unfit(module, tensors, f"{-(-columns // own)} groups of {own} columns")
        form = ByInputs(rows, columns, "awq", 4, own, scales=_scale_kind(module, tensors))
        yield _matrix(module, form, ())


def _modules(tensors: Mapping[str, Origin]) -> Iterator[str]:
    """Yield the names of quantised modules. Raise BadCheckpoint if one lacks a tensor."""
    for name in tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            for part, dims in ("qweight", 2), ("qzeros", 2), ("scales", 2):
                other = tensors.get(f"{module}.{part}")
                if other is None:
                    raise BadCheckpoint(f"{module} is quantised, but its tensor {module}.{part} is missing; {AGAIN}")
                if len(other.shape) != dims or (part != "scales" and other.dtype != torch.int32):
                    raise _unfit(module, tensors, "int32 and two dimensions")
            yield module


def _sizes(module: str, tensors: Mapping[str, Origin], bits: int) -> tuple[int, int, int]:
    """Return rows, columns and groups of a matrix."""
    (words, rows), (groups, width) = (tensors[f"{module}.{part}"].shape for part in ("qweight", "scales"))
    columns = words * 32 // bits
    order = tensors.get(f"{module}.g_idx")
    if order is not None and order.shape not in ((columns,), (0,)):
        raise _unfit(module, tensors, f"g_idx {[columns]}, as {bits} bits are stated")
    if width != rows or tensors[f"{module}.qzeros"].shape != (groups, rows * bits // 32):
        raise _unfit(module, tensors, f"scales and qzeros of {rows} outputs, as {bits} bits are stated")
    return rows, columns, groups


def _less(module: str, zeros: torch.Tensor, bits: int, symmetric: bool, label: int) -> int:
    """Return what stored zero points are less than zero points. Raise UnsupportedModel if they may be either."""
    codes, half = _unpacked(zeros, bits), 1 << (bits - 1)
    if symmetric:
        for less in (0, 1):
            if bool((codes == half - less).all()):
                return less
        some = f"{int(codes.min())} to {int(codes.max())}"
        fault = f"{module}.qzeros holds {some}, but zero points of a symmetric file (sym) are {half} or {half - 1}"
        raise UnsupportedModel(f"{fault}: {_AMBIGUOUS}; correct sym in quantization_config, or {PLAIN}")
    if label and bool((codes == 2 * half - 1).any()):
        fault = f"{module}.qzeros holds {2 * half - 1} in checkpoint_format gptq, which is one too many: {_AMBIGUOUS}"
        raise UnsupportedModel(f"{fault}; save it as gptq_v2 with GPTQModel, or {PLAIN}")
    return label


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of rows, int64 [rows, codes]. words: int32 [rows, words]."""
    string = words.long() & 0xFFFFFFFF
    first = torch.arange(words.shape[1] * 32 // bits) * bits
    following = torch.nn.functional.pad(string, (0, 1))[:, first // 32 + 1]
    both = string[:, first // 32] | (following & 0xFF) << 32
    return both >> first % 32 & (1 << bits) - 1


def _order(
    module: str, tensors: Mapping[str, Origin], columns: int, width: int, settings: Mapping[str, Any]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether columns have groups of their own order, and g_idx if it is not needed."""
    name = f"{module}.g_idx"
    if name not in tensors:
        return False, ()
    found = values_of(tensors[name]).long()
    if not len(found) or torch.equal(found, torch.arange(columns) // width):
        return False, (name,)
    groups = -(-columns // width)
    if tensors[name].dtype != torch.int32 or not 0 <= int(found.min()) <= int(found.max()) < groups:
        some = f"{tensors[name].dtype} with {int(found.min())} to {int(found.max())}"
        raise BadCheckpoint(f"tensor {name} is {some}; it must be int32, from 0 to {groups - 1}: {AGAIN}")
    if not settings.get("desc_act"):
        fault = f"tensor {name} reorders columns, but quantization_config says desc_act false: {_AMBIGUOUS}"
        raise UnsupportedModel(f"{fault}; correct desc_act, or {PLAIN}")
    return True, ()


def _scale_kind(module: str, tensors: Mapping[str, Origin]) -> str:
    kind = SCALE_KINDS.get(tensors[f"{module}.scales"].dtype)
    if kind not in ("f16", "bf16", "f32"):
        raise _unfit(module, tensors, "scales in 16 or 32 bits")
    return kind


def _matrix(module: str, form: ByInputs, others: tuple[str, ...]) -> Matrix:
    parts = ["qweight", "qzeros", "scales", *(["g_idx"] if form.ordered else [])]
    names = tuple(f"{module}.{part}" for part in parts)
    shape = (form.rows, form.columns)
    return Matrix(f"{module}.weight", shape, WeightFormat(form), names, (f"{module}.scales",), others)


def _unfit(module: str, tensors: Mapping[str, Origin], expected: str) -> BadCheckpoint:
    parts = ("qweight", "qzeros", "scales", "g_idx")
    found = {part: tensors[f"{module}.{part}"] for part in parts if f"{module}.{part}" in tensors}
    shapes = ", ".join(f"{part} {list(origin.shape)} {origin.dtype}" for part, origin in found.items())
    return BadCheckpoint(f"the tensors of {module} do not fit each other ({shapes}): expected are {expected}; {AGAIN}")
