"""bench.compare: the order of runs, what is made of them, adapters that skip, and a whole run with a tiny model."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import harness
from bench.cases import COMPARISONS, SMOKE
from bench.compare import __main__ as compare
from bench.harness import Job, Limits, Record
from bench.models import SHAPES, make
from bench.peers import CLASSES, PEERS, own_class
from bench.report.lines import command, lines_of, ratio_text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SHAPES["opt-tiny"], tmp_path_factory.mktemp("compare") / "opt-tiny")


class Pretended:
    """Stand-in for side processes that returns rates by module and batch size."""

    def __init__(self, rates: dict[str, Any]) -> None:
        self.rates = rates
        self.order: list[tuple[str, int, str]] = []
        self.read = 0

    def side(self, side: str, job: Job, limits: Limits | None = None, python: str = sys.executable) -> Record:
        self.order.append((side, job.batch, python))
        rate = self.rates[side]
        if isinstance(rate, str):
            return {"skipped": rate, "error": f"skipped: {rate}"}
        if rate is None:
            return {"error": "stopped after 9 s", "seconds_at_least": 5.0}
        rate = rate[job.batch] if isinstance(rate, dict) else rate
        tokens = [[1] * r.max_tokens for r in job.requests]
        return {
            "tok_s": rate, "seconds": 10.0 / rate, "token_ids": tokens, "versions": {"torch": side},
            "summary": {"bytes": {"disk_read": 400}, "sweeps": 4},
        }  # fmt: skip

    def module(self, module: str, stdin: str, *rest: Any, python: str = sys.executable) -> Record:
        if module == "bench.harness":
            return {"airllm": f"2.11 of {python}"}
        assert module == "bench.compare.bound"
        return {"model_bytes": 1000, "rates": {"link": None}, "memory_seconds": [0.1, 0.1],
                "compute_seconds": [3.0, 0.5]}  # fmt: skip

    def reads(self, files: Sequence[Path]) -> dict[str, float]:
        """The disk is faster after a run than before."""
        self.read += 1
        return {"buffered": 95.0, "direct": 120.0 if self.read % 2 == 0 else 80.0}


def run(tiny: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[str, Any], *words: str) -> tuple[Any, list[Record]]:
    pretended = Pretended(rates)
    monkeypatch.setattr(harness, "run_side", pretended.side)
    monkeypatch.setattr(harness, "run_module", pretended.module)
    monkeypatch.setattr(compare, "read_rates", pretended.reads)
    args = compare.parse(["smoke", "--model", str(tiny), *words])
    return pretended, compare.compare(COMPARISONS["smoke"], args)


def test_sides_take_turns_with_the_best_batch_of_each_peer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"flexengine_side": 10.0, "transformers_generate": {2: 4.0, 4: 5.0}, "accelerate_offload": "no reason"}
    ran, (line,) = run(tiny, monkeypatch, rates, "--runs", "2", "--peer-python", f"transformers={sys.executable}")
    ours, theirs = ("flexengine_side", 16, sys.executable), ("transformers_generate", 4, sys.executable)
    assert ran.order[1] == theirs
    assert [x[:2] for x in ran.order[:3]] == [(theirs[0], 2), (theirs[0], 4), ("accelerate_offload", 2)]
    assert ran.order[3:] == [ours, theirs, ours, theirs]
    peer = line["peers"]["transformers"]
    assert (peer["batch"], peer["ratio"]["median"], peer["rows_equal"]) == (4, 2.0, [4, 4])
    assert peer["versions"] == {"airllm": f"2.11 of {sys.executable}", "torch": "transformers_generate"}
    assert line["skipped"] == {"accelerate-disk": "no reason"}
    assert list(line["peers"]) == ["transformers"]
    assert not compare.bad(line)
    assert line["bound"]["runs"][0]["seconds"] == {
        "disk": 2.0, "memory": 0.2, "link": 0.0, "compute": 3.5, "per_sweep": 4.0, "overall": 3.5
    }  # fmt: skip
    assert line["bound"]["share"]["median"] == 4.0
    assert line["bound"]["runs"][0]["slowest"] == "compute"
    assert [x["direct"] for x in line["bound"]["runs"][0]["read_rates"]] == [80.0, 120.0]
    assert str(tiny) not in json.dumps(line)
    (row,) = lines_of(json.loads(json.dumps(line)))
    assert command([row]) == "python -m bench.compare smoke --runs 2 --peers transformers"


def test_a_peer_may_compute_a_part_of_a_case(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = replace(COMPARISONS["smoke"], peer_tokens=2)
    asked = list[Any]()

    def side(self: Pretended, name: str, job: Job, *rest: Any) -> Record:
        asked.append((name, [row.max_tokens for row in job.requests]))
        return given(self, name, job, *rest) | {"steps": [2.0, 0.5]} if "flex" not in name else given(self, name, job)

    given = Pretended.side
    monkeypatch.setattr(Pretended, "side", side)
    monkeypatch.setitem(compare.COMPARISONS, "smoke", part)
    rates = {"flexengine_side": 10.0, "transformers_generate": 5.0}
    _, (line,) = run(tiny, monkeypatch, rates, "--runs", "1", "--peers", "transformers", "--peer-batches", "3")
    new = [tokens for _, tokens in SMOKE.lengths()]
    assert asked == [("flexengine_side", new), ("transformers_generate", [2] * 3)]
    rate = sum(new) / sum(2.0 + 0.5 * (max(batch) - 1) for batch in (new[:3], new[3:]))
    assert line["peers"]["transformers"]["tok_s"]["median"] == pytest.approx(rate)
    assert line["peers"]["transformers"]["runs"][0]["measured_tok_s"] == 5.0


def test_each_choice_of_switches_is_a_record(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"flexengine_side": 10.0, "transformers_generate": 5.0}
    words = ["--runs", "2", "--peer-runs", "1", "--peers", "transformers", "--lossy", "exact", "weights=int4"]
    ran, lines = run(tiny, monkeypatch, rates, *words, "--peer-batches", "3")
    assert [side for side, _, _ in ran.order] == [
        "flexengine_side", "flexengine_side", "transformers_generate", "flexengine_side", "flexengine_side"
    ]  # fmt: skip
    assert [line["lossy"] for line in lines] == ["exact", "weights=int4"]
    rows = [row for line in lines for row in lines_of(line)]
    assert command(rows) == (
        "python -m bench.compare smoke --runs 2 --peers transformers --peer-runs 1 --lossy exact weights=int4"
    )


def test_a_peer_that_is_stopped_leaves_its_version(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--runs", "1", "--peers", "airllm", "--peer-python", f"airllm={sys.executable}", "--peer-batches", "4"]
    _, (line,) = run(tiny, monkeypatch, {"flexengine_side": 10.0, "airllm_layers": None}, *words)
    peer = line["peers"]["airllm"]
    assert peer["error"] == "stopped after 9 s"
    assert peer["versions"] == {"airllm": f"2.11 of {sys.executable}"}
    assert not compare.bad(line)


def test_an_interpreter_says_what_it_has() -> None:
    assert harness.installed(sys.executable) == harness.versions()
    assert harness.installed("/bin/false") == {}


@pytest.mark.parametrize(
    ("case", "name", "dtype"),
    [("d", "llama-cpp", "float16"), ("d", "airllm", "bfloat16"), ("a", "llama-cpp", "Q4_1"),
     ("a", "llama-cpp-f32", "float32"), ("a", "transformers", "bfloat16"), ("g", "flexgen", "float16"),
     ("g", "deepspeed", "float16"), ("a", "openvino", "Q4_1"), ("d", "openvino", "Q4_1"),
     ("a", "openvino-bf16", "bfloat16"), ("d", "openvino-f32", "float32"), ("a", "vllm", "float32"),
     ("a", "ctranslate2-int8", "int8")],
)  # fmt: skip
def test_what_is_recorded_is_what_a_peer_computes_in(
    case: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has the dtype of a peer that cannot choose, or of its file, not the requested dtype."""
    for make_gguf in ("demo", "widened", "of_llama"):
        monkeypatch.setattr(compare.gguf_files, make_gguf, lambda *place: Path("model.gguf"))
    args = compare.parse([case, "--peer-dtype", "bfloat16"])
    assert compare.peer_job(name, Job("model", ()), COMPARISONS[case], args).dtype == dtype


