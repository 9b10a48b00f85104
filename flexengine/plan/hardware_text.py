"""A machine's capacities and rates as a table."""

from collections.abc import Callable

from flexengine.plan.explain import machine
from flexengine.plan.formatting import count, digits, lane_name, percent, size
from flexengine.plan.hardware import Hardware, Table


def hardware_text(hardware: Hardware) -> str:
    """Return a table of a machine's capacities and rates, at most one line per table of rates."""
    shared = hardware.shared
    limits = [("RAM" if shared and p == "device" else p, limit) for p, limit in hardware.capacity.limits.items()]
    limits = [item for item in limits if not (shared and item[0] == "host")]
    rows = [(f"{name} capacity", "no limit" if limit is None else size(limit)) for name, limit in limits]
    rows += [(lane_name(lane, shared), _points(table, size, size, "/s")) for lane, table in hardware.links.items()]
    rows.append(("model files", _points(hardware.checkpoint_read, size, size, "/s")))
    rows += [(f"products {dtype}", _points(t, _rows, _flops, "")) for dtype, t in hardware.products.items()]
    rows.append(("prompt attention", _points(hardware.prompt_attention, _rows, _flops, "")))
    rows.append(("decode attention", _points(hardware.decode_attention, _rows, size, "/s")))
    rows += [("host attention", f"{size(hardware.host_attention)}/s")] if hardware.host_attention else []
    rows.append(("elementwise", f"{size(hardware.elementwise)}/s"))
    for what in ("cell", "task", "sweep", "sequence"):
        rows.append((f"one {what}", f"{getattr(hardware, f'{what}_seconds') * 1e6:,.1f} microseconds"))
    for lane, others in hardware.crosstalk.items():
        slowed = ", ".join(f"by {percent(x)} of {lane_name(other, shared)}" for other, x in others.items() if x)
        rows += [(f"{lane_name(lane, shared)} slowed", slowed)] if slowed else []
    rows += [("new RAM", f"{size(hardware.touch)}/s")] if hardware.touch else []
    layers, heads = count(len(hardware.layers), "layer", "layers"), count(len(hardware.heads), "head", "heads")
    rows.append(("measured for models", f"{layers}, {heads}"))
    return "\n".join([machine(hardware), *(f"  {name:<22}{text}" for name, text in rows)])


def _points(table: Table, x_text: Callable[[float], str], y_text: Callable[[float], str], per: str) -> str:
    """Return at most four points of a table as text, the first and the last included."""
    chosen = sorted({round(i * (len(table) - 1) / 3) for i in range(4)})
    points = [(x_text(table[i][0]), y_text(table[i][1])) for i in chosen]
    return f"{points[0][1]}{per}" if len(points) == 1 else ", ".join(f"{y}{per} at {x}" for x, y in points)


def _rows(count: float) -> str:
    return f"{count:,.0f}"


def _flops(rate: float) -> str:
    return f"{digits(rate / 1e12)} TFLOP/s" if rate >= 1e12 else f"{digits(rate / 1e9)} GFLOP/s"
