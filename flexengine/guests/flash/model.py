"""The weights of an open model that are read when tokens use them: neurons of feed-forward blocks, and experts; and
the measurement of blocks: reads of scattered records, and products with records in memory and on their way.

Measured reads are of the records, at random places, or of files of the checkpoint if the records are not made yet.
Products are those of the block of a job (`neurons.NeuronBlock`), with as many neurons as tokens of the model use.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexengine.codec.records import RecordForm
from flexengine.errors import FlexError, OutOfMemory
from flexengine.guests.flash.bundles import Bundle, made_bundles, prepare_bundles, record_form
from flexengine.guests.flash.expert_blocks import ExpertLayer, find_experts, use_experts_apart
from flexengine.guests.flash.feed_forward import FeedForward, Sparsified, find, use_records
from flexengine.guests.flash.neurons import IntArray, NeuronBlock, Predict
from flexengine.guests.flash.predictors import Latest, Predictor, Trained
from flexengine.guests.flash.reader import RecordReader
from flexengine.lossy import BUNDLED, ORACLE, PREDICTORS, Lossy
from flexengine.measure.links import WHAT
from flexengine.measure.timing import fill, room, seconds_per_call, unnoticed
from flexengine.model.checkpoint import Origin
from flexengine.model.linear import FastLinear
from flexengine.model.skeleton import ParamRef
from flexengine.plan.facts import NeuronFacts
from flexengine.plan.hardware import Table
from flexengine.plan.neurons import STREAMED, Use, experts_share
from flexengine.tier.machine import Machine
from flexengine.worker.open_model import OpenModel
from flexengine.worker.regions import Regions

HELD = 128 << 20  # most bytes of records in memory, more than the caches of a CPU
OTHERS = 64 << 20  # bytes that are read before each call, as by a layer's other products: caches hold them then
COUNTS = (4, 32, 256, 1024)  # records of one read
SOME, ALL = (1, 2, 4, 8, 16), (4, 32, 128, 256, 512)  # tokens
SECONDS, ROUNDS = 0.1, 3  # seconds of each point in each round
QUICK = 0.02, 1  # the same for a quick measurement


class FlashModel:
    """The blocks and mixtures of an open model whose weights are no weights of their layers."""

    def __init__(self, model: OpenModel) -> None:
        self.model, self.skeleton = model, model.skeleton
        # By layer: the block whose neurons are read when they become active, and the mixture whose experts are read
        # when they are chosen; () without any.
        self.blocks: tuple[FeedForward | None, ...] = ()
        self.experts: tuple[ExpertLayer | None, ...] = ()
        self.trained: Trained | None = None  # predictors of `blocks`, and statistics; None if there are none
        # By layer, with all weights or without; None if it is not known. Searched before the first ones are taken out.
        self.feed_forward = find(self.skeleton)
        self._bundles: tuple[Bundle | None, ...] | None = None
        self._latest: dict[tuple[float, str] | None, Latest] = {}
        self._whole: tuple[list[dict[str, ParamRef]], dict[str, ParamRef]] | None = None  # layers and others

    def put_back(self) -> None:
        """Make all weights weights of their layers again."""
        if self._whole:
            self.skeleton.layers[:], self.skeleton.others = self._whole
            for module in (module for block in self.blocks if block for module in block.modules if module):
                module.__class__ = FastLinear
        self._whole, self.blocks, self.experts, self.trained, self._bundles = None, (), (), None, None

    def take_out(self, lossy: Lossy) -> None:
        """Take the weights that are read on demand out of their layers, which must be whole, and let activation
        functions be sparsified or not. Raise BadCheckpoint if the predictors that are needed are damaged."""
        sparsify, skeleton = lossy.sparsify is not None, self.skeleton
        self.feed_forward = tuple(block.sparsified(sparsify) if block else None for block in self.feed_forward)
        if not lossy.flash:
            return
        oracle, self._whole = lossy.flash == ORACLE, (list(skeleton.layers), dict(skeleton.others))
        blocks = tuple(block if block and block.sparse else None for block in self.feed_forward)
        self.blocks = blocks if any(blocks) else ()
        self.trained = None
        try:
            if self.blocks:
                self.trained = self.latest(lossy.sparsity).load(self.blocks, slice(*skeleton.layer_range))
        except FlexError:  # they are damaged; an oracle needs only their statistics
            if not oracle:
                raise
        use_records(skeleton, self.blocks, keep_first=oracle)
        experts = find_experts(skeleton) if oracle else ()
        self.experts = experts if any(experts) else ()
        use_experts_apart(skeleton, self.experts)

    @property
    def plain(self) -> set[str]:
        """Names of the layers' weights that stay as the checkpoint has them: those that an oracle reads."""
        return {block.first for block in self.blocks if block}

    def facts(self) -> tuple[NeuronFacts | None, ...]:
        """Return the sizes of each layer's block or mixture; () without any."""
        locations, held = self.model.locations, self.model.held
        return tuple(
            self._block(layer, block) if block else _expert_facts(experts, locations, held) if experts else None
            for layer, (block, experts) in enumerate(zip_longest(self.blocks, self.experts))
        )

    def _block(self, layer: int, block: FeedForward) -> NeuronFacts:
        """Return the sizes of a block and, if they are known, how its neurons are used."""
        form = record_form(block, self.model.locations, self.record_kind)
        sparsify, first = self.model.lossy.sparsify, self.model.locations[block.first]
        facts = NeuronFacts(
            block.neurons,
            form.nbytes,
            f"{form.vectors} vectors of {form.width} {form.kind}",
            guess=first.nbytes,
            decoded=4 * form.width if form.coded else 0,
            reuse=() if sparsify is None else (1 - sparsify,),
        )
        if self.trained is None or (known := self.trained.layers[layer]) is None:
            return facts
        predictor = self.predictor(layer, torch.device("meta"))
        if predictor is None:
            return replace(facts, unions=known.true.rows, reuse=known.true.window)
        nbytes = predictor.nbytes
        return replace(facts, predictor=nbytes, guess=nbytes, unions=known.predicted.rows, reuse=known.predicted.window)

    def predictor(self, layer: int, device: torch.device) -> Predictor | None:
        """Return a copy, on a device, of what names a layer's neurons; None if an oracle names them."""
        model = self.model
        known = self.trained.layers[layer] if self.trained and model.lossy.flash == PREDICTORS else None
        return known.predictor.to(device, None if model.cpu else model.dtype) if known is not None else None

    @property
    def record_kind(self) -> str:
        """Format of the records' vectors; "" for the stored one."""
        weights = self.model.lossy.weights
        return weights if isinstance(weights, str) else ""

    def prepare(self) -> None:
        """Measure the thresholds of sparsified activations, and write the records of blocks, unless the cache has them.
        Raise as `prepare_bundles`."""
        model = self.model
        if model.lossy.sparsify is not None:
            for block, threshold in zip(self.feed_forward, model.thresholds(), strict=True):
                assert block is not None
                assert isinstance(block.act, Sparsified)
                block.act.threshold = threshold
        self.prepare_bundles()

    def prepare_bundles(self) -> tuple[Bundle | None, ...]:
        """Return, by layer, the records of the block, after writing missing ones; () without blocks."""
        if self._bundles is None:
            self._bundles = prepare_bundles(self.model, self.blocks, self.record_kind) if self.blocks else ()
        return self._bundles

    def latest(self, sparsity: tuple[float, str] | None) -> Latest:
        """Return the predictors that were trained last. sparsity: as `Lossy.sparsity`."""
        return self._latest.setdefault(sparsity, Latest(self.model.given, sparsity))

    def refusal(self, lossy: Lossy) -> str | None:
        """Return why these switches cannot be used; None if they can."""
        reason = self._encoded_in_file()
        if reason is None and lossy.sparsify is not None:
            reason = self._not_sparsified(lossy)
        if reason is None and lossy.flash:
            reason = self._not_sparse(lossy) or self._not_trained(lossy)
        return reason

    def _not_trained(self, lossy: Lossy) -> str | None:
        if lossy.flash != PREDICTORS or self.latest(lossy.sparsity).find():
            return None
        name = self.model.source.name
        if not self.model.files:
            return f"{name} has no weights here, so no predictors; let flash be {ORACLE}"
        words, lacks = str(self.model.source.directory), "no predictors"
        if lossy.sparsity is not None:
            portion, text = lossy.sparsity
            words += f" --sparsify {portion}" + ("" if text == BUNDLED else f" --calibration-text {text}")
            lacks += f" for sparsify {portion} with this text for its thresholds"
        return f"{name} has {lacks}; train them: flexengine flash train {words}, or let flash be {ORACLE}"

    def _encoded_in_file(self) -> str | None:
        if not (encoded := self.model.stored_forms):
            return None
        fault = f"flash and sparsify read weights as a checkpoint has them, but {len(encoded)} matrices of"
        return f"{fault} {self.model.source.name} are encoded in its file; leave them out, or take a plain checkpoint"

    def _experts_refused(self, lossy: Lossy) -> str | None:
        name = self.model.source.name
        if lossy.flash != ORACLE:
            fault = f"flash is {lossy.flash!r}, but the routers of {name} choose its experts exactly"
            return f"{fault}, so that nothing is to be predicted; let flash be {ORACLE}"
        if lossy.coded is not None or not lossy.decided:
            fault = f"flash reads the experts of {name} as the checkpoint has them, so weights cannot be encoded"
            return f"{fault}; leave weights and compute out, or leave flash out"
        return None

    def _not_sparsified(self, lossy: Lossy) -> str | None:
        given, name = f"sparsify is {lossy.sparsify}", self.model.source.name
        if len(self.skeleton.layers) < self.skeleton.total:
            return f"{given} with stages, of which none has all layers; leave out one of them"
        if unknown := self.feed_forward.count(None):
            return (
                f"{given}, but {unknown} of {len(self.feed_forward)} layers of {name} have no feed-forward block that"
                " it knows (such as mixtures of experts, and blocks with a fused first matrix); leave sparsify out"
            )
        if relu := next((block for block in self.feed_forward if block and block.relu), None):
            fault = f"{given}, but activations of {name} are exactly 0 already for many neurons"
            return f"{fault}: its activation function is {relu.activation}; leave sparsify out"
        return None

    def _not_sparse(self, lossy: Lossy) -> str | None:
        known = {block.activation for block in self.feed_forward if block is not None}
        sparse = lossy.sparsify is not None or any(block is not None and block.relu for block in self.feed_forward)
        experts = any(self.experts or find_experts(self.skeleton))
        if experts and (not sparse or lossy.flash == ORACLE) and (reason := self._experts_refused(lossy)):
            return reason
        if sparse and lossy.compute is not None:
            fault = f"compute is {lossy.compute!r} with flash, whose neurons are multiplied as they are stored"
            return f"{fault}; leave out one of them"
        if sparse or experts:
            return None
        name = self.model.source.name
        what = f"the layers of {name} have no block that it knows"
        if known:
            what = f"no neuron of {name} stays inactive: its activation function is {', '.join(sorted(known))}"
        other = "" if None in self.feed_forward else "set sparsify, such as 0.7, which is lossy, "
        return (
            f"flash reads the neurons that become active, but {what}; {other}use a model with ReLU, such as OPT, or one"
            " that was trained further with ReLU, or leave flash out"
        )


