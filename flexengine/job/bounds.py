"""What a prompt may hold: text that can fit into the model's context, and tokens that the model has."""

import re
from collections.abc import Sequence
from typing import Any

from flexengine.errors import InvalidInput, library_faults, shown, size_within


def check_text(kind: str, text: str) -> None:
    """Raise InvalidInput if UTF-8 cannot encode the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{kind} holds half a surrogate pair, which is no character; remove it") from error


def check_known(ids: Sequence[int], tokenizer: Any, vocabulary: int | None) -> None:
    """Raise InvalidInput if a text has a token that the model does not have: tokenizers may have more tokens than the
    model's embedding. vocabulary: its number of tokens; None does not check."""
    if vocabulary is None or not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    token = next(token for token in ids if not 0 <= token < vocabulary)
    with library_faults(f"token {token} is beyond the model's vocabulary, and has no name"):
        name = tokenizer.convert_ids_to_tokens(token)
    beyond = f"is beyond the model's vocabulary: its token ids lie in [0, {vocabulary})"
    remedy = "remove it from the text, or from the chat template that writes it"
    raise InvalidInput(f"the text has the token {shown(name)} with the id {token}, which {beyond}; {remedy}")


BYTES_PER_CHARACTER = 300  # of memory while a text is tokenized
MOST_CHARACTERS = 1 << 23  # of a text; tokenizing more would take over 2.5 GB
PIECE_CHARACTERS = 1 << 16
_CHARACTERS_PER_TOKEN = 4  # text of up to so many per token of the context is tokenized at once
_CUT_TOKENS = 256  # tokens that a piece may have more than the text has there, as it is cut from it


def most_characters(memory: int | None) -> int:
    """Return the most characters of a text that is tokenized at once in as many bytes, None for no limit."""
    return (
        MOST_CHARACTERS
        if memory is None
        else min(MOST_CHARACTERS, max(PIECE_CHARACTERS, memory // BYTES_PER_CHARACTER))
    )


class BoundedTokenizer:
    """A tokenizer for text that must fit into a model's context. Much longer text is refused after its first pieces,
    and text of more than `most` characters (None: MOST_CHARACTERS) in any case.

    Tokenizing takes about BYTES_PER_CHARACTER bytes of memory per character. Text that may be too long is therefore
    tokenized in pieces first. A piece has at most _CUT_TOKENS tokens more than the text has there: tokenizers join
    tokens and drop unknown text nearby only. Some added tokens take all white space around them. In text with these,
    white space counts as one character.
    """

    def __init__(self, tokenizer: Any, context: int, most: int | None = None) -> None:
        self._tokenizer, self._context, self._most = tokenizer, context, most or MOST_CHARACTERS

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        """Return the encoded text. Raise InvalidInput if it has more tokens than the context, or is too long."""
        if len(text) > max(PIECE_CHARACTERS, _CHARACTERS_PER_TOKEN * self._context) and self._exceeds(text):
            fault = f"text of {len(text):,} characters has more tokens than the model's context of {self._context:,}"
            raise InvalidInput(f"{fault}; shorten it")
        if len(text) > self._most:
            fault = f"text of {len(text):,} characters is more than the {self._most:,} that are tokenized at once"
            more = f", or give the engine {size_within(BYTES_PER_CHARACTER * len(text))} of RAM" * (
                len(text) <= MOST_CHARACTERS
            )
            raise InvalidInput(f"{fault}; cut it into several rows{more}")
        return self._tokenizer(text, **options)

    def _exceeds(self, text: str) -> bool:
        """Return whether a text certainly has more tokens than the context."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        stripping = any((each.lstrip or each.rstrip) and each.content in text for each in added)
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            piece = re.sub(r"\s+", " ", piece) if stripping else piece
            ids = self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            tokens += max(0, len(ids) - _CUT_TOKENS)
            if tokens > self._context:
                return True
        return False
