"""The character between the cells of a table of text: as a user gives it, as the table states it, as its header shows
it."""

import re

from flexengine.errors import InvalidInput, shown
from flexengine.job.remedies import Remedies

# First line that states the character for Excel, as sep=; does.
_STATED = re.compile(
    rb'(?:\xef\xbb\xbf)*"?sep=(\\t|[^\w"\r\n\x80-\xff]|[\xc2-\xf4][\x80-\xbf]+)"?\1*\r?(?:\n|\Z)', re.I
)
_SEPARATORS = ";\t|,"


def delimiter_of(given: str | None, own: str, remedies: Remedies) -> str:
    """Return the character between cells. Raise InvalidInput if the given one is not possible. given: text of a user;
    None is the format's own. own: the format's own character; "" if it has none."""
    if given is None:
        return own
    given = "\t" if given == "\\t" else given
    if not own or len(given) != 1 or given in '"\r\n':
        other = "only .csv and .tsv files have one; leave it out, or " + remedies.form.format("csv")
        must = "it must be one character, and no quote or line end" if own else other
        raise InvalidInput(f"the delimiter is {shown(given)}; {must}")
    return given


def stated_delimiter(line: bytes | bytearray) -> str | None:
    """Return the character that the first line of a table states; None if it states none, so that it is the header. The
    character may be repeated, as programs fill the cells of a line."""
    stated = _STATED.match(line)
    mark = stated[1].decode(errors="replace").replace("\\t", "\t") if stated else ""
    return mark if len(mark) == 1 else None


def other_separator(header: str, own: str, remedies: Remedies) -> str:
    """Return, for a message, the character that seems to separate the columns, and what to do; "" if it is that with
    which the table was read.

    Args:
        header: names of the columns, joined with `own`.
        own: the character with which the table was read; "" if it is no table of text.
    """
    most = max(_SEPARATORS, key=header.count)
    if not own or header.count(most) <= header.count(own):
        return ""
    code, name = repr(most), "tabs" if most == "\t" else repr(most)
    return f"they seem to be separated by {name}; {remedies.delimiter.format(code, code[1:-1])}"
