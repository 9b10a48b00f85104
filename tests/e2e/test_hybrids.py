"""States beside keys and values: tokens of transformers for every placement, cut and batch; bytes by formula."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams, kernels
from flexengine.errors import InvalidInput
from flexengine.kernels.cpu import NativeKernels
from flexengine.lossy import Lossy
from flexengine.model.mixers import mixers_of
from flexengine.plan.workload import Workload
from flexengine.worker.cache.pools import Pools
from flexengine.worker.expert_rows import Experts
from tests.helpers.architectures import reload
from tests.helpers.chained import chained
from tests.helpers.hybrids import KERNELS, KINDS, LENGTHS, NEW, Hybrid, hybrid_maker, tokens_after_a_stop

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
POLICIES = {
    "device": Policy(8, 1),
    "single rows": Policy(1, 8),
    "host": Policy(3, 2, weights=H, cache=H, activations=H, prefill_tokens=128, schedule="zigzag"),
    "disk": Policy(2, 3, weights=K, cache=K, activations=K, prefill_tokens=64, slots=1),
    "everywhere": Policy(2, 4, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=192, schedule="diagonal"),
}
QUICK = [("device", "lfm2"), ("disk", "lfm2")]
SEVERAL = ["qwen3_next", "jamba", "lfm2", "recurrent_gemma", "rwkv", "xlstm", "inkling_text"]
PIECES = (1, 7, 16, 64, 130)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hybrid_maker(tmp_path_factory, LENGTHS)


def run(known: Hybrid, policy: Policy | None, rows: Any = None, device: str = "sim", **options: Any) -> list[Any]:
    offload = known.directory / "offload"
    with Engine(known.directory, policy=policy, device=device, offload_dir=offload, **options) as engine:
        results = engine.generate(known.rows if rows is None else rows, GREEDY)
        assert [r.error for r in results] == [None] * len(results)
        if policy is not None and device == "sim":
            ledgers = {tier: engine.core.machine.tier(tier).ledger.peak for tier in ("device", "host", "disk")}
            assert ledgers == {tier: engine.layout.total(tier) for tier in ledgers}
            check_kernels(engine)
        return [r.token_ids for r in results]


def check_kernels(engine: Any) -> None:
    """All modules with states run with kernels, or none does."""
    skeleton = engine.core.skeleton
    native = isinstance(kernels.load(), NativeKernels) and engine.core.dtype == torch.float32
    uses = native and skeleton.config.model_type in KERNELS
    assert {m.with_kernels is not None for m in mixers_of(skeleton.model)} == {uses}
    assert (engine.core.numerics["states"] == "by kernels") == uses
    assert any("which kernels change" in why for why in skeleton.as_modules.values()) == uses


@pytest.mark.parametrize(("name", "kind"), [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.slow)
    for name in POLICIES for kind in KINDS
])  # fmt: skip
def test_tokens_are_those_of_transformers(hybrids: Any, kind: str, name: str) -> None:
    known = hybrids(kind)
    assert run(known, POLICIES[name]) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(hybrids: Any, kind: str) -> None:
    """Log probabilities have the same bits."""
    known, found, sampling = hybrids(kind), list[Any](), SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    for policy in (Policy(8, 1), Policy(1, 8), Policy(3, 3)):
        with Engine(known.directory, policy=policy, device="sim") as engine:
            found.append([[e["logprob"] for e in r.logprobs or ()] for r in engine.generate(known.rows, sampling)])
    assert len(found[0][0]) == NEW
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KERNELS))
def test_calls_of_kernels_do_not_change_bits(hybrids: Any, kind: str) -> None:
    """Of any number of tokens and sequences: packed prompts may be cut anywhere, and a call may have a single token."""
    known, found = hybrids(kind), list[Any]()
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    for tokens in (512, 64, 16, 7, 1):
        with Engine(known.directory, policy=Policy(4, 2), device="sim") as engine:
            for mixer in mixers_of(engine.core.skeleton.model):
                mixer.most_tokens = mixer.most_sequences = tokens
            results = engine.generate(known.rows, sampling)
        assert [r.token_ids for r in results] == known.expected
        found.append([[e["logprob"] for e in r.logprobs or ()] for r in results])
    assert all(each == found[0] for each in found)


@pytest.mark.slow
def test_no_advice_on_stderr(hybrids: Any, tmp_path: Path) -> None:
    """transformers advises to install packages of kernels when a module's own functions are called, as in a trial."""
    known = hybrids("jamba")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(known.rows[0]) + "\n")
    command = [
        sys.executable,
        "-m",
        "flexengine.run",
        "--model",
        known.directory,
        "--input",
        source,
        "--output",
        output,
    ]
    ran = subprocess.run([*command, "--max-tokens", str(NEW), "--ignore-eos"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(output.read_text())["token_ids"] == known.expected[0]
    assert "install" not in ran.stderr
    assert "falling back" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_under_a_policy_of_the_planner(hybrids: Any, kind: str) -> None:
    known = hybrids(kind)
    assert run(known, None, device="cpu") == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SEVERAL, "kimi_linear", "mamba2", "zamba2"])
