"""Sampling of the next token of each row, and the step from the output projection to the logits.

Noise is a pure function of (seed, row, sample, token index), and no result of a row depends on other rows, so a row's
tokens are independent of its batch.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pkgutil import resolve_name
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

    The largest logit is found in fp32. All other steps run in fp64, for all rows together, and without sorting the
    vocabulary (`kernels.sampling`).

    Args:
        logits: fp32 [rows, vocabulary], on any device; -inf forbids a token.
        draws: one per row.
    """
    if not all(map(_plain, draws)):
        drawn = resolve_name("flexengine.model.drawing:drawn")  # not in greedy jobs
        points = [uniform(d.sampling.seed, d.row, d.sample, len(d.generated)) for d in draws]
        found: list[Sampled] = drawn(logits, draws, points)
        return found
    # Of equal logits both take the first, and NaN before others; numpy takes a sixth of torch's time.
    on_cpu = logits.device.type == "cpu"
    largest = torch.from_numpy(logits.detach().numpy().argmax(axis=-1)) if on_cpu else logits.argmax(dim=-1)
    finite = logits.gather(-1, largest[:, None])[:, 0].isfinite()
    return [Sampled(token, None, ()) for token in torch.where(finite, largest, NONFINITE).tolist()]


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


# Scores (scores.py) need logits of a part of the vocabulary. The step from the output projection's result to the logits
# (a factor, a soft cap, or nothing) is part of the model's own forward function. To apply it to parts, the function is
# called with a module in place of the decoder that computes nothing.


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
