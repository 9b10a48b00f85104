"""--chat of run and plan, and chat=True of Engine.run_job. Tokens are judged by transformers' apply_chat_template and
generate."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from flexengine import Engine, InvalidInput, SamplingParams
from flexengine.activity import reporting
from flexengine.config import Result
from flexengine.engine.file_job import check_rows
from flexengine.engine.rates import RateStore
from flexengine.job.inputs import InputRows
from flexengine.shell.commands import plan
from flexengine.shell.commands.messages import RowNotes
from flexengine.shell.commands.run import parser as run_parser
from flexengine.shell.commands.sampling_options import sampling_of
from tests.helpers.explained import CPU
from tests.helpers.families import NEW, reference
from tests.helpers.inputs import make_tokenizer, written
from tests.helpers.job import FIELDS, Job
from tests.helpers.resuming import journal_of, records
from tests.helpers.speaker import make_speaker

QUESTIONS = ("why?", "who is it?")  # short prompts, in the column `question` of TABLE
TABLE = "question,id\n" + "".join(f"{question},{i}\n" for i, question in enumerate(QUESTIONS))
COLUMN = ("--prompt-column", "question")
PARAMS = SamplingParams(NEW, ignore_eos=True)
HINT = "--chat runs each prompt as a user's message, through the model's chat template"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with a chat template, in a directory and in transformers."""
    directory = tmp_path_factory.mktemp("speaker")
    model = make_speaker(directory)
    return SimpleNamespace(directory=directory, model=model, tokenizer=AutoTokenizer.from_pretrained(directory))


