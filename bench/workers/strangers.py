"""Programs without the secret, and an engine with it, in processes that `siege` starts.

python -m bench.workers.strangers attack HOST PORT COUNT SEED
python -m bench.workers.strangers visit HOST:PORT
"""

import json
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from bench.harness import Record

OPEN, THREADS = 1000, 8  # connections that stay open, and threads that make them
PAUSE_SECONDS = 0.25  # between two connections of an engine with the secret


def kinds() -> dict[str, Callable[[random.Random], bytes]]:
    """Return what a connection sends, by name."""
    from flexengine.guests.wire.link import HEADER, MAGIC
    from flexengine.guests.wire.secret import OPENING, PURPOSE_BYTES

    def header(rng: random.Random) -> bytes:
        length = rng.choice((-1, 1 << 20, 1 << 39, (1 << 63) - 1))
        return HEADER.pack(MAGIC | rng.randrange(1, 30), 0, length, *[rng.randrange(9)] * 5) * rng.randrange(1, 5)

    def opening(rng: random.Random) -> bytes:
        purpose = rng.choice((b"attention", b"stage 0 1", b"stage 4 1", b"stage 3 1"))
        return OPENING + purpose.ljust(PURPOSE_BYTES) + rng.randbytes(32)

    return {
        "nothing": lambda rng: b"",
        "random bytes": lambda rng: rng.randbytes(rng.randrange(1, 5000)),
        "a request": lambda rng: b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" * rng.randrange(1, 50),
        "the store of torch": lambda rng: struct.pack("<BI", 0, 0x3C85F7CE) + rng.randbytes(64),
        "a wrong proof": lambda rng: opening(rng) + rng.randbytes(32),
        "a proof of a wrong length": lambda rng: opening(rng) + rng.randbytes(rng.choice((1, 31, 33, 1000, 100_000))),
        "half an opening": lambda rng: opening(rng)[: rng.randrange(1, 64)],
        "headers": lambda rng: header(rng),
        "headers after an opening": lambda rng: opening(rng) + header(rng),
        SLOW: lambda rng: opening(rng)[:1],
        OTHER_SECRET: lambda rng: b"",
        ECHO: lambda rng: b"",
    }  # fmt: skip


SLOW, OTHER_SECRET, ECHO = "a byte now and then", "a proof with another secret", "an echo"


def harmless(got: bytes) -> bool:
    """Return whether bytes from the side that accepts are at most its nonce and a refusal."""
    from flexengine.guests.wire.secret import NONCE_BYTES, OPENING, PURPOSE_BYTES, REFUSED

    nonce = len(OPENING) + PURPOSE_BYTES + NONCE_BYTES
    return OPENING.startswith(got[: len(OPENING)]) and REFUSED.startswith(got[nonce:])


