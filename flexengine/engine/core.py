"""A model opened on a machine, for all jobs of an engine. Weights may stay in memory between jobs."""

import contextlib
import math
import os
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from flexengine import kernels
from flexengine.activity import activity, message
from flexengine.engine.options import EngineOptions
from flexengine.engine.stages import JobResources, LocalStage, StageDriver
from flexengine.engine.summary import Summary, Verified
from flexengine.errors import InvalidInput
from flexengine.job.files import check_model_kept
from flexengine.lossy import Lossy
from flexengine.model.linear import numerics as product_numerics
from flexengine.model.tokenizer import eos_tokens, load_tokenizer, unapplied
from flexengine.places import DISK
from flexengine.plan.facts import ModelFacts
from flexengine.plan.feedback import SweepMonitor
from flexengine.plan.layout import Layout
from flexengine.plan.min_memory import has_room
from flexengine.policy import Policy
from flexengine.runtime.execute import Executor
from flexengine.runtime.trace import Note, Trace
from flexengine.schedule.program import Program
from flexengine.tier.disk import DiskTier
from flexengine.worker.cache import Cache
from flexengine.worker.hidden import NO_PORTS, Hidden, Ports
from flexengine.worker.open_model import Layers, Trust, open_model
from flexengine.worker.weights import Weights
from flexengine.worker.worker import Worker

# Imported for options with `verify`, for delegated attention, and for flash.
VERIFIER = "flexengine.model.verify:Verifier"
ATTENDER = "flexengine.worker.attend:attender_of"
ON_DEMAND = "flexengine.worker.on_demand:OnDemand"
# Imported for several engines.
REPLICAS = "flexengine.guests.replicas.client:Replicas"
TURNS_WORKER = "flexengine.guests.replicas.worker:TurnsWorker"
PREPARE_SKIPS = "flexengine.guests.replicas.skips:prepare_skips"
SPAWN = "start processes by multiprocessing.get_context('spawn') and open an Engine in each"
# Limits for weights that stay in the page cache (worker/in_place.py): how often the decode sweeps of an engine's jobs
# read all weights, and bytes of these. Copies take 0.45 s per GB, and save 3 ms per GB read by one row.
FEW_SWEEPS, MANY_BYTES = 128, 256 << 20
_openers = set[int]()  # processes that opened a model: this one, and those that it was forked from


def _check_fork() -> None:
    """Raise InvalidInput in a process that was forked from one that opened a model, as OpenMP (libgomp) would wait for
    the parent's threads forever. With one thread it does not."""
    if _openers - {os.getpid()} and torch.get_num_threads() > 1:
        fault = "this process was forked from one that had opened an Engine, whose threads of torch it lacks"
        raise InvalidInput(f"{fault}; {SPAWN}")


