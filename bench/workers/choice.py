"""Whether the planner uses attention workers only where they pay: machines and jobs that differ in one thing each."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.harness import Record
from bench.models import LlamaShape, make
from bench.workers.grid import serve

SHAPE = LlamaShape(16, 768, 2112, 8, vocab=2000, positions=4096, dtype="float32", kv_heads=2)
MEMORY, HOST, DISK = 176 << 20, 96 << 20, 200e6  # bytes of device and host; bytes per second of the disk
TOKENS, WORKERS, WORKER_MEMORY = 12, 2, MEMORY + HOST
PIECE = 1 << 16  # bytes that a slow connection passes on at once


@dataclass(frozen=True)
class Case:
    """A machine and a job.

    Attributes:
        name: for the record.
        context: tokens of each prompt.
        rows: number of prompts.
        machine: fields of a job of `side`.
        link: bytes per second of the connections to workers; None for workers on this machine.
    """

    name: str
    context: int = 2000
    rows: int = 8
    machine: Record = field(default_factory=dict)
    link: float | None = None


_THROTTLED = {"device": "sim", "memory": MEMORY, "host": HOST, "links": {"disk_read": DISK, "disk_write": DISK}}
CASES = (
    Case("memory limits the block", machine=_THROTTLED),
    Case("short contexts", context=32, machine=_THROTTLED),
    Case("all fits into RAM", machine={"device": "cpu", "memory": "4G"}),
    Case("one row", rows=1, machine=_THROTTLED),
    Case("connections of 3 MB/s", context=500, machine=_THROTTLED, link=3e6),
)


@contextmanager
def slow(address: str, rate: float) -> Iterator[str]:
    """Pass a connection on to an address, at most `rate` bytes per second each way. Yield the address to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server, address, rate), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _accept(server: socket.socket, address: str, rate: float) -> None:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            far = socket.create_connection((host, int(port)))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(*ends, rate), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, rate: float) -> None:
    """Pass bytes on until the source ends, then end the target."""
    free = time.monotonic()
    with closing(target), suppress(OSError):
        while piece := source.recv(PIECE):
            free = max(free, time.monotonic()) + len(piece) / rate
            time.sleep(max(0.0, free - time.monotonic()))
            target.sendall(piece)


def sides(case: Case, directory: Path, stack: ExitStack) -> dict[str, Record]:
    """Return the jobs of a case: alone, with workers that the planner may use, and with workers that it must use."""
    rng, model = random.Random(1), make(SHAPE, directory / "choice")
    job = {
        "model": str(model),
        "tokens": TOKENS,
        "folder": str(directory),
        "measure": True,
        **case.machine,
        "rows": [[rng.randrange(3, SHAPE.vocab) for _ in range(case.context)] for _ in range(case.rows)],
    }
    workers: Record = {"workers": WORKERS, "worker_mem": WORKER_MEMORY}
    if case.link is not None:
        addresses = serve(WORKERS, stack, str(WORKER_MEMORY))
        workers = {"workers": [stack.enter_context(slow(address, case.link)) for address in addresses]}
    return {"alone": job, "planned": {**job, **workers}, "forced": {**job, **workers, "force": True}}


def summary(runs: dict[str, list[Record]]) -> Record:
    """Return the medians of a case's runs, and what the planner chose."""
    used = ["workers" in run["policy"]["cache"] for run in runs["planned"]]
    return {
        "seconds": {name: median(run["measured_seconds"] for run in each) for name, each in runs.items()},
        "predicted": {name: median(run["predicted_seconds"] for run in each) for name, each in runs.items()},
        "used": used, "policies": {name: each[-1]["policy"] for name, each in runs.items()},
        "same": all(run["tokens"] == runs["alone"][0]["tokens"] for each in runs.values() for run in each),
    }  # fmt: skip
