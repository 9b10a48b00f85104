"""python -m flexengine.attention FD BYTES: serve the engine at the other end of an open socket."""

import socket
import sys

from flexengine.attention.link import Broken
from flexengine.attention.pool import Pool
from flexengine.attention.server import serve


def main(fd: int, memory: int) -> int:
    """Serve until the engine ends. Return the exit code."""
    try:
        serve(socket.socket(fileno=fd), Pool(memory))
    except Broken as error:
        print(f"attention worker: the engine is lost: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
