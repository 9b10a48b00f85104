"""Memory that runs out while a job runs: a smaller block, the same results, and at last an error with the remedy."""

import contextlib
import errno
import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams, Summary
from flexengine.activity import Activity
from flexengine.engine.recovery import REPLANS, halved
from flexengine.errors import OutOfMemory, RanOut
from flexengine.model.forward import Layer
from flexengine.plan.workload import Workload
from flexengine.runtime.execute import shortage
from flexengine.schedule.tasks import Op, Task
from flexengine.shell.commands import messages, run
from flexengine.worker.worker import Worker
from tests.helpers.families import NEW
from tests.helpers.listening import Heard

GREEDY = SamplingParams(NEW, ignore_eos=True)
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 KiB. GPU 0 has a total capacity of 1 GiB")
ERRORS = {
    "gpu": lambda: torch.OutOfMemoryError(*GPU.args),
    "ledger": lambda: OutOfMemory("device", "activations", 4096, 10, 20),
    "ram": lambda: MemoryError(),
    "torch": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
                                  " memory: you tried to allocate 512 bytes. Error code 12"),
    "map": lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
}  # fmt: skip


class Faults:
    """Counts the tasks of all engines. Tasks fail for which `when(worker, task)` is true."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.raised = 0
        self.kind = "ledger"
        self.when: Callable[[Worker, Task], bool] = lambda worker, task: False
        perform = Worker.perform

        def failing(worker: Worker, task: Task) -> None:
            self.count += 1
            if self.when(worker, task):
                self.raised += 1
                raise ERRORS[self.kind]()
            perform(worker, task)

        monkeypatch.setattr(Worker, "perform", failing)

    def at(self, *numbers: int) -> None:
        """Fails the tasks of these numbers, counted from now on."""
        self.count = self.raised = 0
        self.when = lambda worker, task: self.count in numbers


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def engine(family: Any, **options: Any) -> Engine:
    return Engine(family.directory, **{"device": "sim", "device_mem": "64M", "host_mem": "64M"} | options)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_a_smaller_block_and_the_same_tokens(families: Any, faults: Faults, kind: str, device: str) -> None:
    """Memory runs out in the fourth sweep, reported by ledger, torch or system; the tokens equal those of
    transformers."""
    family, heard = families("llama"), Heard()
    given = {} if device == "sim" else {"device": "cpu", "host_mem": None, "device_mem": "1G"}
    faults.kind = kind
    with engine(family, progress=heard, **given) as made:
        faults.when = lambda worker, task: faults.raised < 1 and task.cell.sweep == 3 and task.op is Op.COMPUTE
        found = made.generate(family.rows, GREEDY)
        summary, block = made.summary, made.layout.policy.block_size if made.layout else 0
    assert faults.raised == 1
    assert [r.token_ids for r in found] == family.expected
    assert block == 4
    told = [record.text for record in heard if record.level == logging.WARNING]
    assert list(summary.replanned) == told
    assert (summary.rows, summary.failed, summary.generated_tokens) == (8, 0, 8 * NEW)
    what = "activations" if kind == "ledger" else "compute, Cell(sweep=3, layer="
    (said,) = told
    assert said.startswith("device memory ran out: there was no room for " + what)
    assert "instead of a block of 8" in said
    assert "continuing with a block of 4" in said
    assert "8 unfinished rows are computed again (replanned 1 of at most 3 times)" in said


def counted(summary: Summary) -> list[int]:
    return [summary.rows, summary.failed, summary.prompt_tokens, summary.generated_tokens]


@pytest.mark.usefixtures("one_thread")  # with two, this memory gives blocks of one sequence
def test_any_task(families: Any, faults: Faults) -> None:
    """Memory that runs out at one of 12 tasks, spread over a job of all three tiers: sampled text, log probabilities,
    second samples and rows of unequal length come out as if nothing had happened."""
    family = families("mistral")
    params = SamplingParams(NEW, temperature=0.9, seed=5, logprobs=2, ignore_eos=True)
    rows = [row | {"max_tokens": 1 + 3 * i % NEW, "n": 1 + i % 2} for i, row in enumerate(family.rows)]
    with engine(family, device_mem=900_000, host_mem=4_100_000) as made:
        expected = made.generate(rows, params)
        assert made.layout is not None
        assert made.layout.policy.block_size > 1
        moved = {link for link, nbytes in made.summary.bytes.items() if nbytes}
        counts = counted(made.summary)
        tasks = faults.count
        assert {"h2d", "disk_read"} <= moved
        capacity = made.core.machine.capacity
        for number in range(1, tasks, -(-tasks // 12)):
            faults.at(number)
            made.core.machine.capacity = capacity
            assert made.generate(rows, params) == expected
            assert len(made.summary.replanned) == faults.raised == 1
            assert counted(made.summary) == counts


def test_memory_that_is_not_there(families: Any, faults: Faults) -> None:
    """A device with less memory than reported: the job is replanned until its bookings fit, and later jobs are not."""
    family = families("llama")
    with engine(family) as made:
        made.generate(family.rows, GREEDY)
        assert made.layout is not None
        booked = made.layout.total("device")
    real, kept = int(0.95 * booked), list[int]()

    def too_much(worker: Worker, _: Task) -> bool:
        kept.append(worker.weights.machine.device.ledger.used)
        return kept[-1] > real

    faults.when = too_much
    with engine(family) as made:
        assert [r.token_ids for r in made.generate(family.rows, GREEDY)] == family.expected
        assert 1 <= len(made.summary.replanned) <= REPLANS
        faults.raised = 0
        assert [r.token_ids for r in made.generate(family.rows, GREEDY)] == family.expected
        assert not faults.raised  # what has been learned holds for the next job
    assert kept[-1] <= real


def test_rows_that_are_finished_stay(families: Any, faults: Faults) -> None:
    """Three shortages are replanned, the fourth raises an error with the finished rows, each of which was yielded
    once."""
    family = families("llama")
    rows = [row | {"max_tokens": 2 + i} for i, row in enumerate(family.rows)]
    faults.when = lambda worker, task: task.cell.sweep == 3 and task.op is Op.COMPUTE
    with engine(family) as made:
        with pytest.raises(RanOut, match=r"a block of 1 .* smaller 3 times; end other programs that use") as caught:
            made.generate(rows, GREEDY)
        assert len(made.summary.replanned) == REPLANS == faults.raised - 1
        done = caught.value.results
        assert [r.index for r in done] == [0, 1]  # of 2 and 3 tokens; all others want a fourth sweep
        assert [r.token_ids for r in done] == [family.expected[i][: 2 + i] for i in (0, 1)]
        faults.when = lambda worker, task: False
        assert [r.token_ids for r in made.generate(family.rows, GREEDY)] == family.expected


def test_a_policy_is_not_changed(families: Any, faults: Faults) -> None:
    family = families("llama")
    faults.when = lambda worker, task: task.cell.sweep == 1 and task.op is Op.COMPUTE
    with engine(family, policy=Policy(gpu_batch_size=2, num_gpu_batches=4)) as made:
        with pytest.raises(RanOut) as caught:
            made.generate(family.rows, GREEDY)
        assert made.summary.replanned == ()
    assert faults.raised  # other gpu_batches may have failed before anybody looked
    said = str(caught.value)
    assert "no room for activations (4.10 kB); the policy has a block of 8 (4 gpu_batches of 2)" in said
    assert "; set gpu_batch_size 2 and num_gpu_batches 2, with which " in said
    single = engine(family, policy=Policy(gpu_batch_size=1, num_gpu_batches=1))
    with single, pytest.raises(RanOut, match="set a smaller prefill_tokens, or move a share"):
        single.generate(family.rows, GREEDY)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Run without garbage collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("short", [True, False])
def test_what_was_computed_is_let_go(
    families: Any, faults: Faults, monkeypatch: pytest.MonkeyPatch, overlap: bool, short: bool
) -> None:
    """Forward passes that had paused hold no memory when it is planned anew, or when another error ends the job: they
    end in the thread they belong to, and no garbage need be collected."""
    family, seen, left = families("llama"), list[weakref.ref[Any]](), list[int]()

    def last_layer(worker: Worker, task: Task) -> bool:
        if faults.raised or task.op is not Op.COMPUTE or task.cell.layer != 2:
            return False
        events = [state.event for state in worker._states]
        seen.extend(weakref.ref(event.hidden) for event in events if isinstance(event, Layer))
        return bool(seen)

    def alive(record: Activity | None = None) -> None:
        if record is None or record.level == logging.WARNING:
            left.append(sum(ref() is not None for ref in seen))

    with engine(family, overlap=overlap, progress=alive) as made:
        made.core._weights, faults.when = None, last_layer
        if not short:
            monkeypatch.setitem(ERRORS, "ledger", lambda: ArithmeticError("something else"))
            with contextlib.suppress(ArithmeticError):
                made.generate(family.rows, GREEDY)
            alive()
        assert [r.token_ids for r in made.generate(family.rows, GREEDY)] == family.expected
    assert seen
    assert left == [0]


def test_a_job_goes_on_where_it_was(
    families: Any, faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line: told on stderr, exit code 3 when it is no use, finished rows in the journal, and the output
    of an undisturbed job in the end."""
    family = families("llama")
    source, calm, out = (tmp_path / name for name in ("in.jsonl", "calm.jsonl", "out.jsonl"))
    source.write_text("".join(json.dumps(row | {"max_tokens": 2 + i}) + "\n" for i, row in enumerate(family.rows)))
    words = [str(source), "--model", str(family.directory), "--device", "sim", "--ignore-eos", "--output"]
    assert run.main([*words, str(calm)]) == messages.DONE
    faults.when = lambda worker, task: task.cell.sweep == 3 and task.op is Op.COMPUTE
    capsys.readouterr()
    assert run.main([*words, str(out)]) == messages.FAILED
    told = capsys.readouterr().err
    assert told.count("flexengine: device memory ran out: ") == REPLANS + 1
    assert "Traceback" not in told
    assert not out.exists()
    faults.when = lambda worker, task: False
    assert run.main([*words, str(out)]) == messages.DONE
    assert "2 of 8 rows were done before" in capsys.readouterr().err
    assert out.read_bytes() == calm.read_bytes()


