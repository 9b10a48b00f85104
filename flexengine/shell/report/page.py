"""Render a ReportRecord as one HTML page without references to other files. Jinja escapes all text of the job."""

import base64
import hashlib
import json
import re
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flexengine.plan.formatting import clock, count, digits, percent, plain, size
from flexengine.shell.report import figures
from flexengine.shell.report.figures import SERIES
from flexengine.shell.report.record import DONE, FAILED, INTERRUPTED, RUNNING, ReportRecord

HEADLINES = {RUNNING: "running when this page was written", DONE: "done", INTERRUPTED: "interrupted", FAILED: "failed"}
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render(record: ReportRecord) -> str:
    """Return the page of a job."""
    source = files("flexengine.shell.report").joinpath("page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(source)
    assert script is not None
    digest = hashlib.sha256(script[1].encode()).digest()  # lets the page's own script run, and no other
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {filter.__name__: filter for filter in (size, clock, digits, percent)}
    environment.filters["plain"] = partial(plain, keep="\n")
    return environment.from_string(source).render(
        r=record,
        headline=HEADLINES[record.state],
        pictures=_pictures(record),
        count=count,
        script=base64.b64encode(digest).decode(),
        tiles=_tiles(record),
        lanes=_lanes(record),
        policy=json.dumps(record.plan.policy) if record.plan else "",
    )


def _pictures(record: ReportRecord) -> dict[str, Markup]:
    """Return the SVG elements by name. Those without data are missing."""
    plan, drawn = record.plan, dict[str, str]()
    if plan is not None:
        drawn["memory"] = figures.memory(plan)
        if any(lane.predicted or lane.measured for lane in plan.report.lanes.values()):
            drawn["lanes"] = figures.lanes(plan)
    if plan is not None and record.sweep is not None:
        drawn["sweep"] = figures.sweep(record.sweep, plan.shared)
    if record.rates:
        drawn["rates"] = figures.rates(record.rates)
    lengths = record.lengths
    if lengths.prompts:
        drawn["prompts"] = figures.lengths("prompts", "Prompt tokens of rows", "row", lengths.prompts, SERIES[0])
    if lengths.completions:
        title = "Generated tokens of samples"
        drawn["completions"] = figures.lengths("completions", title, "sample", lengths.completions, SERIES[3])
    return {name: Markup(svg) for name, svg in drawn.items()}


def _tiles(record: ReportRecord) -> list[tuple[str, str, str]]:
    """Return (value, name, remark) of the most important numbers."""
    counts, totals, plan = record.counts, record.totals, record.plan
    before = f"{counts.done_before:,} in earlier runs" if counts.done_before else f"{counts.failed:,} with an error"
    tiles = [(f"{counts.done + counts.failed:,} of {counts.rows:,}", "rows finished", before)]
    if totals.seconds:
        tiles.append(_rate("generated", totals.tokens, totals.seconds))
    if totals.prefill_seconds:
        tiles.append(_rate("prompts computed", totals.computed_prompt_tokens, totals.prefill_seconds))
    tiles.append((clock(record.elapsed), "from start to this page", count(totals.sweeps, "sweep", "sweeps")))
    if plan is not None and plan.report.measured_seconds:
        rates = "measured rates" if plan.report.measured else "assumed rates"
        took = f"for these sweeps, which took {clock(plan.report.measured_seconds)}; {rates}"
        tiles.append((clock(plan.report.predicted_seconds), "predicted", took))
    return tiles


def _rate(name: str, tokens: int, seconds: float) -> tuple[str, str, str]:
    return f"{digits(tokens / seconds)} tok/s", name, f"{tokens:,} tokens in {clock(seconds)}"


def _lanes(record: ReportRecord) -> list[tuple[str, float, float, str]]:
    """Return (name, predicted seconds, measured seconds, remark) by lane, in the order in which data passes."""
    if record.plan is None:
        return []
    spent = record.plan.report.measured_seconds
    return [
        (name, lane.predicted, lane.measured, percent(lane.measured / spent) if spent else "-")
        for name, lane in figures.lane_seconds(record.plan)
    ]
