"""Number of layers of a model, as its files name it: read without torch and transformers."""

from pathlib import Path
from typing import Any

from flexengine.errors import FlexError
from flexengine.model.demo import demo_file
from flexengine.model.files import read_json
from flexengine.model.gguf_header import read_header

MOST_BYTES = 1 << 20  # of config.json


def named_layers(model: str | None) -> int | None:
    """Return the number of layers; None if no local files name it plainly, or they cannot be read.

    Args:
        model: a model directory, a .gguf file or a hub id; None for the demo model.
    """
    try:
        path = demo_file() if model is None else Path(model).expanduser()
        if path.is_file():
            header = read_header(path)
            return _count(header.values.get(f"{header.architecture}.block_count"))
        config = read_json(path / "config.json", MOST_BYTES)
    except (FlexError, OSError, RuntimeError):  # the engine names the fault
        return None
    values = config.get("text_config", config) if isinstance(config, dict) else None
    return _count(values.get("num_hidden_layers")) if isinstance(values, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
