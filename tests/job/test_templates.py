"""Chat templates in their own process: the text is that of transformers, and limits end one row only."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.job import templates
from flexengine.job.chats import chat_fault
from flexengine.job.rows import Request, Row, encode
from flexengine.job.templates import TemplateFault, chat_text, has_template
from tests.helpers.inputs import make_tokenizer

CHAT = [{"role": "system", "content": "world"}, {"role": "user", "content": " hello \U0001f600 "}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SOUND = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def tokenizer_of(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def error_of(template: str) -> str:
    row = encode(Row(0, 1, {"messages": CHAT}), tokenizer_of(template), 100, SamplingParams(max_tokens=1))
    assert isinstance(row, Row)
    return str(row.error)


@pytest.mark.parametrize("template", [
    SOUND, "{{ unk_token }}{{ messages | tojson(indent=1) }}{{ tools }}{{ add_generation_prompt }}{{ thinking }}",
    {"default": SOUND, "tool_use": "{{ tools }}"},
    "{% for m in messages %}\n{% if loop.last %}{{ m.content | trim }}{% break %}{% endif %}\n  {{ m }}\n{% endfor %}",
])  # fmt: skip
@pytest.mark.parametrize("given", [
    {"add_generation_prompt": True}, {"tools": TOOLS}, {"continue_final_message": True, "thinking": False},
])  # fmt: skip
def test_the_text_is_that_of_transformers(template: Any, given: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(template)
    assert has_template(tokenizer)
    try:
        expected = tokenizer.apply_chat_template(CHAT, tokenize=False, **given)
    except ValueError:
        with pytest.raises(TemplateFault, match="continue_final_message"):
            chat_text(tokenizer, CHAT, variables=given)
        return
    variables = {name: value for name, value in given.items() if name != "tools"}
    assert chat_text(tokenizer, CHAT, given.get("tools"), variables=variables) == expected


def test_random_choices_depend_on_the_conversation_alone() -> None:
    """So that a resumed job has the prompts that it had before."""
    tokenizer = tokenizer_of("{{ range(10 ** 5) | random }} {{ lipsum(n=1, html=false) }}{{ messages[-1].content }}")
    first, other = (chat_text(tokenizer, [{"role": "user", "content": text}]) for text in ("a", "b"))
    assert chat_text(tokenizer, [{"role": "user", "content": "a"}]) == first
    assert first[:-1] != other[:-1]


def test_any_name_may_be_a_variable() -> None:
    """Also the names of parameters of functions here."""
    names = ("now", "tokenizer", "variables", "template", "args", "library", "template_kwargs", "cls")
    tokenizer = tokenizer_of("{{ [" + ", ".join(names) + "] | join(' ') }}")
    variables = {"chat_template_kwargs": {name: name for name in names}}
    row = encode(Row(0, 1, {"messages": CHAT, **variables}), tokenizer, 100, SamplingParams(max_tokens=1))
    assert isinstance(row, Request), row.error
    assert chat_text(tokenizer, CHAT, variables=variables["chat_template_kwargs"]) == " ".join(names)


def test_token_ids_are_those_of_transformers() -> None:
    tokenizer = tokenizer_of(SOUND)
    found = encode(Row(0, 1, {"messages": CHAT}), tokenizer, 100, SamplingParams(max_tokens=1))
    assert isinstance(found, Request)
    assert list(found.prompt_ids) == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_templates_read_the_given_time() -> None:
    tokenizer = tokenizer_of("{{ strftime_now('%d %b %Y %H') }}")
    assert chat_text(tokenizer, CHAT, now=datetime(2019, 7, 4, 5)) == "04 Jul 2019 05"
    assert chat_text(tokenizer, CHAT, now=datetime(2020, 1, 1)) == "01 Jan 2020 00"


@pytest.mark.parametrize("template", [
    "{{ 'a' * 10**10 }}", "{{ 'a'.ljust(10**10) }}", "{{ ('%' ~ '1000000000d') % 1 }}",
    "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{{ range(99999) | list | tojson(indent=10**6) }}",
])  # fmt: skip
def test_memory_is_limited(template: str) -> None:
    assert "takes more than the 64 MiB of memory" in error_of(template)
    assert chat_text(tokenizer_of(SOUND), CHAT[:1]) == "system : world "


@pytest.mark.parametrize("template", [ENDLESS, "{{ lipsum(n=10**7) }}", "{{ 10**(5*10**7) > 1 }}"])
def test_time_is_limited(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single step that cannot be interrupted, the last one, is ended by the kernel."""
    chat_text(tokenizer_of(SOUND), CHAT[:1])  # the process has imported its libraries
    with monkeypatch.context() as patch:
        patch.setattr(templates, "CPU_SECONDS", 0.1)
        assert "s of processor time" in error_of(template)
        patch.setattr(templates._RENDERER, "_ask", lambda *_: pytest.fail("it was tried again"))
        assert "even for a short message" in error_of(template)
    assert chat_text(tokenizer_of(SOUND), CHAT[:1]) == "system : world "


