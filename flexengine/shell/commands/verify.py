"""flexengine verify [MODEL]: compare a model, and what was prepared from it, with checksums; or write checksums."""

import argparse
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from flexengine.config import cache_root
from flexengine.errors import BadCheckpoint, InvalidInput
from flexengine.model.files import regular_file
from flexengine.model.gguf_header import gguf_parts
from flexengine.model.source import check_directory, located
from flexengine.model.verify import SUMS, NoSums, Verifier, has_sums, sums_of
from flexengine.plan.formatting import clock, count, plain, size
from flexengine.shell.cachedir import PREPARED, CacheItem, contents
from flexengine.shell.commands.messages import DONE, REFUSED, program, say, say_error
from flexengine.shell.commands.options import MODEL, add_options
from flexengine.shell.commands.parser import Parser

_MORE = """\
Checksums are in SHA256SUMS beside them, or in the file names of the hub's cache. Weights that were prepared from the
model are compared with their own. Nothing is downloaded.
"""
_OPTIONS = """
--write  write checksums beside a model that is known to be good: SHA256SUMS, for FILE.gguf FILE.gguf.sha256
--json   print one JSON object
"""
INTACT, DAMAGED, NO_SUMS = "intact", "damaged", "no checksums"


def parser() -> Parser:
    p = Parser("verify", "[MODEL]", "Exit code 0: intact; 2: damaged, or there are no checksums.", _MORE)
    p.group("model", MODEL)
    p.add_twin("model")
    add_options(p, _OPTIONS)
    return p


def run(args: argparse.Namespace) -> int:
    """Verify the model, or write its checksums. Return the exit code. Raise FlexError if there is no such model."""
    model, name = located(args.model, download=False)
    if args.write:
        for part in gguf_parts(model) if model.is_file() else [model]:
            _write(part, args.json)
        return DONE
    comparison = verified(model, name)
    if args.json:
        print(json.dumps(asdict(comparison)))
    else:
        _print(comparison)
    return DONE if comparison.result == INTACT else REFUSED


# Comparing.


@dataclass
class Comparison:
    """A model, and all that the cache has of it, compared with their checksums."""

    model: str  # path
    name: str
    result: str  # INTACT, DAMAGED, or NO_SUMS of the model; what was prepared from it is then intact
    files: int  # number of files compared
    bytes: int
    seconds: float
    damaged: list[dict[str, str]]  # file and reason: missing, differs, not listed
    prepared: list[dict[str, str | None]]  # kind, format, path of directories
    problem: str  # why the model could not be compared; "" if it was


def verified(model: Path, name: str) -> Comparison:
    """Return the comparison of a model, and of all that the cache has of it, with their checksums."""
    damaged: dict[str, str] = {}
    prepared: list[dict[str, str | None]] = []
    problem = ""

    def note(file: Path, reason: str) -> None:
        damaged.setdefault(str(file), reason)

    verifier = Verifier(note)
    files = gguf_parts(model) if model.is_file() else [model]
    try:
        for file in files:
            (verifier.gguf if model.is_file() else verifier.directory)(file)
    except NoSums:
        remedy = f"if it is known to be good, write them: flexengine verify {quote(str(model))} --write"
        problem = f"there are no checksums to verify {model} with; {remedy}"
    except BadCheckpoint as error:
        note(model, str(error))
    items: list[CacheItem] = []
    with suppress(OSError, InvalidInput):  # a cache that cannot be read holds nothing that jobs use
        items = contents(cache_root()).items
    for item in items:
        if item.kind in PREPARED and item.source in {str(file.resolve()) for file in files}:
            directory = cache_root() / item.folder / item.file
            prepared.append({"kind": item.kind, "format": item.label or None, "path": str(directory)})
            try:
                verifier.prepared(directory)
            except BadCheckpoint as error:
                note(directory, str(error))
    result = DAMAGED if damaged else NO_SUMS if problem else INTACT
    faults = [{"file": file, "reason": reason} for file, reason in damaged.items()]
    compared = verifier.files, verifier.bytes, verifier.seconds
    return Comparison(str(model), name, result, *compared, faults, prepared, problem)


def _print(comparison: Comparison) -> None:
    for entry in comparison.damaged:
        print(f"damaged: {plain(entry['file'])}: {plain(entry['reason'])}")
    names = [comparison.name]
    for each in comparison.prepared:
        label = f" ({each['format']})" if each["format"] else ""
        names.append(f"prepared {each['kind']}{label}")
    files, nbytes = count(comparison.files, "file", "files"), size(comparison.bytes)
    compared = f"{files}, {nbytes}, compared in {clock(comparison.seconds)}"
    damaged = f", {len(comparison.damaged)} damaged" if comparison.damaged else ""
    print(f"{comparison.result}: {plain(', '.join(names))}: {compared}{damaged}")
    if comparison.problem:
        say_error(comparison.problem)
    paths = [Path(entry["file"]) for entry in comparison.damaged]
    cached = [Path(str(each["path"])) for each in comparison.prepared]
    if bad := [each.name[:8] for each in cached if any(path.is_relative_to(each) for path in paths)]:
        say(f"remove the damaged prepared weights, and they are made again: flexengine cache clear {' '.join(bad)}")
    if not all(any(path.is_relative_to(each) for each in cached) for path in paths):
        say("get the damaged files again, or write the checksums again if the model was changed on purpose")


# Writing.


def _write(model: Path, as_json: bool) -> None:
    """Write the checksums of a directory or a GGUF file. Raise InvalidInput if it has some, or if they cannot be
    written, and ModelNotFound if it is a directory without a model."""
    target = model.with_name(f"{model.name}.sha256") if model.is_file() else model / SUMS
    exists = f"{target} exists; compare with it (leave out --write), or remove it if the model was changed on purpose"
    unwritable, remedy = f"{target} cannot be written", "copy the model to a directory that can be written"
    if model.is_dir():
        check_directory(model)
    if os.path.lexists(target):
        raise InvalidInput(exists)
    if has_sums(model):
        sources = "the names of its files in the hub's cache, a list beside it, or those of the installed package"
        raise InvalidInput(f"{model} has checksums: {sources}; leave out --write")
    files = [model] if model.is_file() else _listed(model)
    if not os.access(target.parent, os.W_OK):
        raise InvalidInput(f"{unwritable}: no permission; {remedy}")
    content = sums_of(target.parent, files)
    try:
        with target.open("xb") as sums:
            try:
                sums.write(content)
                sums.flush()
            except BaseException:
                target.unlink()
                raise
    except FileExistsError as error:
        raise InvalidInput(exists) from error
    except OSError as error:
        raise InvalidInput(f"{unwritable}: {error.strerror}; {remedy}") from error
    nbytes = sum(file.stat().st_size for file in files)
    if as_json:
        print(json.dumps({"written": str(target), "files": len(files), "bytes": nbytes}))
    else:
        print(f"wrote {plain(target)}: {count(len(files), 'file', 'files')}, {size(nbytes)}")


def _listed(directory: Path) -> list[Path]:
    """Return all files below a directory, except those in hidden directories. Raise BadCheckpoint if one is not
    regular or leads out of the directory."""
    regular = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        regular += [regular_file(Path(folder, name), directory) for name in sorted(files)]
    return regular


main = program(lambda words: run(parser().parse_args(words)))
