"""Gate prediction on a mixture of experts that is trained on the spot: how many experts the layer before names.

python -m bench.flash.moe_lm [--folder DIR] [--steps 500] [--new 64] [--out FILE]

A Mixtral of 3 M parameters, with a token per byte, is trained in minutes on the source of Python's standard library.
Then the router of each layer is applied to the input of the experts of the layer before, on other text: the hit rate is
the share of the chosen experts that it names. Last, rows are generated with `flash` and memory for half of the experts,
with guesses and without, one by one and in a gpu_batch each. Of the experts that are not in memory, the record has the
share that the guess names (missing_guessed): only these can be read early. One JSON line.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flexengine import Engine, Lossy, Policy, SamplingParams  # before torch, as it sets how idle threads wait

# isort: split
import torch
import transformers
from torch import Tensor

from bench import harness
from bench.flash.counted import CountedBlock
from bench.flash.experts_side import summed, worth
from bench.flash.relu_model import SPECIAL, TEST, Training, fit, ids_of, nll, rows_of, save, source
from bench.harness import Record
from flexengine.guests.flash import expert_blocks
from flexengine.guests.flash.expert_blocks import ExpertBlocks

ROWS, LENGTH = 32, 255  # stretches of the text, and tokens of each


@dataclass(frozen=True)
class Shape(Training):
    """Sizes and training of the model.

    Attributes:
        width, layers, heads, experts, active: of Mixtral.
        inner: neurons of an expert.
        balance: weight of the loss that has routers use all experts.
    """

    width: int = 128
    layers: int = 6
    heads: int = 4
    inner: int = 160
    experts: int = 8
    active: int = 2
    balance: float = 0.02
    steps: int = 500


@dataclass(frozen=True)
class Case:
    """steps: of the training; new: tokens generated per row; generated: number of rows."""

    steps: int
    new: int
    generated: int = 4


def train(shape: Shape, directory: Path) -> Record:
    """Train a model, save it with its tokenizer, and return what `fit` returns."""
    torch.manual_seed(shape.seed)
    config = transformers.MixtralConfig(
        vocab_size=SPECIAL + 256, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, intermediate_size=shape.inner,
        num_local_experts=shape.experts, num_experts_per_tok=shape.active, max_position_embeddings=shape.context,
        router_aux_loss_coef=shape.balance, sliding_window=None, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).train()

    def loss_of(rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        out = model(rows, labels=rows, output_router_logits=True)
        loss, balance = out.loss.item(), out.aux_loss.item()
        return out.loss, {"loss": loss - shape.balance * balance, "balance": balance}

    made = fit(model, shape, loss_of)
    save(model, directory)
    return made


def hit_rates(directory: Path) -> Record:
    """Return, for each layer but the first, the share of chosen experts that the guess names, and that the token before
    chose."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows, mixtures = rows_of(ids_of(source(TEST)), ROWS, LENGTH), [layer.mlp for layer in model.model.layers]
    inputs, chosen = list[Tensor](), list[Tensor]()

    def note(_: Any, args: Any, out: Any) -> None:
        inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        chosen.append(out[2].view(*rows.shape, -1))

    hooks = [mixture.gate.register_forward_hook(note) for mixture in mixtures]
    with torch.no_grad():
        model(rows)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        named = [m.gate(x)[2].view(*rows.shape, -1) for m, x in zip(mixtures[1:], inputs, strict=False)]
    guesses = [_same(true, other) for true, other in zip(chosen[1:], named, strict=True)]
    return {"nll": nll(model, rows), "hit_rate": sum(guesses) / len(guesses), "hit_rates": guesses,
            "repeated": [_same(true[:, 1:], true[:, :-1]) for true in chosen[1:]]}  # fmt: skip


def _same(true: Tensor, other: Tensor) -> float:
    """Return the share of the experts in `true` that `other` has too, both [rows, tokens, active]."""
    return float((true[..., :, None] == other[..., None, :]).any(-1).float().mean())


def generate(directory: Path, case: Case, guessing: bool, batches: int = 1) -> Record:
    """Return the tokens of rows that are generated from one token, and the counts of all blocks.

    Args:
        batches: gpu_batches of a sweep, of a row each.
    """
    blocks, close = list[CountedBlock](), ExpertBlocks.close

    def closing(of_job: ExpertBlocks) -> None:
        blocks.extend(block for block in of_job.blocks if isinstance(block, CountedBlock))
        close(of_job)

    policy = Policy(1, batches, neurons=0.5, schedule="zigzag")
    changed = patch.multiple(ExpertBlocks, guessing=guessing, close=closing)
    counted = patch.object(expert_blocks, "ExpertBlock", CountedBlock)
    with changed, counted, Engine(directory, device="cpu", policy=policy, lossy=Lossy(flash="oracle")) as engine:
        rows = [{"prompt_token_ids": [0]}] * case.generated
        results = engine.generate(rows, SamplingParams(case.new, temperature=1.0, seed=1, ignore_eos=True))
        seconds = engine.summary.decode_seconds

    counts = summed([asdict(block.counts) for block in blocks])
    return {"token_ids": [r.token_ids for r in results], "decode_seconds": seconds, **counts,
            "guesses": worth(summed([asdict(block.guesses) for block in blocks]))}  # fmt: skip


def measure(directory: Path, case: Case) -> Record:
    """Train the model, unless the directory has it, and return what was measured."""
    shape = Shape(steps=case.steps)
    if not (report := directory / "training.json").exists():
        report.write_text(json.dumps(train(shape, directory)))
    ways = {f"{name}, {count} gpu_batches": generate(directory, case, guessing, count)
            for count in (1, case.generated) for name, guessing in (("guessing", True), ("plain", False))}  # fmt: skip
    equal = len({str(way.pop("token_ids")) for way in ways.values()}) == 1
    made = json.loads(report.read_text())
    return {"shape": asdict(shape), **made, **hit_rates(directory), "tokens_equal": equal, "generated": ways}


def main() -> None:
    """Measure and print the case that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", metavar="DIR", help="where the model is kept (default: a temporary directory)")
    parser.add_argument("--steps", type=harness.at_least_one, default=Shape.steps)
    parser.add_argument("--new", type=harness.at_least_one, default=64)
    parser.add_argument("--out", metavar="FILE", help="also append to bench/results/FILE")
    args = parser.parse_args()
    case = Case(args.steps, args.new)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        os.environ["FLEXENGINE_CACHE"] = str(folder / "cache")
        (folder / "moe-lm").mkdir(parents=True, exist_ok=True)
        line = measure(folder / "moe-lm", case)
    harness.emit({**harness.header("moe_lm", case, [{"versions": harness.versions()}]), **line}, args.out)


if __name__ == "__main__":
    main()
