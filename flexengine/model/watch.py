"""What a trial pass tells about a model's positions and masks: whether it uses those that it is given.

Rows of a batch are packed: a token's position is not its index. A decoder that counts positions itself, by arange or a
running sum, would give wrong tokens without any error. So a trial pass follows such numbers through all functions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexengine.errors import UnsupportedModel

_MAKERS = {torch.arange, torch.linspace, torch.tensor}
_SUMS = {torch.cumsum, Tensor.cumsum}


class Watch(TorchFunctionMode):
    """Torch function mode of a trial pass, which follows positions that the model makes.

    Args:
        tokens: number of tokens of the pass, which nothing else has.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._made: dict[int, Tensor] = {}  # by id; what a dict holds keeps its id
        self._filled: dict[int, tuple[Tensor, Any]] = {}  # tensors of one number, by id, and the number

    def made(self, *tensors: Tensor) -> bool:
        """Return whether a tensor was computed from positions that the model made."""
        return any(id(x) in self._made for x in tensors)

    def blocks(self, ids: Tensor) -> Any:
        """Return a mask function that adds the blocks of `ids`, one for each token, to another mask: none, as all are
        -1. Raise UnsupportedModel if they may be others."""
        if self._filled.get(id(ids), (ids, 0))[1] != -1:
            raise UnsupportedModel("its mask depends on the tokens")
        return lambda *_: torch.zeros((), dtype=torch.bool)

    @staticmethod
    def chunks(size: int, padding: Tensor) -> Any:
        """Return a mask function that adds chunks of `size` tokens to another mask, for rows without padding."""
        return lambda batch, head, query, key: query // size == key // size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MAKERS:
            made = isinstance(out, Tensor) and out.numel() == self._tokens
        elif func in _SUMS:
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            made = isinstance(dim, int) and out.shape[dim] == self._tokens
        elif (number := self._number(func, args, kwargs)) is not None:
            self._filled[id(out)] = out, number
            return out
        else:
            made = bool(self._made) and self._any((args, kwargs))
        if made:
            self._note(out)
            if args and isinstance(args[0], Tensor) and (out is None or func.__name__.endswith("_")):  # in place
                self._note(args[0])
        return out

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the number that a call fills a tensor with; None if that is not known."""
        if func in (torch.full, torch.zeros_like):
            return 0 if func is torch.zeros_like else [*args, *kwargs.values()][1]
        if func not in (Tensor.__getitem__, Tensor.__eq__, torch.where):
            return None
        first, *rest = (self._filled.get(id(x), (x, x))[1] for x in args)
        if isinstance(first, Tensor):
            return None
        found = first == rest[0] if func is Tensor.__eq__ else rest[not first] if func is torch.where else first
        return None if isinstance(found, Tensor) else found

    def _any(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return id(value) in self._made
        if isinstance(value, dict):
            return self._any(tuple(value.values()))
        return isinstance(value, tuple | list) and any(self._any(item) for item in value)

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._made[id(value)] = value
        elif isinstance(value, tuple | list):
            for item in value:
                self._note(item)

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Follow also through the model's linear layers, whose products are hidden from modes, and from its buffers
        of positions."""

        def after(module: nn.Module, args: Any, out: Any) -> None:
            if self._any(args):
                self._note(out)

        hooks = [m.register_forward_hook(after) for m in model.modules() if isinstance(m, nn.Linear)]
        for name, buffer in model.named_buffers():
            if "position_ids" in name and not buffer.is_floating_point():
                self._note(buffer)
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
