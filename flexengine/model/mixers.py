"""Modules that mix the tokens of a sequence through a state of fixed size, such as Mamba, gated delta rules and short
convolutions.

Such a module of transformers reads and writes its states through a cache (`get_conv_state`, `update_recurrent_state`).
Here the cache is a view of the records of some sequences, and the module's own forward runs unmodified:

* for the decode tokens of a gpu_batch, as [sequences, 1, hidden];
* for each group of prompt pieces of equal length, as [pieces, tokens, hidden]. There is no padding.

It runs once for each, or several times: a call's temporary tensors take at most MOST_BYTES, and each call reads the
weights of its projections. A call decodes 24 sequences of Qwen3.5, and 8 of Mamba 2 with 7 billion parameters. If
kernels compute the states (`state_kernels`), a call decodes up to MOST_TOKENS sequences, and another one computes as
many packed tokens of prompts, whatever their pieces.

A piece at position 0 has no earlier state, whatever its record holds; all others have one, also if they have a single
token. Modules compute prompts in chunks of tokens, so a prompt is cut at multiples of `Mixing.grain` only, and no later
piece has a single token, which a module would take for a decode step: then a piece computes what the whole prompt does.
"""

import inspect
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.errors import UnsupportedModel
from flexengine.kernels.paged import PromptPieces
from flexengine.model.build import keeps_state
from flexengine.model.forward import Mix, pause, pausing_layers
from flexengine.model.linear import FastLinear
from flexengine.model.peak import Peak

# What modules call whose own forward gives other numbers for a later piece of a prompt, by the adapter for them.
_ADAPTED = {
    "mamba_selective_scan": "flexengine.model.adapters.mamba:with_states",
    "set_linear_cache": "flexengine.model.adapters.minimax:with_states",
}
_CHUNKS = ("chunk_size", "block_size")  # attributes of modules: tokens of a chunk
CHUNK = 64  # tokens of a chunk of delta rules, a default argument of the functions of transformers
MOST_TOKENS, MOST_BYTES = 512, 256 << 20  # of one call of a module, unless a single chunk or sequence takes more
STATE_ALIGN = 64  # bytes
# Arguments of forward that are replaced, and others that have no effect without padding and gradients.
REPLACED = {"cache", "attention_mask", "conv_mask"}
_HARMLESS = {"position_ids", "position_embeddings", "use_cache", "output_attentions", "cache_position"}
_CACHES = {"cache", "past_key_values", "past_key_value"}  # names of a cache in forward

STATE = "they keep a state beside keys and values"
_BLOCKS = {"mlp", "moe"}  # types of layers that are no more than a feed-forward block

Inputs = tuple[Tensor, ...]  # [sequences, tokens, ...] each: hidden states, and what else a module gets of each token
Key = tuple[str, int]  # kind of state, "conv" or "recurrent", and its number in the layer's cache


class Field(NamedTuple):
    """A state in a record."""

    key: Key
    shape: tuple[int, ...]  # without the dimension of sequences
    dtype: torch.dtype
    offset: int  # bytes before it in the record

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, pages: Tensor) -> Tensor:
        """Return the state in all records, [pages, elements]. pages: uint8 [pages, bytes]."""
        first = self.offset // self.dtype.itemsize
        return pages.view(self.dtype)[:, first : first + math.prod(self.shape)]


class StateRecords(NamedTuple):
    """Records of a gpu_batch's sequences in one layer. Pieces with one token come first in the packed batch."""

    pages: Tensor  # uint8 [pages, bytes]: all records of the layer, or of the gpu_batch
    numbers: Tensor  # int64 [tokens]: number of the record of each token's sequence
    decode: int  # number of pieces with one token, which are decode steps
    prompts: Sequence[PromptPieces]  # the other pieces
    key_pages: Any = None  # an `adapters.sparse.IndexPages`, if the layer has an indexer, too


