"""Requests of HELM as rows of a job, and rows of its output as results of HELM. A request is a dict with the fields of
HELM's `Request`.

Prompts are tokenized, and ended, as HELM's own HuggingFaceClient does.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from flexengine.config import MAX_STOPS, SamplingParams
from flexengine.errors import InvalidInput, library_faults, shown
from flexengine.job.bounds import check_text
from flexengine.job.results import logprob_of
from flexengine.job.templates import chat_text

Token = dict[str, Any]

STATE = "scenario_state.json"  # HELM's file of requests and results, in the folder of a run
ID = "request"  # field of a row: the digest of its request
_USED = ("prompt", "messages", "temperature", "num_completions", "max_tokens", "stop_sequences", "echo_prompt", "top_p",
         "presence_penalty", "frequency_penalty", "random")  # fmt: skip
# Fields that do not change what is computed. top_k_per_token is no top_k of sampling: it is the number of likely tokens
# that some services return, and HELM's HuggingFaceClient does not read it.
_UNUSED = ("model", "model_deployment", "top_k_per_token")
_REFUSED = ("embedding", "multimodal_prompt", "image_generation_parameters", "response_format")


class Encoding:
    """How the requests of a deployment are converted. Raise InvalidInput if there is no tokenizer, or no chat template
    though one is to be applied.

    Args:
        apply_chat_template: write prompts as a user's message, with the model's chat template. None applies the
            template if there is one, as HELM does.
        end_of_text: text that ends a completion, beside the request's stop sequences; "" is none, None is the
            tokenizer's end-of-sequence token.
        model_logprobs: generated tokens have the model's own log probabilities at temperature 0, too; else these are 0,
            as with HELM's HuggingFaceClient, which gives those of the distribution that it samples from.
    """

    def __init__(
        self,
        tokenizer: Any,
        apply_chat_template: bool | None = None,
        end_of_text: str | None = None,
        model_logprobs: bool = False,
    ) -> None:
        if tokenizer is None:
            lacks = "the checkpoint has no tokenizer, and requests of HELM are text"
            raise InvalidInput(f"{lacks}; add the tokenizer's files to the model's directory")
        template = bool(getattr(tokenizer, "chat_template", None))
        if apply_chat_template and not template:
            lacks = "apply_chat_template is true, but the model has no chat template"
            raise InvalidInput(f"{lacks}; leave it out, or take an instruction-tuned model")
        self.tokenizer, self.model_logprobs, self._began = tokenizer, model_logprobs, datetime.now()
        self.apply_chat_template = template if apply_chat_template is None else apply_chat_template
        self.end_of_text = tokenizer.eos_token or "" if end_of_text is None else end_of_text

    def prompt_ids(self, request: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a request's prompt. Raise InvalidInput if there are none."""
        text, messages = request.get("prompt") or "", request.get("messages")
        if messages and not self.apply_chat_template:
            fault = "the request has messages, but no chat template is applied"
            raise InvalidInput(f"{fault}; apply_chat_template must be true for this scenario")
        if self.apply_chat_template:
            messages = messages or [{"role": "user", "content": text}]
            with library_faults("the chat template refuses the request"):
                text = chat_text(self.tokenizer, messages, None, self._began, {"add_generation_prompt": True})
        with library_faults("the request cannot be tokenised"):
            ids = [int(i) for i in self.tokenizer(text, verbose=False)["input_ids"]]
        if not ids:
            raise InvalidInput("the request's prompt is empty, and the tokenizer adds no token that begins a sequence")
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raise InvalidInput if they cannot be decoded."""
        with library_faults("tokens cannot be decoded"):
            text: str = self.tokenizer.decode(ids)
        return text

    def added_tokens(self) -> int:
        """Return how many tokens a prompt has beside those that HELM counts: special tokens and the chat template's."""
        counted = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return len(self.prompt_ids({"prompt": "a"})) - len(counted)


def digest_of(request: Mapping[str, Any]) -> str:
    """Return a text by which equal requests are known: 32 hexadecimal digits."""
    used = {name: request[name] for name in _USED if request.get(name) is not None}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:32]


def is_scored(request: Mapping[str, Any]) -> bool:
    """Return whether the request is for log probabilities of its prompt."""
    return bool(request.get("echo_prompt")) and request.get("max_tokens") == 0


