"""End of a continuation: end tokens, stop tokens and stop strings, and the text before the end."""

from collections.abc import Collection
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput

# Characters at the start of a decoded tail that may differ from the whole text: decoders drop a leading space or keep a
# joining mark, and remove spaces around some punctuation marks.
_MARGIN = 8
_BROKEN = "\ufffd"  # decoders write it for bytes that are no complete character


def check_stops(sampling: SamplingParams, tokenizer: Any) -> None:
    """Raise InvalidInput if there are stop strings but no tokenizer to decode text."""
    if sampling.stop and tokenizer is None:
        raise InvalidInput(
            f"stop is {list(sampling.stop)!r:.80}, but the checkpoint has no tokenizer, so there is no text to search;"
            " use stop_token_ids"
        )


class Stops:
    """End conditions of one continuation.

    Stop strings are searched in the text that `text` returns: of generated tokens only, without special tokens. A stop
    string that is the name of a special token, such as <|im_end|>, never occurs in this text and stands for the token.

    Args:
        tokenizer: a transformers tokenizer, or None. Stop strings without one raise InvalidInput.
        eos: the model's end tokens; ignored if sampling.ignore_eos is set.
    """

    def __init__(self, tokenizer: Any, sampling: SamplingParams, eos: Collection[int]) -> None:
        check_stops(sampling, tokenizer)
        self._tokenizer, self._strings = tokenizer, sampling.stop
        named = {token for text in sampling.stop if (token := self._special(text)) is not None}
        self._tokens = named.union(sampling.stop_token_ids, () if sampling.ignore_eos else eos)
        self._longest = max(map(len, sampling.stop), default=0)

    def reason(self, generated: list[int]) -> str | None:
        """Return "stop" if the last token ends the continuation, else None. Must be called after every token."""
        if not generated:
            return None
        if generated[-1] in self._tokens:
            return "stop"
        # A decoded tail may contain a stop string that the whole text does not, so the whole text is searched too.
        match = self._strings and self._first(self._tail(generated)) >= 0 and self._first(self._decode(generated)) >= 0
        return "stop" if match else None

    def text(self, generated: list[int]) -> str | None:
        """Return the text without special tokens, up to the first stop string; None without a tokenizer.

        The text includes a stop token that is no special token.
        """
        if self._tokenizer is None:
            return None
        text = self._decode(generated)
        end = self._first(text)
        return text if end < 0 else text[:end]

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
        return self._decode(generated)

    def _first(self, text: str) -> int:
        """Return the position of the first stop string in `text`; -1 if there is none."""
        return min((start for string in self._strings if (start := text.find(string)) >= 0), default=-1)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _special(self, text: str) -> int | None:
        """Return the special token whose text is `text`, and which decoding skips; None if there is none."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int) or self._decode([token]) or self._tokenizer.decode([token]) != text:
            return None
        return token
