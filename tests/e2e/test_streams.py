"""Several residual streams: hidden states between layers that are wider than a model, on every place and link."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput, UnsupportedModel, size
from flexengine.lossy import Lossy
from flexengine.model.build import build
from flexengine.model.checkpoint import ByteRange, origins, read_checkpoint
from flexengine.plan import records, tables
from tests.helpers.architectures import config_classes, continuation, reload
from tests.helpers.chained import chained
from tests.helpers.hybrids import NEW, Hybrid, hybrid_maker, tokens_after_a_stop
from tests.helpers.tiny_models import make_model, tiny_config

# Model type: streams, and the shape of hidden states between layers, of n tokens.
STREAMS = {
    "deepseek_v4": (4, (1, -1, 4, 64)),
    "gemma3n_text": (4, (4, 1, -1, 64)),
    "hy_v4": (4, (1, -1, 4, 64)),
    "qwen4_exp_text": (4, (1, -1, 256)),
}
LENGTHS = (150, 5, 70, 1, 18, 64)
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
POLICIES = {
    "device": Policy(6, 1),
    "single rows": Policy(1, 6, activations=H),
    "host": Policy(3, 2, weights=H, cache=H, activations=H, prefill_tokens=16, schedule="zigzag"),
    "disk": Policy(2, 3, weights=K, cache=K, activations=K, prefill_tokens=64, slots=1),
    "everywhere": Policy(2, 3, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=32, schedule="diagonal"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hybrid_maker(tmp_path_factory, LENGTHS)


def opened(known: Hybrid, policy: Policy, **options: Any) -> Engine:
    return Engine(known.directory, policy=policy, device="sim", offload_dir=known.directory / "offload", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", STREAMS)
def test_tokens_are_those_of_transformers(models: Any, kind: str, name: str) -> None:
    known = models(kind)
    with opened(known, POLICIES[name]) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        ledgers = {tier: engine.core.machine.tier(tier).ledger.peak for tier in ("device", "host", "disk")}
        assert ledgers == {tier: engine.layout.total(tier) for tier in ledgers}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_tokens_under_a_policy_of_the_planner(models: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rates of the model are measured."""
    known = models(kind)
    options: Any = dict(device="cpu", offload_dir=known.directory / "offload")
    with caplog.at_level("WARNING"), Engine(known.directory, **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
    assert "not measured" not in caplog.text


@torch.no_grad()
def table_bytes(known: Hybrid) -> int:
    """Bytes of the different rows that transformers looks up, in each pass of each row, in embeddings beside the one of
    token ids."""
    model, read = reload(known.directory), list[int]()

    def noted(module: Any, args: Any) -> None:
        read.append(len(torch.unique(args[0])) * module.embedding_dim * 4)

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module is not model.get_input_embeddings():
            module.register_forward_pre_hook(noted)
    for prompt in known.prompts:
        continuation(model, prompt, new=NEW)
    return sum(read)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("home", ["host", "disk"])
def test_bytes_of_hidden_states(models: Any, kind: str, home: str) -> None:
    """All streams of each token go out and come back between two layers, and the plan books and counts them all."""
    known, (streams, shape) = models(kind), STREAMS[kind]
    policy = Policy(1, 6, activations=H if home == "host" else K, prefill_tokens=192)
    with opened(known, policy) as engine:
        facts, skeleton = engine.core.facts, engine.core.skeleton
        assert (skeleton.hidden_shape, facts.hidden_bytes) == (shape, streams * 64 * 4)
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        tokens = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
        expected = tokens * (len(facts.layers) - 1) * streams * 64 * 4
        moved = engine.summary.bytes
        assert (moved["h2d"], moved["d2h"]) == (expected, expected)
        if home == "disk":
            assert (moved["disk_read"], moved["disk_write"]) == (expected + table_bytes(known), expected)
        assert engine.layout.hidden_buffer == 192 * streams * 64 * 4
        assert bool(facts.tables) == (table_bytes(known) > 0)
        assert engine.layout.account[home]["hidden states"] >= sum(LENGTHS) * streams * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cuts"), [
    ("qwen4_exp_text", (0, 1, 4)), ("qwen4_exp_text", (0, 2, 3, 4)), ("hy_v4", (0, 1, 4)),
    ("deepseek_v4", (0, 1, 2, 4)),
])  # fmt: skip
def test_stages(models: Any, kind: str, cuts: tuple[int, ...]) -> None:
    """All streams pass from a stage to the next one."""
    known = models(kind)
    for policy in (POLICIES["host"], POLICIES["everywhere"]):
        with chained(known.directory, cuts, policy, device="sim") as chain:
            assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("cache", [D, H, K])
