"""Jobs of fleets, with members in this process: results are the bytes of one engine, whatever ends when."""

import contextlib
import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine import Engine, Lossy, Policy
from flexengine.apps.fleet.job import (
    MOST_ROWS,
    Failure,
    FleetMember,
    FleetRunner,
    Recipe,
    open_engine,
    packed,
    results_of,
    rows_of,
    shard_rows,
    shards,
)
from flexengine.apps.fleet.space import Share
from flexengine.config import Completion, Result, SamplingParams, Score
from flexengine.engine.file_job import EngineRunner, FileJob
from flexengine.errors import ONE_SEQUENCE, InvalidInput, MemberFailed, OutOfMemory
from flexengine.guests.attention_workers.workers import RemoteWorker
from flexengine.job.bounds import MOST_CHARACTERS
from flexengine.job.inputs import InputRows
from flexengine.job.resume import open_job
from flexengine.job.rows import Row
from flexengine.shell.commands.main import main
from tests.helpers.attention_workers import listening
from tests.helpers.fleets import LocalFleet, sent

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8)
WORDS = ["--max-tokens", "6", "--ignore-eos", "--temperature", "0.8", "--device", "cpu", "--device-mem", "300M", "-q"]


@pytest.fixture(scope="module")
def known(families: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, bytes]:
    """A model, an input with bad rows, several samples and stop ids, and the output of one engine."""
    llama, folder = families("llama"), tmp_path_factory.mktemp("fleet")
    lines = []
    for i in range(25):
        row: dict[str, Any] = {"prompt_token_ids": llama.prompts[i % 8], "max_tokens": 2 + i % 5, "tag": f"\ud800{i}"}
        lines.append(json.dumps(row | ({"n": 3} if i % 7 == 3 else {}) | ({"temperature": 0.0} if i % 2 else {})))
    lines[4], lines[9] = "{broken", '{"prompt_token_ids": [1000000]}'
    (folder / "in.jsonl").write_text("\n".join(lines))
    assert main(["run", str(folder / "in.jsonl"), "-m", str(llama.directory), "-o", str(folder / "one.jsonl"),
                 *WORDS]) == 1  # fmt: skip
    return str(llama.directory), folder / "in.jsonl", (folder / "one.jsonl").read_bytes()


def recipe(directory: str, **options: Any) -> Recipe:
    return Recipe({"model": directory, "device": "cpu", "device_mem": "300M", "progress": False, **options}, PARAMS)


def run(known: Any, output: Path, fleet: LocalFleet, size: int | None = None, **options: Any) -> dict[str, Any]:
    model, given, _ = known
    with InputRows(given) as rows, open_job(rows, output) as job:
        summary: dict[str, Any] = FileJob(FleetRunner(fleet, recipe(model, **options), size), job).run()
        return summary


@pytest.mark.parametrize(("actors", "size", "repeated"), [(1, None, False), (2, 3, True), (3, 1, True), (1, 99, False)])
def test_bytes_of_one_engine(actors: int, size: int | None, repeated: bool, known: Any, tmp_path: Path) -> None:
    fleet = LocalFleet(actors, repeated)
    summary = run(known, tmp_path / "out.jsonl", fleet, size)
    assert (tmp_path / "out.jsonl").read_bytes() == known[2]
    ran = [row.index for shard in fleet.shards for row in rows_of(shard)]
    assert sorted(ran) == list(range(25))
    assert summary["job"] == {"rows": 25, "done": 23, "failed": 2, "done_before": 0}
    assert (summary["rows"], summary["failed"], sum(summary["members"].values())) == (23, 2, 25)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert summary["generated_tokens"] == sum(row["completion_tokens"] for row in written)


