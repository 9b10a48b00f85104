"""Conversion of GGUF files into model directories, tensor by tensor.

Config keys, tensor names and permutations come from the functions of transformers that
`from_pretrained(gguf_file=...)` uses, called so that at most one tensor is in memory. `from_pretrained` silently drops
tensors without a target, RoPE scaling, ends of turns and most pre-tokenizers (gguf_pre.py); here they are carried over
or refused.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flexengine.activity import activity, message
from flexengine.errors import BadCheckpoint, FlexError, UnsupportedModel, is_fault
from flexengine.model.config import check_backed, check_limits, size_of
from flexengine.model.gguf_header import GgufTensor, Header, read_header
from flexengine.model.gguf_pre import byte_level, end_tokens
from flexengine.model.shards import write_shards
from flexengine.read_retries import opened

_CHUNK_BYTES = 16 * 2**20  # float32 bytes dequantised at a time
_KEPT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NO_TOKENIZER = ("", "none", "no_vocab")  # as llama.cpp takes them
_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
_ROPE_FREQS = "rope_freqs.weight"
_SIZES = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}


def conversion(path: Path, trust_remote_code: bool) -> tuple[list[Path], Callable[[Path], None]]:
    """Return the file, and the function that writes its conversion. Such a file holds no code."""
    return [path], partial(convert, path)


def convert(path: Path, directory: Path) -> None:
    """Write a GGUF file as config.json, generation_config.json, tokenizer files and safetensors into `directory`.

    Quantised tensors become float32; F16, BF16 and F32 keep their dtypes. config.dtype is float32 if any tensor was
    quantised. Raise BadCheckpoint if the file is damaged, UnsupportedModel if it needs a feature that is not supported,
    and OutOfMemory if the disk is full."""
    header = read_header(path, _ARRAYS)
    try:
        _write(header, directory)
    except FlexError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # values of a wrong type or shape raise errors of many types where they are first used, mostly in transformers
        raise BadCheckpoint(f"{path} contradicts itself: {type(error).__name__}: {error}") from error


def _write(header: Header, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, config = header.path, _config(header)
    try:
        with torch.device("meta"):  # names, shapes, tied weights and the generation config
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UnsupportedModel(f"{path} ({config.model_type}) is no causal language model: {error}") from error
    config.architectures = [type(model).__name__]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = set(expected) - set(getattr(model, "all_tied_weights_keys", {}))

    def tensors() -> Iterator[tuple[Path, str, torch.Tensor]]:
        for name, tensor in _tensors(header, config, model):
            if expected.get(name) != tuple(tensor.shape):
                raise BadCheckpoint(f"{path}: {name} has shape {tuple(tensor.shape)}, config says {expected.get(name)}")
            missing.discard(name)
            yield path, name, tensor

    sizes = (math.prod(x.shape) * (2 if x.kind.name in ("F16", "BF16") else 4) for x in header.tensors)
    write_shards(path, directory, sum(sizes), tensors())
    if missing:
        raise BadCheckpoint(f"{path} lacks {len(missing)} tensors, among them {sorted(missing)[:3]}")
    config.save_pretrained(directory)
    if ends := end_tokens(path, header.values):
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.save_pretrained(directory)
    with activity("converting", f"converting the tokenizer of {path.name}"):
        _save_tokenizer(header, config, directory)


def _config(header: Header) -> Any:
    """Return the transformers config of the file, with the dtype of its weights, its RoPE scaling, and the sizes that
    transformers reads for some families only."""
    from transformers import AutoConfig

    path = header.path
    check_limits(path, {key: value for key, value in header.values.items() if key not in _ARRAYS})
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        size = size_of(config)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers has no config for it: {error}") from error
    check_backed(path, size, [math.prod(tensor.shape) for tensor in header.tensors])
    kinds = {tensor.kind.name for tensor in header.tensors}
    plain = kinds <= set(_KEPT) and next((kind for kind in ("BF16", "F16") if kind in kinds), None)
    config.dtype = _KEPT[plain] if plain else torch.float32
    for key, name in _SIZES.items():
        value = header.values.get(f"{header.architecture}.{key}")
        if isinstance(value, int) and hasattr(config, name):
            setattr(config, name, value)
    window = header.values.get(f"{header.architecture}.attention.sliding_window") or 0
    if 0 < window < config.max_position_embeddings and getattr(config, "sliding_window", None) != window:
        if not hasattr(config, "sliding_window") or hasattr(config, "layer_types"):
            raise UnsupportedModel(f"{path} has a window of {window}, which transformers' GGUF reader drops")
        config.sliding_window = window
    _carry_rope(header, config)
    return config


def _targets(header: Header, processor: Any, model: Any) -> tuple[dict[str, str], dict[GgufTensor, str]]:
    """Return transformers' map of names, and the parameter name of each tensor. Raise UnsupportedModel if there is no
    parameter of a tensor."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # A stand-in of the model, with the base model, to which names of some files (Bloom) refer: a walk over all
    # submodules would take seconds.
    shared, prefix = {"config": model.config, "state_dict": model.state_dict}, getattr(model, "base_model_prefix", "")
    base = SimpleNamespace(**shared | {"state_dict": model.base_model.state_dict}, named_children=lambda: [])
    children = [(prefix, base)] if hasattr(model, prefix) else []
    try:
        names = get_gguf_hf_weights_map(SimpleNamespace(**shared, named_children=lambda: children), processor)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{header.path} ({header.architecture}): {error}") from error
    targets, lost = {}, []
    for tensor in header.tensors:
        if (target := names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))) is not None:
            targets[tensor] = target
        elif tensor.name != _ROPE_FREQS:
            lost.append(tensor.name)
    if lost:
        fault = f"{len(lost)} tensors, among them {lost[:3]}, have no place in {type(model).__name__}"
        raise UnsupportedModel(f"{header.path}: {fault}")
    return names, targets


