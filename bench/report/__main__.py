"""The tables of docs/benchmarks.md and README.md, and the plots, made from the committed records alone.

python -m bench.report            write tables and docs/plots/*.svg (needs matplotlib; else prints text)
python -m bench.report --check    exit with 1 if tables or plots differ from the records; write nothing

The latest record of every case, choice of switches and peer counts, even if it is a failure. Of records of one day, the
record with most rounds counts.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.harness import REPO
from bench.report import plots
from bench.report.blocks import BLOCKS, README_BLOCKS

PAGE, README = REPO / "docs" / "benchmarks.md", REPO / "README.md"


def between(name: str) -> re.Pattern[str]:
    """Return a pattern that matches a block with its markers."""
    return re.compile(rf"(<!-- report: {name} -->\n).*?(<!-- end of {name} -->)", re.S)


def updated(text: str, blocks: dict[str, Callable[[], str]] | None = None) -> str:
    """Return the page with new blocks. Raise ValueError if a marker is missing."""
    for name, block in (blocks or BLOCKS).items():
        made = block().replace("\\", "\\\\")  # re.subn interprets backslashes in the replacement
        text, n = between(name).subn(rf"\g<1>{made}\n\g<2>", text)
        if n != 1:
            raise ValueError(f"the page has the markers of {name} {n} times, not once")
    return text


def stale(page: Path = PAGE, readme: Path = README) -> list[str]:
    """Return the tables and plots that differ from the records."""
    wrong = list[str]()
    for path, blocks in ((page, BLOCKS), (readme, README_BLOCKS)):
        text = path.read_text()
        wrong += [f"{path.name}: the table of {name}" for name, block in blocks.items()
                  if updated(text, {name: block}) != text]  # fmt: skip
    return wrong + [f"plot {name}" for name, drawn in plots.drawn().items() if drawn != plots.digest(name)]


def main() -> int:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is stale; 1 if anything is")
    parser.add_argument("--text", action="store_true", help="print the plots as text, as is done without matplotlib")
    args = parser.parse_args()
    if args.check:
        wrong = stale()
        for what in wrong:
            print(f"stale: {what}; run python -m bench.report", file=sys.stderr)
        return int(bool(wrong))
    PAGE.write_text(updated(PAGE.read_text()))
    README.write_text(updated(README.read_text(), README_BLOCKS))
    for name in plots.measured():
        print(plots.text(name) if args.text or not plots.draw(name) else f"drawn: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
