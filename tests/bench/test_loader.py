"""bench.loader: both ways make the engine's files, and a slow or large run is reported."""

from pathlib import Path
from typing import Any

import pytest

from bench.loader import __main__ as loader
from bench.loader.__main__ import Case, measure
from bench.loader.side import Encoding
from flexengine.lossy import Lossy
from flexengine.worker.open_model import open_model


def test_both_ways_make_the_files_of_the_engine(families: Any, own_cache: Path, tmp_path: Path) -> None:
    model = str(families("llama").directory)
    made: list[list[bytes]] = []
    for way in ("steps", "overlapped"):
        (out := tmp_path / way).mkdir()
        work = Encoding(model, "int4", out)
        with work.files:
            found = getattr(work, way)()
        assert set(found.get("steps", ())) == ({"read", "encode", "write"} if way == "steps" else set())
        made.append(sorted(file.read_bytes() for file in out.iterdir()))
        assert work.facts["parameters"] == len(made[-1])
    assert open_model(model, None, "cpu", lossy=Lossy(weights="int4")).prepare_weights()
    engines = sorted(file.read_bytes() for file in (own_cache / "prepared").glob("*/*.safetensors"))
    assert made[0] == made[1] == engines


@pytest.mark.parametrize(
    ("seconds", "peak", "digest", "says"),
    [
        (2.8, 200, "a", []),
        (3.0, 200, "a", ["overlapped, it took 1.20 times the least possible seconds"]),
        (2.0, 221, "a", ["221 bytes of memory are over 220"]),
        (2.0, 200, "b", ["the files differ"]),
    ],
)
def test_verdicts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, peak: int, digest: str, says: list[str]
) -> None:
    def run(model: Path, case: Case, way: str, folder: Path) -> dict[str, Any]:
        common = {"cpu_seconds": 1.0, "facts": {"largest_bytes": 100}}
        if way == "steps":
            steps = {"read": 1.0, "encode": 2.0, "write": 0.5}
            cpu = {"read": 1.0, "encode": 3.6, "write": 0.4}  # 5 s on two cores take 2.5 s
            return {**common, "seconds": 3.5, "steps": steps, "step_cpu_seconds": cpu, "peak": 50, "digest": "a"}
        return {**common, "seconds": seconds, "peak": peak, "digest": digest}

    monkeypatch.setattr(loader, "run", run)
    monkeypatch.setattr(loader.os, "sched_getaffinity", lambda process: {0, 1})
    line, wrong = measure(tmp_path, Case("demo", "int8"), 3, tmp_path)
    assert wrong == line["wrong"] == says
    assert (line["sum"], line["slowest"]) == (3.5, "encode")
    assert (line["least"], line["cores_used"]) == (2.5, 1 / seconds)
