"""Kernels of states (gated delta rules, Mamba 2, short convolutions) against the functions of transformers.

python -m bench.kernels.states [--shapes gdn kda mamba2] [--sequences 24] [--tokens 512] [--rounds 7]
                               [--out states.jsonl]

A decode step of a layer's scan and convolution, for one sequence of several, is compared with its bound: the time in
which torch multiplies as many bytes in place, which reads and writes them once. A prompt's tokens are compared with the
functions that modules of transformers call, one piece of the prompt after the other if it is longer than they get in
the engine. All sides alternate; the least time of all rounds counts. Run it with OMP_NUM_THREADS=1 for figures of a
core. Prints one JSON line per shape.
"""

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench import harness
from flexengine import kernels
from flexengine.kernels import states
from flexengine.kernels.cpu import NativeKernels

import torch  # isort: skip  # after flexengine, which sets the threads' wait policy
from torch import Tensor  # isort: skip

SEED, TAPS, BEYOND = 0, 4, 256 << 20
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class StateShape:
    """A layer. rows, columns: of a head's state; groups: heads of keys, or groups of B and C."""

    model: str
    prompt: str  # functions of transformers
    step: str
    heads: int
    groups: int
    rows: int
    columns: int
    channels: int  # of the convolution
    piece: int  # tokens that the function of transformers gets at once: at most 256 MiB of temporary tensors


_GATED, _KIMI = "gated_delta_rule", "kimi_delta_attention"
SHAPES = {
    "gdn": StateShape("qwen3_next", f"torch_chunk_{_GATED}", f"torch_recurrent_{_GATED}", 32, 16, 128, 128, 8192, 512),
    "kda": StateShape("kimi_linear", f"chunk_{_KIMI}", f"recurrent_{_KIMI}", 32, 32, 128, 128, 12288, 256),
    "mamba2": StateShape("mamba2", "mamba2_chunk_scan", "mamba2_selective_state_update", 64, 8, 64, 128, 6144, 512),
}


class Layer:
    """Random numbers of a layer, and the calls that are measured."""

    def __init__(self, shape: StateShape, native: NativeKernels) -> None:
        self.shape, self.native = shape, native
        module = importlib.import_module(f"transformers.models.{shape.model}.modeling_{shape.model}")
        names = (shape.prompt, shape.step, "causal_conv1d_fn", "causal_conv1d_update")
        self.prompt, self.step, self.conv, self.conv_step = (inspect.unwrap(getattr(module, name)) for name in names)
        self.weight, self.a = torch.randn(shape.channels, TAPS), -torch.rand(shape.heads) - 0.1
        self.skip, self.bias = torch.randn(2, shape.heads)

    def inputs(self, n: int) -> list[Tensor]:
        """Return the scan's inputs for some tokens."""
        s = self.shape
        if s.model == "mamba2":
            bc = torch.randn(2, n, s.groups, s.columns)
            return [torch.randn(n, s.heads, s.rows), torch.randn(n, s.heads), *bc]
        decay = torch.nn.functional.softplus(torch.randn(n, s.heads, *[s.rows] * (s.model == "kimi_linear"))).neg()
        qk = torch.randn(2, n, s.groups, s.rows)
        return [*qk, torch.randn(n, s.heads, s.columns), decay, torch.rand(n, s.heads)]

    def scan(self, x: list[Tensor], records: Tensor, pieces: states.Pieces) -> Tensor:
        """Call the kernel."""
        if self.shape.model != "mamba2":
            q, k, v, g, beta = x
            return states.delta_rule(self.native, q, k, v, g, beta, records, pieces, norm=True)
        y, dt, b, c = x
        return states.scan(self.native, y, dt, self.a, b, c, records, pieces, self.skip, self.bias)

    def own_prompt(self, x: list[Tensor], state: Tensor | None) -> Tensor:
        """Call the function of transformers; return the state."""
        first, *others = (each[None] for each in x)
        if self.shape.model != "mamba2":
            options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            return self.prompt(first, *others, initial_state=state, **options)[1]  # type: ignore[no-any-return]
        dt, b, c = others
        return self.prompt(  # type: ignore[no-any-return]
            first, dt, self.a, b, c, chunk_size=256, D=self.skip, dt_bias=self.bias, dt_softplus=True,
            initial_states=state, return_final_states=True,
        )[1]  # fmt: skip

    def own_step(self, x: list[Tensor], records: Tensor) -> object:
        """Call the function of transformers for a decode step."""
        if self.shape.model != "mamba2":
            options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            return self.step(*(each[:, None] for each in x), initial_state=records, **options)
        y, dt, b, c = x
        dim, size = self.shape.rows, self.shape.columns
        wide, decay = dt[:, :, None].expand(-1, -1, dim), self.a[:, None, None].expand(-1, dim, size)
        skip, bias = (each[:, None].expand(-1, dim) for each in (self.skip, self.bias))
        return self.step(records, y, wide, decay, b, c, skip, dt_bias=bias, dt_softplus=True)


