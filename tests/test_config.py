"""SamplingParams: what it takes, what it turns it into, and what it says about everything else."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from flexengine.config import Completion, Result, SamplingParams
from flexengine.errors import InvalidInput, meant

NAN, INF, HUGE = float("nan"), float("inf"), 10**5000  # Python refuses to print the last


def test_the_order_of_fields_is_a_contract() -> None:
    names = [f.name for f in fields(SamplingParams)]
    assert names[:4] == ["max_tokens", "temperature", "seed", "ignore_eos"]
    assert [f.name for f in fields(Result)][:7] == [
        "index", "generated_text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error",
    ]  # fmt: skip


def test_defaults_change_nothing() -> None:
    neutral = dict(top_k=0, top_p=1, min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
    assert SamplingParams(128, 0, 0, False, stop=(), stop_token_ids=(), n=1, logprobs=None, **neutral) == (
        SamplingParams()
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "b\n", "\u00e9"]}, "stop", ("a", "b\n", "\u00e9")),
        ({"stop": []}, "stop", ()),
        ({"stop": ["x"] * 16}, "stop", ("x",) * 16),
        ({"stop_token_ids": [3, 0, 2**31 - 1]}, "stop_token_ids", (3, 0, 2**31 - 1)),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_p": 5e-324}, "top_p", 5e-324),
        ({"min_p": 1}, "min_p", 1.0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2.0}, "frequency_penalty", 2.0),
        ({"repetition_penalty": 10**300}, "repetition_penalty", 1e300),
        ({"temperature": 10**308}, "temperature", 1e308),
        ({"seed": -(2**63)}, "seed", -(2**63)),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"n": 128}, "n", 128),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 20}, "logprobs", 20),
        ({"top_k": 2**31 - 1}, "top_k", 2**31 - 1),
    ],
)
def test_accepted_and_normalised(fields: dict[str, Any], name: str, value: Any) -> None:
    found = getattr(SamplingParams(**fields), name)
    assert found == value
    assert type(found) is type(value)
    # As rows override defaults: from JSON fields, and once more from what was normalised.
    assert replace(replace(SamplingParams(), **fields), max_tokens=3) == replace(SamplingParams(max_tokens=3), **fields)


def test_parameters_by_token_and_by_variable() -> None:
    made = SamplingParams(logit_bias={"5": 1, 6: None, 7: -2}, bad_words="x", chat_template_kwargs={"a": 1, "b": None})  # type: ignore
    assert (made.logit_bias, made.bad_words, made.chat_template_kwargs) == ({5: 1.0, 7: -2.0}, ("x",), {"a": 1})
    assert SamplingParams(logit_bias=[(5, 1.0)]).logit_bias == {5: 1.0}  # type: ignore  # a map column of Arrow
    assert SamplingParams(logit_bias={}, chat_template_kwargs={}) == SamplingParams()
    assert hash(replace(made, max_tokens=9)) != hash(made)


def test_equal_parameters_are_one_key() -> None:
    one, two = SamplingParams(stop="a", top_p=1, stop_token_ids=[4]), SamplingParams(stop=["a"], stop_token_ids=(4,))  # type: ignore[arg-type]
    assert one == two
    assert hash(one) == hash(two)
    assert asdict(one) == asdict(two)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k is -1; it must be a whole number of at least 0 (0 keeps all tokens)"),
        ({"n": 0}, "n is 0; it must be a whole number of at least 1 and at most 128"),
        ({"n": 129}, "n is 129"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number of at least 0 and at most 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": True}, "logprobs is True"),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a whole number of at least -2**63 and below 2**64"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": 1.0000001}, "top_p is 1.0000001"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be at least 0"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a positive number"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be at least -2 and at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be at least -2 and at most 2"),
        ({"stop": ""}, "stop[0] is ''; it must be a string of at least one character"),
        ({"stop": ["a", ""]}, "stop[1] is ''"),
        ({"stop": ["a", 3]}, "stop[1] is 3; it must be a string"),
        ({"stop": ["a", None]}, "stop[1] is None"),
        ({"stop": ["\ud800"]}, "half a surrogate pair"),
        ({"stop": 3}, "stop is 3; it must be a string or a list of at most 16 strings"),
        ({"stop": {"a": 1}}, 'stop is {"a": 1}; it must be a string or a list of at most 16 strings'),
        ({"stop": None}, "stop is None"),
        ({"stop": b"a"}, "stop is b'a'"),
        ({"stop": ["x"] * 17}, "...; it must be a string or a list of at most 16 strings"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3; it must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1] is -1; it must be a whole number of at least 0"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0] is True"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0] is 1.5"),
        ({"ignore_eos": None}, "ignore_eos is None; it must be True or False"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be a whole number of at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens 8; lower it"),
        ({"logit_bias": 5}, "logit_bias is 5; it must be an object of numbers from -100 to 100 by token id"),
        ({"logit_bias": {"a": 1}}, "a key of logit_bias is 'a'; it must be a token id"),
        ({"logit_bias": {-1: 1}}, "a key of logit_bias is -1"),
        ({"logit_bias": {"5": 101}}, "logit_bias of token 5 is 101; it must be a number from -100 to 100"),
        ({"logit_bias": {5: NAN}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {5: True}}, "logit_bias of token 5 is True"),
        ({"bad_words": 5}, "bad_words is 5; it must be a list of texts, or of lists of token ids"),
        ({"bad_words": ["a", " "]}, "bad_words[1] is ' '; it must be a text that is not blank, or a list of token ids"),
        ({"bad_words": [[]]}, "bad_words[0] is []"),
        ({"bad_words": [[-1]]}, "bad_words[0] is [-1]"),
        ({"bad_words": ["\ud800"]}, "half a surrogate pair"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs is 'x'; it must be an object of variables"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools', which is no variable"),
        ({"chat_template_kwargs": {"conversations": []}}, "has 'conversations', which is no variable"),
        ({"chat_template_kwargs": {"self": 1}}, "has 'self', which is no variable"),
        ({"chat_template_kwargs": {"a": [INF]}}, "chat_template_kwargs has a value that JSON cannot hold"),
        ({"bad_words": [[1.5]]}, "bad_words[0] is [1.5]"),
        ({"chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs has a value that JSON cannot hold"),
    ],
)
def test_refusals_name_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)


def _kind(value: object) -> str:
    return type(value).__name__


REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("max_tokens", "seed", "top_k", "n", "logprobs")


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", [True, "1", None, [1.0], {}, NAN, INF, -INF, HUGE, -HUGE, 1j], ids=_kind)
def test_no_field_takes_what_is_no_finite_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [True, "1", 1.5, [1], {}, NAN, INF, HUGE, -HUGE], ids=_kind)
def test_no_field_takes_what_is_no_whole_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} is "):
        SamplingParams(**{name: value})


def test_floats_that_are_whole_numbers_are_integers() -> None:
    """As in rows: JSON and pandas do not tell 2.0 from 2."""
    whole = dict.fromkeys((*WHOLE, "min_tokens"), 2.0)
    made = SamplingParams(**whole, stop_token_ids=[4.0], bad_words=[[5.0]], logit_bias={6.0: 1})  # type: ignore
    same = SamplingParams(**dict.fromkeys(whole, 2), stop_token_ids=(4,), bad_words=((5,),), logit_bias={6: 1})  # type: ignore
    assert repr(made) == repr(same)


@pytest.mark.parametrize("name", ["stop_token_ids", "stop", "ignore_eos"])
def test_what_cannot_be_printed_is_refused_like_the_rest(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} .* too long to print"):
        SamplingParams(**{name: HUGE})  # type: ignore[arg-type]


def test_messages_are_short_whatever_the_value() -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(top_p="x" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_results_become_plain_json_fields() -> None:
    entry = {"token_id": 5, "token": "a", "logprob": -0.5, "top_logprobs": []}
    samples = [Completion("a", [5], "length", [entry]), Completion("b", [6], "stop")]
    fields = asdict(Result(0, "a", [5], "length", 3, 2, logprobs=[entry], samples=samples))
    assert fields["samples"][0] == {
        "generated_text": "a", "token_ids": [5], "finish_reason": "length", "logprobs": [entry]
    }  # fmt: skip
    assert Result(0).samples is None
    assert Result(0).logprobs is None


@pytest.mark.parametrize(
    ("word", "expected"),
    [("opt-30b", "opt-30b"), ("opt-6", "opt-6.7b"), ("opt-31b", "opt-30b"), ("opt", None), ("", None), ("zzz", None)],
)
def test_the_name_that_was_meant(word: str, expected: str | None) -> None:
    """Several names begin with opt, and opt-30b-4bit begins with opt-30b."""
    assert meant(word, ["opt-30b", "opt-30b-4bit", "opt-6.7b"]) == expected
