"""How many bytes each tier of a machine may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """Bytes of each tier, None for no limit. shared: host and device are one memory (a machine without a GPU).

    staged: disk and device are not directly connected; what passes between them stops in host staging.
    """

    device: int | None
    host: int | None
    disk: int | None
    shared: bool
    staged: bool
