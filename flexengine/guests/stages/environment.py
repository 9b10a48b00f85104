"""Environment variables by which torchrun, or `flexengine run --stages`, tells a process its place. No torch here."""

import os

from flexengine.errors import InvalidInput

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
