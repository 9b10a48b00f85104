"""A command's message and exit code for an error."""

import pytest

from flexengine.shell.commands.messages import FAILED, exit_code


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
])  # fmt: skip
def test_no_memory_is_told_in_words(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        error.add_note("in task: compute, lane device")
        raise error

    assert exit_code(fails) == FAILED
    said = capsys.readouterr().err
    assert "no more memory (in task: compute, lane device)" in said
    assert "--device-mem" in said
    assert "Traceback" not in said


def test_a_fault_of_ours_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise RuntimeError("odd")

    assert exit_code(fails) == FAILED
    assert "Traceback" in capsys.readouterr().err
