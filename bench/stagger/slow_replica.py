"""python -m bench.stagger.slow_replica FD: a replica whose slices take at least BENCH_SLICE_SECONDS."""

import os
import socket
import sys
import time
from typing import Any

from flexengine.guests.replicas.server import ReplicaPass, serve

SECONDS = "BENCH_SLICE_SECONDS"  # environment variable


def main() -> None:
    """Serve the engine at the other end of the socket."""
    compute, seconds = ReplicaPass.slice, float(os.environ[SECONDS])

    def slowed(self: ReplicaPass, *args: Any) -> Any:
        end = time.perf_counter() + seconds
        event = compute(self, *args)
        time.sleep(max(0.0, end - time.perf_counter()))
        return event

    ReplicaPass.slice = slowed  # type: ignore[method-assign, assignment]
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
