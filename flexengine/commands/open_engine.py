"""The engine, machine and model of a command, opened from the options of its command line."""

import argparse
import gc
import os
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from flexengine.activity import activity
from flexengine.activity.terminal import is_terminal
from flexengine.commands.messages import NORMAL, say, verbosity
from flexengine.commands.progress import verified_line

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine
    from flexengine.engine.options import MachineOptions
    from flexengine.engine.state import Progress
    from flexengine.lossy import Lossy
    from flexengine.worker.opened import Opened


def engine_class() -> "type[Engine]":
    """Import and return Engine, with garbage collection off: the collector would traverse all objects that torch and
    transformers define, find no garbage, and take a quarter of the import's time."""
    if verbosity() < NORMAL or not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    collecting = gc.isenabled()
    gc.disable()
    try:
        with activity("starting", "importing PyTorch and transformers"):
            from flexengine.engine.engine import Engine
    finally:
        if collecting:
            gc.enable()
    gc.freeze()
    return Engine


def open_engine(args: argparse.Namespace, on_sweep: "Callable[[Progress], None] | None" = None) -> "Engine":
    """Open the engine of `flexengine run`. Print whether offloading to disk is off, and what was verified.

    Args:
        args: parsed options, with `policy`, `lossy` and `allow` converted to a Policy, a Lossy and names.
        on_sweep: see EngineOptions.
    """
    names = ("policy", "device", "device_mem", "host_mem", "offload_dir", "dtype", "trace", "trust_remote_code",
             "allow_symlinks", "lossy", "allow", "verify")  # fmt: skip
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    engine = engine_class()(args.model, on_sweep=on_sweep, **options)
    if engine.core.machine.no_offload:
        say(f"nothing is offloaded to disk: {engine.core.machine.no_offload}")
    if engine.core.verifier:
        say(verified_line(vars(engine.core.verifier)))
    return engine


def machine_options(args: argparse.Namespace) -> "MachineOptions":
    """Return the options of the machine."""
    from flexengine.engine.options import MachineOptions  # imported here, as it imports torch and --help must not

    names = ("device", "device_mem", "host_mem", "offload_dir")
    return MachineOptions(**{name: getattr(args, name) for name in names})


def machine_kind(args: argparse.Namespace) -> str:
    """Return the kind of this machine: cpu, cuda or sim."""
    with closing(machine_options(args).machine()) as machine:
        return machine.kind


def open_bare(args: argparse.Namespace, kind: str, lossy: "Lossy") -> "Opened":
    """Open the model without its weights, as a machine of this kind would open it."""
    from flexengine.worker.opened import open_model

    return open_model(args.model, args.dtype, kind, args.trust_remote_code, weights=False, lossy=lossy,
                      allow_symlinks=args.allow_symlinks)  # fmt: skip
