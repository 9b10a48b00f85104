"""python -m flexengine.guests.attention_workers FD BYTES [DEVICE [PATH]]: serve the engine at an open socket.

With PATH, a Unix socket there serves further engines, until the first one ends.
"""

import sys

from flexengine.guests.attention_workers.workers import serve_engine

if __name__ == "__main__":
    fd, memory, *rest = sys.argv[1:]
    sys.exit(serve_engine(int(fd), int(memory), *rest))
