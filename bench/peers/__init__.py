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
        gguf: format of the GGUF file that the peer reads: "own" as published or stored, "demo" the same but of the demo
            model only, "f32" for the demo model's weights in fp32; None if it reads no GGUF.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    gguf: str | None = None


# Class of numbers in which products are computed, by the dtype of a peer.
CLASSES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "8 bits", "Q4_1": "4 bits"}


def own_class(switches: dict[str, Any]) -> str:
    """Return the class of flexengine with some switches."""
    weights, compute = switches.get("weights"), switches.get("compute")
    if weights not in (None, "int8"):
        return "4 bits"
    return "8 bits" if "int8" in (weights, compute) else "bf16" if compute == "bf16" else "fp32"


def _exact(dtype: str) -> dict[str, str]:
    """Return OpenVINO's properties for products and a cache of one dtype, without further rounding."""
    return {"INFERENCE_PRECISION_HINT": dtype, "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": dtype}


# OpenVINO does not start with GGUF files without a tokenizer, such as those of bench.models.
PEERS = {
    "transformers": Peer("transformers_generate"),
    "accelerate-cpu": Peer("accelerate_offload", {"place": "cpu"}),
    "accelerate-disk": Peer("accelerate_offload", {"place": "disk"}),
    "airllm": Peer("airllm_layers"),
    "llama-cpp": Peer("llama_cpp_batched", dtype="Q4_1", gguf="own"),
    "llama-cpp-f32": Peer("llama_cpp_batched", dtype="float32", gguf="f32"),
    "openvino": Peer("openvino_genai_batched", dtype="Q4_1", gguf="demo"),
    "openvino-f32": Peer("openvino_genai_batched", {"properties": _exact("f32")}, "float32", gguf="demo"),
    "openvino-bf16": Peer("openvino_genai_batched", {"properties": _exact("bf16")}, "bfloat16", gguf="demo"),
    "vllm": Peer("vllm_cpu_batched", dtype="float32"),
    "vllm-bf16": Peer("vllm_cpu_batched", dtype="bfloat16"),
    "ctranslate2": Peer("ctranslate2_batched", {"compute_type": "float32"}, dtype="float32"),
    "ctranslate2-int8": Peer("ctranslate2_batched", {"compute_type": "int8"}, dtype="int8"),
    "flexgen": Peer("flexgen_opt", dtype="float16"),
    "deepspeed": Peer("deepspeed_zero", dtype="float16"),
}
