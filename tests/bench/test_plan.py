"""bench.plan: the frozen cases, the order of runs, what is made of them, and the side on a tiny model."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import harness, limit
from bench.cases import Case, fixed
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, make
from bench.plan import __main__ as plan
from bench.plan.__main__ import Bench, error_of, judged, run_auto, run_errors
from bench.plan.cases import (
    AUTO,
    AUTO_QUICK,
    DEMO,
    ERROR,
    ERROR_QUICK,
    EXPERTS,
    GROUPED,
    HELD_OUT,
    HELD_OUT_QUICK,
    OPT,
    TINY,
    WINDOWED,
    AutoCase,
    MachineCase,
    Shape,
)
from bench.plan.side import ASSUME, RUN, Asked, perform
from flexengine import Policy

FOUR = Case("four", 4, fixed(3), fixed(2))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPES["opt-tiny"], tmp_path_factory.mktemp("plan") / "opt-tiny").parent


def in_this_process(asked: Asked, limits: Limits) -> Record:
    line = perform(Asked.from_json(asked.to_json()))
    loaded = json.loads(json.dumps(line))
    assert isinstance(loaded, dict)
    return loaded


class Pretended:
    """Answers as a side would, with the seconds that `seconds` gives for a policy's gpu_batch_size (0: the planner's);
    those of None do not fit, and the process of a negative one is killed."""

    def __init__(self, seconds: dict[int, float | None]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[Asked, Limits]] = []

    def __call__(self, asked: Asked, limits: Limits) -> Record:
        self.asked.append((asked, limits))
        if asked.task != RUN:
            return {"hardware": {"name": "pretended"}, "seconds": 1.0, "versions": {}}
        size = asked.job.policy["gpu_batch_size"] if asked.job.policy else 0
        seconds = self.seconds[size]
        if seconds is None:
            return {"refused": "too large"}
        if seconds < 0:
            return {"error": "killed (out of memory?)", "stderr": ""}
        tokens = [[1] * request.max_tokens for request in asked.job.requests]
        summary: Record = {
            "total_seconds": seconds - 1, "load_seconds": 1.0, "sweeps": 2, "peak_bytes": {"device": size}, "bytes": {},
            "policy": asked.job.policy,
            "plan": {"error": 0.0, "lanes": {"device": {"predicted": 3.0, "measured": 4.0}}},
        }  # fmt: skip
        predicted = {"seconds": 1.5, "load_seconds": 0.5, "lanes": {"device": 1.5}, "sweeps": 2.5, "fractions": {},
                     "slowed": {"device": 2.25}}  # fmt: skip
        return {
            "generated_tokens": sum(map(len, tokens)), "seconds": seconds, "planning_seconds": 0.1, "peak_rss": 7,
            "token_ids": tokens, "versions": {"torch": "1"}, "summary": summary, "predicted": predicted,
        }  # fmt: skip

    @property
    def order(self) -> list[int]:
        """gpu_batch_size of each run, 0 for the planner's."""
        return [a.job.policy["gpu_batch_size"] if a.job.policy else 0 for a, _ in self.asked if a.task == RUN]


def bench(tiny: Path, ask: plan.Ask, **more: Any) -> Bench:
    return Bench(tiny, str(tiny / "scratch"), ask=ask, **more)


def auto_case(sizes: list[int], tried: int, machine: MachineCase | None = None) -> AutoCase:
    return AutoCase("case", TINY, machine or MachineCase(), FOUR, tuple(Shape(size) for size in sizes), tried)


