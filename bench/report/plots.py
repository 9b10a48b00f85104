"""The plots of bench.report: the numbers of each, drawn as SVG, or as text if matplotlib is not installed.

An SVG contains a digest of its numbers, so that it can be compared with the records without drawing it.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness import REPO
from bench.report.blocks import scales
from bench.report.lines import compared, rate, short

FOLDER = REPO / "docs" / "plots"
WIDTH = 50  # characters of the longest bar of a text plot


@dataclass(frozen=True)
class Bars:
    """Values by label, with one colour per series: (label, series, value)."""

    title: str
    unit: str
    bars: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class Curve:
    """Points (x, y, label) joined by a line."""

    title: str
    x: str
    y: str
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Gantt:
    """Spans (lane, what, began, end), in milliseconds from the start of a sweep."""

    title: str
    spans: tuple[tuple[str, str, float, float], ...]


Shown = Bars | Curve | Gantt


def throughput() -> Bars:
    """Return tokens/s of flexengine and of peers, by case."""
    bars: dict[tuple[str, str], float] = {}
    for line in compared():
        name = "flexengine" if line.switches == "exact" else f"flexengine {line.switches}"
        bars[f"({line.case.name})", name] = rate(line.ours)
        if line.theirs:
            bars[f"({line.case.name})", line.peer] = rate(line.theirs)
    ordered = sorted(bars.items(), key=lambda x: (x[0][0], x[1]))
    return Bars("Useful tokens per second", "tok/s", tuple((case, name, value) for (case, name), value in ordered))


def bound() -> Bars:
    """Return flexengine's share of the bound, by case and switches."""
    shares = {(f"({x.case.name})", x.switches): 100 * rate(x.share) for x in compared() if x.share}
    return Bars("Share of the bound measured in the same run", "%", tuple((a, b, v) for (a, b), v in shares.items()))


def frontier() -> Curve:
    """Return measured latency and throughput by number of gpu_batches in a sweep."""
    line = scales().get("batches", {"points": []})
    found = [(1e3 * p["sweep_seconds"], p["tok_s"], f"{4 * p['x']} rows") for p in line["points"]]
    return Curve("Latency and throughput, tiny model", "ms per token", "tok/s", tuple(found))


def sweep() -> Gantt:
    """Return one decode sweep of a tiny model whose weights and cache are streamed over slow links."""
    line = scales().get("sweep", {"spans": []})
    spans = tuple((lane, what, began, end) for lane, what, began, end in line["spans"])
    return Gantt("One decode sweep: weights and cache streamed over links of 20 MB/s", spans)


PLOTS: dict[str, Callable[[], Shown]] = {
    "throughput": throughput, "bound": bound, "frontier": frontier, "sweep": sweep
}  # fmt: skip


def measured() -> list[str]:
    """Return the plots for which there are records."""
    return [name for name, made in PLOTS.items() if any(isinstance(x, tuple) and x for x in vars(made()).values())]


def digest(name: str) -> str:
    """Return the digest of a plot's numbers."""
    return hashlib.sha256(json.dumps(asdict(PLOTS[name]())).encode()).hexdigest()[:16]


def drawn(folder: Path = FOLDER) -> dict[str, str]:
    """Return the digests in the SVGs; "" for an SVG without one."""
    found = {}
    for name in measured():
        path = folder / f"{name}.svg"
        match = re.search(r"digest:(\w+)", path.read_text()) if path.exists() else None
        found[name] = match[1] if match else ""
    return found


# ---- as text


def text(name: str) -> str:
    """Return the plot as text."""
    shown = PLOTS[name]()
    if isinstance(shown, Bars):
        most = max((value for _, _, value in shown.bars), default=1.0)
        lines = [f"{label} {series:<44} {'#' * round(WIDTH * value / most):<{WIDTH}} {short(value)} {shown.unit}"
                 for label, series, value in shown.bars]  # fmt: skip
    elif isinstance(shown, Curve):
        lines = [f"{label}: {short(x)} {shown.x}, {short(y)} {shown.y}" for x, y, label in shown.points]
    else:
        lines = gantt_text(shown)
    return "\n".join([shown.title, *lines])


def gantt_text(shown: Gantt) -> list[str]:
    """Return a line of characters for each lane: # busy, . idle."""
    most = max((end for *_, end in shown.spans), default=1.0)
    lines = []
    for lane in dict.fromkeys(lane for lane, *_ in shown.spans):
        cells = ["."] * 100
        for _, _, began, end in (span for span in shown.spans if span[0] == lane):
            for i in range(int(99 * began / most), int(99 * end / most) + 1):
                cells[i] = "#"
        lines.append(f"{lane:>12} {''.join(cells)}")
    return [*lines, f"{'':>12} 0 to {short(most)} ms"]


# ---- as SVG


def draw(name: str, folder: Path = FOLDER) -> bool:
    """Write the SVG. Return False if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    shown = PLOTS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw: dict[type, Callable[[Any, Any], None]] = {Bars: bars, Curve: curve, Gantt: gantt}
        draw[type(shown)](axes, shown)
        axes.set_title(shown.title)
        path = folder / f"{name}.svg"
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": f"digest:{digest(name)}"})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return True


def bars(axes: Any, shown: Bars) -> None:
    """Draw horizontal bars, one colour per series."""
    series = list(dict.fromkeys(name for _, name, _ in shown.bars))
    axes.barh(range(len(shown.bars)), [value for *_, value in shown.bars],
              color=[f"C{series.index(name) % 10}" for _, name, _ in shown.bars])  # fmt: skip
    for i, (_, _, value) in enumerate(shown.bars):
        axes.text(value, i, f" {short(value)}", va="center", fontsize=7)
    axes.set_yticks(range(len(shown.bars)), [f"{label} {name}" for label, name, _ in shown.bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(shown.unit)


def curve(axes: Any, shown: Curve) -> None:
    """Draw points with their labels."""
    axes.plot([x for x, _, _ in shown.points], [y for _, y, _ in shown.points], "o-")
    for x, y, label in shown.points:
        axes.annotate(label, (x, y), xytext=(4, -10), textcoords="offset points", fontsize=7)
    axes.set_xlabel(shown.x)
    axes.set_ylabel(shown.y)


def gantt(axes: Any, shown: Gantt) -> None:
    """Draw a row per lane, with one colour per kind of task."""
    lanes = list(dict.fromkeys(lane for lane, *_ in shown.spans))
    kinds = list(dict.fromkeys(what for _, what, *_ in shown.spans))
    for i, kind in enumerate(kinds):
        mine = [(lanes.index(lane), began, end) for lane, what, began, end in shown.spans if what == kind]
        rows, widths, left = [y for y, _, _ in mine], [e - b for _, b, e in mine], [b for _, b, _ in mine]
        axes.barh(rows, widths, left=left, color=f"C{i % 10}", height=0.7, label=kind, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(fontsize=7, loc="upper right")
