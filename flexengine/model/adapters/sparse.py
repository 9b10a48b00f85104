"""Adapter for DeepSeek's sparse attention (DSA): an indexer chooses the keys that each token sees.

The indexer of a layer scores the keys of all earlier tokens by keys of its own, one of `index_head_dim` elements for
each token, and chooses the `index_topk` best ones. A token with fewer earlier ones sees all of them: for it nothing is
scored. The indexer's keys are kept in columns of the layer's values (`ChosenKeys.attended`), so they are moved, shared,
copied and counted with its KV pages. Where K is wider than V (DeepSeek V3.2, A.X K2, Dots 3), these columns are unused
anyway; where it is not (GLM-5, HY V4), pages are about 6 % larger.

The indexer's own forward runs unmodified, for each sequence alone, with as many keys as if the prompt were uncut, those
of later tokens masked: torch's choice among equal scores depends on their number, and where all heads of an indexer
find no likeness, scores are 0. Of a prefix that prompts share, the number is that of its tokens; of a token after the
prompt, also one that is scored, that of the tokens up to it.

Layers may take the choice of a layer before (GLM-5): it is kept in the pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexengine.errors import UnsupportedModel
from flexengine.model.adapters import become
from flexengine.model.forward import Attend, Mix, pause, this_pass

MOST_BYTES = 64 << 20  # of the scores of one call of an indexer, unless those of a single token take more
_COPIES = 3  # tensors of scores by head that an indexer has at once


class ChosenKeys(NamedTuple):
    """The keys that tokens of a packed pass see, which a layer's indexer chose."""

    tokens: Tensor  # int64 [n]: those that do not see all keys of their sequence, in order
    positions: Tensor  # int32 [n, index_topk], ascending: positions of the keys that each of them sees
    keys: Tensor | None  # [tokens, index_head_dim]: keys of the indexer; None in a layer without one
    counts: Tensor | None = None  # int32 [n]: number of `positions` that are seen, if it differs

    @property
    def attends(self) -> str:
        """What computes attention over pages, as module:name; "" if all tokens see all keys."""
        return "flexengine.worker.cache.chosen:attend" if len(self.tokens) else ""

    @property
    def why(self) -> str:
        """Why layers are not computed by calls of kernels."""
        return "its indexer chooses the keys of each token"

    def attended(self, event: Attend) -> Tensor:
        """Pause for attention over the chosen keys, with the indexer's keys in further columns of the values. Return
        its output, [1, tokens, heads, value_dim]."""
        heads, width = event.v.shape[1], event.v.shape[-1]
        if self.keys is not None:
            count, size = self.keys.shape
            keys = nn.functional.pad(self.keys, (0, columns(size, heads) * heads - size))
            event = event._replace(v=torch.cat([event.v, keys.view(1, count, heads, -1).transpose(1, 2)], -1))
        out: Tensor = pause(event)
        return out[..., :width]


class IndexPages(NamedTuple):
    """Where a gpu_batch's sequences have keys of an indexer in one layer: answer to its `Mix`."""

    pool: Tensor  # [n_pages, 2, kv_heads, page_tokens, head_dim], not encoded
    pieces: tuple["IndexPiece", ...]  # of all tokens of the pass, in order


class IndexPiece(NamedTuple):
    """Consecutive tokens of one sequence."""

    tokens: int  # number of the piece's tokens
    past: int  # tokens before them
    prompt: int  # tokens of the prompt that the sequence has, or would have if its scored tokens were generated
    table: Tensor | None  # int32 [pages]: page table; None if `past` is 0


