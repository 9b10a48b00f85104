"""Pipelines with attention workers that all stages share."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from flexengine import Policy, SamplingParams
from flexengine.config import parse_size
from flexengine.engine.options import EngineOptions
from flexengine.errors import InvalidInput, OutOfMemory, WorkerLost
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.workers import RemoteWorker, WorkerTier
from flexengine.lossy import Lossy
from tests.guests.stages.test_strategy import strategy
from tests.helpers.attention_workers import listening
from tests.helpers.families import NEW
from tests.helpers.threads import Pipeline, ThreadGroup, in_threads

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
MEMORY = 8 << 20
ALL = {"workers": 1}
# (stages, workers, policy fields)
SPLITS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, dict(gpu_batch_size=2, num_gpu_batches=4, cache=ALL)),
    (3, 3, dict(gpu_batch_size=1, num_gpu_batches=8, cache={"workers": 0.6, "device": 0.2, "disk": 0.2},
                weights=(0.4, 0.3, 0.3), prefill_tokens=16)),
    (2, 2, dict(gpu_batch_size=2, num_gpu_batches=4, cache=ALL, partition="heads", schedule="diagonal")),
    (2, 4, dict(gpu_batch_size=2, num_gpu_batches=3, cache={"workers": 0.7, "device": 0.3}, partition="tokens",
                schedule="zigzag")),
    (2, 2, dict(gpu_batch_size=3, num_gpu_batches=2, cache=ALL, queries_first=True)),
]  # fmt: skip
RUNS = [("llama", split) for split in range(len(SPLITS))] + [(f, s) for f in ("gemma2", "gpt-oss") for s in (2, 3, 4)]


@pytest.fixture
def pools() -> Any:
    """Start a number of workers, and return their addresses."""
    with ExitStack() as stack:
        yield lambda count, memory=MEMORY, folder=None: [
            stack.enter_context(listening(memory, folder))[0] for _ in range(count)
        ]


def generated(pipeline: Pipeline, rows: Any) -> list[list[int]]:
    results = pipeline.engine.generate(rows, GREEDY)
    assert [r.error for r in results] == [None] * len(results)
    for engine in (pipeline.engine, *(server.engine for server in pipeline.servers)):
        assert all(tier.ledger.used == 0 for tier in engine.core.machine.workers)
        assert any(tier.attention_bytes > (0, 0) for tier in engine.core.machine.workers)
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "split"), RUNS)
def test_tokens_are_those_of_transformers(
    families: Any, pools: Any, tmp_path: Path, family: str, split: int
) -> None:  # fmt: skip
    known, (stages, workers, fields) = families(family), SPLITS[split]
    with in_threads(stages, model=known.directory, policy=Policy(**fields), device="sim", offload_dir=tmp_path,
                    attention_workers=pools(workers)) as pipeline:  # fmt: skip
        assert generated(pipeline, known.rows) == known.expected
        assert generated(pipeline, known.rows[:3]) == known.expected[:3]  # the next job


@pytest.mark.parametrize("lossy", [Lossy(cache="int4"), Lossy(sparse_attention=0.3)])
def test_lossy_tokens_are_those_of_one_process(families: Any, pools: Any, lossy: Lossy) -> None:
    from flexengine import Engine

    known, policy = families("llama"), Policy(2, 4)
    with Engine(known.directory, policy=policy, device="cpu", lossy=lossy) as engine:
        expected = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
    with in_threads(2, model=known.directory, policy=Policy(2, 4, cache=ALL), device="cpu", lossy=lossy,
                    attention_workers=pools(2)) as pipeline:  # fmt: skip
        assert generated(pipeline, known.rows) == expected


def test_a_file_takes_what_finds_no_room(families: Any, pools: Any, tmp_path: Path) -> None:
    """The worker in memory has room for two sequences of every stage."""
    known = families("llama")
    addresses = [*pools(1, MEMORY // 128), *pools(1, folder=tmp_path)]
    with in_threads(2, model=known.directory, policy=Policy(2, 4, cache=ALL), device="cpu",
                    attention_workers=addresses) as pipeline:  # fmt: skip
        assert generated(pipeline, known.rows) == known.expected
        for engine in (pipeline.engine, *(server.engine for server in pipeline.servers)):
            assert [tier.name for tier in engine.core.machine.workers] == ["worker1", "workerfile1"]
            assert all(tier.attention_bytes > (0, 0) for tier in engine.core.machine.workers)


def test_stages_take_equal_parts(families: Any, pools: Any) -> None:
    with in_threads(3, model=families("llama").directory, device="cpu", attention_workers=pools(2)) as pipeline:
        engines = [pipeline.engine, *(server.engine for server in pipeline.servers)]
        assert [engine.core.machine.capacity.workers for engine in engines] == [(MEMORY // 3, MEMORY // 3)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("calls", [(40,), (3, 90), (25, 26, 27, 120)])
@pytest.mark.parametrize("split", [0, 1, 2])
def test_losses(
    families: Any, pools: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: int, calls: tuple[int, ...]
) -> None:  # fmt: skip
    """Connections break in any stage, at any question or page. All stages connect again, and go on."""
    known, (stages, workers, fields) = families("llama"), SPLITS[split]
    count, renewed = 0, list[WorkerTier]()
    with in_threads(stages, model=known.directory, policy=Policy(**fields), device="sim", offload_dir=tmp_path,
                    attention_workers=pools(workers)) as pipeline:  # fmt: skip
        generated(pipeline, known.rows[:1])  # measures the workers
        for name in ("ask", "write"):
            call = getattr(Client, name)

            def counted(client: Client, *args: Any, call: Any = call) -> Any:
                nonlocal count
                count += 1
                if count in calls:
                    client.link.close()
                return call(client, *args)

            monkeypatch.setattr(Client, name, counted)
        renew = WorkerTier.renew
        monkeypatch.setattr(WorkerTier, "renew", lambda tier: (renewed.append(tier), renew(tier))[1])
        assert generated(pipeline, known.rows) == known.expected
        assert pipeline.engine.summary.rows == len(known.rows)
        engines = [pipeline.engine, *(server.engine for server in pipeline.servers)]
        assert all(set(engine.core.machine.workers) & set(renewed) for engine in engines)
    assert count > calls[-1]


def test_a_worker_that_does_not_come_back(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a stage names the stage and the worker; the next job says the same before it computes."""
    monkeypatch.setattr(RemoteWorker, "patience", 0.0)
    known, asked = families("llama"), 0
    ask = Client.ask
    with ExitStack() as ended:
        address, _ = ended.enter_context(listening(MEMORY))
        with in_threads(2, model=known.directory, policy=Policy(2, 4, cache=ALL), device="cpu",
                        attention_workers=[address]) as pipeline:  # fmt: skip

            def broken(client: Client, *args: Any) -> Any:
                nonlocal asked
                asked += 1
                if asked == 30:
                    ended.close()  # nothing listens any more
                if asked >= 30:
                    client.link.close()
                return ask(client, *args)

            monkeypatch.setattr(Client, "ask", broken)
            with pytest.raises(WorkerLost, match=r"worker1 .*does not answer"):
                pipeline.engine.generate(known.rows, GREEDY)
            with pytest.raises(WorkerLost, match="worker1"):
                pipeline.engine.generate(known.rows, GREEDY)


