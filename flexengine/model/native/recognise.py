"""Which layers of a model compute by calls of native kernels, and why others do not.

A small layer of the same class, with random weights, is run when the model is built: native/reader.py reads from the
run what the layer computes. When the layer is first used, the calls that follow this record are compared with the small
layer's own modules, for small and large weights. So no code is looked at, and no class or module is known by its name.

A trial cannot show what code does with all numbers and in all layers. So only layers of transformers' own models are
tried, not those of a checkpoint's own Python code.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flexengine import kernels
from flexengine.errors import FlexError
from flexengine.kernels.cpu import NativeKernels
from flexengine.model.forward import ATTENTION, Attend, Inputs, Pass, PausingLayer, pausing_layers
from flexengine.model.linear import FastConv1D, FastLinear, Product, unwatched, use_product
from flexengine.model.native.describe import CLOSE, POSITIONS, LayerRecord, Undescribed, angle_pair
from flexengine.model.native.fused import is_norm, settings_of
from flexengine.model.native.kind import LayerKind, Scratch
from flexengine.model.native.layer import NativeLayer
from flexengine.model.native.reader import LayerRun, Reader, Seen

# Sizes of a trial, by the names of a config's fields.
_HEADS, _DIM, _INNER = 8, 16, 24
_SMALL = {"hidden_size": _HEADS * _DIM, "word_embed_proj_dim": _HEADS * _DIM, "head_dim": _DIM}
_SMALL |= dict.fromkeys(("num_attention_heads", "num_attention_heads_per_layer"), _HEADS)
_SMALL |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), _INNER)
_SMALL |= dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"), _INNER)
_SMALL |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 12, "q_lora_rank": 20}
_SMALL["qk_head_dim"] = _SMALL["qk_rope_head_dim"] + _SMALL["qk_nope_head_dim"]
_TOKENS = len(POSITIONS)  # of a trial; no other size is equal
_WEIGHTS = (0.3, 30.0)  # standard deviations of matrices, of one trial each; large ones exceed limits such as clip_qkv
_KNOWN = {"transformers", "torch", "flexengine", "builtins"}  # packages whose classes a trial is for
_FAILED = "calls of kernels do not compute what a small layer's modules compute"
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a layer in a pass on the meta device


@contextmanager
def layer_calls(model: Any) -> Iterator[dict[int, Call]]:
    """Record the arguments of layers, by their numbers, in passes of a model."""
    calls = dict[int, Call]()
    with ExitStack() as hooks:
        for module in pausing_layers(model):

            def record(_: nn.Module, args: Any, kwargs: Any, index: int = module.index) -> None:
                calls[index] = args, kwargs

            hooks.enter_context(module.layer.register_forward_pre_hook(record, with_kwargs=True))
        yield calls


def use_native_layers(
    model: Any, attends: Mapping[int, Attend], calls: Mapping[int, Call], adapt: Callable[[Any], None] | None
) -> dict[int, str]:
    """Let layers of a model, with pausing layers and fast linear modules, compute by calls of kernels if what they
    compute is known. The comparison with their modules follows when they are first used.

    Args:
        attends: by layer, its pause at attention in a pass on the meta device. Others run their modules.
        calls: by layer, its arguments there.
        adapt: replaces the attention of a layer as it was replaced in the model; None if it was not.

    Returns:
        By layer that runs its modules, the reason.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    if any(cls.__module__.partition(".")[0] not in _KNOWN for cls in classes):
        return dict.fromkeys(attends, "its code is not that of transformers")
    kinds, reasons, scratch = dict[Any, LayerKind | str](), dict[int, str](), Scratch()
    all_layers = pausing_layers(model)
    before: PausingLayer | None = None
    layers = [layer for layer in all_layers if layer.index in attends]
    keys = [_settings(module.layer, attends[module.index]) for module in layers]
    for module, key in zip(layers, keys, strict=True):
        event, call = attends[module.index], calls[module.index]
        if key not in kinds:
            alike = [m.index for m, other in zip(layers, keys, strict=True) if other == key]
            failed = partial(_note, reasons, alike)
            trial = _Trial(type(module.layer), model.config, event, call, adapt)
            kinds[key] = _kind(trial, module.layer, scratch, failed)
        if isinstance(kind := kinds[key], str):
            reasons[module.index] = kind
        else:
            module.outputs = kind.record.outputs
            module.native = NativeLayer(module.layer, event, _width(call), kind)
            if before is not None and before.native is not None and before.index + 1 == module.index:
                before.native.following = module.native
        before = module
    if before is not None and before.native is not None and before is all_layers[-1]:
        before.native.last = _ends(model)
    return reasons


