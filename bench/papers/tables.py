"""Tables of our figures beside published ones, as text and as a page of the documentation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

FAR = 0.15  # a ratio that differs by more than this share needs a reason


@dataclass(frozen=True)
class Figure:
    """One figure: ours, and the published one, None if the paper has none. why: one sentence that says why ours
    differs; "" if it is near."""

    name: str
    ours: float
    published: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours divided by the published figure."""
        return self.ours / self.published if self.published else None

    @property
    def unexplained(self) -> bool:
        """Whether ours is far from the published figure, and nothing says why."""
        return self.ratio is not None and abs(self.ratio - 1) > FAR and not self.why


def far(figure: Figure, why: Callable[[], str]) -> Figure:
    """Return the figure with the reason that `why` finds if it is far from the published one; reasons may take time."""
    return replace(figure, why=why()) if figure.unexplained else figure


@dataclass(frozen=True)
class PaperTable:
    """A table of one paper.

    Args:
        name: word by which the command line knows it, such as "flexgen-table2".
        title: one line.
        source: paper, and its table, figure or section.
        unit: of the figures, such as "tokens/s".
        how: one or two sentences: what computes ours, such as the planner, the virtual clock or a real run.
    """

    name: str
    title: str
    source: str
    unit: str
    how: str
    figures: Sequence[Figure]

    def lines(self) -> Iterable[str]:
        """Yield the lines of the table in Markdown."""
        yield f"{self.how} Figures are in {self.unit}; published ones are from {self.source}."
        yield ""
        yield "| figure | ours | published | ratio |"
        yield "|---|---|---|---|"
        for one in self.figures:
            published = "" if one.published is None else shown(one.published)
            ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
            yield f"| {one.name} | {shown(one.ours)} | {published} | {ratio} |"
        if reasons := list(dict.fromkeys(one.why for one in self.figures if one.why)):
            yield ""
            yield from (f"* {', '.join(one.name for one in self.figures if one.why == why)}: {why}" for why in reasons)


def shown(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
