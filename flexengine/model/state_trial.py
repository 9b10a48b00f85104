"""Whether kernels compute what the functions of a module with states compute.

Each function and its kernel get the same random numbers, of the module's shapes but one group of heads, and a prompt
that is longer than a chunk. Then a copy of the module, whose projections are replaced by cheap ones, must give the same
for packed sequences as for each of them alone.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.kernels import states
from flexengine.model import mixers
from flexengine.model.linear import FastLinear
from flexengine.model.native.describe import CLOSE
from flexengine.model.state_doors import RecordView
from flexengine.model.state_kernels import KernelForward

_PROMPTS, _STEPS, _CUT = (mixers.CHUNK + 6, 9), 3, 40  # tokens of a trial
_RECORDS, _NUMBERS = 5, (3, 1)  # of a trial, and those of its sequences
Inputs = tuple[Tensor, ...]  # [tokens, ...] each


def fault(forward: KernelForward, mixer: Any, hidden: int, calls: dict[str, Any]) -> str | None:
    """Return how kernels differ from a module's own functions; None if they compute the same but for rounding.

    Args:
        hidden: elements of a hidden state.
        calls: arguments of kernels on the meta device, by "name of a prompt" and "name of a step".
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, trial in (("convolve", _conv), ("delta_rule", _delta), ("scan", _scan), ("selective_scan", _select)):
            args, step = calls.get(f"{name} of a prompt"), calls.get(f"{name} of a step")
            if args is not None and step is not None and _flags(args, step) != _flags(step, args):
                return f"their steps and prompts have another {name.replace('_', ' ')}"
            if args is not None and (far := trial(forward, args)) > CLOSE:
                return f"a kernel differs from their {name.replace('_', ' ')} by {far:.0e}"
        far = _packed(forward, mixer, hidden)
    return None if far <= CLOSE else f"packed sequences depend on each other by {far:.0e}"


def _flags(args: Any, others: Any) -> list[bool]:
    """Return the flags among the first arguments that both calls have, and which of these are None."""
    return [x if isinstance(x, bool) else x is None for x, _ in zip(args, others, strict=False)]


def _named(forward: KernelForward, *parts: str) -> Any:
    return next(own for name, own in forward.own.items() if any(part in name for part in parts))


