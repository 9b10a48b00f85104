"""Plain values that all other modules import: sizes, sampling parameters, results. No torch here."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flexengine.errors import InvalidInput, shown
from flexengine.records import Limit, as_whole, check, named_fields, refuse

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_LARGEST_SIZE = 2**60  # bytes; more than any machine has


def parse_size(text: str | int, option: str) -> int:
    """Return the bytes of a size such as 800M, 1.5GB, 16GiB or 123456. Raise InvalidInput if the text is no positive
    size; the message names the option."""
    text = as_whole(text)
    if isinstance(text, int) and not isinstance(text, bool):
        size: float = text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
        if match is None or match[2] not in _UNITS:
            raise InvalidInput(f"{option} is {shown(text)}; it must be a number of bytes, or one with a unit such as"
                               " 800M, 1.5GB or 16GiB")  # fmt: skip
        size = float(match[1]) * _UNITS[match[2]]
    if not 1 <= size < _LARGEST_SIZE:
        raise InvalidInput(f"{option} is {shown(text)}; it must be at least one byte and below 2**60 bytes")
    return round(size)


DEVICE_NAME = re.compile(r"cpu|sim|cuda(:[0-9]{1,2})?")  # of an attention worker


def started_workers(given: int | Sequence[str]) -> tuple[str, ...] | None:
    """Return the device of each attention worker that is to be started, such as cpu or cuda:1; None if `given` is no
    number of processes and has no devices, but addresses of running workers."""
    if isinstance(given, int):
        return ("cpu",) * given
    return tuple(given) if given and all(map(DEVICE_NAME.fullmatch, given)) else None


MAX_STOPS = 16
_MAX_COUNT = 2**31 - 1
_ABOVE_ZERO = math.ulp(0.0)
_Penalty = Annotated[float, Limit(-2, 2), "at least -2 and at most 2 (0 is no penalty)"]


def _stop_string(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        refuse(name, value, "a string of at least one character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInput(f"{name} is {shown(value)}, with half a surrogate pair, which is no character; remove it")
    return value


_Stop = Annotated[str, _stop_string]


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    """Return biases by token id. Nulls are left out, as columns of tables have a field for the tokens of all rows."""
    wanted = "an object of numbers from -100 to 100 by token id"
    try:
        pairs = [(as_whole(key), bias) for key, bias in dict(value).items() if bias is not None]
    except (TypeError, ValueError):
        refuse(name, value, wanted)
    for key, bias in pairs:
        if not re.fullmatch(r"[0-9]{1,10}", str(key)):
            refuse(f"a key of {name}", key, "a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            refuse(f"{name} of token {key}", bias, "a number from -100 to 100")
    return {int(key): float(bias) for key, bias in pairs} or None


def _bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        refuse(name, value, "a list of texts, or of lists of token ids")
    return tuple(_bad_word(f"{name}[{i}]", word) for i, word in enumerate(words))


def _bad_word(name: str, word: Any) -> str | tuple[int, ...]:
    if isinstance(word, str) and word.strip():
        return _stop_string(name, word)
    tokens = tuple(map(as_whole, word)) if isinstance(word, list | tuple) else ()
    if tokens and all(type(token) is int and token >= 0 for token in tokens):
        return tokens
    refuse(name, word, "a text that is not blank, or a list of token ids")


# Arguments of transformers' apply_chat_template, which are no variables of a template.
_ARGUMENTS = """self conversation conversations messages tools chat_template add_generation_prompt
    continue_final_message tokenize sanitize_control_tokens padding truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs"""


def _template_variables(name: str, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        refuse(name, value, "an object of variables for the chat template")
    if unknown := [key for key in value if not isinstance(key, str) or key in _ARGUMENTS.split()]:
        fault = f"{name} has {shown(unknown[0])}, which is no variable of a chat template"
        raise InvalidInput(f"{fault}; remove it, or give it as a field of the row")
    variables = {key: each for key, each in value.items() if each is not None}
    try:
        json.dumps(variables, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} has a value that JSON cannot hold: {error}") from error
    return variables or None


@named_fields
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a sequence. Lists become tuples; a single string for `stop` becomes a tuple of one.

    Attributes:
        max_tokens: most tokens generated per prompt and sample.
        temperature: logits are divided by this number before sampling; 0 is greedy.
        seed: in [-2**63, 2**64). The seed, the row's index, the sample's number and the token's number determine all
            sampling noise. A row with a field `seed` counts as row 0, so its text does not depend on its place.
        ignore_eos: continue after an end-of-sequence token. `stop` and `stop_token_ids` still end a continuation.
        min_tokens: end tokens, stop tokens and stop strings do not end a continuation before it has this many tokens.
        top_k: sample from the k most likely tokens; 0 is all.
        top_p: sample from the smallest set of most likely tokens whose probability reaches p; in (0, 1], 1 is all.
        min_p: sample from tokens at least min_p times as likely as the likeliest; in [0, 1], 0 is all.
        repetition_penalty: positive logits of tokens in prompt or continuation are divided by this number, negative
            logits are multiplied.
        presence_penalty: subtracted from the logits of tokens generated before; in [-2, 2].
        frequency_penalty: subtracted once for every time a token was generated before; in [-2, 2].
        logit_bias: numbers in [-100, 100] by token id, which are added to the logits before all else.
        bad_words: texts that are not generated. The last token of such a text gets probability 0 where the tokens
            before it are the others of the text. A text stands for its tokens with and without a space before it. A
            list of token ids may be given instead of a text.
        stop: at most 16 strings. A continuation ends when its text contains one of them; the text is cut before it.
        stop_token_ids: tokens that end a continuation, as the model's own end tokens do.
        n: continuations per prompt, 1 to 128.
        logprobs: None returns no log probabilities, 0 those of the generated tokens, k (at most 20) also those of the
            k most likely tokens at every position.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}. A row's own variables
            are added to those of all rows.
        add_generation_prompt: end a chat with the beginning of the assistant's answer.
        continue_final_message: continue the last message of a chat instead; add_generation_prompt then has no effect.

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.

    Examples:
        >>> SamplingParams(max_tokens=64, temperature=0.7, seed=1, stop=["\\n\\n"])
    """

    max_tokens: Annotated[int, Limit(1, _MAX_COUNT)] = 128
    temperature: Annotated[float, Limit(0), "0 (greedy) or a positive number"] = 0.0
    seed: Annotated[int, Limit(-(2**63), 2**64 - 1), "a whole number of at least -2**63 and below 2**64"] = 0
    ignore_eos: bool = False
    top_k: Annotated[int, Limit(0, _MAX_COUNT), "a whole number of at least 0 (0 keeps all tokens) and below 2**31"] = 0
    top_p: Annotated[float, Limit(_ABOVE_ZERO, 1), "above 0 and at most 1 (1 keeps all tokens)"] = 1.0
    min_p: Annotated[float, Limit(0, 1), "at least 0 (0 keeps all tokens) and at most 1"] = 0.0
    repetition_penalty: Annotated[float, Limit(_ABOVE_ZERO), "a positive number (1 is no penalty)"] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    stop: Annotated[tuple[_Stop, ...], Limit(0, MAX_STOPS), f"a string or a list of at most {MAX_STOPS} strings"] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Limit(0, _MAX_COUNT)], ...], "a list of token ids"] = ()
    n: Annotated[int, Limit(1, 128)] = 1
    logprobs: Annotated[int | None, Limit(0, 20), ", or left out for none"] = None
    min_tokens: Annotated[int, Limit(0, _MAX_COUNT)] = 0
    logit_bias: Annotated[Mapping[int, float] | None, _logit_bias] = field(default=None, hash=False)
    bad_words: Annotated[tuple[str | tuple[int, ...], ...], _bad_words] = ()
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, _template_variables] = field(default=None, hash=False)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it")

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template` that the chat's fields stand for."""
        begins = self.add_generation_prompt and not self.continue_final_message
        only_if_set = {"continue_final_message": True} if self.continue_final_message else {}
        return {"add_generation_prompt": begins, **only_if_set, **(self.chat_template_kwargs or {})}


@dataclass
class Completion:
    """One continuation of a prompt.

    Attributes:
        generated_text: text that continues the prompt's, without special tokens, cut before the first stop string; None
            if the checkpoint has no tokenizer.
        token_ids: all generated tokens, including the token that ended the continuation.
        finish_reason: "stop" (end-of-sequence token, stop token or stop string) or "length" (max_tokens).
        logprobs: None if `SamplingParams.logprobs` is None, else one entry per token of `token_ids`: {"token_id": int,
            "token": str or None, "logprob": float, "top_logprobs": [{"token_id", "token", "logprob"}, ...]}.
            A logprob is the natural logarithm of the model's own probability of the token at that position, before
            penalties, temperature, top_k, top_p and min_p. top_logprobs begins with the likeliest token, and is empty
            for logprobs=0.
    """

    generated_text: str | None
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str | None:
        """Return `generated_text`, as vLLM names it."""
        return self.generated_text


Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]  # text, messages of a chat, or token ids


@dataclass
class Score:
    """Log probability of a given continuation, or of a text.

    Attributes:
        logprob: natural logarithm of its probability: the sum over its tokens.
        tokens: number of its tokens.
        is_greedy: whether each token is the most likely one at its position.
    """

    logprob: float
    tokens: int
    is_greedy: bool


@dataclass
class Result:
    """Result of one prompt; the fields of an output row, and the prompt.

    generated_text, token_ids, finish_reason and logprobs are as in Completion, and those of the first sample if n > 1.

    Attributes:
        index: number of the row.
        generated_text: text without special tokens; None if the checkpoint has no tokenizer, or if `error` is set.
        token_ids: all generated tokens; empty if `error` is set.
        finish_reason: "stop" or "length"; None if `error` is set.
        prompt_tokens: tokens of the prompt.
        completion_tokens: generated tokens, summed over all samples.
        error: why the row could not be run or finished; None if it was finished.
        logprobs: one entry per token of `token_ids`; None if they were not requested.
        samples: all n completions if n > 1, else None.
        scores: for a row that is scored, one Score per choice; else None.
        prompt: the prompt as it was given, not copied: text, messages or token ids. None if the row has none, and for
            rows of a file, whose output has the row's own fields.

    Examples:
        >>> for result in engine.generate(["Hello", "Good morning"]):
        ...     print(result.prompt, result.error or result.generated_text)
    """

    index: int
    generated_text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    samples: list[Completion] | None = None
    scores: list[Score] | None = None
    prompt: Prompt | None = None

    @property
    def outputs(self) -> list[Completion]:
        """Return all completions, as vLLM names them: one, or the n of `samples`; none if `error` is set."""
        one = Completion(self.generated_text, self.token_ids, self.finish_reason, self.logprobs)
        return [] if self.error is not None else self.samples or [one]

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the log probabilities of `token_ids`; None without `logprobs`."""
        return None if self.logprobs is None else math.fsum(entry["logprob"] for entry in self.logprobs)

    @property
    def is_greedy(self) -> bool | None:
        """Return whether each of `token_ids` is the most likely token at its position; None if this is unknown, without
        `logprobs` of at least 1."""
        if self.logprobs is None or not all(entry["top_logprobs"] for entry in self.logprobs):
            return None
        return all(entry["token_id"] == entry["top_logprobs"][0]["token_id"] for entry in self.logprobs)

    def columns(self) -> dict[str, Any]:
        """Return the fields of an output row by name: all but `prompt`."""
        return {name: value for name, value in vars(self).items() if name != "prompt"}


def cache_root() -> Path:
    """Return $FLEXENGINE_CACHE, or ~/.cache/flexengine. The directory is not created. Raise InvalidInput if the home
    directory is unknown."""
    text = os.environ.get("FLEXENGINE_CACHE") or "~/.cache/flexengine"
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"{text} is no directory: {error}; set FLEXENGINE_CACHE to a directory") from error


def mark_used(path: Path) -> None:
    """Set the modification time of a file or directory in the cache to now, as `flexengine cache` shows the time of
    last use. Nothing happens if the cache cannot be written."""
    with suppress(OSError):
        os.utime(path)


def sync_path(path: Path) -> None:
    """Write what the system holds of a file, or of the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
