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
from dataclasses import dataclass, field

import numpy as np

from flexengine.errors import OutOfMemory
from flexengine.plan.cluster.case_costs import CaseCosts
from flexengine.plan.cluster.costs import ClusterTask, Costs, Order, check, orders
from flexengine.plan.cluster.job import Shape, batches, shapes
from flexengine.plan.cluster.plan import ClusterPlan
from flexengine.plan.cluster.program import Assignment, lower_bound, solve
from flexengine.plan.cluster.transfer import transfer

PROGRAM, TRANSFER, AUTO = "program", "transfer", "auto"
METHODS = (AUTO, PROGRAM, TRANSFER)
LARGE = 8000  # units * stages * choices from which AUTO takes the bit transfer
FIRST, SECOND, THIRD = range(3)  # levels of the heap's entries: which bound they have
TRANSFERS = 8  # cases that the bit transfer improves, those with the least bounds


@dataclass(frozen=True)
class Limits:
    """Limits of a search.

    Attributes:
        gap: relative gap to the bound at which the search ends.
        seconds: most seconds; the best plan so far is then returned.
        method: one of METHODS.
        batch: sequences alive at once; None tries several numbers.
    """

    gap: float = 1e-3
    seconds: float = 60.0
    method: str = AUTO
    batch: int | None = None


@dataclass
class Found:
    """Result of a search.

    Attributes:
        plan: the best plan.
        bound: proven lower bound of the cost of all plans.
        seconds: seconds that the search took.
        solved: number of cases that were solved.
        bounded: number of programs without whole numbers.
        method: PROGRAM or TRANSFER.
    """

    plan: ClusterPlan
    bound: float
    seconds: float
    solved: int
    bounded: int
    method: str

    @property
    def gap(self) -> float:
        """Return how far the plan's cost may be above the best possible, as a share of it."""
        cost = self.plan.priced.cost
        return max(0.0, (cost - self.bound) / cost) if cost > 0 else 0.0


