"""Tokens of three families under all partitions and cache formats, with one to four workers, beside one process."""

import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import Record
from bench.workers.side import run

VOCABULARY, ROWS, TOKENS = 601, 8, 8
_COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
               max_position_embeddings=256, intermediate_size=112, head_dim=16, eos_token_id=2,
               initializer_range=0.2)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _COMMON),
    "gemma2": ("Gemma2", dict(_COMMON, sliding_window=9, query_pre_attn_scalar=16)),
    "gpt-oss": ("GptOss", dict(_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                               layer_types=["sliding_attention", "full_attention"] * 2)),
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "exact": {}, "bf16": {"cache": "bf16"}, "int8": {"cache": "int8"}, "int4": {"cache": "int4"},
    "sparse": {"sparse_attention": 0.3},
}  # fmt: skip
PARTITIONS = [("requests", 1), ("requests", 2), ("requests", 3), ("requests", 4), ("heads", 2), ("heads", 4),
              ("tokens", 2), ("tokens", 3), ("tokens", 4)]  # fmt: skip
IN_MEMORY = ("exact", "int4")  # formats that also run with workers of their own, through shared memory


def make_family(name: str, folder: Path) -> Path:
    """Write a random model of a family, unless it is there. Return its directory."""
    import torch
    import transformers

    kind, values = FAMILIES[name]
    directory = folder / f"grid {name}"
    if not directory.exists():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{kind}Config")(**values)
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(directory)
    return directory


def serve(count: int, stack: ExitStack, memory: str = "16M", device: str = "cpu") -> list[str]:
    """Start workers that listen on the loopback interface. Return their addresses. memory, device: of each."""
    addresses, processes = list[str](), list["subprocess.Popen[bytes]"]()
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{free.getsockname()[1]}")
        words = ["serve-attention", addresses[-1], "--worker-mem", memory, "--device", device, "-q"]
        processes.append(process := subprocess.Popen([sys.executable, "-m", "flexengine", *words]))
        stack.callback(process.wait)
        stack.callback(process.terminate)
    for address in addresses:
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1).close()
                break
            except OSError as error:
                if any(process.poll() is not None for process in processes):
                    raise RuntimeError(f"an attention worker has ended, which should listen at {address}") from error
                time.sleep(0.2)
    return addresses


def grid(folder: Path) -> tuple[Record, bool]:
    """Return the number of runs and those whose tokens differ, and whether there are none."""
    rng, runs, differ = random.Random(3), 0, list[str]()
    rows = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 60))] for _ in range(ROWS)]
    with ExitStack() as stack:
        addresses = serve(4, stack)
        for family in FAMILIES:
            model = make_family(family, folder)
            for form, lossy in FORMATS.items():
                block = {"gpu_batch_size": 3, "num_gpu_batches": 3, "prefill_tokens": 40}
                job = {"model": str(model), "device": "sim", "memory": "1G", "host": "1G", "rows": rows,
                       "tokens": TOKENS, "lossy": lossy, "policy": block}  # fmt: skip
                expected = run(job)["tokens"]
                for partition, count in PARTITIONS:
                    if partition == "tokens" and form == "sparse":
                        continue  # refused
                    policy = {**block, "cache": {"workers": 0.8, "device": 0.2}, "partition": partition}
                    ways: dict[str, Record] = {"tcp": {"workers": addresses[:count]}}
                    if form in IN_MEMORY:
                        ways["shared memory"] = {"workers": count, "worker_mem": "16M"}
                    for way, workers in ways.items():
                        runs += 1
                        if run({**job, "policy": policy, **workers})["tokens"] != expected:
                            differ.append(f"{family}, {form}, {partition} over {count}, {way}")
                print(f"  {family}, {form}: {runs} runs, {len(differ)} differ", file=sys.stderr)
    return {"runs": runs, "differ": differ, "same": not differ}, not differ
