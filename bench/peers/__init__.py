"""The peers: one adapter file each, run as a process of its own, that reads a Job and prints one JSON line.

An adapter that cannot run here, or not this job, says so with harness.skip; the comparison goes on without it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """module: of bench.peers. options: of the job. dtype: what it computes in if it leaves no choice; with `gguf`, what
    the demo model's file holds. gguf: reads models as GGUF, "own" as published or as stored, or "f32" with the demo
    model's weights in fp32."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    gguf: str | None = None


PEERS = {
    "transformers": Peer("transformers_generate"),
    "accelerate-cpu": Peer("accelerate_offload", {"place": "cpu"}),
    "accelerate-disk": Peer("accelerate_offload", {"place": "disk"}),
    "airllm": Peer("airllm_layers"),
    "llama-cpp": Peer("llama_cpp_batched", dtype="Q4_1", gguf="own"),
    "llama-cpp-f32": Peer("llama_cpp_batched", dtype="float32", gguf="f32"),
    "flexgen": Peer("flexgen_opt", dtype="float16"),
    "deepspeed": Peer("deepspeed_zero", dtype="float16"),
}
