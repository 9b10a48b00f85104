"""The engine, machine, model and rows that options of commands describe."""

import argparse
import gc
import os
import sys
from contextlib import closing
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity, is_terminal, tick
from flexengine.errors import ModelNotFound
from flexengine.lossy import Lossy
from flexengine.shell.commands.messages import NORMAL, say, verbosity, verified_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexengine.engine.engine import Engine
    from flexengine.engine.options import MachineOptions
    from flexengine.engine.summary import Progress
    from flexengine.guests.stages.group import PipelineGroup
    from flexengine.job.inputs import InputRows
    from flexengine.worker.open_model import OpenModel

_MACHINE = ("device", "device_mem", "host_mem", "offload_dir")  # options of MachineOptions


def load_libraries() -> "type[Engine]":
    """Import torch, transformers and Engine, which --help must not import, and return Engine.

    The garbage collector never looks at what they define (`gc.freeze`): its first full collection would stop the job
    for 0.2 s. Nor at what this process has made before, so programs that import flexengine do without.
    """
    if verbosity() < NORMAL or not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # An import hook that imports nothing. It reports at every import that importing goes on.
    new = "transformers" not in sys.modules
    hook: Any = SimpleNamespace(find_spec=lambda *_: tick())
    sys.meta_path.insert(0, hook)
    try:
        with activity("starting", "importing PyTorch and transformers"):
            engine_class: type[Engine] = resolve_name("flexengine:Engine")
    finally:
        sys.meta_path.remove(hook)
    if new:
        gc.freeze()
    return engine_class


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
    names = ["policy", "trace", "lossy", "allow", "verify", "strategy", "attention_workers", "worker_mem", "engines"]
    some = {name: getattr(args, name) for name in (*names, "prefix_sharing") if hasattr(args, name)}
    return bare_options(args) | some


def bare_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine that MACHINE has."""
    return {name: getattr(args, name) for name in (*_MACHINE, "dtype", "trust_remote_code", "allow_symlinks")}


def open_rows(args: argparse.Namespace) -> "InputRows":
    """Open the input, with the options that ROWS has."""
    from flexengine.job.inputs import InputRows

    names = ("prompt_column", "limit", "chat", "score", "template", "delimiter")
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    given["row_options"], given["memory"] = args.row_options or None, given_ram(args)
    return InputRows(args.input, form=args.input_format, **given)


def given_ram(args: argparse.Namespace) -> int | None:
    """Return `MachineOptions.given_ram`, without an import of torch if no size is given."""
    return machine_options(args).given_ram if args.device_mem or args.host_mem else None


def machine_options(args: argparse.Namespace) -> "MachineOptions":
    """Return the options of the machine."""
    from flexengine.engine.options import MachineOptions

    return MachineOptions(**{name: getattr(args, name) for name in _MACHINE})


def open_bare(args: argparse.Namespace, lossy: Lossy, kind: str | None = None) -> "OpenModel":
    """Open the model, or the shipped shape of this name, without weights, as a machine of a kind would open it. kind:
    cpu, cuda or sim; default: that of this machine."""
    from flexengine.worker.open_model import Trust, open_model

    if kind is None:
        with closing(machine_options(args).machine()) as machine:
            kind = machine.kind
    if args.model is not None:
        args.model = shipped.find("models", args.model)
    trust = Trust(args.trust_remote_code, allow_symlinks=args.allow_symlinks)
    try:
        return open_model(args.model, args.dtype, kind, trust, weights=False, lossy=lossy)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; {shipped.listed('models')}") from error
