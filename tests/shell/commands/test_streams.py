"""The run command with streams as input and output, closed streams, and an output that it must not shorten."""

import contextlib
import errno
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.config import Result
from flexengine.errors import InvalidInput, size
from flexengine.job.journal import Journal
from flexengine.shell.commands import messages, run
from tests.helpers.job import Job

ROOT = Path(__file__).parents[3]


def without_output(job: Job, *more: str) -> list[str]:
    arguments = job.arguments(*more)
    del arguments[3:5]
    return arguments


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_standard_output_by_name_is_as_without_output(job: Job, name: str) -> None:
    assert run.main(without_output(job, "--output", name, "--device", "cpu")) == 0
    lines = job.capsys.readouterr().out.splitlines()
    assert [json.loads(line)["token_ids"] for line in lines] == job.family.expected
    assert run.main(without_output(job, "--output", name, "--restart")) == messages.REFUSED
    err = job.capsys.readouterr().err
    assert "--restart (restart=True in Python) needs an output (--output) that is a plain file" in err
    assert not list(Path("/dev").glob("*.journal"))


def test_an_open_file_as_output_is_not_emptied(job: Job) -> None:
    kept = job.folder / "kept"
    with kept.open("wb", buffering=0) as file:
        file.write(b"kept\n")
        assert run.main(without_output(job, "--output", f"/dev/fd/{file.fileno()}")) == 0
        file.write(b"end\n")
    lines = kept.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("kept", "end")
    assert [json.loads(line)["token_ids"] for line in lines[1:-1]] == job.family.expected
    assert sorted(path.name for path in job.folder.glob("*journal*")) == []
    assert job("--output", "/dev/fd/999") == messages.REFUSED
    assert "output /dev/fd/999 cannot be written to" in job.err


def test_a_compressed_input_continues_where_the_plain_one_stopped(job: Job) -> None:
    """The journal names the decompressed contents and the format."""
    assert job("--limit", "3") == 0
    packed = job.folder / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(job.input.read_bytes()))
    job.input = packed
    assert job() == 0
    assert "3 of 8 rows were done before" in job.err
    assert [row["token_ids"] for row in job.rows] == job.family.expected
    as_text = job.folder / "in.txt"
    as_text.write_bytes(gzip.decompress(packed.read_bytes()))
    job.input = as_text
    assert job() == messages.REFUSED
    assert 'input_format: was "jsonl", now "txt"' in job.err


def test_a_damaged_input_is_refused_before_the_model_is_opened(job: Job) -> None:
    packed = job.folder / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(job.input.read_bytes())[:-30])
    job.input = packed
    assert job("--model", "/nowhere/m") == messages.REFUSED
    assert "in.jsonl.gz is damaged after line" in job.err


def test_the_format_option(job: Job) -> None:
    job.input.rename(job.folder / "rows")
    job.input = job.folder / "rows"
    assert job() == messages.REFUSED
    assert "give --input-format" in job.err
    assert job("--input-format", "jsonl") == 0
    assert [row["token_ids"] for row in job.rows] == job.family.expected


def test_a_longer_output_is_not_shortened(job: Job) -> None:
    assert job() == 0
    whole = job.output.read_bytes()
    assert job("--limit", "3") == messages.REFUSED
    assert "has 8 rows, and would be replaced by the first 3; raise --limit (limit in Python)" in job.err
    assert "rename the output" in job.err
    assert job.output.read_bytes() == whole
    assert job("--limit", "8") == 0
    assert "finished already" in job.err
    job.output.unlink()
    assert job("--limit", "3") == 0  # nothing is lost: the journal still has all rows
    assert len(job.rows) == 3
    assert job("--limit", "3") == 0
    assert job() == 0
    assert job.output.read_bytes() == whole
    assert job("--limit", "3", "--restart") == 0
    assert len(job.rows) == 3


def test_stop_tokens_that_do_not_exist_leave_no_journal(job: Job) -> None:
    assert job("--stop-token-id", "601") == messages.REFUSED
    assert not list(job.folder.glob("*journal*"))
    assert job("--stop-token-id", "600") == 0


def test_row_errors_are_printed_in_the_order_of_the_input(job: Job) -> None:
    good = job.family.rows[0]
    job.write([good, "nonsense", good, {"prompt_token_ids": [601]}, {**good, "max_tokens": 0}])
    assert job() == 1
    assert re.findall(r"row (\d+): line (\d+): ", job.err) == [("1", "2"), ("3", "4"), ("4", "5")]


# A full disk


