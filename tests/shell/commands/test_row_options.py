"""--template, --delimiter and --row-options of run, in a job that is interrupted. Tokens are judged by transformers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from tests.helpers.families import reference
from tests.helpers.job import Job
from tests.helpers.speaker import make_speaker

TABLE = "index;temperature;error;max_token;frage\r\n7;25.3;;1;Schön?\r\n5;-3;x;2;\r\n3;1;;3;Wer?\r\n"
TOLD = (
    "the output has the input's error and index as input_error and input_index, beside its own fields",
    "columns max_token (did you mean max_tokens?) and temperature are data; with --row-options (row_options=True in"
    " Python) columns named like options set them for their rows",
)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_export_of_excel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_speaker(tmp_path)
    job = Job(tmp_path, SimpleNamespace(directory=tmp_path), capsys)
    job.input = tmp_path / "in.csv"
    job.input.write_bytes(TABLE.encode("utf-8-sig"))
    options = ("--delimiter", ";", "--template", "{{x}} {frage}", "--chat")
    assert job(*options) == 1
    assert [job.err.count(text) for text in TOLD] == [1, 1]
    assert job.err.count("max_token ") == 1
    first, empty, last = job.rows
    assert [row["input_index"] for row in job.rows] == ["7", "5", "3"]
    assert [row["temperature"] for row in job.rows] == ["25.3", "-3", "1"]
    assert [row["input_error"] for row in job.rows] == ["", "x", ""]
    assert empty["error"] == "line 3: column frage is empty; it must be text or a number"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [[{"role": "user", "content": f"{{x}} {text}"}] for text in ("Schön?", "Wer?")]
    ids = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in messages]
    assert [first["token_ids"], last["token_ids"]] == reference(model, ids)

    whole, job.output = job.output.read_bytes(), tmp_path / "again.jsonl"
    assert job(*options, "--limit", "1") == 0
    assert job(*options) == 1
    assert "1 of 3 rows were done before" in job.err
    assert job.output.read_bytes() == whole
    assert job(*options, "--row-options") == 2
    assert "row_options: was absent, now true" in job.err
    assert job("--delimiter", ";", "--template", "{fragen}") == 2
    assert "--template names the column 'fragen', which no row has; choose from index, temperature" in job.err
    job.output = tmp_path / "options.jsonl"
    assert job(*options, "--row-options") == 1
    assert job.err.count("field max_token is data; did you mean max_tokens?") == 1
    assert job.rows[1]["error"] == "line 3: column frage is empty; it must be text or a number"
