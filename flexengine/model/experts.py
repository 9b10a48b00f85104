"""Mixtures of experts, as the experts function of transformers: all experts of a layer are one native call.

What the call does not compute (another gate, a norm after an expert, 16-bit activations, formats without native steps,
passes that are watched) is computed one expert after the other, in the same order.
"""

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flexengine import kernels
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.cuda import has_grouped_product
from flexengine.kernels.experts import Bound, ExpertCall, ExpertGate, ExpertMemory, Stacked
from flexengine.kernels.structs import CODES
from flexengine.model.forward import Rows, pause
from flexengine.model.gates import find_gate, gate_settings
from flexengine.model.linear import Product, unwatched

EXPERTS, GROUPED = "flexengine", "grouped_mm"
_calls: WeakKeyDictionary[Product, "_Calls"] = WeakKeyDictionary()
# By module, what `native_experts` has returned last, and for what.
_kept: WeakKeyDictionary[Any, "tuple[tuple[Any, ...], NativeExperts | None]"] = WeakKeyDictionary()


class _Calls(NamedTuple):
    """The native calls of a model, and the memory that they share."""

    formats: dict[Any, ExpertCall]  # by format of the experts
    gates: dict[Any, ExpertGate | None]  # by kernels and settings of modules
    memory: ExpertMemory


def release(product: Product) -> None:
    """Drop the tensors that native calls keep for the experts of a model. product: of the model."""
    for module in [module for module in _kept if module.product is product]:
        del _kept[module]
    if (calls := _calls.get(product)) is not None:
        calls.memory.release()


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, [tokens, hidden], added in the order of the experts.

    The pass pauses before that if the module's experts are loaded by rows: `by_rows` has the number of the decoder
    layer, and the names of the parameters whose first dimension is the expert. If the module has a block
    (guests/flash/expert_blocks.py), which reads the chosen experts, the block computes the sum.

    On a GPU this synchronises once, to read the router's choice, unless transformers' grouped product computes the
    experts: if the weights are plain bf16, the GPU supports it, and no recorder is active.

    Args:
        module: the experts.
        hidden: [tokens, hidden].
        chosen: expert numbers, [tokens, top_k].
        weights: shares of the experts, [tokens, top_k].
    """
    if hidden.is_meta:
        return torch.empty_like(hidden)
    if (block := module.__dict__.get("block")) is not None:
        return cast(Tensor, block(hidden, chosen, weights))
    if (by_rows := module.__dict__.get("by_rows")) is not None:
        layer, names = by_rows
        pause(Rows(layer, names, chosen))
    plain = not getattr(module, "forms", {}) and "watch" not in module.__dict__
    if plain and module.down_proj.dtype == hidden.dtype and has_grouped_product(hidden):
        return cast(Tensor, ALL_EXPERTS_FUNCTIONS[GROUPED](module, hidden, chosen, weights))
    if (native := native_experts(module, hidden)) is not None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        native.add(hidden, chosen, weights, out, fresh=True)
        return out
    out = torch.zeros_like(hidden)
    for expert, picked in by_expert(chosen, len(module.down_proj)):
        add_expert(module, hidden, weights, picked, out, expert, expert)
    return out


class NativeExperts(NamedTuple):
    """The experts of a layer, with the weights that the module has now, as a native call."""

    call: ExpertCall
    matrices: tuple[Stacked, Stacked]  # of the first and of the last product
    bound: Bound  # where they are

    def add(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out: Tensor,
        places: Tensor | None = None,
        fresh: bool = False,
    ) -> None:
        """Add the weighted sums of the chosen experts' outputs to `out`, in the order of the experts.

        Args:
            hidden, chosen, weights: as of `_experts`; fp32, int64 and fp32.
            out: [tokens, hidden], contiguous.
            places: int64 [experts], row of each expert in the stacked matrices, -1 for those that are left out; None if
                it is the expert's number.
            fresh: whether `out` has no values yet.
        """
        with unwatched():
            x = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
            self.call.run(self.matrices, x, chosen.contiguous(), weights.float().contiguous(), out, places, fresh)


def placed(
    layers: Sequence[NativeExperts], hidden: Tensor, chosen: Tensor, weights: Tensor, out: Tensor
) -> tuple[list[int], list[Any]]:
    """Return the address of a struct Experts for each layer, and what must stay in memory. Other arguments as of
    NativeExperts.add; contiguous."""
    addresses, kept = [0] * len(layers), list[Any]()
    kinds = [(layer.call, layer.bound.experts) for layer in layers]  # layers of one kind are placed together
    for kind in dict.fromkeys(kinds):
        own = [number for number, other in enumerate(kinds) if other == kind]
        rows, more = kind[0].placed([layers[number].bound for number in own], hidden, chosen, weights, out)
        kept += [rows, more]
        start = rows.ctypes.data
        for place, number in enumerate(own):
            addresses[number] = start + place * rows.strides[0]
    return addresses, kept


def native_experts(module: Any, hidden: Tensor) -> NativeExperts | None:
    """Return the native call of a module's experts; None if it does not compute them."""
    if hidden.device.type != "cpu" or hidden.dtype != torch.float32 or "watch" in module.__dict__:
        return None
    native, product, own = kernels.load(), module.product, module.__dict__
    if not isinstance(native, NativeKernels) or product.dtype != torch.float32:
        return None
    names, packed, forms = _names(module), own.get("packed", ()), getattr(module, "forms", {})
    bound = [module._parameters.get(part) for name in names for part in (name, f"{name}_bias")]
    now = (native, *bound, product.compute, *map(forms.get, names), *(name in packed for name in names))
    if (kept := _kept.get(module)) is None or not all(map(is_, kept[0], now)):
        with unwatched():
            kept = _kept[module] = now, _native(module, native, product)
    return kept[1]