def test_a_record_of_several_modules_is_copied_once(models: Any, cache: Any) -> None:
    """Of sequences that share a prefix. Layer 2 has a delta rule and two states of n-grams in one record."""
    known = models("qwen4_exp_text")
    long, short = known.prompts[2], known.prompts[5]  # of 70 and 64 tokens
    prompts = [long, long[:66], [*long[:64], *short[:9]], long, [*long[:64], *long[:3]]]
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    with opened(known, Policy(2, 3, cache=cache, prefill_tokens=128)) as engine:
        shared = [r.token_ids for r in engine.generate(rows, GREEDY)]
        assert engine.summary.computed_prompt_tokens < sum(map(len, prompts))
        (record,) = {group.state for group in engine.layout.groups if len(group.layers) == 2 and group.state}
    with opened(known, Policy(1, 1), prefix_sharing=False) as engine:
        assert shared == [r.token_ids for r in engine.generate(rows, GREEDY)]
        config = engine.core.skeleton.config
    # conv [2 keys, values; 4] and S [heads, dk, dv]; ids [2] int64; conv [streams * hidden, 3 taps of 3 apart]
    channels = 2 * config.linear_num_key_heads * 32 + config.linear_num_value_heads * 32
    sizes = (channels * 4 * 4, config.linear_num_value_heads * 32 * 32 * 4, 2 * 8, 256 * 9 * 4)
    assert record == -(-sum(-(-size // 64) * 64 for size in sizes) // 4096) * 4096


@pytest.mark.slow
def test_tables_are_no_weights(models: Any) -> None:
    """Rows of them are read when tokens use them; a plan says so."""
    known = models("gemma3n_text")
    nbytes = 601 * 4 * 32 * 4  # token ids, layers, elements of a layer
    with opened(known, POLICIES["device"]) as engine:
        facts = engine.core.facts
        (line,) = tables.words(facts)
        assert f"{size(nbytes)} of tables stay in the checkpoint's files" in line
        assert facts.tables == ((nbytes, 601, 1, None),)
        assert not any("embed_tokens_per_layer" in tensor.name for tensor in facts.tensors)
        assert facts.held >= 64 * 4 + 4 * 32 * 4  # output of the embedding, inputs of all layers


@pytest.mark.slow
def test_a_table_of_any_size_is_located(models: Any) -> None:
    """Its shards lie one behind the other, without a number for each row."""
    directory, rows = models("qwen4_exp_text").directory, 1 << 40
    skeleton, stored = build(directory, torch.float32), read_checkpoint(directory)
    name = min(skeleton.tables)
    shape = (rows, skeleton.tables[name].shape[1])
    shards = [key for key in stored if skeleton.loading.target(key)[0] == name]
    shards.sort(key=lambda key: int(key.split("shard_")[1].split(".")[0]))
    runs = [ByteRange(stored[key].runs[0].path, i, rows * 4 * shape[1]) for i, key in enumerate(shards)]
    large = {key: replace(stored[key], runs=(run,), shape=shape) for key, run in zip(shards, runs, strict=True)}
    found = origins(stored | large, skeleton.wanted | {name: (4 * rows, shape[1])}, skeleton.loading)[name]
    assert (len(runs), found.runs, found.shape) == (4, tuple(runs), (4 * rows, shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("last", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_keys_that_tokens_of_deepseek_v4_see(tmp_path: Path, last: str) -> None:
    """In all layers, whichever is the last."""
    kinds = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention", last]
    config = tiny_config(config_classes()["deepseek_v4"], layer_types=kinds)
    with torch.no_grad():
        make_model(config, 0).save_pretrained(tmp_path)
    with Engine(tmp_path, policy=Policy(1, 1), device="sim", offload_dir=tmp_path / "offload") as engine:
        facts = engine.core.facts
    assert facts.choosing[0] == config.sliding_window + config.index_topk
    assert (facts.always_chooses, facts.entry_tokens) == (True, 8)
    each = [records.choosing_bytes(facts, 1000, longest) for longest in (8000, 16000)]
    assert each[1] - each[0] >= 1000 * 1000 * 40  # 1000 entries more, for each of 1000 tokens


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [Lossy(cache="int8"), Lossy(sparse_attention=0.2)])
def test_compressed_attention_needs_a_plain_cache(models: Any, lossy: Lossy) -> None:
    known = models("deepseek_v4")
    with (
        pytest.raises(InvalidInput, match="keys that an indexer chooses"),
        opened(known, POLICIES["device"], lossy=lossy) as engine,
    ):
        engine.generate(known.rows[1:2], GREEDY)


@pytest.mark.slow
def test_layers_that_take_more_than_hidden_states_are_no_stage(models: Any) -> None:
    """Layers of Gemma 3n take keys of earlier layers, and inputs that are made of the embedding."""
    known = models("gemma3n_text")
    with (
        pytest.raises(UnsupportedModel, match="a trial pass through layers 2 to 3 alone failed"),
        chained(known.directory, (0, 2, 4), POLICIES["host"], device="sim") as chain,
    ):
        chain.generate(known.rows, GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_job_that_broke_off_goes_on(models: Any, kind: str, tmp_path: Path) -> None:
    known = models(kind)
    policy = Policy(1, 2, weights=H, cache=H, activations=H, prefill_tokens=16)
    assert tokens_after_a_stop(known, tmp_path, partial(opened, known, policy)) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*STREAMS} - {"gemma3n_text"}))
def test_a_row_does_not_depend_on_its_batch(models: Any, kind: str) -> None:
    """Log probabilities have the same bits."""
    known, found = models(kind), list[Any]()
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    for policy in (Policy(6, 1), Policy(1, 6, prefill_tokens=64), Policy(3, 2, prefill_tokens=192)):
        with opened(known, policy) as engine:
            results = engine.generate(known.rows, sampling)
        assert [r.token_ids for r in results] == known.expected
        found.append([entry["logprob"] for r in results for entry in r.logprobs or ()])
    assert len(found[0]) == NEW * len(LENGTHS)
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v4", "qwen4_exp_text"])
def test_shared_prefixes(models: Any, kind: str) -> None:
    """Samples of a prompt, and prompts that have a prefix in common, get the tokens that each gets alone."""
    known = models(kind)
    long = known.prompts[0]  # of 150 tokens
    rows = [{"prompt_token_ids": p} for p in (long, long[:131], [*long[:64], *known.prompts[2]], long)]
    with opened(known, Policy(2, 4, cache=MIX, prefill_tokens=128)) as engine:
        shared = [r.token_ids for r in engine.generate(rows, GREEDY)]
        assert engine.summary.computed_prompt_tokens < sum(len(row["prompt_token_ids"]) for row in rows)
        samples = engine.generate([known.rows[0]], SamplingParams(n=3, max_tokens=NEW, ignore_eos=True))
    assert [s.token_ids for s in samples[0].samples] == [known.expected[0]] * 3
    with opened(known, Policy(1, 1), prefix_sharing=False) as engine:
        assert shared == [r.token_ids for r in engine.generate(rows, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_16_bits(models: Any, kind: str) -> None:
    """Tokens do not depend on the placement."""
    known, found = models(kind), list[Any]()
    for name in ("device", "everywhere"):
        with opened(known, POLICIES[name], dtype="bfloat16") as engine:
            results = engine.generate(known.rows, GREEDY)
            assert [(r.error, len(r.token_ids)) for r in results] == [(None, NEW)] * len(LENGTHS)
            found.append([r.token_ids for r in results])
    assert found[0] == found[1]
