"""Lamina's (arXiv 2405.01814) tables."""

from collections.abc import Callable

from bench.papers.tables import PaperTable

TABLES: dict[str, Callable[[], PaperTable]] = {}
