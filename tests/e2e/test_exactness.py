"""Greedy tokens equal those of transformers.generate, whatever the policy, placement, schedule and lanes."""

from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from tests.helpers.families import FAMILIES, LENGTHS, NEW

D, H, K = (1, 0, 0), (0, 1, 0), (0, 0, 1)
MIX = (0.4, 0.3, 0.3)
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
# (policy fields, overlap)
GRID: list[tuple[dict[str, Any], bool]] = [
    (dict(gpu_batch_size=8, num_gpu_batches=1), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, weights=H, slots=1), True),
    (dict(gpu_batch_size=3, num_gpu_batches=3, weights=K, slots=2), True),
    (dict(gpu_batch_size=4, num_gpu_batches=2, weights=MIX, slots=3), True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=MIX, cache=H, schedule="zigzag"), True),
    (dict(gpu_batch_size=2, num_gpu_batches=2, weights=K, cache=K, schedule="diagonal"), True),
    (dict(gpu_batch_size=3, num_gpu_batches=2, weights=H, cache=MIX, schedule="row", slots=1), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, cache=MIX, activations=H), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, weights=MIX, cache=MIX, activations=MIX, slots=3), True),
    (dict(gpu_batch_size=2, num_gpu_batches=4, weights=K, cache=K, activations=K, slots=1), True),
    (dict(gpu_batch_size=2, num_gpu_batches=3, weights=MIX, cache=MIX, activations=K, schedule="diagonal"), False),
    (dict(gpu_batch_size=2, num_gpu_batches=4, weights=(0.5, 0, 0.5), activations=MIX, schedule="zigzag"), False),
    (dict(gpu_batch_size=4, num_gpu_batches=2, weights=K, cache=H, prefill_tokens=16, slots=3), True),
    (dict(gpu_batch_size=4, num_gpu_batches=1, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=11), True),
    (dict(gpu_batch_size=8, num_gpu_batches=1, prefill_tokens=7, schedule="row"), False),
]


# Placement and schedule move whole layers and cells; a family differs in what a layer computes. So two families meet
# the whole grid: one of dense layers with full attention, and one with experts, attention sinks and sliding windows.
# Every other family meets a third of it. Each third puts weights and cache on every tier, and meets five families.
WHOLE = ("llama", "gpt-oss")
OTHERS = [family for family in FAMILIES if family not in WHOLE]
CASES = [
    (case, family)
    for case in range(len(GRID))
    for family in FAMILIES
    if family in WHOLE or case % 3 == OTHERS.index(family) % 3
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "family"), CASES)
def test_grid(families: Any, tmp_path: Any, family: str, case: int) -> None:
    known = families(family)
    fields, overlap = GRID[case]
    policy = Policy(**fields)
    with Engine(known.directory, policy=policy, device="sim", overlap=overlap, offload_dir=tmp_path) as engine:
        results = engine.generate(known.rows, GREEDY)
        assert [r.error for r in results] == [None] * len(LENGTHS)
        assert [r.token_ids for r in results] == known.expected
        for tier in ("device", "host", "disk"):  # everything booked as planned
            assert engine.summary.peak_bytes[tier] <= engine.core.machine.tier(tier).ledger.peak
    assert not list(tmp_path.iterdir())


# Each family with two of four placements, each placement with half of the families; the others differ as above.
CPU_WEIGHTS = [D, H, K, (0.3, 0.3, 0.4)]
CPU_CASES = [(family, CPU_WEIGHTS[(i + j) % 4]) for i, family in enumerate(FAMILIES) for j in (0, 2)]


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("family", "weights"), CPU_CASES)
def test_cpu(families: Any, tmp_path: Any, family: str, weights: Any) -> None:
    """RAM as the device tier, the disk connected directly."""
    known = families(family)
    half = (0.5, 0, 0.5)
    policy = Policy(gpu_batch_size=3, num_gpu_batches=3, weights=weights, cache=half, activations=half)
    with Engine(known.directory, policy=policy, device="cpu", offload_dir=tmp_path) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


NARROW = ["opt", "opt-350m", "llama-tied", "mistral", "qwen3", "mixtral", "gpt-oss"]
# Every family with both dtypes, each pair with one placement; every dtype with every placement. The dtype decides how a
# product widens a weight, the placement where the weight comes from.
NARROW_CASES = [
    (family, dtype, [D, K, MIX][(i + j) % 3])
    for i, family in enumerate(NARROW)
    for j, dtype in enumerate([torch.float16, torch.bfloat16])
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "weights"), NARROW_CASES)
def test_16_bit_checkpoints(families: Any, family: str, dtype: torch.dtype, weights: Any) -> None:
    """Weights stay 16 bits wide on the device; products widen them on the way."""
    known = families(family, dtype)
    policy = Policy(gpu_batch_size=4, num_gpu_batches=2, weights=weights)
    with Engine(known.directory, policy=policy, device="sim") as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        matrices = [t for t in engine.facts.tensors if t.name in engine.core.skeleton.matrices]
        assert {(t.stored, t.held) for t in matrices} == {(2, 2)}
        assert len(matrices) > len(engine.core.skeleton.layers) * 4


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", FAMILIES)
def test_default_policy(families: Any, family: str) -> None:
    known = families(family)
    with Engine(known.directory) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        assert [r.token_ids for r in engine.generate(known.rows[2:4], GREEDY)] == known.expected[2:4]
