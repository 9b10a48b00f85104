"""bench.scale: the fits, what counts as growth, and every part in its smallest size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.scale import __main__ as scale


def test_line_and_its_error_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(1.0, 9.0)
    y = 3 + 0.5 * x + rng.normal(size=8)
    (b, a), covariance = np.polyfit(x, y, 1, cov=True)
    found = scale.fit(x.tolist(), y.tolist())
    assert (found.a, found.b) == (pytest.approx(a), pytest.approx(b))
    assert found.error == pytest.approx(covariance[0, 0] ** 0.5)
    assert scale.fit([1, 2], [1, 3]) == scale.Fit(-1, 2, 0)


def samples(last: dict[str, int]) -> list[Any]:
    start = {"rss": 10**9, "fds": 5, "threads": 4}
    return [{"rss": 1, "fds": 1, "threads": 1}] * 2 + [start] * 8 + [start | last] * 2


@pytest.mark.parametrize(
    ("last", "grew"),
    [
        ({}, []), ({"rss": 10**9 + 10**7, "fds": 6, "threads": 4}, []),
        ({"fds": 8}, ["fds"]), ({"threads": 9}, ["threads"]), ({"rss": 2 * 10**9}, ["rss"]),
    ],
)  # fmt: skip
def test_growth_after_the_start_is_told(last: dict[str, int], grew: list[str]) -> None:
    assert list(scale.grown(samples(last))) == grew


def test_too_few_samples_prove_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        scale.grown(samples({})[:5])


def test_every_part_in_its_smallest_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scale.jsonl"
    assert scale.main(["--smoke", "--out", str(out)]) == 0
    lines = {line["case"]["name"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == list(scale.PARTS)
    assert [p["rows"] for p in lines["rows"]["points"]] == [1, 20]
    for name in ("prompt", "layers", "batches"):
        assert all(p["total_seconds"] > 0 for p in lines[name]["points"])
    assert {lane for lane, *_ in lines["sweep"]["spans"]} >= {"h2d", "device"}
    assert all(began <= end for _, _, began, end in lines["sweep"]["spans"])
    assert "ms per row" in capsys.readouterr().err


def test_soak_ends_badly_if_memory_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"rows": 9, "seconds": 1.0, "samples": [{"seconds": 0.0, **s} for s in samples({})]}
    monkeypatch.setattr(scale, "job", lambda *rest: json.loads(json.dumps(found)))
    out = str(tmp_path / "soak.jsonl")
    assert scale.main(["--soak", "9", "--out", out]) == 0
    found["samples"] = [{"seconds": 0.0, **s} for s in samples({"fds": 50})]
    assert scale.main(["--soak", "9", "--out", out]) == 1
    first, last = map(json.loads, Path(out).read_text().splitlines())
    assert first["grown"] == {}
    assert last["grown"] == {"fds": [5, 50]}
    assert last["ranges"]["fds"] == [1, 50]
