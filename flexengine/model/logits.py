"""Logits of parts of the vocabulary, and log probabilities of given tokens without all logits in memory at once.

The step from the output projection's result to the logits (a factor, a soft cap, or nothing) is part of the model's own
forward function. To apply it to parts, the function is called with a module in place of the decoder that computes
nothing.

For scores, the output projection is computed for some positions at a time, and, if it is streamed, for one chunk of the
vocabulary at a time. Of each part remain, per position, the largest logit and its token, the sum of exponentials
relative to it, and the logit of the given token:

    log p(token) = logit(token) - max - log(sum over the vocabulary of exp(logit - max))
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.sample import NONFINITE, Sampled


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


class Scores:
    """Running results of the positions of one forward pass.

    Args:
        targets: int64 [positions], the given tokens.
        rows: most positions whose logits are in memory at once.
    """

    def __init__(self, targets: Tensor, rows: int) -> None:
        none = torch.full(targets.shape, -torch.inf, device=targets.device)
        self.rows, self.targets = rows, targets
        self.largest, self.given = none, none.clone()  # the largest logit, and that of the target
        self.likeliest = torch.zeros_like(targets)  # token
        self.total = torch.zeros_like(none)  # sum of exp(logit - largest)
        self.finite = torch.ones_like(none, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.targets)

    def parts(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        """Return (first position, hidden states) of at most `rows` positions each. hidden: [1, positions, width]."""
        return [(row, hidden[:, row : row + self.rows]) for row in range(0, hidden.shape[1], self.rows)]

    def add(self, logits: Tensor, row: int, token: int) -> None:
        """Add the logits of some positions and tokens. Of equal logits the lowest token counts as the likeliest.

        Args:
            logits: [n, tokens], of positions row .. row + n - 1 and tokens token .. token + tokens - 1. Parts of one
                position come in rising order of tokens.
        """
        rows = slice(row, row + logits.shape[0])
        logits = logits.float()
        top, index = logits.max(-1)
        before, likeliest = self.largest[rows], self.likeliest[rows]
        self.finite[rows] &= ~(top.isnan() | (top == torch.inf))
        largest = torch.maximum(before, top)
        base = largest.masked_fill(largest == -torch.inf, 0.0)  # else -inf - -inf is NaN
        added = torch.exp(logits - base[:, None]).sum(-1)
        self.total[rows] = self.total[rows] * torch.exp(before - base) + added
        self.likeliest[rows] = torch.where(top > before, index + token, likeliest)
        self.largest[rows] = largest
        local = self.targets[rows] - token
        inside = (local >= 0) & (local < logits.shape[1])
        given = logits.gather(-1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.given[rows] = torch.where(inside, given, self.given[rows])

    def results(self) -> list[Sampled]:
        """Return each position's token, its log probability, and the likeliest token; NONFINITE if the logits hold NaN
        or +inf, or only -inf."""
        log_total = self.largest.double() + self.total.double().log()
        good = self.finite & (self.largest > -torch.inf)
        columns = (self.targets, self.given - log_total, self.likeliest, self.largest - log_total, good)
        return [
            Sampled(token, logprob, ((likeliest, best),)) if fine else Sampled(NONFINITE, None, ())
            for token, logprob, likeliest, best, fine in zip(*(column.tolist() for column in columns), strict=True)
        ]
