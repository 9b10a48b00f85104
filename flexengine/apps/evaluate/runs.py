"""Runs: a model with its switches, and the specifications of runs on a command line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    Raise InvalidInput if an option or a value is not allowed, or the name is neither PLAIN nor followed by options."""
    name, colon, rest = text.partition(":")
    if "=" in name:
        name, colon, rest = text, ":", text
    if not name.strip() or (not colon and name != PLAIN) or (colon and not rest):
        must = f"it must be {PLAIN}, or NAME:OPTION=VALUE,... as in 4bit:weights=int4"
        raise InvalidInput(f"--run is {shown(text)}; {must}, with options from {', '.join(OPTIONS)}")
    options = _options(name, rest)
    model, dtype = options.pop("model", None), options.pop("dtype", None)
    try:
        lossy = Lossy(**{option.replace("-", "_"): _value(option, value) for option, value in options.items()})
    except InvalidInput as error:
        raise InvalidInput(f"--run {name}: {error}") from error
    return Run(name.strip(), model, lossy, dtype)


def _value(option: str, text: str) -> Any:
    try:
        return float(text) if option in ("sparse-attention", "sparsify") else text
    except ValueError:
        raise InvalidInput(f"{option} is {shown(text)}; it must be a number, such as 0.1") from None


def _options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(",") if text else ():
        option, _, value = part.partition("=")
        option, value = option.strip().replace("_", "-"), value.strip()
        if option not in OPTIONS:
            known = meant(option, OPTIONS)
            question = f"did you mean {known}? Else " if known else ""
            fault = f"--run {name}: there is no option {shown(option)}"
            raise InvalidInput(f"{fault}; {question}choose from {', '.join(OPTIONS)}")
        if not value or option in options:
            why = "has no value" if not value else "is given twice"
            raise InvalidInput(f"--run {name}: {option} {why}; write {option}=VALUE once")
        options[option] = value
    return options


def runs_of(models: Sequence[str], texts: Sequence[str]) -> list[Run]:
    """Return the runs of a command line: each specification with each model, or with its own model if it names one.
    Raise InvalidInput if a specification is wrong, or two runs would share a name or the names of their files.

    Args:
        models: values of --model; none is the demo model.
        texts: values of --run; none is PLAIN.
    """
    runs: list[Run] = []
    for spec in map(parse_run, texts or (PLAIN,)):
        if spec.model is not None or not models:
            runs.append(spec)
        else:
            for model in models:
                name = f"{Path(model).name} {spec.name}" if len(models) > 1 else spec.name
                runs.append(replace(spec, model=model, name=name))
    seen: dict[str, Run] = {}
    for run in runs:
        if (size := len(run.stem.encode())) > _MOST_BYTES:
            must = f"it must have at most {_MOST_BYTES}, as files are named by it; give a shorter name"
            raise InvalidInput(f"the name of the run {shown(run.name)} has {size} bytes; {must}")
        if (first := seen.setdefault(run.stem, run)) is not run:
            fault = f"two runs are named {first.name} and {run.name}"
            raise InvalidInput(f"{fault}; give --run names of their own, as in NAME:OPTION=VALUE")
    return runs
