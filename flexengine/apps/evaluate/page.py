"""The page results.html, without references to other files. Jinja escapes all text."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

MINUS = "\N{MINUS SIGN}"


def page(summary: dict[str, Any]) -> str:
    """Return the page of an evaluation.

    Args:
        summary: as in results.json.
    """
    source = files("flexengine.apps.evaluate").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "signed": signed}
    return environment.from_string(source).render(s=summary, tables=_tables(summary))


def number(value: float | None) -> str:
    """Return a number with 4 significant digits after the point; "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return text.replace("-", MINUS)


def signed(value: float | None) -> str:
    """Return a number with its sign."""
    return number(value) if value is None or value < 0 else f"+{number(value)}"


def _tables(summary: dict[str, Any]) -> list[tuple[dict[str, Any], list[list[dict[str, Any]]]]]:
    """Return each scenario with the lines of its table; a line has the figures of all runs."""
    tables, count = [], len(summary["runs"])
    for scenario in summary["scenarios"]:
        own = [figure for figure in summary["results"] if figure["scenario"] == scenario["name"]]
        tables.append((scenario, [own[begin : begin + count] for begin in range(0, len(own), count)]))
    return tables
