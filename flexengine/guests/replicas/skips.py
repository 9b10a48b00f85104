"""Layers that begin at their attention: prepared models.

The engine that finishes a layer gets its input and its attention. The pass enters the layer at its start, and the
attention function returns what is known. So queries, keys and values have no use there, and their products are left
out, unless more than hidden states is kept across the cut at attention (Lamina, section 3.8; `model.slices`), such as a
gate. Layers of native kernels leave them out by themselves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import greenlet
import torch
from torch import Tensor

from flexengine.model.forward import Attend, Layer, pausing_layers
from flexengine.model.layer_range import skippable
from flexengine.model.linear import FastLinear
from flexengine.model.skeleton import Skeleton
from flexengine.model.slices import HIDDEN, slices_of


def prepare_skips(skeleton: Skeleton, native: bool) -> None:
    """Prepare a whole model for passes that skip layers and parts of them. Raise UnsupportedModel if its layers need
    what is skipped.

    Args:
        native: whether layers that native kernels can compute are computed by them.
    """
    skippable(skeleton)
    projections, layers = _before_attention(skeleton), pausing_layers(skeleton.model)
    for layer, modules, cut in zip(layers, projections, slices_of(skeleton).cuts, strict=True):
        if all(kept.name == HIDDEN for kept in cut.kept) and not (native and layer.native is not None):
            for module in modules:
                if "forward" not in vars(module):
                    module.forward = partial(_project, module.out_features, module.forward)  # type: ignore[method-assign]


def _project(features: int, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    known = getattr(greenlet.getcurrent(), "attended", None) is not None
    return x.new_empty(*x.shape[:-1], features) if known else own(x)


def _before_attention(skeleton: Skeleton) -> list[list[FastLinear]]:
    """Return, by layer, the linear modules that run before its attention."""
    ran, found = list[FastLinear](), list[list[FastLinear]]()

    def note(module: Any, _: Any) -> None:
        ran.append(module)

    linear = [module for module in skeleton.model.modules() if type(module) is FastLinear]
    hooks = [module.register_forward_pre_hook(note) for module in linear]
    try:
        with torch.no_grad():
            for event in skeleton.trial():
                if isinstance(event, Attend):
                    found.append(ran.copy())
                elif isinstance(event, Layer):
                    ran.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return found
