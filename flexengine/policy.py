"""The policy: block shape, splits over the tiers, and switches. A policy is also a JSON file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from flexengine.errors import InvalidInput, shown
from flexengine.places import DEVICE, HOST, MOST_DISKS, TIERS, WORKERS, place_names, place_of, workers_in_memory
from flexengine.records import Limit, check, check_argument, load, named_fields
from flexengine.words import python_words

SCHEDULES = ("row", "zigzag", "diagonal", "continuous")
FIXED, ROTATIONAL = ORDERS = ("fixed", "rotational")
REQUESTS, HEADS, TOKENS = PARTITIONS = ("requests", "heads", "tokens")
NO_CACHE, HOST_CACHE, ALL_CACHE = DELEGATES = ("none", "host", "all")

MAX_NUMBER = 1_000_000_000  # largest whole number in a policy
MOST_SLOTS = 1000  # more slots than any model has layers
MOST_SEQUENCES = 1_000_000  # most sequences of a block

Split = tuple[float, ...]  # a fraction for each place in PLACES, from near to far; at least device, host and disk
PLACES = (*place_names(MOST_DISKS), WORKERS)  # places that a split may name


def _split(name: str, value: Sequence[float] | Mapping[str, float]) -> Split:
    """Return the fractions without zeros of further places at the end, so that equal splits compare equal. Raise
    InvalidInput if they are no fractions that sum to 1. value: fractions in the order of places, or by name of the
    place."""
    if isinstance(value, Mapping):
        if unknown := [place for place in value if place not in PLACES]:
            raise InvalidInput(f"{name} has a share on {shown(unknown[0])}; it may have shares on"
                               f" {', '.join(PLACES)}")  # fmt: skip
        value = [value.get(place, 0.0) for place in PLACES]
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    numeric = not any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers)
    if not (numeric and len(TIERS) <= len(numbers) <= len(PLACES)):
        raise InvalidInput(f"{name} is {shown(value)}; it must be three fractions [device, host, disk], and one"
                           f" more for each further offload directory, {MOST_DISKS - 1} at most; or fractions by name,"
                           ' such as {"host": 0.5, "workers": 0.5}')  # fmt: skip
    if not (all(0 <= x <= 1 for x in numbers) and abs(sum(numbers) - 1) <= 1e-6):  # false for NaN too
        total = f", not {sum(numbers)}" if all(0 <= x <= MAX_NUMBER for x in numbers) else ""
        raise InvalidInput(f"{name} is {shown(numbers)}; fractions must be at least 0 and sum to 1{total}")
    while len(numbers) > len(TIERS) and not numbers[-1]:
        numbers.pop()
    return tuple(map(float, numbers))


def _delegate(name: str, value: object) -> object:
    """Return a value of DELEGATES. False is "none", and True stays for `Policy`. Raise InvalidInput for others."""
    value = NO_CACHE if value is False else value
    return value if value is True else check_argument(name, value, Annotated[str, DELEGATES])


_Count = Annotated[int, Limit(1, MAX_NUMBER)]
_CheckedSplit = Annotated[Split, _split]


def places_of(split: Split) -> tuple[str, ...]:
    """Return the places of a split, in the order of its fractions."""
    return PLACES[: len(split)]


def thousandths(fractions: Sequence[float]) -> Split:
    """Return fractions that sum to 1, in thousandths. The last place with a share gets the rest; the first disk does if
    no further disk has a share."""
    last = max(len(TIERS) - 1, max((k for k, x in enumerate(fractions) if x > 0), default=0))
    left, rounded = 1.0, list[float]()
    for x in fractions[:last]:
        rounded.append(min(max(0.0, round(x, 3)), left))
        left = max(0.0, round(left - rounded[-1], 3))
    return (*rounded, left)


def shares(split: Split) -> dict[str, float]:
    """Return the fractions of a split by place."""
    return dict(zip(places_of(split), split, strict=True))


def delegate_of(delegate: str, cache: Split) -> str:
    """Return the value of `Policy.delegate` that names no place without a share of the KV cache."""
    disks = any(share for place, share in shares(cache).items() if place_of(place).disk)
    if delegate == ALL_CACHE and disks:
        return ALL_CACHE
    return HOST_CACHE if delegate != NO_CACHE and cache[1] else NO_CACHE


@named_fields
@dataclass(frozen=True)
class Policy:
    """Block shape and placement of a job's tensors (FlexGen section 4.1; docs/architecture.md 2).

    Attributes:
        gpu_batch_size: sequences computed together.
        num_gpu_batches: gpu_batches in a block; block size = gpu_batch_size * num_gpu_batches.
        weights: fractions of the weights on (device, host, disk), which sum to 1. Further fractions are for the second
            offload directory, the third, and so on.
        cache: fractions of the KV cache, in the same form, or by name of the place. Place "workers" is the attention
            workers, each of which gets an equal part of this share, and computes attention over it.
        activations: fractions of the activations, in the same form.
        slots: number of buffers for streamed weights; 1 = no overlap, 2 = double buffering. KV cache and activations
            off the device have one buffer more if there is overlap.
        schedule: when sequences enter the block: row (one gpu_batch at a time), zigzag (all together), diagonal (one
            cohort per sweep) or continuous.
        prefill_tokens: most tokens of one gpu_batch in a sweep; limits the memory of activations. Models with states
            beside keys and values take 128 or more: two chunks of their modules.
        delegate: sequences whose decode attention the CPU computes: none, those with KV cache on the host, or all with
            KV cache off the device, whose pages on disks are read to host RAM. Queries, keys and values of new tokens
            then cross the link instead of pages (FlexGen section 4.2, "CPU computation"). True is read as "host" if the
            host has a share of the cache, else as "all".
        partition: what each attention worker holds (Lamina, section 3.4). requests: whole sequences; heads:
            some heads of all sequences; tokens: some tokens of all sequences, whose partial results are merged.
        neurons: share of the neurons of sparse feed-forward blocks whose weights stay on the device, if the others are
            read when they become active (LLM in a flash, section 3.3), or of the experts of each layer.
        half_layers: whether the weights that a layer uses up to attention, and its others, pass through a slot each, so
            that two slots take the bytes of one layer (FlexGen's --sep-layer). Layers whose attention is delegated
            give back the first slot before attention, and load the other one meanwhile.
        queries_first: whether attention workers get queries before keys and values are computed, and begin with the
            cached tokens (Lamina, section 3.4).
        order: which of several engines (`EngineOptions.engines`) computes a slice of a gpu_batch between two
            attentions: fixed, always the same one; rotational, one after the other (Lamina, section 3.3).

    Raises:
        InvalidInput: a value is not allowed; the message names the field, its value and the limit.

    Examples:
        >>> Policy(gpu_batch_size=32, num_gpu_batches=2, weights=(0.2, 0.8, 0), cache=(0, 1, 0))
        >>> Policy.load("policy.json")
    """

    gpu_batch_size: _Count = 16
    num_gpu_batches: _Count = 4
    weights: _CheckedSplit = (1.0, 0.0, 0.0)
    cache: _CheckedSplit = (1.0, 0.0, 0.0)
    activations: _CheckedSplit = (1.0, 0.0, 0.0)
    slots: Annotated[int, Limit(1, MOST_SLOTS)] = 2
    schedule: Annotated[str, SCHEDULES] = "continuous"
    prefill_tokens: _Count = 2048
    delegate: Annotated[str, _delegate] = NO_CACHE
    partition: Annotated[str, PARTITIONS] = REQUESTS
    queries_first: bool = False
    neurons: Annotated[float, Limit(0, 1), "a share from 0 to 1"] = 0.0
    half_layers: bool = False
    order: Annotated[str, ORDERS] = FIXED

    @python_words
    def __post_init__(self) -> None:
        check(self, "policy ")
        if cast(object, self.delegate) is True:
            object.__setattr__(self, "delegate", HOST_CACHE if self.cache[1] else ALL_CACHE)
        if self.block_size > MOST_SEQUENCES:
            shape = f"gpu_batch_size {self.gpu_batch_size} x num_gpu_batches {self.num_gpu_batches}"
            raise InvalidInput(f"policy {shape} is {self.block_size:,} sequences;"
                               f" a block must have at most {MOST_SEQUENCES:,}")  # fmt: skip
        for name in ("weights", "activations"):
            if shares(getattr(self, name)).get(WORKERS):
                raise InvalidInput(f"policy {name} has a share on {WORKERS}, which hold KV cache only; give that share"
                                   " to another place")  # fmt: skip
        if self.works and self.activations[0] < 1:
            raise InvalidInput(f"policy cache has a share on {WORKERS}, with activations {list(self.activations)};"
                               " hidden states must stay on the device while workers attend; set activations to"
                               " [1, 0, 0]")  # fmt: skip
        if self.partition != REQUESTS and not self.works:
            raise InvalidInput(f"policy partition is {self.partition}, but cache has no share on {WORKERS}; give it"
                               " one, or leave out partition")  # fmt: skip
        if self.half_layers and self.slots != 2:
            fault = f"half_layers is true with slots {self.slots}; the halves of layers have one slot each"
            raise InvalidInput(f"policy {fault}; set slots to 2, or half_layers to false")
        if self.queries_first and not self.works:
            raise InvalidInput(f"policy queries_first is true, but cache has no share on {WORKERS}; give it one, or set"
                               " queries_first to false")  # fmt: skip
        if self.delegates and delegate_of(self.delegate, self.cache) == NO_CACHE:
            where = "the host" if self.delegate == HOST_CACHE else "the host or a disk"
            fault = f"delegate is {self.delegate} with cache {list(self.cache)}, which has no share on {where}"
            raise InvalidInput(f"policy {fault}; give it one, or set delegate to another of {', '.join(DELEGATES)}")

    @property
    def places(self) -> tuple[str, ...]:
        """Return the places that have a share, from near to far."""
        weights = shares(self.weights)
        return tuple(place for place in PLACES if place in TIERS or self.spills(place) or weights.get(place, 0.0) > 0)

    @property
    def works(self) -> float:
        """Return the share of the KV cache that is on attention workers."""
        return shares(self.cache).get(WORKERS, 0.0)

    @property
    def delegates(self) -> bool:
        """Return whether the CPU computes decode attention of any sequences."""
        return self.delegate != NO_CACHE

    def spills(self, place: str) -> bool:
        """Return whether KV cache or activations have a share on a place."""
        return any(shares(split).get(place, 0.0) > 0 for split in (self.cache, self.activations))

    @property
    def block_size(self) -> int:
        """Return the most sequences alive at once. With schedule `row` these are one gpu_batch."""
        return self.gpu_batch_size * (1 if self.schedule == "row" else self.num_gpu_batches)

    def attends(self, cache_home: str) -> str:
        """Return the place that computes decode attention of sequences with KV cache on this tier: the place of an
        attender, or "device"."""
        if place_of(cache_home).worker:
            return cache_home
        homes = {NO_CACHE: False, HOST_CACHE: cache_home == HOST, ALL_CACHE: cache_home != DEVICE}
        return HOST if homes[self.delegate] else DEVICE

    def attended(self, homes: Iterable[str]) -> dict[str, str]:
        """Return, by tier of the KV cache, the place that computes decode attention, without tiers of the device's own
        attention. homes: tiers of the KV cache."""
        return {home: place for home in homes if (place := self.attends(home)) != DEVICE}

    def attended_by(self, place: str) -> str:
        """Return the place whose rate of attention counts for a place that computes attention: all workers together if
        each holds a part of every sequence."""
        return WORKERS if place_of(place).worker and self.partition != REQUESTS else place

    def team(self, home: str, places: Iterable[str]) -> tuple[str, ...]:
        """Return the attention workers that share the KV cache of a place: one, or all. () if the place is no worker.
        home: place of the KV cache. places: places of the machine."""
        if not place_of(home).worker:
            return ()
        return (home,) if self.partition == REQUESTS else workers_in_memory(places)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a policy file holds them."""
        fields = asdict(self)
        for name, split in fields.items():
            if isinstance(split, tuple):  # by name if some are on attention workers, whose place follows many disks
                named = {place: share for place, share in shares(split).items() if share}
                fields[name] = named if len(split) == len(PLACES) else list(split)
        return fields

    @staticmethod
    def load(path: str | Path) -> "Policy":
        """Read a policy file, or a shipped one by its name. Raise InvalidInput, which names the fault, for others."""
        return load(Policy, path, "policy file", "policies")