def test_error_runs_are_two_models_on_two_machines_with_three_workloads_and_policies_of_their_own() -> None:
    assert Counter((c.model, c.machine.device) for c in ERROR) == dict.fromkeys(
        [(model, device) for model in (DEMO, OPT) for device in ("cpu", "sim")], 3
    )
    for model in (DEMO, OPT):
        for device in ("cpu", "sim"):
            names = {c.case.name for c in ERROR if (c.model, c.machine.device) == (model, device)}
            assert names == {"long prompts", "mixed", "long outputs"}
    assert len({c.shape for c in ERROR}) == 12
    assert {c.shape.slots for c in ERROR} == {1, 2}
    assert {c.shape.schedule for c in ERROR} == {"row", "zigzag", "diagonal", "continuous"}
    for part in ("weights", "cache", "activations"):
        used = {tier for c in ERROR for tier in range(3) if getattr(c.shape, part)[tier]}
        assert used == {0, 1, 2}, part


def test_every_frozen_policy_is_one() -> None:
    shapes = [c.shape for c in (*ERROR, *ERROR_QUICK)]
    shapes += [shape for c in (*AUTO.values(), *AUTO_QUICK.values()) for shape in c.grid]
    for shape in shapes:
        assert Policy(**shape.policy).gpu_batch_size == shape.gpu_batch_size


def test_grids_hold_24_policies_and_some_to_spare() -> None:
    assert set(AUTO) == set(AUTO_QUICK) == {"resident", "host", "disk"}
    for case in AUTO.values():
        assert case.tried == 24
        assert len(set(case.grid)) == len(case.grid) >= 28
    assert all(shape.weights[0] == 1 for shape in AUTO["resident"].grid)
    assert all(shape.weights[1] > 0 for shape in AUTO["host"].grid)
    assert all(shape.weights[2] > 0 for shape in AUTO["disk"].grid)


def test_question_survives_its_json() -> None:
    job = Job("somewhere", tuple(FOUR.requests(50)), device="sim", device_mem="1M", policy=Shape(3).policy)
    asked = Asked(job, ASSUME, {"h2d": 1e9}, {"name": "x"})
    again = Asked.from_json(asked.to_json())
    assert again.job.requests == job.requests
    assert (again.task, again.links, again.hardware) == (ASSUME, {"h2d": 1e9}, {"name": "x"})
    assert Asked.from_json(again.to_json()) == again


def test_rate_counts_what_comes_before_the_sweeps_and_error_what_is_read_in_them() -> None:
    requests = tuple(FOUR.requests(50))
    line = judged(Pretended({0: 5.0})(Asked(Job("m", requests)), Limits()), FOUR)
    assert line["tok_s"] == 8 / 5
    assert line["sweeps_tok_s"] == 8 / 4
    assert line["prediction_error"] == (1.5 + 0.5) / 4 - 1
    short = judged(Pretended({0: 5.0})(Asked(Job("m", requests[1:])), Limits()), FOUR)
    assert short["error"] == "6 tokens generated, not 8"
    assert "tok_s" not in short


def test_median_and_worst_error_are_of_absolute_values_and_the_mean_is_not() -> None:
    runs = [{"prediction_error": e} for e in (-0.4, 0.1, 0.2)] + [{"error": "killed"}]
    assert error_of(runs) == {"median": 0.2, "worst": 0.4, "mean": pytest.approx(-0.1 / 3), "runs": 3}
    assert error_of([]) is None


def test_planners_policy_runs_first_in_the_middle_last_and_beside_the_best(tiny: Path) -> None:
    ask = Pretended({0: 4.0, 1: 9.0, 2: 5.0, 3: 8.0, 4: 7.0, 5: 1.5})
    record = run_auto(bench(tiny, ask), auto_case([1, 2, 3, 4, 5], tried=4), pairs=2)
    assert ask.order == [0, 1, 2, 0, 3, 4, 0, 2, 0, 2, 0]
    assert record["ratios"] == [5 / 4, 5 / 4]
    assert record["best_policy"] == Shape(2).policy
    assert (record["tried"], record["unfit"], record["auto_failed"]) == (4, 0, 0)
    assert len(record["outputs"]) == 1
    assert (record["peak_rss"], record["device_peak"], record["cgroup_peak"]) == (7, 4, None)
    assert sum(asked.task != RUN for asked, _ in ask.asked) == 1
    assert ask.asked[0][0].task != RUN
    assert all(asked.hardware == {"name": "pretended"} for asked, _ in ask.asked[1:])


