"""Attention on the host: the tokens of transformers, bytes and memory by formula, refusals; the rule when it pays."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.kernels.delegation_rule import Rule, read_share, rule_of
from flexengine import Engine, Policy, SamplingParams, shipped
from flexengine.errors import InvalidInput
from flexengine.lossy import EXACT, Lossy
from flexengine.plan.delegation import projection_share
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.sizes import ALIGN, aligned, slot_bytes
from flexengine.plan.workload import Workload
from flexengine.runtime.lane import Stream, new_lane
from tests.helpers.drawn import model_of
from tests.helpers.families import LENGTHS, NEW
from tests.helpers.plans import opt

H, K = (0, 1, 0), (0, 0, 1)
MIX = (0.4, 0.3, 0.3)
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
# (policy fields, overlap)
GRID: list[tuple[dict[str, Any], bool]] = [
    (dict(gpu_batch_size=8, num_gpu_batches=1, cache=H), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=H, weights=H, slots=1), True),
    (dict(gpu_batch_size=3, num_gpu_batches=3, cache=H, weights=K, slots=2, schedule="zigzag"), True),
    (dict(gpu_batch_size=1, num_gpu_batches=8, cache=(0, 0.6, 0.4), weights=MIX, slots=3), True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, cache=MIX, weights=MIX, schedule="diagonal", slots=3), True),
    (dict(gpu_batch_size=4, num_gpu_batches=2, cache=H, weights=K, schedule="row", slots=1), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=(0.5, 0.5, 0), prefill_tokens=16), True),
    (dict(gpu_batch_size=3, num_gpu_batches=2, cache=H, weights=MIX, prefill_tokens=7, schedule="diagonal"), False),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=MIX, weights=MIX, slots=3), False),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=K, weights=(0, 0.5, 0.5), activations=H, schedule="zigzag"), True),
    (dict(gpu_batch_size=3, num_gpu_batches=3, cache=MIX, activations=MIX, slots=1, prefill_tokens=7), True),
    (dict(gpu_batch_size=3, num_gpu_batches=3, cache=H, weights=(0.2, 0.8, 0), activations=H, half_layers=True), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=MIX, weights=K, schedule="zigzag", half_layers=True), True),
    (dict(gpu_batch_size=8, num_gpu_batches=1, cache=K, weights=MIX, activations=K, half_layers=True), False),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=MIX, weights=MIX, delegate="host", half_layers=True), True),
]  # fmt: skip
# Grouped heads, a window, a soft cap, sinks, ALiBi, and plain heads: the first under every policy.
SPECIAL = ("llama", "mistral", "gemma2", "gpt-oss", "bloom", "opt")
HALVES = [case for case, (fields, _) in enumerate(GRID) if fields.get("half_layers")]
RUNS = [(SPECIAL[0], case) for case in range(len(GRID))]
RUNS += [(name, case) for name in SPECIAL[1:] for case in (1, 4, 9, 10)]
RUNS += [(name, case) for name in SPECIAL[1:] for case in HALVES if name != "gpt-oss"]  # it has experts


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), RUNS)
def test_tokens_are_those_of_transformers(families: Any, tmp_path: Path, family: str, case: int) -> None:
    known = families(family)
    fields, overlap = GRID[case]
    policy = Policy(**{"delegate": "all", **fields})
    with Engine(known.directory, policy=policy, device="sim", overlap=overlap, offload_dir=tmp_path) as engine:
        results = engine.generate(known.rows, GREEDY)
        assert [r.error for r in results] == [None] * len(LENGTHS)
        assert [r.token_ids for r in results] == known.expected
        assert engine.summary.busy["cpu"] > 0
        if case == 1:  # a second job, with other places
            assert [r.token_ids for r in engine.generate(known.rows[2:5], GREEDY)] == known.expected[2:5]
    assert not list(tmp_path.iterdir())


SUITE = {"opt-6.7b": EXACT, "opt-30b": EXACT, "opt-175b": EXACT, "opt-6.7b-4bit": Lossy("int4", cache="int4"),
         "opt-30b-4bit": Lossy(cache="int4"), "opt-175b-4bit": Lossy("int4", cache="int4")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_policies_that_flexgen_published_run_as_given(families: Any, tmp_path: Path, name: str) -> None:
    """With a whole block of each, in the memory that is planned. With 4 bits, tokens are those of all on the device."""
    known, policy, lossy = families("opt"), Policy.load(shipped.find("policies", name)), SUITE[name]
    times = -(-policy.block_size // len(known.rows))
    rows, expected = known.rows * times, known.expected * times
    if lossy != EXACT:
        with Engine(known.directory, policy=Policy(8, 1), device="sim", lossy=lossy) as engine:
            expected = [r.token_ids for r in engine.generate(known.rows, GREEDY)] * times
    options: dict[str, Any] = dict(policy=policy, lossy=lossy, offload_dir=tmp_path, prefix_sharing=False)
    with Engine(known.directory, device="sim", **options) as engine:
        layout = engine.plan(Workload.of((len(p), NEW) for p in known.prompts * times))
    memory = {f"{tier}_mem": layout.total(tier) + ALIGN for tier in ("device", "host")}
    with Engine(known.directory, device="sim", **options, **memory) as engine:
        assert [r.token_ids for r in engine.generate(rows, GREEDY)] == expected
        assert engine.summary.peak_bytes == {t: layout.total(t) for t in ("device", "host", "disk")}
        assert (engine.summary.busy.get("cpu", 0) > 0) == policy.delegates


LOSSY = (Lossy(cache="bf16"), Lossy(cache="int8"), Lossy(cache="int4"), Lossy(sparse_attention=0.3),
         Lossy("int8", cache="int4"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lossy", LOSSY, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_lossy_caches_give_the_tokens_they_give_undelegated(families: Any, family: str, lossy: Lossy) -> None:
    known, found = families(family), []
    fields: dict[str, Any] = dict(gpu_batch_size=3, num_gpu_batches=3, cache=(0.3, 0.4, 0.3), weights=(0.5, 0.5, 0))
    for delegate in ("none", "host", "all"):
        with Engine(known.directory, policy=Policy(**fields, delegate=delegate), device="sim", lossy=lossy) as engine:
            found.append([r.token_ids for r in engine.generate(known.rows, GREEDY)])
    assert found[0] == found[1] == found[2]


# Bytes and memory.


def measured(family: Any, policy: Policy, tmp_path: Path, **options: Any) -> dict[str, Any]:
    with Engine(family.directory, policy=policy, device="sim", offload_dir=tmp_path, **options) as engine:
        assert [r.token_ids for r in engine.generate(family.rows, GREEDY)] == family.expected
        layout = engine.plan(Workload.of((len(p), NEW) for p in family.prompts))
        assert engine.summary.peak_bytes == {t: layout.total(t) for t in ("device", "host", "disk")}
        facts = engine.facts
        shape = {"layers": len(facts.layers), "heads": facts.heads, "kv": facts.kv_heads, "dim": facts.head_dim}
        page = next(pages[0] for place, pages in layout.page_bytes.items() if place != "device")
        return {**engine.summary.to_json(), **shape, "hidden": facts.hidden, "page": page, "layout": layout}


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_bytes_of_a_delegated_token(families: Any, tmp_path: Path, family: str) -> None:
    """Down queries, key and value, up the output, per token and layer; pages go down once, when the prompt is done."""
    got = measured(families(family), Policy(4, 2, cache=H, delegate="host"), tmp_path)
    tokens = len(LENGTHS) * (NEW - 1)
    down = got["layers"] * tokens * (got["heads"] + 2 * got["kv"]) * got["dim"] * 4
    up = got["layers"] * tokens * got["heads"] * got["dim"] * 4
    pages = got["layers"] * len(LENGTHS) * got["page"]  # one page holds the longest sequence
    if family == "gemma2":  # half of the layers see 9 tokens: of a prompt they keep those pages of 16 tokens
        token = 2 * got["kv"] * got["dim"] * 4
        seen = [{s // 16 for s in range(max(0, n - 8), n)} for n in LENGTHS]
        pages = got["layers"] // 2 * token * sum(-(-(max(LENGTHS) + NEW - 1) // 16) * 16 + 16 * len(p) for p in seen)
    assert got["bytes"] == {"h2d": up, "d2h": down + pages, "disk_read": 0, "disk_write": 0}


@pytest.mark.parametrize(("cache", "delegate"), [((0, 0.5, 0.5), "host"), ((0, 0.5, 0.5), "all"), (K, "all")])
def test_pages_on_a_disk_cross_no_link_if_the_cpu_attends(
    families: Any, tmp_path: Path, cache: tuple[float, ...], delegate: str
) -> None:
    """Of each sequence that the CPU attends to: down queries, key and value, up the output. The disk moves the same
    pages. If the CPU attends to KV cache in RAM only, pages of the disk cross."""
    moved, there = (measured(families("llama"), Policy(4, 2, cache=cache, schedule="zigzag", delegate=d), tmp_path)
                    for d in ("none", delegate))  # fmt: skip
    for link in ("disk_read", "disk_write"):
        assert moved["bytes"][link] == there["bytes"][link] > 0
    tokens, page = there["layers"] * len(LENGTHS) * (NEW - 1), there["page"]
    assert there["bytes"]["disk_read"] == cache[2] * tokens * page
    by_cpu, crossing = (cache[1], 1) if delegate == "host" else (1, 0)
    up = by_cpu * tokens * there["heads"] * there["dim"] * 4
    assert there["bytes"]["h2d"] == up + crossing * there["bytes"]["disk_read"]
    down = tokens * (there["heads"] + 2 * there["kv"]) * there["dim"] * 4 + there["layers"] * len(LENGTHS) * page
    assert there["bytes"]["d2h"] == by_cpu * down + crossing * there["bytes"]["disk_write"]  # with pages of prompts


def test_staging_has_room_for_sequences_that_share_nothing_with_each_other(tmp_path: Path) -> None:
    """Eight stems of 512 tokens, each of two sequences: a gpu_batch of eight decoding sequences may have them all."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, eos_token_id=None, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rng = random.Random(1)
    stems = [rng.choices(range(3, 299), k=512) for _ in range(8)]
    rows = [{"prompt_token_ids": stem + rng.choices(range(3, 299), k=more)} for stem in stems for more in (1, 41)]
    sizes = [(512 + more, NEW) for more in (1, 41)]
    work = Workload(dict.fromkeys(sizes, 8), dict.fromkeys(sizes, 256.0), len(stems), longest_stem=512)
    found = []
    for delegate in ("none", "all"):
        policy = Policy(8, 2, cache=K, schedule="zigzag", delegate=delegate)
        with Engine(tmp_path / "model", policy=policy, device="sim") as engine:
            found.append([r.token_ids for r in engine.generate(rows, GREEDY)])
            layout = engine.plan(work)
            assert engine.summary.peak_bytes == {t: layout.total(t) for t in ("device", "host", "disk")}
    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]}) > 8  # the prompts matter
    assert layout.cache_stage == 8 * 9 * layout.page_bytes["disk"][0]  # pages of 64 tokens


