"""The rows of an input file. A bad row becomes a row with an error; only an unusable file raises."""

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from shlex import quote
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from flexengine.activity import message
from flexengine.errors import InvalidInput, shown
from flexengine.job.files import STDIN, descriptor, file_state, full_disk, is_stream
from flexengine.job.packed import Bytes, unpacked
from flexengine.job.remedies import OF_JOB, Remedies
from flexengine.job.row_fields import FieldNotes, RowRules
from flexengine.job.rows import Row
from flexengine.job.scan import InputScan, scan_of

if TYPE_CHECKING:
    from flexengine.job.pandas_index import RangeColumn


class InputRows(AbstractContextManager["InputRows"]):
    """The rows of an input file. Every `iter()` reads the file again from its beginning. Memory does not grow with the
    file. Use as a context manager.

    Iterating raises InvalidInput if the file has changed since it was opened, if compressed data, a Parquet or an Arrow
    file is damaged, or if an array in JSON is invalid from some line on. Rows are run by `chat` and `rules`; see `Row`
    and `RowRules`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prompt_column: str | None = None,
        limit: int | None = None,
        form: str | None = None,
        chat: bool = False,
        score: bool = False,
        row_options: bool | None = None,
        template: str | None = None,
        delimiter: str | None = None,
        memory: int | None = None,
    ) -> None:
        """Open an input file. Raise InvalidInput if the file is missing, unreadable or a directory; its format is
        unknown; a table cannot be opened or lacks the column; or `prompt_column` is given for a txt file, or beside a
        template.

        Args:
            path: a file, or a stream (a pipe, a device, /dev/fd/3). "-" is standard input from its present position.
            prompt_column: as for `RowRules`; None is `prompt` in CSV and TSV files.
            limit: most rows to read; None reads all.
            form, delimiter: as for `InputFile`. A jsonl line may be an OpenAI batch line.
            chat, score: see `Row`. OpenAI batch lines are run as they are.
            row_options: the rule `options`; None is False for tables. template: as for `RowRules`.
            memory: as for `InputFile`.
        """
        self.path = Path(STDIN if path == "-" else path)
        self.chat, self._asked = chat, row_options is not None
        self._scan: InputScan | None = None
        self._limit = None if limit is None else min(limit, sys.maxsize)
        rules = RowRules(prompt_column, template, score)
        self._source = InputFile(self.path, form, delimiter=delimiter, memory=memory)
        self.form = self._source.form  # its format, one of FORMATS
        try:
            self._state = self._source.state
            kind = FORMATS[self.form]
            open_reader: OpenReader = resolve_name(kind.reader)
            self.rules = replace(rules, options=not kind.is_table if row_options is None else row_options)
            self._read = open_reader(self._source, self.rules)
        except BaseException:
            self._source.close()
            raise

    def __iter__(self) -> Iterator[Row]:
        return self.hashed(None)

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @property
    def settings(self) -> dict[str, Any]:
        """Return what decides how rows are read and run, by the names in a manifest, without defaults."""
        rules, kind = self.rules, FORMATS[self.form]
        given: dict[str, Any] = {"chat": self.chat or None, "score": rules.score or None, "template": rules.template}
        given["row_options"] = None if rules.options != kind.is_table else rules.options
        given["delimiter"] = None if self._source.delimiter == kind.delimiter else self._source.delimiter
        return {name: value for name, value in given.items() if value is not None}

    @property
    def size(self) -> int:
        """Bytes of the input, before decompression; 0 if it is gone."""
        state = self._source.state
        return state[0] if state else 0

    @property
    def reading(self) -> int:
        """Most bytes of memory that reading its rows took so far; see `InputFile.taken`."""
        return self._source.taken

    @property
    def changed(self) -> bool:
        """Whether the file has another size, time or inode than when it was opened."""
        return self._source.state != self._state

    def hashed(self, digest: Any) -> Iterator[Row]:
        """Return an iterator of the rows that adds all bytes of the input to a digest of hashlib, also those beyond the
        limit. digest: None for no digest."""
        if self.changed:
            raise InvalidInput(f"input {self.path} has changed since it was opened; start the job again")
        return self._rows(digest)

    def _rows(self, digest: Any) -> Iterator[Row]:
        with self._source.open(digest) as file:
            at = 0
            for row in islice(self._read(file), self._limit):
                if (end := file.tell()) - at > _STEP:
                    self._source.take_row(at, end, row)
                at = end
                marked = (self.chat or self.rules.score) and not row.is_batch
                yield replace(row, chat=self.chat, scored=self.rules.score) if marked else row
            while digest is not None and file.read(_STEP):
                pass

    def scan(self) -> InputScan:
        """Return the counts of the whole input. The first call reads it once. Raise InvalidInput as `scan_of`."""
        if self._scan is None:
            digest = hashlib.sha256()
            notes = FieldNotes(self.rules, self._asked, self._source.index)
            self._scan = scan_of(self.hashed(digest), digest, self, notes)
        return self._scan


_TABLE = "flexengine.job.read_tables:open_table"


class Format(NamedTuple):
    """A file format of input rows."""

    reader: str  # OpenReader of this format, as "module:name", which is imported when a file of this format is opened
    suffixes: tuple[str, ...]
    delimiter: str = ""  # of text tables
    seeks: bool = False  # whether it is read at any position, so that it cannot be decompressed while it is read

    @property
    def is_table(self) -> bool:
        """Return whether its rows are those of a table, whose columns are data unless the user says otherwise."""
        return self.reader == _TABLE


FORMATS = {
    "jsonl": Format("flexengine.job.read_json:open_json", (".jsonl", ".ndjson", ".json")),
    "txt": Format("flexengine.job.read_json:open_text", (".txt",)),
    "csv": Format(_TABLE, (".csv",), ","),
    "tsv": Format(_TABLE, (".tsv",), "\t"),
    "parquet": Format(_TABLE, (".parquet",), seeks=True),
    "arrow": Format(_TABLE, (".arrow", ".feather"), seeks=True),
}
ACCEPTED = (
    ".jsonl, .ndjson and .json (one JSON object per line, or an array of objects), .txt (one prompt per line), .csv and"
    " .tsv (with a header), each also with .gz or .zst behind it, .parquet, .arrow and .feather"
)
_PACKED = {".gz": "gzip", ".zst": "zstd"}
# Patterns of the first bytes. A zstd file may begin with a skippable frame.
_FIRST_BYTES = {"gzip": rb"\x1f\x8b", "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}
_UNPACK = {".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}
_SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
# Files that begin like this hold no text.
_FOREIGN = (
    (rb"PK\x03\x04", "a spreadsheet or a ZIP archive; save the sheet as CSV (UTF-8), or unpack the archive"),
    (rb"PAR1[\x00-\x1f]", "a Parquet file; {parquet}"),
    (rb"ARROW1\x00\x00", "an Arrow file; {arrow}"),
    (rb"BZh[1-9]1AY&SY", "compressed with bzip2; decompress it first (bunzip2 -k)"),
    (rb"\xfd7zXZ\x00", "compressed with xz; decompress it first (unxz -k)"),
    (rb"\x04\x22\x4d\x18", "compressed with lz4; decompress it first (unlz4 -k)"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed twice; decompress it once"),
)
_CR_ENDS = {"txt": rb"\S\s*\r\s*\S", "jsonl": rb"\}[ \t]*\r\s*\{"}  # in files without LF
_UTF32_BOMS = (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_STEP = 2**20  # bytes read at a time
_SEEN = 32  # bytes of the beginning that are looked at
_SEEN_LINES = 2**14  # bytes of the beginning that are searched for line ends


class InputFile:
    """An input that is open until `close` is called."""

    def __init__(
        self,
        name: Path,
        form: str | None = None,
        delimiter: str | None = None,
        memory: int | None = None,
        remedies: Remedies = OF_JOB,
    ) -> None:
        """Open an input. Raise InvalidInput if the input is missing, unreadable, a directory, or holds no text in
        UTF-8; its format is unknown, it is compressed in a way that is not read, or the delimiter is not possible.

        Args:
            name: a file, or a stream, which is copied to a temporary file as it can be read only once.
            form: one of FORMATS; None takes the format of the file's suffix, and for a stream without a suffix csv if a
                delimiter is given, else jsonl.
            delimiter: the character between cells of a .csv or .tsv file; None is that of its format.
            memory: bytes of RAM that the user gave the job; a part of them limits the process that reads a table. None
                is a constant limit.
            remedies: what messages propose.
        """
        self.name, self.memory, self.remedies = name, memory, remedies
        # Most bytes of memory that reading took so far, of rows of over _STEP bytes and of another process that reads.
        self.taken = 0
        self._counted = 0  # end of the last row whose memory was counted
        self._copy: Any = None
        self.index: RangeColumn | None = None  # of a table that pandas wrote, once it was read
        if os.path.isdir(name):
            raise InvalidInput(f"input {name} is a directory; give a file in it: {ACCEPTED}")
        if len(os.fsencode(name)) > 255:
            resolve_name("flexengine.job.bad_paths:check_input")(name)
        self.form, packed = _form_of(name, form, "jsonl" if delimiter is None else "csv", remedies)
        # "" if it is no table of text. A first line sep=; states it.
        self.delimiter = FORMATS[self.form].delimiter
        if delimiter is not None:
            from flexengine.job.delimiters import delimiter_of  # few users give one

            self.delimiter = delimiter_of(delimiter, self.delimiter, remedies)
        try:
            self.file = self._regular()  # holds the bytes: the input, or a temporary copy of a stream
            self.packing = self._packing_of(packed)  # gzip, zstd or ""
            if not FORMATS[self.form].seeks:
                head = self._checked_head()
                if self.delimiter:
                    from flexengine.job.delimiters import stated_delimiter  # tables of text only

                    if (stated := stated_delimiter(head)) and delimiter is not None and stated != self.delimiter:
                        message(f"{name} states {stated!r} in its first line; {self.delimiter!r} is not used for it")
                    self.delimiter = stated or self.delimiter
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the temporary copy, if there is one."""
        if self._copy is not None:
            self._copy.close()

    def take_row(self, start: int, end: int, row: Row) -> None:
        """Count the memory of a row of over _STEP bytes, from `start` to `end`."""
        if end > self._counted:  # rows are read several times
            from flexengine.job.memory import row_memory  # few files have such rows

            texts = [text for name, text in row.request.items() if row.fields.get(name) is not text]
            self.taken, self._counted = max(self.taken, row_memory(end - start, row.fields, texts)), end

    @contextmanager
    def open(self, digest: Any = None) -> Iterator[BinaryIO]:
        """Open the file for reading from its beginning. Compressed data is decompressed while it is read.

        Reading raises InvalidInput if compressed data is damaged or cut short. digest: object of hashlib that gets all
        bytes that are read; None for no digest.
        """
        with self.file.open("rb") as file:
            if not self.packing and digest is None:
                yield file
                return
            with unpacked(file, self.name, self.packing) if self.packing else nullcontext(file) as content:
                yield cast(BinaryIO, io.BufferedReader(Bytes(content, self.name, self.packing, digest), _STEP))

    @property
    def state(self) -> tuple[int, ...] | None:
        """Size, time, device and inode of the file, by which a change is noticed; None if the file is gone."""
        gone = self._copy is not None and self._copy.closed  # another file may have its number now
        return None if gone else file_state(self.file)

    def _regular(self) -> Path:
        """Return a regular file that holds the input's bytes."""
        stream, number = is_stream(self.name), descriptor(self.name)
        try:
            with open(self.name if number is None else number, "rb", closefd=number is None) as file:
                return self._copied(file) if stream else self.name
        except OSError as error:
            raise resolve_name("flexengine.job.bad_paths:unreadable")(self.name, error, stream, ACCEPTED) from error

    def _copied(self, stream: BinaryIO) -> Path:
        """Return a temporary copy of the rest of a stream. Raise OSError if the stream cannot be read.

        The copy has no name in its directory, so nothing of it is left when the process is killed.
        """
        import tempfile

        block = stream.read(_STEP)
        try:
            self._copy = copy = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
            while block:
                copy.write(block)
                block = stream.read(_STEP)
            copy.flush()
        except OSError as error:
            reason = full_disk(error, tempfile.gettempdir()) if self._copy else ""
            fault = f"input {self.name} cannot be copied to a temporary file: {reason or error.strerror}"
            raise InvalidInput(f"{fault}; or set TMPDIR to another directory") from error
        return Path(f"/proc/self/fd/{copy.fileno()}")

    def _packing_of(self, wanted: str) -> str:
        """Return how the file is compressed. Its first bytes decide, so a stream needs no suffix."""
        with self.file.open("rb") as file:
            head = file.read(_SEEN)
        if head.startswith(b"version https://git-lfs"):
            fault = "is a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned"
            raise InvalidInput(f"input {self.name} {fault}")
        packing = next((name for name, first in _FIRST_BYTES.items() if re.match(first, head)), "")
        if wanted and packing != wanted:
            begins = f"it begins with {head[:4].hex(' ')}" if head else "it is empty"
            raise InvalidInput(f"input {self.name} is no {wanted} file: {begins}; give it the name of what it is")
        if packing and FORMATS[self.form].seeks:
            fault = f"input {self.name} is a compressed .{self.form} file, which must be read at any position"
            remedy = f"decompress it first ({'gunzip' if packing == 'gzip' else 'unzstd'} -k {quote(str(self.name))})"
            raise InvalidInput(f"{fault}; {remedy}")
        return packing

    def _checked_head(self) -> bytes:
        """Return the first bytes. Raise InvalidInput if they are those of another kind of file, or not UTF-8."""
        with self.open() as file:
            start = file.read(_SEEN_LINES)
            pattern = b"\n" not in start and _CR_ENDS.get(self.form)
            parts = iter(partial(file.read, _STEP), b"")
            lines = not (pattern and re.search(pattern, start)) or any(b"\n" in part for part in parts)
        head = start[:_SEEN]
        if what := next((what for pattern, what in _FOREIGN if re.match(pattern, head)), None):
            forms = {form: self.remedies.form.format(form) for form in ("parquet", "arrow")}
            raise InvalidInput(f"input {self.name} is {what.format(**forms)}")
        wide = head.startswith(_UTF32_BOMS)
        even, odd = head[0::2], head[1::2]  # every second byte of Latin letters in UTF-16 is 0
        zeros = len(odd) > 1 and ((not any(odd) and all(even)) or (not any(even) and all(odd)))
        if wide or head.startswith(_UTF16_BOMS) or zeros:
            encoding = "UTF-32" if wide else "UTF-16"
            fault = f"is encoded in {encoding}, as some programs of Windows write it; text must be UTF-8"
            raise InvalidInput(f"input {self.name} {fault}: {self._by(f'iconv -f {encoding} -t UTF-8', 'utf8')}")
        if not lines:
            fault = "ends lines with a carriage return (CR) alone, so it would be one line: "
            raise InvalidInput(f"input {self.name} {fault}" + self._by(r"tr '\r' '\n'", "lf", "< "))
        return head

    def _by(self, command: str, prefix: str, reads: str = "") -> str:
        """Return how a command converts the input. prefix: of the new file's name. reads: before the input's name."""
        if self._copy is not None or self.packing:
            return f"{'decompress it, and ' if self.packing else ''}convert it with {command}"
        made = self.name.with_name(f"{prefix}-{self.name.name}")
        return f"convert it with {command} {reads}{quote(str(self.name))} > {quote(str(made))}"


