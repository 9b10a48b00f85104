"""Search the best plan: every order of device types and every shape of micro-batches, pruned by lower bounds.

Cases are taken in the order of their bounds. The first bound of a shape ignores memory, order and links. The second is
the program without whole numbers, order and links; the third, of each order, the program without whole numbers. A case
whose turn comes after all bounds is solved, by the program or by the bit transfer. The first shape that may fit is
solved at once, so that a search that ends early has a plan. The search ends when the least bound of the other cases is
not below the best cost.
"""

import heapq
import itertools
import math
import time
from dataclasses import dataclass

import numpy as np

from flexengine.errors import InvalidInput, OutOfMemory, size
from flexengine.plan.cluster.case_costs import CaseCosts
from flexengine.plan.cluster.costs import ClusterPlan, ClusterTask, Costs, Order, orders
from flexengine.plan.cluster.job import Shape, batches, shapes
from flexengine.plan.cluster.program import Assignment, lower_bound, solve
from flexengine.plan.cluster.transfer import transfer

PROGRAM, TRANSFER, AUTO = "program", "transfer", "auto"
METHODS = (AUTO, PROGRAM, TRANSFER)
LARGE = 8000  # units * stages * choices from which AUTO takes the bit transfer
FIRST, SECOND, THIRD = range(3)  # levels of the heap's entries: which bound they have
TRANSFERS = 8  # cases that the bit transfer improves, those with the least bounds


@dataclass(frozen=True)
class Limits:
    """Limits of a search."""

    gap: float = 1e-3  # relative gap to the bound at which the search ends
    seconds: float = 60.0  # most seconds; the best plan so far is then returned
    method: str = AUTO  # one of METHODS
    batch: int | None = None  # sequences alive at once; None tries several numbers


