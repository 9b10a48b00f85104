"""The planner's text: its numbers are compared with the records and with arithmetic written here."""

import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine import shipped
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.places import TIERS
from flexengine.plan import formatting
from flexengine.plan.candidates import Options
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import NeuronFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.rates import Rates
from flexengine.plan.search import frontier, plan_line, search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.explain import picture, whatif
from flexengine.shell.explain import text as explain
from tests.helpers.explained import CPU, GPU, MIXED, WORK, in_bytes, model, predicted, told, toy_search
from tests.helpers.plans import opt

# Numbers.


def test_sizes_and_times() -> None:
    assert [formatting.size(n) for n in (0, 999, 1000, 15_400_000_000, 999_990_000, 2e12)] == [
        "0 B", "999 B", "1.00 kB", "15.4 GB", "1.00 GB", "2.00 TB"]  # fmt: skip
    assert [formatting.clock(s) for s in (0, 0.0123, 5.5, 59.96, 61, 3885.2, 360000)] == [
        "0.00 s", "0.0123 s", "5.50 s", "0:01:00", "0:01:01", "1:04:45", "100:00:00"]  # fmt: skip
    assert [formatting.percent(x) for x in (0, 0.001, 0.25, 1)] == ["0 %", "<1 %", "25 %", "100 %"]


def test_one_row_reads_well() -> None:
    one = replace(WORK, sizes={(9, 16): 1})
    found = Cost(model(), GPU, one).predict(predicted(Policy(1, 1, (0, 1, 0))).layout)
    text = explain.report("toy", model(), GPU, one, found, [])
    assert "1 sequence of 9 prompt tokens, at most 16 tokens generated\n" in text
    assert re.search(r"1 gpu_batch of 1 sequence, at most [\d,]+ tokens$", text, re.M)
    assert re.search(r"^            the sequence takes [\d.]+ s from entry to end$", text, re.M)
    assert "1 rows" not in text


def test_a_rate_needs_more_than_one_and_a_unit_of_people() -> None:
    assert [formatting.rate(n, seconds, "rows") for n, seconds in ((1, 197.0), (0, 1.0), (5, 0.0))] == ["", "", ""]
    assert formatting.rate(2, 197.0, "rows") == "0.0102 rows/s"
    assert formatting.rate(5, 1000.0, "rows") == "18.0 rows/h"
    assert formatting.rate(60, 2.0, "tok") == "30.0 tok/s"


def test_the_predicted_time_of_a_job_is_no_bound() -> None:
    found = predicted(Policy(1, 1, (0, 1, 0)))
    said = plan_line(Cost(model(), replace(GPU, measured=True), WORK), found)
    assert f"; predicted: about {formatting.clock(found.total_seconds)} if no row ends early, " in said


@pytest.mark.slow
def test_a_given_policy_that_the_planner_chose_has_the_same_explanation() -> None:
    best = toy_search().best
    case = (model(), GPU, WORK)
    plain = whatif.ideas(*case, best, chosen=True, thorough=True)
    assert plain == whatif.ideas(*case, best, chosen=False, thorough=True)
    assert plain
    slow = predicted(Policy(1, 1, (0, 1, 0)))
    told = whatif.ideas(*case, slow, chosen=False, thorough=True)
    ratio = slow.total_seconds / best.total_seconds
    assert told[-1] == whatif.Help("the policy that is chosen without --policy", pytest.approx(ratio))
    assert [h.ratio for h in told[:-1]] == pytest.approx([ratio * h.ratio for h in plain])


def test_bytes_of_every_purpose_add_up() -> None:
    facts, found = model(), predicted(MIXED)
    text = told(MIXED, verbose=True)
    assert len(text.splitlines()) < 60
    booked = re.findall(r"^    (\D+?) +([\d,]+) bytes$", text, re.M)
    assert sum(int(n.replace(",", "")) for _, n in booked) == sum(found.layout.total(tier) for tier in TIERS)
    for tier, limit in zip(TIERS, (120 << 20, 1 << 30, 4 << 30), strict=True):
        line = next(line for line in text.splitlines() if re.match(rf"  {tier} .* of ", line))
        used = found.layout.total(tier)
        shown, bar, share = re.fullmatch(rf"  {tier} +([\d.]+ \w+) of .*\[(.{{40}})\] (<?\d+) %", line).groups()  # type: ignore[union-attr]
        assert in_bytes(shown) == pytest.approx(used, rel=0.01)
        assert abs(bar.count("#") - 40 * used / limit) <= 0.5
        assert share.strip("<") == f"{max(1, round(100 * used / limit))}"
    assert f"weights        {formatting.size(2 * sum(t.elements for t in facts.tensors))}".split() == next(
        line.split()[:3] for line in text.splitlines() if line.startswith("  weights "))  # fmt: skip


