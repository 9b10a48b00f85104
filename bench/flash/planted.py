"""An OPT checkpoint with random weights whose neurons become active in planted sets, and exact predictors for it.

The first `code` elements of a hidden state are a code of the token's position, which no layer changes. Codes of
successive positions are an autoregressive process, so that successive tokens share active neurons (Markov hot sets).
The row of a neuron in fc1 is a random direction of the code, and little noise. Its bias is the quantile at which it
becomes active as often as planned: few neurons often, most seldom, as measured for real models (PowerInfer, section 3).
So a predictor whose rank is `code` knows all scores but the noise.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import OptShape

MARGIN = 0.15  # predictors name neurons whose score is this much below the quantile, because of the noise
NOISE = 5e-4  # of the elements of fc1 that read no code
STEADY = 2e-4  # of the outputs of attention and FFN: hidden states keep their size


@dataclass(frozen=True)
class PlantedShape(OptShape):
    """An OPT decoder with planted activations.

    Attributes:
        code: elements of a position's code.
        kept: correlation of the codes of two successive positions.
        active: mean share of the neurons that a token makes active.
        skew: exponent of the frequencies: that of the neuron of rank r is proportional to r^-skew.
    """

    code: int = 64
    kept: float = 0.97
    active: float = 0.03
    skew: float = 0.5

    def draw(self, name: str, size: tuple[int, ...], generator: Any) -> Any:
        import torch

        def normal(std: float, *shape: int) -> Any:
            return torch.empty(shape or size).normal_(0.0, std, generator=generator)

        if name.endswith("norm.weight"):
            return torch.ones(size)
        if name.endswith("fc1.bias"):
            return self.thresholds(size[0], generator).neg_()
        if name.endswith("bias"):
            return torch.zeros(size)
        if "embed_positions" in name:
            return self.codes(size, generator)
        if "embed_tokens" in name:
            values = normal(1.0)
            values[:, : self.code] = 0
            return values
        if name.endswith(("out_proj.weight", "fc2.weight")):
            values = normal(STEADY)
            values[: self.code] = 0
            return values
        if name.endswith("fc1.weight"):
            values = normal(NOISE)
            rows = normal(1.0, size[0], self.code)
            values[:, : self.code] = rows / rows.norm(dim=1, keepdim=True)
            return values
        return normal(0.02)

    def codes(self, size: tuple[int, ...], generator: Any) -> Any:
        """Return the table of positions: an autoregressive process of unit variance in the first elements, else 0."""
        import torch

        table = torch.zeros(size)
        table[:, : self.code] = successive(size[0], self.code, self.kept, generator)
        return table

    def thresholds(self, neurons: int, generator: Any) -> Any:
        """Return the score above which each neuron becomes active."""
        import torch

        frequencies = torch.arange(1, neurons + 1).double() ** -self.skew
        frequencies *= self.active * neurons / frequencies.sum()
        order = torch.randperm(neurons, generator=generator)
        return torch.special.ndtri(1 - frequencies.clamp(max=0.95))[order].float()


def successive(count: int, width: int, kept: float, generator: Any) -> Any:
    """Return an autoregressive process of unit variance, fp32 [count, width]; successive rows have correlation kept."""
    import torch

    steps = torch.empty(count, width).normal_(generator=generator)
    for row in range(1, count):
        steps[row] = kept * steps[row - 1] + math.sqrt(1 - kept**2) * steps[row]
    return steps


SHAPES = {
    "opt-6.7b": PlantedShape(layers=32, hidden=4096, ffn=16384, heads=32),
    "opt-1.3b": PlantedShape(layers=24, hidden=2048, ffn=8192, heads=32, vocab=8000),
    "opt-0.4b": PlantedShape(layers=8, hidden=2048, ffn=8192, heads=16, vocab=8000),
    "opt-tiny": PlantedShape(layers=3, hidden=256, ffn=1024, heads=4, vocab=512, positions=256, code=32,
                             shard_bytes=1_000_000),
}  # fmt: skip


def plant_predictors(directory: Path, shape: PlantedShape) -> Path:
    """Put predictors of a planted checkpoint into the cache, as if they had been trained. Return their directory."""
    import torch

    from flexengine.guests.flash import predictors as trained
    from flexengine.guests.flash import traces
    from flexengine.guests.flash.predictors import LayerPredictor, PredictionErrors, Predictor, Trained
    from flexengine.model.checkpoint import read_checkpoint
    from flexengine.model.prepare import prepared

    files = sorted(directory.glob("*.safetensors"))
    tensors = read_checkpoint(directory)
    codes = read_tensor(tensors, "model.decoder.embed_positions.weight")[2:, : shape.code]
    starts = [16 + 24 * i for i in range(8)]  # prompts differ by 24 tokens
    stretches = torch.stack([codes[start : start + 64] for start in starts if start + 64 <= len(codes)])
    choose = torch.zeros(shape.code, shape.hidden)
    choose[:, : shape.code] = torch.eye(shape.code)

    def layer(j: int) -> LayerPredictor:
        rows = read_tensor(tensors, f"model.decoder.layers.{j}.fc1.weight")[:, : shape.code]
        bias = read_tensor(tensors, f"model.decoder.layers.{j}.fc1.bias")
        predictor = Predictor(choose.bfloat16(), rows.bfloat16(), bias.float(), -MARGIN)
        scores = stretches.float() @ rows.float().T + bias.float()
        true, predicted = (scores > 0).numpy(), (scores > -MARGIN).numpy()
        errors = PredictionErrors(true.size, int(true.sum()), int(predicted.sum()), int((true & ~predicted).sum()))
        return LayerPredictor(predictor, errors, traces.sharing(true), traces.sharing(predicted))

    def build(folder: Path) -> None:
        layers = tuple(layer(j) for j in range(shape.layers))
        trained.write(Trained(layers, {"text": "planted"}), trained.checkpoint_key(files), folder)

    what = f"planted predictors of version {trained.VERSION}, margin {MARGIN}"
    return prepared(directory, files, build, what, label="predictors, planted")


def read_tensor(tensors: Any, name: str) -> Any:
    """Return a tensor of a checkpoint."""
    from safetensors import safe_open

    with safe_open(tensors[name].runs[0].path, "pt") as file:
        return file.get_tensor(name)
