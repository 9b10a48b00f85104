"""bench.resident: the cases have the shapes that they name, and a process that grows too much is reported."""

from typing import Any

import pytest

from bench.resident import __main__ as resident
from bench.resident.__main__ import CASES, MB, Setting, measure


def test_cases_cover_what_was_promised() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 20
    assert {case.device for case in CASES} == {"cpu", "sim"}
    assert {case.cache for case in CASES} == {None, "bf16", "int8", "int4"}
    assert {case.weights for case in CASES} == {None, "int4"}
    assert {case.heads[0] // case.heads[1] for case in CASES} == {1, 4, 8}
    assert all(2000 <= n <= 8192 for case in CASES for n in case.prompts)


def test_models_have_the_heads_they_should() -> None:
    for case in CASES:
        heads, kv_heads, dim = case.heads
        shapes, config = case.shape.layer_shapes(0), case.shape.config()
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (heads * dim, case.hidden)
        assert shapes["model.layers.0.self_attn.v_proj.weight"] == (kv_heads * dim, case.hidden)
        assert config["head_dim"] == dim
        assert max(case.prompts) < int(str(config["max_position_embeddings"]))


def job(peak: int, **fields: Any) -> dict[str, Any]:
    return {"peak": peak, "replanned": 0, "failed": 0, **fields}


@pytest.mark.parametrize(
    ("jobs", "wrong"),
    [
        ([job(109 * MB)], ""),
        ([job(111 * MB)], "1.11 of the budget"),
        ([job(50 * MB), job(50 * MB, failed=1)], "rows failed"),
        ([job(50 * MB, replanned=1)], "replanned without"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch: Any, jobs: list[dict[str, Any]], wrong: str) -> None:
    monkeypatch.setattr(resident, "run_module", lambda *_: {"jobs": jobs})
    found = measure(Setting("model", (), device_mem=100 * MB))
    assert wrong in "; ".join(found["wrong"])
    assert bool(found["wrong"]) == bool(wrong)


def test_a_killed_process_and_its_limit(monkeypatch: Any) -> None:
    """The cgroup allows what the process takes without jobs, and a tenth more than the budget."""
    answers = iter([{"private": 70 * MB, "jobs": []}, {"error": "killed"}])
    limits = []
    monkeypatch.setattr(resident, "run_module", lambda *how: limits.append(how[2].memory) or next(answers))
    assert measure(Setting("model", (((5,), 1),), device_mem=100 * MB), limited=True)["wrong"] == ["killed"]
    assert limits == [None, 180 * MB]
