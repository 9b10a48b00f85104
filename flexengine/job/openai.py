"""OpenAI's batch format: input lines hold requests, output lines hold responses.

Input: {"custom_id": ..., "method": "POST", "url": "/v1/completions" or "/v1/chat/completions", "body": {...}}. URLs of
other services that end alike, such as Azure's /chat/completions, are read, too. Fields of the body that are absent or
null take the job's defaults, even if OpenAI has another default (temperature). Unknown fields are refused, never
ignored. Output: {"id", "custom_id", "response", "error"}. An output line depends only on the input line and its result,
so that a resumed job writes the same bytes.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from flexengine.config import Completion, Result
from flexengine.errors import InvalidInput, alike, bracketed, json_kind, listed, shown
from flexengine.job.chats import messages_of, tools_of, with_parsed_arguments
from flexengine.job.foreign import FOREIGN, OVERRIDES, TOOLS, check_format
from flexengine.job.near_names import stated
from flexengine.job.row_fields import meant_field
from flexengine.job.rows import Row

COMPLETIONS, CHAT = URLS = ("/v1/completions", "/v1/chat/completions")
MAX_ID_CHARACTERS = 512
_SAME = tuple(name for name in OVERRIDES if name not in ("max_tokens", "logprobs"))  # with names of vLLM
_WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "service_tier", "prediction", "priority",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options",
    # of vLLM and SGLang: identity, caches, and what is returned beside the text
    "request_id", "rid", "cache_salt", "return_token_ids", "return_tokens_as_token_ids", "return_hidden_states",
    "stream_reasoning", "guided_decoding_backend", "guided_whitespace_pattern",
    # of llama.cpp: caches, and settings of samplers whose switches are refused
    "cache_prompt", "id_slot", "timings_per_token", "dynatemp_exponent", "mirostat_tau", "mirostat_eta",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
}  # fmt: skip
# Fields that are accepted with the one value that is done here anyway, beside those of FOREIGN.
_ONLY = {"modalities": ["text"], "response_format": {"type": "text"}}
_OTHERS = sorted({*_WITHOUT_EFFECT, *_ONLY, "messages", "prompt", TOOLS, "tool_choice", "parallel_tool_calls"})
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
_CONFIRMED_AT_ONCE = 4096  # repeated hashes that are compared by custom_id in one pass over the rows
_VERY_UNLIKELY = -9999.0  # OpenAI's value for a log probability of minus infinity, which JSON cannot hold


def custom_id_of(fields: dict[str, Any]) -> str:
    """Return the line's custom_id, or "" if it is absent or not allowed."""
    value = fields.get("custom_id")
    return value if isinstance(value, str) and len(value) <= MAX_ID_CHARACTERS else ""


def kind_of(url: Any) -> str | None:
    """Return which of URLS the URL of a batch line means, with another beginning or a query; None for another one."""
    path = f"/{url.partition('?')[0].rstrip('/')}" if isinstance(url, str) else ""
    return next((kind for kind in reversed(URLS) if path.endswith(kind.removeprefix("/v1"))), None)