def test_all_stages_need_the_same_workers(families: Any, pools: Any) -> None:
    """Here a stage names fewer."""
    addresses = pools(2)
    each = [{"attention_workers": addresses}, {"attention_workers": addresses[:1]}]
    with (
        pytest.raises(InvalidInput, match=r"stage 1 .*attention workers.* stage 0"),
        in_threads(2, each, model=families("llama").directory, device="cpu"),
    ):
        pass


def test_too_little_memory_for_all_stages(families: Any, pools: Any) -> None:
    """The error names what each stage needs, and what all of them do."""
    known = families("llama")
    with in_threads(2, model=known.directory, policy=Policy(2, 4, cache=ALL), device="cpu",
                    attention_workers=pools(1, 4096)) as pipeline:  # fmt: skip
        with pytest.raises(OutOfMemory, match=r"2.04 kB are given") as raised:
            pipeline.engine.generate(known.rows[:1], GREEDY)
        needed = str(raised.value).partition("worker_mem=")[2].split()[0]
        assert str(raised.value).endswith(f"{needed} or more, of which each of 2 processes gets a part")
    with in_threads(2, model=known.directory, policy=Policy(2, 4, cache=ALL), device="cpu",
                    attention_workers=pools(1, parse_size(needed.strip("'"), "it"))) as pipeline:  # fmt: skip
        assert generated(pipeline, known.rows[:1]) == known.expected[:1]


def test_memory_that_another_job_holds(families: Any, pools: Any) -> None:
    """A part of a stage is no longer free, so the planner makes the block smaller."""
    known, (address,) = families("llama"), pools(1)
    with (
        closing(RemoteWorker("worker1", address)) as other,
        in_threads(2, model=known.directory, device="cpu", attention_workers=[address]) as pipeline,
    ):
        assert pipeline.engine.core.machine.capacity.workers == (MEMORY // 2,)
        assert other.allocate(MEMORY - 4096) is not None
        pipeline.engine.planner.policy = Policy(2, 4, cache=ALL)
        with pytest.raises(OutOfMemory, match="worker1"):
            pipeline.engine.generate(known.rows, GREEDY)
        pipeline.engine.planner.policy = None
        results = pipeline.engine.generate(known.rows, GREEDY)
    assert [r.token_ids for r in results] == known.expected


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_planner_chooses(families: Any, pools: Any, rows: int) -> None:
    """Without a policy, of few rows and of more. Workers are not used, as everything fits."""
    known = families("llama")
    with in_threads(2, model=known.directory, device="cpu", attention_workers=pools(2)) as pipeline:
        results = pipeline.engine.generate(known.rows[:rows], GREEDY)
        assert [r.token_ids for r in results] == known.expected[:rows]


def test_options() -> None:
    far = ThreadGroup(0, 2, {}, {})  # one process on each machine
    with pytest.raises(InvalidInput, match=r"^attention_workers is 2, .*several machines; .*serve-attention"):
        EngineOptions(group=far, attention_workers=2, worker_mem="1M")
    with pytest.raises(InvalidInput, match="worker_sharing is 0; it must be a number of engines of at least 1"):
        EngineOptions(attention_workers=["a:1"], worker_sharing=0)
    with pytest.raises(InvalidInput, match=r"^attention_workers cannot be combined with strategy"):
        EngineOptions(strategy=strategy(), attention_workers=["a:1"])