def _tensors(header: Header, config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, tensor): fp32, or in 16 bits if the file stores them so and the conversion is exact.
    Tensors that are merged into one parameter are read in succession."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    names, targets = _targets(header, processor, model)
    first = {target: number for number, target in reversed(list(enumerate(targets.values())))}
    ordered = sorted(targets, key=lambda tensor: first[targets[tensor]])
    for _, group in groupby(ordered, key=lambda tensor: targets[tensor]):
        merged: dict[str, torch.Tensor] = {}
        for tensor in group:
            weights = _read(header.path, tensor)
            more = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": merged}}
            done = processor.process(weights=weights, name=tensor.name, **more)
            if done.name is not None:
                values = torch.from_numpy(np.ascontiguousarray(done.weights))
                half = values.to(_KEPT.get(tensor.kind.name, torch.float32))
                yield names[done.name], half if torch.equal(half.to(torch.float32), values) else values
        yield from merged.items()


def _read(path: Path, tensor: GgufTensor) -> np.ndarray[Any, Any]:
    """Return one tensor as float32. It is read, not mapped, so that file pages do not count as process memory."""
    from gguf.quants import dequantize

    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    stored = np.empty((rows, tensor.nbytes // rows), dtype=np.uint8)
    with opened(path) as file:
        file.seek(tensor.offset)
        if file.readinto(stored.data.cast("B")) != tensor.nbytes:
            raise BadCheckpoint(f"{path} ends before byte {tensor.offset + tensor.nbytes}")
    out = np.empty((rows, columns), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // (4 * columns))
    try:
        for low in range(0, rows, step):
            out[low : low + step] = dequantize(stored[low : low + step], tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: {error}") from error
    return out.reshape(tensor.shape)


def _carry_rope(header: Header, config: Any) -> None:
    """Copy RoPE scaling, which transformers' GGUF reader drops, to the config.

    llama.cpp stores Llama 3's scaling as a tensor of divisors per frequency (convert_hf_to_gguf.py). The scaling is
    recognised if Llama 3's formula with its published constants gives the same numbers. Raise UnsupportedModel for
    other scaling."""
    path, scaling = header.path, header.text(f"{header.architecture}.rope.scaling.type")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if scaling not in ("", "none") and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModel(f"{path} scales RoPE by {scaling!r}, which transformers' GGUF reader drops")
    stored = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FREQS), None)
    if stored is None:
        return
    divisors = _read(path, stored).ravel()
    if (divisors == 1).all():
        return
    base, factor, low, high, context = float(parameters.get("rope_theta", 0)), float(divisors.max()), 1.0, 4.0, 8192
    # Llama 3's frequencies base^(-i / count) are divided by 1 for short waves, by the factor for long ones.
    turns = context / (2 * np.pi * max(base, 1) ** (np.arange(len(divisors)) / len(divisors)))
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    if not base or not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4, atol=0):
        raise UnsupportedModel(f"{path} carries RoPE factors that are not Llama 3's; use the safetensors checkpoint")
    llama3 = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    llama3["original_max_position_embeddings"] = context
    config.rope_parameters = {**parameters, "rope_type": "llama3", **llama3}


def _save_tokenizer(header: Header, config: Any, directory: Path) -> None:
    """Write tokenizer.json and its config with the chat template, or log a warning if the file has no tokenizer."""
    path = header.path
    if header.text("tokenizer.ggml.model") in _NO_TOKENIZER:
        message(f"{path} has no tokenizer; only prompt_token_ids can be used with it", logging.WARNING)
        return
    from transformers import AutoTokenizer

    try:
        if header.text("tokenizer.ggml.model") == "gpt2":
            tokenizer = byte_level(path, header.values)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except FlexError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise UnsupportedModel(f"{path}: its tokenizer cannot be built: {type(error).__name__}: {error}") from error
    if isinstance(length := getattr(config, "max_position_embeddings", None), int):
        tokenizer.model_max_length = length
    tokenizer.save_pretrained(directory)
    if header.values.get("tokenizer.ggml.add_space_prefix") is False:
        _drop_first_space(directory / "tokenizer.json")


def _drop_first_space(file: Path) -> None:
    """Edit a tokenizer.json so that no space is put before a text, nor taken off at decoding."""
    content = json.loads(file.read_bytes())
    content["pre_tokenizer"], content["normalizer"], content["decoder"] = (
        _without_space(content[part]) for part in ("pre_tokenizer", "normalizer", "decoder")
    )
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _without_space(step: Any) -> Any:
    """Return a step of a tokenizer without what adds or takes off a first space; None if nothing remains."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step["type"] in ("Prepend", "Strip"):
        return None
    parts = next((key for key in ("normalizers", "pretokenizers", "decoders") if key in step), None)
    return step | {parts: [kept for part in step[parts] if (kept := _without_space(part))]} if parts else step
