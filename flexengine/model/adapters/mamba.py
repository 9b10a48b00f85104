"""Mamba: the selective scan of a prompt's later pieces begins from the state of the earlier ones.

transformers' own scan begins from zeros, whatever the cache holds, as a kernel does that has no initial state. The scan
here takes the same steps as its plain torch form, from the state that the module was given.
"""

import inspect
import threading
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_given = threading.local()  # .states: an iterator of the states that the running module was given, one for each scan


def with_states(forward: Any) -> Any:
    """Return a module's forward that calls `selective_scan`. Its code and its module stay as they are."""
    own: Any = inspect.unwrap(forward)
    names = {**own.__globals__, "mamba_selective_scan": selective_scan}
    function = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    function.__kwdefaults__ = own.__kwdefaults__

    def forward_with_states(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Tensor:
        state = cache.get_recurrent_state(self.layer_idx)
        heads = [] if state is None else [*state.unbind(1)] if state.dim() == 4 else [state]  # Zamba scans head by head
        _given.states = iter(heads)
        try:
            out: Tensor = function(self, hidden_states, cache=cache, attention_mask=attention_mask)
        finally:
            _given.states = iter(())
        return out

    return forward_with_states


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, inner, tokens] and the last state [batch, inner, size] of a scan.

    Args:
        hidden_states, dt, z: [batch, inner, tokens].
        A: [inner, size].
        B, C: [batch, size, tokens].
        D, delta_bias: [inner].
    """
    dtype = hidden_states.dtype
    dt = torch.nn.functional.softplus(dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None])
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    decay = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    added = dt[:, :, :, None] * B[:, None, :, :].float() * hidden_states[:, :, :, None].float()
    state = next(_given.states, None)
    if state is None:
        state = torch.zeros(*hidden_states.shape[:2], A.shape[-1], dtype=dtype, device=hidden_states.device)
    outs = list[Tensor]()
    for i in range(hidden_states.shape[2]):
        state = decay[:, :, i] * state + added[:, :, i]
        outs.append(torch.matmul(state.to(dtype), C[:, i, :].unsqueeze(-1))[:, :, 0])
    out = torch.stack(outs, dim=-1) + hidden_states * D[None, :, None]
    return out * torch.nn.functional.silu(z), state
