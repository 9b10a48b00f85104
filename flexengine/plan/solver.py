"""Linear programs as rows for people, and their solution by what solver pulp finds."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flexengine.config import shown
from flexengine.errors import InvalidInput

SOLVERS: dict[str, dict[str, dict[str, str]]] = {  # to pulp's names and options, in order of preference
    "HiGHS": {"HiGHS": {"presolve": "off"}},  # which takes longer than such a small program
    "CBC": {"COIN_CMD": {}, "PULP_CBC_CMD": {}},
}
_TIE = 1e-9  # cost, relative to the job's, of a unit of tie
_COST = 1e4  # the job's cost as solvers see it: the ties then stand clear of their tolerance of 1e-7


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


@cache
def _solver(name: str | None) -> Any:
    """Pulp's solver of this name, quiet; None: the first installed."""
    if name is not None and name not in SOLVERS:
        raise InvalidInput(f"solver is {shown(name)}; it must be one of {', '.join(SOLVERS)}")
    try:
        import pulp
    except ImportError as error:
        raise InvalidInput("the planner needs pulp, which is not installed; pip install 'pulp[highs]'") from error
    wanted = [(key, pulp_name) for key in ([name] if name else SOLVERS) for pulp_name in SOLVERS[key]]
    installed = set(pulp.listSolvers(onlyAvailable=True))
    for key, pulp_name in wanted:
        if pulp_name in installed:
            with warnings.catch_warnings():  # pulp 3 warns of its own CBC, which pulp 4 will not bring
                warnings.simplefilter("ignore", DeprecationWarning)
                return pulp.getSolver(pulp_name, msg=False, **SOLVERS[key][pulp_name])
    missing = " or ".join([name] if name else SOLVERS)
    raise InvalidInput(f"the planner needs a solver, and pulp finds no {missing}; pip install highspy")


class Infeasible(InvalidInput):
    """No values satisfy the rows."""


def optimum(program: Program, solver: str | None) -> dict[str, float]:
    """Values by symbol. Raises Infeasible."""
    chosen = _solver(solver)
    import pulp

    # Expressions are made from dictionaries: pulp's operators copy one for every term.
    lp = pulp.LpProblem("placement")
    new = getattr(lp, "add_variable", pulp.LpVariable)  # the method came late in pulp 3; pulp 4 has only that
    unknown = {v.symbol: new(v.symbol, 0.0) for v in program.variables}
    scale = {v.symbol: v.scale for v in program.variables}
    total = sum(v.cost * v.scale for v in program.variables) or 1.0
    lp.objective = pulp.LpAffineExpression(
        {unknown[v.symbol]: _COST * (v.cost * v.scale / total + _TIE * v.tie) for v in program.variables}
    )
    for i, row in enumerate(program.rows):
        terms = {unknown[symbol]: k * scale[symbol] / row.scale for symbol, k in row.terms.items()}
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintLE
        expression = pulp.LpAffineExpression(terms)
        lp.addConstraint(pulp.LpConstraint(expression, sense, rhs=row.limit / row.scale), f"{i} {row.label}")
    if (status := lp.solve(chosen)) != pulp.LpStatusOptimal:
        raise Infeasible(f"the placement cannot be solved for ({pulp.LpStatus[status]});"
                          " check the units of the seconds and bytes given")  # fmt: skip
    return {symbol: (variable.varValue or 0.0) * scale[symbol] for symbol, variable in unknown.items()}
