"""FlexGen's (arXiv 2303.06865) tables."""

from collections.abc import Callable

from bench.papers import flexgen_machines, flexgen_quality, flexgen_rates, flexgen_stages, flexgen_theorem
from bench.papers.tables import PaperTable

TABLES: dict[str, Callable[[], PaperTable]] = {
    **flexgen_rates.TABLES,
    **flexgen_stages.TABLES,
    **flexgen_machines.TABLES,
    **flexgen_quality.TABLES,
    **flexgen_theorem.TABLES,
}
