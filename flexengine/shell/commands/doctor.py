"""flexengine doctor: facts about this machine and installation, and what stops or slows jobs here."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from flexengine import __version__
from flexengine.plan.formatting import digits, plain, size
from flexengine.shell.commands.messages import DONE, SOME_FAILED, ago, program, say, table
from flexengine.shell.commands.options import add_options
from flexengine.shell.commands.parser import Parser
from flexengine.shell.doctor.facts import Facts, Finding, collect, findings, stops_jobs
from flexengine.shell.doctor.machine import Disk, Failed

_OPTIONS = """
--measure              measure the rates of the disks and the memory now; takes ten seconds or more
--model MODEL          model, here on this machine, whose layers to examine: which ones run as modules of transformers
--offload-dir DIR ...  offload directory to examine; may be repeated (default: offload in the cache)
--json                 print one JSON object
"""
_WIDTH = 105  # characters of a line beside its subject


def parser() -> Parser:
    p = Parser("doctor", end="Exit code 0: jobs can run; 1: something stops them.")
    add_options(p, _OPTIONS)
    return p


def run(args: argparse.Namespace) -> int:
    """Print facts and findings and return the exit code."""
    if args.measure:
        say("measuring disks and memory")
    facts = collect(list(map(Path, args.offload_dir or [])), args.measure, args.model or "")
    problems = findings(facts)
    if args.json:
        print(json.dumps(facts.to_json() | {"findings": list(map(asdict, problems))}))
    else:
        print(as_text(facts, problems))
    return SOME_FAILED if stops_jobs(problems) else DONE


def as_text(facts: Facts, problems: Sequence[Finding]) -> str:
    """Return facts and findings as text."""
    lines: list[tuple[str, str]] = []
    for name, subject in _SUBJECTS.items():
        try:
            parts = [part for line in subject(facts) for part in wrap(plain(line), _WIDTH, break_long_words=False)]
        except (AttributeError, TypeError, KeyError, ValueError):  # the facts are missing, which is a finding
            parts = ["unknown"]
        lines += zip([name, *[""] * len(parts)], parts, strict=False)
    disks = [_disk_cells(each) for each in facts.disks if not isinstance(each, Failed)]
    disk_table = table([("directory for", "free", "of", "on", "path"), *disks], right=(1, 2))
    last = ["nothing stops or slows jobs here"]
    if problems:
        verdict = f"jobs {'cannot' if stops_jobs(problems) else 'can'} run here"
        last = [table([(one.level, plain(one)) for one in problems]), verdict]
    return "\n\n".join([f"flexengine {__version__}", table(lines), disk_table, *_rates(facts), *last])


# Subjects. Each raises AttributeError, TypeError, KeyError or ValueError if its facts are missing.


def _cpu(facts: Any) -> Iterator[str]:
    cpu = facts.cpu
    quota = "" if cpu.quota is None else f", at most {cpu.quota:g} at a time (cgroup)"
    yield f"{cpu.model}, {cpu.usable} of {cpu.cores} cores{quota}"
    yield ", ".join(cpu.features) or f"{cpu.machine} without vector instructions that kernels use"


def _memory(facts: Any) -> Iterator[str]:
    memory = facts.memory
    yield f"{size(memory.total)}, {size(memory.free)} free"
    if memory.limit is not None:
        yield f"cgroup limit {size(memory.limit)}, {size(memory.limit_used)} of it used"
    yield f"swap {size(memory.swap)}, {size(memory.swap_used)} used" if memory.swap else "no swap"


def _gpu(facts: Any) -> Iterator[str]:
    if not facts.part("torch"):
        raise ValueError("torch cannot be imported")
    if not facts.part("gpus"):
        yield "none"
    for gpu in facts.part("gpus"):
        memory = f"{size(gpu['total'])}, {size(gpu['free'])} free"
        yield f"{gpu['name']}, {memory}, compute capability {gpu['capability']}"


def _kernels(facts: Any) -> Iterator[str]:
    kernels, threads = facts.part("kernels"), facts.part("torch")["threads"]
    if kernels["name"] == "reference":
        state = "plain torch"
    elif not kernels["compiled"]:
        state = "native, not compiled yet"
    else:
        width = f"vectors of {kernels['simd']} bits" if kernels["simd"] else "portable code"
        state = f"native, compiled, {width}"
    yield f"{state}; {threads} threads"


def _model(facts: Any) -> Iterator[str]:
    if model := facts.part("model"):
        yield f"{model['name']}: native kernels compute {model['native']} of {model['layers']} layers on a CPU"
        if formats := model.get("formats"):
            yield f"weights as in the file: {', '.join(formats)}"


def _compiler(facts: Any) -> Iterator[str]:
    for compiler in facts.compilers:
        known = compiler.version.startswith(compiler.command)
        yield compiler.version if known else f"{compiler.command}: {compiler.version}"
    if not facts.compilers:
        yield "none"


def _python(facts: Any) -> Iterator[str]:
    software = facts.software
    yield f"{software.python} ({software.executable})"
    yield _versions({library.name: library.version for library in software.libraries})


def _versions(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '-'}" for name, version in versions.items())


def _cache(facts: Any) -> Iterator[str]:
    cache = facts.cache
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in cache.by_kind.items())
    yield f"{cache.path}: {size(cache.bytes)}{f' ({kinds})' if kinds else ''}"
    yield f"{cache.hub_path}: {size(cache.hub_bytes)} from the hub"


def _environment(facts: Any) -> Iterator[str]:
    variables = facts.software.environment
    yield " ".join(f"{name}={value}" for name, value in variables.items()) or "no variable that matters is set"


_SUBJECTS: dict[str, Callable[[Any], Iterable[str]]] = {
    "system": lambda facts: [facts.software.system],
    "cpu": _cpu,
    "memory": _memory,
    "gpu": _gpu,
    "kernels": _kernels,
    "model": _model,
    "compiler": _compiler,
    "python": _python,
    "extras": lambda facts: [_versions(facts.software.extras)],
    "cache": _cache,
    "environment": _environment,
}


# Tables.


def _disk_cells(disk: Disk) -> tuple[str, ...]:
    names = ("RAM", "network", "hard disk", "SSD", "read-only")
    are = (disk.in_ram, disk.network, disk.rotational, disk.rotational is False, not disk.writable)
    about = ", ".join([disk.filesystem, *(name for name, is_so in zip(names, are, strict=True) if is_so)])
    missing = "" if disk.exists else " (made when it is needed)"
    use = {"current": "input, output", "hub": "hub downloads"}.get(disk.use, disk.use)
    return use, size(disk.free), size(disk.total), about, f"{plain(disk.path)}{missing}"


def _rates(facts: Facts) -> Iterator[str]:
    for name, title in (("measured", "measured now"), ("rates", "measured")):
        if rates := facts.part(name):
            when = f" {ago(rates['when'])}" if "when" in rates else ""
            yield f"{title}{when}, in GB/s\n{table(list(_rate_cells(rates)), right=(1, 2))}"


def _rate_cells(rates: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    def gb(number: float | None) -> str:
        return digits(number / 1e9) if number else ""

    yield "", "read", "write"
    for directory, disk in rates["disks"].items():
        yield plain(directory), gb(disk["read"]), gb(disk["write"])
        if "checkpoint_read" in disk:
            yield "files of models", gb(disk["checkpoint_read"]), ""
    yield ("RAM to GPU, and back" if "d2h" in rates else "RAM, copies"), gb(rates.get("h2d")), gb(rates.get("d2h"))
    yield "RAM, first writes", "", gb(rates["touch"])


main = program(lambda words: run(parser().parse_args(words)))
