"""Two GPUs for one layer (tensor parallel), or for half of the layers each (stages): what the planner predicts.

python -m bench.plan.tensor

Tensor parallel: a machine whose GPU has twice the memory, products, attention and links to the host, so perfectly
divided; on top, every token of every layer crosses the link between both GPUs twice (an all-reduce after attention and
one after the MLP: with two GPUs each sends its partial sums once), and a call of it has a latency. Nothing else can be
computed meanwhile in the same gpu_batch, so these seconds are added. Stages: one GPU with half of the layers, half of
the host's memory and processors and half of the disk; the slowest stage sets the pace of a full pipeline. One sequence
fills no pipeline: its two stages take turns.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from flexengine import shipped
from flexengine.shell.commands.main import main

LATENCY = 20e-6  # seconds of an all-reduce of few bytes
ELEMENT = 2  # bytes
_TWICE = ("device_bytes", "prompt_attention", "decode_attention", "elementwise", "vector_flops")


class Case(NamedTuple):
    """A job on a machine. between: bytes per second of the link between both GPUs, and its name."""

    model: str
    hardware: str
    between: tuple[float, str]
    prompt: int
    tokens: int
    rows: int


PCIE3, NVLINK = (1.2e10, "PCIe 3"), (4.5e11, "NVLink 4")
CASES = (
    Case("opt-30b", "t4-16gb_208gb_ssd", PCIE3, 512, 32, 1000),
    Case("opt-6.7b", "t4-16gb_208gb_ssd", PCIE3, 512, 32, 1000),
    Case("opt-30b", "h100-80gb_512gb", NVLINK, 512, 32, 1000),
    Case("opt-30b", "h100-80gb_512gb", NVLINK, 512, 128, 1),
)


def scaled(value: Any, factor: float) -> Any:
    """Return a rate, or the rates of a table, times a factor. None stays."""
    if isinstance(value, list):
        return [[x, factor * y] for x, y in value]
    return None if value is None else factor * value


def predicted(folder: Path, case: Case, hardware: dict[str, Any], layers: int) -> float:
    """Return the predicted seconds of the planner's best policy for a job, with some of the model's layers."""
    config = json.loads(Path(shipped.find("models", case.model), "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    (folder / "hardware.json").write_text(json.dumps(hardware))
    words = ["plan", str(folder), "--hardware", str(folder / "hardware.json"), "--prompt-tokens", str(case.prompt),
             "--max-tokens", str(case.tokens), "--rows", str(case.rows), "--json", "-q"]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    assert code == 0, out.getvalue()
    return float(json.loads(out.getvalue())["seconds"])


def run(folder: Path, case: Case) -> str:
    """Return the row of a case."""
    one = json.loads(Path(shipped.find_file("hardware", case.hardware)).read_text())
    config = json.loads(Path(shipped.find("models", case.model), "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    links = {name: scaled(table, 2 if name in ("h2d", "d2h") else 1) for name, table in one["links"].items()}
    both = one | {name: scaled(one[name], 2) for name in _TWICE if name in one}
    both |= {"links": links, "products": {name: scaled(table, 2) for name, table in one["products"].items()}}
    both["cell_seconds"] = one["cell_seconds"] + 2 * LATENCY
    links = {name: scaled(table, 0.5 if "disk" in name else 1) for name, table in one["links"].items()}
    half = one | {"links": links, **{name: scaled(one[name], 0.5) for name in ("host_bytes", "disk_bytes")}}
    half |= {name: scaled(one[name], 0.5) for name in ("host_attention", "host_flops") if name in one}
    alone = predicted(folder, case, one, layers)
    crossing = case.rows * (case.prompt + case.tokens) * layers * 2 * width * ELEMENT / case.between[0]
    tensor = predicted(folder, case, both, layers) + crossing
    stages = alone if case.rows == 1 else predicted(folder, case, half, layers // 2)
    best = "tensor parallel" if tensor < 0.95 * stages else "stages" if stages < 0.95 * tensor else "no difference"
    return (f"| {case.model} | 2 x {case.hardware.split('-')[0].upper()}, {case.between[1]} | {case.rows:,} x"
            f" {case.prompt} + {case.tokens} | {alone:.4g} s | {stages:.4g} s ({alone / stages:.2f}x) | {tensor:.4g} s"
            f" ({alone / tensor:.2f}x), of which {crossing:.3g} s all-reduce | {best} |")  # fmt: skip


if __name__ == "__main__":
    print("| model | GPUs | rows x prompt + tokens | one GPU | stages | tensor parallel | faster |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        for each in CASES:
            print(run(Path(made), each), flush=True)
    sys.exit(0)
