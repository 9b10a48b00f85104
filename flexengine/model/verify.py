"""Checksums of a model's files: verification, and writing of the sums of prepared weights.

Sums are in a file SHA256SUMS beside the files, in the format of sha256sum of coreutils. Files in the hub's cache need
no sums, as they are links to blobs named by their hash (SHA-256, or git's SHA-1 for small files). The demo model needs
none either, as the package installer records the sums of installed files.

Verification detects damage, not malice: a process that can change a file can change its sum.
"""

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from flexengine.activity import activity
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.files import DEMO_PACKAGE, indexed_files, is_snapshot, regular_file
from flexengine.read_retries import opened

SUMS = "SHA256SUMS"
# All files that transformers or flexengine may read in a model directory; the last ones are vocabularies of tokenizers.
READ = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "additional_chat_templates/*",
    "*.py",
    "tokenizer*",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "*.codes",
    "*.tokenizer",
)
_BIN = "pytorch_model*.bin"  # read if there are no safetensors
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RECIPE = f"find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
_MAX_SUMS_BYTES = 10_000_000  # limit in bytes of SHA256SUMS; a model with 1,000 shards needs 100,000
_NAMED = 8  # maximum number of files in a message
_CHUNK = 1 << 20  # bytes read at a time
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}

Tick = Callable[[int], Any]
OnFault = Callable[[Path, str], None]


class NoSums(InvalidInput):
    """A model has no checksums to compare it with."""


class Verifier:
    """Comparison of files with their checksums.

    Attributes:
        files: number of files verified.
        bytes: bytes of the files verified.
        seconds: time spent so far.
    """

    def __init__(self, on_fault: OnFault | None = None) -> None:
        """Args:
        on_fault: called with the path of each file that is missing, differs or is not listed, and the reason; the
            comparison then continues. None raises BadCheckpoint instead.
        """
        self.files, self.bytes, self.seconds = 0, 0, 0.0
        self._on_fault = on_fault

    def directory(self, directory: Path) -> None:
        """Verify a model directory: every file in its sums must match, and every file that may be read must be listed.

        Raises:
            NoSums: the directory has no sums.
            BadCheckpoint: a file is missing, differs or is not listed; the message names it.
        """
        read = _files(directory, READ if any(directory.glob("*.safetensors")) else (*READ, _BIN))
        if is_snapshot(directory.resolve()):
            says = f"the names of their blobs in {directory} say"
            indexes = _indexes(directory)
            self._compare(self._blobs(indexes), directory, says, len(read))
            all_read = {*read, *self._named(indexes)}
            others = self._blobs(sorted(all_read.difference(indexes)))
            return self._compare(others, directory, says, len(all_read))
        if not os.path.lexists(sums := directory / SUMS):
            raise NoSums(
                f"there are no checksums to verify {directory} with; as long as it is known to be good,"
                f" make them: cd {quote(str(directory))} && {_RECIPE}"
            )
        with _remedy("get what is damaged again, or make the sums again if it was changed on purpose"):
            self._listed(directory, read_sums(sums), read)

    def gguf(self, file: Path) -> None:
        """Verify a GGUF file by FILE.sha256 or SHA256SUMS beside it, its blob's name or its package.

        Raises:
            NoSums: there is no sum of the file.
            BadCheckpoint: the file differs.
        """
        if (known := _gguf_sum(file)) is None:
            name = quote(file.name)
            raise NoSums(
                f"there is no checksum to verify {file} with; as long as it is known to be good, make one:"
                f" cd {quote(str(file.parent))} && sha256sum {name} > {name}.sha256"
            )
        digest, says = known
        with _remedy("get it again"):
            self._compare({file: digest}, None, says)

    def prepared(self, directory: Path) -> None:
        """Verify a directory that flexengine made. Raise BadCheckpoint if a file is missing or differs.

        The directory is not removed: another job may be reading it, and the user should learn of a faulty disk.
        """
        with _remedy(f"remove {directory}, and it will be made again"):
            if not os.path.lexists(directory / SUMS):
                raise BadCheckpoint(f"{directory} has no {SUMS}: an earlier version made it, or it is damaged")
            self._listed(directory, read_sums(directory / SUMS), _files(directory, ("**/*",)))

    def _listed(self, directory: Path, sums: Mapping[str, str], read: Iterable[Path]) -> None:
        says, indexes = f"{directory / SUMS} says", _indexes(directory)
        self._check_listed(directory, sums, read)
        first = {index: sums[index.name] for index in indexes if index.name in sums}
        self._compare(first, directory, says, len(sums))
        self._check_listed(directory, sums, self._named(indexes))
        others = {directory / name: digest for name, digest in sums.items()}
        self._compare({f: digest for f, digest in others.items() if f not in first}, directory, says, len(sums))

    def _compare(self, sums: Mapping[Path, str], directory: Path | None, says: str, count: int = 1) -> None:
        """Compare files with their digests. Raise BadCheckpoint if a file is missing or differs.

        Args:
            sums: digest of each file.
            directory: all files must lie in it; None for no check, as for a file that the user named.
            says: source of the digests, for the message.
            count: number of files of the whole model, for the message.
        """
        if not sums:
            return
        began, faults, sizes = time.perf_counter(), [], 0
        with _reading("verifying", "comparing the model's files with their checksums", sums) as tick:
            for file, digest in sums.items():
                name = file.relative_to(directory) if directory else file
                try:
                    if directory:
                        regular_file(file, directory)
                    actual = digest_of(file, tick, git=len(digest) == 40)
                    sizes += file.stat().st_size
                except (BadCheckpoint, OSError) as error:
                    fault = str(error) if os.path.lexists(file) else "missing"
                else:
                    fault = "" if actual == digest else f"has {actual}, expected {digest}"
                if fault and self._on_fault:
                    self._on_fault(file, fault)
                elif fault:
                    faults.append(f"{name} ({fault})")
        if faults:
            raise BadCheckpoint(f"{len(faults)} of {count} files are not as {says}: {_some(faults)}")
        self.files, self.bytes = self.files + len(sums), self.bytes + sizes
        self.seconds += time.perf_counter() - began

    def _check_listed(self, directory: Path, sums: Mapping[str, str], read: Iterable[Path]) -> None:
        names = (file.relative_to(directory).as_posix() for file in read)
        unlisted = sorted(set(names) - {*sums, SUMS})
        if unlisted and not self._on_fault:
            raise BadCheckpoint(f"{directory / SUMS} does not list {_some(unlisted)}")
        for name in unlisted:
            self._report(directory / name, f"not listed in {SUMS}")

    def _named(self, indexes: Iterable[Path]) -> list[Path]:
        """Return the weight files that shard indexes name; a file can have any name."""
        named: set[Path] = set()
        for index in indexes:
            try:
                named.update(indexed_files(index))
            except BadCheckpoint as error:
                self._report(index, error)
        return sorted(named)

    def _blobs(self, files: Iterable[Path]) -> dict[Path, str]:
        """Return the hash that names each file's blob in the hub's cache."""
        blobs = {}
        for file in files:
            try:
                blobs[file] = _blob(file)
            except BadCheckpoint as error:
                self._report(file, error)
        return blobs

    def _report(self, file: Path, fault: str | BadCheckpoint) -> None:
        """Call `on_fault`. Raise the fault if there is none."""
        if self._on_fault is None:
            raise fault if isinstance(fault, BadCheckpoint) else BadCheckpoint(f"{file}: {fault}")
        self._on_fault(file, str(fault))


