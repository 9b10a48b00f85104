"""The engine, machine and model of a command, opened from the options of its command line."""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity, tick
from flexengine.activity.terminal import is_terminal
from flexengine.errors import ModelNotFound
from flexengine.shell.commands.messages import NORMAL, say, verbosity
from flexengine.shell.commands.progress import verified_line

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine
    from flexengine.engine.options import MachineOptions
    from flexengine.engine.summary import Progress
    from flexengine.guests.stages.group import PipelineGroup
    from flexengine.job.inputs import InputRows
    from flexengine.lossy import Lossy
    from flexengine.worker.open_model import OpenModel

_MACHINE = ("device", "device_mem", "host_mem", "offload_dir")  # options of MachineOptions


def load_libraries() -> "type[Engine]":
    """Import torch, transformers and Engine, which --help must not import, and return Engine.

    Garbage collection is off meanwhile: the collector would traverse all objects that torch and transformers define,
    find no garbage, and take a quarter of the import's time.
    """
    if verbosity() < NORMAL or not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    collecting = gc.isenabled()
    # An import hook that imports nothing. It reports at every import that importing goes on.
    hook: Any = SimpleNamespace(find_spec=lambda *_: tick())
    gc.disable()
    sys.meta_path.insert(0, hook)
    try:
        with activity("starting", "importing PyTorch and transformers"):
            from flexengine.engine.engine import Engine
    finally:
        sys.meta_path.remove(hook)
        if collecting:
            gc.enable()
    gc.freeze()
    return Engine


def open_engine(
    args: argparse.Namespace, on_sweep: "Callable[[Progress], None] | None" = None, group: "PipelineGroup | None" = None
) -> "Engine":
    """Open the engine of `flexengine run`. Print whether offloading to disk is off, and what was verified. A model that
    does not exist is refused before this function imports torch.

    Args:
        args: parsed options, with `policy`, `lossy` and `allow` converted to a Policy, a Lossy and names.
        on_sweep, group: see EngineOptions.
    """
    from flexengine.model.source import check_local  # imported here, as --help does without

    try:
        check_local(args.model, args.allow_symlinks)
        engine_class = load_libraries()
        engine = engine_class(args.model, on_sweep=on_sweep, group=group, **engine_options(args))
    except ModelNotFound as error:
        if args.model not in shipped.names("models"):
            raise
        fault = f"{args.model} is a shape for flexengine plan, without weights"
        raise ModelNotFound(f"{fault}; name a directory, a .gguf file or a hub id") from error
    engine.core.machine.say_no_offload()
    if engine.core.verifier:
        say(verified_line(vars(engine.core.verifier)))
    return engine


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine of `flexengine run`, without the model. args: as for `open_engine`."""
    names = ["policy", "trace", "lossy", "allow", "verify", "strategy", "attention_workers", "worker_mem"]
    some = {name: getattr(args, name) for name in (*names, "prefix_sharing") if hasattr(args, name)}
    return bare_options(args) | some


def bare_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine that `options.MACHINE` has."""
    return {name: getattr(args, name) for name in (*_MACHINE, "dtype", "trust_remote_code", "allow_symlinks")}


def open_rows(args: argparse.Namespace) -> "InputRows":
    """Open the input, with the options that `options.ROWS` has."""
    from flexengine.job.inputs import InputRows

    return InputRows(args.input, args.prompt_column, args.limit, args.input_format, args.chat, args.score)


def machine_options(args: argparse.Namespace) -> "MachineOptions":
    """Return the options of the machine."""
    from flexengine.engine.options import MachineOptions

    return MachineOptions(**{name: getattr(args, name) for name in _MACHINE})


def machine_kind(args: argparse.Namespace) -> str:
    """Return the kind of this machine: cpu, cuda or sim."""
    with closing(machine_options(args).machine()) as machine:
        return machine.kind


def open_bare(args: argparse.Namespace, kind: str, lossy: "Lossy") -> "OpenModel":
    """Open the model, or the shipped shape of this name, without weights, as a machine of this kind would open it."""
    from flexengine.worker.open_model import open_model

    if args.model is not None:
        args.model = shipped.find("models", args.model)
    remote, links = args.trust_remote_code, args.allow_symlinks
    try:
        return open_model(args.model, args.dtype, kind, remote, weights=False, lossy=lossy, allow_symlinks=links)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; {shipped.listed('models')}") from error
