"""Bytes and seconds of states beside keys and values: records, which are pages that never fill."""

from collections.abc import Iterator
from dataclasses import replace

from flexengine.errors import InvalidInput, size
from flexengine.places import place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity, Hardware
from flexengine.plan.layout import Layout
from flexengine.plan.terms import Sweeping, Term
from flexengine.policy import Policy


def fitting(model: ModelFacts, policy: Policy, capacity: Capacity) -> Policy:
    """Return the policy with prompts cut at multiples of the model's grain: of two or more of them, so that a later
    piece need not have a single token (`schedule.grain`). Raise InvalidInput if it delegates
    attention, or the machine has attention workers."""
    workers = any(place_of(place).worker for place in capacity.places)
    if policy.delegates or workers:
        other = "attention workers" if workers else f"policy delegate {policy.delegate}"
        fault = f"{other} cannot be used with this model: it keeps states beside keys and values"
        raise InvalidInput(f"{fault}, and layers with a state are computed on the device only; leave it out")
    tokens = max(2 * model.grain, policy.prefill_tokens // model.grain * model.grain)
    return policy if tokens == policy.prefill_tokens else replace(policy, prefill_tokens=tokens)


def terms(data: Sweeping) -> Iterator[Term]:
    """Yield the seconds of the device for decode steps of modules with states, beside their products, which are
    measured as those of a prompt."""
    layers = sum(nbytes > 0 for nbytes in data.model.states)
    yield Term("device", "", "", data.sweeps.decoding * layers * state_seconds(data.model, data.hardware))


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
