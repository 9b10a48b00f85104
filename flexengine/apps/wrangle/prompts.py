"""Rows as text, and the questions and prompts of Narayan et al., Can Foundation Models Wrangle Your Data?
(arXiv 2205.09911)."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

YES, NO = "Yes", "No"
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
    """Return the text of a row, "col: value" joined with ". ". missing: text of missing cells."""
    texts = ((column, text_of(cells[column])) for column in columns)
    return ". ".join(f"{column}: {missing if text is None else text}" for column, text in texts)


# Questions. Rows are serialised.


def match_question(left: str, right: str, noun: str) -> str:
    """Return the question whether two rows are one entity. noun: name of an entity, such as "Product"."""
    return f"{noun} A is {left}. {noun} B is {right}. Are {noun} A and {noun} B the same?"


def impute_question(row: str, column: str) -> str:
    """Return the question for the value of a column. row: the other columns."""
    return f"{row}. What is the {column}?"


def cell_question(row: str | None, column: str, value: str, error: str) -> str:
    """Return the question whether a cell has an error, such as "a spelling error". row: None asks about the cell
    alone."""
    question = f"Is there {error} in {column}: {value}?"
    return question if row is None else f"{row}\n\n{question}"


def row_question(row: str, error: str) -> str:
    """Return the question whether a row has an error."""
    return f"{row}\n\nIs there {error} in this row?"


def schema_question(left: str, right: str) -> str:
    """Return the question whether two descriptions are of one attribute."""
    return f"A is {left}. B is {right}. Are A and B the same? Yes or No?"


def glue(question: str) -> str:
    """Return the text between a question and its answer: a space after a question mark."""
    return " " if question.endswith("?") else ""


def prompt(instruction: str | None, shots: Iterable[tuple[str, str]], question: str) -> str:
    """Return a prompt: instruction, questions with answers, and the question, with a blank line between them."""
    start = () if instruction is None else (instruction,)
    return "\n\n".join((*start, *(shot + glue(shot) + answer for shot, answer in shots), question))
