"""plan.cost against FlexGen's formulas written out, and what model configs must change."""

import random
from dataclasses import replace

import numpy as np
import pytest

from bench.simulate import simulate
from flexengine.places import STAGED, TIERS
from flexengine.plan.cost import Cost
from flexengine.plan.facts import TensorFact
from flexengine.plan.hardware import at
from flexengine.plan.layout import Layout, lay_out
from flexengine.plan.loading import LOAD_BYTES, fault_seconds
from flexengine.plan.problem import phases as phases_of
from flexengine.plan.rates import Attention, Curve, Rates, knows_fused
from flexengine.plan.terms import embedding
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.program import Program
from flexengine.schedule.sweeps import Sequence, Sweeps
from flexengine.schedule.tasks import Op, Task
from tests.helpers.clock import Clock
from tests.helpers.plans import DEVICE, DISK, FLAT, HOST, opt, predicted, random_case

# Formulas.


@pytest.mark.parametrize("share", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_bytes_are_flexgens(share: tuple[float, float]) -> None:
    """Systems 1.2 and 1.5, with pages: what is loaded and stored is whole pages of 16 tokens, but for the tokens that
    decode steps store in RAM, and hidden states pass between layers only. One block of b rows, n tokens, weights, cache
    and hidden states split over host and disk."""
    layers, h, s, n, b, page = 10, 4096, 512, 20, 32, 16
    c, d = share
    split = (0.0, c, d)
    policy = Policy(16, 2, split, split, split, 2, "zigzag")
    model = opt(layers, h, 32, vocabulary=8192)
    told = predicted(model, Workload({(s, n): b}), policy)
    f = told.fractions
    assert [f[f"{k}@{p}"] for k in ("cache", "hidden") for p in ("host", "disk")] == [c, d, c, d]
    assert (f["weights@host"], f["weights@disk"]) == pytest.approx((c, d), abs=0.03)  # whole tensors
    weights = 2 * (layers * (12 * h * h + 10 * h) + 8192 * h)
    kv = 2 * 2 * h * layers * b  # bytes of one token of all rows

    def paged(tokens: int) -> int:
        return -(-tokens // page) * page

    loaded = kv * sum(paged(s + i - 1) for i in range(1, n))
    stored, in_ram = kv * (paged(s) + page * (n - 1)), kv * (paged(s) + n - 1)
    hidden = 2 * h * b * (s + n - 1) * (layers - 1)
    rows = 2 * h * (min(b * s, 8192) + b * (n - 1))  # of the embedding, one for each token but no more than there are
    away = told.layout.homes["embedding"] == "disk"
    disk_read = (n * weights * f["weights@disk"] + rows * away) / 3e9 + (d * loaded + d * hidden) / 2e9
    assert told.busy.get("disk_read", 0.0) == pytest.approx(disk_read)
    assert told.busy.get("disk_write", 0.0) == pytest.approx(d * (stored + hidden) / 1e9)
    assert told.busy["h2d"] == pytest.approx((n * weights + loaded + hidden) / 1e10)
    assert told.busy["d2h"] == pytest.approx((c * in_ram + d * stored + hidden) / 8e9)
    # The same without pages, as the paper has it: 4 (s + n/2) h1 bytes a token and row are read, on average.
    assert loaded == pytest.approx(4 * b * (s + n / 2) * h * layers * (n - 1), rel=0.03)


def test_a_sweep_is_the_longest_lane_with_its_crosstalk() -> None:
    work, policy = Workload({(128, 8): 32}), Policy(16, 2, HOST, HOST, HOST, 2, "zigzag")
    model = opt(6, 2048, 32)
    quiet = predicted(model, work, policy)
    for kind, lanes in quiet.lanes.items():
        assert quiet.sweep_seconds[kind] == pytest.approx(max(lanes.values()))
    talk = {"h2d": {"device": 0.5, "d2h": 0.25}, "device": {"h2d": 1.5}}
    slowed = predicted(model, work, policy, replace(FLAT, crosstalk=talk))
    for kind, lanes in quiet.lanes.items():
        h2d, d2h, device = lanes["h2d"], lanes["d2h"], lanes["device"]
        sent, computed = h2d + 0.5 * device + 0.25 * d2h, device + 1.5 * h2d
        # A lane alone after all others is as quick as ever, so h2d cannot end later than its own work after device.
        ends = min(sent, h2d + max(computed, d2h)), min(computed, device + max(sent, d2h)), d2h
        assert slowed.sweep_seconds[kind] == pytest.approx(max(ends))
    alone = predicted(model, work, replace(policy, slots=1))
    assert alone.seconds == pytest.approx(sum(quiet.busy.values()))


def test_without_overlap_lanes_add_up_whatever_the_slots() -> None:
    """As they do with one slot; then reading what stays is beside nothing, either."""
    model, work = opt(6, 2048, 32), Workload({(128, 8): 32})
    for weights in (HOST, DISK, (0.5, 0.5, 0)):
        layout = lay_out(model, Policy(16, 2, weights, HOST, HOST, 2, "zigzag"), work, FLAT.capacity)
        told = Cost(model, FLAT, work, overlap=False).predict(layout)
        beside = Cost(model, FLAT, work).predict(layout)
        assert told.seconds == pytest.approx(sum(beside.busy.values()))
        assert told.seconds > beside.seconds
        stays = sum(t.stored_bytes for t in model.tensors if layout.homes[t.name] != "disk")
        assert told.load_seconds == pytest.approx(stays / 3e9)


def test_streaming_of_the_model_itself_replaces_crosstalk() -> None:
    """Seconds a disk read adds to the device and the other way round; one slot wakes the device for every layer."""
    model, work, policy = opt(4, 256, 4), Workload({(64, 9): 8}), Policy(8, 1, weights=(0.5, 0, 0.5))
    own = {model.signature(0): {"device": 0.5, "disk_read": 0.25, "wake": 0.125}}
    hardware = replace(FLAT, streaming=own, crosstalk={"device": {"disk_read": 0.1, "h2d": 0.2}})
    cost = Cost(model, hardware, work)
    links = ("disk_read", "disk_write", "h2d", "d2h")  # of a machine that computes and moves with one processor
    assert cost.crosstalk == {"device": dict.fromkeys(links, 0.5), **{lane: {"device": 0.25} for lane in links}}
    gpu = Cost(model, replace(hardware, kind="cuda"), work).crosstalk
    assert gpu == {"device": {"disk_read": 0.5, "h2d": 0.2}, "disk_read": {"device": 0.25}}
    assert Cost(opt(4, 512, 8), hardware, work).crosstalk == hardware.crosstalk
    one, flat = replace(policy, slots=1), Cost(model, FLAT, work)
    woken = cost.predict(lay_out(model, one, work, hardware.capacity))
    away = 1 - woken.fractions["weights@device"]
    plain = flat.predict(lay_out(model, one, work, hardware.capacity))
    assert 0.3 < away < 0.95
    assert woken.seconds - plain.seconds == pytest.approx(0.125 * 4 * away * 9)
    slow = replace(hardware, streaming={model.signature(0): own[model.signature(0)] | {"read": 1.5}})
    read = [
        Cost(model, x, work).predict(lay_out(model, one, work, x.capacity)).busy["disk_read"] for x in (hardware, slow)
    ]
    assert read[1] == pytest.approx(1.5 * read[0], rel=1e-3)  # rows of the embedding are read as before


def test_ram_is_paid_for_when_it_is_first_written_to() -> None:
    """The KV cache as it fills, all else in the first sweep, by the processor that computes; not on a GPU, whose memory
    is there at once."""
    model, work = opt(4, 256, 4), Workload({(64, 9): 8})
    policy = Policy(8, 1, weights=(0.5, 0.5, 0), cache=(0.5, 0.5, 0))
    layout = lay_out(model, policy, work, FLAT.capacity)
    before, after = (Cost(model, h, work).predict(layout) for h in (FLAT, replace(FLAT, touch=1e6)))
    cache = sum(layout.account[tier]["KV cache"] for tier in ("device", "host"))
    rest = sum(sum(layout.account[tier].values()) for tier in ("device", "host")) - cache
    assert after.seconds - before.seconds == pytest.approx(cache / 1e6)
    busy = Cost(model, replace(FLAT, touch=1e6, touch_busy=0.5e6), work).predict(layout)
    assert busy.seconds - before.seconds == pytest.approx(cache / 0.5e6)
    assert busy.load_seconds == after.load_seconds
    waits = before.sweep_seconds["prefill"] - before.lanes["prefill"]["device"]  # of the device, for other lanes
    assert after.load_seconds == pytest.approx(rest / 1e6 - waits)
    assert after.load_seconds > before.load_seconds
    soon = Cost(model, replace(FLAT, touch=1e15), work).predict(layout).load_seconds
    assert soon == pytest.approx(before.load_seconds, abs=1e-6)
    gpu = Cost(model, replace(FLAT, kind="cuda", touch=1e6, touch_busy=1.0), work).predict(layout)
    assert gpu.seconds - before.seconds == pytest.approx(layout.account["host"]["KV cache"] / 1e6)


@pytest.mark.parametrize(("before", "nbytes", "busy", "seconds"), [
    (0, 60, False, 60 / 10), (0, 160, False, 100 / 10 + 60 / 2), (70, 60, False, 30 / 10 + 30 / 2),
    (170, 60, False, 60 / 2), (0, 160, True, 100 / 5 + 60 / 1), (0, 0, False, 0),
])  # fmt: skip
def test_ram_that_was_freed_lately_comes_first(before: float, nbytes: float, busy: bool, seconds: float) -> None:
    hardware = replace(FLAT, touch=2.0, touch_busy=1.0, freed=100.0, touch_freed=10.0, touch_freed_busy=5.0)
    assert fault_seconds(hardware, before, nbytes, busy) == pytest.approx(seconds)
    assert fault_seconds(FLAT, before, nbytes, busy) == 0


def test_a_resident_job_is_the_sum_of_its_layers() -> None:
    """A layer and a head that take so many seconds a token, whatever their number; nothing else costs anything."""
    model = opt(7, 2048, 32)
    hardware = replace(
        FLAT, layers={model.signature(0): ((1, 1e-4), (1000, 0.1))},
        heads={model.head_signature: ((1, 2e-4), (10, 2e-3))}, prompt_attention=((1, 1e30),),
        decode_attention=((1, 1e30),), sweep_seconds=0.01, sequence_seconds=1e-3, task_seconds=1e-5,
    )  # fmt: skip
    rows, s, n = 60, 100, 12
    told = predicted(model, Workload({(s, n): rows}), Policy(10, 2, schedule="zigzag", prefill_tokens=500), hardware)
    assert set(told.busy) == {"device"}
    layers, heads = 7 * 1e-4 * rows * (s + n - 1), 2e-4 * rows * n
    sweeps = 3 * n
    bookkeeping = 0.01 * sweeps + 1e-3 * rows * n
    cells = 3 * (20 * s // 500 + 2 * (n - 1)) * 8 * 1e-5
    assert told.seconds == pytest.approx(layers + heads + bookkeeping + cells, rel=1e-6)
    assert told.tokens == rows * n
    assert told.tok_s == pytest.approx(rows * n / told.seconds)
    assert sum(told.counts.values()) == pytest.approx(sweeps)


@pytest.mark.parametrize("away", ["weights", "cache", "activations", None])
def test_layers_of_one_call_are_faster_where_all_is_on_the_device(away: str | None) -> None:
    """By `Hardware.fused`, for each layer of each gpu_batch that decodes: as `JoinedLayers` joins them."""
    model, work = opt(7, 2048, 32), Workload({(100, 12): 40})
    name, places = model.signature(0), {} if away is None else {away: (0.0, 1.0, 0.0)}
    policy = Policy(10, 2, schedule="zigzag", prefill_tokens=500, **places)  # type: ignore[arg-type]
    known = replace(FLAT, layers={name: ((1, 1e-3), (1000, 1.0))})
    apart, fused = (
        Cost(model, replace(known, fused=table), work).predict(lay_out(model, policy, work, FLAT.capacity))
        for table in ({}, {model.fused_signature(name): ((1.0, 5e-4), (20.0, 1e-2))})
    )
    saved = 7 * 2 * 2 * 11 * 10 * 5e-4 if away is None else 0.0
    assert apart.busy["device"] - fused.busy["device"] == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("resident", [0.0, 0.25, 1.0])
def test_layers_are_priced_in_the_order_that_their_weights_have(resident: float) -> None:
    """By `Hardware.resident`, here half of the seconds, for the share of the weights that stay on the device."""
    model, work = opt(8, 2048, 32), Workload({(100, 12): 40})
    policy = Policy(10, 2, weights=(resident, 0.0, 1 - resident), prefill_tokens=500)
    name, layout = model.signature(0), lay_out(model, policy, work, FLAT.capacity)
    known = replace(FLAT, layers={name: ((1, 1e-3), (1000, 1.0))})
    plain, free, kept = (
        Cost(model, replace(known, **tables), work).predict(layout).busy["device"]
        for tables in ({}, {"layers": {name: ((1, 1e-12),)}}, {"resident": {name: ((1, 5e-4), (1000, 0.5))}})
    )
    assert kept == pytest.approx(plain - resident * (plain - free) / 2, rel=1e-6)
    corrected = replace(known, corrected={name: 3.0}, resident={name: ((1, 1e-3), (1000, 1.0))})
    tables = [Rates.of(model, hardware).stack(7, resident=1.0) for hardware in (known, corrected)]
    assert tables[1] == pytest.approx(3 * tables[0])


def test_layers_of_one_call_are_priced_with_the_cache_that_was_measured() -> None:
    """Not with other formats, which are then not known, and never with one whose attention is computed apart."""
    model = opt(7, 2048, 32)
    name, table = model.signature(0), ((1.0, 5e-4), (20.0, 1e-2))
    coded = replace(model, kv_form="int8", kv_kept=99)
    apart = [replace(model, kv_form="int4", centred=True), replace(model, topk=0.1)]
    known = replace(FLAT, fused={name: table, **{m.fused_signature(name): table for m in (model, *apart)}})
    assert {m.signature(0) for m in (coded, *apart)} == {name}
    assert [bool(Rates.of(m, known).joined) for m in (model, coded, *apart)] == [True, False, False, False]
    assert [knows_fused(known, m) for m in (model, coded, *apart)] == [True, False, True, True]
    assert knows_fused(FLAT, model)  # modules compute these layers, or memory was short
    assert not knows_fused(replace(FLAT, fused={name: table}), model)  # stored without a format


@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0, 5.0])
@pytest.mark.parametrize("tokens", [0.1, 1, 40, 64, 65, 300, 5000])
def test_a_layer_in_one_call_is_corrected_like_others(factor: float, tokens: float) -> None:
    """However little of its time is that of the layer alone."""
    model = opt(7, 2048, 32)
    name, shape = model.signature(0), model.attention_signature(None)

    def rates(by: float) -> Rates:
        layers, fused = {name: tuple((x, by * y) for x, y in alone)}, {model.fused_signature(name): together}
        known = replace(FLAT, layers=layers, fused=fused, attention={shape: {"call": ((1, 4e-4),)}})
        return Rates.of(model, replace(known, corrected={name: by}))

    alone, together = ((1, 3e-4), (64, 4e-4), (512, 2e-3)), ((1, 2e-4), (64, 3e-4))
    assert float(rates(factor).fused(tokens)) == pytest.approx(factor * float(rates(1.0).fused(tokens)))
    assert float(rates(factor).fused(tokens)) > 0


def test_seconds_lie_on_straight_lines() -> None:
    """Between points, and on those through 0 and the first or the last one beyond them."""
    curve = Curve(((4.0, 2.0), (8.0, 3.0), (16.0, 9.0)))
    assert [curve.one(n) for n in (0, 2, 4, 6, 8, 12, 16, 32)] == [0, 1, 2, 2.5, 3, 6, 9, 18]
    assert curve(np.array([[2.0], [12.0]])).tolist() == [[1.0], [6.0]]


def test_phases_add_up_to_the_prediction() -> None:
    """What the linear program is told, at the fractions that came out, is what is predicted: but for the grouping."""
    rng = random.Random(4)
    for _ in range(20):
        model, hardware, work, policy = random_case(rng, 2)
        cost = Cost(model, hardware, work)
        layout = lay_out(model, policy, work, hardware.capacity)
        told = cost.predict(layout)
        sweeps = cost.sweeps(policy, share=1.0 - told.fractions["cache@device"])
        phases = phases_of(cost, policy, sweeps, {"device": 1.0})
        for lane, busy in told.busy.items():
            if lane == "disk_read":  # the program is not told of embedding rows that come from the disk
                rows = sum(term.seconds for term in embedding(model, hardware, sweeps, layout))
                busy -= float((sweeps.times * rows).sum())
            if lane != "device" or 1.0 in (told.fractions[f"cache@{tier}"] for tier in TIERS):
                work_done = sum(p.times * p.lanes[lane].value(told.fractions) for p in phases)
                if lane == "disk_read":  # the program is told of what is read to stay, too
                    resident = (1 - told.fractions["weights@disk"]) * cost.streamed_bytes
                    busy += resident / at(hardware.checkpoint_read, LOAD_BYTES)
                assert work_done == pytest.approx(busy, rel=0.03), (lane, policy)


def test_reading_what_stays_takes_place_while_the_first_sweep_computes() -> None:
    """So what it adds is what it takes longer than that sweep; with mutual slowing, more; alone, all of it."""
    model, work = opt(6, 2048, 32), Workload({(128, 8): 32})
    layout = lay_out(model, Policy(16, 2), work, FLAT.capacity)
    stays = sum(t.stored_bytes for t in model.tensors)
    alone = stays / 3e9
    first = Cost(model, FLAT, work).predict(layout).sweep_seconds["prefill"]
    for factor in (0.5, 4.0):  # of the rate with which it would take as long as the sweep
        hardware = replace(FLAT, checkpoint_read=((1.0, factor * stays / first),))
        added = Cost(model, hardware, work).predict(layout).load_seconds
        assert added == pytest.approx(max(0.0, first / factor - first), abs=1e-9)
        talk = {"device": {"disk_read": 0.25}, "disk_read": {"device": 0.5}}
        slowed = Cost(model, replace(hardware, crosstalk=talk), work).predict(layout).load_seconds
        assert slowed == pytest.approx(max(0.25 / factor * first, first / factor + 0.5 * first - first))
    assert Cost(model, FLAT, work, overlap=False).predict(layout).load_seconds == pytest.approx(alone)


@pytest.mark.parametrize("away", [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4)])
def test_with_one_slot_too_what_stays_is_read_while_the_first_sweep_computes(away: tuple[float, float]) -> None:
    """Against the program's own tasks on the virtual clock. away: shares of the weights in host RAM and on disk."""
    model, work = opt(12, 2048, 32, 8000), Workload({(256, 200): 96})
    policy = Policy(16, 2, (1 - sum(away), *away), slots=1)
    layout = lay_out(model, policy, work, FLAT.capacity)
    stays = layout.stored_bytes["device"] + layout.stored_bytes["host"]
    sweep = first_sweep(Cost(model, FLAT, work), layout)
    # Short reads that stand behind streamed layers are hidden in part; they are priced as if they were not.
    for factor in (2.0, 5.0) if away[1] else (0.5, 2.0, 5.0):
        cost = Cost(model, replace(FLAT, checkpoint_read=((1.0, stays / (factor * sweep)),)), work)
        one = first_sweep(cost, layout)
        longer = first_sweep(cost, layout, reads_resident=True) - one
        assert cost.predict(layout).load_seconds == pytest.approx(longer, abs=0.15 * min(1.0, factor) * one)