@pytest.mark.parametrize("tokens", PIECES)
def test_prompts_in_pieces(hybrids: Any, kind: str, tokens: int) -> None:
    """Pieces smaller than the grain are enlarged to it; the tokens do not depend on them."""
    known = hybrids(kind)
    assert run(known, Policy(3, 3, cache=H, prefill_tokens=tokens)) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SEVERAL, "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize("cache", [D, H, K])
def test_shared_prefixes(hybrids: Any, kind: str, cache: Any) -> None:
    """Samples of a prompt, and prompts that have a prefix in common, share it up to a multiple of the grain. Each gets
    the tokens that it gets alone, as a copy of the record of its prefix is changed, not the record itself."""
    known = hybrids(kind)
    long = known.prompts[1]  # 150 tokens
    prompts = [long, long[:131], long[:64] + known.prompts[0], long, long[:129], [*long[:128], *long[:3]]]
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    policy = Policy(2, 4, cache=cache, prefill_tokens=128)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=known.directory / "offload") as engine:
        shared = engine.generate(rows, GREEDY)
        assert engine.summary.computed_prompt_tokens < sum(map(len, prompts))
        samples = engine.generate([known.rows[1]], SamplingParams(n=3, max_tokens=NEW, ignore_eos=True))
        assert engine.summary.computed_prompt_tokens == 128 + 3 * (150 - 128)
    assert [s.token_ids for s in samples[0].samples] == [known.expected[1]] * 3
    assert [r.token_ids for r in shared] == run(known, Policy(1, 1), rows, prefix_sharing=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cuts"), [
    ("qwen3_next", (0, 1, 4)), ("falcon_h1", (0, 2, 4)), ("mamba2", (0, 3, 4)), ("nemotron_h", (0, 1, 2, 4)),
    ("recurrent_gemma", (0, 1, 2, 4)), ("rwkv", (0, 1, 3, 4)), ("xlstm", (0, 2, 4)), ("inkling_text", (0, 1, 4)),
])  # fmt: skip
def test_stages(hybrids: Any, kind: str, cuts: tuple[int, ...]) -> None:
    """A stage may have layers with states only, with attention only, or with neither."""
    known = hybrids(kind)
    for policy in (POLICIES["host"], POLICIES["everywhere"]):
        with chained(known.directory, cuts, policy, device="sim") as chain:
            assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