class Core:
    """A model opened on a machine."""

    def __init__(self, options: EngineOptions, layers: Layers | None = None, driver: StageDriver | None = None) -> None:
        """Open the model and the machine, without reading weights. Raise the errors of `Engine`.

        Args:
            layers: see `open_model`. Other cores must hold the other layers.
            driver: the other stages of a pipeline whose first stage is this core; None without a pipeline.
        """
        _check_fork()
        kernels.choice()  # raises InvalidInput for a wrong FLEXENGINE_KERNELS before weights are converted
        check_model_kept(options.model, {"trace": options.trace})
        self.options, self.machine, self.driver = options, options.machine(), driver
        try:
            self._open(options, layers)
        except BaseException:  # workers, files and connections must not outlive the error
            self.machine.close()
            raise

    def _open(self, options: EngineOptions, layers: Layers | None) -> None:
        if self.machine.no_offload and options.policy and options.policy.spills(DISK):
            raise InvalidInput(f"the policy puts cache or activations on disk, but {self.machine.no_offload}")
        driven = options.group is not None and options.group.rank > 0
        self.trace = Trace(None if driven else options.trace) if options.trace else None  # spans of all tasks
        self.sample: Any = None  # also gets task spans, from the next job on: its `add` is called as `Trace.add`
        self.verifier = resolve_name(VERIFIER)() if options.verify else None  # compares files with their checksums
        name = str(options.model) if options.model is not None else None
        with activity("opening", f"opening {name or 'the demo model'}"):
            memory = self.machine.capacity.ram
            trust = Trust(options.trust_remote_code, self.verifier, options.allow_symlinks, memory)
            kind = self.machine.kind
            # Its modules are on the meta device; weights have locations.
            self.opened = open_model(name, options.dtype, kind, trust, lossy=options.lossy, layers=layers)
            _openers.add(os.getpid())  # a model that was refused has started no threads
            self.source, self.skeleton, self.dtype = self.opened.source, self.opened.skeleton, self.opened.dtype
            self.tokenizer = load_tokenizer(self.source.directory, options.trust_remote_code)  # None without files
        self.eos = eos_tokens(self.source.directory, self.skeleton.config)  # token ids that end a sequence
        if text := "" if driven else unapplied(self.source.directory):
            message(text)
        kernels.load()  # tiers convert with the CPU's kernels, also with a GPU: build them before lanes start
        self.kernels = kernels.load_for(self.machine.compute)
        self.replicas: Any = None  # the other engines; None without any
        if options.engines > 1:
            self.prepare_skips()
            self.replicas = resolve_name(REPLICAS)(options)
        self._weights: Weights | None = None
        self._swept = 0.0  # how often products have read all weights where the page cache has them
        self._resident_read = 0  # bytes read for resident weights that were dropped later

    @property
    def facts(self) -> ModelFacts:
        """Sizes of the model, with the current lossy switches."""
        return self.opened.facts

    @property
    def lossy(self) -> Lossy:
        """The current lossy switches."""
        return self.opened.lossy

    @property
    def shares(self) -> int:
        """Return at multiples of how many tokens prefixes end that sequences share; 0 if they share none. With a lossy
        cache they do not: results would depend on what is shared, as a shared prefix is read from the cache."""
        return int(self.options.prefix_sharing and not self.lossy.alters_cache) * max(1, self.facts.grain)

    @property
    def cache_form(self) -> str:
        """Return the format of keys and values; "" if they are not encoded."""
        return str(self.opened.cache_form(bits)) if (bits := self.lossy.cache_bits) else ""

    @property
    def numerics(self) -> dict[str, Any]:
        """Return the settings and versions that decide the last bits of a result, besides the model and the request.
        Switches that the planner has not chosen yet are left out."""
        import transformers

        policy, mixing = self.options.policy if self.machine.gpu else None, self.skeleton.mixing
        return {
            **({"cache": self.cache_form} if self.cache_form else {}),
            "dtype": str(self.dtype).removeprefix("torch."),
            # A GPU's products round differently in batches of another shape.
            "policy": policy.to_json() if policy else None,
            "device": "cuda" if self.machine.gpu else "cpu",
            "kernels": product_numerics(self.machine.compute),
            **({"states": mixing.numerics} if mixing else {}),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    @property
    def _notes(self) -> list[Note]:
        return [trace.add for trace in (self.trace, self.sample) if trace is not None]

    @property
    def resident(self) -> Policy | None:
        """Return the policy of the weights in memory; None if no weights are in memory."""
        return self._weights.layout.policy if self._weights is not None else None

    def empty_summary(self) -> Summary:
        """Return the summary of a job without rows."""
        dtype = str(self.dtype).removeprefix("torch.")
        verified = Verified(self.verifier.files, self.verifier.bytes, self.verifier.seconds) if self.verifier else None
        modules = self.opened.facts.as_modules
        return Summary(
            self.source.name, self.machine.kind, dtype, lossy=self.lossy, verified=verified, as_modules=modules
        )

    def prepare(self, watch: SweepMonitor, load_first: bool = False) -> JobResources:
        """Return the resources of a job, of all stages. Arguments and errors as in `stage`."""
        if self.driver is None:
            return JobResources(self.stage(watch, load_first))
        policy, given = watch.layout.policy, self.options.policy is not None
        others = self.driver.prepare(policy, watch.cost.workload, given, self.lossy)
        with contextlib.ExitStack() as undo:
            undo.callback(self.driver.end)
            own = self.stage(watch, load_first, self.driver.ports)
            undo.callback(own.close)
            resources = JobResources(own, others())
            undo.pop_all()
        return resources

    @torch.no_grad()
    def stage(self, watch: SweepMonitor, load_first: bool = False, ports: Ports = NO_PORTS) -> LocalStage:
        """Allocate all large memory of a job, and return its stage.

        Weights of an earlier job stay in memory if the layout has them at the same places.

        Args:
            watch: has a layout for this core's layers.
            load_first: whether to read resident weights now; else the first sweep reads them.
            ports: ports for hidden states.

        Raises:
            OutOfMemory: a tier has less memory than the layout books.
            InvalidInput: a port to layers before or after the core is missing, or is given without such layers.
        """
        ports.check(self.skeleton)
        layout, machine = watch.layout, self.machine
        if self._weights is not None:
            old, same = self._weights.layout, ("homes", "slots", "stages", "early_stages", "head_rows")
            if any(getattr(old, n) != getattr(layout, n) for n in same):
                self.drop_weights()
        for tier in machine.tiers.values():
            tier.ledger.restart_peak()
        machine.keep_freed(has_room(layout, machine.capacity))
        worker = self._worker(layout, load_first, ports, watch.cost.tokens)
        weights = worker.weights
        moving = any(weights.streamed) or bool(weights.arrivals.units or ports.names)
        moving = moving or layout.cache_buffer > 0 or layout.hidden_buffer > 0
        # Without overlap one inline lane runs all tasks. With a GPU it would wait for every kernel.
        lanes = machine.lanes if self.options.overlap and (moving or machine.lanes == "stream") else "inline"
        executor = Executor(worker.perform, lanes, *self._notes)
        machine.synchronize()
        return LocalStage(worker, self._program(worker, watch), executor, watch)

    def _program(self, worker: Worker, watch: SweepMonitor) -> Program:
        """Return a program that begins with empty weight slots. Add weights that are not read yet to `watch`."""
        weights, layout = worker.weights, worker.cache.layout
        if weights.arrivals.units:
            watch.expect_loading(weights.arrivals.missing)
        return Program(
            weights.streamed,
            len(self.skeleton.layers),
            layout.policy.slots,
            self.machine.routes,
            weights.arrivals.units,
            layout.demand(self.facts),
            worker.hidden.ports.names,
            worker.joined.count,
            weights.halves,
            worker.turn,
        )

    @torch.no_grad()
    def renew(self, stage: LocalStage, lost: str, watch: SweepMonitor) -> str:
        """Replace a lost attention worker, between two sweeps of a stage. KV cache at other places stays.

        Args:
            stage: the stage; its lanes have ended.
            lost: place of the worker.
            watch: for the sweeps that follow; has the layout of the stage.

        Returns:
            The place whose KV cache is lost: that of the worker, or of the team that it is part of.

        Raises:
            WorkerLost: another worker is lost, or there is no new one.
            OutOfMemory: the new worker has too little memory.
        """
        worker, layout = stage.worker, stage.watch.layout
        for attender in worker.attenders.values():
            attender.drain(lost)
        home = next(place for place in worker.attenders if lost in layout.policy.team(place, layout.places))
        worker.attenders[home].close()
        self.machine.renew(lost)
        worker.attenders[home] = resolve_name(ATTENDER)(home)(worker.cache, self.dtype)
        stage.program, stage.watch = self._program(worker, watch), watch
        return home

    def _worker(self, layout: Layout, load_first: bool, ports: Ports, tokens: int) -> Worker:
        with contextlib.ExitStack() as undo:  # `Cache` first, as it creates spill files, which may fail
            cache = Cache(self.facts, layout, self.machine, self.kernels, self.dtype, self.lossy)
            undo.callback(cache.close)
            hidden = Hidden(self.skeleton.hidden_shape, layout, self.machine, self.dtype, ports)
            undo.callback(hidden.close)
            attenders = dict[str, Any]()
            for place in sorted(layout.delegation):
                attenders[place] = resolve_name(ATTENDER)(place)(cache, self.dtype)
                undo.callback(attenders[place].close)
            weights = self.resident_weights(layout, tokens)
            if not weights.arrived and (load_first or weights.in_place):  # little is left to read
                weights.load_all_resident()
            on_demand = None
            if self.lossy.flash:
                on_demand = resolve_name(ON_DEMAND)(self.opened, layout, self.machine, self._notes)
                undo.callback(on_demand.close)
            kind: Any = Worker
            if self.replicas and layout.policy.works:
                self.replicas.load(layout, self.lossy)
                kind = partial(resolve_name(TURNS_WORKER), self.replicas)
            worker: Worker = kind(self.skeleton, weights, cache, hidden, attenders, on_demand)
            undo.pop_all()
        return worker

    def prepare_skips(self) -> None:
        """Prepare the model for passes of which other engines compute parts. Raise UnsupportedModel if it has none."""
        native = self.machine.compute.type == "cpu" and self.dtype == torch.float32
        resolve_name(PREPARE_SKIPS)(self.skeleton, native)

    def resident_weights(self, layout: Layout, tokens: int | None = None) -> Weights:
        """Return the weights of a job, those in memory if there are any and it does not need others. tokens: that it
        generates; None for many."""
        sweeps = math.inf if tokens is None else self._sweeps_in_place(layout.policy, tokens)
        in_place = self._swept + sweeps <= FEW_SWEEPS
        if self._weights is not None and self._weights.in_place > in_place:
            self.drop_weights()
        if self._weights is None:
            self._weights = Weights(self.opened, layout, self.machine, in_place)
        if self._weights.in_place:
            self._swept += sweeps
        return self._weights

    def _sweeps_in_place(self, policy: Policy, tokens: int) -> float:
        """Return how often a job reads all weights in decode; infinite if they must not stay in the page cache."""
        fits = self.machine.kind == "cpu" and self.dtype == torch.float32 and self.facts.stored_bytes >= MANY_BYTES
        if not fits or not isinstance(self.machine.disk, DiskTier):
            return math.inf
        return float(resolve_name("flexengine.worker.in_place:decode_sweeps")(self.facts, policy.block_size, tokens))

    def traffic(self) -> dict[str, int]:
        """Return bytes moved by link since the engine began, without reads of resident weights."""
        moved = self.machine.traffic()
        resident = self._resident_read + (self._weights.arrivals.loaded_bytes if self._weights else 0)
        return moved | {"disk_read": moved["disk_read"] - resident}

    def drop_weights(self) -> None:
        """Free the memory of all weights."""
        if self._weights is not None:
            self._resident_read += self._weights.arrivals.loaded_bytes
            self._weights.close()
            self._weights = None

    def close(self) -> None:
        """Free all memory and files."""
        self.drop_weights()
        if getattr(self, "replicas", None) is not None:
            self.replicas.close()
        self.machine.close()
