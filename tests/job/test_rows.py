"""Rows, the places at the beginning of their errors, and their requests. Tokens are judged by the tokenizer itself."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.engine.survey import PromptReader
from flexengine.job.foreign import OVERRIDES
from flexengine.job.rows import Request, Row, encode, row_of, without_place


@pytest.mark.parametrize("error", [
    "line 3: is too long", "row 2 (line 3): is too long", "row 2: is too long", "row 2 (line 3): line 3: is too long",
    "is too long", Row(2, 3).refused("is too long").error,
])  # fmt: skip
def test_errors_without_their_place(error: str) -> None:
    assert without_place(error) == "is too long"


def test_places_within_an_error_stay() -> None:
    assert without_place("line 3: invalid JSON, see row 2: x") == "invalid JSON, see row 2: x"


WORDS = ["<unk>", "<bos>", "hello", "world", "user", "assistant", "system", ":", "a", "b"]
CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant :{% endif %}"
DEFAULTS = SamplingParams(max_tokens=4)
ASKED = [{"role": "user", "content": "a"}]


def make_tokenizer(bos: bool = False, chat: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=CHAT if chat else None)


def run(fields, tokenizer=None, context=64, **kwargs):
    return encode(Row(3, 7, fields), tokenizer or make_tokenizer(), context, DEFAULTS, **kwargs)


def error_of(*args, **kwargs) -> str:
    row = run(*args, **kwargs)
    assert isinstance(row, Row), row
    assert row.error is not None
    assert row.error.startswith("line 7: "), row.error
    return row.error


def test_row_of():
    assert row_of("hi", 2) == Row(2, 0, {"prompt": "hi"})
    assert row_of({"prompt_token_ids": [1]}, 0).fields == {"prompt_token_ids": [1]}
    bad = row_of(17, 5)
    assert bad.error.endswith(
        "is a number; it must be a string or an object with the fields of a row, such as prompt_token_ids"
    )
    assert encode(bad, make_tokenizer(), 64, DEFAULTS) is bad


def test_prompt_ids_are_the_tokenizers():
    for bos in (False, True):
        tokenizer = make_tokenizer(bos)
        request = run({"prompt": "hello world a"}, tokenizer)
        assert request == Request(3, tuple(tokenizer("hello world a")["input_ids"]), DEFAULTS)
    assert request.prompt_ids[0] == 1


def test_messages_go_through_the_chat_template():
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "hello world"}]
    ids = run({"messages": messages}, make_tokenizer(bos=True)).prompt_ids
    assert [WORDS[i] for i in ids] == ["system", ":", "a", "user", ":", "hello", "world", "assistant", ":"]


def test_a_prompt_as_a_users_message():
    def chat(prompt, tokenizer=None):
        return encode(Row(3, 7, {"prompt": prompt, "n": 2}, chat=True), tokenizer or make_tokenizer(), 64, DEFAULTS)

    request = chat("hello world", make_tokenizer(bos=True))
    assert [WORDS[i] for i in request.prompt_ids] == ["user", ":", "hello", "world", "assistant", ":"]
    assert (request.prompt, request.sampling.n) == ("hello world", 2)
    for wrong, reason in (
        ("", "prompt is empty"),
        (5, "prompt is a number"),
        ("\ud800", "prompt holds half a surrogate pair"),
    ):
        assert chat(wrong).error.startswith(f"line 7: {reason}")
    assert "the model has no chat template, so it cannot run messages" in chat("a", make_tokenizer(chat=False)).error


def test_overrides():
    request = run({"prompt": "a", "max_tokens": 9, "temperature": 1, "seed": 5, "ignore_eos": True, "other": 1})
    assert request.sampling == SamplingParams(9, 1, 5, True)
    assert run({"prompt": "a", "max_tokens": None}).sampling == DEFAULTS


def test_every_sampling_field_can_be_overridden():
    changed = {
        "max_tokens": 9, "temperature": 0.5, "seed": 5, "ignore_eos": True, "top_k": 3, "top_p": 0.5, "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": -1.0, "stop": ["x", "y"],
        "stop_token_ids": [4], "n": 2, "logprobs": 1, "min_tokens": 2, "logit_bias": {"5": -1}, "bad_words": ["x", [4]],
        "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    assert set(OVERRIDES) == {f.name for f in dataclasses.fields(SamplingParams)} == set(changed)
    assert run({"messages": ASKED, **changed}, make_tokenizer()).sampling == SamplingParams(**changed)
    assert run({"prompt": "a", "stop": "x"}).sampling.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 8.0}, {"max_tokens": 8}), ({"seed": 7.0, "temperature": 1}, {"seed": 7, "temperature": 1.0}),
        ({"top_k": -1}, {"top_k": 0}), ({"top_k": -1.0}, {"top_k": 0}),
        ({"stop_token_ids": [4.0]}, {"stop_token_ids": [4]}),
        ({"logprobs": 2.0, "n": 2.0}, {"logprobs": 2, "n": 2}), ({"max_tokens": float("nan")}, {}),
    ],
)  # fmt: skip
def test_whole_numbers_may_be_floats(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """As pandas writes them; NaN is no value in a row of Python, too."""
    made = encode(row_of({"prompt": "a", **fields}, 0), make_tokenizer(), 64, DEFAULTS)
    assert isinstance(made, Request)
    assert made.sampling == dataclasses.replace(DEFAULTS, **expected)


def test_prompts_that_are_messages_or_token_ids() -> None:
    assert run({"prompt": ASKED}).prompt_ids == run({"messages": ASKED}).prompt_ids
    assert run({"prompt": [1, 2.0]}).prompt_ids == (1, 2)
    assert run({"prompt_token_ids": [1.0, 2]}).prompt_ids == (1, 2)
    for wrong in (["a"], [{"role": "user"}, "a"], [1, "a"], [1.5], [True], [[1]]):
        assert "a string, an array of messages (objects with role and content) or an array of" in error_of(
            {"prompt": wrong}
        )
    assert "messages[0].role is missing" in error_of({"prompt": [{"content": "a"}]})


NEUTRAL = {
    "skip_special_tokens": True, "echo": False, "stream": False, "best_of": 1, "use_beam_search": False,
    "num_beams": 1.0,
    "length_penalty": 1.0, "top_logprobs": 0, "do_sample": False, "extra_body": {}, "stop_sequences": [], "suffix": "",
    "guided_json": None, "min_new_tokens": 0, "num_return_sequences": 1, "repeat_penalty": 1.0, "typical_p": 1,
    "no_repeat_ngram_size": "0", "images": "a.png", "thinking": "hm", "reasoning": "because", "documents": "x",
    "logprobs": False, "return_full_text": False, "add_bos_token": True, "beam_width": 1, "system": "",
    "options": {"a": "yes", "n": "no", "stop": "halt"}, "parameters": [3], "response_format": "essay",
}  # fmt: skip


def test_fields_of_other_programs_at_their_defaults_are_data() -> None:
    assert run({"prompt": "a", **NEUTRAL}).sampling == DEFAULTS
    assert run({"prompt": "a", "max_tokens": 4, "max_new_tokens": 9, "stop": "x", "stop_strings": ["y"]}).sampling.stop
    assert run({"prompt": "a", "do_sample": True, "temperature": 1}).sampling.temperature == 1


LIKELY_DATA = {
    "documents": ["x"], "functions": [{"name": "f"}], "images": ["a.png"], "videos": ["a.mp4"], "verbosity": "high",
    "thinking": True, "reasoning": {"steps": 2}, "stream": "sports", "echo": 5, "regex": 5, "grammar": 4,
    "suffix": ["b"], "random_seed": 5, "system": "Linux", "system_prompt": "Be short.", "think": "so",
    "stop_sequence": 4, "until": "noon", "truncate": "no",
}  # fmt: skip


def test_fields_that_are_likely_data_are_data() -> None:
    for prompt in ({"prompt": "a"}, {"prompt": [1, 2]}, {"prompt_token_ids": [1]}):
        assert run({**prompt, **LIKELY_DATA}).sampling == DEFAULTS
    for name in ("documents", "functions", "images", "videos", "verbosity", "thinking", "reasoning"):
        for prompt in ({"messages": ASKED}, {"prompt": ASKED}):
            assert f"{name} is " in error_of({**prompt, name: LIKELY_DATA[name]})
        as_message = encode(
            Row(0, 1, {"prompt": "a", name: LIKELY_DATA[name]}, chat=True), make_tokenizer(), 64, DEFAULTS
        )
        assert f"{name} is " in str(getattr(as_message, "error", None))
    assert "random_seed is 5; the field is named seed here" in error_of(
        {"prompt": "a", "random_seed": 5, "temperature": 1}
    )


def test_fields_of_other_programs_are_compared_with_the_parameters_of_the_job() -> None:
    job = SamplingParams(max_tokens=4, temperature=0.7, repetition_penalty=1.2, seed=3, n=2, logprobs=1)
    for name, same, other in (
        ("do_sample", True, False), ("repeat_penalty", 1.2, 1.0), ("sampling_seed", 3, 0), ("n_probs", 1, 0),
        ("num_return_sequences", 2, 1), ("best_of", 2, 1),
    ):  # fmt: skip
        for custom_id in (None, "r-1"):  # of a plain row, and of the body of a batch line
            rows = [Row(0, 1, {"prompt": "a", name: value}, custom_id=custom_id) for value in (same, other)]
            accepted, refused = (encode(row, make_tokenizer(), 64, job) for row in rows)
            assert isinstance(accepted, Request)
            assert isinstance(refused, Row)
            assert f"line 1: {name} is " in str(refused.error)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"max_new_tokens": 5}, "named max_tokens here: rename it"), ({"n_predict": 5}, "named max_tokens here"),
        ({"min_new_tokens": 5}, "named min_tokens here"), ({"stop_sequences": ["a"]}, "named stop here"),
        ({"num_return_sequences": 2}, "named n here"), ({"top_logprobs": 3}, "named logprobs here"),
        ({"do_sample": True}, "set temperature"), ({"best_of": 2}, "it must be equal to n: remove it"),
        ({"skip_special_tokens": False}, "only true is possible here: remove it, or rename the field if it holds data"),
        ({"num_beams": 4}, "only 1 is possible"), ({"echo": True}, "only false is possible"),
        ({"echo": "True"}, "only false"),
        ({"guided_json": {}}, "it is not supported"), ({"allowed_token_ids": [4]}, "it is not supported"),
        ({"messages": ASKED, "functions": [{"name": "f"}]}, "it is not supported"),
        ({"no_repeat_ngram_size": 3}, "only 0 is possible"),
        ({"enable_thinking": False}, 'by chat_template_kwargs: move it there ({"enable_thinking": ...})'),
        ({"reasoning_effort": "low"}, "move it there"),
        ({"messages": ASKED, "thinking": {"type": "disabled"}}, "move it there"),
        ({"suffix": "x"}, "it is not supported"), ({"stop_words": np.array(["x"])}, "named stop here"),
        ({"parameters": {"max_new_tokens": 5}}, "move them out of parameters"),
        ({"options": {"num_ctx": 8, "top_k": 5}}, "move them out of options"),
        ({"generationConfig": {"topP": 0.5}}, "move them"), ({"gen_kwargs": {"temperature": 0.5}}, "move them"),
        ({"until": ["x"]}, "named stop here"), ({"rep_pen": 1.5}, "named repetition_penalty here"),
        ({"beam_width": 4}, "only 1 is possible"), ({"truncate": 9}, "it is not supported"),
        ({"return_full_text": True}, "only false is possible"), ({"messages": ASKED, "think": False}, "move it there"),
        ({"messages": ASKED, "system": "Be short."}, 'begin messages with {"role": "system", "content": ...}'),
        ({"messages": ASKED, "system_instruction": {"parts": []}}, "it is a message here"),
        ({"response_format": "json"}, 'only {"type": "text"} is supported'),
        ({"samplers": ["top_k"]}, "it is not supported"), ({"samplers": "k"}, "it is not supported"),
        ({"sampler_order": [6, 0]}, "it is not supported"), ({"sampler_priority": "k"}, "it is not supported"),
        ({"messages": ASKED, "instructions": "Be short."}, "it is a message here"),
    ],
)  # fmt: skip
def test_fields_of_other_programs_are_never_ignored(fields: dict[str, Any], remedy: str) -> None:
    error = error_of(fields if "messages" in fields else {"prompt": "a", **fields})
    assert f"{[*fields][-1]} is " in error
    assert remedy in error


def test_fields_with_names_of_data_are_data() -> None:
    expected = run({"prompt": "a"}).prompt_ids
    for fields in ({"instructions": "Be short."}, {"samplers": 3}, {"sampler_order": "first"}):
        assert run({"prompt": "a", **fields}).prompt_ids == expected


def test_a_system_prompt_beside_one_of_the_messages_is_data() -> None:
    asked = [{"role": "system", "content": "b"}, *ASKED]
    assert run({"messages": asked, "system": "b"}).prompt_ids == run({"messages": asked}).prompt_ids


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_that_others_continue(name: str) -> None:
    asked = [*ASKED, {"role": "assistant", "content": "b", name: True}]
    assert f"messages[1].{name} is true, which the chat template does not read" in error_of({"messages": asked})
    assert run({"messages": [{**ASKED[0], name: True}, *ASKED]})  # no last message
    begun = {"continue_final_message": True}
    assert run({"messages": asked, **begun}).prompt_ids == run({"messages": [*ASKED, asked[1]], **begun}).prompt_ids


def test_a_request_of_its_own_wins_over_the_fields():
    row = Row(3, 7, {"prompt": "a", "max_tokens": 9}, request={"prompt": "b", "n": 2})
    request = encode(row, make_tokenizer(), 64, DEFAULTS)
    assert request == Request(3, (9,), SamplingParams(max_tokens=4, n=2))


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": "9"}, {"max_tokens": 0}, {"max_tokens": True}, {"max_tokens": 1.5}, {"temperature": -1},
     {"temperature": "hot"}, {"temperature": float("nan")}, {"seed": 1.5}, {"seed": [1]}, {"ignore_eos": 1},
     {"top_p": 0}, {"top_k": -2}, {"stop": [1]}, {"stop_token_ids": "1"}, {"n": 0}, {"logprobs": 21}],
)  # fmt: skip
def test_wrong_overrides(wrong):
    assert next(iter(wrong)) in error_of({"prompt": "a", **wrong})


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "prompt_token_ids": [1]},
     {"text": "a"}],
)  # fmt: skip
def test_exactly_one_kind_of_prompt(fields):
    assert "exactly one" in error_of(fields)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": 5}, {"prompt": ["a"]}, {"messages": []}, {"messages": "hi"}, {"messages": [1]},
     {"messages": [{"role": "user"}]}, {"messages": [{"role": 1, "content": "a"}]},
     {"prompt_token_ids": []}, {"prompt_token_ids": 3}, {"prompt_token_ids": [1, "2"]}, {"prompt_token_ids": [True]},
     {"prompt_token_ids": [-1]}, {"prompt_token_ids": [10]}, {"prompt_token_ids": [2**70]},
     {"prompt": "\ud800"}, {"messages": [{"role": "user", "content": "a\udfff"}]}],
)  # fmt: skip
def test_unusable_prompts(fields):
    assert next(iter(fields)) in error_of(fields)


def test_token_id_range():
    assert run({"prompt_token_ids": [0, 9]}).prompt_ids == (0, 9)
    assert run({"prompt_token_ids": [12]}, vocab_size=13).prompt_ids == (12,)
    assert "[0, 12)" in error_of({"prompt_token_ids": [12]}, vocab_size=12)


def test_without_a_tokenizer():
    for fields, works in (({"prompt_token_ids": [5]}, True), ({"prompt": "a"}, False)):
        out = encode(Row(0, 1, fields), None, 64, DEFAULTS, vocab_size=10)
        assert isinstance(out, Request) == works
    assert "no tokenizer" in out.error


def test_without_a_chat_template():
    messages = [{"role": "user", "content": "a"}]
    assert "chat_template" in error_of({"messages": messages}, make_tokenizer(chat=False))


def test_context_length_counts_prompt_and_continuation():
    fields = {"prompt": "a b a b a b"}
    assert isinstance(run(fields, context=10), Request)
    message = error_of(fields, context=9)
    assert all(number in message for number in ("6", "4", "9"))


def test_empty_prompts():
    for tokenizer in (make_tokenizer(), make_tokenizer(bos=True)):
        assert "prompt is empty" in error_of({"prompt": ""}, tokenizer)
        assert "messages[0].content is empty" in error_of({"messages": [{"role": "user", "content": ""}]}, tokenizer)
    assert "prompt is blank; give a text" in error_of({"prompt": " "})
    assert "prompt is null" in error_of({"prompt": None})
    assert "prompt_token_ids is null" in error_of({"prompt_token_ids": None})


@pytest.mark.parametrize("ids", [np.array([3, 4]), torch.tensor([3, 4])])
def test_arrays_and_tensors_are_token_ids(ids: Any) -> None:
    request = encode(Row(0, 0, {"prompt_token_ids": ids}), None, 100, DEFAULTS, 10)
    assert isinstance(request, Request)
    assert request.prompt_ids == (3, 4)
    assert all(type(token) is int for token in request.prompt_ids)


def test_names_of_fields_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thousand of all rows, as comparing a name with the options takes long."""
    looked: list[str] = []
    monkeypatch.setattr("flexengine.engine.survey.meant_field", lambda name, _: looked.append(name))
    skeleton: Any = SimpleNamespace(
        context_length=100, head=(0, (len(WORDS),)), head_module=SimpleNamespace(step=SimpleNamespace(fault=None))
    )
    row = {"prompt": "a", **{f"x{i}": i for i in range(1100)}}
    assert len(list(PromptReader(make_tokenizer(), skeleton, True).requests([row] * 3, DEFAULTS))) == 3
    assert looked == list(row)[:1000]


