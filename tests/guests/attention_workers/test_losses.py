"""Losses of attention workers: results do not change, and only sequences whose KV cache was lost are computed again."""

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import OutOfMemory, WorkerLost
from flexengine.guests.attention_workers import workers
from flexengine.guests.attention_workers.answers import Answers
from flexengine.guests.attention_workers.workers import WorkerTier
from flexengine.lossy import EXACT, Lossy
from tests.helpers.attention_workers import Losses, NetWorker, ThreadWorker
from tests.helpers.families import LENGTHS, reference

ALL = {"workers": 1}
NEW = 20  # tokens generated: windows of 9 tokens pass several pages
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
PART = "whose KV cache it held"
CHUNKS = dict(gpu_batch_size=3, num_gpu_batches=3, cache={"workers": 0.5, "device": 0.2, "disk": 0.3},
              weights=(0.4, 0.3, 0.3), prefill_tokens=7)  # fmt: skip
BY_REQUESTS = dict(gpu_batch_size=2, num_gpu_batches=4, cache={"workers": 0.7, "device": 0.3})
ON_HOST = dict(gpu_batch_size=4, num_gpu_batches=2, cache={"workers": 0.5, "host": 0.5}, delegate="host", slots=1)


class Job:
    """A job with workers.

    Attributes:
        tokens: by row and sample.
        summary: of the job.
    """

    def __init__(self, known: Any, workers: int, fields: dict[str, Any], rows: Any = None,
                 params: SamplingParams = GREEDY, **options: Any) -> None:  # fmt: skip
        options = {"device": "sim", "worker_mem": "4M"} | options
        rows = [{"prompt_token_ids": prompt} for prompt in (known.prompts if rows is None else rows)]
        with Engine(known.directory, policy=Policy(**fields), attention_workers=workers, **options) as engine:
            results = engine.generate(rows, params)
            assert [r.error for r in results] == [None] * len(results)
            self.summary, tiers = engine.summary, engine.core.machine.tiers
            engine.close()
            assert {place: tier.ledger.used for place, tier in tiers.items()} == dict.fromkeys(tiers, 0)
        self.tokens = [[s.token_ids for s in r.samples or [r]] for r in results]
        assert self.summary.generated_tokens == len(rows) * params.n * params.max_tokens
        assert self.summary.rows == len(rows)


@cache
def greedy(known: Any) -> list[list[list[int]]]:
    """Return the tokens of transformers."""
    return [[tokens] for tokens in reference(known.model, known.prompts, NEW)]


def alone(known: Any, rows: Any = None, params: SamplingParams = GREEDY, lossy: Lossy = EXACT,
          prefill_tokens: int = 2048) -> list[list[list[int]]]:  # fmt: skip
    """Return the tokens of a job without workers. Pieces of a prompt read a lossy cache, so they must be the same."""
    rows = [{"prompt_token_ids": prompt} for prompt in (known.prompts if rows is None else rows)]
    policy = Policy(8, 1, prefill_tokens=prefill_tokens)
    with Engine(known.directory, policy=policy, device="sim", lossy=lossy) as engine:
        return [[s.token_ids for s in r.samples or [r]] for r in engine.generate(rows, params)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lossy", "workers", "fields", "kind", "at"), [
    ("llama", EXACT, 3, BY_REQUESTS, ThreadWorker, (41, 90, 222)),
    ("llama", EXACT, 2, ON_HOST, ThreadWorker, (30, 99)),
    ("llama", Lossy(cache="int4"), 2, CHUNKS, NetWorker, (150, 201)),
    ("gemma2", EXACT, 2, CHUNKS, ThreadWorker, (60, 180, 260)),
    ("gemma2", EXACT, 3, BY_REQUESTS, NetWorker, (75, 150, 226)),
    ("gemma2", Lossy(cache="int4"), 3, BY_REQUESTS, ThreadWorker, (61, 200)),
    ("gpt-oss", EXACT, 2, CHUNKS, NetWorker, (66, 222)),
    ("gpt-oss", Lossy(cache="int4"), 2, BY_REQUESTS, ThreadWorker, (58, 130)),
    ("gpt-oss", Lossy(cache="int8"), 3, CHUNKS, ThreadWorker, (150, 230)),
    ("gpt-oss", Lossy(cache="bf16"), 2, BY_REQUESTS, NetWorker, (101, 160)),
    ("llama", Lossy(sparse_attention=0.3), 2, CHUNKS, ThreadWorker, (190,)),
    ("llama", EXACT, 2, BY_REQUESTS | {"partition": "heads"}, ThreadWorker, (44, 171)),
    ("llama", EXACT, 3, BY_REQUESTS | {"queries_first": True}, ThreadWorker, (41, 90, 222)),
    ("gemma2", EXACT, 2, CHUNKS | {"queries_first": True}, NetWorker, (150, 240, 310)),
    ("gemma2", EXACT, 3, BY_REQUESTS | {"partition": "tokens"}, ThreadWorker, (84, 300)),
])  # fmt: skip
def test_only_lost_sequences_are_computed_again(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, lossy: Lossy, workers: int,
    fields: dict[str, Any], kind: type[ThreadWorker], at: tuple[int, ...],
) -> None:  # fmt: skip
    known = families(family)
    prefill = fields.get("prefill_tokens", 2048)
    expected = greedy(known) if lossy == EXACT else alone(known, lossy=lossy, prefill_tokens=prefill)
    losses = Losses(monkeypatch, at, kind)
    job = Job(known, workers, fields, lossy=lossy, offload_dir=tmp_path)
    assert job.tokens == expected
    assert len(losses.lost) == len(job.summary.replanned) == len(at)
    prompts = dict(enumerate(LENGTHS))
    again = losses.check(prompts)
    assert 0 < again < len(at) * sum(LENGTHS)
    assert job.summary.computed_prompt_tokens == sum(LENGTHS) + again
    for number, said in enumerate(job.summary.replanned):
        count = len(losses.held(number))
        assert f"worker; {count} row{'s' * (count > 1)} {PART} {'are' if count > 1 else 'is'} computed again" in said


