"""GGUF files into model directories, tensor by tensor.

The facts (config keys, tensor names, permutations) are transformers' own: the same functions that
`from_pretrained(gguf_file=...)` uses, called so that no more than one tensor is held at a time. What
that path would drop silently (tensors without a place, RoPE scaling) is either carried over or refused.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.model.prepare import ShardWriter, check_room

if TYPE_CHECKING:
    import numpy as np
    import torch

_CHUNK_BYTES = 16 * 2**20  # of float32 dequantised at a time
_KEPT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FREQS = "rope_freqs.weight"

log = logging.getLogger(__name__)


def convert(path: Path, directory: Path) -> None:
    """Writes a GGUF file as config.json, generation_config.json, tokenizer files and safetensors into `directory`.

    Quantised tensors become float32; F16, BF16 and F32 stay what they are. config.dtype is float32 if anything was
    quantised. Raises BadCheckpoint (damaged file), UnsupportedModel (with the reason) or OutOfMemory (disk).
    """
    reader = _open(path)
    config = _config(path, reader)
    model = _skeleton(path, config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_room(directory, f"weights of {path}", sum(_result_bytes(tensor) for tensor in reader.tensors))
    writer = ShardWriter(directory)
    written = set()
    for name, tensor in _tensors(path, reader, config, model):
        if expected.get(name) != tuple(tensor.shape):
            raise BadCheckpoint(f"{path}: {name} has shape {tuple(tensor.shape)}, config says {expected.get(name)}")
        try:
            writer.add(name, tensor)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{path}: {error}") from error
        written.add(name)
    writer.close()
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    if missing := sorted(set(expected) - written - tied):
        raise BadCheckpoint(f"{path} lacks {len(missing)} tensors, among them {missing[:3]}")
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    _save_tokenizer(path, reader, config, directory)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise BadCheckpoint(f"{path} is not a GGUF file: it starts with {magic!r}")
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError) as error:
        raise BadCheckpoint(f"{path} is damaged or cut off: {type(error).__name__}: {error}") from error
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise UnsupportedModel(f"{path} is one of {parts.contents()} parts; join them with `gguf-split --merge` first")
    return reader


def _config(path: Path, reader: Any) -> Any:
    """The transformers config of the file, with the dtype of its weights and its RoPE scaling."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers has no config for it: {error}") from error
    config.dtype = getattr(torch, _dtype_name(reader.tensors))
    _carry_rope(path, reader, config)
    return config


def _dtype_name(tensors: Sequence[Any]) -> str:
    """dtype for the config: float32 if anything is quantised, else the half type if there is one."""
    types = {tensor.tensor_type.name for tensor in tensors}
    if not types <= set(_KEPT):
        return "float32"
    return next(_KEPT[kind] for kind in ("BF16", "F16", "F32") if kind in types)


def _skeleton(path: Path, config: Any) -> Any:
    """The module on the meta device: names, shapes, ties, generation config."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UnsupportedModel(f"{path} ({config.model_type}) is no causal language model: {error}") from error
    config.architectures = [type(model).__name__]
    return model


def _tensors(path: Path, reader: Any, config: Any, model: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """(transformers name, tensor) of every tensor. Those that are merged into one are read one after the other."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    values = config.to_dict()
    processor = TENSOR_PROCESSORS.get(_text(reader, "general.architecture"), TensorProcessor)(config=values)
    try:
        names = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{path} ({config.model_type}): {error}") from error
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FREQS]
    targets = {t.name: names.get(t.name) or names.get(t.name.removesuffix(".weight")) for t in tensors}
    if lost := [name for name, target in targets.items() if target is None]:
        raise UnsupportedModel(
            f"{path}: {len(lost)} tensors, among them {lost[:3]}, have no place in {type(model).__name__}"
        )
    first = {target: at for at, target in reversed(list(enumerate(targets.values())))}
    tensors.sort(key=lambda tensor: first[targets[tensor.name]])
    for _, group in groupby(tensors, key=lambda tensor: targets[tensor.name]):
        merged: dict[str, torch.Tensor] = {}
        for tensor in group:
            weights = _read(path, tensor)
            done = processor.process(
                weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": merged}
            )
            if done.name is not None:
                yield names[done.name], _as_stored(done.weights, tensor.tensor_type.name)
        yield from merged.items()


