"""Pipelines of one to four stages generate the tokens of one process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.pipeline.grid import DISK, POLICIES
from flexengine import Policy, SamplingParams
from flexengine.engine.stages import LocalStage, StageResult, Sweep
from flexengine.errors import InvalidInput, OutOfMemory, StageFailed
from flexengine.guests.flash.predictors import Latest
from flexengine.guests.stages.group import HIDDENS, RESULTS, OrderKind
from flexengine.guests.wire.link import HEADER
from flexengine.lossy import Lossy
from flexengine.schedule.tasks import Op
from flexengine.worker.worker import Worker
from tests.e2e.test_flash import ORACLE, PREDICTORS, masked, plant
from tests.e2e.test_samples import drawn
from tests.helpers.families import LENGTHS, NEW, prompts_of
from tests.helpers.threads import in_threads

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
RIGS = [(stages, name) for name in POLICIES for stages in ((2, 4) if len(name) % 2 else (3, 1))]


def tokens(results: Any) -> list[Any]:
    assert [r.error for r in results] == [None] * len(results)
    return [[s.token_ids for s in r.samples] if r.samples else r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "name"), [rig for rig in RIGS if rig[0] > 1])
def test_tokens_are_those_of_transformers(families: Any, stages: int, name: str) -> None:
    known = families("llama")
    with in_threads(stages, model=known.directory, policy=POLICIES[name], device="sim", device_mem="1G",
                    host_mem="1G") as pipeline:  # fmt: skip
        assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == known.expected
        assert tokens(pipeline.engine.generate(known.rows[:3], GREEDY)) == known.expected[:3]  # the next job


@pytest.mark.parametrize("stages", [2, 3])
def test_batches_leave_a_stage_in_another_order(families: Any, stages: int) -> None:
    """A gpu_batch of prompts overtakes one whose attention is delegated, as rows end and others enter."""
    known = families("llama")
    rows = [{"prompt_token_ids": p, "max_tokens": 1 + i % NEW} for i, p in enumerate(known.prompts * 3)]
    expected = [known.expected[i % len(known.prompts)][: 1 + i % NEW] for i in range(len(rows))]
    with in_threads(stages, model=known.directory, policy=POLICIES["delegated"], device="sim") as pipeline:
        assert tokens(pipeline.engine.generate(rows, GREEDY)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "llama-tied", "opt-350m", "qwen3-moe", "gpt-oss", "bloom"])
def test_families(families: Any, family: str) -> None:
    known = families(family)
    with in_threads(2, model=known.directory, policy=POLICIES["everywhere"], device="sim") as pipeline:
        assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["everywhere", "device", None])
@pytest.mark.parametrize("lossy", [ORACLE, PREDICTORS], ids=str)
def test_neurons_on_demand(families: Any, lossy: Lossy, name: str | None, stages: int) -> None:
    """Each stage reads the neurons of its own layers. Tokens are those of a masked transformers model."""
    known = families("opt")
    expected = known.expected if lossy is ORACLE else masked(known, plant(known))
    policy = None if name is None else replace(POLICIES[name], neurons=0.4)
    with in_threads(stages, model=known.directory, policy=policy, lossy=lossy, device="sim", device_mem="1G",
                    host_mem="1G") as pipeline:  # fmt: skip
        assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == expected
        assert tokens(pipeline.engine.generate(known.rows[:3], GREEDY)) == expected[:3]


def test_stages_use_the_same_predictors(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known, found = families("opt"), iter(("one", "other"))
    plant(known)
    monkeypatch.setattr(Latest, "digest", lambda _: next(found))
    with (
        pytest.raises(InvalidInput, match=r"stage 1 .* has predictors of neurons 'other', but stage 0 .* has 'one'"),
        in_threads(2, model=known.directory, lossy=PREDICTORS, device="cpu", device_mem="300M"),
    ):
        pass


def test_samples_with_noise_and_prefixes(families: Any) -> None:
    """Samples share their prompt's pages in every stage, and the last stage draws the same noise."""
    known, prompts = families("llama"), prompts_of(601, (37, 48, 5))
    params = SamplingParams(max_tokens=12, n=4, temperature=1.3, seed=2**64 - 1, ignore_eos=True)
    with in_threads(3, model=known.directory, policy=Policy(2, 3), device="cpu") as pipeline:
        results = pipeline.engine.generate([{"prompt_token_ids": p} for p in prompts], params)
    assert tokens(results) == list(drawn(known.model, prompts, params))


