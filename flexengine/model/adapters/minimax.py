"""MiniMax: lightning attention of a prompt's later pieces goes block by block, as that of its first piece.

transformers' module goes token by token if its cache has a state, which rounds otherwise than blocks do. Here a piece
of a prompt finds no state in the cache, and the sum that blocks begin with is the state instead of zeros.
"""

import inspect
import threading
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_given = threading.local()  # .state: the state that the running module was given


class _Torch:
    """The functions of torch, but for `zeros`, which gives the state."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: int, **options: Any) -> Tensor:
        return torch.zeros(*shape, **options) if _given.state is None else _given.state


class _Piece:
    """The cache of a piece of a prompt, which has no state."""

    def __init__(self, cache: Any) -> None:
        self.set_linear_cache = cache.set_linear_cache

    def get_linear_cache(self, layer_idx: int) -> None:
        return None


def with_states(forward: Any) -> Any:
    """Return a module's forward whose blocks begin with the given state. Its code and its module stay as they are."""
    own: Any = inspect.unwrap(forward)
    function = FunctionType(own.__code__, {**own.__globals__, "torch": _Torch()}, own.__name__, own.__defaults__)

    def forward_with_states(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Any:
        _given.state, decodes = cache.get_linear_cache(self.layer_idx), hidden_states.shape[1] == 1
        try:
            return function(self, hidden_states, None, attention_mask, cache if decodes else _Piece(cache))
        finally:
            _given.state = None

    return forward_with_states
