"""worker.expert_blocks: sums against a formula, memory and reads against counting, with and without a GPU's stages."""

import threading
import time
from collections.abc import Callable
from typing import Any

import greenlet
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

from flexengine.model.expert_layers import ExpertLayer, Router
from flexengine.model.linear import Product
from flexengine.model.products import use_product
from flexengine.model.skeleton import ParamRef
from flexengine.tier.base import Region
from flexengine.worker.expert_blocks import ExpertBlock, ExpertReads

EXPERTS, ACTIVE, WIDTH, INNER = 7, 2, 16, 24
NBYTES = 4 * 3 * WIDTH * INNER  # of an expert


class Disk:
    """Regions of tensors, each read after a pause. Notes what is read."""

    def __init__(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        self.pause, self.nbytes, self.fails, self.gate = pause, 0, False, threading.Event()
        self.gate.set()

    def load_all(self, pairs: Any) -> None:
        self.gate.wait()
        time.sleep(self.pause())
        if self.fails:
            raise OSError("planted")
        for region, target in pairs:
            target.copy_(region.place[region.start : region.start + region.nbytes].view(region.dtype))
            self.nbytes += region.nbytes


class Layers:
    """Layers with random experts, and their blocks."""

    def __init__(self, count: int, room: int, disk: Disk, stages: int | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS,
                               num_experts_per_tok=ACTIVE)  # fmt: skip
        made = None if stages is None else [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(stages)]
        self.reads = ExpertReads(disk, made)  # type: ignore[arg-type]
        self.weights, self.routers, self.blocks = list[dict[str, Tensor]](), list[Any](), list[ExpertBlock]()
        for _ in range(count):
            module, router = MixtralExperts(config), MixtralTopKRouter(config)
            use_product(nn.ModuleList([module]), Product(torch.float32))
            nn.init.normal_(router.weight)
            for p in module.parameters():
                nn.init.normal_(p, std=0.3)
            stacked = {name: p.detach() for name, p in module.named_parameters()}
            memory = {name: torch.full((room, *w.shape[1:]), torch.nan) for name, w in stacked.items()}
            pieces = {n: [Region(w.view(-1).view(torch.uint8), 0, w.nbytes, w.dtype)] for n, w in stacked.items()}
            slots = {name: ParamRef(module, name, tuple(w.shape)) for name, w in stacked.items()}
            for name, slot in slots.items():
                slot.bind(nn.Parameter(memory[name], requires_grad=False))
            layer = ExpertLayer(module, slots, EXPERTS, ACTIVE, Router(router, (), ACTIVE))
            self.weights.append(stacked)
            self.routers.append(router)
            self.blocks.append(ExpertBlock(layer, memory, pieces, self.reads))

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


@pytest.mark.parametrize(("stages", "together"), [(None, 1), (None, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize("room", [1, 2, 4, EXPERTS])
@torch.no_grad()
def test_sums(room: int, stages: int | None, together: int) -> None:
    """Results are bitwise those of a memory with room for all, whatever is read early."""
    inputs, random = batches(25), torch.Generator().manual_seed(3)
    layers = Layers(3, room, Disk(lambda: float(torch.rand((), generator=random)) * 1e-3), stages)
    layers.follow()
    found = run(layers, inputs, together)
    whole = Layers(3, EXPERTS, Disk())
    for one, other in zip(found, run(whole, inputs), strict=True):
        assert torch.equal(one, other)
    layers.reads.close()
    whole.reads.close()


@torch.no_grad()
def test_each_expert_is_read_once_if_all_fit() -> None:
    disk = Disk()
    layers = Layers(2, EXPERTS, disk)
    layers.follow()
    run(layers, batches(20))
    for block in layers.blocks:
        block._settle([])
        assert block.counts.read == len(block.arena.held)
    assert disk.nbytes == NBYTES * sum(block.counts.read for block in layers.blocks)


@torch.no_grad()
def test_guesses_are_counted() -> None:
    """The last token goes through layers whose memory is empty: what its guess read early, and what of it was right."""
    layers = Layers(2, EXPERTS, Disk(), seed=5)
    layers.follow()
    x = batches(1, seed=9)[0][:1]
    _, weights, chosen = layers.routers[0](x)
    named = set(layers.routers[1](x)[2].flatten().tolist())
    after = x + 0.1 * layers.expected(0, x, chosen, weights).float()
    true = set(layers.routers[1](after)[2].flatten().tolist())
    run(layers, [x])
    assert layers.blocks[0].guesses == (0, 0, 0, 0)
    assert layers.blocks[1].guesses == (len(true), len(true & named), len(named), len(named - true))
    layers.reads.close()


@torch.no_grad()
def test_wrong_guesses_that_were_not_begun_are_dropped() -> None:
    disk = Disk()
    layers = Layers(1, 3, disk)
    block, x = layers.blocks[0], batches(1)[0][:1]
    _, weights, chosen = layers.routers[0](x)
    others = [e for e in range(EXPERTS) if e not in chosen.flatten().tolist()]
    disk.gate.clear()
    layers.reads.begin([])  # keeps the thread busy
    object.__setattr__(block.layer, "router", Named(torch.tensor([others[:2]])))
    block.guess(x)
    assert block.arena.held.tolist() == others[:2]
    threading.Timer(0.05, disk.gate.set).start()
    block(x, chosen, weights)
    assert block.arena.held.tolist() == sorted(set(chosen.flatten().tolist()))
    assert (block.counts.read, block.guesses.early, block.guesses.wasted) == (ACTIVE, 2, 2)
    assert disk.nbytes == ACTIVE * NBYTES
    layers.reads.close()


class Named:
    """A router that names given experts."""

    def __init__(self, chosen: Tensor) -> None:
        self.chosen = chosen

    def choose(self, hidden: Tensor) -> Tensor:
        return self.chosen


@pytest.mark.parametrize("stages", [None, 2])
@torch.no_grad()
def test_a_failed_read_reaches_the_caller(stages: int | None) -> None:
    disk = Disk()
    layers = Layers(1, 4, disk, stages)
    x = batches(1)[0]
    _, weights, chosen = layers.routers[0](x)
    disk.fails = True
    with pytest.raises(OSError, match="planted"):
        layers.blocks[0](x, chosen, weights)
    layers.reads.close()
