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
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, TypeVar

from flexengine.activity import activity, advance
from flexengine.errors import BadCheckpoint, InvalidInput, size
from flexengine.model.files import DEMO_PACKAGE, indexed_files, is_snapshot, read_limited, regular_file, weights_in
from flexengine.system.read_retries import opened

SUMS = "SHA256SUMS"
# All files that transformers or flexengine may read in a model directory; the last ones are vocabularies of tokenizers.
READ = (
    *("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*", "*.py", "tokenizer*", "*.model", "*.txt"),
    *("*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.tokenizer"),
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RECIPE = f"find . -type f ! -name {SUMS} -exec sha256sum {{}} + > {SUMS}"
_MAX_SUMS_BYTES = 10_000_000  # limit in bytes of SHA256SUMS; a model with 1,000 shards needs 100,000
_NAMED = 8  # maximum number of files in a message
_CHUNK = 1 << 20  # bytes read at a time
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}

T = TypeVar("T")


class NoSums(InvalidInput):
    """A model has no checksums to compare it with."""


class Verifier:
    """Comparison of files with their checksums. on_fault: called with the path of each file that is missing, differs or
    is not listed, and the reason; the comparison then continues. None raises BadCheckpoint instead.
    """

    def __init__(self, on_fault: Callable[[Path, str], None] | None = None) -> None:
        self.files, self.bytes, self.seconds = 0, 0, 0.0  # verified, and the time spent so far
        self._on_fault = on_fault

    def directory(self, directory: Path) -> None:
        """Verify a model directory: every file in its sums must match, and every file that may be read must be listed.
        Raise NoSums, or BadCheckpoint, which names the files that are missing, differ or are not listed."""
        weights = weights_in(directory)  # others than safetensors are read if there are no safetensors
        read = _files(directory, READ if weights is None else (*READ, weights))
        if is_snapshot(directory.resolve()):
            self._verify(directory, read, None)
        elif os.path.lexists(directory / SUMS):
            with _remedy("get what is damaged again, or make the sums again if it was changed on purpose"):
                self._verify(directory, read, read_sums(directory / SUMS))
        else:
            fault = f"there are no checksums to verify {directory} with; as long as it is known to be good, make them"
            raise NoSums(f"{fault}: cd {quote(str(directory))} && {_RECIPE}")

    def gguf(self, file: Path) -> None:
        """Verify a GGUF file by FILE.sha256 or SHA256SUMS beside it, its blob's name or its package. Raise NoSums, or
        BadCheckpoint if the file differs."""
        if (known := _gguf_sum(file)) is None:
            name = quote(file.name)
            fault = f"there is no checksum to verify {file} with; as long as it is known to be good, make one"
            raise NoSums(f"{fault}: cd {quote(str(file.parent))} && sha256sum {name} > {name}.sha256")
        digest, says = known
        with _remedy("get it again"):
            self._compare({file: digest}, None, says, count=1)

    def prepared(self, directory: Path) -> None:
        """Verify a directory that flexengine made. Raise BadCheckpoint if a file is missing or differs.

        The directory is not removed: another job may be reading it, and the user should learn of a faulty disk.
        """
        with _remedy(f"remove {directory}, and it will be made again"):
            if not os.path.lexists(directory / SUMS):
                raise BadCheckpoint(f"{directory} has no {SUMS}: an earlier version made it, or it is damaged")
            self._verify(directory, _files(directory, ("**/*",)), read_sums(directory / SUMS))

    def _verify(self, directory: Path, read: Iterable[Path], sums: Mapping[str, str] | None) -> None:
        """Compare a directory with its sums; None for the names of the blobs that its files link to."""
        files = {*read, *(directory / name for name in sums or ())} - {directory / SUMS}
        says = f"the names of their blobs in {directory} say" if sums is None else f"{directory / SUMS} says"

        def digest(file: Path) -> str:
            if sums is None:
                target = regular_file(file).resolve()
                if target.parent.name != "blobs" or not _HASH.fullmatch(target.name):
                    raise BadCheckpoint(
                        f"{file} is no link to a blob that is named by its hash, so there is nothing to verify it"
                        f" with; download it again, or give a copy of the directory a {SUMS}"
                    )
                return target.name
            if (name := file.relative_to(directory).as_posix()) not in sums:
                raise BadCheckpoint(f"not listed in {SUMS}")
            return sums[name]

        def unlisted(faults: Mapping[Path, str]) -> str:
            if sums is None:
                return _some([*faults.values()])
            names = [file.relative_to(directory).as_posix() for file in faults]
            return f"{directory / SUMS} does not list {_some(names)}"

        def compare(some: Iterable[Path]) -> None:
            self._compare(self._each(sorted(some), digest, unlisted), directory, says, len(files))

        indexes = {file for name in _INDEXES if (file := directory / name) in files and os.path.lexists(file)}
        compare(indexes)  # first, as a damaged one may name other files
        shards = self._each(sorted(indexes), indexed_files, lambda faults: _some([*faults.values()]))
        files.update(*shards.values())  # they can have any name
        compare(files - indexes)

    def _each(
        self, files: Iterable[Path], check: Callable[[Path], T], message: Callable[[Mapping[Path, str]], str]
    ) -> dict[Path, T]:
        """Return what `check` returns for each file. If it raises BadCheckpoint or OSError, call `on_fault`; without,
        raise BadCheckpoint after the last file, with the message for the reasons by file."""
        results, faults = dict[Path, T](), dict[Path, str]()
        for file in files:
            try:
                results[file] = check(file)
            except (BadCheckpoint, OSError) as error:
                if self._on_fault:
                    self._on_fault(file, str(error))
                else:
                    faults[file] = str(error)
        if faults:
            raise BadCheckpoint(message(faults))
        return results

    def _compare(self, sums: Mapping[Path, str], directory: Path | None, says: str, count: int) -> None:
        """Compare files with their digests. Raise BadCheckpoint if a file is missing or differs.

        Args:
            directory: all files must lie in it; None for no check, as for a file that the user named.
            says: source of the digests, for the message, as `count`, of the files of the whole model.
        """
        if not sums:
            return
        began = time.perf_counter()

        def check(file: Path) -> int:
            if not os.path.lexists(file):
                raise BadCheckpoint("missing")
            if directory:
                regular_file(file, directory)
            actual = digest_of(file, git=len(sums[file]) == 40)
            self.bytes += file.stat().st_size
            if actual != sums[file]:
                raise BadCheckpoint(f"has {actual}, expected {sums[file]}")
            return 1

        def damaged(faults: Mapping[Path, str]) -> str:
            names = [f"{file.relative_to(directory) if directory else file} ({why})" for file, why in faults.items()]
            return f"{len(faults)} of {count} files are not as {says}: {_some(names)}"

        with _reading("verifying", "comparing the model's files with their checksums", sums):
            self._each(sums, check, damaged)
        self.files += len(sums)
        self.seconds += time.perf_counter() - began