def request_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a batch line's request, with the field names of a plain row. `encode` checks the values of its fields.
    Raise InvalidInput if the line is no valid batch line; the message names the field."""
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    kind = kind_of(url)
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidInput(f"{stated('custom_id', fields)}; it must be a string that is not empty")
    if len(custom_id) > MAX_ID_CHARACTERS:
        raise InvalidInput(f"custom_id has {len(custom_id)} characters; at most {MAX_ID_CHARACTERS} are allowed")
    if str(fields.get("method")).upper() != "POST":
        raise InvalidInput(f"{stated('method', fields)}; it must be POST")
    if kind is None:
        raise InvalidInput(f"{stated('url', fields)}; it must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidInput(f"{stated('body', fields, json_kind)}; it must be an object")
    if misplaced := sorted({"prompt", "messages", "max_tokens", "max_completion_tokens", *_SAME} & set(fields)):
        raise InvalidInput(f"has {misplaced} beside body; move them into body")
    if (main := "messages" if kind == CHAT else "prompt") not in body:
        other = "messages" if kind == COMPLETIONS else "prompt"
        has = f", and {other} is for {URLS[kind == COMPLETIONS]}" if other in body else ""
        raise InvalidInput(f"{stated(main, body)}; body must have it for {url}{has}")
    remaining = {name: value for name, value in body.items() if value is not None}
    request = _chat(remaining) if kind == CHAT else _completion(remaining)
    request |= _max_tokens(remaining)
    request |= {name: remaining.pop(name) for name in [*remaining] if name in _SAME or name in FOREIGN}
    check_format(remaining)
    known = {**dict.fromkeys(_WITHOUT_EFFECT, ...), **_ONLY}
    if refused := sorted(name for name, value in remaining.items() if known.get(name) not in (..., value)):
        near = {name: meant_field(name) or "".join(alike(name, _OTHERS, 0.8)) for name in refused[:20]}
        rename = listed([f"{name} to {ours}" for name, ours in near.items() if ours not in ("", name)])
        remedy = f"remove them{rename and f', or rename {rename}'}"
        raise InvalidInput(f"body has {bracketed(refused)}, which {url} does not support here; {remedy}")
    return request


def _max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in body]
    values = [body.pop(name) for name in names]
    if len(values) == 2 and values[0] != values[1]:
        both = " and ".join(f"{name} {shown(value)}" for name, value in zip(names, values, strict=True))
        raise InvalidInput(f"body has {both}; give one of them")
    return {"max_tokens": values[0]} if values else {}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    prompt, logprobs = body.pop("prompt", None), body.pop("logprobs", None)
    options = {} if logprobs is None else {"logprobs": logprobs}
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # an array of one prompt, as clients write it, has the response of the prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, **options}
    if not isinstance(prompt, list) or not prompt:
        raise InvalidInput(f"prompt is {shown(prompt)}; it must be a string or an array of token ids")
    if any(isinstance(part, (str, list)) for part in prompt):
        raise InvalidInput(f"prompt is an array of {len(prompt)} prompts; a line must have one: give each its own line")
    return {"prompt_token_ids": prompt, **options}


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    messages, own = body.pop("messages", None), list[Any]()
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):  # unknown fields are refused unless they are empty
            message = {n: value for n, value in message.items() if n in _MESSAGE or value not in (None, False, [], {})}
            if unknown := sorted(set(message) - _MESSAGE):
                known = ", ".join(sorted(_MESSAGE))
                raise InvalidInput(f"messages[{number}] has {bracketed(unknown)}; a message may have {known}")
        own.append(with_parsed_arguments(message))
    tools = tools_of(body)
    for name in (TOOLS, "tool_choice", "parallel_tool_calls"):
        body.pop(name, None)
    logprobs, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(logprobs, bool):
        raise InvalidInput(f"logprobs is {shown(logprobs)}; it must be true or false")
    if top and not logprobs:
        raise InvalidInput("top_logprobs is given without logprobs; set logprobs to true, too")
    chosen = ({"logprobs": top or 0} if logprobs else {}) | ({TOOLS: tools} if tools else {})
    return {"messages": messages_of(own or messages), **chosen}


def duplicate_ids(rows: Iterable[Row], hashes: "array[int]", most: int = 10) -> list[tuple[str, int, int]]:
    """Return up to `most` repeated custom_ids of batch lines, each with its first line and a line that repeats it.

    The rows are iterated again only if two hashes are equal. Memory is 8 bytes a row for `hashes`, and one byte a row.

    Args:
        rows: iterated once per _CONFIRMED_AT_ONCE repeated hashes.
        hashes: hash(custom_id) of every row that has one; sorted in place.
    """
    import numpy as np

    ordered = np.frombuffer(hashes, dtype=np.int64) if hashes else np.empty(0, np.int64)
    ordered.sort()
    suspects = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])

    def repeats(chosen: set[int]) -> Iterator[tuple[str, int, int]]:
        first = dict[str, int]()
        for row in rows:
            if row.custom_id and hash(row.custom_id) in chosen:
                if row.custom_id in first:
                    yield row.custom_id, first[row.custom_id], row.line
                first.setdefault(row.custom_id, row.line)

    for start in range(0, len(suspects), _CONFIRMED_AT_ONCE):
        chosen = set(suspects[start : start + _CONFIRMED_AT_ONCE].tolist())
        if repeated := list(islice(repeats(chosen), most)):
            return repeated
    return []


def batch_line(row: Row, result: Result, model_name: str, created: int) -> dict[str, Any]:
    """Return the output line of a batch line.

    A refused line, whose error begins with its place in the file, gets the response that OpenAI gives to a bad request:
    status_code 400, with the reason in the body. A row that failed later has an error and no response. A custom_id that
    is not allowed is returned unchanged. created: Unix time of the job's start.
    """
    name = f"{row.index} {row.custom_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(name, digest_size=16).hexdigest()
    line: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": row.fields.get("custom_id")}
    if result.error is None:
        status, body = 200, _body(row, result, digest)
        body |= {"created": created, "model": model_name}
    elif result.error.startswith(f"{row.place}: "):
        fault = {"message": result.error, "type": "invalid_request_error", "param": None, "code": None}
        status, body = 400, {"error": fault}
    else:
        return {**line, "response": None, "error": {"code": "generation_failed", "message": result.error}}
    return {**line, "response": {"status_code": status, "request_id": f"req_{digest}", "body": body}, "error": None}


def _body(row: Row, result: Result, digest: str) -> dict[str, Any]:
    chat = kind_of(row.fields.get("url")) == CHAT
    samples: Sequence[Completion | Result] = result.samples or [result]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        "choices": [{"index": i, **_choice(sample, chat)} for i, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.completion_tokens,
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        },
    }


def _choice(sample: Completion | Result, chat: bool) -> dict[str, Any]:
    text, tokens, logprobs = sample.generated_text or "", sample.logprobs, None
    if tokens is not None and chat:
        tops = [[_chat_token(other) for other in token["top_logprobs"]] for token in tokens]
        own = [{**_chat_token(token), "top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]
        logprobs = {"content": own, "refusal": None}
    elif tokens is not None:
        logprobs = _text_logprobs(tokens, text)
    content = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    ids = {"token_ids": sample.token_ids} if sample.generated_text is None else {}  # there is no tokenizer, so no text
    return {**content, **ids, "finish_reason": sample.finish_reason, "logprobs": logprobs}


def _text_logprobs(tokens: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Return logprobs in the format of completions. text_offset counts characters of `text`, without the prompt."""
    names, tops = [_token(t) for t in tokens], [dict[str, float]() for _ in tokens]
    for token, top in zip(tokens, tops, strict=True):
        for other in (*token["top_logprobs"], token):  # of tokens with equal text, the first and likeliest counts
            top.setdefault(_token(other), _finite(other["logprob"]))
    return {
        "tokens": names,
        "token_logprobs": [_finite(t["logprob"]) for t in tokens],
        "top_logprobs": tops,
        "text_offset": _offsets(names, text),
    }


