"""Bytes and seconds of states beside keys and values: records, which are pages that never fill. The same of indexers,
which choose the keys that a token sees (model/adapters/sparse.py)."""

from collections.abc import Iterator
from dataclasses import replace

from flexengine.errors import InvalidInput, size
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.terms import Sweeping, Term
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

SCORES = 64 << 20  # bytes of an indexer's scores, and of gathered K and V, as in model/adapters/sparse.py
_SCORED, _GATHERED = 3, 2  # tensors of scores by head at once; times that chosen K and V are read or written
_SEEN = 40  # bytes for each key that a token of DeepSeek V4 sees: five int64 tensors, while they are sorted
# Bytes of scores, and of the numbers that are added to them by distance, at once, unless those of a single query take
# more; and tensors of both (worker/cache/distances.py).
ADDED, ADDED_COPIES = 64 << 20, 5


def fitting(model: ModelFacts, policy: Policy, workload: Workload, capacity: Capacity) -> Policy:
    """Return the policy with prompts cut at multiples of the model's grain: of two or more of them, so that a later
    piece need not have a single token (`schedule.grain`). Raise InvalidInput if it delegates
    attention, or the machine has attention workers, or if keys are chosen from an encoded cache, or of some values."""
    workers = any(place_of(place).worker for place in capacity.places)
    if policy.delegates or workers:
        other = "attention workers" if workers else f"policy delegate {policy.delegate}"
        kept = "it keeps states beside keys and values, and layers with a state"
        kept = kept if model.states else "its tokens see keys that an indexer chooses, and layers with one"
        raise InvalidInput(
            f"{other} cannot be used with this model: {kept} are computed on the device only; leave it out"
        )
    encoded = model.kv_form if model.kv_form != "bf16" else ""
    if model.chooses(workload.longest) and (encoded or model.topk is not None):
        other = f"a KV cache in {encoded}" if encoded else f"sparse attention of {model.topk:g}"
        fault = f"{other} cannot be used with rows of {workload.longest} tokens of this model: each token sees"
        raise InvalidInput(f"{fault} {model.choosing[0]} keys that an indexer chooses; leave it out, or shorten rows")
    if model.added and (encoded or model.topk is not None):
        other = f"a KV cache in {encoded}" if encoded else f"sparse attention of {model.topk:g}"
        fault = f"{other} cannot be used with this model: its attention adds numbers to scores"
        raise InvalidInput(f"{fault}, and is computed over plain keys and values only; leave it out")
    if not model.states:
        return policy
    tokens = max(2 * model.grain, policy.prefill_tokens // model.grain * model.grain)
    return policy if tokens == policy.prefill_tokens else replace(policy, prefill_tokens=tokens)


def choosing_bytes(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return the most bytes that indexers take, and attention over the keys that they chose: an indexer's keys of a
    sequence, in pages and whole, its scores, K and V of chosen keys, and their numbers.

    Args:
        tokens: most tokens of a gpu_batch.
        longest: tokens of the longest sequence.
    """
    top, heads, size = model.choosing
    kept = 2 * tokens * size * model.itemsize  # of the tokens; beside their values
    if not model.chooses(longest):
        return kept
    numbers = 2 * 4
    if model.always_chooses:
        numbers, top = _SEEN, top + (longest // model.entry_tokens if model.entry_tokens else 0)
    row = 2 * model.kv_heads * model.head_dim * model.itemsize
    scores = max(SCORES, _SCORED * 4 * heads * longest)
    gathered = max(SCORES // row, top) * (row + 8 * (2 * model.kv_heads + 4))  # with numbers of rows and of places
    return kept + 3 * longest * size * model.itemsize + numbers * top * tokens + 8 * longest + max(scores, gathered)


def added_bytes(model: ModelFacts, tokens: int, longest: int) -> int:
    """Return the most bytes that attention takes which adds numbers to scores: K and V of a sequence, in pages and
    joined, and scores. Arguments as in `choosing_bytes`."""
    row = 2 * model.kv_heads * model.head_dim * model.itemsize
    scores = max(ADDED, ADDED_COPIES * 4 * (model.heads * longest + model.added))
    return 3 * longest * row + scores + tokens * model.heads * model.head_dim * model.itemsize


def terms(data: Sweeping, longest: int) -> Iterator[Term]:
    """Yield the seconds of the device for decode steps of modules with states, beside their products, which are
    measured as those of a prompt; and for scores of indexers, which are read and written three times by head, and the
    K and V that they choose, which are gathered; tokens of prompts read them once more than `terms.parts` knows, as
    decode steps; and for scores to which numbers are added, and copies of K and V for them. longest: tokens of the
    longest sequence."""
    model, sweeps = data.model, data.sweeps
    layers = sum(nbytes > 0 for nbytes in model.states)
    yield Term("device", "", "", sweeps.decoding * layers * state_seconds(model, data.hardware))
    if model.choosing:
        top, heads, _ = model.choosing
        scored = 2 * _SCORED * 4 * heads * (sweeps.cached.get(None, 0.0) + sweeps.pairs.get(None, 0.0))
        read = top * 2 * model.kv_heads * model.head_dim * model.itemsize
        moved = scored + read * (_GATHERED * sweeps.decoding + (_GATHERED + 1) * sweeps.prompt)
        layers = model.attended.count(None) if model.chooses(longest) else 0
        yield Term("device", "", "", layers * moved / data.hardware.elementwise)
    if model.added:
        scored, row = 2 * ADDED_COPIES * 4 * model.heads, 2 * model.kv_heads * model.head_dim * model.itemsize
        cached = sum((sweeps.cached[window] for window in model.attended), start=0.0 * sweeps.times)
        pairs = sum((sweeps.pairs[window] for window in model.attended), start=0.0 * sweeps.times)
        moved = scored * (cached + pairs) + 3 * row * cached
        yield Term("device", "", "", moved / data.hardware.elementwise)


def state_seconds(model: ModelFacts, hardware: Hardware) -> float:
    """Return the seconds of a decode step of a sequence in a layer, beside its products. The states, each number of the
    step's temporary tensors, and of copies of the states if no kernel changes them in place, are read and written once:
    of a gated delta rule of 32 heads of 128 x 128, that is 0.5 ms at 10 GB/s, without kernels 2.2 ms."""
    return 2 * model.mixing[4] / hardware.elementwise


def words(model: ModelFacts) -> list[str]:
    """Return a line on the states for a plan; none if the model has no states."""
    if not any(model.states):
        return []
    layers = sum(nbytes > 0 for nbytes in model.states)
    text = f"each sequence has {size(sum(model.states))} of states, in {layers} of {len(model.states)} layers"
    return [f"            {text}; they are kept and moved with its KV cache"]


def make_room(layout: Layout) -> None:
    """Enlarge the buffers of a layout for layers with both keys and values and a state: there, records follow the
    pages."""
    layers = {j for group in layout.groups for j in group.layers}
    if not any(~j in layers for j in layers):
        return
    kinds = {False: 0, True: 0}  # bytes of pages, and of records, of one layer
    for tier, pools in layout.pools.items():
        for group, pool, page in zip(layout.groups, pools, layout.page_bytes[tier], strict=True):
            kinds[group.state > 0] = max(kinds[group.state > 0], (pool.batch_pages or 0) * page)
    layout.beside = kinds[False]
    layout.cache_buffer = sum(kinds.values())
    layout.cache_stage = layout.cache_stage and layout.cache_buffer
