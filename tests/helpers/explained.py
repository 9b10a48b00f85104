"""A toy machine and model whose plans are explained."""

from dataclasses import replace
from functools import cache
from typing import Any

from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.search import Search, search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain import text as explain

GPU = Hardware(
    name="toy", kind="cuda", device_bytes=120 << 20, host_bytes=1 << 30, disk_bytes=4 << 30,
    links={"disk_read": 2e8, "disk_write": 1e8, "h2d": 1e9, "d2h": 1e9}, checkpoint_read=2e8,
    products={"float16": 1e12}, prompt_attention=1e12, decode_attention=1e11, elementwise=1e11,
)  # fmt: skip
CPU = replace(GPU, name="toy cpu", kind="cpu", host_bytes=None, device_bytes=120 << 20, products={"float32": 1e10})
WORK = Workload({(64, 16): 9, (40, 8): 3})
MIXED = Policy(4, 2, (0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (1, 0, 0), prefill_tokens=128)


def model(layers: int = 8, hidden: int = 1024, bytes_: int = 2) -> ModelFacts:
    def matrix(name: str, elements: int) -> TensorFact:
        return TensorFact(name, elements, bytes_, bytes_)

    def layer(j: int) -> tuple[TensorFact, ...]:
        square = hidden * hidden
        norm = TensorFact(f"{j}.norm", hidden, bytes_, bytes_, matrix=False)
        return (*(matrix(f"{j}.{name}", square) for name in "qkvo"), *(matrix(f"{j}.{n}", 4 * square) for n in (1, 2)),
                norm)  # fmt: skip

    return ModelFacts(tuple(layer(j) for j in range(layers)), (), matrix("embedding", 1000 * hidden), None,
                      1000, hidden, 4 * hidden, 8, 8, hidden // 8, 2, "toy")  # fmt: skip


def predicted(policy: Policy, hardware: Hardware = GPU, facts: ModelFacts | None = None) -> Prediction:
    facts = facts or model()
    return Cost(facts, hardware, WORK).predict(lay_out(facts, policy, WORK, hardware.capacity))


@cache
def toy_search() -> Search:
    return search(model(), GPU, WORK)


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def told(policy: Policy, hardware: Hardware = GPU, **more: Any) -> str:
    return explain.report("toy-model", model(), hardware, WORK, predicted(policy, hardware), **more)
