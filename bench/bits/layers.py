"""Measured harm: one layer of transformers' own model has the weights that a format encodes, the others are exact."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = 32  # first tokens of a stretch, which are not scored


@dataclass
class Layered:
    """A model whose layers are `model.model.layers`, and the exact model's hidden states on some stretches of text.

    Attributes:
        rows: token ids, [stretches, tokens].
        entering: hidden states before each layer.
        options: keyword arguments of each layer.
        expected: log probabilities of the exact model, by stretch.
    """

    directory: Path
    stretches: Sequence[Sequence[int]]
    entering: list[Any] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch
        import transformers

        self.rows = torch.tensor([list(row) for row in self.stretches])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()
        self.layers = self.model.model.layers
        hooks = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self.layers]
        with torch.no_grad():
            last = self.model.model(self.rows, use_cache=False).last_hidden_state
            self.expected = [self._logprobs(hidden) for hidden in last]
        for hook in hooks:
            hook.remove()

    def _note(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entering.append(args[0])
        self.options.append(kwargs)

    def _logprobs(self, hidden: Any) -> Any:
        """Return the log probabilities of all tokens after each scored position, fp32 [positions, vocabulary]."""
        return self.model.lm_head(hidden[PROMPT - 1 : -1]).log_softmax(-1)

    def matrices(self, layer: int) -> Iterator[tuple[str, Any]]:
        """Yield the weight of each linear layer, by its name in the checkpoint."""
        import torch

        for name, module in self.layers[layer].named_modules():
            if isinstance(module, torch.nn.Linear):
                yield f"model.layers.{layer}.{name}.weight", module.weight

    def costs(self, layer: int, weights: dict[str, Any]) -> list[tuple[float, float]]:
        """Return by stretch the increase of the negative log-likelihood, and the divergence from the exact model's
        probabilities, both in nats per token.

        Args:
            layer: the layer that is changed.
            weights: its changed matrices, by name.
        """
        import torch

        with torch.no_grad():
            own = {name: weight.data for name, weight in self.matrices(layer)}
            for name, weight in self.matrices(layer):
                weight.data = weights[name]
            hidden = self.entering[layer]
            for number in range(layer, len(self.layers)):
                hidden = self.layers[number](hidden, **self.options[number])
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            for name, weight in self.matrices(layer):
                weight.data = own[name]
            pairs = zip(self.model.model.norm(hidden), self.expected, self.rows, strict=True)
            return [self._cost(self._logprobs(states), expected, row) for states, expected, row in pairs]

    def _cost(self, found: Any, expected: Any, row: Any) -> tuple[float, float]:
        targets = row[PROMPT:, None]
        more = (expected.gather(1, targets) - found.gather(1, targets)).mean()
        divergence = (expected.exp() * (expected - found)).sum(-1).mean()
        return float(more), float(divergence)
