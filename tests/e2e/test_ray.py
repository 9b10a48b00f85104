"""Engines as actors of a real local Ray: each row comes out once, with the tokens an engine gives in this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, SamplingParams
from flexengine.job.rows import Row
from tests.helpers.families import NEW

pa = pytest.importorskip("pyarrow", reason="columns are made by pyarrow")
ray = pytest.importorskip("ray", reason='needs pip install "ray[data]"')
pytest.importorskip("ray.data", reason='needs pip install "ray[data]"')

import pyarrow.parquet as pq  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"
OFFLINE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
KEEPS_TYPES = tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 60)  # of dicts; 2.40 infers them anew
TYPES = {
    "generated_text": pa.string(), "token_ids": pa.list_(pa.int64()), "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "error": pa.string(),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(families: Any) -> Any:
    return families("llama")


@pytest.fixture(scope="module")
def cluster(run_cache: Path) -> Iterator[str]:
    """The address of a Ray of this module's own. Its directory is short: paths of sockets have at most 107 bytes.
    Actors have the environment of its start, so it is told of this run's cache; Ray keeps a token, with
    which those who may use the cluster know each other, in the home directory."""
    directory = tempfile.mkdtemp(prefix="fe", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**OFFLINE, "FLEXENGINE_CACHE": str(run_cache), "HOME": directory}.items():
            patch.setenv(name, value)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            context = ray.init(
                address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20,
                _temp_dir=directory, log_to_driver=False,
            )  # fmt: skip
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)  # it leaves one of its own
            shutil.rmtree(directory, ignore_errors=True)


def rows(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """30 rows: prompts come several times, greedy and not; the 12th cannot be run."""
    made: list[dict[str, Any]] = [
        {"prompt_token_ids": prompts[i % 8], "max_tokens": 3 + i % 5, "ignore_eos": True} for i in range(30)
    ]
    for i, row in enumerate(made):
        row["temperature"] = 2.0 if i % 3 == 0 else None
    made[11]["prompt_token_ids"] = [10**6]
    return made


def in_process(directory: Path, given: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens of all rows as one job."""
    with Engine(directory, device="cpu") as engine:
        return [r.token_ids for r in engine.generate([Row(i, 0, fields) for i, fields in enumerate(given)])]


@pytest.mark.parametrize("form", ["numpy", "pyarrow"])
def test_map_batches(form: str, cluster: str, llama: Any) -> None:
    given = rows(llama.prompts)
    columns = {name: [r.get(name) for r in given] for name in ("prompt_token_ids", "max_tokens", "temperature")}
    table = pa.table({**columns, "index": range(30), "name": [f"row {i}" for i in range(30)]})
    dataset = ray.data.from_arrow([table.slice(0, 11), table.slice(11, 1), table.slice(12)]).map_batches(
        Engine,
        batch_size=7,
        batch_format=form,
        compute=ray.data.ActorPoolStrategy(size=1),
        fn_constructor_kwargs={"model": str(llama.directory), "device": "cpu"},
        fn_kwargs={"params": GREEDY, "row_options": True},
    )
    blocks = [ray.get(ref) for ref in dataset.to_arrow_refs()]
    assert len(blocks) > 1
    for block in blocks if form == "pyarrow" or KEEPS_TYPES else []:
        assert {name: block.schema.field(name).type for name in TYPES} == TYPES
    found = sorted((r for block in blocks for r in block.to_pylist()), key=lambda r: r["index"])
    assert [r["index"] for r in found] == list(range(30))
    assert [list(r["token_ids"]) for r in found] == in_process(llama.directory, given)
    assert [list(r["prompt_token_ids"]) for r in found] == columns["prompt_token_ids"]
    assert [r["name"] for r in found] == table["name"].to_pylist()
    assert [r["index"] for r in found if r["error"] is not None] == [11]


def test_example(cluster: str, llama: Any, tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    given = rows(llama.prompts)
    write_inputs(source, given)
    first = run_example(cluster, llama, source, output)
    assert f"{output}: 33 rows, 29 done, 4 failed, from 3 files" in first
    found = sorted(pq.read_table(output).to_pylist(), key=lambda r: r["index"])
    assert [r["index"] for r in found] == list(range(33))
    places = [(r["source"], r["line"]) for r in found]
    assert places == [("a.jsonl", i) for i in range(1, 14)] + [("b.parquet", i) for i in range(1, 11)] + [
        ("c.jsonl", i) for i in range(1, 11)
    ]
    expected = in_process(llama.directory, [*given[:10], {}, {}, {}, *given[10:]])
    assert [r["token_ids"] for r in found] == expected
    assert [r["index"] for r in found if r["error"] is not None] == [10, 11, 12, 14]
    assert "line 11: " in found[10]["error"]
    assert "line 12: has a field of the wrong type" in found[11]["error"]
    assert "line 13: has a field of the wrong type" in found[12]["error"]
    assert {**json.loads(found[0]["input"]), **given[0]} == json.loads(found[0]["input"])
    assert not output.with_name("out.part").exists()
    files = {p: p.stat().st_mtime_ns for p in output.iterdir()}
    again = run_example(cluster, llama, source, output)
    assert f"{output} is there already: 33 rows, 29 done, 4 failed" in again
    assert {p: p.stat().st_mtime_ns for p in output.iterdir()} == files


def write_inputs(source: Path, given: list[dict[str, Any]]) -> None:
    """Three files; after the first ten rows one that is not JSON and two whose fields are not of their types."""
    source.mkdir()
    bad = ["{broken", '{"prompt": 17}', '{"prompt_token_ids": [5], "max_tokens": "many"}']
    (source / "a.jsonl").write_text("\n".join([*map(json.dumps, given[:10]), *bad]) + "\n")
    pq.write_table(pa.Table.from_pylist(given[10:20]), source / "b.parquet")
    (source / "c.jsonl").write_text("\n".join(map(json.dumps, given[20:])))
    (source / "notes.txt").write_text("not a prompt\n")


def run_example(cluster: str, llama: Any, source: Path, output: Path) -> str:
    command = [sys.executable, str(EXAMPLE), str(source), str(output), "--model", str(llama.directory)]
    environment = {**os.environ, **OFFLINE, "RAY_ADDRESS": cluster}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
