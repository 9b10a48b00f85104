"""English prose in the public domain, for measuring quality and for calibration. README.md in this folder lists it."""

from importlib.resources import files
from pathlib import Path

from flexengine.errors import InvalidInput

SAMPLE = ("moby_dick", "roosevelt_1902")
CALIBRATION = ("alice", "lincoln_1862")  # no text of SAMPLE: quality on the calibration text looks better than it is


def text(name: str) -> str:
    """Return a text of SAMPLE or CALIBRATION."""
    return files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")


def sample() -> str:
    """Return the text on which lossy choices are measured, about 165 kB."""
    return "\n\n".join(text(name).strip() for name in SAMPLE)


def calibration() -> str:
    """Return the text for calibration, about 150 kB, from other works."""
    return "\n\n".join(text(name).strip() for name in CALIBRATION)


def read(path: str) -> str:
    """Return the text of the file that --text names. Raise InvalidInput if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--text {path} cannot be read as UTF-8 text: {error}") from error
