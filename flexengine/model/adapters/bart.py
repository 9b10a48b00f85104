"""Adapters for decoders of encoder-decoders: BART's kin, which count positions from the start of their input, and of
these XGLM, MVP and TrOCR, which also compute attention themselves."""

from typing import Any

from torch import Tensor, nn

from flexengine.model.adapters import become, positions
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace embeddings of positions, and attention, of a model or of a layer of a family in `build.ADAPTERS`."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.endswith("embed_positions") and isinstance(module, nn.Embedding) and kind != "Embedding":
            become(module, GivenPositions)
        elif kind in ("XGLMAttention", "MvpAttention", "TrOCRAttention") and "encoder_attn" not in name:
            become(module, ProjectedScores)


class GivenPositions:
    """Embedding of the pass's positions. They are a vector: a batch's dimension is added where it is needed."""

    def forward(self, ids: Any, cache_length: int = 0, position_ids: Any = None) -> Tensor:
        embedded: Tensor = super().forward(ids, cache_length, position_ids=positions()[0])  # type: ignore[misc]
        return embedded


class ProjectedScores:
    """Attention with projections `q_proj`, `k_proj`, `v_proj` and `out_proj`."""

    def forward(
        self: Any, hidden_states: Tensor, *_: Any, attention_mask: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = (self.q_proj(hidden_states) * self.scaling).view(shape).transpose(1, 2)
        k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        out, _none = attend(self, q, k, v, attention_mask, scaling=1.0)
        return self.out_proj(out.flatten(2)), None
