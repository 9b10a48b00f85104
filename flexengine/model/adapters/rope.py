"""Rotary positions whose frequencies depend on a text's length (longrope, dynamic NTK), for texts that use the first
frequencies. `config.context_of` limits rows to these: the keys of a longer text change while it grows."""

from inspect import unwrap
from typing import Any

from flexengine.model.adapters import become


def use_first_frequencies(model: Any) -> None:
    """Let a model's rotary modules keep the frequencies of short texts, and not look at the positions of a batch."""
    for module in model.modules():
        if hasattr(type(module).forward, "__wrapped__") and hasattr(module, "rope_type"):
            become(module, FirstFrequencies)


class FirstFrequencies:
    """Rotary module without the decorators of its forward, which update frequencies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return unwrap(super().forward.__func__)(self, *args, **kwargs)  # type: ignore[misc]
