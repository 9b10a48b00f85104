"""flexengine serve-attention: hold KV cache for an engine on another machine, and compute attention over it."""

import argparse
import socket
from pathlib import Path

from flexengine.config import parse_size
from flexengine.errors import InvalidInput, size
from flexengine.shell.commands.interrupts import Interrupts
from flexengine.shell.commands.messages import DONE, interruptible, say
from flexengine.shell.commands.options import SECRET, OptionTable, add_options
from flexengine.shell.commands.parser import Parser

# Python handles a signal that arrives just before the system call of `accept` when the call returns.
ACCEPT_SECONDS = 1.0


_END = """\
Several engines can use the worker at the same time, with flexengine run --attention-workers. They prove a secret first:
at an address that other machines reach, give both --secret-file, or set FLEXENGINE_SECRET_FILE, with the same secret.
"""
_OPTIONS = """
--device NAME      where the KV cache is and attention is computed: cpu, cuda, cuda:1, or sim, which treats RAM as a
                   GPU's memory; one worker for each GPU; default cpu
--worker-mem SIZE  memory of the device for KV cache, page tables and questions of all engines together, e.g. 32G
--worker-file DIR  hold the KV cache in a file in this directory instead: beside other workers, it takes the sequences
                   that find no room there
"""


def parser() -> Parser:
    p = Parser("serve-attention", "HOST:PORT", _END)
    p.add_argument("address", nargs="?", metavar="HOST:PORT", help="address to listen at, such as 10.0.0.2:29600")
    add_options(p, OptionTable(_OPTIONS, {"device": "cpu"}))
    add_options(p, SECRET)
    return p


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Serve engines until the process is interrupted. Raise InvalidInput if it cannot listen at the address."""
    interrupts.standing = lambda: "interrupted: the worker has ended"
    if args.address is None or args.worker_mem is None:
        example = "flexengine serve-attention 10.0.0.2:29600 --worker-mem 32G"
        raise InvalidInput(f"an address and --worker-mem are needed, as in {example}")
    memory = parse_size(args.worker_mem, "--worker-mem")
    if args.worker_file is not None and args.device != "cpu":
        raise InvalidInput(f"--worker-file holds pages for the processor, but --device is {args.device}; remove one")
    from flexengine.guests.attention_workers.devices import open_device
    from flexengine.guests.attention_workers.pool import WorkerPool, records_of
    from flexengine.guests.attention_workers.workers import address_of, serve_forever
    from flexengine.guests.wire.secret import secret_for

    (host, port), records = address_of(args.address), records_of(memory)
    secret_for(host)  # before anything is measured, and kernels are compiled, for which an engine may not wait
    folder = None if args.worker_file is None else Path(args.worker_file)
    device = open_device(args.device, memory if folder is None else 0)
    pool = WorkerPool(memory - records, folder, records, device)
    try:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        remedy = "give an address of this machine, and a free port"
        raise InvalidInput(f"cannot listen at {args.address} ({error.strerror or error}); {remedy}") from error
    with server:
        where = f" in a file in {args.worker_file}" if pool.folder else f" on {device.name}" if device.name else ""
        say(f"listening at {args.address}, with {size(pool.memory)} for KV cache{where}; stop with Ctrl-C")
        server.settimeout(ACCEPT_SECONDS)
        serve_forever(server, pool, say, secret_for(server.getsockname()[0]))
    return DONE


main = interruptible(lambda words, interrupts: run(parser().parse_args(words), interrupts))
