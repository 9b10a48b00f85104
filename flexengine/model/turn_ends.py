"""Tokens by which texts and turns end: those of chat templates, and those that end no text here."""

from collections.abc import Collection
from typing import Any

# Ends of a turn, which older files do not name; one is taken if the chat template writes it.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<EOT>")
_CHANNELS = {"<|return|>", "<|flush|>"}  # models with one of these tokens end parts of a turn with <|end|>


def turn_ends(template: str, tokens: Collection[str]) -> set[str]:
    """Return the texts of tokens by which a chat template ends a turn. tokens: texts of all tokens."""
    written = {text for text in _TURN_ENDS if text in template}
    return written - {"<|end|>"} if written and not _CHANNELS.isdisjoint(tokens) else written


def unended(tokenizer: Any, eos: Collection[int]) -> str:
    """Return a message if the tokenizer's end token, or one by which its chat template ends a turn, ends no text; "" if
    all do. eos: the model's end tokens."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    ends = {getattr(tokenizer, "eos_token", None), *turn_ends(str(getattr(tokenizer, "chat_template", "")), vocabulary)}
    lost = {name: token for name, token in sorted(vocabulary.items()) if name in ends and token not in eos}
    if not lost:
        return ""
    listed = " and ".join(f"{name!r} (--stop-token-id {token})" for name, token in lost.items())
    known = f"only {', '.join(map(str, sorted(eos)))}" if eos else "no token"
    return (
        f"the tokenizer ends texts or turns with {listed}, which end no text here, as in generate of transformers:"
        f" by generation_config.json or config.json {known} does; give the option if they should"
    )
