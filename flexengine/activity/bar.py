"""The progress bar of a terminal. Imports tqdm, which most commands never need."""

import sys

from tqdm import tqdm

MIN_BAR = 5  # characters of the bar itself


class Bar(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread, as malloc gives each new thread an arena of its own, and with a tail of facts
    that are left out, the last one first, where the line is too short. Other tqdm bars in the process keep their
    monitor thread."""

    monitor_interval = 0

    def __init__(self) -> None:
        self._head, self._tail = "", ""
        super().__init__(file=sys.stderr, leave=False)

    def draw(self, name: str, share: float | None, facts: list[str], columns: int) -> None:
        """Show the bar.

        Args:
            name: name of the activity.
            share: finished part, 0 to 1; None if it is unknown.
            facts: numbers of the moment, the most important first.
            columns: most characters.
        """
        self.n, self.total, self.ncols = share, None if share is None else 1.0, columns
        self._head = f"{name} " if share is None else f"{name} {share:4.0%} |"
        room = columns - len(self._head) - (0 if share is None else MIN_BAR + 2)
        while facts and len(", ".join(facts)) > room:
            facts = facts[:-1]
        self._tail = ", ".join(facts)
        self.refresh()

    def __str__(self) -> str:
        form = "{head}{tail}" if self.total is None else "{head}{bar}| {tail}"
        more = {"head": self._head, "tail": self._tail}
        return str(self.format_meter(self.n or 0, self.total, 0, self.ncols, ascii=self.ascii, bar_format=form, **more))
