"""Requests of HELM as rows, and rows as results of HELM."""

from typing import Any

import pytest

from flexengine.apps.helm.requests import ID, Encoding, digest_of, result_of, row_of, truncated
from flexengine.errors import InvalidInput
from tests.helpers.speaker import TEMPLATE
from tests.helpers.tokenizers import byte_tokenizer

PLAIN: dict[str, Any] = {"model": "a/b", "model_deployment": "a/b", "embedding": False, "prompt": "ab", "max_tokens": 4,
                         "temperature": 0.0, "num_completions": 1, "top_k_per_token": 5, "top_p": 1,
                         "stop_sequences": ["\n"], "echo_prompt": False, "presence_penalty": 0,
                         "frequency_penalty": 0}  # fmt: skip
SCORED = {**PLAIN, "max_tokens": 0, "echo_prompt": True, "stop_sequences": []}


def encoding(**options: Any) -> Encoding:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "</s>"
    if options.pop("template", False):
        tokenizer.chat_template = TEMPLATE
    return Encoding(tokenizer, **options)


def ids(text: str) -> list[int]:
    return [int(i) for i in byte_tokenizer()(text)["input_ids"]]


def test_a_request_that_generates() -> None:
    request = {**PLAIN, "temperature": 0.7, "top_p": 0.9, "num_completions": 3, "presence_penalty": 0.5}
    row = row_of(request, encoding())
    assert row == {
        ID: digest_of(request), "prompt_token_ids": ids("ab"), "max_tokens": 4, "temperature": 0.7, "top_p": 0.9,
        "n": 3, "seed": 0, "presence_penalty": 0.5, "frequency_penalty": 0, "stop": ["\n"], "stop_token_ids": [],
    }  # fmt: skip


def test_a_request_that_is_scored() -> None:
    row = row_of(SCORED, encoding())
    assert row == {ID: digest_of(SCORED), "context": [0], "continuation": ids("ab")[1:]}


