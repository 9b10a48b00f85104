"""Plot a prediction: bytes per memory against capacity, seconds per lane and sweep, and the frontier."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.plan.explain import tiers
from flexengine.plan.hardware import Hardware
from flexengine.plan.prediction import Prediction
from flexengine.plan.words import lane_name, size


def plot(
    prediction: Prediction, hardware: Hardware, path: str | Path, title: str = "", frontier: Sequence[Prediction] = ()
) -> None:
    """Write the plot as a PNG file.

    Args:
        prediction: of the policy to plot.
        hardware: the machine.
        path: file name, which must end with .png.
        title: above the plot, "" for the machine's name.
        frontier: predictions by rising latency; () leaves out this panel.

    Raises:
        InvalidInput: `check` fails, or the file cannot be written.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 3 if frontier else 2
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    _memory(axes[0], prediction, hardware)
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
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"a plot needs matplotlib ({error}); pip install 'flexengine[plot]'") from error


def _memory(axes: Any, prediction: Prediction, hardware: Hardware) -> None:
    """Draw a bar per memory, stacked by purpose, in % of the capacity. Without a limit, 100 % are the bytes in use."""
    memories = tiers(prediction, hardware)
    purposes = list(dict.fromkeys(what for _, account, _ in memories for what in account))
    wholes = [limit or sum(account.values()) or 1 for _, account, limit in memories]
    bottoms = [0.0] * len(memories)
    for what in purposes:
        heights = [100 * a.get(what, 0) / whole for (_, a, _), whole in zip(memories, wholes, strict=True)]
        axes.bar(range(len(memories)), heights, bottom=bottoms, label=what, width=0.6)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axes.axhline(100, color="black")
    limits = [size(limit) if limit else "no limit" for _, _, limit in memories]
    labels = [f"{m[0]}\n{size(sum(m[1].values()))} of {limit}" for m, limit in zip(memories, limits, strict=True)]
    axes.set_xticks(range(len(memories)), labels)
    axes.set_ylabel("% of capacity")
    axes.set_ylim(0, 110)
    axes.set_title("Memory")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _lanes(axes: Any, prediction: Prediction, hardware: Hardware) -> None:
    """Draw the seconds of each lane in a mean sweep of each kind, and a line at the sweep's end."""
    kinds = [kind for kind, count in prediction.counts.items() if count > 0]
    lanes = [lane for lane in hardware.lanes if any(prediction.lanes[kind].get(lane, 0) > 0 for kind in kinds)]
    labels = []
    for i, kind in enumerate(kinds):
        rows = [i * (len(lanes) + 1) + j for j in range(len(lanes))]
        axes.barh(rows, [prediction.lanes[kind].get(lane, 0.0) for lane in lanes], label=kind)
        axes.vlines(prediction.sweep_seconds[kind], rows[0] - 0.5, rows[-1] + 0.5, colors="black")
        labels += [(row, lane_name(lane, hardware.shared)) for row, lane in zip(rows, lanes, strict=True)]
    axes.set_yticks([row for row, _ in labels], [name for _, name in labels])
    axes.invert_yaxis()
    axes.set_xlabel("seconds in a mean sweep; the line is its end")
    axes.set_title("Lanes")
    axes.legend(fontsize="small")


def _frontier(axes: Any, prediction: Prediction, frontier: Sequence[Prediction]) -> None:
    """Draw throughput by latency of the frontier, and mark the prediction."""
    axes.plot([p.latency for p in frontier], [p.tok_s for p in frontier], marker="o", markersize=4)
    axes.plot([prediction.latency], [prediction.tok_s], marker="*", markersize=14, linestyle="", label="this policy")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.tick_params(axis="x", which="minor", labelrotation=45)  # else labels overlap
    axes.set_xlabel("latency of a row, seconds")
    axes.set_ylabel("generated tokens per second")
    axes.set_title("Frontier")
    axes.legend(fontsize="small")
