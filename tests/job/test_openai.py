"""OpenAI batch lines, judged by hand-written lines of OpenAI's documentation and, where it is installed, by the types
of its client library."""

import json
import re
import tracemalloc
from array import array
from dataclasses import replace

import pytest

from flexengine.config import Result, SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.openai import CHAT, COMPLETIONS, batch_line, custom_id_of, duplicate_ids, kind_of, request_of
from flexengine.job.read_json import is_batch_line
from flexengine.job.rows import Row, encode
from tests.helpers.inputs import batch_fields as line
from tests.helpers.inputs import make_tokenizer

SHORT = SamplingParams(max_tokens=4)


def request(url: str = COMPLETIONS, **body) -> dict:
    return request_of(line(url, **body))


def encoded(fields: dict, sampling: SamplingParams = SHORT):
    row = Row(0, 1, fields, request=request_of(fields), custom_id="r-1")
    return encode(row, make_tokenizer(), 64, sampling)


def refusal(fields: dict) -> str:
    try:
        return str(encoded(fields).error)
    except InvalidInput as error:
        return str(error)


# In


def test_the_line_of_the_documentation():
    text = (
        '{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini",'
        ' "messages": [{"role": "system", "content": "You are a helpful assistant."},'
        ' {"role": "user", "content": "What is 2+2?"}], "max_tokens": 1000}}'
    )
    fields = json.loads(text)
    assert is_batch_line(fields, ("prompt",))
    assert request_of(fields) == {"messages": fields["body"]["messages"], "max_tokens": 1000}


