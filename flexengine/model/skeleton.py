"""A model without weights: its modules on the meta device, cut into units, and whether it can be run exactly."""

import warnings
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.model.adapters import ADAPTED, adapt
from flexengine.model.config import load_config
from flexengine.model.form import Form
from flexengine.model.forward import (
    ATTENTION,
    Attend,
    Forward,
    Head,
    Inputs,
    Layer,
    Logits,
    PausingEmbedding,
    PausingHead,
    PausingLayer,
    Rows,
    attend,
)
from flexengine.model.fused import use_fused
from flexengine.model.linear import FastLinear, Product, use_fast_linear
from flexengine.model.loading import Loading
from flexengine.model.masks import marked, window_of
from flexengine.model.products import Invariance, is_experts, use_product

_BUFFERS = 1 << 30  # bytes of buffers that are no part of a checkpoint
_COUPLED_ROPE = {"dynamic", "longrope"}  # their frequencies depend on the longest sequence of a batch


class Slot(NamedTuple):
    """The place of one parameter: `module`'s attribute `name`."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]

    @property
    def holder(self) -> dict[str, Any]:
        """The module's dict that holds what this slot names."""
        parameters: dict[str, Any] = self.module._parameters  # type: ignore[assignment]
        return parameters if self.name in parameters else self.module._buffers

    def bind(self, tensor: Tensor) -> None:
        """Makes the module compute with this parameter or buffer."""
        self.holder[self.name] = tensor


@dataclass(frozen=True)
class CacheShape:
    """What one token of one sequence leaves in one layer's KV cache: the largest of all layers (worker.cache.fit)."""

    kv_heads: int
    head_dim: int


@dataclass
class Skeleton:
    """layers: per decoder layer, parameter name to its place; others: parameters outside layers, embedding and head.

    width: elements of the widest activation of a layer per token. tied: head and embedding are one tensor.
    """

    model: Any  # a transformers.PreTrainedModel
    config: Any
    name: str
    layers: list[dict[str, Slot]]
    others: dict[str, Slot]
    embedding: tuple[str, tuple[int, ...]]
    head: tuple[str, tuple[int, ...]]
    head_bias: str | None
    tied: bool
    cache: CacheShape
    heads: int
    width: int
    head_module: PausingHead
    product: Product
    invariance: Invariance  # see `mode`
    loading: Loading
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer: tokens seen, None for all
    forms: dict[str, Form] = field(default_factory=dict)  # by parameter: how it is encoded

    def mode(self, device: torch.device) -> Invariance | None:
        """Return the torch function mode of a pass on a device. None on a GPU: there a token's bits depend on its batch
        in any case, and a mode would only delay what is queued."""
        return self.invariance if device.type == "cpu" else None

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Every parameter a checkpoint must hold, with its shape."""
        names = {name: slot.shape for layer in (*self.layers, self.others) for name, slot in layer.items()}
        names[self.embedding[0]] = self.embedding[1]
        if not self.tied:
            names[self.head[0]] = self.head[1]
        if self.head_bias:
            names[self.head_bias] = self.head[1][:1]
        return names

    @property
    def matrices(self) -> set[str]:
        """The parameters that only a Product or an embedding reads, so that they may be held as they are stored."""
        slots = [item for group in (*self.layers, self.others) for item in group.items()]
        linear = {n for n, slot in slots if slot.name == "weight" and isinstance(slot.module, FastLinear)}
        experts = {n for n, slot in slots if _reads_rows(slot)}
        return linear | experts | {self.embedding[0], self.head[0]}

    @property
    def experts(self) -> dict[str, int]:
        """Parameters that experts share, with the number of experts."""
        slots = [item for layer in self.layers for item in layer.items()]
        return {n: slot.shape[0] for n, slot in slots if len(slot.shape) == 3 and is_experts(slot.module)}

    @property
    def active(self) -> int:
        """Experts that one token uses; 0 where there are none. Configs of different makers name it differently."""
        config = self.config.get_text_config()
        names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
        found = (n for name in names if isinstance(n := getattr(config, name, None), int))
        return next(found, 1) if self.experts else 0

    @property
    def context_length(self) -> int | None:
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


def _why(error: Exception) -> str:
    """What a failed trial pass says about the model, as a sentence."""
    if "meta" in str(error):
        return "what it computes depends on the values of tensors, so that it cannot be tried without weights"
    return f"a trial pass without weights came to nothing ({error or type(error).__name__})"


def _reads_rows(slot: Slot) -> bool:
    """Whether it holds experts' matrices [expert, out, in], which a Product reads one at a time."""
    return len(slot.shape) == 3 and is_experts(slot.module) and not slot.module.is_transposed


