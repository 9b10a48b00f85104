"""The kernels in plain torch, for any device: the fallback if the native ones cannot be built, and their reference."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import Form
from flexengine.codec.records import RecordForm
from flexengine.kernels import base, checks
from flexengine.kernels.base import AttentionOptions, PromptCall
from flexengine.kernels.onednn import linear_fp32
from flexengine.kernels.paged import Room

SCORES = 2**21  # number of fp32 scores (8 MiB) that the blockwise path holds at once
EXPLICIT = 21  # maximum bytes per score: the score, its query, value, sum and product in fp32, and its mask
CACHED = 2**20  # number of elements of K and V that the blockwise path reads at once
DECODED = 24  # maximum bytes per element of K and V: fp32 copies and scratch for unpacking codes
BLOCK = 128  # queries per call on a CPU
NEURONS = 64  # number of neurons that are multiplied at a time
WIDENED = 16 << 20  # bytes of fp32 copies of a weight at a time

# By the names in base.ACTS.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "gelu": gelu,
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "relu_squared": lambda x: relu(x).square(),
}


class ReferenceKernels(base.Kernels):
    """Kernels in plain torch, see base.Kernels."""

    name = "reference"

    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None = None
    ) -> None:
        room = checks.check_append(k, v, pool, pages, offsets, form)
        bad = (pages < 0) | (pages >= room.pages) | (offsets < 0) | (offsets >= room.page_tokens)
        if bad.any():
            raise checks.bad_token(int(bad.nonzero()[0]), room)
        write(k, v, pool, pages, offsets, form)

    def decode_attention(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        checks.check_decode(q, pool, tables, lengths, options, form, lse)
        out, heads = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[1]
        for i, (_, scores, v) in enumerate(_scored(q, pool, tables, lengths, options, form)):
            used = None if options.topk is None else _largest(scores, options.topk)
            if lse is not None:
                lse[i] = denominator(scores, options.sinks)
            weights = _softmax(scores.view(heads, 1, -1), options.sinks).view(scores.shape)
            if used is not None:
                weights = weights.masked_fill(~used, 0.0)
                v = v.masked_fill(~used.any(1)[..., None], 0.0)  # unused V may be NaN, and 0 * NaN is NaN
            out[i] = (weights @ v).view(heads, -1).to(q.dtype)
        return out

    def choose(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None,
    ) -> Tensor:  # fmt: skip
        room = checks.check_decode(q, pool, tables, lengths, options, form)
        assert options.topk is not None
        chosen = torch.zeros(
            (len(q), room.kv_heads, tables.shape[1] * room.page_tokens), dtype=torch.bool, device=q.device
        )
        for i, (first, scores, _) in enumerate(_scored(q, pool, tables, lengths, options, form)):
            chosen[i, :, first : first + scores.shape[-1]] = _largest(scores, options.topk).any(1)
        return chosen

    def attend_prompts(self, prompts: Sequence[PromptCall], options: AttentionOptions) -> None:
        for prompt in prompts:
            self._attend_prompt(*prompt, options)

    def _attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, past: base.Past | None, options: AttentionOptions
    ) -> None:
        checks.check_prompt(q, k, v, out, options)
        queries, keys, scale, window = q.shape[1], k.shape[1], options.scale, options.window
        if past is not None or options.softcap is not None or options.sinks is not None:
            first = keys - queries + (0 if past is None else past.length)
            out.copy_(_blockwise(q, first, _keys(q, k, v, window, past), options))
            return
        if cpu := q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()  # 2 AVX-512 cores: 23.6 ms, bf16 throughout 24.4 ms
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = queries == keys and (window is None or window >= keys)
        if causal and (queries <= BLOCK or not cpu):
            out.copy_(_sdpa(q, k, v, None, scale, self.fuses_groups(q)).transpose(1, 2))
            return
        # A block of queries skips the keys that none of its queries sees. Times for 512 tokens, 32 heads over 4,
        # head_dim 128 on 2 cores: is_causal 23.7 ms, blocks of 256 18.4 ms, of 128 16.5 ms.
        block = BLOCK if cpu else 1024
        for begin in range(0, queries, block):
            end = min(queries, begin + block)
            low, high = keys - queries + begin, keys - queries + end  # positions of the block's queries
            first = max(0, low + 1 - window) if window else 0
            mask = _visible(range(low, high), range(first, high), window, q.device)
            part = q[:, :, begin:end], k[:, :, first:high], v[:, :, first:high]
            out[:, begin:end] = _sdpa(*part, mask, scale, self.fuses_groups(q)).transpose(1, 2)

    def fuses_groups(self, q: Tensor) -> bool:
        """Return whether torch's fused attention supports grouped-query attention for queries like q."""
        return True

    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        return EXPLICIT * SCORES + DECODED * CACHED

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: Literal["bf16"] | None = None,
        packed: bool = False,
    ) -> Tensor:  # fmt: skip
        checks.check_linear(x, weight, bias)
        x = x if compute is None else x.bfloat16().float()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        step = max(1, WIDENED // max(1, weight.shape[1] * 4))
        for low in range(0, weight.shape[0], step):
            run = slice(low, low + step)
            widened = weight[run].float().contiguous()
            out[..., run] = linear_fp32(x, widened, None if bias is None else bias[run])
        return out

    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        checks.check_add_weighted(out, a, rows)
        step = max(1, WIDENED // max(1, rows.shape[1] * 4))
        for low in range(0, len(rows), step):
            out += linear_fp32(a[:, low : low + step].contiguous(), rows[low : low + step].float().T.contiguous())

    def product(
        self, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None = None, compute: base.Compute | None = None
    ) -> Tensor:
        checks.check_product(x, weight, form, bias)
        x = to_multiply(x, form, compute)
        out = x.new_empty((*x.shape[:-1], form.rows))
        for run, decoded in decoded_parts(weight, form):
            out[..., run] = linear_fp32(x, decoded, None if bias is None else bias[run])
        return out

    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, bias: Tensor | None = None
    ) -> Tensor:
        checks.check_record_products(x, records, places, form, index, bias)
        _check_places(places, records)
        out = x.new_empty((len(x), len(places)), dtype=torch.float32)
        for low in range(0, len(places), NEURONS):  # products of one shape, as oneDNN computes each in its own way
            v = form.decode(records[places[low : low + NEURONS]], index)
            padded = nn.functional.pad(v, (0, 0, 0, NEURONS - len(v)))
            out[:, low : low + NEURONS] = linear_fp32(x.float(), padded)[:, : len(v)]
        return (out if bias is None else out + bias).to(x.dtype)

    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: RecordForm, index: int, start: Tensor | None = None
    ) -> Tensor:
        checks.check_record_sum(a, records, places, form, index, start)
        _check_places(places, records)
        out = a.new_zeros((len(a), form.width), dtype=torch.float32) if start is None else start.clone()
        step = max(1, WIDENED // (4 * form.width))
        for row, weights in zip(out, a.float(), strict=True):
            used = weights.nonzero()[:, 0]
            for low in range(0, len(used), step):
                run = used[low : low + step]
                v = form.decode(records[places[run]], index)
                row += linear_fp32(weights[None, run], v.T.contiguous())[0]
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        checks.check_norm(x, weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return ((weight.float() + shift) * normed).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        checks.check_rotate(x, cos, sin)
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        checks.check_gate(gate, up, act)
        return ACTIVATIONS[act](gate) * up

    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        checks.check_convert(source, target)
        target.copy_(source)


def write(k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None) -> None:
    """Write K and V as base.Kernels.append does, without checking pages and offsets."""
    page, offset = pages.long()[:, None], offsets.long()[:, None]
    head = torch.arange(k.shape[1], device=pool.device)[None]
    for number, x in enumerate((k, v)):
        if form is None:
            pool[page, number, head, offset] = x.to(pool.dtype)
        else:
            panels, (codes, scale, minimum) = form.panels(pool), form.encode(x)
            panels.codes[page, number, head, offset] = codes
            panels.scale[page, number, head, :, offset] = scale
            panels.minimum[page, number, head, :, offset] = minimum


def read(pool: Tensor, pages: Tensor, form: CacheFormat | None, values: bool = True) -> Tensor:
    """Return pages of a pool, dequantized: [*pages.shape, 2, kv_heads, page_tokens, dim]. pages: int64 page numbers,
    not checked. values: False reads K alone; the 2 is then 1."""
    parts = slice(None) if values else slice(1)
    if form is None:
        return pool[:, parts][pages]
    codes, scale, minimum = (x[:, parts][pages] for x in form.panels(pool))
    return form.dequantize(codes, scale.transpose(-1, -2), minimum.transpose(-1, -2))


def _check_places(places: Tensor, records: Tensor) -> None:
    bad = (places < 0) | (places >= len(records))
    if bad.any():
        raise checks.bad_place(places, int(bad.nonzero()[0]), records)


def to_multiply(x: Tensor, form: Form, compute: base.Compute | None) -> Tensor:
    """Return x, fp32, rounded as `compute` of `Kernels.product` says."""
    return _rounded(x, form.group) if compute == "int8" else x if compute is None else x.bfloat16().float()


def decoded_parts(weight: Tensor, form: Form) -> Iterator[tuple[slice, Tensor]]:
    """Yield all rows of an encoded weight in slices of WIDENED bytes, each with its dequantized rows."""
    for first, start, part in form.matrices():
        data, step = weight[start : start + part.nbytes], max(1, WIDENED // max(1, part.columns * 4))
        for low in range(0, part.rows, step):
            ids = torch.arange(low, min(part.rows, low + step), device=weight.device)
            # contiguous: oneDNN takes 1000 times as long for rows that are slices of longer ones
            yield slice(first + low, first + low + len(ids)), part.dequantize_rows(data, ids).contiguous()


def _rounded(x: Tensor, group: int) -> Tensor:
    """Return x rounded to symmetric 8-bit codes per group of columns, dequantized; NaN if a group is not finite."""
    codes, scale = rounded_codes(nn.functional.pad(x, (0, -x.shape[-1] % group)), group)
    return (codes * scale).flatten(-2)[..., : x.shape[-1]]


def rounded_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return integer codes from -127 to 127, [..., groups, group], and scales [..., groups, 1], of x [..., columns].

    The scale of a group with a number that is not finite is NaN; codes of this group may be NaN.
    """
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    limit = groups.new_full((), 127)  # on a GPU, division by a Python number multiplies by its reciprocal: other codes
    scale = groups.abs().amax(-1, keepdim=True) / limit
    codes = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-127, 127)
    return codes, torch.where(scale.isfinite(), scale, torch.nan)


def check_pages(pages: Tensor, room: Room) -> None:
    """Raise InvalidInput if a page is not of the pool. On a GPU the check would synchronise with the host."""
    if pages.device.type == "cpu" and ((pages < 0) | (pages >= room.pages)).any():
        raise checks.bad_sequence(0, room)


def _scored(
    q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions, form: CacheFormat | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first position seen, capped scores [kv_heads, group, seen], V [kv_heads, seen, dim]) per sequence."""
    room = checks.check_pool(pool, form)
    for i, length in enumerate(lengths.tolist()):
        if not 1 <= length <= tables.shape[1] * room.page_tokens:
            raise checks.bad_sequence(i, room)
        first = max(0, length - options.window) if options.window else 0
        start = first // room.page_tokens
        used = tables[i, start : -(-length // room.page_tokens)].long()
        if used.min() < 0 or used.max() >= room.pages:
            raise checks.bad_sequence(i, room)
        pages = read(pool, used, form).float().permute(1, 2, 0, 3, 4)  # [2, kv_heads, pages, page_tokens, dim]
        within = slice(first - start * room.page_tokens, length - start * room.page_tokens)
        k, v = pages.flatten(2, 3)[:, :, within]
        scores = q[i].float().reshape(room.kv_heads, -1, room.dim) @ k.transpose(1, 2) * options.scale
        yield first, capped(scores, options.softcap), v


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(scores / softcap), or the scores if softcap is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def denominator(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the log of the softmax's denominator, [..., heads], of capped scores [..., kv_heads, group, S]."""
    total = torch.logsumexp(scores, -1).flatten(-2)
    return total if sinks is None else torch.logaddexp(total, sinks.float())


def _largest(scores: Tensor, topk: float) -> Tensor:
    """Return the mask, bool [..., S], of positions whose V `decode_attention` uses with topk; the last always is."""
    past = scores[..., :-1]
    order = past.sort(dim=-1, descending=True, stable=True).indices[..., : int(topk * past.shape[-1])]
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    mask[..., -1] = True
    return mask


def _visible(positions: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of the keys that queries at `positions` see, bool [positions, keys]."""
    position = torch.arange(positions.start, positions.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None]
    mask = key <= position
    return mask if window is None else mask & (key > position - window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, grouped: bool) -> Tensor:
    """Return torch's fused attention of q [B, heads, T, d] over k, v [B, kv_heads, S, d]; causal if mask is None."""
    # On a CPU enable_gqa uses the flash path without copies: 16.5 ms with blocks, 17.5 ms with expanded k and v. On
    # CUDA a masked call with enable_gqa does not use the fused kernels and would hold the scores of all queries and
    # keys. So k and v are expanded for a masked call on CUDA, and if `grouped` is false.
    group = q.shape[1] // k.shape[1]
    if group > 1 and (not grouped or (mask is not None and q.device.type != "cpu")):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


Keys = Iterator[tuple[range, Tensor, Tensor]]  # (positions, K, V) with K and V [B, keys, kv_heads, dim]


def _keys(q: Tensor, k: Tensor, v: Tensor, window: int | None, past: base.Past | None) -> Keys:
    """Yield the K and V that the queries see in blocks of about CACHED elements: cached tokens first, then k and v."""
    width, start = 2 * k.shape[2] * k.shape[3], 0
    if past is not None:
        room, start = checks.check_past(q, k, past), past.length
        pages, P = past.table[: -(-start // room.page_tokens)].long(), room.page_tokens
        check_pages(pages, room)
        first = max(0, start + k.shape[1] - q.shape[1] + 1 - window) if window else 0  # first position seen
        step = max(1, CACHED // (width * P))
        for page in range(first // P, len(pages), step):
            positions = range(page * P, min((page + step) * P, start))
            both = read(past.pool, pages[page : page + step], past.form).permute(1, 0, 3, 2, 4).flatten(1, 2)
            yield positions, both[:1, : len(positions)], both[1:, : len(positions)]
    step = max(1, CACHED // max(1, k.shape[0] * width))
    for low in range(0, k.shape[1], step):
        high = min(low + step, k.shape[1])
        yield range(start + low, start + high), k[:, low:high], v[:, low:high]


def _blockwise(q: Tensor, first: int, keys: Keys, options: AttentionOptions) -> Tensor:
    """Return attention of the queries [B, T, heads, dim] at positions first, first + 1, ...

    Softmax and sums are updated block by block of keys (online softmax, arXiv 1805.02867), in fp32.
    """
    scale, window, softcap, sinks, *_ = options
    batch, count, heads, dim = q.shape
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    top = torch.full((batch, heads, count, 1), torch.finfo(torch.float32).min, device=q.device)
    total = torch.zeros_like(top)
    for positions, k, v in keys:
        kv_heads = k.shape[2]
        k, v = k.float().permute(0, 2, 3, 1), v.float().transpose(1, 2)
        step = max(1, SCORES // max(1, batch * heads * max(len(positions), dim)))
        for low in range(max(0, positions.start - first), count, step):
            rows = slice(low, min(low + step, count))
            seen = _visible(range(first + low, first + rows.stop), positions, window, q.device)
            queries = (q[:, rows].float() * scale).transpose(1, 2).reshape(batch, kv_heads, -1, dim)
            scores = (queries @ k).view(batch, heads, len(seen), -1)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores.masked_fill_(~seen, float("-inf"))
            most = torch.maximum(top[:, :, rows], scores.amax(-1, keepdim=True))
            keep, weights = (top[:, :, rows] - most).exp_(), scores.sub_(most).exp_()
            top[:, :, rows] = most
            total[:, :, rows] = total[:, :, rows] * keep + weights.sum(-1, keepdim=True)
            more = weights.view(*queries.shape[:3], -1) @ v
            acc[:, rows] = acc[:, rows] * keep.transpose(1, 2) + more.view(batch, heads, -1, dim).transpose(1, 2)
    if sinks is not None:
        total += (sinks.float()[:, None, None] - top).exp_()
    return acc.div_(total.transpose(1, 2)).to(q.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax weights of capped scores [..., heads, T, S], with sinks. May overwrite the scores."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.float()[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = scores.sub_(top).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (sink - top).exp())
