"""FlexGen's machine, models, policies and jobs, for this project's planner."""

from dataclasses import replace
from functools import cache
from typing import Any

from flexengine import shipped
from flexengine.errors import OutOfMemory
from flexengine.lossy import EXACT, Lossy
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import ALL_CACHE, NO_CACHE, Policy, delegate_of
from flexengine.worker.open_model import open_model

SIZES = ("6.7B", "30B", "175B")
ROWS = 1024  # of a job
MORE_BYTES, MOST_BYTES = 10**9, 30 * 10**9  # steps and limit of a device that is enlarged so that a policy fits
DEQUANTIZED_BYTES = 50  # that torch moves here to dequantize one element in memory (docs/machines.md)
FLEXGEN_BYTES = 22  # the same of FlexGen, as its rates for OPT-30B with a 4-bit cache imply: 20, 22 and 26
# Policies of FlexGen's benchmark suite by (size, prompt tokens, 4 bits): fractions of weights and of the KV cache on
# GPU and CPU, sequences of a gpu_batch, and gpu_batches. Activations are on the GPU for 6.7B, on the CPU for others.
SUITE = {
    ("6.7B", 256, False): ((1, 0), (1, 0), 4, 1), ("6.7B", 256, True): ((1, 0), (1, 0), 128, 1),
    ("6.7B", 512, False): ((1, 0), (1, 0), 2, 1), ("6.7B", 512, True): ((1, 0), (1, 0), 72, 1),
    ("6.7B", 1024, False): ((1, 0), (1, 0), 1, 1), ("6.7B", 1024, True): ((1, 0), (1, 0), 28, 1),
    ("30B", 256, False): ((0.1, 0.9), (0, 1), 160, 2), ("30B", 256, True): ((0, 1), (0, 1), 128, 8),
    ("30B", 512, False): ((0.2, 0.8), (0, 1), 48, 3), ("30B", 512, True): ((0, 1), (0, 1), 64, 8),
    ("30B", 1024, False): ((0.04, 0.96), (0, 1), 20, 4), ("30B", 1024, True): ((0, 1), (0, 1), 20, 12),
    ("175B", 256, False): ((0, 0.5), (0, 0), 64, 8), ("175B", 256, True): ((0, 1), (0, 1), 96, 3),
    ("175B", 512, False): ((0, 0.5), (0, 0), 32, 8), ("175B", 512, True): ((0, 1), (0, 1), 48, 3),
    ("175B", 1024, False): ((0, 0.5), (0, 0), 12, 12), ("175B", 1024, True): ((0, 1), (0, 1), 12, 4),
}  # fmt: skip


@cache
def machine(name: str = "t4-16gb_208gb_ssd") -> Hardware:
    """Return a shipped machine: by default the one on which FlexGen was measured."""
    return Hardware.load(shipped.find("hardware", name))


@cache
def facts(size: str, lossy: Lossy = EXACT) -> ModelFacts:
    """Return the shape of an OPT model. size: its parameters, such as "30B"."""
    return open_model(
        str(shipped.find("models", f"opt-{size.lower()}")), None, "cuda", weights=False, lossy=lossy
    ).facts


def compressed(size: str, four_bits: bool = True) -> Lossy:
    """Return the switches of FlexGen's compression: its suite compresses the cache alone for 30B."""
    if not four_bits:
        return EXACT
    return Lossy(cache="int4") if size == "30B" else Lossy(weights="int4", cache="int4")


def job(prompt: int, new: int, rows: int = ROWS) -> Workload:
    """Return a job of rows of one size. prompt, new: tokens in and out."""
    return Workload({(prompt, new): rows})


def suite_policy(size: str, prompt: int, four_bits: bool = False) -> Policy:
    """Return a policy of FlexGen's benchmark suite. The CPU attends to an exact cache that is off the GPU."""
    weights, kv, batch, batches = SUITE[size, prompt, four_bits]
    hidden = (1, 0, 0) if size == "6.7B" else (0, 1, 0)
    by_cpu = size != "6.7B" and not four_bits
    cache = (*kv, 1 - sum(kv))
    return Policy(batch, batches, (*weights, 1 - sum(weights)), cache, hidden, schedule="zigzag",
                  delegate=delegate_of(ALL_CACHE if by_cpu else NO_CACHE, cache),
                  half_layers=by_cpu and size == "30B")  # fmt: skip


