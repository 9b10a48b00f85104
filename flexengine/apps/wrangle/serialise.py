"""Text of cells and rows in prompts."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_LINE_ENDS = re.compile(r"\s*[\r\n]\s*")


def text_of(value: Any) -> str | None:
    """Return the text of a cell in one line, as prompts are made of lines; None if the cell is missing: empty, null or
    NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | list | dict):
        value = json.dumps(value, ensure_ascii=False)
    text = _LINE_ENDS.sub(" ", str(value))
    return text if text.strip() else None


def serialise(cells: Mapping[str, Any], columns: Iterable[str], missing: str) -> str:
    """Return the text of a row, "col: value" joined with ". ".

    Args:
        cells: cells by column.
        columns: columns in order.
        missing: text of missing cells.
    """
    texts = ((column, text_of(cells[column])) for column in columns)
    return ". ".join(f"{column}: {missing if text is None else text}" for column, text in texts)