@pytest.mark.parametrize("schedule", ["zigzag", "row", "diagonal", "continuous"])
@pytest.mark.parametrize("outputs", [200, 300, 1024])
def test_the_first_sweep_hides_as_much_reading_whatever_comes_after(outputs: int, schedule: str) -> None:
    """Against the program's own tasks on the virtual clock; and the linear program is told the same."""
    model, work, policy = opt(12, 2048, 32, 8000), Workload({(256, outputs): 96}), Policy(16, 2, schedule=schedule)
    layout = lay_out(model, policy, work, FLAT.capacity)
    stays, one = sum(t.stored_bytes for t in model.tensors), first_sweep(Cost(model, FLAT, work), layout)
    for factor in (0.5, 2.0, 5.0):  # times as long as that sweep, to read
        hardware = replace(FLAT, checkpoint_read=((1.0, stays / (factor * one)),))
        cost = Cost(model, hardware, work)
        told, phases = cost.predict(layout), phases_of(cost, policy, cost.sweeps(policy), {"device": 1.0})
        longer = first_sweep(cost, layout, reads_resident=True) - one
        # Reading comes a layer ahead, and nothing computes while the first is read.
        assert told.load_seconds == pytest.approx(longer, abs=0.15 * min(1.0, factor) * one)
        everything = {"weights@device": 1.0, "cache@device": 1.0, "hidden@device": 1.0}
        objective = sum(p.times * max(x.value(everything) for x in p.lanes.values()) for p in phases)
        assert objective == pytest.approx(told.total_seconds, rel=1e-6)


