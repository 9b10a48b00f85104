"""The interface of kernels: attention over a paged KV cache, products with weights and with neurons, conversion.

Names and shapes in this package:
    pool      [n_pages, 2, kv_heads, page_tokens, head_dim], contiguous; one layer. Index 1 is 0 for K, 1 for V.
    table     the pages of one sequence in order: token s of the sequence lies in page table[s // page_tokens],
              at offset s % page_tokens.
    form      format of an encoded pool, which is uint8 [n_pages, form.page_bytes], contiguous, at an even address.
    heads     kv_heads * group; query head h reads kv head h // group (grouped-query attention; group 1 is multi-head).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import Form
from flexengine.kernels.paged import PagedAttention, PagedTokens

if TYPE_CHECKING:
    from flexengine.codec.records import RecordForm

ACTS = ("silu", "gelu_tanh", "relu", "gelu", "gelu_quick", "relu_squared")  # first ones of enum Act of elementwise.h
Compute = Literal["bf16", "int8"]  # dtype that a product rounds x to before it multiplies; None: no rounding


class Past(NamedTuple):
    """The first `length` tokens of one prompt, which are already in the KV cache."""

    pool: Tensor  # see the top of this file
    # int32, at least ceil(length / page_tokens) entries. Pages before the window of every query are not read.
    table: Tensor
    length: int  # tokens, at least 1. Entries of the last page after these tokens are not read
    form: CacheFormat | None = None  # format of an encoded pool; None for a plain one


class AttentionOptions(NamedTuple):
    """Numbers of attention, which are those of a layer and of a job."""

    scale: float  # factor on q . k, usually head_dim ** -0.5
    # A query sees only the last `window` tokens, itself included (sliding window); None for all.
    window: int | None = None
    # Scores become softcap * tanh(score / softcap), after the scale (Gemma 2); None for no cap.
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads], a logit per head that is added to the softmax's denominator only (gpt-oss)
    # Share of the past positions whose V is used, from 0 to 1 (FlexGen section 5.2; systems 1.7); None for all. If a
    # query sees t positions, these are the floor(topk * (t - 1)) past positions with the largest weights, the earlier
    # of equal ones, and its own position. The weights are not rescaled. V that no query head of a kv head uses is not
    # read. Attention of prompts uses all V.
    topk: float | None = None
    # Whether attention of prompts multiplies pairs of bf16, if the kernels have `bf16`: q times the scale, K, V and the
    # weights are rounded to bf16, and sums are in fp32. Decode attention is not concerned.
    rounded: bool = False


class PromptCall(NamedTuple):
    """B prompts of one length."""

    q: Tensor  # [B, T, heads, head_dim], any strides. Query t has position P + S - T + t; P is past.length, or 0
    # k, v: [B, S, kv_heads, head_dim], any strides, S >= T: tokens P to P + S - 1.
    k: Tensor
    v: Tensor
    out: Tensor  # receives the result, [B, T, heads, head_dim], contiguous, in q's dtype, apart from q, k and v
    past: Past | None = None  # tokens 0 to P - 1, read from their pages; B must be 1. None if there are none


class Kernels(ABC):
    """One implementation of every kernel.

    All sums are in fp32, whatever the tensors' dtype. Several threads may call any methods at the same time if they
    write to different memory. Every method raises InvalidInput, with the sizes, for arguments that do not fit, and
    OutOfMemory if there is no memory for scratch data; after an error nothing was written.
    """

    name: str  # "native", "reference" or "cuda", for reports
    bf16 = False  # whether they multiply pairs of bf16
    narrow = False  # whether `product`, `linear` and `add_weighted` accept x in bf16 and fp16

    @abstractmethod
    def append(
        self, k: Tensor, v: Tensor, pool: Tensor, pages: Tensor, offsets: Tensor, form: CacheFormat | None = None
    ) -> None:
        """Write token t's K to pool[pages[t], 0, :, offsets[t]] and its V to pool[pages[t], 1, :, offsets[t]].

        Args:
            k, v: [T, kv_heads, head_dim], any token and head strides. They are rounded to the pool's dtype (to nearest
                even), or encoded as by form.encode, each token separately.
            pool: receives the tokens.
            pages, offsets: int32 [T]; no two tokens have the same page and offset.
            form: format of an encoded pool; None for a plain one.
        """

    @abstractmethod
    def decode_attention(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None, lse: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return attention of one new token per sequence over the cache of this sequence, for a whole batch.

        Args:
            q: [n, heads, head_dim], any token and head strides. n may be 0.
            pool: K and V of all sequences.
            tables: int32 [n, max_pages]; entries after a sequence's last page, and pages before its window, are not
                read.
            lengths: int32 [n], tokens in the cache including the new one, at least 1.
            options: see there.
            form: format of an encoded pool; None for a plain one.
            lse: receives the log of the softmax's denominator, with which results over parts of a cache are
                merged: fp32 [n, heads], contiguous. None for no such result. Not possible with topk.

        Returns:
            [n, heads, head_dim], contiguous, in q's dtype. A sequence's result is bitwise the same for any other
            sequences in the batch, any pages, and any number of threads.
        """

    def paged(
        self, heads: int, pool: Tensor, tokens: PagedTokens, window: int | None = None,
        form: CacheFormat | None = None, memory: Tensor | None = None, rounded: bool = False,
    ) -> PagedAttention | None:  # fmt: skip
        """Check the arguments, and return them for calls that compute a whole layer, with this pool or others of its
        shape; None if these kernels have no such calls.

        Args:
            pool, window, form: as in `decode_attention`.
            memory: scratch memory of an earlier result, which is used if it is large enough.
            rounded: as in AttentionOptions.
        """
        return None

    @abstractmethod
    def choose(
        self, q: Tensor, pool: Tensor, tables: Tensor, lengths: Tensor, options: AttentionOptions,
        form: CacheFormat | None = None,
    ) -> Tensor:  # fmt: skip
        """Return a mask of the positions whose V `decode_attention` with the same arguments reads.

        Other V need not be loaded. No V is read here. q, pool, tables, lengths, options, form: as in
        `decode_attention`. `options.topk` is a number.

        Returns:
            bool [n, kv_heads, max_pages * page_tokens]: whether any query head of the kv head uses the V at a position.
            The position of the new token is always included.
        """

    @abstractmethod
    def attend_prompts(self, prompts: Sequence[PromptCall], options: AttentionOptions) -> None:
        """Write causal attention of prompts, or of one chunk of each prompt, to their `out`. Prompts of one length can
        be one call; see PromptCall for the arguments.

        Scratch memory: at most `prompt_scratch` bytes per call, and on a CPU fp32 copies of half-precision q, k, v.

        On a CPU with native kernels a query's result is bitwise the same for any number of queries and prompts, any
        number of threads, and, if the pool holds fp32, any number of cached tokens; `rounded` or not.
        """

    def attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, past: Past | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return what `attend_prompts` writes for one call. out: as in PromptCall; None allocates it."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self.attend_prompts([PromptCall(q, k, v, out, past)], options)
        return out

    @abstractmethod
    def prompt_scratch(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Return an upper bound, in bytes, of the scratch memory of one call of `attend_prompts` with any `past`."""

    def pack(self, weight: Tensor, threads: int = 1) -> bool:
        """Reorder a weight [n, k] in place, so that `linear` with `packed` reads it faster. Return whether this is
        possible; if not, the weight is unchanged. Scratch memory: 64 rows per thread. weight: bf16, fp16 or fp32,
        contiguous."""
        return False

    @abstractmethod
    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, compute: Literal["bf16"] | None = None,
        packed: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return x @ weight.T + bias for a weight of 16 bits, which is widened to fp32 without loss, or of fp32.

        Scratch memory: at most about 16 MiB of widened weights, and a copy of x unless compute is None.

        Args:
            x: fp32 [..., k], any strides; bf16 and fp16 too if `narrow`.
            weight: bf16, fp16 or fp32 [n, k], rows or columns contiguous.
            bias: fp32 [n], or None.
            compute: "bf16" rounds x to bf16 first; numbers below 1.2e-38 may then count as zeros.
            packed: whether `pack` of the same kernels has reordered the weight.

        Returns:
            [..., n] in x's dtype. On a CPU a row's result is bitwise the same for any other rows and any number of
            threads, and with a packed weight.
        """

    @abstractmethod
    def add_weighted(self, out: Tensor, a: Tensor, rows: Tensor) -> None:
        """Add a @ rows to `out`. Scratch memory as in `linear`.

        Args:
            out: fp32 [T, width], contiguous.
            a: fp32 [T, n], any strides; bf16 and fp16 too if `narrow`.
            rows: bf16, fp16 or fp32 [n, width], each row contiguous.

        On a CPU a row of `out` is bitwise the same for any other rows and any number of threads.
        """

    @abstractmethod
    def product(
        self, x: Tensor, weight: Tensor, form: Form, bias: Tensor | None = None, compute: Compute | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias for an encoded weight.

        With compute "int8", x is rounded to 8 bits, by row m and by group g of form.group columns: code
        q = round(x / s), to nearest even, with s = max |x| / 127. For weights of codes with scales and minima,
            out[m, c] = bias[c] + sum_g s[m, g] * (scale[c, g] * sum q * code + minimum[c, g] * sum q);
        native kernels sum the codes as integers, or, of FP8, as products of pairs of bf16, which are exact, in fp32.

        Scratch memory: at most about 16 MiB of dequantized weights, 64 MiB on a GPU, and a copy of x unless compute is
        None.

        Args:
            x: fp32 [..., form.columns], any strides. Kernels with `narrow` also accept bf16 and fp16: dequantized
                weights are then rounded to x's dtype, and the fp32 sums too.
            weight: uint8 [form.nbytes], contiguous.
            bias: fp32 [form.rows], or None.
            compute: None multiplies by the weight that form.dequantize returns. "bf16" rounds x to bf16 first, and the
                dequantized weight too if the CPU multiplies pairs of bf16. "int8": see above.

        Returns:
            [..., form.rows] in x's dtype. If a row of x has a number that is not finite, no number in its result is
            finite. On a CPU a row's result is bitwise the same for any other rows and any number of threads.
        """

    def encoded_rows(self, weight: Tensor, form: Form, ids: Tensor) -> Tensor:
        """Return some rows of an encoded weight, dequantized: fp32 [n, form.columns].

        Args:
            weight: uint8 [form.nbytes], contiguous.
            ids: int64 [n], numbers of the rows. On a GPU they are not checked.
        """
        return form.dequantize_rows(weight, ids)

    def record_vectors(self, records: Tensor, form: "RecordForm", index: int) -> Tensor:
        """Return one vector of each record [n, form.width]: plain ones as a view, encoded ones in fp32. records: uint8
        [n, form.nbytes], contiguous. index: of the vector, from 0 to form.vectors - 1."""
        return form.vectors_of(records, index)

    @abstractmethod
    def record_products(
        self, x: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, bias: Tensor | None = None
    ) -> Tensor:
        """Return x @ V.T + bias, where V has vector `index` of the records at `places`, in the order of `places`.

        Vectors are widened, or decoded as by form.decode, without loss.

        Args:
            x: float [T, form.width], any strides.
            records: uint8 [room, form.nbytes], contiguous.
            places: int64 [n], rows of `records` in any order. On a GPU they are not checked.
            index: of the vector, from 0 to form.vectors - 1.
            bias: fp32 [n], or None.

        Returns:
            [T, n] in x's dtype, summed in fp32. On a CPU a number depends on its row of x, its vector and its bias
            only: it is bitwise the same for any other rows and places, any place of its record, and any number of
            threads.
        """

    @abstractmethod
    def record_sum(
        self, a: Tensor, records: Tensor, places: Tensor, form: "RecordForm", index: int, start: Tensor | None = None
    ) -> Tensor:
        """Return start + a @ V, where V has vector `index` of the records at `places`, in the order of `places`.

        Vectors are widened, or decoded as by form.decode, without loss. On a CPU records with weights of 0 in all rows
        are not read.

        Args:
            a: float [T, n], any strides; weights of the records at `places`.
            records, places, form, index: as in `record_products`.
            start: fp32 [T, form.width], such as the sum of earlier records; None for zeros.

        Returns:
            fp32 [T, form.width]. On a CPU a row is summed in the order of `places` without weights of 0, which do not
            count even if the vector is not finite. So the row is bitwise the same for any other rows, any further
            places with weights of 0, any places of its records, and any number of threads. With native kernels, and
            vectors of whole blocks, it is also the same if `places` is summed in parts, each from the sum of the parts
            before.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
        """Return (weight + shift) * x / sqrt(mean(x ** 2) + eps) along the last dimension.

        Args:
            x: [..., n], any strides.
            weight: [n].
            eps: added to the mean.
            shift: added to the weight.

        Returns:
            [..., n], contiguous, in x's dtype.
        """

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x with rotary positions: x * cos + cat(-second half of x, first half of x) * sin, head by head.

        Args:
            x: [B, heads, T, head_dim], any strides.
            cos, sin: [B, T, head_dim].

        Returns:
            [B, heads, T, head_dim].
        """

    @abstractmethod
    def gate(self, gate: Tensor, up: Tensor, act: str) -> Tensor:
        """Return act(gate) * up, which may overwrite `gate`. gate, up: of one shape and dtype. act: one of ACTS."""

    @abstractmethod
    def convert(self, source: Tensor, target: Tensor, threads: int = 1) -> None:
        """Copy source to target, both 1-D, contiguous and of one size, and convert the dtype.

        Narrowing rounds to nearest even, as torch does. NaN stays NaN; its payload may differ.

        Args:
            source, target: any float dtypes.
            threads: number of threads; 1 uses only the calling thread.
        """


class FormatKernels(NamedTuple):
    """Kernels of one format on one kind of device. Arguments are checked, and the columns of x and ids contiguous."""

    # product(kernels, x [M, columns], weight, form, bias, compute) returns what `Kernels.product` does, or None for an
    # x whose dtype or number of rows it does not support; rows are then decoded in torch.
    product: Callable[..., Tensor | None]
    # rows(kernels, weight, form, ids) returns what `Kernels.encoded_rows` does; None decodes in torch.
    rows: Callable[..., Tensor] | None = None


# "module:object" of FormatKernels by "module:class" of the format and device; imported when they are first needed.
KERNELS = {
    ("flexengine.codec.packed:Packed", "cpu"): "flexengine.kernels.encoded:ENCODED",
    ("flexengine.codec.gguf_blocks:GgufBlocks", "cpu"): "flexengine.kernels.encoded:ENCODED",
    ("flexengine.codec.scaled:Scaled", "cpu"): "flexengine.kernels.encoded:ENCODED",
    ("flexengine.codec.by_inputs:ByInputs", "cpu"): "flexengine.kernels.encoded:ENCODED",
    ("flexengine.codec.flat_blocks:FlatBlocks", "cpu"): "flexengine.kernels.encoded:ENCODED",
    ("flexengine.codec.packed:Packed", "cuda"): "flexengine.kernels.triton_codes:KERNELS",
    ("flexengine.codec.scaled:Scaled", "cuda"): "flexengine.kernels.triton_parts:KERNELS",
    ("flexengine.codec.by_inputs:ByInputs", "cuda"): "flexengine.kernels.triton_parts:KERNELS",
    **{("flexengine.codec.mixed:Mixed", device): "flexengine.kernels.apart:KERNELS" for device in ("cpu", "cuda")},
}


@cache
def kernels_of(kind: type[Form], device: str) -> FormatKernels | None:
    """Return the kernels of a kind of format on a device, cpu or cuda; None if there are none."""
    path = KERNELS.get((f"{kind.__module__}:{kind.__qualname__}", device))
    kernels: FormatKernels | None = None if path is None else resolve_name(path)
    return kernels
