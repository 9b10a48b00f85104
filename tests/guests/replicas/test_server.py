"""Memory of a replica, and models that it refuses."""

import socket
from contextlib import closing
from typing import Any

import pytest
import torch

from flexengine.errors import OutOfMemory, UnsupportedModel
from flexengine.guests.replicas.messages import ReplicaJob, ReplicaKind, ReplicaOptions
from flexengine.guests.replicas.server import ReplicaServer
from flexengine.guests.wire.link import Connection, Message, pack
from flexengine.lossy import EXACT
from flexengine.model.build import build
from flexengine.model.forward import pausing_layers
from flexengine.model.layer_range import skippable
from flexengine.plan.sizes import aligned
from flexengine.policy import Policy

ROOM = "paused forwards"


def test_passes_that_are_paused_are_booked(families: Any) -> None:
    """Those of a job, until the next one. If there is too little memory for them, loading fails."""
    own, other = socket.socketpair()
    server, first = ReplicaServer(Connection(own)), Connection(other)
    options = ReplicaOptions(str(families("llama").directory), "sim", 64 << 20, None, 1, None, False, False)

    def booked(rows: int) -> int:
        policy = Policy(gpu_batch_size=rows, num_gpu_batches=2, cache={"workers": 1})
        server._load(Message(ReplicaKind.LOAD, (), 0), pack(ReplicaJob(EXACT, policy)))
        return server.core.machine.device.ledger.entries[ROOM]

    with closing(first), closing(server):
        server._open(Message(ReplicaKind.OPEN, (), 0), pack(options))
        facts, ledger = server.core.facts, server.core.machine.device.ledger
        token = 3 * facts.sent + 5 * facts.hidden * facts.itemsize
        assert [booked(rows) for rows in (8, 40, 8)] == [aligned(2 * rows * token) for rows in (8, 40, 8)]
        assert ledger.capacity is not None
        ledger.reserve(rest := ledger.capacity - ledger.used, "other")
        with pytest.raises(OutOfMemory, match=ROOM):
            booked(200)
        ledger.release(rest, "other")
        assert ROOM not in ledger.entries
    assert not ledger.used


def test_models_whose_layers_need_one_that_is_skipped_are_refused(families: Any) -> None:
    """Whether an even or an odd layer leaves something beside hidden states."""
    for reader in (1, 2):
        skeleton, left = build(families("llama").directory, torch.float32), list[str]()
        skippable(skeleton)
        skeleton.model.register_forward_pre_hook(lambda *_, left=left: left.clear())
        layers = pausing_layers(skeleton.model)
        layers[reader - 1].layer.register_forward_hook(lambda *_, left=left: left.append("left"))
        layers[reader].layer.register_forward_pre_hook(lambda *_, left=left: [left.pop(), None][1])
        for _ in skeleton.trial():
            pass
        with pytest.raises(UnsupportedModel, match="a trial pass that skips layers failed: IndexError"):
            skippable(skeleton)
