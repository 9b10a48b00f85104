"""The accepting side of connections: each has a thread of its own, and proves the secret first.

A program without the secret costs a thread for at most PROOF_SECONDS. Beyond MOST_UNPROVED such connections or a
quarter of the files that this process may open, or without a free file descriptor, one drawn by chance ends, so that a
process with the secret, which tries again, comes in.
"""

import contextlib
import errno
import random
import resource
import socket
import threading
import time
from collections.abc import Callable

from flexengine.guests.wire.link import Broken
from flexengine.guests.wire.secret import prove

MOST_UNPROVED = 256  # connections that have not proved the secret yet
SAY_SECONDS = 10.0  # between two messages about refused connections
REST_SECONDS = 0.05  # until `accept` is called again after the system had no means for a connection
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EPERM)


class Gate:
    """Accepts connections at a listening socket.

    Args:
        server: the socket. After its timeout, if it has one, `accept` returns.
        secret: what connections must prove; None at a Unix socket that only this user can reach.
        purpose: how the purpose of a connection must begin.
        admit: called with a connection that has proved the secret, with its name and its purpose, in the connection's
            thread. It then belongs to `admit`.
        say: gets a line about refused connections at most every SAY_SECONDS.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: bytes | None,
        purpose: bytes,
        admit: Callable[[socket.socket, str, bytes], None],
        say: Callable[[str], None],
    ) -> None:
        self.server, self._secret, self._purpose, self._admit, self._say = server, secret, purpose, admit, say
        self._lock = threading.Lock()
        self._unproved: dict[socket.socket, threading.Thread] = {}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_UNPROVED if files == resource.RLIM_INFINITY else min(MOST_UNPROVED, max(1, files // 4))
        self._refused, self._said = 0, -SAY_SECONDS  # connections since the last message, and its time

    def accept(self) -> None:
        """Wait for a connection, or for the socket's timeout. Raise OSError if the socket is closed."""
        try:
            connection, address = self.server.accept()
        except TimeoutError:
            return
        except OSError as error:
            if error.errno not in SHORT:
                raise
            self._refuse("a connection", f"{error.strerror}; raise the limit of open files (ulimit -n)")
            self._end_one()
            time.sleep(REST_SECONDS)
            return
        name = "{} port {}".format(*address) if address else "this machine"
        thread = threading.Thread(target=self._check, args=(connection, name), daemon=True)
        if len(self._unproved) >= self._most:
            self._end_one()
        with self._lock:
            self._unproved[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._forget(connection)
            connection.close()
            self._refuse(name, str(error))

    def _end_one(self) -> None:
        with self._lock:
            if not self._unproved:
                return
            thread = self._unproved.pop(connection := random.choice([*self._unproved]))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(1.0)

    def _forget(self, connection: socket.socket) -> bool:
        """Return whether the connection was still waiting for its proof."""
        with self._lock:
            return self._unproved.pop(connection, None) is not None

    def _check(self, connection: socket.socket, name: str) -> None:
        try:
            secret, purpose = self._secret, self._purpose
            heard = purpose if secret is None else prove(connection, secret, purpose, accepts=True)
            if not self._forget(connection):
                raise Broken("other connections took its place")
        except Broken as error:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            self._forget(connection)
            self._refuse(name, str(error))
            return
        self._admit(connection, name, heard)

    def _refuse(self, name: str, why: str) -> None:
        with self._lock:
            self._refused += 1
            if (now := time.monotonic()) - self._said < SAY_SECONDS:
                return
            more, self._refused, self._said = self._refused - 1, 0, now
        others = f" ({more} others before it)" if more else ""
        self._say(f"refused {name}{others}: {why}")
