"""Kernels in place of the functions by which modules of transformers change their states, and the records of sequences
in place of their cache.

Each door has the arguments of the function that it stands for.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexengine.kernels import states
from flexengine.model import mixers
from flexengine.model.mixers import Field, Key, StateView


class Unsuited(Exception):
    """A module uses its states or functions otherwise than kernels do; the message says how."""


class RecordView(StateView):
    """The records of pieces in place of a cache of transformers. A state is handed out as a view of all records, which
    only kernels read; `numbers` of the pieces select theirs.

    Attributes:
        used: states that kernels have changed.
        calls: names and arguments of the calls of kernels, in a trial on the meta device.
    """

    def __init__(self, fields: Sequence[Field], pages: Tensor, pieces: states.Pieces, hidden: bool) -> None:
        """hidden: whether the module sees no state, so that it does not take a single token for a decode step."""
        super().__init__({f.key: f.of(pages).view(-1, *f.shape) for f in fields})
        self.pieces, self.hidden, self.used, self.calls = pieces, hidden, set[Key](), list[tuple[str, Any]]()
        self._columns: tuple[Tensor, Key] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self.hidden else super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self.hidden else super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return the new columns. The convolution reads those before them from the records."""
        self._columns = conv_states.view_as(conv_states), ("conv", state_idx)
        return self._columns[0]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        if recurrent_states is not self.states["recurrent", state_idx]:
            raise Unsuited("a state is changed after its scan")
        return recurrent_states

    def columns_of(self, x: Tensor) -> Tensor:
        """Return the state of a convolution over the new columns x."""
        if self._columns is None or x is not self._columns[0]:
            raise Unsuited("the columns of a convolution are changed before it")
        return self._take(self._columns[1])

    def state_of(self, given: Tensor | None) -> Tensor:
        """Return the state that a function was given; the only one that is no convolution's if the module saw none."""
        if given is None and self.hidden:
            return self.scanned()
        keys = [key for key, state in self.states.items() if state is given]
        if not keys:
            raise Unsuited("a state is changed before its scan")
        return self._take(keys[0])

    def scanned(self) -> Tensor:
        """Return the only state that is no convolution's."""
        keys = [key for key in self.states if key[0] == "recurrent"]
        if len(keys) != 1:
            raise Unsuited("a scan may be of several states")
        return self._take(keys[0])

    def _take(self, key: Key) -> Tensor:
        if key in self.used:
            raise Unsuited("a scan gets a part of a state")
        self.used.add(key)
        return self.states[key]


_ROWS, _WIDE = 64, 16  # of scratch memory in states.h, at most: rows of a thread beside a head's state; their multiple
running = threading.local()  # .view: of the module that runs; .kernels


def _run(name: str, out: tuple[int, ...], x: Tensor, *args: Any) -> Tensor:
    """Return the result of a function of `kernels.states`, of the shape `out`. x, args: all its arguments but the
    first."""
    view: RecordView = running.view
    if x.is_meta:
        view.calls.append((name, (x, *args)))
        held = _temporary(x, *args)
        result = x.new_empty(out)
        del held
        return result
    found: Tensor = getattr(states, name)(running.kernels, x, *args)
    return found.view(out)