@pytest.mark.parametrize(("family", "fields", "at"), [
    ("llama", BY_REQUESTS, (20, 100, 180)), ("gemma2", BY_REQUESTS, (33, 99)), ("gemma2", CHUNKS, (29, 160, 330)),
    ("gpt-oss", BY_REQUESTS | {"schedule": "zigzag"}, (70, 130)),
])  # fmt: skip
def test_samples_and_common_prefixes(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, fields: dict[str, Any],
    at: tuple[int, ...],
) -> None:  # fmt: skip
    """A lost worker takes the pages of prefixes with it; the same prefixes elsewhere stay."""
    known = families(family)
    a, b, c, d = (known.prompts[i] for i in (3, 1, 5, 4))
    rows = [a + b + d[:5], d, a + d[:7], a + b + c, a[:20] + c, a, a + b + d[:1]]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, n=3, temperature=1.0, seed=3)
    expected = alone(known, rows, params)
    losses = Losses(monkeypatch, at)
    job = Job(known, 2, fields, rows, params, offload_dir=tmp_path)
    assert job.tokens == expected
    assert 0 < len(losses.lost) == len(job.summary.replanned)
    assert all(PART in said for said in job.summary.replanned)


@pytest.mark.parametrize("at", [(1,), (3, 4), (24, 25, 26)], ids=str)
def test_losses_while_prompts_are_computed(families: Any, monkeypatch: pytest.MonkeyPatch, at: tuple[int, ...]) -> None:
    """The first calls write and read pages of prompts, which are cut into pieces of 7 tokens."""
    known, losses = families("llama"), Losses(monkeypatch, at, NetWorker)
    fields = dict(gpu_batch_size=4, num_gpu_batches=2, cache={"workers": 0.7, "device": 0.3}, prefill_tokens=7)
    job = Job(known, 2, fields, params=SamplingParams(max_tokens=2, ignore_eos=True))
    assert job.tokens == [[tokens[:2]] for tokens in known.expected]
    sweeps = sorted({sweep for sweep, _ in losses.lost})  # the first sweep, then those that repeat it
    assert sweeps == list(range(len(sweeps)))
    assert 1 <= len(sweeps) <= len(losses.lost) <= len(at)  # calls in short succession may meet one sweep
    assert losses.check(dict(enumerate(LENGTHS))) == 0
    assert job.summary.computed_prompt_tokens == sum(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [EXACT, Lossy(cache="int4")], ids=str)
def test_scores(families: Any, monkeypatch: pytest.MonkeyPatch, lossy: Lossy) -> None:
    known = families("llama")
    pairs = known.prompts[:-1], [prompt[:6] for prompt in known.prompts[1:]]
    options: dict[str, Any] = dict(device="sim", lossy=lossy)
    with Engine(known.directory, policy=Policy(3, 1, prefill_tokens=7), **options) as engine:
        expected = [r.logprobs for r in engine.score(*pairs)]
    Losses(monkeypatch, (5, 30), NetWorker)
    policy = Policy(3, 1, prefill_tokens=7, cache=ALL)
    with Engine(known.directory, policy=policy, attention_workers=2, worker_mem="4M", **options) as engine:
        assert [r.logprobs for r in engine.score(*pairs)] == expected
        assert len(engine.summary.replanned) == 2
        assert engine.summary.scored_tokens == sum(map(len, pairs[1]))


