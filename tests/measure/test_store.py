"""Measurements that are kept: files, fingerprints, corrections."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy
from flexengine.engine.options import MachineOptions
from flexengine.engine.rates import this_machine
from flexengine.measure import machine as machine_rates
from flexengine.measure import store, timing
from flexengine.plan.hardware import Hardware
from flexengine.plan.rates import Rates
from flexengine.tier.machine import Machine
from tests.helpers.listening import listening
from tests.helpers.measuring import MB, SLOW, hardware


def test_kept() -> None:
    one = hardware(layers={"a": ((1.0, 0.5),)}, crosstalk={"h2d": {"device": 0.25}})
    assert store.cached("0" * 32) is None
    store.save_rates("0" * 32, one)
    assert store.cached("0" * 32) == one
    file = store._file("0" * 32)
    assert file.stat().st_mode & 0o777 == 0o600
    store.save_rates("0" * 32, hardware())
    assert store.cached("0" * 32) == hardware()
    assert [path.name for path in file.parent.glob("0" * 32 + "*")] == [file.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"name": 1, "kind": "cpu"}', "[" * 100_000])
def test_a_broken_file_is_as_none(text: str) -> None:
    store.save_rates("1" * 32, hardware())
    store._file("1" * 32).write_text(text)
    assert store.cached("1" * 32) is None
    values = hardware().to_json()
    for name in values:
        for wrong in ("x", [[]], {"a": 1}, -1, None):
            store._file("1" * 32).write_text(json.dumps({**values, name: wrong}))
            store.cached("1" * 32)  # whatever it says, it does not fail


def test_products_measured_later_end_corrections_of_what_is_computed_from_them() -> None:
    """Corrections of links, of other models and of layers that were timed remain."""
    facts = SimpleNamespace(signature="abc".__getitem__, layers=range(3), head_signature="head", output=None)
    known = hardware(layers={"b": ((1.0, 0.5),)}, corrected=dict.fromkeys(("a", "b", "head", "other", "h2d"), 2.0))
    tables = {"int8": ((1.0, 9.0),)}
    found = store.joined(known, {"products": tables}, facts)  # type: ignore[arg-type]
    assert found.products == {**known.products, **tables}
    assert found.corrected == {"b": 2.0, "other": 2.0, "h2d": 2.0}


def test_a_file_of_a_cpu_keeps_what_other_jobs_stored(
    at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs on a CPU with other disks, or in another process, store other models' rates; the file is one."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    table, moment = ((1.0, 0.5),), ((1.0, 0.75),)
    first = hardware(layers={"a": table, "b": moment}, heads={"h": table}, quick=("b",), elementwise=7.0,
                     corrected={"a": 2.0, "b": 3.0})  # fmt: skip
    second = hardware(layers={"a": moment, "b": table, "c": moment}, attention={"x": {"decode": moment}},
                      quick=("a", "c", "x"), corrected={"a": 4.0, "c": 5.0}, measured=False)  # fmt: skip
    for rates in (first, second):
        assert store.keep(at("cpu"), torch.float32, [], rates)
    found = store.computing_rates(at("sim"), torch.float32)
    assert found is not None
    assert found.layers == {"a": table, "b": table, "c": moment}
    assert found.heads == {"h": table}
    assert found.attention == {"x": {"decode": moment}}
    assert found.quick == ("c", "x")
    assert found.corrected == {"a": 2.0, "c": 5.0}
    assert (found.elementwise, found.measured) == (7.0, True)
    assert store.computing_rates(at("cpu"), torch.float32) is None


def test_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file"))
    assert f"{tmp_path / 'file' / 'hardware'}" in store.save_rates("2" * 32, hardware())
    assert store.cached("2" * 32) is None


def test_fingerprint(at: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the same machine, and another for each thing that matters."""
    machine = at("sim", 50 * MB, SLOW)
    first = store.fingerprint(machine)
    assert store.fingerprint(at("sim", 40 * MB, SLOW)) == first
    others = [store.fingerprint(at("sim", 50 * MB, replace(SLOW, **{lane: 7 * MB})))
              for lane in ("h2d", "d2h", "disk_read", "disk_write")]  # fmt: skip
    others += [store.fingerprint(at("sim")), store.fingerprint(at("cpu"))]
    changes: list[tuple[Any, str, Any]] = [
        (store, "__version__", "9"), (torch, "__version__", "9"), (store, "version", lambda _: "9"),
        (store, "cpu_type", lambda: "model name : another"), (store, "numerics", lambda _: "mkl"),
        (store.os, "sched_getaffinity", lambda _: set(range(99))), (torch, "get_num_threads", lambda: 99),
        (store, "device_of", lambda _: 99), (store, "machine_name", lambda _: "a GPU"),
    ]  # fmt: skip
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            others.append(store.fingerprint(machine))
    assert len({first, *others}) == 1 + len(others)
    keys = {store.key_of(machine, dtype, ()) for dtype in (torch.float32, torch.bfloat16)}
    assert len({first, *keys}) == 3
    assert store.fingerprint(machine) == first


