"""Attenders: an attender computes the decode attention of gpu_batches in one place off the device.

Queries, keys and values of new tokens (the question) are copied to the place of the KV cache. The output of attention
(the answer) is copied back. FlexGen calls this CPU computation (section 4.2), Lamina attention offloading.

One layer of one gpu_batch has five calls, one per task of `schedule.program`. `Routes.attend` names the lanes of three
of these tasks, by place.

| call | task | lane |
|---|---|---|
| ask | PROJECT, after the layer's part before attention | device |
| send | SEND | Routes.attend[place][0] |
| attend | ATTEND | Routes.attend[place][1] |
| fetch | FETCH | Routes.attend[place][2] |
| answer | FINISH, before the rest of the layer | device |

If queries go first (`Batch.queries_first`), `ask` gets them alone, and three more calls follow `send`. Keys and values
are sent while the place computes attention over cached tokens. Only attention workers have these calls.

| call | task | lane |
|---|---|---|
| add | PROJECT_KEYS, after the layer's part before attention | device |
| send_added | SEND_KEYS | Routes.attend[place][0] |
| attend_cached | ATTEND_CACHED | Routes.attend[place][1] |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name

import torch
from torch import Tensor

from flexengine.model.forward import Attend, Query
from flexengine.places import HOST, WORKERS, place_of
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.schedule.batches import Batch
from flexengine.tier.machine import Machine
from flexengine.worker.cache import Cache, View


class Attender(ABC):
    """Computes the decode attention of the gpu_batches whose `Batch.attention` is its place.

    The edges of the program order the calls:

    - The five calls of one gpu_batch in one layer have the order of the table. The next layer's `ask` follows `answer`.
      The work of a call, also work that the call queues on a GPU, starts after the work of the previous call has ended.
    - `add`, `send_added` and `attend` have this order, and `send`, `attend_cached` and `attend`.
    - Calls for different gpu_batches overlap in any order, so each gpu_batch needs its own buffers.

    Every implementation must keep these rules:

    - `ask` copies all tensors of the event. The model's tensors, sinks among them, may be overwritten after the call.
    - Keys and values of earlier tokens are in pages of tier `Batch.cache_home`. STORE_CACHE tasks write keys and values
      of prompts, and `attend` appends keys and values of every later token.
    - Page numbers are valid for one sweep. `Cache.tables(view, layer)` returns page numbers in the pool of this tier,
      as int32 tensors in RAM.
    - A lane whose tasks read or write RAM with the CPU must not queue them (`places.Lane.queues`). On a GPU its tasks
      then start after earlier copies have ended (`runtime.lane.new_lane`).
    - The constructor takes no more memory than `plan.layout` books. If the constructor raises, it frees what it took.
    - Errors are raised where they occur. The lane passes them on.
    """

    @abstractmethod
    def begin(self, batches: Mapping[int, Batch]) -> None:
        """Prepare for a sweep. No task of an earlier sweep is left.

        Args:
            batches: by number in the sweep, the gpu_batches whose attention is computed here. Each piece is one token.
        """

    @abstractmethod
    def ask(self, k: int, event: Attend | Query, view: View) -> None:
        """Copy queries, keys and values of gpu_batch k to a device buffer, for `send`. Of a Query, copy queries alone.

        Args:
            k: number of the gpu_batch in the sweep.
            event: on the device; q [1, heads, tokens, head_dim], k [1, kv_heads, tokens, head_dim], v [1, kv_heads,
                tokens, value_dim]; tokens in the order of `packed(batch)`. Heads and widths may differ by layer: see
                `Cache.prepared`.
            view: page tables of the gpu_batch.
        """

    @abstractmethod
    def send(self, k: int) -> None:
        """Copy the question of gpu_batch k to the place."""

    @abstractmethod
    def attend(self, k: int, view: View) -> None:
        """Append the new keys and values to the pages, and compute attention of the queries over all tokens seen.

        Pages in `Tables.copies` are copied first. Attention uses scale, window, softcap and sinks of the event, and
        reads the fraction `Cache.topk` of the values.

        Args:
            k: number of the gpu_batch in the sweep.
            view: as in `ask`.
        """

    @abstractmethod
    def fetch(self, k: int) -> None:
        """Copy the answer of gpu_batch k to the device."""

    @abstractmethod
    def answer(self, k: int) -> Tensor:
        """Return attention of gpu_batch k on the device, [1, tokens, heads, value_dim] in the dtype of the queries.

        The tensor is valid until the next `ask` for gpu_batch k.
        """

    def add(self, k: int, event: Attend, view: View) -> None:
        """Copy the keys and values of gpu_batch k, whose queries went first, to a device buffer, for `send_added`."""
        raise NotImplementedError

    def send_added(self, k: int) -> None:
        """Copy the keys and values of gpu_batch k to the place."""
        raise NotImplementedError

    def attend_cached(self, k: int) -> None:
        """Compute attention of the queries of gpu_batch k over the cached tokens. `attend` adds the new tokens."""
        raise NotImplementedError

    def drain(self, lost: str) -> None:  # noqa: B027 - an attender in this process has no answers under way
        """Wait for the answers of a sweep that broke off, so that buffers and pages can be used again. lost: place of a
        lost attention worker, whose answers do not come.

        Raises:
            WorkerLost: another worker is lost.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory, even if other objects still refer to this one. No call follows."""


# By kind of place, a class, or its module:name, which is imported on first use. Its first argument is the place.
ATTENDERS: dict[str, str | Callable[..., Attender]] = {
    HOST: "flexengine.worker.attend.buffered:HostAttender",
    WORKERS: "flexengine.guests.attention_workers.attender:RemoteAttender",
}


def attender_of(place: str) -> Callable[[ModelFacts, Layout, Machine, Cache, torch.dtype], Attender]:
    """Return the class of a place's attender. Each attention worker is a place."""
    attender = ATTENDERS[WORKERS if place_of(place).worker else place]
    return partial(resolve_name(attender) if isinstance(attender, str) else attender, place)
