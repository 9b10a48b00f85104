"""Adapters for families whose modules compute attention, positions or experts themselves (build.ADAPTERS).

An adapter changes the class of single modules of one model. So other models of the process keep their classes, and a
forward that is replaced on the instance (queries.py) can be given back.
"""

import math
from functools import cache
from typing import Any

from torch import Tensor, nn

from flexengine.model.forward import this_pass


def become(module: nn.Module, mixin: type) -> None:
    """Let the methods of `mixin` replace those of the module's class, for this module only."""
    own: Any = type(module)
    module.__class__ = _joined(mixin, own)


@cache
def _joined(mixin: type, own: type) -> Any:
    return type(own.__name__, (mixin, own), {})


def positions() -> Tensor:
    """Return the positions of the pass's tokens, int64 [1, tokens]."""
    return this_pass().inputs.positions


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of every head: a falling geometric series. If `heads` is no power of two, every second term
    of the next finer series follows."""
    whole = 2 ** int(math.log2(heads))
    base = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return base + [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
