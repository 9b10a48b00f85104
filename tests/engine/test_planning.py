"""The planner in the engine: real runs against what was planned, when a machine is measured, and what is refused."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine import Engine, Policy, SamplingParams
from flexengine.engine import planner as planning
from flexengine.engine.survey import PromptReader, Refused
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.job.inputs import InputRows
from flexengine.lossy import Lossy
from flexengine.measure import machine as machine_rates
from flexengine.measure import store
from flexengine.model.tokenizer import load_tokenizer
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import READING, lay_out
from flexengine.plan.min_memory import smallest
from flexengine.plan.rates import assumed, origin, timed
from flexengine.plan.workload import Workload
from flexengine.shell.commands.messages import DONE, REFUSED
from flexengine.shell.commands.run import main
from flexengine.tier.machine import Links, Machine
from flexengine.worker.open_model import OpenModel, open_model
from tests.helpers.families import NEW
from tests.helpers.listening import listening
from tests.helpers.measuring import measure_quickly
from tests.helpers.plans import machine_of

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SPLITS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3), (0, 0.5, 0.5), (0.5, 0, 0.5)]


POLICIES = st.builds(
    Policy, st.integers(1, 8), st.integers(1, 3), *3 * [st.sampled_from(SPLITS)], st.integers(1, 3),
    st.sampled_from(["row", "zigzag", "diagonal", "continuous"]), st.sampled_from([16, 64, 2048]),
)  # fmt: skip


@given(policy=POLICIES)
@settings(max_examples=20)
def test_ledger_peaks_of_any_policy_are_those_predicted(families: Any, tmp_path: Path, policy: Policy) -> None:
    known = families("llama")
    work = Workload.of((len(p), NEW) for p in known.prompts)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=tmp_path) as engine:
        prediction = engine.planner.cost(work).predict(engine.plan(work))
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        predicted = {tier: prediction.layout.total(tier) for tier in ("device", "host", "disk")}
        assert engine.summary.peak_bytes == predicted


@pytest.mark.parametrize("overlap", [True, False])
def test_jobs_that_overlap_nothing_are_planned_so(
    families: Any, tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, searching = list[Any](), planning.search
    monkeypatch.setattr(planning, "search", lambda *given: asked.append(given[3]) or searching(*given))
    policy, hardware = Policy(4, 2, weights=(0, 1, 0)), machine_of(random.Random(7), "sim")
    options = {"overlap": overlap, "offload_dir": tmp_path, "hardware": hardware}
    with Engine(families("llama").directory, policy=policy, device="sim", **options) as engine:
        work = Workload({(20, 5): 8})
        told = engine.planner.cost(work).predict(engine.plan(work))
        engine.planner.choose(work)
    lanes = sum(told.busy.values())
    assert told.seconds == pytest.approx(max(told.busy.values()) if overlap else lanes)
    assert {options.overlap for options in asked} == {overlap}


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_auto_fits_every_capacity_and_is_exact(families: Any, tmp_path: Path, kind: str) -> None:
    """Capacities from the whole need down to where nothing fits: the tokens always equal those of transformers."""
    known, rng = families("llama"), random.Random(6)
    refused, streamed = list[float](), 0
    work = Workload.of((len(p), NEW) for p in known.prompts)
    for share in (1.5, 1.0, 0.6, 0.4, 0.2, 0.02):
        with Engine(known.directory, device="cpu") as engine:
            resident = engine.plan(work)
            whole, reading = resident.total("device"), resident.account["device"][READING]
        options = {"device_mem": int(share * whole) + reading * (kind == "cpu"), "offload_dir": tmp_path}
        with Engine(known.directory, device=kind, hardware=machine_of(rng, kind), **options) as engine:
            try:
                engine.planner.plan(work)
            except OutOfMemory:
                refused.append(share)
                for policy in smallest(128, engine.core.machine.capacity):  # not even what takes least
                    with pytest.raises(OutOfMemory):
                        lay_out(engine.facts, policy, work, engine.core.machine.capacity)
                continue
            results = engine.generate(known.rows, GREEDY)
            done = [(r.token_ids, known.expected[r.index]) for r in results if not r.error]
            assert all(found == right for found, right in done)
            assert engine.summary.peak_bytes["device"] <= options["device_mem"]
            streamed += engine.summary.policy.weights[0] < 1
    assert 0.02 in refused
    assert max(refused) < 0.4
    assert streamed


class Recorder:
    """Stands in for measure.store.obtain: counts what was asked for."""

    def __init__(self, cached: Hardware | None, measured: Hardware) -> None:
        self.cached, self.measured = cached, measured
        self.asked: list[bool] = []

    def __call__(self, _machine: Any, _opened: Any, measure: bool = False) -> Hardware | None:
        self.asked.append(measure)
        return self.measured if measure else self.cached


@pytest.mark.parametrize(("seconds", "least", "worth"), [
    (449.0, 0.0, False), (450.0, 0.0, True), (5000.0, 4600.0, False), (5000.0, 4550.0, True), (9e9, 9e9, False),
])  # fmt: skip
def test_measuring_pays_if_a_better_plan_can_save_ten_times_as_much(seconds: float, least: float, worth: bool) -> None:
    assert planning.pays(seconds, least, 45.0) == worth


@pytest.mark.parametrize(("seconds", "least", "worth"), [(1.0, 0.5, False), (5e3, 4.9e3, False), (5e3, 1e3, True)])
def test_everything_is_measured_before_jobs_that_this_may_shorten(
    families: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, least: float, worth: bool
) -> None:
    """A message says so before. least: seconds with unlimited memory."""

    def search(_facts: Any, known: Hardware, *_: Any) -> Any:
        best = seconds if known.device_bytes else least
        return SimpleNamespace(best=SimpleNamespace(seconds=best - 0.5, total_seconds=best))

    recorder = Recorder(None, assumed("cpu", Capacity(1 << 30, None, 1 << 30, shared=True, staged=False)))
    monkeypatch.setattr(planning, "search", search)
    monkeypatch.setattr("flexengine.measure.store.obtain", recorder)
    monkeypatch.setattr("flexengine.measure.store.obtain_quickly", lambda *_: (recorder.measured, False))
    with Engine(families("llama").directory, device="cpu") as engine, listening() as heard:
        for _ in range(2):  # what was measured is known from then on
            engine.planner.search(Workload({(8, 8): 8}))
            assert recorder.asked.count(True) == int(worth)
    said = "measuring this machine and model takes about 45.0 s; the job is predicted to take 1:23:20, of which a"
    said += " better plan saves at most 1:06:40"
    assert any(text.startswith(said) for text in heard.messages) == worth


def test_a_job_that_fits_in_memory_does_not_measure_everything(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes all the time, so other policies shorten it little, however long it is."""
    recorder = Recorder(None, assumed("cpu", Capacity(1 << 30, None, 1 << 30, shared=True, staged=False)))
    slow = replace(recorder.measured, cell_seconds=0.1)
    monkeypatch.setattr("flexengine.measure.store.obtain", recorder)
    monkeypatch.setattr("flexengine.measure.store.obtain_quickly", lambda *_: (slow, False))
    with Engine(families("llama").directory, device="cpu") as engine:
        found = engine.planner.search(Workload({(8, 8): 300_000}))
        assert found.best.seconds > 450
        assert not any(recorder.asked)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Hardware | None]:
    """Quick measurements from now on, by the rates that were stored before, with an empty cache."""
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    measure_quickly(monkeypatch)
    calls, measure = list[Hardware | None](), machine_rates.measure_quickly

    def counted(known: Hardware | None, machine: Machine, opened: OpenModel) -> tuple[Hardware, dict[str, Any], bool]:
        calls.append(known)
        return measure(known, machine, opened)

    monkeypatch.setattr(machine_rates, "measure_quickly", counted)
    return calls


