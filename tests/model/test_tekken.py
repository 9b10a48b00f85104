"""Chats of a model whose tokenizer is only in tekken.json, judged by mistral-common."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.job.rows import Request, Row, encode
from flexengine.model.tokenizer import load_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hello world"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("mistral_common")
    words = [*(bytes([i]) for i in range(256)), b"he", b"ll", b"hell", b"hello", b" w", b"or"]
    config = {"pattern": r"[^\s]+|\s+", "num_vocab_tokens": len(words), "default_num_special_tokens": len(SPECIAL)}
    config |= {"default_vocab_size": len(words) + len(SPECIAL), "version": "v7"}
    ranks = [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None} for i, w in enumerate(words)]
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIAL)]
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": ranks, "special_tokens": special}))
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    return tmp_path


def encoded(model: Path, fields: dict[str, Any]) -> Request | Row:
    return encode(Row(0, 1, fields), load_tokenizer(model), 512, SamplingParams(max_tokens=4))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_chat_has_the_tokens_of_mistral_common(model: Path, tools: Any, caplog: Any, capfd: Any) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest  # type: ignore[import-not-found]
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # type: ignore[import-not-found]

    chat = ChatCompletionRequest.from_openai(ASKED, tools)
    expected = MistralTokenizer.from_file(str(model / "tekken.json")).encode_chat_completion(chat).tokens
    found = encoded(model, {"messages": ASKED} | ({"tools": tools} if tools else {}))
    assert isinstance(found, Request)
    assert list(found.prompt_ids) == expected
    assert "unsafe" not in capfd.readouterr().err + caplog.text


def test_a_text_is_no_chat_and_a_wrong_chat_is_an_error_row(model: Path) -> None:
    text, wrong = encoded(model, {"prompt": "hello"}), encoded(model, {"messages": [{"role": "x", "content": "a"}]})
    assert isinstance(text, Request)
    assert text.prompt_ids == (1, len(SPECIAL) + 259)
    assert isinstance(wrong, Row)
    assert wrong.error == "line 1: messages cannot be tokenised: ValueError: Unknown message role: x"
