"""Which pages of a pool are held, and by how many sequences. Numbers only; page ids are the same in every layer."""

from flexengine.errors import OutOfMemory


class Pages:
    """Ids 0 .. count-1 of one pool. The page freed last is handed out first, so that warm memory is reused. Sequences
    may share a page; the page is free when the last of them has given it back."""

    def __init__(self, tier: str, count: int) -> None:
        self.tier, self.count = tier, count
        self._free = list(range(count - 1, -1, -1))
        self._more: dict[int, int] = {}  # by page that several sequences hold: how many beside the first

    @property
    def used(self) -> int:
        """Number of pages that some sequence holds."""
        return self.count - len(self._free)

    def take(self, n: int) -> list[int]:
        """Return n free pages, now held once. Raise OutOfMemory if there are fewer: admission by forecast makes that a
        fault of the schedule."""
        if n > len(self._free):
            raise OutOfMemory(self.tier, f"{n} KV pages (counted in pages)", n, self.used, self.count)
        return [self._free.pop() for _ in range(n)]

    def share(self, pages: list[int]) -> list[int]:
        """Return the same pages, each held once more."""
        for page in pages:
            self._more[page] = self._more.get(page, 0) + 1
        return list(pages)

    def is_shared(self, page: int) -> bool:
        """Return whether several sequences hold a page."""
        return page in self._more

    def give(self, pages: list[int]) -> None:
        """Give pages back, each held once less. Those that no sequence holds any more are free."""
        for page in reversed(pages):
            if more := self._more.pop(page, 0):
                if more > 1:
                    self._more[page] = more - 1
            else:
                self._free.append(page)
