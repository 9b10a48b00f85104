"""Sampling of the next token of each row, and scores of given tokens.

Noise is a pure function of (seed, row, sample, token index), and each row is computed alone, so a row's tokens are
independent of its batch.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.config import SamplingParams
from flexengine.errors import library_faults

NONFINITE = -1  # replaces a token id if the logits hold NaN or +inf, or only -inf


class Draw(NamedTuple):
    """Parameters of the choice of one row's next token. Row, sample and seed determine the noise."""

    sampling: SamplingParams  # as `Stops.resolved` returns them: bad words are token ids
    row: int  # number of the prompt in the job; 0 for a prompt with a seed of its own
    sample: int  # number of the continuation, of n continuations of the prompt
    prompt: Sequence[int]  # token ids
    generated: Sequence[int]  # token ids so far; the next token has index len(generated)


class Sampled(NamedTuple):
    """A row's next token."""

    token: int  # its id, or NONFINITE
    # Natural logarithm of its probability without penalties and temperature; None if not requested.
    logprob: float | None
    # (Token id, logprob) of the most likely tokens, most likely first, of equal ones the lower id first. Tokens of
    # probability 0 are left out.
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, row: int, sample: int, token: int) -> float:
    """Return a number in [0, 1) that is a pure function of its arguments; token 0 is the first generated one."""
    digest = hashlib.blake2b(f"{seed}/{row}/{sample}/{token}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Return the next token of each row.

    The steps are, in this order and as in transformers: logit bias, in fp32; tokens that min_tokens and bad_words
    forbid; repetition penalty; presence and frequency penalty; at temperature 0 the largest logit, of equal ones the
    lowest id; otherwise temperature, top-k, top-p, min-p, one draw.

    * top-k keeps the tokens that are at least as likely as the k-th, so more than k if several equal the k-th.
    * top-p applies to the distribution after top-k: a token stays if the tokens before it, ordered by probability and
      then by lower id, have a sum below p.
    * min-p keeps tokens that are at least min_p times as likely as the most likely one.
    * The draw takes the first token, by id, at which the running sum of the remaining weights exceeds `uniform` times
      their total.

    The largest logit is found in fp32. All other steps run in fp64, row by row, with a few vectors of the vocabulary's
    size as scratch memory.

    Args:
        logits: fp32 [rows, vocabulary], on any device; -inf forbids a token.
        draws: one per row.
    """
    # Of equal logits both take the first, and NaN before others; numpy takes a sixth of torch's time.
    on_cpu = logits.device.type == "cpu"
    largest = torch.from_numpy(logits.detach().numpy().argmax(axis=-1)) if on_cpu else logits.argmax(dim=-1)
    finite = logits.gather(-1, largest[:, None])[:, 0].isfinite()
    tokens: list[int] = torch.where(finite, largest, NONFINITE).tolist()
    return [
        Sampled(token, None, ()) if token == NONFINITE or _plain(draw) else _row(logits[i].double(), draw)
        for i, (token, draw) in enumerate(zip(tokens, draws, strict=True))
    ]


def logprob_entry(sampled: Sampled, tokenizer: Any) -> dict[str, Any]:
    """Return a Sampled with a logprob as an entry of `Completion.logprobs`; "token" is None without a tokenizer. Raise
    InvalidInput if a token cannot be decoded."""
    pairs = [(sampled.token, sampled.logprob), *sampled.top]
    first, *top = ({"token_id": t, "token": _text(t, tokenizer), "logprob": value} for t, value in pairs)
    return {**first, "top_logprobs": top}


def _text(token: int, tokenizer: Any) -> str | None:
    """Return the text that a token adds. Some tokenizers drop the leading space of a token that is decoded alone."""
    if tokenizer is None:
        return None
    with library_faults(f"token {token} cannot be decoded"):
        once: str = tokenizer.decode([token])
        twice: str = tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def _plain(draw: Draw) -> bool:
    """Return whether a row needs only its largest logit."""
    s = draw.sampling
    if s.logit_bias or s.bad_words or len(draw.generated) < s.min_tokens:
        return False
    penalises = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return s.temperature == 0 and s.logprobs is None and not penalises


def _row(row: Tensor, draw: Draw) -> Sampled:
    """Return the next token of one row, fp64 [vocabulary], whose largest value is finite."""
    k = draw.sampling.logprobs
    allowed = _allowed(row, draw)
    if allowed is not row and allowed.max() == -torch.inf:
        return Sampled(NONFINITE, None, ())
    token = _choose(_penalised(allowed, draw), draw)
    if k is None:
        return Sampled(token, None, ())
    logprobs = row.log_softmax(0)
    return Sampled(token, float(logprobs[token]), _most_likely(logprobs, k))


def _allowed(row: Tensor, draw: Draw) -> Tensor:
    """Return the row with logit biases, and -inf for tokens that bad words or a continuation's least length forbid."""
    s, size = draw.sampling, len(row)
    if bias := {token: number for token, number in (s.logit_bias or {}).items() if token < size}:
        ids = torch.tensor([*bias], device=row.device)
        added = torch.tensor([*bias.values()], dtype=torch.float32, device=row.device)
        row = row.index_copy(0, ids, (row[ids].float() + added).to(row))
    forbidden = {*s.stop_token_ids} if len(draw.generated) < s.min_tokens else set[int]()
    longest = max(map(len, s.bad_words), default=0)
    before = (*draw.prompt[-longest:], *draw.generated[-longest:]) if longest > 1 else ()
    for word in s.bad_words:
        begin = tuple(word[:-1])
        if len(begin) <= len(before) and before[len(before) - len(begin) :] == begin:
            forbidden.add(int(word[-1]))
    ids = torch.tensor([token for token in forbidden if token < size], dtype=torch.int64, device=row.device)
    return row.index_fill(0, ids, -torch.inf) if len(ids) else row


def _penalised(row: Tensor, draw: Draw) -> Tensor:
    s = draw.sampling
    if s.repetition_penalty != 1:
        seen, _ = _counts([*draw.prompt, *draw.generated], row)
        old = row[seen]
        new = torch.where(old < 0, old * s.repetition_penalty, old / s.repetition_penalty)
        new = new.clamp(-sys.float_info.max, sys.float_info.max)  # an extreme penalty must not make infinities
        row = row.index_copy(0, seen, torch.where(old.isinf(), old, new))
    if s.presence_penalty or s.frequency_penalty:
        seen, counts = _counts(draw.generated, row)
        row = row.index_add(0, seen, s.presence_penalty + s.frequency_penalty * counts, alpha=-1)
    return row


def _counts(tokens: Sequence[int], row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens below the row's length, as the embedding may have more rows than the head, and their
    counts, in the row's dtype and on its device."""
    ids, counts = torch.unique(torch.tensor([*tokens], dtype=torch.int64), return_counts=True)
    inside = ids < len(row)
    return ids[inside].to(row.device), counts[inside].to(row)


def _choose(row: Tensor, draw: Draw) -> int:
    s = draw.sampling
    if s.temperature == 0:
        return int(row.argmax())
    # Relative to the largest logit, so that a temperature near 0 gives exp(-inf) = 0 and not inf - inf.
    ids, weights = _candidates((row - row.max()) / s.temperature, s)
    running = weights.cumsum(0)
    total = running[-1]
    point = total * uniform(s.seed, draw.row, draw.sample, len(draw.generated))
    point = point.minimum(total.nextafter(torch.zeros_like(total)))  # the product may round up to the total
    return int(ids[torch.searchsorted(running, point, right=True)])


def _candidates(scaled: Tensor, s: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the ids that may be drawn, ascending, and their probabilities relative to the most likely token."""
    weights = scaled.exp()
    if 0 < s.top_k < len(scaled):
        weights = weights.masked_fill(scaled < scaled.topk(s.top_k).values[-1], 0)
    # Tokens of weight 0 are removed: a parallel running sum may change at them by rounding.
    ids = weights.nonzero()[:, 0]
    weights = weights[ids]
    if s.top_p < 1:
        inside = _nucleus(weights, s.top_p)
        ids, weights = ids[inside], weights[inside]
    if s.min_p > 0:
        probable = weights >= s.min_p
        ids, weights = ids[probable], weights[probable]
    return ids, weights


def _nucleus(weights: Tensor, p: float) -> Tensor:
    """Return the positions, ascending, of the tokens that top-p keeps."""
    total = weights.sum()
    # Tokens below this weight sum to at most (1 - p) / 2, so top-p removes them in any case; fewer tokens sort faster.
    likely = (weights > (1 - p) / 2 * total / len(weights)).nonzero()[:, 0]
    falling, order = weights[likely].sort(descending=True, stable=True)
    ahead = torch.nn.functional.pad(falling.cumsum(0)[:-1], (1, 0))
    return likely[order[ahead < p * total]].sort().values


def _most_likely(logprobs: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """Return the k most likely tokens. torch.topk alone does not define which of several equal ones it takes."""
    if k == 0:
        return ()
    least = logprobs.topk(min(k, len(logprobs))).values[-1]
    ids = ((logprobs >= least) & logprobs.isfinite()).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:k]].tolist(), values[:k].tolist(), strict=True))


# Scores of given tokens, without all logits in memory at once: the output projection is computed for some positions at
# a time, and, if it is streamed, for one chunk of the vocabulary at a time. Of each part remain, per position, the
# largest logit and its token, the sum of exponentials relative to it, and the logit of the given token:
#
#     log p(token) = logit(token) - max - log(sum over the vocabulary of exp(logit - max))
#
# The step from the output projection's result to the logits (a factor, a soft cap, or nothing) is part of the model's
# own forward function. To apply it to parts, the function is called with a module in place of the decoder that computes
# nothing.


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

    Args:
        model: a causal language model with a PausingHead.
        decoder: name of the model's child that holds the decoder layers.
        width: elements of a hidden state.
    """

    def __init__(self, model: nn.Module, decoder: str, width: int) -> None:
        self._model, self._decoder, self._width = model, decoder, width
        # The part that the output projection returns in place of its own result; None outside of a call.
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
