"""Layers that a cell computes together with its own."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from flexengine.model.forward import PausingLayer
from flexengine.schedule.batches import Batch, Piece
from flexengine.worker.weights import JoinedLayers

LAYERS = 5
MOST = 8  # token layers of one call


class Model:
    """Layers that are joined, and weights in memory; a test changes one of them."""

    def __init__(self) -> None:
        self.modules = [PausingLayer(nn.Identity(), j) for j in range(LAYERS)]
        for module in self.modules:
            module.native = SimpleNamespace(joined=True, most_layers=lambda tokens: MOST // tokens)
        skeleton: Any = SimpleNamespace(model=nn.ModuleList(self.modules), layers=[{}] * LAYERS)
        self.weights: Any = SimpleNamespace(arrived=True, units=[{} for _ in range(LAYERS + 1)])
        self.joined = JoinedLayers(skeleton, self.weights)
        self.joined.begin([decoding(1), decoding(2)])

    def layers(self, layer: int, batch: int = 0) -> list[int]:
        return list(range(layer, layer + self.joined.count(layer, batch)))


def decoding(sequence: int, home: str = "device", source: int | None = None, start: int = 7) -> Batch:
    return Batch((Piece(sequence, start, 1, True, source=source),), "device", home)


def test_all_layers_after_it_if_all_is_on_the_device() -> None:
    model = Model()
    assert model.layers(0) == [0, 1, 2, 3, 4]
    assert model.layers(3, batch=1) == [3, 4]


def test_no_others_while_weights_arrive() -> None:
    model = Model()
    model.weights.arrived = False
    assert model.layers(1) == [1]


def test_up_to_a_layer_with_weights_off_the_device() -> None:
    model = Model()
    model.weights.units[3] = {"weight": ()}
    assert model.layers(0) == [0, 1, 2]
    assert model.layers(4) == [4]


def test_kernels_compute_no_layer_that_modules_compute() -> None:
    model = Model()
    model.modules[3].native = None
    assert model.layers(3) == [3]
    assert list(model.joined.native(3, 5)) == []
    assert list(model.joined.native(0, 3)) == [0, 1, 2]
    assert model.layers(0) == [0, 1, 2]


def test_up_to_a_layer_that_is_not_joined() -> None:
    model = Model()
    model.modules[2].native.joined = False
    assert model.layers(0) == [0, 1]
    assert model.layers(2) == [2, 3, 4]
    model.modules[3].native = None
    assert model.layers(2) == [2]


def test_no_others_where_hidden_states_or_kv_leave_the_device() -> None:
    model = Model()
    model.joined.begin([decoding(1)._replace(cache_home="host")])
    assert model.layers(0) == [0]
    model.joined.begin([decoding(1, home="host")])
    assert model.layers(0) == [0]
    model.joined.begin([decoding(1), decoding(2)._replace(cache_home="disk")])
    assert model.layers(0) == [0]  # else the disk would wait for all of its layers


def test_a_gpu_batch_waits_for_what_an_earlier_one_appends() -> None:
    """Tokens of one sequence, or of the trunk that it shares, in two gpu_batches of a sweep."""
    model = Model()
    for later in (decoding(1, start=8), decoding(3, source=1)):
        model.joined.begin([decoding(1), decoding(2), later])
        assert [model.layers(0, batch) for batch in range(3)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0]]


def test_no_more_than_one_call_computes() -> None:
    model = Model()
    model.joined.begin([Batch((Piece(1, 0, 4, True),), "device", "device"), decoding(2)])
    assert [model.layers(0, batch) for batch in range(2)] == [[0, 1], [0, 1, 2, 3, 4]]
    assert model.layers(4) == [4]
