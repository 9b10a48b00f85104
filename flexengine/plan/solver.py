"""Linear programs as rows for people, and their solution by HiGHS."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from flexengine.errors import FlexError

_TIE = 1e-9  # cost, relative to the job's, of a unit of tie
_COST = 1e4  # the job's cost as the solver sees it: the ties then stand clear of its tolerance of 1e-7


@dataclass(frozen=True)
class Variable:
    """An unknown, 0 or more. The solver sees value / scale. cost: of one unit, in the unit of what is minimised; tie:
    the same among solutions of equal cost, where less is better."""

    symbol: str
    meaning: str
    unit: str
    cost: float = 0.0
    scale: float = 1.0
    tie: float = 0.0


@dataclass(frozen=True)
class Row:
    """sum of terms[symbol] * variable <= limit, or == if equal, in `unit`. The solver sees both sides / scale."""

    label: str
    unit: str
    terms: Mapping[str, float]
    limit: float
    scale: float = 1.0
    equal: bool = False


@dataclass(frozen=True)
class Program:
    """Find the values that satisfy all rows at the least cost. goal: what the cost is."""

    goal: str
    variables: list[Variable]
    rows: list[Row]


class NoSolver(FlexError):
    """The solver is not installed."""


class SolverFailed(FlexError):
    """The solver gave no optimum of a program, and not because its rows contradict each other."""


_idle: list[Any] = []  # solvers that take no turn now: making one takes longer than solving such a small program


def _solver(highspy: Any) -> Any:
    """One that no other thread has, quiet."""
    try:
        return _idle.pop()
    except IndexError:
        highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("presolve", "off")  # which takes longer than such a small program
    return highs


def optimum(program: Program) -> dict[str, float] | None:
    """Return values by symbol, or None if no values satisfy the rows (the program is infeasible).

    Raises:
        NoSolver: highspy is not installed.
        SolverFailed: a coefficient is not finite (the message names it), the program is unbounded, or HiGHS stopped
            for another reason, such as a time limit or a numerical error (the message has its status).
    """
    try:
        import highspy
    except ImportError as error:
        raise NoSolver("the planner needs highspy, which is not installed; pip install highspy") from error
    # Of optima that are equal, which one is found depends on the order of the columns: that of the symbols.
    variables = sorted(program.variables, key=attrgetter("symbol"))
    lp = _scaled(highspy, program, variables)
    highs = _solver(highspy)
    passed = highs.passModel(lp)
    if passed == highspy.HighsStatus.kError:
        raise SolverFailed(f"HiGHS refuses the program that minimises the {program.goal}")
    highs.run()
    status, found = highs.getModelStatus(), highs.getSolution().col_value
    _idle.append(highs)
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolverFailed(_reason(program, status.name.removeprefix("k")))
    return {v.symbol: value * v.scale for v, value in zip(variables, found, strict=True)}


def _scaled(highspy: Any, program: Program, variables: Sequence[Variable]) -> Any:
    """Return the program as HiGHS takes it, with columns in the order of `variables`. Raises SolverFailed."""
    column = {v.symbol: i for i, v in enumerate(variables)}
    scale = {v.symbol: v.scale for v in variables}
    total = sum(v.cost * v.scale for v in program.variables) or 1.0
    costs = [_COST * (v.cost * v.scale / total + _TIE * v.tie) for v in variables]
    for v, cost in zip(variables, costs, strict=True):
        _check_finite(cost, f"cost of {v.symbol} ({v.cost:g} per {v.unit})")
    starts, columns, values, limits = [0], list[int](), list[float](), list[float]()
    for row in program.rows:
        for symbol, k in row.terms.items():
            columns.append(column[symbol])
            values.append(k * scale[symbol] / row.scale)
            _check_finite(values[-1], f"coefficient of {symbol} in row '{row.label}' ({k:g} {row.unit})")
        limits.append(row.limit / row.scale)
        _check_finite(limits[-1], f"limit of row '{row.label}' ({row.limit:g} {row.unit})")
        starts.append(len(columns))

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(variables), len(limits)
    lp.col_cost_ = costs
    lp.col_lower_, lp.col_upper_ = [0.0] * len(variables), [highspy.kHighsInf] * len(variables)
    lp.row_lower_ = [
        limit if row.equal else -highspy.kHighsInf for row, limit in zip(program.rows, limits, strict=True)
    ]
    lp.row_upper_ = limits
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, columns, values
    return lp


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise SolverFailed(f"the {what} is {value:g} after scaling; the numbers of a linear program must be finite")


def _reason(program: Program, status: str) -> str:
    """Return why HiGHS found no optimum. status: the name of its model status."""
    if status == "UnboundedOrInfeasible":
        return f"the program has no least {program.goal}, or its rows contradict each other (HiGHS: {status})"
    if status == "Unbounded":
        return f"the program has no least {program.goal}: no row bounds it from below (HiGHS: {status})"
    return f"HiGHS found no least {program.goal}: it stopped with status {status}"
