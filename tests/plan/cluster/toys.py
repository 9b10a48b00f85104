"""Small clusters, models and random cases for tests of the cluster planner."""

import numpy as np

from flexengine.plan.cluster import harm
from flexengine.plan.cluster.costs import Task
from flexengine.plan.cluster.devices import Cluster, Device, Link
from flexengine.plan.cluster.job import Job
from flexengine.plan.cluster.latency import HandRates
from flexengine.plan.cluster.model import Format, Model, decoder
from flexengine.plan.cluster.numbers import Choice, Numbers
from flexengine.strategy import BITS

MIXED: tuple[Format, ...] = (None, "int8", "int4")


def rates(flops: float, bandwidth: float, layer_seconds: float = 1e-4) -> HandRates:
    return HandRates(dict.fromkeys(BITS, flops), dict.fromkeys(BITS, bandwidth), layer_seconds)


def device(name: str, speed: float, memory: float, kind: str = "", host: float = 0.0) -> Device:
    """`speed` times 10 TFLOP/s and 100 GB/s; memory and host in GB."""
    link = 1e10 if host else 0.0
    return Device(name, kind or name, int(memory * 1e9), rates(1e13 * speed, 1e11 * speed), host_memory=int(host * 1e9),
                  host_link=link)  # fmt: skip


def cluster(*devices: Device, bandwidth: float = 1e10, latency: float = 1e-5) -> Cluster:
    link = Link(bandwidth, latency)
    return Cluster("toy", devices, link, link)


def task(
    devices: Cluster, model: Model | None = None, job: Job | None = None, formats: tuple[Format, ...] = MIXED,
    theta: float = 1.0, group: int = 1,
) -> Task:  # fmt: skip
    made = model or decoder("toy", 12, 2048, 8192, 32000)
    table = harm.assumed(made, formats)
    rng = np.random.default_rng(1)
    table = table * rng.uniform(0.3, 3.0, (len(made.layers), 1))
    return Task(devices, {"cuda": made}, job or Job.uniform(16, 256, 32), formats, table, theta, group)


def random_numbers(rng: np.random.Generator, units: int, stages: int, formats: int, host: bool) -> Numbers:
    """Return a random case: two classes of units, links of unequal speed, memory that just suffices."""
    choices = tuple(Choice(form, on) for on in ((False, True) if host else (False,)) for form in MIXED[:formats])
    size = (stages, 2, len(choices))
    on_host = np.array([c.host for c in choices])
    nbytes = np.array([{None: 16.0, "int8": 8.0, "int4": 4.0}[c.form] for c in choices]) * 1e9
    bulk = nbytes * rng.uniform(0.8, 1.2, (1, 2, 1))
    speed = rng.uniform(0.3, 3.0, (stages, 1, 1))
    noise = rng.uniform(0.9, 1.1, size)
    classes = tuple(int(x) for x in rng.integers(0, 2, units))
    cached = rng.uniform(0.2, 2.0) * 1e9
    need = 12e9 * units / stages
    hops = rng.uniform(0.0, 0.3, (2, stages, stages))
    cohorts = int(rng.integers(1, 5))
    return Numbers(
        choices, classes if len(set(classes)) == 2 else (0, 1, *classes[2:]),
        prefill=(0.5 + 0.03 * bulk / 1e9) / speed * noise, decode=(0.02 + 0.01 * bulk / 1e9) / speed * noise,
        load=np.where(on_host, bulk / 2e10, 0.0) * np.ones(size), memory=cached + np.where(on_host, 0.0, bulk) * np.ones(size),
        host=np.where(on_host, bulk, 0.0) * np.ones(size), slots=np.where(on_host, 2 * bulk, 0.0) * np.ones(size),
        fixed_prefill=rng.uniform(0, 0.1, stages), fixed_decode=rng.uniform(0, 0.01, stages),
        fixed_memory=rng.uniform(0, 1e9, stages), capacity=need * rng.uniform(0.6, 2.0, stages),
        host_capacity=need * rng.uniform(0.0, 1.0, stages), hop_prefill=hops[0], hop_decode=0.1 * hops[1],
        back=float(rng.uniform(0, 0.02)),
        harm=np.array([{None: 0.0, "int8": 0.05, "int4": 1.0}[c.form] for c in choices]) * rng.uniform(0.5, 3, (units, 1)),
        theta=float(rng.choice([0.0, 0.1, 1.0, 10.0])), prefills=cohorts * int(rng.integers(1, 4)), cohorts=cohorts,
        steps=int(rng.integers(1, 40)), rounds=int(rng.integers(1, 3)),
    )  # fmt: skip