def _indexes(directory: Path) -> list[Path]:
    """Return the shard indexes of a directory. They are verified first, as a damaged one may name other files."""
    return [directory / name for name in _INDEXES if os.path.lexists(directory / name)]


def write_sums(directory: Path) -> None:
    """Write SHA256SUMS of all files below a directory, with the digests of their present contents."""
    files = [file for file in _files(directory, ("**/*",)) if file != directory / SUMS]
    (directory / SUMS).write_bytes(sums_of(directory, files))


def sums_of(directory: Path, files: Sequence[Path]) -> bytes:
    """Return the content of SHA256SUMS in a directory for files below it, with digests of their contents."""
    with _reading("hashing", "computing checksums, which --verify and flexengine verify compare", files) as tick:
        lines = [_line(file.relative_to(directory).as_posix(), digest_of(file, tick)) for file in files]
    return os.fsencode("".join(lines))


def read_sums(file: Path) -> dict[str, str]:
    """Return the digests in a file that sha256sum wrote, by name relative to its directory, without its own entry.

    Raises:
        BadCheckpoint: the file cannot be read, or a line is not valid; the message names the line and the fault.
    """
    try:
        if (size := regular_file(file).stat().st_size) > _MAX_SUMS_BYTES:
            raise BadCheckpoint(f"{file} has {size:,} bytes; at most {_MAX_SUMS_BYTES:,} are read")
        with opened(file) as stream:
            lines = os.fsdecode(stream.read()).removesuffix("\n").split("\n")
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read: {error}") from error
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if (match := _LINE.fullmatch(line)) is None:
            raise BadCheckpoint(
                f"{file}, line {number}: {line[:100]!r} is not what sha256sum writes, 64 hex digits,"
                " two spaces and a name"
            )
        try:
            name = _name(match[3], escaped=bool(match[1]))
        except (KeyError, ValueError) as error:
            raise BadCheckpoint(
                f"{file}, line {number}: {match[3][:100]!r} is not the name of a file below that directory ({error})"
            ) from error
        if name in digests:
            raise BadCheckpoint(f"{file}, line {number}: {name[:100]!r} is there twice")
        digests[name] = match[2].lower()
    digests.pop(file.name, None)  # a second `sha256sum * > SHA256SUMS` lists the file itself, with an old digest
    return digests


