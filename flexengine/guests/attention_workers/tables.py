"""Page tables that an engine sends to an attention worker, their parts for several workers, and checks of questions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.guests.attention_workers.messages import DTYPES, WorkerQuestion
from flexengine.guests.wire.link import Broken

if TYPE_CHECKING:
    from flexengine.worker.cache.tables import Tables


class WorkerTables(NamedTuple):
    """Page tables of a gpu_batch for a group of layers, all int32."""

    tables: Tensor  # [sequences, pages], pages of each sequence
    lengths: Tensor  # [sequences], tokens of each sequence in these pages, with the new one if it is here
    seen: Tensor  # [sequences], number of the last of them that the query sees
    pages: Tensor  # [new tokens], page of each new token
    offsets: Tensor  # [new tokens], its offset in the page
    rows: Tensor  # [new tokens], its sequence
    copies: Tensor  # [copies, 2], pages (from, to) that are copied before tokens are appended

    def cached(self) -> "WorkerTables":
        """Return the tables without the new tokens."""
        new = torch.zeros_like(self.lengths)
        new[self.rows.long()] = 1
        return self._replace(lengths=self.lengths - new, seen=self.seen - new)

    @staticmethod
    def unpack(numbers: Tensor, pages: int, new: int, copies: int) -> "WorkerTables":
        """Return the page tables in the body of a message. Raise Broken if it has a wrong length."""
        negative = min(pages, new, copies) < 0
        sequences, rest = (0, 1) if negative else divmod(len(numbers) - 3 * new - 2 * copies, pages + 2)
        if rest or sequences < 0:
            raise Broken(f"page tables of {len(numbers)} numbers came, which fit no number of sequences")
        sizes = [sequences * pages, sequences, sequences, new, new, new, 2 * copies]
        tables, lengths, seen, at, offsets, rows, both = torch.split(numbers, sizes)
        return WorkerTables(tables.view(sequences, pages), lengths, seen, at, offsets, rows, both.view(copies, 2))


def check(ask: WorkerQuestion, tables: WorkerTables, sinks: Tensor | None) -> None:
    """Raise ValueError if a question or its tables name memory that does not exist: kernels read without checks."""
    sizes = (ask.pages, ask.page_tokens, ask.heads, ask.kv_heads, ask.head_dim)
    if min(sizes) < 1 or ask.heads % ask.kv_heads:
        raise ValueError(
            f"pages, page_tokens, heads, kv_heads and head_dim are {sizes}; they must be at least 1, and"
            " kv_heads must divide heads"
        )
    if not (0 <= ask.dtype < len(DTYPES) and 0 <= ask.pool_dtype < len(DTYPES)):
        raise ValueError(f"dtypes are numbers {ask.dtype} and {ask.pool_dtype}; they must be 0 to {len(DTYPES) - 1}")
    if ask.topk is not None and not 0 <= ask.topk <= 1:
        raise ValueError(f"the share of values is {ask.topk}; it must be 0 to 1")
    if ask.sinks and (sinks is None or len(sinks) != ask.heads):
        raise ValueError(f"the layer has {0 if sinks is None else len(sinks)} sinks, but {ask.heads} heads")
    if len(tables.pages) != len(tables.lengths) and not ask.partial:
        raise ValueError(f"{len(tables.pages)} new tokens came for {len(tables.lengths)} sequences")
    limits = {"page tables": (tables.tables, ask.pages), "pages": (tables.pages, ask.pages),
              "offsets": (tables.offsets, ask.page_tokens), "copied pages": (tables.copies, ask.pages),
              "rows": (tables.rows, len(tables.lengths)),
              "lengths": (tables.lengths, tables.tables.shape[1] * ask.page_tokens + 1),
              "seen tokens": (tables.seen, tables.tables.shape[1] * ask.page_tokens + 1)}  # fmt: skip
    for what, (numbers, end) in limits.items():
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
            raise ValueError(f"{what} hold {int(numbers.min())} to {int(numbers.max())}; they must be below {end}")
    grown = tables.lengths[tables.rows.long()] if ask.partial else tables.lengths
    if grown.numel() and int(grown.min()) < 1:
        raise ValueError("lengths hold 0; they must be at least 1")


def whole(tables: "Tables") -> WorkerTables:
    """Return the page tables of a worker that holds all tokens."""
    lengths, copies = tables.lengths, torch.tensor(tables.copies, dtype=torch.int32).view(-1, 2)
    rows = torch.arange(len(lengths), dtype=torch.int32)
    return WorkerTables(tables.tables, lengths, lengths, tables.pages, tables.offsets, rows, copies)


def by_tokens(tables: "Tables", page_tokens: int, window: int | None, workers: int) -> list[WorkerTables]:
    """Return the page tables of workers that hold slices of every page's tokens. tables: of whole pages, of page_tokens
    tokens. window: tokens that a query sees; None for all."""
    share, parts, everything = page_tokens // workers, list[WorkerTables](), whole(tables)
    for number in range(workers):

        def held(tokens: Tensor, first: int = number * share) -> Tensor:
            """Return how many of the first tokens of each sequence the worker holds."""
            return tokens // page_tokens * share + (tokens % page_tokens - first).clamp(0, share)

        lengths = held(tables.lengths)
        unseen = 0 if window is None else held((tables.lengths - window).clamp(min=0))
        new = torch.nonzero(tables.offsets // share == number).flatten()
        parts.append(
            everything._replace(
                lengths=lengths,
                seen=lengths - unseen,
                pages=tables.pages[new],
                offsets=tables.offsets[new] % share,
                rows=everything.rows[new],
            )
        )
    return parts


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Return attention over the union of disjoint sets of keys and values, which lie on different devices, from the
    results over each set.

    Args:
        outs: [n, heads, head_dim] per set.
        lses: fp32 [n, heads] per set, logs of the denominators, see `lse` of Kernels.decode_attention; -inf for
            a set without keys, whose `outs` is ignored. Sinks may be part of one set's denominator only.

    Returns:
        [n, heads, head_dim] in the dtype of `outs`, summed in fp32. The log of the merged denominator is
        torch.logsumexp of `lses`.
    """
    logs = torch.stack(list(lses)).float()
    shares = torch.exp(logs - torch.logsumexp(logs, 0))[..., None]
    parts = torch.stack([out.float() for out in outs])
    return (parts.masked_fill(shares == 0, 0.0) * shares).sum(0).to(outs[0].dtype)


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """Return attention over the tokens of all workers, from out [tokens, heads, head_dim] and lse, fp32 [tokens,
    heads], of each. Sinks, fp32 [heads] or None, add to the denominator only, so they are no worker's."""
    out = merge(outs, lses)
    if sinks is None:
        return out
    total = torch.logsumexp(torch.stack(list(lses)), 0)
    return (out.float() * torch.sigmoid(total - sinks)[..., None]).to(out.dtype)
