"""Building of a skeleton from a model directory, and the check that the model can be run in units."""

import inspect
import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.activity import message
from flexengine.errors import UnsupportedModel, size, size_within
from flexengine.model.checkpoint import Loading
from flexengine.model.config import context_of, coupled_rope, load_config
from flexengine.model.forward import ATTENTION, Attend, Layer, Mix, PausingEmbedding, PausingHead, PausingLayer
from flexengine.model.linear import FastLinear, Invariance, Product, use_product
from flexengine.model.native.fused import use_fused
from flexengine.model.native.recognise import layer_calls, use_native_layers
from flexengine.model.queries import recorded, separable
from flexengine.model.sample import LogitStep
from flexengine.model.skeleton import TRIAL_TOKENS, ParamRef, Skeleton

_LARGEST = 1 << 17  # tokens; the mask function is tried on at most about twice as many
_lock = threading.Lock()  # `marked` patches global state of transformers
_CHUNKS = "chunks of tokens"  # pattern of a mask by which a token sees the earlier ones of its chunk
_COUNTED = "it counts positions itself, so rows of a batch cannot be packed"
_BUFFERS = 1 << 30  # limit in bytes of buffers that no checkpoint holds
# Families whose modules compute attention, positions or experts themselves: by adapter, which is imported on first use.
_ADAPTED = {
    "flexengine.model.adapters.alibi:adapt": "bloom mpt",
    "flexengine.model.adapters.bart:adapt": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus"
    " plbart trocr xglm",
    "flexengine.model.adapters.bert:adapt": "big_bird git megatron-bert rembert roformer xmod",
    "flexengine.model.adapters.deepseek_v4:adapt": "deepseek_v4",
    "flexengine.model.adapters.blocks:adapt": "minimax_m3_vl_text",
    "flexengine.model.adapters.diffllama:adapt": "diffllama",
    "flexengine.model.adapters.doge:adapt": "doge",
    "flexengine.model.adapters.experts:adapt": "dbrx jetmoe llama4 llama4_text",
    "flexengine.model.adapters.falcon:adapt": "falcon",
    "flexengine.model.adapters.inkling:adapt": "inkling_text",
    "flexengine.model.adapters.longcat:adapt": "longcat_flash",
    "flexengine.model.adapters.mllama:adapt": "mllama mllama_text_model",
    "flexengine.model.adapters.recurrent:adapt": "recurrent_gemma rwkv xlstm",
    "flexengine.model.adapters.qwen4:adapt": "qwen4_exp qwen4_exp_text",
    "flexengine.model.adapters.sparse:adapt": "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4",
    "flexengine.model.adapters.scores:adapt": "codegen gpt_neo gpt_neox_japanese gptj openai-gpt",
    "flexengine.model.adapters.visits:adapt": "hrm_text",
}
ADAPTERS = {kind: adapter for adapter, kinds in _ADAPTED.items() for kind in kinds.split()}
_MIXERS = "flexengine.model.mixers"  # imported for models whose layers keep states beside keys and values
_TABLES = "flexengine.model.tables"  # imported for models with further embeddings whose rows stay in the checkpoint
_STATE_CALLS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}


