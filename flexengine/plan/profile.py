"""Mean counts of a job's sweeps under a policy: sequences that enter and that are alive, and cached tokens.

The schedule itself (`schedule.sweeps`) walks single sequences. This module treats sequences as a fluid. A sequence that
entered d sweeps ago is alive with the probability that it generates more than d tokens. So each count of a sweep is the
sum, over all earlier sweeps, of (sequences that entered) x (mean count of a sequence of that age). Admission follows
the schedule's rule with fractional numbers of sequences. The computation takes milliseconds for any number of rows, and
is exact if all rows have equal sizes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexengine.plan.sizes import Array, LayerPages, moved_pages
from flexengine.plan.workload import Workload
from flexengine.schedule.pages import Pool
from flexengine.schedule.sweeps import entrants

Indices = NDArray[np.intp]

MAX_AGES = 256  # most steps of a sequence's life; longer lives have longer steps
MAX_SIZES = 512  # most different sizes of sequences
IDLE_PAGE_SHARE = 0.5  # of one sequence's pages: idle, because the next sequence in line needs more
PERIODIC_LIVES = 3  # longest lives after which the sweeps of the last one are assumed to repeat


@dataclass(frozen=True)
class Unit:
    """Mean numbers of one sequence of a workload. Arrays are by age: sweeps since the sequence entered."""

    stride: int  # sweeps per step of age
    live: Array  # probability that the sequence is alive
    ended: Array  # probability that the sequence ends
    # by window (None: all), tokens that attention reads when the sequence decodes, with the new token, and at
    # most the window; 0 at age 0
    cached: Mapping[int | None, Array]
    held: Array  # tokens of its pages, averaged over layers
    # loaded, stored: tokens of pages loaded before, and stored after computing, averaged over layers, if its
    # cache is off the device
    loaded: Array
    stored: Array
    prompt: float  # tokens of its prompt that are computed: without those that it shares, see `Workload.spared`
    pairs: Mapping[int | None, float]  # (query, key) pairs of the prompt by window (None: all)
    late: Mapping[int | None, float]  # part of `pairs` in the prompt's later pieces
    # prompt_loaded, prompt_stored: part of `loaded` and `stored` that its prompt causes
    prompt_loaded: float = 0.0
    prompt_stored: float = 0.0
    logits: float = 0.0  # tokens whose logits are computed in its prompt, beyond one
    alike: bool = False  # whether all sequences hold equally many pages at their end
    together: bool = False  # whether all sequences generate equally many tokens


@dataclass(frozen=True)
class Profile:
    """A job's sweeps in order. Arrays have one entry per group of equal sweeps, and hold means of one sweep.

    A sweep in which a whole block enters is always an entry of its own. Fields that are not listed are sums over
    sequences of the fields of `Unit` with the same name."""

    times: Array  # number of real sweeps
    # entering, decoding: number of sequences
    entering: Array
    decoding: Array
    prompt: Array  # prompt tokens computed
    cached: Mapping[int | None, Array]
    loaded: Array
    stored: Array
    prompt_loaded: Array
    prompt_stored: Array
    logits: Array  # tokens whose logits are computed, beyond one for each sequence
    pairs: Mapping[int | None, Array]
    late: Mapping[int | None, Array]
    rows: int  # sequences of the job
    peak: float = 0.0  # most page tokens ever held
    counted: Array | float = 1.0  # share of the sequences that `loaded` and `stored` include
    ended: Array | float = 0.0  # sequences that end
    periods: Array | float = 1.0  # number of times that the group of sweeps occurs; `times` counts all

    @staticmethod
    def stacked(sweeps: Sequence[Mapping[str, Any]], rows: int, counted: Array) -> "Profile":
        """Return the profile of single sweeps, one entry each. sweeps: their numbers, by names of fields."""

        def columns(values: Sequence[Any]) -> Any:
            if not isinstance(values[0], Mapping):
                return np.array(values, dtype=float)
            return {window: columns([by_window[window] for by_window in values]) for window in values[0]}

        sums = {name: columns([sweep[name] for sweep in sweeps]) for name in sweeps[0]}
        return Profile(**sums, times=np.ones(len(sweeps)), rows=rows, counted=counted)

    @property
    def live(self) -> Array:
        """Return the sequences alive, by sweep."""
        return self.entering + self.decoding

    def stores(self, seconds: Array, loading: float) -> tuple[float, float]:
        """Return the seconds until the first sequence ends, and the most seconds between two ends, or before the first.

        Args:
            seconds: of one sweep, by group.
            loading: seconds before the first sweep.
        """
        once = self.times / self.periods
        clock, ended = loading + np.cumsum(seconds * once), np.round(np.cumsum(self.ended * once))
        ends = np.append(clock[np.diff(ended, prepend=0.0) > 0], clock[-1])
        return float(ends[0]), float(np.diff(ends, prepend=0.0).max())


def classes(workload: Workload) -> tuple[Array, Array, Array, Array]:
    """Return (prompt tokens, tokens to generate, spared tokens, share of the rows) of at most MAX_SIZES sizes."""
    items = sorted(workload.sizes.items(), key=lambda item: (item[0][1], item[0][0]))
    rows = ((p, n, workload.spared.get((p, n), 0.0), count) for (p, n), count in items)
    prompts, outputs, spared, counts = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    if len(items) > MAX_SIZES:
        group = np.minimum((np.cumsum(counts) - counts / 2) / counts.sum() * MAX_SIZES, MAX_SIZES - 1).astype(int)
        totals = np.bincount(group, counts, MAX_SIZES)
        used = totals > 0
        means = [np.bincount(group, x * counts, MAX_SIZES)[used] / totals[used] for x in (prompts, outputs, spared)]
        (prompts, outputs, spared), counts = map(np.round, means), totals[used]
    return prompts, outputs, spared, counts / counts.sum()


def unit(
    workload: Workload, prefill_tokens: int, pages: Sequence[LayerPages], share_away: float, batch: int = 1,
    windows: Iterable[int] = (),
) -> Unit:  # fmt: skip
    """Return the mean sequence of a workload.

    Args:
        pages: one per group of layers.
        share_away: share of the sequences whose cache is off the device.
        batch: sequences of a gpu_batch, which loads a page that they share once.
        windows: of the layers, without None.
    """
    p, n, spared, share = classes(workload)
    stride = max(1, -(-int(n.max()) // MAX_AGES))
    age = np.arange(0, int(n.max()), stride, dtype=float)[:, None]
    alive = (n > age) * share
    step = np.minimum(stride, np.maximum(n - age, 0)) / stride * share  # the last step of a life may be shorter

    def mean(count: Callable[[Pool], Array], device: bool = False) -> Array:
        """Return the tokens of pages, averaged over layers. count: number of pages of a pool."""
        pools = ((group.layers, group.device if device else group.away) for group in pages)
        return np.asarray(sum(layers * pool.page_tokens * count(pool) for layers, pool in pools))

    def held_by(tokens: Array) -> Array:
        on_device, off_device = (
            mean(lambda pool: pool.held(tokens) - pool.num_shared(spared), device) for device in (True, False)
        )
        return (1 - share_away) * on_device + share_away * off_device

    held_tokens, at_end = held_by(np.minimum(p + age + stride - 1, p + n - 1)), held_by(p + n - 1)
    users = max(1.0, workload.count / max(1, workload.stems))  # of a shared page
    shared = spared * users / max(1.0, users - 1)
    again = 1 - 1 / min(batch, users)  # share of the reads of shared pages that find the page loaded
    computed = p - spared

    def moved(pool: Pool) -> tuple[Array, Array]:
        return moved_pages(pool, computed, prefill_tokens)

    prompt_loaded = mean(lambda pool: moved(pool)[0] + pool.num_read(shared) - again * pool.num_shared(shared))
    prompt_stored = mean(lambda pool: moved(pool)[1])
    decode_loaded = mean(lambda pool: pool.num_read(p + age - 1) - again * pool.num_shared(shared))
    loaded = np.where(age > 0, decode_loaded, prompt_loaded / stride)
    stored = np.where(age > 0, mean(lambda pool: np.ones_like(p)), prompt_stored / stride)
    any_window = (None, *windows)
    seen = {w: np.minimum(p + age, np.inf if w is None else w) for w in any_window}
    cached = {w: (np.where(age > 0, tokens, 0.0) * step).sum(1) for w, tokens in seen.items()}
    pairs = {w: float(((_pairs(p, w) - _pairs(spared, w)) * share).sum()) for w in any_window}
    first = np.where(spared > 0, 0.0, np.minimum(p, prefill_tokens))  # what follows a shared prefix is a later piece
    late = {w: max(0.0, pairs[w] - float((_pairs(first, w) * share).sum())) for w in any_window}
    return Unit(
        stride=stride,
        live=step.sum(1),
        ended=-np.diff(alive.sum(1), append=0.0),
        cached=cached,
        held=(held_tokens * alive).sum(1),
        loaded=(loaded * step).sum(1),
        stored=(stored * step).sum(1),
        prompt=float((computed * share).sum()),
        pairs=pairs,
        late=late,
        prompt_loaded=float((prompt_loaded * share).sum()),
        prompt_stored=float((prompt_stored * share).sum()),
        logits=(workload.scored or 0) / max(1, workload.count),
        alike=len(np.unique(at_end)) == 1,
        together=len(np.unique(n)) == 1,
    )


def _pairs(tokens: Array, window: int | None) -> Array:
    """Return the (query, key) pairs of prompts of `tokens` tokens. Each query sees at most `window` tokens."""
    short = tokens if window is None else np.minimum(tokens, window)
    return np.asarray(short * (short + 1) / 2 + (tokens - short) * (window or 0))


@dataclass(frozen=True)
class Walk:
    """Entries of sequences. Arrays by step of `Unit.stride` sweeps."""

    entered: Array  # sequences that enter
    at_once: Array  # part of `entered` that enters in the step's first sweep; the rest spreads over the step
    times: Array  # number of times that the step occurs

    def peak(self, each: Unit) -> float:
        """Return the most page tokens ever held."""
        return float(np.convolve(self.entered, each.held).max())


def never_waits(each: Unit, rows: int, schedule: str, shape: tuple[int, int], room: float) -> bool:
    """Return whether pages suffice for a block and one more sequence at any ages, so that no sequence waits."""
    return bool(room >= (_block(rows, schedule, shape) + 1) * (each.held / np.maximum(each.live, 1e-9)).max())


def _block(rows: int, schedule: str, shape: tuple[int, int]) -> int:
    return min(shape[0] if schedule == "row" else shape[0] * shape[1], rows)


def walk(each: Unit, rows: int, schedule: str, shape: tuple[int, int], room: float = np.inf) -> Walk:
    """Return the entries of a job's sequences.

    Without a limit on pages, the result depends on the workload, `schedule` and `shape` alone. At least one mean
    sequence fits, even if `room` is less: smaller parts of a sequence would take endlessly many sweeps.

    Args:
        each: mean sequence of the job.
        rows: number of sequences.
        schedule: as in `Policy`.
        shape: (gpu_batch_size, num_gpu_batches).
        room: page tokens that fit.
    """
    block, each_peak = _block(rows, schedule, shape), max(1e-9, float(each.held.max()))
    if room < block * each_peak and not each.alike:
        room -= IDLE_PAGE_SHARE * min(each_peak, max(0.0, room - each_peak))
    room = max(room, each_peak)
    return (_rounds if schedule in ("row", "zigzag") else _stream)(each, rows, schedule, shape, room)


def _rounds(each: Unit, rows: int, schedule: str, shape: tuple[int, int], room: float) -> Walk:
    """Return the entries if a block enters when the previous one has ended: full blocks, then the remaining rows."""
    allowed = float(entrants(schedule, 0, *shape))
    block = min(_whole(each, min(allowed, room / max(1e-9, float(each.held.max())))), float(rows))
    full = float(np.floor(rows / block + 1e-9))
    sizes = [(block, full), (rows - full * block, 1.0)]
    entered = np.concatenate([np.append(size, np.zeros(len(each.live) - 1)) for size, _ in sizes if size > 1e-6])
    return Walk(entered, entered, np.repeat([times for size, times in sizes if size > 1e-6], len(each.live)))


def _stream(each: Unit, rows: int, schedule: str, shape: tuple[int, int], room: float) -> Walk:
    """Return the entries if sequences enter as others end: step by step, with repeated periods only once."""
    horizon, limited = len(each.live), room < np.inf
    ones = np.stack([each.live, each.held])[: 1 + limited]
    future = np.zeros((len(ones), 4 * horizon))  # sequences alive, and page tokens held, by step
    entered: list[float] = []
    times: list[float] = []
    left, repeated, least, block = float(rows), False, np.maximum(each.held, 1e-9), float(shape[0] * shape[1])
    while left > 1e-6:
        step = len(entered)
        if step + horizon > future.shape[1]:
            future = np.concatenate([future, np.zeros_like(future)], axis=1)
        if step >= PERIODIC_LIVES * horizon and not repeated:
            period = sum(entered[-horizon:])
            whole, repeated = float(np.floor(left / period + 1e-9)), True
            times[-horizon:] = [1.0 + whole] * horizon
            left -= whole * period
            continue
        alive = 0.0 if future[0, step] < 1e-9 else float(future[0, step])
        free = float(entrants(schedule, alive, *shape))  # type: ignore[arg-type]
        now = min(each.stride * free, block - alive, left)  # `free` sequences enter in each sweep of the step
        if now > 0 and limited:
            fits = float(((room - future[1, step : step + horizon]) / least).min())
            now = max(0.0, min(now, _whole(each, fits)))
        entered.append(now)
        times.append(1.0)
        left -= now
        if now > 0:
            future[:, step + 1 : step + horizon] += now * ones[:, 1:]
    rest = horizon - 1  # steps until the last sequences end
    at_once = np.zeros(len(entered) + rest)  # later sequences enter when others end, at any sweep of a step
    at_once[0] = min(entered[0], float(entrants(schedule, 0, *shape)))
    if each.together and schedule == "continuous":
        at_once[: len(entered)] = entered
    return Walk(np.append(entered, np.zeros(rest)), at_once, np.append(times, np.ones(rest)))


def _whole(each: Unit, number: float) -> float:
    """Return the number rounded down if all sequences hold equally many pages; else the mean may be fractional."""
    return float(np.floor(number + 1e-9)) if each.alike and np.isfinite(number) else number


def summed(each: Unit, walk: Walk, rows: int) -> Profile:
    """Return the sweeps of a walk: sums over ages of (sequences that entered) x (mean sequence of that age).

    A sweep takes place if any sequence is alive. Near the end of a block, this has a probability below 1. `times`
    counts the sweep with its probability, and all other fields are divided by it.
    """
    entered, times, steps = walk.entered, walk.times, len(walk.entered)
    step, real, by_entry = _cut(walk, each.stride)

    def sums(column: Array, fresh: float) -> Array:
        """Return the sums of a column of `Unit`, scaled so that the job's total is exact.

        Args:
            fresh: value of a sequence in the sweep of its entry.
        """
        total = np.convolve(entered, column)[:steps]
        counted = float((total * times).sum())
        scale = rows * float(column.sum()) / counted if counted > 0 else 1.0  # repeated steps need not be whole periods
        return by_entry(total * scale, (total - entered * column[0]) * scale + walk.at_once * fresh)

    def prompts(number: float) -> Array:
        return by_entry(entered * number / each.stride, walk.at_once * number)

    occurs = -np.expm1(np.convolve(entered, np.log(np.clip(1 - each.live, 1e-12, 1.0)))[:steps])
    occurs = np.where(entered > 0, 1.0, occurs)[step]  # probability that a sequence is alive
    made = occurs > 1e-6
    share = np.where(made, occurs, 1.0)[made]

    def mean(values: Array) -> Array:
        return np.asarray(values[made] / share)

    decoding = each.live.copy()
    decoding[0] -= 1 / each.stride  # in its first sweep, a sequence computes its prompt
    return Profile(
        times=real[made] * share,
        periods=walk.times[step][made],
        ended=mean(by_entry(np.convolve(entered, each.ended)[:steps] / each.stride, np.zeros(steps))),
        entering=mean(prompts(1.0)),
        decoding=mean(np.maximum(sums(decoding, 0.0), 0.0)),
        prompt=mean(prompts(each.prompt)),
        cached={w: mean(sums(x, 0.0)) for w, x in each.cached.items()},
        loaded=mean(sums(each.loaded, each.prompt_loaded)),
        stored=mean(sums(each.stored, each.prompt_stored)),
        prompt_loaded=mean(prompts(each.prompt_loaded)),
        prompt_stored=mean(prompts(each.prompt_stored)),
        logits=mean(prompts(each.logits)),
        pairs={w: mean(prompts(pairs)) for w, pairs in each.pairs.items()},
        late={w: mean(prompts(pairs)) for w, pairs in each.late.items()},
        rows=rows,
        peak=walk.peak(each),
    )


def _cut(walk: Walk, stride: int) -> tuple[Indices, Array, Callable[[Array, Array], Array]]:
    """Return the step and the real sweeps of each entry of a profile, and a function that returns values by entry.

    A step in which sequences enter at once gives two entries: its first sweep, and the mean of its other sweeps. The
    function's arguments are, by step, the values of a mean sweep and of the first sweep.
    """
    apart = (walk.at_once > 0) & (stride > 1)
    step = np.repeat(np.arange(len(apart)), 1 + apart)
    is_rest = np.append(False, step[1:] == step[:-1])
    is_first = apart[step] & ~is_rest

    def sweeps(mean: Array, first: Array) -> Array:
        rest = np.maximum(mean * stride - first, 0) / max(1, stride - 1)
        return np.where(is_first, first[step], np.where(is_rest, rest[step], mean[step]))

    return step, walk.times[step] * np.where(is_first, 1, np.where(is_rest, stride - 1, stride)), sweeps
