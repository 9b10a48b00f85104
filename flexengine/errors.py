"""Every error a caller may want to catch. Messages name the value, the limit and the remedy."""

from typing import Any


class FlexError(Exception):
    """Base of all errors raised on purpose by flexengine."""


class InvalidInput(FlexError, ValueError):
    """A parameter, policy, row or file that cannot be used as given."""


class UnsupportedModel(FlexError):
    """A model the engine cannot run exactly; says which and why, before any weight is read."""


class BadCheckpoint(FlexError):
    """A checkpoint whose files, tensors or shapes do not fit its config."""


class ModelNotFound(FlexError):
    """No model at the given place; says what to type."""


class OutOfMemory(FlexError, MemoryError):
    """A tier cannot hold what is asked of it.

    Attributes: tier (name), what (the thing), needed, used, capacity (bytes). No capacity is given where it is the
    system that has no more.
    """

    def __init__(
        self, tier: str, what: str, needed: int, used: int = 0, capacity: int | None = None, remedy: str = ""
    ) -> None:
        self.tier, self.what, self.needed, self.used, self.capacity = tier, what, needed, used, capacity or 0
        message = f"{tier} memory: {what} needs {needed:,} bytes, but "
        if capacity is None:
            message += "the system has no more"
        else:
            message += f"{used:,} of {capacity:,} bytes are taken ({needed + used - capacity:,} too many)"
        super().__init__(f"{message}; {remedy}" if remedy else message)


class RanOut(OutOfMemory):
    """Memory that a plan counted on was not there while a job ran, and smaller plans did not help or were not allowed.

    Attributes as of OutOfMemory, and results: of the rows that `Engine.generate` had finished; `Engine.stream` has
    handed out its own.
    """

    def __init__(self, tier: str, what: str, needed: int, message: str) -> None:
        super().__init__(tier, what, needed)
        self.args = (message,)
        self.results: list[Any] = []
