"""Slices that take turns on several engines: the tokens of transformers, for every order."""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flexengine import Engine, Policy, SamplingParams
from flexengine.engine.rates import RateStore
from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.replicas.worker import TurnsWorker
from flexengine.kernels import recycled
from flexengine.model import build
from flexengine.model.linear import FastLinear
from flexengine.schedule.tasks import Op, Task
from flexengine.worker import open_model
from tests.helpers.attention_workers import ThreadWorker
from tests.helpers.families import FAMILIES, NEW, prompts_of, reference
from tests.helpers.replicas import ThreadReplica

ALL = {"workers": 1}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers and replicas be threads of this process."""
    monkeypatch.setattr("flexengine.guests.attention_workers.workers.LocalWorker", ThreadWorker)
    monkeypatch.setattr("flexengine.guests.replicas.client.Replica", ThreadReplica)


def generated(
    directory: Any, prompts: list[list[int]], engines: int, fields: dict[str, Any], new: int = NEW, **options: Any
) -> list[list[int]]:
    options = dict(device="sim", device_mem="64M", attention_workers=1, worker_mem="8M") | options
    with Engine(directory, policy=Policy(**fields), engines=engines, **options) as engine:
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(rows, SamplingParams(max_tokens=new, ignore_eos=True))
        assert [r.error for r in results] == [None] * len(results)
        assert engine.summary.busy.get("replica1", 0.0) > 0 or engines == 1
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("order", ["fixed", "rotational"])
@pytest.mark.parametrize("batches", [2, 3, 4])
def test_tokens_are_those_of_transformers(families: Any, order: str, batches: int, engines: int) -> None:
    known = families("llama")
    fields = dict(gpu_batch_size=-(-len(known.prompts) // batches), num_gpu_batches=batches, cache=ALL, order=order)
    assert generated(known.directory, known.prompts, engines, fields) == known.expected


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_prompts_of_any_length(families: Any, seed: int) -> None:
    """Rows enter and leave at different times, so gpu_batches change from sweep to sweep. Some results are longer than
    a page, and results of native kernels are large enough for memory that is used again."""
    rng = random.Random(seed)
    known = families(rng.choice(["llama", "opt", "qwen3"]))
    lengths = tuple(rng.choice([1, 2, 15, 16, 17, rng.randrange(1, 60)]) for _ in range(rng.randrange(5, 14)))
    prompts, new = prompts_of(601, lengths), rng.choice([3, 9, 20])
    fields = dict(
        gpu_batch_size=rng.randrange(1, 5), num_gpu_batches=rng.choice([2, 3, 4, 5]), order="rotational",
        schedule=rng.choice(["continuous", "zigzag", "diagonal", "row"]), prefill_tokens=rng.choice([16, 2048]),
        cache=rng.choice([ALL, {"workers": 0.6, "device": 0.4}]),
    )  # fmt: skip
    engines, workers = rng.choice([2, 3, 4]), rng.choice([1, 2])
    expected = reference(known.model, prompts, new)
    assert generated(known.directory, prompts, engines, fields, new, attention_workers=workers) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_of_all_families(families: Any, family: str) -> None:
    """Windows, sinks, soft caps, parallel blocks, experts, fused projections."""
    known = families(family)
    fields = dict(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, order="rotational")
    assert generated(known.directory, known.prompts, 2, fields) == known.expected


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("partition", ["heads", "tokens"])
def test_tokens_of_divided_workers(families: Any, partition: str) -> None:
    known = families("llama")
    fields = dict(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, order="rotational", partition=partition)
    assert generated(known.directory, known.prompts, 3, fields, attention_workers=2) == known.expected


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe", "mixtral"])
def test_no_projection_is_computed_twice(families: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Of layers that modules compute: as many products as on one engine."""
    known, calls = families(family), Counter[str]()
    forward = FastLinear.forward

    def counted(self: FastLinear, x: Any) -> Any:
        if not x.is_meta:
            calls[f"{self.in_features} {self.out_features}"] += 1
        return forward(self, x)

    monkeypatch.setattr(FastLinear, "forward", counted)
    monkeypatch.setattr(build, "use_native_layers", lambda *_: {})
    monkeypatch.setattr(open_model, "build", build.build)  # neither from the skeletons of other tests, nor for them
    monkeypatch.setattr(RateStore, "measure_quickly", lambda *_: False)  # products of measurements are not counted
    fields, found = dict(gpu_batch_size=3, num_gpu_batches=3, cache=ALL), list[Counter[str]]()
    for engines, order in ((1, "fixed"), (2, "rotational")):
        calls.clear()
        assert generated(known.directory, known.prompts, engines, fields | {"order": order}) == known.expected
        found.append(calls.copy())
    assert found[0] == found[1]
    assert found[0].total() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_tokens_of_large_gpu_batches(tmp_path: Path) -> None:
    """Hidden states of at least 64 KiB are in memory that native kernels use again."""
    config = LlamaConfig(
        vocab_size=601, hidden_size=512, intermediate_size=640, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.2, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    rows, new = 34, 4
    assert 4 * rows * config.hidden_size > recycled.SMALL
    prompts = prompts_of(601, tuple(1 + k % 9 for k in range(3 * rows)))
    fields = dict(gpu_batch_size=rows, num_gpu_batches=3, cache=ALL, order="rotational")
    expected = reference(model, prompts, new)
    assert generated(tmp_path, prompts, 2, fields, new, device_mem="256M", worker_mem="64M") == expected


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fixed", "rotational"])
def test_tokens_of_processes(families: Any, order: str) -> None:
    known = families("llama")
    fields = dict(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, order=order)
    assert generated(known.directory, known.prompts, 2, fields) == known.expected


@pytest.mark.slow
def test_a_lost_engine_ends_the_job(families: Any) -> None:
    """With a message that names it. The engine's next job fails, too, and closes."""
    known = families("llama")
    policy = Policy(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, order="rotational")

    def kill(progress: Any) -> None:
        if progress.sweeps == 2:
            (member,) = engine.core.replicas.members
            os.kill(member.process.pid, signal.SIGKILL)

    options: dict[str, Any] = dict(device="sim", device_mem="64M", attention_workers=1, worker_mem="8M")
    engine = Engine(known.directory, policy=policy, engines=2, on_sweep=kill, **options)
    with engine, pytest.raises(StageLost, match="1 of 0 to 1"):
        engine.generate(known.rows, SamplingParams(max_tokens=NEW, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_a_stopped_job_leaves_the_engines_usable(families: Any) -> None:
    """Before the next job, the first engine reads and drops the answers of a replica that an interrupted job left."""
    known = families("llama")
    policy = Policy(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, order="rotational")
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with Engine(
        known.directory, policy=policy, engines=2, device="sim", device_mem="64M", attention_workers=1, worker_mem="8M"
    ) as engine:
        perform, left = TurnsWorker.perform, [12]

        def failing(self: TurnsWorker, task: Task) -> None:
            left[0] -= task.op is Op.HAND_OVER
            if not left[0]:
                raise RuntimeError("enough")
            perform(self, task)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TurnsWorker, "perform", failing)
            with pytest.raises(RuntimeError, match="enough"):
                engine.generate(known.rows, greedy)
        assert [r.token_ids for r in engine.generate(known.rows, greedy)] == known.expected


@pytest.mark.parametrize(
    ("fields", "options", "fault"),
    [
        (dict(order="rotational"), dict(engines=1), "there is one engine; set engines"),
        (dict(queries_first=True), dict(engines=2), "without queries_first"),
        (dict(weights=(0.5, 0.5, 0)), dict(engines=2), "need all weights on the device"),
        (None, dict(engines=2, attention_workers=0, worker_mem=None), "add attention_workers"),
    ],
)
@pytest.mark.usefixtures("threads")
def test_what_several_engines_refuse(families: Any, fields: Any, options: dict[str, Any], fault: str) -> None:
    policy = None if fields is None else Policy(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, **fields)
    given: dict[str, Any] = dict(device="sim", device_mem="64M", attention_workers=1, worker_mem="8M") | options
    with pytest.raises(InvalidInput, match=fault), Engine(families("llama").directory, policy=policy, **given) as made:
        made.generate(families("llama").rows, SamplingParams(max_tokens=2))
