"""Models, machines and predictions that tests of plans share."""

import random
from dataclasses import replace

from bench.simulate import Forecast
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.profile import Profile, Unit, summed, walk
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, Split
from flexengine.schedule.tasks import Task
from tests.helpers.clock import simulated
from tests.helpers.drawn import model_of

DEVICE: Split = (1, 0, 0)
HOST: Split = (0, 1, 0)
DISK: Split = (0, 0, 1)
SPLITS: list[Split] = [DEVICE, HOST, DISK, (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0), (0.2, 0.8, 0)]
NEAR: list[Split] = [DEVICE, HOST, (0.5, 0.5, 0), (0.2, 0.8, 0)]  # off the disk
OPT = {"6.7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56)}  # layers, hidden size, heads


def opt(layers: int, hidden: int, heads: int, vocabulary: int = 50272) -> ModelFacts:
    """An OPT model in float16: 4 h^2 of attention, 8 h^2 of FFN."""
    sizes = [hidden * hidden] * 4 + [4 * hidden * hidden] * 2 + [hidden] * 6 + [4 * hidden]
    stack = tuple(
        tuple(TensorFact(f"{j}.{i}", n, 2, 2, matrix=n >= hidden * hidden, early=i < 3) for i, n in enumerate(sizes))
        for j in range(layers)
    )
    embedding = TensorFact("embedding", vocabulary * hidden, 2, 2)
    return ModelFacts(stack, (), embedding, None, vocabulary, hidden, 4 * hidden, heads, heads, hidden // heads, 2)


def machine_of(rng: random.Random, kind: str) -> Hardware:
    """Rates that are the same at every size, each 0.2 to 5 times a round number."""
    names = ("disk_read", "disk_write", "h2d") if kind == "cpu" else ("disk_read", "disk_write", "h2d", "d2h")
    round_numbers = {"disk_read": 2e9, "disk_write": 1e9, "h2d": 1e10, "d2h": 1e10}

    def near(x: float) -> float:
        return float(x * 10 ** rng.uniform(-0.7, 0.7))

    return Hardware(
        "random", kind, None, None, None, {name: near(round_numbers[name]) for name in names}, near(2e9),
        {"float32": near(1e12), "float16": near(2e12)}, near(1e12), near(1e11), near(1e11), cell_seconds=near(1e-5),
        task_seconds=near(1e-6), sweep_seconds=near(1e-5), sequence_seconds=near(1e-6),
    )  # fmt: skip


FLAT = replace(
    machine_of(random.Random(0), "sim"), links={"disk_read": 2e9, "disk_write": 1e9, "h2d": 1e10, "d2h": 8e9},
    checkpoint_read=3e9, cell_seconds=0.0, task_seconds=0.0, sweep_seconds=0.0, sequence_seconds=0.0,
)  # fmt: skip


def both(model: ModelFacts, hardware: Hardware, work: Workload, policy: Policy) -> tuple[Prediction, Forecast[Task]]:
    cost = Cost(model, hardware, work)
    layout = lay_out(model, policy, work, hardware.capacity)
    return cost.predict(layout), simulated(cost, layout)


def predicted(model: ModelFacts, work: Workload, policy: Policy, hardware: Hardware = FLAT) -> Prediction:
    return Cost(model, hardware, work).predict(lay_out(model, policy, work, hardware.capacity))


def random_case(rng: random.Random, slots: int) -> tuple[ModelFacts, Hardware, Workload, Policy]:
    """A few layers of a model of realistic width, or a tiny one; everything may lie anywhere."""
    wide = opt(rng.choice([6, 8, 12]), *rng.choice(list(OPT.values()))[1:], vocabulary=rng.choice([8000, 50272]))
    model = wide if rng.random() < 0.7 else model_of(rng)
    size = (rng.choice([32, 128, 512]), rng.choice([4, 16]))
    hidden = rng.choice([DEVICE, HOST, DISK, (0.5, 0.5, 0)])
    policy = Policy(rng.choice([4, 8, 16, 32]), rng.choice([1, 2, 3, 4, 6]), rng.choice(SPLITS), rng.choice(SPLITS),
                    hidden, slots, "zigzag", rng.choice([256, 512, 2048]))  # fmt: skip
    return model, machine_of(rng, rng.choice(["sim", "cpu"])), Workload({size: rng.choice([40, 64])}), policy


def sweeps_of(each: Unit, rows: int, schedule: str, shape: tuple[int, int], room: float = float("inf")) -> Profile:
    """The sweeps of a job of `rows` sequences. Arguments as in `walk`."""
    return summed(each, walk(each, rows, schedule, shape, room), rows)
