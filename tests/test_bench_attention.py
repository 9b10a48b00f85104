"""bench.attention: sizes, arithmetic of the results, and a whole run of a small case."""

import pytest
import torch

from bench import attention
from bench.attention import CASES, Case, copies, reading, results, table, timed

SMALL = Case("small", kv_heads=2, sequences=3, tokens=40, heads=4, dim=64, page_tokens=16)


def test_the_cases_have_the_sizes_they_are_known_by() -> None:
    for name, kv_heads in (("mha", 32), ("gqa", 8)):
        case = CASES[name]
        assert (case.sequences, case.tokens, case.heads, case.kv_heads, case.dim) == (16, 544, 32, kv_heads, 128)
        assert case.token_bytes("bf16") == 2 * kv_heads * 128 * 2
        assert case.token_bytes("fp32") == 2 * case.token_bytes("bf16")
        assert case.token_bytes("4-bit") == 2 * kv_heads * (128 // 2 + 4 * (2 + 2))  # four groups: scale and minimum


def test_ragged_lengths_and_their_pages() -> None:
    assert SMALL.lengths == [40, 39, 38]
    assert SMALL.pages == 9
    assert SMALL.kv_bytes("fp32") == (40 + 39 + 38) * 2 * 2 * 64 * 4


def test_a_side_goes_through_more_than_a_cache_holds() -> None:
    for nbytes in (1, 10 << 20, 300 << 20, 1 << 30):
        assert copies(nbytes) >= 2
        assert copies(nbytes) * nbytes >= attention.BEYOND


def test_reading_takes_one_piece_after_the_other() -> None:
    read = reading(24, torch.arange(10))
    assert [int(read(i)) for i in range(4)] == [0 + 1 + 2, 3 + 4 + 5, 6 + 7 + 8, 0 + 1 + 2]


def test_sides_take_turns() -> None:
    seen: list[tuple[str, int]] = []
    found = timed({"a": lambda i: seen.append(("a", i)), "b": lambda i: seen.append(("b", i))}, 2)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2}


def test_results_are_of_the_least_times() -> None:
    case = Case("one", kv_heads=1, sequences=1, tokens=100, heads=1, dim=64, page_tokens=16, kinds=("bf16",))
    found = results(case, {"bf16": [2.0, 1.0, 4.0], "read bf16": [0.9, 0.5], "sdpa": [3.0]})
    assert found["bf16"] == {
        "seconds": 1.0, "median": 2.0, "gb_s": 100 * 256 / 1e9, "mtokens_s": 100 / 1e6,
        "read_gb_s": 2 * 100 * 256 / 1e9, "share": 0.5, "to_sdpa": 3.0,
    }  # fmt: skip
    assert found["sdpa"]["gb_s"] == pytest.approx(100 * 512 / 3e9)
    assert [line.split()[0] for line in table(case, found).splitlines()] == ["one:", "KV", "bf16", "sdpa"]


def test_a_small_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.attention.BEYOND", 1 << 20)
    record = attention.run_case(SMALL, 2)
    assert list(record["kinds"]) == [*SMALL.kinds, "sdpa"]
    assert all(x["seconds"] > 0 for x in record["kinds"].values())
    assert record["versions"]["torch"] == torch.__version__
