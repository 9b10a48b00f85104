"""Imports point one way (docs/architecture.md 6): checked on syntax trees, and in a process without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "flexengine"
PURE = ("errors", "records", "config", "policy", "schedule", "plan")
# What each part may import besides itself.
ALLOWED = {
    "words": set[str](),
    "errors": {"places"},
    "activity": {"words"},
    "records": {"errors", "shipped", "words"},
    "config": {"errors", "records"},
    "lossy": {"errors", "records", "config", "words"},
    "places": set[str](),
    "system": {"errors"},
    "policy": {"errors", "records", "places", "words"},
    "schedule": {"errors", "config", "places", "policy"},
    "plan": {"words", "errors", "records", "activity", "config", "places", "policy", "schedule"},
    "kernels": {"errors", "system", "activity", "config", "codec"},
    "codec": {"errors"},
    "tier": {"errors", "records", "system", "activity", "places", "kernels"},
    "model": {"errors", "activity", "system", "config", "codec", "kernels"},
    "runtime": {"errors", "system", "activity", "places", "schedule"},
    "worker": {"errors", "records", "activity", "config", "lossy", "places", "policy", "schedule", "plan", "codec",
               "kernels", "tier", "model"},
    "job": {"errors", "records", "activity", "config"},
    "measure": {"errors", "system", "activity", "config", "places", "policy", "plan", "schedule", "codec", "kernels",
                "tier", "lossy", "model", "runtime", "worker", "__version__"},
    "engine": {"words", "errors", "records", "activity", "config", "lossy", "places", "policy", "schedule", "plan",
               "codec", "kernels", "tier", "model", "runtime", "worker", "job", "measure", "__version__"},
    "guests": {"errors", "records", "activity", "system", "config", "lossy", "places", "policy",
               "schedule", "plan", "codec", "kernels", "tier", "model", "runtime", "worker", "measure", "engine",
               "texts", "__version__"},
    "apps": {"errors", "records", "activity", "config", "lossy", "policy", "plan", "job", "engine", "guests", "shipped",
             "__version__"},
    "explain": {"errors", "activity", "places", "policy", "schedule", "plan"},
    "report": {"errors", "config", "places", "plan", "explain", "schedule", "doctor", "job", "engine", "__version__"},
    "cachedir": {"model"},
    "doctor": {"errors", "system", "config", "places", "plan", "kernels", "tier", "model", "measure", "cachedir",
               "__version__"},
    "commands": {"words", "errors", "activity", "cachedir", "doctor", "config", "lossy", "policy", "plan", "tier",
                 "explain", "kernels", "model", "guests", "worker", "measure", "job", "engine", "report", "apps",
                 "shipped", "texts", "__version__"},
    "run": {"commands"},
    "__main__": {"commands"},
    "plan door": {"commands"},
    "shell": set[str](),
    "shipped": {"errors"},
    "texts": {"errors"},
    "__init__": {"errors", "activity", "config", "lossy", "policy", "plan", "tier", "engine"},
}  # fmt: skip
# A machine is a set of tiers and how they are joined: it answers with plan's Capacity.
EXCEPTIONS = {("tier.machine", "plan")}
CUDA = {"tier.cuda", "system.limits", "runtime.lane", "kernels.cuda"}


class Import(NamedTuple):
    """`module` (without flexengine.) of this file imports `target`; `when`: import, call or types."""

    module: str
    target: str
    when: str


@cache  # here and below: parsed by the first test, not by every process that collects the tests
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name if name == "__init__" else name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def walk(node: ast.AST, when: str = "import") -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        now = when
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            now = "call" if when == "import" else when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            now = "types"
        yield child, now
        yield from walk(child, now)


def imports(name: str, tree: ast.Module) -> Iterator[Import]:
    for node, when in walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            base = node.module or ""
            deeper = base in ("flexengine", "torch") or (ROOT / Path(*base.split(".")[1:])).is_dir()
            yield from (Import(name, f"{base}.{alias.name}" if deeper else base, when) for alias in node.names)


@cache
def all_imports() -> list[Import]:
    return [i for name, tree in modules().items() for i in imports(name, tree)]


@cache
def ours() -> list[Import]:
    return [i for i in all_imports() if i.target.split(".")[0] == "flexengine"]


def part(module: str) -> str:
    """Return the part that a module belongs to. plan.__main__ is a door to a command, as run and quality are."""
    return "plan door" if module == "plan.__main__" else module.removeprefix("shell.").split(".")[0]


def test_every_part_is_known() -> None:
    assert {part(name) for name in modules()} <= set(ALLOWED)
    assert len(ours()) > 60  # the walk sees something


def test_direction() -> None:
    wrong = []
    for i in ours():
        target = part(i.target.removeprefix("flexengine."))
        fine = target == part(i.module) or target in ALLOWED[part(i.module)]
        if not fine and (i.module, target) not in EXCEPTIONS:
            wrong.append(f"{i.module} imports {i.target}")
    assert wrong == []


def test_exceptions_are_needed() -> None:
    assert {(i.module, i.target.split(".")[1]) for i in ours()} >= EXCEPTIONS


def put_in_order(needs: dict[str, set[str]], placed: set[str]) -> None:
    """Fails unless there is an order in which each name stands on those before it and on `placed`."""
    left = dict(needs)
    while left:
        free = [name for name, wants in left.items() if wants <= placed]
        assert free, f"a cycle among {sorted(left)}"
        placed = placed | set(free)
        for name in free:
            del left[name]


def test_the_parts_have_an_order() -> None:
    """ALLOWED itself has no cycle."""
    put_in_order(ALLOWED, {"__version__"})


def test_no_module_imports_itself() -> None:
    """No cycle among the modules, by imports in functions and for types as little as by those that run on import."""
    known = set(modules())
    needs: dict[str, set[str]] = {name: set() for name in known}
    for i in ours():
        target = i.target.removeprefix("flexengine.")
        while target and target not in known:
            target = target.rpartition(".")[0]
        needs[i.module] |= {target} - {"", i.module, "__init__"}
    del needs["__init__"]  # it imports the public names on first use, and types for that
    put_in_order(needs, set())


def test_sizes() -> None:
    """At most ten modules at the package's root beside those that start commands, and no file above 400 lines."""
    assert len({path.name for path in ROOT.glob("*.py")} - {"__main__.py", "run.py"}) <= 10
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: n for name, n in lines.items() if n > 400} == {}


