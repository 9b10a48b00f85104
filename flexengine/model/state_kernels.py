"""Modules with states whose functions are native kernels.

A module of transformers computes its convolution and its scan by functions of its modeling file. `DOORS` has a kernel
for some of them. If it has one for all that change a module's states, the module's own code runs with the kernels in
place of the functions, once for the packed prompts of a gpu_batch and once for its decode steps, and kernels change the
states in their records. Results of kernels have the same bits for any cut of a prompt and any other sequences.

`use_kernels` tries each kind of module when a model is opened (`state_trial`). One that kernels do not compute alike
runs its own functions (`mixers`).
"""

import inspect
from collections.abc import Iterator
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.kernels import Kernels, states
from flexengine.kernels.cpu import NativeKernels
from flexengine.model import mixers
from flexengine.model.forward import pausing_layers
from flexengine.model.halves import buffers_on_meta
from flexengine.model.mixers import Mixing, StateRecords
from flexengine.model.peak import Peak
from flexengine.model.state_doors import DOORS, RecordView, Unsuited, running

_TRIAL = "flexengine.model.state_trial:fault"  # imported for models with states on a CPU


_CONVS = {"causal_conv1d_fn", "causal_conv1d_update"}


class KernelForward(NamedTuple):
    """The code of a class of modules, with kernels in place of functions."""

    function: Any  # its forward
    own: dict[str, Any]  # the functions that were replaced, without advice on stderr, by name
    kernels: NativeKernels

    def __call__(self, mixer: Any, hidden: Tensor, view: RecordView) -> Any:
        """Return the module's output for hidden states [sequences or 1, tokens, hidden]. Raise Unsuited if its states
        were not changed by kernels."""
        running.view, running.kernels = view, self.kernels
        masks = dict.fromkeys(mixers.REPLACED & set(inspect.signature(self.function).parameters))
        try:
            out = self.function(mixer, hidden, **{**masks, "cache": view})
        finally:
            del running.view, running.kernels
        if view.used != set(view.states):
            raise Unsuited("a state is changed by none of the functions that have kernels")
        return mixers.map_tensors(lambda y: y if y.shape[:2] == hidden.shape[:2] else None, out)

    def pieces(self, mixer: Any, hidden: Tensor, records: StateRecords) -> Iterator[Any]:
        """Yield outputs of consecutive tokens, and change their states."""
        pages, numbers, decode, *_ = records
        for first in range(0, decode, mixer.most_sequences):
            end = min(first + mixer.most_sequences, decode)
            fresh = torch.zeros(end - first, dtype=torch.bool)
            pieces = states.Pieces(torch.arange(end - first + 1), numbers[first:end].contiguous(), fresh)
            out = self(mixer, hidden[0, first:end, None], RecordView(mixer.fields, pages, pieces, hidden=False))
            yield mixers.map_tensors(lambda y: y.transpose(0, 1), out)
        for first in range(decode, hidden.shape[1], mixer.most_tokens):
            end = min(first + mixer.most_tokens, hidden.shape[1])
            view = RecordView(mixer.fields, pages, _prompts(records, first, end), hidden=end - first == 1)
            yield self(mixer, hidden[:, first:end], view)