def test_members_share_attention_workers(known: Any, tmp_path: Path) -> None:
    """Each member plans with an equal part of the workers' memory, whatever the others hold."""
    with listening(8 << 20) as (one, said), listening(8 << 20) as (two, _):
        output = tmp_path / "out.jsonl"
        run(known, output, LocalFleet(3), 3, policy=Policy(2, 2, cache={"workers": 1}),
            attention_workers=[one, two])  # fmt: skip
    assert output.read_bytes() == known[2]
    assert sum("serving" in line for line in said) == 4  # one member that describes itself, and three
    with listening(9 << 20) as (one, _), contextlib.closing(RemoteWorker("worker1", one)) as other:
        assert other.allocate(5 << 20) is not None
        with open_engine(recipe(known[0], attention_workers=[one]), None, Share(fleet=3)) as engine:
            assert engine.core.machine.capacity.workers == (3 << 20,)
        assert other.allocate(2 << 20) is not None
        with open_engine(recipe(known[0], attention_workers=[one]), None, Share(fleet=3)) as engine:
            assert engine.core.machine.capacity.workers == (2 << 20,)


def test_text_that_is_too_long_does_not_depend_on_the_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.apps.fleet.job.Engine", lambda **options: SimpleNamespace(reader=SimpleNamespace()))
    for given, most in ((None, MOST_CHARACTERS), ("60M", 200_000)):
        share = Share(2, 30_000_000, "device_mem")
        assert open_engine(recipe("m", device_mem=given), None, share).reader.most == most


def test_a_lost_fleet_continues(known: Any, tmp_path: Path) -> None:
    """After two answers the fleet is lost. Later runs compute only the rows without results."""
    output, seen = tmp_path / "out.jsonl", 0
    for _ in range(3):
        fleet = LocalFleet(2, ends=2)
        with pytest.raises(MemberFailed, match="host, process 1: memory ran out; run the same command again"):
            run(known, output, fleet, 3)
        ran = [row.index for shard in fleet.shards for row in rows_of(shard)]
        assert len(fleet.shards) == 2
        seen += len(ran)
    fleet = LocalFleet(3)
    assert run(known, output, fleet, 4)["job"]["done_before"] == seen
    assert sum(len(rows_of(shard)) for shard in fleet.shards) == 25 - seen
    assert output.read_bytes() == known[2]
    assert run(known, output, LocalFleet(1))["job"]["done_before"] == 25


