"""Conversion of GGUF files into model directories, some rows of a tensor at a time.

Config keys, tensor names and permutations come from the functions of transformers that
`from_pretrained(gguf_file=...)` uses. They reorder row numbers here instead of weights (as in checkpoint.py), so that
no whole tensor is in memory, except one that they change in another way. `from_pretrained` silently drops tensors
without a target, RoPE scaling, ends of turns and most pre-tokenizers (gguf_pre.py); here they are carried over or
refused.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flexengine.activity import activity, message
from flexengine.errors import BadCheckpoint, FlexError, UnsupportedModel, library_faults, shown
from flexengine.model.config import check_backed, check_limits, size_of
from flexengine.model.gguf_config import carry_values
from flexengine.model.gguf_header import GgufTensor, Header, read_header, write_outline
from flexengine.model.gguf_pre import byte_level, end_tokens
from flexengine.model.shards import PIECE_BYTES, StoredTensor, check_memory, pieces_of, write_shards
from flexengine.system.read_retries import opened

_WHOLE_COPIES = 5  # of a tensor in float32 that are in memory if it is converted whole
_ROWS = 1 << 40  # more than any tensor has
_KEPT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NO_TOKENIZER = ("", "none", "no_vocab")  # as llama.cpp takes them
_TOKEN_BYTES = 3000  # of memory that transformers' GGUF reader takes for a token
_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
_ROPE_FREQS, _MAX_FREQS = "rope_freqs.weight", 1 << 16
Group = list[GgufTensor]  # tensors that are made into one parameter
Array = np.ndarray[Any, Any]


def conversion(
    path: Path, trust_remote_code: bool, memory: int | None = None
) -> tuple[list[Path], Callable[[Path], None]]:
    """Return the file, and the function that writes its conversion. Such a file holds no code. memory: as for
    `convert`."""
    return [path], partial(convert, path, memory=memory)


def convert(path: Path, directory: Path, memory: int | None = None) -> None:
    """Write a GGUF file as config.json, generation_config.json, tokenizer files and safetensors into `directory`.

    Quantised tensors become float32; F16, BF16 and F32 keep their dtypes. config.dtype is float32 if any tensor was
    quantised. Raise BadCheckpoint if the file is damaged, UnsupportedModel if it needs a feature that is not supported,
    and OutOfMemory if the disk is full, or the tokenizer or a tensor that must be converted whole needs more bytes
    than `memory`, if given."""
    header = read_header(path, _ARRAYS)
    try:
        _write(header, directory, memory)
    except FlexError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # values of a wrong type or shape raise errors of many types where they are first used, mostly in transformers
        raise BadCheckpoint(f"{path} contradicts itself: {type(error).__name__}: {error}") from error


def _write(header: Header, directory: Path, memory: int | None) -> None:
    from transformers import AutoModelForCausalLM

    path, config = header.path, _config(header, directory)
    if header.text("tokenizer.ggml.model") not in (*_NO_TOKENIZER, "gpt2"):
        needed = _TOKEN_BYTES * len(header.values.get("tokenizer.ggml.tokens") or ())
        remedy = " or use the safetensors checkpoint"
        check_memory(f"the tokenizer of {path}, which transformers reads,", needed, memory, remedy)
    try:
        with torch.device("meta"):  # names, shapes, tied weights and the generation config
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UnsupportedModel(f"{path} ({config.model_type}) is no causal language model: {error}") from error
    config.architectures = [type(model).__name__]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = set(expected) - set(getattr(model, "all_tied_weights_keys", {}))

    def tensors() -> Iterator[StoredTensor]:
        for tensor in _tensors(header, config, model, memory):
            name, shape = tensor.name, tensor.shape
            if expected.get(name) != shape:
                raise BadCheckpoint(f"{path}: {name} has shape {shape}, config says {expected.get(name)}")
            missing.discard(name)
            yield tensor

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


def _config(header: Header, directory: Path) -> Any:
    """Return the transformers config of the file, with the dtype of its weights, its RoPE scaling, and the values that
    transformers reads for some families only. directory: for a file that is removed again."""
    from transformers import AutoConfig

    path = header.path
    check_limits(path, {key: value for key, value in header.values.items() if key not in _ARRAYS})
    outline = directory / "outline.gguf"
    write_outline(header, outline)
    try:
        config = AutoConfig.from_pretrained(directory, gguf_file=outline.name)
        size = size_of(config)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers has no config for it: {error}") from error
    finally:
        outline.unlink()
    check_backed(path, size, [math.prod(tensor.shape) for tensor in header.tensors])
    kinds = {tensor.kind.name for tensor in header.tensors}
    plain = kinds <= set(_KEPT) and next((kind for kind in ("BF16", "F16") if kind in kinds), None)
    config.dtype = _KEPT[plain] if plain else torch.float32
    carry_values(header, config)
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


def _tensors(header: Header, config: Any, model: Any, memory: int | None) -> Iterator[StoredTensor]:
    """Yield the parameters: fp32, or in 16 bits if the file stores them so and the conversion is exact. Raise
    OutOfMemory first if one needs more bytes than `memory`, if given."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    names, targets = _targets(header, processor, model)

    def processed(group: Group, weights: Callable[[int, GgufTensor], Any]) -> dict[str, Any]:
        """Return the arrays of the parameters that a group is made into, by name."""
        merged, found = dict[str, Any](), dict[str, Any]()
        for number, tensor in enumerate(group):
            more = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": merged}}
            done = processor.process(weights=weights(number, tensor), name=tensor.name, **more)
            if done.name is not None:
                found[names[done.name]] = done.weights
        return found | {name: tensor.numpy() for name, tensor in merged.items()}

    groups = dict[str, Group]()
    for tensor, target in targets.items():
        groups.setdefault(target, []).append(tensor)
    wanted = Counter(names.values())
    if parts := [target for target, group in groups.items() if len(group) < wanted[target]]:
        needs = [name for name, target in names.items() if target == parts[0]]
        raise BadCheckpoint(f"{header.path} lacks a part of {parts[0]}, which is made of {' and '.join(needs)}")
    for target in (target for target, group in groups.items() if _rows_of(group, processed) is None):
        needed = sum(_WHOLE_COPIES * 4 * math.prod(tensor.shape) for tensor in groups[target])
        check_memory(f"{target} of {header.path}, which is converted whole,", needed, memory)
    for group in groups.values():
        if (found := _rows_of(group, processed)) is None:  # again, as row numbers of all tensors take much memory
            yield from _whole_tensors(header.path, group, processed)
            continue
        kinds, columns = {tensor.kind.name for tensor in group}, group[0].shape[-1]
        dtype = _KEPT.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
        for name, numbers in found.items():
            pieces = _row_pieces(header.path, group, numbers.reshape(-1), dtype)
            yield StoredTensor(header.path, name, dtype, (*numbers.shape[:-1], columns), pieces)