def first_sweep(cost: Cost, layout: Layout, reads_resident: bool = False) -> float:
    """Seconds of its tasks; reads_resident: whether resident weights are read in the sweep."""
    clock, layers, walk = Clock.of(cost, layout), len(cost.model.layers), Sweeps(layout.policy, layout.pools)
    for i, ((prompt, outputs), times) in enumerate(cost.workload.sizes.items()):
        for j in range(times):
            walk.add(Sequence(1000 * i + j, prompt, outputs))
    batches = walk.begin(lambda sequence, pages: None)
    read = [sum(t.stored_bytes for t in layer if layout.homes[t.name] != "disk") for layer in cost.model.layers]
    read[0] += layout.stored_bytes["device"] + layout.stored_bytes["host"] - sum(read)
    routes = Program([tuple(unit) for unit in clock.units], layers, layout.policy.slots, STAGED,
                     range(layers) if reads_resident else (), clock.demand)  # fmt: skip
    price = clock.seconds(batches)

    def seconds(task: Task) -> float:
        loads = task.op is Op.LOAD_RESIDENT
        return read[task.cell.layer] / cost.hardware.checkpoint_read[0][1] if loads else price(task)

    return simulate(routes.sweep(0, batches, False), seconds).seconds


# What models differ in.


def test_grouped_query_attention() -> None:
    work, policy = Workload({(256, 8): 32}), Policy(16, 2, DEVICE, HOST, schedule="zigzag")
    model = opt(6, 4096, 32)
    few = replace(model, kv_heads=8)
    many, grouped = predicted(model, work, policy), predicted(few, work, policy)
    # Pages hold at least 256 KiB, so fewer heads are longer pages, of which the last is not full.
    assert grouped.busy["h2d"] == pytest.approx(many.busy["h2d"] / 4, rel=0.25)
    attend = Attention(model, FLAT).decode(1000, 100), Attention(few, FLAT).decode(1000, 100)
    assert attend[0] == pytest.approx(4 * attend[1])
    prompts = Attention(model, FLAT).prompt(1000, 100), Attention(few, FLAT).prompt(1000, 100)
    assert prompts[0] == pytest.approx(prompts[1])  # as many query heads


