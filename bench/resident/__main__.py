"""Resident memory of jobs against the memory they were given, with Python's cyclic garbage collector off.

python -m bench.resident jobs prompts states [--quick] [--only TEXT] [--out resident.jsonl]

jobs: twelve of mixed sizes, one after another on one engine. prompts: twenty models with a few prompts of 2k to 8k
tokens each, which are computed in pieces; with the least memory that is accepted, with a quarter more, and with the
least in a cgroup. states: models whose sequences have states beside keys and values, 48 of 96 at once, with the memory
that the plan of this policy takes. Each case runs in a process of its own. It fails if the process grows by more than
OVER times its budget in any job, if a row fails, or if the kernel kills it. Growth counts from where all modules are
imported and a tiny job has run, since the pages of libraries are code and not data.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness import Limits, Record, emit, machine, now, run_module, versions
from bench.limit import why_not
from bench.models import HybridShape, LlamaShape, OptShape, Shapes, make

MB = 10**6
OVER = 1.1  # most growth, as a multiple of the budget
MORE = 1.25  # budget of a case, as a multiple of the least memory that is accepted
SECONDS = 600.0  # most seconds of a case
NEW = 4  # tokens generated after a long prompt
Job = tuple[tuple[int, ...], int]  # tokens of each prompt, tokens to generate


@dataclass(frozen=True)
class Setting:
    """Jobs of one engine. Sizes in bytes.

    Attributes:
        model: directory.
        jobs: the jobs, in order.
        device: cpu or sim.
        device_mem, host_mem: the budget; host_mem for sim only.
        policy: fields of a Policy; None lets the planner choose.
        lossy: fields of a Lossy.
        short: numbers of the jobs, from 0, in whose second sweep one task gets no memory.
        collector: whether the cyclic garbage collector is on.
        tiny: directory of a tiny model of the same architecture, which runs before the growth is counted.
    """

    model: str
    jobs: tuple[Job, ...]
    device: str = "cpu"
    device_mem: int = 300 * MB
    host_mem: int | None = None
    policy: Record | None = None
    lossy: Record = field(default_factory=dict)
    short: tuple[int, ...] = ()
    collector: bool = False
    tiny: str | None = None

    @property
    def budget(self) -> int:
        """Return the bytes of RAM that the jobs were given."""
        return self.device_mem + (self.host_mem or 0)


def measure(setting: Setting, limited: bool = False) -> Record:
    """Run a setting in a fresh process and return the growth of the process.

    Args:
        setting: the jobs.
        limited: whether it runs in a cgroup, whose limit is the idle process's bytes and OVER times the budget.

    Returns:
        base: resident bytes before the engine was made.
        private: bytes of base that belong to no file.
        jobs: per job peak and after (bytes above base), ledger (most booked bytes), replanned (times), failed (rows),
            seconds.
        closed: bytes above base after the engine was closed.
        limit: bytes of the cgroup.
        over: the largest peak divided by the budget.
        wrong: messages for all that is not as it should be.
    """
    limit = None
    if limited:
        idle = run_module("bench.resident.side", json.dumps(asdict(replace(setting, jobs=()))), Limits(None, SECONDS))
        limit = int(idle["private"] + OVER * setting.budget)
    found = run_module("bench.resident.side", json.dumps(asdict(setting)), Limits(limit, SECONDS))
    if "error" in found:
        return {**found, "limit": limit, "over": None, "wrong": [found["error"]]}
    jobs, wrong = found["jobs"], []
    over = max(job["peak"] for job in jobs) / setting.budget
    if over > OVER:
        wrong.append(f"grown to {over:.2f} of the budget of {setting.budget:,} bytes; at most {OVER} is allowed")
    if any(job["failed"] for job in jobs):
        wrong.append("rows failed")
    if [bool(job["replanned"]) for job in jobs] != [n in setting.short for n in range(len(jobs))]:
        wrong.append("a job was replanned without an injected shortage, or was not replanned after one")
    return {**found, "limit": limit, "over": over, "wrong": wrong}


@dataclass(frozen=True)
class HeadShape(LlamaShape):
    """A LLaMA decoder with a head width that does not follow from the hidden size."""

    dim: int = 128

    def layer_shapes(self, j: int) -> Shapes:
        p, h = f"model.layers.{j}.self_attn.", self.hidden
        own = {"q_proj": (self.heads * self.dim, h), "k_proj": (self.kv_heads * self.dim, h),
               "v_proj": (self.kv_heads * self.dim, h), "o_proj": (h, self.heads * self.dim)}  # fmt: skip
        return super().layer_shapes(j) | {f"{p}{name}.weight": size for name, size in own.items()}

    def config(self) -> dict[str, object]:
        return super().config() | {"head_dim": self.dim}


@dataclass(frozen=True)
class Case:
    """Long prompts of one model.

    Attributes:
        heads: query heads, key/value heads, width of a head.
        prompts: tokens of each prompt.
        cache, weights: values of the switches of these names.
    """

    heads: tuple[int, int, int]
    prompts: tuple[int, ...]
    layers: int = 2
    cache: str | None = None
    weights: str | None = None
    device: str = "cpu"
    hidden: int = 1024
    ffn: int = 2816

    @property
    def name(self) -> str:
        """Return a short name, which differs between cases."""
        heads, prompts = "x".join(map(str, self.heads)), "+".join(map(str, self.prompts))
        return f"{heads}-l{self.layers}-p{prompts}-{self.cache or 'plain'}-{self.weights or 'plain'}-{self.device}"

    @property
    def shape(self) -> HeadShape:
        """Return the shape of the model."""
        heads, kv_heads, dim = self.heads
        return HeadShape(self.layers, self.hidden, self.ffn, heads, 8192, 8192 + 64, kv_heads=kv_heads, dim=dim)


CASES = (
    Case((32, 32, 128), (4095,)),
    Case((32, 32, 128), (4095,), layers=3, hidden=2048, ffn=5632),
    Case((32, 32, 128), (4095,), cache="bf16"),
    Case((32, 32, 128), (6000,), cache="int8"),
    Case((32, 32, 128), (4095,), cache="int4", weights="int4"),
    Case((32, 32, 128), (4095, 2100), device="sim"),
    Case((32, 32, 64), (8000,), layers=3),
    Case((32, 32, 64), (4095, 2500), cache="int4"),
    Case((32, 8, 128), (8000,)),
    Case((32, 8, 128), (8000,), cache="int8", weights="int4"),
    Case((32, 8, 128), (4095, 3000, 2100), layers=3, device="sim"),
    Case((32, 4, 128), (8000,), cache="bf16"),
    Case((32, 4, 64), (8000, 8000), layers=3, weights="int4"),
    Case((16, 2, 128), (8000,)),
    Case((16, 2, 256), (6000,), cache="int8", device="sim"),
    Case((16, 16, 64), (8000,), cache="int4", device="sim"),
    Case((8, 8, 64), (8000, 4000), layers=3),
    Case((8, 8, 128), (8000,), weights="int4"),
    Case((8, 8, 256), (6000,)),
    Case((8, 8, 256), (4095,), cache="bf16", weights="int4", device="sim"),
)
TINY = LlamaShape(1, 64, 128, 2, vocab=1024, kv_heads=2)


def given(setting: Setting, times: float) -> Setting:
    """Return the setting with `times` times the least device memory that the engine accepts, and on sim with the host
    memory of the plan for it."""
    from flexengine import Engine
    from flexengine.errors import TooLittle
    from flexengine.lossy import Lossy
    from flexengine.plan.workload import Workload

    ((prompts, new),) = setting.jobs
    workload, lossy = Workload.of((n, new) for n in prompts), Lossy(**setting.lossy)
    size = 1 << 16
    try:
        with Engine(setting.model, device=setting.device, device_mem=size, lossy=lossy) as engine:
            engine.planner.check(workload)
    except TooLittle as error:
        size = int(error.least["device"] * times)
    with Engine(setting.model, device=setting.device, device_mem=size, lossy=lossy) as engine:
        host = engine.plan(workload).total("host") if setting.device == "sim" else None
    return replace(setting, device_mem=size, host_mem=host)


def long_prompts(work: Path, quick: bool) -> Iterator[tuple[str, Setting, bool]]:
    """Yield (name, setting, whether in a cgroup) of long prompts."""
    tiny = str(make(TINY, work / "tiny"))
    for case in CASES[:1] if quick else CASES:
        model = make(case.shape, work / f"model-{'-'.join(map(str, (*case.heads, case.layers, case.hidden)))}")
        lossy = {"weights": case.weights, "cache": case.cache}
        job = Setting(str(model), ((case.prompts, NEW),), case.device, lossy=lossy, tiny=tiny)
        yield f"{case.name}, least", given(job, 1), False
        yield f"{case.name}, {MORE} of the least", given(job, MORE), False
        if why_not() is None:
            yield f"{case.name}, least, in a cgroup", given(job, 1), True


# A large cache with little computing: 32 KiB of K and V per token in float32, 1.6 MFLOP per layer and token.
SHAPE = OptShape(layers=16, hidden=256, ffn=1024, heads=4, vocab=4096)
JOBS: tuple[Job, ...] = tuple(((prompt,) * rows, new) for rows, prompt, new in (
    (16, 200, 8), (24, 256, 8), (8, 64, 16), (30, 256, 8), (4, 1000, 4), (24, 200, 24),
    (1, 1500, 8), (32, 256, 4), (12, 300, 8), (20, 250, 8), (6, 128, 4), (30, 260, 6),
))  # fmt: skip
QUICK = OptShape(layers=4, hidden=128, ffn=256, heads=2, vocab=1024)
QUICK_JOBS: tuple[Job, ...] = (((100,) * 8, 4), ((200,) * 16, 4), ((50,) * 4, 4)) * 4


def jobs_in_a_row(work: Path, quick: bool) -> Iterator[tuple[str, Setting, bool]]:
    """Yield (name, setting, whether in a cgroup) of 12 jobs of mixed sizes on one engine."""
    shape, jobs, size = (QUICK, QUICK_JOBS, 60 * MB) if quick else (SHAPE, JOBS, 300 * MB)
    cpu = Setting(str(make(shape, work / "model")), jobs, device_mem=size, tiny=str(make(QUICK, work / "tiny")))
    sim = replace(cpu, device="sim", device_mem=size // 2, host_mem=size // 2)
    short = tuple(range(1, len(cpu.jobs), 3))
    for setting in (cpu, sim):
        for limited in (False, True) if why_not() is None else (False,):
            where = ", in a cgroup" * limited
            yield f"{setting.device}, 12 jobs{where}", setting, limited
            yield f"{setting.device}, 12 jobs, 4 of them short of memory{where}", replace(setting, short=short), limited


# States of 1 to 9 MB a sequence. Before a model of four layers, one of two runs, which has a layer of each kind.
_GDN = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LINEAR, _WIDTH, _FFN = ["linear_attention", "full_attention"], 256, 512
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_key_value_heads": 2, "head_dim": 64, **_GDN, "layer_types": _LINEAR},
    "kimi_linear": {
        "linear_num_heads": 16, "linear_head_dim": 128, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 128, "layer_types": _LINEAR, "q_lora_rank": None, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 64,
        "mlp_layer_types": ["dense", "sparse"], "pad_token_id": None,
    },
    "mamba2": {"num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 16, "chunk_size": 64},
    "mamba": {"state_size": 64, "expand": 16, "intermediate_size": 16 * _WIDTH},
    "minimax": {
        "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": _LINEAR, "num_attention_heads": 16, "block_size": 64,
    },
    "xlstm": {"embedding_dim": 512, "hidden_size": 512, "num_heads": 2, "intermediate_size": None},
}  # fmt: skip
STATE_ROWS, STATE_TOKENS = 96, 70
STATE_POLICY = {"gpu_batch_size": 8, "num_gpu_batches": 6}  # half of the rows at once


def with_states(kind: str, layers: int, directory: Path) -> str:
    """Make a model with states, and return its directory."""
    fields = {"num_hidden_layers": layers, "intermediate_size": _FFN, **STATES[kind]}
    for name in ("layer_types", "mlp_layer_types"):
        if name in fields:
            fields[name] = fields[name] * (layers // 2)
    return str(
        make(HybridShape(layers, _WIDTH, _FFN, 4, 1024, 1024, "float32", model_type=kind, fields=fields), directory)
    )


def planned(setting: Setting) -> Setting:
    """Return the setting with the memory that its plan takes."""
    from flexengine import Engine, Policy
    from flexengine.plan.workload import Workload

    ((prompts, new),) = setting.jobs
    policy = Policy(**setting.policy or {})
    with Engine(setting.model, device=setting.device, policy=policy) as engine:
        layout = engine.plan(Workload.of((n, new) for n in prompts))
    host = layout.total("host") if setting.device == "sim" else None
    return replace(setting, device_mem=layout.total("device"), host_mem=host)


def many_states(work: Path, quick: bool) -> Iterator[tuple[str, Setting, bool]]:
    """Yield (name, setting, whether in a cgroup) of sequences whose states take most of what their plan takes."""
    for kind in list(STATES)[:1] if quick else STATES:
        model, tiny = (with_states(kind, n, work / f"{kind}-{n}") for n in (4, 2))
        setting = Setting(model, (((STATE_TOKENS,) * STATE_ROWS, 8),), policy=STATE_POLICY, tiny=tiny)
        cpu = planned(setting)
        yield f"{kind}, cpu", cpu, False
        if why_not() is None:
            yield f"{kind}, cpu, in a cgroup", cpu, True
        sim = replace(setting, device="sim", policy={**STATE_POLICY, "cache": (0, 1, 0)})
        yield f"{kind}, sim", planned(sim), False


KINDS = {"jobs": jobs_in_a_row, "prompts": long_prompts, "states": many_states}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.resident", description="Measure resident memory of jobs.")
    p.add_argument("kinds", nargs="+", choices=KINDS)
    p.add_argument("--quick", action="store_true", help="a tiny model, or one model with a long prompt")
    p.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text in it")
    p.add_argument("--out", help="JSON lines are added to this file of bench/results")
    args = p.parse_args(argv)
    bad = 0
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="flexengine-resident-") as work:
            for name, setting, limited in KINDS[kind](Path(work), args.quick):
                if args.only not in name:
                    continue
                found = measure(setting, limited)
                bad += bool(found["wrong"])
                print(f"{name:70} {found['over'] or 0:.2f} of {setting.budget / MB:,.0f} MB "
                      f" {'; '.join(found['wrong'])}", file=sys.stderr, flush=True)  # fmt: skip
                about = {"bench": "resident", "kind": kind, "case": name, "quick": args.quick, "time": now(),
                         "machine": machine(), "versions": versions(), "budget": setting.budget}  # fmt: skip
                emit({**about, **found}, args.out)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
