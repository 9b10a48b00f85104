"""The run command, in this process on a tiny checkpoint: exit codes, output rows and summaries."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexengine.shell.commands import messages, run
from tests.helpers.families import NEW
from tests.helpers.job import FIELDS, Job
from tests.helpers.strategies import mutated


def test_done(job: Job) -> None:
    assert job("--device", "cpu") == messages.DONE == 0
    assert [r["token_ids"] for r in job.rows] == job.family.expected
    assert [r["index"] for r in job.rows] == list(range(8))
    assert all(r["error"] is None and r["finish_reason"] == "length" for r in job.rows)
    counts = [(r["prompt_tokens"], r["completion_tokens"]) for r in job.rows]
    assert counts == [(len(p), NEW) for p in job.family.prompts]
    assert job.out == ""
    assert f"8 rows done, 0 failed; 150 prompt and {8 * NEW} generated tokens" in job.err.splitlines()[-1]
    assert list(job.folder.glob("*.part")) == []


def test_rows_in_input_order_with_all_their_fields(job: Job) -> None:
    """Short and long continuations end out of order; they are written in order, each with its input fields."""
    prompts, expected = job.family.prompts, job.family.expected
    lengths = [6, 1, 5, 3, 2, 4, 1, 3]
    rows = [{"custom_id": f"r{i}", "prompt_token_ids": p, "max_tokens": n, "meta": {"ä": [1, None]}, "index": "mine"}
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]  # fmt: skip
    job.write(rows)
    policy = job.folder / "policy.json"
    policy.write_text('{"gpu_batch_size": 2, "num_gpu_batches": 2}')
    assert job("--policy", str(policy)) == 0
    for i, (row, found) in enumerate(zip(rows, job.rows, strict=True)):
        assert found["index"] == i  # an input field of the same name has another
        assert {k: found[k] for k in row if k != "index"} == {k: v for k, v in row.items() if k != "index"}
        assert set(found) == {*row, *FIELDS, "input_index"}
        assert found["input_index"] == "mine"
        assert found["token_ids"] == expected[i][: lengths[i]]


def test_bad_rows_are_error_rows_and_the_others_are_done(job: Job) -> None:
    good = job.family.rows
    bad: list[Any] = ['{"prompt_token_ids": [1, 2', {"prompt_token_ids": []}, {"prompt_token_ids": [601]},
                      {"prompt_token_ids": [3], "max_tokens": 0}, {"prompt": "no tokenizer"}, {"question": "?"},
                      {"prompt_token_ids": [3] * 253}, "[1, 2]"]  # fmt: skip
    mixed = [row for pair in zip(good, bad, strict=True) for row in pair]
    job.write(mixed)
    assert job() == messages.SOME_FAILED == 1
    assert [r["token_ids"] for r in job.rows[::2]] == job.family.expected
    assert [r["error"] for r in job.rows[::2]] == [None] * 8
    errors = [r["error"] for r in job.rows[1::2]]
    wanted = ["invalid JSON", "prompt_token_ids is []; it must be an array", "holds 601; token ids lie in [0, 601)",
              "max_tokens is 0",
              "no tokenizer, so prompt cannot be used; send prompt_token_ids", "exactly one is needed",
              "253 tokens + max_tokens 6 = 259 tokens, more than the model's context of 256", "an array"]  # fmt: skip
    for line, (error, want) in enumerate(zip(errors, wanted, strict=True)):
        assert want in error
        assert error.startswith(f"line {2 * line + 2}: ")
    assert all(r["finish_reason"] is None and r["token_ids"] == [] for r in job.rows[1::2])
    assert "8 rows done, 8 failed" in job.err
    assert sum(line.startswith("flexengine: row ") for line in job.err.splitlines()) == 5
    assert job.err.count("more rows failed; their errors are in the output") == 1


def test_mutated_lines(job: Job) -> None:
    """Rows out equal rows in, whole rows get the reference's answer, errors name their lines, the exit code is 1."""
    whole, failed = json.dumps({"prompt_token_ids": job.family.prompts[0], "max_tokens": 3, "id": 7}).encode(), [0]

    @given(others=st.lists(mutated(whole), min_size=20, max_size=60))
    @settings(max_examples=12)
    def run_once(others: list[bytes]) -> None:
        lines = [whole, *others, whole, b"broken"]
        job.input.write_bytes(b"\n".join(lines))
        assert job("--device", "cpu", "--restart") == 1
        places = [number for number, line in enumerate(lines, 1) if line.strip()]
        assert [row["index"] for row in job.rows] == list(range(len(places)))
        bad = 0
        for place, row in zip(places, job.rows, strict=True):
            if lines[place - 1] == whole:
                assert row["token_ids"] == job.family.expected[0][:3]
                assert row["id"] == 7
            elif row["error"] is not None:
                assert row["error"].startswith(f"line {place}: ")
                bad += 1
        assert f"{len(places) - bad} rows done, {bad} failed" in job.err
        failed[0] += bad

    run_once()
    assert failed[0] > 50