def build(directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Skeleton:
    """The skeleton of the model in `directory`, computing in `dtype`.

    Raises UnsupportedModel with the model's name and the reason, before any weight is read.
    """
    config = load_config(directory, trust_remote_code)
    name = f"{(config.architectures or [config.model_type])[0]} ({directory.name})"
    model = _meta_model(config, name, dtype, trust_remote_code)
    try:
        skeleton = _cut(model, config, name)
        _probe(skeleton)
        _restore_buffers(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except Exception as error:
        raise UnsupportedModel(f"{name}: {_why(error)}") from error
    return skeleton


def _meta_model(config: Any, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only language models are supported")
    if coupled := _rope_types(config) & _COUPLED_ROPE:
        raise UnsupportedModel(f"{name} uses {min(coupled)} rotary scaling, which ties a batch's rows together")
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise UnsupportedModel(f"{name} ({config.model_type}) is not a causal language model of transformers")
    adapted = config.model_type in ADAPTED
    if not adapted and not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} computes attention itself and accepts no registered attention")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attention = "eager" if adapted else ATTENTION
            model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    if adapted:
        adapt(model, attend)
        model.config._attn_implementation = ATTENTION  # no masks, then
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # looks at values; and there is no padding
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model.eval().requires_grad_(False)


def _rope_types(config: Any) -> set[str]:
    """Of all layers: transformers keeps parameters for each type of layer where they differ."""
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    tables = [rope, *rope.values()] if isinstance(rope, dict) else []
    return {kind for table in tables if isinstance(table, dict) and isinstance(kind := table.get("rope_type"), str)}


def _layer_list(model: Any, count: int) -> tuple[nn.Module, str, str]:
    """Parent, attribute and full name of the decoder's ModuleList. Other towers may have as many layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    for name, module in sorted(model.named_modules(), key=lambda pair: id(pair[1]) not in inside):
        if isinstance(module, nn.ModuleList) and len(module) == count and all(hasattr(m, "forward") for m in module):
            parent = model.get_submodule(name.rpartition(".")[0])
            return parent, name.rpartition(".")[2], name
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers")


def _cut(model: Any, config: Any, name: str) -> Skeleton:
    """Names the parameters of each unit and puts pausing modules in place of layers, embedding and head."""
    loading = Loading(model)
    count = config.get_text_config().num_hidden_layers
    parent, attribute, path = _layer_list(model, count)
    _refuse_mixing(getattr(parent, attribute))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise UnsupportedModel(f"{name} has no plain embedding and linear output projection")
    names = {module: module_name for module_name, module in model.named_modules()}
    persistent = set(model.state_dict(keep_vars=True))
    layers: list[dict[str, Slot]] = [{} for _ in range(count)]
    others: dict[str, Slot] = {}
    for module_name, module in model.named_modules():
        if module is embedding or module is head:
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{module_name}.{key}".lstrip(".")
            if tensor is None or full not in persistent:
                continue
            inside = module_name.startswith(f"{path}.")
            group = layers[int(module_name[len(path) + 1 :].split(".")[0])] if inside else others
            group[full] = Slot(module, key, tuple(tensor.shape))
    product = Product(model.dtype)
    use_fast_linear(model, product)
    use_product(model, product)
    use_fused(model)
    modules = getattr(parent, attribute)
    for j in range(count):
        modules[j] = PausingLayer(modules[j], j)
    model.set_input_embeddings(PausingEmbedding(embedding, f"{names[embedding]}.weight"))
    pausing = PausingHead(head.out_features, 1, product)
    model.set_output_embeddings(pausing)
    wide = max((max(s.shape[-2:]) for layer in layers for s in layer.values() if len(s.shape) > 1), default=1)
    weights = {f"{names[embedding]}.weight", f"{names[head]}.weight"}
    return Skeleton(
        model, config, name, layers, others,
        embedding=(f"{names[embedding]}.weight", tuple(embedding.weight.shape)),
        head=(f"{names[head]}.weight", tuple(head.weight.shape)),
        head_bias=f"{names[head]}.bias" if head.bias is not None else None,
        tied=any({target, source} == weights for target, source in loading.tied.items()),
        cache=CacheShape(0, 0), heads=0, width=wide, head_module=pausing, product=product,
        invariance=Invariance(product), loading=loading,
    )  # fmt: skip


def _refuse_mixing(layers: nn.Module) -> None:
    """Tokens of several sequences lie side by side; only attention keeps them apart."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            raise UnsupportedModel(f"layer {name} is a convolution over tokens; it keeps state beyond the KV cache")


def _probe(skeleton: Skeleton) -> None:
    """Runs two packed tokens on the meta device: every layer must pause once, and once more in its attention.

    In fp32 the linear layers see 16-bit weights, as they may later: none may narrow its input to their dtype.
    """
    if skeleton.model.dtype == torch.float32:
        for module in skeleton.model.modules():
            if isinstance(module, FastLinear):
                narrow = module.weight.to(torch.bfloat16)
                module._parameters["weight"] = nn.Parameter(narrow, requires_grad=False)
    with marked(ATTENTION):
        _trial(skeleton)


def _trial(skeleton: Skeleton) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    forward = Forward(skeleton.model, Inputs(ids, ids, ids[0]), skeleton.invariance)
    seen: list[str] = []
    shapes: set[tuple[int, int, int]] = set()
    vocabulary, hidden = skeleton.embedding[1]
    answer: Any = None
    while not isinstance(event := forward.resume(answer), Logits):
        answer = None
        if isinstance(event, Rows):
            answer = torch.empty(vocabulary, hidden, device="meta", dtype=skeleton.model.dtype), event.ids
        elif isinstance(event, Layer):
            seen.append(f"layer {event.index}")
            if event.hidden.shape != (1, 2, skeleton.config.get_text_config().hidden_size):
                raise UnsupportedModel(f"hidden states are {tuple(event.hidden.shape)} between layers")
            answer = event.hidden
        elif isinstance(event, Attend):
            seen.append(f"attention {event.layer}")
            skeleton.windows[event.layer] = _window(event)
            answer = _probe_attention(event, shapes)
        elif isinstance(event, Head):
            answer = torch.empty(skeleton.head[1], device="meta", dtype=skeleton.model.dtype), None, None
    expected = [f"{what} {j}" for j in range(len(skeleton.layers)) for what in ("layer", "attention")]
    if seen != expected:
        pairs = zip_longest(seen, expected, fillvalue="the end")
        got, wanted = next((got, wanted) for got, wanted in pairs if got != wanted)
        raise UnsupportedModel(f"expected {wanted} but the model went to {got}; it keeps other state")
    heads, kv_heads, dims = (list(column) for column in zip(*shapes, strict=True))
    width = max(dims) if max(dims) % 8 == 0 else -(-max(dims) // 16) * 16  # kernels like whole vectors
    skeleton.heads, skeleton.cache = max(heads), CacheShape(max(kv_heads), width)
    if any(skeleton.cache.kv_heads % n for n in kv_heads) or any(n % skeleton.cache.kv_heads for n in heads):
        raise UnsupportedModel(f"its layers have {sorted(set(kv_heads))} KV heads for"
                               f" {sorted(set(heads))} heads, which cannot share one page size")  # fmt: skip


def _window(event: Attend) -> int | None:
    """Of what the attention is told and what the mask says, which must not contradict each other."""
    if event.mask is None:
        return event.window
    window = window_of(event.mask)
    if event.window not in (None, window):
        raise UnsupportedModel(f"layer {event.layer} has a window of {event.window} and a mask of {window} tokens")
    return window


def _probe_attention(event: Attend, shapes: set[tuple[int, int, int]]) -> Tensor:
    heads, tokens, head_dim = event.q.shape[1:]
    kv_heads, count, width = event.v.shape[1:]
    if event.k.shape != (1, kv_heads, count, head_dim) or count != tokens or heads % kv_heads:
        raise UnsupportedModel(f"attention of {tuple(event.q.shape)} queries over {tuple(event.k.shape)} keys and"
                               f" {tuple(event.v.shape)} values is none the engine knows")  # fmt: skip
    shapes.add((heads, kv_heads, max(head_dim, width)))
    return event.q.new_empty(1, tokens, heads, width)


def _restore_buffers(model: Any) -> None:
    """Computes the buffers no checkpoint holds (rotary frequencies): on meta they were never filled."""
    if (size := sum(b.nbytes for b in model.buffers())) > _BUFFERS:
        raise UnsupportedModel(f"its buffers take {size:,} bytes, more than {_BUFFERS:,}; its config cannot be right")
    for module in model.modules():
        buffers = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        if not any(k in module._non_persistent_buffers_set for k in buffers):
            continue
        for name, buffer in buffers.items():
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        model._init_weights(module)


def choose_dtype(requested: str | None, config: Any, device: str) -> torch.dtype:
    """The compute dtype: as requested; else float32 on CPU and sim, the checkpoint's own on CUDA."""
    if (dtype := named_dtype(requested)) is not None:
        return dtype
    own = getattr(config, "dtype", None)
    return own if device == "cuda" and isinstance(own, torch.dtype) else torch.float32


def named_dtype(requested: str | None) -> torch.dtype | None:
    """The dtype of that name; None for auto. Raises InvalidInput for any other name."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if requested in (None, "auto"):
        return None
    if requested not in names:
        raise InvalidInput(f"dtype is {requested!r}; it must be auto, {', '.join(names)}")
    return names[requested]