def test_common_prefixes_are_computed_once(families: Any) -> None:
    """Sequences of all cohorts share the pages of a prefix."""
    known, (prefix, *own) = families("llama"), prompts_of(601, (64, 9, 3, 7, 4, 5, 8))
    rows = [{"prompt_token_ids": prefix + each} for each in own]
    found = []
    for sharing in (True, False):
        with in_threads(2, model=known.directory, policy=Policy(2, 3), device="cpu", prefix_sharing=sharing) as made:
            found.append(tokens(made.engine.generate(rows, GREEDY)))
            computed = made.engine.summary.computed_prompt_tokens
        assert computed == sum(map(len, own)) + len(prefix) * (1 if sharing else len(own))
    assert found[0] == found[1]


def test_log_probabilities_penalties_and_scores(families: Any) -> None:
    from flexengine import Engine

    known = families("llama")
    params = SamplingParams(max_tokens=NEW, logprobs=3, repetition_penalty=1.3, frequency_penalty=0.5, seed=-3,
                            temperature=0.7, min_p=0.01, top_k=50)  # fmt: skip
    with Engine(known.directory, device="cpu") as alone:
        expected, scores = alone.generate(known.rows, params), alone.score(known.prompts, known.expected)
    with in_threads(3, model=known.directory, device="cpu") as pipeline:
        assert pipeline.engine.generate(known.rows, params) == expected
        assert pipeline.engine.score(known.prompts, known.expected) == scores


def test_trace_has_all_stages(families: Any, tmp_path: Path) -> None:
    """Each stage is a process of the trace, with the layers that it computed."""
    known, path = families("llama"), tmp_path / "trace.json"
    with in_threads(3, model=known.directory, policy=Policy(2, 4), device="cpu", trace=path) as pipeline:
        pipeline.engine.generate(known.rows, GREEDY)
        sweeps = pipeline.engine.summary.sweeps
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [f"flexengine stage {rank}" for rank in range(3)]
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    computed = [e for e in spans if e["name"] == Op.COMPUTE.value]
    for process, layers in zip(names, ({0, 1}, {2}, {3, 4}), strict=True):  # 4 is the head
        own = [e["args"] for e in computed if e["pid"] == process]
        assert {each["layer"] for each in own if each["layer"] >= 0} == layers
        assert len({each["sweep"] for each in own}) == sweeps


def test_plans_of_all_stages(families: Any) -> None:
    known = families("llama")
    with in_threads(3, model=known.directory, device="cpu") as pipeline:
        engine = pipeline.engine
        workload = engine.reader.survey(known.rows, GREEDY)
        layout = engine.planner.layout(workload)
        others = engine.planner.others
    assert [plan.layers for plan in others] == [(2, 3, 4), (3, 4, 4)]
    assert all(plan.seconds > 0 for plan in others)
    assert {plan.policy.block_size for plan in others} == {layout.policy.block_size}


