"""A small ReLU language model, trained on the spot: OPT's architecture, a token per byte, few active neurons.

The loss has a term for the mean of all activations (L1), without which over half of the neurons are active. The text is
the source of Python's standard library. Files are divided into three parts: TRAIN for the model, LEARN for predictors,
TEST for measurements.
"""

import hashlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

TRAIN, LEARN, TEST = "train", "learn", "test"
SPECIAL = 3  # <s>, </s>, <unk> come before the 256 bytes
_SKIPPED = ("site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3")


@dataclass(frozen=True)
class Training:
    """Length and rate of a training.

    Attributes:
        context: most tokens of a sequence.
        rows: sequences of a step.
        rate: highest learning rate.
        steps: number of steps; 1,200 of the ReLU model take about 7 minutes on two idle cores.
        seed: of weights and rows.
    """

    context: int = 256
    rows: int = 6
    rate: float = 2e-3
    steps: int = 1200
    seed: int = 0


@dataclass(frozen=True)
class Shape(Training):
    """Sizes and training of the model.

    Attributes:
        width, layers, heads, neurons: of OPT.
        sparsity: weight of the mean activation in the loss.
    """

    width: int = 192
    layers: int = 4
    heads: int = 6
    neurons: int = 1536
    sparsity: float = 0.3


def tokenizer() -> Any:
    """Return a tokenizer with a token per byte, from SPECIAL on, and <s> before every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {"<s>": 0, "</s>": 1, "<unk>": 2} | {letter: SPECIAL + i for i, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(names, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def source(part: str) -> str:
    """Return the text of a part: TRAIN has 18 of 20 files, LEARN and TEST one of 20 each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if not set(_SKIPPED) & set(p.relative_to(root).parts)]
    ours = (p for p in files if _part(p.relative_to(root)) == part)
    return "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in ours)


def _part(path: Path) -> str:
    number = hashlib.sha256(path.as_posix().encode()).digest()[0] % 20
    return {0: LEARN, 1: TEST}.get(number, TRAIN)


def ids_of(text: str) -> Tensor:
    """Return the tokens of a text, int64 [n], without <s>."""
    return torch.tensor(tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"])


def rows_of(ids: Tensor, count: int, length: int) -> Tensor:
    """Return `count` stretches of `length` tokens with <s> in front, at even distances: [count, length + 1]."""
    starts = torch.linspace(0, len(ids) - length, count).long()
    rows = torch.stack([ids[s : s + length] for s in starts.tolist()])
    return nn.functional.pad(rows, (1, 0), value=0)


def blocks(model: Any) -> list[Any]:
    """Return the decoder layers of a model of transformers, each with fc1, activation_fn and fc2."""
    return list(model.model.decoder.layers)


@contextmanager
def watching(model: Any) -> Iterator[list[Tensor]]:
    """Collect the activations of all layers while the block runs; the caller empties the list."""
    found: list[Tensor] = []
    hooks = [b.activation_fn.register_forward_hook(lambda _, args, out: found.append(out)) for b in blocks(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def nll(model: Any, rows: Tensor) -> float:
    """Return the mean nats per token of rows that begin with <s>."""
    with torch.no_grad():
        logits = torch.cat([model(part).logits[:, :-1] for part in torch.split(rows, 16)])
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def train(shape: Shape, directory: Path) -> dict[str, Any]:
    """Train a model, save it with its tokenizer, and return steps, seconds and the last losses."""
    torch.manual_seed(shape.seed)
    config = transformers.OPTConfig(
        vocab_size=SPECIAL + 256, hidden_size=shape.width, num_hidden_layers=shape.layers, ffn_dim=shape.neurons,
        num_attention_heads=shape.heads, max_position_embeddings=shape.context, word_embed_proj_dim=shape.width,
        dropout=0.0, attention_dropout=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=1, init_std=0.04,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with watching(model) as activations:

        def loss_of(rows: Tensor) -> tuple[Tensor, dict[str, float]]:
            logits = model(rows).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            penalty = torch.stack([a.mean() for a in activations]).mean()
            active = float(torch.stack([(a > 0).float().mean() for a in activations]).mean())
            activations.clear()
            return loss + shape.sparsity * penalty, {"loss": loss.item(), "active": active}

        made = fit(model, shape, loss_of)
    save(model, directory)
    return made


def fit(
    model: Any, shape: Training, loss_of: Callable[[Tensor], tuple[Tensor, dict[str, float]]]
) -> dict[str, Any]:  # fmt: skip
    """Train a model on the TRAIN text, and return the parameters, the seconds and the last values.

    Args:
        model: in training mode.
        shape: length and rate.
        loss_of: returns the loss of rows [rows, context], and values to print and return.
    """
    ids, began, values = ids_of(source(TRAIN)), time.perf_counter(), dict[str, float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(shape.steps):
        rate = min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / shape.steps)))
        optimizer.param_groups[0]["lr"] = shape.rate * rate
        starts = torch.randint(len(ids) - shape.context, (shape.rows,))
        loss, values = loss_of(torch.stack([ids[s : s + shape.context] for s in starts.tolist()]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"step {step + 1}: {shown}", file=sys.stderr, flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    last = {f"train_{name}": value for name, value in values.items()}
    return {"parameters": parameters, "train_seconds": time.perf_counter() - began, **last}


def save(model: Any, directory: Path) -> None:
    """Save a model with its tokenizer."""
    model.eval().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
