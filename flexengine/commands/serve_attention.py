"""flexengine serve-attention: hold KV cache for an engine on another machine, and compute attention over it."""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from flexengine.commands.exit_codes import run_interruptible
from flexengine.commands.messages import say
from flexengine.commands.parser import Parser
from flexengine.config import parse_size
from flexengine.errors import InvalidInput

# Python handles a signal that arrives just before the system call of `accept` when the call returns.
ACCEPT_SECONDS = 1.0


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("serve-attention", "Hold KV cache for flexengine run --attention-workers on another machine, and compute"
                                  " attention over it. Several engines can use it at the same time.",
               "Every program that reaches the address can use the worker: listen in a trusted network only.",
               "HOST:PORT")  # fmt: skip
    p.add_argument("address", nargs="?", metavar="HOST:PORT", help="address to listen at, such as 10.0.0.2:29600")
    p.add_argument("--worker-mem", metavar="SIZE", help="memory for KV cache of all engines together, e.g. 32G")
    p.add_argument("--worker-file", metavar="DIR",
                   help="hold the KV cache in a file in this directory instead: beside other workers, it takes the"
                        " sequences that find no room there")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 2 refused, 3 failed, 130 or 143 interrupted by SIGINT or SIGTERM."""
    return run_interruptible(lambda _: run(parser().parse_args(argv)), "interrupted: the worker has ended")


def run(args: argparse.Namespace) -> int:
    """Serve engines until the process is interrupted. Raise InvalidInput if it cannot listen at the address."""
    if args.address is None or args.worker_mem is None:
        raise InvalidInput("an address and --worker-mem are needed, as in flexengine serve-attention 10.0.0.2:29600"
                           " --worker-mem 32G")  # fmt: skip
    memory = parse_size(args.worker_mem, "--worker-mem")
    if args.worker_file is None and memory > (free := psutil.virtual_memory().available):
        raise InvalidInput(f"--worker-mem is {memory:,} bytes, but {free:,} bytes of RAM are free; give less, or hold"
                           " the KV cache in a file with --worker-file")  # fmt: skip
    from flexengine import kernels
    from flexengine.guests.attention_workers.network import address_of, serve_forever
    from flexengine.guests.attention_workers.pool import WorkerPool

    host, port = address_of(args.address)
    pool = WorkerPool(memory, None if args.worker_file is None else Path(args.worker_file))
    kernels.load()  # compiling them may take longer than an engine waits
    try:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidInput(f"cannot listen at {args.address} ({error.strerror or error}); give an address of this"
                           " machine, and a free port") from error  # fmt: skip
    with server:
        where = f" in a file in {args.worker_file}" if pool.folder else ""
        say(f"listening at {args.address}, with {memory:,} bytes for KV cache{where}; stop with Ctrl-C")
        server.settimeout(ACCEPT_SECONDS)
        serve_forever(server, pool, say)
    return 0
