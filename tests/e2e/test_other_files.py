"""Files as other programs write them, through the command line: rows are those of an independent reader, and tokens
those of transformers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexengine.shell.commands import run
from tests.helpers.speaker import make_speaker

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or m.role == 'user' %};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot>"
    "{% if enable_thinking is defined and not enable_thinking %}..{% endif %}{% endif %}"
)
ASK, BEGUN = {"role": "user", "content": "the river"}, {"role": "assistant", "content": "it is"}
NEW = 6


class Speaker:
    """A small model with a chat template, and what transformers says of a prompt."""

    def __init__(self, directory: Path) -> None:
        make_speaker(directory, TEMPLATE)
        self.directory, self.tokenizer = directory, AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def chat(self, messages: list[dict[str, str]], **template: Any) -> list[int]:
        """Return the greedy tokens after a chat."""
        options = {"add_generation_prompt": True} | template
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.text(text, add_special_tokens=False)

    @torch.no_grad()
    def text(self, text: str, **options: Any) -> list[int]:
        """Return the greedy tokens after a text."""
        ids = torch.tensor([self.tokenizer(text, **options)["input_ids"]])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        return list(made[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(tmp_path_factory.mktemp("speaker"))


def rows_of(speaker: Speaker, file: Path, *options: str) -> list[dict[str, Any]]:
    """Return the rows of a job's output."""
    output = file.with_name("out.jsonl")
    more = ("--max-tokens", str(NEW), "--ignore-eos", *options)
    run.main([str(file), "-m", str(speaker.directory), "-o", str(output), "--device", "cpu", "-q", *more])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_cell_of_many_lines(speaker: Speaker, tmp_path: Path) -> None:
    log = "".join(f'2024-01-01 10:{i % 60:02}, started "job" {i}\n' for i in range(1200))
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "prompt"], ["1", "a b c"], ["2", log], ["3", "d e f"]])
    rows = rows_of(speaker, tmp_path / "in.csv")
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert [rows[i]["token_ids"] for i in (0, 2)] == [speaker.text("a b c"), speaker.text("d e f")]
    assert "context" in rows[1]["error"]  # 40 kB are more tokens than the model's context


def test_fields_that_change_a_chat(speaker: Speaker, tmp_path: Path) -> None:
    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    given: list[dict[str, Any]] = [
        {"messages": [ASK]}, {"messages": [ASK], **silent}, {"messages": [ASK, BEGUN]},
        {"messages": [ASK, BEGUN], **more},
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    expected = [
        speaker.chat([ASK]), speaker.chat([ASK], enable_thinking=False), speaker.chat([ASK, BEGUN]),
        speaker.chat([ASK, BEGUN], **more),
    ]  # fmt: skip
    assert len({*map(tuple, expected)}) == 4
    assert [row["token_ids"] for row in rows_of(speaker, tmp_path / "in.jsonl")] == expected
    silenced = rows_of(speaker, tmp_path / "in.jsonl", "--no-thinking", "--limit", "1", "--restart")
    assert [row["token_ids"] for row in silenced] == expected[1:2]
    body = {"model": "x", "messages": [ASK], "max_tokens": NEW, **silent}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    (answer,) = rows_of(speaker, tmp_path / "batch.jsonl", "--restart")
    said = answer["response"]["body"]["choices"][0]["message"]["content"]
    assert said == speaker.tokenizer.decode(expected[1], skip_special_tokens=True)


def test_a_context_that_yarn_extends(speaker: Speaker, tmp_path: Path) -> None:
    config = json.loads((speaker.directory / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    for file in speaker.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "rope_parameters": yarn}))
    extended = Speaker.__new__(Speaker)
    extended.directory, extended.tokenizer = tmp_path, speaker.tokenizer
    extended.model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = "abcdefghij" * 12
    assert 64 < len(speaker.tokenizer(prompt)["input_ids"]) < 250
    (tmp_path / "in.txt").write_text(prompt + "\n")
    (row,) = rows_of(extended, tmp_path / "in.txt")
    assert row["token_ids"] == extended.text(prompt) != speaker.text(prompt)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_prompt_that_is_a_chat(speaker: Speaker, tmp_path: Path, ending: str) -> None:
    given = [{"prompt": [ASK]}, {"prompt": [ASK, BEGUN, ASK]}]
    file = tmp_path / f"in.{ending}"
    if ending == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(given), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in given))
    expected = [speaker.chat(row["prompt"]) for row in given]
    assert [row["token_ids"] for row in rows_of(speaker, file)] == expected


def test_rows_and_batch_lines_of_other_programs(speaker: Speaker, tmp_path: Path) -> None:
    plain = '{"prompt":"the river","max_tokens":6.0}\n{"prompt":"the river","top_k":-1,"seed":7.0,"note":NaN}\n'
    (tmp_path / "in.jsonl").write_text(plain)
    expected = speaker.text("the river")
    rows = rows_of(speaker, tmp_path / "in.jsonl")
    assert [row["token_ids"] for row in rows] == [expected, expected]
    assert rows[1]["note"] is None
    same = {"skip_special_tokens": True, "min_tokens": 0, "add_generation_prompt": True, "top_logprobs": 0}
    body = {"model": "x", "messages": [ASK], "max_tokens": NEW, **same}
    line = {"custom_id": "azure", "method": "POST", "url": "/chat/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    (answer,) = rows_of(speaker, tmp_path / "batch.jsonl", "--restart")
    said = answer["response"]["body"]["choices"][0]["message"]["content"]
    assert said == speaker.tokenizer.decode(speaker.chat([ASK]), skip_special_tokens=True)
