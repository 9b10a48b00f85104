"""worker.neurons.Block: sums against a formula, and when its records are read, with a reader that overwrites at once."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from flexengine.codec.records import RecordForm
from flexengine.flash.arena import Numbers
from flexengine.model.neurons import FeedForward
from flexengine.worker.neurons import Block

NEURONS, WIDTH = 48, 8


class Toy:
    """A block whose tokens use the neurons in `uses`, bool [tokens, NEURONS].

    Attributes:
        events: "now" and "begin" of reads, with the number of records; "arrive" and "compute".
    """

    def __init__(self, room: int) -> None:
        torch.manual_seed(room)
        self.first, self.down = torch.randn(NEURONS, WIDTH), torch.randn(NEURONS, WIDTH)
        form = RecordForm("float32", WIDTH)
        self.records, self.events = form.encode(self.first, self.down), list[object]()
        bare = SimpleNamespace(bias=None)
        feed = FeedForward("first", "", "down", (bare, None, bare), NEURONS, WIDTH, nn.ReLU())  # type: ignore[arg-type]
        memory, streamed = (torch.zeros(n, form.nbytes, dtype=torch.uint8) for n in (room, 4))
        self.uses = torch.zeros(0, NEURONS, dtype=torch.bool)
        self.block = Block(feed, form, memory, (streamed, streamed.clone()), self.begin, self.now, lambda _: self.uses)
        added = self.block.added

        def adding(*args: object) -> Tensor:
            self.events.append("compute")
            return added(*args)  # type: ignore[arg-type]

        self.block.added = adding  # type: ignore[method-assign]

    def now(self, numbers: Numbers, target: Tensor, rows: Numbers) -> None:
        self.events.append(("now", len(numbers)))
        target[torch.from_numpy(rows)] = self.records[torch.from_numpy(numbers)]

    def begin(self, numbers: Numbers, target: Tensor, rows: Numbers) -> Callable[[], None]:
        self.events.append(("begin", len(numbers)))
        target[torch.from_numpy(rows)] = self.records[torch.from_numpy(numbers)]
        return lambda: self.events.append("arrive")

    def check(self, uses: Tensor) -> list[object]:
        """Compare the outputs of tokens with a formula. Return the events, and forget them."""
        self.uses, x = uses, torch.randn(len(uses), WIDTH)
        found = self.block(x, torch.ones(len(x), dtype=torch.bool))
        expected = (torch.relu(x @ self.first.T) * uses) @ self.down
        assert torch.allclose(found, expected, atol=1e-4)
        events = self.events.copy()
        self.events.clear()
        return events


def some(numbers: list[int]) -> Tensor:
    uses = torch.zeros(1, NEURONS, dtype=torch.bool)
    uses[0, numbers] = True
    return uses


def test_neurons_that_fit_are_read_in_the_calling_thread() -> None:
    toy = Toy(10)
    assert toy.check(some([1, 5, 7])) == [("now", 3), "compute"]
    assert toy.check(some([1, 5, 8, 9])) == [("now", 2), "compute"]
    assert toy.check(some([1, 5])) == ["compute"]
    assert toy.block.counts == (9, 5)