def test_every_field_arrives():
    shared = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 3, "stop": ["a"], "presence_penalty": 1, "top_k": 7,
        "frequency_penalty": -1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [4],
        "min_tokens": 2, "logit_bias": {"5": -100}, "bad_words": ["b"], "chat_template_kwargs": {"a": False},
        "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    completion = request(max_tokens=5, logprobs=2, **shared)
    assert completion == {"prompt": "hi", "max_tokens": 5, "logprobs": 2, **shared}
    chat = request(CHAT, max_completion_tokens=5, logprobs=True, top_logprobs=2, **shared)
    assert chat == {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": 2, **shared}
    assert {*shared, "max_tokens", "logprobs"} == set(SamplingParams.__dataclass_fields__)  # none is out of reach
    assert request(max_tokens=5, max_completion_tokens=5)["max_tokens"] == 5
    row = Row(0, 1, {**request(prompt=[1], top_k=-1)}, custom_id="r-1")
    assert encode(row, None, 9, SHORT).sampling.top_k == 0
    assert request(stop="a")["stop"] == "a"


def test_kinds_of_prompts():
    assert request(prompt=[5, 6]) == request(prompt=[[5, 6]]) == {"prompt_token_ids": [5, 6]}
    assert request(prompt=["a"]) == request(prompt="a") == {"prompt": "a"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "Ann", "refusal": None, "tool_calls": None}
    assert request(CHAT, messages=[message]) == {"messages": [{"role": "user", "content": "a\nb", "name": "Ann"}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"logprobs": None}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
     ({"logprobs": True, "top_logprobs": None}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)  # fmt: skip
def test_chat_logprobs(given, expected):
    assert request(CHAT, **given).get("logprobs") == expected


def test_what_has_no_effect_is_accepted():
    quiet = {
        "model": "m", "user": "u", "metadata": {"a": "b"}, "store": True, "stream": False, "service_tier": "flex",
        "echo": False, "best_of": 2, "logit_bias": {}, "suffix": None, "tools": None, "modalities": ["text"],
        "response_format": {"type": "text"}, "safety_identifier": "s", "prompt_cache_key": "k", "prediction": {"a": 1},
    }  # fmt: skip
    assert encoded(line(n=2, **quiet)).sampling == replace(SHORT, n=2)
    assert encoded(line(best_of=1)).sampling == SHORT
    assert encoded(line(do_sample=True), replace(SHORT, temperature=0.7)).sampling.temperature == 0.7


@pytest.mark.parametrize(
    "body",
    [{"stream": True}, {"echo": True}, {"best_of": 2}, {"best_of": 3, "n": 2}, {"allowed_token_ids": [5]},
     {"suffix": "x"}, {"max_new_tokens": 5}, {"guided_json": {}}, {"messages": []}, {"stream": 0}, {"best_of": True},
     {"grammar": 4}, {"thinking": True}, {"documents": "x"}],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(body):
    name = next(iter(body))
    assert re.search(f"'{name}'|{name} is ", refusal(line(**body)))


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x"}, {"functions": [{}]}, {"reasoning_effort": "low"}, {"modalities": ["text", "audio"]},
     {"web_search_options": {}}, {"response_format": "text"}, {"verbosity": "low"}],
)  # fmt: skip
def test_what_chat_does_not_support_is_refused_by_name(body):
    name = next(iter(body))
    assert re.search(f"'{name}'|{name} is ", refusal(line(CHAT, **body)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_object"}}, 'response_format is {"type": "json_object"}; only'),
        ({"tools": {}}, "tools is {}; it must be an array of objects"),
        ({"tools": ["f"]}, 'tools is ["f"]; it must be an array of objects'),
        ({"tool_choice": "required"}, "tool_choice is 'required'; it must be auto or none"),
        ({"tool_choice": {"type": "function"}}, 'tool_choice is {"type": "function"}; it must be auto or none'),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is false; only true is possible"),
    ],
)
def test_what_a_model_cannot_be_forced_to_do_is_refused(body, words):
    assert words in refusal(line(CHAT, **body))


def test_tools_arrive_and_arguments_become_objects():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    odd = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    made = request(CHAT, messages=messages, tools=tools, tool_choice="auto", parallel_tool_calls=True)
    assert made["tools"] == tools
    first, second = made["messages"][1]["tool_calls"]
    assert first == {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert second == odd
    assert set(made["messages"][1]) == {"role", "tool_calls"}
    assert made["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "3"}
    for off in ({"tools": []}, {"tools": tools, "tool_choice": "none"}, {"tools": None}):
        assert "tools" not in request(CHAT, **off)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"custom_id": 5}, "custom_id is 5"),
        ({"custom_id": None}, "custom_id is null"),
        ({"custom_id": ""}, "custom_id is ''"),
        ({"custom_id": "x" * 513}, "513 characters; at most 512"),
        ({"method": "GET"}, "method is 'GET'"),
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings'; it must be /v1/completions or /v1/chat/completions"),
        ({"url": ["/v1/completions"]}, "url is"),
        ({"body": "x"}, "body is a string; it must be an object"),
        ({"body": None}, "body is null; it must be an object"),
        ({"body": {}}, "prompt is missing; body must have it for /v1/completions"),
        ({"body": {"prompt": None}}, "prompt is null"),
        ({"body": {"messages": []}}, f"must have it for {COMPLETIONS}, and messages is for {CHAT}"),
        ({"url": CHAT, "body": {"prompt": "a"}}, f"must have it for {CHAT}, and prompt is for {COMPLETIONS}"),
        ({"body": {"promt": "a"}}, "prompt is missing (did you mean prompt by 'promt'?); body must have it"),
        ({"url": CHAT, "body": {"Mesages": []}}, "messages is missing (did you mean messages by 'Mesages'?); body"),
        (
            {"body": {"prompt": "a", "max_token": 4, "x": 1}},
            "body has ['max_token', 'x'], which /v1/completions does"
            " not support here; remove them, or rename max_token to max_tokens",
        ),
        ({"body": {"prompt": "a", "x": 1}}, "which /v1/completions does not support here; remove them"),
        ({"url": CHAT, "body": {"messages": [{"role": "user", "content": "a"}], "prompt": "b"}}, "here; remove them"),
        ({"max_tokens": 5}, "has ['max_tokens'] beside body"),
    ],
)
def test_wrong_lines(fields, words):
    assert words in refusal({**line(), **fields})


