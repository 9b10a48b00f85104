"""Messages and tools, judged by transformers' own apply_chat_template."""

import re
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.openai import CHAT as OPENAI_CHAT
from flexengine.job.openai import request_of
from flexengine.job.rows import Request, Row, encode
from tests.helpers.inputs import batch_fields

WORDS = ["<unk>", "user", "assistant", "tool", ":", "a", "b", "call", "f", "x", "1", "with", "tools", "id"]
PLAIN = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}assistant :"
CALLING = (
    "{% if tools %}with tools {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }} : "
    "{% if m.content is defined %}{{ m.content }} {% endif %}{% if m.tool_call_id %}id {{ m.tool_call_id }} {% endif %}"
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {% for k, v in c.function.arguments.items() %}"
    "{{ k }} {{ v }} {% endfor %}{% endfor %}{% endfor %}assistant :"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ASKED = [{"role": "user", "content": "a"}]
CHAT = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "b"}]  # fmt: skip


def tokenizer(template=CALLING) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=template)


def run(fields, template=CALLING):
    return encode(Row(0, 4, fields), tokenizer(template), 64, SamplingParams(max_tokens=4))


def error_of(fields, template=CALLING) -> str:
    row = run(fields, template)
    assert isinstance(row, Row), row
    assert row.error.startswith("line 4: ")
    return row.error


def words(request) -> str:
    assert isinstance(request, Request), request.error
    return " ".join(WORDS[i] for i in request.prompt_ids)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tool_calls_and_tools_are_those_of_transformers(tools):
    row = {"messages": CHAT, **({"tools": tools} if tools else {})}
    expected = tokenizer().apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
    assert list(run(row).prompt_ids) == expected
    called = "user : a assistant : call f x 1 tool : b id 1 assistant :"
    assert words(run(row)) == ("with tools f " if tools else "") + called


YEAR = "{{ {'26 Jul 2024': 'a', '26 Jul 1999': 'b'}.get(strftime_now('%d %b %Y'), 'x') }}"


@pytest.mark.parametrize("templates", [YEAR, {"default": "f", "tool_use": YEAR}])
def test_the_clock_of_a_template_is_that_of_the_job(templates):
    made = tokenizer(templates)
    row = Row(0, 4, {"messages": ASKED, **({} if isinstance(templates, str) else {"tools": TOOLS})})
    if "tools" in row.fields:  # else the tools are refused as unused
        made.chat_template["tool_use"] += "{% if tools %} tools{% endif %}"
    greedy = SamplingParams(max_tokens=4)
    said = [words(encode(row, made, 64, greedy, now=datetime(year, 7, 26))) for year in (2024, 1999, 2026)]
    assert [each.split()[0] for each in said] == ["a", "b", "x"]


def test_text_parts_are_joined_and_null_fields_left_out():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = "{{ messages[0].content | length }} {{ messages[0].name is defined }}"
    core = tokenizer(template)
    ids = run({"messages": [{"role": "user", "content": parts, "name": None}]}, template).prompt_ids
    assert list(ids) == core("3 False", add_special_tokens=False)["input_ids"]
    assert words(run({"messages": [{"role": "user", "content": parts}]}, PLAIN)) == "user : a b assistant :"


@pytest.mark.parametrize("name", ["tool_use", "default"])
def test_a_template_for_tools_is_taken_as_transformers_takes_it(name):
    templates = {"default": PLAIN, "tool_use": CALLING}
    tools = TOOLS if name == "tool_use" else None
    row = {"messages": ASKED, **({"tools": tools} if tools else {})}
    begins = "with tools f " if tools else ""
    assert words(run(row, templates)) == f"{begins}user : a assistant :"


@pytest.mark.parametrize(("templates", "words"), [
    (None, "the model has no chat template, so it cannot run messages: send prompt, or put a chat_template.jinja"),
    ({"rag": PLAIN, "tool_use": CALLING}, "no chat template named default, only rag, tool_use: copy the one to use to"),
])  # fmt: skip
def test_a_model_without_a_default_template(templates, words):
    assert words in error_of({"messages": ASKED}, templates)


