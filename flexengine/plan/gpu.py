"""GPU memory that kernels and libraries take beside activations."""

from flexengine.plan.facts import ModelFacts

BUFFER = 64 << 20  # bytes of a kernel's scratch memory, as in kernels/cuda.py
GATHERED = 32  # bytes of scratch per element of K and V in plain torch attention, as in kernels/cuda.py
MAX_FUSED_HEAD_DIM = 256  # most elements of a head in fused attention, as in kernels/triton_attention.py
SPAN_TOKENS = 512  # tokens of one partial result of fused attention, as in kernels/triton_attention.py
MIN_GROUP_COLUMNS = 32  # fewest columns of x that share a scale if x is rounded to 8 bits
CONVERTED = 16 << 20  # bytes of host elements that are converted on the GPU at once, as in tier/cuda.py
BLOCK_QUERIES = 1024  # queries per call of attention within a window, as in kernels/reference.py
CUBLAS = 64 << 20  # bytes of workspaces: at most 32 MiB for each of two streams that multiply


def buffers(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return the bytes that kernels and libraries hold at once on a GPU, beside activations and logits.

    Args:
        tokens: most tokens of a gpu_batch.
        longest: most cached tokens of a sequence.
    """
    partial = 4 * model.heads * -(-longest // SPAN_TOKENS) * (model.head_dim + 1)  # one sequence is never divided
    plain = model.topk is not None or model.head_dim > MAX_FUSED_HEAD_DIM
    gathered = GATHERED * 2 * model.kv_heads * model.head_dim * longest if plain else 0
    wide = max(model.width, model.hidden)
    groups = -(-wide // MIN_GROUP_COLUMNS)  # each has a scale and a sum
    codes = tokens * (wide + MIN_GROUP_COLUMNS + 8 * groups) if model.rounds_activations else 0
    experts = tokens * model.active * _expert_elements(model) * model.itemsize
    converted = CONVERTED if model.converts_weights else 0
    copies = 2 * model.heads * model.head_dim * model.itemsize * tokens if model.heads > model.kv_heads else 0
    attention = max(BUFFER, partial, gathered, copies, _windowed(model, tokens, longest))
    return attention + codes + experts + converted + CUBLAS


def _windowed(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return the bytes of prompt attention within a window, for the window that takes most.

    K and V of all prompts longer than the window are copied for every query head, and there are two masks.
    """
    most = 0
    for window in {w for w in model.windows if w is not None and w < longest}:
        keys, prompts = min(window + BLOCK_QUERIES, longest), max(1, tokens // (window + 1))
        copies = 2 * model.heads * model.head_dim * model.itemsize * prompts
        most = max(most, keys * (copies + BLOCK_QUERIES * (1 + model.itemsize)))
    return most


def _expert_elements(model: ModelFacts) -> int:
    """Return the elements held per token and chosen expert if all experts are computed in one call.

    These are four copies of the token (before, after, weighted, reordered), and input and output of the gate, with
    copies.
    """
    wide = model.expert_width
    return 4 * model.hidden + 2 * wide if wide else 0
