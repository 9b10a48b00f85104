"""Sparse attention of DeepSeek (DSA): tokens of transformers for every placement, cut and batch, in contexts of many
times `index_topk`; bytes by formula; and what is refused."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.lossy import Lossy
from flexengine.model.adapters import sparse
from flexengine.model.build import build
from flexengine.model.layer_range import use_range
from flexengine.plan.stages import stage_layers
from flexengine.worker.open_model import open_model
from tests.helpers.chained import chained
from tests.helpers.families import prompts_of
from tests.helpers.hybrids import NEW, Hybrid, hybrid_maker, tokens_after_a_stop

# Layers with experts and without; layers that take the choice of the layer before; layers with a window.
KINDS = ("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text")
TOP = 8  # index_topk of their tiny configs
# Below `TOP`, up to it with the new tokens, from it on, and 20 times as many; 25 and 13 pages of 16 tokens.
LENGTHS = (65, 150, 1, 8, TOP - NEW, 40, 9, 130)
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
D, H, K, MIX = (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.4, 0.3, 0.3)
POLICIES = {
    "device": Policy(8, 1),
    "single rows": Policy(1, 8),
    "host": Policy(3, 2, weights=H, cache=H, activations=H, prefill_tokens=128, schedule="zigzag"),
    "disk": Policy(2, 3, weights=K, cache=K, activations=K, prefill_tokens=64, slots=1),
    "everywhere": Policy(2, 4, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=192, schedule="diagonal"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hybrid_maker(tmp_path_factory, LENGTHS)


def run(known: Hybrid, policy: Policy | None, rows: Any = None, device: str = "sim", **options: Any) -> list[Any]:
    offload = known.directory / "offload"
    with Engine(known.directory, policy=policy, device=device, offload_dir=offload, **options) as engine:
        results = engine.generate(known.rows if rows is None else rows, GREEDY)
        assert [r.error for r in results] == [None] * len(results)
        if policy is not None:
            ledgers = {tier: engine.core.machine.tier(tier).ledger.peak for tier in ("device", "host", "disk")}
            assert ledgers == {tier: engine.layout.total(tier) for tier in ledgers}
        return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(models: Any, kind: str, name: str) -> None:
    known = models(kind)
    assert run(known, POLICIES[name]) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_under_a_policy_of_the_planner(models: Any, kind: str) -> None:
    known = models(kind)
    assert run(known, None, device="cpu") == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_decides(models: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all keys are seen, tokens differ: of rows that are longer than the number of chosen keys only."""
    known, kept = models(kind), sparse.Chooses._kept

    def all_seen(self: sparse.Chooses, choice: sparse.ChosenKeys) -> sparse.ChosenKeys:
        return kept(self, choice._replace(tokens=choice.tokens[:0], positions=choice.positions[:0]))

    monkeypatch.setattr(sparse.Chooses, "_kept", all_seen)
    same = [a == b for a, b in zip(run(known, Policy(8, 1)), known.expected, strict=True)]
    short = [n + NEW - 1 <= TOP for n in LENGTHS]
    assert [equal for equal, few in zip(same, short, strict=True) if few] == [True] * sum(short)
    assert not any(equal for equal, n in zip(same, LENGTHS, strict=True) if n > 4 * TOP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 16, 64])
