"""Lines of OpenAI batch results, judged by hand-written ones and, where it is installed, by the client library."""

import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest

from flexengine.config import Completion, Result
from flexengine.job.openai import CHAT, COMPLETIONS, batch_line
from flexengine.job.rows import Row
from tests.helpers.inputs import batch_fields as line


def entry(token: str | None, logprob: float, number: int = 7, top=()) -> dict:
    return {"token_id": number, "token": token, "logprob": logprob, "top_logprobs": list(top)}


def answer(result: Result, url: str = COMPLETIONS, **fields) -> dict:
    return batch_line(Row(4, 9, {**line(url), **fields}, custom_id="r-1"), result, "demo", 1700000000)


def test_a_completion():
    out = answer(Result(4, " there", [5, 6], "length", 3, 2))
    body = out["response"]["body"]
    assert out.keys() == {"id", "custom_id", "response", "error"}
    assert (out["custom_id"], out["error"], out["response"]["status_code"]) == ("r-1", None, 200)
    assert out["id"].startswith("batch_req_")
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1700000000,
        "model": "demo",
        "choices": [{"index": 0, "text": " there", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_a_chat_completion_with_samples():
    samples = [Completion("a", [5], "stop"), Completion("b", [6, 7], "length")]
    body = answer(Result(4, "a", [5], "stop", 3, 3, samples=samples), CHAT)["response"]["body"]
    assert body.pop("id").startswith("chatcmpl-")
    said = [{"role": "assistant", "content": text, "refusal": None} for text in "ab"]
    assert body == {
        "object": "chat.completion",
        "created": 1700000000,
        "model": "demo",
        "choices": [
            {"index": 0, "message": said[0], "finish_reason": "stop", "logprobs": None},
            {"index": 1, "message": said[1], "finish_reason": "length", "logprobs": None},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    }


def test_logprobs_of_completions():
    top = [entry("a", -0.1, 1), entry("\ufffd", -2.0, 2), entry("\ufffd", -3.0, 3)]
    tokens = [entry("€", -4.0, 4, top), entry(None, -math.inf, 5), entry("xyz", -0.5, 6, [entry("xyz", -0.5, 6)])]
    (choice,) = answer(Result(4, "€", [4, 5, 6], "stop", 1, 3, logprobs=tokens))["response"]["body"]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["€", "token_id:5", "xyz"],
        "token_logprobs": [-4.0, -9999.0, -0.5],
        "top_logprobs": [{"a": -0.1, "\ufffd": -2.0, "€": -4.0}, {"token_id:5": -9999.0}, {"xyz": -0.5}],
        "text_offset": [0, 1, 11],
    }
    empty = answer(Result(4, "", [], "stop", 1, 0, logprobs=[]))["response"]["body"]["choices"][0]["logprobs"]
    assert empty == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@pytest.mark.parametrize(
    ("names", "text", "offsets"),
    [
        ([" put", " a"], " put a", [0, 4]),
        ([" put", " a"], "put a", [0, 3]),  # a text at the beginning of a sequence loses its space
        (["\ufffd", "\ufffd", "\ufffd", "x", "y"], "\u65e5xy", [0, 0, 0, 1, 2]),
        (["a", "\ufffd", "\ufffd", "\u65e5", "b"], "a\u65e5\u65e5b", [0, 1, 1, 2, 3]),
        (["a", "<|x|>", "b", "</s>"], "ab", [0, 1, 1, 2]),
        (["a", "\ufffd", "b"], "a\ufffdb", [0, 1, 2]),  # a byte that is no character
        ([" the", " end", " here"], " the", [0, 4, 8]),  # cut before a stop string
        ([" the", " end", "!"], " the e", [0, 4, 8]),
        ([], "", []),
    ],
)
def test_offsets_of_tokens_are_those_of_the_text(names, text, offsets):
    tokens = [entry(name, -1.0, 4, []) for name in names]
    (choice,) = answer(Result(4, text, [4] * len(names), "stop", 1, 3, logprobs=tokens))["response"]["body"]["choices"]
    assert choice["logprobs"]["text_offset"] == offsets


def test_logprobs_of_chat():
    tokens = [entry("€", -1.0, 4, [entry("a", -0.5, 1)]), entry("\ufffd", -2.0, 5)]
    (choice,) = answer(Result(4, "x", [4, 5], "stop", 1, 2, logprobs=tokens), CHAT)["response"]["body"]["choices"]
    first = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert choice["logprobs"] == {
        "content": [
            {"token": "€", "logprob": -1.0, "bytes": [226, 130, 172], "top_logprobs": [first]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_without_a_tokenizer_token_ids_are_given():
    (choice,) = answer(Result(4, None, [5, 6], "stop", 1, 2))["response"]["body"]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [5, 6])


def test_refused_and_failed_lines():
    refused = answer(Result(4, error="line 9: url is None"))
    assert refused["error"] is None
    assert refused["response"]["status_code"] == 400
    error = {"message": "line 9: url is None", "type": "invalid_request_error", "param": None, "code": None}
    assert refused["response"]["body"] == {"error": error}
    failed = answer(Result(4, error="logits are not finite"))
    assert failed["response"] is None
    assert failed["error"] == {"code": "generation_failed", "message": "logits are not finite"}
    assert answer(Result(4, error="line 9: custom_id is 5"), custom_id=5)["custom_id"] == 5
    row = Row(2, 3, custom_id="").refused("invalid JSON")
    unread = batch_line(row, Result(2, error=row.error), "m", 1)
    assert (unread["custom_id"], unread["response"]["status_code"]) == (None, 400)


def test_ids_are_different_for_each_line_and_the_same_in_every_process():
    out = [batch_line(Row(i, i + 1, line(), custom_id=c), Result(i, "x"), "m", 1) for i in range(3) for c in "ab"]
    assert len({o["id"] for o in out}) == len({o["response"]["request_id"] for o in out}) == 6
    code = "import json; from flexengine.job.openai import batch_line; from flexengine.job.rows import Row\n"
    code += "from flexengine.config import Result\n"
    code += f"print(json.dumps(batch_line(Row(0, 1, {line()!r}, custom_id='a'), Result(0, 'x'), 'm', 1)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(other.stdout) == out[0]
    assert all(a != b for a, b in pairwise(o["response"]["body"]["id"] for o in out))


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_the_client_library_reads_the_body(url):
    types = pytest.importorskip("openai.types")
    kind = types.Completion if url == COMPLETIONS else pytest.importorskip("openai.types.chat").ChatCompletion
    tokens = [entry("€", -1.0, 4, [entry("a", -0.5, 1)]), entry("\ufffd", -math.inf, 5)]
    samples = [Completion("a", [4, 5], "stop", tokens), Completion("b", [6], "length", [entry("b", -0.1)])]
    body = answer(Result(4, "a", [4, 5], "stop", 3, 3, None, tokens, samples), url)["response"]["body"]
    read = kind.model_validate(json.loads(json.dumps(body, allow_nan=False)), strict=True)
    assert read.model_extra in ({}, None)
    assert json.loads(read.model_dump_json(exclude_unset=True)) == body