def packed_bytes(value: Any) -> int:
    """Bytes of a value in MessagePack, by its specification (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    if value is None:
        return 1
    if isinstance(value, float):
        return 9
    if isinstance(value, int):
        negative, size = value < 0, ~value if value < 0 else value
        return (
            1
            if size < (32 if negative else 128)
            else next(1 + n for n in (1, 2, 4, 8) if size < 1 << (8 * n - negative))
        )
    items = [*value, *value.values()] if isinstance(value, Mapping) else list(value)
    return (1 if len(value) < 16 else 3) + sum(map(packed_bytes, items))


@pytest.mark.parametrize("stages", [2, 3])
def test_bytes_between_stages_equal_the_formula(families: Any, stages: int) -> None:
    """A token crosses each boundary once per sweep, in frames of one gpu_batch each (docs/pipeline.md)."""
    known = families("llama")
    with in_threads(stages, model=known.directory, policy=Policy(2, 4), device="cpu") as pipeline:
        batches, made = [0], list[StageResult]()
        start, finish = LocalStage.start, LocalStage.result

        def counted(stage: LocalStage, sweep: Sweep, texts: Any) -> None:
            batches[0] += len(sweep.batches) if stage.layers[0] == 0 else 0
            start(stage, sweep, texts)

        def noted(stage: LocalStage) -> StageResult:
            result = finish(stage)
            made.extend([result] * (stage.layers[1] == stage.layers[2]))
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStage, "start", counted)
            patch.setattr(LocalStage, "result", noted)
            assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == known.expected
        crossed = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
        hidden = {key: wire for key, wire in pipeline.wires.items() if key[2] == HIDDENS}
        assert sorted(hidden) == [(rank, rank + 1, HIDDENS) for rank in range(stages - 1)]
        for wire in hidden.values():
            assert (wire.frames, wire.nbytes) == (batches[0], HEADER.size * batches[0] + crossed * 64 * 4)
        results = pipeline.wires[stages - 1, 0, RESULTS]
        sweeps = pipeline.engine.summary.sweeps
        assert results.counts[OrderKind.RESULT] == sweeps
        assert sum(len(result.sampled) for result in made) == len(LENGTHS) * NEW
        assert results.bodies[OrderKind.RESULT] == sum(map(packed_bytes, made))


def test_stages_must_be_alike(families: Any) -> None:
    from flexengine.lossy import Lossy

    model, each = families("llama").directory, [{}, {"lossy": Lossy(cache="int8")}]
    with pytest.raises(InvalidInput, match=r"stage 1 \(thread 1\) has lossy switches {'cache': 'int8'}, but stage 0"):
        in_threads(2, each, model=model, device="cpu").__enter__()


def test_more_stages_than_layers(families: Any) -> None:
    with pytest.raises(InvalidInput, match="there are 5 stages, but the model has 4 layers"):
        in_threads(5, model=families("llama").directory, device="cpu").__enter__()


def test_a_stage_with_too_little_memory_is_named(families: Any) -> None:
    """It is refused before the first sweep. The pipeline runs the next job."""
    known = families("llama")
    each = [{"device_mem": "1G"}, {"device_mem": "20K"}]
    with in_threads(2, each, model=known.directory, policy=Policy(8, 1), device="sim", host_mem="1G") as pipeline:
        with pytest.raises(OutOfMemory, match=r"stage 1 of 0 to 1 \(thread 1\): device memory: .* 20.0 kB are"):
            pipeline.engine.generate(known.rows, GREEDY)
        assert pipeline.servers[0].stage is None


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_error_in_a_stage_ends_the_job_in_all(families: Any, monkeypatch: Any, where: int) -> None:
    """After an error in the middle of a sweep, the same stages run the next job."""
    known, perform = families("llama"), Worker.perform
    failing = [True]

    def fail(worker: Worker, task: Any) -> None:
        if failing[0] and worker.skeleton.layer_range[0] == where and task.op is Op.COMPUTE and task.cell.sweep == 5:
            failing[0] = False
            raise ValueError("this task fails")
        perform(worker, task)

    with in_threads(3, model=known.directory, policy=Policy(2, 3), device="sim") as pipeline:
        first = [server.core.skeleton.layer_range[0] for server in pipeline.servers]
        where = ([0, *first])[where]
        monkeypatch.setattr(Worker, "perform", fail)
        named = "this task fails" if where == 0 else r"stage \d of 0 to 2 .* failed: ValueError: this task fails"
        with pytest.raises((ValueError, StageFailed), match=named):
            pipeline.engine.generate(known.rows, GREEDY)
        assert not failing[0]
        assert tokens(pipeline.engine.generate(known.rows, GREEDY)) == known.expected


def test_the_summary_names_every_stage(families: Any) -> None:
    known = families("llama")
    with in_threads(3, model=known.directory, policy=Policy(2, 4, weights=DISK), device="sim") as pipeline:
        pipeline.engine.generate(known.rows, GREEDY)
        summary = pipeline.engine.summary.to_json()
        assert [stage["layers"] for stage in summary["stages"]] == [[2, 3, 4], [3, 4, 4]]
        for stage, server in zip(summary["stages"], pipeline.servers, strict=True):
            assert stage["peak_bytes"]["device"] == server.core.machine.device.ledger.peak > 0
            assert stage["bytes"]["disk_read"] > 0
            assert stage["plan"]["measured_seconds"] > 0
