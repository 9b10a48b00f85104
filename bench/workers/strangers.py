"""Programs without the secret against an attention worker and against stages that wait for one another.

python -m bench.workers.strangers [--connections 10000] [--seed 0] [--out FILE]

As root, in a network namespace of its own, so that nothing else is reached. Connections send nothing, random bytes,
requests of other protocols, wrong proofs, or headers that announce much; up to OPEN of them stay open. Meanwhile an
engine with the secret connects to the worker again and again, and at the end the second stage joins. Good if all of
these come in, the worker and the stage live, and the worker's peak of RAM grows by less than its budget.
"""

import argparse
import os
import random
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record

INSIDE = "FLEXENGINE_BENCH_NAMESPACE"  # environment variable of the process in the namespace
HOST, WORKER, STAGES = "10.77.0.1", 29600, 29500  # an address that is not loopback, and ports
MEMORY = 100_000_000  # bytes of --worker-mem
OPEN, THREADS = 900, 8  # connections that stay open, and threads that make them
PAUSE_SECONDS = 0.25  # between two connections of the engine with the secret
STAGE = f"""
from flexengine.guests.stages import group
group._address = lambda interface: {HOST!r}
made = group.PipelineGroup("lo")
print("joined", made.exchange("key", str(made.rank)), flush=True)
made.close()
"""


def kinds() -> dict[str, Callable[[random.Random], bytes]]:
    """Return what a connection sends, by name."""
    from flexengine.guests.wire.link import HEADER, MAGIC
    from flexengine.guests.wire.secret import OPENING

    def header(rng: random.Random) -> bytes:
        return HEADER.pack(MAGIC | rng.randrange(1, 30), 0, rng.choice((-1, 1 << 20, 1 << 39)), *[rng.randrange(9)] * 5)

    return {
        "nothing": lambda rng: b"",
        "random bytes": lambda rng: rng.randbytes(rng.randrange(1, 5000)),
        "a request": lambda rng: b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" * rng.randrange(1, 50),
        "the store of torch": lambda rng: struct.pack("<BI", 0, 0x3C85F7CE) + rng.randbytes(64),
        "a wrong proof": lambda rng: OPENING + b"attention".ljust(16) + rng.randbytes(64),
        "half an opening": lambda rng: OPENING[: rng.randrange(1, 16)],
        "headers": lambda rng: b"".join(header(rng) for _ in range(rng.randrange(1, 5))),
        "headers after an opening": lambda rng: OPENING + b"attention".ljust(16) + rng.randbytes(64) + header(rng),
    }


def attack(address: tuple[str, int], count: int, seed: int, held: int = OPEN) -> dict[str, int]:
    """Make connections without the secret from some threads. Return the number of each kind, and of those that could
    not be made. held: connections that stay open."""
    sends, counts, lock = kinds(), dict[str, int](), threading.Lock()

    def run(number: int) -> None:
        rng, kept = random.Random(f"{seed} {number}"), list[socket.socket]()
        for _ in range(count // THREADS):
            name = rng.choice(list(sends))
            try:
                made = socket.create_connection(address, 5)
            except OSError:
                name = "not made"
            else:
                with suppress(OSError):
                    if data := sends[name](rng):
                        made.sendall(data)
                kept.append(made)
            with lock:
                counts[name] = counts.get(name, 0) + 1
            if len(kept) > held // THREADS:
                gone = kept.pop(rng.randrange(len(kept)))
                if rng.random() < 0.5:  # the other side gets a reset
                    with suppress(OSError):
                        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                gone.close()
        for each in kept:
            each.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


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


def visits(address: str, ended: threading.Event) -> tuple[list[float], list[str]]:
    """Visit again and again until an event is set. Return the seconds of each visit, and errors."""
    seconds, errors = list[float](), list[str]()
    while not ended.wait(PAUSE_SECONDS):
        began = time.monotonic()
        try:
            visit(address)
            seconds.append(time.monotonic() - began)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return seconds, errors


def peak(pid: int) -> int:
    """Return the most resident bytes of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def wait_for(port: int) -> None:
    while True:
        with suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        time.sleep(0.2)


def inside(count: int, seed: int) -> tuple[Record, bool]:
    """Return the record, and whether all is well. Called in the namespace."""
    subprocess.run("ip link set lo up && ip address add 10.77.0.1/8 dev lo", shell=True, check=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    os.environ["FLEXENGINE_SECRET"] = secrets.token_hex(32)
    python, shell = [sys.executable, "-m", "flexengine"], 'ulimit -n 1024; exec "$@"'
    command = ["bash", "-c", shell, "-", *python, "serve-attention", f"{HOST}:{WORKER}", "--worker-mem", str(MEMORY)]
    variables = {"MASTER_ADDR": HOST, "MASTER_PORT": str(STAGES), "WORLD_SIZE": "2"}

    def stage(rank: int, stack: ExitStack) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", STAGE], text=True, stdout=subprocess.PIPE,
                                   env=os.environ | variables | {"RANK": str(rank)})  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        driver = stage(0, stack)
        wait_for(WORKER)
        wait_for(STAGES)
        ended, found = threading.Event(), list[Any]()
        visit(f"{HOST}:{WORKER}")  # libraries are loaded
        before = peak(worker.pid)
        visiting = threading.Thread(target=lambda: found.extend(visits(f"{HOST}:{WORKER}", ended)))
        visiting.start()
        began = time.monotonic()
        sent = attack((HOST, WORKER), count, seed)
        seconds = time.monotonic() - began
        ended.set()
        visiting.join()
        staged = attack((HOST, STAGES), count // 10, seed + 1)
        second = stage(1, stack)
        joined = [process.communicate(timeout=60)[0].strip() for process in (driver, second)]
        lives, after = worker.poll() is None, peak(worker.pid)
        worker.terminate()
        said = worker.communicate(timeout=60)[1].splitlines()
    times, errors = found
    record = {
        "sent": sent, "sent_to_stages": staged, "seconds": seconds, "visits": len(times), "errors": errors,
        "slowest_visit": max(times, default=0.0), "worker_lives": lives, "stages": joined,
        "peak_bytes": after, "grown_bytes": after - before, "refusals_said": sum("refused" in line for line in said),
    }  # fmt: skip
    good = lives and bool(times) and not errors and joined == ["joined ['0', '1']"] * 2
    return record, good and after - before < 1.1 * MEMORY


def main() -> int:
    """Run in a namespace and print the record. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=harness.at_least_one, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    if INSIDE not in os.environ:
        again = [sys.executable, "-m", "bench.workers.strangers", *sys.argv[1:]]
        return subprocess.run(["unshare", "-n", *again], env=os.environ | {INSIDE: "1"}).returncode
    record, good = inside(args.connections, args.seed)
    case = {"name": "strangers", "connections": args.connections, "seed": args.seed, "memory": MEMORY}
    header = harness.header("workers", case, [{"versions": harness.versions()}])
    harness.emit(header | record | {"good": good}, args.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