def test_tools_that_the_template_leaves_out_are_an_error():
    message = error_of({"messages": ASKED, "tools": TOOLS}, PLAIN)
    assert "the model's chat template does not use them; remove them" in message
    for fields in ({"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}):
        assert words(run({"messages": ASKED, **fields}, PLAIN)) == "user : a assistant :"
    assert words(run({"messages": ASKED, "tools": TOOLS, "tool_choice": "auto"})).startswith("with tools")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": "f"}, "tools is 'f'; it must be an array of objects"),
        ({"tools": [1]}, "tools is [1]; it must be an array of objects"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is 'required'; it must be auto or none"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls is false; only true is possible"),
        ({"response_format": {"type": "json_object"}}, 'only {"type": "text"} is supported: remove it'),
        ({"max_new_tokens": 5}, "max_new_tokens is 5; the field is named max_tokens here: rename it"),
        ({"max_completion_tokens": 5}, "the field is named max_tokens here"),
    ],
)
def test_what_cannot_be_done_is_an_error(fields, reason):
    assert reason in error_of({"messages": ASKED, **fields})


def test_fields_of_those_names_that_ask_for_nothing_else():
    for fields in ({"response_format": {"type": "text"}}, {"response_format": "data"}, {"tool_choice": None},
                   {"max_new_tokens": 9, "max_tokens": 4}):  # fmt: skip
        assert words(run({"messages": ASKED, **fields})) == "user : a assistant :"


THINKING = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant : "
    "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}{% endif %}"
)
BEGUN = [*ASKED, {"role": "assistant", "content": "b"}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"add_generation_prompt": True}),
        (OFF, {"add_generation_prompt": True, "enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": None}}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
    ],
)
def test_fields_for_the_template_are_those_of_transformers(fields, options):
    expected = tokenizer(THINKING).apply_chat_template(BEGUN, **options)["input_ids"]
    assert list(run({"messages": BEGUN, **fields}, THINKING).prompt_ids) == expected
    assert list(run({"prompt": BEGUN, **fields}, THINKING).prompt_ids) == expected


def test_a_rows_variables_are_added_to_those_of_all_rows():
    defaults = SamplingParams(max_tokens=4, chat_template_kwargs={"enable_thinking": False, "a": 1})
    row = Row(0, 4, {"messages": ASKED, "chat_template_kwargs": {"a": 2}})
    made = encode(row, tokenizer(THINKING), 64, defaults)
    assert made.sampling.chat_template_kwargs == {"enable_thinking": False, "a": 2}
    assert words(made) == "user : a assistant : x"
    assert words(encode(Row(0, 4, {"prompt": "a"}, chat=True), tokenizer(THINKING), 64, defaults)).endswith("x")


@pytest.mark.parametrize("fields", [OFF, {"add_generation_prompt": False}, {"continue_final_message": True}])
def test_fields_for_the_template_need_messages(fields):
    for prompt in ({"prompt": "a"}, {"prompt_token_ids": [5]}):
        assert f"{next(iter(fields))} needs messages" in error_of({**prompt, **fields})


def test_unusable_fields_for_the_template():
    for wrong, reason in (
        ({"tokenize": False}, "has 'tokenize', which is no variable"),
        (5, "is 5; it must be an object"),
    ):
        assert f"chat_template_kwargs {reason}" in error_of({"messages": ASKED, "chat_template_kwargs": wrong})
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert "are both true; leave one out" in error_of({"messages": ASKED, **both})


@pytest.mark.parametrize("prompt", [{"prompt": "a"}, {"prompt_token_ids": [5]}])
def test_tools_need_messages(prompt):
    assert "tools needs messages" in error_of({**prompt, "tools": TOOLS})
    assert words(run({**prompt, "tools": "a column of text"})) == "a"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (7, "messages[0] is 7; it must be an object with role and content"),
        ({"content": "a"}, "messages[0].role is missing; it must be a string"),
        ({"role": None, "content": "a"}, "messages[0].role is null; it must be a string"),
        ({"rol": "user", "content": "a"}, "messages[0].role is missing (did you mean role by 'rol'?); it must be"),
        ({"role": "user", "value": "a"}, "messages[0].content is missing; it must be a string or an array of text"
         " parts, or be null beside tool_calls; rename value to content"),
        ({"role": "user"}, "messages[0].content is missing; it must be a string or an array of text parts, or be null"),
        ({"role": "user", "content": 5}, "messages[0].content is 5; it must be a string"),
        ({"role": "user", "content": []}, "messages[0].content is []"),
        ({"role": "user", "content": {"a": None}}, 'messages[0].content is {"a": null}'),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
         "messages[0] has a part of type 'image_url'; only text is read, no images, audio or files"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "part of type 'input_audio'"),
        ({"role": "user", "content": ["a"]}, "has a part that is a string"),
        ({"role": "user", "content": [{"type": "text"}]}, "a text part whose text is missing; it must be a string"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content is null"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls is 'f'; it must be an array of objects"),
        ({"role": "assistant", "tool_calls": [CALL, None]}, "it must be an array of objects"),
    ],
)  # fmt: skip
def test_unusable_messages(message, reason):
    assert reason in error_of({"messages": [message]})


