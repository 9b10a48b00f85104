"""transformers' models with weights as they are after encoding."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flexengine.codec.forms import make_form


def rounded(
    directory: Path, codecs: str | Sequence[str | None], importances: Mapping[str, torch.Tensor] | None = None
) -> Any:
    """transformers' model with every matrix of a layer, embedding and head, as they are after encoding.

    codecs: of all layers, or of each; None leaves a layer as it is. importances: of linear layers, by parameter.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def twice(matrix: torch.Tensor, kind: str, name: str = "") -> torch.Tensor:
        form = make_form(kind, *matrix.shape)
        return form.dequantize(form.encode(matrix, (importances or {}).get(name)))

    edges = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    with torch.no_grad():
        for name, module in {id(m): (n, m) for n, m in model.named_modules()}.values():
            weight, number = getattr(module, "weight", None), re.search(r"\.(\d+)\.", name)
            if id(module) in edges or number is None:
                continue
            codec = codecs if isinstance(codecs, str) else codecs[int(number[1])]
            if codec is None:
                continue
            if isinstance(module, torch.nn.Linear):
                weight.copy_(twice(weight, codec, f"{name}.weight"))
            elif type(module).__name__ == "Conv1D":
                weight.copy_(twice(weight.t().contiguous(), codec).t())
            elif hasattr(module, "down_proj") and hasattr(module, "is_transposed"):
                for experts in ("gate_up_proj", "down_proj"):
                    for expert in getattr(module, experts):
                        turned = expert.t() if module.is_transposed else expert
                        new = twice(turned.contiguous(), codec)
                        expert.copy_(new.t() if module.is_transposed else new)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        for module in [model.get_input_embeddings(), *([] if tied else [model.get_output_embeddings()])]:
            module.weight.copy_(twice(module.weight, "int8"))
    return model
