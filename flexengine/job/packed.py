"""Bytes of inputs, compressed or not, as a stream that knows its place."""

import io
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from flexengine.errors import InvalidInput


def unpacked(file: BinaryIO, name: Path, packing: str) -> Any:
    """Return an object that decompresses a file. name, packing: as for `Bytes`."""
    if packing == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=file)
    for module in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(module).ZstdFile(file)
        except ImportError:
            continue
    raise InvalidInput(f'input {name}: reading zstd needs backports.zstd; pip install "flexengine[zst]"')


class Bytes(io.RawIOBase):
    """Bytes of a file, which are added to a digest while they are read. Reading damaged compressed data raises
    InvalidInput, which names the last whole line.

    Args:
        file: the file, or an object that decompresses it.
        name, packing: name of the input in messages; gzip, zstd or "".
        digest: None for no digest.
    """

    def __init__(self, file: Any, name: Path, packing: str, digest: Any) -> None:
        self._file, self._name, self._packing, self._digest = file, name, packing, digest
        self._at = self._lines = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        name, packing = self._name, self._packing
        try:
            data = self._file.read1(len(buffer))
        except Exception as error:  # each decompressor raises errors of its own
            if not packing or (isinstance(error, OSError) and error.errno is not None):
                raise  # the file itself cannot be read
            reason = "it is cut short" if isinstance(error, EOFError) else str(error) or type(error).__name__
            fault = f"input {name} is damaged after line {self._lines}: {reason} ({packing})"
            raise InvalidInput(f"{fault}; make it again") from error
        if packing:
            self._lines += data.count(b"\n")
        if self._digest is not None:
            self._digest.update(data)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
