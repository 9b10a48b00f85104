"""LLM-PQ's (arXiv 2403.01136) tables."""

from collections.abc import Callable

from bench.papers.tables import PaperTable

TABLES: dict[str, Callable[[], PaperTable]] = {}
