"""Queries first: attention modules of transformers, unmodified, whose queries are computed before keys and values.

The forward of an attention module computes queries, keys and values, and then calls the attention function. In a pass
with `queries_first`, this forward runs twice per layer:

    run     q_proj                k_proj, v_proj    at the attention function
    first   computes              return zeros      pauses with Query, then the run ends
    second  returns the same      compute           pauses with Attend, as in every pass

So no product is computed twice, and all products are those of other passes. Norms and rotary positions of the queries
are computed twice, which is little. A module can do this if keys and values do not change its queries. `separable`
tries it once, when the model is opened.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import greenlet
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from flexengine.model.forward import Attend, Pass, PausingLayer, Queried
from flexengine.model.linear import FastLinear

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_MOST_ELEMENTS = 1 << 22  # of a parameter or buffer that a trial reads; larger ones belong to projections

# By attention module, arguments of its forward, None for no call; None is the module of a layer without such a module.
Calls = dict[nn.Module | None, tuple[tuple[Any, ...], dict[str, Any]] | None]


class QueriesFirst:
    """Replaces the forwards of an attention module and of its projections, as the table says."""

    def __init__(self, module: Any) -> None:
        self.module = module
        # The own forwards of the projections, by name, and of the attention module, by "".
        self.own = {name: getattr(module, name).forward for name in PROJECTIONS} | {"": module.forward}
        module.forward = self._forward
        for name in PROJECTIONS:
            getattr(module, name).forward = partial(self._project, name)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        current: Any = greenlet.getcurrent()
        if current.queries_first:
            current.only_queries = True
            try:
                self.own[""](*args, **kwargs)
            except Queried:
                pass
            finally:
                current.only_queries = False
        return self.own[""](*args, **kwargs)

    def _project(self, name: str, x: Tensor) -> Any:
        current: Any = greenlet.getcurrent()
        if name != "q_proj" and current.only_queries:
            return x.new_zeros(*x.shape[:-1], getattr(self.module, name).out_features)
        if name != "q_proj" or not current.queries_first:
            return self.own[name](x)
        if current.only_queries:
            current.queries = self.own[name](x)
            return current.queries
        queries, current.queries = current.queries, None
        return queries

    def undo(self) -> None:
        """Give the modules the forwards of their classes back."""
        for module in (self.module, *(getattr(self.module, name) for name in PROJECTIONS)):
            del module.forward


def use_queries_first(model: nn.Module) -> None:
    """Let passes of a model compute queries first, if they are made so. The model must be `separable`."""
    for module in filter(None, _attentions(model)):
        if not isinstance(getattr(module.forward, "__self__", None), QueriesFirst):
            QueriesFirst(module)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Calls]:
    """Record the calls of attention modules in passes of a model."""
    calls: Calls = dict.fromkeys(_attentions(model))

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = args, kwargs

    with ExitStack() as hooks:
        for module in filter(None, calls):
            hooks.enter_context(module.register_forward_pre_hook(record, with_kwargs=True))
        yield calls


def separable(calls: Calls) -> bool:
    """Return whether the queries of every layer can be computed first. calls: `recorded` in a pass on the meta device.

    Each kind of module is tried with random numbers: its queries must be the same in both runs.
    """
    kinds = dict[Any, Any]()
    for module, call in calls.items():
        if module is None or call is None:
            return False
        kinds[type(module), *((name, x.shape) for name, x in module.state_dict().items())] = module, *call
    return all(_separable(*call) for call in kinds.values())


def _attentions(model: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the module of each layer that has one linear projection each for queries, keys and values; None if there
    is not exactly one."""
    for layer in (module.layer for module in model.modules() if isinstance(module, PausingLayer)):
        all_of = [m for m in layer.modules() if all(isinstance(getattr(m, p, None), FastLinear) for p in PROJECTIONS)]
        yield all_of[0] if len(all_of) == 1 else None


def _separable(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    rng = torch.Generator().manual_seed(0)

    def projected(out_features: int, x: Tensor) -> Tensor:
        return torch.randn(*x.shape[:-1], out_features, generator=rng).to(x.dtype)

    for name in PROJECTIONS:
        projection = getattr(module, name)
        projection.forward = partial(projected, projection.out_features)
    tried = QueriesFirst(module)
    small = {n: x for n, x in (*module.named_parameters(), *module.named_buffers()) if x.numel() <= _MOST_ELEMENTS}
    own = {name: _numbers(x, rng) for name, x in small.items() if not name.startswith(PROJECTIONS)}
    current: Any = Pass(partial(functional_call, module, own))
    current.queries_first = True
    try:
        first = current.switch(_numbers(args, rng), _numbers(kwargs, rng))
        queries = first.attend.q.clone()  # the second run may change them in place
        second = current.switch()
    except Exception:  # the module reads what a trial does not have
        return False
    finally:
        tried.undo()
        if current and not current.dead:
            current.throw()
    alike = isinstance(second, Attend) and torch.equal(queries, second.q)
    return alike and not torch.equal(first.attend.k, second.k)


def _numbers(x: Any, rng: torch.Generator) -> Any:
    """Return random numbers in place of the tensors on the meta device in x; zeros for integers, such as positions."""

    def number(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_meta:
            return x
        if not x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype)
        return torch.rand(x.shape, generator=rng).add_(0.5).to(x.dtype)

    return tree_map(number, x)
