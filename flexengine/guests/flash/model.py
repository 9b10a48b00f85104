"""The weights of an open model that are read when tokens use them: neurons of feed-forward blocks, and experts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import torch

from flexengine.errors import FlexError
from flexengine.guests.flash.bundles import Bundle, made_bundles, prepare_bundles, record_form
from flexengine.guests.flash.expert_layers import ExpertLayer, find_experts, use_experts_apart
from flexengine.guests.flash.feed_forward import FeedForward, Sparsified, find, use_linears, use_records
from flexengine.guests.flash.predictors import Latest, Predictor, Trained
from flexengine.lossy import BUNDLED, ORACLE, PREDICTORS, Lossy
from flexengine.model.checkpoint import Origin
from flexengine.model.skeleton import ParamRef
from flexengine.plan.experts import share
from flexengine.plan.facts import NeuronFacts
from flexengine.worker.open_model import OpenModel


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
            use_linears(self.blocks)
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
        self.trained = self._load_trained(lossy) if self.blocks else None
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
            source = self.model.source.directory, self.model.given, self.model.locations
            made = prepare_bundles(*source, self.blocks, self.record_kind, self.model.verifier) if self.blocks else ()
            self._bundles = made
        return self._bundles

    @property
    def made_bundles(self) -> list[Bundle]:
        """The bundles if they were made before, else []."""
        model = self.model
        return made_bundles(model.given, model.locations, self.blocks, self.record_kind) if model.files else []

    def latest(self, sparsity: tuple[float, str] | None) -> Latest:
        """Return the predictors that were trained last. sparsity: as `Lossy.sparsity`."""
        return self._latest.setdefault(sparsity, Latest(self.model.given, sparsity))

    def _load_trained(self, lossy: Lossy) -> Trained | None:
        """Return the predictors of the model, which were trained last; None if there are none, or if an oracle, which
        needs only their statistics, finds them damaged."""
        try:
            return self.latest(lossy.sparsity).load(self.blocks, slice(*self.skeleton.layer_range))
        except FlexError:
            if lossy.flash == ORACLE:
                return None
            raise

    def refusal(self, lossy: Lossy) -> str | None:
        """Return why these switches cannot be used; None if they can."""
        reason = self._not_sparsified(lossy) if lossy.sparsify is not None else None
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

    def _experts_refused(self, lossy: Lossy) -> str | None:
        name = self.model.source.name
        if lossy.flash != ORACLE:
            return (
                f"flash is {lossy.flash!r}, but the routers of {name} choose its experts exactly, so that nothing is to"
                f" be predicted; let flash be {ORACLE}"
            )
        if lossy.coded is not None or not lossy.decided:
            return (
                f"flash reads the experts of {name} as the checkpoint has them, so weights cannot be encoded; leave"
                " weights and compute out, or leave flash out"
            )
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
            return (
                f"{given}, but activations of {name} are exactly 0 already for many neurons: its activation function"
                f" is {relu.activation}; leave sparsify out"
            )
        return None

    def _not_sparse(self, lossy: Lossy) -> str | None:
        known = {block.activation for block in self.feed_forward if block is not None}
        sparse = lossy.sparsify is not None or any(block is not None and block.relu for block in self.feed_forward)
        experts = any(self.experts or find_experts(self.skeleton))
        if experts and (not sparse or lossy.flash == ORACLE) and (reason := self._experts_refused(lossy)):
            return reason
        if sparse and lossy.compute is not None:
            return (
                f"compute is {lossy.compute!r} with flash, whose neurons are multiplied as they are stored; leave out"
                " one of them"
            )
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
    successive = tuple(float(share(layer.active, layer.experts, tokens)) for tokens in range(1, 65))
    return NeuronFacts(layer.experts, record, form, reuse=successive, stored=on_disk, experts=True)
