"""Downloads of models from the Hugging Face hub."""

import logging
from pathlib import Path

from flexengine.activity import activity
from flexengine.errors import ModelNotFound

FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]
SKIP = ["*/*", "consolidated*", "*.bin.index.json"]
SECONDS = 20.0  # time limit of the first request


def download(model: str, trust_remote_code: bool, online: bool) -> Path:
    """Return a snapshot of a hub repository: safetensors, JSON and tokenizer files at its top level.

    If the hub does not respond, or `online` is false, the local cache of the hub is used. Raise ModelNotFound if the
    repository cannot be downloaded and is not in the cache, or has no safetensors."""
    patterns = [*FILES, *(["*.py"] if trust_remote_code else [])]
    silent: Exception | None = None
    try:
        from huggingface_hub import model_info, snapshot_download

        try:  # the same request in snapshot_download has no time limit, and hangs if a firewall drops packets
            if online:
                model_info(model, timeout=SECONDS)
        except Exception as error:
            silent = error
        offline = not online or silent is not None
        text = f"downloading {model} from the hub, unless its cache has the files"
        with activity("downloading", text, level=logging.DEBUG if offline else logging.INFO):
            options = {"allow_patterns": patterns, "ignore_patterns": SKIP, "local_files_only": offline}
            path = Path(snapshot_download(model, **options))
    except Exception as error:  # network, authorisation, unknown id, disk: one message for all
        cause = silent or error
        if not online:
            raise ModelNotFound(
                f"{model} is no path, and not all of it is in the hub's cache; check the id, or run"
                " the model once, which downloads it"
            ) from cause
        reason = " ".join(str(cause).split())[:300]
        raise ModelNotFound(
            f"{model} is neither here nor could it be downloaded from the hub ({type(cause).__name__}: {reason});"
            " check the id and the network, or download it elsewhere and give its directory"
        ) from cause
    if not any(path.glob("*.safetensors")):
        raise ModelNotFound(f"hub model {model} has no safetensors files; download it yourself and give its directory")
    return path
