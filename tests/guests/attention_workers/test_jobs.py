"""Jobs with attention workers: the tokens of transformers, bytes by formula, refusals."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput, ModelNotFound, OutOfMemory
from flexengine.guests.attention_workers import client
from flexengine.guests.attention_workers.answers import Answers
from flexengine.guests.attention_workers.attender import RemoteAttender
from flexengine.lossy import Lossy
from flexengine.plan.workload import Workload
from flexengine.schedule.tasks import Op
from tests.helpers.attention_workers import NetWorker, ThreadWorker
from tests.helpers.families import LENGTHS, NEW

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
ALL = {"workers": 1}
OPENED = "flexengine.guests.attention_workers.workers"
# (workers, policy fields)
SPLITS: list[tuple[int, dict[str, Any]]] = [
    (1, dict(gpu_batch_size=8, num_gpu_batches=1, cache=ALL)),
    (3, dict(gpu_batch_size=2, num_gpu_batches=4, cache=ALL, schedule="zigzag")),
    (2, dict(gpu_batch_size=3, num_gpu_batches=3, cache={"workers": 0.5, "device": 0.2, "disk": 0.3},
             weights=(0.4, 0.3, 0.3), prefill_tokens=16)),
    (2, dict(gpu_batch_size=3, num_gpu_batches=2, cache=ALL, partition="heads", schedule="diagonal")),
    (3, dict(gpu_batch_size=4, num_gpu_batches=2, cache={"workers": 0.7, "device": 0.3}, partition="tokens",
             slots=1, weights=(0, 0.5, 0.5), prefill_tokens=7)),
]  # fmt: skip
FIRST = [(workers, dict(fields, queries_first=True)) for workers, fields in SPLITS]
# bench.workers compares all formats under all partitions.
FORMS = [(1, Lossy(cache="bf16")), (1, Lossy(sparse_attention=0.3)), (3, Lossy(cache="int4")),
         (3, Lossy(sparse_attention=0.3)), (4, Lossy(cache="int8")), (4, Lossy(cache="int4")),
         (4, Lossy(sparse_attention=0.3))]  # fmt: skip
# Grouped heads, a soft cap with windows, sinks with windows: the first under all policies.
RUNS = [("llama", split) for split in range(len(SPLITS))] + [(f, s) for f in ("gemma2", "gpt-oss") for s in (2, 3, 4)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be threads of this process."""
    monkeypatch.setattr(f"{OPENED}.LocalWorker", ThreadWorker)


def generated(known: Any, workers: int, fields: dict[str, Any], rows: Any = None, **options: Any) -> list[list[int]]:
    options = dict(device="sim") | options
    with Engine(
        known.directory, policy=Policy(**fields), attention_workers=workers, worker_mem="4M", **options
    ) as engine:
        results = engine.generate(known.rows if rows is None else rows, GREEDY)
        assert [r.error for r in results] == [None] * len(results)
        for place in engine.core.machine.tiers:
            if place.startswith("worker"):
                assert engine.summary.bytes[f"{place}_send"] > 0
                assert engine.summary.peak_bytes[place] > 0
        engine.close()
        assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("family", "split"), RUNS)
def test_tokens_are_those_of_transformers(families: Any, tmp_path: Path, family: str, split: int) -> None:
    known, (workers, fields) = families(family), SPLITS[split]
    device = "cpu" if split in (1, 3) else "sim"
    assert generated(known, workers, fields, device=device, offload_dir=tmp_path) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("worker", [ThreadWorker, NetWorker])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("split", [2, 3, 4])
def test_tokens_with_queries_first(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, split: int, worker: Any
) -> None:  # fmt: skip
    """Through shared memory and over TCP. One row begins with a single cached token."""
    monkeypatch.setattr(f"{OPENED}.LocalWorker", worker)
    known, (workers, fields) = families(family), FIRST[split]
    device = "cpu" if split == 3 else "sim"
    assert generated(known, workers, fields, device=device, offload_dir=tmp_path) == known.expected


