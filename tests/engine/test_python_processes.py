"""An engine in processes, forks, threads and tasks: lines of the table in docs/python.md, "What an engine takes"."""

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, InvalidInput
from flexengine.activity import Activity
from flexengine.engine.job import Job
from flexengine.errors import ModelNotFound
from tests.helpers.patience import PATIENCE, until
from tests.helpers.speaker import LONG, SHORT, TEXTS, opened, tokens


def test_an_engine_is_not_copied_and_a_closed_one_says_so(directory: Path) -> None:
    with opened(directory) as engine:
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidInput, match="can be neither copied nor pickled; use this one, or open another"):
                call(engine)
    for again in (copy.copy, copy.deepcopy, pickle.dumps, lambda closed: closed.__enter__()):
        with pytest.raises(InvalidInput, match="this engine is closed; open a new Engine"):
            again(engine)
    engine.close()


def test_a_fork_of_an_engine_is_refused(engine: Any) -> None:
    """In the child; the parent's files and threads stay as they are, whatever the child does."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            try:
                engine.generate("One")
            except InvalidInput as error:
                os.write(write, str(error).encode())
            engine.close()
        os._exit(0)
    os.close(write)
    with open(read) as said:
        assert "; start processes by multiprocessing.get_context('spawn') and open an Engine in each" in said.read()
    assert os.waitpid(child, 0)[1] == 0
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_fork_of_a_process_whose_engine_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may open an engine, as no threads were started."""
    monkeypatch.setattr("flexengine.engine.core._openers", set())
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with pytest.raises(ModelNotFound):
        Engine("nothing", device="cpu", device_mem="1G")
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in the fork
    with pytest.raises(ModelNotFound):
        Engine("nothing", device="cpu", device_mem="1G")


