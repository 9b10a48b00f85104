"""An opened model without loaded weights: meta modules, locations of weights, and facts for the planner."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from flexengine.codec.cache import CacheFormat
from flexengine.codec.forms import WeightFormat
from flexengine.errors import BadCheckpoint, FlexError, InvalidInput, format_words
from flexengine.kernels import load_for
from flexengine.kernels.base import Compute
from flexengine.lossy import EXACT, Lossy
from flexengine.model.build import build, build_from
from flexengine.model.checkpoint import ByteRange, Origin, differ, origins, read_checkpoint
from flexengine.model.config import choose_dtype, defaulted, load_config, quantisation
from flexengine.model.files import read_object, set_links, weights_in
from flexengine.model.skeleton import Skeleton
from flexengine.model.source import ModelSource, resolve
from flexengine.plan.facts import NO_ATTENTION, ModelFacts, TableFacts, TensorFact
from flexengine.plan.sizes import aligned

if TYPE_CHECKING:
    from flexengine.model.encoding import Importances
    from flexengine.model.verify import Verifier

Layers = tuple[int, int] | Callable[[int, Set[int]], tuple[int, int]]
# What models with lossy switches need, as module:name, which is imported on first use.
GUESTS = {
    "flash": "flexengine.guests.flash.model:FlashModel",
    "formats": "flexengine.model.encoding:forms",
    "encoding": "flexengine.model.encoding:encoded",
    "formats by layer": "flexengine.worker.layer_formats:read",
    "range of layers": "flexengine.model.layer_range:use_range",
    "halves": "flexengine.model.halves:look_closer",
    "states": "flexengine.model.state_kernels:use_kernels",
    "quantised": "flexengine.model.quantised.schemes:decoded_names",
    "matrices": "flexengine.model.quantised.matrices:check_matrices",
}


def _no_thresholds() -> Sequence[float]:
    raise RuntimeError("nothing measures the thresholds of this model")


@dataclass
class OpenModel:
    """An opened model."""

    source: ModelSource  # directory and files of the model
    dtype: torch.dtype  # dtype of activations
    skeleton: Skeleton  # the modules, on the meta device
    locations: dict[str, Origin]  # by name, the location of each parameter in the checkpoint
    cpu: bool  # whether the compute device is a CPU
    held: dict[str, torch.dtype] = field(init=False)  # by name, the dtype of each parameter on the device
    facts: ModelFacts = field(init=False)  # sizes of the model, for the planner
    # Returns the importances of columns for encoding; None if all columns are equal
    importances: Callable[[], "Importances | None"] = lambda: None
    # Returns the threshold of each layer for sparsified activations
    thresholds: Callable[[], Sequence[float]] = _no_thresholds
    verifier: "Verifier | None" = None  # compares encoded weights with their checksums; None for no check
    lossy: Lossy = EXACT  # the current lossy switches
    # By name, the location of each parameter in its format; None before `prepare_weights`
    origins: dict[str, Origin] | None = None
    _flash: Any = None

    @property
    def flash(self) -> Any:
        """The weights that are read when tokens use them: a `guests.flash.model.FlashModel`."""
        if self._flash is None:
            self._flash = resolve_name(GUESTS["flash"])(self)
        return self._flash

    @property
    def forms(self) -> dict[str, WeightFormat]:
        """Format of each encoded parameter, by name."""
        return self.skeleton.forms

    @property
    def stored_forms(self) -> dict[str, WeightFormat]:
        """Format of each parameter that is encoded in the checkpoint, by name."""
        return {name: stored.form for name, stored in self.locations.items() if stored.form is not None}

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
        if lossy.file is not None:
            lossy = resolve_name(GUESTS["formats by layer"])(lossy, self.source.name, self.skeleton.total)
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
        self.lossy, skeleton, flash = lossy, self.skeleton, lossy.flash or lossy.sparsify is not None
        skeleton.product.compute = cast(Compute | None, lossy.compute)
        if self._flash is not None:
            self._flash.put_back()
        skeleton.use_forms({})  # also of weights that are taken out of their layers now
        encodable = self._formats("int8" if lossy.compute == "bf16" else None)
        self.held = self._held(encodable)
        kept = set[str]()
        if flash or self._flash is not None:
            self.flash.take_out(lossy)
            kept = self.flash.plain
        coded, stored = self._formats(lossy.coded), self.stored_forms
        formats = {**stored, **coded} if lossy.weights else {**coded, **stored}  # compute alone encodes plain matrices
        skeleton.use_forms({name: form for name, form in formats.items() if name not in kept})
        self.held |= dict.fromkeys(self.forms, torch.uint8)
        self.origins = None if self.forms else self.locations
        self.facts = self._facts(lossy)
        if flash:
            self.facts = replace(self.facts, blocks=self.flash.facts())

    def _formats(self, codecs: str | Sequence[str | None] | None) -> dict[str, WeightFormat]:
        """Return the format of every matrix that is encoded; see `model.encoding.forms`."""
        formats: dict[str, WeightFormat] = {}
        return formats if codecs is None else resolve_name(GUESTS["formats"])(self.skeleton, codecs)

    def _held(self, encodable: Mapping[str, WeightFormat]) -> dict[str, torch.dtype]:
        """Return the dtype of each weight on the device.

        On a CPU that computes in fp32, 16-bit matrices keep their stored dtype. If products are computed in bf16, all
        matrices except routers are held in bf16.

        Args:
            encodable: has the names of the matrices that can be encoded, which routers cannot; unused unless products
                are computed in bf16.
        """
        keep = self.skeleton.matrices if self.cpu and self.dtype == torch.float32 else set[str]()
        if self.skeleton.product.compute == "bf16":
            keep &= set(encodable)  # routers keep their dtype: rounding would change the choice of experts
            return {name: torch.bfloat16 if name in keep else self.dtype for name in self.locations}
        narrow, stored = (torch.bfloat16, torch.float16), self.locations.items()
        wide = dict.fromkeys(self.skeleton.loading.integers & self.locations.keys(), torch.float32)
        return {n: s.dtype if n in keep and s.dtype in narrow else self.dtype for n, s in stored} | wide

    def _facts(self, lossy: Lossy) -> ModelFacts:
        """Return the sizes of the model, without those of blocks that are read when tokens use them."""
        skeleton, facts = self.skeleton, self._tensor_facts
        embedding = None if skeleton.enters else facts(dict([skeleton.embedding]))[0]
        own = not skeleton.leaves and not (skeleton.tied and embedding)
        others = {name: param.shape for name, param in skeleton.others.items()}
        others |= {n: skeleton.head[1][:1] for n in [skeleton.head_bias] if n is not None and n in skeleton.wanted}
        layers = [{name: param.shape for name, param in layer.items()} for layer in skeleton.layers]
        text = skeleton.config.get_text_config()
        sizes = dict[str, Any](kv_form=lossy.cache or "")
        if lossy.cache == "bf16":
            sizes["kv_kept"] = 2 * skeleton.kv_heads * skeleton.head_dim * torch.bfloat16.itemsize
        elif bits := lossy.cache_bits:
            form = self.cache_form(bits)
            pieces = sum(len(part.starts) for part in form.parts)  # codes, each scale, each minimum
            sizes |= dict(kv_kept=form.page_bytes, kv_pieces=pieces, centred=bits < 8)
        kernels = load_for(torch.device("cpu" if self.cpu else "cuda"))
        if skeleton.mixing:
            if self.cpu and self.dtype == torch.float32:
                resolve_name(GUESTS["states"])(skeleton, kernels)
            mixing = skeleton.mixing
            states = map(aligned, mixing.record_bytes[slice(*skeleton.layer_range)])
            sizes |= dict(states=tuple(states), grain=mixing.grain, mixing=mixing[2:7])
        if skeleton.added:
            sizes |= dict(added=skeleton.added)
        if skeleton.choosing:
            names = [
                next(n for n in (f"index_{x}", f"indexer_{x}") if hasattr(text, n)) for x in ("n_heads", "head_dim")
            ]
            sizes |= dict(choosing=(skeleton.choosing, *(getattr(text, name) for name in names)))
            sizes |= dict(always_chooses=skeleton.always_chooses, entry_tokens=skeleton.entry_tokens)
        scratch = kernels.prompt_scratch(skeleton.heads, skeleton.kv_heads, skeleton.head_dim)
        return ModelFacts(
            tuple(facts(layer, skeleton.experts) for layer in layers),
            facts(others),
            embedding,
            facts({skeleton.output: skeleton.head[1]})[0] if own else None,
            vocabulary=skeleton.head[1][0],
            hidden=text.hidden_size,
            streams=skeleton.hidden_width // text.hidden_size,
            held=skeleton.held,
            inherits=frozenset(skeleton.inherits),
            tables=tuple(
                TableFacts(self.locations[name].nbytes, table.shape[0], table.module.lookups, table.layer)
                for name, table in skeleton.tables.items()
            ),
            width=skeleton.width,
            heads=skeleton.heads,
            kv_heads=skeleton.kv_heads,
            head_dim=skeleton.head_dim,
            itemsize=self.dtype.itemsize,
            kind=skeleton.config.model_type,
            active=skeleton.active,
            windows=tuple(skeleton.windows.get(j, NO_ATTENTION) for j in range(len(skeleton.layers))),
            softcap=getattr(text, "attn_logit_softcapping", None),
            leaves=skeleton.leaves,
            embedding_stays=skeleton.embedding_stays,
            queries_apart=skeleton.queries_apart,
            as_modules=self._module_words() if self.cpu and self.dtype == torch.float32 else (),
            topk=lossy.sparse_attention,
            rounded=lossy.compute is not None and self.dtype == torch.float32 and kernels.bf16,
            # Calls of whole layers keep theirs (`Cache.paged`) beside those of attention.
            scratch=scratch * (2 if self.cpu else 1),
            drawing=torch.get_num_threads() if self.cpu else 0,
            gpu=not self.cpu,
            **sizes,
        )

    def _module_words(self) -> tuple[str, ...]:
        """Return texts that say which layers run as modules of transformers, and why."""
        forms = {name: form.packed.matrices() for name, form in self.skeleton.forms.items()}
        slow = {name: {part.name for *_, part in parts if not part.in_steps} for name, parts in forms.items()}
        kinds = [set[str]().union(*(slow.get(name, ()) for name in layer)) for layer in self.skeleton.layers]
        if not (count := sum(map(bool, kinds))):
            return self.skeleton.module_words
        names = ", ".join(sorted(map(format_words, set[str]().union(*kinds))))
        text = (
            f"{count} of {len(kinds)} layers run as modules of transformers, which is slower: their weights in {names}"
        )
        return *self.skeleton.module_words, f"{text} are decoded in torch"

    def _tensor_facts(
        self, shapes: Mapping[str, tuple[int, ...]], experts: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[TensorFact, ...]:
        skeleton, by = self.skeleton, f" by {self.lossy.compute}" if self.lossy.compute else ""
        tensor_facts = []
        for name, shape in shapes.items():
            stored, held = self.locations[name], self.held[name]
            elements, size = math.prod(stored.shape), stored.dtype.itemsize
            early, matrix = name in skeleton.early, len(shape) > 1
            fact = TensorFact(name, elements, size, held.itemsize, experts.get(name, 0), matrix, early=early)
            if (form := skeleton.forms.get(name)) is not None:
                packed = form.packed
                most = packed.with_rows(packed.step).nbytes if name == skeleton.output else 0
                fact = replace(fact, encoded=form.nbytes, together=packed.step, most=most, form=packed.name + by)
            elif self.lossy.compute == "bf16" and fact.matrix and held == torch.bfloat16:
                fact = replace(fact, form="bfloat16" + by)
            tensor_facts.append(fact)
        return tuple(tensor_facts)

    def refusal(self, lossy: Lossy) -> str | None:
        """Return the reason why `use` refuses these switches; None if `use` accepts them."""
        switch = next((name for name in ("compute", "cache") if getattr(lossy, name) == "bf16"), None)
        if switch and not (self.cpu and self.dtype == torch.float32):
            return (
                f"{switch} is 'bf16', but this {'CPU' if self.cpu else 'GPU'} computes in {self.dtype}: it is for CPUs"
                " that compute in fp32; leave it out, or let dtype be bfloat16 to compute all in bf16"
            )
        flash = lossy.flash or lossy.sparsify is not None
        if flash and (reason := self.flash.refusal(lossy)) is not None:
            return str(reason)
        if isinstance(lossy.weights, tuple) and len(lossy.weights) != self.skeleton.total:
            return (
                f"weights has formats for {len(lossy.weights)} layers, but the model has {self.skeleton.total}; give"
                " one format per layer"
            )
        if lossy.compute != "bf16" or not lossy.decided:
            return None
        plain = set(self._formats("int8")) - set(self._formats(lossy.coded))
        if not (transposed := plain - self.skeleton.matrices):
            return None
        return (
            f"compute is 'bf16', but the model has {len(transposed)} transposed matrices, such as {min(transposed)},"
            " which are multiplied in fp32; encode them with weights int8 or fewer bits, or let compute be 'int8'"
        )

    def cache_form(self, bits: int) -> CacheFormat:
        """Return the format of a layer's KV cache in `bits` bits, with pages of one token."""
        return CacheFormat(bits, self.skeleton.kv_heads, 1, self.skeleton.head_dim)

    def prepare(self) -> None:
        """Measure thresholds, encode weights and write records of neurons, if the switches need them and the cache
        lacks them. This takes memory, and writes to the cache.

        Raises:
            The errors of `model.encoding.encoded` and of `guests.flash.bundles.prepare_bundles`.
        """
        if self.lossy.flash or self.lossy.sparsify is not None:
            self.flash.prepare()
        self.prepare_weights()

    def prepare_weights(self) -> dict[str, Origin]:
        """Return, by name, the location of each parameter in its format, after encoding weights that are not encoded
        yet. Raise as `model.encoding.encoded`."""
        if self.origins is None:
            stored, made = self.stored_forms, dict[str, Origin]()
            if chosen := {name: form for name, form in self.forms.items() if form != stored.get(name)}:
                checkpoint = self.source.directory, self.given, self.locations
                encoded = resolve_name(GUESTS["encoding"])
                made = encoded(*checkpoint, chosen, self.importances(), self.verifier)
            self.origins = self.in_formats(made)
        return self.origins

    def in_formats(self, made: Mapping[str, Origin]) -> dict[str, Origin]:
        """Return, by name, the location of each parameter in its format. made: of those that are encoded here."""
        return {name: made.get(name, stored.raw) for name, stored in self.locations.items()}


