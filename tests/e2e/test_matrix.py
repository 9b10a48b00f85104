"""Every pair of features in about 30 jobs: greedy tokens equal those of transformers.generate.

CASES is a covering array: each value of a feature meets each value of every other one in at least one job, unless the
two cannot meet (IMPOSSIBLE). An error of the engine that needs two features together shows here. The grids of single
features run all their combinations, and cost a hundred times as much: they are slow tests
(test_exactness, test_flash, test_flash_experts, test_stages, test_places, guests/attention_workers/test_jobs,
worker/test_delegation, worker/test_experts, guests/stages/test_tokens, engine/test_lossy).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.guests.attention_workers import workers
from tests.helpers.attention_workers import ThreadWorker
from tests.helpers.durations import ONCE
from tests.helpers.families import Family, prompts_of, reference
from tests.helpers.rounded import rounded
from tests.helpers.threads import in_threads

NEW = 5
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
SPLITS = {"device": (1, 0, 0), "host": (0, 1, 0), "disk": (0, 0, 1), "mixed": (0.4, 0.3, 0.3)}


class Case(NamedTuple):
    """One job.

    Attributes:
        weights, cache, activations: placement, by name in SPLITS. Attention workers take half of the cache.
        slots: as in Policy.
        schedule: as in Policy.
        overlap: as in EngineOptions.
        device: as in EngineOptions.
        family: of the model.
        guest: what computes or loads in another way: "delegated" (attention on the CPU, of all cache off the device),
            "host delegated" (of the cache on the host),
            "workers" (two attention workers), "stages" (two stages of a pipeline), "rows" (neurons or experts on
            demand), "halves" (halves of layers in a slot each).
        batches: gpu_batch_size and num_gpu_batches.
        prefill: as prefill_tokens in Policy.
        form: "exact", or "int8" weights and their kernels.
        sharing: as prefix_sharing in EngineOptions. All jobs have prompts with a common prefix.
    """

    weights: str
    cache: str
    activations: str
    slots: int
    schedule: str
    overlap: bool
    device: str
    family: str
    guest: str
    batches: tuple[int, int]
    prefill: int
    form: str
    sharing: bool


VALUES = Case(
    weights=tuple(SPLITS), cache=tuple(SPLITS), activations=tuple(SPLITS), slots=(1, 2, 3),
    schedule=("row", "zigzag", "diagonal", "continuous"), overlap=(True, False), device=("sim", "cpu"),
    family=("llama", "opt", "gemma3", "gpt-oss"),
    guest=("none", "delegated", "host delegated", "workers", "stages", "rows", "halves"),
    batches=((8, 1), (3, 2), (2, 4)), prefill=(2048, 16), form=("exact", "int8"), sharing=(True, False),
)  # type: ignore[arg-type]  # fmt: skip
CASES = [Case(*values) for values in (
    ("host", "mixed", "disk", 1, "diagonal", True, "cpu", "llama", "none", (8, 1), 2048, "int8", True),
    ("mixed", "device", "host", 3, "zigzag", True, "cpu", "llama", "none", (3, 2), 16, "exact", False),
    ("mixed", "disk", "device", 2, "continuous", False, "cpu", "llama", "none", (2, 4), 2048, "exact", True),
    ("device", "host", "host", 2, "continuous", True, "sim", "opt", "none", (8, 1), 2048, "int8", False),
    ("mixed", "device", "mixed", 2, "diagonal", False, "cpu", "gemma3", "none", (3, 2), 16, "int8", True),
    ("disk", "disk", "mixed", 1, "continuous", False, "sim", "gpt-oss", "none", (2, 4), 2048, "int8", True),
    ("mixed", "mixed", "disk", 1, "row", False, "sim", "gpt-oss", "none", (2, 4), 2048, "exact", True),
    ("disk", "mixed", "device", 2, "zigzag", False, "sim", "llama", "delegated", (2, 4), 2048, "exact", True),
    ("host", "host", "host", 1, "diagonal", True, "sim", "opt", "delegated", (2, 4), 16, "exact", False),
    ("device", "disk", "disk", 3, "row", False, "sim", "gemma3", "delegated", (3, 2), 2048, "int8", True),
    ("mixed", "host", "mixed", 2, "continuous", False, "sim", "gpt-oss", "delegated", (8, 1), 16, "exact", False),
    ("device", "mixed", "host", 3, "zigzag", True, "sim", "gemma3", "host delegated", (2, 4), 16, "int8", False),
    ("host", "mixed", "device", 1, "row", False, "sim", "llama", "host delegated", (8, 1), 2048, "exact", True),
    ("disk", "host", "disk", 2, "diagonal", True, "sim", "opt", "host delegated", (3, 2), 2048, "exact", True),
    ("mixed", "mixed", "mixed", 2, "continuous", False, "sim", "gpt-oss", "host delegated", (2, 4), 16, "int8", True),
    ("disk", "host", "device", 1, "row", False, "sim", "llama", "workers", (3, 2), 2048, "exact", True),
    ("mixed", "disk", "device", 1, "diagonal", True, "cpu", "opt", "workers", (2, 4), 16, "exact", False),
    ("disk", "device", "device", 3, "continuous", False, "sim", "gemma3", "workers", (8, 1), 16, "exact", False),
    ("host", "disk", "device", 2, "zigzag", True, "cpu", "gemma3", "workers", (8, 1), 16, "int8", True),
    ("device", "mixed", "device", 1, "zigzag", True, "cpu", "gpt-oss", "workers", (3, 2), 16, "exact", False),
    ("device", "host", "mixed", 3, "diagonal", False, "cpu", "llama", "stages", (8, 1), 2048, "int8", False),
    ("mixed", "host", "host", 2, "zigzag", False, "sim", "opt", "stages", (2, 4), 2048, "int8", True),
    ("disk", "mixed", "disk", 2, "continuous", True, "cpu", "opt", "stages", (3, 2), 16, "exact", False),
    ("device", "device", "disk", 1, "zigzag", False, "sim", "gemma3", "stages", (2, 4), 2048, "int8", True),
    ("disk", "mixed", "host", 3, "diagonal", True, "cpu", "gemma3", "stages", (2, 4), 16, "exact", True),
    ("device", "host", "device", 2, "zigzag", False, "sim", "gemma3", "stages", (8, 1), 2048, "exact", True),
    ("host", "disk", "host", 3, "row", False, "sim", "gpt-oss", "stages", (8, 1), 16, "exact", False),
    ("host", "device", "disk", 3, "row", False, "cpu", "opt", "rows", (2, 4), 2048, "exact", True),
    ("host", "mixed", "mixed", 3, "zigzag", False, "cpu", "opt", "rows", (3, 2), 2048, "exact", True),
    ("host", "host", "disk", 3, "continuous", False, "cpu", "opt", "rows", (2, 4), 2048, "exact", True),
    ("device", "disk", "mixed", 2, "row", True, "cpu", "gpt-oss", "rows", (3, 2), 16, "exact", False),
    ("mixed", "mixed", "host", 1, "diagonal", True, "sim", "gpt-oss", "rows", (8, 1), 2048, "exact", True),
    ("disk", "device", "device", 3, "diagonal", True, "sim", "gpt-oss", "rows", (8, 1), 16, "exact", False),
    ("host", "mixed", "host", 2, "diagonal", True, "sim", "llama", "halves", (8, 1), 2048, "exact", True),
    ("disk", "disk", "mixed", 2, "zigzag", False, "sim", "opt", "halves", (3, 2), 16, "int8", False),
    ("mixed", "host", "disk", 2, "row", True, "sim", "gemma3", "halves", (2, 4), 16, "exact", True),
    ("device", "device", "device", 2, "continuous", False, "sim", "llama", "halves", (3, 2), 2048, "int8", False),
)]  # fmt: skip
# Pairs that no job can have: two features, their values, and the reason.
IMPOSSIBLE: list[tuple[dict[str, tuple[Any, ...]], str]] = [
    ({"guest": ("workers",), "activations": ("host", "disk", "mixed")},
     "hidden states stay on the device while workers attend; Policy refuses"),
    ({"guest": ("delegated",), "cache": ("device",)}, "nothing is off the device to attend to; Policy refuses"),
    ({"guest": ("host delegated",), "cache": ("device", "disk")}, "the host has nothing to attend to; Policy refuses"),
    ({"guest": ("delegated", "host delegated"), "device": ("cpu",)},
     "RAM is the device, which attends itself; Engine refuses"),
    ({"guest": ("halves",), "slots": (1, 3)}, "the halves have a slot each; Policy refuses"),
    ({"guest": ("halves",), "device": ("cpu",)}, "weights are read from RAM, which is the device; Engine refuses"),
    ({"guest": ("halves",), "family": ("gpt-oss",)}, "its experts are loaded on demand; Engine refuses"),
    ({"guest": ("rows",), "family": ("llama", "gemma3")}, "no neuron of SiLU or GELU is ever 0; Engine refuses"),
    ({"guest": ("rows",), "form": ("int8",)},
     "records of neurons and experts are rounded in groups of their own, which transformers' model does not have:"
     " test_flash.test_encoded_records compares them with each other"),
]  # fmt: skip


def possible(pair: dict[str, Any]) -> bool:
    return not any(all(pair.get(name) in values for name, values in features.items()) for features, _ in IMPOSSIBLE)


def test_every_possible_pair_is_covered() -> None:
    missing = []
    for (a, of_a), (b, of_b) in combinations(VALUES._asdict().items(), 2):
        covered = {(getattr(case, a), getattr(case, b)) for case in CASES}
        missing += [{a: x, b: y} for x, y in product(of_a, of_b) if possible({a: x, b: y}) and (x, y) not in covered]
        assert all(possible({a: x, b: y}) for x, y in covered)
    assert missing == []


def policy_of(case: Case) -> Policy:
    cache: Any = SPLITS[case.cache]
    if case.guest == "workers":
        cache = {"workers": 0.5, **{place: x / 2 for place, x in zip(("device", "host", "disk"), cache, strict=True)}}
    return Policy(
        *case.batches, SPLITS[case.weights], cache, SPLITS[case.activations], case.slots, case.schedule, case.prefill,
        delegate={"delegated": "all", "host delegated": "host"}.get(case.guest, "none"),
        neurons=0.4 if case.guest == "rows" else 0.0, half_layers=case.guest == "halves",
    )  # fmt: skip


def lossy_of(case: Case) -> Lossy:
    return Lossy(weights="int8" if case.form == "int8" else None, flash="oracle" if case.guest == "rows" else None)


@pytest.mark.parametrize("refused", [
    {"guest": "workers", "activations": "host"}, {"guest": "delegated", "cache": "device"},
    {"guest": "delegated", "cache": "host", "device": "cpu"}, {"guest": "host delegated", "cache": "disk"},
    {"guest": "host delegated", "cache": "host", "device": "cpu"}, {"guest": "halves"},
    {"guest": "halves", "device": "sim", "family": "gpt-oss"}, {"guest": "halves", "device": "sim", "slots": 3},
    {"guest": "rows", "family": "llama"}, {"guest": "rows", "family": "gemma3"},
], ids=str)  # fmt: skip
def test_impossible_pairs_are_refused(families: Any, refused: dict[str, Any]) -> None:
    case = Case("device", "host", "device", 2, "continuous", True, "cpu", "opt", "none", (8, 1), 2048, "exact", True)
    case = case._replace(**refused)
    directory = families(case.family).directory
    with (
        pytest.raises(InvalidInput),
        Engine(directory, policy=policy_of(case), lossy=lossy_of(case), device=case.device) as engine,
    ):
        engine.generate([{"prompt_token_ids": [5]}], GREEDY)


@pytest.fixture(scope="module")
def answers(families: Any) -> Callable[[str, str], tuple[Family, list[list[int]], list[list[int]]]]:
    """Return a function of family and form that returns the family, prompts, and tokens of transformers for these."""
    known: dict[tuple[str, str], tuple[Family, list[list[int]], list[list[int]]]] = {}
    prefix, *others = prompts_of(601, (37, 5, 17, 1, 30, 8, 33))
    prompts = [prompt if i % 2 else prefix + prompt for i, prompt in enumerate(others)]

    def get(name: str, form: str) -> tuple[Family, list[list[int]], list[list[int]]]:
        if (name, form) not in known:
            family = families(name)
            with ONCE.counted():
                model = family.model if form == "exact" else rounded(family.directory, form)
                known[name, form] = family, prompts, reference(model, prompts, NEW)
        return known[name, form]

    return get


@contextmanager
def opened(case: Case, **options: Any) -> Iterator[Engine]:
    """Yield an engine, which is the driver of two stages if that is the case's guest."""
    if case.guest != "stages":
        workers: dict[str, Any] = dict(attention_workers=2, worker_mem="4M") if case.guest == "workers" else {}
        with Engine(**options, **workers) as engine:
            yield engine
    else:
        with in_threads(2, **options, device_mem="300M") as pipeline:
            yield pipeline.engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_tokens(answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(workers, "LocalWorker", ThreadWorker)
    known, prompts, expected = answers(case.family, case.form)
    options = dict(
        model=known.directory, policy=policy_of(case), lossy=lossy_of(case), device=case.device, overlap=case.overlap,
        prefix_sharing=case.sharing, offload_dir=tmp_path,
    )  # fmt: skip
    with opened(case, **options) as engine:
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
        assert [r.error for r in results] == [None] * len(prompts)
        assert [r.token_ids for r in results] == expected
        if case.guest in ("none", "delegated", "host delegated", "rows", "halves"):  # everything booked as planned
            for tier in engine.summary.peak_bytes:
                assert engine.summary.peak_bytes[tier] <= engine.core.machine.tier(tier).ledger.peak
