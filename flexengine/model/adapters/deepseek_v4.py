"""Adapter for DeepSeek V4: tokens see the last ones, and entries that stand for many tokens each.

In layers with compressed attention, each window of `compress_rate` tokens (128, or 4) makes an entry, a sum of its
tokens' keys by gates of their own; with the lower rate, also of the window before. An indexer chooses the
`index_topk` best of the latter by keys of its own, which are compressed in the same way.

Keys are values in this model. So a token's values in its page hold what is compressed: the entry, and the indexer's
key, of the window that ends with the token. What windows that are not complete need of earlier tokens is a state of
fixed size (mixers.py).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from flexengine.model.adapters import become
from flexengine.model.adapters.sparse import MOST_BYTES, IndexPages, all_keys
from flexengine.model.forward import Attend, Mix, attend, pause


class Compressed(NamedTuple):
    """What the tokens of a packed pass see in a layer, as a `sparse.ChosenKeys`."""

    tokens: Tensor  # int64 [tokens]: all
    # int32 [tokens, most]: 2 * position of a key that a token sees, or that and 1 of the entry that is kept there
    positions: Tensor
    keys: Tensor  # [tokens, width]: entries, and keys of the indexer, if any; of use for the last tokens of windows
    counts: Tensor  # int32 [tokens]: number of `positions` that are seen
    entry_tokens: int = 0  # tokens of an entry, in a layer whose tokens see all entries before them

    @property
    def attends(self) -> str:
        """What computes attention over pages, as module:name."""
        return "flexengine.worker.cache.compressed:attend"

    @property
    def why(self) -> str:
        """Why layers are not computed by calls of kernels."""
        return "its indexer chooses the keys of each token"

    def attended(self, event: Attend) -> Tensor:
        """Pause for attention, with what is compressed in place of the values. Return its output, [1, tokens, heads,
        head_dim]."""
        out: Tensor = pause(event._replace(v=self.keys[None, None]))
        return out[..., : event.k.shape[-1]]


class Compresses:
    """Mixin of a compressor: a module with states, which returns for each token the entry of the window that it ends,
    [sequences, tokens, head_dim], and the indexer's key if there is an indexer. Those of other tokens are zeros."""

    keeps_state = True

    def forward(self: Any, hidden_states: Tensor, positions: Tensor, cache: Any = None) -> tuple[Tensor, ...]:
        parts = [self, self.indexer] if hasattr(self, "indexer") else [self]
        return tuple(_entries(part, i, hidden_states, positions, cache) for i, part in enumerate(parts))


