"""Plot a prediction: bytes per memory against capacity, seconds per lane and sweep, and the frontier."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput, check_library
from flexengine.places import by_way
from flexengine.plan.cost import Prediction
from flexengine.plan.formatting import lane_name, size
from flexengine.plan.hardware import Hardware
from flexengine.shell.explain.text import tiers

MOST_PURPOSES = 8  # bytes of further purposes are one part of a bar
OTHER = "other"
# Place of a legend: below the axes and their labels (the pad is in heights of its font), or beside the title.
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "frameon": False, "borderaxespad": 3.8}
ABOVE = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False, "borderaxespad": 0.2}

Memory = tuple[str, dict[str, int], int | None]  # name, bytes by purpose, capacity


def plot(
    prediction: Prediction, hardware: Hardware, path: str | Path, title: str = "", frontier: Sequence[Prediction] = ()
) -> None:
    """Write the plot as a PNG file. Raise InvalidInput if `check` fails, or the file cannot be written.

    Args:
        path: file name, which must end with .png.
        title: above the plot, "" for the machine's name.
        frontier: predictions by rising latency; () leaves out this panel.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 3 if frontier else 2
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    draw_memory(axes[0], tiers(prediction, hardware))
    axes[0].set_title("Memory", loc="left")
    _lanes(axes[1], prediction, hardware)
    if frontier:
        _frontier(axes[2], prediction, frontier)
    figure.suptitle(title or hardware.name)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise InvalidInput(f"plot file {path} cannot be written: {error}") from error


def check(path: str | Path) -> None:
    """Raise InvalidInput if matplotlib is not installed or the name does not end with .png."""
    if Path(path).suffix.lower() != ".png":
        raise InvalidInput(f"plot file {path} does not end with .png; plots are PNG files, change the name")
    check_library("matplotlib.figure", "a plot needs matplotlib", "plot")


def draw_memory(axes: Any, memories: Sequence[Memory], columns: int = 4) -> dict[str, str]:
    """Draw a bar per memory, stacked by purpose, in % of the capacity. Without a limit, 100 % are the bytes in use.

    Args:
        axes: axes of matplotlib.
        memories: as `text.tiers` returns them.
        columns: columns of the legend.

    Returns:
        What each part of a bar shows, by the gid of its artist.
    """
    purposes, shown = _purposes(memories), dict[str, str]()
    wholes = [limit or sum(account.values()) or 1 for _, account, limit in memories]
    ends = [0.0] * len(memories)
    for column, purpose in enumerate(purposes):
        parts = [
            sum(n for what, n in account.items() if purpose == (what if what in purposes else OTHER))
            for _, account, _ in memories
        ]
        widths = [100 * part / whole for part, whole in zip(parts, wholes, strict=True)]
        bars = axes.barh(range(len(memories)), widths, left=ends, label=purpose, height=0.6)
        for row, (bar, part) in enumerate(zip(bars, parts, strict=True)):
            bar.set_gid(f"memory-{row}-{column}")
            shown[f"memory-{row}-{column}"] = f"{memories[row][0]}: {purpose} {size(part)}, {widths[row]:.1f} %"
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.axvline(100, color=axes.xaxis.label.get_color())
    limits = [f"of {size(limit)}" if limit else "no limit" for _, _, limit in memories]
    labels = [f"{m[0]}\n{size(sum(m[1].values()))} {limit}" for m, limit in zip(memories, limits, strict=True)]
    axes.set_yticks(range(len(memories)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("% of capacity")
    axes.legend(**BELOW, ncols=columns)
    return shown


def _purposes(memories: Sequence[Memory]) -> list[str]:
    """Return at most MOST_PURPOSES purposes: weights, KV cache, those with the most bytes, and OTHER for the rest."""
    total: Counter[str] = Counter()
    for _, account, _ in memories:
        total.update(account)
    first = [what for what in ("weights", "KV cache") if total[what]]
    largest = [*first, *(what for what, n in total.most_common() if n and what not in first)]
    return largest if len(largest) <= MOST_PURPOSES else [*largest[: MOST_PURPOSES - 1], OTHER]


def _lanes(axes: Any, prediction: Prediction, hardware: Hardware) -> None:
    """Draw the seconds of each lane in a mean sweep of each kind, and a line at the sweep's end."""
    kinds = [kind for kind, count in prediction.counts.items() if count > 0]
    lanes = [lane for lane in by_way(hardware.lanes) if any(prediction.lanes[kind].get(lane, 0) > 0 for kind in kinds)]
    labels = []
    for i, kind in enumerate(kinds):
        rows = [i * (len(lanes) + 1) + j for j in range(len(lanes))]
        axes.barh(rows, [prediction.lanes[kind].get(lane, 0.0) for lane in lanes], label=kind)
        axes.vlines(prediction.sweep_seconds[kind], rows[0] - 0.5, rows[-1] + 0.5, colors="black")
        labels += [(row, lane_name(lane, hardware.shared)) for row, lane in zip(rows, lanes, strict=True)]
    axes.set_yticks([row for row, _ in labels], [name for _, name in labels])
    axes.invert_yaxis()
    axes.set_xlabel("seconds in a mean sweep; the line is its end")
    axes.set_title("Lanes", loc="left")
    axes.legend(**ABOVE, ncols=2)


def _frontier(axes: Any, prediction: Prediction, frontier: Sequence[Prediction]) -> None:
    """Draw throughput by latency of the frontier, and mark the prediction."""
    axes.plot([p.latency for p in frontier], [p.tok_s for p in frontier], marker="o", markersize=4)
    axes.plot([prediction.latency], [prediction.tok_s], marker="*", markersize=14, linestyle="", label="this policy")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.tick_params(axis="x", which="minor", labelrotation=45)  # else labels overlap
    axes.set_xlabel("latency of a row, seconds")
    axes.set_ylabel("generated tokens per second")
    axes.set_title("Frontier", loc="left")
    axes.legend(**ABOVE)
