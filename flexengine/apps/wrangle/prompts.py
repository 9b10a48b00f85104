"""Questions and prompts, in the form of Narayan et al., Can Foundation Models Wrangle Your Data? (arXiv 2205.09911)."""

from collections.abc import Iterable

YES, NO = "Yes", "No"


def match_question(left: str, right: str, noun: str) -> str:
    """Return the question whether two rows are one entity.

    Args:
        left: the first row, serialised.
        right: the second row, serialised.
        noun: name of an entity, such as "Product".
    """
    return f"{noun} A is {left}. {noun} B is {right}. Are {noun} A and {noun} B the same?"


def impute_question(row: str, column: str) -> str:
    """Return the question for the value of a column.

    Args:
        row: the other columns of the row, serialised.
    """
    return f"{row}. What is the {column}?"


def cell_question(row: str | None, column: str, value: str, error: str) -> str:
    """Return the question whether a cell has an error.

    Args:
        row: the row, serialised; None asks about the cell alone.
        error: the error in words, such as "a spelling error".
    """
    question = f"Is there {error} in {column}: {value}?"
    return question if row is None else f"{row}\n\n{question}"


def row_question(row: str, error: str) -> str:
    """Return the question whether a row has an error. The arguments are as for `cell_question`."""
    return f"{row}\n\nIs there {error} in this row?"


def schema_question(left: str, right: str) -> str:
    """Return the question whether two descriptions are of one attribute."""
    return f"A is {left}. B is {right}. Are A and B the same? Yes or No?"


def transform_question(value: str) -> str:
    """Return the first part of a transformation, whose answer is the output."""
    return f"input:{value}\noutput:"


def answered(question: str, answer: str) -> str:
    """Return a question with its answer, as a prompt shows an example."""
    return question + glue(question) + answer


def glue(question: str) -> str:
    """Return the text between a question and its answer: a space after a question mark."""
    return " " if question.endswith("?") else ""


def prompt(instruction: str | None, shots: Iterable[tuple[str, str]], question: str) -> str:
    """Return a prompt: instruction, examples and question, with a blank line between them.

    Args:
        instruction: text at the beginning; None has none.
        shots: questions and answers of examples.
    """
    start = () if instruction is None else (instruction,)
    return "\n\n".join((*start, *(answered(*shot) for shot in shots), question))
