"""Remedies in messages about inputs; commands and files of settings name other options."""

from typing import NamedTuple


class Remedies(NamedTuple):
    """What messages propose for a table that is read in a wrong way, with {0} for the value as code, {1} as text. The
    defaults are those of a job."""

    delimiter: str = "give --delimiter {0} (delimiter={0} in Python)"
    form: str = "give --input-format {0} (input_format='{0}' in Python)"


OF_JOB = Remedies()
