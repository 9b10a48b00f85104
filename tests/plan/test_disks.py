"""Plans for machines with several disks: shares follow the rates, and no other split of the weights is better."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.places import Routes
from flexengine.plan.cost import Cost, Prediction, busiest
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.rates import assumed
from flexengine.plan.search import search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy, thousandths
from flexengine.shell.explain.text import hardware_text, report
from flexengine.shell.explain.whatif import changes, helps
from tests.helpers.plans import both, opt

MODEL = opt(16, 1024, 8, 20000)
SIZE = sum(t.held_bytes for t in MODEL.tensors)
WORK = Workload({(64, 16): 40})
TB = 1 << 40


def machine(*rates: float, kind: str = "cpu", more: tuple[int | None, ...] | None = None) -> Hardware:
    """A machine whose memory holds a third of the model, with a disk for each read rate."""
    room, further = SIZE // 3 + (60 << 20), (TB,) * (len(rates) - 1) if more is None else more
    capacity = Capacity(room, None if kind == "cpu" else room, TB, kind == "cpu", kind != "cpu", further)
    known = assumed(kind, capacity)
    links = dict(known.links)
    for number, rate in enumerate(rates, 1):
        disk = "disk" if number == 1 else f"disk{number}"
        links |= {f"{disk}_read": ((1.0, rate),), f"{disk}_write": ((1.0, rate),)}
    return replace(known, links=links, checkpoint_read=((1.0, rates[0]),), crosstalk={}, assumed=False)


@cache
def fastest(kind: str, *rates: float) -> Prediction:
    """The best plan for `machine`. Tests share it."""
    return search(MODEL, machine(*rates, kind=kind), WORK).best


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_work_is_divided_by_the_rates(kind: str, ratio: float) -> None:
    """Where disks are the bottleneck, two of them are busy equally long, and a sweep takes about as long as with one
    disk of the sum of their rates. (Two disks need more staging than one.)"""
    rate = 5e7
    one, two, sum_of_both = (rate,), (rate, ratio * rate), (rate * (1 + ratio),)
    found = [fastest(kind, *rates) for rates in (one, two, sum_of_both)]
    lanes, seconds = found[1].lanes["decode"], [p.sweep_seconds["decode"] for p in found]
    assert lanes["disk2_read"] == pytest.approx(lanes["disk_read"], rel=0.15)
    assert seconds[1] <= 1.25 * seconds[2]
    assert seconds[1] <= 1.25 * seconds[0] / (1 + ratio)


def test_no_other_split_of_the_weights_is_better() -> None:
    hardware = machine(1e8, 6e7, 2e8, kind="sim")
    best = search(MODEL, hardware, WORK).best
    cost = Cost(MODEL, hardware, WORK)
    device, host = best.policy.weights[:2]
    tried: list[float] = []
    rest, steps = 1 - device - host, [k / 10 for k in range(11)]
    for a, b in product(steps, steps):
        if a + b <= 1:
            split = (device, host, rest * a, rest * b, max(0.0, rest * (1 - a - b)))
            with suppress(OutOfMemory):
                layout = lay_out(MODEL, replace(best.policy, weights=split), WORK, hardware.capacity)
                tried.append(cost.predict(layout).total_seconds)
    assert len(tried) > 10
    assert best.total_seconds <= 1.01 * min(tried)


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_the_virtual_clock_agrees(kind: str) -> None:
    policy = Policy(10, 4, (0.1, 0, 0.5, 0.4), (0, 0, 0.4, 0.6), (0, 0, 0, 1), slots=3, schedule="zigzag")
    prediction, forecast = both(MODEL, replace(machine(1e9, 5e8, kind=kind), device_bytes=None, host_bytes=None), WORK,
                                policy)  # fmt: skip
    assert forecast.busy["disk2_read"] == pytest.approx(prediction.busy["disk2_read"], rel=0.1)
    assert prediction.seconds == pytest.approx(forecast.seconds, rel=0.25)


def test_a_full_disk_is_not_planned_on() -> None:
    small = machine(5e7, 5e7, more=(SIZE // 10,))
    best = search(MODEL, small, WORK).best
    assert 0 < best.layout.total("disk2") <= SIZE // 10


def test_words() -> None:
    hardware = machine(5e7, 1e8)
    text = report("m", MODEL, hardware, WORK, search(MODEL, hardware, WORK).best)
    assert "disk2 read" in text
    assert "reads from disk" in text
    assert "disk2 " in hardware_text(hardware)
    assert Hardware.from_json(hardware.to_json(), "again") == hardware


def test_routes() -> None:
    routes = Routes.between(("device", "host", "disk", "disk2"), True)
    assert routes.load["disk2"] == ("disk2_read", "h2d_disk2")
    assert routes.store["disk2"] == ("d2h_disk2", "disk2_write")
    assert Routes.between(("device", "host", "disk", "disk2"), False).load["disk2"] == ("disk2_read",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more_disks": (TB, TB)}, r"has no links \['disk3_read', 'disk3_write'\]"),
        ({"more_disks": ()}, r"has links \['disk2_read', 'disk2_write'\]; they must .*in more_disks"),
        ({"more_disks": (0,)}, r"more_disks\[0\] is 0; it must be a positive number"),
        ({"more_disks": (None,) * 8}, "it must be a list of bytes, at most 7 of them"),
        ({"more_disks": "1"}, "it must be a list of bytes"),
        ({"crosstalk": {"disk3_read": {"device": 0.5}}}, "between lanes of disk_read"),
    ],
)
def test_bad_hardware(change: dict[str, object], message: str) -> None:
    values = {**machine(1e9, 1e9).to_json(), **change}
    with pytest.raises(InvalidInput, match=message):
        Hardware.from_json(values, "file")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((0.5, 0.5), "must be three fractions .device, host, disk., and one more for each further offload directory"),
        ((0,) * 11 + (1,), "7 at most"),
        ((0, 0, 0.5, 0.6), "must be at least 0 and sum to 1, not 1.1"),
    ],
)
def test_bad_splits(split: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Policy(weights=split)


def test_splits_that_are_equal_compare_equal() -> None:
    assert Policy(cache=(0, 1, 0, 0, 0)) == Policy(cache=(0, 1, 0))
    assert Policy(weights=(0, 0, 0, 1)).places == ("device", "host", "disk", "disk2")
    assert Policy(cache=(0, 0, 0, 1)).to_json()["cache"] == [0, 0, 0, 1]


def test_thousandths() -> None:
    """The rest goes to the first disk or to the last further disk with a share, never to a disk without one."""
    assert thousandths([0.3334, 0.3334, 0.3332, 0.0]) == (0.333, 0.333, 0.334)
    assert thousandths([0.3334, 0.3334, 0.0, 0.3332]) == (0.333, 0.333, 0.0, 0.334)
    assert thousandths([1.0, 0.0, 0.0, 0.0]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("lane", ["disk_read", "disk2_read"])
def test_embedding_rows_are_priced_on_every_disk(lane: str) -> None:
    """Each row is a read as long as the shortest that was measured."""
    hardware = replace(machine(1e8, 1e8), device_bytes=None)
    table = ((4096.0, 1e8),)
    hardware = replace(hardware, checkpoint_read=table, links={**hardware.links, "disk2_read": table})
    split = (0.5, 0, 0.5) if lane == "disk_read" else (0.5, 0, 0, 0.5)
    layout = lay_out(MODEL, Policy(10, 4, split), WORK, hardware.capacity)
    homes = layout.homes | {MODEL.embedding.name: lane.removesuffix("_read")}
    cost = Cost(MODEL, hardware, WORK)
    more = [cost.predict(replace(layout, homes=h)).busy[lane] for h in (layout.homes | {"embedding": "device"}, homes)]
    row = max(4096, MODEL.embedding.stored_bytes / MODEL.vocabulary)
    tokens = sum((prompt + new - 1) * times for (prompt, new), times in WORK.sizes.items())
    assert more[1] - more[0] == pytest.approx(tokens * row / 1e8, rel=0.05)


def test_what_helps_where_the_second_disk_is_full() -> None:
    hardware = machine(1e8, 1e8, more=(SIZE // 2,))
    policy = Policy(4, 4, (0, 0, 1), (0, 0, 0, 1), prefill_tokens=128)
    prediction = Cost(MODEL, hardware, WORK).predict(lay_out(MODEL, policy, WORK, hardware.capacity))
    full = replace(hardware, more_disks=(int(prediction.layout.total("disk2") * 1.05),))
    assert "disk2 space" in str([change.label for change in changes(MODEL, full, prediction)])
    assert helps(MODEL, full, WORK, prediction, budget=0.0) is not None


def test_the_smallest_policies_use_every_disk() -> None:
    """A job whose cache fits no memory runs on the second disk where the first has no room."""
    hardware = replace(machine(1e8, 1e8), disk_bytes=1, device_bytes=SIZE // 3 + (20 << 20))
    work = Workload({(2000, 30): 40})
    assert search(MODEL, hardware, work).best.layout.total("disk2") > 0


def test_lanes_of_one_link_count_together() -> None:
    assert busiest({"device": 8.0, "h2d": 5.0, "h2d_disk2": 4.0, "disk_read": 7.0}) == "h2d"
    assert busiest({"device": 8.0, "h2d": 5.0, "d2h": 5.0}) == "device"