@pytest.fixture
def asked(speaker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """A job of a table of questions."""
    made = Job(tmp_path, speaker, capsys)
    made.input = tmp_path / "in.csv"
    made.input.write_text(TABLE)
    return made


def templated(speaker: Any, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    ids: list[int] = speaker.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more)["input_ids"]
    return ids


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_column_of_questions(asked: Job, speaker: Any) -> None:
    """Tokens are those of transformers, and a row keeps its own fields."""
    assert asked("--chat", *COLUMN) == 0, asked.err
    ids = [templated(speaker, user(question)) for question in QUESTIONS]
    assert [row["token_ids"] for row in asked.rows] == reference(speaker.model, ids)
    assert [row["prompt_tokens"] for row in asked.rows] == list(map(len, ids))
    for i, (row, question) in enumerate(zip(asked.rows, QUESTIONS, strict=True)):
        assert list(row) == ["question", "id", *FIELDS]
        assert (row["question"], row["id"]) == (question, str(i))
    assert HINT not in asked.err


def test_only_prompts_become_messages(asked: Job, speaker: Any) -> None:
    """Messages, token ids and OpenAI batch lines are run as without --chat. Sampling fields and tools count."""
    longer = [*user("hi"), {"role": "bot", "content": "yes"}, *user("no")]
    body = {"prompt": "and", "max_tokens": NEW}
    asked.input = asked.folder / "in.jsonl"
    asked.write([
        {"prompt": "why?", "max_tokens": 2}, {"prompt": "why?", "tools": [{"name": "f"}]}, {"messages": longer},
        {"prompt_token_ids": [5, 6, 7]}, {"prompt": 5},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": body},
    ])  # fmt: skip
    assert asked("--chat") == 1
    *plain, wrong, batch = asked.rows
    ids = [templated(speaker, user("why?")), templated(speaker, user("why?"), tools=[{"name": "f"}]),
           templated(speaker, longer), [5, 6, 7]]  # fmt: skip
    first, *others = reference(speaker.model, ids)
    assert [row["token_ids"] for row in plain] == [first[:2], *others]
    assert wrong["error"] == "line 5: prompt is a number; it must be a string"
    (said,) = reference(speaker.model, [speaker.tokenizer("and")["input_ids"]])
    assert batch["response"]["body"]["choices"][0]["text"] == speaker.tokenizer.decode(said, skip_special_tokens=True)


# A job that goes on.


def in_python(job: Job, **more: Any) -> None:
    with Engine(job.family.directory) as engine:
        engine.run_job(job.input, job.output, PARAMS, prompt_column="question", **more)


@pytest.mark.parametrize("begins", ["the command", "Python"])
def test_one_goes_on_with_the_others_job(asked: Job, begins: str) -> None:
    first = asked.output
    asked.output = asked.folder / "undisturbed.jsonl"
    assert asked("--chat", *COLUMN) == 0
    expected, asked.output = asked.output.read_bytes(), first
    if begins == "Python":
        in_python(asked, chat=True, limit=1)
        assert asked("--chat", *COLUMN) == 0
    else:
        assert asked("--chat", *COLUMN, "--limit", "1") == 0
        in_python(asked, chat=True)
    assert asked.output.read_bytes() == expected
    assert records(asked)[0]["manifest"]["chat"] is True


@pytest.mark.parametrize(("began", "now"), [(True, False), (False, True)])
def test_a_job_keeps_its_chat(asked: Job, began: bool, now: bool) -> None:
    """A manifest without the option is as before there was one."""
    assert asked(*COLUMN, *(["--chat"] if began else [])) == 0
    assert ("chat" in records(asked)[0]["manifest"]) == began
    before = asked.output.read_bytes()
    assert asked(*COLUMN, *(["--chat"] if now else [])) == 2
    assert f"chat: was {str(began).lower()}, now {str(now).lower()}. Give the same options" in asked.err
    with pytest.raises(InvalidInput, match="chat: was "):
        in_python(asked, chat=now)
    assert asked.output.read_bytes() == before


# Refusals.


def test_a_model_without_a_template(families: Any, asked: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The job is refused once, before the files of the model are hashed."""
    no_template, strict = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("strict")
    make_speaker(no_template, None)
    make_speaker(strict, "{{ raise_exception('a system message comes first') }}")
    for directory, reason in (
        (families("llama").directory, "the checkpoint has no tokenizer"),
        (no_template, "the model has no chat template"),
        (strict, "the model's chat template refuses a user's message (TemplateError: a system message comes first)"),
    ):
        message = (f"runs prompts as a user's messages, but {reason}; leave it out, or"
                   " take an instruction-tuned")  # fmt: skip
        for more in ((), ("--dry-run",)):
            assert asked("--chat", *COLUMN, "--model", str(directory), *more) == 2
            assert asked.err.count("\n") == 1
            assert f"--chat (chat=True in Python) {message}" in asked.err
        assert not journal_of(asked).exists()
        with Engine(directory) as engine, pytest.raises(InvalidInput) as caught:
            engine.run_job(asked.input, asked.output, prompt_column="question", chat=True)
        assert f"chat=True {message}" in str(caught.value)


def test_chat_is_true_or_false(asked: Job) -> None:
    with pytest.raises(InvalidInput, match="chat is 'yes'; it must be True or False"):
        in_python(asked, chat="yes")


# Plans.


def test_a_plan_counts_the_tokens_of_the_template(asked: Job, speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RateStore, "measure_quickly", lambda *_: False)  # measures nothing
    least, most = sorted(len(templated(speaker, user(question))) for question in QUESTIONS)
    rows = f"2 sequences of {least} to {most} prompt tokens"
    assert asked("--chat", *COLUMN, "--dry-run") == 0
    assert rows in asked.out
    config, hardware = asked.folder / "job.toml", asked.folder / "hw.json"
    config.write_text(f'chat = true\nprompt-column = "question"\nmax-tokens = {NEW}\n')
    hardware.write_text(json.dumps(CPU.to_json()))
    words = [str(speaker.directory), "--hardware", str(hardware)]
    assert plan.main([*words, "--input", str(asked.input), "--config", str(config)]) == 0
    assert rows in asked.capsys.readouterr().out
    assert plan.main([*words, "--chat"]) == 2
    assert "--chat needs the rows of a file; give --input, too" in asked.capsys.readouterr().err


# The hint.


def hint_of(path: Path, texts: list[str | None], template: bool = True, **options: Any) -> str:
    counts = RowNotes()
    for i, text in enumerate(texts):
        counts.take(Result(i, text, error=None if text is not None else "bad"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if template else None
    with InputRows(path, **options) as rows:
        return counts.hint(rows, tokenizer)


def test_a_hint_if_half_of_the_texts_are_empty(tmp_path: Path) -> None:
    path = written(tmp_path, b"a\nb\nc\nd\n", "in.txt")
    assert hint_of(path, ["", "x", "", "y"]) == f"2 of 4 texts are empty; {HINT}"
    assert hint_of(path, [""]) == f"1 of 1 text is empty; {HINT}"
    for texts in (["", "x", "y"], ["x"], [], ["", None, None], [None]):
        assert hint_of(path, texts) == ""
    assert hint_of(path, [""], chat=True) == hint_of(path, [""], template=False) == ""


def test_no_hint_if_prompts_are_not_plain(tmp_path: Path) -> None:
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    for other in ({"messages": user("a")}, {"prompt_token_ids": [1]}, batch):
        path = written(tmp_path, "\n".join(map(json.dumps, [{"prompt": "a"}, other])).encode())
        assert hint_of(path, ["", ""]) == ""
    assert hint_of(written(tmp_path, b'{"prompt": "a"}\nbroken\n'), ["", None]) != ""


def test_the_command_prints_it(asked: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexengine.model.tokenizer.Stops.text", lambda *_: "")
    assert asked(*COLUMN) == 0
    assert asked.err.splitlines()[-1] == f"flexengine: 2 of 2 texts are empty; {HINT}"
    for more in ((), ("-q", "--restart"), ("--chat", "--restart")):  # the first run finds that the job is finished
        assert asked(*COLUMN, *more) == 0
        assert HINT not in asked.err


def test_options_for_sampling_and_templates() -> None:
    words = ["in.csv", "--no-thinking", "--chat-template-kwargs", '{"a": 1}', "--logit-bias", '{"5": -1}', "--bad-word",
             "x", "--bad-word", "y z", "--min-tokens", "3", "--continue-final-message"]  # fmt: skip
    assert sampling_of(run_parser().parse_args(words)) == SamplingParams(
        chat_template_kwargs={"enable_thinking": False, "a": 1}, logit_bias={5: -1.0}, bad_words=("x", "y z"),
        min_tokens=3, continue_final_message=True,
    )  # fmt: skip
    assert sampling_of(run_parser().parse_args(["in.csv"])) == SamplingParams()
    words = ["in.csv", "--no-thinking", "--chat-template-kwargs"]
    for value in ("false", "null"):
        agreeing = sampling_of(run_parser().parse_args([*words, f'{{"enable_thinking": {value}}}']))
        assert agreeing.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(InvalidInput, match="contradicts enable_thinking true of --chat-template-kwargs; remove"):
        sampling_of(run_parser().parse_args([*words, '{"enable_thinking": true}']))


@pytest.mark.parametrize("text", ["{", "5"])
def test_an_option_that_is_no_json_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_parser().parse_args(["in.csv", "--logit-bias", text])
    assert "JSON" in capsys.readouterr().err


def test_variables_that_no_row_or_template_reads(asked: Job, speaker: Any) -> None:
    """Without --chat the job is refused; a template without the variable is named, once, and the texts are as ever."""
    assert asked("--no-thinking", *COLUMN) == 2
    assert "chat_template_kwargs" in asked.err
    assert "give --chat (chat=True in Python)" in asked.err
    assert asked("--no-thinking", "--chat", *COLUMN) == 0, asked.err
    assert asked.err.count("the model's chat template does not use enable_thinking, so it has no effect") == 1
    ids = [templated(speaker, user(question)) for question in QUESTIONS]
    assert [row["token_ids"] for row in asked.rows] == reference(speaker.model, ids)


def test_batch_lines_without_max_tokens_are_counted(tmp_path: Path) -> None:
    def line(name: str, **more: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", **more}}

    lines = [line("a"), line("b", max_tokens=None), line("c", max_tokens=5), line("d", max_completion_tokens=5),
             line("e", web_search_options={}), {"prompt": "a"}]  # fmt: skip
    rows = InputRows(written(tmp_path, "\n".join(map(json.dumps, lines)).encode()))
    assert rows.scan().unlimited == 2
    said = list[str]()
    with reporting(lambda event: said.append(str(event))):
        check_rows(rows, SamplingParams())
        check_rows(rows, SamplingParams(max_tokens=64))
    assert len([text for text in said if "2 batch lines have no max_tokens: texts end at 128 tokens" in text]) == 1
