"""Messages over a socket."""

import fcntl
import resource
import socket

import pytest

from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.guests.wire.link import Connection, answers_read


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


@pytest.mark.parametrize("answer", [None, OutOfMemory("device", "weights", 2)])
def test_answers_are_read_if_the_block_fails(answer: OutOfMemory | None) -> None:
    """The block's error is raised, whatever the answers are."""
    read = list[int]()

    def answers() -> None:
        read.append(1)
        if answer is not None:
            raise answer

    with pytest.raises(InvalidInput, match="own fault"), answers_read(answers):
        raise InvalidInput("own fault")
    assert read == [1]
    with answers_read(answers):
        pass
    assert read == [1]
