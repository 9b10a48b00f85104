"""Device buffers that cells use in turn, and the names of slots and buffers as resources of tasks."""

from collections.abc import Hashable


def num_buffers(slots: int) -> int:
    """Return the number of device buffers for KV pages, and for hidden states, of one gpu_batch each.

    With overlap, there are three or more: one gpu_batch is loaded, one computed and one stored at the same time.
    Weights need one slot less, as they are not stored.

    Args:
        slots: number of weight slots, `Policy.slots`.
    """
    return slots + 1 if slots > 1 else 1


class Ring:
    """Buffers 0 .. count - 1 of one kind, which cells take in turn. The names of the buffers order their tasks.

    Args:
        kind: "c" for KV pages, "h" for hidden states.
        count: number of buffers.
    """

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count, self._taken = kind, count, 0

    def take(self) -> int:
        """Return the number of the next buffer."""
        self._taken += 1
        return (self._taken - 1) % self.count

    def buffer(self, number: int) -> Hashable:
        """Return the name of a buffer."""
        return (f"{self.kind}buf", number)

    def stage(self, number: int) -> Hashable:
        """Return the name of a buffer's host staging."""
        return (f"{self.kind}stage", number)


def slot_part(slot: int, home: str) -> Hashable:
    """Return the name of the part of a weight slot that is filled from a tier."""
    return ("w", slot, home)


def slot_stage(slot: int, home: str) -> Hashable:
    """Return the name of the host staging of a weight slot's data from a disk."""
    return ("wstage", slot, home)