def test_chat_templates() -> None:
    """A template is applied if the model has one, and its text is tokenized like any text, as HELM does."""
    assert row_of(PLAIN, encoding(template=True))["prompt_token_ids"] == ids("user:ab;bot:")
    assert row_of(PLAIN, encoding(template=True, apply_chat_template=False))["prompt_token_ids"] == ids("ab")
    talk = {**PLAIN, "prompt": "", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    assert row_of(talk, encoding(template=True))["prompt_token_ids"] == ids("system:x;user:y;bot:")
    with pytest.raises(InvalidInput, match="has messages, but no chat template is applied"):
        row_of(talk, encoding())
    with pytest.raises(InvalidInput, match="has no chat template"):
        encoding(apply_chat_template=True)


@pytest.mark.parametrize("prompt", ["", " ", "\n"])
def test_blank_prompts_are_sent_as_they_are(prompt: str) -> None:
    """As HELM's HuggingFaceClient sends them, unlike the rows of other jobs: HELM ends a whole run at a request that
    fails."""
    assert row_of({**PLAIN, "prompt": prompt}, encoding())["prompt_token_ids"] == ids(prompt)
    chat = row_of({**PLAIN, "prompt": prompt}, encoding(template=True))
    assert chat["prompt_token_ids"] == ids(f"user:{prompt};bot:")


def test_special_tokens_and_many_strings_that_stop() -> None:
    row = row_of({**PLAIN, "stop_sequences": ["</s>", *map(str, range(20))]}, encoding())
    assert row["stop_token_ids"] == [1]
    assert row["stop"] == [str(number) for number in range(16)]


def test_seeds() -> None:
    """`random` sets requests apart, and the seed follows from it alone."""
    one, two = ({**PLAIN, "random": text} for text in ("1", "2"))
    assert len({digest_of(each) for each in (PLAIN, one, two)}) == 3
    seeds = {row_of(each, encoding())["seed"] for each in (PLAIN, one, two)}
    assert len(seeds) == 3
    assert row_of({**one, "prompt": "c"}, encoding())["seed"] in seeds


def test_digests_do_not_depend_on_what_changes_nothing() -> None:
    other = {**PLAIN, "model": "c/d", "model_deployment": "e", "top_k_per_token": 1, "random": None, "messages": None}
    assert digest_of(other) == digest_of(PLAIN)
    assert digest_of({**PLAIN, "max_tokens": 5}) != digest_of(PLAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding": True}, "the request has embedding, which the engine does not have"),
        ({"multimodal_prompt": {"media_objects": []}}, "the request has multimodal_prompt"),
        ({"response_format": {"json_schema": {}}}, "the request has response_format"),
        ({"beams": 3}, "the request has beams 3, which this version of flexengine does not know"),
        ({"messages": [{"role": "user", "content": "x"}]}, "both prompt and messages"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_tokens": 0, "echo_prompt": True, "num_completions": 2}, "max_tokens 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": None}, "the request has no max_tokens"),
        ({"prompt": 5}, "the request has prompt 5; it must be text"),
        ({"prompt": "a\ud83d"}, "prompt holds half a surrogate pair"),
        ({"random": 5}, "the request has random 5; it must be text"),
        ({"stop_sequences": "ab"}, "stop_sequences 'ab'; it must be an array of texts"),
        ({"prompt": "", "messages": "ab"}, "messages 'ab'; it must be an array of objects"),
        ({"top_p": 0}, "top_p is 0"),
        ({"stop_sequences": [""]}, "at least one character"),
        ({"num_completions": 1000}, "n is 1000"),
        ({**SCORED, "prompt": ""}, "has one token"),
    ],
)
def test_requests_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        row_of({**PLAIN, **change}, encoding())


def output(text: str, special: list[int] | None = None, logprob: float = -0.5) -> dict[str, Any]:
    """Fields of an output row: a token per byte, and further tokens."""
    tokens = [*ids(text)[1:], *(special or [])]
    return {"error": None, "token_ids": tokens, "logprobs": [{"logprob": logprob} for _ in tokens]}


def test_results_end_before_stop_strings_and_the_end_of_text() -> None:
    for row in (output("xy\nz"), output("xy", [1]), output("xy", [1, 3]), output("xy")):
        (made,) = result_of(PLAIN, row, encoding())["completions"]
        assert made["text"] == "xy"
        assert [token["text"] for token in made["tokens"]] == ["x", "y"]


def test_log_probabilities_of_generated_tokens() -> None:
    """HELM's own client gives those of the distribution that it samples from; at temperature 0 they are 0."""

    def logprob(request: dict[str, Any], **options: Any) -> float:
        (made,) = result_of(request, output("xy\nz"), encoding(**options))["completions"]
        assert made["logprob"] == sum(token["logprob"] for token in made["tokens"])
        return float(made["logprob"])

    assert logprob(PLAIN) == 0
    assert logprob(PLAIN, model_logprobs=True) == -1
    assert logprob({**PLAIN, "temperature": 1.0}) == -1


def test_the_prompt_is_echoed() -> None:
    request = {**PLAIN, "echo_prompt": True, "temperature": 1.0}
    (made,) = result_of(request, output("xy\nz"), encoding())["completions"]
    assert made["text"] == "<s>abxy\nz"  # HELM cuts nothing after an echoed prompt
    assert [token["logprob"] for token in made["tokens"]] == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert made["logprob"] == -2


def test_scored_prompts() -> None:
    row = {**output("ab"), "context": [0]}
    (made,) = result_of(SCORED, row, encoding())["completions"]
    assert made["text"] == "<s>ab"
    assert [(token["text"], token["logprob"]) for token in made["tokens"]] == [("<s>", 0), ("a", -0.5), ("b", -0.5)]


def test_samples_and_errors() -> None:
    row = {**output("x"), "samples": [output("x"), output("yy")]}
    found = result_of({**PLAIN, "num_completions": 2}, row, encoding())
    assert [each["text"] for each in found["completions"]] == ["x", "yy"]
    failed = result_of(PLAIN, {"error": "line 1: no"}, encoding())
    assert (failed["success"], failed["error"], failed["completions"]) == (False, "line 1: no", [])


def test_tokens_are_cut_at_their_borders() -> None:
    """As HELM's truncate_sequence: the text is cut in the middle of a token, the tokens are not."""
    tokens = [{"text": text, "logprob": -1.0} for text in ("a.", "b", ".c")]
    made = truncated("a.b.c", tokens, ["."])
    assert made == {"text": "a", "logprob": -2.0, "tokens": tokens[:2]}
    assert truncated("a.b.c", tokens, ["x", "b"])["tokens"] == tokens[:1]