@dataclass
class _Search:
    """A search under way. The heap has (bound, level, tie, case)."""

    task: ClusterTask
    limits: Limits
    costs: Costs = field(init=False)
    best: ClusterPlan | None = None
    solved: int = 0
    bounded: int = 0
    floor: float = math.inf  # least bound of the cases that were not solved to the end

    def __post_init__(self) -> None:
        self.costs = Costs(self.task)
        self.began = time.monotonic()
        self.orders = orders(self.task.cluster)
        self.heap: list[tuple[float, int, int, tuple[Order | None, Shape]]] = []
        self.ties = itertools.count()
        widest = max(len(order) for order in self.orders)
        size = len(self.task.groups) * widest * len(self.task.choices)
        self.program = self.limits.method == PROGRAM or (self.limits.method == AUTO and size < LARGE)

    def run(self) -> Found:
        """Return the best plan."""
        devices = self.orders[0]
        sizes = [self.limits.batch] if self.limits.batch else batches(self.task.job.rows)
        for batch in sizes:
            for shape in shapes(min(batch, self.task.job.rows), len(self.task.cluster.devices)):
                self._push(quick_bound(self.costs.numbers(devices, shape)), FIRST, (None, shape))
        while self.heap and not self._done():
            bound, level, _, (order, shape) = heapq.heappop(self.heap)
            if level == FIRST:
                self.bounded += 1
                found = lower_bound(self.costs.unordered(shape), anywhere=True)
                self._push(max(bound, found), SECOND, (None, shape))
                if self.best is None and math.isfinite(found):  # a first plan, in the first order
                    order = next(order for order in self.orders if len(order) <= len(self.task.groups))
                    numbers = self.costs.numbers(order, shape)
                    self._take(transfer(numbers), order, shape, numbers)
            elif order is None:
                self._branch(shape, bound)
            else:
                self._solve(order, shape, bound)
        if self.best is None:
            raise self._too_little()
        left = min([self.floor, self.best.priced.cost, *(entry[0] for entry in self.heap)])
        return Found(self.best, left, time.monotonic() - self.began, self.solved, self.bounded,
                     PROGRAM if self.program else TRANSFER)  # fmt: skip

    def _done(self) -> bool:
        if not self.program and self.solved >= TRANSFERS and self.best is not None:
            return True
        late = time.monotonic() - self.began > self.limits.seconds
        return self.best is not None and (late or self.heap[0][0] >= self.best.priced.cost * (1 - self.limits.gap))

    def _push(self, bound: float, level: int, case: tuple[Order | None, Shape]) -> None:
        if math.isfinite(bound):
            heapq.heappush(self.heap, (bound, level, next(self.ties), case))

    def _branch(self, shape: Shape, bound: float) -> None:
        """Add the cases of all orders of a shape."""
        for order in self.orders:
            if len(order) <= len(self.task.groups):
                self.bounded += 1
                found = lower_bound(self.costs.numbers(order, shape))
                self._push(max(bound, found), THIRD, (order, shape))

    def _solve(self, order: Order, shape: Shape, bound: float) -> None:
        self.solved += 1
        numbers = self.costs.numbers(order, shape)
        if not self.program:
            self._take(transfer(numbers), order, shape, numbers)
            self.floor = min(self.floor, bound)
            return
        left = max(1.0, self.limits.seconds - (time.monotonic() - self.began))
        below = self.best.priced.cost * (1 - self.limits.gap) if self.best else None
        answer = solve(numbers, self.limits.gap, left, below)
        if answer is not None:
            self._take(answer, order, shape, numbers)
            self.floor = min(self.floor, max(bound, answer.bound))
        elif time.monotonic() - self.began > self.limits.seconds:
            self.floor = min(self.floor, bound)
        elif below is not None:
            self.floor = min(self.floor, below)

    def _take(self, answer: Assignment | None, order: Order, shape: Shape, numbers: CaseCosts) -> None:
        if answer is None:
            return
        plan = ClusterPlan(self.task, order, shape, numbers, answer.stage_of, answer.choice_of)
        if plan.priced.fits and (self.best is None or plan.priced.cost < self.best.priced.cost):
            self.best = plan

    def _too_little(self) -> OutOfMemory:
        """Return the error of a cluster that is too small."""
        devices, batch = self.task.cluster.devices, self.limits.batch or 1
        least = min_bytes(self.costs.numbers(self.orders[0], Shape(batch, 1, 1)))
        have, hosts = sum(d.memory for d in devices), sum(d.host_memory for d in devices if d.offloads)
        names = ", ".join(form or "exact" for form in self.task.formats)
        rows = "one sequence at a time" if batch == 1 else f"{batch:,} sequences at once (--batch)"
        error = OutOfMemory("device", "stages", least, 0, have)
        error.args = (
            f"no stages fit: with layers in {names} and {rows}, the model needs at least {least:,} bytes, and the"
            f" {len(devices)} devices have {have:,} bytes, their hosts {hosts:,}, and each must hold whole layers with"
            " their KV cache; raise memory in the cluster file, add devices or host_memory, lower --batch, or allow"
            " fewer bits with --allow int8-weights,int4-weights,int3-weights",
        )
        return error


def search(task: ClusterTask, limits: Limits | None = None) -> Found:
    """Return the plan with the least cost: seconds + theta * harm.

    Raises:
        InvalidInput: a device has no kernel for any allowed format.
        OutOfMemory: no plan fits.
        NoSolver: highspy is not installed.
    """
    check(task)
    return _Search(task, limits or Limits()).run()


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
    seconds = numbers.round_seconds((slow[0], slow[1]), (through[0], through[1]))
    return numbers.rounds * seconds + numbers.theta * float(numbers.harm.min(axis=1).sum())


def min_bytes(numbers: CaseCosts) -> int:
    """Return a lower bound of the bytes of all devices and hosts together."""
    units = np.bincount(numbers.classes, minlength=numbers.memory.shape[1])
    both = np.where(np.isfinite(numbers.decode), numbers.memory + numbers.host, np.inf)
    return int(both.min(axis=(0, 2)) @ units + numbers.fixed_memory[[0, -1]].min())
