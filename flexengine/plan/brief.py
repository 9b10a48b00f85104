"""A plan in one line."""

from flexengine.plan.cost import Cost
from flexengine.plan.explain import KINDS, holder, kind_bytes, waits_for
from flexengine.plan.prediction import Prediction
from flexengine.plan.problem import fraction
from flexengine.plan.words import clock, count, digits, percent, size


def plan_line(cost: Cost, prediction: Prediction) -> str:
    """Return where weights and KV cache lie, the block, the bottleneck and, if rates are measured, the time."""
    policy, shared = prediction.policy, cost.hardware.shared
    sizes = kind_bytes(cost.model, cost.workload, prediction)
    batches = 1 if policy.schedule == "row" else policy.num_gpu_batches
    parts = [f"{kind} {size(sizes[kind])} ({_places(prediction, KINDS[kind], shared)})"
             for kind in ("weights", "KV cache")]  # fmt: skip
    block = count(batches * policy.gpu_batch_size, "sequence", "sequences")
    parts += [f"block of {block} ({count(batches, 'gpu_batch', 'gpu_batches')})",
              f"bottleneck: {waits_for(prediction.bottleneck, shared)}"]  # fmt: skip
    if cost.hardware.measured:
        rate = prediction.tokens / prediction.total_seconds
        parts.append(f"predicted: at most {clock(prediction.total_seconds)}, {digits(rate)} tok/s")
    return f"plan: {'; '.join(parts)}"


def _places(prediction: Prediction, kind: str, shared: bool) -> str:
    """Return the places of a kind of data, with shares if there are several."""
    places = prediction.layout.places
    shares = {place: prediction.fractions.get(fraction(kind, place), 0.0) for place in places}
    used = {holder(prediction, place, shared): x for place, x in shares.items() if x > 0}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{place} {percent(x)}" for place, x in used.items())
