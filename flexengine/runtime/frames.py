"""Variables that errors keep alive through the frames of their tracebacks."""

import traceback


def forget_variables(error: BaseException) -> None:
    """Clear the local variables of all ended frames in the tracebacks of `error` and of the errors before it.

    Tensors in such variables would live as long as the error, and a variable that leads back to the error (a `Done`)
    would close a reference cycle. The traceback still prints as before.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