def _conv(forward: KernelForward, args: Any) -> float:
    x, weight, bias, silu, state, _ = args
    channels, taps, columns = min(x.shape[1], 40), weight.shape[1], state.shape[-1]
    weight, bias = torch.randn(channels, taps), None if bias is None else torch.randn(channels)
    prompt, step = _named(forward, "conv1d_fn"), _named(forward, "conv1d_update")
    name = "silu" if silu else None

    def own(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x = given[0].t()[None]
        if state is None:
            out = prompt(x, weight, bias, activation=name)
            return out[0].t(), nn.functional.pad(x, (columns, 0))[:, :, -columns:].clone()
        return step(x, state, weight, bias, activation=name)[0].t(), state

    def kernel(given: Inputs, records: Tensor, pieces: states.Pieces) -> Tensor:
        return states.convolve(forward.kernels, given[0], weight, bias, silu, records, pieces)

    return _furthest(lambda n: (torch.randn(n, channels),), own, kernel, (channels, columns))


def _delta(forward: KernelForward, args: Any) -> float:
    q, _, v, g, _, _, _, norm = args
    dk, dv, heads = q.shape[-1], v.shape[-1], v.shape[1] // q.shape[1]
    prompt, step = _named(forward, "chunk"), _named(forward, "recurrent")

    def inputs(n: int) -> Inputs:
        decay = nn.functional.softplus(torch.randn(n, heads, *g.shape[2:]) - 1).neg()
        key, beta = torch.randn(n, 1, dk) / (1 if norm else dk**0.5), torch.rand(n, heads)
        return torch.randn(n, 1, dk), key, torch.randn(n, heads, dv), decay, beta

    def own(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (x[None] for x in given)
        function = prompt if state is None else step
        options: Any = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": norm}
        out, last = function(q, k, v, g=g, beta=beta, **options)
        return out[0], last

    def kernel(given: Inputs, records: Tensor, pieces: states.Pieces) -> Tensor:
        q, k, v, g, beta = given
        return states.delta_rule(forward.kernels, q, k, v, g, beta, records, pieces, norm)

    return _furthest(inputs, own, kernel, (heads, dk, dv))


def _scan(forward: KernelForward, args: Any) -> float:
    x, _, _, b, _, _, _, skip, bias, soft, limits = args
    dim, size, heads = x.shape[-1], b.shape[-1], x.shape[1] // b.shape[1]
    a, own_skip, own_bias = -torch.rand(heads) - 0.1, *(None if y is None else torch.randn(heads) for y in (skip, bias))
    prompt, step = _named(forward, "chunk_scan"), _named(forward, "state_update")
    options: Any = {"dt_softplus": soft}

    def inputs(n: int) -> Inputs:
        dt = torch.randn(n, heads) if soft else torch.rand(n, heads)
        return torch.randn(n, heads, dim), dt, torch.randn(n, 1, size), torch.randn(n, 1, size)

    def own(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = given
        if state is None:
            out, last = prompt(
                x[None],
                dt[None],
                a,
                b[None],
                c[None],
                chunk_size=mixers.CHUNK,
                D=own_skip,
                dt_bias=own_bias,
                return_final_states=True,
                dt_limit=limits,
                **options,
            )
            return out[0], last
        each, wide = ((None if y is None else y[:, None].expand(-1, dim)) for y in (own_skip, own_bias))
        decay = a[:, None, None].expand(-1, dim, size)
        return step(state, x, dt[:, :, None].expand(-1, -1, dim), decay, b, c, each, dt_bias=wide, **options), state

    def kernel(given: Inputs, records: Tensor, pieces: states.Pieces) -> Tensor:
        x, dt, b, c = given
        steps = len(x) == len(pieces.numbers)
        return states.scan(
            forward.kernels,
            x,
            dt,
            a,
            b,
            c,
            records,
            pieces,
            own_skip,
            own_bias,
            soft,
            states.UNLIMITED if steps else limits,
        )

    return _furthest(inputs, own, kernel, (heads, dim, size))


def _select(forward: KernelForward, args: Any) -> float:
    _, _, a, _, _, _, _, skip, bias, soft, z = args
    channels, size = 24, a.shape[1]
    rates, own_skip, own_bias = (
        -torch.rand(channels, size) - 0.1,
        *(None if y is None else torch.randn(channels) for y in (skip, bias)),
    )
    prompt, step = _named(forward, "selective_scan"), _named(forward, "state_update")

    def inputs(n: int) -> Inputs:
        dt = torch.randn(n, channels) if soft else torch.rand(n, channels)
        bc = (torch.randn(n, size) for _ in range(2))
        return torch.randn(n, channels), dt, *bc, torch.randn(n, channels)

    def own(given: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if state is None:
            x, dt, b, c, gate = (y.t()[None] for y in given)
            options: Any = {"delta_bias": own_bias, "delta_softplus": soft, "return_last_state": True}
            out, last = prompt(x, dt, rates, b, c, D=own_skip, z=None if z is None else gate, **options)
            return out[0].t(), last
        x, dt, b, c, gate = given
        options = {"dt_bias": own_bias, "dt_softplus": soft, "z": None if z is None else gate}
        return step(state, x, dt, rates, b, c, own_skip, **options), state

    def kernel(given: Inputs, records: Tensor, pieces: states.Pieces) -> Tensor:
        x, dt, b, c, gate = given
        options = own_skip, own_bias, soft, None if z is None else gate
        return states.selective_scan(forward.kernels, x, dt, rates, b, c, records, pieces, *options)

    return _furthest(inputs, own, kernel, (channels, size))


def _furthest(
    inputs: Callable[[int], Inputs],
    own: Callable[..., tuple[Tensor, Tensor]],
    kernel: Callable[..., Tensor],
    shape: Sequence[int],
) -> float:
    """Return the largest relative difference of outputs and states of two sequences: a prompt each, and steps.

    Args:
        inputs: returns random inputs of some tokens.
        own: returns outputs and last state of tokens, from a state [1, *shape], or of a prompt from none.
        kernel: returns outputs of packed pieces, from their records [_RECORDS, *shape].
    """
    rows, records = [inputs(n + _STEPS) for n in _PROMPTS], torch.full((_RECORDS, *shape), torch.nan)
    ends, expected, last = list(_PROMPTS), [list[Tensor](), list[Tensor]()], list[Tensor]()
    for row, n, outs in zip(rows, _PROMPTS, expected, strict=True):
        out, state = own(tuple(x[:n] for x in row), None)
        outs.append(out)
        for t in range(n, n + _STEPS):
            out, state = own(tuple(x[t : t + 1] for x in row), state)
            outs.append(out)
        last.append(state[0])
    calls = [[(0, 0, _CUT), (1, 0, ends[1])], [(0, _CUT, ends[0])]]
    calls += [[(s, ends[s] + t, ends[s] + t + 1) for s in (0, 1)] for t in range(_STEPS)]
    found = [list[Tensor](), list[Tensor]()]
    for parts in calls:
        given = tuple(torch.cat(x) for x in zip(*([x[low:end] for x in rows[s]] for s, low, end in parts), strict=True))
        sizes = [end - low for _, low, end in parts]
        pieces = _pieces(sizes, [_NUMBERS[s] for s, _, _ in parts], [not low for _, low, _ in parts])
        for (s, _, _), out in zip(parts, torch.split(kernel(given, records, pieces), sizes), strict=True):
            found[s].append(out)
    pairs = [(torch.cat(a), torch.cat(b)) for a, b in zip(expected, found, strict=True)]
    pairs += [(state, records[number]) for state, number in zip(last, _NUMBERS, strict=True)]
    return max(_far(*pair) for pair in pairs)


def _far(a: Tensor, b: Tensor) -> float:
    far = float((a - b).norm() / a.norm())
    return far if far == far else torch.inf


def _pieces(sizes: Sequence[int], numbers: Sequence[int], fresh: Sequence[bool]) -> states.Pieces:
    starts = torch.tensor([0, *sizes]).cumsum(0)
    return states.Pieces(starts, torch.tensor(numbers), torch.tensor(fresh))


class _Spread(nn.Module):
    """A projection in place of a large one: each output is a sum of two inputs, with random weights."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self._linear = [linear]  # no part of this module
        self.factors = torch.randn(2, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1] * self.factors[0] + x[..., 1:2] * self.factors[1]

    def __getattr__(self, name: str) -> Any:  # its weight's dtype, and its sizes
        own = self.__dict__.get("_linear")
        if own is None or name in ("factors",):
            return super().__getattr__(name)
        return getattr(own[0], name)


def _packed(forward: KernelForward, mixer: Any, hidden: int) -> float:
    """Return how far the results of a module differ between sequences that are packed and each of them alone."""
    linear = {id(m): _Spread(m) for m in mixer.modules() if isinstance(m, FastLinear)}
    small = copy.deepcopy(mixer, dict(linear))
    for module in (m for m in small.modules() if not isinstance(m, _Spread)):
        for own in (module._parameters, module._buffers):
            own.update({k: _random(x, type(x)) for k, x in own.items() if x is not None})  # type: ignore[misc]
    sizes, x = (5, 1, 3), torch.randn(1, 9, hidden)
    far, results = 0.0, list[Tensor]()
    for groups in ([(0, 1, 2)], [(0,), (1,), (2,)]):
        pages = torch.full((_RECORDS, mixers.record_bytes(mixer.fields)), 255, dtype=torch.uint8)  # NaN
        parts, outs = torch.split(x, [*sizes], 1), dict[int, list[Tensor]]()
        for decode in (False, True):
            for group in groups:
                pieces = _pieces([1 if decode else sizes[s] for s in group], group, [not decode] * len(group))
                given = torch.cat([parts[s][:, -1:] if decode else parts[s] for s in group], 0 if decode else 1)
                view = RecordView(mixer.fields, pages, pieces, hidden=not decode and given.shape[1] == 1)
                out = forward(small, given, view)
                out = out[0] if isinstance(out, tuple) else out
                for s, each in zip(group, torch.split(out.flatten(0, 1), pieces.starts.diff().tolist()), strict=True):
                    outs.setdefault(s, []).append(each)
        states_of = [f.of(pages)[: len(sizes)].float().flatten() for f in mixer.fields]
        results.append(torch.cat([y.flatten() for s in range(len(sizes)) for y in outs[s]]))
        results += states_of
    half = len(results) // 2
    for one, two in zip(results[:half], results[half:], strict=True):
        far = max(far, _far(one, two))
    return far


def _random(x: Tensor, kind: Any) -> Tensor:
    new = torch.randn(x.shape) / 2 if x.is_floating_point() else torch.zeros(x.shape, dtype=x.dtype)
    return nn.Parameter(new, requires_grad=False) if issubclass(kind, nn.Parameter) else new
