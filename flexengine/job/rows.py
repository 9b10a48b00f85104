"""A row of the input. All file readers yield rows, and an engine runs them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flexengine.errors import json_kind

PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")
CONTEXT = "context"  # field that stands before a continuation or choices
SCORED_KINDS = ("continuation", "choices", "text")  # fields of rows that are scored
_PLACE = re.compile(r"^((line|row) \d+( \(line \d+\))?: )+")


@dataclass(frozen=True)
class Row:
    """One input row."""

    index: int  # number of the row, from 0; blank lines do not count
    # Line of the file on which the row starts, from 1 (in a Parquet or Arrow file: the row's number); 0 if the row is
    # not from a file.
    line: int
    # All fields of the row, kept for the output; empty if the line could not be read.
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why this row cannot be run, beginning with its line; None if no error is known
    # Fields to run, named as in a plain JSONL row: prompt, messages or prompt_token_ids, and sampling fields. Default:
    # `fields`.
    request: dict[str, Any] = field(default_factory=dict)
    custom_id: str | None = None  # id of an OpenAI batch line, "" if the line has no usable one; None for other rows
    # Run a prompt that is text as a user's message, through the model's chat template. Messages and token ids are run
    # as they are.
    chat: bool = False
    scored: bool = False  # score the row, unless it has a prompt

    def __post_init__(self) -> None:
        if not self.request:
            object.__setattr__(self, "request", self.fields)

    @property
    def is_batch(self) -> bool:
        """Return whether the result is written as an OpenAI batch line."""
        return self.custom_id is not None

    @property
    def is_scored(self) -> bool:
        """Return whether the row is scored, not run. A row without a prompt, in a job that scores, is scored."""
        return self.scored and all(self.request.get(kind) is None for kind in PROMPT_KINDS)

    @property
    def prompt(self) -> Any:
        """Return the row's prompt as it was given: text, messages or token ids; the context of a row that is scored.
        Return None if it has none."""
        kinds = (CONTEXT,) if self.is_scored else PROMPT_KINDS
        return next((self.request[kind] for kind in kinds if self.request.get(kind) is not None), None)

    @property
    def place(self) -> str:
        """Return the row's line, or its number if it has no line. Every error of the row begins with this text."""
        return f"line {self.line}" if self.line else f"prompt {self.index}"

    def refused(self, reason: str) -> "Row":
        """Return this row with an error."""
        return replace(self, error=f"{self.place}: {reason}")


def row_of(prompt: object, index: int) -> Row:
    """Return the row of a prompt given in Python: a string, or a mapping with the fields of a JSONL row."""
    if isinstance(prompt, str):
        return Row(index, 0, {"prompt": prompt})
    if isinstance(prompt, Mapping):
        return Row(index, 0, dict(prompt))
    return Row(index, 0).refused(f"is {json_kind(prompt)}; it must be a string or an object with the fields of a row")


def without_place(error: str) -> str:
    """Return a row's error without the line and the number of the row at its beginning, as in "line 3: ..." and
    "row 2 (line 3): ..."."""
    return _PLACE.sub("", error)
