"""OpenMP threads that a thread ends and starts again."""

import os
import time

import pytest
import torch

from flexengine.runtime.execute import Executor
from flexengine.system import openmp
from flexengine.system.openmp import end_idle_threads
from tests.helpers.patience import PATIENCE, in_time


def threads(expected: int | None = None) -> int:
    """Return the number of this process's threads. Wait for the expected one, but not forever."""
    end = time.monotonic() + PATIENCE / 2
    while (number := len(os.listdir("/proc/self/task"))) != (expected or number) and time.monotonic() < end:
        time.sleep(0.001)
    return number


@pytest.mark.skipif(openmp._gomp() is None, reason="torch has another OpenMP library than libgomp")
def test_the_threads_end_before_lanes_compute_and_start_again() -> None:
    """A new thread starts OpenMP threads of its own, beside those of the thread that runs the tests."""

    def work() -> None:
        torch.set_num_threads(3)
        before, x = threads(), torch.arange(1 << 20)
        executor = Executor(lambda _: None, "inline")
        for end, started in ((end_idle_threads, 0), (executor.__enter__, 1)):  # an executor's watchdog is a thread
            first = x + x
            assert threads(before + 2) == before + 2
            end()
            assert threads(before + started) == before + started
            assert torch.get_num_threads() == 3
            assert torch.equal(x + x, first)
            assert threads(before + started + 2) == before + started + 2
            end_idle_threads()
        executor.__exit__(None, None, None)
        assert threads(before) == before

    number = torch.get_num_threads()
    try:
        in_time(work)
    finally:
        torch.set_num_threads(number)


def test_other_openmp_libraries_keep_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool serves all threads there. An old libgomp cannot end its threads."""
    monkeypatch.setattr(openmp, "_gomp", lambda: None)
    end_idle_threads()
