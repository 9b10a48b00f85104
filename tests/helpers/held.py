"""Reading of the KV in pages of a cache."""

from torch import Tensor

from flexengine.codec.cache import CacheFormat
from flexengine.kernels.reference import read


def held(pool: Tensor, table: Tensor, length: int, form: CacheFormat | None = None) -> tuple[Tensor, Tensor]:
    """Return K and V [length, kv_heads, head_dim] of one sequence, decoded. table: int32, its pages."""
    tokens = pool.shape[3] if form is None else form.page_tokens
    pages = read(pool, table[: -(-length // tokens)].long(), form)  # [pages, 2, kv_heads, page_tokens, head_dim]
    k, v = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return k.contiguous(), v.contiguous()
