"""Tokens of the native kernel and of plain torch are those of a full sort of every row, in numpy."""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexengine.kernels import load, structs
from flexengine.kernels.cpu import NativeKernels
from flexengine.kernels.sampling import Chosen, Edits, RowOptions, choose_tokens, plain_choice
from flexengine.plan.sizes import workspace
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from tests.helpers.plans import opt

INF = math.inf


def none_of(rows: int) -> Edits:
    first, ids = torch.zeros(rows + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Edits(first, ids, ids, torch.zeros(0, dtype=torch.float64))


def kinds(words: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    x = torch.randn(words, generator=torch.Generator().manual_seed(seed))
    yield "flat", x
    yield "sharp", torch.where(x > 2, x * 6, x * 3)
    yield "many ties", (x * 4).round()
    yield "bf16", (x * 3).bfloat16().float()
    yield "equal", torch.full((words,), 0.5)
    yield "sorted", x.sort(descending=True).values * 2
    yield "rising", x.sort().values * 2
    yield "one", torch.where(x == x.max(), x + 30, x)
    yield "forbidden", torch.where((x > 1) | (x == x.max()), x, -INF)


def sorted_choice(x: np.ndarray, o: dict[str, float]) -> tuple[list[int], int]:
    """Return the tokens that are kept, by rising id, and the one that is drawn."""
    weights = np.exp((x - x.max()) / o["temperature"])
    if 0 < o["top_k"] < len(x):
        weights[x < np.sort(x)[-int(o["top_k"])]] = 0
    cut = weights.copy()
    if o["top_p"] < 1:
        order = np.lexsort((np.arange(len(x)), -x))
        before = np.concatenate(([0], weights[order].cumsum()[:-1]))
        cut[order[before >= o["top_p"] * weights.sum()]] = 0
    cut[weights < o["min_p"]] = 0
    running = cut.cumsum()
    kept = [int(i) for i in np.flatnonzero(cut)]
    drawn = int(np.searchsorted(running, o["point"] * running[-1], side="right"))
    return kept, drawn


def both(logits: torch.Tensor, given: list[dict[str, float]], edits: Edits, listed: int = -1) -> list[Chosen]:
    """Return what both forms choose."""
    fp64 = [
        torch.tensor([o[name] for o in given], dtype=torch.float64)
        for name in ("temperature", "top_p", "min_p", "point")
    ]
    temperature, top_p, min_p, points = fp64
    top_k = torch.tensor([int(o["top_k"]) for o in given])
    options = RowOptions(temperature, top_k, top_p, min_p, points, torch.full((len(given),), listed))
    assert isinstance(load(), NativeKernels)
    return [choose_tokens(logits, options, edits), plain_choice(logits, options, edits)]


CUTS: list[dict[str, float]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 1000}, {"top_p": 0.02}, {"top_p": 0.5}, {"top_p": 0.95},
    {"top_p": 0.9995}, {"min_p": 0.3}, {"min_p": 1}, {"min_p": 1e-4}, {"top_k": 40, "top_p": 0.8},
    {"top_k": 3000, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.05}, {"top_p": 0.3, "min_p": 0.01},
    {"top_k": 40, "min_p": 0.2}, {"top_k": 100, "top_p": 0.97, "min_p": 0.02}, {"temperature": 3, "top_p": 0.9},
    {"temperature": 0.3, "top_p": 0.9, "min_p": 0.001},
]  # fmt: skip
NEUTRAL = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 7, 128, 129, 5000, 50_001])
@pytest.mark.parametrize("edited", [False, True])
def test_no_sort_gives_the_tokens_of_a_sort(words: int, edited: bool) -> None:
    noise = np.random.default_rng(words)
    for kind, row in kinds(words, words):
        given = [NEUTRAL | cut | {"point": point} for cut in CUTS for point in (0.0, *noise.random(4), 1 - 2**-53)]
        x, edits = row.double().numpy().copy(), none_of(len(given))
        if edited and words > 2:
            ids = torch.from_numpy(np.unique(noise.integers(0, words, max(1, words // 50))))
            values = row.double()[ids] / 1.7 + 0.1
            values[::5] = -INF
            if values.max() == -INF or len(ids) == words:
                continue
            x[ids.numpy()] = values.numpy()
            if x.max() == -INF:
                continue
            many = len(given)
            edits = Edits(torch.arange(many + 1) * len(ids), torch.arange(many).repeat_interleave(len(ids)),
                          ids.repeat(many), values.repeat(many))  # fmt: skip
        wanted = [sorted_choice(x, o) for o in given]
        for name, found in zip(("native", "plain"), both(row.expand(len(given), words), given, edits), strict=True):
            for o, (kept, token), got in zip(given, wanted, found.tokens.tolist(), strict=True):
                if o["point"] > 1 - 1e-15:  # tokens with less than the rounding of the sum may be left out
                    assert got in kept, (kind, name, o)
                elif name == "plain" and kind == "one" and o["point"] == 0:  # tokens of 2 ** -44 and less count as 0
                    assert got in kept, o
                else:
                    assert got == token, (kind, name, o, x[got], x[token])


def test_listed_tokens_are_those_of_a_sort() -> None:
    for words in (1, 3, 300, 5000):
        for kind, row in kinds(words, 3):
            order = np.lexsort((np.arange(words), -row.double().numpy()))
            order = [int(i) for i in order if row[i] > -INF][:20]
            logprobs = row.double().log_softmax(0)
            for temperature in (0, 1, 2):
                options = NEUTRAL | {"temperature": temperature, "point": 0.4, "top_p": 0.9}
                for found in both(row[None], [options], none_of(1), 20):
                    got = [i for i in found.likeliest[0].tolist() if i >= 0]
                    assert got == order, kind
                    likely = found.likely[0][: len(got)]
                    torch.testing.assert_close(likely, logprobs[order], rtol=0, atol=1e-9)
                    torch.testing.assert_close(found.logprobs, logprobs[found.tokens], rtol=0, atol=1e-9)


def test_weights_are_as_exact_as_fp64() -> None:
    """The kernel's own exp: probabilities of two tokens, over the range of fp64."""
    gaps = np.concatenate((np.linspace(0, 30, 400), np.linspace(30, 700, 50))).astype(np.float32)
    for gap in gaps.tolist():
        p = 1 / (1 + math.exp(-gap))  # of the first token
        for point, token in ((p * (1 - 4e-16), 0), (min(p * (1 + 4e-16), 1 - 2**-53), 1)):
            if gap > 30 and token:
                continue  # the second token is less than the rounding
            [native, _] = both(torch.tensor([[0.0, -gap]]), [NEUTRAL | {"point": point}], none_of(1))
            assert native.tokens.tolist() == [token], gap


@pytest.mark.parametrize("words", [1, 129, 50_001, 262_144])
def test_scratch_memory_is_booked(words: int) -> None:
    """That of each thread, for at most as many threads as rows. A stage without the head draws no tokens."""
    kernels, policy, work = load(), Policy(8, prefill_tokens=8), Workload({(8, 2): 3})
    assert isinstance(kernels, NativeKernels)
    taken = structs.bound(kernels.library, "sampling_bytes", ctypes.c_int64, (ctypes.c_int64,))(words)
    model = replace(opt(1, 64, 2, words), scratch=0)
    plain = workspace(model, policy, work)
    for threads, used in ((1, 1), (2, 2), (64, 3)):
        booked = workspace(replace(model, drawing=threads), policy, work) - plain
        assert used * taken <= booked <= used * 1.1 * (taken + 8192)
    last = replace(model, leaves=True)
    assert workspace(replace(last, drawing=4), policy, work) == workspace(last, policy, work)


def test_other_rows_and_threads_change_nothing() -> None:
    rows = [row for _, row in kinds(5000, 9)]
    given: list[dict[str, Any]] = [NEUTRAL | cut | {"point": 0.1 + i / 40} for i, cut in enumerate(CUTS[: len(rows)])]
    logits, threads = torch.stack(rows), torch.get_num_threads()
    edits = none_of(len(rows))
    for form, together in enumerate(both(logits, given, edits, 5)):
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                again = both(logits.flip(0), given[::-1], edits, 5)[form]
                assert all((a == b.flip(0)).all() for a, b in zip(together, again, strict=True))
                for r in range(len(rows)):
                    alone = both(logits[r : r + 1], given[r : r + 1], none_of(1), 5)[form]
                    assert all((a[r] == b[0]).all() for a, b in zip(together, alone, strict=True))
        finally:
            torch.set_num_threads(threads)
