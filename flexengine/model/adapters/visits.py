"""Adapter for HRM, which visits its layers several times: each visit becomes a layer, with keys and values of its own.

Layers that are visits of one layer have its weights, which are read for each of them.
"""

import copy
import re
from functools import partial
from typing import Any

from torch import Tensor, nn

from flexengine.activity import message
from flexengine.model.adapters import become

_PART = re.compile(r"(.*\b)([LH])_module\.layers\.(\d+)\.(.+)")


def adapt(config: Any, model: Any) -> None:
    """Make the list of visits of a model, and let its stacks go through it. config: of the model."""
    decoder = next((m for m in model.modules() if type(m).__name__ == "HrmTextModel"), None)
    if decoder is None:  # a layer
        return
    if config.prefix_lm:
        causal = "prompts are read causally, as by transformers without token_type_ids"
        message(f"{causal}; a model that was trained with prefix_lm may answer worse")
    low, high, size = decoder.L_module.layers, decoder.H_module.layers, config.num_layers_per_stack
    own = [layer for _ in range(config.H_cycles) for stack in [low] * config.L_cycles + [high] for layer in stack]
    decoder.visits = nn.ModuleList([copy.deepcopy(layer, {id(config): config}) for layer in own])
    decoder.L_bp_cycles_padded = [config.L_cycles] * config.H_cycles  # gradients tell what reads the embedding
    first = {layer: own.index(layer) for layer in own}
    ties = dict(model.all_tied_weights_keys)
    prefix = next(name for name, module in model.named_modules() if module is decoder.visits)
    for number, (visit, layer) in enumerate(zip(decoder.visits, own, strict=True)):
        visit.self_attn.layer_idx = number
        if number != first[layer]:
            names = [name for name, _ in visit.named_parameters()]
            ties |= {f"{prefix}.{number}.{name}": f"{prefix}.{first[layer]}.{name}" for name in names}
    model.all_tied_weights_keys = ties
    model.stored_name = partial(stored_name, {"L": 0, "H": config.L_cycles * size})
    for stack in (decoder.L_module, decoder.H_module):
        become(stack, Visits)
        stack.count = size
        stack.layers, stack.__dict__["visits"] = nn.ModuleList(), decoder.visits


def stored_name(first: dict[str, int], name: str) -> str:
    """Return the name of a stored tensor in the first visit of its layer. first: the first visit of each stack."""
    match = _PART.fullmatch(name)
    return name if match is None else f"{match[1]}visits.{first[match[2]] + int(match[3])}.{match[4]}"


class Visits:
    """A stack of layers of HRM."""

    def forward(self: Any, hidden_states: Tensor, cycle_offset: int = 0, **kwargs: Any) -> Tensor:
        for number in range(cycle_offset, cycle_offset + self.count):
            hidden_states = self.visits[number](hidden_states, cycle_offset=cycle_offset, **kwargs)
        normed: Tensor = self.final_norm(hidden_states)
        return normed
