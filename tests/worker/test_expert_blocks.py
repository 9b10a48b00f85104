"""flash.expert_blocks: sums against a formula, memory and reads against counting, with and without a GPU's stages."""

import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

from bench.flash.counted import CountedBlock, Guesses
from flexengine.guests.flash import expert_blocks, reader
from flexengine.guests.flash.expert_blocks import ExpertLayer, Router
from flexengine.guests.flash.reader import ExpertReads
from flexengine.model.linear import Product, use_product
from flexengine.model.skeleton import ParamRef
from flexengine.tier.base import Region
from tests.helpers.arenas import held

EXPERTS, ACTIVE, WIDTH, INNER = 7, 2, 16, 24
NBYTES = 4 * 3 * WIDTH * INNER  # of an expert
PIECES = 3  # of a read


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE", NBYTES // PIECES)


class Disk:
    """Regions of tensors, each read after a pause. Notes what is read."""

    def __init__(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        self.pause, self.nbytes, self.fails, self.gate = pause, 0, False, threading.Event()
        self._arrived = threading.Event()
        self.gate.set()

    def wait_until_blocked(self) -> None:
        """Wait until a read waits at the gate."""
        assert self._arrived.wait(30)

    def load_all(self, pairs: Any) -> None:
        if not self.gate.is_set():
            self._arrived.set()
        self.gate.wait()
        time.sleep(self.pause())
        if self.fails:
            raise OSError("planted")
        for region, target in pairs:
            target.copy_(region.place[region.start : region.start + region.nbytes].view(region.dtype))
            self.nbytes += region.nbytes


class Layers:
    """Layers with random experts, and their blocks.

    Args:
        spare: rows that belong to no layer.
        stages: buffers on the way to a GPU; None for a CPU.
    """

    def __init__(
        self, count: int, room: int, disk: Disk, stages: int | None = None, seed: int = 0, spare: int = 2
    ) -> None:
        torch.manual_seed(seed)
        config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS,
                               num_experts_per_tok=ACTIVE)  # fmt: skip
        made = None if stages is None else [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(stages)]
        self.reads = ExpertReads(disk, made)  # type: ignore[arg-type]
        self.weights, self.routers, self.blocks = list[dict[str, Tensor]](), list[Any](), list[CountedBlock]()
        shapes = {name: w.shape[1:] for name, w in MixtralExperts(config).named_parameters()}
        memory = {name: torch.full((count * room + spare, *shape), torch.nan) for name, shape in shapes.items()}
        free = list(range(count * room, count * room + spare))
        for j in range(count):
            module, router = MixtralExperts(config), MixtralTopKRouter(config)
            use_product(nn.ModuleList([module]), Product(torch.float32))
            nn.init.normal_(router.weight)
            for p in module.parameters():
                nn.init.normal_(p, std=0.3)
            stacked = {name: p.detach() for name, p in module.named_parameters()}
            pieces = {n: [Region(w.view(-1).view(torch.uint8), 0, w.nbytes, w.dtype)] for n, w in stacked.items()}
            slots = {name: ParamRef(module, name, tuple(w.shape)) for name, w in stacked.items()}
            for name, slot in slots.items():
                slot.bind(nn.Parameter(memory[name], requires_grad=False))
            layer = ExpertLayer(module, slots, EXPERTS, ACTIVE, Router(router, (), ACTIVE))
            self.weights.append(stacked)
            self.routers.append(router)
            own = list(range(j * room, (j + 1) * room))
            self.blocks.append(CountedBlock(layer, memory, own, free, pieces, self.reads))

    def follow(self) -> None:
        for block, after in zip(self.blocks, self.blocks[1:], strict=False):
            block.follow = after

    def expected(self, j: int, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum in fp64, token by token."""
        first, down = (self.weights[j][name].double() for name in ("gate_up_proj", "down_proj"))
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t, token in enumerate(x.double()):
            for expert, share in zip(chosen[t].tolist(), weights[t].double(), strict=True):
                gate, up = (first[expert] @ token).split(INNER)
                out[t] += share * (down[expert] @ (nn.functional.silu(gate) * up))
        return out


def run(layers: Layers, inputs: list[Tensor], together: int = 1) -> list[Tensor]:
    """Return the outputs of all layers for batches of tokens, each a pass of its own.

    Args:
        together: passes that go through a layer before one goes on to the next layer.
    """
    found = dict[tuple[int, int], Tensor]()

    def forward(number: int, x: Tensor) -> None:
        for j, block in enumerate(layers.blocks):
            _, weights, chosen = layers.routers[j](x)
            out = found[number, j] = block(x, chosen, weights)
            assert torch.allclose(out.double(), layers.expected(j, x, chosen, weights), atol=1e-5)
            x = x + 0.1 * out
            greenlet.getcurrent().parent.switch()

    passes = [greenlet.greenlet(forward) for _ in inputs]
    for first in range(0, len(inputs), together):
        for j in range(len(layers.blocks)):
            for number in range(first, min(first + together, len(inputs))):
                passes[number].switch(*((number, inputs[number]) if j == 0 else ()))
    return [found[key] for key in sorted(found)]


def batches(count: int, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(int(torch.randint(1, 6, ())), WIDTH) for _ in range(count)]


@pytest.mark.parametrize(
    ("stages", "spare", "together"), [(None, 2, 1), (None, 1, 3), (None, 0, 2), (2, 0, 3), (3, 0, 1)]
)
@pytest.mark.parametrize("room", [1, 2, 4, EXPERTS])
@pytest.mark.parametrize("singly", [0, expert_blocks.FEW_TOKENS])
@torch.no_grad()
def test_sums(
    monkeypatch: pytest.MonkeyPatch, room: int, stages: int | None, spare: int, together: int, singly: int
) -> None:
    """Results are bitwise those of a memory with room for all, whatever is read early. All bytes are accounted for.

    Args:
        singly: for more tokens than this, several experts are fetched together if not all chosen ones fit.
    """
    monkeypatch.setattr(expert_blocks, "FEW_TOKENS", singly)
    inputs, random = batches(25), torch.Generator().manual_seed(3)
    disk = Disk(lambda: float(torch.rand((), generator=random)) * 1e-3)
    layers = Layers(3, room, disk, stages, spare=spare)
    layers.follow()
    found = run(layers, inputs, together)
    whole = Layers(3, EXPERTS, Disk())
    for one, other in zip(found, run(whole, inputs), strict=True):
        assert torch.equal(one, other)
    layers.reads.close()
    whole.reads.close()
    assert disk.nbytes == sum(b.counts.read * NBYTES + b.guesses.wasted_bytes for b in layers.blocks)
    rows = [row for block in layers.blocks for row in block.own] + layers.blocks[0].spare
    assert sorted(rows) == list(range(3 * room + spare))
    assert stages is None or len(layers.reads.stages or ()) == stages


@torch.no_grad()
@torch.no_grad()
def test_hidden_states_that_are_a_transposed_view() -> None:
    layers, x = Layers(1, EXPERTS, Disk()), torch.randn(WIDTH, 5).t()
    assert not x.is_contiguous()
    torch.testing.assert_close(run(layers, [x]), run(layers, [x.contiguous()]))
    layers.reads.close()


def test_each_expert_is_read_once_if_all_fit() -> None:
    disk = Disk()
    layers = Layers(2, EXPERTS, disk)
    run(layers, batches(20))
    for block in layers.blocks:
        assert block.counts.read == len(held(block.arena))
    assert disk.nbytes == NBYTES * sum(block.counts.read for block in layers.blocks)


@torch.no_grad()
def test_guesses_are_counted() -> None:
    """One token goes through layers whose memory is empty: what its guess read early, and what of it was right."""
    layers = Layers(2, EXPERTS, Disk(), seed=5)
    layers.follow()
    x = batches(1, seed=9)[0][:1]
    _, weights, chosen = layers.routers[0](x)
    named = set(layers.routers[1](x)[2].flatten().tolist())
    after = x + 0.1 * layers.expected(0, x, chosen, weights).float()
    true = set(layers.routers[1](after)[2].flatten().tolist())
    run(layers, [x])
    right, found = len(true & named), layers.blocks[1].guesses
    assert layers.blocks[0].guesses == Guesses()
    assert astuple(found)[:6] == (len(true), right, len(true), right, len(named), len(named - true))
    assert 0 <= found.ahead_bytes <= right * NBYTES
    layers.reads.close()


class Named:
    """A router that names given experts."""

    def __init__(self, *experts: int) -> None:
        self.chosen = torch.tensor([experts])

    def choose(self, hidden: Tensor) -> Tensor:
        return self.chosen


class Guessed:
    """A layer, a token, and guesses that are planted. `chosen` are the token's experts, `others` all others."""

    def __init__(self, disk: Disk, stages: int | None = None, room: int = 3) -> None:
        self.layers, self.disk = Layers(1, room, disk, stages), disk
        self.block, self.x = self.layers.blocks[0], batches(1)[0][:1]
        _, self.weights, self.picked = self.layers.routers[0](self.x)
        self.chosen = sorted(self.picked.flatten().tolist())
        self.others = [e for e in range(EXPERTS) if e not in self.chosen]

    def guess(self, *experts: int) -> None:
        object.__setattr__(self.block.layer, "router", Named(*experts))
        self.block.guess(self.x)

    def compute(self) -> None:
        out = self.block(self.x, self.picked, self.weights)
        expected = self.layers.expected(0, self.x, self.picked, self.weights)
        assert torch.allclose(out.double(), expected, atol=1e-5)


STAGES = pytest.mark.parametrize("stages", [None, 3])


@STAGES
@torch.no_grad()
def test_a_wrong_guess_costs_a_piece_and_takes_nothing_out_of_memory(stages: int | None) -> None:
    disk = Disk()
    case = Guessed(disk, stages)
    case.compute()
    disk.gate.clear()
    case.guess(*case.others[:2])
    disk.wait_until_blocked()
    case.compute()  # while the first piece is read
    disk.gate.set()
    case.layers.reads.close()
    assert held(case.block.arena).tolist() == case.chosen
    assert case.block.counts.read == ACTIVE
    assert case.block.guesses == Guesses(ACTIVE, 0, 0, 0, 2, 2, 0, NBYTES // PIECES)
    assert disk.nbytes == ACTIVE * NBYTES + NBYTES // PIECES


@STAGES
@torch.no_grad()
def test_a_right_guess_is_read_once(stages: int | None) -> None:
    disk = Disk()
    case = Guessed(disk, stages)
    disk.gate.clear()
    case.guess(*case.chosen)
    disk.wait_until_blocked()
    threading.Timer(0.02, disk.gate.set).start()
    case.compute()
    assert astuple(case.block.guesses)[:6] == (ACTIVE, ACTIVE, ACTIVE, ACTIVE, ACTIVE, 0)
    assert NBYTES // PIECES <= case.block.guesses.ahead_bytes <= ACTIVE * NBYTES
    assert disk.nbytes == ACTIVE * NBYTES
    case.layers.reads.close()


@torch.no_grad()
def test_first_choices_are_read_first() -> None:
    disk = Disk()
    case = Guessed(disk)
    disk.gate.clear()
    object.__setattr__(case.block.layer, "router", Named())
    case.block.layer.router.chosen = torch.tensor([[5, 0], [2, 5]])  # type: ignore[union-attr]
    case.block.guess(case.x)
    assert list(case.block._coming) == [5, 2]
    disk.gate.set()
    case.layers.reads.close()


@STAGES
@torch.no_grad()
def test_a_guess_is_kept_until_its_own_pass_has_come(stages: int | None) -> None:
    """Two gpu_batches: the expert that the second one's guess named is not dropped when the first one is computed."""
    disk = Disk()
    case = Guessed(disk, stages)
    mine, other = case.chosen[0], case.others[0]
    disk.gate.clear()
    second = greenlet.greenlet(lambda: (case.guess(other), greenlet.getcurrent().parent.switch(), case.compute()))
    second.switch()
    case.guess(mine)
    threading.Timer(0.02, disk.gate.set).start()
    case.compute()
    assert list(case.block._coming) == [other]
    assert astuple(case.block.guesses)[:6] == (ACTIVE, 1, ACTIVE, 1, 2, 0)
    second.switch()
    assert not case.block._coming
    assert (case.block.guesses.early, case.block.guesses.wasted) == (2, 1)
    case.layers.reads.close()


@torch.no_grad()
def test_guesses_of_a_pass_that_ended_are_forgotten() -> None:
    case = Guessed(Disk())
    greenlet.greenlet(case.guess).switch(case.others[0])
    case.compute()
    assert not case.block._coming
    assert case.block.guesses.wasted == 1
    case.layers.reads.close()


@STAGES
@torch.no_grad()
def test_a_failed_read_reaches_the_caller(stages: int | None) -> None:
    case = Guessed(Disk(), stages)
    case.disk.fails = True
    with pytest.raises(OSError, match="planted"):
        case.compute()
    case.layers.reads.close()


@STAGES
@torch.no_grad()
def test_a_failed_early_read_reaches_the_caller_if_it_is_chosen(stages: int | None) -> None:
    case = Guessed(Disk(), stages)
    case.disk.fails = True
    case.guess(case.others[0])
    case.block._coming[case.others[0]].done.exception()  # waits
    case.disk.fails = False
    case.compute()
    case.layers.reads.close()
    case = Guessed(Disk(), stages)
    case.disk.fails = True
    case.guess(case.chosen[1])
    case.block._coming[case.chosen[1]].done.exception()
    case.disk.fails = False
    with pytest.raises(OSError, match="planted"):
        case.compute()
    case.layers.reads.close()


@torch.no_grad()
def test_closing_while_an_early_read_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    case = Guessed(disk)
    disk.gate.clear()
    case.guess(*case.others[:2])
    disk.wait_until_blocked()
    queue = case.layers.reads._thread
    shutdown = queue.shutdown

    def closed(cancel_futures: bool) -> None:
        shutdown(wait=False, cancel_futures=cancel_futures)
        disk.gate.set()
        shutdown()

    monkeypatch.setattr(queue, "shutdown", closed)
    case.layers.reads.close()
    assert disk.nbytes <= 2 * NBYTES // PIECES  # one piece, or a second one that began before the queue was closed
