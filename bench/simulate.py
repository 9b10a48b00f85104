"""Simulation of a program on a virtual clock, for tests of schedules and checks of the cost model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flexengine.schedule.edges import Edges
from flexengine.schedule.tasks import Task

Simulated = TypeVar("Simulated", bound=Task)


@dataclass
class Forecast(Generic[Simulated]):
    """Result of a simulation."""

    seconds: float = 0.0  # end of the last task
    busy: dict[str, float] = field(default_factory=dict)  # seconds of work per lane
    # (task, start, end) in program order, in seconds
    spans: list[tuple[Simulated, float, float]] = field(default_factory=list)


def simulate(
    program: Iterable[Simulated], cost: Callable[[Simulated], float], overlap: bool = True
) -> Forecast[Simulated]:
    """Simulate a program in which every lane runs its tasks in order, each after the tasks it depends on.

    Args:
        cost: returns the seconds of a task.
        overlap: False runs one task at a time, as inline lanes do, so the end is the sum of all costs.
    """
    free: dict[str, float] = {}
    edges: Edges[list[float]] = Edges()
    forecast = Forecast[Simulated]()
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
