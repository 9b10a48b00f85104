"""Numbers of quantised safetensors weights in Triton: codes, scales and zero points, for triton_parts.py."""

import triton
import triton.language as tl


@triton.jit
def code_at(at, row, column, stride, ORDER: tl.constexpr, BITS: tl.constexpr):
    """Return a code: by rows of `stride` bytes, or one of inputs (`column`) of `stride` words. None crosses a byte."""
    if ORDER == "awq":
        bit = row % 8 // 2 * 4 + row % 2 * 16
        place = (column * stride + row // 8) * 4 + bit // 8
    else:
        bit = column * BITS
        place = (bit // 32 * stride + row) * 4 + bit % 32 // 8 if ORDER == "gptq" else row * stride + bit // 8
    return tl.load(at + place).to(tl.int32) >> (bit % 8).to(tl.int32) & ((1 << BITS) - 1)


@triton.jit
def zero_at(at, row, own, cell, stride, cells, rows, ZEROS: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr):
    """Return zero points. own: row of the grid; cell: column of it."""
    if ZEROS == "bytes":
        codes = tl.load(at + own * cells + cell).to(tl.int8, bitcast=True).to(tl.int32)
    elif ZEROS == "down":
        codes = code_at(at, cell, own, cells, "gptq", BITS)
    elif ZEROS == "gptq":
        codes = code_at(at, cell, row, rows * BITS // 8, "rows", BITS)
    else:
        codes = code_at(at, row, cell, stride, "awq", BITS)
    return (codes + MORE).to(tl.float32)


@triton.jit
def spread(x, ORDERED: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return numbers of columns from those of cells of WIDTH columns, [R, C]."""
    if ORDERED:
        each = tl.broadcast_to(x, (R, C))
    else:
        apart = tl.expand_dims(tl.broadcast_to(x, (R, C // WIDTH)), 2)
        each = tl.reshape(tl.broadcast_to(apart, (R, C // WIDTH, WIDTH)), (R, C))
    return each


@triton.jit
def number_of(code, NUMBERS: tl.constexpr, LESS: tl.constexpr):
    """Return the numbers of codes, int32, in fp32. Those of floats of few bits are subnormal as bits of fp32 first."""
    if NUMBERS == "e4m3":
        x = e4m3(code)
    elif NUMBERS == "e2m1":
        x = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif NUMBERS == "signed":
        x = (code << 24 >> 24).to(tl.float32)
    else:
        x = (code - LESS).to(tl.float32)
    return x


@triton.jit
def e4m3(code):
    small = ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True)
    return tl.where((code & 127) == 127, float("nan"), small * 1.329227995784916e36)


@triton.jit
def scale_of(x, SCALES: tl.constexpr):
    """Return scales in fp32, see codec.scaled.SCALES."""
    if SCALES == "e4m3":
        scale = e4m3(x.to(tl.int32))
    elif SCALES == "e8m0":
        power = x.to(tl.int32)
        bits = tl.where(power == 0, 1 << 22, tl.where(power == 255, 0x7FC00000, power << 23))
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALES == "bf16":
        scale = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        scale = x.to(tl.float32)
    return scale
