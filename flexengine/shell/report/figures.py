"""The pictures of a page: matplotlib figures as inline SVG, with colors from the page's style sheet and a tooltip for
each shape."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flexengine.plan.feedback import LaneSeconds
from flexengine.plan.formatting import clock, count, digits, lane_name, percent, size
from flexengine.schedule.routes import by_way
from flexengine.schedule.tasks import LOADING
from flexengine.shell.explain.picture import draw_memory
from flexengine.shell.report.record import Bucket, LengthCounts, Planned
from flexengine.shell.report.timeline import KINDS, LaneSpan, SweepLine

# Colors in figures, and the CSS variables of page.html that replace them. Pages have a light and a dark set.
INK, FAINT, PAPER = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0101{number:02x}" for number in range(16, 24))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
_VARIABLES |= {color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)}

_REFERENCE = re.compile(r"#([\w-]+)")
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
WIDTH, HALF = 9.0, 4.4  # inches of wide and of narrow pictures
ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3}  # place of a legend above the axes
Box = tuple[float, float, float, float]  # left, right, bottom, top
Tips = dict[str, str | Sequence[str]]


def to_svg(figure: Any, name: str, title: str, description: str, tips: Mapping[str, str | Sequence[str]]) -> str:
    """Return a figure as an `<svg>` element for an HTML page, drawn with STYLE.

    Args:
        figure: matplotlib figure. Its colors are INK, FAINT, PAPER and SERIES.
        name: prefix of the element's ids, unique in the page.
        title, description: name and contents of the picture, for screen readers.
        tips: by gid of an artist, the tooltip of the artist, or one tooltip for each of its shapes.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # ids that are referred to depend on the salt
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = _NOT_IN_HTML.sub("", file.getvalue()).replace("xlink:href", "href")
    root, used = ET.fromstring(text), set(_REFERENCE.findall(text))
    for element in list(root.iter()):
        _add_tips(element, tips)
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    _label(root, name, title, description)
    text = ET.tostring(root, encoding="unicode")
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text


def _add_tips(element: ET.Element, tips: Mapping[str, str | Sequence[str]]) -> None:
    """Add a `<title>` to the shapes of an artist that has tooltips."""
    tip = tips.get(element.get("id", ""))
    if tip is None:
        return
    shapes = element.findall(".//path")
    texts = [tip] * len(shapes) if isinstance(tip, str) else tip
    for shape, said in zip(shapes, texts, strict=True):
        title = ET.Element("title")
        title.text = said
        shape.insert(0, title)


def _label(root: ET.Element, name: str, title: str, description: str) -> None:
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    for i, (tag, said) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(tag, {"id": f"{name}-{'description' if tag == 'desc' else 'title'}"})
        element.text = said
        root.insert(i, element)


