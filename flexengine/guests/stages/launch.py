"""Start the processes of a pipeline on this machine, each with the same command line. Environment variables, those of
torchrun, tell each its place. No torch here."""

import os
import socket
from collections.abc import Sequence
from signal import SIGINT
from types import TracebackType
from typing import Self

from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.wire.processes import END_SECONDS, ChildProcess, interrupts_wait

LOCAL = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # network interface of gloo


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) without torchrun.

    Raises:
        InvalidInput: the variables are no numbers, or the rank is not below the number of processes.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise InvalidInput(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, which torchrun sets to a"
            " number below the number of processes; unset both to run one process"
        )
    return int(rank), int(size)


class LocalStages:
    """The processes of stages 1 and on. Use as a context manager, in the process of stage 0.

    A process gets its rank by the environment variables of torchrun. It ignores SIGINT: the driver ends it.
    """

    def __init__(self, stages: int, argv: Sequence[str]) -> None:
        """Start the processes, with arguments of Python, and set the environment of this one. stages: with that of this
        process."""
        with socket.socket() as free:
            free.bind((LOCAL, 0))
            port = free.getsockname()[1]
        threads = max(1, len(os.sched_getaffinity(0)) // stages)
        variables = {
            **{"WORLD_SIZE": str(stages), "LOCAL_WORLD_SIZE": str(stages), "RANK": "0", "LOCAL_RANK": "0"},
            **{"MASTER_ADDR": LOCAL, "MASTER_PORT": str(port)},
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ |= variables
        self._processes: list[ChildProcess] = []
        try:
            for rank in range(1, stages):
                with interrupts_wait():  # until `_processes` holds the process, so that `__exit__` ends it, too
                    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    self._processes.append(ChildProcess(argv, ranks, [SIGINT]))
        except BaseException as error:  # an interrupt, or no memory for a process: end those that were started
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __enter__(self) -> Self:
        return self

    def look(self) -> None:
        """Raise StageLost if a process has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (code := process.poll()) is not None:
                why = f"it ended with code {code} before it joined ({process.tail() or 'no message'})"
                raise StageLost(rank, len(self._processes) + 1, f"process {process.pid}", why)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes. Add the last messages of those that failed to the error."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            messages = process.end(END_SECONDS if error is None or code is not None else 0.0)
            if error is not None and code:
                error.add_note(f"stage {rank} ended with code {code}: {messages}")
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