def _note(reasons: dict[int, str], layers: list[int]) -> None:
    reasons.update(dict.fromkeys(layers, _FAILED))


def _settings(layer: Any, event: Attend) -> Any:
    """Return what layers that compute alike have in common: classes, plain attributes of modules but their numbers."""
    modules = tuple((name, *settings_of(m, ("layer_idx", "layer_id"))) for name, m in layer.named_modules())
    paths = tuple(name for name, _ in layer.named_parameters())
    return modules, paths, event.q.shape, event.k.shape, event.v.shape, event.scale, event.softcap


def _width(call: Call) -> int:
    """Return the elements of cosines and sines that a layer gets; 0 for none."""
    pair = angle_pair(call[1].get("position_embeddings"))
    return 0 if pair is None else int(pair[0].shape[-1])


def _kind(trial: "_Trial", layer: nn.Module, scratch: Scratch, failed: Callable[[], None]) -> LayerKind | str:
    """Return what layers of equal settings share, or the reason why they run their modules. failed: called if calls do
    not compute what the modules do."""
    if why := next((m.as_module for m in layer.modules() if hasattr(type(m), "as_module")), ""):
        return str(why)
    try:
        run, _ = trial.run(small := trial.small(_WEIGHTS[0]))
        record = _read(run, trial.clip(small))
        fitting = _fitting(record, small, layer)
        if any(type(layer.get_submodule(path)) not in (FastLinear, FastConv1D) for path in record.linear):
            raise Undescribed("a projection is a linear layer of a class of its own")
    except Undescribed as error:
        return str(error)
    except Exception as error:  # the layer needs what a trial does not have
        return f"a small layer of its class fails alone ({type(error).__name__}: {str(error)[:80]})"

    @cache
    def passes() -> bool:
        if not (found := trial.passes(record)):
            failed()
        return found

    return LayerKind(fitting, lambda: isinstance(kernels.load(), NativeKernels) and passes(), scratch)


def _read(run: LayerRun, clip: float) -> LayerRecord:
    """Return the record of a layer. clip: see `_Trial.clip`. Raise Undescribed if there is none."""
    if not clip:
        with suppress(Undescribed):
            return Reader(run).record()
    from flexengine.model.native.rarer import RarerReader

    return RarerReader(run, clip).record()


def _fitting(record: LayerRecord, small: nn.Module, layer: nn.Module) -> LayerRecord:
    """Return the record of a small layer with the factors of another one. Some, such as those of queries, depend on
    sizes. Raise Undescribed if it is not clear which number of the layer a factor is."""

    def named(number: float) -> set[Any]:
        paths = [(path, name) for path, m in small.named_modules() for name, x in vars(m).items() if _is(x, number)]
        return {vars(layer.get_submodule(path))[name] for path, name in paths}

    def of(factor: float) -> float:
        found = named(factor) if factor != 1.0 else set()
        if len(found) > 1:
            raise Undescribed(f"several of its numbers are {factor:g} in a small layer, but differ here")
        return found.pop() if found else factor

    if record.v.groups > 1 and record.v.groups not in named(record.v.groups):
        raise Undescribed("the groups of heads of its projections depend on its size")
    first, second = map(of, record.factors)
    values = record.v._replace(factor=of(record.v.factor))
    return record._replace(factors=(first, second), factor=of(record.factor), v=values)


def _is(x: Any, number: float) -> bool:
    return type(x) is type(number) and bool(x == number)


