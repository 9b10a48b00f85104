"""What feed-forward blocks compute, seen while a model reads a text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import greenlet
from torch import Tensor

from flexengine.guests.flash.feed_forward import FeedForward

# Called with the number of a block, the `Inputs` of the pass, the block's input, and what its first matrix gives.
Note = Callable[[int, Any, Tensor, Tensor], None]


@contextmanager
def watching(blocks: Sequence[FeedForward], note: Note) -> Iterator[None]:
    """Call `note` for each block in each pass of a job, while the context is open."""

    def hook(number: int) -> Any:
        def noting(_: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            inputs = getattr(greenlet.getcurrent(), "inputs", None)
            if inputs is not None:  # None in trial passes
                note(number, inputs, args[0], out)

        return noting

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.modules[0].register_forward_hook(hook(number)).remove)
        yield
