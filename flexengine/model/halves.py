"""What a second trial on the meta device tells about a model: which weights its layers use before attention only, and
whether layers read values of the embedding beside hidden states."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.model.build import marked
from flexengine.model.forward import ATTENTION, Attend, Layer, Pause
from flexengine.model.skeleton import Skeleton


class Uses(ExitStack):
    """Notes, in a trial, the parameters of layers that are used before attention only: those of modules that have
    returned before the pause, and do not run after it."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self._layers = skeleton.layers
        self._begun: set[nn.Module] = set()
        self._ended: set[nn.Module] = set()
        self._before: list[set[nn.Module]] = []  # by layer, modules that had returned at the pause
        self._fine = True  # whether each parameter is used in one half only
        for module in dict.fromkeys(param.module for layer in self._layers for param in layer.values()):
            self.enter_context(module.register_forward_pre_hook(self._begin))
            self.enter_context(module.register_forward_hook(self._end))

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._fine &= not any(module in before for before in self._before)
        self._begun.add(module)

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        self._ended.add(module)

    def attend(self, layer: int) -> None:
        """Note a pause at attention."""
        own = {param.module for param in self._layers[layer].values()}
        self._before.append(own & self._ended)
        self._fine &= bool(self._before[-1]) and not own & (self._begun - self._ended)

    def early(self) -> frozenset[str]:
        """Return the names; none if a layer cannot be divided."""
        pairs = zip(self._layers, self._before, strict=True)
        names = (name for layer, before in pairs for name, param in layer.items() if param.module in before)
        return frozenset(names) if self._fine else frozenset()


def requiring_gradients(model: Any) -> Any:
    """Return a context of trials with gradients: the output of the embedding requires gradients. As the first layer's
    hidden states do not, later values require them only if they depend on the embedding in another way."""

    def required(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # clone, as a leaf must not be changed in place

    return model.get_input_embeddings().register_forward_hook(required)


def from_embedding(event: Pause) -> bool:
    """Return whether values of a pause depend on the embedding; see `requiring_gradients`."""
    if isinstance(event, Layer):
        return event.index > 0 and event.hidden.requires_grad
    return any(isinstance(x, Tensor) and x.requires_grad for x in (event if isinstance(event, tuple) else ()))


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Set buffers off the meta device, such as tables of positions, to the meta device, and restore them: a module that
    indexes one without a move would mix the devices."""
    kept = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None and not b.is_meta]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.to("meta")
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def look_closer(skeleton: Skeleton) -> None:
    """Set `early` and `embedding_stays` of a skeleton by a trial. If the trial fails, as it may with gradients only,
    nothing changes: layers cannot be divided, and the output of the embedding is kept."""
    stays = False
    try:
        whole = buffers_on_meta(skeleton.model)
        with whole, marked(ATTENTION), torch.enable_grad(), requiring_gradients(skeleton.model), Uses(skeleton) as uses:
            for event in skeleton.trial():
                stays |= from_embedding(event)
                if isinstance(event, Attend):
                    uses.attend(event.layer)
    except Exception:
        return
    early = frozenset[str]() if skeleton.experts or skeleton.mixing else uses.early()
    skeleton.embedding_stays, skeleton.early = stays, early
