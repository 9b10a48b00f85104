"""Files that commands write: checks before work starts, and writing with an error in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flexengine.errors import InvalidInput
from flexengine.job.apart import check_apart


def check_written(written: Mapping[str, str | None], read: Mapping[str, str | None]) -> None:
    """Raise InvalidInput if a file cannot be written, is read, too, or is written by two options.

    Args:
        written: file names by option; None if the option is not given.
        read: names of files that are read, likewise.
    """
    check_apart(read, written)
    for option, name in written.items():
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: it is a directory; name a file in it")
        if not (parent := path.absolute().parent).is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: there is no directory {parent}; make it first")


def write(path: str, text: str) -> None:
    """Write a text and a newline. Raise InvalidInput if the file cannot be written."""
    with writing(path):
        Path(path).write_text(text + "\n", encoding="utf-8")


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise InvalidInput instead of OSError if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error}") from error
