"""An opened model without loaded weights: meta modules, locations of weights, and facts for the planner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import cast

import torch

from flexengine.codec.cache import CacheFormat
from flexengine.errors import FlexError, InvalidInput
from flexengine.flash.bundles import Bundle, made_bundles, prepare_bundles, record_form
from flexengine.flash.predictors import Predictor
from flexengine.flash.trained import Latest, Trained
from flexengine.kernels import load_for
from flexengine.kernels.base import Compute
from flexengine.lossy import BUNDLED, EXACT, ORACLE, PREDICTORS, Lossy
from flexengine.model.checkpoint import read_checkpoint
from flexengine.model.config import load_config
from flexengine.model.dtypes import choose_dtype
from flexengine.model.encoding import encoded, forms, use_forms
from flexengine.model.expert_layers import ExpertLayer, find_experts, use_experts_apart
from flexengine.model.files import set_links
from flexengine.model.form import WeightFormat
from flexengine.model.importance import Importances
from flexengine.model.layer_range import use_range
from flexengine.model.loading import ByteRange, Origin, differ, origins
from flexengine.model.neurons import FeedForward, Sparsified, find, use_linears, use_records
from flexengine.model.skeleton import ParamRef, Skeleton, build
from flexengine.model.source import Source, resolve
from flexengine.model.verify import Verifier
from flexengine.plan.facts import ModelFacts, NeuronFacts
from flexengine.worker import layer_formats
from flexengine.worker.model_facts import expert_facts, held_dtypes, model_facts

Layers = tuple[int, int] | Callable[[int], tuple[int, int]]


def _no_importances() -> None:
    return None


def _no_thresholds() -> Sequence[float]:
    raise RuntimeError("nothing measures the thresholds of this model")


@dataclass
class Opened:
    """An opened model.

    Attributes:
        source: directory and files of the model.
        dtype: dtype of activations.
        skeleton: the modules, on the meta device.
        locations: by name, the location of each parameter in the checkpoint.
        cpu: whether the compute device is a CPU.
        held: by name, the dtype of each parameter on the device.
        facts: sizes of the model, for the planner.
        importances: returns the importances of columns for encoding; None if all columns are equal.
        thresholds: returns the threshold of each layer for sparsified activations.
        verifier: compares encoded weights with their checksums; None for no check.
        lossy: the current lossy switches.
        blocks: by layer, the feed-forward block whose neurons are read when they become active; () without `flash`.
        experts: by layer, the mixture whose experts are read when they are chosen; () if `flash` is no oracle.
        trained: predictors of `blocks`, and statistics; None if there are none.
    """

    source: Source
    dtype: torch.dtype
    skeleton: Skeleton
    locations: dict[str, Origin]
    cpu: bool
    held: dict[str, torch.dtype] = field(init=False)
    facts: ModelFacts = field(init=False)
    importances: Callable[[], Importances | None] = _no_importances
    thresholds: Callable[[], Sequence[float]] = _no_thresholds
    verifier: Verifier | None = None
    lossy: Lossy = EXACT
    blocks: tuple[FeedForward | None, ...] = ()
    experts: tuple[ExpertLayer | None, ...] = ()
    trained: Trained | None = None
    _latest: dict[tuple[float, str] | None, Latest] = field(default_factory=dict)
    _whole: tuple[list[dict[str, ParamRef]], dict[str, ParamRef]] | None = None  # layers and others without `flash`

    @cached_property
    def found(self) -> tuple[FeedForward | None, ...]:
        """The feed-forward block of each layer, with all weights or without; None for a layer whose block is not known.
        They are searched before the first blocks are taken out."""
        return find(self.skeleton)

    @property
    def forms(self) -> dict[str, WeightFormat]:
        """Format of each encoded parameter, by name."""
        return self.skeleton.forms

    @property
    def files(self) -> list[Path]:
        """Files that contain the weights; empty if there are no weights."""
        paths = {run.path for origin in self.locations.values() for run in origin.runs}
        return sorted(path for path in paths if path != Path())

    @property
    def given(self) -> list[Path]:
        """The user's own files. They are the key of encoded weights: converted files may be made again."""
        return list(self.source.given) or self.files

    def use(self, lossy: Lossy) -> None:
        """Set the lossy switches, and the formats and facts that depend on the switches. Weights must not be loaded.
        Weights `mixed` stay as in the checkpoint until their formats are chosen.

        Raises:
            InvalidInput: a switch cannot be combined with the device or the dtype, or formats of layers are of another
                model.
        """
        lossy = layer_formats.read(lossy, self.source.name, self.skeleton.total)
        if reason := self.refusal(lossy):
            raise InvalidInput(reason)
        before = self.lossy
        try:
            self._set(lossy)
        except FlexError:  # predictors may be damaged
            if lossy != before:
                self._set(before)
            raise

    def _set(self, lossy: Lossy) -> None:
        """Set the lossy switches, which are not refused."""
        self.lossy, skeleton = lossy, self.skeleton
        skeleton.product.compute = cast(Compute | None, lossy.compute)
        self._take_out(lossy)
        kept = {block.first for block in self.blocks if block}  # an oracle's, as the checkpoint has them
        use_forms(skeleton, {name: form for name, form in forms(skeleton, lossy.coded).items() if name not in kept})
        self.held |= dict.fromkeys(self.forms, torch.uint8)
        self.facts = model_facts(skeleton, self.locations, self.held, self.dtype)
        kernels, facts = load_for(torch.device("cpu" if self.cpu else "cuda")), self.facts
        scratch = kernels.prompt_scratch(facts.heads, facts.kv_heads, facts.head_dim)
        scratch *= 2 if self.cpu else 1  # calls of whole layers keep theirs (`Cache.paged`) beside those of attention
        self.facts = replace(facts, topk=lossy.sparse_attention, scratch=scratch, gpu=not self.cpu)
        if lossy.cache == "bf16":
            kv = 2 * self.facts.kv_heads * self.facts.head_dim * torch.bfloat16.itemsize
            self.facts = replace(self.facts, kv_kept=kv)
        if bits := lossy.cache_bits:
            form = self.cache_form(bits)
            self.facts = replace(self.facts, kv_kept=form.token_bytes, kv_pieces=form.pieces, centred=bits < 8)
        pairs = zip_longest(self.blocks, self.experts)
        self.facts = replace(self.facts, kv_form=lossy.cache or "", blocks=tuple(
            self._block(j, block) if block else expert_facts(experts, self.locations, self.held) if experts else None
            for j, (block, experts) in enumerate(pairs)))  # fmt: skip
        for name in ("origins", "bundles"):
            self.__dict__.pop(name, None)

    def _take_out(self, lossy: Lossy) -> None:
        """Set the blocks whose weights are read on demand, take these out of the layers, and set the dtypes of all
        weights on the device."""
        skeleton, oracle = self.skeleton, lossy.flash == ORACLE
        if self._whole:
            skeleton.layers[:], skeleton.others = self._whole
            use_linears(self.blocks)
        use_forms(skeleton, {})  # also of weights that are taken out now
        self._whole = (list(skeleton.layers), dict(skeleton.others)) if lossy.flash else None
        self.held = held_dtypes(skeleton, self.locations, self.dtype, self.cpu)
        sparsify = lossy.sparsify is not None
        if lossy.flash or sparsify or "found" in self.__dict__:
            self.found = tuple(b.sparsified(sparsify) if b else None for b in self.found)
        blocks = tuple(b if b and b.sparse else None for b in self.found) if lossy.flash else ()
        self.blocks = blocks if any(blocks) else ()
        self.trained = self._trained() if self.blocks else None
        use_records(skeleton, self.blocks, keep_first=oracle)
        experts = find_experts(skeleton) if oracle else ()
        self.experts = experts if any(experts) else ()
        use_experts_apart(skeleton, self.experts)

    def _block(self, layer: int, block: FeedForward) -> NeuronFacts:
        """Return the sizes of a block and, if they are known, how its neurons are used."""
        form = record_form(block, self.locations, self.record_kind)
        first = self.locations[block.first]
        made = f"{form.vectors} vectors of {form.width} {form.kind}"
        share = self.lossy.sparsify
        facts = NeuronFacts(block.neurons, form.nbytes, made, guess=first.nbytes, decoded=form.decoded_bytes,
                            reuse=() if share is None else (1 - share,))  # fmt: skip
        if self.trained is None or (known := self.trained.layers[layer]) is None:
            return facts
        if (predictor := self.predictor(layer, torch.device("meta"))) is None:
            return replace(facts, unions=known.true.rows, reuse=known.true.window)
        nbytes = predictor.nbytes
        return replace(facts, predictor=nbytes, guess=nbytes, unions=known.predicted.rows, reuse=known.predicted.window)

    def predictor(self, layer: int, device: torch.device) -> Predictor | None:
        """Return a copy, on a device, of what names a layer's neurons; None if an oracle names them."""
        known = self.trained.layers[layer] if self.trained and self.lossy.flash == PREDICTORS else None
        return known.predictor.to(device, None if self.cpu else self.dtype) if known is not None else None

    @property
    def record_kind(self) -> str:
        """Format of the records' vectors; "" for the stored one."""
        return self.lossy.weights if isinstance(self.lossy.weights, str) else ""

    @cached_property
    def bundles(self) -> tuple[Bundle | None, ...]:
        """By layer, the records of the block; () without blocks. Makes missing ones. Raise as `prepare_bundles`."""
        source = self.source.directory, self.given, self.locations
        return prepare_bundles(*source, self.blocks, self.record_kind, self.verifier) if self.blocks else ()

    @property
    def made_bundles(self) -> list[Bundle]:
        """The bundles if they were made before, else []."""
        return made_bundles(self.given, self.locations, self.blocks, self.record_kind) if self.files else []

    def latest(self, sparsity: tuple[float, str] | None) -> Latest:
        """Return the predictors that were trained last. sparsity: as `Lossy.sparsity`."""
        return self._latest.setdefault(sparsity, Latest(self.given, sparsity))

    def _trained(self) -> Trained | None:
        """Return the predictors of the model, which were trained last; None if there are none, or if an oracle, which
        needs only their statistics, finds them damaged."""
        try:
            return self.latest(self.lossy.sparsity).load(self.blocks, slice(*self.skeleton.layer_range))
        except FlexError:
            if self.lossy.flash == ORACLE:
                return None
            raise

    def _not_trained(self, lossy: Lossy) -> str | None:
        """Return why the model has no predictors, if it needs some."""
        if lossy.flash != PREDICTORS or self.latest(lossy.sparsity).find():
            return None
        if not self.files:
            return f"{self.source.name} has no weights here, so no predictors; let flash be {ORACLE}"
        words, lacks = str(self.source.directory), "no predictors"
        if lossy.sparsity is not None:
            share, text = lossy.sparsity
            words += f" --sparsify {share}" + ("" if text == BUNDLED else f" --calibration-text {text}")
            lacks += f" for sparsify {share} with this text for its thresholds"
        return (f"{self.source.name} has {lacks}; train them: flexengine flash train {words}, or let flash be"
                f" {ORACLE}")  # fmt: skip

    def refusal(self, lossy: Lossy) -> str | None:
        """Return the reason why `use` refuses these switches; None if `use` accepts them."""
        switch = next((name for name in ("compute", "cache") if getattr(lossy, name) == "bf16"), None)
        if switch and not (self.cpu and self.dtype == torch.float32):
            return (f"{switch} is 'bf16', but this {'CPU' if self.cpu else 'GPU'} computes in {self.dtype}: it is for"
                    " CPUs that compute in fp32; leave it out, or let dtype be bfloat16 to compute all in"
                    " bf16")  # fmt: skip
        if lossy.sparsify is not None and (reason := self._not_sparsified(lossy)):
            return reason
        if lossy.flash and (reason := self._not_sparse(lossy) or self._not_trained(lossy)):
            return reason
        if reason := layer_formats.mismatch(lossy.weights, self.skeleton.total):
            return reason
        plain = set(forms(self.skeleton, "int8")) - set(forms(self.skeleton, lossy.coded))
        transposed = plain - self.skeleton.matrices
        if lossy.compute == "bf16" and lossy.decided and transposed:
            return (f"compute is 'bf16', but the model has {len(transposed)} transposed matrices, such as"
                    f" {min(transposed)}, which are multiplied in fp32; encode them with weights int8 or fewer bits, or"
                    " let compute be 'int8'")  # fmt: skip
        return None

    def _experts_refused(self, lossy: Lossy) -> str | None:
        """Return why experts cannot be read with these switches; None if they can."""
        if lossy.flash != ORACLE:
            return (f"flash is {lossy.flash!r}, but the routers of {self.source.name} choose its experts exactly, so"
                    f" that nothing is to be predicted; let flash be {ORACLE}")  # fmt: skip
        if lossy.coded is not None or not lossy.decided:
            return (f"flash reads the experts of {self.source.name} as the checkpoint has them, so weights cannot be"
                    " encoded; leave weights and compute out, or leave flash out")  # fmt: skip
        return None

    def _not_sparsified(self, lossy: Lossy) -> str | None:
        """Return why activations cannot be sparsified; None if they can."""
        given, name = f"sparsify is {lossy.sparsify}", self.source.name
        if len(self.skeleton.layers) < self.skeleton.total:
            return f"{given} with stages, of which none has all layers; leave out one of them"
        if unknown := self.found.count(None):
            return (f"{given}, but {unknown} of {len(self.found)} layers of {name} have no feed-forward block that it"
                    " knows (such as mixtures of experts, and blocks with a fused first matrix); leave sparsify"
                    " out")  # fmt: skip
        if relu := next((block for block in self.found if block and block.relu), None):
            return (f"{given}, but activations of {name} are exactly 0 already for many neurons: its activation"
                    f" function is {relu.activation}; leave sparsify out")  # fmt: skip
        return None

    def _not_sparse(self, lossy: Lossy) -> str | None:
        """Return why no neurons can be read apart; None if they can."""
        known = {block.activation for block in self.found if block is not None}
        sparse = lossy.sparsify is not None or any(block is not None and block.relu for block in self.found)
        experts = any(self.experts or find_experts(self.skeleton))
        if experts and (not sparse or lossy.flash == ORACLE) and (reason := self._experts_refused(lossy)):
            return reason
        if sparse and lossy.compute is not None:
            return (f"compute is {lossy.compute!r} with flash, whose neurons are multiplied as they are stored; leave"
                    " out one of them")  # fmt: skip
        if sparse or experts:
            return None
        what = (f"no neuron of {self.source.name} stays inactive: its activation function is {', '.join(sorted(known))}"
                if known else f"the layers of {self.source.name} have no block that it knows")  # fmt: skip
        other = "set sparsify, such as 0.7, which is lossy, " if None not in self.found else ""
        return (f"flash reads the neurons that become active, but {what}; {other}use a model with ReLU, such as OPT, or"
                " one that was trained further with ReLU, or leave flash out")  # fmt: skip

    def set_thresholds(self) -> None:
        """Set the thresholds of sparsified activations, if there are any. Measures them if the cache lacks them."""
        if self.lossy.sparsify is not None:
            for block, threshold in zip(self.found, self.thresholds(), strict=True):
                assert block is not None
                assert isinstance(block.act, Sparsified)
                block.act.threshold = threshold

    def cache_form(self, bits: int) -> CacheFormat:
        """Return the format of a layer's KV cache in `bits` bits, with pages of one token."""
        return CacheFormat(bits, self.skeleton.cache.kv_heads, 1, self.skeleton.cache.head_dim)

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """By name, the location of each parameter in its format. Encodes weights that are not encoded yet.

        Raises:
            The errors of `model.encoding.encoded`.
        """
        if not self.forms:
            return self.locations
        checkpoint = self.source.directory, self.given, self.locations
        made = encoded(*checkpoint, self.forms, self.importances(), self.verifier)
        return {**self.locations, **made}


