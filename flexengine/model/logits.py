"""The step from the output projection's result to the logits: a factor, a soft cap, or nothing.

The step is part of the model's own forward function, after the projection. To apply it to parts of the logits, the
function is called with a module in place of the decoder that computes nothing.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


class _Output:
    """Output of a decoder that computes nothing. Fields other than the hidden states are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class _NoDecoder(nn.Module):
    """Stands for the decoder, and for the modules in it that a forward function calls."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.hidden)


class LogitStep:
    """Computes logits from parts of the output projection's result.

    Attributes:
        given: the part that the output projection returns in place of its own result; None outside of a call.
    """

    def __init__(self, model: nn.Module, decoder: str, width: int) -> None:
        """Take the step from a model.

        Args:
            model: a causal language model with a PausingHead.
            decoder: name of the model's child that holds the decoder layers.
            width: elements of a hidden state.
        """
        self._model, self._decoder, self._width = model, decoder, width
        self.given: Tensor | None = None

    def __call__(self, part: Tensor) -> Tensor:
        """Return the logits of a part: [1, tokens, any part of the vocabulary]."""
        modules, ids = self._model._modules, torch.zeros(1, part.shape[1], dtype=torch.int64, device=part.device)
        decoder = modules[self._decoder]
        modules[self._decoder] = _NoDecoder(part.new_zeros(1, part.shape[1], self._width))
        self.given = part
        try:
            logits: Tensor = self._model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=0).logits
        finally:
            modules[self._decoder], self.given = decoder, None
        return logits

    @cached_property
    def fault(self) -> str | None:
        """Return why logits cannot be computed part by part; None if they can."""
        part = torch.linspace(-30, 30, 64, dtype=torch.float32).view(1, 2, 32)
        try:
            whole, pieces = self(part), [self(piece) for piece in torch.split(part, 5, dim=-1)]
        except Exception as error:
            return f"its forward function fails on a part of the logits ({error or type(error).__name__})"
        same = whole.shape == part.shape and torch.equal(whole, torch.cat(pieces, dim=-1))
        return None if same else "its logits depend on those of other tokens"
