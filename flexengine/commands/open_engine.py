"""The engine, machine and model of a command, opened from the options of its command line."""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity, tick
from flexengine.activity.terminal import is_terminal
from flexengine.commands.messages import NORMAL, say, verbosity
from flexengine.commands.progress import verified_line
from flexengine.errors import ModelNotFound

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine
    from flexengine.engine.options import MachineOptions
    from flexengine.engine.state import Progress
    from flexengine.job.inputs import Rows
    from flexengine.lossy import Lossy
    from flexengine.parallel.group import Group
    from flexengine.worker.opened import Opened


def load_libraries() -> "type[Engine]":
    """Import torch, transformers and Engine, which --help must not import, and return Engine.

    Garbage collection is off meanwhile: the collector would traverse all objects that torch and transformers define,
    find no garbage, and take a quarter of the import's time.
    """
    if verbosity() < NORMAL or not is_terminal():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    collecting, hook = gc.isenabled(), _Ticking()
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


class _Ticking:
    """Import hook that imports nothing. It reports at every import that importing goes on."""

    def find_spec(self, *_: object) -> None:
        """Return None, so that Python's own hooks find the module."""
        tick()


def open_engine(
    args: argparse.Namespace, on_sweep: "Callable[[Progress], None] | None" = None, group: "Group | None" = None
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
        raise ModelNotFound(f"{args.model} is a shape for flexengine plan, without weights; name a directory, a .gguf"
                            " file or a hub id") from error  # fmt: skip
    engine.core.machine.say_no_offload()
    if engine.core.verifier:
        say(verified_line(vars(engine.core.verifier)))
    return engine


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the engine of `flexengine run`, without the model. args: as for `open_engine`."""
    names = ("policy", "device", "device_mem", "host_mem", "offload_dir", "dtype", "trace", "trust_remote_code",
             "allow_symlinks", "lossy", "allow", "verify")  # fmt: skip
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    options["strategy"] = getattr(args, "strategy", None)  # of commands with pipelines
    options |= {name: getattr(args, name) for name in ("attention_workers", "worker_mem") if hasattr(args, name)}
    options["prefix_sharing"] = getattr(args, "prefix_sharing", True)  # only commands that read rows have the option
    return options


def open_rows(args: argparse.Namespace) -> "Rows":
    """Open the input, with the options that `options.add_rows` adds."""
    from flexengine.job.inputs import Rows

    return Rows(args.input, args.prompt_column, args.limit, args.input_format, args.chat, args.score)


def machine_options(args: argparse.Namespace) -> "MachineOptions":
    """Return the options of the machine."""
    from flexengine.engine.options import MachineOptions

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
