"""Render a ReportRecord as one HTML page without references to other files. Jinja escapes all text of the job.

Pictures are matplotlib figures as inline SVG, with colors from the page's style sheet and a tooltip for each shape.
"""

import base64
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flexengine.places import by_way
from flexengine.plan.feedback import LaneSeconds
from flexengine.plan.formatting import clock, count, digits, lane_name, percent, plain, rate, size
from flexengine.schedule.tasks import LOADING
from flexengine.shell.explain.picture import draw_memory
from flexengine.shell.report.record import (
    KINDS,
    Bucket,
    LaneSpan,
    LengthCounts,
    Planned,
    ReportRecord,
    SweepLine,
    merged,
)

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)

# Colors in figures, and the CSS variables of page.html that replace them. Pages have a light and a dark set.
INK, FAINT, PAPER = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0101{number:02x}" for number in range(16, 24))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
_VARIABLES |= {color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)}

_REFERENCE = re.compile(r"#([\w-]+)")
_DIGITS = re.compile(r"(?<=\d\.\d\d)\d+")  # of coordinates, in 1/72 inch
_NOT_IN_HTML = re.compile(r'<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>|\sxmlns(?::\w+)?="[^"]*"', re.DOTALL)

STYLE = {
    **dict.fromkeys(("font.size", "axes.titlesize"), 10),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("svg.fonttype", "axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("text.parse_math", "legend.frameon", "axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **{"grid.linewidth": 0.4, "grid.alpha": 0.6, "hatch.linewidth": 0.6},
}
WIDTH, HALF = 9.0, 4.4  # inches of wide pictures, and of those that fit on a phone
MOST_NARROW = 60  # boxes of a lane or a panel of a narrow picture
FEW = 3  # whole numbers that an axis shows each
ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3}  # place of a legend above the axes
Box = tuple[float, float, float, float]  # left, right, bottom, top
Tips = dict[str, Sequence[str]]  # by gid of an artist, a tooltip for each of its shapes


