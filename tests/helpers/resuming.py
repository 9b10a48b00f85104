"""What tests of resumed jobs share."""

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.engine.engine import Engine
from flexengine.engine.summary import JobRows
from tests.helpers.job import Job

ROOT = Path(__file__).parents[2]
SAMPLED = ("--temperature", "1.2", "--n", "2", "--top-k", "50")


class Watch:
    """Wraps Engine.results: records its rows, and raises an error instead of result number `fail_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[int] | None = None
        self.params: SamplingParams | None = None
        self.fail_at: int | None = None
        self.change: Callable[[Any], None] = lambda result: None
        real = Engine.results

        def results(engine: Engine, rows: Any, params: SamplingParams, counts: JobRows) -> Iterator[Any]:
            self.ran, self.params = [row.index for row in rows], params
            assert self.ran == [row.index for row in rows]  # as often as the engine likes
            for count, result in enumerate(real(engine, rows, params, counts)):
                if count == self.fail_at:
                    raise OSError(errno.EIO, "Input/output error")
                self.change(result)
                yield result

        monkeypatch.setattr(Engine, "results", results)

    def forget(self) -> None:
        self.ran = self.fail_at = None
        self.change = lambda result: None


def journal_of(job: Job) -> Path:
    return job.output.with_name(job.output.name + ".journal")


def records(job: Job) -> list[Any]:
    return [json.loads(line[9:]) for line in journal_of(job).read_bytes().splitlines()]


def rows_done(job: Job) -> set[int]:
    return {r["index"] for r in records(job) if "index" in r}


def state(job: Job) -> list[Any]:
    return [(p.name, p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in sorted(job.folder.iterdir())]