def row_of(request: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Return the row of a request: one with `prompt_token_ids` that generates, or one with `context` and `continuation`
    that is scored. It has the field ID. Raise InvalidInput if the request needs what the engine cannot do, or a value
    is not allowed."""
    if (fault := next(_faults(request), None)) is not None:
        raise InvalidInput(f"the request has {fault}")
    own = {ID: digest_of(request)}
    ids = encoding.prompt_ids(request)
    if is_scored(request):
        if len(ids) < 2:
            fault = f"the prompt {shown(request['prompt'])} has one token, and its probability is that of the others"
            raise InvalidInput(f"{fault}; it must have at least 2")
        return {**own, "context": ids[:1], "continuation": ids[1:]}
    # Special tokens are no part of the engine's text, so that they are stop tokens. Stop strings beyond those that the
    # engine takes only cut the finished text.
    texts, tokenizer = request.get("stop_sequences") or [], encoding.tokenizer
    special = {text: tokenizer.convert_tokens_to_ids(text) for text in texts if text in tokenizer.all_special_tokens}
    random = request.get("random")
    sampling = {
        "max_tokens": request["max_tokens"],
        "temperature": request.get("temperature", 1.0),
        "top_p": request.get("top_p", 1),
        "n": request.get("num_completions", 1),
        "seed": 0 if random is None else int.from_bytes(hashlib.sha256(random.encode()).digest()[:7]),
        "presence_penalty": request.get("presence_penalty", 0),
        "stop": [text for text in texts if text not in special][:MAX_STOPS],
        "stop_token_ids": list(special.values()),
        "frequency_penalty": request.get("frequency_penalty", 0),
    }
    SamplingParams(**sampling)  # raises if a value is not allowed
    return {**own, "prompt_token_ids": ids, **sampling}


def _faults(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the engine cannot serve a request. SamplingParams checks numbers."""
    given = {name: value for name, value in request.items() if value not in (None, False)}
    for name in given:
        if name in _REFUSED:
            yield f"{name}, which the engine does not have; it completes text only"
        elif name not in (*_USED, *_UNUSED):
            yield f"{name} {shown(request[name])}, which this version of flexengine does not know"
    for name in ("prompt", "random"):
        text = given.get(name, "")
        if not isinstance(text, str):
            yield f"{name} {shown(text)}; it must be text"
        check_text(name, text)
    for name, kind, what in (("messages", dict, "objects"), ("stop_sequences", str, "texts")):
        value = given.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            yield f"{name} {shown(value)}; it must be an array of {what}"
    if given.get("prompt") and given.get("messages"):
        yield "both prompt and messages; it must have one of them"
    if request.get("max_tokens") is None:
        yield "no max_tokens; it must be one of HELM 0.5"
    if request.get("max_tokens") == 0 and (not is_scored(request) or request.get("num_completions", 1) != 1):
        probabilities = "which gives the log probabilities of the prompt"
        yield f"max_tokens 0; this is allowed with echo_prompt and one completion only, {probabilities}"


def result_of(request: Mapping[str, Any], row: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Return the result of a request, a dict with the fields of HELM's `RequestResult`. Raise InvalidInput if the job
    computed no log probabilities, and the result needs them.

    Texts, tokens and log probabilities are those of HELM's own HuggingFaceClient. There are no times: the time of a
    single request in a batch is not defined, and an interrupted job gives the same bytes. encoding: the encoding with
    which the row of the input was made.
    """
    if row["error"] is not None:
        return {"success": False, "embedding": [], "completions": [], "cached": False, "error": row["error"]}
    if is_scored(request):  # the prompt; its first token has the log probability 0
        ids = [*row["context"], *row["token_ids"]]
        tokens = _tokens(ids, [0.0, *_logprobs(row)], encoding)
        completions = [_completion(encoding.decoded(ids), tokens)]
    else:
        completions = [_generated(request, sample, encoding) for sample in row.get("samples") or [row]]
    return {"success": True, "embedding": [], "completions": completions, "cached": False}


def _generated(request: Mapping[str, Any], sample: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    ids = sample["token_ids"]
    drawn = request.get("temperature", 1.0) != 0 or encoding.model_logprobs
    tokens = _tokens(ids, _logprobs(sample) if drawn else [0.0] * len(ids), encoding)
    if request.get("echo_prompt"):
        prompt = encoding.prompt_ids(request)
        before = _tokens(prompt, [0.0] * len(prompt), encoding)
        return _completion(encoding.decoded([*prompt, *ids]), before + tokens)
    ends = [*(request.get("stop_sequences") or []), *([encoding.end_of_text] if encoding.end_of_text else [])]
    return truncated(encoding.decoded(ids), tokens, ends)


def _logprobs(result: Mapping[str, Any]) -> list[float]:
    if not isinstance(entries := result.get("logprobs"), list):
        remedy = "run the rows again with flexengine run --score --logprobs 0 --restart"
        raise InvalidInput(f"the results have no log probabilities; {remedy}")
    return [logprob_of(entry) for entry in entries]


def _tokens(ids: Sequence[int], logprobs: Sequence[float], encoding: Encoding) -> list[Token]:
    return [
        {"text": encoding.decoded([token]), "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)
    ]


def truncated(text: str, tokens: list[Token], ends: Sequence[str]) -> dict[str, Any]:
    """Return a completion that ends before the first of some texts, as HELM's `truncate_sequence` cuts it: the text at
    the character, the tokens before the first one that begins with such a text."""
    for end in ends:
        text = text.partition(end)[0]
        tokens = tokens[: next((i for i, token in enumerate(tokens) if token["text"].startswith(end)), len(tokens))]
    return _completion(text, tokens)


def _completion(text: str, tokens: list[Token]) -> dict[str, Any]:
    return {"text": text, "logprob": sum(token["logprob"] for token in tokens), "tokens": tokens}