def test_only_bad_rows(job: Job) -> None:
    job.write(["nonsense", {"prompt_token_ids": "x"}])
    assert job("--json") == 1
    assert [r["index"] for r in job.rows if r["error"]] == [0, 1]
    assert json.loads(job.out.splitlines()[-1])["failed"] == 2


def test_empty_file(job: Job) -> None:
    job.input.write_text("\n\n")
    assert job() == 0
    assert job.rows == []
    assert job.err.splitlines() == [f"flexengine: 0 rows done: {job.input} has no rows"]
    assert job() == 0
    arguments = job.arguments()
    del arguments[3:5]  # --output
    assert run.main(arguments) == 0
    assert job.capsys.readouterr() == ("", f"flexengine: 0 rows done: {job.input} has no rows\n")


def test_limit(job: Job) -> None:
    assert job("--limit", "3") == 0
    assert [r["token_ids"] for r in job.rows] == job.family.expected[:3]
    for limit in ("0", "-1"):
        assert job("--limit", limit) == 2
        assert f"--limit is {limit}; it must be at least 1" in job.err


def test_rows_on_stdout_and_the_summary_last(job: Job) -> None:
    arguments = job.arguments("--json", "--device", "cpu")
    del arguments[3:5]  # --output
    assert run.main(arguments) == 0
    lines = job.capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert [json.loads(line)["token_ids"] for line in lines[:8]] == job.family.expected
    assert json.loads(lines[8])["rows"] == 8


def test_json_summary(job: Job) -> None:
    policy = job.folder / "policy.json"
    fields = {"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": [0, 0, 1], "cache": [0, 1, 0], "slots": 2,
              "activations": [1, 0, 0], "schedule": "zigzag", "prefill_tokens": 512, "delegate": "none",
              "partition": "requests", "queries_first": False, "neurons": 0.0, "half_layers": False,
              "order": "fixed"}  # fmt: skip
    policy.write_text(json.dumps(fields))
    assert job("--json", "--policy", str(policy), "--device", "sim", "--offload-dir", str(job.folder / "off")) == 0
    summary = json.loads(job.out.splitlines()[-1])
    assert summary["policy"] == fields
    assert [summary[n] for n in ("rows", "failed", "prompt_tokens", "generated_tokens")] == [8, 0, 150, 8 * NEW]
    assert (summary["device"], summary["dtype"], summary["sweeps"]) == ("sim", "float32", NEW)
    assert summary["total_seconds"] == pytest.approx(summary["prefill_seconds"] + summary["decode_seconds"])
    assert summary["generated_tok_s"] == pytest.approx(8 * NEW / summary["total_seconds"])
    assert set(summary["bytes"]) == {"disk_read", "disk_write", "h2d", "d2h"}
    assert summary["bytes"]["disk_read"] > 0
    assert summary["bytes"]["disk_write"] == 0
    assert summary["bytes"]["d2h"] > 0
    assert set(summary["peak_bytes"]) == {"device", "host", "disk"}
    assert {"device", "disk_read", "h2d", "d2h"} <= set(summary["busy"])
    assert all(0 < share <= 1 for share in summary["busy"].values())
    assert list((job.folder / "off").glob("*")) == []


def test_seed_and_temperature(job: Job) -> None:
    found = []
    for seed in ("1", "1", "2"):
        assert job("--temperature", "1.5", "--seed", seed, "--restart") == 0
        found.append([r["token_ids"] for r in job.rows])
    assert found[0] == found[1] != found[2]
    assert found[0] != job.family.expected


def test_eos_ends_a_row(job: Job) -> None:
    """Without --ignore-eos a row ends with the checkpoint's end-of-sequence token."""
    config = json.loads((job.family.directory / "config.json").read_text())
    assert config["eos_token_id"] == 2
    stop = job.family.expected[0][4]
    copy = job.folder / "model"
    copy.mkdir()
    for path in job.family.directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "generation_config.json"):
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**values, "eos_token_id": stop}))
    arguments = job.arguments("--model", str(copy))
    arguments.remove("--ignore-eos")
    assert run.main(arguments) == 0
    for row, whole in zip(job.rows, job.family.expected, strict=True):
        ends = whole.index(stop) + 1 if stop in whole else NEW
        assert row["token_ids"] == whole[:ends]
        assert row["finish_reason"] == ("stop" if stop in whole else "length")
    assert job.rows[0]["finish_reason"] == "stop"