def test_a_full_disk_says_what_is_free_and_what_to_keep(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path(os.environ["FLEXENGINE_CACHE"])
    (cache / "prepared").mkdir(parents=True, exist_ok=True)
    (cache / "prepared" / "big").write_bytes(bytes(12_345))
    real, written = os.pwrite, 0

    def full(file: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    assert job() == messages.FAILED
    last = job.err.splitlines()[-1]
    journal = job.output.with_name("out.jsonl.journal")
    total = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    for words in (f"the disk of {job.folder} is full", " are free, about ",
                  f"the journal {journal} takes {size(journal.stat().st_size)}, and must be kept",
                  f"the cache {cache} takes {size(total)}", "run the same command again to continue"):  # fmt: skip
        assert words in last
    monkeypatch.undo()
    assert job() == 0
    assert [row["token_ids"] for row in job.rows] == job.family.expected


def test_the_first_error_is_the_one_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the journal or the output fails after the job failed: the first failure is the cause."""

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "second")

    def refused(*_: Any, **__: Any) -> None:
        raise InvalidInput("first")

    monkeypatch.setattr("flexengine.shell.commands.run.run_job", refused)
    monkeypatch.setattr(Journal, "close", broken)
    assert job() == messages.REFUSED
    assert "first" in job.err
    assert "second" not in job.err
    monkeypatch.setattr("flexengine.job.resume.whole_stdout", lambda: SimpleNamespace(flush=broken))
    assert run.main(without_output(job)) == messages.REFUSED
    assert "first" in job.capsys.readouterr().err


def test_a_failed_sync_at_the_end_is_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Journal, "close", broken)
    assert job() == messages.FAILED
    assert "Input/output error; 8 of 8 rows are done; run the same command again to continue" in job.err


def test_samples_have_logprobs_only_if_they_were_requested(job: Job) -> None:
    assert job("--n", "2", "--limit", "1") == 0
    assert [set(sample) for sample in job.rows[0]["samples"]] == [{"generated_text", "token_ids", "finish_reason"}] * 2
    assert job("--n", "2", "--limit", "1", "--logprobs", "0", "--restart") == 0
    assert all(len(sample["logprobs"]) == 6 for sample in job.rows[0]["samples"])
    assert "logprobs" in vars(Result(0))  # the field itself stays


# Closed streams, in a process of their own


def closed(job: Job, redirection: str, *arguments: str) -> tuple[int, str]:
    script = f'"$0" -m flexengine.run "$@" {redirection} 2>"{job.folder}/said"'
    done = subprocess.run(["bash", "-c", script, sys.executable, *arguments], cwd=ROOT, timeout=300)
    return done.returncode, (job.folder / "said").read_text()


def test_a_closed_stdout_is_refused_before_the_model_is_opened(job: Job) -> None:
    for more in ([], ["--output", str(job.output), "--json"], ["--dry-run"]):
        code, said = closed(job, ">&-", str(job.input), "--model", "/nowhere/m", *more)
        assert code == messages.REFUSED
        assert said == "flexengine: stdout is closed, so results cannot be written to it; name an --output file\n"


def test_a_closed_stdin_is_no_empty_input(job: Job) -> None:
    code, said = closed(job, "<&-", "-", "--model", "/nowhere/m")
    assert code == messages.REFUSED
    assert "input /dev/stdin cannot be read (Bad file descriptor)" in said
    assert "did you mean" not in said


def test_a_full_stdout_is_open(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert run.main(without_output(job)) == messages.FAILED
    with contextlib.suppress(OSError):
        full.close()
    assert "No space left on device" in job.capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
@pytest.mark.parametrize(("redirection", "sentence"), [
    (">/dev/full", "No space left on device"), (">&-", "stdout is closed, so the output is lost"),
])  # fmt: skip
def test_help_that_is_lost(words: list[str], redirection: str, sentence: str) -> None:
    script = f'"$0" -m flexengine "$@" {redirection}'
    done = subprocess.run(["bash", "-c", script, sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert done.returncode == messages.FAILED
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("printed", "code"), [("'x'", messages.FAILED), ("end=''", messages.DONE)])
def test_output_that_is_lost_is_one_sentence(tmp_path: Path, printed: str, code: int) -> None:
    """A file that the command opens does not get the number of stdout, so nothing is written into it."""
    program = "import sys; from flexengine.shell.commands.messages import exit_code\n"
    program += f"def command():\n f = open({str(tmp_path / 'file')!r}, 'w'); print({printed}); return 0\n"
    program += "sys.exit(exit_code(command))"
    script = f'"$0" -c "$1" >&- 2>"{tmp_path}/said"'
    done = subprocess.run(["bash", "-c", script, sys.executable, program], cwd=ROOT, timeout=120)
    said = "flexengine: stdout is closed, so the output is lost; open stdout, or send it to a file\n"
    assert (tmp_path / "said").read_text() == (said if code else "")
    assert done.returncode == code
    assert (tmp_path / "file").read_text() == ""


def test_a_delimiter_says_that_a_stream_is_csv(
    families: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header alone has no rows to plan, as `run` has none to run."""
    (table := tmp_path / "in.csv").write_text("prompt;id\n")
    with table.open() as file:
        asked = [f"/dev/fd/{file.fileno()}", "--dry-run", "--model", str(families("llama").directory)]
        assert run.main([*asked, "--device", "cpu", "--delimiter", ";"]) == messages.DONE
        assert f"nothing to plan: {asked[0]} has no rows" in capsys.readouterr().err
        assert run.main([*asked, "--delimiter", ";", "--input-format", "jsonl"]) == messages.REFUSED
    assert (
        "only .csv and .tsv files have one; leave it out, or give --input-format csv (input_format='csv' in Python)"
        in capsys.readouterr().err
    )
