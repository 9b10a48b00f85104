"""Attention workers in threads of the test's process: all of the engine's code but the start of a process."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexengine.guests.attention_workers import workers
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import PageDevice
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.attention_workers.workers import WorkerTier, serve_forever
from flexengine.guests.wire.link import Broken, Connection
from flexengine.guests.wire.secret import secret_for
from flexengine.places import worker_names
from flexengine.schedule.batches import Batch
from flexengine.worker.worker import Worker


def _serve(connection: socket.socket, memory: int) -> None:
    with contextlib.suppress(Broken):  # the test ended the connection
        AttentionServer(Connection(connection), WorkerPool(memory)).run()


class ThreadWorker(Client):
    """A worker in a thread. It takes the place of LocalWorker, with the same arguments."""

    in_memory = True  # shared with the worker

    def __init__(self, place: str, memory: int, threads: int, path: Path | None = None, device: str = "cpu") -> None:
        own, other = self.sockets()
        self.thread = threading.Thread(target=_serve, args=(other, memory), daemon=True)
        self.thread.start()
        super().__init__(Connection(own), place, shares=self.in_memory, threads=threads)

    @staticmethod
    def sockets() -> tuple[socket.socket, socket.socket]:
        """Return two ends of a connection."""
        return socket.socketpair()

    def close(self) -> None:
        super().close()
        self.thread.join(30)
        assert not self.thread.is_alive()


class NetWorker(ThreadWorker):
    """The same over TCP on the loopback interface."""

    in_memory = False

    @staticmethod
    def sockets() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = socket.create_connection(server.getsockname())
            return own, server.accept()[0]


def thread_workers(count: int, memory: int = 1 << 24) -> list[WorkerTier]:
    """Return the tiers of workers in threads."""
    return [WorkerTier(lambda place: ThreadWorker(place, memory, 1), name) for name in worker_names(count)]


@contextlib.contextmanager
def listening(
    memory: int, folder: Path | None = None, timeout: float | None = None, device: PageDevice | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Run `serve_forever` in a thread. Yield its address, and the messages so far.

    Args:
        memory: bytes for pages.
        folder, device: as in `WorkerPool`.
        timeout: of the socket, in seconds.
    """
    said, secret = list[str](), secret_for("127.0.0.1")

    def run(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test closed the socket
            serve_forever(server, WorkerPool(memory, folder, device=device), said.append, secret)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(timeout)
        thread = threading.Thread(target=run, args=(server,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", said
        server.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    assert not thread.is_alive()


class Losses:
    """Breaks the connections of workers, and notes what is computed before and after.

    Attributes:
        sweeps: by sweep that was begun, broken off or not, the first piece of each sequence: place of its KV cache,
            first token, and whether it is a part of a prompt.
        lost: number of the sweep, and place, of each worker that was replaced.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, at: Iterable[int], kind: type[ThreadWorker] = ThreadWorker,
        calls: Sequence[str] = ("ask", "write", "read"), place: str = "",
    ) -> None:  # fmt: skip
        """Break the connection of the worker that gets call number n, for each n in `at`.

        Args:
            kind: class of the workers.
            calls: which calls count: questions, writes and reads of pages.
            place: whose calls count; those of all workers, whose lanes call at the same time, if it is empty.
        """
        self.sweeps = list[dict[int, tuple[str, int, bool]]]()
        self.lost = list[tuple[int, str]]()
        self.workers, self.calls, self._at = list[ThreadWorker](), 0, set(at)
        self._place, self._counting = place, threading.Lock()
        patch.setattr(workers, "LocalWorker", lambda *args, **more: self._made(kind, *args, **more))
        for name in calls:
            patch.setattr(kind, name, self._counted(getattr(kind, name)))
        begin = Worker.begin

        def noted(worker: Worker, batches: list[Batch], *rest: Any) -> None:
            self.sweeps.append({})
            for batch in batches:
                for piece in batch.pieces:
                    self.sweeps[-1].setdefault(piece.sequence, (batch.cache_home, piece.start, piece.prompt))
            begin(worker, batches, *rest)

        patch.setattr(Worker, "begin", noted)

    def _made(self, kind: type[ThreadWorker], place: str, *args: Any, **more: Any) -> ThreadWorker:
        if self.sweeps:
            self.lost.append((len(self.sweeps) - 1, place))
        self.workers.append(worker := kind(place, *args, **more))
        return worker

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(worker: ThreadWorker, *args: Any) -> Any:
            if self.sweeps and worker.place.startswith(self._place):  # not those that measure a worker
                with self._counting:
                    self.calls += 1
                    breaks = self.calls in self._at
                if breaks:
                    self.break_off(worker)
            return call(worker, *args)

        return counted

    def break_off(self, worker: ThreadWorker) -> None:
        """Break the connection of a worker."""
        worker.link.close()

    def held(self, number: int) -> list[int]:
        """Return the sequences whose KV cache loss `number` took. A team of workers has the first one's place."""
        sweep, place = self.lost[number]
        homes = {home for home, _, _ in self.sweeps[sweep].values()}
        home = place if place in homes else "worker1"
        return [s for s, (there, _, _) in self.sweeps[sweep].items() if there == home]

    def check(self, prompts: dict[int, int]) -> int:
        """Check that sequences go on where they were unless their KV cache was lost. Return the prompt tokens that are
        computed again.

        Args:
            prompts: prompt tokens, by sequence.
        """
        again = 0
        for number, (sweep, _) in enumerate(self.lost):
            after, held = self.sweeps[sweep + 1 :], self.held(number)
            for sequence, piece in self.sweeps[sweep].items():
                if sequence in held or piece[2]:
                    later = next(each[sequence] for each in after if sequence in each)
                    assert later[1:] == (0, True)
                else:
                    assert after[0][sequence] == piece
            again += sum(prompts[s] for s in held if not self.sweeps[sweep][s][2])
        return again