def _rows_of(group: Group, processed: Callable[..., dict[str, Any]]) -> dict[str, Array] | None:
    """Return, for each parameter that is made of some tensors, the numbers of the rows that it consists of, each tensor
    number * _ROWS + row, in the shape of the parameter with one column. None if not only rows are moved."""
    counts = [math.prod(tensor.shape[:-1]) for tensor in group]
    if min(counts) == 1 or len({tensor.shape[-1] for tensor in group}) > 1:
        return None

    def numbered(number: int, tensor: GgufTensor) -> Array:
        return (np.arange(counts[number]) + number * _ROWS).reshape(*tensor.shape[:-1], 1)

    try:
        with np.errstate(all="ignore"):
            found = processed(group, numbered)
    except ValueError:  # it needs the shape of the weights
        return None
    every = np.sort(np.concatenate([numbers.reshape(-1) for numbers in found.values()]))
    right = np.concatenate([numbered(number, tensor).reshape(-1) for number, tensor in enumerate(group)])
    columns = {numbers.shape[-1] for numbers in found.values()}
    return found if columns == {1} and np.array_equal(every, right) else None


def _whole_tensors(path: Path, group: Group, processed: Callable[..., dict[str, Any]]) -> Iterator[StoredTensor]:
    """Yield the parameters that some tensors are made into. They are made to know their dtypes, dropped, and made again
    when their pieces are read, so that those of a shard are not in memory at once."""
    kept = _KEPT.get(group[0].kind.name, torch.float32)

    def made() -> dict[str, torch.Tensor]:
        found = dict[str, torch.Tensor]()
        for name, weights in processed(group, lambda _, tensor: _read(path, tensor)).items():
            values = torch.from_numpy(np.ascontiguousarray(weights))
            half = values.to(kept)
            found[name] = half if torch.equal(half.to(torch.float32), values) else values
        return found

    def pieces(name: str) -> Iterator[torch.Tensor]:
        yield from pieces_of(made()[name])

    for name, dtype, shape in [(name, values.dtype, tuple(values.shape)) for name, values in made().items()]:
        yield StoredTensor(path, name, dtype, shape, pieces(name))