def _expert_facts(layer: ExpertLayer, stored: Mapping[str, Origin], held: Mapping[str, torch.dtype]) -> NeuronFacts:
    """Return the sizes of a layer's experts. Tokens are expected to choose independently and evenly."""
    elements = {name: stored[name].nbytes // stored[name].dtype.itemsize for name in layer.matrices}
    record = sum(n * held[name].itemsize for name, n in elements.items()) // layer.experts
    on_disk = sum(stored[name].nbytes for name in layer.matrices) // layer.experts
    form = f"{len(elements)} matrices, {layer.active} of {layer.experts} experts"
    successive = tuple(float(experts_share(layer.active, layer.experts, tokens)) for tokens in range(1, 65))
    return NeuronFacts(layer.experts, record, form, reuse=successive, stored=on_disk, experts=True)


class _File(Bundle):
    """A file of a checkpoint, read as if it held records."""

    def check(self) -> None:
        """Accept any size."""


@torch.no_grad()
def measure_blocks(opened: OpenModel, machine: Machine, quick: bool = False) -> dict[str, dict[str, Table]]:
    """Return `Hardware.blocks` of a model. Products that do not fit in memory are left out. Takes up to ten seconds, or
    half a second if `quick`."""
    seconds, rounds = QUICK if quick else (SECONDS, ROUNDS)
    found, flash = dict[str, dict[str, Table]](), opened.flash
    bundles = made_bundles(opened, flash.blocks, flash.record_kind) if opened.files else []
    for layer, (feed, facts) in enumerate(zip(flash.blocks, opened.facts.blocks, strict=False)):
        if feed is None or facts is None or facts.signature in found:
            continue
        form = record_form(feed, opened.locations, flash.record_kind)
        # Without bundles, all files that have a layer's records at least: a cache of the disk could hold a single one.
        sizes = ((path, path.stat().st_size // form.nbytes) for path in opened.files)
        others: list[Bundle] = [_File(path, form, total) for path, total in sizes if total >= feed.neurons]
        files = [b for b in bundles if b.form == form] or others
        predictor = flash.predictor(layer, machine.compute)
        with unnoticed(machine), RecordReader(files) as reader:
            points = _Points(feed, facts, form, opened.dtype, machine, files, reader, predictor, seconds)
            found[facts.signature] = _typical([points.rates() for _ in range(rounds)])
    return found


def _typical(rounds: Sequence[dict[str, Table]]) -> dict[str, Table]:
    """Return the median rate of each point. Rates of a disk that others use, too, change within seconds."""
    names = [name for name in rounds[0] if all(name in tables for tables in rounds)]
    return {name: tuple(sorted(same)[len(same) // 2] for same in zip(*(t[name] for t in rounds), strict=True))
            for name in names}  # fmt: skip


@dataclass(frozen=True)
class _Points:
    """The points to measure for one kind of block."""

    feed: FeedForward
    facts: NeuronFacts
    form: RecordForm
    dtype: torch.dtype  # of activations
    machine: Machine
    files: list[Bundle]  # what is read
    reader: RecordReader
    predictor: Predictor | None  # what names the neurons of a job; None for an oracle
    seconds: float  # of each point

    def rates(self) -> dict[str, Table]:
        """Return all rates; without those for which there is too little memory."""
        found = dict[str, Table]()
        with suppress(OutOfMemory), Regions(self.machine) as regions:
            others = fill(self._ram(regions, OTHERS).view(torch.float32))
            found |= self.reads(regions, others)
            found |= self.products(regions, others)
        return found

    def _ram(self, regions: Regions, nbytes: int) -> Tensor:
        place = "device" if self.machine.capacity.shared else "host"
        return self.machine.tier(place).view(regions.take(place, nbytes, WHAT))

    def reads(self, regions: Regions, others: Tensor) -> dict[str, Table]:
        """Return the rate of reads of scattered records. others: memory that is read before each call."""
        if not self.files:
            return {}
        rng, neurons, nbytes, rates = np.random.default_rng(0), self.feed.neurons, self.form.nbytes, []
        counts = tuple(count for count in COUNTS if count <= neurons // 2) or (1,)
        target = self._ram(regions, counts[-1] * nbytes).view(-1, nbytes)
        for count in reversed(counts):  # the first calls of new threads are slow: most of all with few records

            def call(_: int, count: int = count) -> None:
                numbers = np.sort(rng.choice(neurons, count, replace=False))
                self._read(*self._somewhere(rng, numbers), target, np.arange(count))

            rates.append((float(count), count * nbytes / seconds_per_call(call, self.seconds, before=others.sum)))
        return {"read": tuple(reversed(rates))}

    def _somewhere(self, rng: np.random.Generator, numbers: IntArray) -> tuple[Bundle, IntArray]:
        """Return a file, and the numbers of a layer's records at a random place of it."""
        file = self.files[rng.integers(len(self.files))]
        return file, numbers + int(rng.integers(file.neurons - self.feed.neurons + 1))

    def _read(self, file: Bundle, numbers: IntArray, target: Tensor, rows: IntArray) -> None:
        wanted = torch.from_numpy(numbers), target, torch.from_numpy(rows)
        self.machine.disk.read_by(lambda: self.reader.read(file, *wanted))

    def products(self, regions: Regions, others: Tensor) -> dict[str, Table]:
        """Return the rates of products with records in memory, and with records that are read. others: see `reads`."""
        nbytes, rng = self.form.nbytes, np.random.default_rng(0)
        count = min(self.feed.neurons, max(64, min(HELD, room(self.machine, "device")) // nbytes))
        memory = _records(self.form, self.machine.device.view(regions.take("device", count * nbytes, WHAT)))
        fit = max(1, STREAMED // nbytes) * nbytes
        buffers = tuple(_records(self.form, self._ram(regions, fit)) for _ in range(2))
        bare = tuple(None if module is None else SimpleNamespace(bias=None) for module in self.feed.modules)

        def block(neurons: int, room: int, read: Any, predict: Predict | None = None) -> NeuronBlock:
            feed = replace(self.feed, modules=bare, neurons=neurons)  # type: ignore[arg-type]
            return NeuronBlock(feed, self.form, memory[:room], buffers, read, lambda *_: None, predict)  # type: ignore[arg-type]

        def at_once(*_: object) -> Callable[[], object]:
            return lambda: None

        def coming(numbers: IntArray, target: Tensor, rows: IntArray) -> Callable[[], object]:
            file, at = self._somewhere(rng, numbers)
            return self.reader.begin(lambda: self._read(file, at, target, rows)).result

        found = {"some": self._some(lambda predict: block(count, count, at_once, predict), count, others),
                 "all": self._all(block(count, count, at_once), others)}  # fmt: skip
        if self.files:
            found["all_read"] = self._all(block(self.feed.neurons, 1, coming), others)
        return found

    def _some(self, of: Callable[[Predict], NeuronBlock], count: int, others: Tensor) -> Table:
        """Return the rate of tokens that use some of `count` neurons, as many as in the model. of: makes the block."""
        rng, rates, tokens = np.random.default_rng(0), [], np.array(SOME, dtype=float)
        for n, portion in zip(SOME, Use(self.facts).used(tokens), strict=True):
            used = max(1, min(count // 2, int(portion * self.feed.neurons)))
            x, scored = self._inputs(n), torch.ones(n, dtype=torch.bool)

            def predict(x: Tensor, used: int = used) -> Tensor:
                if self.predictor is not None:
                    self.predictor.active(x)
                uses = torch.zeros(len(x), count, dtype=torch.bool)
                uses[:, torch.from_numpy(rng.choice(count, used, replace=False))] = True
                return uses.to(x.device)

            block = of(predict)
            rates.append((float(n), used * self.form.nbytes / self._seconds(partial(block, x, scored), others)))
        return tuple(rates)

    def _all(self, block: NeuronBlock, others: Tensor) -> Table:
        """Return the rate of tokens that use all neurons of a block."""
        nbytes, inputs = block.feed.neurons * self.form.nbytes, {n: self._inputs(n) for n in ALL}
        return tuple((float(n), nbytes / self._seconds(partial(block.all, x), others)) for n, x in inputs.items())

    def _inputs(self, tokens: int) -> Tensor:
        return fill(torch.empty(tokens, self.form.width, dtype=self.dtype, device=self.machine.compute), 1.0)

    def _seconds(self, call: Callable[[], object], others: Tensor) -> float:
        return seconds_per_call(lambda _: call(), self.seconds, self.machine, others.sum)


def _records(form: RecordForm, memory: Tensor) -> Tensor:
    """Fill memory with records of random numbers, and return it as uint8 [n, form.nbytes]."""
    records = memory.view(-1, form.nbytes)
    numbers = fill(torch.empty(min(len(records), 64), form.width))
    some = form.encode(*[numbers] * form.vectors).to(memory.device)
    for low in range(0, len(records), len(some)):
        part = records[low : low + len(some)]
        part.copy_(some[: len(part)])
    return records