def test_a_first_token_that_is_there_twice_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in llama.cpp. The ids stay those of the tokenizer, as in transformers."""
    skeleton: Any = SimpleNamespace(
        context_length=100, head=(0, (len(WORDS),)), head_module=SimpleNamespace(step=SimpleNamespace(fault=None))
    )
    tokenizer = make_tokenizer(bos=True)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    prompts: list[Any]
    for prompts, count in ((["a", {"prompt_token_ids": [1, 1]}], 0), (["<bos>a", "<bos>a"], 1)):
        requests = [*PromptReader(tokenizer, skeleton, True).requests(prompts, DEFAULTS)]
        assert len([record for record in caplog.records if "is there twice" in record.message]) == count
    assert isinstance(requests[0], Request)
    assert requests[0].prompt_ids == tuple(tokenizer("<bos>a")["input_ids"]) == (1, 1, WORDS.index("a"))


@pytest.mark.parametrize("deep", ["list", "object"])
def test_a_row_that_is_nested_deeply_is_an_error_row(deep: str) -> None:
    """Whatever its field; the rows after it run."""
    value: Any = 1
    for _ in range(5000):
        value = [value] if deep == "list" else {"a": value}
    rows = [Row(0, 0, {"prompt": "a", name: value}) for name in ("prompt", *OVERRIDES)]
    rows += [Row(0, 0, {name: value}, scored=True) for name in ("prompt_token_ids", "messages", "text")]
    rows += [Row(0, 0, {"context": "a", name: value}, scored=True) for name in ("continuation", "choices")]
    skeleton: Any = SimpleNamespace(
        context_length=100, head=(0, (len(WORDS),)), head_module=SimpleNamespace(step=SimpleNamespace(fault=None))
    )
    reader = PromptReader(make_tokenizer(), skeleton, True)
    *found, last = reader.requests([*rows, "a"], DEFAULTS)
    assert isinstance(last, Request)
    assert [row for row, item in zip(rows, found, strict=True) if isinstance(item, Request)] == []
