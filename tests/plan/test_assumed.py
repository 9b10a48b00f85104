"""Plans with assumed rates, judged with the rates that runs on an H200 recorded (bench/results/gpu.jsonl)."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flexengine import shipped
from flexengine.places import place_of
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.rates import assumed
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, shares
from flexengine.worker.open_model import open_model

RECORDS = Path(__file__).parents[2] / "bench" / "results" / "gpu.jsonl"
LAYERS, SWEEPS, WORK = 40, 32, Workload({(128, 32): 64})
CAPACITY = Capacity(16 << 30, 115 * 10**9, 60 * 10**9, shared=False, staged=True)  # --device-mem 16GiB
STREAMED = Policy(32, 2, weights=(0, 1, 0))  # as it was run
DEVICE_MEMORY = 3.9e12  # bytes per second of copies within the device, by its data sheet (4.8e12) and bench.gpu.kernels


@cache
def facts() -> ModelFacts:
    return open_model(shipped.find("models", "opt-13b"), None, "cuda", weights=False).facts


@cache
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def job(name: str) -> dict[str, Any]:
    """The first run of a case."""
    return next(r for r in records() if r["bench"] == "gpu" and r["case"]["case"]["name"] == f"opt-13b, {name}")


def lanes(name: str) -> dict[str, float]:
    """Seconds of work of each lane."""
    return {lane: by["measured"] for lane, by in job(name)["run"]["summary"]["plan"]["lanes"].items()}


def all_assumed() -> Hardware:
    return assumed("cuda", CAPACITY)


def quick() -> Hardware:
    """What `measure.machine.quick_rates` measures there, but for attention on the host and the fixed cost of a layer,
    which stay assumed here."""
    products = {r["rows"]: r["tflop_s"]["bf16"] * 1e12 for r in records() if "product" in r}
    link, known = ((1.0, job("all weights streamed")["h2d_rate"]),), all_assumed()
    return replace(known, links={**known.links, "h2d": link, "d2h": link}, elementwise=DEVICE_MEMORY,
                   products={"float16": tuple((float(n), rate) for n, rate in sorted(products.items()))},
                   decode_attention=((1.0, 0.4 * DEVICE_MEMORY),))  # fmt: skip


def recorded() -> Hardware:
    """The rates that the runs had: all lanes of the delegated job, and the device and the loading of the other."""
    run, moved = lanes("engine's own policy"), job("engine's own policy")["run"]["summary"]["bytes"]
    policy, told = (job("engine's own policy")["run"]["summary"][key] for key in ("policy", "plan"))
    host = 8e9 * told["lanes"]["cpu"]["predicted"] / run["cpu"]  # 8e9 was assumed
    cell = run["device"] / (SWEEPS * LAYERS * policy["num_gpu_batches"])
    assert cell == pytest.approx(2.75e-3, rel=0.01)
    streamed = lanes("all weights streamed")
    plain = streamed["device"] / (SWEEPS * LAYERS * STREAMED.num_gpu_batches)
    rates = {lane: ((1.0, moved[lane] / run[lane]),) for lane in ("disk_read", "disk_write", "d2h")}
    weights = sum(t.stored_bytes for t in facts().tensors)
    known = quick()
    return replace(known, links={**known.links, **rates}, host_attention=host, cell_seconds=plain / 2, crosstalk={},
                   delegation={facts().signature(0): cell - plain}, assumed=False,
                   checkpoint_read=((1.0, weights / streamed["loading"]),))  # fmt: skip


def test_a_delegated_job_takes_what_it_took() -> None:
    """The device waited for the host and the link, and pages of the disk for the answers of the host, as the order of a
    layer's cells demands: without these waits the price of a sweep is a quarter too low. The first sweep, the only one
    with prompts, took as long as reading the weights. The rate of the link is the job's own, as weights and pages from
    disk shared it."""
    run = job("engine's own policy")["run"]["summary"]
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in run["policy"].items()}
    link = ((1.0, run["bytes"]["h2d"] / lanes("engine's own policy")["h2d"]),)
    known = replace(recorded(), links={**recorded().links, "h2d": link})
    prediction = Cost(facts(), known, WORK).of(Policy(**fields), CAPACITY)
    assert prediction is not None
    decoding = run["total_seconds"] - run["prefill_seconds"]
    assert prediction.sweep_seconds["decode"] == pytest.approx(decoding / (SWEEPS - 1), rel=0.1)


def priced(policy: Policy) -> Prediction:
    prediction = Cost(facts(), recorded(), WORK).of(policy, CAPACITY)
    assert prediction is not None
    return prediction


def test_the_recorded_rates_give_the_recorded_seconds_of_streaming() -> None:
    seconds = job("all weights streamed")["run"]["summary"]["total_seconds"]
    assert priced(STREAMED).total_seconds == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("known", [all_assumed, quick])
def test_no_plan_is_slower_than_streaming_all_weights(known: Any) -> None:
    """As predicted with the rates of the plan, and with those of the machine."""
    chosen = search(facts(), known(), WORK).best
    told = Cost(facts(), known(), WORK).of(STREAMED, CAPACITY)
    assert told is not None
    assert chosen.total_seconds <= told.total_seconds
    assert not chosen.policy.delegates  # there the device waited for the CPU: no price of lanes that overlap holds
    assert priced(chosen.policy).total_seconds <= 1.02 * priced(STREAMED).total_seconds


@pytest.mark.parametrize("known", [all_assumed, quick])
def test_assumed_rates_put_no_cache_on_a_disk_and_delegate_nothing(known: Any) -> None:
    """With rates of a file, which differ in `assumed` alone, they may."""
    policy = search(facts(), known(), WORK).best.policy
    assert not any(share for place, share in shares(policy.cache).items() if place_of(place).disk)
    assert not policy.delegates


def test_a_cache_that_memory_cannot_hold_goes_to_the_disk() -> None:
    token = facts().kv_token * LAYERS
    small = replace(all_assumed(), device_bytes=3 * 10**9, host_bytes=1 * 10**9)
    best = search(facts(), small, Workload({(2000, 32): 1})).best
    assert token * 2000 > 10**9
    assert shares(best.policy.cache)["disk"] == 1 or best.policy.cache[0] == 1
