"""Runs: a model with its switches, the specifications of runs on a command line, and the job of a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexengine.apps.rows_job import RowsJob, RunsJobs
from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput, meant, shown
from flexengine.lossy import EXACT, Lossy

OPTIONS = ("model", "weights", "budget", "compute", "cache", "sparse-attention", "calibrate", "flash", "sparsify",
           "dtype")  # fmt: skip
PLAIN = "exact"  # the run without options
_MOST_BYTES = 200  # of a run's name; a file's name has at most 255


@dataclass(frozen=True)
class Run:
    """A model with its switches."""

    name: str  # name in all results
    model: str | None = None  # as in --model; None is the demo model
    lossy: Lossy = EXACT
    dtype: str | None = None  # as in --dtype; None until that option is known

    @property
    def stem(self) -> str:
        """Return the name of the run's files without suffix."""
        return re.sub(r"[^\w.-]+", "_", self.name)


def parse_run(text: str) -> Run:
    """Return the run of a specification: NAME, or NAME:OPTION=VALUE,..., or OPTION=VALUE,... whose name is the text.

    Raises:
        InvalidInput: an option is unknown, has no value, or is given twice; a value is not allowed; or the name is
            neither PLAIN nor followed by options.
    """
    name, colon, rest = text.partition(":")
    if "=" in name:
        name, colon, rest = text, ":", text
    if not name.strip() or (not colon and name != PLAIN) or (colon and not rest):
        raise InvalidInput(
            f"--run is {shown(text)}; it must be {PLAIN}, or NAME:OPTION=VALUE,... as in"
            f" 4bit:weights=int4, with options from {', '.join(OPTIONS)}"
        )
    options = _options(name, rest)
    switches: dict[str, Any] = {n.replace("-", "_"): v for n, v in options.items() if n not in ("model", "dtype")}
    try:
        for switch in ("sparse_attention", "sparsify"):
            value = switches.get(switch)
            try:
                if value is not None:
                    switches[switch] = float(value)
            except ValueError:
                option = switch.replace("_", "-")
                raise InvalidInput(f"{option} is {shown(value)}; it must be a number, such as 0.1") from None
        lossy = Lossy(**switches)
    except InvalidInput as error:
        raise InvalidInput(f"--run {name}: {error}") from error
    return Run(name.strip(), options.get("model"), lossy, options.get("dtype"))


def _options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(",") if text else ():
        option, _, value = part.partition("=")
        option, value = option.strip().replace("_", "-"), value.strip()
        if option not in OPTIONS:
            known = meant(option, OPTIONS)
            question = f"did you mean {known}? Else " if known else ""
            raise InvalidInput(
                f"--run {name}: there is no option {shown(option)}; {question}choose from {', '.join(OPTIONS)}"
            )
        if not value or option in options:
            why = "has no value" if not value else "is given twice"
            raise InvalidInput(f"--run {name}: {option} {why}; write {option}=VALUE once")
        options[option] = value
    return options


def runs_of(models: Sequence[str], texts: Sequence[str]) -> list[Run]:
    """Return the runs of a command line: each specification with each model, or with its own model if it names one.

    Args:
        models: values of --model; none is the demo model.
        texts: values of --run; none is PLAIN.

    Raises:
        InvalidInput: a specification is wrong, or two runs would share a name or the names of their files.
    """
    runs: list[Run] = []
    for spec in map(parse_run, texts or (PLAIN,)):
        if spec.model is not None or not models:
            runs.append(spec)
        else:
            several = len(models) > 1
            names = [f"{Path(model).name} {spec.name}" if several else spec.name for model in models]
            runs += [replace(spec, model=model, name=name) for model, name in zip(models, names, strict=True)]
    seen: dict[str, Run] = {}
    for run in runs:
        if (size := len(run.stem.encode())) > _MOST_BYTES:
            raise InvalidInput(
                f"the name of the run {shown(run.name)} has {size} bytes; it must have at most"
                f" {_MOST_BYTES}, as files are named by it; give a shorter name"
            )
        if (first := seen.setdefault(run.stem, run)) is not run:
            raise InvalidInput(
                f"two runs are named {first.name} and {run.name}; give --run names of their own, as in"
                " NAME:OPTION=VALUE"
            )
    return runs


def run_job(
    engine: RunsJobs, run: Run, rows: Sequence[dict[str, Any]], folder: Path
) -> tuple[list[dict[str, Any]], float | None]:
    """Run the rows as one job, whose files are in `folder`. If the job was interrupted, it is continued; if it is
    finished, its results are read.

    Returns:
        The rows with the fields of the output, and the seconds of the job, from the reading of weights on; None if an
        earlier call of the command computed some of the rows.

    Raises:
        InvalidInput: the folder holds a job of this name with other rows.
    """
    job = RowsJob.named(folder / run.stem)
    write_rows(job, rows)
    summary = engine.run_job(job.rows, job.results, SamplingParams(), score=True)
    seconds = summary.load_seconds + summary.total_seconds
    results = [{**row, **output} for row, output in zip(rows, job.outputs(), strict=True)]
    return results, seconds if summary.job.done_before == 0 else None


def write_rows(job: RowsJob, rows: Sequence[dict[str, Any]]) -> None:
    """Write the input of a job, unless it is there. Raise InvalidInput if the file has other rows."""
    if job.has_other(rows):
        raise InvalidInput(
            f"{job.rows} was written for other scenarios: they, or their data, have changed since; give --restart to"
            " start over, or another --output"
        )
    job.write(rows)
