"""Space for the actors of a fleet on the machines of a cluster."""

import itertools
import random

import pytest

from flexengine.apps.fleet.space import FleetMachine as Machine
from flexengine.apps.fleet.space import Share, Space, space_for
from flexengine.errors import InvalidInput


@pytest.mark.parametrize(("machines", "given", "expected"), [
    ([Machine(8)], ("cpu", None), Space(1, 1, 8, 0)),
    ([Machine(8), Machine(8)], ("auto", None), Space(2, 1, 8, 0)),
    ([Machine(8), Machine(3)], ("auto", 3), Space(3, 1, 3, 0)),
    ([Machine(16, 4)], ("auto", None), Space(4, 1, 4, 1)),
    ([Machine(16, 4)], ("cpu", None), Space(1, 1, 16, 0)),
    ([Machine(16, 4), Machine(64)], ("cuda", 3), Space(3, 1, 5, 1)),
    ([Machine(16, 4)], ("auto", None, 2), Space(2, 2, 4, 1)),
    ([Machine(8), Machine(8)], ("auto", None, 4), Space(2, 4, 2, 0)),
    ([Machine(4, 1)] * 4, ("auto", None, 4, "eth0"), Space(1, 4, 4, 1, "eth0")),
    ([Machine(4)] * 4, ("auto", None, 2, "eth0"), Space(2, 2, 4, 0, "eth0")),
])  # fmt: skip
def test_space(machines: list[Machine], given: tuple, expected: Space) -> None:  # type: ignore[type-arg]
    assert space_for(machines, *given) == expected


@pytest.mark.parametrize(("machines", "given", "why"), [
    ([], ("auto", None), "no space for 1 actors with at least 1 processor each (processors of its machines: no"),
    ([Machine(2)], ("cpu", 3), "no space for 3 actors with at least 1 processor each (processors of its machines: 2)"),
    ([Machine(8)], ("cuda", None), "1 processor and GPU each (processors + GPUs of its machines: 8 + 0)"),
    ([Machine(8, 2)], ("auto", 3), "no space for 3 actors"),
    ([Machine(8, 2), Machine(8, 2)], ("auto", 1, 3), "each on one machine with at least 3 processor and GPUs,"),
])  # fmt: skip
def test_no_space(machines: list[Machine], given: tuple, why: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidInput) as error:
        space_for(machines, *given)
    assert why in str(error.value)


def test_processes_get_all_that_fits() -> None:
    """Random clusters: the actors fit as Ray places them, and would not with one processor more each."""
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        machines = [Machine(rng.randrange(1, 12), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]
        device, actors, stages = rng.choice(["auto", "cpu"]), rng.randrange(1, 5), rng.randrange(1, 3)
        try:
            space = space_for(machines, device, actors, stages)
        except InvalidInput:
            assert not fits(machines, actors, stages, 1, int(device == "auto" and any(m.gpus for m in machines)))
            continue
        found += 1
        assert fits(machines, actors, stages, space.cpus, space.gpus)
        assert not fits(machines, actors, stages, space.cpus + 1, space.gpus)
    assert found > 50


def fits(machines: list[Machine], actors: int, stages: int, cpus: int, gpus: int) -> bool:
    """Whether some way to put the actors on machines has enough of everything."""
    for way in itertools.product(range(len(machines)), repeat=actors):
        if all(way.count(i) * stages * cpus <= m.cpus and way.count(i) * stages * gpus <= m.gpus
               for i, m in enumerate(machines)):  # fmt: skip
            return True
    return False


def test_share() -> None:
    """Memory is divided by the processes that may come to a machine, whichever run now."""
    assert Space(4, 1, 3, 0).share(Machine(8, 0, 100), "auto") == Share(2, 50, "device_mem", 4)
    assert Space(1, 2, 1, 0).share(Machine(64, 0, 100), "cpu") == Share(2, 50, "device_mem", 2)
    assert Space(1, 1, 8, 0).share(Machine(4), "cpu") == Share(1, None, "device_mem")
    assert Space(5, 1, 4, 1).share(Machine(64, 1, 90), "auto") == Share(1, 90, "host_mem", 5)
    assert Space(5, 1, 4, 1).share(Machine(16, 4, 90), "auto") == Share(4, 22, "host_mem", 5)
    assert Space(3, 1, 1, 0).share(Machine(8, 0, 100), "sim").ram is None
