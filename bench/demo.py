"""The demo model's numbers as plain fp32 tensors, for programs that read no GGUF file.

python -m bench.demo DIRECTORY

transformers reads the file. Config and tokenizer are the engine's. An existing copy of the same file is reused.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from bench.compare.gguf_files import marks
from bench.models import MARKER


def plain(directory: Path) -> Path:
    """Make the copy, unless `directory` already has it."""
    from flexengine.model.source import resolve

    source = resolve(None)
    file, marker = source.given[0], directory / MARKER
    record = marks(file)
    if marker.exists() and marker.read_text() == record:
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.") as name:
        half = Path(name) / directory.name
        _write(file, half)
        for pattern in ("*config.json", "tokenizer*", "*.jinja"):
            for part in source.directory.glob(pattern):
                shutil.copy(part, half)
        (half / MARKER).write_text(record)
        half.replace(directory)
    return directory


def _write(file: Path, directory: Path) -> None:
    """Write the tensors of a GGUF file, as transformers decodes them."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    directory.mkdir()
    save_model(model, str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    print(plain(Path(sys.argv[1])))