BLANK = [{"type": "text", "text": ""}, {"type": "text", "text": " "}]
TOLD = {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "lack"),
    [
        ([{"role": "system", "content": ""}], "empty"),
        ([{"role": "system", "content": BLANK}], "blank"),
        ([{"role": "assistant", "content": "", "tool_calls": []}], "empty"),
        ([{"role": "tool", "content": "\u3164"}], "blank"),
        ([{"role": "system", "content": " "}, {"role": "assistant", "content": "", "name": "a"}], "blank"),
        ([{"role": "narrator", "content": "\0"}], "blank"),
    ],
)
def test_a_conversation_without_visible_text_is_an_error(messages, lack):
    fault = f"no message has visible text (messages[0].content is {lack}); give one"
    assert error_of({"messages": messages}) == error_of({"prompt": messages}) == f"line 4: {fault}"
    with pytest.raises(InvalidInput, match=re.escape(fault)):
        request_of(batch_fields(OPENAI_CHAT, messages=messages))


@pytest.mark.parametrize("last", ["", " ", BLANK])
def test_an_empty_last_message_of_a_user_is_an_error(last):
    fault = f"content is {'empty' if last == '' else 'blank'}; give the user's text"
    assert f"messages[1].{fault}" in error_of({"messages": [TOLD, {"role": "user", "content": last}]})
    assert f"messages[0].{fault}" in error_of({"messages": [{"role": "user", "content": last}, CHAT[1]]})


@pytest.mark.parametrize(
    "messages",
    [
        [TOLD],
        [CHAT[1]],
        [{"role": "system", "content": ""}, *CHAT],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}, *ASKED],
        [*ASKED, {"role": "assistant", "content": ""}],
        [*ASKED, CHAT[1], {"role": "tool", "content": ""}],
        [{"role": "assistant", "content": "a"}],
    ],
)
def test_conversations_with_text_or_tool_calls_are_legal(messages):
    expected = tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(run({"messages": messages}).prompt_ids) == expected


KNOWN = """{% for m in messages if m.role in ['user', "b"] %}user : {{ m.content }} {% endfor %}"""
ELSE = "{% for m in messages %}{{ 'user' if m.role == 'user' else 'assistant' }} : {{ m.content }} {% endfor %}"
ESCAPED = "{% for m in messages %}{{ m.role | replace('_', ' ') }} : {{ m.content | tojson }} {% endfor %}"
LAST_FIRST = "{% for m in messages | reverse %}{{ m.role }} : {{ m.content.split('x')[-1] }} {% endfor %}"
HEADED = "{% for m in messages %}{{ m.role | title }} : {{ m.content }} {% endfor %}"


@pytest.mark.parametrize("template", [PLAIN, KNOWN, {"default": PLAIN, "tool_use": KNOWN}])
def test_roles_of_other_programs_are_errors(template):
    meant = {"user": "human Human prompter User usr", "system": "developer sytem", "tool": "tools"}
    meant["assistant"] = "bot model ai AI gpt chatbot asistant ASSISTANT"
    for ours, roles in meant.items():
        for role in roles.split():
            message = error_of({"messages": [*ASKED, {"role": role, "content": "b"}]}, template)
            assert message == (
                f"line 4: messages[1].role is {role!r}, which the chat template does not name; it must be user,"
                f" assistant, system or tool: did you mean {ours}?"
            )


@pytest.mark.parametrize("template", [PLAIN + "{# message['role'] == 'model' #}", {"default": PLAIN + '{# "model" #}'}])
def test_roles_that_the_template_names_are_legal(template):
    assert words(run({"messages": [*ASKED, {"role": "model", "content": "b"}]}, template)).startswith(
        "user : a <unk> : b"
    )