def _temporary(*args: Any) -> list[Tensor]:
    """Return tensors on the meta device that take as much memory as a kernel's copies and scratch memory, or more."""
    state = args[next(i for i, x in enumerate(args) if isinstance(x, states.Pieces)) - 1]
    sizes = [-(-size // _WIDE) * _WIDE for size in state.shape[2:]]
    scratch = torch.get_num_threads() * (math.prod(sizes) + _ROWS * sum(sizes))
    tensors = [x for x in args if isinstance(x, Tensor) and x is not state]
    copies = [x for x in tensors if x.stride(-1) != 1 or len(x) != len(args[0])]  # of columns, and of parameters
    return [torch.empty_like(x, dtype=torch.float32) for x in copies] + [state.new_empty(scratch)]


def _no_others(others: dict[str, Any]) -> None:
    if given := [name for name, value in others.items() if value is not None]:
        raise Unsuited(f"a function of theirs gets {', '.join(sorted(given))}")


def _activation(name: str | None) -> bool:
    if name not in (None, "silu", "swish"):
        raise Unsuited(f"the activation {name} follows a convolution")
    return name is not None


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """causal_conv1d_fn. x: [1, channels, tokens]."""
    _no_others(others)
    view: RecordView = running.view
    state, silu = view.columns_of(x), _activation(activation)
    out = _run("convolve", (x.shape[2], x.shape[1]), x[0].t(), weight, bias, silu, state, view.pieces)
    return out.t()[None]


def _conv_step(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal_conv1d_update. x: [sequences, channels, 1]."""
    view: RecordView = running.view
    state, silu = view.state_of(conv_state), _activation(activation)
    return _run("convolve", tuple(x.shape[:2]), x[:, :, 0], weight, bias, silu, state, view.pieces)[:, :, None]


def _delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = mixers.CHUNK,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The functions of delta rules: in chunks, or token by token. value: [1, tokens, heads, dv], or [sequences, 1,
    heads, dv]."""
    _no_others(others)
    view: RecordView = running.view
    state = view.state_of(initial_state)
    tokens = (x.flatten(0, 1) for x in (query, key, value, g, beta))
    out = _run("delta_rule", tuple(value.shape), *tokens, state, view.pieces, use_qk_l2norm_in_kernel)  # type: ignore[misc]
    return out, state


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, torch.inf),
    return_final_states: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """mamba2_chunk_scan. x: [1, tokens, heads, dim]."""
    _no_others(others)
    if not return_final_states:
        raise Unsuited("a scan returns no state")
    view: RecordView = running.view
    state, limits = view.state_of(initial_states), (float(dt_limit[0]), float(dt_limit[1]))
    out = _run("scan", tuple(x.shape), x[0], dt[0], A, B[0], C[0], state, view.pieces, D, dt_bias, dt_softplus, limits)
    return out, state


def _scan_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """mamba2_selective_state_update. x, dt: [sequences, heads, dim]; A: [heads, dim, size]; D: [heads, dim]."""
    _no_others(others)
    one = [each if each is None else _first(each, n) for each, n in ((dt, 2), (A, 1), (D, 1), (dt_bias, 1))]
    view: RecordView = running.view
    states_of = view.state_of(state)
    args = x, one[0], one[1], B, C, states_of, view.pieces, one[2], one[3], dt_softplus
    out = _run("scan", tuple(x.shape), *args)  # type: ignore[arg-type]
    return out if z is None else out * torch.nn.functional.silu(z)


def _select(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,  # other ways to the same numbers
    use_associative_scan: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """mamba_selective_scan, which gets no state. x, dt, z: [1, channels, tokens]; B, C: [1, size, tokens]."""
    _no_others(others)
    view: RecordView = running.view
    state, gate = view.scanned(), None if z is None else z[0].t()
    args = dt[0].t(), A, B[0].t(), C[0].t(), state, view.pieces, D, delta_bias, delta_softplus, gate
    return _run("selective_scan", (x.shape[2], x.shape[1]), x[0].t(), *args).t()[None], state


def _select_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """mamba_selective_state_update. x, dt, z: [sequences, channels]; B, C: [sequences, size]."""
    _no_others(others)
    view: RecordView = running.view
    args = dt, A, B, C, view.state_of(state), view.pieces, D, dt_bias, dt_softplus, z
    return _run("selective_scan", tuple(x.shape), x, *args)


def _first(x: Tensor, dims: int) -> Tensor:
    """Return the numbers of x along its first dimensions, which were expanded to the others."""
    if any(x.stride(d) and x.shape[d] > 1 for d in range(dims, x.dim())):
        raise Unsuited("channels of a head have decays of their own")
    while x.dim() > dims:
        x = x[..., 0]
    return x


# Kernels in place of functions of transformers' modeling files, by name: those of prompts, and of decode steps.
DOORS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_step,
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _scan_step,
    "mamba_selective_scan": _select,
    "mamba_selective_state_update": _select_step,
}
