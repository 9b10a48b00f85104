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
    fused = model.topk is None and model.head_dim <= MAX_FUSED_HEAD_DIM
    gathered = 0 if fused else GATHERED * 2 * model.kv_heads * model.head_dim * longest
    wide = max(model.width, model.hidden)
    groups = -(-wide // MIN_GROUP_COLUMNS)  # each has a scale and a sum
    codes = tokens * (wide + MIN_GROUP_COLUMNS + 8 * groups) if model.rounds_activations else 0
    # All experts are computed in one call: of each token and chosen expert there are four copies (before, after,
    # weighted, reordered), and input and output of the gate, with copies.
    copied = 4 * model.hidden + 2 * model.expert_width if model.expert_width else 0
    experts = tokens * model.active * copied * model.itemsize
    converted = CONVERTED if model.converts_weights else 0
    copies = 2 * model.heads * model.head_dim * model.itemsize * tokens if model.heads > model.kv_heads else 0
    windowed = 0
    for window in {w for w in model.windows if w is not None and w < longest}:
        # K and V of all prompts longer than the window are copied for every query head, and there are two masks.
        keys, prompts = min(window + BLOCK_QUERIES, longest), max(1, tokens // (window + 1))
        key = 2 * model.heads * model.head_dim * model.itemsize * prompts + BLOCK_QUERIES * (1 + model.itemsize)
        windowed = max(windowed, keys * key)
    attention = max(BUFFER, partial, gathered, copies, windowed)
    return attention + codes + experts + converted + CUBLAS
