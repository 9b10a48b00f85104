"""Outputs of one to four stages under ten policies, by `--stages` and by torchrun, beside that of one process."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from bench import harness
from bench.harness import Record
from bench.models import demo_model
from bench.pipeline.models import VOCABULARY, make_model
from flexengine.policy import Policy

HOST, DISK, MIX = (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.4, 0.3, 0.3)
POLICIES = {
    "device": Policy(2, 4),
    "one batch": Policy(8, 1),
    "row": Policy(2, 2, schedule="row"),
    "in pieces": Policy(2, 3, prefill_tokens=11, schedule="diagonal"),
    "host": Policy(2, 4, weights=HOST, cache=HOST, activations=HOST, schedule="zigzag"),
    "disk": Policy(1, 5, weights=DISK, cache=DISK, activations=DISK, prefill_tokens=20, slots=1),
    "delegated": Policy(3, 2, weights=HOST, cache=HOST, delegate="host", prefill_tokens=20, slots=3),
    "everywhere": Policy(2, 3, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=20),
    "streamed": Policy(1, 8, weights=DISK, slots=3),
    "chosen": None,
}
STAGES = (1, 2, 3, 4)
MOST_SECONDS = 300


def write_job(folder: Path) -> list[str]:
    """Write a random model with the demo model's tokenizer, the policies, and an input whose rows have several samples,
    noise, stop strings, or none of these. Return the words of the command."""
    from flexengine.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model())
    make_model(folder / "model", 5, 64, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    for name, policy in POLICIES.items():
        if policy is not None:
            (folder / f"{name}.json").write_text(json.dumps(policy.to_json()))
    rng = random.Random(5)
    kinds: list[Record] = [{}, {"temperature": 0.9}, {"n": 3, "temperature": 1.2, "seed": 9}, {"stop": ["e", "th"]},
                           {"n": 2, "temperature": 0.8, "stop": "a"}, {"repetition_penalty": 1.3}]  # fmt: skip
    rows = [{"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 50))],
             "max_tokens": rng.randrange(1, 12), **kinds[i % len(kinds)]} for i in range(24)]  # fmt: skip
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["in.jsonl", "-m", "model", "--ignore-eos", "--device", "sim", "--device-mem", "1G", "--host-mem", "1G",
            "--seed", "3", "-q"]  # fmt: skip


def launch(launcher: str, words: list[str], stages: int) -> list[str]:
    """Return the command line of so many stages."""
    if launcher == "--stages":
        return [sys.executable, "-m", "flexengine", "run", *words, *(["--stages", str(stages)] if stages > 1 else [])]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages), "-m",
            "flexengine.run", *words]  # fmt: skip


def grid(folder: Path, launchers: tuple[str, ...] = ("--stages", "torchrun")) -> tuple[Record, bool]:
    """Return the fields of the record, and whether all outputs are that of one process."""
    words, began = write_job(folder), time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.REPO)}

    def output(launcher: str, name: str, stages: int) -> bytes:
        path = folder / f"{launcher.strip('-')} {name} {stages}.jsonl"
        policy = [] if POLICIES[name] is None else ["--policy", f"{name}.json"]
        subprocess.run(launch(launcher, [*words, *policy, "-o", path.name], stages), cwd=folder, env=environment,
                       check=True, timeout=MOST_SECONDS)  # fmt: skip
        return path.read_bytes()

    expected = output("--stages", "chosen", 1)
    different = list[str]()
    for launcher in launchers:
        for name in POLICIES:
            for stages in STAGES:
                if output(launcher, name, stages) != expected:
                    different.append(f"{launcher}, {stages} stages, {name}")
            print(f"  {launcher}, {name}: {len(different)} different so far", file=sys.stderr)
    runs = len(launchers) * len(POLICIES) * len(STAGES)
    record = {"runs": runs, "launchers": list(launchers), "policies": list(POLICIES), "stages": list(STAGES),
              "different": different, "same": not different, "rows": expected.count(b"\n"),
              "seconds": time.monotonic() - began}  # fmt: skip
    return record, not different
