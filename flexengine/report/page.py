"""Render a Record as one HTML page without references to other files. Jinja escapes all text of the job."""

import base64
import hashlib
import json
import re
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flexengine.plan.words import clock, count, digits, percent, plain, size
from flexengine.report import figures
from flexengine.report.figures import loading_name
from flexengine.report.record import DONE, FAILED, INTERRUPTED, RUNNING, Record
from flexengine.report.svg import SERIES
from flexengine.schedule.program import LOADING
from flexengine.schedule.routes import by_way

HEADLINES = {RUNNING: "running when this page was written", DONE: "done", INTERRUPTED: "interrupted", FAILED: "failed"}
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render(record: Record) -> str:
    """Return the page of a job."""
    source = files("flexengine.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size, "clock": clock, "digits": digits, "percent": percent,
                            "plain": partial(plain, keep="\n")}  # fmt: skip
    return environment.from_string(source).render(
        r=record, headline=HEADLINES[record.state], pictures=_pictures(record), count=count, script=_digest(source),
        tiles=_tiles(record), lanes=_lanes(record), policy=json.dumps(record.plan.policy) if record.plan else "",
    )  # fmt: skip


def _digest(source: str) -> str:
    """Return the hash that lets the page's own script run, and no other."""
    script = _SCRIPT.search(source)
    assert script is not None
    return base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()


def _pictures(record: Record) -> dict[str, Markup]:
    """Return the SVG elements by name. Those without data are missing."""
    plan, drawn = record.plan, dict[str, str]()
    if plan is not None:
        drawn["memory"] = figures.memory(plan)
        if any(map(any, plan.lanes.values())):
            drawn["lanes"] = figures.lanes(plan)
    if plan is not None and record.sweep is not None:
        drawn["sweep"] = figures.sweep(record.sweep, plan.shared)
    if record.rates:
        drawn["rates"] = figures.rates(record.rates)
    lengths = record.lengths
    if lengths.prompts.number:
        drawn["prompts"] = figures.lengths("prompts", "Prompt tokens of rows", "row", lengths.prompts, SERIES[0])
    if lengths.completions.number:
        drawn["completions"] = figures.lengths(
            "completions", "Generated tokens of samples", "sample", lengths.completions, SERIES[3]
        )
    return {name: Markup(svg) for name, svg in drawn.items()}


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """Return (value, name, remark) of the most important numbers."""
    counts, totals, plan = record.counts, record.totals, record.plan
    before = f"{counts.done_before:,} in earlier runs" if counts.done_before else f"{counts.failed:,} with an error"
    tiles = [(f"{counts.done + counts.failed:,} of {counts.rows:,}", "rows finished", before)]
    if totals.seconds:
        tiles.append((f"{digits(totals.tokens / totals.seconds)} tok/s", "generated",
                      f"{totals.tokens:,} tokens in {clock(totals.seconds)}"))  # fmt: skip
    if totals.prefill_seconds:
        tiles.append((f"{digits(totals.computed_prompt_tokens / totals.prefill_seconds)} tok/s", "prompts computed",
                      f"{totals.computed_prompt_tokens:,} tokens in {clock(totals.prefill_seconds)}"))  # fmt: skip
    tiles.append((clock(record.elapsed), "from start to this page", count(totals.sweeps, "sweep", "sweeps")))
    if plan is not None and plan.measured_seconds:
        rates = "measured rates" if plan.measured else "assumed rates"
        tiles.append((clock(plan.predicted_seconds), "predicted",
                      f"for these sweeps, which took {clock(plan.measured_seconds)}; {rates}"))  # fmt: skip
    return tiles


def _lanes(record: Record) -> list[tuple[str, float, float, str]]:
    """Return (name, predicted seconds, measured seconds, remark) by lane, in the order in which data passes."""
    if record.plan is None:
        return []
    plan, spent = record.plan, record.plan.measured_seconds
    order = [*by_way(lane for lane in plan.lanes if lane != LOADING), *([LOADING] if LOADING in plan.lanes else [])]
    return [(loading_name(lane, plan.shared), *plan.lanes[lane], percent(plan.lanes[lane][1] / spent) if spent else "-")
            for lane in order]  # fmt: skip
