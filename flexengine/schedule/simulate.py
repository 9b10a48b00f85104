"""A program on a virtual clock: the schedule's test, the plan's check and the ETA (docs/architecture.md 3)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flexengine.schedule.edges import Edges
from flexengine.schedule.program import Task


@dataclass
class Forecast:
    """seconds: end of the last task; busy: seconds of work per lane; spans: (task, start, end) in program order."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[Task, float, float]] = field(default_factory=list)


def simulate(program: Iterable[Task], cost: Callable[[Task], float], overlap: bool = True) -> Forecast:
    """Runs every task for cost(task) seconds on its lane, first come first served, after all it waits for.

    Without overlap one task runs at a time, which is what Inline lanes do: the end is then the sum of all costs.
    """
    free: dict[str, float] = {}
    edges: Edges[list[float]] = Edges()
    forecast = Forecast()
    for task in program:
        end = [0.0]
        ready = max((e[0] for e in edges.add(task.reads, task.writes, end)), default=0.0)
        start = max(ready, free.get(task.lane, 0.0)) if overlap else forecast.seconds
        seconds = cost(task)
        end[0] = free[task.lane] = start + seconds
        forecast.seconds = max(forecast.seconds, end[0])
        forecast.busy[task.lane] = forecast.busy.get(task.lane, 0.0) + seconds
        forecast.spans.append((task, start, end[0]))
    return forecast