def test_a_record_is_not_read_before_it_is_written(hybrids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of fresh memory, or of sequences that have ended, hold anything: a prompt of one token must not be taken
    for a decode step (vLLM #32118, #56524)."""
    known, claim = hybrids("qwen3_next"), Pools.claim

    def poisoned(pools: Pools, sequence: Any, tokens: int) -> None:
        fresh = sequence.id not in pools.held
        claim(pools, sequence, tokens)
        if fresh and sequence.source is None:
            for layer, group in pools.group.items():
                if layer < 0:
                    for page in pools.held[sequence.id][group]:
                        pools.view(layer, sequence.home).view(torch.float32)[page] = torch.nan

    monkeypatch.setattr(Pools, "claim", poisoned)
    for cache in (D, H):
        assert run(known, Policy(2, 2, cache=cache)) == known.expected


def state_sizes(config: Any) -> tuple[int, ...]:
    """Return the bytes of each state of a layer and sequence, in fp32."""
    kind, hidden = config.model_type, config.hidden_size
    if kind == "rwkv":  # of the last token's inputs of two blocks, and of three sums
        return (hidden * 4,) * 5
    if kind == "xlstm":  # memory, normalizer and exponent of each head
        key, value = config.qk_head_dim, config.v_head_dim
        return tuple(config.num_heads * size * 4 for size in (key * value, key, 1))
    if kind == "qwen3_next":  # conv of q, k and v; S of each head of values
        heads, dim = config.linear_num_value_heads, config.linear_key_head_dim
        channels = 2 * config.linear_num_key_heads * dim + heads * config.linear_value_head_dim
        return channels * config.linear_conv_kernel_dim * 4, heads * dim * config.linear_value_head_dim * 4
    if kind == "kimi_linear":
        heads, dim = config.linear_num_heads, config.linear_head_dim
        return 3 * heads * dim * config.linear_conv_kernel_dim * 4, heads * dim * dim * 4
    if kind == "mamba":
        return config.intermediate_size * config.conv_kernel * 4, config.intermediate_size * config.state_size * 4
    if kind == "lfm2":
        return (hidden * config.conv_L_cache * 4,)
    if kind == "minimax":  # sums of products of keys and values
        return (config.num_attention_heads * config.head_dim**2 * 4,)
    if kind == "recurrent_gemma":  # columns before the next token's, and a number of each channel
        return config.lru_width * (config.conv1d_width - 1) * 4, config.lru_width * 4
    if kind == "inkling_text":  # convs of keys, of values, and after two blocks
        keys = config.num_key_value_heads * config.head_dim
        return tuple(channels * config.conv_kernel_size * 4 for channels in (keys, keys, hidden, hidden))
    # conv [inner + 2 groups state, kernel] and S [heads, head_dim, state]
    inner = config.expand * hidden
    conv = (inner + 2 * config.n_groups * config.state_size) * config.conv_kernel * 4
    return conv, config.num_heads * config.head_dim * config.state_size * 4


# Pieces of prompts, cut at multiples of 64: of 128 tokens, and two or more. MiniMax, in blocks of 256, cuts none.
CUTS: dict[int, tuple[int, ...]] = {150: (128, 22), 129: (64, 65), 130: (128, 2)}


def pages_moved(page_tokens: int, window: int | None, cuts: dict[int, tuple[int, ...]]) -> tuple[int, int]:
    """Return how many pages of keys and values a layer loads and stores: those before a piece that its tokens see, and
    those of its tokens that later ones see. window: tokens that each of them sees; None for all."""
    loaded = stored = 0
    for length in LENGTHS:
        past = 0
        for count in (*cuts.get(length, (length,)), *[1] * (NEW - 1)):
            end = past + count
            first, kept = (0, 0) if window is None else (max(0, past + 1 - window), max(0, end + 1 - window))
            loaded += -(-past // page_tokens) - min(first, past) // page_tokens
            stored += -(-end // page_tokens) - max(past, min(kept, end - 1)) // page_tokens
            past = end
    return loaded, stored


@pytest.mark.slow
@pytest.mark.parametrize(("home", "kind"), [
    *(("host", kind) for kind in ("mamba2", "mamba", "rwkv", "xlstm")),
    *(("disk", kind) for kind in ("mamba2", "mamba", "rwkv", "xlstm", "qwen3_next", "kimi_linear", "lfm2")),
    *(("disk", kind) for kind in ("minimax", "recurrent_gemma", "inkling_text")),
])  # fmt: skip
def test_bytes_of_states(hybrids: Any, home: str, kind: str) -> None:
    """Each piece but a prompt's first loads its record, and every piece stores it, once in each layer that has one.
    Pages of keys and values of other layers are loaded and stored whole."""
    known = hybrids(kind)
    cache = H if home == "host" else K
    with Engine(
        known.directory, policy=Policy(4, 2, cache=cache, prefill_tokens=128), device="sim",
        offload_dir=known.directory / "offload",
    ) as engine:  # fmt: skip
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        moved, layout = engine.summary.bytes, engine.layout
        config = engine.core.skeleton.config
    # Each state from a multiple of 64 bytes on
    record = -(-sum(-(-size // 64) * 64 for size in state_sizes(config)) // 4096) * 4096
    cuts = {} if kind == "minimax" else CUTS
    once, decode = sum(len(cuts.get(n, (n,))) for n in LENGTHS), len(LENGTHS) * (NEW - 1)
    loaded = stored = 0
    for group, page, pool in zip(layout.groups, layout.page_bytes[home], layout.pools[home], strict=True):
        if group.state:
            assert page == record
            counts = once - len(LENGTHS) + decode, once + decode
        else:
            counts = pages_moved(pool.page_tokens, group.window, cuts)
        loaded += len(group.layers) * page * counts[0]
        stored += len(group.layers) * page * counts[1]
    assert (moved["h2d"], moved["d2h"]) == (loaded, stored)
    if home == "disk":
        assert (moved["disk_read"], moved["disk_write"]) == (loaded, stored)


@pytest.mark.slow
def test_experts_are_loaded_once_for_each_layer(hybrids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layers without attention, too, in a task of their own instead of the lane that computes."""
    known, lacking, missing = hybrids("qwen3_next"), Experts.lacking, list[Any]()

    def noted(experts: Experts, rows: Any, slot: int | None) -> Any:
        missing.append(lacking(experts, rows, slot))
        return missing[-1]

    monkeypatch.setattr(Experts, "lacking", noted)
    monkeypatch.setattr(Experts, "bring", None)
    one = LENGTHS.index(1)
    with Engine(known.directory, policy=Policy(1, 1, weights=H), device="sim") as engine:
        assert engine.generate([known.rows[one]], GREEDY)[0].token_ids == known.expected[one]
        config = engine.core.skeleton.config
        assert [len(each) for each in missing] == [config.num_experts_per_tok] * config.num_hidden_layers * NEW


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "longcat_flash"])
def test_a_job_that_broke_off_goes_on(hybrids: Any, tmp_path: Path, kind: str) -> None:
    """Rows that had not ended begin anew, with a new record (vllm-metal #488)."""
    known = hybrids(kind)
    policy, offload = Policy(2, 2, cache=H, schedule="zigzag"), tmp_path / "off"
    opened = partial(Engine, known.directory, policy=policy, device="sim", offload_dir=offload)
    assert tokens_after_a_stop(known, tmp_path, opened) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "lfm2", "inkling_text"])
def test_scores(hybrids: Any, kind: str) -> None:
    """Log probabilities of continuations are those of transformers; long contexts are computed once."""
    known = hybrids(kind)
    model, long = reload(known.directory), known.prompts[1]
    pairs = [(long[:130], long[130:]), (long[:130], [7]), (long[:70], long[:65]), ([5], [6, 7])]
    with Engine(known.directory, policy=Policy(2, 2, cache=H, prefill_tokens=128), device="sim") as engine:
        results = engine.score([context for context, _ in pairs], [continuation for _, continuation in pairs])
        assert engine.summary.computed_prompt_tokens < sum(len(a) + len(b) - 1 for a, b in pairs)
    for result, (context, continuation) in zip(results, pairs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].double()
        found = logits.log_softmax(-1)[range(len(continuation)), continuation].tolist()
        assert [entry["logprob"] for entry in result.logprobs or ()] == pytest.approx(found, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "mamba2", "lfm2"])
@pytest.mark.parametrize("options", [
    {"lossy": Lossy(weights="int8")}, {"lossy": Lossy(cache="int8")}, {"lossy": Lossy(sparse_attention=0.2)},
])  # fmt: skip
def test_tokens_do_not_depend_on_the_placement(hybrids: Any, kind: str, options: dict[str, Any]) -> None:
    """Switches change keys, values and matrices, and nothing in states."""
    known = hybrids(kind)
    results = [run(known, POLICIES[name], **options) for name in ("device", "everywhere")]
    assert results[0] == results[1]


@pytest.mark.slow
def test_states_keep_their_dtype(hybrids: Any) -> None:
    """What a delta rule and Mamba sum up stays in fp32 in a model that computes in 16 bits (vLLM #22928, #39032)."""
    for kind in ("qwen3_next", "granitemoehybrid", "kimi_linear", "xlstm"):
        tokens, offload = list[Any](), hybrids(kind).directory / "offload"
        for name in ("device", "everywhere"):
            policy = POLICIES[name]
            with Engine(
                hybrids(kind).directory, policy=policy, device="sim", dtype="bfloat16", offload_dir=offload
            ) as engine:
                results = engine.generate(hybrids(kind).rows, GREEDY)
                assert [(r.error, len(r.token_ids)) for r in results] == [(None, NEW)] * len(LENGTHS)
                tokens.append([r.token_ids for r in results])
                mixers = mixers_of(engine.core.skeleton.model)
                kinds = {field.key[0]: field.dtype for mixer in mixers for field in mixer.fields}
                assert kinds.pop("conv", None) == (None if kind == "xlstm" else torch.bfloat16)
                assert kinds == {"recurrent": torch.float32}
        assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_delegated_attention_is_refused(hybrids: Any) -> None:
    known = hybrids("qwen3_next")
    with pytest.raises(InvalidInput, match="states beside keys and values"):
        run(known, Policy(2, 2, cache=H, delegate="host"))


@pytest.mark.slow
def test_the_layout_books_records(hybrids: Any) -> None:
    """One record for each sequence and layer with a state, on the tier of its keys and values."""
    known = hybrids("qwen3_next")
    with Engine(known.directory, policy=Policy(2, 4, cache=(0.5, 0.5, 0)), device="sim") as engine:
        engine.generate(known.rows, GREEDY)
        groups = {group.state > 0: (g, group) for g, group in enumerate(engine.layout.groups)}
        number, group = groups[True]
        assert group.layers == (~0, ~2)
        assert groups[False][1].layers == (1, 3)
        counts = {tier: pools[number].pages for tier, pools in engine.layout.pools.items()}
        stems = 1 + 1  # a bound for prefixes that the rows may share
        assert all(4 <= count <= 4 + stems for count in counts.values())
        workload = Workload.of((n, NEW) for n in LENGTHS)
        assert engine.core.facts.states[0] % 4096 == 0 < engine.core.facts.states[0]
        assert workload.longest == 150 + NEW - 1
