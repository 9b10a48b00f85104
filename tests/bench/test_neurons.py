"""bench.kernels.neurons: sizes, arithmetic of the results, and a whole run of a small case."""

import pytest

from bench.kernels import neurons
from bench.kernels.neurons import BEYOND, CASES, Case, results, table


def test_the_cases_have_the_sizes_they_are_known_by() -> None:
    for name, case in CASES.items():
        assert case.width == int(name)
        assert case.nbytes("bfloat16") == case.places * case.width * 2
        assert case.nbytes("int4") == case.places * case.width * 5 // 8  # scale and minimum per 32 codes


def test_records_are_more_than_a_cache_holds() -> None:
    assert Case("few", width=2048, places=10).room("float16") * 2 * 2048 * 2 == 2 * BEYOND
    assert Case("many", width=16, places=10**9).room("float16") == 2 * 10**9


def test_results_are_of_the_least_times() -> None:
    case = Case("one", width=64, places=1000, rows=(1,), kinds=("float32",))
    seconds = {"float32 read": [2.0, 1.0], "float32 products 1": [4.0, 2.0], "float32 sum 1": [4.0]}
    found = results(case, "float32", seconds)
    rate = 1000 * 64 * 4 / 1e9
    assert found == {"read": {"gb_s": rate, "share": 1.0}, "products 1": {"gb_s": rate / 2, "share": 0.5},
                     "sum 1": {"gb_s": rate / 4, "share": 0.25}}  # fmt: skip
    assert [line.split()[0] for line in table(case, {"float32": found}).splitlines()[2:]] == ["float32", "float32"]


def test_a_small_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.neurons.BEYOND", 1 << 20)
    case = Case("small", width=64, places=30, rows=(1, 3), zeros=0.5)
    record = neurons.run_case(case, 5)
    assert list(record["kinds"]) == list(case.kinds)
    for found in record["kinds"].values():
        assert list(found) == ["read", "products 1", "sum 1", "products 3", "sum 3"]
        assert all(side["gb_s"] > 0 for side in found.values())
