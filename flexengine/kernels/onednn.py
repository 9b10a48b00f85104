"""Products of fp32 matrices in which a row's result does not depend on the other rows."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, all fp32.

    On a CPU a row's result is bitwise the same for any other rows: oneDNN computes each of two or more rows in the same
    way. MKL does not, and is slower: on AMD Zen 5 (2048 x 8192, 16 / 512 rows) MKL reaches 91 / 208 GFLOP/s, oneDNN
    218 / 467 GFLOP/s.

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n], or None.

    Returns:
        [..., n].
    """
    if x.device.type != "cpu" or not x.numel():
        return linear(x, weight, bias)
    rows, n = x.reshape(-1, x.shape[-1]), weight.shape[0]
    more = padded_rows(rows.shape[0]) - rows.shape[0]
    padded = nn.functional.pad(rows, (0, 0, 0, more)) if more else rows
    out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[: rows.shape[0]].reshape(*x.shape[:-1], n)


def padded_rows(rows: int) -> int:
    """Return the number of rows, at least `rows`, to which a product is padded.

    oneDNN caches about 300 kB of code and tables per number of rows, for up to 1024 of them, so there should be few.
    The result is at least 2, as oneDNN computes a single row in another way.
    """
    if rows <= 16:
        return max(2, 1 << (rows - 1).bit_length())
    step = 16 if rows <= 128 else 64
    return -(-rows // step) * step


def has_onednn() -> bool:
    """Return whether torch was built with oneDNN's product."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(2, 2), torch.zeros(2, 2), None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True
