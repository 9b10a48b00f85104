"""The tokenizer of a model directory, and the end of a continuation: end tokens, stop tokens and stop strings."""

import logging
import math
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flexengine.activity import message
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, is_fault, library_faults, shown
from flexengine.model.files import AGAIN, check_mark, model_file, read_object

_GENERATION = "generation_config.json"
# Settings of generate(do_sample=False) of transformers that change tokens, with the value that changes none.
_CHANGING: dict[str, Any] = dict.fromkeys(
    (
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("sequence_bias", "exponential_decay_length_penalty", "stop_strings", "token_healing", "watermarking_config"),
        *("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),
    )
)
_CHANGING |= dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "num_beams", "guidance_scale"), 1)
_CHANGING |= dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0)
_CONFIG = "tokenizer_config.json"
_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", _CONFIG, "vocab.json")
_OBJECTS = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
_TEXTS = ("vocab.txt", "merges.txt")
_MAX_BYTES = 2**30  # of each
_READ = ("*.json", "*.model", "tokenizer.model*", "*.jinja", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
# Extra of flexengine, and its modules, that read a file which may be a model's only tokenizer.
_READERS = {"sentencepiece": ("sentencepiece", "google.protobuf"), "tiktoken": ("tiktoken",)}
_READERS["mistral"] = ("mistral_common",)
_HINT = "; it has its own Python code, which runs only with --trust-remote-code: read the code before you set it"


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model directory, None if it has none. trust_remote_code: run its own Python code.
    Raise InvalidInput if it cannot be loaded, BadCheckpoint if a file is a link out of the directory."""
    if not any(os.path.lexists(directory / name) for name in _NAMES):
        return None
    for file in sorted(file for pattern in _READ for file in directory.glob(pattern)):
        path = model_file(file, directory)
        if file.suffix == ".jinja" or file.name in _TEXTS:
            with path.open("rb") as stream:
                check_mark(file, stream.read(3))
    settings = _settings(directory / _CONFIG)
    if settings:
        resolve_name("flexengine.model.tokenizer_faults:check_settings")(directory / _CONFIG, settings)
    from transformers import AutoTokenizer

    whole = any(os.path.lexists(directory / name) for name in ("tokenizer.json", "vocab.json"))
    if not whole and "auto_map" not in settings:
        _check_reader(directory)
    # transformers otherwise prefers mistral-common, if it is installed, to the tokenizer.json beside a tekken.json
    options = {"trust_remote_code": trust_remote_code, **({"mistral_format": False} if whole else {})}
    converter: Any = sys.modules.get("flexengine.model.gguf_pre")  # has what this process has just converted
    made = converter.take_written(directory) if converter else None
    try:
        tokenizer: Any = (made or AutoTokenizer).from_pretrained(directory, **({} if made else options))
    except BaseException as error:
        if not is_fault(error):
            raise
        for file in (directory / name for name in _OBJECTS if os.path.lexists(directory / name)):
            read_object(file, _MAX_BYTES)  # its error names the file and the place in it
        fault = resolve_name("flexengine.model.tokenizer_faults:tokenizer_fault")(directory, error)
        hint = _HINT if "auto_map" in settings and not trust_remote_code else ""
        raise InvalidInput(f"the tokenizer in {directory} cannot be loaded: {fault}{hint}") from error
    template = _settings(directory / "chat_template.json").get("chat_template")  # of the model's processor
    if isinstance(template, str) and getattr(tokenizer, "chat_template", template) is None:
        tokenizer.chat_template = template
    return tokenizer


def _check_reader(directory: Path) -> None:
    """Raise InvalidInput if the only tokenizer of a directory is a file whose reader is not installed."""
    files = (directory / name for name in ("tekken.json", "tokenizer.model", "spiece.model"))
    if (file := next((file for file in files if os.path.lexists(file)), None)) is None:
        return
    with file.open("rb") as stream:
        binary = stream.read(1) == b"\n"  # of sentencepiece; tiktoken's files are lines of text
    extra = "mistral" if file.suffix == ".json" else "sentencepiece" if binary else "tiktoken"
    missing = [module for module in _READERS[extra] if not _installed(module)]
    if missing:
        names = " and ".join(module.removeprefix("google.").replace("_", "-") for module in missing)
        raise InvalidInput(
            f"the tokenizer in {directory} is only in {file.name}, which cannot be read without {names}:"
            f" type `pip install 'flexengine[{extra}]'`, or put the model's tokenizer.json beside it"
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a model directory, {} if there is none. Raise as `read_object`."""
    return read_object(path) if os.path.lexists(path) else {}


def eos_tokens(directory: Path, config: Any) -> set[int]:
    """Return the end-of-sequence ids, from generation_config.json or else from the config. Raise InvalidInput if the
    value is no token id or list of ids, BadCheckpoint if the file cannot be read or is a link out of the directory."""
    settings, key = _settings(directory / _GENERATION), "eos_token_id"
    text = config.get_text_config()
    value = settings[key] if key in settings else getattr(text, key, None)
    values = value if isinstance(value, list) else [] if value is None else [value]
    size = getattr(text, "vocab_size", None) or math.inf
    path = directory / (_GENERATION if key in settings else "config.json")
    if not all(type(token) is int for token in values):
        must = f"it must be a token id or a list of them; correct it, or {AGAIN}"
        raise InvalidInput(f"{path}: {key} is {shown(value)}; {must}")
    if beyond := [token for token in values if token >= size]:
        message(f"{path}: {key} is {shown(beyond)}; the model has {size} tokens, so it ends no text", logging.WARNING)
    return set(values)


def unapplied(directory: Path) -> str:
    """Return a message about settings by which `generate` of transformers would give other tokens, as they are not
    applied here; "" if there are none. Raise as `eos_tokens`."""
    path = directory / (_GENERATION if os.path.lexists(directory / _GENERATION) else "config.json")
    known = _settings(path)
    given = {name: known.get(name) for name in _CHANGING}
    found = {n: x for n, x in given.items() if x is not False and x not in (None, _CHANGING[n], [], {})}
    return resolve_name("flexengine.model.tokenizer_faults:unapplied_words")(path, found, _CHANGING) if found else ""


def opening(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before any text, such as <bos>."""
    whole, bare = token_ids(tokenizer, "a", special=True), token_ids(tokenizer, "a", special=False)
    starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
    return whole[: next(starts, 0)]


def token_ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the token ids of a text. special: include the tokens that the tokenizer puts around a text. Raise
    InvalidInput if the tokenizer raises an error."""
    with library_faults(f"the text {shown(text[:80])} cannot be tokenised"):
        return [int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]


def excerpts(
    tokenizer: Any, name: str, text: str, rows: int, tokens: int, use: str, remedy: str
) -> list[tuple[int, ...]]:
    """Return the token ids of `rows` excerpts of a text, at even distances. Each has as many tokens as given, of which
    the first are the tokenizer's `opening`. Raise InvalidInput if there is no tokenizer, or the text is too short.

    Args:
        tokenizer: None if the checkpoint has none.
        name, use, remedy: for messages, such as "a.txt", "8 rows of 64 take" and "give a longer text".
    """
    if tokenizer is None:
        raise InvalidInput("the checkpoint has no tokenizer, so it cannot read text; put its tokenizer files beside it")
    begin, ids = opening(tokenizer), token_ids(tokenizer, text, special=False)
    length, distance = tokens - len(begin), len(ids) // rows
    if not 1 <= length <= distance:
        raise InvalidInput(f"{name} has {len(ids):,} tokens; {use} {rows * length:,}; {remedy}")
    return [(*begin, *ids[i * distance :][:length]) for i in range(rows)]


# Characters at the start of a decoded tail that may differ from the whole text: decoders drop a leading space or keep a
# joining mark, and remove spaces around some punctuation marks.
_MARGIN = 8
_BROKEN = "\ufffd"  # decoders write it for bytes that are no complete character


def check_stops(sampling: SamplingParams, tokenizer: Any) -> None:
    """Raise InvalidInput if there are stop strings but no tokenizer to decode text."""
    if sampling.stop and tokenizer is None:
        fault = f"stop is {list(sampling.stop)!r:.80}, but the checkpoint has no tokenizer"
        raise InvalidInput(f"{fault}, so there is no text to search; use stop_token_ids")


def named_tokens(sampling: SamplingParams, tokenizer: Any) -> set[int]:
    """Return the special tokens that stop strings name. Raise InvalidInput as `check_stops`, and for an error of the
    tokenizer."""
    check_stops(sampling, tokenizer)
    return {token for text in sampling.stop if (token := _special(tokenizer, text)) is not None}


def _special(tokenizer: Any, text: str) -> int | None:
    """Return the special token whose text is `text`, and which decoding skips; None if there is none."""
    with library_faults(f"the stop string {shown(text)} cannot be looked up"):
        token = tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int) or tokenizer.decode([token], skip_special_tokens=True):
            return None
        return token if tokenizer.decode([token]) == text else None


def _marked(strings: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the stop strings that hold the name of a special token and other text, and the special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items() if strings else ()
    names = {token: text.content for token, text in added if text.special and text.content}
    marked = (string for string in strings if any(name in string and name != string for name in names.values()))
    return tuple(marked), frozenset(names)


def bad_word_ids(sampling: SamplingParams, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each bad word, as vLLM has them: those of the text without white space before it, and those
    after a space if they are as many and begin with another token. Raise InvalidInput if a text has no tokens."""
    found = dict[tuple[int, ...], None]()
    for word in sampling.bad_words:
        if not isinstance(word, str):
            found[word] = None
            continue
        if tokenizer is None:
            raise InvalidInput(f"bad_words has {word!r:.80}, but the checkpoint has no tokenizer; give token ids")
        bare, spaced = (tuple(token_ids(tokenizer, space + word.lstrip(), special=False)) for space in ("", " "))
        if not bare:
            raise InvalidInput(f"bad_words has {word!r:.80}, which has no tokens; remove it")
        found[bare] = None
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(found)


def check_edits(sampling: SamplingParams, tokenizer: Any, vocabulary: int) -> None:
    """Raise InvalidInput if there are stop strings or bad words that cannot be found, or tokens of logit_bias or
    bad_words that the model does not have. vocabulary: its number of tokens."""
    named_tokens(sampling, tokenizer)
    words = bad_word_ids(sampling, tokenizer) if sampling.bad_words else ()
    for name, ids in (("logit_bias", sampling.logit_bias or ()), ("bad_words", (i for word in words for i in word))):
        if unknown := [token for token in ids if token >= vocabulary]:
            raise InvalidInput(f"{name} holds token {unknown[0]}; token ids lie in [0, {vocabulary})")


def resolved(sampling: SamplingParams, tokenizer: Any, eos: Collection[int]) -> SamplingParams:
    """Return the parameters as `sample` needs them: bad words as token ids, and with min_tokens all end tokens as stop
    tokens. eos: as for `Stops`."""
    if not (sampling.bad_words or sampling.min_tokens):
        return sampling
    ends = tuple(sorted(token for token in Stops(tokenizer, sampling, eos).tokens if token >= 0))
    return replace(sampling, bad_words=bad_word_ids(sampling, tokenizer), stop_token_ids=ends)


class Stops:
    """End conditions of one continuation.

    Stop strings are searched in the text that `text` returns: of generated tokens only, without special tokens. The
    text continues the prompt's: many tokenizers drop the leading space of tokens that are decoded without the prompt. A
    stop string that is the name of a special token, such as <|im_end|>, never occurs in this text and stands for the
    token. One that holds such a name and other text, such as <|im_start|>user, is searched in the text with special
    tokens, as in transformers. With min_tokens a stop string counts only if it ends after this many tokens, as in vLLM.
    `sample` gives end tokens no probability before.

    Args:
        tokenizer: a transformers tokenizer, or None. Stop strings without one raise InvalidInput.
        eos: the model's end tokens; ignored if sampling.ignore_eos is set.
        prompt: token ids that the continuation follows.
    """

    def __init__(
        self, tokenizer: Any, sampling: SamplingParams, eos: Collection[int], prompt: Sequence[int] = ()
    ) -> None:
        self._prompt, self._least = prompt, sampling.min_tokens
        named = named_tokens(sampling, tokenizer)
        self._tokenizer, self._strings = tokenizer, sampling.stop
        self._marked, self._special = _marked(sampling.stop, tokenizer)
        self.tokens = named.union(sampling.stop_token_ids, () if sampling.ignore_eos else eos)
        self._longest = max(map(len, sampling.stop), default=0)

    def reason(self, generated: list[int]) -> str | None:
        """Return "stop" if the last token ends the continuation, else None. Must be called after every token."""
        if not generated:
            return None
        if generated[-1] in self.tokens:
            return "stop"
        if not self._strings or len(generated) <= self._least:
            return None
        # A decoded tail may contain a stop string that the whole text does not, so the whole text is searched too.
        match = self._first(self._tail(generated)) >= 0 and self._end_of(generated, self._continuation(generated)) >= 0
        return "stop" if match or self._marked_at(generated) >= 0 else None

    def text(self, generated: list[int]) -> str | None:
        """Return the text without special tokens, up to the first stop string; None without a tokenizer.

        The text includes a stop token that is no special token.
        """
        if self._tokenizer is None:
            return None
        text = self._continuation(generated)
        end = self._end_of(generated, text)
        if end < 0 and (at := self._marked_at(generated)) >= 0:
            count = len(generated)
            while len(before := self._decode(generated[: count - 1], False)) > at:
                count -= 1
            return self._continuation(generated[: count - 1]) + self._decode(generated[:count], False)[len(before) : at]
        return text if end < 0 else text[:end]

    def _marked_at(self, generated: list[int]) -> int:
        """Return where the first stop string with a special token's name begins in the text with special tokens; -1 if
        there is none. The whole text is decoded if one of its last tokens is special: a part may decode otherwise."""
        last = generated[-4 * self._longest - 8 :]  # a character has 4 tokens at most, one for each byte
        if not self._marked or len(generated) <= self._least or self._special.isdisjoint(last):
            return -1
        text, least = self._decode(generated, False), len(self._decode(generated[: self._least], False))
        starts = (text.find(string, max(0, least - len(string) + 1)) for string in self._marked)
        return min((start for start in starts if start >= 0), default=-1)

    def _tail(self, generated: list[int]) -> str:
        """Return the end of the text, long enough to contain any stop string that the last token completes.

        Such a string overlaps the characters that the last token added or completed. So the tail starts earlier than
        these by the longest stop string. It must not start with a broken character: byte tokens in succession are
        decoded together, and a start in the middle of a character would break all of them.
        """
        needed = self._longest + _MARGIN
        count = 8 + self._longest // 2
        while count < len(generated):
            before, now = self._decode(generated[-count:-1]), self._decode(generated[-count:])
            if before[:needed] == now[:needed] and len(before) >= needed and not now.startswith(_BROKEN):
                return now
            count *= 2
        return self._continuation(generated)

    def _end_of(self, generated: list[int], text: str) -> int:
        """Return the position at which a stop string ends the text of the generated tokens; -1 for no end."""
        if not self._strings or not self._least:
            return self._first(text)
        return self._first(text, len(self._continuation(generated[: self._least])) + 1)

    def _first(self, text: str, least: int = 0) -> int:
        """Return the position of the first stop string in `text`; -1 if there is none. least: characters of the text up
        to the first possible end of a stop string."""
        starts = (text.find(string, max(0, least - len(string))) for string in self._strings)
        return min((start for start in starts if start >= 0), default=-1)

    @cached_property
    def _context(self) -> tuple[list[int], str]:
        """Return the last tokens of the prompt, and their text: enough that it ends as the whole prompt's text does."""
        count = 8
        while True:
            tokens = [*self._prompt[-count:]]
            text = self._decode(tokens) if tokens else ""
            if count >= len(self._prompt) or (len(text) >= _MARGIN and not text.startswith(_BROKEN)):
                return tokens, text
            count *= 2

    def _continuation(self, generated: list[int]) -> str:
        """Return what the generated tokens add to the text of the prompt, with a character that the prompt begins.
        Where both are joined differently (`don 't` becomes `don't`), return the text of the generated tokens alone."""
        tokens, before = self._context
        whole = self._decode(tokens + generated)
        same = next((i for i, character in enumerate(before) if whole[i : i + 1] != character), len(before))
        return whole[same:] if set(before[same:]) <= {_BROKEN} else self._decode(generated)

    def _decode(self, tokens: list[int], skip: bool = True) -> str:
        with library_faults("the generated tokens cannot be decoded"):
            text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip)
        return text
