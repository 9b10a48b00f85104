"""The error of policies that do not fit, which names the missing memory."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial

from flexengine.errors import ONE_SEQUENCE, OutOfMemory, TooLittle
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import booked_parts, lay_out
from flexengine.plan.min_memory import SHORTEST, laid_out
from flexengine.plan.sizes import ALIGN
from flexengine.plan.workload import Workload
from flexengine.policy import Policy


def too_little(model: ModelFacts, policies: Sequence[Policy], workload: Workload, capacity: Capacity) -> TooLittle:
    """Return the error for policies that do not fit.

    If more memory of a single tier is enough, the error names the tier that lacks the fewest bytes. Else it names all
    tiers that must grow, with the device as small as possible.
    """
    least_of = partial(least_bytes, model, policies, workload)
    given = {place: limit for place, limit in capacity.limits.items() if limit is not None}
    single = {tier: least for tier in given if (least := least_of(capacity, tier)) is not None}
    if single:
        tier = min(single, key=lambda t: single[t] - given[t])
        needs = {tier: single[tier]}
    else:
        needs, room = {}, capacity.limited(dict.fromkeys(given))
        for tier in given:  # smallest size of each tier while later tiers have no limit
            least = least_of(room, tier)
            if least is not None and least > given[tier]:
                needs[tier] = least
            room = room.limited({tier: needs.get(tier, given[tier])})
    enough = capacity.limited(needs)
    layout = next(filter(None, (laid_out(model, policy, workload, enough) for policy in policies)))
    parts, first = {tier: booked_parts(layout, tier, capacity, needs[tier]) for tier in needs}, next(iter(needs))
    if len(policies) > 1 and any(laid_out(model, policy, SHORTEST, capacity) for policy in policies):
        what = f"{ONE_SEQUENCE} of {workload.longest:,} tokens, with weights and buffers beside it"
    else:
        errors = []
        for policy in policies:
            try:
                lay_out(model, policy, workload, capacity)
            except OutOfMemory as error:
                errors.append(error)
        what = min((e for e in errors if e.tier == first), key=lambda e: e.needed + e.used, default=errors[0]).what
    return TooLittle(what, needs, given, parts, capacity.engines)


def least_bytes(
    model: ModelFacts, policies: Iterable[Policy], workload: Workload, capacity: Capacity, tier: str
) -> int | None:
    """Return the fewest bytes of a tier for which a policy fits, other capacities unchanged; None if none does."""
    fewest: int | None = None
    for policy in policies:
        layout = laid_out(model, policy, workload, capacity.limited({tier: None}))
        if layout is None:
            continue

        def fits(nbytes: int, policy: Policy = policy) -> bool:
            return laid_out(model, policy, workload, capacity.limited({tier: nbytes})) is not None

        most = layout.total(tier) + (layout.total("host") if capacity.shared and tier == "device" else 0)
        most += ALIGN  # KV pages leave ALIGN bytes of a limited tier free
        if fewest is None or fits(min(fewest - 1, most)):
            fewest = bisect_left(range(min(most, fewest or most)), True, key=fits)
    return fewest
