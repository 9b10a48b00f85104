"""FlexGen's six published policies, run as given on a simulated accelerator with a sixteenth of a T4's memory.

python -m bench.published [NAME ...] [--folder DIR] [--scale 4] [--layers N] [--dry] [--out FILE]

The shapes are OPT-6.7B, OPT-30B and OPT-175B, with hidden size, heads, feed-forward size and vocabulary divided by
SCALE, and random weights. Weights then have 1 / SCALE^2 of their bytes, and so have the memory limits of the T4, hidden
states and KV cache: the paper's 512 prompt tokens, its 32 generated ones and `prefill_tokens` are divided by SCALE too,
and by 2 where the bytes of a token are doubled, since all computing is in fp32 (a 4-bit cache has the same bytes). As
pages of 16 tokens are not divided, tokens are rounded down to whole pages: by 6 % if SCALE is 4. Splits, block shape,
delegation, halves of layers and compression are those of the policy files.

LAYERS has the layers of shapes that would take too long here; the limits are then smaller by what the other layers
would hold, with KV cache of as many tokens as there is room for with all layers. One JSON line per policy: whether
it fits, peak bytes beside the limits, sweeps (one per generated token if the whole block is alive at once), predicted
and measured seconds, and rows whose tokens equal those of `transformers`, or with 4 bits those of an engine with all on
the device. Exits with 1 if a policy does not fit or a token differs.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Record
from bench.models import OptShape, make

PROMPT, NEW = 512, 32  # tokens in and out in the paper
PREFILL = 2048  # `prefill_tokens`, which the policy files leave out
MACHINE = "t4-16gb_208gb_ssd"
PAGE_TOKENS = 16  # of the smallest pages
CHECKED = 4  # rows whose tokens are compared
SEED = 11
# Policy by size and compression; the paper compresses no weights of OPT-30B.
LOSSY: dict[str, Record] = {
    "opt-6.7b": {}, "opt-30b": {}, "opt-175b": {}, "opt-6.7b-4bit": {"weights": "int4", "cache": "int4"},
    "opt-30b-4bit": {"cache": "int4"}, "opt-175b-4bit": {"weights": "int4", "cache": "int4"},
}  # fmt: skip
# Layers of the runs, None for all. Those with fewer hold no share of a layer on the device, only its slots.
LAYERS: dict[str, int | None] = {
    "opt-6.7b": None, "opt-30b": None, "opt-175b": 16, "opt-6.7b-4bit": None, "opt-30b-4bit": 4, "opt-175b-4bit": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One policy on a smaller model.

    Attributes:
        name: of the policy, such as "opt-30b-4bit".
        scale: divisor of sizes; bytes are divided by its square.
        layers: of the model; None for all.
    """

    name: str
    scale: int = 4
    layers: int | None = None

    @property
    def config(self) -> Record:
        """Return the config of the model in full size."""
        from flexengine import shipped

        path = Path(shipped.find("models", self.name.removesuffix("-4bit"))) / "config.json"
        found: Record = json.loads(path.read_text())
        return found

    @property
    def shape(self) -> OptShape:
        """Return the smaller model."""
        config, by = self.config, self.scale
        if config["num_attention_heads"] % by:
            raise ValueError(f"{config['num_attention_heads']} heads of {self.name} cannot be divided by {by}")
        return OptShape(
            layers=self.layers or config["num_hidden_layers"], hidden=config["hidden_size"] // by,
            ffn=config["ffn_dim"] // by, heads=config["num_attention_heads"] // by, vocab=config["vocab_size"] // by,
            positions=256,
        )  # fmt: skip

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the prompt tokens and generated tokens of a row. At least two are generated: the second one attends
        to the cache. The last one is never cached."""
        by = self.scale * (1 if "cache" in LOSSY[self.name] else 2)
        new, cached = max(2, NEW // by), max(1, (PROMPT + NEW) // by // PAGE_TOKENS) * PAGE_TOKENS
        return cached - new + 1, new

    @property
    def policy(self) -> Any:
        """Return the published policy, as given, with smaller prefill chunks."""
        from flexengine import Policy, shipped

        given = Policy.load(shipped.find("policies", self.name))
        assert given.prefill_tokens == PREFILL
        return replace(given, prefill_tokens=PREFILL // (2 * self.scale))

    @property
    def lossy(self) -> Any:
        """Return the paper's compression."""
        from flexengine.lossy import Lossy

        return Lossy(**LOSSY[self.name])

    def prompts(self) -> list[list[int]]:
        """Return as many random prompts as the policy's block has sequences."""
        rng, vocabulary = random.Random(SEED), self.shape.vocab
        return [rng.choices(range(3, vocabulary), k=self.tokens[0]) for _ in range(self.policy.block_size)]

    def limits(self, facts: Any) -> dict[str, int]:
        """Return the bytes of device and host that the policy may use: those of the T4, less those that the layers
        which are left out would hold there. facts: of the smaller model."""
        from flexengine import shipped
        from flexengine.plan.hardware import Hardware
        from flexengine.policy import shares

        machine, policy = Hardware.load(shipped.find("hardware", MACHINE)), self.policy
        missing = self.config["num_hidden_layers"] - self.shape.layers
        weights = missing * sum(t.stored_bytes for t in facts.layers[0])
        cached = min(policy.block_size * (sum(self.tokens) - 1), room(self)) if missing else 0
        cache = missing * facts.kv_token * cached
        held = {tier: weights * shares(policy.weights)[tier] + cache * shares(policy.cache)[tier]
                for tier in ("device", "host")}  # fmt: skip
        whole = {"device": machine.device_bytes or 0, "host": machine.host_bytes or 0}
        return {tier: int(whole[tier] / self.scale**2 - held[tier]) for tier in held}


