"""The peers: one adapter file each. An adapter runs as a process of its own, reads a Job and prints one JSON line.

An adapter that cannot run on this machine, or cannot run the job, calls harness.skip; the comparison continues.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A peer's adapter.

    Attributes:
        module: module of bench.peers.
        options: options of the job.
        dtype: dtype in which the peer computes if it cannot be chosen; with `gguf`, the dtype of the demo model's file.
        gguf: format of the GGUF file that the peer reads: "own" as published or stored, "f32" for the demo model's
            weights in fp32; None if it reads no GGUF.
    """

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
