"""plan.profile against the schedule's own sweeps, walked sequence by sequence."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings

from flexengine.plan import profile as profiles
from flexengine.plan.profile import MAX_SIZES, Profile, classes, unit
from flexengine.plan.sizes import LayerPages
from flexengine.plan.workload import Workload
from flexengine.policy import SCHEDULES, Policy
from flexengine.schedule.batches import Piece
from flexengine.schedule.pages import Pool, pages_for
from flexengine.schedule.sweeps import Sequence, Sweeps, entrants
from tests.helpers.plans import sweeps_of
from tests.helpers.strategies import RANDOMS

SUMS = ("entering", "decoding", "prompt", "cached", "loaded", "stored")
WINDOW = 40
PAGES = (LayerPages(1.0, Pool(0, 16), Pool(0, 64)),)
Rows = list[tuple[int, int]]  # (prompt tokens, tokens to generate), in order


@dataclass(frozen=True)
class Case:
    """A job whose sequences all live on one tier."""

    rows: Rows
    policy: Policy
    home: str
    pool: Pool

    @property
    def room(self) -> int:
        return self.pool.pages * self.pool.page_tokens


def case_of(rng: random.Random, schedule: str, uniform: bool, limited: bool, count: int) -> Case:
    """A random job. limited: too few pages for the block, now and then just enough for one sequence."""
    longest_prompt, most = rng.choice([(30, 10), (300, 60), (100, 200), (600, 40)])
    one = (rng.randint(1, longest_prompt), rng.randint(1, most))
    rows = [one if uniform else (rng.randint(1, longest_prompt), rng.randint(1, most)) for _ in range(count)]
    home, page = rng.choice([("device", 16), ("host", 64)])
    policy = Policy(rng.randint(1, 32), rng.randint(1, 6), cache=(1, 0, 0) if home == "device" else (0, 1, 0),
                    schedule=schedule, prefill_tokens=rng.choice([128, 512, 2048]))  # fmt: skip
    least = pages_for(max(p + n - 1 for p, n in rows), page)
    full = policy.block_size * least
    return Case(rows, policy, home, Pool(max(least, int(full * rng.uniform(0.1, 1))) if limited else full, page))


def told(case: Case) -> Profile:
    policy, away = case.policy, float(case.home != "device")
    each = unit(Workload.of(case.rows), policy.prefill_tokens, PAGES, away, windows=[WINDOW])
    shape = (policy.gpu_batch_size, policy.num_gpu_batches)
    return sweeps_of(each, len(case.rows), policy.schedule, shape, case.room)


def totals(found: Profile) -> dict[str, float]:
    sums = {name: float((getattr(found, name) * found.times).sum()) for name in SUMS if name != "cached"}
    sums |= {f"window {w}" if w else "cached": float((x * found.times).sum()) for w, x in found.cached.items()}
    sums |= {f"pairs {w}": float((x * found.times).sum()) for w, x in found.pairs.items()}
    return {"sweeps": float(found.times.sum()), "peak": found.peak, **sums}


def walked(case: Case, only_sweeps: bool = False) -> dict[str, float]:
    """The same from real sweeps. only_sweeps: how many there are, which is much less to count."""
    walk = Sweeps(case.policy, {case.home: (case.pool,)})
    for i, (prompt, most) in enumerate(case.rows):
        walk.add(Sequence(i, prompt, most))
    found = dict.fromkeys(("sweeps", "peak", *SUMS, f"window {WINDOW}", "pairs None", f"pairs {WINDOW}"), 0.0)
    while not walk.idle:
        batches = walk.begin(lambda sequence, pages: None)
        pieces = [p for batch in batches for p in batch.pieces]
        assert pieces, "nobody may enter"
        found["sweeps"] += 1
        if only_sweeps:
            walk.advance(batches, set())
            continue
        page = case.pool.page_tokens
        held = sum(pages_for(p.start + p.count, page) for p in pieces if p.final) * page
        found["peak"] = max(found["peak"], held)
        for piece in pieces:
            count(found, piece, walk.live[piece.sequence].generated > 0, page)
        walk.advance(batches, set())
    return found


def count(found: dict[str, float], piece: Piece, decodes: bool, page: int) -> None:
    end = piece.start + piece.count
    found["loaded"] += pages_for(piece.start, page) * page
    found["stored"] += (pages_for(end, page) - piece.start // page) * page
    if decodes:
        found["decoding"] += 1
        found["cached"] += end
        found[f"window {WINDOW}"] += min(end, WINDOW)
        return
    found["entering"] += piece.final
    found["prompt"] += piece.count
    for key in range(piece.start + 1, end + 1):
        found["pairs None"] += key
        found[f"pairs {WINDOW}"] += min(key, WINDOW)


def ignoring(case: Case) -> tuple[str, ...]:
    """Nothing is loaded or stored where the cache lives on the device."""
    return ("loaded", "stored") if case.home == "device" else ()


@pytest.mark.slow
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("schedule", ["row", "zigzag"])
@given(rng=RANDOMS)
@settings(max_examples=25)
def test_rows_that_are_alike_are_exact(schedule: str, limited: bool, rng: random.Random) -> None:
    case = case_of(rng, schedule, True, limited, rng.randint(1, 200))
    real, found = walked(case), totals(told(case))
    for name in real.keys() - set(ignoring(case)):
        assert found[name] == pytest.approx(real[name], rel=1e-9), (name, case)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("schedule", ["diagonal", "continuous"])
def test_rows_that_are_alike_enter_as_places_fall_free(schedule: str, limited: bool) -> None:
    rng = random.Random(2)
    for _ in range(25):
        case = case_of(rng, schedule, True, limited, rng.randint(1, 200))
        real, found = walked(case), totals(told(case))
        for name in real.keys() - set(ignoring(case)):
            assert found[name] == pytest.approx(real[name], rel=0.02), (name, case)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(rng=RANDOMS)
@settings(max_examples=10)
def test_every_row_counts_in_full(schedule: str, rng: random.Random) -> None:
    """Sums over the job do not depend on who computes together: they are exact whatever the rows and pools."""
    case = case_of(rng, schedule, False, rng.random() < 0.5, rng.randint(1, 150))
    real, found = walked(case), totals(told(case))
    for name in real.keys() - {"sweeps", "peak", *ignoring(case)}:
        assert found[name] == pytest.approx(real[name], rel=1e-5), (name, case)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("limited", "median", "worst"), [(False, 0.03, 0.1), (True, 0.05, 0.25)])
def test_sweeps_of_ragged_rows(schedule: str, limited: bool, median: float, worst: float) -> None:
    """A block takes as long as its longest row, which varies much if there are few blocks."""
    rng = random.Random(4)
    errors = []
    while len(errors) < 12:
        case = case_of(rng, schedule, False, limited, rng.randint(100, 250))
        if case.policy.block_size < 8 or case.pool.pages < 8 * pages_for(200, case.pool.page_tokens):
            continue
        errors.append(totals(told(case))["sweeps"] / walked(case, only_sweeps=True)["sweeps"] - 1)
    assert np.median(np.abs(errors)) < median
    assert np.max(np.abs(errors)) < worst


def test_peak_of_large_ragged_blocks() -> None:
    """A mean, and so a little less than the most there ever is."""
    rng = random.Random(5)
    errors = []
    for schedule in SCHEDULES:
        for _ in range(4):
            case = case_of(rng, schedule, False, False, 250)
            if case.policy.block_size >= 24:
                errors.append(totals(told(case))["peak"] / walked(case)["peak"] - 1)
    assert np.median(np.abs(errors)) < 0.1
    assert np.max(np.abs(errors)) < 0.25


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_long_outputs_in_longer_steps(schedule: str) -> None:
    """More ages of sequences than the profile distinguishes."""
    rng = random.Random(6)
    for uniform in (True, False):
        rows = [(50, 700) if uniform else (rng.randint(1, 100), rng.randint(1, 900)) for _ in range(60)]
        case = Case(rows, Policy(8, 2, schedule=schedule), "device", Pool(16 * 63, 16))
        found, real = told(case), walked(case)
        assert len(found.times) < real["sweeps"]
        sums = totals(found)
        for name in ("entering", "decoding", "prompt", "cached"):
            assert sums[name] == pytest.approx(real[name], rel=0.01), name
        assert sums["sweeps"] == pytest.approx(real["sweeps"], rel=0.01 if uniform else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 256), (4, 100), (8, 2)])
@pytest.mark.parametrize("uniform", [True, False])
def test_small_cohorts_with_long_outputs_enter_every_sweep(shape: tuple[int, int], uniform: bool) -> None:
    """One in each sweep, not one in each step of several."""
    rng = random.Random(10)
    rows = [(50, 900) if uniform else (rng.randint(1, 100), rng.randint(1, 900)) for _ in range(4 * shape[0] * 24)]
    case = Case(rows, Policy(*shape, schedule="diagonal"), "device", Pool(10**6, 16))
    assert totals(told(case))["sweeps"] == pytest.approx(walked(case, only_sweeps=True)["sweeps"], rel=0.03)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("uniform", [True, False])
def test_the_first_sweep_is_never_averaged_with_others(schedule: str, uniform: bool) -> None:
    """However long the outputs: it computes the prompts of all who enter, and nobody decodes."""
    rng = random.Random(11)
    rows = [(50, 1000) if uniform else (50, rng.randint(1, 1000)) for _ in range(60)]
    case = Case(rows, Policy(8, 2, schedule=schedule), "device", Pool(10**6, 16))
    found, enter = told(case), 8 if schedule in ("row", "diagonal") else 16
    assert found.entering[0] == pytest.approx(enter)
    assert found.prompt[0] == pytest.approx(50 * enter)
    assert found.decoding[0] == found.cached[None][0] == 0
    assert found.pairs[None][0] == pytest.approx(enter * 50 * 51 / 2)
    assert (found.entering * found.times).sum() == pytest.approx(60)
    if schedule in ("row", "zigzag"):  # nor that of any other block
        assert found.times[found.entering > 0].sum() == pytest.approx(-(-60 // enter))
        assert not (found.decoding * found.entering).any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("uniform", [True, False])
def test_many_rows_are_many_times_few(schedule: str, uniform: bool) -> None:
    """Sweeps that are repeated instead of simulated: 100,000 rows take as many sweeps per row as 1,920 simulated
    rows."""
    rng = random.Random(7)
    sizes = [(rng.randint(1, 200), rng.randint(1, 40)) for _ in range(40)]
    rows = [(100, 20)] * 1920 if uniform else [rng.choice(sizes) for _ in range(1920)]
    policy = Policy(16, 4, schedule=schedule)
    case = Case(rows, policy, "device", Pool(600, 16))
    each = unit(Workload.of(rows), policy.prefill_tokens, PAGES, 0.0)
    many = sweeps_of(each, 100_000, schedule, (16, 4), case.room)
    real = walked(case)
    assert float((many.entering * many.times).sum()) == pytest.approx(100_000)
    assert float((many.decoding * many.times).sum()) == pytest.approx(100_000 / 1920 * real["decoding"])
    assert many.times.sum() == pytest.approx(100_000 / 1920 * real["sweeps"], rel=0.01 if uniform else 0.05)
    assert len(many.times) < 500


@pytest.fixture
def limit_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets the profiles after its call take so many steps: one more fails at once."""
    left = 0

    def counted(*args: int) -> int:
        nonlocal left
        assert (left := left - 1) >= 0, "the profile takes more steps than it may"
        return entrants(*args)  # type: ignore[arg-type]

    def limit(steps: int) -> None:
        nonlocal left
        left = steps

    monkeypatch.setattr(profiles, "entrants", counted)
    return limit