def test_what_errors_say() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    found = shortage(caught.value, gpu=False)
    assert found is not None
    assert (found.tier, found.needed) == ("device", 1 << 52)
    assert (shortage(caught.value, gpu=True) or found).tier == "host"
    gpu = shortage(GPU, gpu=True)
    assert gpu is not None
    assert (gpu.tier, gpu.needed) == ("device", 1536)
    assert shortage(OutOfMemory("disk", "spill", 5, 4, 3), gpu=False) is None
    assert shortage(OSError(errno.ENOSPC, "No space left on device"), gpu=False) is None
    assert shortage(RuntimeError("shapes differ"), gpu=True) is None
    assert shortage(RuntimeError("CUDA error: out of memory"), gpu=True) is not None


@pytest.mark.parametrize(("error", "tier"), [
    (torch.OutOfMemoryError(*GPU.args), "device"),  # GPU memory, of torch
    (RuntimeError("CUDA error: out of memory"), "device"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "device"),
    (OutOfMemory("device", "weights", 4096, 10, 20), "device"),  # a ledger
    (OutOfMemory("host", "weights", 4096, 10, 20), "host"),
    (OutOfMemory("host", "KV cache", 4096), "host"),  # RAM that could not be locked
    (OutOfMemory("device", "what a thread reads", 4096), "host"),  # kernels for a CPU, which attends for the GPU
    (MemoryError(), "host"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 512 bytes."), "host"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),  # a mapping
    (OSError(errno.ENOSPC, "No space left on device"), None),  # a full disk: no smaller block helps
    (OutOfMemory("disk", "spill", 5, 4, 3), None),
])  # fmt: skip
def test_the_tier_that_is_short_is_blamed_beside_a_gpu(error: Exception, tier: str | None) -> None:
    found = shortage(error, gpu=True)
    assert (found.tier if found else None) == tier


@pytest.mark.parametrize("tier", ["device", "host"])
def test_only_the_tier_that_is_short_shrinks(families: Any, tier: str, tmp_path: Path) -> None:
    """The tier in the error gets a smaller budget; the other tier keeps its capacity."""
    with engine(families("llama"), device_mem="1500K", host_mem="7M", offload_dir=tmp_path) as made:
        work = Workload.of([(20, 8)] * 40)
        layout, before = made.plan(work), made.core.machine.capacity
        assert layout.total(tier)
        error = {"device": torch.OutOfMemoryError(*GPU.args), "host": MemoryError()}[tier]
        found = shortage(error, gpu=True)
        assert found is not None
        smaller = made.planner.smaller(work, layout, found.tier, found.needed, None)
        after, other = made.core.machine.capacity, {"device": "host", "host": "device"}[tier]
        assert getattr(after, tier) < layout.total(tier)
        assert getattr(after, other) == getattr(before, other)
        assert smaller.total(tier) <= getattr(after, tier)


def test_halved() -> None:
    assert halved(Policy(16, 5)) == Policy(16, 2)
    assert halved(Policy(5, 1)) == Policy(2, 1)
    assert halved(Policy(1, 1)) is None
