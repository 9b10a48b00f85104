"""FlexGen's (arXiv 2303.06865) tables."""

from collections.abc import Callable

from bench.papers.tables import PaperTable

TABLES: dict[str, Callable[[], PaperTable]] = {}