def _names(module: Any) -> tuple[str, str]:
    """Return the names of the matrices of the first and of the last product."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _native(module: Any, native: NativeKernels, product: Product) -> NativeExperts | None:
    if (calls := _calls.get(product)) is None:
        calls = _calls[product] = _Calls({}, {}, ExpertMemory())
    own = module.__dict__
    if "native_gate" not in own:
        own["native_gate"] = None if _has_norm(module) else _gate(module, native, calls)
    gate: ExpertGate | None = own["native_gate"]
    first, last = (_stacked(module, name) for name in _names(module))
    if gate is None or first is None or last is None:
        return None
    key = (first.format, last.format, gate, product.compute, native)
    if (call := calls.formats.get(key)) is None:
        call = calls.formats[key] = ExpertCall(native, first, gate, last, product.compute, calls.memory)
    return NativeExperts(call, (first, last), call.bound((first, last)))


def _gate(module: Any, native: NativeKernels, calls: _Calls) -> ExpertGate | None:
    """Return what `find_gate` does, which modules of equal settings call once."""
    if (settings := gate_settings(module)) is None:
        return find_gate(module, native)
    if (key := (native, settings)) not in calls.gates:
        calls.gates[key] = find_gate(module, native)
    return calls.gates[key]


def _has_norm(module: Any) -> bool:
    return bool(getattr(module, "has_post_expert_norm", False))


def _stacked(module: Any, name: str) -> Stacked | None:
    """Return the matrices of one product; None if the native kernels do not read them."""
    weight, form = getattr(module, name).data, getattr(module, "forms", {}).get(name)
    bias = getattr(module, f"{name}_bias").data.float().contiguous() if module.has_bias else None
    if (apart := module.__dict__.get("apart", {}).get(name)) is not None:
        fits = bias is None or bias.device.type == "cpu"
        return Stacked(weight, bias, None, module.is_transposed, apart=apart) if fits else None
    fits = weight.device.type == "cpu" and (bias is None or bias.device.type == "cpu")
    if form is not None:
        fits, across = fits and form.in_steps and weight.dtype == torch.uint8 and weight.stride(-1) == 1, False
    else:
        fits, across = fits and weight.dtype in CODES and weight.stride(-1) == 1, module.is_transposed
    if packed := name in module.__dict__.get("packed", ()):  # as [out, in]
        weight, across = weight.view(_turned(weight.shape) if across else weight.shape), False
    return Stacked(weight, bias, form, across, packed) if fits else None


def _turned(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def by_expert(chosen: Tensor, number: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert, rising, with its indices in the flattened `chosen`. number: of experts."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    counts = torch.zeros(number, dtype=torch.int64, device=experts.device)
    start = 0
    for expert, count in enumerate(counts.scatter_add_(0, experts, torch.ones_like(experts)).tolist()):
        if count:
            yield expert, order[start : start + count]
        start += count


def add_expert(
    module: Any, hidden: Tensor, weights: Tensor, picked: Tensor, out: Tensor, expert: int, row: int
) -> None:
    """Add the weighted output of one expert to `out`, [tokens, hidden].

    Args:
        module: the experts.
        hidden: [tokens, hidden].
        weights: shares of the experts, [tokens, top_k].
        picked: int64, indices in the flattened `weights` of the tokens that use the expert.
        out: changed in place.
        expert: its number.
        row: its row in the stacked matrices.
    """
    tokens = picked // weights.shape[-1]
    up, down = _names(module)
    x = _one(module, hidden[tokens], up, expert, row)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _one(module, x, down, expert, row)
    if _has_norm(module):
        x = module.post_expert_norm(x)
    x = x * weights.reshape(-1)[picked, None]
    out.index_add_(0, tokens, x.to(out.dtype))


def _one(module: Any, x: Tensor, name: str, expert: int, row: int) -> Tensor:
    apart, form = module.__dict__.get("apart", {}).get(name), getattr(module, "forms", {}).get(name)
    weight = getattr(module, name)[row] if apart is None else apart.matrix(row)
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if watch := module.__dict__.get("watch"):  # see encoding.ImportanceRecorder
        watch[name](expert, x)
    product: Product = module.product
    packed = name in module.__dict__.get("packed", ())
    if module.is_transposed and form is None:
        weight = weight.view(_turned(weight.shape)) if packed else weight.t()
    return product(x, weight, bias, form, packed)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
