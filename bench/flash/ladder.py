"""The ladder of I/O of LLM in a flash: what each step saves, with the planted predictors of bench/flash/planted.py.

python -m bench.flash.ladder DIR [--out FILE] [--shape opt-6.7b] [--tokens 64] [--turns 3] [--share 0.15] [--layers 4]

DIR: where the checkpoint is made or reused (13 GB; the cache takes 9 GB more for the records). Steps, each with its
seconds of reads and its bytes per token:

    naive       all weights of the model
    resident    the weights of the feed-forward blocks; all others stay in memory
    predictor   of these, the neurons that predictors name, in two reads each, of half a record
    window      of these, the neurons that the last tokens did not use; the memory has room for --share of the neurons
    bundles     the same, in one read of a record each

Reads are those of `flexengine.guests.flash.reader`, with direct I/O, 32 at a time; no gaps between neurons are read.
They are done for --layers of the layers, and their seconds and bytes are scaled to all bytes of a step, or all layers.
For naive, the blocks' records are read in place of all weights. In two reads, a neuron's halves lie in the two halves
of one file, as two matrices of a checkpoint do. The steps take turns with every token; medians of --turns count. The
last steps leave out the first tokens, which have no full window behind them. One JSON line. The exit code is 1 if bytes
differ from their arithmetic, or if a step takes no less time than the one before.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import NamedTuple

from flexengine import Engine, Lossy  # before torch, as it sets how idle threads wait

# isort: split
import numpy as np
import torch
from torch import Tensor

from bench import harness
from bench.flash.planted import SHAPES, PlantedShape, plant_predictors, read_tensor
from bench.harness import Record
from bench.models import make
from flexengine.codec.records import RecordForm
from flexengine.guests.flash.bundles import Bundle
from flexengine.guests.flash.neurons import Arena, Fetch, IntArray
from flexengine.guests.flash.predictors import Trained
from flexengine.guests.flash.reader import RecordReader, requests
from flexengine.guests.flash.traces import Trace, window_unions
from flexengine.model.checkpoint import read_checkpoint
from flexengine.tier.memory import aligned_buffer

START = 64  # position of the first token of the sequence
Wanted = tuple[Bundle, IntArray]  # a file, and the records of it to read
STEPS = ("naive", "resident", "predictor", "window", "bundles")


class WindowArena(Arena):
    """Rows that neurons leave if none of the last `window` tokens used them, though there is room."""

    def __init__(self, neurons: int, room: int, window: int) -> None:
        super().__init__(neurons, room)
        self.window = window

    def fetch(self, neurons: IntArray) -> Fetch:
        fetch = super().fetch(neurons)
        left = np.flatnonzero((self._neuron_at >= 0) & (self._used <= self.step - self.window))
        self._row_of[self._neuron_at[left]] = self._neuron_at[left] = self._used[left] = -1
        return fetch


@dataclass(frozen=True)
class Layer:
    """One layer that is measured.

    Attributes:
        bundle: its records.
        trace: bool [1, tokens, neurons], the predicted neurons of each token.
    """

    bundle: Bundle
    trace: Trace

    @property
    def halves(self) -> Bundle:
        """The same file as records of half the size: neuron i is record i and record neurons + i."""
        form = self.bundle.form
        return Bundle(self.bundle.path, RecordForm(form.kind, form.width // 2), 2 * self.bundle.neurons)

    def used(self, first: int) -> Iterator[IntArray]:
        """Yield the predicted neurons of each token, from token `first` on."""
        return map(np.flatnonzero, self.trace[0, first:])

    def new(self, window: int, room: int) -> Iterator[IntArray]:
        """Yield the predicted neurons that are not in memory, for each token with a full window behind it."""
        arena = WindowArena(self.bundle.neurons, room, window)
        for token, numbers in enumerate(self.used(0)):
            fetch = arena.fetch(numbers)
            if token >= window:
                yield fetch.neurons


@dataclass(frozen=True)
class Ladder:
    """What is measured.

    Attributes:
        layers: those that are measured.
        count: number of the model's layers.
        model: bytes of the checkpoint's tensors.
        window: tokens that the memory remembers.
        room: neurons that it has room for.
    """

    layers: tuple[Layer, ...]
    count: int
    model: int
    window: int
    room: int

    @property
    def tokens(self) -> int:
        """Tokens with a full window behind them."""
        return int(self.layers[0].trace.shape[1]) - self.window

    def predicted(self) -> dict[str, float]:
        """Return the bytes per token and measured layer of each step but naive, by arithmetic."""
        blocks, named, new = list[float](), list[float](), list[float]()
        for layer in self.layers:
            shares = window_unions(layer.trace, self.window + 1)
            nbytes = layer.bundle.neurons * layer.bundle.form.nbytes
            blocks.append(nbytes)
            named.append(nbytes * float(layer.trace[0, self.window :].mean()))
            new.append(nbytes * (shares[self.window] - shares[self.window - 1]))
        each = [sum(found) / len(self.layers) for found in (blocks, named, new)]
        return dict(zip(STEPS[1:], (*each, each[-1]), strict=True))

    def plans(self) -> dict[str, Callable[[Layer], Iterator[Wanted]]]:
        """Return the reads of each step in a layer: one per token, or one for all tokens."""

        def whole(layer: Layer) -> Iterator[Wanted]:
            yield layer.bundle, np.arange(layer.bundle.neurons)

        def predictor(layer: Layer) -> Iterator[Wanted]:
            return ((layer.halves, in_halves(layer, n)) for n in layer.used(self.window))

        def window(layer: Layer) -> Iterator[Wanted]:
            return ((layer.halves, in_halves(layer, n)) for n in layer.new(self.window, self.room))

        def bundles(layer: Layer) -> Iterator[Wanted]:
            return ((layer.bundle, n) for n in layer.new(self.window, self.room))

        return dict(zip(STEPS, (whole, whole, predictor, window, bundles), strict=True))


class Read(NamedTuple):
    """Seconds of reads, their bytes and requests."""

    seconds: float = 0.0
    bytes: int = 0
    requests: int = 0

    def plus(self, other: "Read") -> "Read":
        """Return the sums."""
        return Read(self.seconds + other.seconds, self.bytes + other.bytes, self.requests + other.requests)


def in_halves(layer: Layer, numbers: IntArray) -> IntArray:
    """Return the numbers of the halves of records, rising."""
    return np.concatenate((numbers, layer.bundle.neurons + numbers))


def traces(model: Path, shape: PlantedShape, known: Trained, tokens: int) -> list[Trace]:
    """Return the neurons that the predictors name for the tokens of one sequence, [1, tokens, neurons] by layer.

    No layer changes the code of a position, so the input of each predictor is known but for the noise.
    """
    positions = read_tensor(read_checkpoint(model), "model.decoder.embed_positions.weight")[2:]
    x = positions[START : START + tokens].float()
    assert len(x) == tokens, f"the shape has {shape.positions} positions; give at most {shape.positions - START} tokens"
    return [layer.predictor.active(x).numpy()[None] for layer in known.known]


def window_of(traces: list[Trace], share: float) -> int:
    """Return the most successive tokens whose neurons together are always at most this share of all neurons.

    Raises:
        ValueError: the neurons of a single token are more.
    """
    longest = int(traces[0].shape[1]) - 1
    for k in range(1, longest + 1):
        windows = (np.lib.stride_tricks.sliding_window_view(trace[0], k, axis=0) for trace in traces)
        if (most := max(float(found.any(-1).mean(-1).max()) for found in windows)) > share:
            if k == 1:
                raise ValueError(f"a token uses {most:.1%} of the neurons, more than the share of {share:.1%}")
            return k - 1
    return longest


def measure(ladder: Ladder, reader: RecordReader, target: Tensor) -> dict[str, Read]:
    """Return what each step reads in the measured layers, for all tokens. The steps take turns with every token."""
    found = dict.fromkeys(STEPS, Read())
    for layer in ladder.layers:
        plans = ladder.plans()
        for reads in zip_longest(*(plans[step](layer) for step in STEPS)):
            for step, read in zip(STEPS, reads, strict=True):
                if read is not None:
                    found[step] = found[step].plus(_timed(reader, read, target))
    return found


def _timed(reader: RecordReader, read: Wanted, target: Tensor) -> Read:
    bundle, numbers = read
    rows, chosen, places = target.view(-1, bundle.form.nbytes), torch.from_numpy(numbers), torch.arange(len(numbers))
    began = time.perf_counter()
    nbytes = reader.read(bundle, chosen, rows, places)
    seconds = time.perf_counter() - began
    asked = len(requests(numbers, bundle.form.nbytes, reader.gap)) - 1 if len(numbers) else 0
    return Read(seconds, nbytes, asked)


def climbed(ladder: Ladder, turns: int) -> dict[str, Record]:
    """Return, by step, seconds, bytes, arithmetic bytes and requests per token, of all layers."""
    expected, steps = ladder.predicted(), dict[str, Record]()
    target = aligned_buffer(max(layer.bundle.nbytes for layer in ladder.layers)).fill_(0)
    with RecordReader([each for layer in ladder.layers for each in (layer.bundle, layer.halves)], gap=0) as reader:
        made = [measure(ladder, reader, target) for _ in range(turns)]
    for step in STEPS:
        tokens = 1 if step in STEPS[:2] else ladder.tokens
        each = made[0][step].bytes / tokens / len(ladder.layers)  # of a layer
        layers = ladder.model / each if step == "naive" else ladder.count
        factor = layers / tokens / len(ladder.layers)
        steps[step] = {"seconds": [factor * found[step].seconds for found in made], "bytes": round(layers * each),
                       "arithmetic": ladder.model if step == "naive" else round(layers * expected[step]),
                       "requests": round(factor * made[0][step].requests)}  # fmt: skip
    return steps


def ladder_of(model: Path, shape: PlantedShape, tokens: int, share: float, most: int) -> Ladder:
    """Return what to measure, after making missing records. most: layers to measure, spread over the model."""
    with Engine(model, lossy=Lossy(flash="predictors")) as engine:
        bundles, known = engine.core.opened.flash.prepare_bundles(), engine.core.opened.flash.trained
    assert known is not None
    found = traces(model, shape, known, tokens)
    window = window_of(found, share)
    chosen = sorted({shape.layers * i // min(most, shape.layers) for i in range(min(most, shape.layers))})
    layers = tuple(Layer(bundle, found[j]) for j in chosen if (bundle := bundles[j]) is not None)
    stored = sum(each.nbytes for each in read_checkpoint(model).values())
    return Ladder(layers, shape.layers, stored, window, int(share * shape.ffn))


def faults(steps: dict[str, Record]) -> list[str]:
    """Return the steps whose bytes differ from the arithmetic, and those that take no less time than the one before."""
    wrong = [f"{step}: {x['bytes']:,} bytes, not {x['arithmetic']:,}" for step, x in steps.items()
             if x["bytes"] != x["arithmetic"]]  # fmt: skip
    taken = {step: median(x["seconds"]) for step, x in steps.items()}
    return wrong + [f"{after} takes {taken[after]:.4g} s, {before} {taken[before]:.4g} s"
                    for before, after in pairwise(taken) if taken[after] >= taken[before]]  # fmt: skip


def main() -> int:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="opt-6.7b")
    parser.add_argument("--tokens", type=harness.at_least_one, default=64)
    parser.add_argument("--turns", type=harness.at_least_one, default=3)
    parser.add_argument("--share", type=float, default=0.15, help="room of the memory, of all neurons (default 0.15)")
    parser.add_argument("--layers", type=harness.at_least_one, default=4, help="that are measured (default 4)")
    parser.add_argument("--out", help="append the record to this file")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    model = make(shape, args.directory.resolve() / args.shape, workers=2)
    plant_predictors(model, shape)
    ladder = ladder_of(model, shape, args.tokens, args.share, args.layers)
    steps = climbed(ladder, args.turns)
    case = {"shape": args.shape, "tokens": args.tokens, "share": args.share, "layers": len(ladder.layers)}
    record: Record = {**harness.header("flash.ladder", case, [{"versions": harness.versions()}]),
                      "window": ladder.window, "steps": steps}  # fmt: skip
    harness.emit(record, args.out)
    for step, found in steps.items():
        print(f"{step:9} {median(found['seconds']):8.4f} s  {found['bytes'] / 1e6:10.2f} MB, by arithmetic"
              f" {found['arithmetic'] / 1e6:10.2f} MB  {found['requests']:8,} requests", file=sys.stderr)  # fmt: skip
    wrong = faults(steps)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