@dataclass
class Found:
    """A search, and its result."""

    task: ClusterTask  # what is planned
    limits: Limits  # limits of the search
    best: ClusterPlan | None = None  # the best plan so far; None if none fits
    # proven lower bound of the cost of all plans
    bound: float = math.inf  # during the search, of the cases that were not solved to the end
    seconds: float = 0.0  # seconds that the search took
    solved: int = 0  # number of cases that were solved
    bounded: int = 0  # number of programs without whole numbers
    method: str = PROGRAM  # PROGRAM or TRANSFER

    def __post_init__(self) -> None:
        self.costs = Costs(self.task)
        self.began = time.monotonic()
        self.orders = orders(self.task.cluster)
        self.heap: list[tuple[float, int, int, tuple[Order | None, Shape]]] = []  # bound, level, tie, case
        self.ties = itertools.count()
        size = len(self.task.groups) * max(map(len, self.orders)) * len(self.task.choices)
        if self.limits.method == TRANSFER or (self.limits.method == AUTO and size >= LARGE):
            self.method = TRANSFER

    @property
    def plan(self) -> ClusterPlan:
        """Return the best plan. Raise OutOfMemory if none fits."""
        if self.best is None:
            raise self._too_little()
        return self.best

    @property
    def gap(self) -> float:
        """Return how far the plan's cost may be above the best possible, as a share of it."""
        cost = self.plan.priced.cost
        return max(0.0, (cost - self.bound) / cost) if cost > 0 else 0.0

    def run(self) -> None:
        """Search until the plan is good enough, or time is up."""
        sizes = [self.limits.batch] if self.limits.batch else batches(self.task.job.rows)
        for batch in sizes:
            for shape in shapes(min(batch, self.task.job.rows), len(self.task.cluster.devices)):
                self._push(quick_bound(self.costs.numbers(self.orders[0], shape)), FIRST, (None, shape))
        while self.heap and not self._done():
            bound, level, _, (order, shape) = heapq.heappop(self.heap)
            if level == FIRST:
                self.bounded += 1
                found = lower_bound(self.costs.unordered(shape), anywhere=True)
                self._push(max(bound, found), SECOND, (None, shape))
                if self.best is None and math.isfinite(found):  # a first plan, in the first order
                    self._transfer(next(order for order in self.orders if len(order) <= len(self.task.groups)), shape)
            elif order is None:
                for order in self.orders:
                    if len(order) <= len(self.task.groups):
                        self.bounded += 1
                        found = lower_bound(self.costs.numbers(order, shape))
                        self._push(max(bound, found), THIRD, (order, shape))
            elif self.method == TRANSFER:
                self.solved += 1
                self._transfer(order, shape)
                self.bound = min(self.bound, bound)
            else:
                self._solve(order, shape, bound)
        self.bound = min([self.bound, self.plan.priced.cost, *(entry[0] for entry in self.heap)])
        self.seconds = time.monotonic() - self.began

    def _done(self) -> bool:
        if self.method == TRANSFER and self.solved >= TRANSFERS and self.best is not None:
            return True
        late = time.monotonic() - self.began > self.limits.seconds
        return self.best is not None and (late or self.heap[0][0] >= self.best.priced.cost * (1 - self.limits.gap))

    def _push(self, bound: float, level: int, case: tuple[Order | None, Shape]) -> None:
        if math.isfinite(bound):
            heapq.heappush(self.heap, (bound, level, next(self.ties), case))

    def _transfer(self, order: Order, shape: Shape) -> None:
        numbers = self.costs.numbers(order, shape)
        if (answer := transfer(numbers)) is not None:
            self._take(answer, order, shape, numbers)

    def _solve(self, order: Order, shape: Shape, bound: float) -> None:
        self.solved += 1
        numbers = self.costs.numbers(order, shape)
        left = max(1.0, self.limits.seconds - (time.monotonic() - self.began))
        below = self.best.priced.cost * (1 - self.limits.gap) if self.best else None
        answer = solve(numbers, self.limits.gap, left, below)
        if answer is not None:
            self._take(answer, order, shape, numbers)
            self.bound = min(self.bound, max(bound, answer.bound))
        elif time.monotonic() - self.began > self.limits.seconds:
            self.bound = min(self.bound, bound)
        elif below is not None:
            self.bound = min(self.bound, below)

    def _take(self, answer: Assignment, order: Order, shape: Shape, numbers: CaseCosts) -> None:
        plan = ClusterPlan(self.task, order, shape, numbers, answer.stage_of, answer.choice_of)
        if plan.priced.fits and (self.best is None or plan.priced.cost < self.best.priced.cost):
            self.best = plan

    def _too_little(self) -> OutOfMemory:
        """Return the error of a cluster that is too small."""
        devices, batch = self.task.cluster.devices, self.limits.batch or 1
        numbers = self.costs.numbers(self.orders[0], Shape(batch, 1, 1))
        both = np.where(np.isfinite(numbers.decode), numbers.memory + numbers.host, np.inf).min(axis=(0, 2))
        least = int(both[list(numbers.classes)].sum() + numbers.fixed_memory[[0, -1]].min())
        have, hosts = sum(d.memory for d in devices), sum(d.host_memory for d in devices if d.offloads)
        names = ", ".join(form or "exact" for form in self.task.formats)
        rows = "one sequence at a time" if batch == 1 else f"{batch:,} sequences at once (--batch)"
        error = OutOfMemory("device", "stages", least, 0, have)
        error.args = (
            f"no stages fit: with layers in {names} and {rows}, the model needs at least {size(least)}, and the"
            f" {len(devices)} devices have {size(have)}, their hosts {size(hosts)}, and each must hold whole layers"
            " with their KV cache; raise memory in the cluster file, add devices or host_memory, lower --batch, or"
            " allow fewer bits with --allow int8-weights,int4-weights,int3-weights",
        )
        return error


def search(task: ClusterTask, limits: Limits | None = None) -> Found:
    """Return the plan with the least cost: seconds + theta * harm.

    Raises:
        InvalidInput: a device has no kernel for any allowed format.
        OutOfMemory: no plan fits.
        NoSolver: highspy is not installed.
    """
    found = Found(task, limits or Limits())
    for device in task.cluster.devices:
        if not np.any(np.isfinite(found.costs.numbers((device,), Shape(1, 1, 1)).decode)):
            names = ", ".join(form or "exact" for form in task.formats)
            raise InvalidInput(
                f"device {device.name} has no rates for layers in {names}; add them to the cluster file,"
                " or allow other formats"
            )
    found.run()
    return found


def quick_bound(numbers: CaseCosts) -> float:
    """Return a lower bound of the cost of any order of these devices, without a program.

    The slowest stage takes at least as long as perfectly divided work, and the way through the pipeline at least as
    long as all layers on their fastest devices.
    """
    units = np.bincount(numbers.classes, minlength=numbers.prefill.shape[1])
    slow, through = [], []
    for table in (numbers.prefill, numbers.decode):
        fastest = np.maximum(table, numbers.load).min(axis=2)  # [stages, classes]
        least = fastest.min(axis=0)
        through.append(float(least @ units))
        with np.errstate(divide="ignore"):  # a layer without seconds
            slow.append(max(float(n / np.sum(1 / fastest[:, k])) for k, n in enumerate(units)))
    first, step = numbers.passes((slow[0], slow[1]), (through[0], through[1]))
    seconds = numbers.rounds * (first + numbers.steps * step)
    return float(seconds + numbers.theta * numbers.harm.min(axis=1).sum())