def test_placement_shows_where_weights_lie() -> None:
    found, facts = predicted(MIXED), model()
    line = next(line for line in told(MIXED).splitlines() if line.startswith("  weights "))
    bar = re.search(r"\[(.{40})\]", line)[1]  # type: ignore[index]
    for tier, mark in zip(TIERS, "#=.", strict=True):
        streamed = [*(t for layer in facts.layers for t in layer), facts.embedding]
        share = sum(t.elements for t in streamed if found.layout.homes[t.name] == tier) / sum(
            t.elements for t in streamed)  # fmt: skip
        assert abs(bar.count(mark) - 40 * share) <= 1.5
        assert f"{tier} {share:.0%}".replace("%", " %") in line


def test_lanes_and_what_the_job_waits_for() -> None:
    away = Policy(8, 4, (0, 1, 0), prefill_tokens=256)
    roomy = replace(GPU, device_bytes=200 << 20)
    found = predicted(away, roomy)
    text = told(away, roomy)
    rows = {kind: line.split() for kind in ("prefill", "decode") for line in text.splitlines()
            if line.startswith(f"  {kind} ")}  # fmt: skip
    streamed = 2 * sum(t.elements for t in model().tensors)
    for kind, row in rows.items():
        assert float(row[1].replace(",", "")) == pytest.approx(found.counts[kind], rel=0.06)
        assert float(row[2]) == pytest.approx(found.sweep_seconds[kind], rel=0.01)
        assert float(row[3]) == pytest.approx(streamed / 1e9, rel=0.01)  # the only lane besides computing
    assert "decode (" in text
    assert "waits for the link from host to device: busy 100 % of a sweep, carrying weights 100 %" in " ".join(
        text.split()
    )
    assert f"{formatting.digits((9 * 16 + 3 * 8) / found.seconds)} tok/s" in text
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 130 and line == line.rstrip() for line in text.splitlines())


def test_a_link_that_carries_two_things() -> None:
    policy = replace(MIXED, cache=(0, 1, 0), weights=(0, 1, 0))
    cost, found = Cost(model(), GPU, WORK), predicted(policy)
    weights = 2 * sum(t.elements for t in model().tensors) / 1e9 / found.lanes["decode"]["h2d"]
    shares = explain.carried(cost, found, "decode", "h2d")
    assert shares == pytest.approx({"weights": weights, "KV cache": 1 - weights})
    assert 0.05 < 1 - weights < 0.95


def test_one_slot_overlaps_nothing() -> None:
    assert "with one slot every lane waits for the others" in told(replace(MIXED, slots=1))
    assert "1 slot for streamed weights: transfers wait for computing" in told(replace(MIXED, slots=1))


def test_a_machine_without_a_gpu_has_ram_and_no_host() -> None:
    text = told(Policy(4, 2, (0.2, 0, 0.8), prefill_tokens=128), CPU)
    assert "  RAM " in text
    assert not re.search(r"\b(host|device)\b", text)
    account = predicted(Policy(4, 2, (0.2, 0, 0.8), prefill_tokens=128), CPU).layout
    used = account.total("device") + account.total("host")
    assert in_bytes(re.search(r"  RAM +([\d.]+ \w+) of", text)[1]) == pytest.approx(used, rel=0.01)  # type: ignore[index]


def test_help_is_told_with_what_it_is_worth() -> None:
    text = told(MIXED, helps=[whatif.Help("more", 2.0), whatif.Help("other", 1.5, False)])
    assert re.search(r"  more     2.00x\n  other  >=1.50x\n  >= is", text)
    assert "no change makes the job" in told(MIXED, helps=[])
    assert "Would help" not in told(MIXED)


# What if.


def test_twice_the_link_is_twice_as_fast_where_all_wait_for_it() -> None:
    facts = replace(model(layers=32, bytes_=1), kv_heads=1)  # 403 MB; already too narrow to shrink much
    machine = replace(
        GPU, device_bytes=60 << 20, checkpoint_read=1e13, products={"float16": 1e15}, elementwise=1e14,
        prompt_attention=1e15, decode_attention=1e15,
    )  # fmt: skip
    best = search(facts, machine, WORK).best
    assert best.bottleneck == "h2d"
    found = whatif.helps(facts, machine, WORK, best, budget=60)
    assert found[0].label == "link between host and device twice as fast"
    assert found[0].ratio == pytest.approx(2, rel=0.1)
    assert [h.ratio for h in found] == sorted((h.ratio for h in found), reverse=True)
    assert all(h.ratio >= 1.03 and h.searched for h in found)
    assert not any(h.label.startswith(("disk", "4-bit")) for h in found)
    assert any(h.label == "+62.9 MB device memory" for h in found)


