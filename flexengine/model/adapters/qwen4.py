"""Adapter for Qwen4-Exp: attention to chosen keys (QSA), and embeddings of n-grams (PLE).

For each token, its indexer chooses `indexer_budget` earlier tokens in whole blocks of `indexer_compress_ratio`, and the
tokens of the last, incomplete block. It scores a block by the mean of the keys of its own that the block's tokens have.
These keys are kept beside the values, as those of DeepSeek's indexers (sparse.py). Tokens with fewer earlier ones see
all of them, and nothing is scored.

The layer of n-grams has two states: ids of the last tokens, and columns of a dilated convolution.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.adapters import become
from flexengine.model.adapters.sparse import Chooses, ChosenKeys, IndexPages
from flexengine.model.forward import Mix, attend, pause

# Buffers of integers, which follow from the config.
_NUMBERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


class SeesBlocks:
    """Mixin of an attention module with an indexer of blocks."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        choice = self.indexer(hidden_states, position_embeddings)
        q, gate = self.q_proj(hidden_states).view(*heads[:-1], 2 * self.head_dim).chunk(2, dim=-1)
        k, v = self.k_proj(hidden_states).view(heads), self.v_proj(hidden_states).view(heads)
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = (_rotated(x, *position_embeddings) for x in (q, k))
        out, _none = attend(self, q, k, v, attention_mask, scaling=self.scaling, indices=choice)
        return self.o_proj(out.flatten(2) * torch.sigmoid(gate.flatten(2))), None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [1, heads, tokens, head_dim] with its first elements rotated by halves. cos, sin: [1, tokens, some]."""
    turned, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    one, two = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None], rest], -1)


class ChoosesBlocks(Chooses):
    """Mixin of an indexer of blocks: returns a ChosenKeys."""

    rotary: Any  # a list of the decoder's module of cosines and sines

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any) -> ChosenKeys:  # type: ignore[override]
        heads, size, ratio = self.index_n_heads, self.index_head_dim, self.compress_ratio
        top = self.block_topk * ratio + ratio - 1
        q, keys = self.index_qk_proj(hidden_states).split([heads * size, size], dim=-1)
        q = _rotated(self.q_layernorm(q.view(*q.shape[:2], heads, size)).transpose(1, 2), *position_embeddings)[0]
        q = q.transpose(0, 1).float().contiguous()  # [tokens, heads, index_head_dim]
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        where: IndexPages | None = None if q.is_meta else pause(Mix())
        if where is None:  # a trial, of one prompt
            return ChosenKeys(none, none.int().view(0, top), keys[0], none)
        chosen, numbers, counts, first = list[Tensor](), list[int](), list[int](), 0
        for count, past, _, table in where.pieces:
            new = max(0, top - past)  # the first token that does not see all
            if new < count:
                own = keys[:, first : first + count]
                blocks = self._blocks(self._whole(where.pool, past, past + count, table, own)[0]).float()
                for at in range(new, count):  # one by one, so that bits do not depend on the others
                    seen = past + at + 1
                    likeness = torch.matmul(q[first + at], blocks[: seen // ratio].t()).t()
                    scores = torch.relu(likeness).sum(-1) / math.sqrt(size)
                    best = scores.topk(self.block_topk).indices.sort().values
                    tokens = (best[:, None] * ratio + torch.arange(ratio, device=q.device)).flatten()
                    tail = torch.arange(seen // ratio * ratio, seen, device=q.device)
                    rest = tail.new_full((ratio - 1 - len(tail),), seen - 1)  # beyond the count
                    chosen.append(torch.cat([tokens, tail, rest]).int())
                    numbers.append(first + at)
                    counts.append(len(tokens) + len(tail))
            first += count
        if not chosen:
            return ChosenKeys(none, none.int().view(0, top), keys[0], none)
        each = torch.tensor(counts, dtype=torch.int32, device=q.device)
        return ChosenKeys(torch.tensor(numbers, device=q.device), torch.stack(chosen), keys[0], each)

    def _blocks(self: Any, keys: Tensor) -> Tensor:
        """Return the keys of whole blocks, [blocks, index_head_dim], from those of a sequence's tokens."""
        count = len(keys) // self.compress_ratio
        each = keys[: count * self.compress_ratio].view(count, self.compress_ratio, -1)
        pooled = self.k_layernorm(each.float().mean(1).to(keys.dtype))
        starts = torch.arange(count, device=keys.device)[None, None] * self.compress_ratio
        return _rotated(pooled[None, None], *self.rotary[0](pooled[None], starts))[0, 0]


class KeepsIds:
    """Mixin of a layer of n-grams: all of it is one module with states."""

    keeps_state = True

    def forward(self: Any, hidden_states: Tensor, input_ids: Tensor, cache: Any = None, conv_mask: Any = None) -> Any:
        return super().forward(hidden_states, input_ids, cache, conv_mask)  # type: ignore[misc]


def adapt(config: Any, model: Any) -> None:
    """Replace attention and layers of n-grams of a model, or of a layer. config: of the model."""
    config.get_text_config()._attn_implementation = config._attn_implementation
    rotary = [m for name, m in model.named_modules() if name.endswith("rotary_emb") and "visual" not in name]
    for module in list(model.modules()):
        if hasattr(module, "indexer") and hasattr(module, "q_proj"):
            become(module, SeesBlocks)
            become(module.indexer, ChoosesBlocks)
            module.indexer.heads, module.indexer.first = config.get_text_config().num_key_value_heads, module.head_dim
            module.indexer.rotary = rotary
        elif hasattr(module, "ple_embedding"):
            become(module, KeepsIds)
        elif hasattr(module, _NUMBERS[0]) and isinstance(module, nn.Module):
            module._non_persistent_buffers_set.update(_NUMBERS)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    model._keys_to_ignore_on_load_unexpected = [*ignored, rf"\.ple_embedding\.({'|'.join(_NUMBERS)})$"]