@given(rng=RANDOMS)
@settings(max_examples=100)
def test_pools_too_small_end_all_the_same(rng: random.Random, limit_steps: Callable[[int], None]) -> None:
    """Pools for less than one sequence, or hardly one: such a plan is refused elsewhere, but the profile must not
    hang."""
    rows = [(rng.randint(1, 400), rng.randint(1, 60)) for _ in range(rng.randint(1, 30))]
    each = unit(Workload.of(rows), rng.choice([16, 512]), PAGES, rng.random())
    room = rng.choice([0, 1, 16, 400, 1e9]) * rng.random()
    shape = (rng.randint(1, 9), rng.randint(1, 4))
    limit_steps(10 * 60)  # ten of the longest lives
    found = sweeps_of(each, rng.choice([1, 3, 10_000, 10**9]), rng.choice(SCHEDULES), shape, room)
    assert float((found.entering * found.times).sum()) == pytest.approx(found.rows)
    values = [found.cached[None] if name == "cached" else getattr(found, name) for name in SUMS]
    assert np.isfinite(values).all()
    assert (found.times > 0).all()
    assert (found.decoding >= 0).all()


@pytest.mark.parametrize("room", [0.0, 5e-324, 1e-9, 1e-5, 0.1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_room_for_a_tiny_part_of_a_sequence(schedule: str, room: float, limit_steps: Callable[[int], None]) -> None:
    """One sequence at a time: entries by parts of 1e-11 sequences would take 1e20 steps."""
    uniform, mixed = ([(100, 20)], [(100, 20), (100, 30)])
    limit_steps(10 * 30)
    alike = sweeps_of(unit(Workload.of(uniform), 512, PAGES, 0.0), 10**9, schedule, (4, 2), room)
    assert alike.times.sum() == pytest.approx(20 * 10**9)
    assert alike.live == pytest.approx(np.ones(len(alike.times)))
    limit_steps(10 * 30)
    found = sweeps_of(unit(Workload.of(mixed), 512, PAGES, 0.0), 10**9, schedule, (4, 2), room)
    assert float((found.entering * found.times).sum()) == pytest.approx(10**9)
    assert float((found.decoding * found.times).sum()) == pytest.approx((19 + 29) / 2 * 10**9)


def test_classes_keep_means() -> None:
    """More sizes than are told apart are joined by neighbours."""
    rng = random.Random(9)
    few = Workload.of([(3, 2), (3, 2), (7, 9)])
    prompts, outputs, _, shares = classes(few)
    assert [*prompts, *outputs] == [3, 7, 2, 9]
    assert shares == pytest.approx([2 / 3, 1 / 3])
    rows = [(rng.randint(1, 2000), rng.randint(1, 400)) for _ in range(5000)]
    prompts, outputs, _, shares = classes(Workload.of(rows))
    assert len(prompts) <= MAX_SIZES
    assert shares.sum() == pytest.approx(1)
    assert (prompts * shares).sum() == pytest.approx(np.mean([p for p, _ in rows]), rel=0.01)
    assert (outputs * shares).sum() == pytest.approx(np.mean([n for _, n in rows]), rel=0.01)


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
def test_a_gpu_batch_loads_shared_pages_once(batch: int) -> None:
    """Against the pages that gpu_batches load, counted one by one: eight sequences share 192 of 205 prompt tokens."""
    workload = Workload({(205, 20): 8}, {(205, 20): 192 * 7 / 8}, 1, 192)
    pages = (LayerPages(1.0, Pool(0, 16), Pool(0, 16)),)
    loaded = 0
    for step in range(20):
        for first in range(0, 8, batch):
            cached = 192 if step == 0 else 205 + step - 1
            loaded += len({page if page < 12 else (page, i) for i in range(first, min(8, first + batch))
                           for page in range(-(-cached // 16))})  # fmt: skip
    assert 8 * float(unit(workload, 512, pages, 1.0, batch).loaded.sum()) == pytest.approx(16 * loaded, rel=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [[(50, 20)] * 60, [(50, 700)] * 40, [(9, 5)] * 30 + [(9, 40)] * 30, [(9, 1)] * 50])
def test_sweeps_between_ends_of_rows(schedule: str, rows: Rows) -> None:
    """Until the first end and, for rows of one size, the most between two ends. Steps may have three sweeps."""
    case = Case(rows, Policy(8, 2, schedule=schedule), "device", Pool(10**5, 16))
    walk, ends, sweeps = Sweeps(case.policy, {"device": (case.pool,)}), [0], 0
    for i, (prompt, most) in enumerate(random.Random(3).sample(rows, len(rows))):
        walk.add(Sequence(i, prompt, most))
    while not walk.idle:
        batches = walk.begin(lambda sequence, pages: None)
        before, sweeps = set(walk.live), sweeps + 1
        walk.advance(batches, set())
        ends += [sweeps] * bool(before - set(walk.live))
    found = told(case)
    first, longest = found.stores(np.ones(len(found.times)), 0.0)
    step = -(-max(n for _, n in rows) // profiles.MAX_AGES)
    assert first == pytest.approx(ends[1], abs=step, rel=0.02)
    assert len(set(rows)) > 1 or longest == pytest.approx(max(np.diff(ends)), abs=step, rel=0.02)
    assert found.stores(np.ones(len(found.times)), 10_000.0) == (first + 10_000, first + 10_000)
