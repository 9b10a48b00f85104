"""Explain attention workers in a plan: bytes over their links, the bandwidth that hides them, and where they pay.

The numbers are means of a decode sweep (of a prefill sweep if there is no other): seconds of its lanes, as the cost
model predicts them. A link hides under two conditions: its transfers take less time than the products of the block
(Lamina, arXiv 2405.01814, section 3.2), and the attention of one gpu_batch is back before the device has computed the
others.

They pay at the context lengths at which keeping the KV cache at workers beats keeping it near, by predicted seconds.
Both sides run the same number of rows with the same tokens to generate, with the plan's block. The near side has the
whole cache on the device, or on the host with and without delegation, whichever is predicted to be fastest. Each side
holds as many sequences as its memory has room for, so long contexts shrink the block of the near side first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexengine.places import DEVICE, place_of, workers_of
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.delegation import LOG_SUM_BYTES, Crossing
from flexengine.plan.facts import ModelFacts
from flexengine.plan.formatting import digits, duration, size
from flexengine.plan.hardware import Hardware, at
from flexengine.plan.min_memory import planned
from flexengine.plan.terms import CACHE, fraction
from flexengine.plan.workload import Workload
from flexengine.policy import HOST_CACHE, NO_CACHE, REQUESTS, TOKENS, Policy

SHORTEST, LONGEST = 16, 1 << 17  # prompt tokens that are tried
CLOSE = 1.02  # ratio of two lengths that count as one
NEGLIGIBLE = 0.01  # share of a sweep
ROUNDING = 1e-9  # relative difference of seconds that may be one of rounding, which depends on the CPU


class PromptRange(NamedTuple):
    """Lengths of prompts, in tokens. last: None for no end among the lengths that are tried."""

    first: int
    last: int | None


def near(cost: Cost, policy: Policy) -> Prediction | None:
    """Return the fastest prediction of a policy with its KV cache near; None if none fits."""
    caches = [((1.0, 0.0, 0.0), NO_CACHE)]  # and the sequences whose attention is delegated
    caches += [] if cost.hardware.shared else [((0.0, 1.0, 0.0), NO_CACHE), ((0.0, 1.0, 0.0), HOST_CACHE)]
    alone = replace(policy, cache=(1, 0, 0), delegate=NO_CACHE, partition=REQUESTS, queries_first=False)
    others = (replace(alone, cache=cache, delegate=delegate) for cache, delegate in caches)
    found = (cost.of(other, planned(cost.hardware.capacity)) for other in others)
    return min(filter(None, found), key=lambda p: p.total_seconds, default=None)


def span(model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy) -> list[PromptRange]:
    """Return the lengths of prompts for which a policy with attention workers beats the same policy without them."""
    output = max(1, round(sum(n * times for (_, n), times in workload.sizes.items()) / max(1, workload.count)))

    def workers_win(prompt: int) -> bool | None:
        """Return whether workers are faster; None if no side has room for one prompt."""
        cost = Cost(model, hardware, Workload({(prompt, output): max(1, workload.count)}))
        far, other = cost.of(policy, planned(hardware.capacity)), near(cost, policy)
        if far is None or max(map(far.layout.room, workers_of(far.layout.pools)), default=0) < prompt + output:
            return None if other is None else False
        return other is None or far.total_seconds < other.total_seconds * (1 - ROUNDING)

    return list(spans(workers_win))


def spans(wins: Callable[[int], bool | None]) -> Iterator[PromptRange]:
    """Yield the lengths for which a condition holds: found at powers of two, their ends by bisection. wins: the
    condition at a length; None beyond the last length that can be asked."""
    first, low, before, length = 0, 0, False, SHORTEST
    while length <= LONGEST and (after := wins(length)) is not None:
        if after != before:
            high = length
            while low and high > low * CLOSE and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if bool(wins(middle)) == before else (low, middle)
            if after:
                first = high
            else:
                yield PromptRange(first, high)
        low, before, length = length, after, 2 * length
    if before:
        yield PromptRange(first, None)


def token_bytes(model: ModelFacts, partition: str, workers: int) -> int:
    """Return the bytes of one token and layer over all links. With partition `tokens`, every worker gets the queries,
    and sends an output and a log-sum-exp per head."""
    if partition != TOKENS:
        return model.sent + model.fetched
    queries = model.fetched  # as many bytes as the output
    return model.sent + (workers - 1) * queries + workers * (model.fetched + LOG_SUM_BYTES * model.heads)


def least_bandwidth(nbytes: float, layers: int, block: float, seconds: float) -> float:
    """Return Lamina's minimum bandwidth: the bytes per second at which transfers take as long as products.

    Args:
        nbytes: bytes of a token and layer: (2 + 2/G) e d.
        block: sequences whose attention is at workers.
        seconds: of the products of one step.
    """
    return nbytes * block * layers / seconds


@dataclass(frozen=True)
class WorkerLinks:
    """Work in one layer of a mean sweep, in seconds, and the links to the workers."""

    computing: float  # of the device, for all gpu_batches
    loading: float  # of the busiest other lane that belongs to no worker, such as reads of weights
    moving: float  # transfers of the busiest worker, both ways
    attending: float  # attention of the busiest worker, with the handling of its questions
    away: float  # from the question of one gpu_batch to its answer
    batches: float  # gpu_batches that decode
    asked: float  # gpu_batches whose attention is at workers
    sequences: float  # sequences that decode
    handling: float  # of one question by a worker
    reading: float  # attention of the busiest worker, without the handling
    partition: str  # how the workers share the work, as in `Policy`
    rate: float  # bytes per second of the slowest worker's link, as the plan counts
    measured: bool  # whether the machine has rates of these links; else they are those of copies to the device
    least: float  # `least_bandwidth` of all links together
    token_bytes: int  # bytes of a token over all links
    workers: int

    @staticmethod
    def of(model: ModelFacts, hardware: Hardware, prediction: Prediction) -> "WorkerLinks | None":
        """Return the links of a prediction; None if workers attend to nothing."""
        policy = prediction.policy
        kind = "decode" if prediction.counts["decode"] > 0 else "prefill"
        layer = {lane: x / len(model.layers) for lane, x in prediction.lanes[kind].items()}
        lanes = ((w, [layer.get(lane, 0.0) for lane in w.attention]) for w in workers_of(hardware.places))
        work = {w: times for w, times in lanes if times[0]}
        if not work:
            return None
        share = sum(prediction.fractions[fraction(CACHE, w)] for w in work)
        members = {worker for w in work for worker in policy.team(w, hardware.places)}
        handling = (1 + policy.queries_first) * hardware.worker_seconds

        def question_seconds(worker: str) -> float:
            """Return the seconds of a gpu_batch's question on a worker's lane, as the cost model counts them."""
            crossing, lane = Crossing.of(model, hardware, policy, worker), place_of(worker).attention[0]
            sent = crossing[:2] if policy.queries_first else (crossing.queries + crossing.keys,)
            each = [policy.gpu_batch_size * nbytes for nbytes in sent]
            return float(sum(hardware.link_seconds(lane, nbytes, nbytes) for nbytes in each))

        asked = {w: times[0] / question_seconds(w) for w, times in work.items()}
        rates = [at(hardware.lane_rates(place_of(w).attention[0]), policy.gpu_batch_size * model.sent) for w in members]
        total, nbytes = sum(asked.values()), token_bytes(model, policy.partition, len(members))
        reading = max(times[1] - handling * asked[w] for w, times in work.items())
        # A gpu_batch asks one worker, or all of them if each holds a part of every sequence.
        asked = {w: max(1.0, n if policy.partition == REQUESTS else total) for w, n in asked.items()}
        batches = sum(asked.values()) if policy.partition == REQUESTS else max(asked.values())
        own = {lane for w in workers_of(hardware.places) for lane in (*w.lanes, *w.links, *w.attention)}
        others = [x for lane, x in layer.items() if lane != DEVICE and lane not in own]
        return WorkerLinks(
            computing=layer[DEVICE], loading=max(others, default=0.0),
            moving=max(down + up for down, _, up in work.values()),
            attending=max(attention for _, attention, _ in work.values()),
            away=max(sum(work[w]) / n for w, n in asked.items()), batches=batches / share, asked=batches,
            sequences=total * policy.gpu_batch_size / share, partition=policy.partition, rate=min(rates),
            handling=handling, reading=max(0.0, reading),
            least=least_bandwidth(nbytes, 1, total * policy.gpu_batch_size, layer[DEVICE]),
            token_bytes=nbytes, measured=members <= set(hardware.worker_links), workers=len(members),
        )  # fmt: skip

    @property
    def working(self) -> float:
        """Seconds of the layer without any wait for workers: of products, or of loads if they take longer."""
        return max(self.computing, self.loading)

    @property
    def meanwhile(self) -> float:
        """Seconds of the layer in which the device need not compute the gpu_batch whose attention is away."""
        return self.working - self.computing / self.batches

    @property
    def longest(self) -> str:
        """The work that takes longest in a layer."""
        device = {"products": self.computing, "loads": self.loading}
        times = device | {"transfers": self.moving, "attention": self.attending}
        return max(times, key=lambda name: times[name])

    @property
    def hides(self) -> bool:
        """Whether the device waits for no worker, or for less than `NEGLIGIBLE` of the time."""
        waits = self.away - self.meanwhile
        return self.longest in ("products", "loads") and waits < NEGLIGIBLE * self.working


def worker_words(model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction) -> list[str]:
    """Return lines on the attention workers of a plan; [] if there are none."""
    links = WorkerLinks.of(model, hardware, prediction)
    if links is None:
        return []
    assumed = "" if links.measured else " if as fast as copies to the device"
    return [
        f"Workers     {_bytes(model, prediction.policy.partition, links)}",
        f"            products hide their links from {size(links.least)}/s on, {size(links.least / links.workers)}/s"
        f" for each worker; a link carries {size(links.rate)}/s{assumed}",
        f"            a layer of a sweep: products {duration(links.computing)}, transfers of a worker"
        f" {duration(links.moving)}, its attention {duration(links.attending)}",
        f"            {_verdict(links)}",
        f"            {_crossing(span(model, hardware, workload, prediction.policy))}",
    ]


def price_words(model: ModelFacts, hardware: Hardware, workload: Workload, prediction: Prediction) -> list[str]:
    """Return a line on tokens per second and unit of price; [] if the hardware has no prices."""
    if not hardware.prices:
        return []
    works = bool(prediction.policy.works)

    def per_price(prediction: Prediction, price: float, which: str = "") -> str:
        if not price:
            return f"no place{which} has a price"
        return f"{digits(prediction.tok_s / price)} tok/s per unit of price{which} (places cost {digits(price)})"

    line = per_price(prediction, hardware.price(works))
    if works and (other := near(Cost(model, hardware, workload), prediction.policy)) is not None:
        line += f"; {per_price(other, hardware.price(False), ' without workers')}"
    return [f"Price       {line}"]


def _bytes(model: ModelFacts, partition: str, links: WorkerLinks) -> str:
    group, e = model.heads // model.kv_heads, model.itemsize
    form = "4 e d" if group == 1 else "(2 + 2/G) e d"
    if partition == TOKENS:
        form = "(2 n + 2/G) e d + 4 n h"
    values = {"e": e, "d": model.heads * model.head_dim, "G": group, "n": links.workers, "h": model.heads}
    known = ", ".join(f"{name} {value:,}" for name, value in values.items() if name in form)
    return f"a token moves {links.token_bytes:,} bytes per layer over the links: {form}, with {known}"


def _verdict(links: WorkerLinks) -> str:
    if links.hides:
        return (
            f"the link hides: {links.longest} take longest, and attention of a gpu_batch is back after"
            f" {duration(links.away)} of {duration(links.meanwhile)} until the device needs it"
        )
    if links.longest == "transfers":
        return "the link does not hide: its transfers take longest"
    if links.longest == "attention":
        return "the device waits for workers: their attention takes longest"
    return (
        f"the device waits for workers: {links.longest} take longest, but attention of a gpu_batch is back after"
        f" {duration(links.away)}, and the device needs it after {duration(links.meanwhile)}; more gpu_batches"
        " help"
    )


def _crossing(found: Sequence[PromptRange]) -> str:
    if not found:
        return "by predicted seconds, this job is faster with its KV cache near, for prompts of any length"
    shown = [
        f"from {s.first:,} tokens on" if s.last is None else f"from {s.first:,} to {s.last:,} tokens" for s in found
    ]
    return f"by predicted seconds, this job is faster than with its KV cache near for prompts {', and '.join(shown)}"
