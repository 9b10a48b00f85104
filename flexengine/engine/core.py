"""A model opened on a machine. All jobs of an engine share it, and weights may stay in its memory between jobs."""

import contextlib

import torch

from flexengine import kernels
from flexengine.engine.options import EngineOptions
from flexengine.engine.stages import JobResources, Stage
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy
from flexengine.model.tokenizer import eos_tokens, load_tokenizer
from flexengine.model.verify import Verifier
from flexengine.places import DISK
from flexengine.plan.experts import demand_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.feedback import Watch
from flexengine.plan.layout import Layout
from flexengine.plan.least import has_room
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor
from flexengine.runtime.trace import Trace
from flexengine.schedule.program import Program
from flexengine.worker.attend import ATTENDERS, Attender
from flexengine.worker.cache import Cache
from flexengine.worker.hidden import Hidden
from flexengine.worker.opened import open_model
from flexengine.worker.stage_ports import NO_PORTS, Ports
from flexengine.worker.weights import Weights
from flexengine.worker.worker import Worker


class Core:
    """A model opened on a machine.

    Attributes:
        machine: the device and the tiers around it.
        opened: the model's modules on the meta device, and where its bytes lie.
        tokenizer: None if the checkpoint has none.
        eos: token ids that end a sequence.
        verifier: counts files compared with their checksums; None if none are compared.
        trace: collects task spans; None if none are collected.
    """

    def __init__(self, options: EngineOptions, layers: tuple[int, int] | None = None) -> None:
        """Open the model and the machine; read no weights. Raise as `Engine` does.

        Args:
            options: of the engine.
            layers: first layer, and last layer + 1, that this core holds and computes; None for all. The job then needs
                cores for the other layers: see `stage`.
        """
        kernels.choice()  # raises InvalidInput for a wrong FLEXENGINE_KERNELS before weights are converted
        self.options, self.machine = options, options.machine()
        self._check_disk(options.policy)
        self.trace = Trace(options.trace) if options.trace else None
        self.verifier = Verifier() if options.verify else None
        name = str(options.model) if options.model is not None else None
        self.opened = open_model(
            name, options.dtype, self.machine.kind, options.trust_remote_code, lossy=options.lossy,
            verifier=self.verifier, layers=layers,
        )  # fmt: skip
        self.source, self.skeleton, self.dtype = self.opened.source, self.opened.skeleton, self.opened.dtype
        self.tokenizer = load_tokenizer(self.source.directory, options.trust_remote_code)
        self.eos = eos_tokens(self.source.directory, self.skeleton.config)
        kernels.load()  # beside a GPU, too, tiers convert with the CPU's kernels: build them before lanes start
        self.kernels = kernels.load_for(self.machine.compute)
        self._weights: Weights | None = None
        self._resident_read = 0  # bytes read for resident weights that have been dropped since

    def _check_disk(self, policy: Policy | None) -> None:
        if self.machine.no_offload and policy and policy.spills(DISK):
            self.machine.close()
            raise InvalidInput(f"the policy puts cache or activations on disk, but {self.machine.no_offload}")

    @property
    def facts(self) -> ModelFacts:
        """The model in numbers, with the present lossy switches."""
        return self.opened.facts

    @property
    def lossy(self) -> Lossy:
        """The present lossy switches."""
        return self.opened.lossy

    @property
    def cache_form(self) -> str:
        """Return how keys and values are encoded; "" if they are not encoded."""
        return str(self.opened.cache_form(bits)) if (bits := self.lossy.cache_bits) else ""

    @property
    def resident(self) -> Policy | None:
        """Return the policy under which weights are in memory; None if none are."""
        return self._weights.layout.policy if self._weights is not None else None

    def prepare(self, watch: Watch, load_first: bool = False) -> JobResources:
        """Return the resources of a job that this core computes alone. See `stage`."""
        return JobResources([self.stage(watch, load_first)])

    @torch.no_grad()
    def stage(self, watch: Watch, load_first: bool = False, ports: Ports = NO_PORTS) -> Stage:
        """Allocate all large memory of a job, and return what its sweeps need.

        Weights of an earlier job stay if the layout places them alike. Weights that stay in memory are read in the
        first sweep, or here with `load_first`.

        Args:
            watch: of a layout for this core's layers.
            load_first: see above.
            ports: through which hidden states enter and leave.

        Raises:
            OutOfMemory: a tier has less memory than the layout books.
            InvalidInput: the core has layers before or after it and no port to them, or the opposite.
        """
        ports.check(self.skeleton)
        layout, machine = watch.layout, self.machine
        self._drop_misplaced(layout)
        for tier in machine.tiers.values():
            tier.ledger.restart_peak()
        machine.keep_freed(has_room(layout, machine.capacity))
        worker = self._worker(layout, load_first, ports)
        weights = worker.weights
        if weights.arriving:
            watch.expect_loading(weights.missing)
        program = Program(
            weights.streamed, len(self.skeleton.layers), layout.policy.slots, machine.routes, weights.arriving,
            demand_of(self.facts, layout.homes), ports.names,
        )  # fmt: skip
        moving = weights.arriving or any(weights.streamed) or layout.cache_buffer or layout.hidden_buffer or ports.names
        # Without overlap a single inline lane runs all tasks. On a GPU an inline lane would wait for every kernel.
        lanes = machine.lanes if self.options.overlap and (moving or machine.lanes == "stream") else "inline"
        executor = Executor(worker.perform, lanes, self.trace)
        machine.synchronize()
        return Stage(worker, program, executor, watch)

    def _worker(self, layout: Layout, load_first: bool, ports: Ports) -> Worker:
        with contextlib.ExitStack() as undo:  # create the spill files first, as this may fail
            cache = Cache(self.facts, layout, self.machine, self.kernels, self.dtype, self.lossy)
            undo.callback(cache.close)
            hidden = Hidden(self.facts, layout, self.machine, self.dtype, ports)
            undo.callback(hidden.close)
            attenders = dict[str, Attender]()
            for place in sorted(set(layout.policy.attended.values())):
                attenders[place] = ATTENDERS[place](self.facts, layout, self.machine, cache, self.dtype)
                undo.callback(attenders[place].close)
            if self._weights is None:
                self._weights = Weights(self.opened, layout, self.machine)
            if load_first:
                self._weights.load_all_resident()
            worker = Worker(self.skeleton, self._weights, cache, hidden, attenders)
            undo.pop_all()
        return worker

    def traffic(self) -> dict[str, int]:
        """Return bytes moved by link since the engine began, without reads of resident weights."""
        moved = self.machine.traffic()
        resident = self._resident_read + (self._weights.loaded_bytes if self._weights else 0)
        return moved | {"disk_read": moved["disk_read"] - resident}

    def _drop_misplaced(self, layout: Layout) -> None:
        """Drop the weights of an earlier job unless this layout places them alike."""
        if self._weights is None:
            return
        old, same = self._weights.layout, ("homes", "slot", "stages", "head_rows")
        if old.policy.slots != layout.policy.slots or any(getattr(old, n) != getattr(layout, n) for n in same):
            self.drop_weights()

    def drop_weights(self) -> None:
        """Free the memory of all weights."""
        if self._weights is not None:
            self._resident_read += self._weights.loaded_bytes
            self._weights.close()
            self._weights = None

    def close(self) -> None:
        """Free all memory and files."""
        self.drop_weights()
        self.machine.close()
