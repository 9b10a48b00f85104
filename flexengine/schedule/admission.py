"""The admission rules. `Sweeps` applies them.

A waiting sequence enters the block if the schedule lets it (`entrants`), and if the pages of all live sequences still
fit when each has grown to its end (`peak_pages`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexengine.schedule.pages import Pool

FOREVER = 1 << 32  # sweeps of a common prefix that waiting sequences will share


class Growing(NamedTuple):
    """A sequence, or a common prefix of sequences, in the forecast of KV pages."""

    tokens: int  # tokens cached after the next sweep
    sweeps: int  # sweeps until the sequence, or the last one with the prefix, ends
    # prompt tokens on shared pages, which the entry of a common prefix counts; 0 if none. That prefix ends no earlier.
    shared: int = 0
    grows: int = 1  # tokens added per sweep: 1, or 0 for a common prefix


def entrants(schedule: str, live: int, gpu_batch_size: int, num_gpu_batches: int) -> int:
    """Return the maximum number of sequences that may enter in the next sweep.

    Args:
        schedule: row: a gpu_batch runs to its end before the next one enters. zigzag: a whole block enters together
            when the previous block has ended (FlexGen 4.2). diagonal: at most gpu_batch_size sequences enter per sweep
            (FlexGen appendix A.1). continuous: sequences enter as soon as the block has room.
    """
    block = gpu_batch_size * num_gpu_batches
    if schedule == "row":
        return 0 if live else gpu_batch_size
    if schedule == "zigzag":
        return 0 if live else block
    if schedule == "diagonal":
        return min(gpu_batch_size, block - live)
    return block - live


def peak_pages(sequences: Sequence[Growing], pool: Pool, late: int = 0) -> int:
    """Return the most pages in use if no sequence enters. Shared pages are counted once.

    The number of pages falls only when a sequence or a common prefix ends, so the maximum occurs in the last sweep of
    one of them, or `late` sweeps later.

    Args:
        late: sweeps for which an ended sequence keeps its pages.
    """
    if not sequences:
        return 0
    tokens, sweeps, shared, grows = np.array(sequences).T
    ends = np.unique([sweeps, sweeps + late])[:, None]
    held = pool.held(tokens + (np.minimum(ends, sweeps) - 1) * grows) - pool.num_shared(shared)
    return int(np.where(sweeps + late >= ends, held, 0).sum(axis=1).max())
