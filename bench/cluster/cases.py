"""Cases of the cluster planner's bench: skewed clusters, LLM-PQ's clusters with its numbers, and a large one."""

from dataclasses import dataclass, replace

from flexengine.plan.cluster.devices import Cluster, Device, HandRates, Link
from flexengine.plan.cluster.job import ClusterJob, Format, Model
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.stages import BITS
from flexengine.plan.workload import Workload

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


def uniform_job(rows: int, prompt: int, output: int) -> ClusterJob:
    """Return a job of equal rows."""
    return ClusterJob(Workload({(prompt, output): rows}))


def decoder(name: str, layers: int, hidden: int, width: int, vocabulary: int, tied: bool = False) -> Model:
    """Return a decoder in 16 bits, with a plain FFN of two matrices.

    Args:
        name: kind of the model.
        layers: number of layers.
        hidden, width: elements of the hidden state and of the FFN.
        vocabulary: number of tokens.
        tied: whether the head is the embedding.
    """
    matrices = [hidden * hidden] * 4 + [hidden * width] * 2

    def tensors(form: Format) -> tuple[TensorFact, ...]:
        encoded = (0 if form is None else round(n * (BITS[form] + 32 / GROUP) / 8) for n in matrices)
        made = [TensorFact(f"matrix {k}", n, 2, 2, encoded=nbytes, form=form or "")
                for k, (n, nbytes) in enumerate(zip(matrices, encoded, strict=True))]  # fmt: skip
        return (*made, TensorFact("norms", 4 * hidden, 2, 2, matrix=False))

    embedding, head = (TensorFact(table, vocabulary * hidden, 2, 2) for table in ("embedding", "head"))
    heads = max(1, hidden // 64)
    exact = ModelFacts((tensors(None),) * layers, (), embedding, None if tied else head, vocabulary, hidden, width,
                       heads, heads, hidden // heads, 2, name)  # fmt: skip
    return Model({form: replace(exact, layers=(tensors(form),) * layers) for form in BITS})
