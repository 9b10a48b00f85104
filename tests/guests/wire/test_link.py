"""Messages over a socket."""

import fcntl
import resource
import socket

from flexengine.guests.wire.link import Connection


def test_a_process_with_many_open_files_waits_for_messages() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        one, other = socket.socketpair()
        link = Connection(socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    one.close()
    assert not link.readable(0)
    other.sendall(b"a")
    assert link.readable(1)
    other.close()
    link.close()
