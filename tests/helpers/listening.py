"""A listener that keeps all reports."""

from collections.abc import Iterator
from contextlib import contextmanager

from flexengine.activity import MESSAGE, Activity, reporting


class Heard(list[Activity]):
    """Reports in the order of their arrival. Pass it as `Engine(progress=...)`."""

    def __call__(self, record: Activity) -> None:
        self.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.text for record in self if record.name == MESSAGE]

    def begun(self, name: str | None = None) -> list[str]:
        """Return the texts of the activities that have begun, of one name or of all."""
        return [r.text for r in self if r.state == "began" and name in (None, r.name)]

    def last(self, name: str) -> Activity:
        return [record for record in self if record.name == name][-1]


@contextmanager
def listening() -> Iterator[Heard]:
    """Yield all reports of the block in this context."""
    found = Heard()
    with reporting(found):
        yield found