def test_records_are_corrected_instead_of_layers(families: Any, tmp_path: Path) -> None:
    with Engine(families("opt").directory, device="cpu", offload_dir=tmp_path, lossy=Lossy(flash="oracle")) as engine:
        facts = engine.facts
    assert facts.blocks[0] is not None
    own, layer = facts.blocks[0].signature, facts.signature(0)
    rates = {"read": ((4.0, 6.0), (32.0, 12.0)), "some": ((1.0, 9.0),)}
    one = hardware(layers={layer: ((1.0, 0.5),)}, blocks={own: rates, "others": rates})
    two = store.corrected(one, {"device": 1.5}, facts)
    assert two.blocks == {own: {"read": ((4.0, 4.0), (32.0, 8.0)), "some": ((1.0, 6.0),)}, "others": rates}
    assert (two.layers, two.corrected) == (one.layers, {own: 1.5})
    assert store.corrected(two, {"device": 1.5}, facts, planned=one) == two
    anew = replace(two, blocks={own: {**rates, "some": ((1.0, 7.0),)}}, corrected={})
    assert store.corrected(anew, {"device": 2.0}, facts, planned=two) == anew


def test_a_job_corrects_a_model_whose_layers_were_not_timed(families: Any, tmp_path: Path) -> None:
    """The next plan computes its seconds from rates of products, times the factor that the job showed."""
    with Engine(families("llama").directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine:
        facts = engine.facts
    one = hardware()
    two = store.corrected(one, {"device": 0.4}, facts)
    assert two.corrected == {facts.signature(0): 0.4, facts.head_signature: 0.4}
    for tokens in (1.0, 30.0, 512.0):
        first, second = (Rates.of(facts, known) for known in (one, two))
        assert second.one_layer(0, tokens) == pytest.approx(0.4 * first.one_layer(0, tokens))
        assert second.head(tokens) == pytest.approx(0.4 * first.head(tokens))
    assert store.corrected(two, {"device": 2.0}, facts, planned=one).corrected[facts.signature(0)] == 2.0
    timed = store.joined(two, {"layers": {facts.signature(0): ((1.0, 0.5),)}, "heads": {}, "blocks": {}}, facts)
    assert timed.corrected == {facts.head_signature: 0.4}  # what was measured since needs no factor
    assert Rates.of(facts, timed).one_layer(0, 1.0) == pytest.approx(0.5)


def test_corrected(families: Any, tmp_path: Path) -> None:
    with Engine(families("llama").directory, policy=Policy(), device="cpu", offload_dir=tmp_path) as engine:
        facts = engine.facts
    own, head = facts.signature(0), facts.head_signature
    one = hardware(layers={own: ((1.0, 0.5),), "other": ((1.0, 0.5),)}, heads={head: ((1.0, 0.25),)})
    two = store.corrected(one, {"disk_read": 2.0, "device": 3.0, "d2h": 4.0}, facts)
    assert two.links == {**one.links, "disk_read": ((1.0, 1.0), (8.0, 2.0))}
    assert two.checkpoint_read == ((1.0, 1.0), (8.0, 2.0))
    assert two.layers == {own: ((1.0, 1.5),), "other": ((1.0, 0.5),)}
    assert two.heads == {head: ((1.0, 0.75),)}
    assert two.corrected == {"disk_read": 2.0, own: 3.0, head: 3.0}
    same = {"links": one.links, "checkpoint_read": one.checkpoint_read, "layers": one.layers, "heads": one.heads}
    assert replace(two, corrected={}, **same) == one
    assert Hardware.from_json(json.loads(json.dumps(two.to_json())), "") == two
    assert store.corrected(one, {"h2d": 100.0}, facts).links["h2d"] == ((1.0, 0.4), (8.0, 0.8))
    assert store.corrected(one, {"h2d": 0.01}, facts).links["h2d"] == ((1.0, 10.0), (8.0, 20.0))
    assert store.corrected(one, {}, facts) == one
    # Two jobs at the same time, which both find the same, have found it once; the later one's is what holds.
    assert store.corrected(two, {"disk_read": 2.0, "device": 3.0}, facts, planned=one) == two
    later = store.corrected(two, {"disk_read": 4.0}, facts, planned=one)
    assert later.checkpoint_read == ((1.0, 0.5), (8.0, 1.0))
    # What has been measured anew since the job was planned stays, for the job says nothing of it.
    anew = replace(two, links={**two.links, "disk_read": ((1.0, 5.0), (8.0, 5.0))},
                   layers={**two.layers, own: ((1.0, 0.9),)}, corrected={head: 3.0})  # fmt: skip
    found = store.corrected(anew, {"disk_read": 1.3, "device": 2.0}, facts, planned=two)
    assert (found.links["disk_read"], found.layers[own]) == (anew.links["disk_read"], anew.layers[own])
    assert found.heads[head] == ((1.0, 1.25),)
    assert found.corrected == {head: 5.0}
    back = store.corrected(two, {"disk_read": 0.5, "device": 1 / 3}, facts)
    assert back.checkpoint_read == one.checkpoint_read
    assert back.layers[own][0][1] == pytest.approx(0.5)
    for _ in range(20):  # whatever is wrong there, no link's rate mends it
        two = store.corrected(two, {"disk_read": 1.5, "h2d": 0.5}, facts)
    assert [y for _, y in two.checkpoint_read] == pytest.approx([0.4, 0.8])
    assert [y for _, y in two.links["h2d"]] == pytest.approx([10.0, 20.0])


def test_obtain(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured once, each model once, and what is free is asked for every time."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    measured = list[str]()
    monkeypatch.setattr(timing, "noticing", lambda *_: nullcontext([]))
    monkeypatch.setattr(machine_rates, "measure_machine", lambda *_: measured.append("machine") or hardware())

    def ask(family: str, measure: bool, memory: int) -> Hardware | None:
        known = families(family)
        with Engine(known.directory, policy=Policy(), device="cpu", device_mem=memory, offload_dir=tmp_path) as engine:
            with listening() as heard:
                found = store.obtain(engine.core.machine, engine.core.opened, measure)
            measured.extend(text.partition(", ")[0] for text in heard.begun("measuring"))
            return found

    assert ask("llama", False, 50 * MB) is None
    first = ask("llama", True, 50 * MB)
    assert first is not None
    steps = ["measuring this model's layers", "measuring this model's attention",
             "measuring how much computing and reading of layers slow each other"]  # fmt: skip
    assert measured == ["machine", *steps]
    assert (first.device_bytes, first.host_bytes) == (50 * MB, None)
    second = ask("llama", False, 60 * MB)
    assert second is not None
    assert replace(second, disk_bytes=None) == replace(first, device_bytes=60 * MB, disk_bytes=None)
    without = ask("qwen3", False, 50 * MB)
    assert without is not None
    assert without.layers == first.layers
    both = ask("qwen3", True, 50 * MB)
    assert both is not None
    assert len(both.layers) == 2
    assert first.layers.items() <= both.layers.items()
    assert measured[4:] == steps


def test_measure_says_that_rates_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_rates, "measure_machine", lambda *_: hardware())
    options = MachineOptions(device="cpu", offload_dir=tmp_path)
    for again, said in ((False, False), (False, True), (True, False)):
        with listening() as heard:
            this_machine(options, None, again)
        line = "rates of the machine itself were measured before; --again measures them again"
        assert (line in heard.messages) == said