def best(
    size: str, work: tuple[int, int] = (512, 32), four_bits: bool = False, hardware: Hardware | None = None,
    options: Options | None = None,
) -> Prediction:  # fmt: skip
    """Return the planner's policy for a job of `ROWS` rows.

    Args:
        work: tokens in and out.
        hardware: None for FlexGen's machine.
        options: None for those of `flexengine plan`.
    """
    if hardware is None:
        return _best_on_t4(size, work, four_bits, options or Options())
    return search(facts(size, compressed(size, four_bits)), hardware, job(*work), options or Options()).best


@cache
def _best_on_t4(size: str, work: tuple[int, int], four_bits: bool, options: Options) -> Prediction:
    """Kept: several tables ask for the same jobs."""
    return search(facts(size, compressed(size, four_bits)), machine(), job(*work), options).best


def priced(
    size: str, policy: Policy, work: Workload, hardware: Hardware | None = None, four_bits: bool = False,
    overlap: bool = True,
) -> Prediction:  # fmt: skip
    """Return the prediction of a policy that is given. overlap: False runs one transfer or computation at a time.

    Raises:
        OutOfMemory: the policy does not fit.
    """
    model, hardware = facts(size, compressed(size, four_bits)), hardware or machine()
    policy = policy if overlap else replace(policy, slots=1, half_layers=False)
    return Cost(model, hardware, work, overlap).predict(lay_out(model, policy, work, hardware.capacity))


def suite_priced(
    size: str, prompt: int, new: int = 32, four_bits: bool = False, overlap: bool = True,
    hardware: Hardware | None = None, **changes: Any,
) -> Prediction:  # fmt: skip
    """Return the prediction of a policy of the suite, over four of its blocks. If it does not fit, the GPU has more
    memory. changes: other fields of the policy."""
    policy, hardware = replace(suite_policy(size, prompt, four_bits), **changes), hardware or machine()
    work = job(prompt, new, 4 * policy.block_size)
    for more in range(0, MOST_BYTES, MORE_BYTES):
        larger = replace(hardware, device_bytes=(hardware.device_bytes or 0) + more)
        try:
            return priced(size, policy, work, larger, four_bits, overlap)
        except OutOfMemory:
            continue
    raise ValueError(f"FlexGen's policy for OPT-{size} at {prompt} tokens fits in no GPU")


def decompressing(hardware: Hardware) -> Hardware:
    """Return the machine with FlexGen's products of 4-bit weights: a weight is dequantized to 16 bits in memory, once
    for a gpu_batch, and tensor cores multiply."""
    plain = hardware.products["float16"]
    slow = FLEXGEN_BYTES / hardware.elementwise
    table = tuple((rows, 2 * rows / (slow + 2 * rows / rate)) for rows, rate in plain)
    return replace(hardware, products={**hardware.products, "int4": table})


def with_bus(hardware: Hardware, share: float) -> Hardware:
    """Return the machine whose link from host to device has this share of its rate."""
    slower = tuple((x, y * share) for x, y in hardware.links["h2d"])
    return replace(hardware, links={**hardware.links, "h2d": slower})


def with_disk(hardware: Hardware, read: float, write: float) -> Hardware:
    """Return the machine with another disk. read, write: most bytes per second."""

    def scaled(table: tuple[tuple[float, float], ...], most: float) -> tuple[tuple[float, float], ...]:
        return tuple((x, y * most / max(y for _, y in table)) for x, y in table)

    links = {**hardware.links, "disk_read": scaled(hardware.links["disk_read"], read),
             "disk_write": scaled(hardware.links["disk_write"], write)}  # fmt: skip
    return replace(hardware, links=links, checkpoint_read=scaled(hardware.checkpoint_read, read))
