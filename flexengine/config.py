"""Plain values that all other modules import: sizes, sampling parameters, results. No torch here."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_LARGEST_SIZE = 2**60  # bytes; more than any machine has
_MAX_JSON_BYTES = 10_000_000  # of a policy or hardware file; the hardware file of a measured machine has some 50,000


def parse_size(text: str | int, option: str) -> int:
    """Return the bytes of a size such as 800M, 1.5GB, 16GiB or 123456.

    Raises:
        InvalidInput: the text is no positive size; the message names the option.
    """
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
    return int(size)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a sequence. Lists become tuples; a single string for `stop` becomes a tuple of one.

    Attributes:
        max_tokens: most tokens generated per prompt and sample.
        temperature: logits are divided by this number before sampling; 0 is greedy.
        seed: in [-2**63, 2**64). The seed, the row's index, the sample's number and the token's number determine all
            sampling noise.
        ignore_eos: continue after an end-of-sequence token. `stop` and `stop_token_ids` still end a continuation.
        top_k: sample from the k most likely tokens; 0 is all.
        top_p: sample from the smallest set of most likely tokens whose probability reaches p; in (0, 1], 1 is all.
        min_p: sample from tokens at least min_p times as likely as the likeliest; in [0, 1], 0 is all.
        repetition_penalty: positive logits of tokens in prompt or continuation are divided by this number, negative
            logits are multiplied.
        presence_penalty: subtracted from the logits of tokens generated before; in [-2, 2].
        frequency_penalty: subtracted once for every time a token was generated before; in [-2, 2].
        stop: at most 16 strings. A continuation ends when its text contains one of them; the text is cut before it.
        stop_token_ids: tokens that end a continuation, as the model's own end tokens do.
        n: continuations per prompt, 1 to 128.
        logprobs: None returns no log probabilities, 0 those of the generated tokens, k (at most 20) also those of the
            k most likely tokens at every position.

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.

    Examples:
        >>> SamplingParams(max_tokens=64, temperature=0.7, seed=1, stop=["\\n\\n"])
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, limit) in _WHOLE.items():
            if (value := getattr(self, name)) is not None or name != "logprobs":
                _check_whole(name, value, low, high, limit)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"ignore_eos is {shown(self.ignore_eos)}; it must be true or false")
        normal: dict[str, Any] = {name: _number(name, getattr(self, name), *limits) for name, limits in _REAL.items()}
        normal |= {"stop": _stop_strings(self.stop), "stop_token_ids": _stop_tokens(self.stop_token_ids)}
        for name, value in normal.items():
            object.__setattr__(self, name, value)


MAX_STOPS = 16
_MAX_COUNT = 2**31 - 1
_ABOVE_ZERO, _LARGEST = math.ulp(0.0), sys.float_info.max
_WHOLE: dict[str, tuple[int, int, str]] = {
    "max_tokens": (1, _MAX_COUNT, f"a whole number of at least 1 and at most {_MAX_COUNT}"),
    "seed": (-(2**63), 2**64 - 1, "a whole number of at least -2**63 and below 2**64"),
    "top_k": (0, _MAX_COUNT, f"a whole number of at least 0 (0 keeps all tokens) and at most {_MAX_COUNT}"),
    "n": (1, 128, "a whole number of at least 1 and at most 128"),
    "logprobs": (0, 20, "a whole number of at least 0 and at most 20, or left out for none"),
}
_REAL: dict[str, tuple[float, float, str]] = {
    "temperature": (0, _LARGEST, "0 (greedy) or a positive number"),
    "top_p": (_ABOVE_ZERO, 1, "above 0 and at most 1 (1 keeps all tokens)"),
    "min_p": (0, 1, "at least 0 (0 keeps all tokens) and at most 1"),
    "repetition_penalty": (_ABOVE_ZERO, _LARGEST, "a positive number (1 is no penalty)"),
    "presence_penalty": (-2, 2, "at least -2 and at most 2 (0 is no penalty)"),
    "frequency_penalty": (-2, 2, "at least -2 and at most 2 (0 is no penalty)"),
}


def _check_whole(name: str, value: object, low: int, high: int, limit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"{name} is {shown(value)}; it must be {limit}")


def _number(name: str, value: object, low: float, high: float, limit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a number")
    if not low <= value <= high:
        raise InvalidInput(f"{name} is {shown(value)}; it must be {limit}")
    return float(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)):
        raise InvalidInput(f"stop is {shown(value)}; it must be a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise InvalidInput(f"stop holds {len(texts)} strings; it must hold at most {MAX_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidInput(f"stop holds {shown(text)}; it must hold strings of at least one character")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidInput(f"stop holds {shown(text)}, with half a surrogate pair, which is no character;"
                               " remove it")  # fmt: skip
    return tuple(texts)


def _stop_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(f"stop_token_ids is {shown(value)}; it must be a list of token ids")
    for token in value:
        _check_whole("a token of stop_token_ids", token, 0, _MAX_COUNT, f"a whole number from 0 to {_MAX_COUNT}")
    return tuple(value)


_WRITTEN_AS_JSON = (type(None), bool, list, tuple, dict)
_JSON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"), (str, "a string"), ((int, float), "a number"), ((list, tuple), "an array"),
    (Mapping, "an object"),
)  # fmt: skip


def json_kind(value: object) -> str:
    """Return the kind of a value in JSON's words, such as "an array", or the name of its type if JSON has no such
    kind."""
    if value is None:
        return "null"
    return next((name for kind, name in _JSON_KINDS if isinstance(value, kind)), type(value).__name__)


def shown(value: object) -> str:
    """Return the value as text for a message, at most about 80 characters.

    null, true, false, arrays and objects are written as in JSON. Values that Python refuses to print, such as numbers
    of thousands of digits, are named by their kind.
    """
    try:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, _WRITTEN_AS_JSON) else repr(value)
    except TypeError:  # an array that holds other values than JSON's
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"{json_kind(value)} too long to print"
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair cannot be printed
    return text if len(text) <= 80 else f"{text[:76]} ..."


def meant(word: str, known: Sequence[str]) -> str | None:
    """Return the known name that the user probably meant by a word: the word itself, the one name that begins with it,
    or the most similar one. Return None if there is none, or if several names begin with the word."""
    begins = [word] if word in known else [name for name in known if word and name.startswith(word)]
    if not begins:
        import difflib

        begins = difflib.get_close_matches(word, known, 1)
    return begins[0] if len(begins) == 1 else None


def json_fault(error: ValueError | RecursionError) -> str:
    """Return why `json.loads` refused a text.

    Args:
        error: the error of `json.loads`.
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if "integer string conversion" in str(error):  # Python's own message advises to change an interpreter setting
        return f"a whole number has over {sys.get_int_max_str_digits():,} digits"
    return str(error)


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file, which may begin with a BOM.

    Args:
        what: kind of file, for messages, such as "policy file".

    Raises:
        InvalidInput: the file cannot be read, is too large, or holds no JSON object; the message names the file.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_JSON_BYTES:
        raise InvalidInput(f"{what} {path} has more than {_MAX_JSON_BYTES:,} bytes; give the name of a {what}")
    try:
        values = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} {path} is not UTF-8 text: byte {error.start} is wrong") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what} {path} is not JSON: {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{what} {path} holds {json_kind(values)}; it must be an object of fields")
    return values


def from_fields(kind: type, values: dict[str, Any], what: str) -> Any:
    """Return a dataclass made from JSON fields. Raise InvalidInput if a name is unknown.

    Args:
        kind: the dataclass.
        what: origin of the fields, for messages.
    """
    known = {f.name for f in fields(kind) if f.init}
    if unknown := sorted(set(values) - known):
        raise InvalidInput(f"{what} has unknown fields {unknown}; it takes {sorted(known)}")
    return kind(**values)


@dataclass
class Completion:
    """One continuation of a prompt.

    Attributes:
        generated_text: text without special tokens, cut before the first stop string; None if the checkpoint has no
            tokenizer.
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
    """Return $FLEXENGINE_CACHE, or ~/.cache/flexengine. The directory is not created.

    Raises:
        InvalidInput: the home directory is unknown.
    """
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