def _read(path: Path, tensor: Any) -> "np.ndarray[Any, Any]":
    """One tensor as float32, in torch's order of dimensions; read from the file, so that no mapped page stays."""
    import numpy as np
    from gguf.quants import dequantize

    stored = np.fromfile(path, dtype=tensor.data.dtype, count=tensor.data.size, offset=tensor.data_offset)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    rows = stored.reshape(-1, tensor.data.shape[-1])
    out = np.empty((rows.shape[0], shape[-1]), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // (4 * shape[-1]))
    try:
        for at in range(0, len(rows), step):
            out[at : at + step] = dequantize(rows[at : at + step], tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{path}: {tensor.name}: {error}") from error
    return out.reshape(shape)


def _as_stored(weights: "np.ndarray[Any, Any]", kind: str) -> "torch.Tensor":
    """float32 values as a tensor; as F16 or BF16 again if the file had them so and nothing is lost by it."""
    import numpy as np
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(weights))
    if kind in ("F16", "BF16"):
        half = tensor.to(getattr(torch, _KEPT[kind]))
        if torch.equal(half.to(torch.float32), tensor):
            return half
    return tensor


def _result_bytes(tensor: Any) -> int:
    return int(tensor.n_elements) * (2 if tensor.tensor_type.name in ("F16", "BF16") else 4)


def _carry_rope(path: Path, reader: Any, config: Any) -> None:
    """Carries RoPE scaling, which transformers' GGUF path drops, into the config; raises UnsupportedModel if it cannot.

    llama.cpp stores Llama 3's scaling as a tensor of divisors per frequency (convert_hf_to_gguf.py); it is
    recognised if Llama 3's formula with its published constants gives the same numbers.
    """
    scaling = _text(reader, f"{_text(reader, 'general.architecture')}.rope.scaling.type")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if scaling not in ("", "none") and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModel(f"{path} scales RoPE by {scaling!r}, which transformers' GGUF reader drops")
    stored = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_FREQS), None)
    if stored is None:
        return
    divisors = [float(value) for value in _read(path, stored).ravel()]
    if all(value == 1 for value in divisors):
        return
    base = float(parameters.get("rope_theta", 0))
    llama3 = {"factor": max(divisors), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    formula = llama3_divisors(base, len(divisors), **llama3) if base else []
    if len(formula) != len(divisors) or any(abs(a - b) > 1e-4 * b for a, b in zip(divisors, formula, strict=True)):
        raise UnsupportedModel(f"{path} carries RoPE factors that are not Llama 3's; use the safetensors checkpoint")
    config.rope_parameters = {**parameters, "rope_type": "llama3", **llama3}


def llama3_divisors(
    base: float,
    count: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> list[float]:
    """What Llama 3.1 divides its `count` RoPE frequencies base^(-i/count) by: 1 for short waves, `factor` for long."""
    divisors = []
    for i in range(count):
        turns = original_max_position_embeddings / (2 * math.pi * base ** (i / count))
        smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _save_tokenizer(path: Path, reader: Any, config: Any, directory: Path) -> None:
    """tokenizer.json and its config with the chat template; nothing if the file has no tokenizer."""
    if not _text(reader, "tokenizer.ggml.model"):
        log.warning("%s has no tokenizer; only prompt_token_ids can be used with it", path)
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers cannot build its tokenizer: {error}") from error
    length = getattr(config, "max_position_embeddings", None)
    if isinstance(length, int):
        tokenizer.model_max_length = length
    tokenizer.save_pretrained(directory)
