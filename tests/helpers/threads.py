"""A pipeline whose stages run in threads of one process: the driver's and the servers' own code, with queues in the
place of sockets."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flexengine import Engine
from flexengine.guests.stages.group import HIDDENS, Frame, FrameChannel, OrderKind, PipelineGroup
from flexengine.guests.stages.server import StageServer
from flexengine.guests.wire.link import HEADER

Key = tuple[int, int, int]  # sender, receiver, tag


class _Wire(FrameChannel):
    """Frames on their way, with the bytes that would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.nbytes = 0, 0
        self.expected = 0  # most bytes of hidden states
        self.counts, self.bodies = Counter[int](), Counter[int]()  # by kind: frames, and bytes of bodies
        self.seen: Callable[[Frame], None] = lambda frame: None

    def put(self, frame: Frame) -> None:
        assert frame.kind != OrderKind.HIDDEN or len(frame.body) <= self.expected
        self.frames, self.nbytes = self.frames + 1, self.nbytes + HEADER.size + len(frame.body)
        self.counts[frame.kind] += 1
        self.bodies[frame.kind] += len(frame.body)
        super().put(frame)
        self.seen(frame)


class ThreadGroup(PipelineGroup):
    """A group of threads."""

    def __init__(self, rank: int, size: int, wires: dict[Key, _Wire], values: dict[str, list[str]]) -> None:
        self.rank, self.size, self.local_size, self.local_rank = rank, size, 1, 0
        self.names, self.wires, self.values = [f"thread {number}" for number in range(size)], wires, values

    def exchange(self, key: str, value: str) -> list[str]:
        """Return the values of the ranks so far: of one thread, they come one after the other."""
        values = self.values.setdefault(key, [])
        values.append(value)
        return values

    def send(self, rank: int, tag: int, most: int = 2) -> FrameChannel:
        return self.wires.setdefault((self.rank, rank, tag), _Wire())

    def receive(self, rank: int, tag: int, seen: Callable[[Frame], None] = lambda frame: None) -> FrameChannel:
        wire = self.wires.setdefault((rank, self.rank, tag), _Wire())
        wire.seen = seen
        return wire

    def expect(self, rank: int, nbytes: int) -> None:
        wire = self.wires.setdefault((rank, self.rank, HIDDENS), _Wire())
        wire.expected = max(nbytes, wire.expected)


class Pipeline:
    """A driver and servers.

    Attributes:
        engine: the driver's engine.
        servers: the other stages.
        wires: frames by sender, receiver and tag.
    """

    def __init__(self, stages: int, each: Sequence[dict[str, Any]]) -> None:
        self.wires: dict[Key, _Wire] = {}
        values: dict[str, list[str]] = {}
        groups = [ThreadGroup(rank, stages, self.wires, values) for rank in range(stages)]
        self.engine = Engine(**each[0], group=groups[0])
        self.servers = [StageServer(Engine(**options, group=group), group)
                        for group, options in zip(groups[1:], each[1:], strict=True)]  # fmt: skip
        self.threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End all stages."""
        self.engine.close()
        for thread, server in zip(self.threads, self.servers, strict=True):
            thread.join(60)
            assert not thread.is_alive()
            server.engine.close()


@contextmanager
def in_threads(stages: int, each: Sequence[dict[str, Any]] = (), **options: Any) -> Iterator[Pipeline]:
    """Yield a pipeline. each: by stage, options of its engine beside those of all."""
    torch.set_grad_enabled(True)
    pipeline = Pipeline(stages, [{**options, **(each[rank] if each else {})} for rank in range(stages)])
    try:
        yield pipeline
    finally:
        pipeline.close()
