"""bench.kernels.attention: sizes, arithmetic of the results, and a whole run of a small case."""

from dataclasses import replace

import pytest
import torch

from bench.kernels import attention
from bench.kernels.attention import (
    CASES,
    PROMPTS,
    SHARES,
    Case,
    PromptCase,
    copies,
    prompt_results,
    prompt_table,
    reading,
    results,
    table,
    timed,
)  # fmt: skip
from bench.kernels.peak import Peak

SMALL = Case("small", kv_heads=2, sequences=3, tokens=40, heads=4, dim=64, page_tokens=16)


def test_the_cases_have_the_sizes_they_are_known_by() -> None:
    for name, kv_heads in (("mha", 32), ("gqa", 8), ("gqa8", 4)):
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
    seconds = {"bf16": [2.0, 1.0, 4.0], "read bf16": [0.9, 0.5], "sdpa": [3.0]}
    found = results(case, seconds, Peak(fp32=1e9, bf16=0.0, int8=0.0, read=0.0))
    assert found["bf16"] == {
        "seconds": 1.0, "median": 2.0, "gb_s": 100 * 256 / 1e9, "gflop_s": 4 * 100 * 64 / 1e9, "mtokens_s": 100 / 1e6,
        "read_gb_s": 2 * 100 * 256 / 1e9, "share": 0.5, "bound": 0.5, "to_sdpa": 3.0,
    }  # fmt: skip
    slow = results(case, seconds, Peak(fp32=4 * 100 * 64 / 0.75, bf16=0.0, int8=0.0, read=0.0))
    assert slow["bf16"]["bound"] == 0.75  # the products take longer than the read
    assert found["sdpa"]["gb_s"] == pytest.approx(100 * 512 / 3e9)
    assert [line.split()[0] for line in table(case, found).splitlines()] == ["one:", "KV", "bf16", "sdpa"]


def test_a_small_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.attention.BEYOND", 1 << 20)
    record = attention.run_case(SMALL, 2)
    assert list(record["kinds"]) == [*SMALL.kinds, "sdpa"]
    assert all(x["seconds"] > 0 for x in record["kinds"].values())
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # packages may lack "+cpu"
    assert all(0 < x["share"] <= x["bound"] for kind, x in record["kinds"].items() if kind != "sdpa")


def test_prompts_are_the_lengths_and_heads_they_are_known_by() -> None:
    for name, kv_heads in (("prompt-mha", 32), ("prompt-gqa", 8), ("prompt-gqa8", 4)):
        case = PROMPTS[name]
        assert (case.heads, case.kv_heads, case.dim) == (32, kv_heads, 128)
        assert (min(case.tokens), max(case.tokens)) == (128, 4096)
    pairs = sum(1 for t in range(5) for s in range(5) if s <= t)
    assert PromptCase("five", kv_heads=1, heads=3, dim=16).operations(5) == pairs * 3 * 16 * 2 * 2


def test_results_of_prompts_are_of_the_least_times() -> None:
    case = PromptCase("one", kv_heads=1, heads=1, dim=64)
    found = prompt_results(case, {3: [2.0, 1.0]}, Peak(fp32=2 * 4 * 64 * 6, bf16=0.0, int8=0.0, read=0.0))
    assert found == {"3": {"seconds": 1.0, "median": 1.5, "gflop_s": 4 * 64 * 6 / 1e9, "share": 0.5}}
    assert [line.split()[0] for line in prompt_table(case, found).splitlines()] == ["one:", "tokens", "3"]
    pairs = replace(case, rounded=True)
    found = prompt_results(pairs, {3: [1.0]}, Peak(fp32=1.0, bf16=4 * 4 * 64 * 6, int8=0.0, read=0.0))
    assert found["3"]["share"] == 0.25
    assert prompt_table(pairs, found).splitlines()[0].endswith(", bf16")


def test_shares_are_of_each_class_and_shape() -> None:
    assert {(case.heads // case.kv_heads, case.dim) for case in SHARES.values() if case.rounded} == {
        (case.heads // case.kv_heads, case.dim) for case in SHARES.values() if not case.rounded
    }
    assert {case.tokens for case in SHARES.values()} == {(512, 1500, 6000)}


def test_a_small_prompt() -> None:
    record = attention.run_prompt(PromptCase("small", kv_heads=2, heads=4, dim=64, tokens=(16, 48)), 1)
    assert list(record["lengths"]) == ["16", "48"]
    assert all(x["seconds"] > 0 for x in record["lengths"].values())
    assert record["peak_gflop_s"] > 0