def test_gated_ffn() -> None:
    """A third matrix of h * 4h: 16 h^2 in place of 12 h^2, in bytes and in products."""
    h = 4096
    model = opt(6, h, 32, vocabulary=512)
    gated = replace(model, layers=tuple((*layer, TensorFact(f"{j}.gate", 4 * h * h, 2, 2))
                                        for j, layer in enumerate(model.layers)))  # fmt: skip
    work, policy = Workload({(256, 8): 32}), Policy(16, 2, HOST, schedule="zigzag")
    plain, more = predicted(model, work, policy), predicted(gated, work, policy)
    assert more.busy["h2d"] / plain.busy["h2d"] == pytest.approx(16 / 12, rel=0.01)
    hardware = replace(FLAT, elementwise=1e30)
    ratio = Rates.of(gated, hardware).stack(64) / Rates.of(model, hardware).stack(64)
    assert ratio == pytest.approx(16 / 12)
    assert gated.signature(0) != model.signature(0)


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (64, 6), (128, 8)])
def test_experts(experts: int, active: int) -> None:
    """A kernel that takes as long for one row as for many: a layer takes as long as experts are touched, which a
    drawing of `active` different experts for each token says."""
    elements = experts * 3 * 256 * 512
    bank = (TensorFact("experts", elements, 2, 2, experts=experts),)
    model = replace(opt(1, 512, 8), layers=(bank,), active=active)
    hardware = replace(FLAT, products={"float16": [(1, 1e9), (1e6, 1e15)]}, elementwise=1e30)
    one = 2 * elements / experts / 1e9
    rng = np.random.default_rng(0)
    for tokens in (1, 4, 16, 64, 256):
        draws = [len({e for _ in range(tokens) for e in rng.choice(experts, active, replace=False)}) for _ in range(60)]
        seconds = float(Rates.of(model, hardware).stack(tokens))
        assert seconds == pytest.approx(np.mean(draws) * one, rel=0.03), tokens
    # A rate that does not depend on rows: then it is the work of the active ones alone.
    flat = Rates.of(model, replace(FLAT, elementwise=1e30, products={"float16": 1e12}))
    assert float(flat.stack(50)) == pytest.approx(2 * 50 * active * elements / experts / 1e12, rel=1e-6)


