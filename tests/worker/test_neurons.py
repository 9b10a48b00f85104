"""flash.neurons: sums against a formula, and when records are read, with a reader that overwrites at once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexengine.codec.records import RecordForm
from flexengine.guests.flash.feed_forward import FeedForward
from flexengine.guests.flash.neurons import Fetch, IntArray, NeuronBlock, Neurons
from flexengine.lossy import Lossy
from flexengine.plan import neurons as neuron_plan
from flexengine.plan.layout import lay_out_weights
from flexengine.plan.neurons import RECORDS, STREAMED
from flexengine.policy import Policy
from flexengine.tier.base import ALIGN
from flexengine.tier.machine import make_machine
from flexengine.worker.on_demand import DemandReads
from flexengine.worker.open_model import open_model

NEURONS, WIDTH = 48, 8


class Toy:
    """A block whose tokens use the neurons in `uses`, bool [tokens, NEURONS].

    Attributes:
        events: "now" and "begin" of reads, with the number of records; "arrive" and "compute".
        used, read: neurons that tokens used, summed over calls, and those that had to be read.
    """

    def __init__(self, room: int) -> None:
        torch.manual_seed(room)
        self.first, self.down = torch.randn(NEURONS, WIDTH), torch.randn(NEURONS, WIDTH)
        form = RecordForm("float32", WIDTH)
        self.records, self.events = form.encode(self.first, self.down), list[object]()
        bare = SimpleNamespace(bias=None)
        feed = FeedForward("first", "", "down", (bare, None, bare), NEURONS, WIDTH, nn.ReLU(), nn.Module())  # type: ignore[arg-type]
        memory, streamed = (torch.zeros(n, form.nbytes, dtype=torch.uint8) for n in (room, 4))
        self.uses = torch.zeros(0, NEURONS, dtype=torch.bool)
        self.block = NeuronBlock(
            feed, form, memory, (streamed, streamed.clone()), self.begin, self.now, lambda _: self.uses
        )
        added, fetch = self.block.added, self.block.arena.fetch
        self.used = self.read = 0

        def fetching(numbers: IntArray) -> Fetch:
            fetched = fetch(numbers)
            self.used, self.read = self.used + len(numbers), self.read + len(fetched.neurons)
            return fetched

        def adding(*args: object) -> Tensor:
            self.events.append("compute")
            return added(*args)  # type: ignore[arg-type]

        self.block.added = adding  # type: ignore[method-assign]
        self.block.arena.fetch = fetching  # type: ignore[method-assign]

    def now(self, numbers: IntArray, target: Tensor, rows: IntArray) -> None:
        self.events.append(("now", len(numbers)))
        target[torch.from_numpy(rows)] = self.records[torch.from_numpy(numbers)]

    def begin(self, numbers: IntArray, target: Tensor, rows: IntArray) -> Callable[[], None]:
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
    assert (toy.used, toy.read) == (9, 5)


def test_of_more_neurons_one_part_is_read_while_another_is_computed() -> None:
    toy = Toy(10)
    events = toy.check(some(list(range(20, 38))))
    assert events == [("begin", 5), "arrive", ("begin", 5), "compute", "arrive", ("begin", 5), "compute", "arrive",
                      ("begin", 3), "compute", "arrive", "compute"]  # fmt: skip
    assert (toy.used, toy.read) == (18, 18)


@pytest.mark.parametrize("room", [2, 3, 10, 47])
def test_any_tokens(room: int) -> None:
    """No part overwrites the one that is computed, whatever is in memory."""
    toy, rng = Toy(room), np.random.default_rng(room)
    for _ in range(60):
        toy.check(torch.from_numpy(rng.random((int(rng.integers(1, 5)), NEURONS)) < rng.random() ** 2) | some([3]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("weights", [None, "int4"])
def test_memory_is_that_of_the_layout(
    families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, weights: str | None
) -> None:
    """With a GPU, records that were read pass a buffer in its memory, too. No kernel is called here."""
    opened = open_model(str(families("opt").directory), None, "cpu", lossy=Lossy(weights, flash="oracle"))
    opened.facts = replace(opened.facts, gpu=device == "cuda")
    machine = make_machine("sim", 1 << 28, 1 << 28, [tmp_path])
    monkeypatch.setattr(type(machine), "compute", torch.device(device))
    layout = lay_out_weights(opened.facts, Policy(neurons=0.5), machine.capacity)
    neurons = Neurons(opened, layout, machine, DemandReads(machine.disk))
    for place in ("device", "host"):
        booked = {what: n for what, n in layout.account[place].items() if what in (neuron_plan.NEURONS, RECORDS)}
        assert machine.tier(place).ledger.entries == booked
    record = RecordForm(weights or "float32", 64).nbytes
    decoded = -(-(STREAMED // record * 4 * 64) // ALIGN) * ALIGN if weights else 0
    assert machine.device.ledger.entries.get(RECORDS, 0) == decoded + STREAMED * (device == "cuda")
    neurons.close()
    assert machine.device.ledger.used == machine.host.ledger.used == 0
    machine.close()
