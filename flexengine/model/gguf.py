"""Preparation of GGUF files: config, tokenizer, small tensors, and the places of those that stay in the file.

A parameter that consists of rows of the file stays there, in the file's own format (gguf_places.py). Others, such as
norms that the file stores plus 1, are converted, some rows of a tensor at a time. What llama.cpp changed is undone
on row numbers instead of weights (as in checkpoint.py), so that no whole tensor is in memory, except one whose rows are
changed. Config keys come from the functions of transformers that `from_pretrained(gguf_file=...)` uses. That silently
drops tensors without a target, RoPE scaling, ends of turns and most pre-tokenizers (gguf_pre.py); here they are carried
over or refused.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flexengine.activity import activity, message
from flexengine.errors import BadCheckpoint, FlexError, UnsupportedModel, library_faults, shown, size
from flexengine.model.config import check_backed, check_limits, size_of
from flexengine.model.gguf_config import carry_values, family_config, own_family
from flexengine.model.gguf_header import GgufTensor, Header, gguf_parts, read_model, write_outline
from flexengine.model.gguf_names import ROPE_FREQS, Array, parts_of, undone
from flexengine.model.gguf_places import (
    PLAIN_KINDS,
    ROWS,
    ParamPlace,
    check_scales,
    in_form,
    place_of_rows,
    write_places,
)
from flexengine.model.gguf_pre import byte_level, end_tokens, keep_written, sentencepiece
from flexengine.model.linear import is_experts
from flexengine.model.shards import PIECE_BYTES, StoredTensor, check_memory, pieces_of, write_shards
from flexengine.system.read_retries import opened

_WHOLE_COPIES = 5  # of a tensor in float32 that are in memory if it is converted whole
_IN_LAYER = re.compile(r"\.(layers|h|blocks)\.\d+\.")  # names of modules of decoder layers
_NO_TOKENIZER = ("", "none", "no_vocab")  # as llama.cpp takes them
_TOKEN_BYTES = 3000  # of memory that transformers' GGUF reader takes for a token
_ARRAYS = tuple(f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges", "scores", "precompiled_charsmap"))
_MAX_FREQS = 1 << 16
Group = list[GgufTensor]  # tensors that are made into one parameter


def conversion(
    path: Path, trust_remote_code: bool, memory: int | None = None
) -> tuple[list[Path], Callable[[Path], None]]:
    """Return the files of the model, all of its parts, and the function that prepares it. Such files hold no code.
    Raise BadCheckpoint if a part is missing. memory: as for `convert`."""
    files = gguf_parts(path)
    if missing := [file.name for file in files if not file.is_file()]:
        raise BadCheckpoint(f"{path} is one of {len(files)} parts, but {missing[0]} is missing; download all parts")
    return files, partial(convert, files, memory=memory)


def convert(files: Sequence[Path], directory: Path, memory: int | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer files, the list of the tensors that stay in a GGUF file, and
    safetensors of all others into `directory`.

    Of these, quantised tensors become float32; F16, BF16 and F32 keep their dtypes. config.dtype is float32 if any
    tensor is quantised. Raise BadCheckpoint if the file is damaged, UnsupportedModel if it needs a feature that is not
    supported, and OutOfMemory if the disk is full, or the tokenizer or a tensor that must be converted whole needs more
    bytes than `memory`, if given."""
    header = read_model(files, _ARRAYS)
    try:
        _write(header, directory, memory)
    except FlexError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        # values of a wrong type or shape raise errors of many types where they are first used, mostly in transformers
        raise BadCheckpoint(f"{files[0]} contradicts itself: {type(error).__name__}: {error}") from error


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
    weights = _Weights(header, config, model, memory)

    def check(name: str, shape: tuple[int, ...]) -> None:
        if expected.get(name) != shape:
            raise BadCheckpoint(f"{path}: {name} has shape {shape}, config says {expected.get(name)}")
        missing.discard(name)

    for name, place in weights.places.items():
        check(name, place.shape)
    check_scales(weights.staying)

    def tensors() -> Iterator[StoredTensor]:
        for tensor in weights.converted():
            check(tensor.name, tensor.shape)
            yield tensor

    text = f"preparing {path.name}, once for this file ({size(weights.nbytes)} beside the weights in it)"
    write_shards(path, directory, weights.nbytes, tensors(), text)
    write_places(directory, weights.places)
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
    try:
        if own_family(header):
            config = family_config(header)
        else:
            write_outline(header, outline)
            config = AutoConfig.from_pretrained(directory, gguf_file=outline.name)
        sizes = size_of(config)
    except Exception as error:
        raise UnsupportedModel(f"{path}: transformers has no config for it: {error}") from error
    finally:
        outline.unlink(missing_ok=True)
    check_backed(path, sizes, [math.prod(tensor.shape) for tensor in header.tensors])
    kinds = {tensor.kind.name for tensor in header.tensors}
    plain = kinds <= set(PLAIN_KINDS) and next((kind for kind in ("BF16", "F16") if kind in kinds), None)
    config.dtype = PLAIN_KINDS[plain] if plain else torch.float32
    carry_values(header, config)
    _carry_rope(header, config)
    return config


