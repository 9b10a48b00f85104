"""--report of the run command: the page of a real job, refusals, and jobs that end early."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.config import Result
from flexengine.job.resume import JournalJob
from flexengine.shell.report import recorder
from flexengine.shell.report.recorder import ReportRecorder
from tests.helpers.families import NEW
from tests.helpers.job import Job

pytest.importorskip("matplotlib")

POLICY = {"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": [0, 0, 1], "cache": [0, 1, 0], "slots": 2}


@pytest.fixture
def offloaded(job: Job) -> list[str]:
    policy = job.folder / "policy.json"
    policy.write_text(json.dumps(POLICY))
    return ["--policy", str(policy), "--device", "sim", "--offload-dir", str(job.folder / "off"), "--json"]


def test_the_page_of_a_job(job: Job, offloaded: list[str]) -> None:
    """Numbers of the page against the job's summary and the input; a report changes no result."""
    secret = "prompt-text-of-the-user"
    bad = [{"prompt_token_ids": [1, 2], "max_tokens": 0, "note": secret}, f'{{"prompt": "{secret}']
    job.write([*job.family.rows, *bad])
    path = job.folder / "r.html"
    assert job(*offloaded, "--report", str(path)) == 1
    assert [r["token_ids"] for r in job.rows[:8]] == job.family.expected
    summary = json.loads(job.out.splitlines()[-1])
    page = path.read_text()
    assert ": <span>done</span></h1>" in page
    for words in ("10 of 10", "2 with an error", f"150 prompt tokens of finished rows, {8 * NEW:,} generated",
                  f"length {8}.", "max_tokens is 0", "invalid JSON", "disk read: load weight, layer",
                  "a decode sweep of typical length", f"h2d {summary['bytes']['h2d'] / 1e6:.3g}"):  # fmt: skip
        assert words in page, words
    assert secret not in page
    assert "--report" in page.split('<pre class="wrap">')[1].split("</pre>")[0]
    assert json.dumps(summary["policy"]) in page.replace("&#34;", '"')
    assert not list(job.folder.glob("*.part"))
    lanes = summary["plan"]["lanes"]
    assert lanes["h2d"]["measured"] > 0
    for name in ("disk read", "host to device", "device to host", "compute"):
        assert f'<th scope="row">{name}</th>' in page


def test_refusals(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "closed").mkdir(mode=0o500)
    (job.folder / "d.html").mkdir()
    monkeypatch.setattr(recorder.os, "access", lambda path, mode: Path(path).name != "closed")
    for name, words in {
        "r.txt": "it must end with .html", "d.html": "is a directory; name a plain file",
        "no/r.html": "does not exist; create it first", "closed/r.html": "is not writable; name another file",
    }.items():  # fmt: skip
        assert job("--report", str(job.folder / name)) == 2
        assert words in job.err
    assert job("--report", str(job.folder / "r.html"), "--dry-run") == 2
    assert "--report has no effect with --dry-run" in job.err
    for name in [n for n in sys.modules if n.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert job("--report", str(job.folder / "r.html")) == 2
    assert "--report needs matplotlib" in job.err
    assert 'pip install "flexengine[report]"' in job.err
    assert not job.output.exists()
    assert not (job.folder / "r.html").exists()


@pytest.mark.parametrize("more", [
    ["--report", "in.html"], ["--report", "t.html", "--trace", "t.html"], ["--report", "p.html", "--policy", "p.html"],
    ["--report", "o.html", "--output", "o.html"], ["--report", "r.html", "--trace", "r.html.part"],
])  # fmt: skip
def test_a_page_is_written_over_no_other_file(job: Job, more: list[str]) -> None:
    job.input = job.input.rename(job.folder / "in.html")
    (job.folder / "p.html").write_text('{"gpu_batch_size": 2}')
    before = {p: p.read_text() for p in job.folder.iterdir()}
    assert job(*(x if x.startswith("--") else str(job.folder / x) for x in more)) == 2
    assert "are one file" in job.err
    assert {p: p.read_text() for p in job.folder.iterdir()} == before


def test_a_finished_job_keeps_its_page(job: Job) -> None:
    path = job.folder / "r.html"
    assert job("--report", str(path)) == 0
    before = path.read_text()
    assert job("--report", str(path)) == 0
    assert "no row remained to be run, so --report writes no page" in job.err
    assert path.read_text() == before
    job.write([*job.family.rows, job.family.rows[0]])
    assert job("--report", str(path)) == 2  # another input: refused after the engine is opened
    assert "--restart" in job.err
    assert path.read_text() == before
    assert job("--report", str(path), "--restart") == 0
    assert path.read_text() != before


def test_a_page_that_cannot_be_written_stops_no_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "r.html":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(recorder, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(recorder.os, "replace", full)
    assert job("--report", str(job.folder / "r.html")) == 0
    assert [r["token_ids"] for r in job.rows] == job.family.expected
    assert job.err.count("is not written: [Errno 28] No space left on device") == 1
    assert not list(job.folder.glob("r.html*"))


class Interrupting:
    """Clock of a job that is interrupted, or fails, at its n-th reading."""

    def __init__(self, error: BaseException, reading: int) -> None:
        self.error, self.left, self.now = error, reading, 0.0

    def __call__(self) -> float:
        self.left -= 1
        self.now += 100.0
        if self.left == 0:
            raise self.error
        return self.now


@pytest.mark.parametrize(("error", "words"), [
    (KeyboardInterrupt(), "<span>interrupted</span>"), (RuntimeError("it <broke>"), '<span class="bad">failed</span>'),
])  # fmt: skip
def test_a_job_that_ends_early_leaves_a_page(
    job: Job, offloaded: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    """A page is written while the job runs, and another one at its end."""
    written: list[str] = []
    clock, write = Interrupting(error, 7), ReportRecorder._write

    def noted(self: ReportRecorder, state: str, reason: str = "") -> None:
        write(self, state, reason)
        written.append(Path(self.path).read_text())

    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=clock, strftime=time.strftime))
    monkeypatch.setattr(ReportRecorder, "_write", noted)
    assert job(*offloaded, "--report", str(job.folder / "r.html")) in (3, 130)
    assert "running when this page was written" in written[0]
    assert words in written[-1]
    assert ("it &lt;broke&gt;" in written[-1]) == isinstance(error, RuntimeError)
    assert len(written) >= 2


def test_an_output_that_cannot_be_written_is_on_the_page(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: JournalJob) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalJob, "end", full)
    assert job("--report", str(job.folder / "r.html")) == 3
    page = (job.folder / "r.html").read_text()
    assert ': <span class="bad">' in page
    assert "No space left on device" in page


def test_samples_are_counted_each(tmp_path: Path) -> None:
    from flexengine.config import Completion

    made = ReportRecorder(str(tmp_path / "r.html"), ["run"], None, print)  # type: ignore[arg-type]
    samples = [Completion("", [1, 2], "stop"), Completion("", [1], "length")]
    made.take(Result(0, "", [1, 2], "stop", 9, 3, samples=samples))
    made.take(Result(1, error="row 1: no"))
    assert made.record.endings == {"stop": 1, "length": 1}
    assert made.record.completions.bins() == [(1, 1, 1), (2, 2, 1)]
    assert made.record.prompts.bins() == [(9, 9, 1)]
    assert [kind.message for kind in made.record.errors.kinds.values()] == ["row 1: no"]
