"""The options of an engine, each written once, in one frozen record."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, cast

from flexengine.activity import Listener
from flexengine.config import cache_root, parse_size, started_workers
from flexengine.engine.stages import ProcessGroup
from flexengine.engine.summary import Progress
from flexengine.errors import InvalidInput, shown
from flexengine.lossy import EXACT, Lossy, choices
from flexengine.model.config import named_dtype
from flexengine.places import MOST_ENGINES
from flexengine.plan.hardware import Hardware
from flexengine.policy import FIXED, Policy
from flexengine.records import Limit, as_whole, check, check_argument, refuse
from flexengine.tier.base import Tier
from flexengine.tier.machine import KINDS, Links, Machine, make_machine, resolved
from flexengine.words import python_words

if TYPE_CHECKING:
    from flexengine.plan.stages import Strategy

P = ParamSpec("P")
# Imported for attention workers.
CHECK_WORKERS = "flexengine.guests.attention_workers.workers:check_workers"
CHECK_ENGINES = "flexengine.guests.replicas.client:check_engines"
OPEN_WORKERS = "flexengine.guests.attention_workers.workers:open_workers"
_MODEL = "a directory, a .gguf file, a hub id, or None for the demo model"
_Engines = Annotated[int | None, Limit(1), "a number of engines of at least 1, or None"]


def _size(name: str, value: Any) -> Any:
    parse_size(value, f"--{name.replace('_', '-')}")
    return value


_Size = Annotated[str | int | None, _size]


def _directories(name: str, value: Any) -> Any:
    given = [value] if isinstance(value, str | Path) else value
    named = isinstance(given, Sequence) and len(given) > 0 and all(isinstance(d, str | Path) and d != "" for d in given)
    if not named:
        refuse(name, value, "the name of a directory, or a list of at least one name; leave it out for the default")
    return value


def _workers(name: str, value: Any) -> Any:
    value = as_whole(value)
    if isinstance(value, bool) or not isinstance(value, int | Sequence) or value == "":
        refuse(name, value, "a number of processes, or a list of devices or of addresses HOST:PORT")
    return value


def _allow(name: str, value: Any) -> Any:
    """Return names that the planner may choose from. Raise InvalidInput if they are none."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        choices([example := value if isinstance(value, str) else "int8-weights"])
        refuse(name, value, f"a list of names, such as [{shown(example)}]")
    choices(value)
    return value


