"""Checkpoints with random weights in the shape of real models, written shard by shard in bounded memory.

python -m bench.models SHAPE DIR     (a name of SHAPES, such as opt-1.3b)

An existing checkpoint of the same record is reused.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import cache

Shapes = dict[str, tuple[int, ...]]

MARKER = "bench.json"  # written last: the record from which this checkpoint was made


@dataclass(frozen=True)
class Shape(ABC):
    """Shape of a decoder, and the seed of its weights."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int = 50272
    positions: int = 2048
    dtype: str = "float16"
    seed: int = 0
    shard_bytes: int = 256 * 2**20

    @abstractmethod
    def groups(self) -> list[Shapes]:
        """The tensors in order, a group for the embeddings and one per layer; a group is never split over shards."""

    @abstractmethod
    def config(self) -> dict[str, object]:
        """config.json."""

    def draw(self, name: str, size: tuple[int, ...], generator: Any) -> Any:
        """Return the values of a tensor, fp32: normal with standard deviation 0.02; the weights of norms are 1 more."""
        import torch

        values = torch.empty(size).normal_(0.0, 0.02, generator=generator)
        return values + 1 if name.endswith("norm.weight") else values

    def shards(self) -> list[Shapes]:
        """Return consecutive groups joined up to shard_bytes, with at least one group each."""
        shards: list[Shapes] = []
        for group in self.groups():
            if shards and self.nbytes(shards[-1]) + self.nbytes(group) <= self.shard_bytes:
                shards[-1] |= group
            else:
                shards.append(dict(group))
        return shards

    def nbytes(self, shapes: Shapes) -> int:
        """Return the bytes of these tensors in this dtype."""
        item = {"float16": 2, "bfloat16": 2, "float32": 4}[self.dtype]
        return item * sum(map(math.prod, shapes.values()))


@dataclass(frozen=True)
class OptShape(Shape):
    """An OPT decoder (pre-norm, learned positions, tied embeddings)."""

    def layer_shapes(self, j: int) -> Shapes:
        """Return the tensors of decoder layer j, by their names in OPTForCausalLM's state dict."""
        p, h, f = f"model.decoder.layers.{j}.", self.hidden, self.ffn
        shapes: Shapes = {}
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes |= {f"{p}self_attn.{name}.weight": (h, h), f"{p}self_attn.{name}.bias": (h,)}
        shapes |= {f"{p}fc1.weight": (f, h), f"{p}fc1.bias": (f,), f"{p}fc2.weight": (h, f), f"{p}fc2.bias": (h,)}
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{p}{name}.weight": (h,), f"{p}{name}.bias": (h,)}
        return shapes

    def groups(self) -> list[Shapes]:
        p, h = "model.decoder.", self.hidden
        embeddings: Shapes = {
            f"{p}embed_tokens.weight": (self.vocab, h),
            f"{p}embed_positions.weight": (self.positions + 2, h),  # OPT offsets positions by 2
            f"{p}final_layer_norm.weight": (h,),
            f"{p}final_layer_norm.bias": (h,),
        }
        return [embeddings, *(self.layer_shapes(j) for j in range(self.layers))]

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": self.dtype,
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "word_embed_proj_dim": self.hidden,
            "ffn_dim": self.ffn, "num_attention_heads": self.heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.positions, "activation_function": "relu", "do_layer_norm_before": True,
            "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
            "_remove_final_layer_norm": False, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
            "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "init_std": 0.02, "use_cache": True,
        }  # fmt: skip


@dataclass(frozen=True)
class LlamaShape(Shape):
    """A LLaMA decoder (gated MLP, rotary positions, untied head) whose query heads share `kv_heads`."""

    vocab: int = 32000
    kv_heads: int = 4

    def layer_shapes(self, j: int) -> Shapes:
        """Return the tensors of decoder layer j, by their names in LlamaForCausalLM's state dict."""
        p, h, f = f"model.layers.{j}.", self.hidden, self.ffn
        kv = h // self.heads * self.kv_heads
        rows = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
                "self_attn.o_proj": (h, h), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
                "input_layernorm": (h,), "post_attention_layernorm": (h,)}  # fmt: skip
        return {f"{p}{name}.weight": size for name, size in rows.items()}

    def groups(self) -> list[Shapes]:
        ends = {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,),
                "lm_head.weight": (self.vocab, self.hidden)}  # fmt: skip
        return [ends, *(self.layer_shapes(j) for j in range(self.layers))]

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": self.dtype,
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


@dataclass(frozen=True)
class MistralShape(LlamaShape):
    """A LLaMA decoder whose layers see `window` tokens each."""

    window: int = 256

    def config(self) -> dict[str, object]:
        own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": self.window}
        return super().config() | own


@dataclass(frozen=True)
class MixtralShape(LlamaShape):
    """A LLaMA decoder with `experts` MLPs per layer, of which each token uses `active`."""

    experts: int = 8
    active: int = 2

    def layer_shapes(self, j: int) -> Shapes:
        p, h, f = f"model.layers.{j}.block_sparse_moe.", self.hidden, self.ffn
        shapes = {name: size for name, size in super().layer_shapes(j).items() if ".mlp." not in name}
        shapes[f"{p}gate.weight"] = (self.experts, h)
        for e in range(self.experts):
            shapes |= {f"{p}experts.{e}.w1.weight": (f, h), f"{p}experts.{e}.w2.weight": (h, f),
                       f"{p}experts.{e}.w3.weight": (f, h)}  # fmt: skip
        return shapes

    def config(self) -> dict[str, object]:
        return super().config() | {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": self.experts,
            "num_experts_per_tok": self.active, "sliding_window": None,
        }  # fmt: skip