class Trust(NamedTuple):
    """What may be done with a model's files; see `model.source.resolve`."""

    trust_remote_code: bool = False  # whether the model's own Python code may run
    verifier: "Verifier | None" = None
    allow_symlinks: bool = False
    memory: int | None = None


NO_TRUST = Trust()


def open_model(
    model: str | None, dtype: str | None, kind: str, trust: Trust = NO_TRUST, weights: bool = True,
    lossy: Lossy = EXACT, layers: Layers | None = None,
) -> OpenModel:  # fmt: skip
    """Return an opened model.

    Args:
        model: see `model.source.resolve`.
        dtype: see `model.config.named_dtype`.
        kind: kind of machine: cpu, sim or cuda.
        weights: False also accepts a directory that has only a config.json; its weights then count as stored in the
            config's dtype. Scales of quantised weights are not checked then.
        lossy: switches for the formats of weights and cache.
        layers: first layer, and last layer + 1, to hold, or a function of the number of layers that returns them; None
            for all.

    Raises:
        InvalidInput: the model does not have these layers.
        ModelNotFound: the model is not found.
        UnsupportedModel: the model cannot be run.
        BadCheckpoint: a file is damaged.
    """
    path = Path(model or "")
    bare = not weights and model is not None and (path / "config.json").is_file() and weights_in(path) is None
    if bare:
        set_links(path, trust.allow_symlinks)
        source = ModelSource(path, path.resolve().name)
    else:
        source = resolve(model, *trust)
    config = load_config(source.directory, trust.trust_remote_code, not bare)
    computing, own = choose_dtype(dtype, config, kind), getattr(config, "dtype", None)
    with torch.no_grad():
        given = (source.directory, computing, trust.trust_remote_code)
        skeleton = build_from(config, *given) if bare else build(*given)
        if kind != "cpu":  # for policies that a CPU's own memory has no use for
            resolve_name(GUESTS["halves"])(skeleton)
    tensors = {} if bare else read_checkpoint(source.directory, source.given)
    quantised = not bare and quantisation(read_object(source.directory / "config.json"))
    if quantised:
        tensors = resolve_name(GUESTS["quantised"])(source.directory, tensors, weights)
    skeleton.tied = skeleton.tied and not differ(tensors, skeleton)
    if layers is not None:
        use_range = resolve_name(GUESTS["range of layers"])
        use_range(skeleton, layers(len(skeleton.layers), skeleton.inherits) if callable(layers) else layers)
    assumed = own if isinstance(own, torch.dtype) else torch.float32
    try:
        stored = _assumed(skeleton, assumed) if bare else origins(tensors, skeleton.wanted, skeleton.loading)
    except BadCheckpoint as error:
        lack = defaulted(source.directory / "config.json", config)
        raise BadCheckpoint("; ".join(filter(None, (str(error), lack)))) from error
    if quantised:
        resolve_name(GUESTS["matrices"])(skeleton, stored)
    opened = OpenModel(source, computing, skeleton, stored, kind != "cuda", verifier=trust.verifier)
    opened.use(lossy)
    return opened


def _assumed(skeleton: Skeleton, dtype: torch.dtype) -> dict[str, Origin]:
    """Return locations without a file for a model without weights. dtype: of all weights."""
    return {
        name: Origin((ByteRange(Path(), 0, math.prod(shape) * dtype.itemsize),), dtype, shape)
        for name, shape in skeleton.wanted.items()
    }
