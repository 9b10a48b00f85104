"""The tokenizer of a model directory, and the tokens that end a text."""

import json
import os
from pathlib import Path
from typing import Any

from flexengine.errors import InvalidInput
from flexengine.model.files import regular_file

_CONFIG = "tokenizer_config.json"
_NAMES = ("tokenizer.json", "tokenizer.model", _CONFIG, "vocab.json")
_READ = ("*.json", "*.model", "tokenizer.model*", "*.jinja", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
_HINT = "; it has its own Python code, which runs only with --trust-remote-code: read the code before you set it"


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model directory, None if it has none. trust_remote_code: run its own Python code.
    Raise InvalidInput if it cannot be loaded, BadCheckpoint if a file is a link out of the directory."""
    if not any(os.path.lexists(directory / name) for name in _NAMES):
        return None
    for file in sorted(file for pattern in _READ for file in directory.glob(pattern)):
        regular_file(file, directory)
    path = directory / _CONFIG
    try:
        settings = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(settings, dict):
        raise InvalidInput(f"{path} holds a JSON {type(settings).__name__}; it must be an object")
    for name in settings.get("fast_tokenizer_files") or []:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidInput(f"{path} names {name!r}, which is not a file name in that directory")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except BaseException as error:  # panics of the Rust library do not derive from Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        hint = _HINT if "auto_map" in settings and not trust_remote_code else ""
        raise InvalidInput(f"the tokenizer in {directory} cannot be loaded: {error or repr(error)}{hint}") from error


def eos_tokens(directory: Path, config: Any) -> set[int]:
    """Return the end-of-sequence ids, from generation_config.json or else from the config. Raise InvalidInput if the
    file cannot be read or the value is no token id or list of ids, BadCheckpoint if the file is a link out of the
    directory."""
    value = getattr(config.get_text_config(), "eos_token_id", None)
    path = directory / "generation_config.json"
    if os.path.lexists(path):
        try:
            value = json.loads(regular_file(path).read_text()).get("eos_token_id", value)
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidInput(f"{path}: {error}") from error
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in values):
        raise InvalidInput(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return set(values)


def opening(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before any text, such as <bos>."""
    whole, bare = token_ids(tokenizer, "a", special=True), token_ids(tokenizer, "a", special=False)
    starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
    return whole[: next(starts, 0)]


def token_ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Return the token ids of a text. special: include the tokens that the tokenizer puts around a text."""
    return [int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]


def spread(begin: list[int], ids: list[int], rows: int, length: int) -> list[list[int]]:
    """Return `rows` excerpts of `ids`, each `begin` plus `length` ids, at even distances; [] if ids are too few."""
    distance = len(ids) // rows
    return [begin + ids[i * distance :][:length] for i in range(rows)] if 1 <= length <= distance else []
