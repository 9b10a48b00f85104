"""Every error a caller may want to catch. Messages name the value, the limit and the remedy."""


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

    Attributes: tier (name), what (the thing), needed, used, capacity (bytes).
    """

    def __init__(self, tier: str, what: str, needed: int, used: int, capacity: int, remedy: str = "") -> None:
        self.tier, self.what, self.needed, self.used, self.capacity = tier, what, needed, used, capacity
        message = (
            f"{tier} memory: {what} needs {needed:,} bytes, but {used:,} of {capacity:,} bytes are taken"
            f" ({needed + used - capacity:,} too many)"
        )
        super().__init__(f"{message}; {remedy}" if remedy else message)