@pytest.mark.slow  # forks of a process with torch
def test_a_new_engine_in_a_fork(engine: Any, directory: Path) -> None:
    """It is refused, as torch would wait for threads that the child lacks; with one thread it runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).add(1)  # this thread's OpenMP threads begin, which the child lacks
    torch.set_num_threads(threads)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(30)
        with contextlib.suppress(BaseException):
            torch.set_num_threads(2)
            with contextlib.suppress(InvalidInput):
                opened(directory).close()
                os._exit(6)
            torch.set_num_threads(1)
            with opened(directory) as new:
                os.write(write, str(tokens(new.generate(TEXTS, SHORT))).encode())
            os._exit(5)
        os._exit(7)
    os.close(write)
    with open(read) as said:
        assert said.read() == str(engine.expected)
    assert os.waitpid(child, 0)[1] == 5 << 8


@pytest.mark.slow  # forks of a process with torch
def test_a_fork_within_a_stream_leaves_it_to_the_parent(engine: Any) -> None:
    """The child can go on to its end, and drop the stream."""
    stream = engine.stream(TEXTS * 4, SHORT)
    next(stream)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            next(stream)
        except InvalidInput as error:
            stream = None
            gc.collect()
            os._exit(5 if "and open an Engine in each" in str(error) else 6)
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 5 << 8
    if (child := os.fork()) == 0:
        signal.alarm(20)
        stream.close()
        os._exit(5)
    assert os.waitpid(child, 0)[1] == 5 << 8
    assert len(tokens(list(stream))) == 7
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_thread_may_run_a_job_and_a_second_one_is_told(engine: Any) -> None:
    found: list[Any] = []
    stream = engine.stream(TEXTS, SHORT)
    next(stream)

    def other() -> None:
        try:
            found.append(engine.generate(TEXTS, SHORT))
        except InvalidInput as error:
            found.append(str(error))

    for _ in range(2):
        (thread := threading.Thread(target=other)).start()
        thread.join()
        stream.close()
    assert "generating already, in this thread or another one; let the other call end, or call stop()" in found[0]
    assert tokens(found[1]) == engine.expected


def test_stop_ends_a_job_and_the_engine_goes_on(engine: Any) -> None:
    engine.stop()  # no job runs
    engine.on_sweep = lambda _: engine.stop()
    try:
        with pytest.raises(InvalidInput, match=r"the job was ended before all rows were done, by stop\(\)"):
            engine.generate(TEXTS, LONG)
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps == 1
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_cancelled_task_stops_its_job(engine: Any) -> None:
    began, go_on = threading.Event(), threading.Event()
    engine.on_sweep = lambda _: (began.set(), go_on.wait(PATIENCE))

    async def cancelled() -> None:
        task = asyncio.create_task(engine.in_thread(engine.generate, TEXTS, LONG))
        await asyncio.to_thread(began.wait, PATIENCE)
        task.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)  # after the job was stopped
        await task

    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps < 80
    assert tokens(asyncio.run(engine.in_thread(engine.generate, TEXTS, SHORT))) == engine.expected


def test_a_cancelled_task_leaves_the_jobs_of_others(engine: Any) -> None:
    async def both() -> Any:
        began, other, ends = asyncio.Event(), asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        engine.on_sweep = lambda _: loop.call_soon_threadsafe(began.set)
        first = asyncio.create_task(engine.in_thread(engine.generate, TEXTS, LONG))
        await began.wait()
        waits = lambda: (loop.call_soon_threadsafe(other.set), ends.wait(PATIENCE))  # noqa: E731
        second = asyncio.create_task(engine.in_thread(waits))
        await other.wait()
        second.cancel()
        loop.call_soon(ends.set)
        with pytest.raises(asyncio.CancelledError):
            await second
        return await first

    try:
        assert len(tokens(asyncio.run(both()))) == 2
    finally:
        engine.on_sweep = None


def test_a_cancelled_task_of_another_thread_goes_on_until_stop(engine: Any) -> None:
    """`asyncio.to_thread` cannot end its thread; the error of the next call names what can."""
    began, again = threading.Event(), threading.Event()
    engine.on_sweep = lambda _: (began.set(), again.wait(PATIENCE))

    async def cancelled() -> None:
        task = asyncio.create_task(asyncio.to_thread(engine.generate, TEXTS, LONG))
        await asyncio.to_thread(began.wait, PATIENCE)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with pytest.raises(InvalidInput, match=r"or call stop\(\), as a task .* `await engine.in_thread\(...\)` runs"):
            engine.generate(TEXTS, SHORT)
        engine.stop()
        again.set()

    try:
        asyncio.run(cancelled())  # waits for its threads
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps == 1
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_task_that_is_cancelled_between_results_ends_the_stream(engine: Any) -> None:
    async def reads() -> None:
        for _ in engine.stream(TEXTS, SHORT):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(reads())
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    gc.collect()
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_close_ends_the_job_of_another_thread(directory: Path) -> None:
    began, engine = threading.Event(), opened(directory)
    engine.on_sweep = lambda _: (began.set(), until(lambda: engine._job.stopped.is_set()))  # not before
    (thread := threading.Thread(target=lambda: began.wait(PATIENCE) and engine.close())).start()
    with pytest.raises(InvalidInput, match=r"the job was ended before all rows were done, by close\(\)"):
        engine.generate(TEXTS, LONG)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    with pytest.raises(InvalidInput, match="this engine is closed; open a new Engine"):
        engine.generate("One")


def test_close_in_a_function_that_the_job_calls(directory: Path) -> None:
    engine = opened(directory)
    engine.on_sweep = lambda _: engine.close()
    with pytest.raises(InvalidInput, match=r"by close\(\) of this engine"):
        engine.generate(TEXTS, LONG)
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())


def test_close_in_a_progress_function_that_another_thread_calls(directory: Path) -> None:
    """As the watchdog does, while the job waits for the function."""
    left: list[bool] = []

    def progress(_: Activity) -> None:
        if threading.current_thread() is not threading.main_thread():
            engine.close()

    def sweep_ended(_: Any) -> None:
        thread = threading.Thread(target=engine.listener, args=[Activity("other", "work")], daemon=True)
        thread.start()
        thread.join(PATIENCE)
        left.append(thread.is_alive())

    engine = opened(directory, progress=progress)
    engine.on_sweep = sweep_ended
    with pytest.raises(InvalidInput, match=r"by close\(\) of this engine"):
        engine.generate(TEXTS, LONG)
    assert left == [False]
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())


def test_several_threads_close_an_engine_whose_stream_waits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job takes some time to end; meanwhile the stream is asked for its next result."""
    ends, wait = threading.Event(), Job._write_trace
    monkeypatch.setattr(Job, "_write_trace", lambda job: (ends.set(), time.sleep(0.1), wait(job)))
    engine = opened(directory)
    stream = engine.stream(TEXTS * 4, SHORT)
    next(stream)
    threads = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert ends.wait(PATIENCE)
    with pytest.raises(InvalidInput, match="the engine was closed before this stream had ended"):
        next(stream)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())
