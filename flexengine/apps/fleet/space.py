"""Numbers of actors and of their processors on the machines of a cluster. Pure: nothing here knows Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexengine.errors import InvalidInput


@dataclass(frozen=True)
class FleetMachine:
    """A machine of the cluster."""

    # cpus, gpus: as Ray counts them.
    cpus: int
    gpus: int = 0
    ram: int = 0  # bytes that were free when Ray started; 0 if they are unknown


@dataclass(frozen=True)
class Share:
    """Part of a machine that one process may use."""

    engines: int = 1  # processes that share the machine
    ram: int | None = None  # bytes of RAM; None to share what is free when the process starts
    option: str = "device_mem"  # the option of `Engine` that limits its RAM
    fleet: int = 1  # processes of the whole fleet, which share its attention workers


ALL = Share()


@dataclass(frozen=True)
class Space:
    """Actors of a fleet, and the part of a machine that each of their processes takes."""

    actors: int  # engines, or groups of stages
    stages: int
    # cpus, gpus: of a process.
    cpus: int
    gpus: int
    interface: str | None = None  # network interface that joins the stages of an actor; None keeps them on one machine

    def share(self, machine: FleetMachine, device: str) -> Share:
        """Return the part of a machine that a process may use. It does not depend on the processes that run now, so
        that a process that is started again gets as much as before. device: auto, cpu, cuda or sim. A simulated device
        has no limit of its own."""
        here = machine.cpus // self.cpus
        if self.gpus:
            here = min(here, machine.gpus // self.gpus)
        engines = max(1, min(self.actors * self.stages, here))
        ram = machine.ram // engines if machine.ram and device != "sim" else None
        return Share(engines, ram, "host_mem" if self.gpus else "device_mem", self.actors * self.stages)


def space_for(
    machines: Sequence[FleetMachine], device: str, actors: int | None, stages: int = 1, interface: str | None = None
) -> Space:
    """Return the space of a fleet. Each process gets as many processors as fit, and one GPU if GPUs are used. Raise
    InvalidInput if there is no space for these actors.

    Args:
        device: auto, cpu, cuda or sim; auto uses GPUs if there are any.
        actors: None takes an actor for each GPU, or for each machine if none are used; for groups of stages, as many
            groups as there is space for in these.
        interface: see Space.
    """
    gpus = int(device == "cuda" or (device == "auto" and any(m.gpus for m in machines)))
    per_unit = 1 if interface else stages  # processes that must be on one machine
    if actors is None:
        actors = max(1, _units(machines, per_unit, 1, gpus) * per_unit // stages if gpus
                     else len(machines) * per_unit // stages if interface else len(machines))  # fmt: skip
    units = actors * stages // per_unit
    most = max((m.cpus for m in machines), default=0) // per_unit
    fitting = (cpus for cpus in range(most, 0, -1) if _units(machines, per_unit, cpus, gpus) >= units)
    if (cpus := next(fitting, 0)) == 0:
        needs = f"{stages} {'processor and GPU' if gpus else 'processor'}{'s' if stages > 1 else ''}"
        each = f", each on one machine with at least {needs}," if per_unit > 1 else f" with at least {needs} each"
        have = ", ".join(f"{m.cpus} + {m.gpus}" if gpus else f"{m.cpus}" for m in machines) or "no machine"
        raise InvalidInput(
            f"the cluster has no space for {actors} actors{each} (processors{' + GPUs' if gpus else ''}"
            f" of its machines: {have}); give fewer --actors or --stages, or add machines"
        )
    return Space(actors, stages, cpus, gpus, interface)


def _units(machines: Sequence[FleetMachine], per_unit: int, cpus: int, gpus: int) -> int:
    """Return how many groups of `per_unit` processes there is space for, each on one machine."""
    by_cpu = [m.cpus // (cpus * per_unit) for m in machines]
    by_gpu = [m.gpus // per_unit for m in machines] if gpus else by_cpu
    return sum(map(min, by_cpu, by_gpu))
