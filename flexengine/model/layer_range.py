"""A range of a model's layers: hidden states enter before its first layer and leave after its last one.

Modules are not changed, so positions and masks are computed as for the whole model. Layers before the range return
their input. The pass ends at the pause of the first layer after the range. The first layer of the range gets number 0.
"""

from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from flexengine.errors import InvalidInput, UnsupportedModel, library_faults
from flexengine.model.build import marked
from flexengine.model.forward import ATTENTION, Layer, PausingLayer, pausing_layers
from flexengine.model.halves import buffers_on_meta, from_embedding, requiring_gradients
from flexengine.model.skeleton import Skeleton


def use_range(skeleton: Skeleton, layers: tuple[int, int]) -> None:
    """Restrict a skeleton of a whole model, in place, to a range of its layers: first, and last + 1.

    Raises:
        InvalidInput: the model does not have these layers.
        UnsupportedModel: the layers read values that earlier layers or the embedding computed, beside hidden states.
    """
    count = len(skeleton.layers)
    numbers: Any = layers if isinstance(layers, tuple) and len(layers) == 2 else ()
    if not numbers or any(type(n) is not int for n in numbers) or not 0 <= numbers[0] < numbers[1] <= count:
        fault = f"layers is {layers!r}; it must be (first, last + 1) with 0 <= first <= last < {count}"
        raise InvalidInput(f"{fault}, as {skeleton.name} has {count} layers")
    first, end = numbers
    modules = pausing_layers(skeleton.model)
    failed = f"{skeleton.name}: a trial pass through layers {first} to {end - 1} alone failed"
    on_meta = buffers_on_meta(skeleton.model)
    with library_faults(failed, UnsupportedModel), marked(ATTENTION), torch.enable_grad(), on_meta:
        if first:  # a skipped layer must return as many values
            note_outputs(skeleton)
        for module in modules:
            module.index -= first
        skeleton.first, skeleton.layers = first, skeleton.layers[first:end]
        inside = (None, *range(first, end))
        skeleton.tables = {name: table for name, table in skeleton.tables.items() if table.layer in inside}
        skeleton.windows = {j - first: skeleton.windows[j] for j in range(first, end) if j in skeleton.windows}
        reasons = {j - first: why for j, why in skeleton.as_modules.items() if first <= j < end}
        skeleton.as_modules.clear()
        skeleton.as_modules.update(reasons)
        if first:
            refuse_leaks(skeleton)


def skippable(skeleton: Skeleton) -> None:
    """Prepare a whole model for passes that skip layers. Raise UnsupportedModel if they need what is skipped."""
    failed = f"{skeleton.name}: a trial pass that skips layers failed"
    on_meta = buffers_on_meta(skeleton.model)
    with library_faults(failed, UnsupportedModel), marked(ATTENTION), torch.enable_grad(), on_meta:
        note_outputs(skeleton)
        refuse_leaks(skeleton)
        for first in (0, 1):  # each layer after one that is skipped
            deque(skeleton.trial(range(first, len(skeleton.layers), 2)), 0)


def note_outputs(skeleton: Skeleton) -> None:
    """Note how many values each layer returns, for passes that skip it."""
    with ExitStack() as hooks:
        for module in pausing_layers(skeleton.model):
            hooks.enter_context(module.layer.register_forward_hook(partial(_note_outputs, module)))
        deque(skeleton.trial(), 0)


def _note_outputs(module: PausingLayer, _: nn.Module, __: Any, output: Any) -> None:
    module.outputs = len(output) if isinstance(output, tuple | list) else None


def refuse_leaks(skeleton: Skeleton) -> None:
    """Raise UnsupportedModel if a layer of the range reads values of the embedding, except through hidden states: in
    this trial, only what depends on the embedding in another way requires gradients."""
    with requiring_gradients(skeleton.model):
        for event in skeleton.trial():
            if from_embedding(event):
                fault = f"{skeleton.name}: its layers read values of the embedding beside hidden states"
                raise UnsupportedModel(f"{fault}, so it can be run only as a whole")
            if isinstance(event, Layer) and event.index == len(skeleton.layers):
                return