@pytest.mark.parametrize("budget", [math.inf, -1.0])
def test_help_counts_no_larger_block_whose_results_come_late(budget: float) -> None:
    """A long job has smaller blocks than the fastest. The changed job has, too, also if it takes under ten minutes."""
    file = shipped.find("hardware", "cpu-2core_24gb")
    roomy, facts = replace(Hardware.load(file), device_bytes=1 << 40), opt(12, 768, 12, 4096)
    work = Workload({(512, 128): 1000})
    best = search(facts, roomy, work).best
    assert 600 < best.total_seconds < 1200
    same = whatif.Change("none", facts, roomy)
    assert whatif._seconds_nearby(same, work, best, Options()) == pytest.approx(best.total_seconds, rel=1e-6)
    found = whatif.helps(facts, roomy, work, best, budget=budget)
    assert [(h.label, h.ratio <= 2) for h in found] == [("CPU twice as fast", True)]


def test_when_time_is_up_the_rest_is_a_lower_bound() -> None:
    best = toy_search().best
    whole = {h.label: h for h in whatif.helps(model(), GPU, WORK, best, budget=1e9)}
    ticks = itertools.count()
    hurried = whatif.helps(model(), GPU, WORK, best, budget=3, now=lambda: float(next(ticks)))
    assert {h.searched for h in hurried} == {True, False}
    assert [h.ratio for h in hurried] == sorted((h.ratio for h in hurried), reverse=True)
    for h in hurried:
        assert h.ratio <= whole[h.label].ratio * 1.0001
        assert h.searched <= (h.ratio == pytest.approx(whole[h.label].ratio))


def test_four_bits_take_9_of_32_of_the_bytes_and_the_same_time() -> None:
    facts = model()
    narrow = whatif.four_bits(facts)
    assert narrow is not None
    for old, new in zip(facts.layers[0], narrow.layers[0], strict=True):
        share = new.elements * new.held / (old.elements * old.held)
        assert share == pytest.approx(0.28125 if old.matrix else 1)
    assert whatif.four_bits(narrow) is None
    before, after = Rates.of(facts, GPU), Rates.of(narrow, whatif.as_fast(GPU, facts, narrow))
    for tokens in (1.0, 64.0, 1024.0):
        assert float(after.stack(tokens)) == pytest.approx(float(before.stack(tokens)), rel=1e-6)
        assert float(after.head(tokens)) == pytest.approx(float(before.head(tokens)), rel=1e-6)


def test_corrections_are_not_applied_twice() -> None:
    """Layers that keep their form have the same seconds, in every order of their weights."""
    facts = model()
    name, table = facts.signature(0), ((1.0, 1e-3), (1000.0, 0.1))
    tables: dict[str, Any] = {"layers": {name: table}, "resident": {name: table}}
    known = replace(GPU, corrected={name: 3.0}, **tables)
    before, after = Rates.of(facts, known), Rates.of(facts, whatif.as_fast(known, facts, facts))
    for resident in (0.0, 0.5, 1.0):
        assert float(after.stack(64.0, resident)) == pytest.approx(float(before.stack(64.0, resident)), rel=1e-6)


def test_no_four_bits_of_records() -> None:
    """Their rates are known in the present format only."""
    best = search(model(), GPU, WORK).best
    block = NeuronFacts(1000, 512, "2 vectors of 128 float16")
    labels = [[change.label for change in whatif.changes(facts, GPU, best)]
              for facts in (model(), replace(model(), blocks=(None, block)))]  # fmt: skip
    assert labels[0] == [*labels[1], "4-bit weights (--weights int4)"]


def test_four_bits_of_a_stage_without_a_head() -> None:
    facts = replace(model(), leaves=True)
    narrow = whatif.four_bits(facts)
    assert narrow is not None
    hardware = whatif.as_fast(GPU, facts, narrow)
    assert hardware.heads == GPU.heads
    assert float(Rates.of(narrow, hardware).stack(64.0)) == pytest.approx(float(Rates.of(facts, GPU).stack(64.0)))


def test_a_device_twice_as_fast_takes_half_the_time() -> None:
    measured = replace(GPU, layers={model().signature(0): 0.01}, heads={model().head_signature: 0.002})
    for machine in (GPU, measured):
        before, after = (Rates.of(model(), m) for m in (machine, whatif.faster_device(machine)))
        for seconds in (lambda r: r.stack(100.0), lambda r: r.head(100.0),
                        lambda r: r.attention[None].decode(500.0, 50.0),
                        lambda r: r.attention[None].prompt(500.0, 50.0)):  # fmt: skip
            assert float(seconds(after)) == pytest.approx(float(seconds(before)) / 2)


# Several policies.


