"""Counts, seconds and bytes of a job: the record that `Engine.summary` and `Engine.run_job` return."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flexengine.lossy import EXACT, Lossy
from flexengine.plan.feedback import PlanReport
from flexengine.policy import Policy


@dataclass(frozen=True)
class Verified:
    """Comparisons of files with their checksums, since the engine was opened."""

    files: int  # number of files
    bytes: int  # bytes of these files
    seconds: float  # seconds of reading and hashing


@dataclass(frozen=True)
class JobCounts:
    """Rows of a job of a file, over all its runs."""

    rows: int  # rows of the input, up to `limit`
    done: int  # rows that have a result without an error
    failed: int  # rows that have a result with an error
    done_before: int  # rows that had a result when this run began


@dataclass(frozen=True)
class Summary:
    """Counts, seconds and bytes of one job. The counts are 0 if no row was run.

    The seconds are periods by the clock, one after the other: `load_seconds`, then sweeps, each of which counts either
    in `prefill_seconds` or in `decode_seconds`.

    Attributes:
        model: name of the model.
        device: cpu, cuda or sim.
        dtype: dtype of the activations, such as float32.
        rows: rows finished without an error.
        failed: rows that have an error.
        prompt_tokens: tokens of the prompts of finished rows.
        computed_prompt_tokens: prompt tokens that were computed: fewer if prompts have common prefixes, more if memory
            ran out and rows started again. Given continuations count as prompts.
        generated_tokens: generated tokens of all samples.
        scored_tokens: tokens of continuations and texts whose log probability was computed.
        sweeps: number of sweeps.
        load_seconds: seconds before the first sweep. Weights are calibrated, encoded and verified in this period, if
            necessary, and memory is allocated.
        prefill_seconds: seconds of the sweeps that computed any prompt. In an engine's first job, and in the first job
            of a layout, the first such sweep also reads the weights that stay in memory, beside computing.
        decode_seconds: seconds of all other sweeps.
        bytes: bytes moved, by link: disk_read, disk_write, h2d, d2h, and disk2_read, ... of further offload
            directories. Weights that stay in memory are not counted.
        busy: share of `total_seconds` in which each lane worked, in [0, 1]. "loading" is the time from the beginning to
            the end of reading the weights that stay in memory, hidden by computing or not; "disk_read" does not
            contain it.
        replanned: one message per plan that was replaced because memory ran out, and per loss of an attention worker.
            `policy` and `peak_bytes` are those of the last plan; `plan` covers the sweeps after the last message.
        peak_bytes: most bytes allocated, by tier: device, host (with a GPU), disk, ...
        lossy: the lossy switches of the job.
        verified: comparisons with checksums; None without `verify`.
        policy: the policy of the job; None if no row could be run.
        plan: predicted against measured seconds; None if no row could be run.
        job: rows of the job over all its runs; None except from `Engine.run_job`.
        stages: for each stage of a pipeline in another process, its layers, policy, plan, busy seconds by lane, bytes
            by link and peak bytes, as JSON values. All other fields are those of the first stage; counts and seconds
            are those of the job.

    Examples:
        >>> summary = engine.run_job("prompts.jsonl", "results.jsonl")
        >>> print(summary.rows, summary.failed, f"{summary.generated_tok_s:.1f} tok/s")
    """

    model: str
    device: str
    dtype: str
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    sweeps: int = 0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    bytes: Mapping[str, int] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    replanned: tuple[str, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    lossy: Lossy = EXACT
    verified: Verified | None = None
    policy: Policy | None = None
    plan: PlanReport | None = None
    job: JobCounts | None = None
    stages: tuple[Mapping[str, Any], ...] = ()

    @property
    def total_seconds(self) -> float:
        """Return the seconds of all sweeps, without `load_seconds`."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def generated_tok_s(self) -> float:
        """Return generated tokens per second of `total_seconds`; 0 if no sweep was computed."""
        return self.generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values, as `flexengine run --json` prints it. `job` and `stages` are left out if
        they are empty."""
        counts = ("model", "device", "dtype", "rows", "failed", "prompt_tokens", "computed_prompt_tokens",
                  "generated_tokens", "scored_tokens", "sweeps", "load_seconds", "prefill_seconds",
                  "decode_seconds", "total_seconds", "generated_tok_s")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in counts},
            "bytes": dict(self.bytes),
            "busy": dict(self.busy),
            "replanned": list(self.replanned),
            "peak_bytes": dict(self.peak_bytes),
            "lossy": self.lossy.enabled,
            "verified": asdict(self.verified) if self.verified else None,
            "policy": self.policy.to_json() if self.policy else None,
            "plan": self.plan.to_json() if self.plan else None,
            **({"job": asdict(self.job)} if self.job else {}),
            **({"stages": list(self.stages)} if self.stages else {}),
        }
