"""Options of the rows of a gpu_batch as vectors, and the logits that they change, for `kernels.sampling`."""

import sys
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from flexengine.kernels.sampling import Edits, RowOptions, choose_tokens
from flexengine.model.sample import NONFINITE, Draw, Sampled

WORD = 32  # bits of a token id; a row and an id are one number, which sorts by row


def drawn(logits: Tensor, draws: Sequence[Draw], points: Sequence[float]) -> list[Sampled]:
    """Return what `sample` does, with its noise. points: one number of [0, 1) per row."""
    logits = logits.float()
    given = [d.sampling for d in draws]
    numbers = [[getattr(s, name) for s in given] for name in ("temperature", "top_p", "min_p")]
    temperature, top_p, min_p = torch.tensor(numbers, dtype=torch.float64)
    listed = torch.tensor([-1 if s.logprobs is None else s.logprobs for s in given])
    noise, top_k = torch.tensor(points, dtype=torch.float64), torch.tensor([s.top_k for s in given])
    found = choose_tokens(logits, RowOptions(temperature, top_k, top_p, min_p, noise, listed), edits(logits, draws))
    results = list[Sampled]()
    for s, token, logprob, *top in zip(given, *(column.tolist() for column in found), strict=True):
        if s.logprobs is None or token == NONFINITE:
            results.append(Sampled(token, None, ()))
            continue
        pairs = zip(*(column[: s.logprobs] for column in top), strict=True)
        results.append(Sampled(token, logprob, tuple(pair for pair in pairs if pair[0] >= 0)))
    return results


def edits(logits: Tensor, draws: Sequence[Draw]) -> Edits:
    """Return the values of all tokens that biases, bad words, a continuation's least length or penalties change.

    Tokens beyond the vocabulary are left out, as the embedding may have more rows than the head.
    """
    biased, amounts = _biases(draws)
    forbidden = _numbers((row, _forbidden(draw)) for row, draw in enumerate(draws))
    seen = _numbers(
        (row, chain(d.prompt, d.generated)) for row, d in enumerate(draws) if d.sampling.repetition_penalty != 1
    )
    again = _numbers((row, d.generated) for row, d in enumerate(draws) if _counts(d))
    parts = (biased, forbidden, seen, again)
    if not any(map(len, parts)):
        none = torch.empty(0, dtype=torch.int64)
        return Edits(torch.zeros(len(draws) + 1, dtype=torch.int64), none, none, none.double())
    keys, places = np.unique(np.concatenate(parts), return_inverse=True)
    known = (keys & ((1 << WORD) - 1)) < logits.shape[1]
    first = torch.from_numpy(np.searchsorted(keys[known], np.arange(len(draws) + 1) << WORD))
    rows, ids = torch.from_numpy(keys[known] >> WORD), torch.from_numpy(keys[known] & ((1 << WORD) - 1))
    if not known.any():
        return Edits(first, rows, ids, torch.empty(0, dtype=torch.float64))
    at_bias, at_forbidden, at_seen, at_again = np.split(places, np.cumsum([len(part) for part in parts])[:-1])
    numbers = np.zeros((4, len(keys)))
    bias, penalty, less, banned = numbers
    bias[at_bias], banned[at_forbidden] = amounts, 1
    given = [(d.sampling.repetition_penalty, d.sampling.presence_penalty, d.sampling.frequency_penalty) for d in draws]
    repetition, presence, frequency = np.array(given, dtype=np.float64)[keys >> WORD].T
    penalty[:] = 1
    penalty[at_seen] = repetition[at_seen]
    counts = np.bincount(at_again, minlength=len(keys))
    less[:] = np.where(counts > 0, presence + frequency * counts, 0)
    on_device = (x.to(logits.device, non_blocking=True) for x in (rows, ids, torch.from_numpy(numbers[:, known])))
    rows, ids, edited = on_device
    return Edits(first, rows, ids, _edited(logits[rows, ids], *edited))


def _edited(old: Tensor, bias: Tensor, penalty: Tensor, less: Tensor, forbidden: Tensor) -> Tensor:
    """Return the values that replace logits, fp64. old: fp32; the others: fp64, all of one shape."""
    old = (old + bias.float()).double().masked_fill(forbidden > 0, -torch.inf)
    new = torch.where(old < 0, old * penalty, old / penalty)
    new = new.clamp(-sys.float_info.max, sys.float_info.max)  # an extreme penalty must not make infinities
    return torch.where(old.isinf(), old, new) - less


def _numbers(rows: Iterable[tuple[int, Iterable[int]]]) -> np.ndarray:
    """Return row << WORD | token of all tokens of the rows, int64."""
    parts = [np.fromiter(tokens, np.int64) + (row << WORD) for row, tokens in rows]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _biases(draws: Sequence[Draw]) -> tuple[np.ndarray, np.ndarray]:
    """Return the biased tokens, as `_numbers` does, and what is added to their logits."""
    parts = [(row, d.sampling.logit_bias) for row, d in enumerate(draws) if d.sampling.logit_bias]
    return (
        _numbers((row, [*bias]) for row, bias in parts),
        np.fromiter(chain.from_iterable(bias.values() for _, bias in parts), np.float32),
    )


def _counts(draw: Draw) -> bool:
    return draw.sampling.presence_penalty != 0 or draw.sampling.frequency_penalty != 0


def _forbidden(draw: Draw) -> set[int]:
    """Return the tokens that bad words or a continuation's least length forbid."""
    s = draw.sampling
    forbidden = {*s.stop_token_ids} if len(draw.generated) < s.min_tokens else set[int]()
    longest = max(map(len, s.bad_words), default=0)
    before = (*draw.prompt[-longest:], *draw.generated[-longest:]) if longest > 1 else ()
    for word in s.bad_words:
        begin = tuple(word[:-1])
        if len(begin) <= len(before) and before[len(before) - len(begin) :] == begin:
            forbidden.add(int(word[-1]))
    return forbidden
