"""Requests of HELM as rows of a job. A request is a dict with the fields of HELM's `Request`.

Prompts are tokenized, and ended, as HELM's own HuggingFaceClient does.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexengine.config import MAX_STOPS, SamplingParams, shown
from flexengine.errors import InvalidInput
from flexengine.job.prompts import check_text

STATE = "scenario_state.json"  # HELM's file of requests and results, in the folder of a run
ID = "request"  # field of a row: the digest of its request
_USED = ("prompt", "messages", "temperature", "num_completions", "max_tokens", "stop_sequences", "echo_prompt", "top_p",
         "presence_penalty", "frequency_penalty", "random")  # fmt: skip
# Fields that do not change what is computed. top_k_per_token is no top_k of sampling: it is the number of likely tokens
# that some services return, and HELM's HuggingFaceClient does not read it.
_UNUSED = ("model", "model_deployment", "top_k_per_token")
_REFUSED = ("embedding", "multimodal_prompt", "image_generation_parameters", "response_format")


@dataclass(frozen=True)
class Encoding:
    """How the requests of a deployment are converted.

    Attributes:
        tokenizer: the model's tokenizer, of transformers.
        apply_chat_template: write prompts as a user's message, with the model's chat template.
        end_of_text: text that ends a completion, beside the request's stop sequences; "" is none.
        model_logprobs: generated tokens have the model's own log probabilities at temperature 0, too; else these are 0,
            as with HELM's HuggingFaceClient, which gives those of the distribution that it samples from.
    """

    tokenizer: Any
    apply_chat_template: bool
    end_of_text: str
    model_logprobs: bool = False

    @classmethod
    def of(
        cls, tokenizer: Any, apply_chat_template: bool | None = None, end_of_text: str | None = None,
        model_logprobs: bool = False,
    ) -> "Encoding":  # fmt: skip
        """Return the encoding of a deployment.

        Args:
            tokenizer: the model's tokenizer; None if it has none.
            apply_chat_template: None applies the template if there is one, as HELM does.
            end_of_text: None is the tokenizer's end-of-sequence token.

        Raises:
            InvalidInput: there is no tokenizer, or no chat template though one is to be applied.
        """
        if tokenizer is None:
            raise InvalidInput(
                "the checkpoint has no tokenizer, and requests of HELM are text; add the tokenizer's"
                " files to the model's directory"
            )
        template = bool(getattr(tokenizer, "chat_template", None))
        if apply_chat_template and not template:
            raise InvalidInput(
                "apply_chat_template is true, but the model has no chat template; leave it out, or take"
                " an instruction-tuned model"
            )
        apply = template if apply_chat_template is None else apply_chat_template
        end = tokenizer.eos_token or "" if end_of_text is None else end_of_text
        return cls(tokenizer, apply, end, model_logprobs)

    def prompt_ids(self, request: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a request's prompt. Raise InvalidInput if there are none."""
        text = request.get("prompt") or ""
        if messages := request.get("messages"):
            if not self.apply_chat_template:
                raise InvalidInput(
                    "the request has messages, but no chat template is applied; apply_chat_template must"
                    " be true for this scenario"
                )
            text = self._templated(messages)
        elif self.apply_chat_template:
            text = self._templated([{"role": "user", "content": text}])
        ids = [int(i) for i in self.tokenizer(text, verbose=False)["input_ids"]]
        if not ids:
            raise InvalidInput("the request's prompt is empty, and the tokenizer adds no token that begins a sequence")
        return ids

    def added_tokens(self) -> int:
        """Return how many tokens a prompt has beside those that HELM counts: special tokens and the chat template's."""
        text = "a"
        return len(self.prompt_ids({"prompt": text})) - len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _templated(self, messages: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


def digest_of(request: Mapping[str, Any]) -> str:
    """Return a text by which equal requests are known: 32 hexadecimal digits."""
    used = {name: request[name] for name in _USED if request.get(name) is not None}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:32]


def is_scored(request: Mapping[str, Any]) -> bool:
    """Return whether the request is for log probabilities of its prompt."""
    return bool(request.get("echo_prompt")) and request.get("max_tokens") == 0


def row_of(request: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Return the row of a request: one with `prompt_token_ids` that generates, or one with `context` and `continuation`
    that is scored. It has the field ID.

    Raises:
        InvalidInput: the request needs what the engine cannot do, or a value is not allowed.
    """
    _check(request)
    own = {ID: digest_of(request)}
    ids = encoding.prompt_ids(request)
    if is_scored(request):
        if len(ids) < 2:
            raise InvalidInput(
                f"the prompt {shown(request['prompt'])} has one token, and its probability is that of"
                " the others; it must have at least 2"
            )
        return {**own, "context": ids[:1], "continuation": ids[1:]}
    stop, stop_ids = _stops(request.get("stop_sequences") or [], encoding.tokenizer)
    sampling = {
        "max_tokens": request["max_tokens"], "temperature": request.get("temperature", 1.0),
        "top_p": request.get("top_p", 1), "n": request.get("num_completions", 1), "seed": _seed(request.get("random")),
        "presence_penalty": request.get("presence_penalty", 0), "stop": stop, "stop_token_ids": stop_ids,
        "frequency_penalty": request.get("frequency_penalty", 0),
    }  # fmt: skip
    SamplingParams(**sampling)  # raises if a value is not allowed
    return {**own, "prompt_token_ids": ids, **sampling}


def _check(request: Mapping[str, Any]) -> None:
    """Raise InvalidInput if the engine cannot serve a request."""
    given = {name: value for name, value in request.items() if value not in (None, False)}
    for name in given:
        if name in _REFUSED:
            raise InvalidInput(f"the request has {name}, which the engine does not have; it completes text only")
        if name not in (*_USED, *_UNUSED):
            raise InvalidInput(
                f"the request has {name} {shown(request[name])}, which this version of flexengine does not know"
            )
    _check_kinds(given)
    if given.get("prompt") and given.get("messages"):
        raise InvalidInput("the request has both prompt and messages; it must have one of them")
    if request.get("max_tokens") is None:
        raise InvalidInput("the request has no max_tokens; it must be one of HELM 0.5")
    if request.get("max_tokens") == 0 and (not is_scored(request) or request.get("num_completions", 1) != 1):
        raise InvalidInput(
            "the request has max_tokens 0; this is allowed with echo_prompt and one completion only,"
            " which gives the log probabilities of the prompt"
        )


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Raise InvalidInput if texts of a request are none. SamplingParams checks its numbers."""
    for name in ("prompt", "random"):
        if not isinstance(text := given.get(name, ""), str):
            raise InvalidInput(f"the request has {name} {shown(text)}; it must be text")
        check_text(name, text)
    for name, kind, what in (("messages", dict, "objects"), ("stop_sequences", str, "texts")):
        if not isinstance(value := given.get(name, []), list) or not all(isinstance(each, kind) for each in value):
            raise InvalidInput(f"the request has {name} {shown(value)}; it must be an array of {what}")


def _stops(texts: list[str], tokenizer: Any) -> tuple[list[str], list[int]]:
    """Return the stop strings and the stop tokens of a request. Special tokens are no part of the engine's text, so
    that they are stop tokens. Further stop strings than the engine takes only cut the finished text."""
    special = {text: tokenizer.convert_tokens_to_ids(text) for text in texts if text in tokenizer.all_special_tokens}
    return [text for text in texts if text not in special][:MAX_STOPS], list(special.values())


def _seed(random: str | None) -> int:
    """Return the seed of a request: 0, or one that HELM's `random` determines."""
    return 0 if random is None else int.from_bytes(hashlib.sha256(random.encode()).digest()[:7])
