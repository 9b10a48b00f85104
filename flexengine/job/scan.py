"""One reading of a whole input: its counts, and what is wrong with all of it."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from flexengine.activity import advance
from flexengine.errors import InvalidInput, shown
from flexengine.job.row_fields import FieldNotes
from flexengine.job.rows import Row


class InputScan(NamedTuple):
    """What one reading of the whole input counts."""

    total: int
    sha256: str  # hex digest of all bytes of the input after decompression, including those beyond the limit
    only_texts: bool  # whether all rows without an error have a text as prompt, and none is an OpenAI batch line
    notes: tuple[str, ...]  # messages about the names of fields
    unlimited: int  # OpenAI batch lines that do not say how many tokens are generated


def scan_of(rows: Iterator[Row], digest: Any, again: Iterable[Row], names: FieldNotes) -> InputScan:
    """Return the counts of an input.

    Memory is 8 bytes for each OpenAI batch line, and more if lines share a custom_id; see `openai.duplicate_ids`. Raise
    InvalidInput if OpenAI batch lines share a custom_id, the template names a field that no row has, or as for
    iterating.

    Args:
        rows: all rows.
        digest: object of hashlib that has all bytes of the input when `rows` ends.
        again: the rows, as often as they are iterated.
        names: gets all rows.
    """
    total, only_texts, hashes, unlimited = 0, True, array("q"), 0
    for row in rows:
        total += 1
        advance()
        names.add(row)
        only_texts = only_texts and (row.error is not None or (not row.is_batch and isinstance(row.prompt, str)))
        unlimited += row.is_batch and row.error is None and row.request.get("max_tokens") is None
        if row.custom_id:
            hashes.append(hash(row.custom_id))
    if hashes:
        from flexengine.job.openai import duplicate_ids  # most files have no custom_id

        if repeated := duplicate_ids(again, hashes):
            listed = ", ".join(f"{shown(name)} (lines {first} and {second})" for name, first, second in repeated)
            fault = f"every custom_id must be unique, but these are found twice: {listed}"
            raise InvalidInput(f"{fault}; change one of each")
    return InputScan(total, digest.hexdigest(), only_texts, tuple(names.lines(total)), unlimited)
