"""The manifest of a job: a flat record of the values that decide its results. It is stored in the job's journal, and
compared with the manifest of a job that resumes it (same_job.py).

Values that do not affect results are not in the manifest: placement (policy, memory sizes, offload directory), the
number of rows, the trace. A job may therefore be resumed with other memory or a larger limit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flexengine.config import SamplingParams
from flexengine.job.foreign import CHAT_ONLY
from flexengine.job.inputs import InputRows

FORMAT = 4
MODEL_FILES = "model_files"
INPUT_DIGEST = "input_sha256"
LOSSY = "lossy"
# Sampling parameters that a manifest has only if they are set, as earlier versions had none of them.
ONLY_IF_SET = ("min_tokens", "logit_bias", "bad_words", *CHAT_ONLY)

Manifest = dict[str, Any]


def manifest_of(
    rows: InputRows, sampling: SamplingParams, engine: Mapping[str, Any], lossy: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of a job of a file: name -> JSON value.

    Args:
        sampling: parameters of rows without fields of these names.
        engine: fields that identify the model and its arithmetic.
        lossy: the lossy switches that are set, by name.
    """
    given = {"input": rows.path.name, INPUT_DIGEST: rows.scan().sha256, "input_format": rows.form,
             "prompt_column": rows.rules.column, "output_format": "jsonl"}  # fmt: skip
    set_now = {n: v for n, v in asdict(sampling).items() if n not in ONLY_IF_SET or v != getattr(SamplingParams(), n)}
    values = {"format": FORMAT, **given, **rows.settings, **engine, **set_now, LOSSY: dict(lossy)}
    plain: Manifest = json.loads(json.dumps(values))  # tuples become lists, as when the journal is read
    return plain