def test_compare_ranks_and_says_why_one_does_not_fit() -> None:
    base = Policy(4, 2, (0, 1, 0), prefill_tokens=128)
    policies = {"host": base, "disk": replace(base, weights=(0, 0, 1)), "alone": replace(base, num_gpu_batches=1)}
    entries: list[tuple[str, Any]] = [(name, predicted(policy)) for name, policy in policies.items()]
    with pytest.raises(OutOfMemory) as caught:
        predicted(Policy(4, 2))
    lines = explain.compare([("resident", caught.value), *entries], GPU).splitlines()
    ranked = [line.split()[1] for line in lines[1:4]]
    assert ranked == [name for name, p in sorted(entries, key=lambda e: e[1].seconds)]
    for line in lines[1:4]:
        cells = line.split()
        assert float(cells[2]) == pytest.approx(dict(entries)[cells[1]].tok_s, rel=0.01)
        assert line.endswith("  " + formatting.lane_name(dict(entries)[cells[1]].bottleneck, False))
    over = caught.value.needed + caught.value.used - caught.value.capacity
    assert lines[4].split()[:2] == ["-", "resident"]
    needs, memory = formatting.size(over), formatting.size(120 << 20)
    assert f"does not fit: needs {needs} more than the {memory} of device memory" in lines[4]


def test_frontier_holds_what_nothing_beats() -> None:
    found = toy_search()
    kept = frontier(found)

    def beaten(p: Prediction) -> bool:
        mine = (p.latency, p.seconds)
        others = [(q.latency, q.seconds) for q in found.tried]
        return any(other != mine and all(x <= y for x, y in zip(other, mine, strict=True)) for other in others)

    unbeaten = {(p.latency, p.seconds) for p in found.tried if not beaten(p)}
    assert [(p.latency, p.seconds) for p in kept] == sorted(unbeaten)
    lines = explain.frontier_text(kept, 1000).splitlines()
    assert len(lines) == len(kept) + 1
    assert [float(line[10:20]) for line in lines[1:]] == [pytest.approx(p.tok_s, rel=0.01) for p in kept]
    few = explain.frontier_text(kept * 30, 10).splitlines()
    assert len(few) <= 13
    assert f"({30 * len(kept) - (len(few) - 2)} more policies between these)" in few[-1]


# The picture.


@pytest.mark.parametrize("curve", [False, True])
def test_plot_draws(tmp_path: Path, curve: bool) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    found = toy_search()
    picture.plot(found.best, GPU, tmp_path / "a.png", frontier=frontier(found) if curve else ())
    image = imread(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert image.shape[1] > (1900 if curve else 1200)
    assert len({tuple(pixel) for row in image[::7] for pixel in row[::7].round(2)}) > 6  # bars of several colours


def test_no_legend_of_the_plot_covers_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Legends lie beside their axes, and on no text."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    for found, curve in ((toy_search().best, frontier(toy_search())), (predicted(MIXED), ())):
        picture.plot(found, GPU, tmp_path / "a.png", frontier=curve)
    for figure in figures:
        figure.draw_without_rendering()
        page = figure.bbox
        for axes in figure.axes:
            legend = axes.get_legend().get_window_extent()
            assert page.x0 <= legend.x0 < legend.x1 <= page.x1
            assert page.y0 <= legend.y0 < legend.y1 <= page.y1
            texts = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
            for artist in (axes.patch, *texts):
                if artist is axes.patch or artist.get_text():
                    assert not legend.overlaps(artist.get_window_extent()), artist


def test_parts_of_a_memory_are_told_and_few() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    account = {"workspace": 30, "KV cache": 20, **{f"buffer {i}": 10 - i for i in range(9)}, "weights": 5, "none": 0}
    axes = Figure().subplots()
    shown = picture.draw_memory(axes, [("device", account, 200), ("host", {"weights": 7}, None)])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["weights", "KV cache", "workspace", "buffer 0", "buffer 1", "buffer 2", "buffer 3", "other"]
    assert list(shown.values())[::2] == [
        "device: weights 5 B, 2.5 %", "device: KV cache 20 B, 10.0 %", "device: workspace 30 B, 15.0 %",
        *(f"device: buffer {i} {10 - i} B, {(10 - i) / 2:.1f} %" for i in range(4)), "device: other 20 B, 10.0 %",
    ]  # fmt: skip
    assert shown["memory-1-0"] == "host: weights 7 B, 100.0 %"


def test_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(MIXED)
    with pytest.raises(InvalidInput, match=r"a\.jpg does not end with \.png"):
        picture.plot(found, GPU, tmp_path / "a.jpg")
    for name in [n for n in sys.modules if n.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=r'pip install "flexengine\[plot\]"'):
        picture.plot(found, GPU, tmp_path / "a.png")
