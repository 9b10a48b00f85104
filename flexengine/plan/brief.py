"""A plan in one line."""

from flexengine.places import lane_of
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import clock, count, digits, percent, place_name, size, worker_lane
from flexengine.plan.prediction import CACHE, HIDDEN, WEIGHTS, Prediction
from flexengine.plan.workload import Workload

KINDS = {"weights": WEIGHTS, "KV cache": CACHE, "hidden states": HIDDEN}  # name in the report -> kind of data


def plan_line(cost: Cost, prediction: Prediction) -> str:
    """Return where weights and KV cache lie, the block, the bottleneck and, if rates are measured, the time."""
    policy, shared = prediction.policy, cost.hardware.shared
    sizes = kind_bytes(cost.model, cost.workload, prediction)
    batches = 1 if policy.schedule == "row" else policy.num_gpu_batches
    parts = [
        f"{kind} {size(sizes[kind])} ({_places(prediction, KINDS[kind], shared)})" for kind in ("weights", "KV cache")
    ]
    block = count(batches * policy.gpu_batch_size, "sequence", "sequences")
    parts += [
        f"block of {block} ({count(batches, 'gpu_batch', 'gpu_batches')})",
        f"bottleneck: {waits_for(prediction.bottleneck, shared)}",
    ]
    if cost.hardware.measured:
        rate = prediction.tokens / prediction.total_seconds
        parts.append(f"predicted: at most {clock(prediction.total_seconds)}, {digits(rate)} tok/s")
    return f"plan: {'; '.join(parts)}"


def _places(prediction: Prediction, kind: str, shared: bool) -> str:
    """Return the places of a kind of data, with shares if there are several."""
    used = {holder(prediction, place, shared): x for place, x in prediction.shares(kind).items() if x > 0}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{place} {percent(x)}" for place, x in used.items())


def holder(prediction: Prediction, place: str, shared: bool) -> str:
    """Return the name of a place; of an attention worker that stands for all that share its sequences, all names."""
    team = prediction.policy.team(place, prediction.layout.places)
    return f"{team[0]} to {team[-1]}" if len(team) > 1 else place_name(place, shared)


def kind_bytes(model: ModelFacts, workload: Workload, prediction: Prediction) -> dict[str, int]:
    """Return the bytes of each kind: weights as stored, all pages of the KV cache, most hidden states of a sweep."""
    account, block = prediction.layout.account, prediction.policy.block_size
    tokens = workload.prompt_tokens(block) + min(block, workload.count)
    return {
        "weights": sum(t.stored_bytes for t in model.tensors),
        "KV cache": sum(booked.get("KV cache", 0) for booked in account.values()),
        "hidden states": tokens * model.hidden * model.itemsize,
    }


def waits_for(lane: str, shared: bool) -> str:
    """Return the work of a lane in words, as an object of "waits for"."""
    if shared and lane == "h2d":
        return "copies of weights from RAM to a slot"
    known = lane_of(lane)
    if known.of_disk:
        return f"reads from {known.place}" if known.way == "read" else f"writes to {known.place}"
    if known.of_worker:
        return worker_lane(known)
    return {"h2d": "the link from host to device", "d2h": "the link from device to host", "device": "computing",
            "cpu": "computing on the host"}[known.link]  # fmt: skip
