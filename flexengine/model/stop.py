"""When a continuation ends: end tokens, stop tokens, stop strings; and its text up to there."""

from collections.abc import Collection
from typing import Any

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput

# Characters at the start of a decoded tail that may differ from the same place in the whole text: decoders drop a
# leading space or keep a joining mark, and tidy up spaces around a few punctuation marks.
_MARGIN = 8
_BROKEN = "\ufffd"  # what decoders write for bytes that are no character (yet)


def check_stops(sampling: SamplingParams, tokenizer: Any) -> None:
    """Raises InvalidInput if stop strings are asked for and there is no tokenizer to make text with."""
    if sampling.stop and tokenizer is None:
        raise InvalidInput(
            f"stop is {list(sampling.stop)!r:.80}, but the checkpoint has no tokenizer, so there is no text to search;"
            " use stop_token_ids"
        )


class Stops:
    """Watches one continuation.

    tokenizer: a transformers tokenizer or None. eos: the model's end tokens, which sampling.ignore_eos switches off.
    A stop string is looked for in the text that `text` gives: of generated tokens only, without special tokens. One
    that is the name of a special token, such as <|im_end|>, never shows in that text and means the token.
    Raises InvalidInput as check_stops does.
    """

    def __init__(self, tokenizer: Any, sampling: SamplingParams, eos: Collection[int]) -> None:
        check_stops(sampling, tokenizer)
        self._tokenizer, self._strings = tokenizer, sampling.stop
        named = {token for text in sampling.stop if (token := self._special(text)) is not None}
        self._tokens = named.union(sampling.stop_token_ids, () if sampling.ignore_eos else eos)
        self._longest = max(map(len, sampling.stop), default=0)

    def reason(self, generated: list[int]) -> str | None:
        """ "stop" if the last of these tokens ends the continuation, else None. To be asked after every token."""
        if not generated:
            return None
        if generated[-1] in self._tokens:
            return "stop"
        # A tail may show what the whole text does not, so it is the whole that decides.
        found = self._strings and self._first(self._tail(generated)) >= 0 and self._first(self._decode(generated)) >= 0
        return "stop" if found else None

    def text(self, generated: list[int]) -> str | None:
        """The text without special tokens, up to the first stop string; None without a tokenizer.

        A stop token that is no special token shows in the text.
        """
        if self._tokenizer is None:
            return None
        text = self._decode(generated)
        end = self._first(text)
        return text if end < 0 else text[:end]

    def _tail(self, generated: list[int]) -> str:
        """The end of the text, long enough for any stop string that the last token completes.

        Such a string reaches into what the last token changed: its own characters, and those before that it made
        whole. So the tail starts before the change by the longest string. It must not start with a broken
        character: byte tokens in a row are decoded together, and a start in the middle of one would break them all.
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
        """Where the first stop string begins; -1 if there is none."""
        return min((at for string in self._strings if (at := text.find(string)) >= 0), default=-1)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _special(self, text: str) -> int | None:
        """The special token of this name: one whose text is just that, and which decoding leaves out."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int) or self._decode([token]) or self._tokenizer.decode([token]) != text:
            return None
        return token
