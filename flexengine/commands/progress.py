"""Output of a run on standard error: a progress bar, row errors, and a last line."""

import sys
from typing import TYPE_CHECKING, Any

from flexengine.bar import Bar
from flexengine.config import Result

if TYPE_CHECKING:
    from flexengine.engine.state import Progress
    from flexengine.job.resume import Job

SHOWN_ERRORS = 5  # errors of rows that are printed while a job runs


class JobBar:
    """Progress bar in tokens, with rate, ETA, and the rows done and failed in this and earlier runs of the job."""

    def __init__(self, job: "Job") -> None:
        self._job, self._failed = job, 0

    def show(self, progress: "Progress") -> None:
        """Show the state after a sweep."""
        self._bar.total = progress.most
        done, failed = self._done_before + progress.rows, self._failed_before + progress.failed
        self._bar.set_postfix_str(f"{done} of {self._job.total} rows done, {failed} failed", refresh=False)
        self._bar.update(progress.tokens - self._bar.n)

    def note(self, result: Result) -> None:
        """Print the error of a result, if it has one, up to SHOWN_ERRORS errors."""
        if not result.error:
            return
        self._failed += 1
        if self._failed <= SHOWN_ERRORS:
            self._bar.write(f"row {result.index}: {result.error}"[:300], file=sys.stderr)
        elif self._failed == SHOWN_ERRORS + 1:
            self._bar.write("more rows failed; their errors are in the output", file=sys.stderr)

    def __enter__(self) -> "JobBar":
        self._done_before, self._failed_before = self._job.done, self._job.resumed - self._job.done
        self._bar = Bar(unit="tok", smoothing=0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def last_line(job: "Job", output: str | None, summary: dict[str, Any]) -> str:
    """Return the last line of a run.

    Args:
        summary: the engine's summary; empty if no row remained to be run.
    """
    if summary:
        return summary_line(summary)
    if not job.done and not job.failed:
        return f"0 rows done: {job.rows.path} has no rows"
    if not job.finished:
        return f"{job.done} rows done, {job.failed} failed; all of them were in the journal"
    failed = f"{job.failed} with errors" + ("; --retry-errors runs those rows again" if job.failed else "")
    return f"finished already: {job.total} rows in {output} ({failed}); --restart runs the job again"


def summary_line(s: dict[str, Any]) -> str:
    """Return a summary as one line of text."""
    moved = ", ".join(f"{link} {n / 1e9:.2f} GB" for link, n in s["bytes"].items() if n) or "nothing"
    peak = ", ".join(f"{tier} {n / 1e9:.2f} GB" for tier, n in s["peak_bytes"].items() if n)
    busy = ", ".join(f"{lane} {share:.0%}" for lane, share in s["busy"].items())
    return (
        f"{s['rows']} rows done, {s['failed']} failed; {s['prompt_tokens']} prompt and"
        f" {s['generated_tokens']} generated tokens;"
        f" prefill {s['prefill_seconds']:.2f} s, decode {s['decode_seconds']:.2f} s:"
        f" {s['generated_tok_s']:.1f} tok/s; moved {moved}; peak {peak}; busy {busy}{_prediction(s.get('plan'))}"
        + (f"; verified {verified(checked)}" if (checked := s.get("verified")) else "")
    )


def _prediction(plan: dict[str, Any] | None) -> str:
    """Return the predicted seconds and their errors as text; "" if the rates were not measured."""
    if not plan or not plan["measured"]:
        return ""
    off = [f"{lane} {x['predicted'] / x['measured'] - 1:+.0%}" for lane, x in plan["lanes"].items() if x["measured"]]
    return f"; predicted {plan['predicted_seconds']:.1f} s for these sweeps ({plan['error']:+.0%}; {', '.join(off)})"


def verified(checked: dict[str, Any]) -> str:
    """Return the files, bytes and seconds of checksum comparisons as text."""
    return f"{checked['files']} files, {checked['bytes'] / 1e9:.2f} GB, in {checked['seconds']:.1f} s"
