"""A device that is not the processor, in RAM: what a GPU refuses, it refuses, too.

Its tensors say that they are on device "meta". An operation on them and on a tensor in RAM raises, except a copy; so do
new tensors in RAM where the device's are due. Operations are computed by the processor on hidden tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flexengine.guests.attention_workers.devices import StagedDevice
from flexengine.kernels.base import Kernels
from flexengine.kernels.cuda import CudaKernels

META = torch.device("meta")
aten: Any = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `hidden` has its numbers."""

    hidden: torch.Tensor

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, hidden.shape, strides=hidden.stride(), storage_offset=hidden.storage_offset(), dtype=hidden.dtype,
            device=META,
        )  # fmt: skip
        made.hidden = hidden
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Lets new tensors of device "meta" be tensors of the device, in the thread that enters it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operation. Raise RuntimeError if it mixes tensors of the device with others."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in leaves if isinstance(x, DeviceTensor)]
    apart = [x for x in leaves if not isinstance(x, DeviceTensor) and x.dim()]
    if there and apart and func not in COPIES:
        raise RuntimeError(f"{func}: tensors on the device and in RAM")
    given, on_device = kwargs.get("device"), bool(there)
    if given is not None:
        on_device = torch.device(given) == META
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten.copy_.default:
        on_device = isinstance(args[0], DeviceTensor)
    originals = {id(x.hidden): x for x in there}
    args, kwargs = pytree.tree_map_only(DeviceTensor, lambda x: x.hidden, (tuple(args), kwargs))
    found = func(*args, **kwargs)
    if not on_device:
        return found
    placed = lambda x: originals[id(x)] if id(x) in originals else DeviceTensor(x)  # noqa: E731
    return pytree.tree_map_only(torch.Tensor, placed, found)


class OtherDevice(StagedDevice):
    """An attention worker's device, with a GPU's kernels in torch, or others."""

    name, where = "other device", META

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.kernels = CudaKernels(fused=False) if kernels is None else kernels
        self.freed = 0  # calls of `give_back`

    def begin_thread(self) -> None:
        OnDevice().__enter__()

    def give_back(self) -> None:
        self.freed += 1


def on_device(call: Callable[[], Any]) -> Any:
    """Return what a function returns that uses the device."""
    with OnDevice():
        return call()
