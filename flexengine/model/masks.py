"""Sliding windows of a model's layers, found from the masks that the model requests from transformers.

A real forward pass uses no masks: the kernels separate packed sequences and apply causality and windows. But some
models define a window by the mask alone, and others use masks that the kernels do not support. So the trial pass on the
meta device gets markers instead of masks, and each marker's mask function is compared with a causal window.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flexengine.errors import UnsupportedModel
from flexengine.model.forward import Attend

_LARGEST = 1 << 17  # tokens; the mask function is tried on at most about twice as many
_lock = threading.Lock()  # `marked` patches global state of transformers


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Make transformers return markers as masks of the attention implementation `name` while the block runs."""
    from transformers import AttentionMaskInterface, masking_utils

    # find_packed_sequence_indices reads tensor values, which meta tensors lack; a trial pass has a single sequence.
    masks = AttentionMaskInterface._global_mapping
    with _lock:
        find = masking_utils.find_packed_sequence_indices
        masks[name] = _marker
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = find
            del masks[name]


def window_at(event: Attend) -> int | None:
    """Return the window of a layer in tokens, None for a causal mask. Raise UnsupportedModel for any other mask, or if
    the layer's argument and its mask contradict each other."""
    if event.mask is None:
        return event.window
    own = "its attention changes the mask or makes its own, which the engine does not support"
    window: int | str | None = getattr(event.mask, "pattern", own)
    if isinstance(window, str):
        raise UnsupportedModel(window)
    if event.window not in (None, window):
        raise UnsupportedModel(f"layer {event.layer} has a window of {event.window} and a mask of {window} tokens")
    return window


def _marker(*_: Any, mask_function: Any = None, local_size: int | None = None, config: Any = None, **__: Any) -> Tensor:
    marker = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
    marker.pattern = _pattern(mask_function, local_size or 0)  # type: ignore[attr-defined]
    return marker


def _pattern(mask_function: Any, hint: int) -> int | str | None:
    """Return the window in tokens, None for a causal mask, or a text that says why the mask is neither.

    Args:
        mask_function: mask function of transformers.
        hint: size of a window or chunk in the mask, in tokens; 0 if unknown.
    """
    end = 2 * min(max(hint, 64), _LARGEST) + 3
    keys, zero = torch.arange(end + 64), torch.tensor(0)
    queries = torch.tensor([0, 1, 2, 7, end // 2 - 2, end // 2 - 1, end // 2, end // 2 + 1, end - 1])
    try:
        seen = mask_function(zero, zero, queries[:, None], keys[None, :])
    except Exception:
        return "its mask depends on more than the distance of two tokens (such as chunks, or the tokens themselves)"
    seen = seen.expand(len(queries), len(keys))
    width = int(seen[-1].sum())
    window = None if width == end else width
    distance = queries[:, None] - keys[None, :]
    expected = (distance >= 0) & (distance < (window or end))
    return window if torch.equal(seen, expected) else "its mask is neither causal nor a sliding window"
