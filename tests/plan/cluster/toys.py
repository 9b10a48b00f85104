"""Small clusters, models and random cases for tests of the cluster planner."""

import numpy as np

from bench.cluster.cases import decoder, uniform_job
from flexengine.plan.cluster.costs import ClusterTask
from flexengine.plan.cluster.devices import Cluster, Device, HandRates, Link
from flexengine.plan.cluster.job import ClusterJob, Format, Model, assumed_harm
from flexengine.plan.stages import BITS

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
    devices: Cluster, model: Model | None = None, job: ClusterJob | None = None, formats: tuple[Format, ...] = MIXED,
    theta: float = 1.0, group: int = 1,
) -> ClusterTask:  # fmt: skip
    made = model or decoder("toy", 12, 2048, 8192, 32000)
    table = assumed_harm(made, formats)
    rng = np.random.default_rng(1)
    table = table * rng.uniform(0.3, 3.0, (len(made.kinds), 1))
    return ClusterTask(devices, {"cuda": made}, job or uniform_job(16, 256, 32), formats, table, theta, group)
