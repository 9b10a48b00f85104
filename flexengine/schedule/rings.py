"""Slots that tasks share: the next free slot, and the resource names of slots."""

from collections.abc import Hashable, Iterable


def num_buffers(slots: int) -> int:
    """Return the number of device buffers for KV pages, and for hidden states, of one gpu_batch each.

    With overlap, there are three or more: one gpu_batch is loaded, one computed and one stored at the same time.
    Weights need one slot less, as they are not stored.

    Args:
        slots: number of weight slots, `Policy.slots`.
    """
    return slots + 1 if slots > 1 else 1


class Ring:
    """Slots 0 .. count - 1 of one kind, handed out in ring order and given back in the same order.

    Args:
        kind: "w" for weights, "c" for KV pages, "h" for hidden states. Resource names begin with it.
        count: number of slots.

    Attributes:
        taken: number of slots handed out so far.
        passed: number of units that are fully emitted. Each such unit used one slot.
    """

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self.taken = self.passed = self._given_back = 0

    def take(self) -> int:
        """Return the next slot. Buffers of one cell are not given back: their resource names order the tasks."""
        self.taken += 1
        return (self.taken - 1) % self.count

    @property
    def free(self) -> bool:
        """Whether a slot can be taken."""
        return self.taken - self._given_back < self.count

    @property
    def current(self) -> int:
        """The slot of the unit whose cells are being emitted."""
        return self.passed % self.count

    def leave(self, held: bool) -> None:
        """Go on to the next unit. Give the slot back unless it is `held`, for a task that is not emitted yet."""
        self.passed += 1
        self._given_back = self.passed - held

    def give_back(self) -> None:
        """Give back the slots of all passed units."""
        self._given_back = self.passed

    def part(self, slot: int, home: str) -> Hashable:
        """Return the name of the part of a slot that is filled from a tier."""
        return (self.kind, slot, home)

    def parts(self, slot: int, homes: Iterable[str]) -> tuple[Hashable, ...]:
        """Return the names of the parts of a slot that are filled from these tiers."""
        return tuple(self.part(slot, home) for home in homes)

    def buffer(self, slot: int) -> Hashable:
        """Return the name of a device buffer."""
        return (f"{self.kind}buf", slot)

    def stage(self, slot: int, *home: str) -> Hashable:
        """Return the name of a buffer's host staging. home: a disk, for the staging of a slot's data from this disk."""
        return (f"{self.kind}stage", slot, *home)
