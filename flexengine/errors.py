"""Every error a caller may want to catch. Messages name the value, the limit and the remedy."""

from collections.abc import Mapping
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


ONE_SEQUENCE = "the KV cache of one sequence"  # `OutOfMemory.what` begins with this if shorter rows would fit
_OPTIONS = {"device": "set --device-mem {} or more", "host": "set --host-mem {} or more",
            "disk": "set --offload-dir to a directory with {} bytes free"}  # fmt: skip


class TooLittle(OutOfMemory):
    """The memory that was given is too little for a job, whatever the plan, or for a given policy.

    Attributes as of OutOfMemory for the first tier that must grow (`needed`: bytes of the whole tier that are enough,
    `used`: 0), and least: by tier, the fewest bytes with which the job runs, the other tiers being as given;
    parts: by tier, what these bytes are for, as `name bytes, name bytes`.
    """

    def __init__(
        self, what: str, least: Mapping[str, int], given: Mapping[str, int], parts: Mapping[str, str]
    ) -> None:
        tier = next(iter(least))
        super().__init__(tier, what, least[tier], 0, given[tier])
        self.least, self.parts = dict(least), dict(parts)
        # A tier that cannot be used has 1 byte: see tier.machine.NO_DISK.
        unusable = {t for t, n in given.items() if t == "disk" and n == 1}
        there = {t: "none can be used" if t in unusable else f"{n:,} are given" for t, n in given.items()}
        needs = " and ".join(
            f"{t} memory: at least {n:,} bytes are needed ({parts[t]}), {there[t]}" for t, n in least.items()
        )
        remedy = " and ".join(_OPTIONS[t].format(n) for t, n in least.items())
        self.args = (f"{needs}, too little for {what}; {remedy}",)


class RanOut(OutOfMemory):
    """Memory that a plan counted on was not there while a job ran, and smaller plans did not help or were not allowed.

    Attributes as of OutOfMemory, and results: of the rows that `Engine.generate` had finished; `Engine.stream` has
    handed out its own.
    """

    def __init__(self, tier: str, what: str, needed: int, message: str) -> None:
        super().__init__(tier, what, needed)
        self.args = (message,)
        self.results: list[Any] = []
