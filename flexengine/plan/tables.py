"""Seconds and words of tables whose rows stay in the checkpoint, and are read when tokens use them."""

from collections.abc import Iterator

import numpy as np

from flexengine.errors import size
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.profile import Profile
from flexengine.plan.terms import Term

_LANE = "disk_read"  # of the checkpoint's files


def terms(model: ModelFacts, hardware: Hardware, sweeps: Profile) -> Iterator[Term]:
    """Yield the seconds in which the device waits for rows: a read that is shorter than the shortest measured one takes
    as long."""
    for table in model.tables:
        rows = np.minimum((sweeps.prompt + sweeps.decoding) * table.lookups, table.rows)
        read = max(table.nbytes // table.rows, hardware.weight_rates(_LANE)[0][0])
        yield Term("device", "", "", hardware.link_seconds(_LANE, rows * read, read, weights=True))


def words(model: ModelFacts) -> list[str]:
    """Return a line on the tables for a plan; none if the model has none."""
    if not model.tables:
        return []
    of_token = sum(table.lookups * (table.nbytes // table.rows) for table in model.tables)
    text = f"{size(sum(table.nbytes for table in model.tables))} of tables stay in the checkpoint's files"
    return [f"            {text}; each token reads {size(of_token)} of them"]
