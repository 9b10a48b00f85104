"""Files that commands write: checks before work starts, and writing with an error in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flexengine.errors import InvalidInput
from flexengine.job.files import check_model_kept, check_not_overwritten


def check_written(written: Mapping[str, str | None], read: Mapping[str, str | None], model: str | None) -> None:
    """Raise InvalidInput if a file cannot be written, is read, too, is written by two options, or is of the model.

    Args:
        written: file names by option; None if the option is not given.
        read: names of files that are read, by option; None if the option is not given.
        model: as in --model.
    """
    check_not_overwritten(read, written)
    check_model_kept(model, written)
    for option, name in written.items():
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: it is a directory; name a file in it")
        if not (parent := path.absolute().parent).is_dir():
            raise InvalidInput(f"{option} {name} cannot be written: there is no directory {parent}; make it first")


def write(path: str, text: str) -> None:
    """Write a text and a newline. Raise OSError, which says so, if the file cannot be written."""
    with writing(path):
        Path(path).write_text(text + "\n", encoding="utf-8")


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the file in an OSError of the block, which writes it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"the file cannot be written: {error.strerror}", path) from error
