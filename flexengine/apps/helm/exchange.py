"""Requests of HELM as one job, which continues after an interruption, engines of deployments, by their arguments, and
HELM's files of requests and results (scenario_state.json)."""

import atexit
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flexengine.apps.helm.requests import ID, STATE, Encoding, digest_of, result_of, row_of
from flexengine.apps.lm_eval.arguments import engine_options
from flexengine.apps.rows_job import RowsJob
from flexengine.config import SamplingParams
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput, json_fault, json_kind, listed, shown
from flexengine.job.files import write_whole
from flexengine.job.results import encode_fields
from flexengine.job.same_job import OtherJob
from flexengine.lossy import Lossy

Request = Mapping[str, Any]
Row = dict[str, Any]
States = dict[Path, dict[str, Any]]  # scenario states of HELM, by their files
PARAMS = SamplingParams(logprobs=0)  # the log probability of each token
OWN = ("apply_chat_template", "end_of_text_token", "model_logprobs")  # arguments that are not the engine's
_DECIDE = ("model", "pretrained", "device", "dtype", "lossy", "allow", *(f.name for f in fields(Lossy)))
_ENGINES: dict[str, Engine] = {}  # of this process, open until its end, by their arguments


def engine_of(args: Mapping[str, Any]) -> Engine:
    """Return the engine of a deployment. No weights are read. Raise InvalidInput if an argument is unknown or wrong, or
    the checkpoint has no tokenizer, and FlexError as for `Engine`."""
    given = {name: value for name, value in args.items() if name not in OWN and value is not None}
    key = json.dumps(given, sort_keys=True, default=str)
    if key not in _ENGINES:
        device = given.pop("device", None)
        engine = Engine(**engine_options(given, device, "the deployment", OWN))
        atexit.register(engine.close)
        Encoding(engine.tokenizer)  # raises if there is no tokenizer
        _ENGINES[key] = engine
    return _ENGINES[key]


def encoding_of(args: Mapping[str, Any]) -> Encoding:
    """Return the encoding of a deployment. Raise as `engine_of`, and InvalidInput if there is no chat template though
    one is to be applied."""
    return Encoding(engine_of(args).tokenizer, args.get("apply_chat_template"), args.get("end_of_text_token"),
                       bool(args.get("model_logprobs")))  # fmt: skip


def decisive(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that results depend on: those of the model and its numbers, not those of memory."""
    return {name: args[name] for name in _DECIDE if args.get(name) is not None}


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


def run_batch(engine: Engine, rows: Sequence[Row], folder: Path, options: Mapping[str, Any]) -> dict[str, Row]:
    """Run rows as one job, and return the rows of its output by the digests of their requests. Raise InvalidInput if
    the model has changed since the job began, and FlexError as for `Engine.run_job`.

    The job's files are in `folder`, named by a digest of rows and options: the same call continues the job, or reads
    its results if it is finished. options: options on which results depend.
    """
    decisive = json.dumps(options, sort_keys=True, default=str).encode()
    digest = hashlib.sha256(decisive + b"\n" + b"".join(map(encode_fields, rows))).hexdigest()[:16]
    job = RowsJob.named(folder / digest)
    folder.mkdir(parents=True, exist_ok=True)
    job.write(rows)
    try:
        engine.run_job(job.rows, job.results, PARAMS, score=True, row_options=True, retry_errors=True)
    except OtherJob as error:
        raise InvalidInput(f"{error}; to start over, delete the files {folder / digest}.*") from error
    return read_output(job.results)


def read_output(path: Path) -> dict[str, Row]:
    """Return the rows of an output by the digests of their requests. Raise InvalidInput if it is no such output."""
    try:
        with path.open(encoding="utf-8") as file:
            rows = [_row(f"{path}, line {number}", line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text: {error}") from error
    return {row[ID]: row for row in rows}


def _row(place: str, line: str) -> Row:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{place} is not JSON ({json_fault(error)}); name the output of flexengine run") from error
    if not isinstance(row, dict) or not isinstance(row.get(ID), str) or "error" not in row:
        remedy = "name the output of flexengine run with rows of flexengine helm export"
        raise InvalidInput(f"{place}: there is no field {ID} or error; {remedy}")
    return row


def read_states(names: Sequence[str]) -> States:
    """Return scenario states of HELM. names: files, and folders in which files named STATE are searched, at any depth.
    Raise InvalidInput if a file cannot be read or is no scenario state, there is none, or their requests are for
    several deployments."""
    states: States = {}
    for name in map(Path, names):
        found = [name] if name.is_file() else sorted(name.rglob(STATE))
        if not found:
            remedy = "call helm-run with --dry-run first, and name the folder of its suite"
            raise InvalidInput(f"there is no {STATE} in {name}; {remedy}")
        states |= {path: _read(path) for path in found}
    models = sorted({str(request.get("model_deployment")) for request in requests_of(states)})
    if len(models) > 1:
        raise InvalidInput(f"the requests are for the deployments {listed(models, last=', ')}; name the files of one")
    return states


def requests_of(states: States) -> Iterator[dict[str, Any]]:
    """Yield all requests of states."""
    return (each["request"] for state in states.values() for each in state["request_states"])


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    states = state.get("request_states") if isinstance(state, dict) else None
    if not isinstance(states, list) or not all(
        isinstance(each, dict) and isinstance(each.get("request"), dict) for each in states
    ):
        raise InvalidInput(f"{path} is {json_kind(state)} without request_states; it must be a scenario state of HELM")
    return state


def export(states: States, encoding: Encoding, output: Path) -> int:
    """Write the rows of all requests, one for equal requests, and return their number. Raise InvalidInput if the engine
    cannot serve a request, or there is none."""
    rows = rows_of(requests_of(states), encoding)
    if not rows:
        raise InvalidInput(f"there are no requests in {', '.join(map(str, states))}")
    write_whole(output, b"".join(map(encode_fields, rows)))
    return len(rows)


def complete(states: States, results: Path, encoding: Encoding) -> tuple[int, int]:
    """Write results into the files of the requests. Return how many requests have a result, and how many of these
    failed. results: output of a job with rows that `export` wrote. Raise InvalidInput if a request has no result, one
    without log probabilities, or that of another row; no file is changed then."""
    output, success = read_output(results), list[bool]()
    for path, state in states.items():
        for each in state["request_states"]:
            each["result"] = _result(each["request"], output, encoding, path, results)
            success.append(each["result"]["success"])
    for path, state in states.items():
        write_whole(path, json.dumps(state, indent=2).encode())
    return len(success), success.count(False)


def _result(
    request: dict[str, Any], output: dict[str, Row], encoding: Encoding, path: Path, results: Path
) -> dict[str, Any]:
    row = output.get(digest_of(request))
    if row is None:
        fault = f"the request with the prompt {shown(request.get('prompt'))} of {path} has no result in {results}"
        raise InvalidInput(f"{fault}; export its suite again, and run the rows")
    try:
        for name, value in (row_of(request, encoding) if row["error"] is None else {}).items():
            if row.get(name) != value:
                fault = f"a row has {name} {shown(row.get(name))} where export writes {shown(value)}"
                raise InvalidInput(f"{fault}; give import the model, the options and the files of the export")
        return result_of(request, row, encoding)
    except InvalidInput as error:
        raise InvalidInput(f"{results}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # an edited row
        fault = f"the row of the prompt {shown(request.get('prompt'))} is no output of flexengine run"
        raise InvalidInput(f"{results}: {fault} ({type(error).__name__}: {error}); run the rows again") from error
