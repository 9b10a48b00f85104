"""Messages over a stream socket: a header of fixed layout, then a body. Nothing is executed or unpickled.

A header is eight little-endian int64: MAGIC and kind, number, bytes of the body, and five numbers whose meaning depends
on the kind. `number` counts the messages of a direction from 0, so a message that is lost, repeated or out of order is
noticed. After any wrong message the connection is of no use: `Broken` is raised, and the caller closes it.
"""

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from flexengine.errors import FlexError
from flexengine.places import Lane, Place

HEADER = struct.Struct("<8q")
NUMBERS = 5  # in a header, for the kind of message
MAGIC = 0x464C4558_0000  # "FLEX", beside the kind
MOST_KINDS = 1 << 16
MOST_BODY = 1 << 40  # bytes; a larger body is damage
MOST_TAKEN = 1 << 30  # bytes of a body that is read into new memory
MOST_TEXT = 1 << 16  # bytes of a body that is a greeting or an error
SILENT_SECONDS = 15.0  # without any byte, until the other process counts as lost
BEAT_SECONDS = SILENT_SECONDS / 10  # between two messages that show that a process lives
BEAT = 3  # their kind
# A machine that is gone counts as lost after 30 s also where silence is allowed.
KEEPALIVE = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
T = TypeVar("T")


class Broken(Exception):
    """The connection has ended, is silent, or has carried a wrong message. The text says which."""


class Message(NamedTuple):
    """The header of a message. `Connection.take` reads the body, which must be read before the next message."""

    kind: int  # number of its kind
    numbers: tuple[int, ...]  # five numbers
    nbytes: int  # bytes of the body


