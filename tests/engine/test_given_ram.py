"""Limits of reading rows depend on sizes that the user gave, not on the memory that is free."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.engine import file_job
from flexengine.engine.options import EngineOptions
from flexengine.shell.commands import openers, run
from flexengine.shell.commands import plan as plan_command
from flexengine.tier import machine

CASES = [
    ("cpu", "1G", None, False, 10**9),
    ("auto", "1G", None, False, 10**9),
    ("auto", "1G", None, True, None),
    ("auto", "1G", "2G", True, 2 * 10**9),
    ("cuda", "1G", None, True, None),
    ("sim", "1G", None, False, None),
    ("sim", "1G", "2G", False, 2 * 10**9),
    ("cpu", None, None, False, None),
    ("auto", None, None, True, None),
]


@pytest.mark.parametrize(("device", "device_mem", "host_mem", "gpu", "given"), CASES)
def test_ram_that_was_given(
    device: str,
    device_mem: str | None,
    host_mem: str | None,
    gpu: bool,
    given: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands and Engine.run_job have one rule."""
    monkeypatch.setattr(machine, "has_gpu", lambda: gpu)
    sizes = {"device": device, "device_mem": device_mem, "host_mem": host_mem}
    asked = EngineOptions(**sizes)  # type: ignore[arg-type]
    assert asked.given_ram == given
    words = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items() if value is not None]
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for parser, named in ((run.parser(), []), (plan_command.parser(), ["--input"])):
        args = parser.parse_args([*named, str(tmp_path / "in.jsonl"), *words])
        args.input = str(tmp_path / "in.jsonl")
        with openers.open_rows(args) as rows:
            assert rows._source.memory == given
    found = list[Any]()

    def rows_of(*_: Any, memory: int | None, **__: Any) -> Any:
        found.append(memory)
        raise InterruptedError

    monkeypatch.setattr(file_job, "InputRows", rows_of)
    core = SimpleNamespace(machine=SimpleNamespace(capacity=SimpleNamespace(device=1, ram=1, shared=True)))
    engine = SimpleNamespace(core=core, listener=None, options=asked)
    arguments = {
        **dict.fromkeys(file_job._ARGUMENTS),
        **dict.fromkeys(("chat", "score", "restart", "retry_errors"), False),
    }
    arguments |= {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    arguments["params"] = file_job.SamplingParams()
    with pytest.raises(InterruptedError):
        file_job.run_job(engine, **arguments)  # type: ignore[arg-type]
    assert found == [given]
