"""Replicas in threads of the test's process: all code but the start of a process."""

import socket
import threading

from flexengine.guests.replicas import client
from flexengine.guests.replicas.server import serve


class ThreadReplica(client.Replica):
    """A replica in a thread."""

    def _start(self, threads: int) -> socket.socket:
        own, other = socket.socketpair()
        self.thread = threading.Thread(target=serve, args=(other,), daemon=True)
        self.thread.start()
        return own

    def _end(self) -> str:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return ""
