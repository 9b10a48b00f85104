"""Which pages of a pool belong to whom. Numbers only; page ids are the same in every layer."""

from flexengine.errors import OutOfMemory


class Pages:
    """Ids 0 .. count-1 of one pool; the page freed last is handed out first, so that warm memory is reused."""

    def __init__(self, tier: str, count: int) -> None:
        self.tier, self.count = tier, count
        self._free = list(range(count - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self, n: int) -> list[int]:
        """n page ids. Raises OutOfMemory: admission by forecast makes that a fault of the schedule."""
        if n > len(self._free):
            raise OutOfMemory(self.tier, f"{n} KV pages (counted in pages)", n, self.used, self.count)
        return [self._free.pop() for _ in range(n)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