def digest_of(file: Path, tick: Tick, git: bool = False) -> str:
    """Return the digest of a file.

    Args:
        file: to read.
        tick: called with the number of bytes after each read.
        git: return git's SHA-1 of the content as a blob, instead of SHA-256.

    Raises:
        OSError: the file cannot be read.
    """
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else hashlib.sha256()
        view = memoryview(bytearray(min(_CHUNK, size + 1)))
        while count := stream.readinto(view):
            digest.update(view[:count])
            tick(count)
    return digest.hexdigest()


def _name(name: str, escaped: bool) -> str:
    """Return a relative path without `.` parts. Raise KeyError for a wrong escape, ValueError for a path outside."""
    if escaped:
        name = re.sub(r"\\.?", lambda match: _ESCAPES[match[0]], name)
    elif name.endswith("\r"):
        raise ValueError("its line ends with a carriage return")
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or name.endswith("/"):
        raise ValueError("it is absolute, empty or leads upwards")
    return str(path)


def _line(name: str, digest: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != name else ""
    return f"{mark}{digest}  {escaped}\n"


def _files(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files that match a pattern, dead links included."""
    return sorted({file for pattern in patterns for file in directory.glob(pattern) if not file.is_dir()})


def _blob(file: Path) -> str:
    """Return the hash that names a file's blob in the hub's cache. Raise BadCheckpoint if the file is no such link."""
    target = regular_file(file).resolve()
    if target.parent.name != "blobs" or not _HASH.fullmatch(target.name):
        raise BadCheckpoint(
            f"{file} is no link to a blob that is named by its hash, so there is nothing to verify it"
            f" with; download it again, or give a copy of the directory a {SUMS}"
        )
    return target.name


def has_sums(model: Path) -> bool:
    """Return whether a model directory or GGUF file has checksums to verify it with."""
    if model.is_dir():
        return is_snapshot(model.resolve()) or os.path.lexists(model / SUMS)
    try:
        return _gguf_sum(model) is not None
    except BadCheckpoint:  # a list without this file
        return False


def _gguf_sum(file: Path) -> tuple[str, str] | None:
    """Return the digest of a GGUF file and its source, for messages; None if there is none.

    Raises:
        BadCheckpoint: the list beside the file cannot be read, or does not list the file.
    """
    lists = [path for path in (file.with_name(f"{file.name}.sha256"), file.with_name(SUMS)) if os.path.lexists(path)]
    if lists:
        if (digest := read_sums(lists[0]).get(file.name)) is None:
            raise BadCheckpoint(f"{lists[0]} does not list {file.name}")
        return digest, f"{lists[0]} says"
    if (target := file.resolve()).parent.name == "blobs" and _HASH.fullmatch(target.name):
        return target.name, "the name of its blob says"
    installed = _installed(file)
    return None if installed is None else (installed, f"was installed with {DEMO_PACKAGE}")


def _installed(file: Path) -> str | None:
    """Return the sum of this file that the installer of the demo package recorded; None if there is none."""
    from importlib import metadata

    try:
        listed = metadata.files(DEMO_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    for entry in listed:
        hashed: Any = entry.hash
        known = hashed is not None and hashed.mode == "sha256"
        if known and entry.name == file.name and Path(str(entry.locate())).resolve() == file.resolve():
            return base64.urlsafe_b64decode(f"{hashed.value}=").hex()
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


@contextmanager
def _remedy(text: str) -> Iterator[None]:
    try:
        yield
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error}; {text}") from error


@contextmanager
def _reading(name: str, text: str, files: Iterable[Path]) -> Iterator[Tick]:
    """Report the block as an activity that reads these files."""
    total = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    with activity(name, f"{text} ({total / 1e9:.2f} GB)", total, "B") as work:
        yield work.advance
