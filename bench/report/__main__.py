"""README's tables and the plots, from the committed records and nothing else.

python -m bench.report            writes README's tables and docs/plots/*.svg (needs matplotlib; else prints text)
python -m bench.report --check    1 if README's tables or the plots are not those of the records; writes nothing

Of every case, choice of switches and peer the latest record counts, whatever it says; of one
day, that with most rounds.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench.harness import REPO
from bench.report import plots
from bench.report.blocks import BLOCKS

README = REPO / "README.md"


def between(name: str) -> re.Pattern[str]:
    """A block with its markers."""
    return re.compile(rf"(<!-- report: {name} -->\n).*?(<!-- end of {name} -->)", re.S)


def updated(text: str, blocks: dict[str, Callable[[], str]] | None = None) -> str:
    """README with its blocks made anew. Raises ValueError where a marker is missing."""
    for name, block in (blocks or BLOCKS).items():
        made = block().replace("\\", "\\\\")  # in what is put in, re gives backslashes a meaning
        text, n = between(name).subn(rf"\g<1>{made}\n\g<2>", text)
        if n != 1:
            raise ValueError(f"README has the markers of {name} {n} times, not once")
    return text


def stale(readme: Path = README) -> list[str]:
    """What is not as the records are."""
    text = readme.read_text()
    wrong = [f"{readme.name}: the table of {name}" for name, block in BLOCKS.items()
             if updated(text, {name: block}) != text]  # fmt: skip
    return wrong + [f"plot {name}" for name, drawn in plots.drawn().items() if drawn != plots.digest(name)]


def main() -> int:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is stale; 1 if anything is")
    parser.add_argument("--text", action="store_true", help="print the plots as text, as is done without matplotlib")
    args = parser.parse_args()
    if args.check:
        wrong = stale()
        for what in wrong:
            print(f"stale: {what}; run python -m bench.report", file=sys.stderr)
        return int(bool(wrong))
    README.write_text(updated(README.read_text()))
    for name in plots.measured():
        print(plots.text(name) if args.text or not plots.draw(name) else f"drawn: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
