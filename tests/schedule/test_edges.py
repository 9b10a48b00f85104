"""Edges: any interleaving that they allow gives the result of the oracle, and no kind of edge is spare."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.places import Routes
from flexengine.schedule.edges import Edges
from flexengine.schedule.program import Program
from tests.helpers.strategies import SEEDS, refuted
from tests.helpers.toy import (
    MACHINES,
    MACHINES_AND_SLOTS,
    Job,
    Shuffled,
    SomeEdges,
    Toy,
    arriving_of,
    generate,
    jobs,
    oracle,
)


def outcome(job: Job, seed: int, routes: Routes, edges: Any) -> bool:
    """Return whether a job in a random interleaving gives what the oracle says."""
    rng, (streamed, layers, policy, rows), slots = random.Random(seed), job, job.policy.slots
    arriving = arriving_of(rng, layers)
    toy = Toy(streamed, layers, slots, routes, rows, arriving)
    generate(toy, Shuffled(toy, edges, rng).run, Program(streamed, layers, slots, routes, arriving), policy, rows)
    assert not any(toy.missing.values())
    return {s: t[rows[s][0] :] for s, t in toy.tokens.items()} == oracle(streamed, layers, rows)


# Drawn in test_rows.test_any_program, too.
@pytest.mark.slow
@pytest.mark.parametrize("routes", MACHINES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=25)
def test_every_interleaving_gives_the_sequential_result(slots: int, routes: str, data: Any, seed: int) -> None:
    assert outcome(data.draw(jobs(slots, MACHINES[routes])), seed, MACHINES[routes], Edges())


@pytest.mark.slow
@pytest.mark.parametrize(("routes", "slots"), MACHINES_AND_SLOTS)
def test_no_kind_of_edge_is_spare(slots: int, routes: str) -> None:
    every = ("raw", "war", "waw")
    cases = st.tuples(jobs(slots, MACHINES[routes]), SEEDS)
    assert not refuted(cases, lambda case: outcome(*case, MACHINES[routes], SomeEdges(*every)), 20)
    for kind in every:
        others = [k for k in every if k != kind]
        assert refuted(cases, lambda case, others=others: outcome(*case, MACHINES[routes], SomeEdges(*others))), kind


TASK = st.tuples(st.sets(st.integers(0, 5), max_size=3), st.sets(st.integers(0, 5), max_size=2))  # reads, writes


@given(tasks=st.lists(TASK, min_size=5, max_size=25))
def test_edges_order_every_conflict_and_nothing_else(tasks: list[tuple[set[int], set[int]]]) -> None:
    """The transitive closure of `add`'s answers equals that of all pairs that conflict."""
    edges: Edges[int] = Edges()
    closed: list[set[int]] = []
    wanted: list[set[int]] = []
    for i, (reads, writes) in enumerate(tasks):
        after = edges.add(sorted(reads), sorted(writes), i)
        conflicts = {e for e, (r, w) in enumerate(tasks[:i]) if reads & w or writes & (r | w)}
        closed.append(set(after).union(*(closed[e] for e in after)))
        wanted.append(conflicts.union(*(wanted[e] for e in conflicts)))
        assert closed[i] == wanted[i]