def columns(size: int, heads: int) -> int:
    """Return the columns of each KV head's values that hold an indexer's key of `size` elements."""
    return -(-size // heads)


class _KeysOnly(Exception):
    """Ends an indexer's forward when its keys are known."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _Keys:
    """What an indexer sees as cache: it returns the keys of the tokens before with those of a call."""

    def __init__(self, whole: Tensor | None) -> None:
        self.whole = whole  # [1, tokens, index_head_dim], with those of the call; None ends the call

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        if self.whole is None:
            raise _KeysOnly(keys)
        return self.whole


class Chooses:
    """Mixin of an indexer: returns a ChosenKeys."""

    inherited = False  # whether a layer after it takes its choice
    heads: int  # KV heads of its layer
    first: int  # columns of values before the indexer's keys
    index_topk: int
    n_heads: int

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: Any, attention_mask: Any, *_: Any, **__: Any
    ) -> ChosenKeys:
        own, top, device = super().forward, self.index_topk, hidden_states.device  # type: ignore[misc]

        def run(tokens: slice, mask: Tensor, whole: Tensor | None) -> Any:
            turned = tuple(x[:, tokens] for x in position_embeddings)
            return own(hidden_states[:, tokens], q_resid[:, tokens], turned, mask, None, cache=_Keys(whole))

        everything = slice(0, hidden_states.shape[1])
        try:
            keys = run(everything, attention_mask, None)
        except _KeysOnly as found:
            keys = found.keys
        where: IndexPages | None = None if hidden_states.is_meta else pause(Mix())
        if where is None:  # a trial, of one prompt
            if hidden_states.is_meta:
                run(everything, attention_mask, keys)
            empty = torch.empty(0, dtype=torch.int64, device=device)
            return self._kept(ChosenKeys(empty, empty.int().view(0, top), keys[0]))
        if self.inherited:
            this_pass().choice = None
        chosen, numbers, first = list[Tensor](), list[int](), 0
        for count, past, prompt, table in where.pieces:
            new = max(0, top - past)
            if new < count:
                end = max(prompt, past + count)
                whole = self._whole(where.pool, past, end, table, keys[:, first : first + count])
                at = torch.arange(end, device=device)
            while new < count:
                total = max(prompt, past + new + 1)
                most = max(1, MOST_BYTES // (_COPIES * 4 * self.n_heads * total))
                end = min(count, new + most, max(new + 1, prompt - past))
                seen = at[:total] <= at[past + new : past + end, None]
                tokens = slice(first + new, first + end)
                chosen.append(run(tokens, seen[None], whole[:, :total])[0].sort(-1).values)
                numbers += range(tokens.start, tokens.stop)
                new = end
            first += count
        positions = torch.cat(chosen) if chosen else torch.empty(0, top, dtype=torch.int32, device=device)
        return self._kept(ChosenKeys(torch.tensor(numbers, dtype=torch.int64, device=device), positions, keys[0]))

    def _kept(self, choice: ChosenKeys) -> ChosenKeys:
        if self.inherited:
            this_pass().choice = choice._replace(keys=None)
        return choice

    def _whole(self, pool: Tensor, past: int, total: int, table: Tensor | None, keys: Tensor) -> Tensor:
        return all_keys(pool, (self.heads, self.first), past, total, table, keys)


def all_keys(pool: Tensor, kept: tuple[int, int], past: int, total: int, table: Tensor | None, keys: Tensor) -> Tensor:
    """Return the keys of a sequence's tokens, [1, total, size]: those in pages, new ones, and zeros.

    Args:
        pool: as in `IndexPages`.
        kept: KV heads whose values have the keys in further columns, and the first of these columns.
        past: tokens in pages.
        table: as in `IndexPiece`.
        keys: of the new tokens, [1, tokens, size].
    """
    keys, (heads, first) = nn.functional.pad(keys, (0, 0, 0, total - past - keys.shape[1])), kept
    if table is None:
        return keys
    size, page_tokens, repeated = keys.shape[-1], pool.shape[3], pool.shape[2] // heads
    pages = table[: -(-past // page_tokens)].long()
    some = pool[:, 1, ::repeated, :, first : first + columns(size, heads)]
    before = some[pages].transpose(1, 2).reshape(len(pages) * page_tokens, -1)[:past, :size]
    return torch.cat([before.to(keys.dtype)[None], keys], 1)


class Inherits(nn.Module):
    """In place of the indexer of a layer that takes the choice of a layer before."""

    def forward(self, *_: Any, **__: Any) -> ChosenKeys:
        choice: ChosenKeys | None = this_pass().choice
        if choice is None:
            fault = "a layer sees the keys that a layer before it chose, which was not computed here"
            must = 'begin each stage with a layer that has an indexer ("full" in indexer_types of config.json)'
            raise UnsupportedModel(f"{fault}; {must}")
        return choice


class SeesChosen:
    """Mixin of an attention module with an indexer. Its masks are not used, but read."""

    def forward(self, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        mask = torch.empty(1, 1, 1, 1, dtype=torch.bool) if attention_mask is None else attention_mask
        return super().forward(*args, attention_mask=mask, **kwargs)  # type: ignore[misc]


class Plain(nn.Linear):
    """A projection whose weight has the dtype that its module says: the module converts to it."""


def adapt(config: Any, model: nn.Module) -> None:
    """Let indexers choose for packed sequences, and layers without one take the choice of a layer before."""
    config.get_text_config()._attn_implementation = config._attn_implementation
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if indexer is None and not getattr(module, "skip_topk", False):
            continue
        if not isinstance(indexer, nn.Module):
            module.indexer = Inherits()
        else:
            indexer.heads, indexer.first = module.num_heads, module.v_head_dim
            indexer.weights_proj.__class__ = Plain  # type: ignore[assignment, union-attr]
            become(indexer, Chooses)
        become(module, SeesChosen)
    every = [*model.modules()]
    for module in every if any(isinstance(module, Inherits) for module in every) else ():
        if isinstance(module, Chooses):
            module.inherited = True