def build(directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Skeleton:
    """Return the skeleton of the model in `directory`, with `dtype` for activations. No weight is read. Raise
    UnsupportedModel, with name and reason, if the model cannot be run."""
    return build_from(load_config(directory, trust_remote_code), directory, dtype, trust_remote_code)


def build_from(config: Any, directory: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> Skeleton:
    """Return a skeleton, as `build`. config: as `load_config` returned it."""
    config = deepcopy(config)  # an adapter may change it
    name = f"{(config.architectures or [config.model_type])[0]} ({directory.name})"
    model = _meta_model(config, name, dtype, trust_remote_code)
    try:
        skeleton = _cut(model, config, name)
        if dtype == torch.float32:
            # Linear layers get 16-bit weights, as they may later, to detect modules that convert their input to the
            # weight's dtype.
            for module in (m for m in model.modules() if isinstance(m, FastLinear)):
                narrow = module.weight.to(torch.bfloat16)
                module._parameters["weight"] = nn.Parameter(narrow, requires_grad=False)
        watch = resolve_name("flexengine.model.watch:Watch")(TRIAL_TOKENS) if _watched(model) else None
        watching = nullcontext() if watch is None else watch.over(model)
        with marked(ATTENTION, watch), recorded(model) as calls, layer_calls(model) as arguments, watching:
            attends = _trial(skeleton, watch)
        adapt = partial(_adapt, model.config) if model.config.model_type in ADAPTERS else None
        others = skeleton.mixing.reasons(attends) if skeleton.mixing else {}
        others |= {j: event.choice.why for j, event in attends.items() if event.choice and j not in others}
        whole = {j: event for j, event in attends.items() if j not in others}
        skeleton.as_modules = use_native_layers(model, whole, arguments, adapt)
        skeleton.as_modules.update(others)
        skeleton.queries_apart = not (skeleton.mixing or skeleton.choosing) and separable(calls)
        wide = skeleton.hidden_width > config.get_text_config().hidden_size
        if skeleton.tables or wide or hasattr(model.base_model, "visits"):
            with marked(ATTENTION):
                skeleton.held = resolve_name("flexengine.model.peak:bytes_beside")(skeleton)
        _restore_buffers(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except Exception as error:
        from flexengine.model.config_faults import odd_sizes  # few models are refused

        reason = f"a trial pass without weights failed ({error or type(error).__name__}){odd_sizes(config)}"
        if "meta" in str(error):
            reason = "its forward pass reads tensor values, so it cannot be checked on the meta device"
        raise UnsupportedModel(f"{name}: {reason}") from error
    return skeleton


def _meta_model(config: Any, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only language models are supported")
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise UnsupportedModel(f"{name} ({config.model_type}) is not a causal language model of transformers")
    adapted = config.model_type in ADAPTERS
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attention = "eager" if adapted else ATTENTION
            options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except Exception as error:
        from flexengine.model.config_faults import config_fault, odd_sizes

        if error.args == (ATTENTION,):  # a table of attention classes lacks it
            raise UnsupportedModel(f"{name} computes attention itself and accepts no registered attention") from error
        raise UnsupportedModel(f"{name}: {config_fault(error, config.to_dict())}{odd_sizes(config)}") from error
    if adapted:
        _adapt(model.config, model)
        model.config._attn_implementation = ATTENTION  # else transformers makes masks
    if getattr(config, "gates_first", False):  # of a GGUF file (gguf_config.py)
        resolve_name("flexengine.model.adapters.experts:use_gates_first")(model)
    if coupled := coupled_rope(config):
        resolve_name("flexengine.model.adapters.rope:use_first_frequencies")(model)
        message(f"{name}: rows of at most {context_of(config)} tokens: longer ones change {min(coupled)} positions")
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # reads tensor values; and there is no padding
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model.eval().requires_grad_(False)


def _watched(model: Any) -> bool:
    """Return whether a trial pass is watched (watch.py): all but models of which transformers says that they take other
    attention with the positions it is given, and whose masks have no blocks and chunks."""
    blocks = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    return model.config.model_type in ADAPTERS or not model._supports_attention_backend or blocks is not None


def _adapt(config: Any, module: nn.Module) -> None:
    """Replace the attention of a model with this config, or of a layer, if its family needs it."""
    if config.model_type in ADAPTERS:
        resolve_name(ADAPTERS[config.model_type])(config, module)


def _layer_list(model: Any, count: int) -> tuple[str, nn.ModuleList]:
    """Return name and list of `count` layers, of the decoder if it has such a list: other parts may have one, too."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = set(decoder.modules()) if isinstance(decoder, nn.Module) else set()
    order = [(module not in inside, "vision" in name, name, module) for name, module in model.named_modules()]
    for *_, name, module in sorted(order, key=lambda item: item[:2]):
        if isinstance(module, nn.ModuleList) and len(module) == count and all(hasattr(m, "forward") for m in module):
            return name, module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers")


def _cut(model: Any, config: Any, name: str) -> Skeleton:
    """Return the skeleton of a model, after replacing layers, embedding and head by pausing modules."""
    loading = Loading(model)
    count = config.get_text_config().num_hidden_layers
    path, modules = _layer_list(model, count)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise UnsupportedModel(f"{name} has no plain embedding and linear output projection")
    names = {module: module_name for module_name, module in model.named_modules()}
    embedding_weight, head_weight = f"{names[embedding]}.weight", f"{names[head]}.weight"
    persistent = set(model.state_dict(keep_vars=True))
    layers: list[dict[str, ParamRef]] = [{} for _ in range(count)]
    tables: dict[str, Any] = {}
    others: dict[str, ParamRef] = {}  # also of modules that several layers have, as in Zamba
    number = Counter(module for layer in modules for module in layer.modules())

    def number_of(module_name: str) -> int:
        return int(module_name[len(path) + 1 :].split(".")[0])

    for module_name, module in model.named_modules():
        if module is embedding or module is head:
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{module_name}.{key}".lstrip(".")
            if tensor is None or full not in persistent:
                continue
            inside = module_name.startswith(f"{path}.") and number[module] == 1
            large = inside and tensor.numel() >= embedding.weight.numel()
            if isinstance(module, nn.Embedding) and (large or module_name.endswith("embed_tokens_per_layer")):
                tables[full] = resolve_name(f"{_TABLES}:table_of")(module, number_of(module_name) if inside else None)
                continue
            group = layers[number_of(module_name)] if inside else others
            group[full] = ParamRef(module, key, tuple(tensor.shape))
    product = Product(model.dtype)
    use_product(model, product)
    use_fused(model)
    if any(keeps_state(m) or (isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1) for m in modules.modules()):
        resolve_name(f"{_MIXERS}:use_mixers")(modules)  # only attention and mixers separate packed sequences
    for j, layer in enumerate(modules):
        modules[j] = PausingLayer(layer, j)
    model.set_input_embeddings(PausingEmbedding(embedding, embedding_weight))
    step = LogitStep(model, path.partition(".")[0], head.in_features)
    model.set_output_embeddings(pausing := PausingHead(head.out_features, 1, product, step))
    wide = max((max(s.shape[-2:]) for layer in layers for s in layer.values() if len(s.shape) > 1), default=1)
    return Skeleton(
        model,
        config,
        name,
        layers,
        others,
        tables=tables,
        embedding=(embedding_weight, tuple(embedding.weight.shape)),
        head=(head_weight, tuple(head.weight.shape)),
        head_bias=f"{names[head]}.bias" if head.bias is not None else None,
        tied=any({*both} == {embedding_weight, head_weight} for both in loading.tied.items()),
        width=wide,
        head_module=pausing,
        product=product,
        invariance=Invariance(product),
        loading=loading,
        chunk=getattr(model, "most_tokens", None),  # of an adapter
        total=count,
    )


def keeps_state(module: nn.Module) -> bool:
    """Return whether the module's own forward writes a state to a cache of transformers, or its adapter says that one
    of its parts does."""
    if getattr(type(module), "keeps_state", False):
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not _STATE_CALLS.isdisjoint(code.co_names)


def _trial(skeleton: Skeleton, watch: Any) -> dict[int, Attend]:
    """Run packed tokens on the meta device. Return the pauses at attention, by layer. Raise UnsupportedModel if the
    model cannot be run in units: every layer must pause once, and once more in its attention, and positions must be
    those that are given. watch: a Watch that follows the pass, or None."""
    seen: list[str] = []
    attends: dict[int, Attend] = {}
    shapes: set[tuple[int, int, int]] = set()
    mixed: set[int] = set()  # layers with a state
    layer = -1
    for event in skeleton.trial():
        if isinstance(event, Layer):
            layer = event.index
            seen.append(f"layer {layer}")
            shape = tuple(-1 if n == TRIAL_TOKENS else n for n in event.hidden.shape)
            skewed = math.prod(shape) % skeleton.config.get_text_config().hidden_size  # of whole residual streams
            if shape.count(-1) != 1 or shape != (skeleton.hidden_shape or shape) or skewed:
                raise UnsupportedModel(f"hidden states are {tuple(event.hidden.shape)} between layers")
            skeleton.hidden_shape = shape
            if watch and watch.made(event.hidden):
                raise UnsupportedModel(_COUNTED)
        elif isinstance(event, Mix):
            mixed.add(layer)
        elif isinstance(event, Attend):
            event = event._replace(layer=layer)  # modules that several layers share have no number
            seen.append(f"attention {layer}")
            if watch and watch.made(event.q, event.k, event.v):
                raise UnsupportedModel(_COUNTED)
            skeleton.windows[event.layer], attends[event.layer] = window_at(event), event
            if elements := getattr(event.choice, "elements", 0):
                skeleton.added = max(skeleton.added, elements)
            elif event.choice is not None:
                skeleton.choosing = max(skeleton.choosing, event.choice.positions.shape[1])
                skeleton.always_chooses |= hasattr(event.choice, "entry_tokens")  # adapters/deepseek_v4.py
                skeleton.entry_tokens = getattr(event.choice, "entry_tokens", 0) or skeleton.entry_tokens
            if chunk := getattr(event.mask, "chunk_tokens", None):
                skeleton.chunk = min(chunk, skeleton.chunk or chunk)
            (heads, tokens, head_dim), (kv_heads, count, width) = event.q.shape[1:], event.v.shape[1:]
            if heads % kv_heads:
                must = "num_attention_heads in config.json must be a multiple of num_key_value_heads"
                raise UnsupportedModel(f"it has {heads} heads for queries and {kv_heads} for keys and values; {must}")
            if event.k.shape != (1, kv_heads, count, head_dim) or count != tokens:
                raise UnsupportedModel(
                    f"attention of {tuple(event.q.shape)} queries over {tuple(event.k.shape)} keys and"
                    f" {tuple(event.v.shape)} values is not supported"
                )
            shapes.add((heads, kv_heads, max(head_dim, width)))
            if getattr(event.choice, "keys", event) is None:
                skeleton.inherits.add(event.layer)
    order = [f"{what} {j}" for j in range(len(skeleton.layers)) for what in ("layer", "attention")]
    if mixed:
        order = resolve_name(f"{_MIXERS}:order_of")(order, mixed, attends, skeleton.config.get_text_config())
    if seen != order:
        pairs = zip_longest(seen, order, fillvalue="the end")
        got, expected = next((got, expected) for got, expected in pairs if got != expected)
        why = "it keeps other state, or computes attention itself"
        raise UnsupportedModel(f"expected {expected} but the model went to {got}; {why}")
    if mixed:
        skeleton.mixing = resolve_name(f"{_MIXERS}:mixing_of")(skeleton.model, attends)
        shapes = shapes or {(1, 1, 8)}  # a model without attention has no pages
    all_heads, all_kv_heads, (*_, dim) = (sorted(set(column)) for column in zip(*shapes, strict=True))
    width = dim if dim % 8 == 0 else -(-dim // 16) * 16  # kernels are fastest with whole vectors
    skeleton.heads, skeleton.kv_heads, skeleton.head_dim = all_heads[-1], all_kv_heads[-1], width
    if any(all_kv_heads[-1] % n for n in all_kv_heads) or any(n % all_kv_heads[-1] for n in all_heads):
        cannot = "which cannot share one page size"
        raise UnsupportedModel(f"its layers have {all_kv_heads} KV heads for {all_heads} heads, {cannot}")
    return attends


def _restore_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies), as the meta device has no values."""
    if (taken := sum(b.nbytes for b in model.buffers())) > _BUFFERS:
        raise UnsupportedModel(f"its buffers take {size_within(taken)}, over {size(_BUFFERS)}; correct its config")
    if not hasattr(model, "hidden_size"):  # Gemma 3n reads it of the model, where only its decoder has it
        model.hidden_size = model.config.get_text_config().hidden_size
    for module in model.modules():
        own = {k: module._buffers.get(k) for k in module._non_persistent_buffers_set}
        lost = {k: b for k, b in own.items() if b is not None and b.is_meta}
        module._buffers.update({k: torch.empty_like(b, device="cpu") for k, b in lost.items()})
        if lost:
            model._init_weights(module)
    model._init_weights(getattr(model, model.base_model_prefix, model))  # Falcon-H1's decoder fills buffers of layers


# Sliding windows of layers. A real forward pass uses no masks: the kernels separate packed sequences and apply
# causality and windows. But some models define a window by the mask alone, and others use masks that the kernels do not
# support. So the trial pass gets markers instead of masks, and each marker's mask function is compared with a causal
# window.


@contextmanager
def marked(name: str, watch: Any = None) -> Iterator[None]:
    """Make transformers return markers as masks of the attention implementation `name` while the block runs. watch:
    a Watch, which tells masks that depend on the tokens; None if masks are not looked at, or have no such parts."""
    from transformers import AttentionMaskInterface, masking_utils

    # These read tensor values, which meta tensors lack; a trial pass has a single sequence.
    own: dict[str, Any] = {"find_packed_sequence_indices": lambda position_ids: None}
    own |= {} if watch is None else {"chunked_overlay": watch.chunks, "blockwise_overlay": watch.blocks}
    masks = AttentionMaskInterface._global_mapping
    with _lock:
        before = {n: getattr(masking_utils, n) for n in own if hasattr(masking_utils, n)}
        masks[name] = _marker
        vars(masking_utils).update({n: own[n] for n in before})
        try:
            yield
        finally:
            vars(masking_utils).update(before)
            del masks[name]


def window_at(event: Attend) -> int | None:
    """Return the window of a layer in tokens, None for a causal mask. Raise UnsupportedModel for any other mask, or if
    the layer's argument and its mask contradict each other."""
    if event.mask is None:
        return event.window
    own = "its attention changes the mask or makes its own, which the engine does not support"
    window: int | str | None = getattr(event.mask, "pattern", own)
    if isinstance(window, str):
        raise UnsupportedModel(window)
    if event.window not in (None, window):
        raise UnsupportedModel(f"layer {event.layer} has a window of {event.window} and a mask of {window} tokens")
    return window


def _marker(*_: Any, mask_function: Any = None, local_size: int | None = None, config: Any = None, **__: Any) -> Tensor:
    marker = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
    pattern = _pattern(mask_function, local_size or 0)
    if pattern == _CHUNKS:  # rows that fit in a chunk see all their tokens (Skeleton.chunk)
        marker.chunk_tokens, pattern = local_size, None  # type: ignore[attr-defined]
    marker.pattern = pattern  # type: ignore[attr-defined]
    return marker


def _pattern(mask_function: Any, hint: int) -> int | str | None:
    """Return the window in tokens, None for a causal mask, or a text: `_CHUNKS`, or why the mask is none of these.

    Args:
        mask_function: mask function of transformers.
        hint: size of a window or chunk in the mask, in tokens; 0 if unknown.
    """
    end = 2 * min(max(hint, 64), _LARGEST) + 3
    keys, zero = torch.arange(end + 64), torch.tensor(0)
    queries = torch.tensor([0, 1, 2, 7, end // 2 - 2, end // 2 - 1, end // 2, end // 2 + 1, end - 1])
    if hint < 0:
        return f"config.json sets the window of its attention to {hint} tokens; correct it, or set it to null"
    try:
        seen = mask_function(zero, zero, queries[:, None], keys[None, :])
    except Exception:
        return "its mask depends on more than the distance of two tokens (such as chunks, or the tokens themselves)"
    seen = seen.expand(len(queries), len(keys))
    width, distance = int(seen[-1].sum()), queries[:, None] - keys[None, :]
    window = None if width == end else width
    if hint and torch.equal(seen, (distance >= 0) & (queries[:, None] // hint == keys[None, :] // hint)):
        return _CHUNKS
    expected = (distance >= 0) & (distance < (window or end))
    return window if torch.equal(seen, expected) else "its mask is neither causal nor a sliding window"