@pytest.mark.parametrize(
    ("switches", "name"),
    [({}, "fp32"), ({"cache": "bf16"}, "fp32"), ({"compute": "bf16", "cache": "bf16"}, "bf16"),
     ({"compute": "int8"}, "8 bits"), ({"weights": "int8", "compute": "bf16"}, "8 bits"),
     ({"weights": "int4"}, "4 bits"), ({"weights": "mixed", "compute": "int8"}, "4 bits"),
     ({"weights": [None, "int3"]}, "4 bits")],
)  # fmt: skip
def test_classes_of_numbers(switches: Record, name: str) -> None:
    assert own_class(switches) == name
    assert {peer.dtype for peer in PEERS.values() if peer.dtype} <= set(CLASSES)


def test_classes_are_named_where_they_differ(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"flexengine_side": 10.0, "transformers_generate": 5.0}
    words = ["--runs", "1", "--peers", "transformers", "--lossy", "exact", "compute=int8", "--peer-batches", "4"]
    _, found = run(tiny, monkeypatch, rates, *words)
    assert [ratio_text(row) for line in found for row in lines_of(line)] == ["2", "2, 8 bits against fp32"]


def test_every_case_has_peers_and_every_peer_an_adapter() -> None:
    for compared in COMPARISONS.values():
        assert set(compared.peers) <= set(PEERS)
        assert compared.model == "demo" or compared.model in SHAPES
    for peer in PEERS.values():
        assert (harness.REPO / "bench" / "peers" / f"{peer.module}.py").is_file()


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    for text in (f"nobody={sys.executable}", "airllm=/no/such/python", "airllm"):
        with pytest.raises(SystemExit):
            compare.parse(["smoke", "--peer-python", text])