def _drawn(
    name: str, title: str, description: str, inches: tuple[float, float], draw: Callable[[Any], Tips], panels: int = 1
) -> str:
    """Return an SVG. draw: draws on the axes (an array of axes for several panels), and returns the tooltips."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycler(color=list(SERIES))}):
        figure = Figure(figsize=inches, layout="constrained")
        tips = draw(figure.subplots(panels, 1, sharex=panels > 1))
        return to_svg(figure, name, title, description, tips)


def _boxes(axes: Any, boxes: Iterable[Box], gid: str, **look: Any) -> None:
    """Draw rectangles, which are one artist with this gid."""
    from matplotlib.collections import PolyCollection

    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in boxes]
    artist = PolyCollection(corners, linewidths=look.pop("linewidths", 0), **look)
    artist.set_gid(gid)
    axes.add_collection(artist)


# Placement.


def memory(plan: Planned) -> str:
    """Return a bar per memory: its bytes by purpose, in % of its capacity."""
    parts = []
    for name, account, limit in plan.memories:
        parts.append(f"{name} {size(sum(account.values()))}" + (f" of {size(limit)}" if limit else ""))

    def draw(axes: Any) -> Tips:
        axes.grid(axis="y", visible=False)
        return dict(draw_memory(axes, plan.memories))

    inches = (WIDTH, 1.5 + 0.5 * len(parts))
    return _drawn("memory", "Bytes of each memory against its capacity", "; ".join(parts), inches, draw)


# One sweep.


def sweep(line: SweepLine, shared: bool) -> str:
    """Return the time line of a sweep, one row per lane."""
    lanes = line.lanes
    named = [lane_name(lane, shared) for lane in lanes]
    share = {lane: min(1.0, line.busy[lane] / line.seconds) if line.seconds else 0.0 for lane in lanes}
    words = ", ".join(f"{name} busy {percent(share[lane])}" for name, lane in zip(named, lanes, strict=True))
    unit, scale = ("ms", 1e3) if line.seconds < 2 else ("seconds", 1.0)

    def draw(axes: Any) -> Tips:
        tips: Tips = {}
        for color, kind in zip(SERIES, KINDS, strict=False):
            spans = [span for span in line.spans if span.kind == kind]
            rows = [lanes.index(span.lane) for span in spans]
            ends = [(scale * span.began, scale * span.end) for span in spans]
            boxes = [(*both, row - 0.38, row + 0.38) for both, row in zip(ends, rows, strict=True)]
            gid = f"sweep-{kind}".replace(" ", "-")
            _boxes(axes, boxes, gid, facecolors=color, label=kind if spans else None)
            tips[gid] = [_span_words(span, shared) for span in spans]
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
        axes.legend(**ABOVE, ncols=4)
        return tips

    return _drawn("sweep", "Time line of one sweep by lane", words, (WIDTH, 1.2 + 0.4 * len(lanes)), draw)


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


# Tokens per second.


def rates(buckets: Sequence[Bucket]) -> str:
    """Return tokens per second over the seconds of all sweeps, of decode and of prefill sweeps."""
    ends, total = [], 0.0
    for bucket in buckets:
        ends.append((total, total := total + bucket.seconds))
    decode = [(b.decode_tokens, b.decode_seconds) for b in buckets]
    prefill = [(b.prompt_tokens, b.prefill_seconds) for b in buckets]
    shown = [("decode", "generated", decode, SERIES[3]), ("prefill", "prompt", prefill, SERIES[0])]

    def draw(panels: Any) -> Tips:
        tips: Tips = {}
        for axes, (kind, what, sums, color) in zip(panels, shown, strict=True):
            values = [(tokens / seconds if seconds else 0.0) for tokens, seconds in sums]
            boxes = [(x0, x1, 0.0, y) for (x0, x1), y in zip(ends, values, strict=True)]
            _boxes(axes, boxes, kind, facecolors=color, edgecolors=color, linewidths=0.4)
            tips[kind] = [
                f"{kind}, {clock(x0)} to {clock(x1)}: {digits(y)} tok/s in {bucket.sweeps} sweeps"
                for (x0, x1, _, y), bucket in zip(boxes, buckets, strict=True)
            ]
            axes.set_ylim(0, 1.08 * max(values, default=0.0) or 1)
            axes.set_title(f"{kind}: {what} tokens per second of {kind} sweeps", loc="left")
        axes.set_xlim(0, total or 1)
        axes.set_xlabel("seconds of sweeps")
        return tips

    sums = [(kind, sum(n for n, _ in pairs), sum(x for _, x in pairs)) for kind, _, pairs, _ in shown]
    means = ", ".join(f"{kind} {digits(tokens / seconds)} tok/s" for kind, tokens, seconds in sums if seconds)
    return _drawn("rates", "Tokens per second over time", f"Mean: {means}", (WIDTH, 3.6), draw, 2)


# Prediction.


def lanes(plan: Planned) -> str:
    """Return measured and predicted seconds of work by lane."""
    rows = [(name, lane) for name, lane in lane_seconds(plan) if lane.predicted or lane.measured]
    words = "; ".join(f"{name} predicted {clock(x.predicted)}, measured {clock(x.measured)}" for name, x in rows)
    named = [name for name, _ in rows]

    def draw(axes: Any) -> Tips:
        tips: Tips = {}
        looks = {"predicted": {"facecolor": "none", "edgecolor": INK, "hatch": "///"}, "measured": {"color": SERIES[3]}}
        for i, (what, look) in enumerate(looks.items()):
            seconds = [getattr(lane, what) for _, lane in rows]
            bars = axes.barh([row + 0.4 * i - 0.2 for row in range(len(rows))], seconds, 0.36, label=what, **look)
            for name, bar, spent in zip(named, bars, seconds, strict=True):
                bar.set_gid(f"{what}-{name}".replace(" ", "-"))
                tips[f"{what}-{name}".replace(" ", "-")] = f"{name}: {what} {clock(spent)}"
        axes.set_yticks(range(len(rows)), named)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds of work")
        axes.legend(**ABOVE, ncols=2)
        return tips

    inches = (WIDTH, 1.2 + 0.5 * len(rows))
    return _drawn("lanes", "Predicted and measured seconds of work by lane", words, inches, draw)


def lane_seconds(plan: Planned) -> list[tuple[str, LaneSeconds]]:
    """Return name and seconds of work of the lanes, in the order in which data passes them, and of the reads of
    resident weights."""
    lanes = dict(plan.report.lanes)
    reads = [("reading resident weights", lanes.pop(LOADING))] if LOADING in lanes else []
    return [*((lane_name(lane, plan.shared), lanes[lane]) for lane in by_way(lanes)), *reads]


# Lengths.


def lengths(name: str, title: str, what: str, counts: LengthCounts, color: str) -> str:
    """Return a histogram of numbers of tokens.

    Args:
        name, title: as in `to_svg`.
        what: noun of the counted things, in the singular: row, sample.
    """
    bins = counts.bins()
    words = f"{min(counts):,} to {max(counts):,} tokens, mean {digits(counts.mean)}"

    def draw(axes: Any) -> Tips:
        boxes = [(low - 0.46, high + 0.46, 0.0, float(n)) for low, high, n in bins]
        _boxes(axes, boxes, name, facecolors=color)
        low, high = bins[0][0], bins[-1][1]
        axes.set_xlim(low - 0.5 - 0.02 * (high - low), high + 0.5 + 0.02 * (high - low))
        axes.set_ylim(0, 1.08 * max(n for _, _, n in bins))
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"{what}s")
        axes.grid(axis="x", visible=False)
        axes.axhline(0, color=FAINT, linewidth=0.8)
        ranges = [f"{low:,} to {high:,}" if high > low else f"{low:,}" for low, high, _ in bins]
        numbers = [count(number, what, f"{what}s") for _, _, number in bins]
        return {name: [f"{tokens} tokens: {rows}" for tokens, rows in zip(ranges, numbers, strict=True)]}

    return _drawn(name, title, words, (HALF, 2.4), draw)