def facts_of(run: Run) -> Any:
    """Return the facts of the smaller model, which needs no weights for it."""
    from flexengine.worker.open_model import open_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(run.shape.config()))
        return open_model(folder, None, "sim", weights=False, lossy=run.lossy).facts


@cache
def room(run: Run) -> float:
    """Return the tokens of KV cache that the memory limits hold with all layers."""
    found = planned(replace(run, layers=None))
    if not found["fits"]:
        raise ValueError(f"{run.name} does not fit with all layers: {found['error']}")
    return float(found["room"])


def planned(run: Run) -> Record:
    """Return the bytes that the plan takes beside the limits, by tier, the share of the block that is alive, and the
    tokens of KV cache that there is room for."""
    from flexengine.errors import OutOfMemory
    from flexengine.plan.hardware import Capacity
    from flexengine.plan.layout import lay_out
    from flexengine.plan.workload import Workload

    facts = facts_of(run)
    limits, (prompt, new) = run.limits(facts), run.tokens
    work = Workload({(prompt, new): run.policy.block_size})
    capacity = Capacity(limits["device"], limits["host"], None, shared=False, staged=True)
    try:
        layout = lay_out(facts, run.policy, work, capacity)
    except OutOfMemory as error:
        return {"fits": False, "limits": limits, "error": str(error)}
    alive = sum(min(pool.pages // pool.held(work.longest) for pool in pools) for pools in layout.pools.values())
    return {"fits": True, "limits": limits, "bytes": {tier: layout.total(tier) for tier in layout.places},
            "alive": min(1.0, alive / run.policy.block_size), "room": sum(map(layout.room, layout.pools))}  # fmt: skip


def references(run: Run, model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of `transformers` in fp32; with 4 bits, of an engine with all on the device."""
    from flexengine.lossy import EXACT

    if run.lossy != EXACT:
        from flexengine import Engine, Policy

        with Engine(model, policy=Policy(len(prompts), 1), device="sim", lossy=run.lossy) as engine:
            return tokens_of(engine, prompts, run.tokens[1])
    import torch
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        made = [plain.generate(torch.tensor([prompt]), max_new_tokens=run.tokens[1], min_new_tokens=run.tokens[1],
                               do_sample=False, pad_token_id=1) for prompt in prompts]  # fmt: skip
    return [ids[0, len(prompt) :].tolist() for ids, prompt in zip(made, prompts, strict=True)]


def tokens_of(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Return the greedy tokens of an engine. Raise SystemExit if a row has an error."""
    from flexengine import SamplingParams

    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = engine.generate(rows, SamplingParams(max_tokens=new, ignore_eos=True))
    if errors := [r.error for r in results if r.error]:
        raise SystemExit(f"{len(errors)} rows failed; the first: {errors[0]}")
    return [list(r.token_ids) for r in results]


def measured(run: Run, folder: Path, checked: int = CHECKED) -> Record:
    """Run a whole block of a policy within the limits. Return the fields of its record.

    Args:
        folder: receives the model, and offloaded data.
        checked: number of rows whose tokens are compared.
    """
    from flexengine import Engine
    from flexengine.errors import OutOfMemory

    shape, prompts = run.shape, run.prompts()
    model = make(shape, folder / f"{run.name.removesuffix('-4bit')}-{run.scale}-{shape.layers}")
    limits = run.limits(facts_of(run))
    memory: Record = {f"{tier}_mem": nbytes for tier, nbytes in limits.items()}
    fields: Record = {"layers": shape.layers, "hidden": shape.hidden, "tokens": run.tokens, "limits": limits,
                      "sequences": len(prompts)}  # fmt: skip
    options: Record = {"policy": run.policy, "lossy": run.lossy, "offload_dir": folder, "prefix_sharing": False}
    with Engine(model, device="sim", **options, **memory) as engine:
        began = time.perf_counter()
        try:
            tokens = tokens_of(engine, prompts, run.tokens[1])
        except OutOfMemory as error:
            return {**fields, "fits": False, "error": str(error)}
        seconds, summary = time.perf_counter() - began, engine.summary
    assert summary.plan is not None
    expected = references(run, model, prompts[:checked])
    return {
        **fields, "fits": not summary.replanned, "peak_bytes": dict(summary.peak_bytes), "sweeps": summary.sweeps,
        "predicted_seconds": summary.plan.predicted_seconds, "seconds": summary.plan.measured_seconds,
        "with_loading": seconds, "prefill_seconds": summary.prefill_seconds, "busy": dict(summary.busy),
        "bytes": dict(summary.bytes), "policy": run.policy.to_json(),
        "rows_equal": sum(a == b for a, b in zip(tokens, expected, strict=False)), "rows_checked": len(expected),
        "different_rows": len(set(map(tuple, tokens))),
    }  # fmt: skip


def main() -> int:
    """Run the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of policies (default: all): {', '.join(LOSSY)}")
    parser.add_argument("--folder", type=Path, help="receives models and offloaded data (default: a temporary one)")
    parser.add_argument("--scale", type=int, default=4, help="divisor of sizes (default 4: 1/16 of the bytes)")
    parser.add_argument("--layers", type=int, help=f"of the models (default: {LAYERS}, None for all)")
    parser.add_argument("--dry", action="store_true", help="plan only: print bytes beside the limits")
    parser.add_argument("--out", help="append records to this file under bench/results/")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in LOSSY]:
        parser.error(f"there is no policy {unknown[0]!r}; there are {', '.join(LOSSY)}")
    faults = 0
    for name in args.names or LOSSY:
        run = Run(name, args.scale, args.layers or LAYERS[name])
        with tempfile.TemporaryDirectory() as scratch:
            found = planned(run) if args.dry else measured(run, args.folder or Path(scratch))
        case = {"name": name, "scale": run.scale, "layers": run.layers}
        harness.emit({**harness.header("published", case, [{"versions": harness.versions()}]), **found}, args.out)
        faults += not found["fits"] or found.get("rows_equal") != found.get("rows_checked")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