def _row_pieces(path: Path, group: Group, numbers: Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield rows of some tensors, by their numbers, as a dtype: that of all of these tensors, or else float32."""
    columns = group[0].shape[-1]
    step = max(1, PIECE_BYTES // (4 * columns))
    for low in range(0, len(numbers), step):
        sources, rows = np.divmod(numbers[low : low + step], _ROWS)
        out = torch.empty(len(rows), columns, dtype=dtype)
        for number in np.unique(sources):
            of_this = torch.from_numpy(sources == number)
            stored = _read_rows(path, group[number], rows[sources == number])
            out[of_this] = _numbers(path, group[number], stored, dtype)
        yield out


def _read(path: Path, tensor: GgufTensor) -> Array:
    """Return one tensor as float32."""
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    pieces = _row_pieces(path, [tensor], np.arange(rows), torch.float32)
    out, low = np.empty((rows, columns), dtype=np.float32), 0
    for piece in pieces:
        out[low : low + len(piece)] = piece.numpy()
        low += len(piece)
    return out.reshape(tensor.shape)


def _read_rows(path: Path, tensor: GgufTensor, rows: Array) -> Array:
    """Return the stored bytes of some rows, uint8 [rows, bytes]. They are read, not mapped, so that file pages do not
    count as process memory."""
    nbytes = tensor.nbytes // math.prod(tensor.shape[:-1])
    stored, ends = np.empty((len(rows), nbytes), dtype=np.uint8), [*np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)]
    with opened(path) as file:
        for low, high in pairwise([0, *ends]):
            file.seek(tensor.offset + int(rows[low]) * nbytes)
            if file.readinto(stored[low:high].data.cast("B")) != (high - low) * nbytes:
                raise BadCheckpoint(f"{path} ends before byte {tensor.offset + tensor.nbytes}")
    return stored


def _numbers(path: Path, tensor: GgufTensor, stored: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a tensor as a dtype, from their stored bytes."""
    from gguf.quants import dequantize

    if (kept := _KEPT.get(tensor.kind.name)) is not None:
        return torch.from_numpy(stored).view(kept).to(dtype)
    try:
        return torch.from_numpy(dequantize(stored, tensor.kind))
    except NotImplementedError as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: {error}") from error


def _carry_rope(header: Header, config: Any) -> None:
    """Copy RoPE scaling, which transformers' GGUF reader drops, to the config.

    llama.cpp stores Llama 3's scaling as a tensor of divisors per frequency (convert_hf_to_gguf.py). The scaling is
    recognised if Llama 3's formula with its published constants gives the same numbers. Raise UnsupportedModel for
    other scaling."""
    path, scaling = header.path, header.text(f"{header.architecture}.rope.scaling.type")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if scaling not in ("", "none") and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModel(f"{path} scales RoPE by {shown(scaling)}, which transformers' GGUF reader drops")
    stored = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FREQS), None)
    if stored is None:
        return
    if math.prod(stored.shape) > _MAX_FREQS:
        raise BadCheckpoint(f"{path}: {_ROPE_FREQS} has the shape {stored.shape}; at most {_MAX_FREQS} are read")
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

    with library_faults(f"{path}: its tokenizer cannot be built", UnsupportedModel):
        if header.text("tokenizer.ggml.model") == "gpt2":
            tokenizer = byte_level(path, header.values)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
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