def test_fleet_and_engine_continue_each_other(known: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(MemberFailed):
        run(known, output, LocalFleet(2, ends=3), 2)
    assert main(["run", str(known[1]), "-m", known[0], "-o", str(output), *WORDS]) == 1
    assert output.read_bytes() == known[2]
    assert run(known, output, LocalFleet(1))["job"]["done_before"] == 25


@pytest.mark.parametrize("options", [{}, {"allow": ("int8-weights", "int4-weights")}])
def test_a_fleet_continues_the_job_of_an_engine(options: Any, known: Any, tmp_path: Path) -> None:
    """Its members take the switches and the cuts that the engine chose."""
    model, given, _ = known
    outputs = tmp_path / "one.jsonl", tmp_path / "out.jsonl"
    with Engine(model, device="cpu", device_mem="300M", **options) as engine:
        engine.run_job(given, outputs[0], PARAMS)
    with (
        Engine(model, device="cpu", device_mem="300M", **options) as engine, InputRows(given) as rows,
        open_job(rows, outputs[1]) as job,
    ):  # fmt: skip
        running = FileJob(EngineRunner(engine, PARAMS), job)
        running.begin()
        with contextlib.closing(running.results()) as results:
            began = len(list(islice(results, 7)))
        assert began == 7
    assert run(known, outputs[1], LocalFleet(2), 3, **options)["job"]["done_before"] == began
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_rows_that_are_too_long_are_error_rows(known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a shard has no others, of which an engine raises OutOfMemory."""
    lines = [{"prompt_token_ids": [5] * 200}] * 3 + [{"prompt_token_ids": [5, 6]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = Engine.results

    def refused(engine: Engine, rows: Any, *given: Any) -> Any:
        if all(len(row.request["prompt_token_ids"]) > 100 for row in rows):
            raise OutOfMemory("device", f"{ONE_SEQUENCE} of 206 tokens", 100, 0, 50)
        return results(engine, rows, *given)

    monkeypatch.setattr(Engine, "results", refused)
    summary = run((known[0], tmp_path / "in.jsonl", b""), tmp_path / "out.jsonl", LocalFleet(1), 1)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["error"] is None for row in written] == [False, False, False, True], summary
    assert all("cannot be held" in row["error"] for row in written[:3])


def test_an_error_that_is_not_ours_names_the_member(
    known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Engine, "results", fail)
    with pytest.raises(MemberFailed, match=r"process \d+: OSError: .*No space left on device; run the same command"):
        run(known, tmp_path / "out.jsonl", LocalFleet(1))


def test_switches_need_a_row_to_be_chosen_by(known: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{broken\n")
    given = (known[0], tmp_path / "in.jsonl", b"")
    with pytest.raises(InvalidInput, match="none of the first 2,048 rows can be run"):
        run(given, tmp_path / "out.jsonl", LocalFleet(1), allow=("int8-weights",))
    assert run(given, tmp_path / "out.jsonl", LocalFleet(1))["job"]["failed"] == 1


@pytest.mark.parametrize("options", [
    {"allow": ("int8-weights",)}, {"lossy": "weights"}, {"policy": "blocks"},
])  # fmt: skip
def test_members_share_the_choices_of_the_first(options: Any, known: Any, tmp_path: Path) -> None:
    """Lossy switches and cuts of prompts are those that one engine of the whole job takes."""
    if "lossy" in options:
        options = {"lossy": Lossy(weights="int4")}
    if "policy" in options:
        options = {"policy": Policy(2, 3, prefill_tokens=16)}
    summary = run(known, tmp_path / "out.jsonl", LocalFleet(2), 4, **options)
    with Engine(known[0], device="cpu", device_mem="300M", **options) as engine:
        engine.run_job(known[1], tmp_path / "one.jsonl", PARAMS)
        assert summary["lossy"] == engine.lossy.enabled
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_member_that_differs_refuses(known: Any) -> None:
    first = FleetMember(recipe(known[0]))
    about = first.describe(next(shards([Row(0, 0, {"prompt_token_ids": [5, 6]})], 1)))
    first.close()
    assert not isinstance(about, Failure)
    other = dict(about.engine) | {"torch": "1.0", "dtype": "float16"}
    member = FleetMember(Recipe(recipe(known[0]).options, PARAMS, agreed=replace(about, engine=other)))
    failure = member.run(next(shards([Row(0, 0, {"prompt_token_ids": [5, 6]})], 1)))
    assert isinstance(failure, Failure)
    assert not failure.running
    assert "this machine differs from the one that began the job: dtype: was" in failure.message
    assert "torch: was" in failure.message


@pytest.mark.parametrize(("options", "why"), [
    ({"model": "/none"}, "/none"), ({"device_mem": "1K"}, "device memory"), ({"dtype": "float8"}, "float8"),
])  # fmt: skip
def test_a_refused_engine_is_an_error_of_the_job(options: Any, why: str, known: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"process \d+: ") as error:
        run(known, tmp_path / "out.jsonl", LocalFleet(1), None, **options)
    assert why in str(error.value)
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_results_are_sent_whole() -> None:
    sample = Completion("\ud800", [3], "stop")
    results = [
        Result(3, prompt="p", generated_text="\ud83d", token_ids=[1, 2], finish_reason="length", prompt_tokens=4,
               completion_tokens=2, samples=[sample, sample]),
        Result(9, error="line 2: broken"),
        Result(1, scores=[Score(-1.0, 2, True)]),
    ]  # fmt: skip
    found = list(results_of(sent(packed(results))))
    assert found == results
    assert all(result.prompt is None for result in found)
    with pytest.raises(ValueError, match="damaged"):
        list(results_of(packed(results)[:-5]))


def test_shards() -> None:
    rows = [Row(i, i + 1, {"prompt": f"{i}", "tag": object}) for i in range(10)]
    rows[3] = rows[3].refused("is broken")
    parts = [rows_of(shard) for shard in shards(rows, 4)]
    assert [[row.index for row in part] for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert parts[0][3].error == "line 4: is broken"
    rng = random.Random(0)
    for _ in range(100):
        count, actors = rng.randrange(1, 10**5), rng.randrange(1, 9)
        size = shard_rows(count, actors)
        assert 1 <= size <= MOST_ROWS
        assert -(-count // size) >= min(count, actors)  # each actor gets a shard