class Connection:
    """A connection to another process. Any thread may send; one thread receives.

    Attributes:
        limits: most bytes of a body, by kind; other kinds are refused. None for MOST_BODY and any kind.
        pieces: yields a tensor that is sent as tensors in RAM; by default it is in RAM.
    """

    limits: Mapping[int, int] | None = None

    def __init__(self, connection: socket.socket, first_seconds: float | None = None) -> None:
        """Take over a connected socket. first_seconds: until the first byte must have come; None: SILENT_SECONDS."""
        self._socket, self._silent, self._may_be_silent = connection, first_seconds or SILENT_SECONDS, False
        self._ended = threading.Event()
        self._socket.settimeout(self._silent)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self.pieces: Callable[[Tensor], Iterable[Tensor]] = lambda part: (part,)
        self._sending = threading.Lock()
        self._next_sent = self._next_received = 0
        self._left = 0  # bytes of the present body that are not read

    def send(self, kind: int, numbers: Sequence[int] = (), *parts: Tensor, descriptor: int | None = None) -> None:
        """Send a message. Raise Broken.

        Args:
            parts: tensors in RAM, or others that `pieces` takes, contiguous, which together are the body.
            descriptor: an open file that is sent instead, over a Unix socket, with a body of one byte.
        """
        nbytes = sum(part.nbytes for part in parts) if descriptor is None else 1
        bodies = (_bytes(piece) for part in parts if part.numel() for piece in self.pieces(part))
        with self._sending:
            head = HEADER.pack(MAGIC | kind, self._next_sent, nbytes, *numbers, *[0] * (NUMBERS - len(numbers)))
            self._next_sent += 1
            try:
                for view in itertools.chain((memoryview(head),), bodies):
                    done = 0
                    while done < len(view):  # each part has the whole time limit: a slow network is no silence
                        done += self._socket.send(view[done:])
                if descriptor is not None:
                    socket.send_fds(self._socket, [b"\0"], [descriptor])
            except (OSError, RuntimeError) as error:  # of the socket, or of a device whose memory is sent
                with contextlib.suppress(OSError):  # it may be sent in part, so nothing may follow
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise self._broken(error) from error

    def take_file(self) -> int:
        """Return the descriptor of the open file in the present message. Raise Broken if there is none."""
        files = list[int]()
        if self._left == 1 and self._socket.family == socket.AF_UNIX:
            try:
                byte, files, _, _ = socket.recv_fds(self._socket, 1, 1)
            except OSError as error:
                raise self._broken(error) from error
            self._left -= len(byte)
        if not files:
            raise Broken("a message without a file came where one was due")
        return files[0]

    def allow_silence(self) -> None:
        """Wait for messages, and for room to send them, without a limit: the other process is watched otherwise."""
        self._may_be_silent = True
        self._socket.settimeout(None)

    def beat(self) -> None:
        """Start a thread that sends a message BEAT now and then, until the connection ends or breaks."""

        def send() -> None:
            with contextlib.suppress(Broken):
                while not self._ended.wait(BEAT_SECONDS):
                    self.send(BEAT)

        threading.Thread(target=send, name="flexengine-beat", daemon=True).start()

    def receive(self) -> Message:
        """Wait for a message other than BEAT, and return its header. Raise Broken, also after SILENT_SECONDS without
        one."""
        while (message := self._receive()).kind == BEAT:
            pass
        return message

    def _receive(self) -> Message:
        if self._left:
            raise Broken(f"{self._left} bytes of a message were not read")
        head = bytearray(HEADER.size)
        self._fill(memoryview(head))
        magic, number, nbytes, *numbers = HEADER.unpack(head)
        if magic & ~(MOST_KINDS - 1) != MAGIC:
            raise Broken("it sends no messages of flexengine")
        if number != self._next_received:
            raise Broken(f"message {number} came, but message {self._next_received} was due")
        kind = magic & (MOST_KINDS - 1)
        most = 0 if kind == BEAT else MOST_BODY if self.limits is None else self.limits.get(kind)
        if most is None:
            raise Broken(f"a message of unknown kind {kind} came")
        if not 0 <= nbytes <= most:
            raise Broken(f"a message of {nbytes} bytes was announced; kind {kind} has at most {most}")
        if not self._next_received:
            self._silent = SILENT_SECONDS
            if not self._may_be_silent:
                self._socket.settimeout(SILENT_SECONDS)
        self._next_received += 1
        self._left = nbytes
        return Message(kind, tuple(numbers), nbytes)

    def readable(self, seconds: float) -> bool:
        """Return whether the other process sends something, or ends, within some seconds."""
        (poll := select.poll()).register(self._socket, select.POLLIN)  # `select` refuses descriptors from 1024 on
        return bool(poll.poll(seconds * 1000))

    def take_into(self, target: Tensor) -> None:
        """Read the next bytes of the body into a contiguous tensor in RAM. Raise Broken if the body is shorter."""
        if target.nbytes > self._left:
            raise Broken(f"a message ended {target.nbytes - self._left} bytes too early")
        if target.nbytes:
            self._fill(_bytes(target))
            self._left -= target.nbytes

    def take(self, most: int = MOST_TAKEN) -> Tensor:
        """Return the rest of the body, uint8 [bytes]. Raise Broken if it has more than `most` bytes."""
        if self._left > most:
            raise Broken(f"a body of {self._left} bytes came, where at most {most} are allowed")
        body = torch.empty(self._left, dtype=torch.uint8)
        self.take_into(body)
        return body

    def _fill(self, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                if not (count := self._socket.recv_into(view[done:])):
                    self._ended.set()
                    raise Broken("it has ended" if not done else "it ended in the middle of a message")
                done += count
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError | RuntimeError) -> Broken:
        self._ended.set()
        if isinstance(error, TimeoutError):
            return Broken(f"it gave no sign of life for {self._silent:g} s")
        return Broken(f"its connection broke ({getattr(error, 'strerror', None) or error})")

    def finish(self, seconds: float = 1.0) -> None:
        """Send no more, and drop what comes until the other process ends or some seconds have passed: if bytes were
        left unread, the system could discard those that were sent."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(seconds)
            while time.monotonic() < deadline and self._socket.recv(1 << 16):
                pass

    def close(self) -> None:
        """End the connection. A thread that waits in `receive` raises Broken."""
        self._ended.set()
        with contextlib.suppress(OSError):  # the other process has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def pack(values: Any) -> Tensor:
    """Return values as uint8 [bytes]: numbers, text, lists, dicts, dataclasses and named tuples; places and lanes by
    their names."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(values, enc_hook=_name)), dtype=torch.uint8)


def _name(value: object) -> str:
    if isinstance(value, Place | Lane):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be packed")


def unpack(body: Tensor, kind: type[T]) -> T:
    """Return the values in a body (uint8 [bytes], from `pack`) as a type, such as a dataclass or dict[str, int]. Raise
    Broken if they are not of it."""
    try:
        values: T = _decoder(kind).decode(memoryview(body.numpy()))  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise Broken(f"a message is no {kind.__name__} ({error})") from error
    return values


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@contextlib.contextmanager
def answers_read(answers: Callable[[], object]) -> Iterator[None]:
    """Read the answers to a question also if the block raises; else the next question would read them."""
    try:
        yield
    except FlexError:
        with contextlib.suppress(FlexError):
            answers()
        raise
