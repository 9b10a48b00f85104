"""bench.kernels.sweeps: the arithmetic of its parts, what it times, and its table."""

import json
from pathlib import Path

import pytest

from bench.kernels.sweeps import ATTENTION, Calls, parts_of
from bench.report import blocks
from flexengine.kernels.steps import KINDS


def test_parts_add_up_to_the_sweep() -> None:
    kernels = dict.fromkeys(KINDS, 0.02) | {"linear": 0.3, "dots": 0.1, "attend": 0.4, "append": 0.04}
    kernels |= {"decode call": 0.0, "append call": 0.0, "prompt call": 0.02}
    parts = parts_of(2.0, kernels, 10)
    assert parts == pytest.approx({
        "all": 200.0, "products": 42.0, "attention": 50.0, "other kernels": 12.0, "between kernels": 96.0,
    })  # fmt: skip
    assert parts["all"] == pytest.approx(sum(value for name, value in parts.items() if name != "all"))


def test_calls_are_timed_and_return_what_they_did() -> None:
    class Kernel:
        def __init__(self) -> None:
            for attribute in ATTENTION.values():
                setattr(self, attribute, lambda address: address + 1)

    kernel = Kernel()
    calls = Calls(kernel)
    assert kernel._decode(4) == 5  # type: ignore[attr-defined]
    assert calls.seconds["decode call"] > 0
    assert calls.seconds["append call"] == calls.seconds["prompt call"] == 0


def test_the_table(tmp_path: Path) -> None:
    assert blocks.sweeps_block(tmp_path) == "Not recorded yet."
    case = {"rows": 64, "prompt": 128, "new": 33}
    lines = [{"bench": "kernels.sweeps", "case": case, "lossy": name,
              "prompts": {"all": 1234.0, "products": 800.0}, "sweep": {"all": ms, "products": 9.5}}
             for name, ms in (("exact", 150.0), ("compute=int8", 80.0), ("exact", 140.0))]  # fmt: skip
    (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = blocks.sweeps_block(tmp_path)
    assert "| none | prompts | 1230 | 800 |\n| none | sweep | 140 | 9.5 |\n| `compute=int8` | prompts |" in text
    assert "`python -m bench.kernels.sweeps --lossy exact compute=int8 --out kernels.jsonl`" in text