def test_hidden_states_of_delegated_sequences_cross_the_link(families: Any, tmp_path: Path) -> None:
    here, away = (measured(families("llama"), Policy(4, 2, cache=H, activations=a, delegate="host"), tmp_path)
                  for a in ((1, 0, 0), H))  # fmt: skip
    tokens = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    crossing = (here["layers"] - 1) * tokens * here["hidden"] * 4
    for link in ("h2d", "d2h"):
        assert away["bytes"][link] - here["bytes"][link] == crossing


def test_halves_of_layers_take_the_room_of_one(families: Any, tmp_path: Path) -> None:
    """Each half crosses the link once a sweep, like the whole; its slot is as large as the half."""
    fields: dict[str, Any] = dict(cache=H, weights=H, schedule="zigzag", delegate="host")
    whole, halves = (measured(families("opt"), Policy(4, 2, half_layers=half, **fields), tmp_path)
                     for half in (False, True))  # fmt: skip
    assert whole["bytes"] == halves["bytes"]
    assert whole["sweeps"] == halves["sweeps"]
    with Engine(families("opt").directory, device="sim") as engine:
        facts = engine.facts
    early, late = (slot_bytes(t.held_bytes for t in facts.layers[0] if t.early == first) for first in (True, False))
    named = {t.name.rpartition("layers.0.")[2].rpartition(".")[0] for t in facts.layers[0] if t.early}
    assert named == {"self_attn_layer_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert halves["layout"].slots == [early, max(late, halves["layout"].slot)]
    saved = whole["layout"].account["device"]["weight slots"] - halves["layout"].account["device"]["weight slots"]
    assert saved == 2 * aligned(whole["layout"].slot) - aligned(early) - aligned(halves["layout"].slot)


def test_layers_with_experts_are_not_halved(families: Any) -> None:
    policy = Policy(4, 2, weights=H, half_layers=True)
    refusal = pytest.raises(InvalidInput, match="half_layers is True, but layers of this model cannot be divided")
    with Engine(families("gpt-oss").directory, policy=policy, device="sim") as engine, refusal:
        engine.generate(families("gpt-oss").rows, GREEDY)


@pytest.mark.parametrize("fields", [dict(cache=H), dict(cache=MIX, weights=MIX, slots=3), dict(cache=(0.2, 0.8, 0))])
def test_memory_is_booked_to_the_byte(families: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    policy = Policy(gpu_batch_size=3, num_gpu_batches=3, **fields, delegate="host")
    layout = measured(families("llama"), policy, tmp_path)["layout"]
    there = 9 - round(9 * fields["cache"][0])  # sequences
    row = (4 + 2 * 2) * 16 * 4
    assert layout.account["host"]["delegation buffers"] == aligned(there * row)
    assert layout.account["device"]["delegation buffers"] == aligned(there * row)
    assert layout.account["host"]["delegation workspace"] == aligned(min(there, 3) * 4 * 16 * 4)


def test_host_memory_is_enough_at_the_predicted_peak_and_not_a_page_less(families: Any, tmp_path: Path) -> None:
    policy = Policy(4, 2, cache=H, schedule="zigzag", delegate="host")
    need = measured(families("llama"), policy, tmp_path)["peak_bytes"]["host"]
    assert measured(families("llama"), policy, tmp_path, host_mem=need + ALIGN)["sweeps"] == NEW
    tight = measured_sweeps(families("llama"), policy, tmp_path, need - ALIGN)
    assert tight > NEW  # one sequence had to wait


def measured_sweeps(family: Any, policy: Policy, tmp_path: Path, host_mem: int) -> int:
    with Engine(family.directory, policy=policy, device="sim", offload_dir=tmp_path, host_mem=host_mem) as engine:
        assert [r.token_ids for r in engine.generate(family.rows, GREEDY)] == family.expected
        return int(engine.summary.sweeps)


def test_the_trace_shows_the_host_at_work(families: Any, tmp_path: Path) -> None:
    known = families("llama")
    policy = Policy(4, 2, cache=H, delegate="host")
    with Engine(known.directory, policy=policy, device="sim", trace=tmp_path / "t.json") as e:
        e.generate(known.rows, GREEDY)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    names = {(lanes[x["tid"]], x["name"]) for x in events if x["ph"] == "X"}
    assert {("cpu", "attend"), ("d2h", "send queries"), ("h2d", "fetch attention"),
            ("device", "compute up to attention"), ("device", "compute from attention on")} <= names  # fmt: skip


def test_the_host_lane_waits_for_the_gpu_itself() -> None:
    """A stream's work is queued; the CPU must not read data that has not arrived."""
    lane = new_lane("stream", "cpu")
    assert not isinstance(lane, Stream)
    lane.close()


# Refusals, all before anything is allocated.


def test_refused_where_ram_is_the_device(families: Any) -> None:
    known = families("llama")
    policy = Policy(4, 2, cache=(0.5, 0.5, 0), delegate="host")
    with Engine(known.directory, policy=policy, device="cpu") as engine:
        with pytest.raises(InvalidInput, match="delegate is host, but on device 'cpu' RAM is the device"):
            engine.generate(known.rows, GREEDY)
        assert all(engine.core.machine.tier(t).ledger.peak == 0 for t in ("device", "host", "disk"))


def test_halves_are_refused_where_ram_is_the_device(families: Any) -> None:
    policy, known = Policy(4, 2, half_layers=True), families("llama")
    refusal = pytest.raises(InvalidInput, match="half_layers is True, but on device 'cpu' RAM is the device")
    with Engine(known.directory, policy=policy, device="cpu") as engine, refusal:
        engine.generate(known.rows, GREEDY)


def test_refused_where_the_share_is_less_than_a_sequence(families: Any) -> None:
    known = families("llama")
    with Engine(known.directory, policy=Policy(2, 1, cache=(0.9, 0.1, 0), delegate="host"), device="sim") as engine:
        with pytest.raises(InvalidInput, match=r"a share of 0\.1 of the KV cache is no sequence of a block of 2;"):
            engine.generate(known.rows, GREEDY)
        assert engine.core.machine.host.ledger.peak == engine.core.machine.device.ledger.peak == 0


# The rule.


def test_the_rule_is_that_of_systems_written_out() -> None:
    """4 b h1 s / cpu + 4 b h1 / link < 4 b h1 s / link + t_gpu; the new token's K and V cross either way."""
    rng = random.Random(0)
    for _ in range(200):
        b, h1 = rng.choice([1, 8, 64]), rng.choice([1024, 5120])
        link, cpu, gpu = (10 ** rng.uniform(8.5, 11) for _ in range(3))
        model = opt(2, h1, h1 // 128)
        rule = rule_of(model, up=link, down=math.inf, host=cpu, device=gpu, sequences=b, computing=0.1)
        for s in (1, 7, 60, 512, 4000):
            there = 4 * b * h1 * s / cpu + 2 * b * h1 / link
            moved = 4 * b * h1 * s / link + 4 * b * h1 * s / gpu
            assert rule.delegates(s) == (there < moved)
        slope = 4 * b * h1 * (1 / link + 1 / gpu - 1 / cpu)
        expected = 2 * b * h1 / link / slope if slope > 0 else math.inf
        assert rule.crossover == pytest.approx(expected, rel=1e-6)


def test_every_literal_follows_the_model() -> None:
    """Grouped heads, encoded caches and sparse values: bytes by hand."""
    rng = random.Random(1)
    for _ in range(20):
        model = model_of(rng)
        rule = rule_of(model, 0.1, up=1e9, down=2e9, host=3e9)
        size, dim = model.itemsize, model.head_dim
        assert rule.kv == (model.kv_kept or 2 * model.kv_heads * dim * size)
        assert rule.sent == (model.heads + 2 * model.kv_heads) * dim * size
        assert rule.fetched == model.heads * dim * size
        some = 1 - 0.9 ** (model.heads // model.kv_heads)  # that one head of the group wants a value
        assert rule.read == pytest.approx((1 + some) / 2)
    assert (read_share(None), read_share(0.0), read_share(1.0)) == (1.0, 0.5, 1.0)
    assert projection_share(opt(2, 512, 8), 0) == pytest.approx(3 / 12)


def test_crossover_is_where_the_sides_change_places() -> None:
    """Against scanning the rule, for chains and for lanes that overlap; from there on delegation stays the quicker."""
    rng = random.Random(2)
    seen = set()
    for _ in range(400):
        rule = Rule(
            kv=rng.uniform(100, 20000), sent=rng.uniform(1e3, 1e5), fetched=rng.uniform(1e3, 1e5),
            up=10 ** rng.uniform(8, 10), down=10 ** rng.uniform(8, 10), host=10 ** rng.uniform(8, 10.5),
            device=10 ** rng.uniform(9, 11), read=rng.uniform(0.5, 1), page=rng.choice([0, 16, 64]),
            sequences=rng.randint(1, 64), computing=10 ** rng.uniform(-5, -2), fixed=10 ** rng.uniform(-6, -3),
            batches=rng.randint(1, 3), overlap=rng.random() < 0.7,
        )  # fmt: skip
        at = rule.crossover
        seen.add("never" if at == math.inf else "always" if at == 0 else "from")
        if at == math.inf:
            assert not any(rule.delegates(s) for s in (1e7, 1e8, 1e9))
        else:
            assert all(rule.delegates(at * x + 1e-6) for x in (1.001, 1.1, 2, 10, 1e4))
            assert at == 0 or not rule.delegates(at * 0.999)
    assert seen == {"never", "always", "from"}


@pytest.mark.parametrize("what", ["up", "host", "fixed", "fetched"])
def test_crossover_is_monotone(what: str) -> None:
    """A faster link or a slower host moves the crossover to longer caches; so do more bytes to send and fixed costs."""
    rng = random.Random(what)
    for _ in range(100):
        given = dict(kv=4096.0, sent=6144.0, fetched=2048.0, up=10 ** rng.uniform(8, 10), down=1e10,
                     host=10 ** rng.uniform(9, 10.5), computing=1e-4, fixed=10 ** rng.uniform(-6, -3))  # fmt: skip
        overlap = rng.random() < 0.5
        factor = 1 / 1.3 if what == "host" else 1.3
        later = Rule(**{**given, what: given[what] * factor}, overlap=overlap)  # type: ignore[arg-type]
        assert later.crossover >= Rule(**given, overlap=overlap).crossover * (1 - 1e-9)  # type: ignore[arg-type]


def test_layouts_book_delegation_for_any_model() -> None:
    rng = random.Random(3)
    endless = Capacity(None, None, None, shared=False, staged=True)
    for _ in range(30):
        model, policy = model_of(rng), Policy(4, 3, cache=(0.5, 0.5, 0), delegate="host")
        work = Workload({(20, 5): 30})
        with_, without = (lay_out(model, p, work, endless) for p in (policy, Policy(4, 3, cache=(0.5, 0.5, 0))))
        more = {t: with_.total(t) - without.total(t) for t in ("device", "host", "disk")}
        each = aligned(6 * model.sent)
        kept = aligned(6 * (3 * model.sent + 4 * model.hidden * model.itemsize))
        assert more == {"device": each + kept, "host": each + aligned(4 * model.fetched), "disk": 0}
