"""The options of an engine, each written once, in one frozen record."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexengine.activity import Listener
from flexengine.config import cache_root, parse_size
from flexengine.engine.state import Progress
from flexengine.errors import InvalidInput
from flexengine.lossy import EXACT, Lossy
from flexengine.model.dtypes import named_dtype
from flexengine.plan.hardware import Hardware
from flexengine.policy import Policy
from flexengine.tier.machine import Links, Machine, make_machine


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where an engine computes, and the memory it may use.

    Attributes:
        device: auto, cpu, cuda or sim.
        device_mem: bytes of device memory, or text such as "800M"; None takes the free memory. On a CPU this is RAM.
        host_mem: bytes of host memory beside a GPU, in the same form.
        offload_dir: directory for KV cache and activations that are offloaded to disk, or a list of directories on
            different disks. Further directories may also hold copies of weights.
        links: link rates of a `sim` machine.
    """

    device: str = "auto"
    device_mem: str | int | None = None
    host_mem: str | int | None = None
    offload_dir: str | Path | Sequence[str | Path] | None = None
    links: Links | None = None

    @property
    def directories(self) -> tuple[Path, ...]:
        """Return the offload directories. If the home directory is unknown, return a path that cannot be created; only
        plans that offload to disk then fail."""
        if self.offload_dir:
            given = [self.offload_dir] if isinstance(self.offload_dir, (str, Path)) else self.offload_dir
            return tuple(map(Path, given))
        try:
            return (cache_root() / "offload",)
        except InvalidInput:
            return (Path(os.devnull) / "offload",)

    def machine(self) -> Machine:
        """Return the machine. Raise InvalidInput for a device or a size that this machine does not have."""
        device = parse_size(self.device_mem, "--device-mem") if self.device_mem is not None else None
        host = parse_size(self.host_mem, "--host-mem") if self.host_mem is not None else None
        return make_machine(self.device, device, host, self.directories, self.links)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(MachineOptions):
    """All options of `Engine`, which takes them as keyword arguments.

    Attributes:
        model: a directory, a .gguf file or a hub id; None is the demo model.
        policy: block shape and placement; None lets the planner choose.
        dtype: auto (float32 on CPU and sim, the checkpoint's on CUDA), float32, bfloat16 or float16.
        overlap: run tasks of different lanes at the same time. False runs, and plans for, one task at a time.
        trace: file for Chrome trace JSON of all lanes.
        on_sweep: called with a Progress after every sweep.
        trust_remote_code: run Python code that comes with the checkpoint, if the model needs it.
        hardware: rates to plan with instead of this machine's measured rates.
        lossy: switches whose results differ from the checkpoint's own numbers.
        allow: names in `lossy.ALLOW` that the planner may choose from, once, for the first job.
        verify: compare all files of the model with their checksums before they are read (see model/verify.py).
        progress: True shows progress and messages on standard error: bars on a terminal, else plain lines. False shows
            nothing; messages go to the logger "flexengine". A function is called with an `activity.Activity` at the
            start and the end of long work, and about twice a second meanwhile, possibly from another thread, one call
            at a time. None is True if standard error is a terminal, else False.

    Raises:
        InvalidInput: a value has the wrong type, or two options exclude each other.
    """

    model: str | Path | None = None
    policy: Policy | None = None
    dtype: str | None = None
    overlap: bool = True
    trace: str | Path | None = None
    on_sweep: Callable[[Progress], None] | None = None
    trust_remote_code: bool = False
    hardware: Hardware | None = None
    lossy: Lossy = EXACT
    allow: Sequence[str] = ()
    verify: bool = False
    progress: bool | Listener | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy | None):
            raise InvalidInput(f"policy is {type(self.policy).__name__}; it must be a Policy, such as Policy(**fields)")
        if self.allow and (self.lossy or self.policy is not None):
            raise InvalidInput("allow cannot be combined with lossy or policy, which fix what the planner would choose;"
                               " remove one of them")  # fmt: skip
        if not (isinstance(self.progress, bool | None) or callable(self.progress)):
            kind = type(self.progress).__name__
            raise InvalidInput(f"progress is {kind}; it must be True, False, None or a function")
        named_dtype(self.dtype)

    def exact(self, hardware: Hardware, progress: Listener) -> "EngineOptions":
        """Return the options of an engine for the same model with the checkpoint's own numbers.

        Args:
            hardware: rates to plan with. An engine with given rates corrects no stored rates.
            progress: receives its reports.
        """
        return replace(self, hardware=hardware, policy=None, lossy=EXACT, allow=(), trace=None, on_sweep=None,
                       verify=False, progress=progress)  # fmt: skip