@pytest.mark.parametrize("missing", ["custom_id", "method", "url", "body"])
def test_a_line_with_a_key_missing_is_still_a_batch_line(missing):
    fields = line()
    del fields[missing]
    assert is_batch_line(fields, ("prompt", None))
    assert refusal(fields).startswith(f"{missing} is missing; it must be ")
    for other in (missing.title(), missing.replace("_", "-") + "s", missing[:1] + missing[2:]):
        assert f"{missing} is missing (did you mean {missing} by {other!r}?); " in refusal({other: 1, **fields})
    assert not is_batch_line({**fields, "prompt": "x"}, ("prompt", None))


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, "an array of 2 prompts; a line must have one"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt is []"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "an array of 2 prompts"),
        (COMPLETIONS, {"prompt": []}, "prompt is []"),
        (COMPLETIONS, {"prompt": 5}, "prompt is 5"),
        (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens 6 and max_tokens 5"),
        (CHAT, {"messages": []}, "messages is []"),
        (CHAT, {"messages": ["hi"]}, "messages[0] is 'hi'; it must be an object"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0] has a part that is a string; it"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, "messages[0] has ['audio']"),
        (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content is missing"),
        (CHAT, {"logprobs": 2}, "logprobs is 2; it must be true or false"),
        (CHAT, {"top_logprobs": 2}, "without logprobs"),
    ],
)
def test_wrong_bodies(url, body, words):
    assert words in refusal(line(url, **body))


@pytest.mark.parametrize(
    "body",
    [{"prompt": [1, "a"]}, {"prompt": [1.5]}, {"prompt": [True]}, {"prompt": [-1]}, {"temperature": "x"}, {"n": 0},
     {"logprobs": True}, {"max_tokens": 0}, {"stop": 5}, {"seed": 1.5}, {"top_p": 2}],
)  # fmt: skip
def test_wrong_values_become_errors_at_the_latest_when_encoded(body):
    try:
        row = Row(0, 4, line(**body), request=request(**body), custom_id="r-1")
    except InvalidInput:
        return
    assert encode(row, None, 64, SamplingParams(max_tokens=4), vocab_size=9).error.startswith("line 4: ")


def test_custom_ids():
    longest = "x" * 512
    given = ("a", longest, longest + "x", 5, None)
    assert [custom_id_of({"custom_id": c}) for c in given] == ["a", longest, "", "", ""]


@pytest.mark.parametrize("url", [
    "/chat/completions", "/v1/chat/completions/", "/openai/v1/chat/completions", "https://x.y/openai/deployments/d/"
    "chat/completions?api-version=2024-10-21", "chat/completions",
])  # fmt: skip
def test_urls_of_other_services(url: str) -> None:
    assert kind_of(url) == CHAT
    assert kind_of(url.replace("chat/", "")) == COMPLETIONS
    fields = {**line(CHAT), "url": url, "method": "post"}
    assert request_of(fields) == request(CHAT)
    body = batch_line(Row(4, 9, fields, custom_id="r-1"), Result(4, "a", [5], "stop"), "demo", 1)["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    "url", [None, 5, "", "/v1/embeddings", "/v1/responses", "/v1/xcompletions", "/chat/completionsx"]
)
def test_other_urls_are_refused(url: object) -> None:
    assert kind_of(url) is None


def test_fields_of_other_programs_at_their_defaults_are_accepted() -> None:
    neutral = {
        "min_tokens": 0, "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
        "include_stop_str_in_output": False, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0,
        "spaces_between_special_tokens": True, "priority": 0, "top_logprobs": 0, "logprobs": False, "stream": False,
        "stream_options": None, "extra_body": {}, "functions": [], "guided_json": None, "repetition_penalty": 1.0,
    }  # fmt: skip
    for url in (COMPLETIONS, CHAT):
        given = {name: value for name, value in neutral.items() if url == CHAT or name != "logprobs"}
        row = Row(
            0, 4, line(url, **given), request={**request(url, **given), "messages": None, "prompt_token_ids": [1]}
        )
        found = encode(replace(row, request={**row.request, "prompt": None}), None, 64, SHORT, vocab_size=9)
        assert found.sampling == SHORT