class _Weights:
    """The parameters that a file's tensors are made into: those that stay in the file, and others. Raise OutOfMemory if
    one must be converted whole and needs more bytes than `memory`, if given.

    Attributes:
        places: of the parameters that stay, by name.
        staying: tensors of the file that they consist of.
        nbytes: of the parameters that are converted, at most.
    """

    def __init__(self, header: Header, config: Any, model: Any, memory: int | None) -> None:
        self.path, self._architecture, self._config = header.path, header.architecture, config
        self.places, self.staying, self._others = dict[str, ParamPlace](), list[GgufTensor](), dict[str, Group]()
        self._transposed = transposed_experts(model)
        encodable = _encodable(model)
        for name, group in parts_of(header, model).items():
            turned, numbers = name in self._transposed, rows_of(group, self._made)
            if numbers is not None and _stays(group, name in encodable, turned):
                self.places[name] = place_of_rows(group, numbers, turned)
                self.staying += group
                continue
            self._others[name] = group
            if numbers is None or turned:
                needed = sum(_WHOLE_COPIES * 4 * math.prod(tensor.shape) for tensor in group)
                check_memory(f"{name} of {header.path}, which is converted whole,", needed, memory)
        narrow = ("F16", "BF16")
        others = [tensor for group in self._others.values() for tensor in group]
        self.nbytes = sum(math.prod(x.shape) * (2 if x.kind.name in narrow else 4) for x in others)

    def _made(self, group: Group, weights: Callable[[int, GgufTensor], Any]) -> Array:
        """Return the array of the parameter that a group is made into. weights: returns the array of a tensor."""
        arrays = [weights(number, tensor) for number, tensor in enumerate(group)]
        return undone(self._architecture, self._config, group, arrays)

    def _whole(self, group: Group, turned: bool) -> Array:
        """Return the array of a parameter that is not made of rows, or that the model has transposed (`turned`)."""
        made = self._made(group, lambda _, tensor: _read(tensor))
        return made.swapaxes(-1, -2) if turned else made

    def converted(self) -> Iterator[StoredTensor]:
        """Yield the other parameters: fp32, or in 16 bits if the file stores them so and the conversion is exact."""
        for name, group in self._others.items():
            numbers, turned = rows_of(group, self._made), name in self._transposed  # again, as they take much memory
            if numbers is None or turned:
                kept = PLAIN_KINDS.get(group[0].kind.name, torch.float32)
                made = partial(self._whole, group, turned)
                yield whole_tensor(self.path, name, kept, made)
                continue
            kinds, columns = {tensor.kind.name for tensor in group}, group[0].shape[-1]
            dtype = PLAIN_KINDS.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
            pieces = _row_pieces(group, numbers.reshape(-1), dtype)
            yield StoredTensor(self.path, name, dtype, (*numbers.shape[:-1], columns), pieces)


