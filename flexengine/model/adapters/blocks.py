"""Adapter for MiniMax M3, whose sparse layers let a token see blocks of keys that an indexer chooses.

A row with no more blocks than an indexer chooses sees all its tokens. So rows are limited to these, and compute without
indexers, whose tensors are not read.
"""

import re
from typing import Any

from flexengine.activity import message


def adapt(config: Any, model: Any) -> None:
    """Leave the indexers of a model, or of a layer, out, and limit the rows of a model. config: of the model."""
    text, found = config.get_text_config(), False
    for module in model.modules():
        if type(module).__name__ == "MiniMaxM3VLAttention" and module.indexer is not None:
            module.indexer, found = None, True
    if found and hasattr(model, "get_decoder"):
        model.most_tokens = text.index_topk_blocks * text.index_block_size
        model.stored_name = stored_name
        sizes = f"{text.index_topk_blocks} blocks of {text.index_block_size} tokens"
        message(f"{model.most_tokens:,} tokens are the most of a row: a token of longer ones sees {sizes} only")


def stored_name(name: str) -> str | None:
    """Return a tensor's name; None for an indexer's."""
    return None if re.search(r"\.self_attn\.(indexer\.|index_[qk]_)", name) else name
