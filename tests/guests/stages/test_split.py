"""The layers of stages on one machine, by predicted seconds."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.pipeline.models import make_model
from flexengine import Links, Policy
from flexengine.engine.options import EngineOptions
from flexengine.engine.stages import ProcessGroup
from flexengine.guests.stages.split import layers_of

LAYERS = 8


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A model whose head has the bytes of seven layers, behind a slow link."""
    folder: Path = tmp_path_factory.mktemp("head") / "model"
    make_model(folder, LAYERS, 128, vocabulary=12_000)
    return EngineOptions(folder, device="sim", device_mem="80M", host_mem="1G", links=Links(h2d=5e6, d2h=5e6))


class FakeGroup(ProcessGroup):
    """A process of a group on one machine, which gets what rank 0 has sent."""

    def __init__(self, rank: int, size: int, sent: list[str]) -> None:
        self.rank, self.size, self.local_size, self.local_rank, self.sent = rank, size, size, rank, sent

    def exchange(self, key: str, value: str) -> list[str]:
        if self.rank == 0:
            self.sent[:] = [value]
        return self.sent


def test_all_ranks_take_the_layers_of_rank_0(options: EngineOptions) -> None:
    sent: list[str] = []
    ranges = [layers_of(options, FakeGroup(rank, 3, sent), LAYERS) for rank in range(3)]
    assert ranges == [tuple(each) for each in json.loads(sent[0])]
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert (ranges[0][0], ranges[-1][1]) == (0, LAYERS)


def test_layers_are_even_with_a_policy_and_on_several_machines(options: EngineOptions) -> None:
    sent: list[str] = []
    given = replace(options, policy=Policy(2, 4))
    assert [layers_of(given, FakeGroup(rank, 2, sent), LAYERS) for rank in range(2)] == [(0, 4), (4, 8)]
    far = FakeGroup(0, 2, sent)
    far.local_size = 1
    assert layers_of(options, far, LAYERS) == (0, 4)
    assert sent == ["[]"]
