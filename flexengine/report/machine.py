"""The machine and the versions of a job, for a page."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flexengine import __version__
from flexengine.plan.words import count, size

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def machine() -> list[tuple[str, str]]:
    """Return (name, value) of processor, memory, system and versions."""
    import psutil

    cores = count(len(os.sched_getaffinity(0)), "core", "cores")
    facts = [
        ("processor", f"{processor()}, {cores} for this process"),
        ("memory", size(psutil.virtual_memory().total)),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("flexengine", __version__),
        ("Python", platform.python_version()),
    ]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts.append((package, version(package)))
    return facts


def processor(path: str = "/proc/cpuinfo") -> str:
    """Return the processor's name, or its architecture if the system gives no name.

    Args:
        path: file of the system that lists the processors.
    """
    with suppress(OSError):
        for entry in Path(path).read_text(errors="replace").splitlines():
            name, _, value = entry.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()