def _progress(name: str, value: Any) -> Any:
    if not (isinstance(value, bool) or callable(value)):
        raise InvalidInput(f"{name} is {type(value).__name__}; it must be True, False, None or a function")
    return value


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where an engine computes, and the memory it may use.

    Attributes:
        device: auto, cpu, cuda or sim. auto takes cuda if there is a CUDA GPU, else cpu.
        device_mem: bytes of device memory, or text such as "800M" or "16GiB"; None takes the free memory. On a CPU this
            is RAM.
        host_mem: bytes of host memory beside a GPU, in the same form.
        offload_dir: directory for KV cache and activations that are offloaded to disk, or a list of directories on
            different disks. Further directories may also hold copies of weights. None is `offload` in the cache.
        links: link rates of a `sim` machine; None for no limits.
        attention_workers: number of processes to start on this machine that hold KV cache and compute attention over it
            (docs/attention-workers.md), or the device of each, such as ["cuda:1", "cuda:2"], or addresses HOST:PORT of
            running ones.
        worker_mem: bytes for KV cache of each worker that is started, in the same form as device_mem.
        group: the processes of a pipeline, one of which runs this engine; None for one process.
        sharing: engines on this machine that share its RAM and disks: each takes an equal part of what is free, unless
            sizes are given. None is `engines`, or the number of processes of `group` on this machine, which also share
            its GPUs.
        engines: number of engines that compute the slices of one job between two attentions, in turn: this one and
            further processes of this machine, which hold all weights, too (docs/attention-workers.md).
        worker_sharing: engines that share the attention workers at these addresses: each takes at most an equal part of
            their memory. None is the number of processes of `group`.
    """

    device: Annotated[str, KINDS] = "auto"
    device_mem: _Size = None
    host_mem: _Size = None
    offload_dir: Annotated[str | Path | Sequence[str | Path] | None, _directories] = None
    links: Annotated[Links | None, "a Links, such as Links(h2d=12e9), or None"] = None
    attention_workers: Annotated[int | Sequence[str], _workers] = 0
    worker_mem: _Size = None
    engines: Annotated[int, Limit(1, MOST_ENGINES)] = 1
    group: Annotated[ProcessGroup | None, "a Group of flexengine.guests.stages, or None"] = None
    sharing: _Engines = None
    worker_sharing: _Engines = None

    @python_words
    def __post_init__(self) -> None:
        check(self)
        if self.attention_workers or self.worker_mem is not None:
            resolve_name(CHECK_WORKERS)(self.attention_workers, self.worker_mem)
        if self.engines > 1:
            resolve_name(CHECK_ENGINES)(self)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Return the offload directories. If the home directory is unknown, return a path that cannot be created; only
        plans that offload to disk then fail."""
        if self.offload_dir is not None:
            given = [self.offload_dir] if isinstance(self.offload_dir, str | Path) else self.offload_dir
            return tuple(map(Path, given))
        try:
            return (cache_root() / "offload",)
        except InvalidInput:
            return (Path(os.devnull) / "offload",)

    @property
    def given_ram(self) -> int | None:
        """Return the bytes of RAM that were given, which limit the reading of rows; None if none were given. Free
        memory does not limit it, as a job that is resumed must give the same results."""
        option = "device_mem" if resolved(self.device) == "cpu" else "host_mem"
        size = getattr(self, option)
        return None if size is None else parse_size(size, f"--{option.replace('_', '-')}")

    def machine(self) -> Machine:
        """Return the machine.

        Raises:
            InvalidInput: this machine does not have the device or a size.
            WorkerLost: an attention worker cannot be started, or does not answer.
        """
        group, started = self.group, list[Tier]()
        processes, all_processes = (group.local_size, group.size) if group is not None else (1, 1)
        if self.attention_workers:
            memory = parse_size(self.worker_mem or "1", "--worker-mem")
            engines = self.worker_sharing or all_processes
            started = resolve_name(OPEN_WORKERS)(self.attention_workers, memory, engines, group)
        sizes = (("--device-mem", self.device_mem), ("--host-mem", self.host_mem))
        device, host = (None if size is None else parse_size(size, option) for option, size in sizes)
        sharing = self.sharing or max(processes, self.engines)
        try:
            made = make_machine(self.device, device, host, self.directories, self.links, sharing, processes, started)
        except BaseException:
            for worker in started:
                worker.close()
            raise
        made.capacity = replace(made.capacity, turns=self.engines)
        return made


