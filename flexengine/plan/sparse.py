"""Whether sparse attention makes a job longer."""

from dataclasses import replace

from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.formatting import digits

MIN_SPARSE_LOSS = 1.03  # a job that sparse attention makes longer by this factor has a warning


def sparse_factor(cost: Cost, prediction: Prediction) -> float:
    """Return the predicted seconds of a job with sparse attention over those of the same policy without it; 1 if the
    model has none, or the policy does not fit without it."""
    model, hardware = cost.model, cost.hardware
    if model.topk is None:
        return 1.0
    dense = replace(model, topk=None)
    names = [(dense.attention_signature(w), model.attention_signature(w)) for w in model.attended]
    measured = {name: hardware.attention[known] for name, known in names if known in hardware.attention}
    hardware = replace(hardware, attention={**measured, **hardware.attention})
    without = Cost(dense, hardware, cost.workload, cost.overlap).of(prediction.policy, hardware.capacity)
    return prediction.seconds / without.seconds if without is not None else 1.0


def sparse_warning(cost: Cost, prediction: Prediction) -> str:
    """Return the warning that sparse attention makes a job longer; "" if it does not."""
    if (factor := sparse_factor(cost, prediction)) < MIN_SPARSE_LOSS:
        return ""
    return (
        f"sparse attention is predicted to make this job {digits(factor)} times as long: it loads fewer values, but the"
        " device waits for each layer's; leave --sparse-attention out"
    )
