"""Scores of given tokens, without all logits in memory at once.

The output projection is computed for some positions at a time, and, if it is streamed, for one chunk of the vocabulary
at a time. Of each part remain, per position, the largest logit and its token, the sum of exponentials relative to it,
and the logit of the given token:

    log p(token) = logit(token) - max - log(sum over the vocabulary of exp(logit - max))
"""

import torch
from torch import Tensor

from flexengine.model.sample import NONFINITE, Sampled


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
        logits: [n, tokens], of positions row .. row + n - 1 and tokens token .. token + tokens - 1. Parts of one
        position come in rising order of tokens."""
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
