"""The interface of attenders. An attender computes the decode attention of gpu_batches in one place off the device.

Queries, keys and values of new tokens (the question) go to the place where the KV cache lies, and attention (the
answer) comes back. FlexGen calls this CPU computation (section 4.2), Lamina attention offloading.

One layer of one gpu_batch is five calls, one per task of `schedule.program`. `Routes.attend` names the lanes of three
of these tasks, by place.

| call | task | lane |
|---|---|---|
| ask | PROJECT, after the layer's part before attention | device |
| send | SEND | Routes.attend[place][0] |
| attend | ATTEND | Routes.attend[place][1] |
| fetch | FETCH | Routes.attend[place][2] |
| answer | FINISH, before the rest of the layer | device |
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flexengine.model.forward import Attend
from flexengine.schedule.order import Batch
from flexengine.worker.cache import View


class Attender(ABC):
    """Computes the decode attention of the gpu_batches whose `Batch.attention` is its place.

    The edges of the program order the calls:

    - The five calls of one gpu_batch in one layer come in the order of the table, and the next layer's `ask` after
      `answer`. The work of a call, or the work that it queues on a GPU, starts after that of the call before has ended.
    - Calls for different gpu_batches overlap in any order, so each gpu_batch needs buffers of its own.

    Every implementation must keep these rules:

    - `ask` copies all tensors of the event. The model's tensors, sinks among them, may be overwritten after the call.
    - Keys and values of earlier tokens are in pages of tier `Batch.cache_home`: tasks STORE_CACHE write those of
      prompts, and `attend` appends those of every later token.
    - Page numbers are valid for one sweep. `Cache.tables(view, layer)` returns them: int32 tensors in RAM, which count
      in the pool of that tier.
    - A lane whose tasks read or write RAM with the CPU needs a name that starts with "cpu". On a GPU its tasks then
      start after earlier copies have ended (`runtime.lane.new_lane`).
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
    def ask(self, k: int, event: Attend, view: View) -> None:
        """Copy queries, keys and values of gpu_batch k to a device buffer, for `send`.

        Args:
            k: number of the gpu_batch in the sweep.
            event: on the device; q [1, heads, tokens, head_dim], k [1, kv_heads, tokens, head_dim], v [1, kv_heads,
                tokens, value_dim]; tokens in the order of `packed(batch)`. Heads and widths may differ by layer: see
                `Cache.prepared`.
            view: of the gpu_batch.
        """

    @abstractmethod
    def send(self, k: int) -> None:
        """Bring the question of gpu_batch k to the place."""

    @abstractmethod
    def attend(self, k: int, view: View) -> None:
        """Append the new keys and values to the pages, and compute attention of the queries over all tokens seen.

        Pages in `Tables.copies` are copied first. Attention has the scale, window, softcap and sinks of the event, and
        reads the share of values in `Cache.topk`.

        Args:
            k: number of the gpu_batch in the sweep.
            view: as in `ask`.
        """

    @abstractmethod
    def fetch(self, k: int) -> None:
        """Bring the answer of gpu_batch k to the device."""

    @abstractmethod
    def answer(self, k: int) -> Tensor:
        """Return attention of gpu_batch k on the device, [1, tokens, heads, value_dim] in the dtype of the queries.

        The tensor is valid until gpu_batch k asks again.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory, even if other objects still refer to this one. No call follows."""