def _ends(model: Any) -> bool:
    """Return whether nothing but a norm of each token, and the output projection, follows the last layer. Embeddings of
    ids and of positions come before the first layer; a norm may have no parameters."""
    inside = {m for layer in model.modules() if isinstance(layer, PausingLayer) for m in layer.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    others = [m for m in outside if not isinstance(m, nn.Embedding)]
    return len(others) < len(outside) and len(others) <= 1 and all(map(is_norm, others))


class _Trial:
    """Small layers of a class, with a model's config and the number of a layer. Arguments as in `use_native_layers`."""

    def __init__(self, cls: Any, config: Any, event: Attend, call: Call, adapt: Callable[[Any], None] | None) -> None:
        self._class, self._config, self._call, self._adapt = cls, config.get_text_config(), call, adapt
        self._index, width = event.layer, _width(call)
        self._complex = width > 0 and not isinstance(call[1]["position_embeddings"], tuple)
        # Elements of the small layer's cosines, and its field rotary_dim.
        rotary, latent = (getattr(self._config, name, None) or 0 for name in ("rotary_dim", "qk_rope_head_dim"))
        of, size = (latent, _SMALL["qk_rope_head_dim"]) if latent else (event.q.shape[-1], _DIM)
        self._width = max(2, 2 * (width * size // of // 2)) if width else 0
        self._rotary = rotary * self._width // width if width else rotary
        share = event.q.shape[1] // event.k.shape[1]
        self._kv_heads = _HEADS if share == 1 else 1 if event.k.shape[1] == 1 else _HEADS // 2

    def small(self, weights: float) -> nn.Module:
        """Return a small layer with random weights, matrices of a standard deviation."""
        rng, config = torch.Generator().manual_seed(0), copy.deepcopy(self._config)
        for name, size in (_SMALL | {"num_key_value_heads": self._kv_heads, "rotary_dim": self._rotary}).items():
            if getattr(config, name, None) is not None:
                with suppress(AttributeError):  # a property that follows from other fields
                    own = getattr(config, name)
                    setattr(config, name, [size] * len(own) if isinstance(own, list) else size)
        config._attn_implementation, config._experts_implementation_internal = ATTENTION, "eager"
        if self._adapt is not None:  # some make their modules by name
            config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            small: nn.Module = self._class(config, self._index).float().eval().requires_grad_(False)
        config._attn_implementation = ATTENTION
        if self._adapt is not None:
            self._adapt(small)
        for tensor in small.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=rng) * (weights if tensor.dim() > 1 else 1.0))
        return small

    def run(self, layer: nn.Module) -> tuple[LayerRun, Any]:
        """Run a small layer's modules. Return the run, and the layer's cosines and sines as it got them."""
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(1, _TOKENS, _SMALL["hidden_size"], generator=rng)
        positions: Any = None
        if self._width:
            positions = tuple(torch.randn(1, _TOKENS, self._width, generator=rng) for _ in range(2))
        angles = None if positions is None else (positions[0][0], positions[1][0])
        positions = torch.complex(*positions) if self._complex else positions
        args, kwargs = self._arguments(x, positions)
        seen = list[Seen]()
        with ExitStack() as hooks:
            for path, module in layer.named_modules():
                if path:
                    hook = partial(_see, seen, path)
                    hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            event, attended, result = _ran(lambda: layer(*args, **kwargs))
        outputs = len(result) if isinstance(result, tuple | list) else None
        result = result[0] if isinstance(result, tuple | list) else result
        return LayerRun(layer, seen, x[0], event, angles, attended[0], result[0], outputs), positions

    def clip(self, small: nn.Module) -> float:
        """Return the limit of values of a small layer whose matrices have the first of the standard deviations; 0 for
        none. Change the layer's weights."""
        for tensor in small.parameters():
            if tensor.dim() > 1:
                tensor.mul_(_WEIGHTS[1] / _WEIGHTS[0])
        size = self.run(small)[0].event.v.abs()
        return float(size.max()) if int((size == size.max()).sum()) > 1 else 0.0

    def _arguments(self, x: Tensor, positions: Any) -> Call:
        """Return arguments like those of the call: hidden states x, positions, and no masks."""
        first = [True]

        def given(name: str, value: Any) -> Any:
            if name == "position_embeddings":
                if positions is None and value is not None:
                    raise Undescribed("its positions are not cosines and sines")
                return positions
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point() and value.dim() == 3 and first:
                first.clear()
                return x.clone()
            whole = not value.is_floating_point() and value.dtype != torch.bool
            if value.is_floating_point() and name not in ("", "attention_mask", "alibi"):
                raise Undescribed(f"its argument {name} is a tensor whose use is not known")
            return torch.tensor([POSITIONS]) if whole and value.dim() == 2 else None

        args, kwargs = self._call
        return tuple(given("", value) for value in args), {k: given(k, value) for k, value in kwargs.items()}

    def passes(self, record: LayerRecord) -> bool:
        """Return whether calls by the record compute the same as the modules, but for rounding."""
        try:
            kind = LayerKind(record, lambda: True, Scratch())  # its router is probed once
            with unwatched():  # a pass runs; numbers may be rounded otherwise here
                return all(self._alike(self._sized(record, size), kind) for size in _WEIGHTS)
        except FlexError:
            raise
        except Exception:  # the record does not fit the layer
            return False

    def _sized(self, record: LayerRecord, weights: float) -> nn.Module:
        """Return a small layer as `small`. In modules that compute the block after attention, which are used as they
        are, matrices keep the first of the deviations: with large ones, rounding may change a choice of experts."""
        small = self.small(weights)
        for tensor in (x for path in record.blocks for x in small.get_submodule(path).parameters() if x.dim() > 1):
            tensor.mul_(_WEIGHTS[0] / weights)
        return small

    def _alike(self, own: nn.Module, kind: LayerKind) -> bool:
        ours = copy.deepcopy(own)
        use_product(ours, Product(torch.float32))
        run, positions = self.run(own)
        native = NativeLayer(ours, run.event, self._width, kind)
        found, _, result = _ran(lambda: native(run.x[None].clone(), positions)[1])
        one, two = run.event, found
        pairs = [(one.q * one.scale, two.q * two.scale), (one.v, two.v), (run.result, result[0])]
        # Positions of ALiBi are large numbers in a column of their own.
        parts = (slice(-1), slice(-1, None)) if kind.record.alibi else (slice(None),)
        pairs += [(one.k[..., part], two.k[..., part]) for part in parts]
        return all(a.shape == b.shape and float((a - b).norm() / a.norm()) < CLOSE for a, b in pairs)


def _see(seen: list[Seen], path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    """Note what a module got and gave."""
    y = result[0] if isinstance(result, tuple) and result else result
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    if given and isinstance(y, Tensor):
        seen.append(Seen(path, module, _by_token(given[0]), _by_token(y)))


def _by_token(x: Tensor) -> Tensor:
    """Return a copy of [1, tokens, ...] or [1, heads, tokens, dim] as [tokens, ...]."""
    x = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
    x = x.transpose(0, 1) if x.dim() == 3 and x.shape[0] != _TOKENS == x.shape[1] else x
    return (x[:, 0] if x.dim() == 3 and x.shape[1] == 1 else x).clone()


def _ran(layer: Callable[[], Any]) -> tuple[Attend, Tensor, Any]:
    """Return the pause at attention, its answer, which is random, and the output of a layer."""
    current, positions = Pass(layer), torch.tensor([POSITIONS])
    current.inputs = Inputs(positions, positions, torch.arange(_TOKENS))
    event = current.switch()
    if not isinstance(event, Attend):
        raise Undescribed("it does not pause at attention")
    rng = torch.Generator().manual_seed(2)
    attended = torch.randn(1, _TOKENS, event.q.shape[1], event.v.shape[-1], generator=rng)
    return (
        event._replace(q=event.q.clone(), k=event.k.clone(), v=event.v.clone()),
        attended,
        current.switch(attended.clone()),
    )