def _offsets(names: list[str], text: str) -> list[int]:
    """Return where each token's text begins in `text`, which may end before the last tokens.

    Tokens that are no text begin where the next one does: special tokens, and parts of a character before its last
    part, whose names hold broken characters. The text then goes on at the next token that is found in it.
    """
    offsets, end, waiting = list[int](), 0, ""
    for name in names:
        # Parts of characters have made one character at least, and special tokens none.
        first = end + ("\ufffd" in waiting)
        at = text.find(name, first if waiting else end, end + len(waiting) + len(name))
        if at >= 0 and (name if waiting else at == end):
            offsets.append(at)
            end, waiting = at + len(name), ""
        elif end + len(name) > len(text) and text[end:] == name[: len(text) - end] and "\ufffd" not in name:
            offsets.append(end)  # the text was cut within this token, or before it
            end, waiting = end + len(name), ""
        else:
            offsets.append(end)
            waiting += name
    return offsets


def _chat_token(token: dict[str, Any]) -> dict[str, Any]:
    """Return a token in the format of chat logprobs. `bytes` is None if the token is part of a character, as its text
    then does not have its bytes."""
    name = _token(token)
    known = token["token"] is not None and "\ufffd" not in name
    return {"token": name, "logprob": _finite(token["logprob"]), "bytes": list(name.encode()) if known else None}


def _token(token: dict[str, Any]) -> str:
    return f"token_id:{token['token_id']}" if token["token"] is None else str(token["token"])


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _VERY_UNLIKELY
