"""A device and an attention worker that take given seconds, by sleeps: both then have processors of their own on any
machine, however busy.

python -m bench.workers.slowed MEMORY SECONDS prints a port of the loopback interface, and serves one engine there.
SECONDS: of attention per cached token that is read.
"""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from torch import nn

from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.wire.link import Connection
from flexengine.guests.wire.secret import prove, secret_for
from flexengine.model.linear import FastLinear


class SlowProduct:
    """Product that takes `seconds` per element of its weight."""

    def __init__(self, product: Any, seconds: float) -> None:
        self.product, self.seconds = product, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.product, name)

    def __call__(self, x: Any, weight: Any, *rest: Any) -> Any:
        end = time.perf_counter() + self.seconds * weight.numel()
        out = self.product(x, weight, *rest)
        time.sleep(max(0.0, end - time.perf_counter()))
        return out


class SlowKernels:
    """Kernels whose decode attention takes `seconds` per cached token that it reads."""

    def __init__(self, kernels: Any, seconds: float) -> None:
        self.kernels, self.seconds = kernels, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def decode_attention(self, q: Any, pool: Any, tables: Any, lengths: Any, options: Any, *rest: Any) -> Any:
        read = lengths if options.window is None else lengths.clamp(max=options.window)
        end = time.perf_counter() + self.seconds * int(read.sum())
        out = self.kernels.decode_attention(q, pool, tables, lengths, options, *rest)
        time.sleep(max(0.0, end - time.perf_counter()))
        return out


def slow_down(model: nn.Module, seconds: float) -> None:
    """Let the products of a model's layers take `seconds` per element of a weight."""
    for module in model.modules():
        if isinstance(module, FastLinear):
            module.product = SlowProduct(module.product, seconds)  # type: ignore[assignment]


def start(memory: int, seconds: float, stack: ExitStack) -> str:
    """Start a slowed worker in a process of its own. Return its address."""
    command = [sys.executable, "-m", "bench.workers.slowed", str(memory), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return f"127.0.0.1:{process.stdout.readline().strip()}"


def main() -> None:
    """Serve one engine."""
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection = listening.accept()[0]
        prove(connection, secret_for("127.0.0.1"), b"", accepts=True)
        server = AttentionServer(Connection(connection), WorkerPool(memory))
    server.device.kernels = SlowKernels(server.device.kernels, seconds)  # type: ignore[assignment]
    server.run()


if __name__ == "__main__":
    main()
