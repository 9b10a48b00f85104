"""Bytes of buffers for reads from disks, and names of buffers of delegated attention."""

from flexengine.plan.sizes import ALIGN, aligned

DELEGATION, DESKS = "delegation buffers", "buffers of attention workers"
READ, READ_BUFFERS = 4 << 20, 3  # bytes of a long read from disk, and number of buffers, as in tier/disk.py
HUGE = 2 << 20  # bytes of a huge page
SHORT_READ, SHORT_READERS = READ // 4, 4  # bytes of a short read, and threads with one buffer each


def read_buffers(longest: int, disks: int) -> int:
    """Return the bytes of RAM buffers of all disks in use. Data is read into these buffers, then converted.

    A disk has buffers for short reads and, if any read is long, for long reads. Consecutive weights are one read. Only
    the part of a buffer that the longest read fills takes RAM, in huge pages if the read is long.

    Args:
        longest: bytes of the longest read.
        disks: number of disks in use.
    """
    long = READ_BUFFERS * min(READ, aligned(longest, HUGE)) if longest >= SHORT_READ else 0
    return disks * (aligned(long) + SHORT_READERS * aligned(min(SHORT_READ, longest) + 2 * ALIGN))