@pytest.mark.parametrize(("device", "policy"), [("cpu", None), ("sim", None), ("cpu", Policy(4))])
def test_a_model_is_measured_for_a_moment_once(
    families: Any,
    moments: list[Hardware | None],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    policy: Policy | None,
) -> None:
    """Before all but the shortest jobs. Its rates are stored, also for other processes."""
    monkeypatch.setattr(planning, "MIN_QUICK_SECONDS", 0.05)
    for rows, calls in ((1, 0), (300, 1), (300, 1)):
        with Engine(families("llama").directory, device=device, policy=policy) as engine:
            before = {name: tier.ledger.used for name, tier in engine.core.machine.tiers.items()}
            engine.planner.plan(Workload({(8, 8): rows}))
            engine.planner.plan(Workload({(8, 8): rows}))
            assert {name: tier.ledger.used for name, tier in engine.core.machine.tiers.items()} == before
            assert len(moments) == calls
            known, facts = engine.planner.rates.known(), engine.facts
        assert not known.measured
        assert known.assumed
        assert timed(known, facts) == bool(calls)
        said = "this model measured briefly, offload directories assumed" if calls else "not measured"
        assert origin(known, facts) == said


def test_a_disturbed_measurement_is_made_again_at_the_next_start(
    families: Any, moments: list[Hardware | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process plans with its rates, also with those of other formats, and a job does not store them corrected."""
    for cores, formats, calls in (([2.5], (None, "int8"), 2), ([], (None,), 3)):
        monkeypatch.setattr(machine_rates, "noticing", lambda _, cores=cores: nullcontext(cores))
        with Engine(families("llama").directory, device="cpu") as engine:
            rates, opened, work = engine.planner.rates, engine.core.opened, Workload({(8, 8): 4})
            for _ in range(2):
                for cache in formats:
                    engine.planner.use(Lossy(cache=cache))
                    rates.measure_quickly()
                    assert timed(rates.known(), opened.facts)
            watch = engine.planner.watch(work, engine.plan(work))
            monkeypatch.setattr(watch, "factors", lambda: {"device": 2.0})
            rates.learn(watch)
            assert len(moments) == calls
            assert store.knows_quickly(engine.core.machine, opened) == (not cores)


@pytest.mark.slow
def test_a_sim_machine_computes_at_the_rates_of_its_cpu(families: Any, moments: list[Hardware | None]) -> None:
    """Its links are measured, and at most as fast as their limits."""
    directory, links = families("llama").directory, Links(h2d=1e9, disk_read=2e9, disk_write=1e8)
    with Engine(directory, device="cpu") as engine:
        engine.plan(Workload({(8, 8): 1_000_000}))
        own, facts = engine.planner.rates.known(), engine.facts
    with Engine(directory, device="sim", links=links) as engine:
        engine.plan(Workload({(8, 8): 1_000_000}))
        known = engine.planner.rates.known()
    assert moments == [None, None]
    assert (known.layers, known.heads, known.attention) == (own.layers, own.heads, own.attention)
    assert timed(known, facts)
    assumed_links = assumed("sim", Capacity(None, None, None, shared=False, staged=False)).links
    assert max(rate for _, rate in known.links["h2d"]) < 1.1e9
    assert known.links["d2h"] != assumed_links["d2h"]
    assert max(rate for _, rate in known.links["disk_read"]) < 2.2e9
    assert 0.5e8 < max(rate for _, rate in known.links["disk_write"]) < 1.1e8
    assert known.name == own.name
    with Engine(directory, device="sim", links=links) as engine:
        engine.plan(Workload({(8, 8): 1_000_000}))
        again = engine.planner.rates.known()
    assert replace(again, disk_bytes=None) == replace(known, disk_bytes=None)
    assert len(moments) == 2


def test_a_sim_machine_keeps_what_was_measured_of_its_cpu(families: Any, moments: list[Hardware | None]) -> None:
    directory, kept = families("llama").directory, ("elementwise", "decode_attention", "sweep_seconds")
    with Engine(directory, device="cpu") as engine:
        machine, opened = engine.core.machine, engine.core.opened
        whole = replace(assumed("cpu", machine.capacity), measured=True, assumed=False, elementwise=1.25e10,
                        decode_attention=((1.0, 2e9), (64.0, 3e9)), sweep_seconds=0.25)  # fmt: skip
        assert store.keep(machine, opened.dtype, opened.files, whole)
    with Engine(directory, device="sim") as engine:
        engine.planner.rates.measure_quickly()
        known = engine.planner.rates.known()
    assert len(moments) == 1
    assert [getattr(known, name) for name in kept] == [getattr(whole, name) for name in kept]
    assert known.links["h2d"] != assumed("sim", Capacity(None, None, None, shared=False, staged=False)).links["h2d"]
    assert not known.measured


def test_a_job_corrects_rates_that_were_measured_for_a_moment(
    families: Any, moments: list[Hardware | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MIN_QUICK_SECONDS", 0.0)
    work, seconds = Workload({(8, 8): 100}), list[float]()
    for _ in range(2):
        with Engine(families("llama").directory, device="cpu") as engine:
            layout = engine.plan(work)
            watch = engine.planner.watch(work, layout)
            seconds.append(float(watch.cost.rates.stack(8)))
            monkeypatch.setattr(watch, "factors", lambda: {"device": 2.0})
            engine.planner.rates.learn(watch)
    assert len(moments) == 1
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_model_in_other_formats_is_measured_on_a_machine_that_was_measured(
    families: Any, moments: list[Hardware | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers and attention in these formats, not products of other formats, decide the prediction."""
    monkeypatch.setattr(planning, "MIN_QUICK_SECONDS", 0.0)
    lossy, work = Lossy(weights="int4", compute="int8", cache="int8"), Workload({(8, 8): 4})
    for number in range(2):
        with Engine(families("llama").directory, device="cpu", lossy=lossy) as engine:
            machine, opened = engine.core.machine, engine.core.opened
            if not number:
                rates = replace(assumed("cpu", machine.capacity), measured=True, assumed=False)
                assert not store.save_rates(store.key_of(machine, opened.dtype, opened.files), rates)
                assert origin(rates, engine.facts) == "measured, but not this model's layers"
            engine.plan(work)
            known = engine.planner.rates.known()
            assert origin(known, engine.facts) == "measured, this model briefly"
            assert engine.facts.signatures == {*known.layers, *known.heads, *known.attention}
            assert {*known.quick} == {*engine.facts.signatures, *known.fused}
    assert len(moments) == 1


def test_a_moment_replaces_nothing_that_was_measured(families: Any, moments: list[Hardware | None]) -> None:
    """Of a model that was measured, another format of the cache lacks its attention alone."""
    for cache in (None, "int8", "int4"):
        with Engine(families("llama").directory, device="cpu", lossy=Lossy(cache=cache)) as engine:
            machine, opened, rates = engine.core.machine, engine.core.opened, engine.planner.rates
            facts = engine.facts
            if cache is None:
                table = ((1.0, 0.5), (64.0, 0.75))
                whole = replace(
                    assumed("cpu", machine.capacity), measured=True, assumed=False,
                    layers={facts.signature(0): table}, heads={facts.head_signature: table},
                    attention={facts.attention_signature(None): {"decode": ((1.0, 1e9),)}},
                )  # fmt: skip
                assert store.keep(machine, opened.dtype, opened.files, whole)
            rates.measure_quickly()
            known = rates.known()
            assert store.knows_products(known, facts)
            assert (known.layers, known.heads) == (whole.layers, whole.heads)
            assert known.attention.items() >= whole.attention.items()
    assert len(moments) == len(known.quick) == 2


def test_what_did_not_fit_is_measured_when_it_does(families: Any, moments: list[Hardware | None]) -> None:
    """Rates are stored for all memory limits of a machine."""
    for memory, fits in (("1M", False), ("100M", True)):
        with Engine(families("llama").directory, device="cpu", device_mem=memory) as engine:
            with pytest.MonkeyPatch.context() as patch:
                if not fits:
                    patch.setattr(
                        "flexengine.measure.machine.measure_model", lambda *_, **__: {"layers": {}, "heads": {}}
                    )
                engine.planner.rates.measure_quickly()
            known = engine.planner.rates.known()
            assert {*known.quick} == {*known.layers, *known.fused, *known.heads, *known.attention}
            assert timed(known, engine.facts) == fits
    assert len(moments) == 2


@pytest.mark.slow
def test_records_are_measured_for_a_moment(
    families: Any, moments: list[Hardware | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that reads neurons on demand waits for them, so its model is known if they are. The rates are corrected."""
    monkeypatch.setattr("flexengine.guests.flash.model.QUICK", (0.001, 1))
    with Engine(families("opt").directory, device="cpu", lossy=Lossy(flash="oracle")) as engine:
        facts, rates = engine.facts, engine.planner.rates
        rates.measure_quickly()
        known = rates.known()
    own = {block.signature for block in facts.blocks if block}
    assert own
    assert own == {*known.blocks} <= {*known.quick}
    assert timed(known, facts)
    assert not timed(replace(known, blocks={}), facts)
    assert not store.knows_blocks(known, facts)
    assert {*store.corrected(known, {"device": 3.0}, facts).corrected} == own
    assert len(moments) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "measured"), [(20, 0), (20_000, 2)])
def test_three_choices_at_most_are_measured(
    families: Any, moments: list[Hardware | None], rows: int, measured: int
) -> None:
    """All are compared by the same rates before, and these three by the same rates after. Short jobs measure none."""
    allow = ["int8-weights", "int4-weights", "int8-cache", "int4-cache", "int8-compute"]
    with Engine(families("llama").directory, device="cpu", allow=allow) as engine:
        planner, compared = engine.planner, list[tuple[Lossy, bool]]()
        assert len(planner.choices) > 8
        choose = planner.choose

        def noted(workload: Workload, known: Hardware) -> Any:
            compared.append((engine.lossy, timed(known, engine.facts)))
            return choose(workload, known=known)

        planner.choose = noted  # type: ignore[method-assign]
        among = planner.choices
        best = planner.least_lossy(Workload({(8, 8): rows}), among)
    assert len(moments) == measured
    assert [lossy for lossy, _ in compared[: len(among)]] == [*among]
    assert [known for _, known in compared] == [False] * len(among) + [True] * measured
    assert best in [lossy for lossy, _ in compared[-measured:]]
    assert Lossy() in [lossy for lossy, _ in compared[-measured:]]


def test_nothing_is_measured_while_weights_are_loaded(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring binds the modules to other weights, so loaded weights would be lost to the next job."""
    known = families("llama")
    recorder = Recorder(None, assumed("cpu", Capacity(1 << 30, None, 1 << 30, shared=True, staged=False)))
    monkeypatch.setattr("flexengine.measure.store.obtain", recorder)
    with Engine(known.directory, device="cpu") as engine:
        engine.generate(known.rows[:2], GREEDY)
        engine.plan(Workload({(8, 8): 30_000_000}))
        assert not any(recorder.asked)
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


def test_what_cannot_be_held_is_refused_without_a_search(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` refuses the same jobs as `fitting`, which searches, with the same message; both accept jobs with
    shorter rows."""
    monkeypatch.setattr("flexengine.measure.store.obtain", Recorder(None, machine_of(random.Random(8), "cpu")))
    directory, sizes = families("llama").directory, [{(8, 8): 3}, {(8, 8): 3, (100, 20): 2}]
    with Engine(directory, device="cpu") as engine:
        layouts = [lay_out(engine.facts, policy, Workload(sizes[0]), engine.core.machine.capacity)
                   for policy in smallest(128, engine.core.machine.capacity)]  # fmt: skip
        least = min(layout.total("device") + layout.total("host") for layout in layouts)
    for share in (0.5, 0.9, 4.0):
        for each in sizes:
            with Engine(directory, device="cpu", device_mem=int(share * least)) as engine:
                told = list[str]()
                for ask in (engine.planner.check, engine.planner.plan):
                    try:
                        ask(Workload(each))
                    except OutOfMemory as error:
                        told.append(str(error))
                assert told == told[:1] * 2 or told == []
                assert bool(told) == (share < 1)
    searched = list[Any]()
    monkeypatch.setattr(planning, "search", lambda *given: searched.append(given))
    with Engine(directory, device="cpu") as engine:
        engine.planner.check(Workload(sizes[0]))
    assert searched == []


def test_given_hardware_is_used_with_the_machines_own_capacity(families: Any) -> None:
    hardware = replace(machine_of(random.Random(7), "cpu"), device_bytes=1 << 50)
    with Engine(families("llama").directory, device="cpu", device_mem="1G", hardware=hardware) as engine:
        assert engine.planner.rates.measured().device_bytes == 10**9
        assert engine.planner.rates.measured().links == hardware.links
    with pytest.raises(InvalidInput, match="of kind sim, but this job runs on cpu"):
        Engine(families("llama").directory, device="cpu", hardware=machine_of(random.Random(7), "sim"))


def bare_model(directory: Path) -> OpenModel:
    return open_model(str(directory), None, "cpu", weights=False)


def test_facts_of_a_config_alone(families: Any, tmp_path: Path) -> None:
    """A directory without weights gives the numbers that the same one with weights gives."""
    known = families("llama")
    (tmp_path / "config.json").write_text((known.directory / "config.json").read_text())
    bare = bare_model(tmp_path)
    full = bare_model(known.directory)
    assert bare.facts == full.facts
    refused = Refused()
    rows = [*known.rows, {"prompt_token_ids": []}, {"prompt_token_ids": [-1]}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with InputRows(tmp_path / "in.jsonl") as opened:
        reader = PromptReader(load_tokenizer(bare.source.directory, False), bare.skeleton, True)
        found = reader.survey(opened, GREEDY, refused)
    assert found == Workload.of((len(p), NEW) for p in known.prompts)
    assert str(refused).startswith(f"2 rows cannot be run and are left out; the first: line {len(known.rows) + 1}")


def test_experts_and_windows_are_in_the_facts(families: Any) -> None:
    facts = bare_model(families("mixtral").directory).facts
    config = json.loads((families("mixtral").directory / "config.json").read_text())
    shared = [t for layer in facts.layers for t in layer if t.experts]
    assert {t.experts for t in shared} == {config["num_local_experts"]}
    assert facts.active == config["num_experts_per_tok"]
    gemma = bare_model(families("gemma2").directory).facts
    assert {None, json.loads((families("gemma2").directory / "config.json").read_text())["sliding_window"]} == set(
        gemma.windows
    )


def test_dry_run_prints_the_plan_and_writes_nothing(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = families("llama")
    capacity = Capacity(1 << 30, None, 1 << 30, shared=True, staged=False)
    monkeypatch.setattr("flexengine.measure.store.obtain", Recorder(None, assumed("cpu", capacity)))
    monkeypatch.setattr("flexengine.measure.store.obtain_quickly", lambda *_: (assumed("cpu", capacity), True))
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in known.rows))
    out = tmp_path / "out.jsonl"
    asked = [str(source), "--model", str(known.directory), "--device", "cpu", "--output", str(out), "--dry-run"]
    assert main([*asked, "--max-tokens", "4"]) == DONE
    text = capsys.readouterr().out
    assert "tok/s" in text
    assert "RAM" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]
    source.write_text("no json\n")
    assert main([*asked, "--max-tokens", "4"]) == REFUSED