def test_windows() -> None:
    """Layers that see 64 tokens attend to so many; the others to all."""
    model = opt(6, 2048, 32)
    work, policy = Workload({(256, 9): 32}), Policy(16, 2, schedule="zigzag")
    hardware = replace(FLAT, decode_attention=1e6, prompt_attention=1e9)
    seconds = {}
    for name, windows in (("none", ()), ("all", (64,) * 6), ("half", (64, None) * 3), ("wide", (1000,) * 6)):
        seconds[name] = predicted(replace(model, windows=windows), work, policy, hardware).seconds
    assert seconds["wide"] == pytest.approx(seconds["none"])
    assert seconds["half"] == pytest.approx((seconds["none"] + seconds["all"]) / 2)
    decode = sum(256 + i - 64 for i in range(1, 9)) * 32 * 2 * 2 * 2048 / 1e6
    prefill = 32 * 4 * 2048 * sum(q - 64 for q in range(65, 257)) / 1e9
    assert seconds["none"] - seconds["all"] == pytest.approx(6 * (decode + prefill))


def test_vocabulary_and_tied_embeddings() -> None:
    model = opt(6, 2048, 32, vocabulary=50000)
    large, untied = opt(6, 2048, 32, vocabulary=250000), replace(model, head=replace(model.embedding, name="head"))
    work, policy = Workload({(64, 8): 32}), Policy(16, 2, HOST, schedule="zigzag")
    told = {"tied": predicted(model, work, policy), "large": predicted(large, work, policy),
            "untied": predicted(untied, work, policy)}  # fmt: skip
    # The head is streamed once a sweep; an embedding of its own is gathered from, and never streamed.
    more = 8 * 2 * 200000 * 2048 / 1e10
    assert told["large"].busy["h2d"] - told["tied"].busy["h2d"] == pytest.approx(more)
    assert told["untied"].busy["h2d"] == pytest.approx(told["tied"].busy["h2d"])
    assert told["untied"].load_seconds - told["tied"].load_seconds == pytest.approx(2 * 50000 * 2048 / 3e9)
    logits = 32 * 8 * 200000 * 2 * 2048 / FLAT.products["float16"][0][1] + 32 * 8 * 12 * 200000 / FLAT.elementwise
    assert told["large"].busy["device"] - told["tied"].busy["device"] == pytest.approx(logits, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ({(16, 16): 64}, 8),
        ({(16, 16): 8, (20, 12): 8}, 8),
        ({(16, 16): 32, (20, 12): 32}, 1),
        ({(900, 16): 8, (920, 12): 8}, 1),  # several pages each
    ],
)
def test_pages_that_sequences_take_together_are_one_transfer_of_a_disk(
    sizes: dict[tuple[int, int], int], together: int
) -> None:
    """Sequences of one size, or a job in one block, take pages side by side; others take the pages that are free."""
    model, work, policy = opt(4, 256, 4, vocabulary=512), Workload(sizes), Policy(8, 2, cache=DISK)
    page = Cost(model, FLAT, work).pages[0].away.page_tokens * model.kv_token
    for lane in ("disk_read", "disk_write"):
        one = predicted(model, work, policy, replace(FLAT, links={**FLAT.links, lane: ((1.0, 1.0),)}))
        by_size = replace(FLAT, links={**FLAT.links, lane: ((1.0, 1.0), (1e9, 1e9))})  # a transfer takes a second
        assert one.busy[lane] / predicted(model, work, policy, by_size).busy[lane] == pytest.approx(together * page)
