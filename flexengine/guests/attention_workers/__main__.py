"""python -m flexengine.guests.attention_workers FD BYTES [PATH]: serve the engine at the other end of an open socket.

With PATH, a Unix socket there serves further engines, until the first one ends.
"""

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import serve
from flexengine.guests.attention_workers.workers import serve_meanwhile
from flexengine.guests.wire.link import Broken


def main(fd: int, memory: int, path: str | None = None) -> int:
    """Serve until the first engine ends. Return the exit code."""
    pool = WorkerPool(memory)
    try:
        with listening(pool, path):
            serve(socket.socket(fileno=fd), pool)
    except Broken as error:
        print(f"attention worker: the engine is lost: {error}", file=sys.stderr)
        if path is not None:  # else the first engine removes the directory
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()
        return 3
    return 0


@contextlib.contextmanager
def listening(pool: WorkerPool, path: str | None) -> Iterator[None]:
    """Serve engines that connect to a Unix socket while the block runs; none if path is None."""
    if path is None:
        yield
        return
    Path(path).unlink(missing_ok=True)  # the socket of a worker that was killed
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        serving = serve_meanwhile(server, pool)
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            serving.join()
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    fd, memory, *rest = sys.argv[1:]
    sys.exit(main(int(fd), int(memory), *rest))
