"""Release of the variables that an error keeps alive through the frames of its traceback."""

import traceback


def forget_variables(error: BaseException) -> None:
    """Clear the local variables of all ended frames in the tracebacks of `error` and of its causes and contexts.

    Tensors in such variables would live as long as the error, and a variable that leads back to the error (a `Done`)
    would close a reference cycle. The traceback still prints as before.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
