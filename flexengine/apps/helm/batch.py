"""All requests of a suite as one job, which continues after an interruption."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.apps.helm.requests import ID, Encoding, digest_of, row_of
from flexengine.apps.rows_job import RowsJob, RunsJobs
from flexengine.config import SamplingParams, json_fault, shown
from flexengine.errors import InvalidInput
from flexengine.job.results import encode_fields
from flexengine.job.same_job import OtherJob

Request = Mapping[str, Any]
Row = dict[str, Any]
PARAMS = SamplingParams(logprobs=0)  # the log probability of each token


def rows_of(requests: Iterable[Request], encoding: Encoding) -> list[Row]:
    """Return the rows of requests, one for equal requests. Raise InvalidInput if the engine cannot serve one."""
    unique = {digest_of(request): request for request in requests}
    rows = []
    for request in unique.values():
        try:
            rows.append(row_of(request, encoding))
        except InvalidInput as error:
            start = shown(request.get("prompt") or request.get("messages"))
            raise InvalidInput(f"the request with the prompt {start} cannot be run: {error}") from error
    return rows


def run_batch(engine: RunsJobs, rows: Sequence[Row], folder: Path, options: Mapping[str, Any]) -> dict[str, Row]:
    """Run rows as one job, and return the rows of its output by the digests of their requests.

    The job's files are in `folder`, named by a digest of rows and options: the same call continues the job, or reads
    its results if it is finished.

    Args:
        options: options on which results depend.

    Raises:
        InvalidInput: the model has changed since the job began.
        FlexError: as for `Engine.run_job`.
    """
    decisive = json.dumps(options, sort_keys=True, default=str).encode()
    digest = hashlib.sha256(decisive + b"\n" + b"".join(map(encode_fields, rows))).hexdigest()[:16]
    job = RowsJob.named(folder / digest)
    folder.mkdir(parents=True, exist_ok=True)
    job.write(rows)
    try:
        engine.run_job(job.rows, job.results, PARAMS, score=True, retry_errors=True)
    except OtherJob as error:
        raise InvalidInput(f"{error}; to start over, delete the files {folder / digest}.*") from error
    return read_output(job.results)


def read_output(path: Path) -> dict[str, Row]:
    """Return the rows of an output by the digests of their requests. Raise InvalidInput if it is no such output."""
    found: dict[str, Row] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = _loaded(line, f"{path}, line {number}")
                if row is None:
                    continue
                if not isinstance(row, dict) or not isinstance(row.get(ID), str) or "error" not in row:
                    raise InvalidInput(
                        f"{path}, line {number}: there is no field {ID} or error; name the output of"
                        " flexengine run with rows of flexengine helm export"
                    )
                found[row[ID]] = row
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text: {error}") from error
    return found


def _loaded(line: str, place: str) -> Any:
    """Return the JSON value of a line; None for a blank line."""
    try:
        return json.loads(line) if line.strip() else None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{place} is not JSON ({json_fault(error)}); name the output of flexengine run") from error