@dataclass(frozen=True, kw_only=True)
class EngineOptions(MachineOptions):
    """All options of `Engine`, which takes them as keyword arguments.

    Attributes:
        model: a directory, a .gguf file or a hub id; None is the demo model.
        policy: block shape and placement; None lets the planner choose.
        dtype: auto or None (float32 on CPU and sim, the checkpoint's on CUDA), float32, bfloat16 or float16.
        overlap: run tasks of different lanes at the same time. False runs, and plans for, one task at a time.
        trace: file for Chrome trace JSON of all lanes; None writes none.
        on_sweep: called with a Progress after every sweep.
        trust_remote_code: run Python code that comes with the checkpoint, if the model needs it.
        allow_symlinks: read files of the model's directory that are links to files outside of it.
        hardware: rates to plan with; None takes this machine's measured rates.
        lossy: switches whose results differ from the checkpoint's own numbers.
        allow: names in `lossy.ALLOWED` that the planner may choose from, once, for the first job.
        prefix_sharing: compute a prefix that several prompts have in common once.
        verify: compare all files of the model with their checksums before they are read (docs/jobs.md, "Checksums").
        strategy: layers, formats and batches of a pipeline's stages; None divides them by predicted
            seconds on one machine, else evenly.
        progress: True shows progress and messages on standard error: bars on a terminal, else plain lines. False shows
            nothing; messages go to the logger "flexengine". A function is called with an Activity at the start and
            the end of long work, and about twice a second meanwhile, possibly from another thread, one call at a time.
            None is True if standard error is a terminal, else False; a notebook shows long work that is done once.

    Raises:
        InvalidInput: a value has the wrong type or is not allowed, or two options exclude each other.
    """

    model: Annotated[str | Path | None, _MODEL] = field(default=None, kw_only=False)
    policy: Annotated[Policy | None, "a Policy, such as Policy(**fields) or Policy.load(FILE), or None"] = None
    dtype: Annotated[str | None, Limit(1), "one of auto, float32, bfloat16, float16"] = None
    overlap: bool = True
    trace: Annotated[str | Path | None, "the name of a file, or None"] = None
    on_sweep: Annotated[Callable[[Progress], None] | None, "a function that takes a Progress, or None"] = None
    trust_remote_code: bool = False
    allow_symlinks: bool = False
    hardware: Annotated[Hardware | None, "a Hardware, such as Hardware.load(FILE), or None"] = None
    lossy: Annotated[Lossy, "a Lossy, such as Lossy(weights='int4')"] = EXACT
    allow: Annotated[Sequence[str], _allow] = ()
    prefix_sharing: bool = True
    verify: bool = False
    strategy: "Strategy | None" = None
    progress: Annotated[bool | Listener | None, _progress] = None

    @python_words
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy is not None:
            self._check_strategy()
        if self.attention_workers and self.policy is not None and not self.policy.works:
            raise InvalidInput(f"--attention-workers is {self.attention_workers}, but the policy gives them no share of"
                               ' the KV cache; add one, such as "cache": {"workers": 1}, or leave out the workers or'
                               " the policy")  # fmt: skip
        if self.engines == 1 and self.policy is not None and self.policy.order != FIXED:
            raise InvalidInput(
                f"policy order is {self.policy.order}, but there is one engine; set --engines to 2 or more, or order to"
                f" {FIXED}"
            )
        group, given = self.group, self.attention_workers
        if group is not None and started_workers(given) and group.local_size < group.size:
            raise InvalidInput(f"--attention-workers is {given}, but the stages are on several machines; start workers"
                               " with flexengine serve-attention, and give their addresses")  # fmt: skip
        if self.allow and (self.lossy or self.policy is not None):
            raise InvalidInput("allow cannot be combined with lossy or policy, which fix what the planner would choose;"
                               " remove one of them")  # fmt: skip
        named_dtype(self.dtype)

    def _check_strategy(self) -> None:
        from flexengine.plan.stages import Strategy  # not without stages

        check_argument(
            "strategy", self.strategy, Annotated[Strategy, "a Strategy, such as Strategy.load(FILE), or None"]
        )
        assert self.strategy is not None
        if self.attention_workers:
            raise InvalidInput("--attention-workers cannot be combined with --strategy, whose stages keep the KV cache;"
                               " leave out one of them")  # fmt: skip
        if self.policy is not None or self.allow:
            raise InvalidInput("strategy cannot be combined with policy or allow, as it has a block and formats of its"
                               " own; remove one of them")  # fmt: skip
        formats = self.strategy.weights
        if any(formats) and self.lossy.weights not in (None, formats):
            raise InvalidInput(f"the strategy names a format of the weights of each layer, but weights is"
                               f" {shown(self.lossy.weights)}; leave weights out")  # fmt: skip
        if any(formats):
            object.__setattr__(self, "lossy", replace(self.lossy, weights=formats))

    def exact(self, hardware: Hardware, progress: Listener) -> "EngineOptions":
        """Return the options of an engine for the same model with the checkpoint's own numbers.

        Args:
            hardware: rates to plan with. An engine with given rates corrects no stored rates.
            progress: receives its reports.
        """
        return replace(self, hardware=hardware, policy=None, lossy=EXACT, allow=(), trace=None, on_sweep=None,
                       verify=False, group=None, strategy=None, attention_workers=0, worker_mem=None,
                       engines=1, progress=progress)  # fmt: skip


def takes(record: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a method the parameters of `record`, for type checkers, editors and `help`.

    So an option's name, type and default are written once, in the record.
    """

    def dressed(method: Any) -> Callable[Concatenate[Any, P], None]:
        own = next(iter(inspect.signature(method).parameters.values()))
        parameters = [own, *inspect.signature(record).parameters.values()]
        method.__signature__ = inspect.Signature(parameters, return_annotation=None)
        return cast(Callable[Concatenate[Any, P], None], method)

    return dressed