def render(record: ReportRecord) -> str:
    """Return the page of a job."""
    placement = record.plan.placement if record.plan else {}
    source = files("flexengine.shell.report").joinpath("page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(source)
    assert script is not None
    digest = hashlib.sha256(script[1].encode()).digest()  # lets the page's own script run, and no other
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {filter.__name__: filter for filter in (size, clock, digits, percent)}
    environment.filters |= {"plain": partial(plain, keep="\n"), "json": json.dumps}
    return environment.from_string(source).render(
        r=record,
        pictures={name: Markup(svg) for name, svg in _pictures(record).items()},
        count=count,
        script=base64.b64encode(digest).decode(),
        tiles=_tiles(record),
        lanes=_lane_seconds(record.plan) if record.plan else [],
        columns=[i for i, parts in enumerate(zip(*placement.values(), strict=True)) if any(parts)],
    )


def _pictures(record: ReportRecord) -> dict[str, str]:
    """Return the SVG elements by name. Those without data are missing."""
    plan, drawn = record.plan, dict[str, str]()
    if plan is not None:
        drawn["memory"] = _memory(plan)
        if any(lane.predicted or lane.measured for lane in plan.report.lanes.values()):
            drawn["lanes"] = _lanes(plan)
        if record.sweep is not None:
            drawn["sweep"] = _sweep(record.sweep, plan.shared)
    if record.rates:
        drawn["rates"] = _token_rates(record.rates)
    if record.prompts:
        drawn["prompts"] = _lengths("prompts", "Prompt tokens of rows", "row", record.prompts, SERIES[0])
    if record.completions:
        title = "Generated tokens of samples"
        drawn["completions"] = _lengths("completions", title, "sample", record.completions, SERIES[3])
    return drawn


def _tiles(record: ReportRecord) -> list[tuple[str, str, str]]:
    """Return (value, name, remark) of the most important numbers."""
    counts, totals, plan = record.counts, record.totals, record.plan
    before = f"{counts.done_before:,} in earlier runs" if counts.done_before else f"{counts.failed:,} with an error"
    tiles = [(f"{counts.done + counts.failed:,} of {counts.rows:,}", "rows finished", before)]
    rates = [
        ("generated tokens", totals.tokens, totals.seconds, "all sweeps"),
        ("prompt tokens computed", totals.computed_prompt_tokens, totals.prefill_seconds, "prefill sweeps"),
    ]
    for name, tokens, seconds, sweeps in rates:
        if pace := rate(tokens, seconds, "tok"):
            tiles.append((pace, name, f"{tokens:,} in the {clock(seconds)} of {sweeps}"))
    tiles.append((clock(record.elapsed), "from start to this page", count(totals.sweeps, "sweep", "sweeps")))
    if plan is not None and plan.report.measured_seconds:
        origin = "measured rates" if plan.report.measured else "assumed rates"
        took = f"for these sweeps, which took {clock(plan.report.measured_seconds)}; {origin}"
        tiles.append((clock(plan.report.predicted_seconds), "predicted", took))
    return tiles


def _lane_seconds(plan: Planned) -> list[tuple[str, LaneSeconds]]:
    """Return name and seconds of work of the lanes, in the order in which data passes them, and of the reads of
    resident weights."""
    lanes = dict(plan.report.lanes)
    reads = [("reading resident weights", lanes.pop(LOADING))] if LOADING in lanes else []
    return [*((lane_name(lane, plan.shared), lanes[lane]) for lane in by_way(lanes)), *reads]


# Pictures. Each function returns an `<svg>` element; see `_drawn`.


def _drawn_twice(
    name: str, title: str, description: str, height: float, draw: Callable[[Any, bool], Tips], panels: int = 1
) -> str:
    """Return a picture as two `<svg>` elements, of which the page's style shows the one that fits the window.

    Args:
        height: inches of the wide one; the narrow one is a little higher, for its legend.
        draw: as for `_drawn`; its second argument is whether the picture is narrow.
    """
    wide = _drawn(name, title, description, (WIDTH, height), lambda axes: draw(axes, False), panels)
    narrow = _drawn(f"{name}-narrow", title, description, (HALF, height + 0.4), lambda axes: draw(axes, True), panels)
    return wide + narrow.replace("<svg ", '<svg class="narrow" ', 1)


def _drawn(
    name: str, title: str, description: str, inches: tuple[float, float], draw: Callable[[Any], Tips], panels: int = 1
) -> str:
    """Return a picture as an `<svg>` element.

    Args:
        name: prefix of the element's ids, unique in the page.
        title, description: name and contents of the picture, for screen readers.
        draw: draws on the axes (an array of axes for several panels) with the colors INK, FAINT, PAPER and SERIES, and
            returns the tooltips.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    file = io.StringIO()
    cycle = cycler(color=list(SERIES))
    # The salt is that of the ids that are referred to.
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycle, "svg.hashsalt": name}):
        figure = Figure(figsize=inches, layout="constrained")
        tips = draw(figure.subplots(panels, 1, sharex=panels > 1))
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = _DIGITS.sub("", _NOT_IN_HTML.sub("", file.getvalue())).replace("xlink:href", "href")
    root, used = ET.fromstring(text), set(_REFERENCE.findall(text))
    for element in list(root.iter()):
        key = element.get("id", "")
        if key in tips:
            for shape, tip in zip(element.findall(".//path"), tips[key], strict=True):
                shape.insert(0, _element("title", tip))
        if key not in used:
            element.attrib.pop("id", None)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-description"}
    root.insert(0, _element("title", title, id=f"{name}-title"))
    root.insert(1, _element("desc", description, id=f"{name}-description"))
    text = ET.tostring(root, encoding="unicode")
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text


def _element(tag: str, text: str, **attributes: str) -> ET.Element:
    element = ET.Element(tag, attributes)
    element.text = text
    return element


def _boxes(axes: Any, boxes: Iterable[Box], gid: str, **look: Any) -> None:
    """Draw rectangles, which are one artist with this gid."""
    from matplotlib.collections import PolyCollection

    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in boxes]
    artist = PolyCollection(corners, linewidths=look.pop("linewidths", 0), **look)
    artist.set_gid(gid)
    axes.add_collection(artist)


def _memory(plan: Planned) -> str:
    parts = []
    for name, account, limit in plan.memories:
        parts.append(f"{name} {size(sum(account.values()))}" + (f" of {size(limit)}" if limit else ""))

    def draw(axes: Any, narrow: bool) -> Tips:
        axes.grid(axis="y", visible=False)
        return {gid: [tip] for gid, tip in draw_memory(axes, plan.memories, 2 if narrow else 4).items()}

    height = 1.5 + 0.5 * len(parts)
    return _drawn_twice("memory", "Bytes of each memory against its capacity", "; ".join(parts), height, draw)


def _sweep(line: SweepLine, shared: bool) -> str:
    lanes = by_way(line.busy)
    named = [lane_name(lane, shared) for lane in lanes]
    share = {lane: min(1.0, line.busy[lane] / line.seconds) if line.seconds else 0.0 for lane in lanes}
    words = ", ".join(f"{name} busy {percent(share[lane])}" for name, lane in zip(named, lanes, strict=True))
    unit, scale = ("ms", 1e3) if line.seconds < 2 else ("seconds", 1.0)

    def draw(axes: Any, narrow: bool) -> Tips:
        tips: Tips = {}
        drawn = merged(line.spans, MOST_NARROW * len(lanes)) if narrow else line.spans
        for color, kind in zip(SERIES, KINDS, strict=False):
            spans = [span for span in drawn if span.kind == kind]
            rows = [lanes.index(span.lane) for span in spans]
            ends = [(scale * span.began, scale * span.end) for span in spans]
            boxes = [(*both, row - 0.38, row + 0.38) for both, row in zip(ends, rows, strict=True)]
            _boxes(axes, boxes, kind, facecolors=color, label=kind if spans else None)
            tips[kind] = [_span_words(span, shared) for span in spans]
        axes.set_xlim(0, scale * line.seconds or 1)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(lanes)), named)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{unit} from the start of the sweep")
        beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "annotation_clip": False}
        at = ("axes fraction", "data")
        for row, lane in enumerate(lanes):
            axes.annotate(percent(share[lane]), (1, row), xycoords=at, xytext=(6, 0), va="center", **beside)
        axes.annotate("busy", (1, 1), xycoords="axes fraction", xytext=(6, 4), **beside)
        axes.legend(**ABOVE, ncols=2 if narrow else 4)
        return tips

    return _drawn_twice("sweep", "Time line of one sweep by lane", words, 1.2 + 0.4 * len(lanes), draw)


def _span_words(span: LaneSpan, shared: bool) -> str:
    def several(name: str, ends: tuple[int, int]) -> str:
        low, high = ends
        return "" if high < 0 else f", {name} {high}" if low in (-1, high) else f", {name}s {low} to {high}"

    work = "" if span.tasks == 1 else f"; {span.tasks} tasks, {_brief(span.busy)} of work"
    cells = several("layer", span.layers) + several("gpu_batch", span.batches).replace("gpu_batchs", "gpu_batches")
    times = f"{_brief(span.end - span.began)} from {_brief(span.began)} on"
    return f"{lane_name(span.lane, shared)}: {span.op}{cells}, {times}{work}"


def _brief(seconds: float) -> str:
    return f"{digits(1e3 * seconds)} ms" if seconds < 1 else clock(seconds)


def _token_rates(buckets: Sequence[Bucket]) -> str:
    """Return tokens per second over the seconds of all sweeps, of decode and of prefill sweeps."""
    shown: dict[str, tuple[str, str, Callable[[Bucket], tuple[int, float]]]] = {
        "decode": ("generated", SERIES[3], lambda bucket: (bucket.decode_tokens, bucket.decode_seconds)),
        "prefill": ("prompt", SERIES[0], lambda bucket: (bucket.prompt_tokens, bucket.prefill_seconds)),
    }

    def draw(panels: Any, narrow: bool) -> Tips:
        tips: Tips = {}
        step = -(-len(buckets) // MOST_NARROW) if narrow else 1
        drawn = [sum(buckets[first : first + step], Bucket()) for first in range(0, len(buckets), step)]
        ends = [0.0, *accumulate(bucket.prefill_seconds + bucket.decode_seconds for bucket in drawn)]
        for axes, (kind, (what, color, sums)) in zip(panels, shown.items(), strict=True):
            values = [(tokens / seconds if seconds else 0.0) for tokens, seconds in map(sums, drawn)]
            boxes = [(x0, x1, 0.0, y) for (x0, x1), y in zip(pairwise(ends), values, strict=True)]
            _boxes(axes, boxes, kind, facecolors=color, edgecolors=color, linewidths=0.4)
            tips[kind] = [
                f"{kind}, {clock(x0)} to {clock(x1)}: {digits(y)} tok/s in {bucket.sweeps} sweeps"
                for (x0, x1, _, y), bucket in zip(boxes, drawn, strict=True)
            ]
            axes.set_ylim(0, 1.08 * max(values, default=0.0) or 1)
            axes.set_title(f"{kind}: {what} tokens per second of {kind} sweeps", loc="left")
        axes.set_xlim(0, ends[-1] or 1)
        axes.set_xlabel("seconds of sweeps")
        return tips

    totals = [(kind, *sums(sum(buckets, Bucket()))) for kind, (_, _, sums) in shown.items()]
    means = ", ".join(f"{kind} {mean}" for kind, n, seconds in totals if (mean := rate(n, seconds, "tok")))
    return _drawn_twice("rates", "Tokens per second over time", f"Mean: {means}", 3.6, draw, 2)


def _lanes(plan: Planned) -> str:
    rows = [(name, lane) for name, lane in _lane_seconds(plan) if lane.predicted or lane.measured]
    words = "; ".join(f"{name} predicted {clock(x.predicted)}, measured {clock(x.measured)}" for name, x in rows)
    named = [name for name, _ in rows]

    def draw(axes: Any, _: bool) -> Tips:
        tips: Tips = {}
        looks = {"predicted": {"facecolor": "none", "edgecolor": INK, "hatch": "///"}, "measured": {"color": SERIES[3]}}
        for i, (what, look) in enumerate(looks.items()):
            seconds = [getattr(lane, what) for _, lane in rows]
            bars = axes.barh([row + 0.4 * i - 0.2 for row in range(len(rows))], seconds, 0.36, label=what, **look)
            for name, bar, spent in zip(named, bars, seconds, strict=True):
                bar.set_gid(f"{name}: {what}")
                tips[f"{name}: {what}"] = [f"{name}: {what} {clock(spent)}"]
        axes.set_yticks(range(len(rows)), named)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds of work")
        axes.legend(**ABOVE, ncols=2)
        return tips

    height = 1.2 + 0.5 * len(rows)
    return _drawn_twice("lanes", "Predicted and measured seconds of work by lane", words, height, draw)


def _lengths(name: str, title: str, what: str, counts: LengthCounts, color: str) -> str:
    """Return a histogram of numbers of tokens. what: noun of the counted things: row or sample."""
    bins = counts.bins()
    words = f"{min(counts):,} to {max(counts):,} tokens, mean {digits(counts.mean)}"

    def draw(axes: Any) -> Tips:
        boxes = [(low - 0.46, high + 0.46, 0.0, float(n)) for low, high, n in bins]
        _boxes(axes, boxes, name, facecolors=color)
        low, high = bins[0][0], bins[-1][1]
        axes.set_xlim(low - 0.5 - 0.02 * (high - low), high + 0.5 + 0.02 * (high - low))
        most = max(n for _, _, n in bins)
        axes.set_ylim(0, 1.08 * most)
        for axis, first, last in ((axes.xaxis, low, high), (axes.yaxis, 0, most)):
            axis.get_major_locator().set_params(integer=True)
            if last - first < FEW:  # the locator would choose fractions
                axis.set_ticks(range(first, last + 1))
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"{what}s")
        axes.grid(axis="x", visible=False)
        axes.axhline(0, color=FAINT, linewidth=0.8)
        ranges = [f"{low:,} to {high:,}" if high > low else f"{low:,}" for low, high, _ in bins]
        numbers = [count(number, what, f"{what}s") for _, _, number in bins]
        return {name: [f"{tokens} tokens: {rows}" for tokens, rows in zip(ranges, numbers, strict=True)]}

    return _drawn(name, title, words, (HALF, 2.4), draw)
