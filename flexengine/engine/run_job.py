"""The work of `Engine.run_job`: arguments are checked, the job is opened and run."""

from pathlib import Path
from typing import NamedTuple

from flexengine.activity import reporting
from flexengine.config import SamplingParams, shown
from flexengine.engine.engine_runner import EngineRunner
from flexengine.engine.file_job import FileJob
from flexengine.engine.options import check
from flexengine.engine.session import Session
from flexengine.engine.summary import Summary
from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.overwrite import check_not_overwritten
from flexengine.job.results import check_output, files_beside
from flexengine.job.resume import open_job
from flexengine.job.source import FORMATS
from flexengine.job.streams import STDIN


class JobArguments(NamedTuple):
    """The further arguments of `Engine.run_job`, by the same names."""

    prompt_column: str | None
    limit: int | None
    input_format: str | None
    chat: bool
    score: bool
    restart: bool
    retry_errors: bool

    def check(self) -> None:
        """Raise InvalidInput if an argument is wrong."""
        check("prompt_column", self.prompt_column, str | None, "the name of a column, or None")
        if self.input_format not in (*FORMATS, None):
            raise InvalidInput(f"input_format is {shown(self.input_format)}; it must be one of {', '.join(FORMATS)}")
        check("limit", self.limit, int | None, "a whole number of at least 1, or None")
        if self.limit is not None and self.limit < 1:
            raise InvalidInput(f"limit is {self.limit}; it must be at least 1")
        for name in ("chat", "score", "restart", "retry_errors"):
            check(name, getattr(self, name), bool, "True or False")


def run_job(
    engine: Session, input: str | Path, output: str | Path, params: SamplingParams, arguments: JobArguments
) -> Summary:
    """Run the rows of a file on an engine; see `Engine.run_job`."""
    check("input", input, str | Path, "the name of a file")
    check("output", output, str | Path, "the name of a file")
    check("params", params, SamplingParams, "SamplingParams, or None")
    arguments.check()
    column, limit, form, chat, score, restart, retry_errors = arguments
    input = STDIN if input == "-" else input
    check_output(output, input)
    written = {"trace": engine.options.trace, "output": output, **files_beside(output, "output")}
    check_not_overwritten({"input": input}, written)
    with (
        reporting(engine.listener),
        InputRows(input, column, limit, form, chat, score) as rows,
        open_job(rows, output, restart, retry_errors) as store,
    ):
        summary: Summary = FileJob(EngineRunner(engine, params), store).run()
        return summary
