"""The interface of attenders. An attender computes the decode attention of gpu_batches in one place off the device.

The queries and the new token of a sequence go to the place where its KV cache lies, and attention comes back. FlexGen
calls this CPU computation (section 4.2), Lamina attention offloading.

One layer of one gpu_batch is five calls, one per task of `schedule.program`. The lanes are data: `Routes.attend` names
those of send, attend and fetch for each place.

| call | task | lane |
|---|---|---|
| ask | PROJECT, after the layer was computed up to its attention | device |
| send | SEND | Routes.attend[place][0] |
| attend | ATTEND | Routes.attend[place][1] |
| fetch | FETCH | Routes.attend[place][2] |
| answer | FINISH, before the rest of the layer is computed | device |
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flexengine.model.forward import Attend
from flexengine.schedule.order import Batch
from flexengine.worker.cache import View


class Attender(ABC):
    """Computes the decode attention of the gpu_batches whose `Batch.attention` is its place.

    The edges of the program give these guarantees. The five calls of one gpu_batch in one layer come in the order of
    the table, each after the work of the previous one has ended. A gpu_batch asks in its next layer after it has
    taken its answer. Calls of different gpu_batches overlap in any order: each needs buffers of its own.

    Every implementation must keep these rules:

    - Keys and values of earlier tokens are in the pages of `Batch.cache_home`. Tasks STORE_CACHE bring the prompts' KV
      there before a sequence is asked about. `attend` appends those of the new tokens, as later layers' and later
      sweeps' calls, and prompts of other samples, read the pages.
    - Sequences have new pages in every sweep. `Cache.tables(view, layer)` gives their numbers: int32 tensors in RAM
      that count in the pool of the cache's tier.
    - Send, attend and fetch do not read tensors of the model: its weights may lie in a slot that is filled again. `ask`
      copies all that they need.
    - A lane that computes in RAM has a name that starts with "cpu": on a GPU machine its tasks then wait for copies to
      end (`runtime.lane.new_lane`).
    - The constructor takes no more memory than `plan.layout` books, and keeps none if it raises.
    - Errors are raised where they occur; the lane passes them on.
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
        """Bring what `ask` copied to the place."""

    @abstractmethod
    def attend(self, k: int, view: View) -> None:
        """Append the new keys and values to the pages, and compute attention of the queries over all tokens that they
        see: softmax of scaled scores, with the window, softcap and sinks of the question, and the share of values in
        `Cache.topk`. Pages in `Tables.copies` are copied first.

        Args:
            k: number of the gpu_batch in the sweep.
            view: as in `ask`.
        """

    @abstractmethod
    def fetch(self, k: int) -> None:
        """Bring attention to the device."""

    @abstractmethod
    def answer(self, k: int) -> Tensor:
        """Return attention of gpu_batch k on the device, [1, tokens, heads, value_dim] in the dtype of the queries.

        The tensor is valid until gpu_batch k asks again.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory, even if other objects still refer to this one. No task is left; begin is not called
        again."""
