"""Choice of the next token of every row of a gpu_batch, and log probabilities: C++ on a CPU, plain torch elsewhere.

Tokens are ordered by falling logit, of equal logits by rising id. Each of top-k, top-p and min-p keeps a beginning of
this order. Of the tokens that all keep one is drawn: the first, by id, at which the running sum of weights exceeds
`points` times their total. The weight of a token is exp((its logit - the largest) / temperature).
"""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.kernels import load, structs
from flexengine.kernels.cpu import NativeKernels

ELEMENTS = 1 << 20  # logits that plain torch computes at a time, on a GPU: about 64 bytes of scratch memory for each
CPU_ELEMENTS = 1 << 18  # on a CPU
DIGIT = 11  # bits of an order's number that a histogram resolves


class RowOptions(NamedTuple):
    """How the token of each row is chosen: vectors [rows] on the CPU."""

    temperature: Tensor  # fp64; 0 takes the largest logit, of equal ones the lowest id
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # fp64, in (0, 1]
    min_p: Tensor  # fp64, in [0, 1]
    points: Tensor  # fp64, in [0, 1): where the token is drawn
    # int64: number of most likely tokens to list; 0 for the log probability of the chosen token alone; -1 for neither.
    listed: Tensor


class Edits(NamedTuple):
    """Values that replace logits, by rising row and id, without repetition. On the logits' device, except `first`."""

    first: Tensor  # int64 [rows + 1], on the CPU: number of each row's first edit
    rows: Tensor  # int64 [edits]
    ids: Tensor  # int64 [edits]
    values: Tensor  # fp64 [edits]


class Chosen(NamedTuple):
    """Tensors on the CPU. Log probabilities are those of the logits without edits."""

    tokens: Tensor  # int64 [rows]; -1 if the logits hold NaN or +inf, or all values are -inf
    logprobs: Tensor  # fp64 [rows], of the tokens
    likeliest: (
        Tensor  # int64 [rows, most listed], most likely first, of equal ones the lower id; -1 behind the last one
    )
    likely: Tensor  # fp64 [rows, most listed], their log probabilities


def choose_tokens(logits: Tensor, options: RowOptions, edits: Edits) -> Chosen:
    """Return the next token of each row. A row's result is the same for any other rows. On a GPU there is one
    synchronization. logits: fp32 [rows, vocabulary], on any device; not changed."""
    kernels = load() if logits.device.type == "cpu" else None
    if isinstance(kernels, NativeKernels) and logits.numel():
        return _native(kernels, logits, options, edits)
    return plain_choice(logits, options, edits)


def _native(kernels: NativeKernels, logits: Tensor, options: RowOptions, edits: Edits) -> Chosen:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, words), width = logits.shape, max(0, int(options.listed.max()))
    threads = min(torch.get_num_threads(), rows)
    size = int(structs.bound(kernels.library, "sampling_bytes", ctypes.c_int64, (ctypes.c_int64,))(words))
    scratch = torch.empty(threads * size, dtype=torch.uint8)
    chosen = Chosen(
        torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float64),
        torch.empty(rows, width, dtype=torch.int64), torch.empty(rows, width, dtype=torch.float64),
    )  # fmt: skip
    tensors = {"logits": logits, **edits._asdict(), "scratch": scratch}
    addresses = {
        name: x.data_ptr() for name, x in (tensors | options._asdict() | chosen._asdict()).items() if name != "rows"
    }
    call = structs.Sampling(**addresses, rows=rows, words=words, stride=logits.stride(0), width=width, threads=threads)
    structs.bound(kernels.library, "sampling_run")(ctypes.addressof(call))
    return chosen