def test_trace(job: Job) -> None:
    trace = job.folder / "trace.json"
    assert job("--trace", str(trace)) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["sweep"] for e in events if e["ph"] == "X"} == set(range(NEW))


def test_a_failure_on_the_way_is_not_mistaken_for_done(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.tier.disk import DiskTier

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DiskTier, "_read", broken)
    assert job() == messages.FAILED == 3
    assert "Input/output error" in job.err
    assert not job.output.exists()


def test_a_temperature_too_large_for_a_float_is_a_bad_row(job: Job) -> None:
    job.write([job.family.rows[0], {**job.family.rows[1], "temperature": 10**400}, job.family.rows[2]])
    assert job() == 1
    assert [bool(r["error"]) for r in job.rows] == [False, True, False]
    assert [r["token_ids"] for r in job.rows[::2]] == job.family.expected[0:3:2]


@pytest.mark.parametrize("more", [
    ["--trace", "in.jsonl"], ["--trace", "p.json", "--policy", "p.json"], ["--trace", "out.jsonl"],
    ["--trace", "out.jsonl.part"], ["--trace", "out.jsonl.journal"], ["--output", "p.json", "--policy", "p.json"],
])  # fmt: skip
def test_no_file_is_written_over_another(job: Job, more: list[str]) -> None:
    (job.folder / "p.json").write_text('{"gpu_batch_size": 2}')
    before = {p: p.read_text() for p in job.folder.iterdir()}
    assert job(*(x if x.startswith("--") else str(job.folder / x) for x in more)) == 2
    assert "are one file" in job.err
    assert {p: p.read_text() for p in job.folder.iterdir()} == before


def test_results_survive_a_trace_that_cannot_be_written(job: Job) -> None:
    assert job("--trace", "/dev/full") == 0
    assert job.err.count("flexengine: the trace is lost: ") == 1
    assert [r["token_ids"] for r in job.rows] == job.family.expected
    assert job("--trace", str(job.folder)) == 2
    assert "trace file" in job.err


def test_a_full_disk_is_one_line_and_not_done(job: Job) -> None:
    assert job("--output", "/dev/full") == messages.FAILED
    said = "results cannot be written (No space left on device); free space there, or name a plain file as output"
    assert said in job.err.splitlines()[-1]
    assert job.err.splitlines()[-1].endswith("'/dev/full'")


@pytest.mark.slow
def test_whoever_reads_the_results_may_go(job: Job) -> None:
    words = [sys.executable, "-m", "flexengine.run", *job.arguments()[:3], "--max-tokens", "2"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout
    child.stdout.close()
    assert child.stderr
    said = child.stderr.read()
    assert child.wait() == messages.FAILED
    assert "the reader of the output closed it before all was written" in said
    assert "Traceback" not in said


def test_stdout_and_stderr_are_one_closed_pipe() -> None:
    """The message cannot be printed either, and the exit code must not be Python's 1."""
    program = "import sys, time; from flexengine.shell.commands.messages import exit_code\n"
    program += "def command():\n time.sleep(0.5); print('x' * 100_000); return 0\nsys.exit(exit_code(command))"
    script = '"$0" -c "$1" 2>&1 | true; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", script, sys.executable, program], timeout=120)
    assert done.returncode == messages.FAILED


def test_limit_beyond_any_file(job: Job) -> None:
    assert job("--limit", str(10**20)) == 0
    assert len(job.rows) == 8


@pytest.mark.parametrize("option", ["--output", "--model", "--policy", "--offload-dir", "--trace"])
def test_an_empty_name_is_refused(job: Job, option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        job(option, "")
    assert caught.value.code == 2


def test_thousands_of_bad_rows_before_the_first_good_one(job: Job) -> None:
    job.write(["nonsense"] * 2500 + job.family.rows[:2])
    assert job() == 1
    assert [r["error"] is None for r in job.rows] == [False] * 2500 + [True] * 2
    arguments = job.arguments()
    del arguments[3:5]  # --output
    assert run.main(arguments) == 1
    assert len(job.capsys.readouterr().out.splitlines()) == 2502


def test_an_output_cut_short_is_put_together_again(job: Job) -> None:
    assert job() == 0
    whole = job.output.read_bytes()
    job.output.write_bytes(whole[:100])
    assert job() == 0
    assert job.output.read_bytes() == whole
