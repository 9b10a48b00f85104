"""The next token of each row. Noise is a pure function of (seed, row, sample, token index), and a row is computed
alone, so batching cannot change what it gets."""

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.config import SamplingParams

NONFINITE = -1  # in place of a token: the logits held NaN or +inf, or nothing but -inf


class Draw(NamedTuple):
    """How one row of logits becomes a token.

    row, sample: which prompt of the job and which of its n continuations; with the seed they choose the noise.
    prompt, generated: token ids so far; len(generated) is the index of the token to come.
    forced: tokens to take instead of choosing, if there are any.
    """

    sampling: SamplingParams
    row: int
    sample: int
    prompt: Sequence[int]
    generated: Sequence[int]
    forced: Sequence[int] = ()


class Sampled(NamedTuple):
    """A row's next token.

    token: its id, or NONFINITE.
    logprob: natural logarithm of the model's own probability of it; None if not asked for.
    top: (token id, logprob) of the most likely tokens, likeliest first, the lower id first where they are equal;
    tokens of probability 0 are left out.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, row: int, sample: int, token: int) -> float:
    """A number in [0, 1) that depends on its four arguments and nothing else; token 0 is the first generated."""
    digest = hashlib.blake2b(f"{seed}/{row}/{sample}/{token}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """The next token of each row of logits `[rows, vocabulary]`, fp32, on any device; -inf forbids a token.

    In this order, as in transformers: repetition penalty; presence and frequency penalty; at temperature 0 the
    largest logit, the lowest id among equals; otherwise temperature, top-k, top-p, min-p and one draw.
    top-k keeps tokens no less likely than the k-th, so more than k where others equal it. top-p is about the
    distribution that top-k left: a token stays if those ahead of it, by probability and then by lower id, have less
    than p together. min-p keeps tokens at least min_p times as likely as the likeliest. The draw is the first token,
    by id, at which the running sum of what is left exceeds `uniform` times its total.

    All but the largest logit is computed in fp64, one row after the other: a few vectors of the vocabulary's size.
    """
    largest = logits.argmax(dim=-1)  # of a row with NaN: where a NaN is
    finite = logits.gather(-1, largest[:, None])[:, 0].isfinite()
    tokens: list[int] = torch.where(finite, largest, NONFINITE).tolist()
    return [
        Sampled(token, None, ()) if token == NONFINITE or _plain(draw) else _row(logits[i].double(), draw)
        for i, (token, draw) in enumerate(zip(tokens, draws, strict=True))
    ]


def logprob_entry(sampled: Sampled, tokenizer: Any) -> dict[str, Any]:
    """A `Sampled` that has a logprob, as an entry of `Completion.logprobs`; "token" is None without a tokenizer."""
    pairs = [(sampled.token, sampled.logprob), *sampled.top]
    first, *top = ({"token_id": t, "token": _text(t, tokenizer), "logprob": value} for t, value in pairs)
    return {**first, "top_logprobs": top}


def _text(token: int, tokenizer: Any) -> str | None:
    """What a token adds to a text; decoded alone, it would lose its leading space with some tokenizers."""
    if tokenizer is None:
        return None
    once: str = tokenizer.decode([token])
    twice: str = tokenizer.decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def _plain(draw: Draw) -> bool:
    """Whether the largest logit is all there is to know."""
    s = draw.sampling
    return not draw.forced and s.temperature == 0 and s.logprobs is None and not _penalises(s)


def _penalises(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _row(row: Tensor, draw: Draw) -> Sampled:
    """The next token of one row `[vocabulary]`, fp64, whose largest value is finite."""
    s = draw.sampling
    if draw.forced:
        token = draw.forced[len(draw.generated)]
    else:
        token = _choose(_penalised(row, draw) if _penalises(s) else row, draw)
    if s.logprobs is None:
        return Sampled(token, None, ())
    logprobs = row.log_softmax(0)
    return Sampled(token, float(logprobs[token]), _most_likely(logprobs, s.logprobs))


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
    """Distinct tokens below the row's length, and how often each occurs, fp64; on the row's device."""
    # The embedding may have more rows than the head.
    counts = {token: count for token, count in Counter(tokens).items() if token < len(row)}
    ids = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
    return ids, torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)


def _choose(row: Tensor, draw: Draw) -> int:
    s = draw.sampling
    if s.temperature == 0:
        return int(row.argmax())
    # From the top down, so that a temperature near 0 gives exp(-inf) = 0 and not inf - inf.
    ids, weights = _candidates((row - row.max()) / s.temperature, s)
    running = weights.cumsum(0)
    total = running[-1]
    point = total * uniform(s.seed, draw.row, draw.sample, len(draw.generated))
    point = point.minimum(total.nextafter(torch.zeros_like(total)))  # the product may round up to the total
    return int(ids[torch.searchsorted(running, point, right=True)])


def _candidates(scaled: Tensor, s: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids, ascending, that may be drawn, and their weights: probabilities relative to the likeliest token's."""
    weights = scaled.exp()
    if 0 < s.top_k < len(scaled):
        weights = weights.masked_fill(scaled < scaled.topk(s.top_k).values[-1], 0)
    # Those without weight go: a parallel running sum need not stand still at them.
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
    """Positions, ascending, of the tokens that top-p keeps."""
    total = weights.sum()
    # Tokens this small have at most half of 1 - p together, so top-p cuts them in any case; the rest sort faster.
    likely = (weights > (1 - p) / 2 * total / len(weights)).nonzero()[:, 0]
    falling, order = weights[likely].sort(descending=True, stable=True)
    ahead = torch.nn.functional.pad(falling.cumsum(0)[:-1], (1, 0))
    return likely[order[ahead < p * total]].sort().values


def _most_likely(logprobs: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """The k most likely tokens; topk alone leaves open which of several equals it takes."""
    if k == 0:
        return ()
    least = logprobs.topk(min(k, len(logprobs))).values[-1]
    ids = ((logprobs >= least) & logprobs.isfinite()).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:k]].tolist(), values[:k].tolist(), strict=True))
