"""python -m flexengine.guests.replicas FD NUMBER: compute slices for the engine at the other end of an open socket, on
GPU NUMBER if there is one."""

import socket
import sys

from flexengine.guests.replicas.server import serve
from flexengine.system.limits import has_gpu

if __name__ == "__main__":
    if has_gpu():
        from flexengine.tier.cuda import take_one

        take_one(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
