"""A cache directory with items of each kind, and `flexengine cache` on it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexengine.shell.commands import cache as command

DAY = 24 * 3600
K = {name: name * 32 for name in "abcdef0123456789"}  # keys


class Cache:
    """A cache directory, and the command on it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def __call__(self, *words: str) -> Any:
        self.capsys.readouterr()
        self.code = command.main(words)
        self.out, self.err = self.capsys.readouterr()
        return json.loads(self.out) if "--json" in words else self.out

    def clear(self, *words: str) -> Any:
        return self("clear", *words, "--yes", "--json")

    def file(self, name: str, nbytes: int = 10, days: float = 1.0) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * nbytes)
        os.utime(path, (time.time() - days * DAY,) * 2)
        return path

    def finished(self, key: str, name: str, source: str = "", label: str = "", days: float = 1.0) -> Path:
        """Make a prepared directory with one file `name` of 1,000 bytes and a note."""
        folder = self.root / "prepared" / key
        self.file(f"prepared/{key}/{name}", 1000)
        (folder / "prepared.json").write_text(json.dumps({"source": source, "format": 1, "label": label}))
        os.utime(folder, (time.time() - days * DAY,) * 2)
        return folder

    def left(self) -> set[str]:
        """Return all paths below the root, except locks."""
        return {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.suffix != ".lock"}


@contextmanager
def process(code: str, *arguments: object) -> Iterator[None]:
    """Run Python code in a process of its own, from the line it prints to the end of the block."""
    child = subprocess.Popen([sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()", *map(str, arguments)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "\n"
    try:
        yield
    finally:
        child.communicate("\n")


def full(cache: Cache) -> None:
    """One item of each kind and origin, a day old."""
    cache.finished(K["a"], "config.json", "/models/tiny.gguf")
    cache.finished(K["b"], "00000.safetensors", str(cache.root / "prepared" / K["a"]), "int4")
    cache.finished(K["c"], "importances.safetensors", str(cache.root / "prepared" / K["a"]), "float32")
    cache.file(f"prepared/{K['d']}.part/00000.safetensors", 300)
    cache.file(f"prepared/{K['e']}.tmp-77/config.json", 20)
    cache.file(f"prepared/{K['a']}.lock", 0)
    cache.file(f"kernels/cpu-{K['1']}.so", 500)
    cache.file("kernels/tmpab12_x9z/cpu.o", 40)
    cache.file(f"hardware/{K['2']}.json", 60)
    cache.file(f"hardware/{K['2']}.ab12_x9z", 70)
    cache.file("offload/flexengine-ab12.spill", 80)
    cache.file("offload/flexengine-ab12.measuring", 90)
    for path in cache.root.rglob("*"):
        os.utime(path, (time.time() - DAY,) * 2)
