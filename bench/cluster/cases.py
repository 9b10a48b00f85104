"""Cases of the cluster planner's bench: skewed clusters, LLM-PQ's clusters with its numbers, and a large one."""

from dataclasses import dataclass

from flexengine.plan.cluster.devices import Cluster, Device, HandRates, Link
from flexengine.plan.cluster.model import Format, LayerSizes, Model
from flexengine.strategy import BITS

GROUP = 64  # elements of a matrix that share a scale and a minimum of 16 bits each


@dataclass(frozen=True)
class Published:
    """A cluster of LLM-PQ (Zhao et al. 2024, tables 4 and 5), with B = 32, s = 512, n = 100.

    Attributes:
        number: of the cluster.
        model: shipped shape of the model.
        pipe_edge, llm_pq: published tokens per second; None if there is none.
    """

    number: int
    model: str
    pipe_edge: float | None
    llm_pq: float | None


PUBLISHED = (
    Published(1, "opt-13b", 13.69, 55.57), Published(2, "opt-13b", 103.76, 155.13),
    Published(3, "opt-30b", 21.86, 39.70), Published(4, "opt-30b", 7.12, 14.94),
    Published(5, "opt-66b", 4.26, 9.97), Published(6, "opt-66b", 27.82, 46.60),
    Published(7, "bloom-176b", 4.38, 7.48), Published(8, "bloom-176b", 3.77, 10.86),
    Published(9, "opt-30b", None, 7.85), Published(10, "opt-66b", None, 17.97),
    Published(11, "bloom-176b", None, 70.41),
)  # fmt: skip


def device(name: str, kind: str, speed: float, memory: float) -> Device:
    """Return a device of `speed` times 10 TFLOP/s and 100 GB/s. memory: in GB."""
    rates = HandRates(dict.fromkeys(BITS, 1e13 * speed), dict.fromkeys(BITS, 1e11 * speed), 1e-4)
    return Device(name, kind, int(memory * 1e9), rates)


def cluster(name: str, devices: list[Device], bandwidth: float = 1e10, latency: float = 1e-5) -> Cluster:
    """Return a cluster with equal links."""
    link = Link(bandwidth, latency)
    return Cluster(name, tuple(devices), link, link)


# Skewed clusters for a model of 24 layers of 4096: 9.7 GB of layers in 16 bits.
SKEWED = (
    cluster("fast and slow", [device("a", "a", 1, 4.5), device("b", "b", 4, 5.5)]),
    cluster("fast but small", [device("a", "a", 5, 2.5), device("b", "b", 1, 10.0)]),
    cluster("three of a kind and one", [*(device(f"t{k}", "t", 1, 2.2) for k in range(3)), device("v", "v", 5, 4.5)]),
    cluster("three types", [device("a", "a", 1, 2.5), device("b", "b", 2, 3.0), device("c", "c", 6, 4.0)]),
    cluster("slow link", [device("a", "a", 1, 3), device("b", "b", 3, 3.5), device("c", "c", 5, 3.5)], 2e8, 1e-3),
)
# Six devices of three types for a model of 64 layers.
LARGE = cluster("six devices of three types", [
    *(device(f"t{k}", "t", 2.5, 11) for k in range(2)), *(device(f"v{k}", "v", 7, 20) for k in range(2)),
    *(device(f"a{k}", "a", 12, 26) for k in range(2)),
])  # fmt: skip


def encoded_bytes(elements: float, form: Format, itemsize: int) -> float:
    """Return the bytes of a matrix in a format. itemsize: bytes per element of the exact matrix."""
    return elements * itemsize if form is None else elements * (BITS[form] + 32 / GROUP) / 8


def decoder(
    name: str, layers: int, hidden: int, width: int, vocabulary: int, kv_share: float = 1.0, itemsize: int = 2
) -> Model:
    """Return a decoder described by hand, with a plain FFN of two matrices and an untied head.

    Args:
        name: shown in messages.
        layers: number of layers.
        hidden, width: elements of the hidden state and of the FFN.
        vocabulary: number of tokens.
        kv_share: KV heads per query head.
        itemsize: bytes per element.
    """
    matrices = 2 * hidden * hidden * (1 + kv_share) + 2 * hidden * width
    norms = 4 * hidden * itemsize
    nbytes = {form: round(encoded_bytes(matrices, form, itemsize)) + norms for form in BITS}
    layer = LayerSizes(nbytes, matrices, 4.0 * hidden, round(2 * hidden * kv_share * itemsize))
    edge = vocabulary * hidden
    return Model(name, (layer,) * layers, hidden, width, itemsize, vocabulary, edge * itemsize, edge * itemsize, edge)