def test_a_row_that_takes_long_does_not_condemn_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}" + SOUND)
    chat_text(tokenizer, CHAT[:1])  # the process has imported its libraries
    monkeypatch.setattr(templates, "CPU_SECONDS", 0.5)
    with pytest.raises(TemplateFault, match="shorten the row"):
        chat_text(tokenizer, CHAT)
    assert chat_text(tokenizer, CHAT[:1]) == "system : world "


def test_errors_have_the_names_that_the_template_gave() -> None:
    assert "messages cannot be tokenised: TemplateError: no 3" in error_of("{{ raise_exception('no 3') }}")
    fault = "cannot be tokenised: the chat template, or the row, is nested too deeply; use"
    assert fault in error_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    fault = chat_fault(tokenizer_of("{{ raise_exception('no') }}"))
    assert fault == "the model's chat template refuses a user's message (TemplateError: no)"
    assert len(error_of("{{ raise_exception('a' * 10**6) }}")) < 2000
    with pytest.raises(TemplateFault):
        chat_text(tokenizer_of("{{ 1 / 0 }}"), CHAT)


def test_large_rows_have_memory() -> None:
    text = "\u00e9" * 20_000_000
    found = chat_text(tokenizer_of("{{ messages[0].content | trim }}"), [{"role": "user", "content": text}])
    assert found == text


def test_an_interrupted_row_leaves_no_reply_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_text(tokenizer_of("{{ 'first' }}"), CHAT) == "first"
    process = templates._RENDERER._process
    assert process is not None

    class Interrupted:
        def read(self, size: int) -> bytes:
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        chat_text(tokenizer_of("{{ 'second' }}"), CHAT)
    assert chat_text(tokenizer_of("{{ 'third' }}"), CHAT) == "third"


def test_the_process_is_started_again_and_ends_with_this_one() -> None:
    assert chat_text(tokenizer_of("{{ 'a' }}"), CHAT) == "a"
    process = templates._RENDERER._process
    assert process is not None
    assert Path(f"/proc/{process.pid}/stat").read_text().split()[5] == str(process.pid)  # no Ctrl-C of the terminal
    process.kill()
    process.wait()
    assert chat_text(tokenizer_of("{{ 'c' }}"), CHAT) == "c"
    last = templates._RENDERER._process
    assert last is not None
    assert last.stdin is not None
    last.stdin.close()
    assert last.wait(60) == 0
    templates._RENDERER.forget()


def test_a_forked_process_has_its_own() -> None:
    assert chat_text(tokenizer_of("{{ 'a' }}"), CHAT) == "a"
    templates._RENDERER.forget()  # called in a child
    assert chat_text(tokenizer_of("{{ 'b' }}"), CHAT) == "b"


def test_a_forked_process_does_not_keep_the_one_of_its_parent() -> None:
    """It ends when no process has the other end of its input."""
    assert chat_text(tokenizer_of("{{ 'a' }}"), CHAT) == "a"
    process = templates._RENDERER._process
    assert process is not None
    templates._RENDERER.forget()  # called in a child
    assert process.wait(60) == 0


def renderer_of(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> templates._Renderer:
    """Return a renderer whose process is a shell script."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return templates._Renderer()


def test_a_reply_that_was_cut_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header says 100 bytes, 5 follow."""
    script = "head -c 16 > /dev/null; printf 't\\144\\0\\0\\0\\0\\0\\0\\0short'; exit 3"
    renderer = renderer_of(script, tmp_path, monkeypatch)
    with pytest.raises(TemplateFault, match="ended with exit status 3"):
        renderer.text("a", {}, datetime.now())


def test_a_process_that_cannot_start_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"echo x >> {tmp_path}/starts; echo Traceback >&2; echo 'ImportError: no jinja2' >&2; exit 1"
    renderer = renderer_of(script, tmp_path, monkeypatch)
    for _ in range(3):
        with pytest.raises(TemplateFault, match="ended with exit status 1: ImportError: no jinja2"):
            renderer.text("a", {}, datetime.now())
    assert (tmp_path / "starts").read_text() == "x\n"


def test_an_error_in_the_text_of_a_template_names_file_and_line(tmp_path: Path) -> None:
    template = "a\n{% for m in messages %}\n{{ m[ }}\n{% endfor %}"
    assert "TemplateSyntaxError: the chat template, line 3: unexpected '}'" in error_of(template)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).touch()
        tokenizer = tokenizer_of(template)
        tokenizer.name_or_path = str(tmp_path)
        with pytest.raises(TemplateFault, match=rf"^{file}, line 3: unexpected"):
            chat_text(tokenizer, CHAT)