@pytest.mark.usefixtures("threads")
def test_attention_over_cached_tokens_overlaps_keys_and_values(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """A worker finishes the cached tokens of a cell only while the device computes the cell's keys and values, and the
    device finishes these only while the worker computes. The trace shows both at the same time."""
    meeting, begun = threading.Barrier(2, timeout=60), threading.Event()
    cached, waiting, add = Answers.attend_cached, RemoteAttender.attend_cached, RemoteAttender.add

    def meet(self: Any, *args: Any) -> Any:
        meeting.wait()
        return cached(self, *args)

    def wait(self: Any, k: int) -> None:
        begun.set()
        waiting(self, k)

    def adding(self: Any, *args: Any) -> None:
        assert begun.wait(60)
        begun.clear()
        meeting.wait()
        add(self, *args)

    monkeypatch.setattr(Answers, "attend_cached", meet)
    monkeypatch.setattr(RemoteAttender, "attend_cached", wait)
    monkeypatch.setattr(RemoteAttender, "add", adding)
    known, trace = families("llama"), tmp_path / "trace.json"
    policy = dict(gpu_batch_size=8, num_gpu_batches=1, cache=ALL, queries_first=True)
    assert generated(known, 1, policy, trace=trace) == known.expected
    spans: dict[tuple[str, Any], list[tuple[float, float]]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            cell = tuple(sorted((k, v) for k, v in event["args"].items() if isinstance(v, int)))
            spans.setdefault((event["name"], cell), []).append((event["ts"], event["ts"] + event["dur"]))
    cells = [(both, spans[Op.PROJECT_KEYS.value, cell]) for (name, cell), both in spans.items()
             if name == Op.ATTEND_CACHED.value]  # fmt: skip
    assert len(cells) == 4 * (NEW - 1)  # layers, decode steps
    for ((began, end),), ((other, last),) in cells:
        assert max(began, other) < min(end, last)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("split", "form"), FORMS, ids=str)
def test_lossy_caches_give_the_tokens_they_give_on_the_device(families: Any, split: int, form: Lossy) -> None:
    known, (workers, fields) = families("gpt-oss"), SPLITS[split]
    if form.sparse_attention and split == 4:
        with pytest.raises(InvalidInput, match="partition is tokens, but with sparse attention a worker cannot know"):
            generated(known, workers, fields, lossy=form)
        return
    plain = {k: v for k, v in fields.items() if k not in ("cache", "partition")}
    with Engine(known.directory, policy=Policy(**plain), device="sim", lossy=form) as engine:
        expected = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
    assert generated(known, workers, fields, lossy=form) == expected
    if form.sparse_attention:
        with pytest.raises(InvalidInput, match="queries_first is True, but with sparse attention the new token"):
            generated(known, *FIRST[split], lossy=form)
        return
    assert generated(known, *FIRST[split], lossy=form) == expected


def test_tokens_over_tcp(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OPENED}.LocalWorker", NetWorker)
    known, (workers, fields) = families("llama"), SPLITS[3]
    assert generated(known, workers, fields) == known.expected


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("partition", ["requests", "heads", "tokens"])
def test_bytes_of_a_token(families: Any, partition: str, first: bool) -> None:
    """(2 + 2 / G) e d per token and layer, where G query heads share a KV head (Lamina, section 3.2). With parts of the
    tokens, each worker gets all queries, and one of them the new keys and values."""
    known, workers = families("llama"), 2
    policy = Policy(4, 2, cache=ALL, partition=partition, queries_first=first)
    with Engine(known.directory, policy=policy, device="cpu", attention_workers=workers, worker_mem="4M") as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        moved, facts = engine.summary.bytes, engine.facts
        layout = engine.plan(Workload.of((len(p), NEW) for p in known.prompts))
        page = layout.page_bytes["worker1"][0]
    tokens, (heads, kv, dim) = len(facts.layers) * len(LENGTHS) * (NEW - 1), (facts.heads, facts.kv_heads, 16)
    sent = sum(moved[f"worker{i}_send"] for i in (1, 2))
    fetched = sum(moved[f"worker{i}_fetch"] for i in (1, 2))
    if partition == "tokens":
        assert sent == tokens * (workers * heads + 2 * kv) * dim * 4
        assert fetched == tokens * workers * heads * (dim * 4 + 4)
    else:
        assert sent + fetched == tokens * (2 + 2 / (heads / kv)) * heads * dim * 4
        assert moved["worker1_send"] == moved["worker2_send"]
    size = layout.pools["worker1"][0].page_tokens
    pages = sum(-(-n // size) for n in LENGTHS)  # of prompts, stored once
    assert sum(moved[f"worker{i}_write"] for i in (1, 2)) == len(facts.layers) * pages * page
    assert sum(moved[f"worker{i}_read"] for i in (1, 2)) == 0


@pytest.mark.usefixtures("threads")
def test_refusals(families: Any) -> None:
    known = families("llama")
    for fields, workers, message in (
        (dict(cache=(1, 0, 0)), 2, "attention_workers is 2, but the policy gives them no share of the KV cache"),
        (dict(cache=ALL, partition="heads"), 3, "2 KV heads cannot be divided evenly among 3 attention workers"),
        (dict(cache=ALL), 0, "share of the KV cache on workers, but there are no attention workers; start some with"),
        (
            dict(gpu_batch_size=1, num_gpu_batches=4, cache={"workers": 0.05, "device": 0.95}),
            2,
            "share of 0.05 on attention workers is no sequence of a block of 4",
        ),
        (dict(cache=(1, 0, 0), queries_first=True), 2, "queries_first is True, but cache has no share on workers"),
        (dict(cache=ALL), 65, "attention_workers is 65; it must be 0 to 64"),
        (dict(cache=ALL), -1, "attention_workers is -1; it must be 0 to 64"),
    ):
        with pytest.raises(InvalidInput, match=message):
            generated(known, workers, fields) if workers else Engine(
                known.directory, policy=Policy(**fields), device="cpu"
            ).generate(known.rows, GREEDY)
    with pytest.raises(InvalidInput, match="attention_workers needs worker_mem"):
        Engine(known.directory, policy=Policy(cache=ALL), attention_workers=1)
    with pytest.raises(InvalidInput, match=r"attention_workers is '10.* it must be a number of processes, or"):
        Engine(known.directory, policy=Policy(cache=ALL), attention_workers="10.0.0.2:29600")
    with pytest.raises(InvalidInput, match=r"workers may take [\d.,]+ TB of RAM, but [\d.]+ GB are free"):
        Engine(known.directory, policy=Policy(cache=ALL), attention_workers=2, worker_mem="900G")
    with pytest.raises(InvalidInput, match="worker_mem is 1G, but there are no attention workers"):
        Engine(known.directory, worker_mem="1G")


@pytest.mark.usefixtures("threads")
def test_queries_of_fused_projections_cannot_go_first(families: Any) -> None:
    with pytest.raises(InvalidInput, match="the model's layers compute queries together with keys and values; set"):
        generated(families("phi3"), *FIRST[0])


@pytest.mark.usefixtures("threads")
def test_sequences_are_divided_evenly(families: Any) -> None:
    """A block that is not full does not fill one worker first."""
    known = families("llama")
    policy = Policy(8, 2, cache=ALL)
    with Engine(known.directory, policy=policy, device="cpu", attention_workers=2, worker_mem="4M") as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        written = [engine.summary.bytes[f"worker{i}_write"] for i in (1, 2)]
    assert max(written) < 1.5 * min(written)


@pytest.mark.usefixtures("threads")
def test_no_worker_stays_behind_if_the_model_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[ThreadWorker]()

    class Noted(ThreadWorker):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr(f"{OPENED}.LocalWorker", Noted)
    with pytest.raises(ModelNotFound):
        Engine("/no/such/model", policy=Policy(cache=ALL), device="cpu", attention_workers=2, worker_mem="4M")
    assert len(made) == 2
    assert not any(worker.thread.is_alive() for worker in made)


@pytest.mark.usefixtures("threads")
def test_too_little_memory_of_workers(families: Any) -> None:
    known = families("llama")
    policy = Policy(8, 1, cache=ALL)
    for given in (policy, replace(policy, cache={"workers": 0.75, "device": 0.25})):  # the device cannot stand in
        with (
            Engine(known.directory, policy=given, device="cpu", attention_workers=2, worker_mem=20_000) as engine,
            pytest.raises(OutOfMemory, match=r"worker1 memory: at least .* set worker_mem='20.5kB' or more$"),
        ):
            engine.generate(known.rows, GREEDY)
    with Engine(known.directory, policy=policy, device="cpu", attention_workers=2, worker_mem=70_000) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        assert engine.summary.sweeps > NEW  # sequences had to wait


def test_clients_of_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "identity", lambda: "flexengine 9.9 with OtherKernels")
    with pytest.raises(InvalidInput, match=r"worker1 refuses: .* but the engine runs flexengine 9.9"):
        ThreadWorker("worker1", 1000, 1)
