"""The papers' tables by one command, each beside the published figures.

python -m bench.papers [NAME ...] [--out papers.jsonl] [--page docs/papers.md]

Without names all tables are made. A figure that differs from the published one by more than 15 % has a sentence that
says why; the command exits with 1 if one has none. --page writes the page of the documentation, of all tables.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness
from bench.papers import flexgen, lamina, llm_pq
from bench.papers.tables import PaperTable

MAKERS: dict[str, Callable[[], PaperTable]] = {**flexgen.TABLES, **llm_pq.TABLES, **lamina.TABLES}

HEAD = """# The papers' tables

`python -m bench.papers` makes these tables, without a GPU, and writes this page (`--page docs/papers.md`). It took
{seconds:.0f} seconds on a machine with two cores. The published figures were measured by the papers' authors on their
machines; ours are predictions, runs in virtual time, or small real runs, as each table says.
"""


def page(made: Sequence[tuple[PaperTable, float]]) -> str:
    """Return the page of the documentation. made: tables, and the seconds that each took."""
    parts = [HEAD.format(seconds=sum(seconds for _, seconds in made))]
    for table, seconds in made:
        parts.append("\n".join([f"## {table.title}", "", *table.lines(), "", f"`{table.name}`, {seconds:.1f} s."]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def parse() -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of tables (default: all): {', '.join(MAKERS)}")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    parser.add_argument("--page", type=Path, help="write the tables to this file, in Markdown")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in MAKERS]:
        parser.error(f"no table is called {unknown[0]!r}; there are {', '.join(MAKERS)}")
    return args


def main() -> int:
    """Run the command of the module's docstring. Return 1 if a figure far from the published one has no reason."""
    args, made, unexplained = parse(), list[tuple[PaperTable, float]](), 0
    for name in args.names or MAKERS:
        began = time.perf_counter()
        table = MAKERS[name]()
        made.append((table, time.perf_counter() - began))
        print(f"{table.title} ({made[-1][1]:.1f} s)\n", *table.lines(), sep="\n", end="\n\n", flush=True)
        for figure in table.figures:
            if args.out:
                harness.emit({"table": name, "unit": table.unit, **vars(figure)}, args.out)
            if figure.unexplained:
                unexplained += 1
                print(f"{name}: {figure.name} is far from the published figure, without a reason", file=sys.stderr)
    if args.page:
        args.page.write_text(page(made), encoding="utf-8")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