def test_policies_that_do_not_fit_or_are_killed_are_recorded_and_replaced(tiny: Path) -> None:
    ask = Pretended({0: 4.0, 1: None, 2: 5.0, 3: -1.0, 4: 7.0, 5: 3.0})
    record = run_auto(bench(tiny, ask), auto_case([1, 2, 3, 4, 5], tried=2), pairs=1)
    assert ask.order == [0, 1, 2, 0, 3, 4, 0, 2, 0]
    assert (record["tried"], record["unfit"]) == (2, 2)
    assert [run.get("refused") or run.get("error") for run in record["grid"]] == [
        None, None, "too large", "killed (out of memory?)",
    ]  # fmt: skip


def test_planners_policy_that_fails_is_counted(tiny: Path) -> None:
    record = run_auto(bench(tiny, Pretended({0: -1.0, 1: 5.0})), auto_case([1], tried=1), pairs=2)
    assert record["auto_failed"] == 5
    assert record["ratio"] is None


@pytest.mark.parametrize("reason", [None, "no right"])
def test_memory_limit_or_what_comes_closest(tiny: Path, monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    monkeypatch.setattr(limit, "why_not", lambda: reason)
    ask = Pretended({0: 4.0, 1: 5.0})
    machine = MachineCase(memory=10**9, without="600M")
    record = run_auto(bench(tiny, ask), auto_case([1], 1, machine), pairs=0)
    wanted = (None, "600M") if reason else (10**9, None)
    assert {(limits.memory, asked.job.device_mem) for asked, limits in ask.asked} == {wanted}
    assert record["limit_bytes"] == wanted[0]


def test_unknown_rates_end_the_bench(tiny: Path) -> None:
    with pytest.raises(SystemExit, match="no rates of opt-tiny"):
        run_errors(bench(tiny, lambda asked, limits: {"error": "exit code 1"}), ERROR_QUICK)


def test_error_of_a_tiny_model(tiny: Path) -> None:
    record = run_errors(bench(tiny, in_this_process, quick=True), ERROR_QUICK)
    assert record["failed"] == 0
    assert len(record["rates"]) == 2
    assert not any(rates["hardware"]["measured"] for rates in record["rates"])
    for case, run in zip(ERROR_QUICK, record["runs"], strict=True):
        assert run["generated_tokens"] == case.case.output_tokens
        predicted = run["predicted_seconds"] + run["load_seconds"][0]
        assert run["prediction_error"] == pytest.approx(predicted / run["total_seconds"] - 1)
        assert run["policy"] == Policy(**case.shape.policy).to_json()
        assert run["sweeps"][0] == pytest.approx(run["sweeps"][1], rel=0.5)
        assert set(run["lanes"]) >= {"device"}
    assert {run["tokens_sha256"] for run in record["runs"]} == {record["runs"][0]["tokens_sha256"]}
    assert str(tiny) not in json.dumps(record)


def test_auto_on_a_tiny_model_that_is_streamed(tiny: Path) -> None:
    case = replace(AUTO_QUICK["host"], tried=2)
    record = run_auto(bench(tiny, in_this_process, quick=True), case, pairs=1)
    assert (record["tried"], record["unfit"], record["auto_failed"]) == (2, 1, 0)
    assert "device memory" in record["grid"][2]["refused"]
    assert len(record["outputs"]) == 1
    assert record["device_peak"] <= 700_000
    assert len(record["auto"]) == 3


def test_side_in_a_process_of_its_own(tiny: Path) -> None:
    shape = Shape(2, weights=(0.0, 0.0, 1.0))
    job = Job(str(tiny / "opt-tiny"), tuple(FOUR.requests(512)), policy=shape.policy, scratch=str(tiny / "scratch"))
    alone = plan.ask_process(Asked(job), Limits(seconds=120))
    assert "error" not in alone, alone
    assert alone["token_ids"] == in_this_process(Asked(job), Limits())["token_ids"]
    assert alone["versions"] == harness.versions()


def test_held_out_cases_differ_from_the_recorded_ones_and_cover_what_was_promised() -> None:
    held, known = ({(c.model, c.machine.device, c.case) for c in cases} for cases in (HELD_OUT, ERROR))
    assert len(held) == len(HELD_OUT)
    assert not held & known
    assert {"bf16", "int8", "int4", None} == {(c.lossy or {}).get("cache") for c in HELD_OUT}
    assert {c.machine.device_mem for c in HELD_OUT if c.shape is None} == {"900M", "700M", None}
    assert {c.model for c in HELD_OUT} == {DEMO, OPT, GROUPED, WINDOWED, EXPERTS}
    assert {c.dtype for c in HELD_OUT} == {None, "bfloat16"}
    assert {c.score for c in HELD_OUT if c.shape} == {c.score for c in HELD_OUT if not c.shape} == {True, False}
    shapes = [(c.machine.device, Policy(**c.shape.policy)) for c in HELD_OUT if c.shape]
    for kind in (
        lambda device, p: device == "sim" and p.weights[0] == 1,  # all on the device, and streamed
        lambda device, p: device == "sim" and p.weights[1] == 1,
        lambda device, p: p.weights[2] > 0.5,
        lambda device, p: 0 < p.cache[2] < 1 and p.weights[0] == 1,
        lambda device, p: p.cache[2] > 0 and p.weights[2] > 0,
        lambda device, p: p.delegates,
        lambda device, p: p.num_gpu_batches == 4,
    ):
        assert any(kind(*shape) for shape in shapes)


def test_held_out_runs_are_measured_and_made_with_their_switches(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = run_errors(bench(tiny, in_this_process, quick=True), HELD_OUT_QUICK, "held-out")
    assert (record["part"], record["failed"]) == ("held-out", 0)
    assert record["prediction_error"]["runs"] == 3
    few_bits = {"weights": "int4", "compute": "int8"}
    assert [run["lossy"] for run in record["runs"]] == [{"cache": "int8"}, few_bits, None]
    assert record["runs"][2]["generated_tokens"] == 18  # tokens that were scored
    assert len(record["rates"]) == 3
    assert "of at most 8%; worst" in capfd.readouterr().err


def test_first_jobs_find_no_measured_rates_and_everything_else_of_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    for name in ("hardware", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    pretended, seen = Pretended({0: 4.0, 2: 4.0}), list[tuple[bool, bool]]()

    def ask(asked: Asked, limits: Limits) -> Record:
        seen.append(((harness.cache() / "hardware").exists(), (harness.cache() / "kernels" / "file").exists()))
        return pretended(asked, limits)

    record = run_errors(bench(tiny, ask), HELD_OUT_QUICK[:2], "first")
    assert seen == [(False, True)] * 2
    assert harness.cache() == tmp_path
    assert all(asked.task == RUN and asked.hardware is None for asked, _ in pretended.asked)
    assert (record["rates"], record["limits"]) == ([], {"worst": 0.4})


def test_a_lane_is_right_if_it_worked_between_its_seconds_alone_and_slowed() -> None:
    line = Pretended({0: 5.0})(Asked(Job("m", tuple(FOUR.requests(50)))), Limits())
    lanes = plan.lanes_of(line)
    assert lanes == {"device": {"predicted": 3.0, "slowed": 4.5, "measured": 4.0, "error": 0.0}}
    assert plan.by_lane(lanes) == "device 3.0-4.5: 4.0"
    line["summary"]["plan"]["lanes"]["device"]["measured"] = 9.0
    assert plan.lanes_of(line)["device"]["error"] == -0.5
