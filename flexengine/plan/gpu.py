"""GPU memory that computing takes beside activations: what kernels and libraries hold while they run."""

from flexengine.plan.facts import ModelFacts

BUFFER = 64 << 20  # bytes that a kernel holds at once, as kernels.cuda says
GATHERED = 32  # bytes per element of K and V that plain torch gathers and decodes, as kernels.cuda says
WIDEST = 256  # elements of a head that the fused attention takes, as kernels.triton_attention says
SPAN = 512  # tokens that one of its partial results is for
GROUP = 32  # least columns of x that share a scale where it is rounded to 8 bits
CONVERTED = 16 << 20  # bytes of the host's elements that are converted on the GPU at once, as tier.cuda says
BLOCK = 1024  # queries of a prompt that attend together within a window, as kernels.reference says
CUBLAS = 64 << 20  # of its workspaces: at most 32 MiB for each of two streams that multiply


def buffers(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return bytes that kernels and libraries hold at once on a GPU, beside activations and logits.

    Args:
        model: its shape.
        tokens: most tokens of a gpu_batch.
        longest: most cached tokens of a sequence.
    """
    partial = 4 * model.heads * -(-longest // SPAN) * (model.head_dim + 1)  # of one sequence, which is not divided
    plain = model.topk is not None or model.head_dim > WIDEST
    gathered = GATHERED * 2 * model.kv_heads * model.head_dim * longest if plain else 0
    wide = max(model.width, model.hidden)
    groups = -(-wide // GROUP)  # each has a scale and a sum
    codes = tokens * (wide + GROUP + 8 * groups) if model.rounds_activations else 0
    experts = tokens * model.active * _pair(model) * model.itemsize
    converted = CONVERTED if model.converts_weights else 0
    copies = 2 * model.heads * model.head_dim * model.itemsize * tokens if model.heads > model.kv_heads else 0
    attention = max(BUFFER, partial, gathered, copies, _windowed(model, tokens, longest))
    return attention + codes + experts + converted + CUBLAS


def _windowed(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return bytes of attention within a window: K and V of all prompts that are longer than it, copied for every query
    head, and two masks."""
    found = 0
    for window in {w for w in model.windows if w is not None and w < longest}:
        keys, prompts = min(window + BLOCK, longest), max(1, tokens // (window + 1))
        copies = 2 * model.heads * model.head_dim * model.itemsize * prompts
        found = max(found, keys * (copies + BLOCK * (1 + model.itemsize)))
    return found


def _pair(model: ModelFacts) -> int:
    """Return elements that one token and one of its experts take where all experts are computed in one call: the token
    before, after, weighted and back in order; input and output of the gate, with copies."""
    wide = model.expert_width
    return 4 * model.hidden + 2 * wide if wide else 0