class Stranger:
    """A thread that makes connections without the secret, until an event is set.

    Attributes:
        counts: connections by kind, and REFUSED ones, at a port where nothing listens.
        got: most bytes that a connection has got.
        harmful: bytes that a connection should not have got.
    """

    REFUSED = "refused"

    def __init__(self, address: tuple[str, int], seed: str, held: int, ended: threading.Event) -> None:
        self._address, self._rng, self._held, self._ended = address, random.Random(seed), held, ended
        self.counts, self.got, self.harmful = Counter[str](), 0, list[str]()
        self._open = list[tuple[str, socket.socket, bytearray]]()  # kind, and the bytes that it has got
        self._dripped = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def made(self) -> int:
        return self.counts.total() - self.counts[self.REFUSED]

    def _run(self) -> None:
        sends = kinds()
        while not self._ended.is_set():
            self._connect(sends)
            if len(self._open) > self._held:
                self._end(*self._open.pop(self._rng.randrange(len(self._open))))
            if time.monotonic() - self._dripped > 0.5:
                self._drip()
        for each in self._open:
            self._end(*each)

    def _connect(self, sends: dict[str, Callable[[random.Random], bytes]]) -> None:
        name = self._rng.choice(list(sends))
        try:
            made = socket.create_connection(self._address, 5)
        except OSError:
            self.counts[self.REFUSED] += 1
            time.sleep(0.01)
            return
        self.counts[name] += 1
        with suppress(OSError):
            if data := sends[name](self._rng):
                made.sendall(data)
            if self._rng.random() < 0.1:
                made.shutdown(socket.SHUT_WR)
        got = self._speak(name, made, sends) if name in (OTHER_SECRET, ECHO) else b""
        self._open.append((name, made, bytearray(got)))

    def _speak(self, name: str, made: socket.socket, sends: dict[str, Callable[[random.Random], bytes]]) -> bytes:
        """Speak the protocol without the secret. Return what came. An echo sends back the nonce of the other side."""
        from flexengine.guests.wire.link import Broken
        from flexengine.guests.wire.secret import prove

        if name == OTHER_SECRET:
            with suppress(Broken):
                size = self._rng.choice((1, 15, 16, 64, 4096, 100_000))
                prove(made, self._rng.randbytes(size), b"attention", accepts=False)
                self.harmful.append("the other side has proved the secret")
        got = b""
        with suppress(OSError):
            if name == ECHO:
                made.settimeout(0.2)
                made.sendall(sends["a wrong proof"](self._rng)[:64])
                made.sendall((got := made.recv(64))[-32:])
        return got

    def _drip(self) -> None:
        self._dripped = time.monotonic()
        for name, connection, got in self._open:
            self._hear(connection, got)
            if name == SLOW:
                with suppress(OSError):
                    connection.send(b"f")

    def _hear(self, connection: socket.socket, got: bytearray) -> None:
        with suppress(OSError):
            connection.setblocking(False)
            got += connection.recv(1 << 16)

    def _end(self, name: str, connection: socket.socket, got: bytearray) -> None:
        self._hear(connection, got)
        self.got = max(self.got, len(got))
        if name != OTHER_SECRET and not harmless(bytes(got)):
            self.harmful.append(got[:200].hex())
        if self._rng.random() < 0.5:  # the other side gets a reset
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def attack(address: tuple[str, int], count: int, seed: int, held: int = OPEN, until: Callable[[], None] = lambda: None
           ) -> Record:  # fmt: skip
    """Make connections without the secret from some threads. Return the number of each kind, the most bytes that one
    has got, and bytes that none should have got.

    Args:
        count: least connections.
        held: connections that stay open.
        until: called after `count` connections; they go on until it returns.
    """
    ended = threading.Event()
    strangers = [Stranger(address, f"{seed} {number}", held // THREADS, ended) for number in range(THREADS)]
    while sum(each.made for each in strangers) < count:
        time.sleep(0.02)
    until()
    ended.set()
    for each in strangers:
        each.thread.join()
    counts = Counter[str]()
    for each in strangers:
        counts += each.counts
    harmful = [line for each in strangers for line in each.harmful]
    return {"sent": dict(counts), "got": max(each.got for each in strangers), "harmful": harmful[:9]}


def attack_here(words: list[str]) -> None:
    """Attack HOST PORT with COUNT connections and SEED, say so, and go on until standard input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))

    def until() -> None:
        print("enough", flush=True)
        sys.stdin.read()

    host, port, count, seed = words
    print(json.dumps(attack((host, int(port)), int(count), int(seed), until=until)), flush=True)


def visit(address: str) -> None:
    """Connect as an engine, store bytes and read them."""
    import torch

    from flexengine.guests.attention_workers.workers import RemoteWorker

    sent = torch.arange(1000, dtype=torch.int32)
    worker = RemoteWorker("worker1", address)
    handle = worker.allocate(sent.nbytes)
    assert handle is not None
    worker.write(handle, 0, sent)
    worker.read(handle, 0, got := torch.empty_like(sent)).wait()
    assert torch.equal(got, sent)
    worker.close()


def visits_here(address: str) -> None:
    """Visit again and again until standard input ends. Print the seconds of each visit, and errors."""
    seconds, errors, ended = list[float](), list[str](), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    visit(address)
    print("ready", flush=True)
    while not ended.wait(PAUSE_SECONDS):
        began = time.monotonic()
        try:
            visit(address)
            seconds.append(time.monotonic() - began)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    print(json.dumps([seconds, errors]), flush=True)


if __name__ == "__main__":
    attack_here(sys.argv[2:]) if sys.argv[1] == "attack" else visits_here(sys.argv[2])
