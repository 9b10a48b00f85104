"""Resolution of the user's model argument into a directory of config.json, safetensors and tokenizer files."""

import re
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from flexengine.errors import ModelNotFound
from flexengine.model.demo import demo_file
from flexengine.model.files import set_links

if TYPE_CHECKING:
    from flexengine.model.verify import Verifier

# Checkpoints other than safetensors, by the suffix of their files: the function that returns the converted model, as
# module:name, which is imported on first use.
CONVERTERS = {".gguf": "flexengine.model.gguf:resolve_gguf", ".bin": "flexengine.model.pickled:resolve_bin"}
DOWNLOAD = "flexengine.model.hub:download"  # imported for models of the hub
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Attributes:
        directory: with config.json, *.safetensors and usually tokenizer files.
        name: for messages.
        given: the user's files that `directory` was converted from; empty if the directory is the user's own.
    """

    directory: Path
    name: str
    given: tuple[Path, ...] = ()


def resolve(
    model: str | None, trust_remote_code: bool = False, verifier: "Verifier | None" = None, allow_symlinks: bool = False
) -> ModelSource:
    """Return the model as a directory, after downloading and converting it if necessary.

    Args:
        model: a directory, a .gguf file or a hub id; None for the demo model.
        trust_remote_code: include the model's .py files.
        verifier: compares the model's files, and converted ones, with their checksums before they are read.
        allow_symlinks: read files of a directory that are links to files outside of it.

    Raises:
        ModelNotFound: there is no such model; the message says what to type.
        BadCheckpoint: a file is damaged.
        UnsupportedModel: the model cannot be converted.
        OutOfMemory: the disk is full.
    """
    path, name = located(model, trust_remote_code, allow_symlinks=allow_symlinks)
    suffix = path.suffix.lower()
    if path.is_dir():
        check_directory(path)
        if verifier:
            verifier.directory(path)
        if any(path.glob("*.safetensors")):
            return ModelSource(path, name)
        suffix = ".bin"
    source: ModelSource = resolve_name(CONVERTERS[suffix])(path, trust_remote_code, verifier)
    return source


def located(
    model: str | None, trust_remote_code: bool = False, download: bool = True, allow_symlinks: bool = False
) -> tuple[Path, str]:
    """Return the user's model, a directory or a .gguf file, and its name. Nothing is converted, or read from it.

    Args:
        model: a directory, a .gguf file or a hub id; None for the demo model.
        trust_remote_code: download the model's .py files, too.
        download: download a model of the hub if necessary.
        allow_symlinks: allow files of a directory that are links to files outside of it.

    Raises:
        ModelNotFound: there is no such model; the message says what to type.
    """
    local = _local(model, allow_symlinks)
    return local or (resolve_name(DOWNLOAD)(str(model), trust_remote_code, download), str(model))


def check_local(model: str | None, allow_symlinks: bool = False) -> None:
    """Raise ModelNotFound if the user's model is a path without a model. Hub ids are not looked up. The check
    imports no torch and reads no weights."""
    local = _local(model, allow_symlinks)
    if local is not None and local[0].is_dir():
        check_directory(local[0])


def _local(model: str | None, allow_symlinks: bool) -> tuple[Path, str] | None:
    """Return a model on this machine and its name; None if the argument is a hub id. Raise as `located`."""
    if model is None:
        return demo_file(), demo_file().stem
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for the file system, or ~ of an unknown user
        raise ModelNotFound(
            f"{model[:200]!r} cannot be a path ({error}); a model is a directory, a .gguf file or a hub id"
        ) from error
    if is_directory:
        set_links(path, allow_symlinks)
        return path, path.resolve().name
    if is_file:
        if path.suffix.lower() == ".gguf":
            return path, path.stem
        raise ModelNotFound(f"{model} is a {path.suffix or 'plain'} file; a model is a directory or a .gguf file")
    if _looks_like_path(model):
        raise ModelNotFound(f"there is no model at {path}; a model is a directory, a .gguf file or a hub id")
    return None


def _looks_like_path(model: str) -> bool:
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        return True
    owner, _, name = model.partition("/")
    return model.lower().endswith((".gguf", ".safetensors", ".bin")) or (bool(name) and Path(owner).exists())


def check_directory(path: Path) -> None:
    """Raise ModelNotFound if a directory lacks a config or weights."""
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}: give that file as the model" if ggufs else "; a model directory has one"
        raise ModelNotFound(f"{path} has no config.json{hint}")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise ModelNotFound(f"{path} has a config.json but no weights (*.safetensors or pytorch_model*.bin)")
