"""Memory of a job ends with the job, however it ends, with the cyclic garbage collector off."""

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.runtime.execute import Executor
from flexengine.runtime.lane import Thread
from flexengine.schedule.tasks import Compute, Task
from flexengine.tier import memory
from flexengine.worker.worker import Worker
from tests.helpers.families import NEW

GREEDY = SamplingParams(NEW, ignore_eos=True)
SPLIT = (0.4, 0.3, 0.3)
POLICIES = {
    "spread": Policy(gpu_batch_size=2, num_gpu_batches=4, weights=SPLIT, cache=SPLIT, activations=SPLIT),
    "delegated": Policy(gpu_batch_size=4, num_gpu_batches=2, cache=(0.5, 0.5, 0), delegate="host"),
    "resident": Policy(gpu_batch_size=8, num_gpu_batches=1),
}


class Regions:
    """Regions of RAM that memory tiers have handed out: whether their memory is still mapped."""

    def __init__(self) -> None:
        self.made: list[tuple[weakref.ref[Any], int]] = []

    def buffer(self, nbytes: int, pinned: bool = False) -> torch.Tensor:
        """Stands for memory.aligned_buffer."""
        pages = mmap.mmap(-1, max(nbytes, 1))
        self.made.append((weakref.ref(pages), nbytes))
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]

    @property
    def alive(self) -> int:
        """Bytes of the regions that some tensor still refers to."""
        return sum(nbytes for ref, nbytes in self.made if ref() is not None)


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Regions]:
    """All regions of RAM from now on, while no garbage is collected."""
    found = Regions()
    monkeypatch.setattr(memory, "aligned_buffer", found.buffer)
    gc.disable()
    yield found
    gc.enable()


def layers_of(task: Compute) -> range:
    return range(task.cell.layer, task.cell.layer + task.layers)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Raise the error in this list in a compute task of the next job's second sweep."""
    errors: list[BaseException] = []
    perform = Worker.perform

    def failing(worker: Worker, task: Task) -> None:
        if errors and isinstance(task, Compute) and task.cell.sweep == 1 and 1 in layers_of(task):
            raise errors.pop()
        perform(worker, task)

    monkeypatch.setattr(Worker, "perform", failing)
    return errors


def booked(engine: Engine) -> dict[str, int]:
    """Ledger entries of RAM by purpose, of both memory tiers."""
    ledgers = {id(tier.ledger): tier.ledger for tier in (engine.core.machine.device, engine.core.machine.host)}
    entries = [item for ledger in ledgers.values() for item in ledger.entries.items()]
    return {what: sum(n for name, n in entries if name == what) for what, _ in entries}


def run_out(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    fail.append(MemoryError())
    with pytest.raises(Exception, match="memory ran out"):
        engine.generate(rows, GREEDY)


def break_down(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    fail.append(ArithmeticError("broken"))
    try:
        engine.generate(rows, GREEDY)
    except ArithmeticError:
        check()  # not only when the error is forgotten


def interrupt(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    fail.append(KeyboardInterrupt())
    try:
        engine.generate(rows, GREEDY)
    except KeyboardInterrupt:
        check()


def close_early(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    stream: Any = engine.stream([rows[0] | {"max_tokens": 2}, *rows[1:]], GREEDY)
    assert next(stream).index == 0
    stream.close()
    check()


def leave_open(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    next(iter(engine.stream([rows[0] | {"max_tokens": 2}, *rows[1:]], GREEDY)))


def fail_outside(engine: Engine, rows: list[Any], fail: list[BaseException], check: Callable[[], None]) -> None:
    def on_sweep(progress: Any) -> None:
        raise LookupError("the caller's own")

    engine.on_sweep = on_sweep
    try:
        engine.generate(rows, GREEDY)
    except LookupError:
        check()
    engine.on_sweep = None


ENDS = (run_out, break_down, interrupt, close_early, leave_open, fail_outside)
CASES = [("cpu", "spread", end) for end in ENDS] + [("sim", "delegated", end) for end in ENDS]
CASES += [("cpu", "resident", break_down), ("cpu", "resident", interrupt), ("sim", "spread", break_down)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy", "end"), CASES)
def test_a_job_leaves_nothing_but_weights(
    families: Any, tmp_path: Path, regions: Regions, fail: list[BaseException], kind: str, policy: str, end: Any
) -> None:
    """Every byte of RAM that is still mapped after a job, however it ended, is a byte of a weight in the ledger."""
    family = families("llama")
    with Engine(family.directory, policy=POLICIES[policy], device=kind, offload_dir=tmp_path) as engine:

        def check() -> None:
            entries = booked(engine)
            assert set(entries) <= {"weights", "weight slots", "weight staging"}
            assert regions.alive == sum(entries.values())

        assert [r.token_ids for r in engine.generate(family.rows, GREEDY)] == family.expected
        check()
        end(engine, family.rows, fail, check)
        check()
        assert [r.token_ids for r in engine.generate(family.rows, GREEDY)] == family.expected
        check()
    assert regions.alive == 0


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_the_failed_pool_is_gone_before_the_smaller_one_is_made(
    families: Any, tmp_path: Path, regions: Regions, fail: list[BaseException], kind: str
) -> None:
    family, left = families("llama"), list[tuple[int, int]]()
    sizes = {"device_mem": "64M", "host_mem": "64M" if kind == "sim" else None}
    with Engine(family.directory, device=kind, offload_dir=tmp_path, **sizes) as engine:
        engine.generate(family.rows, GREEDY)
        smaller = engine.planner.smaller

        def spy(*args: Any) -> Any:
            left.append((regions.alive, sum(booked(engine).values())))
            return smaller(*args)

        engine.planner.smaller = spy  # type: ignore[method-assign]
        fail.append(MemoryError())
        assert [r.token_ids for r in engine.generate(family.rows, GREEDY)] == family.expected
        assert len(engine.summary.replanned) == 1
        weights = booked(engine)["weights"]
    assert left == [(weights, weights)]


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_job_leaves_no_garbage_of_its_own(families: Any, tmp_path: Path, kind: str) -> None:
    """No object of flexengine is part of a reference cycle once a job has ended."""
    family = families("llama")
    with Engine(family.directory, policy=POLICIES["spread"], device=kind, offload_dir=tmp_path) as engine:
        engine.generate(family.rows, GREEDY)
        gc.collect()
        gc.disable()
        try:
            engine.generate(family.rows, GREEDY)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            names = {f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not [name for name in names if name.startswith(("flexengine", "torch", "numpy"))]


def test_all_lanes_close_though_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised, unless the job itself has failed: then it is a note of the job's error."""
    close = Thread.close

    def failing(lane: Thread) -> None:
        close(lane)
        if lane.name in ("a", "b"):
            raise ArithmeticError(f"lane {lane.name}")

    def executor() -> Executor:
        made = Executor(lambda task: None, "thread")
        made.lanes = {name: Thread(name) for name in ("a", "b", "c")}
        return made

    monkeypatch.setattr(Thread, "close", failing)
    first, second = executor(), executor()
    threads = [lane._thread for each in (first, second) for lane in each.lanes.values()]  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError, match="lane a"), first:
        pass
    with pytest.raises(LookupError) as caught, second:
        raise LookupError("the job's own")
    assert len(caught.value.__notes__) == 2
    assert "lane a" in caught.value.__notes__[0]
    assert not [thread for thread in threads if thread.is_alive()]
