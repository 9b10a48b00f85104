"""Which modules a plain job loads: no guest, and few lines. In a process of its own, with a tiny LLaMA."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).parents[1]
# Guests and shells, which a plain job must not load. Guests register as "module:name" and are imported on first use.
OUTSIDE = [
    "codec.packed",
    "guests",
    "plan.cluster",
    "apps",
    "shell",
    "model.encoding",
    "model.halves",
    "model.drawing",
    "model.verify",
    "model.gguf",
    "model.pickled",
    "model.adapters",
    "model.watch",
    "model.experts",
    "model.scores",
    "model.layer_range",
    "measure.machine",
    "kernels.cuda",
    "kernels.sampling",
    "engine.recovery",
    "job.same_job",
    "engine.scoring",
    "plan.stages",
    "plan.too_little",
    "schedule.halves",
    "schedule.parts",
    "tier.throttled",
    "worker.attend",
    "worker.cache.smoothing",
    "worker.cache.teams",
    "worker.on_demand",
]
MOST_LINES = 26_200
JOB = """
import json, sys
from flexengine import Engine, SamplingParams
with Engine(sys.argv[1], device="cpu", offload_dir=sys.argv[2]) as engine:
    engine.run_job(sys.argv[2] + "/in.jsonl", sys.argv[2] + "/out.jsonl", SamplingParams(max_tokens=3))
files = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "flexengine" and m.__file__}
print(json.dumps(files))
"""


@pytest.fixture(scope="module")
def loaded(families: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The modules of flexengine that a job from JSON lines to JSON lines loads."""
    folder = tmp_path_factory.mktemp("job")
    rows = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9], "max_tokens": 2}]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", JOB, str(families("llama").directory), str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert [len(json.loads(line)["token_ids"]) for line in (folder / "out.jsonl").read_text().splitlines()] == [3, 2]
    return {name: Path(file) for name, file in json.loads(out.stdout).items()}


def test_a_plain_job_loads_no_guest(loaded: dict[str, Path]) -> None:
    names = [f"flexengine.{name}" for name in OUTSIDE]
    assert "flexengine.worker.worker" in loaded
    assert [m for m in loaded if any(m == name or m.startswith(f"{name}.") for name in names)] == []


def test_a_plain_job_loads_few_lines(loaded: dict[str, Path]) -> None:
    assert sum(len(file.read_text().splitlines()) for file in loaded.values()) <= MOST_LINES


def test_what_doors_name_exists() -> None:
    """Every "flexengine.module:object" in the package; mypy does not see these names."""
    named = set[str]()
    for path in (ROOT / "flexengine").rglob("*.py"):
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        named |= {text for text in texts if isinstance(text, str) and re.fullmatch(r"flexengine[.\w]+:\w+", text)}
    assert len(named) > 10
    for name in sorted(named):
        assert resolve_name(name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("command", [False, True])
def test_the_collector_does_not_look_at_what_libraries_define(command: bool) -> None:
    """Not while they are imported; in commands, not later either. A program's own objects are collected as before."""
    opened = "from flexengine.shell.commands.openers import load_libraries; load_libraries()"
    code = f"""
import gc, weakref, flexengine
class Node: pass
node = Node()
node.itself, seen = node, weakref.ref(node)
collections = gc.get_stats()[2]["collections"]
{opened if command else "flexengine.Engine"}
print(gc.get_stats()[2]["collections"] - collections, gc.get_freeze_count() > 100_000, gc.get_freeze_count() == 0)
del node
gc.collect()
print(gc.isenabled(), seen() is None)"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert out.stdout.split() == ["0", str(command), str(not command), "True", str(not command)], out.stderr
