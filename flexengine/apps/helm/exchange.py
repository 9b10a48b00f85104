"""HELM's files of requests (scenario_state.json) as rows of a job, and the job's results in these files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexengine.apps.helm.batch import Row, read_output, rows_of
from flexengine.apps.helm.requests import STATE, Encoding, digest_of, row_of
from flexengine.apps.helm.results import result_of
from flexengine.config import json_kind, shown
from flexengine.errors import InvalidInput
from flexengine.job.results import encode_fields
from flexengine.job.whole_file import write_whole


class States:
    """Scenario states of HELM.

    Attributes:
        by_file: the content of each file.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Read scenario states.

        Args:
            names: files, and folders in which files named STATE are searched, at any depth.

        Raises:
            InvalidInput: a file cannot be read or is no scenario state, there is none, or their requests are for
                several deployments.
        """
        self.by_file = {path: _read(path) for name in names for path in _files(Path(name))}
        models = sorted({str(request.get("model_deployment")) for request in self.requests()})
        if len(models) > 1:
            raise InvalidInput(f"the requests are for the deployments {', '.join(models)}; name the files of one")

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield all requests."""
        return (each["request"] for state in self.by_file.values() for each in state["request_states"])


def _files(name: Path) -> list[Path]:
    found = [name] if name.is_file() else sorted(name.rglob(STATE))
    if not found:
        raise InvalidInput(
            f"there is no {STATE} in {name}; call helm-run with --dry-run first, and name the folder of its suite"
        )
    return found


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
    """Write the rows of all requests, one for equal requests, and return their number.

    Raises:
        InvalidInput: the engine cannot serve a request, or there is none.
    """
    rows = rows_of(states.requests(), encoding)
    if not rows:
        raise InvalidInput(f"there are no requests in {', '.join(map(str, states.by_file))}")
    write_whole(output, b"".join(map(encode_fields, rows)))
    return len(rows)


def complete(states: States, results: Path, encoding: Encoding) -> tuple[int, int]:
    """Write results into the files of the requests. Return how many requests have a result, and how many of these
    failed.

    Args:
        results: output of a job with rows that `export` wrote.
        encoding: that of the export.

    Raises:
        InvalidInput: a request has no result, one without log probabilities, or that of another row; no file is changed
            then.
    """
    output, failed, done = read_output(results), 0, 0
    for path, state in states.by_file.items():
        for each in state["request_states"]:
            each["result"] = _result(each["request"], output, encoding, path, results)
            failed += not each["result"]["success"]
            done += 1
    for path, state in states.by_file.items():
        write_whole(path, json.dumps(state, indent=2).encode())
    return done, failed


def _result(
    request: dict[str, Any], output: dict[str, Row], encoding: Encoding, path: Path, results: Path
) -> dict[str, Any]:
    row = output.get(digest_of(request))
    if row is None:
        raise InvalidInput(
            f"the request with the prompt {shown(request.get('prompt'))} of {path} has no result in"
            f" {results}; export its suite again, and run the rows"
        )
    try:
        if row["error"] is None:
            _check_row(row, row_of(request, encoding))
        return result_of(request, row, encoding)
    except InvalidInput as error:
        raise InvalidInput(f"{results}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # an edited row
        raise InvalidInput(
            f"{results}: the row of the prompt {shown(request.get('prompt'))} is no output of flexengine"
            f" run ({type(error).__name__}: {error}); run the rows again"
        ) from error


def _check_row(row: Row, own: Row) -> None:
    """Raise InvalidInput if a row of the output is not that of a request.

    Args:
        row: row of the output.
        own: the row of the request, as `export` writes it.
    """
    for name, value in own.items():
        if row.get(name) != value:
            raise InvalidInput(
                f"a row has {name} {shown(row.get(name))} where export writes {shown(value)}; give"
                " import the model, the options and the files of the export"
            )