@dataclass(frozen=True)
class HybridShape(Shape):
    """A model with recurrent states: the tensors of transformers' class, which is made on the meta device.

    Attributes:
        model_type: as in config.json.
        fields: further fields of config.json.
    """

    dtype: str = "bfloat16"
    vocab: int = 32000
    model_type: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def groups(self) -> list[Shapes]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config()))
        groups: list[Shapes] = [{} for _ in range(self.layers + 1)]
        for name, tensor in model.state_dict().items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            groups[int(layer[1]) + 1 if layer else 0][name] = tuple(tensor.shape)
        return groups

    def config(self) -> dict[str, object]:
        return {
            "model_type": self.model_type, "dtype": self.dtype, "hidden_size": self.hidden, "vocab_size": self.vocab,
            "num_attention_heads": self.heads, "max_position_embeddings": self.positions, "bos_token_id": 1,
            "eos_token_id": 2, **self.fields,
        }  # fmt: skip

    def draw(self, name: str, size: tuple[int, ...], generator: Any) -> Any:
        """Convolutions have the scale at which transformers starts them, and Mamba's D is about 1."""
        values = super().draw(name, size, generator)
        return values * 15 if "conv1d" in name else values + 1 if name.endswith(".D") else values


# Qwen3.5-35B-A3B and Nemotron 3 Nano 30B-A3B, both with all kinds of layers in their order, and a tenth of the bytes.
QWEN_MOE = {
    "num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 512, "num_experts": 64,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": [
        {"M": "linear_attention", "E": "moe", "*": "full_attention"}[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEME"
    ],
    "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 768, "n_routed_experts": 64,
    "moe_shared_expert_intermediate_size": 1536, "num_experts_per_tok": 6, "mamba_num_heads": 32, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "chunk_size": 128,
}  # fmt: skip
SHAPES = {
    "qwen3.5-moe-2.7b": HybridShape(
        layers=12, hidden=1024, ffn=512, heads=8, model_type="qwen3_5_moe_text", fields=QWEN_MOE
    ),
    "nemotron-h-2.7b": HybridShape(layers=27, hidden=1024, ffn=768, heads=16, model_type="nemotron_h", fields=NEMOTRON),
    "opt-1.3b": OptShape(layers=24, hidden=2048, ffn=8192, heads=32),
    "opt-13b": OptShape(layers=40, hidden=5120, ffn=20480, heads=40),
    "opt-tiny": OptShape(layers=3, hidden=64, ffn=256, heads=4, vocab=512, positions=128, shard_bytes=100_000),
    "llama-1.1b": LlamaShape(layers=22, hidden=2048, ffn=5632, heads=32),
    "llama-7b": LlamaShape(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32),
    "llama-0.2b": LlamaShape(layers=16, hidden=1024, ffn=2816, heads=16, kv_heads=2),
    "mistral-0.2b": MistralShape(layers=12, hidden=1024, ffn=3584, heads=8, kv_heads=2, window=256),
    "mixtral-0.3b": MixtralShape(layers=8, hidden=768, ffn=1536, heads=12, kv_heads=4),
    "llama-tiny": LlamaShape(layers=2, hidden=64, ffn=176, heads=4, vocab=512, positions=128, kv_heads=2),
}


def write_shard(path: Path, shape: Shape, index: int, tensors: Shapes) -> None:
    """Draw and write one shard. The seed is (shape.seed, index), so shards may be written in any order."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + index)
    dtype = getattr(torch, shape.dtype)
    drawn = {name: shape.draw(name, size, generator).to(dtype) for name, size in tensors.items()}
    save_file(drawn, path, metadata={"format": "pt"})


def make(shape: Shape, directory: Path, workers: int | None = None) -> Path:
    """Make the checkpoint, unless `directory` already has it. Peak memory: `workers` shards and a tensor for each."""
    record = json.dumps(asdict(shape), sort_keys=True)
    marker = directory / MARKER
    if marker.exists() and marker.read_text() == record:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    shards = shape.shards()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda i: write_shard(directory / names[i], shape, i, shards[i]), range(len(shards))))
    index = {
        "metadata": {"total_size": sum(map(shape.nbytes, shards))},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))
    marker.write_text(record)
    return directory


def demo_model() -> Path:
    """Return a directory with the demo model's numbers as plain fp32 tensors. It is made once, in a process of its own,
    as importing flexengine changes the environment."""
    root = Path(__file__).resolve().parents[1]
    argv = [sys.executable, "-m", "bench.demo", str(cache() / "bench" / "demo")]
    found = subprocess.run(argv, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.splitlines()[-1])


def shard_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order."""
    return sorted(directory.glob("*.safetensors"))


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description="make a random-weight checkpoint in the shape of a real model")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=None, help="shards written at once (default: up to 8)")
    args = parser.parse_args()
    directory = make(SHAPES[args.shape], args.directory, args.workers)
    files = shard_files(directory)
    print(json.dumps({"shape": args.shape, "shards": len(files), "bytes": sum(f.stat().st_size for f in files)}))


if __name__ == "__main__":
    main()