def test_prompts_in_pieces(models: Any, kind: str, tokens: int) -> None:
    known = models(kind)
    assert run(known, Policy(3, 3, cache=H, prefill_tokens=tokens)) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_any_size(models: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer is called, and chosen keys are gathered, for one token at a time if memory says so."""
    monkeypatch.setattr(sparse, "MOST_BYTES", 1)
    monkeypatch.setattr("flexengine.worker.cache.chosen.MOST_BYTES", 1)
    known = models(kind)
    assert run(known, Policy(3, 3)) == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(models: Any, kind: str) -> None:
    """Log probabilities have the same bits."""
    known, found, sampling = models(kind), list[Any](), SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    for policy in (Policy(8, 1), Policy(1, 8), Policy(3, 3)):
        with Engine(known.directory, policy=policy, device="sim") as engine:
            found.append([[e["logprob"] for e in r.logprobs or ()] for r in engine.generate(known.rows, sampling)])
    assert len(found[0][0]) == NEW
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [16, 512])
def test_scores_are_those_of_generated_tokens(models: Any, kind: str, tokens: int) -> None:
    """Also where indexers find equal scores, and choose by the number of keys."""
    known, sampling = models(kind), SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1)
    with Engine(known.directory, policy=Policy(3, 3, prefill_tokens=tokens), device="sim") as engine:
        made = engine.generate(known.rows, sampling)
        scores = engine.score(known.prompts, [result.token_ids for result in made])
    assert all(result.is_greedy for result in scores)
    for one, two in zip(scores, made, strict=True):
        found, expected = ([entry["logprob"] for entry in result.logprobs or ()] for result in (one, two))
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [D, H, K])
def test_shared_prefixes(models: Any, kind: str, cache: Any) -> None:
    """Samples of a prompt, and prompts that have a prefix in common, share its pages with the indexer's keys. With as
    many heads, no scores are equal: those of a prefix may be chosen in another order than those of a prompt."""
    known = models(kind, index_n_heads=16)
    long = known.prompts[1]  # 150 tokens
    prompts = [long, long[:131], long[:64] + known.prompts[0], long, long[:129], [*long[:128], *long[:3]]]
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    policy = Policy(2, 4, cache=cache, prefill_tokens=128)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=known.directory / "offload") as engine:
        shared = engine.generate(rows, GREEDY)
        assert engine.summary.computed_prompt_tokens < sum(map(len, prompts))
        samples = engine.generate([known.rows[1]], SamplingParams(n=3, max_tokens=NEW, ignore_eos=True))
        assert engine.summary.computed_prompt_tokens < 3 * len(long)
    assert [s.token_ids for s in samples[0].samples] == [known.expected[1]] * 3
    assert [r.token_ids for r in shared] == run(known, Policy(1, 1), rows, prefix_sharing=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cuts"), [
    ("deepseek_v32", (0, 1, 4)), ("axk2", (0, 3, 4)), ("glm_moe_dsa", (0, 2, 4)), ("dots3_note_text", (0, 1, 3, 4)),
])  # fmt: skip
def test_stages(models: Any, kind: str, cuts: tuple[int, ...]) -> None:
    known = models(kind)
    for policy in (POLICIES["host"], POLICIES["everywhere"]):
        with chained(known.directory, cuts, policy, device="sim") as chain:
            assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
def test_no_stage_begins_with_a_shared_choice(models: Any) -> None:
    skeleton = build(models("glm_moe_dsa").directory, torch.float32)
    with pytest.raises(UnsupportedModel, match="a layer sees the keys that a layer before it chose"):
        use_range(skeleton, (1, 4))


@pytest.mark.slow
def test_even_stages_begin_where_they_can(models: Any) -> None:
    """Two layers for each stage would begin the second one at layer 2."""
    known = models("glm_moe_dsa", indexer_types=["full", "full", "shared", "shared"])
    opened = [
        open_model(str(known.directory), None, "sim", layers=partial(stage_layers, rank=rank, stages=2, strategy=None))
        for rank in range(2)
    ]
    assert [each.skeleton.layer_range for each in opened] == [(0, 1), (1, 4)]
    with chained(known.directory, (0, 1, 4), POLICIES["host"], device="sim") as chain:
        assert [r.token_ids for r in chain.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_job_that_broke_off_goes_on(models: Any, kind: str, tmp_path: Path) -> None:
    known = models(kind)
    policy, offload = Policy(2, 2, cache=H, schedule="zigzag"), tmp_path / "off"
    opened = partial(Engine, known.directory, policy=policy, device="sim", offload_dir=offload)
    assert tokens_after_a_stop(known, tmp_path, opened) == known.expected


@pytest.mark.slow
def test_pages_have_columns_for_keys_of_the_indexer(models: Any) -> None:
    """V of 4 heads of 16 has 8 more columns for a key of 32 elements; K has 24. A step loads and stores whole pages."""
    known = models("deepseek_v32")
    policy = Policy(1, 1, cache=K, prefill_tokens=256)
    with Engine(known.directory, policy=policy, device="sim", offload_dir=known.directory / "offload") as engine:
        result = engine.generate([known.rows[1]], GREEDY)
        assert [r.token_ids for r in result] == [known.expected[1]]
        config, facts, moved = engine.core.skeleton.config, engine.core.facts, engine.summary.bytes
        assert (config.num_attention_heads, config.v_head_dim, config.index_head_dim) == (4, 16, 32)
        assert facts.choosing == (TOP, config.index_n_heads, 32)
        assert facts.kv_token == 2 * 4 * (16 + 8) * 4
        (page,), tokens = engine.layout.page_bytes["disk"], engine.layout.pools["disk"][0].page_tokens
    pages = [-(-n // tokens) for n in range(150, 150 + NEW)]  # that hold the tokens after each step
    loaded = sum(-(-n // tokens) for n in range(150, 150 + NEW - 1))
    assert moved["disk_read"] == config.num_hidden_layers * page * loaded
    assert moved["disk_write"] == config.num_hidden_layers * page * (pages[0] + NEW - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [("deepseek_v32", 24), ("glm_moe_dsa", 24)])
def test_bytes_of_each_step(models: Any, kind: str, width: int, tmp_path: Path) -> None:
    """A piece loads the pages before its tokens, with keys of the indexer, and stores those that get tokens. Weights on
    the disk, and rows of the embedding, are all else that is read: what a job reads that has its cache on the device.
    Pages of 4 heads of K and V are `width` wide."""
    known, piece, new = models(kind, max_position_embeddings=2048), 128, 3
    (prompt,) = prompts_of(601, (1100,))
    found: dict[tuple[Any, Any], list[Any]] = {}
    tokens = set[tuple[int, ...]]()
    for cache, weights in ((K, D), (K, K), (D, K)):
        steps = found[cache, weights] = list[Any]()
        options: Any = dict(
            policy=Policy(1, 1, cache=cache, weights=weights, prefill_tokens=piece), device="sim",
            on_sweep=lambda _, steps=steps: steps.append(engine.core.traffic()),
        )  # fmt: skip
        with Engine(known.directory, offload_dir=tmp_path, **options) as engine:
            (result,) = engine.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=new, ignore_eos=True))
            assert result.error is None
            tokens.add(tuple(result.token_ids))
            if cache == K:
                (page,), size = engine.layout.page_bytes["disk"], engine.layout.pools["disk"][0].page_tokens
                layers = engine.core.skeleton.config.num_hidden_layers
    assert len(tokens) == 1
    assert page == -(-size * 2 * 4 * width * 4 // 4096) * 4096
    pieces, count = [*range(0, len(prompt), piece), len(prompt)], len(prompt)
    sweeps = [pieces, *([n, n + 1] for n in range(count, count + new - 1))]  # bounds: a sweep has all of a prompt
    loads = [layers * page * sum(-(-n // size) for n in bounds[:-1]) for bounds in sweeps]
    stores = [layers * page * sum(-(-end // size) - n // size for n, end in pairwise(bounds)) for bounds in sweeps]

    def each(job: tuple[Any, Any], link: str) -> list[int]:
        moved = [0, *(step[link] for step in found[job])]
        return [after - before for before, after in pairwise(moved)]

    for link in ("disk_read", "h2d"):
        assert each((K, D), link) == loads
        rest = each((D, K), link)
        assert sum(each((K, K), link)) - sum(loads) == sum(rest)  # experts may come before their sweep
        assert all(rest)
    for link in ("disk_write", "d2h"):
        assert each((K, D), link) == each((K, K), link) == stores
        assert not any(each((D, K), link))


@pytest.mark.slow
@pytest.mark.parametrize(("lossy", "other"), [
    (Lossy(cache="int8"), "a KV cache in int8"), (Lossy(sparse_attention=0.2), "sparse attention of 0.2"),
])  # fmt: skip
def test_no_choice_from_a_lossy_cache(models: Any, lossy: Lossy, other: str) -> None:
    """Rows in which every token sees all keys can have one."""
    known = models("deepseek_v32")
    with pytest.raises(InvalidInput, match=f"{other} cannot be used with rows of 154 tokens of this model"):
        run(known, Policy(2, 2), lossy=lossy)
    short = [row for row, n in zip(known.rows, LENGTHS, strict=True) if n + NEW - 1 <= TOP]
    assert len(short) == 2
    assert len(run(known, Policy(2, 2), short, lossy=lossy)) == 2


@pytest.mark.slow
def test_the_planner_chooses_no_lossy_cache(models: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And measures this model, without delegated attention."""
    known = models("deepseek_v32")
    with caplog.at_level("WARNING"):
        assert run(known, None, allow=("int8-cache", "sparse-attention")) == known.expected
    assert "not measured" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lossy": Lossy(cache="bf16")}, {"dtype": "bfloat16"}])
def test_tokens_in_16_bits_do_not_depend_on_the_placement(models: Any, options: dict[str, Any]) -> None:
    known = models("deepseek_v32")
    results = [run(known, POLICIES[name], **options) for name in ("device", "everywhere")]
    assert results[0] == results[1]


@pytest.mark.slow
def test_delegated_attention_is_refused(models: Any) -> None:
    with pytest.raises(InvalidInput, match="its tokens see keys that an indexer chooses"):
        run(models("deepseek_v32"), Policy(2, 2, cache=H, delegate="host"))