@pytest.mark.parametrize(("words", "told"), [
    ("--runs 0", "must be 1 or more"), ("--peer-runs -3", "must be 1 or more"), ("--peer-batches 4 0", "1 or more"),
    ("--lossy weights=int9", "'int9'; it must be"), ("--lossy weight=int4", "did you mean weights?"),
    ("--lossy sparse_attention", "sparse_attention"),
    ("--limit abc", "'abc'"), ("--limit 0", "'0'"), ("--model /nonexistent", "/nonexistent is no directory"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_at_once(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.parse(["smoke", *words.split()])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in PEERS if name not in ("transformers", "accelerate-disk")])
def test_peers_that_cannot_run_this_job_say_why(tiny: Path, name: str) -> None:
    """Peers without support for the model, without a GPU or without their package report a reason, not a traceback."""
    peer = PEERS[name]
    job = Job(str(tiny), tuple(SMOKE.requests(512)), batch=4, scratch=str(tiny), options=peer.options)
    ran = harness.run_side(peer.module, job, Limits(seconds=60))
    assert ran.get("skipped"), ran


def test_disk_offload_gives_the_tokens_of_the_engine(tiny: Path, tmp_path: Path) -> None:
    words = ["--runs", "1", "--peers", "accelerate-disk", "--peer-batches", "4"]
    args = compare.parse(["smoke", "--model", str(tiny), *words])
    (line,) = compare.compare(COMPARISONS["smoke"], args)
    assert not compare.bad(line), line
    assert line["peers"]["accelerate-disk"]["rows_equal"] == [4, 4]
    assert line["bound"]["share"]["median"] > 0
    assert line["peers"]["accelerate-disk"]["versions"]["accelerate"]


def test_the_command_of_a_record_is_as_given_but_for_places() -> None:
    words = "a --runs 1 --peer-python llama-cpp=/x --lossy exact weights=int4,compute=int8 --out=x.jsonl --dir y"
    assert compare.given(words.split()) == "python -m bench.compare a --runs 1 --lossy exact weights=int4,compute=int8"
