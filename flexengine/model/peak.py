"""The most bytes of tensors that exist at once, without their memory."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexengine.model.forward import Layer
from flexengine.model.skeleton import TRIAL_TOKENS


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that exist at once, of those made while the mode is active. They are on the meta
    device, so none takes memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            return out  # a trial converts narrow weights, which products read as they are
        before = {id(x.untyped_storage()) for x in args if isinstance(x, Tensor)}  # of views, and changed in place
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and id(storage := x.untyped_storage()) not in before:
                self._now += (nbytes := storage.nbytes())
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._ended, nbytes)
        return out

    def _ended(self, nbytes: int) -> None:
        self._now -= nbytes

    def held_beside(self, hidden: Tensor) -> int:
        """Return the bytes of the tensors that exist now, without hidden states."""
        return self._now - hidden.untyped_storage().nbytes()


def bytes_beside(skeleton: Any) -> int:
    """Return the most bytes that a pass holds for each token between layers, beside hidden states: the output of the
    embedding, positions, and what else its layers get, such as inputs of each layer in Gemma 3n."""
    most = 0
    with Peak() as peak:
        for event in skeleton.trial():
            if isinstance(event, Layer) and event.index:
                most = max(most, peak.held_beside(event.hidden))
    return -(-most // TRIAL_TOKENS)
