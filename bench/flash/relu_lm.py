"""Predictors of a ReLU model that is trained on the spot: their misses and false alarms, and what masking costs.

python -m bench.flash.relu_lm [--folder DIR] [--steps 1200] [--tokens 32768] [--misses 0.045] [--rank N] [--out FILE]

A model of 3 M parameters (bench/flash/relu_model.py) is trained in minutes, and its predictors as `flexengine flash
train` trains them. Then the mean nats per token of other text are measured: dense, with the oracle's mask (activations
that are 0 anyway), and with the predictors' masks (activations that are not predicted become 0). One JSON line.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexengine import Engine  # before torch, as it sets how idle threads wait

# isort: split
import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear

from bench import harness
from bench.flash.relu_model import LEARN, TEST, Shape, blocks, ids_of, nll, rows_of, source, train
from bench.harness import Record
from flexengine.guests.flash import training
from flexengine.guests.flash.predictors import Predictor, Trained
from flexengine.guests.flash.training import Settings

ROWS, LENGTH = 64, 255  # stretches of the text for nll, and tokens of each
Mask = Callable[[int, Tensor], Tensor]  # of a layer, from its inputs [tokens, width]


@dataclass(frozen=True)
class Case:
    """steps: of the model's training; tokens, misses, rank: as of `flexengine flash train`."""

    steps: int
    tokens: int
    misses: float
    rank: int | None


@contextmanager
def masked(model: Any, mask: Mask) -> Iterator[None]:
    """Set the activations that the mask does not have to 0, in all layers of a model of transformers."""
    masks: dict[int, Tensor] = {}
    hooks = list[Any]()

    def watch(number: int, block: Any) -> None:
        def before(_: Any, args: Any) -> None:
            masks[number] = mask(number, args[0].reshape(-1, args[0].shape[-1]))

        def after(_: Any, args: Any, out: Tensor) -> Tensor:
            return out * masks[number].view(out.shape)

        hooks.append(block.fc1.register_forward_pre_hook(before))
        hooks.append(block.activation_fn.register_forward_hook(after))

    for number, block in enumerate(blocks(model)):
        watch(number, block)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def losses(directory: Path, predictors: Sequence[Predictor]) -> Record:
    """Return the nats per token of the TEST text: dense, with the oracle's masks, with those of predictors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = rows_of(ids_of(source(TEST)), ROWS, LENGTH)
    firsts, found = [block.fc1 for block in blocks(model)], {"dense": nll(model, rows)}
    masks: dict[str, Mask] = {
        "oracle": lambda number, x: linear(x, firsts[number].weight, firsts[number].bias) > 0,
        "predictor": lambda number, x: predictors[number].active(x),
    }
    for name, mask in masks.items():
        with torch.no_grad(), masked(model, mask):
            found[name] = nll(model, rows)
    return {"tokens": rows[:, 1:].numel(), "nll": found, "nll_more": found["predictor"] - found["dense"]}


def predict(directory: Path, case: Case) -> Trained:
    """Return the predictors of the model in a directory."""
    with Engine(directory, device="cpu", prefix_sharing=False) as engine:
        core = engine.core
        text = training.cut(LEARN, source(LEARN), core.tokenizer, core.skeleton.context_length, case.tokens)
        return training.predictors(engine, text, Settings(case.misses, case.rank))


def measure(directory: Path, case: Case) -> Record:
    """Train model and predictors, and return what was measured."""
    if not (report := directory / "training.json").exists():
        report.write_text(json.dumps(train(Shape(steps=case.steps), directory)))
    made, began = json.loads(report.read_text()), time.perf_counter()
    trained = predict(directory, case)
    seconds, errors = time.perf_counter() - began, trained.errors
    layers = [
        {"active": x.errors.active_share, "predicted": x.errors.predicted_share, "misses": x.errors.misses,
         "false_alarms": x.errors.false_alarms, "rank": x.predictor.rank, "threshold": x.predictor.threshold,
         "true_window": x.true.window, "predicted_window": x.predicted.window, "true_rows": x.true.rows,
         "predicted_rows": x.predicted.rows}
        for x in trained.known
    ]  # fmt: skip
    return {
        "shape": asdict(Shape(steps=case.steps)), **made, "predictor_seconds": seconds,
        "active": errors.active_share, "predicted": errors.predicted_share, "misses": errors.misses,
        "false_alarms": errors.false_alarms, "predictor_bytes": trained.nbytes,
        **losses(directory, [layer.predictor for layer in trained.known]), "layers": layers,
    }  # fmt: skip


def main() -> None:
    """Measure and print the case that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", metavar="DIR", help="where the model is kept (default: a temporary directory)")
    parser.add_argument("--steps", type=harness.at_least_one, default=Shape.steps)
    parser.add_argument("--tokens", type=harness.at_least_one, default=32768)
    parser.add_argument("--misses", type=float, default=0.045)
    parser.add_argument("--rank", type=harness.at_least_one)
    parser.add_argument("--threads", type=harness.at_least_one, default=torch.get_num_threads())
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = Case(args.steps, args.tokens, args.misses, args.rank)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FLEXENGINE_CACHE"] = str(Path(args.folder or temporary) / "cache")
        line = measure(Path(args.folder or temporary) / "relu-lm", case)
    harness.emit({**harness.header("relu_lm", case, [{"versions": harness.versions()}]), **line}, args.out)


if __name__ == "__main__":
    main()
