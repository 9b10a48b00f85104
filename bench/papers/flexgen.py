"""FlexGen's (arXiv 2303.06865) tables. Table 3, four GPUs, needs a planner for stages that offload; it belongs here."""

from collections.abc import Callable

from bench.papers import flexgen_machines, flexgen_quality, flexgen_rates, flexgen_theorem
from bench.papers.tables import PaperTable

TABLES: dict[str, Callable[[], PaperTable]] = {
    **flexgen_rates.TABLES,
    **flexgen_machines.TABLES,
    **flexgen_quality.TABLES,
    **flexgen_theorem.TABLES,
}