def _encodable(model: Any) -> set[str]:
    """Return the parameters whose values only products and the embedding read, so that they can stay encoded."""
    names = {module: name for name, module in model.named_modules()}
    edges = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    inside = [(name, module) for module, name in names.items() if _IN_LAYER.search(name)]
    experts = [(name, module) for name, module in inside if is_experts(module)]
    stacks = {f"{name}.{key}": p for name, module in experts for key, p in module.named_parameters() if p.dim() == 3}
    counts = {len(parameter) for parameter in stacks.values()}  # rows of routers
    linear = {f"{name}.weight" for name, m in inside if type(m) is nn.Linear and m.out_features not in counts}
    return {f"{names[module]}.weight" for module in edges} | set(stacks) | linear


def transposed_experts(model: Any) -> set[str]:
    """Return the stacks of experts that the model has as [experts, in, out]; files have them as [experts, out, in]."""
    experts = [(name, module) for name, module in model.named_modules() if is_experts(module) and module.is_transposed]
    return {f"{name}.{key}" for name, module in experts for key, p in module.named_parameters() if p.dim() == 3}


def _stays(group: Group, encodable: bool, turned: bool) -> bool:
    """Return whether a parameter that is made of a group's rows can be read from the file. encodable: if they are
    encoded; turned: whether the model has it transposed, which products with encoded matrices do not see."""
    plain = len({tensor.kind for tensor in group}) == 1 and group[0].kind.name in PLAIN_KINDS and not turned
    return plain or (encodable and all(map(in_form, group)))


def rows_of(group: Group, made: Callable[[Group, Callable[[int, GgufTensor], Any]], Array]) -> Array | None:
    """Return the numbers of the rows that a parameter consists of, each tensor number * ROWS + row, in the shape of the
    parameter with one column. None if not only rows are moved. made: as `_Weights._made`."""
    counts = [math.prod(tensor.shape[:-1]) for tensor in group]
    if min(counts) == 1 or len({tensor.shape[-1] for tensor in group}) > 1:
        return None

    def numbered(number: int, tensor: GgufTensor) -> Array:
        return (np.arange(counts[number]) + number * ROWS).reshape(*tensor.shape[:-1], 1)

    try:
        with np.errstate(all="ignore"):
            numbers = made(group, numbered)
    except ValueError:  # it needs the shape of the weights
        return None
    right = np.concatenate([numbered(number, tensor).reshape(-1) for number, tensor in enumerate(group)])
    return numbers if numbers.shape[-1] == 1 and np.array_equal(np.sort(numbers.reshape(-1)), right) else None


def whole_tensor(path: Path, name: str, kept: torch.dtype, made: Callable[[], Array]) -> StoredTensor:
    """Return a parameter that is made of whole tensors. It is made to know its dtype, dropped, and made again when its
    pieces are read, so that those of a shard are not in memory at once.

    Args:
        kept: dtype of the numbers in the file, which is kept if it holds the parameter exactly; else it is fp32.
        made: returns the parameter in fp32.
    """

    def values() -> torch.Tensor:
        wide = torch.from_numpy(np.ascontiguousarray(made()))
        half = wide.to(kept)
        return half if torch.equal(half.to(torch.float32), wide) else wide

    def pieces() -> Iterator[torch.Tensor]:
        yield from pieces_of(values())

    now = values()
    return StoredTensor(path, name, now.dtype, tuple(now.shape), pieces())