def _entries(part: Any, number: int, hidden: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """Return the entries of a compressor, or of its indexer. number: of the state of its last tokens."""
    rate, size, count = part.compress_rate, part.head_dim, hidden.shape[1]
    windows = part.kv_proj.out_features // size  # that an entry is made of
    back = windows * rate - 1
    x = torch.cat([part.kv_proj(hidden), part.gate_proj(hidden)], -1).transpose(1, 2)
    whole = cache.update_conv_state(x, 0, state_idx=number, conv_kernel_size=back)
    out = hidden.new_zeros(*hidden.shape[:2], size)
    if hidden.is_meta:
        return out
    whole = nn.functional.pad(whole, (back + count - whole.shape[-1], 0)).transpose(1, 2)
    row, token = ((positions + 1) % rate == 0).nonzero(as_tuple=True)  # ends of windows
    if not len(row):
        return out
    columns = token[:, None] + torch.arange(back + 1, device=token.device)
    kv, gate = whole[row[:, None], columns].chunk(2, dim=-1)  # [windows, tokens of an entry, windows * head_dim]
    gate = gate + part.position_bias.repeat(windows, 1)
    if windows == 2:  # the first half of the numbers is for the next window's entry, the other for the own one's
        kv, gate = (torch.cat([y[:, :rate, :size], y[:, rate:, size:]], 1) for y in (kv, gate))
        first = (positions[row, token] + 1 == rate)[:, None, None]
        first = first & (torch.arange(2 * rate, device=row.device) < rate)[:, None]
        kv, gate = kv.masked_fill(first, 0.0), gate.masked_fill(first, float("-inf"))
    entries = part.kv_norm((kv * gate.softmax(dim=1, dtype=torch.float32).to(kv.dtype)).sum(dim=1))[None]
    starts = (positions[row, token] + 1 - rate)[None]
    cos, sin = part.rotary_emb(entries, position_ids=starts, layer_type=part.rope_layer_type)
    out[row, token] = apply_rotary_pos_emb(entries[:, None], cos, sin)[0, 0].to(out.dtype)
    return out


class SeesCompressed:
    """Mixin of an attention module."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        position_ids: Tensor,
        attention_mask: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        cos, sin = position_embeddings[self.rope_layer_type]
        residual = self.q_a_norm(self.q_a_proj(hidden_states))
        q = self.q_b_norm(self.q_b_proj(residual).view(heads).transpose(1, 2))
        kv = self.kv_norm(self.kv_proj(hidden_states)).view(heads).transpose(1, 2)
        q, kv = (apply_rotary_pos_emb(x, cos, sin) for x in (q, kv))
        options: Any = {"scaling": self.scaling, "s_aux": self.sinks}
        if self.compressor is None:
            out, _none = attend(self, q, kv, kv, attention_mask, sliding_window=self.sliding_window, **options)
        else:
            seen = self._seen(hidden_states, residual, position_ids, (cos, sin))
            out, _none = attend(self, q, kv, kv, None, indices=seen, **options)
        out = apply_rotary_pos_emb(out.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = out.reshape(*hidden_states.shape[:-1], self.config.o_groups, -1)
        return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None

    def _seen(self: Any, hidden: Tensor, residual: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor]) -> Any:
        parts = self.compressor(hidden, positions)
        keys, rate, indexer = torch.cat(parts, -1)[0], self.compressor.compress_rate, len(parts) > 1
        tokens = torch.arange(hidden.shape[1], device=hidden.device)
        if hidden.is_meta:
            most = self.sliding_window + (self.compressor.indexer.index_topk if indexer else 0)
            none = tokens.int()[:0, None].expand(0, most)
            return Compressed(tokens, none, keys, tokens.int(), 0 if indexer else rate)
        at = positions[0]
        last = at[:, None] - torch.arange(self.sliding_window, device=at.device)
        if indexer:
            entries = self._chosen(hidden, residual, parts[1], at, angles)
        else:
            entries = torch.arange(int(at.max() + 1) // rate, device=at.device).expand(len(at), -1)
        rows = torch.cat([2 * last, 2 * ((entries + 1) * rate - 1) + 1], 1)
        valid = torch.cat([last >= 0, (entries >= 0) & (entries < (at[:, None] + 1) // rate)], 1)
        order = torch.sort(valid.int(), dim=1, descending=True, stable=True).indices
        counts = valid.sum(1)
        rows = torch.where(valid, rows, 2 * at[:, None]).gather(1, order)[:, : int(counts.max())]
        return Compressed(tokens, rows.int(), keys, counts.int())

    def _chosen(self: Any, hidden: Tensor, residual: Tensor, keys: Tensor, at: Tensor, angles: Any) -> Tensor:
        """Return the entries that an indexer chooses for each token, int64 [tokens, most]: rising, and -1 or later ones
        behind them. As in sparse.py, those of the whole prompt are scored, since there are equal scores."""
        indexer, rate, parts = self.compressor.indexer, self.compressor.compress_rate, list[Tensor]()
        records = pause(Mix())
        if records is None:  # a trial, of one prompt
            most = min(indexer.index_topk, int(at.max() + 1) // rate)
            return torch.arange(most, device=at.device).expand(len(at), -1)
        where: IndexPages = records.key_pages
        q = indexer.q_b_proj(residual).view(1, hidden.shape[1], -1, indexer.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, *angles).transpose(1, 2)
        first = 0
        for count, past, prompt, table in where.pieces:
            low, stop, end = first, first + count, max(prompt, past + count)
            if (past + count) // rate <= indexer.index_topk:
                low, every = stop, torch.arange((past + count) // rate, device=at.device)
                parts.append(every.expand(count, -1))
            else:
                whole = all_keys(where.pool, (1, self.head_dim), past, end, table, keys[:, low:stop])
                whole = whole[:, rate - 1 :: rate]
            while low < stop:
                total = max(prompt, past + low - first + 1) // rate  # of a token after the prompt, those up to it
                step = max(1, MOST_BYTES // (3 * 4 * q.shape[2] * max(1, total)))
                high = min(low + step, stop, max(low + 1, first + prompt - past))
                some, ends = slice(low, high), (at[low:high, None] + 1) // rate
                scores = indexer.scorer(q[:, some], whole[:, :total], hidden[:, some])[0]
                scores = scores.masked_fill(torch.arange(total, device=at.device) >= ends, float("-inf"))
                parts.append(scores.topk(min(total, indexer.index_topk)).indices.sort(-1).values)
                low = high
            first = stop
        most = max(part.shape[1] for part in parts)
        return torch.cat([nn.functional.pad(part, (0, most - part.shape[1]), value=-1) for part in parts])


class ProjectsGroups:
    """Mixin of a projection of groups of heads: one product for each, whose bits do not depend on other tokens."""

    def forward(self: Any, x: Tensor) -> Tensor:
        pairs = zip(x.unbind(-2), self.weight.chunk(self.n_groups), strict=True)
        return torch.stack([nn.functional.linear(part.contiguous(), weight) for part, weight in pairs], -2)


def adapt(config: Any, model: Any) -> None:
    """Replace attention and compressors of a model, or of a layer."""
    for module in list(model.modules()):
        if hasattr(module, "compressor") and hasattr(module, "o_a_proj"):
            become(module, SeesCompressed)
            become(module.o_a_proj, ProjectsGroups)
            if module.compressor is not None:
                become(module.compressor, Compresses)
    model.small_integers = ("tid2eid",)  # numbers of experts by token id
