"""The frozen cases of the benches: prompts, token counts and seeds. No torch here."""

import math
import random
from dataclasses import dataclass

FIRST_TOKEN = 10  # ids below are special tokens in the vocabularies used here


@dataclass(frozen=True)
class Request:
    """One prompt as token ids and the number of tokens to generate for it."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: log-normal around `median` with `sigma` (uniform if None), clipped to low..high."""

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    def draw(self, rng: random.Random) -> int:
        """Return a random length."""
        if self.sigma is None:
            return rng.randint(self.low, self.high)
        return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))


def fixed(n: int) -> Lengths:
    """Return lengths that are all n."""
    return Lengths(n, n)


@dataclass(frozen=True)
class Case:
    """Rows of given lengths. `requests` depends only on the fields and a vocabulary size.

    Attributes:
        peer_batches: batch sizes that a padded peer may choose from.
    """

    name: str
    rows: int
    prompt: Lengths
    output: Lengths
    seed: int = 0
    peer_batches: tuple[int, ...] = ()

    def lengths(self) -> list[tuple[int, int]]:
        """Return (prompt tokens, tokens to generate) of each row."""
        rng = random.Random(f"lengths {self.seed}")
        return [(self.prompt.draw(rng), self.output.draw(rng)) for _ in range(self.rows)]

    def requests(self, vocab_size: int) -> list[Request]:
        """Return the rows, with token ids drawn uniformly from FIRST_TOKEN..vocab_size - 1."""
        rng = random.Random(f"tokens {self.seed}")
        return [
            Request(tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(prompt)), output)
            for prompt, output in self.lengths()
        ]

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all rows."""
        return sum(prompt for prompt, _ in self.lengths())

    @property
    def output_tokens(self) -> int:
        """Return the tokens to generate of all rows, without padding: the useful tokens."""
        return sum(output for _, output in self.lengths())


@dataclass(frozen=True)
class Comparison:
    """A case against peers.

    Attributes:
        model: "demo", or a shape of bench.models.
        dtype: dtype in which the peers compute. flexengine computes in fp32 on a CPU, in the checkpoint's dtype on a
            GPU.
        memory: bytes of the cgroup of every side.
        peer_tokens: tokens of each row that peers generate, of one batch only; their rate for the case follows from the
            seconds of these steps. None if they compute the case.
        device_mem: bytes of GPU memory.
    """

    case: Case
    model: str
    peers: tuple[str, ...]
    dtype: str = "float32"
    memory: int | None = None
    device: str = "cpu"
    device_mem: str | None = None
    peer_tokens: int | None = None


@dataclass(frozen=True)
class GpuCase:
    """A case with streamed weights on a GPU.

    Attributes:
        device_mem: device memory of the engine.
        policy: fields of the policy; None lets the planner choose.
    """

    case: Case
    device_mem: str = "16GiB"
    weights: tuple[float, float, float] | None = (0.0, 1.0, 0.0)
    gpu_batch_size: int = 32
    num_gpu_batches: int = 2


RESIDENT = Case("a", 64, fixed(128), fixed(32), peer_batches=(16, 32, 64, 128))
MIXED = Case("b", 96, Lengths(16, 512, median=100.0, sigma=0.8), Lengths(8, 64), peer_batches=(16, 32, 48, 96))
OFFLOAD_SHORT = Case("c1", 16, fixed(128), fixed(8))
OFFLOAD_LONG = Case("c2", 32, fixed(32), fixed(32))
SMOKE = Case("smoke", 4, Lengths(3, 9), Lengths(2, 5), peer_batches=(2, 4))
OFFLOAD_LLAMA = Case("d", 16, fixed(128), fixed(8))
RESIDENT_LLAMA = Case("e", 16, fixed(128), fixed(16))
HYBRID_EXPERTS = Case("i", 32, fixed(64), fixed(16), peer_batches=(32, 8))
HYBRID_MAMBA = Case("j", 32, fixed(64), fixed(16), peer_batches=(16, 8))
LONG_PROMPTS = Case("f", 8, fixed(1500), fixed(64))
LONG_CONTEXT = Case("h", 4, fixed(6000), fixed(32))
GPU_OFFLOAD = Case("g", 32, fixed(256), fixed(16), peer_batches=(32,))

COMPARISONS = {
    comparison.case.name: comparison
    for comparison in (
        Comparison(RESIDENT, "demo", ("transformers", "llama-cpp", "llama-cpp-f32")),
        Comparison(MIXED, "demo", ("transformers", "llama-cpp", "llama-cpp-f32")),
        Comparison(OFFLOAD_SHORT, "opt-1.3b", ("accelerate-disk",), "float16", 2 * 10**9),
        Comparison(OFFLOAD_LONG, "opt-1.3b", ("accelerate-disk",), "float16", 2 * 10**9),
        Comparison(
            OFFLOAD_LLAMA, "llama-1.1b", ("accelerate-disk", "airllm", "llama-cpp"), "float16", 16 * 10**8,
        ),
        Comparison(HYBRID_EXPERTS, "qwen3.5-moe-2.7b", ("accelerate-disk",), "bfloat16", 2 * 10**9, peer_tokens=3),
        Comparison(HYBRID_MAMBA, "nemotron-h-2.7b", ("accelerate-disk",), "bfloat16", 2 * 10**9, peer_tokens=3),
        Comparison(RESIDENT_LLAMA, "llama-1.1b", ("transformers",), "float32"),
        Comparison(LONG_PROMPTS, "demo", ("openvino-f32", "openvino-bf16", "openvino")),
        Comparison(LONG_CONTEXT, "demo", ("openvino-f32", "openvino-bf16", "openvino")),
        Comparison(
            GPU_OFFLOAD, "opt-13b", ("accelerate-cpu", "accelerate-disk", "flexgen", "deepspeed"), "float16",
            device="cuda", device_mem="16GiB",
        ),
        Comparison(SMOKE, "opt-tiny", ("transformers", "accelerate-disk")),
    )
}  # fmt: skip
GPU = (
    GpuCase(Case("opt-13b, all weights streamed", 64, fixed(128), fixed(32))),
    GpuCase(Case("opt-13b, all weights streamed, long prompts", 16, fixed(512), fixed(32)), gpu_batch_size=8),
    GpuCase(Case("opt-13b, engine's own policy", 64, fixed(128), fixed(32)), weights=None),
)