@pytest.mark.parametrize(
    ("template", "role", "content", "legal"),
    [
        (PLAIN, "narrator", "b", True),
        (HEADED, "narrator", " b ", True),
        (PLAIN, "narrator", "", True),
        (KNOWN, "b", "b", True),
        (KNOWN, "narrator", "b", False),
        (ELSE, "narrator", "b", False),
        (ELSE, "narrator", "narrator", False),
        (ESCAPED, "narrator", "a\nb", True),
        (LAST_FIRST, "narrator", "b", True),
    ],
)
def test_roles_that_the_template_leaves_out_are_errors(template, role, content, legal):
    row = {"messages": [*ASKED, {"role": role, "content": content}, {"role": "user", "content": "b"}]}
    if legal:
        assert isinstance(run(row, template), Request)
    else:
        must = "which the chat template leaves out; it must be user, assistant, system or tool"
        assert error_of(row, template) == f"line 4: messages[1].role is 'narrator', {must}"


def test_half_a_surrogate_pair_and_depth_anywhere_are_errors():
    call = {"function": {"name": "f", "arguments": {"x": "\ud800"}}}
    assert "surrogate" in error_of({"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}]})
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "too deeply" in error_of({"messages": [{"role": "user", "content": "a", "more": deep}]})


def test_a_template_without_tool_calls_is_an_error_of_its_row():
    strict = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert "messages cannot be tokenised: UndefinedError" in error_of({"messages": CHAT}, strict)


def test_texts_instead_of_messages_name_what_runs_them():
    fault = error_of({"messages": "Hello"})
    assert "messages is 'Hello'; it must be an array of messages that is not empty, such as" in fault
    option = "--template '{messages}' (template='{messages}' of run_job in Python), with --chat (engine.chat in Python)"
    assert fault.endswith(f"; for a text, send prompt, or give {option} for a user's message")
    fault = error_of({"messages": ["Hello", "you"]})
    assert "messages[0] is 'Hello'; it must be an object with role and content; for texts, give each" in fault
    assert fault.endswith("its own row, as prompt, with --chat (engine.chat in Python) for a user's message")
    for messages in ([], {"role": "user"}, ["Hello", 5], [{"role": "user", "content": ""}]):
        assert "--chat" not in error_of({"messages": messages})
    with pytest.raises(InvalidInput, match="an array of messages") as caught:
        request_of(batch_fields(OPENAI_CHAT, messages="Hello"))
    assert "--chat" not in str(caught.value)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", '{"x": Infinity}', '[{"function": {"x": Infinity}}]'])
@pytest.mark.parametrize("name", ["tools", "messages"])
def test_infinities_in_fields_of_a_chat_are_error_rows(tmp_path, name, value):
    cells = {"messages": '[{"role": "user", "content": "a"}]'} | {name: value}
    if name == "messages" and value[0] == "[":
        cells[name] = '[{"role": "user", "content": "a", "tool_calls": [{"x": Infinity}]}]'
    (tmp_path / "in.jsonl").write_text("{" + ", ".join(f'"{n}": {v}' for n, v in cells.items()) + "}")
    (row,) = InputRows(tmp_path / "in.jsonl")
    made = encode(row, tokenizer(), 64, SamplingParams(max_tokens=4))
    assert isinstance(made, Row)
    assert made.error.startswith(f"line 1: {name}")
    assert ("holds Infinity or NaN" if value[0] == "[" else "it must be an array") in made.error


def test_tool_calls_that_the_template_leaves_out_are_an_error():
    fault = "messages[1].tool_calls are given, but the model's chat template does not use them"
    assert fault in error_of({"messages": CHAT}, PLAIN)
    default = "{% for m in messages %}{{ m.role }} : {{ m.content | default('') }} {% endfor %}"
    assert fault in error_of({"messages": CHAT}, default)
    assert isinstance(run({"messages": CHAT}), Request)


def test_fields_of_messages_that_the_template_leaves_out_are_named_once(caplog):
    rows = [{"messages": [{"role": "user", "content": "a", "name": "b", "more": 1}]}] * 2
    template = "{% for m in messages %}{{ m.role }} : {{ m.name }} {{ m.content }} {% endfor %}{# named #}"
    with caplog.at_level("INFO", "flexengine"):
        assert [words(run(row, template)) for row in rows] == ["user : b a"] * 2
    assert [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()] == [
        "the model's chat template leaves messages[0].more out (and maybe others)"
    ]


def test_faults_of_templates_name_no_class_and_half_a_surrogate_pair():
    forbidden = error_of({"messages": ASKED}, "{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}")
    assert "the chat template does what templates must not do here" in forbidden
    assert "SecurityError" not in forbidden
    surrogate = error_of({"messages": ASKED}, "{{ '\\ud800' }}a")
    assert "the text that the chat template writes holds half a surrogate pair" in surrogate