def _prompts(records: StateRecords, first: int, end: int) -> states.Pieces:
    """Return the parts of prompts among some tokens."""
    starts, tokens, fresh = list[int](), list[int](), list[bool]()
    for p in records.prompts:
        low = max(0, (first - p.first) // p.length)  # the first row that may reach into the tokens
        for row in range(low, min(p.rows, -(-(end - p.first) // p.length))):
            begin = p.first + row * p.length
            starts.append(max(begin, first) - first)
            tokens.append(begin)
            fresh.append(not p.past and begin >= first)
    bounds = torch.tensor([*starts, end - first])
    return states.Pieces(bounds, records.numbers[torch.tensor(tokens)], torch.tensor(fresh))


def kernel_forward(mixer: Any, kernels: NativeKernels) -> KernelForward:
    """Return the code of a module with kernels. Raise Unsuited if a state has none."""
    own: Any = inspect.unwrap(mixer.own_class.forward)
    names = {*own.__code__.co_names}
    kinds = {f.key[0] for f in mixer.fields}
    missing = [kind for kind in ("conv", "recurrent") if kind in kinds and not _covers(kind, names)]
    if missing or own.__closure__:
        raise Unsuited("no kernel computes their " + ("scan" if "recurrent" in missing else "convolution"))
    doors = {name: door for name, door in DOORS.items() if name in names}
    function = FunctionType(own.__code__, {**own.__globals__, **doors}, own.__name__, own.__defaults__)
    function.__kwdefaults__ = own.__kwdefaults__
    replaced = {name: inspect.unwrap(own.__globals__[name]) for name in doors}
    return KernelForward(function, replaced, kernels)


def _covers(kind: str, names: set[str]) -> bool:
    found = names & DOORS.keys()
    return found >= _CONVS if kind == "conv" else len(found - _CONVS) == 2


def use_kernels(skeleton: Any, kernels: Kernels) -> None:
    """Let the modules with states of a skeleton run with kernels, if these are native, for a model that computes in
    fp32 on a CPU. `Skeleton.mixing` then has the sizes of their calls, and `as_modules` says how layers compute.

    Args:
        skeleton: after a trial pass on the meta device.
    """
    mixing: Mixing = skeleton.mixing
    if mixing.without_kernels is not None or not isinstance(kernels, NativeKernels):
        return
    found, reasons, moved = dict[Any, tuple[KernelForward | str, int, int]](), dict[int, str](), 0
    dtype = skeleton.model.dtype
    for layer in pausing_layers(skeleton.model):
        for mixer in mixers.mixers_of(layer):
            kind = type(mixer), tuple(f[:3] for f in mixer.fields)
            if kind not in found:
                (hidden, *_), _ = next(iter(mixer.inputs.values()))
                found[kind] = _tried(mixer, hidden, dtype, kernels)
            forward, token, sequence = found[kind]
            words = f"{mixers.STATE}, which kernels change"
            if isinstance(forward, str):
                words = reasons[layer.index] = f"{mixers.STATE}, and {forward}"
            else:
                mixer.with_kernels = forward
                mixer.most_tokens = max(1, min(mixers.MOST_TOKENS, mixers.MOST_BYTES // token))
                mixer.most_sequences = max(1, min(mixers.MOST_TOKENS, mixers.MOST_BYTES // sequence))
                moved = max(moved, sum(f.nbytes for f in mixer.fields) + sequence)
            if layer.index in skeleton.as_modules:
                skeleton.as_modules[layer.index] = words
    sizes = [(token, sequence, moved) for forward, token, sequence in found.values() if not isinstance(forward, str)]
    if reasons or not sizes:
        sizes.append((mixing.token_bytes, mixing.sequence_bytes, mixing.moved_bytes))
    token, sequence, moved = (max(column) for column in zip(*sizes, strict=True))
    most = [(m.most_tokens, m.most_sequences) for m in mixers.mixers_of(skeleton.model)]
    tokens, sequences = (max(column) for column in zip(*most, strict=True))
    skeleton.mixing = Mixing(*mixing[:2], token, tokens, sequence, sequences, moved, reasons)


def _tried(mixer: Any, hidden: int, dtype: torch.dtype, kernels: NativeKernels) -> tuple[KernelForward | str, int, int]:
    """Return a module's code with kernels, or the reason why it runs its own functions; and the most bytes of temporary
    tensors, for each token of a prompt, and for each sequence that decodes."""
    try:
        forward = kernel_forward(mixer, kernels)
        calls = dict[str, Any]()
        with buffers_on_meta(mixer):
            sizes = [_peak(forward, mixer, hidden, dtype, decode, calls) for decode in (False, True)]
        if fault := resolve_name(_TRIAL)(forward, mixer, hidden, calls):
            raise Unsuited(fault)
    except Unsuited as error:
        return str(error), 0, 0
    except Exception as error:  # it needs what a trial does not have
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error):
            raise  # memory decides nothing about numbers
        return f"a trial with kernels fails ({type(error).__name__}: {str(error)[:80]})", 0, 0
    token, sequence = sizes
    return forward, token, sequence


def _peak(
    forward: KernelForward, mixer: Any, hidden: int, dtype: torch.dtype, decode: bool, calls: dict[str, Any]
) -> int:
    """Return the most bytes of temporary tensors for each of some tokens on the meta device; note the calls of kernels,
    by name of the function that they replace."""
    tokens = mixers.CHUNK
    pages = torch.empty(2, mixers.record_bytes(mixer.fields), dtype=torch.uint8, device="meta")
    shape = (tokens, 1, hidden) if decode else (1, tokens, hidden)
    x = torch.empty(shape, dtype=dtype, device="meta")
    view = RecordView(mixer.fields, pages, _NONE, hidden=False)
    with Peak() as seen:
        out = forward(mixer, x, view)
    for y in out if isinstance(out, tuple) else (out,):
        if isinstance(y, Tensor) and y.shape[:2] != x.shape[:2]:
            raise Unsuited("their output has another shape with kernels")
    calls |= {f"{name} of {'a step' if decode else 'a prompt'}": args for name, args in view.calls}
    most: int = seen.most
    return -(-most // tokens)


_NONE = states.Pieces(torch.empty(0), torch.empty(0), torch.empty(0))
