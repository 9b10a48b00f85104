"""A refusal names the least memory that is enough; the job runs with exactly that, and not with less."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput, OutOfMemory, TooLittle, size, size_option, size_within
from flexengine.plan.hardware import Capacity
from flexengine.plan.layout import lay_out
from flexengine.plan.min_memory import capacity_for, lay_out_given, planned, smallest
from flexengine.plan.search import check, search
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.drawn import policy_of, work_of
from tests.helpers.plans import machine_of, opt

GREEDY = SamplingParams(max_tokens=6)
MODEL = opt(6, 256, 4, 4096)
WORK = Workload({(20, 8): 12, (300, 12): 4})
MIB = 1 << 20


def refused(model: Any, work: Workload, capacity: Capacity) -> TooLittle:
    with pytest.raises(TooLittle) as caught:
        check(model, work, capacity)
    return caught.value


def runs(directory: Path, rows: list[Any], **options: Any) -> list[tuple[int, ...]]:
    """Return the token ids of all rows; raise if the job is refused."""
    with Engine(directory, **options) as engine:
        results = engine.generate(rows, GREEDY)
        assert not any(r.error for r in results)
        used = engine.summary.peak_bytes
        assert used["device"] <= int(options["device_mem"])
        return [tuple(r.token_ids) for r in results]


def test_a_refusal_never_names_less_than_is_needed_or_more_than_is_given() -> None:
    said = str(TooLittle("a job", {"device": 4104}, {"device": 4108}, {"device": "weights 4.10 kB"}))
    assert "at least 4.11 kB are needed" in said
    assert "4.10 kB are given" in said


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_job_runs_with_exactly_what_the_refusal_names(families: Any, tmp_path: Path, kind: str) -> None:
    """The sizes are read from the message, as by a user; one byte less is refused with the same number."""
    known = families("llama")
    rows = [known.rows[0]] * 3
    with Engine(known.directory, device="cpu", dtype="float32") as engine:
        expected = [tuple(r.token_ids) for r in engine.generate(rows, GREEDY)]
    options: dict[str, Any] = {"device": kind, "offload_dir": tmp_path, "dtype": "float32"}
    with pytest.raises(TooLittle, match=r"at least [\d.]+ [kMGT]?B are needed \(.*\), 4.09 kB are given") as caught:
        runs(known.directory, rows, device_mem=4096, **options)
    least = caught.value.least["device"]
    assert f"set device_mem='{size_option(least)}' or more" in str(caught.value)
    assert runs(known.directory, rows, device_mem=str(least), **options) == expected
    with pytest.raises(TooLittle) as again:
        runs(known.directory, rows, device_mem=least - 1, **options)
    assert again.value.least == {"device": least}
    assert again.value.capacity == least - 1  # the number that was given, not what is left of it


def test_the_host_and_both(families: Any, tmp_path: Path) -> None:
    """With little in the host the message names the tier where less must be added; with little in both, both."""
    known = families("llama")
    rows = [known.rows[0]] * 3
    options: dict[str, Any] = {"device": "sim", "offload_dir": tmp_path, "dtype": "float32"}
    with pytest.raises(TooLittle) as caught:
        runs(known.directory, rows, device_mem=4096, host_mem=4096, **options)
    sizes = {f"{tier}_mem": n for tier, n in caught.value.least.items()}
    sizes = {"device_mem": 4096, "host_mem": 4096} | sizes
    assert sizes["device_mem"] > 4096
    assert len(runs(known.directory, rows, **sizes, **options)) == 3
    for tier, least in caught.value.least.items():
        with pytest.raises(TooLittle):
            runs(known.directory, rows, **{**sizes, f"{tier}_mem": least - 1}, **options)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_policy_fits_into_less(seed: int, shared: bool) -> None:
    """The least of the device is enough for the search, and none of 300 policies drawn at random fits into less.

    prefill_tokens of 128 and more are drawn: shorter pieces, which the search does not try, need less workspace.
    """
    rng = random.Random(seed)
    work = work_of(rng)
    host = None if shared else rng.choice([None, 200_000, 4 * MIB])
    capacity = Capacity(8192, host, 1 << 40, shared, staged=not shared)
    least = refused(MODEL, work, capacity).least
    enough = replace(capacity, device=least["device"], host=least.get("host", host))
    check(MODEL, work, enough)
    less = replace(enough, device=least["device"] - 1)
    assert refused(MODEL, work, less).least["device"] <= least["device"]
    for _ in range(300):
        policy = replace(policy_of(rng), prefill_tokens=rng.choice([128, 512]))
        with pytest.raises((OutOfMemory, InvalidInput)):
            lay_out(MODEL, policy, work, less)


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_search_and_check_say_the_same(kind: str) -> None:
    hardware = replace(machine_of(random.Random(1), kind), device_bytes=100_000, disk_bytes=1 << 40)
    errors = []
    with pytest.raises(TooLittle) as caught:
        search(MODEL, hardware, WORK)
    errors.append(str(caught.value))
    errors.append(str(refused(MODEL, WORK, hardware.capacity)))
    assert errors[0] == errors[1]
    least = caught.value.least["device"]
    best = search(MODEL, replace(hardware, device_bytes=least), WORK).best
    assert best.layout.total("device") + (best.layout.total("host") if kind == "cpu" else 0) <= least


def test_the_reserve_is_used_only_as_far_as_needed() -> None:
    """A process keeps some of its RAM as long as the job fits beside that; then as much of it as is left."""
    policies = smallest(128, Capacity(None, None, 1 << 40, shared=True, staged=False))
    least = refused(MODEL, WORK, Capacity(4096, None, 1 << 40, shared=True, staged=False)).least["device"]
    for given in (least, least + least // 10, 4 * least, 1 << 34):
        capacity = Capacity(given, None, 1 << 40, shared=True, staged=False)
        room = capacity_for(MODEL, policies, WORK, capacity).device
        assert room == max(least, planned(capacity).device or 0)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_given_policy_is_refused_with_what_is_enough_for_it(tier: str) -> None:
    policy = Policy(4, 2, (0.3, 0.4, 0.3), (0.3, 0.3, 0.4), (0.5, 0, 0.5), prefill_tokens=128)
    capacity = replace(Capacity(1 << 40, 1 << 40, 1 << 40, shared=False, staged=True), **{tier: 1000})
    with pytest.raises(TooLittle) as caught:
        lay_out_given(MODEL, policy, WORK, capacity)
    least = caught.value.least
    assert set(least) == {tier}
    layout = lay_out_given(MODEL, policy, WORK, replace(capacity, **least))  # type: ignore[arg-type]
    assert layout.total(tier) <= least[tier]
    listed = re.search(r"B are needed \((.*)\), 1.00 kB are given", str(caught.value))
    assert listed is not None
    parts = (part.rsplit(" ", 2) for part in listed[1].split(", "))
    named = {name: f"{number} {unit}" for name, number, unit in parts}
    assert named.pop("left free", "0 B") == size(least[tier] - layout.total(tier))
    assert named == {name: size(n) for name, n in layout.account[tier].items()}  # all, not only those before a limit
    start = f"{tier} memory: at least {size_within(least[tier])} are needed ("
    assert str(caught.value).startswith(start)
    assert "), 1.00 kB are given, too little for" in str(caught.value)
    with pytest.raises(OutOfMemory):
        lay_out(MODEL, policy, WORK, replace(capacity, **{tier: least[tier] - 1}))


@pytest.mark.parametrize("seed", range(40))
def test_the_sizes_of_several_tiers_are_enough_together(seed: int) -> None:
    rng = random.Random(seed)
    policy, work = policy_of(rng), work_of(rng)
    short = rng.sample(["device", "host", "disk"], rng.choice([2, 3]))
    sizes = {tier: rng.choice([1, 1000, 8_000_000]) for tier in short}
    capacity = replace(Capacity(1 << 40, 1 << 40, 1 << 40, shared=False, staged=True), **sizes)
    try:
        lay_out_given(MODEL, policy, work, capacity)
    except TooLittle as error:
        lay_out_given(MODEL, policy, work, replace(capacity, **error.least))  # type: ignore[arg-type]


def test_a_shortage_that_two_tiers_share() -> None:
    policy, capacity = Policy(4, 2, (0, 0, 1), (0, 0.5, 0.5), (1, 0, 0)), Capacity(1000, 8_000_000, 1, False, True)
    with pytest.raises(TooLittle) as caught:
        lay_out_given(MODEL, policy, WORK, capacity)
    assert len(caught.value.least) > 1
    lay_out_given(MODEL, policy, WORK, replace(capacity, **caught.value.least))  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [True, False])
def test_reading_rows_takes_ram(shared: bool) -> None:
    """The least RAM is larger by what reading takes, and the message says so; a GPU's memory holds no rows."""
    read, tier = replace(WORK, reading=300 * MIB), "device" if shared else "host"
    capacity = Capacity(4096 if shared else None, None if shared else 4096, 2**40, shared, not shared)
    plain, more = refused(MODEL, WORK, capacity), refused(MODEL, read, capacity)
    assert more.least[tier] - plain.least[tier] == 300 * MIB
    assert "rows being read 315 MB" in str(more)
    enough = replace(capacity, device=4096, host=None if shared else 2**30)
    assert shared or refused(MODEL, read, enough).least == refused(MODEL, WORK, enough).least
    assert read.up_to(100).reading == 300 * MIB
