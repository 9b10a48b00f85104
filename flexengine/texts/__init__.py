"""English prose in the public domain, to measure quality on and to calibrate with; README.md says what each text is."""

from collections.abc import Iterable
from importlib.resources import files

from flexengine.errors import InvalidInput

SAMPLE = ("moby_dick", "roosevelt_1902")
CALIBRATION = ("alice", "lincoln_1862")  # none of SAMPLE: what was calibrated on a text looks too good on it


def names() -> tuple[str, ...]:
    """Of all texts."""
    return tuple(sorted(SAMPLE + CALIBRATION))


def text(name: str) -> str:
    """One of them. Raises InvalidInput for another name."""
    if name not in names():
        raise InvalidInput(f"there is no text {name!r}; there are {', '.join(names())}")
    return files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")


def sample() -> str:
    """The prose that lossy choices are judged on, about 165 kB."""
    return _joined(SAMPLE)


def calibration() -> str:
    """Prose of other works, about 150 kB, for what is fitted to a text."""
    return _joined(CALIBRATION)


def _joined(chosen: Iterable[str]) -> str:
    return "\n\n".join(text(name).strip() for name in chosen)