def plain_choice(logits: Tensor, options: RowOptions, edits: Edits) -> Chosen:
    """Return what `choose_tokens` does, computed in plain torch: some rows at a time, with vectors of options.

    Weights are whole numbers, multiples of 2 ** -k of the largest one: their sums do not depend on an order of adding,
    so a row's result is the same in any batch on a GPU, too.
    """
    rows, words = logits.shape
    together = max(1, (CPU_ELEMENTS if logits.device.type == "cpu" else ELEMENTS) // max(words, 1 << DIGIT))
    width, bounds, parts = max([0, *options.listed.tolist()]), edits.first.tolist(), list[Tensor]()
    for first in range(0, rows, together):
        last = min(first + together, rows)
        own = slice(bounds[first], bounds[last])
        values = logits[first:last].double()
        if own.start < own.stop:
            values[edits.rows[own] - first, edits.ids[own]] = edits.values[own]
        part = RowOptions(*(x[first:last] for x in options))
        parts.append(_rows_chosen(logits[first:last], values, part, width))
    found = torch.cat(parts).cpu() if parts else torch.empty(0, 2 + 2 * width, dtype=torch.float64)
    ids = found[:, [0, *range(2, 2 + width)]].long()
    return Chosen(ids[:, 0], found[:, 1], ids[:, 1:], found[:, 2 + width :])


def _rows_chosen(logits: Tensor, values: Tensor, options: RowOptions, width: int) -> Tensor:
    """Return fp64 [rows, 2 + 2 * width] on the logits' device: token, log probability, likeliest tokens, and theirs.
    values: the edited logits, fp64; overwritten."""
    on_device = torch.stack([x.double() for x in options]).to(logits.device, non_blocking=True)
    temperature, _, _, _, points, _ = on_device
    raw, best = logits.amax(-1), values.amax(-1)
    broken = ~(raw.isfinite() & best.isfinite())  # amax is NaN if any number is
    tokens = values.argmax(-1)
    if options.temperature.any():
        # Behind the largest value in the order; a temperature near 0 gives inf, and exp(-inf) = 0.
        behind = values.sub_(best[:, None]).div_(torch.where(temperature > 0, temperature, 1)[:, None]).abs_()
        weights = _whole(behind)
        _cut(weights, behind, options, on_device)
        running = weights.cumsum(-1)
        total = running[:, -1]
        at = (points * total.double()).long().minimum(total - 1)
        drawn = torch.searchsorted(running, at[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
        tokens = torch.where(temperature > 0, drawn, tokens)
    columns = [torch.where(broken, -1, tokens).double()[:, None]]
    if width == 0 and not (options.listed >= 0).any():
        return torch.cat([*columns, torch.zeros_like(columns[0])], dim=1)
    ids = torch.cat([tokens[:, None], _largest(logits, width)], dim=1)
    below = (raw[:, None].double() - logits).abs_()
    log_total = _whole(below).sum(-1, keepdim=True).double().log() - _bits(logits) * math.log(2)
    logprobs = -below.gather(1, ids.clamp(min=0)) - log_total
    listed = (torch.arange(width, device=ids.device) < on_device[5][:, None]) & logprobs[:, 1:].isfinite()
    likeliest = torch.where(listed, ids[:, 1:], -1).double()
    return torch.cat([*columns, logprobs[:, :1], likeliest, logprobs[:, 1:]], dim=1)


def _bits(x: Tensor) -> int:
    """Return k so that sums of a row's weights, at most 2 ** k each, stay below 2 ** 62."""
    return 62 - x.shape[1].bit_length()


def _whole(behind: Tensor) -> Tensor:
    """Return exp(-behind) as multiples of 2 ** -k, int64; 0 for NaN."""
    return behind.neg().exp_().mul_(2.0 ** _bits(behind)).nan_to_num_(0).round_().long()


def _cut(weights: Tensor, behind: Tensor, options: RowOptions, on_device: Tensor) -> None:
    """Set the weights of tokens that top-k, top-p or min-p removes to 0. behind: fp64, how far each token is behind the
    largest; 0 or more. on_device: the options on its device."""
    _, top_k, top_p, min_p, _, _ = on_device[..., None]
    words = behind.shape[1]
    if (most := int(torch.where(options.top_k < words, options.top_k, 0).max())) > 0:
        cut = (top_k > 0) & (top_k < words)
        last = behind.topk(most, largest=False).values.gather(1, (top_k.long() - 1).clamp(0, most - 1))
        weights.masked_fill_((behind > last) & cut, 0)
    unlikely = behind.neg().exp_() < min_p if (options.min_p > 0).any() else None
    if (options.top_p < 1).any():
        total = weights.sum(-1, keepdim=True)
        target = (top_p * total.double()).ceil().long().minimum(total).clamp(min=1)
        order = behind.view(torch.int64)  # of numbers >= 0, bits have the same order
        end, room = _reached(order, weights, target)
        equal = order == end
        # Each of the equal tokens has the same weight; the first ones are kept until the target is reached.
        one = weights.masked_fill(~equal, 0).amax(-1, keepdim=True).clamp(min=1)
        over = (order > end) | (equal & (equal.cumsum(-1) > (room + one - 1) // one))
        weights.masked_fill_(over & (top_p < 1), 0)
    if unlikely is not None:
        weights.masked_fill_(unlikely, 0)


def _reached(order: Tensor, weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least number of each row up to which weights have a sum of `target` or more, and what is missing
    before it: int64 [rows, 1]. Histograms find it digit by digit. order: int64 [rows, words], 0 or more."""
    end, room = torch.zeros_like(target), target
    top = 62 // DIGIT * DIGIT
    for shift in range(top, -1, -DIGIT):
        live = weights if shift == top else weights.masked_fill((order >> (shift + DIGIT)) != end, 0)
        digits = (order >> shift) & ((1 << DIGIT) - 1)
        sums = weights.new_zeros(len(weights), 1 << DIGIT).scatter_add_(1, digits, live).cumsum(-1)
        digit = torch.searchsorted(sums, room).clamp(max=(1 << DIGIT) - 1)
        room = room - torch.where(digit > 0, sums.gather(1, (digit - 1).clamp(min=0)), 0)
        end = (end << DIGIT) | digit
    return end, room


def _largest(logits: Tensor, count: int) -> Tensor:
    """Return the ids of each row's `count` largest logits, of equal ones the lower ids first, -1 behind the last."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: of -0.0 and 0.0 neither is larger
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys = rising + torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    found = logits.shape[1] - 1 - (keys.topk(min(count, logits.shape[1])).values & 0xFFFFFFFF)
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1)