# As vLLM's ChatCompletionRequest and llama.cpp's server state their defaults.
DUMPED = {
    "frequency_penalty": 0.0, "logprobs": False, "top_logprobs": 0, "n": 1, "presence_penalty": 0.0, "stop": [],
    "response_format": None, "tool_choice": "none", "include_reasoning": True, "parallel_tool_calls": True,
    "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [], "ignore_eos": False, "truncate": None,
    "prompt_logprobs": None, "bad_words": [], "add_special_tokens": False, "documents": None, "request_id": "9ad2",
    "return_tokens_as_token_ids": None, "return_token_ids": False, "cache_salt": None, "vllm_xargs": None,
    "stream_options": None, "detokenize": True, "separate_reasoning": True, "cache_prompt": True, "mirostat": 0,
    "mirostat_tau": 5.0, "dry_multiplier": 0.0, "dry_sequence_breakers": ["\n", ":"], "id_slot": -1,
}  # fmt: skip


def test_whole_requests_of_other_programs_are_accepted() -> None:
    assert encoded(line(CHAT, **DUMPED)).sampling == SHORT
    row = Row(0, 1, {"messages": [{"role": "user", "content": "hi"}], **DUMPED})
    assert encode(row, make_tokenizer(), 64, SHORT).sampling == SHORT


def test_special_tokens_of_prompts_and_of_chats() -> None:
    assert "add_special_tokens is true; only false" in refusal(line(CHAT, add_special_tokens=True))
    assert "add_special_tokens is false; only true" in refusal(line(COMPLETIONS, add_special_tokens=False))
    assert encoded(line(COMPLETIONS, add_special_tokens=True)).sampling == SHORT


def test_what_belongs_to_a_chat_template_is_refused_with_the_remedy() -> None:
    message = refusal(line(CHAT, enable_thinking=False, echo=True))
    assert message.endswith('gets variables by chat_template_kwargs: move it there ({"enable_thinking": ...})')


# Repeated ids


def rows_with(ids: list[str | None]) -> list[Row]:
    return [Row(i, i + 1, {"x": 1}, custom_id=custom_id) for i, custom_id in enumerate(ids)]


def hashes_of(rows: list[Row]) -> "array[int]":
    return array("q", (hash(r.custom_id) for r in rows if r.custom_id))


def repeated(ids: list[str | None], **options) -> list[tuple[str, int, int]]:
    rows = rows_with(ids)
    return duplicate_ids(rows, hashes_of(rows), **options)


def test_repeated_ids_are_found_with_their_lines():
    assert repeated([]) == repeated([None, None, "", ""]) == repeated(["a", None, "b", ""]) == []
    assert repeated(["a", "b", None, "a", "c", "b", "a"]) == [("a", 1, 4), ("b", 2, 6), ("a", 1, 7)]
    assert repeated(["a"] * 50, most=3) == [("a", 1, 2), ("a", 1, 3), ("a", 1, 4)]


def test_equal_hashes_are_no_repetition(monkeypatch):
    monkeypatch.setattr("flexengine.job.openai._CONFIRMED_AT_ONCE", 1)
    rows = rows_with(["a", "b", "c", "d", "c"])
    real = hashes_of(rows)
    same = array("q", [real[0], real[0], *real[2:]])  # as if a and b had one hash; then the true pair, in a later part
    assert duplicate_ids(rows, same) == [("c", 3, 5)]


def test_memory_for_repeated_ids_is_small():
    pytest.importorskip("numpy")
    count = 100_000

    class Many:
        def __iter__(self):
            return (Row(i, i + 1, {"x": 1}, custom_id=f"{i % (count // 2):0200}") for i in range(count))

    hashes = array("q", (hash(row.custom_id) for row in Many()))
    tracemalloc.start()
    assert len(duplicate_ids(Many(), hashes, most=5)) == 5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * count  # all of them are repeated; their texts alone are 10 MB
