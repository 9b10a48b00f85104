"""Adapters for BERT's kin whose modules compute attention themselves: Megatron-BERT, RemBERT, RoFormer, BigBird and
GIT's decoder; and for X-MOD, whose modules choose adapters of languages by tensor values."""

from typing import Any

from torch import Tensor

from flexengine.model.adapters import become, positions
from flexengine.model.forward import attend


def adapt(config: Any, model: Any) -> None:
    """Replace the attention of a model, or of a layer, of a family in `build.ADAPTERS`. config: of the model."""
    if hasattr(model, "bert") and config.model_type == "big_bird":
        model.bert.set_attention_type("original_full")  # as transformers does for a decoder
    for module in model.modules():
        name = type(module).__name__
        if config.model_type != "xmod" and name.endswith("SelfAttention") and hasattr(module, "attention_head_size"):
            become(module, BertScores)
        elif name == "RoFormerSinusoidalPositionalEmbedding":
            become(module, GivenAngles)
        elif name == "XmodOutput" and config.default_language:
            module.language = str(config.default_language)
            become(module, OneLanguage)


class BertScores:
    """Attention with projections `query`, `key` and `value`."""

    def forward(
        self: Any, hidden: Tensor, attention_mask: Any = None, sinusoidal_pos: Any = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden.shape[:-1], -1, self.attention_head_size)
        q, k, v = (f(hidden).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        if hasattr(self, "rotary_value"):
            both = (q, k, v) if self.rotary_value else (q, k)
            q, k, *rest = self.apply_rotary_position_embeddings(sinusoidal_pos, *both)
            v = rest[0] if rest else v
        out, _none = attend(self, q, k, v, attention_mask, scaling=self.attention_head_size**-0.5)
        return out.flatten(2), None


class GivenAngles:
    """Sines and cosines of the pass's positions, [tokens, head_dim]."""

    def forward(self, *_: Any, **__: Any) -> Any:
        return super().forward((), position_ids=positions()[0])  # type: ignore[misc]


class OneLanguage:
    """End of a layer of X-MOD, with the adapter of the default language, whose number all tokens have."""

    def lang_adapter(self: Any, _ids: Tensor, hidden: Tensor) -> Tensor:
        residual = hidden
        if self.adapter_layer_norm is not None:
            hidden = self.adapter_layer_norm(hidden)
        elif self.adapter_reuse_layer_norm:
            hidden = self.LayerNorm(hidden)
        adapted: Tensor = self.adapter_modules[self.language](hidden)
        return adapted + (hidden if self.ln_before_adapter else residual)