def write_sums(directory: Path) -> None:
    """Write SHA256SUMS of all files below a directory, with the digests of their present contents."""
    files = [file for file in _files(directory, ("**/*",)) if file != directory / SUMS]
    (directory / SUMS).write_bytes(sums_of(directory, files))


def sums_of(directory: Path, files: Sequence[Path]) -> bytes:
    """Return the content of SHA256SUMS in a directory for files below it, with digests of their contents."""
    with _reading("hashing", "computing checksums, which --verify and flexengine verify compare", files):
        digests = {file.relative_to(directory).as_posix(): digest_of(file) for file in files}
    lines = list[str]()
    for name, digest in digests.items():
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append("\\" * (escaped != name) + f"{digest}  {escaped}\n")
    return os.fsencode("".join(lines))


def read_sums(file: Path) -> dict[str, str]:
    """Return the digests in a file that sha256sum wrote, by name relative to its directory, without its own entry.
    Raise BadCheckpoint if the file cannot be read, or a line is not valid; the message names the line and the fault."""
    lines = os.fsdecode(read_limited(file, _MAX_SUMS_BYTES)).removesuffix("\n").split("\n")
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if (match := _LINE.fullmatch(line)) is None:
            fault = "is not what sha256sum writes, 64 hex digits, two spaces and a name"
            raise BadCheckpoint(f"{file}, line {number}: {line[:100]!r} {fault}")
        try:
            name = _name(match[3], escaped=bool(match[1]))
        except (KeyError, ValueError) as error:
            fault = f"is not the name of a file below that directory ({error})"
            raise BadCheckpoint(f"{file}, line {number}: {match[3][:100]!r} {fault}") from error
        if name in digests:
            raise BadCheckpoint(f"{file}, line {number}: {name[:100]!r} is there twice")
        digests[name] = match[2].lower()
    digests.pop(file.name, None)  # a second `sha256sum * > SHA256SUMS` lists the file itself, with an old digest
    return digests


def digest_of(file: Path, count_bytes: Callable[[int], object] = advance, git: bool = False) -> str:
    """Return the SHA-256 of a file. Raise OSError if the file cannot be read.

    Args:
        count_bytes: called with the number of bytes after each read.
        git: return git's SHA-1 of the content as a blob instead.
    """
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else hashlib.sha256()
        view = memoryview(bytearray(min(_CHUNK, size + 1)))
        while count := stream.readinto(view):
            digest.update(view[:count])
            count_bytes(count)
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


def _files(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files that match a pattern, dead links included."""
    return sorted({file for pattern in patterns for file in directory.glob(pattern) if not file.is_dir()})


def has_sums(model: Path) -> bool:
    """Return whether a model directory or GGUF file has checksums to verify it with."""
    if model.is_dir():
        return is_snapshot(model.resolve()) or os.path.lexists(model / SUMS)
    try:
        return _gguf_sum(model) is not None
    except BadCheckpoint:  # a list without this file
        return False


def _gguf_sum(file: Path) -> tuple[str, str] | None:
    """Return the digest of a GGUF file and its source, for messages; None if there is none. Raise BadCheckpoint if the
    list beside the file cannot be read, or does not list the file."""
    lists = [path for path in (file.with_name(f"{file.name}.sha256"), file.with_name(SUMS)) if os.path.lexists(path)]
    if lists:
        if (digest := read_sums(lists[0]).get(file.name)) is None:
            raise BadCheckpoint(f"{lists[0]} does not list {file.name}")
        return digest, f"{lists[0]} says"
    if (target := file.resolve()).parent.name == "blobs" and _HASH.fullmatch(target.name):
        return target.name, "the name of its blob says"
    try:
        installed = metadata.files(DEMO_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    for entry in installed:
        hashed: Any = entry.hash
        known = hashed is not None and hashed.mode == "sha256"
        if known and entry.name == file.name and Path(str(entry.locate())).resolve() == file.resolve():
            return base64.urlsafe_b64decode(f"{hashed.value}=").hex(), f"was installed with {DEMO_PACKAGE}"
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


def _reading(name: str, text: str, files: Iterable[Path]) -> AbstractContextManager[Any]:
    """Report the block as an activity that reads these files."""
    total = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return activity(name, f"{text} ({size(total)})", total, "B")
