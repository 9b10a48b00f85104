"""Which tokens a layer's queries see, told from the masks that a model asks transformers for.

A real pass makes no masks: packed sequences are kept apart by the kernels, and causality and windows are theirs too.
But some models put a window into the mask alone, and others mask in ways the kernels do not know. So the trial pass on
the meta device gets markers in place of masks, and what they say is checked against a causal window.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flexengine.errors import UnsupportedModel

_LARGEST = 1 << 17  # of windows that are looked at as a whole
_lock = threading.Lock()  # what is patched is everybody's


@contextmanager
def marked(name: str) -> Iterator[None]:
    """While it is open, masks made for the attention implementation `name` are markers."""
    from transformers import AttentionMaskInterface, masking_utils

    # It looks at values, of which a meta tensor has none; a trial pass has a single sequence.
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


def window_of(mask: Tensor) -> int | None:
    """The window of a marker; None if it is all that came before. Raises UnsupportedModel for any other mask."""
    if not hasattr(mask, "pattern"):
        raise UnsupportedModel("its attention changes the mask or has one of its own, which the engine does not honour")
    pattern = mask.pattern
    if isinstance(pattern, str):
        raise UnsupportedModel(pattern)
    return pattern  # type: ignore[no-any-return]


def _marker(*_: Any, mask_function: Any = None, local_size: int | None = None, config: Any = None, **__: Any) -> Tensor:
    marker = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
    marker.pattern = _pattern(mask_function, local_size or 0)  # type: ignore[attr-defined]
    return marker


def _pattern(mask_function: Any, hint: int) -> int | str | None:
    """The window, None for none, or why it is neither. hint: a size that plays a part in the mask."""
    end = 2 * min(max(hint, 64), _LARGEST) + 3
    keys, zero = torch.arange(end + 64), torch.tensor(0)
    queries = torch.tensor([0, 1, 2, 7, end // 2 - 2, end // 2 - 1, end // 2, end // 2 + 1, end - 1])
    try:
        seen = mask_function(zero, zero, queries[:, None], keys[None, :])
    except Exception:
        return "its mask depends on more than the distance of two tokens (it attends in chunks, or looks at the tokens)"
    seen = seen.expand(len(queries), len(keys))
    width = int(seen[-1].sum())
    window = None if width == end else width
    distance = queries[:, None] - keys[None, :]
    wanted = (distance >= 0) & (distance < (window or end))
    return window if torch.equal(seen, wanted) else "its mask is neither causal nor a sliding window"