@pytest.mark.parametrize("heavy", ["torch", "transformers", "psutil", "threading", "ctypes"])
def test_pure_parts_stay_pure(heavy: str) -> None:
    assert [i for i in all_imports() if part(i.module) in PURE and part(i.target) == heavy] == []


def test_only_kernels_and_tiers_touch_foreign_memory() -> None:
    allowed = {"system", "kernels", "tier", "model"}
    assert {part(i.module) for i in all_imports() if part(i.target) == "ctypes"} <= allowed


def test_what_model_runtime_and_job_must_not_know() -> None:
    knows: dict[str, set[str]] = {}
    for i in ours():
        knows.setdefault(part(i.module), set()).add(i.target.split(".")[1])
    assert not knows["model"] & {"tier", "runtime", "worker", "engine", "schedule", "plan"}
    assert not knows["runtime"] & {"model", "tier", "worker", "engine", "plan"}
    assert not knows["job"] & {"engine", "worker", "model", "runtime"}
    users = {part(i.module) for i in all_imports() if part(i.target) == "transformers"}
    assert not users & {"runtime", "tier"}


def test_cuda_is_asked_about_in_few_places() -> None:
    users = {i.module for i in all_imports() if i.target.startswith("torch.cuda")}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                users.add(name)
    assert {"tier.cuda", "runtime.lane"} <= users <= CUDA


def test_threads_are_made_in_few_places() -> None:
    """Lanes; what watches them; the disk's readers, which end with the tier, and those of records, which end with
    their reader; the reader of experts, which ends with the job; connections between processes; and those that
    hash, encode and write weights, which end with the call that starts them."""
    makers = set()
    for name, tree in modules().items():
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(call.split(".")[-1] in ("Thread", "ThreadPoolExecutor", "Process") for call in calls):
            makers.add(name)
    known = {"runtime.lane", "runtime.execute", "tier.disk", "guests.flash.reader",
             "guests.stages.group", "guests.wire.link", "guests.wire.gate", "model.encoding", "model.prepare",
             *(f"guests.attention_workers.{name}" for name in ("client", "pool", "server", "workers"))}  # fmt: skip
    assert makers <= known


def test_torch_stays_out_until_it_is_needed() -> None:
    """In a process of its own: the pure parts, the job files, and the command line up to its --help."""
    pure = [name for name in modules() if part(name) in (*PURE, "job", "run", "commands")]
    pure.append("model.source")  # it refuses a model that does not exist before torch is imported
    code = "import sys, importlib\n"
    code += f"for name in {pure!r}: importlib.import_module('flexengine.' + name)\n"
    code += "from flexengine import Policy, SamplingParams, Result\n"
    code += "from flexengine.shell.commands.run import parser; parser().format_help()\n"
    code += "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT.parent)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


def test_numpy_stays_out_of_help() -> None:
    """In a process of its own: the import of numpy takes longer than all else that --help of `run` does."""
    code = "import sys\nfrom flexengine.shell.commands.run import parser; parser().format_help()\n"
    code += "print('numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT.parent)
    assert (out.returncode, out.stdout.strip()) == (0, "False"), out.stderr