class Mixing(NamedTuple):
    """States of a model."""

    grain: int  # tokens: prompts are cut at multiples of it
    record_bytes: tuple[int, ...]  # by layer of the whole model; 0 for a layer without states
    # Most bytes of temporary tensors of a module: for each token of a prompt and for each sequence that decodes; and
    # most tokens and sequences of a call.
    token_bytes: int
    most_tokens: int
    sequence_bytes: int
    most_sequences: int
    moved_bytes: int  # that a decode step of a sequence reads and writes
    without_kernels: Mapping[int, str] | None = None  # by layer that runs its own functions, why; None if all do

    @property
    def numerics(self) -> str:
        """Return a text that tells apart which layers kernels compute, for a job's manifest and for stages."""
        own = self.without_kernels
        return "by modules" if own is None else f"by kernels{f', but for {len(own)} layers' if own else ''}"

    def reasons(self, attends: Collection[int]) -> dict[int, str]:
        """Return why layers run their modules that have a state, or are not among `attends`, by layer."""
        others = {j: nbytes for j, nbytes in enumerate(self.record_bytes) if nbytes or j not in attends}
        return {j: STATE if nbytes else "they have no attention" for j, nbytes in others.items()}


class StateView:
    """States of some sequences in one layer, in place of a cache of transformers. None of them has padding.

    As in `transformers.cache_utils.LinearAttentionLayer`, a convolution keeps the last `conv_kernel_size` columns, and
    gets those before its input together with it. There is no state before the first token.
    """

    def __init__(self, states: dict[Key, Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before = self.get_conv_state(layer_idx, state_idx)
        if before is not None:
            width, whole = before.shape[-1], torch.cat([before, conv_states], -1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.states["conv", state_idx] = whole[..., whole.shape[-1] - width :]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states) if state_idx is None else ("conv", state_idx) in self.states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class PausingMixer:
    """Mixin of a module with a state: its forward pauses for the records, and runs the module's own forward."""

    own_class: type  # the module's
    with_kernels: Any = None  # a `state_kernels.KernelForward`, if kernels compute its states
    fields: tuple[Field, ...] = ()  # known after a trial, as are:
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape of a token, and dtype, of what it gets by tokens
    grain = CHUNK
    most_tokens, most_sequences = MOST_TOKENS, MOST_TOKENS

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = super().forward  # type: ignore[misc]
        names = _parameters(own)
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden: Tensor = given.pop(names[0])
        others = {k: v for k, v in given.items() if k not in REPLACED | _HARMLESS and v is not None and v is not False}
        inputs = {names[0]: hidden}  # by tokens
        inputs |= {k: v for k, v in others.items() if isinstance(v, Tensor) and v.shape[:2] == hidden.shape[:2]}
        others = {k: v for k, v in others.items() if k not in inputs}
        if others:
            fault = f"its module {type(self).__name__.removeprefix('Pausing')} gets {', '.join(sorted(others))}"
            raise UnsupportedModel(f"{fault}, which the engine does not support beside a state")
        masks = dict.fromkeys(REPLACED & set(names))

        def run(xs: Inputs, view: StateView) -> Any:
            x, *more = xs
            given = dict(zip(list(inputs)[1:], more, strict=True))
            out = own(x, **given, **{**masks, "cache": view})  # some return a state, too, which their layers do not use
            return map_tensors(lambda y: y if y.shape[:2] == x.shape[:2] else None, out)

        xs: Inputs = tuple(inputs.values())

        records: StateRecords | None = pause(Mix())
        if records is None:  # in a trial, of one prompt
            view = StateView({})
            cuts = self._cuts(hidden.shape[1])
            out = _joined([run(tuple(x[:, low:high] for x in xs), view) for low, high in cuts])
            if hidden.is_meta and not self.fields:
                self.fields = _fields(view)
                self.inputs = {name: (tuple(x.shape[2:]), x.dtype) for name, x in inputs.items()}
            return out
        if self.with_kernels is not None:
            return _joined(list(self.with_kernels.pieces(self, hidden, records)))
        return _joined(list(self._pieces(run, xs, records)))

    def _pieces(self, run: Any, inputs: Inputs, records: StateRecords) -> Iterator[Any]:
        """Yield outputs of consecutive tokens, and write their states."""
        for first in range(0, records.decode, self.most_sequences):
            end = min(first + self.most_sequences, records.decode)
            numbers = records.numbers[first:end]
            view = self._read(records.pages, numbers)
            out = run(tuple(x[0, first:end, None] for x in inputs), view)
            self._write(records.pages, numbers, view)
            yield map_tensors(lambda y: y.transpose(0, 1), out)
        for p in records.prompts:
            padded = -(-p.length // self.grain) * self.grain  # modules fill their chunks
            together = max(1, self.most_tokens // padded)
            for row in range(0, p.rows, together):
                count = min(together, p.rows - row)
                start = p.first + row * p.length
                tokens = slice(start, start + count * p.length)
                numbers = records.numbers[tokens].view(count, p.length)[:, 0].contiguous()
                view = self._read(records.pages, numbers) if p.past else StateView({})
                xs = [x[0, tokens].view(count, p.length, *x.shape[2:]) for x in inputs]
                outs = [run(tuple(x[:, low:high] for x in xs), view) for low, high in self._cuts(p.length)]
                self._write(records.pages, numbers, view)
                yield map_tensors(lambda y: y.reshape(1, -1, *y.shape[2:]), _joined(outs))

    def _cuts(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the parts in which a piece is computed. Only a piece of one token has a part of one."""
        first = 0
        while first < length:
            end = min(first + self.most_tokens, length)
            end -= self.grain * (length - end == 1)
            yield first, end
            first = end

    def _read(self, pages: Tensor, numbers: Tensor) -> StateView:
        """Return copies of the states of sequences."""
        return StateView({f.key: f.of(pages).index_select(0, numbers).view(-1, *f.shape) for f in self.fields})

    def _write(self, pages: Tensor, numbers: Tensor, view: StateView) -> None:
        for field in self.fields:
            field.of(pages).index_copy_(0, numbers, view.states[field.key].reshape(len(numbers), -1))


def _parameters(forward: Any) -> list[str]:
    return [name for name in inspect.signature(inspect.unwrap(forward)).parameters if name != "self"]


def _fields(view: StateView) -> tuple[Field, ...]:
    """Return the fields of the states in a view, one after the other, each from a multiple of STATE_ALIGN on."""
    fields, offset = list[Field](), 0
    for key, state in view.states.items():
        fields.append(Field(key, tuple(state.shape[1:]), state.dtype, offset))
        offset += -(-fields[-1].nbytes // STATE_ALIGN) * STATE_ALIGN
    return tuple(fields)


def record_bytes(fields: Sequence[Field]) -> int:
    """Return the bytes of a record."""
    return -(-(fields[-1].offset + fields[-1].nbytes) // STATE_ALIGN) * STATE_ALIGN


def map_tensors(function: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(map_tensors(function, x) for x in out)
    return function(out) if isinstance(out, Tensor) else out


def _joined(outs: Sequence[Any]) -> Any:
    """Return outputs of consecutive tokens, [1, tokens, ...] each, as one; None for others."""
    if isinstance(outs[0], tuple):
        return tuple(_joined(parts) for parts in zip(*outs, strict=True))
    if len(outs) == 1:
        return outs[0]
    return torch.cat(list(outs), 1) if all(isinstance(out, Tensor) for out in outs) else None


_classes: dict[type, type] = {}  # by class of a module, the class with the mixin


def use_mixers(layers: nn.Module) -> None:
    """Let modules with states pause. Linear layers whose weights they multiply themselves stay plain.

    Raise UnsupportedModel for a convolution over tokens outside of them: it would mix the sequences of a gpu_batch.
    """
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_no_advice)
    parts = set[nn.Module]()  # of modules with states: the whole module pauses
    for module in layers.modules():
        if keeps_state(module) and module not in parts:
            parts.update(module.modules())
            own = type(module)
            source = inspect.getsource(inspect.unwrap(own.forward))
            for name in re.findall(r"self\.(\w+)\.weight @", source):
                if type(inner := getattr(module, name)) is FastLinear:
                    inner.__class__ = nn.Linear  # type: ignore[assignment]
            sizes = [n for name in _CHUNKS if isinstance(n := getattr(module, name, None), int) and n > 0]
            module.__class__ = _pausing(own)
            module.grain = math.lcm(CHUNK, *sizes)  # type: ignore[assignment]
    inside = {m for mixer in mixers_of(layers) for m in mixer.modules()}
    for path, module in layers.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and module not in inside:
            raise UnsupportedModel(f"layer {path} is a convolution over tokens; it keeps state beyond the KV cache")


def _no_advice(record: logging.LogRecord) -> bool:
    """Return False for the advice to install packages of kernels, as the engine has its own."""
    return "falling back to its reference" not in record.getMessage()


def _pausing(own: Any) -> type:
    """Return the class of a module with the mixin."""
    if own not in _classes:
        base, calls = own, inspect.unwrap(own.forward).__code__.co_names
        for adapter in (_ADAPTED[name] for name in _ADAPTED if name in calls):
            base = type(own.__name__, (own,), {"forward": resolve_name(adapter)(own.forward)})
        _classes[own] = type(f"Pausing{own.__name__}", (PausingMixer, base), {"own_class": own})
    return _classes[own]


def mixers_of(module: nn.Module) -> list[Any]:
    """Return the modules with states, in order."""
    return [m for m in module.modules() if isinstance(m, PausingMixer)]


def order_of(order: Sequence[str], mixed: Collection[int], attends: Collection[int], config: Any) -> list[str]:
    """Return the pauses that a trial pass must have, of those of a model whose layers all have attention. A layer
    without attention must have a state, or be no more than a feed-forward block. mixed, attends: layers that paused for
    a state, and at attention."""
    blocks = [j for j, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in _BLOCKS]
    without = {f"attention {j}" for j in (*mixed, *blocks) if j not in attends}
    return [each for each in order if each not in without]


def refuse_others(layer: Any) -> None:
    """Raise UnsupportedModel if a module of a layer that did not pause at attention takes a cache beside its states: it
    may be an attention that would see the tokens of its own call only."""
    own = set(mixers_of(layer))
    inside = {m for mixer in own for m in mixer.modules()}
    for m in layer.layer.modules():
        if m is layer.layer or m in inside or not own.isdisjoint(m.modules()):
            continue  # a module around a mixer hands the cache on
        if not _CACHES.isdisjoint(_parameters(type(m).forward)):
            raise UnsupportedModel(f"layer {layer.index} has {type(m).__name__}, which did not call attention")


def mixing_of(model: Any, attends: Collection[int]) -> Mixing:
    """Return the states of a model after a trial pass. attends: layers that paused at attention."""
    sizes, kinds = list[int](), dict[Any, tuple[Any, int, int]]()
    for layer in pausing_layers(model):
        if layer.index not in attends:
            refuse_others(layer)
        own, nbytes = mixers_of(layer), 0
        if not all(mixer.fields for mixer in own):
            raise UnsupportedModel(f"layer {layer.index} has a module with states that a pass does not use")
        for mixer in own:
            mixer.fields = tuple(f._replace(offset=nbytes + f.offset) for f in mixer.fields)
            nbytes = record_bytes(mixer.fields)
            shape = type(mixer), tuple(f[:3] for f in mixer.fields)
            if shape not in kinds:
                kinds[shape] = mixer, *_peaks(mixer)
            _, token, sequence = kinds[shape]
            most = min(MOST_TOKENS, MOST_BYTES // token) // mixer.grain
            mixer.most_tokens = max(2, most) * mixer.grain
            mixer.most_sequences = max(1, min(MOST_TOKENS, MOST_BYTES // sequence))
        sizes.append(nbytes)
    grains = [mixer.grain for mixer, *_ in kinds.values()]
    token, sequence = (max(column) for column in zip(*(sizes[1:] for sizes in kinds.values()), strict=True))
    most = [(mixer.most_tokens, mixer.most_sequences) for mixer, *_ in kinds.values()]
    tokens, sequences = (max(column) for column in zip(*most, strict=True))
    return Mixing(math.lcm(*grains), tuple(sizes), token, tokens, sequence, sequences, sequence)


def _peaks(mixer: Any) -> tuple[int, int]:
    """Return the most bytes that a mixer's temporary tensors take for each token of a prompt, and for each sequence
    that decodes, with its states."""
    forward = super(PausingMixer, mixer).forward
    masks = dict.fromkeys(REPLACED & set(_parameters(forward)))

    def peak(rows: int, tokens: int, fields: Sequence[Field]) -> int:
        states = {f.key: torch.empty(rows, *f.shape, dtype=f.dtype, device="meta") for f in fields}
        given = mixer.inputs.items()
        xs = {k: torch.empty(rows, tokens, *shape, dtype=dtype, device="meta") for k, (shape, dtype) in given}
        with Peak() as seen:
            forward(**xs, **{**masks, "cache": StateView(states)})
        most: int = seen.most
        return most

    record = sum(f.nbytes for f in mixer.fields)
    return peak(1, mixer.grain, ()) // mixer.grain + 1, peak(1, 1, mixer.fields) + 2 * record
