"""Pages of an attention worker in a file: it is mapped to memory, so the system reads pages that attention reads.

Lines of a file that is larger than free RAM are read from disk again and again. So only sequences that find no room in
the memory of other workers are there (Lamina, section 3.6: memory beyond the device's; InstInfer: attention beside a
disk).
"""

import mmap
import os
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from flexengine.errors import InvalidInput

MEASURED = 64 << 20  # bytes that are written and read to measure a disk


def mapped_file(descriptor: int, nbytes: int) -> Tensor:
    """Return uint8 [nbytes] in a mapping of an open file, which other processes may map too."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def mapped(folder: Path, nbytes: int) -> Tensor:
    """Return uint8 [nbytes], zeros, in a mapping of a new file without a name, which ends with the tensor.

    Raise OSError if the disk has too few free bytes: without space, later writes would end the process.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return mapped_file(file.fileno(), nbytes)


def read_rate(folder: Path, memory: int) -> int:
    """Return the bytes per second of reads from a file in a directory. Raise InvalidInput if it cannot have one of so
    many bytes. memory: most bytes of all files."""
    try:
        if (free := shutil.disk_usage(folder).free) < memory:
            raise InvalidInput(
                f"--worker-mem is {memory:,} bytes, but the disk of {str(folder)!r} has {free:,} free"
                " bytes; give less, or a directory of another disk"
            )
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MEASURED))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, MEASURED, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with closing(mmap.mmap(file.fileno(), MEASURED, prot=mmap.PROT_READ)) as pages:
                pages.read()
            return max(1, round(MEASURED / (time.perf_counter() - began)))
    except OSError as error:
        raise InvalidInput(
            f"directory {str(folder)!r} cannot hold a file of pages ({error.strerror or error});"
            " give a directory of a disk that can be written"
        ) from error