def open_model(
    model: str | None,
    dtype: str | None,
    kind: str,
    trust_remote_code: bool = False,
    weights: bool = True,
    lossy: Lossy = EXACT,
    verifier: Verifier | None = None,
    layers: Layers | None = None,
    allow_symlinks: bool = False,
) -> Opened:
    """Return an opened model.

    Args:
        model: see `model.source.resolve`.
        dtype: see `model.dtypes.named_dtype`.
        kind: kind of machine: cpu, sim or cuda.
        trust_remote_code: whether the model's own Python code may run.
        weights: False also accepts a directory that has only a config.json; its weights then count as stored in the
            config's dtype.
        lossy: switches for the formats of weights and cache.
        verifier: see `model.source.resolve`.
        layers: first layer, and last layer + 1, to hold, or a function of the number of layers that returns them; None
            for all.
        allow_symlinks: see `model.source.resolve`.

    Raises:
        InvalidInput: the model does not have these layers.
        ModelNotFound: the model is not found.
        UnsupportedModel: the model cannot be run.
        BadCheckpoint: a file is damaged.
    """
    bare = model is not None and not weights and _is_bare(Path(model))
    if bare:
        set_links(Path(str(model)), allow_symlinks)
    source = (
        Source(Path(str(model)), Path(str(model)).resolve().name) if bare
        else resolve(model, trust_remote_code, verifier, allow_symlinks)
    )  # fmt: skip
    config = load_config(source.directory, trust_remote_code)
    computing = choose_dtype(dtype, config, kind)
    with torch.no_grad():
        skeleton = build(source.directory, computing, trust_remote_code)
    tensors = {} if bare else read_checkpoint(source.directory)
    skeleton.tied = skeleton.tied and not differ(tensors, skeleton)
    if layers is not None:
        use_range(skeleton, layers(len(skeleton.layers)) if callable(layers) else layers)
    if bare:
        own = getattr(config, "dtype", None)
        stored = _assumed(skeleton, own if isinstance(own, torch.dtype) else torch.float32)
    else:
        stored = origins(tensors, skeleton.wanted, skeleton.loading)
    opened = Opened(source, computing, skeleton, stored, kind != "cuda", verifier=verifier)
    opened.use(lossy)
    return opened


def _is_bare(path: Path) -> bool:
    """Return whether `path` is a directory with a config and no weights."""
    weights = ("*.safetensors", "pytorch_model*.bin")
    return (path / "config.json").is_file() and not any(any(path.glob(pattern)) for pattern in weights)


def _assumed(skeleton: Skeleton, dtype: torch.dtype) -> dict[str, Origin]:
    """Return locations without a file for a model without weights. dtype: of all weights."""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in skeleton.wanted.items()}
    shapes = skeleton.wanted
    return {name: Origin((ByteRange(Path(), 0, nbytes),), dtype, shapes[name]) for name, nbytes in sizes.items()}
