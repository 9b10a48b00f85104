"""The parts of a gpu_batch's attention that several workers compute: some heads, or some tokens, of every sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flexengine.guests.attention_workers.tables import WorkerTables
from flexengine.kernels.merge import merge
from flexengine.worker.cache import tables as cache_tables


def whole(tables: cache_tables.Tables) -> WorkerTables:
    """Return the page tables of a worker that holds all tokens."""
    lengths, copies = tables.lengths, torch.tensor(tables.copies, dtype=torch.int32).view(-1, 2)
    rows = torch.arange(len(lengths), dtype=torch.int32)
    return WorkerTables(tables.tables, lengths, lengths, tables.pages, tables.offsets, rows, copies)


def by_tokens(tables: cache_tables.Tables, page_tokens: int, window: int | None, workers: int) -> list[WorkerTables]:
    """Return the page tables of workers that hold slices of every page's tokens.

    Args:
        tables: page tables of whole pages.
        page_tokens: tokens of a whole page.
        window: tokens that a query sees; None for all.
        workers: number of workers.
    """
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


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """Return attention over the tokens of all workers.

    Args:
        outs: [tokens, heads, head_dim] of each worker.
        lses: fp32 [tokens, heads] of each worker.
        sinks: fp32 [heads]; None for none. They add to the denominator only, so they are no worker's.
    """
    out = merge(outs, lses)
    if sinks is None:
        return out
    total = torch.logsumexp(torch.stack(list(lses)), 0)
    return (out.float() * torch.sigmoid(total - sinks)[..., None]).to(out.dtype)
