"""What a recorder reads of a job, and the recorder of a job without a page. Imports little: every job imports it."""

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from flexengine.config import Result

if TYPE_CHECKING:
    from flexengine.plan.feedback import Watch


class Counted(Protocol):
    """The rows of a job, as `job.resume.Job` counts them."""

    total: int
    resumed: int

    @property
    def done(self) -> int: ...

    @property
    def failed(self) -> int: ...


class Progress(Protocol):
    """Counts after a sweep, as in `engine.state.Progress`."""

    sweeps: int
    prompt_tokens: int
    computed_prompt_tokens: int
    tokens: int
    most: int
    prefill_seconds: float
    decode_seconds: float


class Summary(Protocol):
    """Counts, seconds and bytes of a job, as `engine.summary.Summary`."""

    def to_json(self) -> dict[str, Any]: ...


class Observed(Protocol):
    """The engine of the job, as far as a page shows it."""

    core: Any

    @property
    def summary(self) -> Summary: ...

    @property
    def watch(self) -> "Watch | None": ...


class NoReport:
    """Recorder of a job without a page. All its methods do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def attach(self, engine: Observed) -> None:
        """Observe an engine, before its job begins."""

    def sweep(self, progress: Progress) -> None:
        """Record a sweep that has ended. Write the page if it is time to."""

    def take(self, result: Result) -> None:
        """Record the result of a row."""
