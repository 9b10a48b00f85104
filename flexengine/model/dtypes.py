"""The dtype of activations, by name or by default."""

from typing import Any

import torch

from flexengine.errors import InvalidInput


def choose_dtype(requested: str | None, config: Any, device: str) -> torch.dtype:
    """Return the requested compute dtype, or the default: float32 on cpu and sim, the checkpoint's dtype on cuda."""
    if (dtype := named_dtype(requested)) is not None:
        return dtype
    own = getattr(config, "dtype", None)
    return own if device == "cuda" and isinstance(own, torch.dtype) else torch.float32


def named_dtype(requested: str | None) -> torch.dtype | None:
    """Return the dtype with a name; None for auto or None. Raise InvalidInput if the name is unknown."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if requested in (None, "auto"):
        return None
    if requested not in names:
        raise InvalidInput(f"dtype is {requested!r}; it must be one of auto, {', '.join(names)}")
    return names[requested]
