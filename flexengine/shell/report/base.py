"""The recorder of a job without a page. It imports little, as every job imports it."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from flexengine.config import Result

if TYPE_CHECKING:
    from flexengine.engine.session import Session
    from flexengine.engine.summary import Progress


class NoReport:
    """Recorder of a job without a page. All its methods do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def attach(self, engine: "Session") -> None:
        """Observe an engine, before its job begins."""

    def sweep(self, progress: "Progress") -> None:
        """Record a sweep that has ended. Write the page if it is time to."""

    def take(self, result: Result) -> None:
        """Record the result of a row."""