def decode_calls(layer: Layer, sequences: int) -> tuple[Calls, int]:
    """Return the calls of a decode step, and the bytes of the states."""
    s, x = layer.shape, layer.inputs(sequences)
    records = torch.randn(sequences, s.heads, s.rows, s.columns) / 10
    columns, new = torch.randn(sequences, s.channels, TAPS), torch.randn(sequences, s.channels)
    none = torch.zeros(sequences, dtype=torch.bool)
    pieces = states.Pieces(torch.arange(sequences + 1), torch.randperm(sequences), none)
    few = min(sequences, 4)  # of the functions of transformers, as copies of states take memory
    return {
        "scan": lambda: layer.scan(x, records, pieces),
        "conv": lambda: states.convolve(layer.native, new, layer.weight, None, True, columns, pieces),
        "own scan": lambda: layer.own_step([each[:few] for each in x], records[:few]),
        "own conv": lambda: layer.conv_step(new[:few, :, None], columns[:few], layer.weight, None, "silu"),
    }, records[0].nbytes + columns[0].nbytes  # fmt: skip


def prompt_calls(layer: Layer, tokens: int) -> Calls:
    """Return the calls of a prompt."""
    s, x, new = layer.shape, layer.inputs(tokens), torch.randn(tokens, layer.shape.channels)
    records, columns = torch.zeros(1, s.heads, s.rows, s.columns), torch.zeros(1, s.channels, TAPS)
    pieces = states.Pieces(torch.tensor([0, tokens]), torch.tensor([0]), torch.tensor([True]))

    def own() -> None:
        state = None
        for first in range(0, tokens, s.piece):
            state = layer.own_prompt([each[first : first + s.piece] for each in x], state)

    return {
        "scan": lambda: layer.scan(x, records, pieces),
        "conv": lambda: states.convolve(layer.native, new, layer.weight, None, True, columns, pieces),
        "own scan": own,
        "own conv": lambda: layer.conv(torch.cat([columns, new.t()[None]], -1), layer.weight, None, "silu"),
    }


def in_turns(calls: Calls, rounds: int) -> dict[str, float]:
    """Return the least seconds of each call."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def results(shape: StateShape, native: NativeKernels, sequences: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of a decode step per sequence, and of a prompt per token, and their ratios."""
    layer, large = Layer(shape, native), torch.zeros(BEYOND // 4)
    calls, nbytes = decode_calls(layer, sequences)
    decode = in_turns({**calls, "bound": lambda: large.mul_(1.0001)}, rounds)
    prompt = in_turns(prompt_calls(layer, tokens), rounds)
    few = min(sequences, 4)
    steps = {k: v * 1e3 / (few if k.startswith("own") else sequences) for k, v in decode.items() if k != "bound"}
    bound = decode["bound"] * 1e3 * nbytes / large.nbytes
    each = {k: v * 1e3 / tokens for k, v in prompt.items()}
    found = {f"decode {k} ms": v for k, v in steps.items()} | {"decode bound ms": bound}
    found["decode of bound"] = (steps["scan"] + steps["conv"]) / bound
    found |= {f"prompt {k} ms": v for k, v in each.items()}
    found["prompt speedup"] = (each["own scan"] + each["own conv"]) / (each["scan"] + each["conv"])
    return found


def main() -> None:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sequences", type=harness.at_least_one, default=24)
    parser.add_argument("--tokens", type=harness.at_least_one, default=512)
    parser.add_argument("--rounds", type=harness.at_least_one, default=7)
    parser.add_argument("--out", metavar="FILE", help="append records to this file under bench/results/")
    args = parser.parse_args()
    native = kernels.load()
    assert isinstance(native, NativeKernels)
    for name in args.shapes:
        torch.manual_seed(SEED)
        with torch.no_grad():
            found = results(SHAPES[name], native, args.sequences, args.tokens, args.rounds)
        head = harness.header("states", SHAPES[name], [{"versions": harness.versions()}])
        how = {"simd": native.simd, "seed": SEED, "threads": torch.get_num_threads(), "rounds": args.rounds}
        sizes = {"sequences": args.sequences, "tokens": args.tokens}
        harness.emit({**head, "shape": name, **asdict(SHAPES[name]), **how, **sizes, **found}, args.out)
        print(
            f"{name:7}" + "".join(f"  {key} {value:.4g}" for key, value in found.items()), file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()