def _row_pieces(group: Group, numbers: Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield rows of some tensors, by their numbers, as a dtype: that of all of these tensors, or else float32."""
    columns = group[0].shape[-1]
    step = max(1, PIECE_BYTES // (4 * columns))
    for low in range(0, len(numbers), step):
        sources, rows = np.divmod(numbers[low : low + step], ROWS)
        out = torch.empty(len(rows), columns, dtype=dtype)
        for number in np.unique(sources):
            of_this = torch.from_numpy(sources == number)
            stored = _read_rows(group[number], rows[sources == number])
            out[of_this] = _numbers(group[number], stored, dtype)
        yield out


def _read(tensor: GgufTensor) -> Array:
    """Return one tensor as float32."""
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    pieces = _row_pieces([tensor], np.arange(rows), torch.float32)
    out, low = np.empty((rows, columns), dtype=np.float32), 0
    for piece in pieces:
        out[low : low + len(piece)] = piece.numpy()
        low += len(piece)
    return out.reshape(tensor.shape)


def _read_rows(tensor: GgufTensor, rows: Array) -> Array:
    """Return the stored bytes of some rows, uint8 [rows, bytes]. They are read, not mapped, so that file pages do not
    count as process memory."""
    nbytes = tensor.nbytes // math.prod(tensor.shape[:-1])
    stored, ends = np.empty((len(rows), nbytes), dtype=np.uint8), [*np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)]
    with opened(tensor.path) as file:
        for low, high in pairwise([0, *ends]):
            file.seek(tensor.offset + int(rows[low]) * nbytes)
            if file.readinto(stored[low:high].data.cast("B")) != (high - low) * nbytes:
                raise BadCheckpoint(f"{tensor.path} ends before byte {tensor.offset + tensor.nbytes}")
    return stored


def _numbers(tensor: GgufTensor, stored: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a tensor as a dtype, from their stored bytes."""
    from gguf.quants import dequantize

    if (kept := PLAIN_KINDS.get(tensor.kind.name)) is not None:
        return torch.from_numpy(stored).view(kept).to(dtype)
    try:
        return torch.from_numpy(dequantize(stored, tensor.kind))
    except NotImplementedError as error:
        raise UnsupportedModel(f"{tensor.path}: {tensor.name}: {error}") from error


def _carry_rope(header: Header, config: Any) -> None:
    """Copy RoPE scaling, which transformers' GGUF reader drops, to the config.

    llama.cpp stores Llama 3's scaling as a tensor of divisors per frequency (convert_hf_to_gguf.py). The scaling is
    recognised if Llama 3's formula with its published constants gives the same numbers. Raise UnsupportedModel for
    other scaling."""
    path, scaling = header.path, header.text(f"{header.architecture}.rope.scaling.type")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if scaling not in ("", "none") and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModel(f"{path} scales RoPE by {shown(scaling)}, which transformers' GGUF reader drops")
    stored = next((tensor for tensor in header.tensors if tensor.name == ROPE_FREQS), None)
    if stored is None:
        return
    if math.prod(stored.shape) > _MAX_FREQS:
        raise BadCheckpoint(f"{path}: {ROPE_FREQS} has the shape {stored.shape}; at most {_MAX_FREQS} are read")
    divisors = _read(stored).ravel()
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
    with library_faults(f"{path}: its tokenizer cannot be built", UnsupportedModel):
        byte_bpe = header.text("tokenizer.ggml.model") == "gpt2"
        tokenizer = (byte_level if byte_bpe else sentencepiece)(path, header.values)
    if isinstance(length := getattr(config, "max_position_embeddings", None), int):
        tokenizer.model_max_length = length
    # Without the spaces that it is saved with otherwise, a large vocabulary is read in two thirds of the time.
    tokenizer._save_pretrained = lambda file_names, **_: file_names
    tokenizer.save_pretrained(directory)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    keep_written(directory, tokenizer.backend_tokenizer)
    if not byte_bpe:  # transformers parses a whole tokenizer.json for its added tokens, unless they are listed
        file = directory / "tokenizer_config.json"
        added = {number: token.__getstate__() for number, token in tokenizer.added_tokens_decoder.items()}
        settings = json.loads(file.read_bytes()) | {"added_tokens_decoder": added}
        file.write_text(json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8")
    if header.values.get("tokenizer.ggml.add_space_prefix") is False:
        _drop_first_space(directory / "tokenizer.json")


def _drop_first_space(file: Path) -> None:
    """Edit a tokenizer.json so that no space is put before a text, nor taken off at decoding. Its last part, the model,
    is not parsed: that takes a second for the vocabulary of Gemma."""
    first, model, rest = file.read_bytes().partition(b',"model":{')  # in a string quotes are escaped
    content = json.loads(first + b"}" * bool(model))
    edited = content | {part: _without_space(content[part]) for part in ("pre_tokenizer", "normalizer", "decoder")}
    if edited != content:
        text = json.dumps(edited, ensure_ascii=False).encode()
        file.write_bytes(text.removesuffix(b"}") + model + rest if model else text)


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
