"""The machine and the versions of a job, for a page."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from flexengine import __version__
from flexengine.doctor.machine import cpu
from flexengine.plan.formatting import count, size

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def machine() -> list[tuple[str, str]]:
    """Return (name, value) of processor, memory, system and versions."""
    import psutil

    name = platform.machine()
    with suppress(OSError):  # a system without /proc
        name = cpu().model
    cores = count(len(os.sched_getaffinity(0)), "core", "cores")
    facts = [
        ("processor", f"{name}, {cores} for this process"),
        ("memory", size(psutil.virtual_memory().total)),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("flexengine", __version__),
        ("Python", platform.python_version()),
    ]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts.append((package, version(package)))
    return facts