def _form_of(name: Path, form: str | None, of_stream: str, remedies: Remedies) -> tuple[str, str]:
    """Return the format of an input, one of FORMATS, and the compression that its suffix states ("" for none).
    of_stream: the format of a stream without a suffix."""
    suffix = name.suffix.lower()
    packed = _PACKED.get(suffix, "")
    if form is not None:
        if form not in FORMATS:
            raise InvalidInput(f"input format is {shown(form)}; it must be one of {', '.join(FORMATS)}")
        return form, packed
    inner = Path(name.stem).suffix.lower() if packed else suffix
    if not inner and is_stream(name):
        return of_stream, packed
    named = next((name for name, kind in FORMATS.items() if inner in kind.suffixes), None)
    if named is not None:
        return named, packed
    where = f"no suffix before {name.suffix}" if packed and not inner else f"suffix {shown(inner)}"
    fault = f"has {where}; accepted are {ACCEPTED}; or {remedies.form.format('jsonl')}"
    if inner in _SPREADSHEETS:
        fault = "is a spreadsheet, which is not read; save the sheet as CSV (UTF-8) and give that file"
    elif inner in _UNPACK:
        unpack = f"{_UNPACK[inner]} {quote(str(name))}"
        fault = f"is compressed in a way that is not read; decompress it first ({unpack})"
    raise InvalidInput(f"input {name} {fault}")


ReadRows = Callable[[BinaryIO], Iterator[Row]]  # yields the rows of the file, which is at its beginning
OpenReader = Callable[[InputFile, RowRules], ReadRows]  # raises InvalidInput if no row of the file can be read
