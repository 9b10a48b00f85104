"""Argument structs of the native kernels, with the same fields as in the C++ headers in this folder."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Dtype of simd.h


class DecodeArgs(ctypes.Structure):
    """struct Decode of attention.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "out", "pool", "tables", "lengths", "sinks", "lse", "chosen", "memory")),
        *((name, c_int64) for name in ("n", "heads", "pages", "kv_heads", "page_tokens", "dim", "group", "max_pages")),
        *((name, c_int64) for name in ("q_row", "q_head", "window")),
        ("topk", c_double),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("q_dtype", "pool_dtype", "threads")),
    ]


class AppendArgs(ctypes.Structure):
    """struct Append of cache.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v", "pool", "pages", "offsets")),
        *((name, c_int64) for name in ("tokens", "pool_pages", "kv_heads", "page_tokens", "dim", "group")),
        *((name, c_int64) for name in ("k_row", "k_head", "v_row", "v_head")),
        *((name, c_int32) for name in ("from_dtype", "pool_dtype", "threads")),
    ]


class LinearArgs(ctypes.Structure):
    """struct Linear of linear.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "w", "bias", "residual", "out")),
        *((name, c_int64) for name in ("rows", "n", "k", "x_row", "w_row", "out_row")),
        *((name, c_int32) for name in ("w_dtype", "pairs", "across", "panels", "threads")),
    ]


class ProductArgs(ctypes.Structure):
    """struct Product of encoded.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "w", "bias", "residual", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "n", "k", "x_row", "out_row", "groups")),
        *((name, c_int32) for name in ("bits", "group", "compute", "threads")),
    ]


class PromptArgs(ctypes.Structure):
    """struct Prompt of prompt.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "sinks", "out", "pool", "table")),
        *((name, c_int64) for name in ("batch", "queries", "keys", "heads", "kv_heads", "dim", "window")),
        *((name, c_int64) for name in ("past", "pages", "page_tokens", "group")),
        *((f"{name}_{part}", c_int64) for name in "qkv" for part in ("prompt", "row", "head")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("pool_dtype", "threads")),
    ]


class BatchArgs(ctypes.Structure):
    """struct Batch of prompt.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "out", "pool", "pieces", "entries", "memory")),
        *((name, c_int64) for name in ("count", "heads", "kv_heads", "dim", "window", "pages", "page_tokens", "group")),
        *((f"{name}_{part}", c_int64) for name in "qkv" for part in ("row", "head")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("pool_dtype", "threads")),
    ]


class NormArgs(ctypes.Structure):
    """struct Norm of elementwise.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, c_int64) for name in ("rows", "n", "x_row")),
        *((name, c_float) for name in ("eps", "shift")),
        ("centred", c_int32),
    ]


class RotateArgs(ctypes.Structure):
    """struct Rotate of elementwise.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, c_int64) for name in ("tokens", "heads", "dim", "x_row", "x_head", "angle_row")),
    ]


class GateArgs(ctypes.Structure):
    """struct Gate of elementwise.h."""

    _fields_ = [("gate", c_void_p), ("up", c_void_p), ("n", c_int64), ("act", c_int32)]


class NarrowArgs(ctypes.Structure):
    """struct Narrow of elementwise.h."""

    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("rows", "n", "x_row")),
        ("wide", c_int32),
    ]


class Step(ctypes.Structure):
    """struct Step of steps.h."""

    _fields_ = [("call", c_void_p), ("kind", c_int32), ("beside", c_int32)]


class RecordsArgs(ctypes.Structure):
    """struct Records of neurons.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "records", "places", "bias", "start", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "n", "room", "nbytes", "shift", "width", "x_row", "out_row")),
        *((name, c_int32) for name in ("kind", "threads")),
    ]


_ARGS = (DecodeArgs, AppendArgs, LinearArgs, ProductArgs, PromptArgs, BatchArgs, NormArgs, RotateArgs, GateArgs,
         RecordsArgs, NarrowArgs, Step)  # fmt: skip
STRUCTS: dict[str, type[ctypes.Structure]] = {args.__name__.removesuffix("Args").lower(): args for args in _ARGS}


def bound(library: ctypes.CDLL, name: str, returns: Any = None, takes: Sequence[Any] = (c_void_p,)) -> Any:
    """Return the library's function flex_`name`. returns, takes: types of its result and its arguments."""
    function = getattr(library, f"flex_{name}")
    function.argtypes, function.restype = list(takes), returns
    return function


def check(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if a struct has another size in the library: its fields would be misread."""
    for name, struct in STRUCTS.items():
        size_of = getattr(library, f"flex_{name}_size")
        size_of.restype = c_int64
        if (native := size_of()) != (python := ctypes.sizeof(struct)):
            raise RuntimeError(
                f"the argument struct of flex_{name} has {native} bytes in the native kernels but {python} in"
                f" {__name__}.{struct.__name__}; give both the same fields"
            )