def test_late_answers_of_other_workers_change_nothing(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """worker2 still computes answers of the sweep that broke off, in buffers that the next sweep uses. There are four
    gpu_batches for each worker, so question 5 to worker1 is the first of layer 1, when one answer of layer 0 has come.
    """
    attend = Answers.attend

    def slow(answers: Answers, asked: Any) -> Any:
        time.sleep(0.05)
        return attend(answers, asked)

    known, losses = families("llama"), Losses(monkeypatch, (5,), calls=["ask"], place="worker1")
    monkeypatch.setattr(Answers, "attend", slow)
    job = Job(known, 2, dict(gpu_batch_size=1, num_gpu_batches=8, cache=ALL, slots=3),
              params=SamplingParams(max_tokens=3, ignore_eos=True))  # fmt: skip
    assert job.tokens == [[tokens[:3]] for tokens in known.expected]
    assert losses.lost == [(1, "worker1")]


@pytest.mark.slow
def test_several_losses_at_once(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are computed again if another worker turns out to be lost, too."""
    attend = Answers.attend

    class All(Losses):
        def break_off(self, worker: ThreadWorker) -> None:
            for each in self.workers[-2:]:
                each.link.close()

    monkeypatch.setattr(Answers, "attend", lambda *args: (time.sleep(0.05), attend(*args))[1])
    known, losses = families("llama"), All(monkeypatch, (9,), calls=["ask"])
    job = Job(known, 2, dict(gpu_batch_size=1, num_gpu_batches=8, cache=ALL, slots=3),
              params=SamplingParams(max_tokens=6, ignore_eos=True))  # fmt: skip
    assert job.tokens == [[tokens] for tokens in known.expected]
    assert losses.lost == [(1, "worker1"), (1, "worker2")]
    assert len(job.summary.replanned) == 2
    assert all("; 8 unfinished rows are computed again" in said for said in job.summary.replanned)


def test_a_loss_while_a_worker_is_replaced(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first new worker dies at once: all rows are computed again with a second one."""
    made = list[ThreadWorker]()

    class Dying(ThreadWorker):
        def allocate(self, *args: Any, **options: Any) -> int | None:
            if self not in made:
                made.append(self)
                if len(made) == 3:
                    self.link.close()
            return super().allocate(*args, **options)

    known = families("llama")
    Losses(monkeypatch, (41,), Dying)
    job = Job(known, 2, BY_REQUESTS, params=SamplingParams(max_tokens=6, ignore_eos=True))
    assert job.tokens == [[tokens] for tokens in known.expected]
    assert len(made) == 4
    (said,) = job.summary.replanned
    assert "continuing with a new worker; 8 unfinished rows are computed again" in said
    assert job.summary.computed_prompt_tokens == 2 * sum(LENGTHS)


def test_a_job_ends_if_workers_are_lost_again_and_again(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ThreadWorker):
        def ask(self, *args: Any) -> Any:
            self.link.close()
            return super().ask(*args)

    monkeypatch.setattr(workers, "LocalWorker", Broken)
    known, said = families("llama"), list[Any]()
    with Engine(known.directory, policy=Policy(8, 1, cache=ALL), device="cpu", attention_workers=1,
                worker_mem="4M") as engine:  # fmt: skip
        with pytest.raises(WorkerLost, match=r"attention worker worker1 \(.*, process \d+\) is lost: "):
            said += engine.generate(known.rows, GREEDY)
        assert len(engine.summary.replanned) == 8
        monkeypatch.setattr(workers, "LocalWorker", ThreadWorker)
    assert not said


@pytest.mark.slow
def test_a_killed_process_changes_nothing(families: Any) -> None:
    """Workers are processes; one is killed in the middle of the job."""
    known, killed = families("llama"), threading.Event()

    def kill(progress: Any) -> None:
        if progress.sweeps == 3 and not killed.is_set():
            os.kill(engine.core.machine.tier("worker1").client.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            killed.set()

    policy = Policy(4, 2, cache={"workers": 0.5, "device": 0.5})
    with Engine(known.directory, policy=policy, device="cpu", attention_workers=1, worker_mem="4M",
                on_sweep=kill) as engine:  # fmt: skip
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        assert [r.token_ids for r in engine.generate(known.rows, params)] == known.expected
        (said,) = engine.summary.replanned
        assert f"4 rows {PART} are computed again" in said
        process = engine.core.machine.tier("worker1").client.process  # type: ignore[attr-defined]
    assert process.poll() == 0  # it has ended with the engine


def test_regions_of_a_tier_stay() -> None:
    """A new worker has memory for them, under the same handles, and the ledger has them once."""
    memory = [1 << 16, 1 << 16, 1 << 12]
    tier = WorkerTier(lambda place: ThreadWorker(place, memory.pop(0), 1), "worker1")
    first, second = tier.allocate(4096, "one"), tier.allocate(10_000, "two")
    tier.free(first, "one")
    tier.client.link.close()
    tier.renew()
    third, data = tier.allocate(4096, "three"), torch.arange(10_000).to(torch.uint8)
    assert third.place not in (first.place, second.place)
    tier.store(data, second)
    tier.load(second, found := torch.zeros(10_000, dtype=torch.uint8))
    assert torch.equal(found, data)
    assert tier.ledger.entries == {"two": 12288, "three": 4096}
    with pytest.raises(OutOfMemory, match="two"):
        tier.renew()
    for region, what in ((second, "two"), (third, "three")):
        tier.free(region, what)
    assert tier.ledger.used == 0
    tier.close()
