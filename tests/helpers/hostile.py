"""What tests of hostile checkpoints share."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexengine.errors import FlexError

# --- configs
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 112,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 601,
         "max_position_embeddings": 256, "head_dim": 16, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
         "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 2}  # fmt: skip


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def damaged(good: bytes, rng: random.Random, most: int) -> bytes:
    """`good` with one to three changes among its first `most` bytes: bits, bytes, numbers, pieces cut or doubled."""
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        at, kind = rng.randrange(min(most, len(data))), rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**60, 2**63, 2**64 - 1]))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data)


def refused_or_loaded(load: Callable[[], Any]) -> bool:
    """Whether it was refused, with one of the package's errors: any other is the test's failure."""
    try:
        load()
    except FlexError:
        return True
    return False
