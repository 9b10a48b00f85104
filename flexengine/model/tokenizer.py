"""What stands beside the weights and turns text into tokens and back: the tokenizer, and which tokens end a text."""

import json
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer beside the weights, None if there is none. Raises InvalidInput if there is one that cannot load."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((directory / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise InvalidInput(f"the tokenizer in {directory} cannot be loaded: {error}") from error


def eos_tokens(directory: Path, config: Any) -> set[int]:
    """End-of-sequence ids: those of generation_config.json, else the config's."""
    value = getattr(config.get_text_config(), "eos_token_id", None)
    path = directory / "generation_config.json"
    if path.exists():
        try:
            value = json.loads(path.read_text()).get("eos_token_id", value)
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidInput(f"{path}: {error}") from error
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in values):
        raise InvalidInput(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return set(values)
