"""Tokens by which texts and turns end: those of chat templates."""

from collections.abc import Collection
from typing import Any

from flexengine.config import SamplingParams

# Ends of a turn, which older files do not name; one is taken if the chat template writes it.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<EOT>")
_CHANNELS = {"<|return|>", "<|flush|>"}  # models with one of these tokens end parts of a turn with <|end|>


def turn_ends(template: str, tokens: Collection[str]) -> set[str]:
    """Return the texts of tokens by which a chat template ends a turn. tokens: texts of all tokens."""
    written = {text for text in _TURN_ENDS if text in template}
    return written - {"<|end|>"} if written and not _CHANNELS.isdisjoint(tokens) else written


def unended(tokenizer: Any, sampling: SamplingParams, eos: Collection[int]) -> str:
    """Return a message if the chat template ends turns with tokens of which none ends a text; "" otherwise. eos: the
    model's end tokens."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    written = turn_ends(str(getattr(tokenizer, "chat_template", "")), vocabulary)
    ends = {name: vocabulary[name] for name in sorted(written & vocabulary.keys())}
    if (
        not ends
        or not {*ends.values()}.isdisjoint({*eos, *sampling.stop_token_ids})
        or not written.isdisjoint(sampling.stop)
    ):
        return ""
    name, token = next(iter(ends.items()))
    return (
        f"the chat template ends turns with {name!r}, which ends no text by the model's generation_config.json or"
        f" config.json, so answers may run on; --stop-token-id {token} ends them"
    )
