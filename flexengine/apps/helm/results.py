"""Rows of a job's output as results of HELM: dicts with the fields of HELM's `RequestResult`.

Texts, tokens and log probabilities are those of HELM's own HuggingFaceClient. They have no times: the time of a single
request in a batch is not defined, and an interrupted job gives the same bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flexengine.apps.helm.requests import Encoding, is_scored
from flexengine.errors import InvalidInput
from flexengine.job.results import logprob_of

Token = dict[str, Any]


def result_of(request: Mapping[str, Any], row: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Return the result of a request.

    Args:
        row: row of the output.
        encoding: the encoding with which the row of the input was made.

    Raises:
        InvalidInput: the job computed no log probabilities, and the result needs them.
    """
    if row["error"] is not None:
        return {"success": False, "embedding": [], "completions": [], "cached": False, "error": row["error"]}
    if is_scored(request):
        completions = [_scored(row, encoding)]
    else:
        samples = row.get("samples") or [row]
        completions = [_generated(request, sample, encoding) for sample in samples]
    return {"success": True, "embedding": [], "completions": completions, "cached": False}


def _scored(row: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Return the prompt with the log probability of each token. The first token has 0."""
    ids = [*row["context"], *row["token_ids"]]
    logprobs = [0.0, *_logprobs(row)]
    return _completion(encoding.tokenizer.decode(ids), _tokens(ids, logprobs, encoding))


def _generated(request: Mapping[str, Any], sample: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    ids = sample["token_ids"]
    logprobs = [0.0] * len(ids)
    if request.get("temperature", 1.0) != 0 or encoding.model_logprobs:
        logprobs = _logprobs(sample)
    tokens = _tokens(ids, logprobs, encoding)
    if request.get("echo_prompt"):
        prompt = encoding.prompt_ids(request)
        before = _tokens(prompt, [0.0] * len(prompt), encoding)
        return _completion(encoding.tokenizer.decode([*prompt, *ids]), before + tokens)
    ends = [*(request.get("stop_sequences") or []), *([encoding.end_of_text] if encoding.end_of_text else [])]
    return truncated(encoding.tokenizer.decode(ids), tokens, ends)


def _logprobs(result: Mapping[str, Any]) -> list[float]:
    """Return the log probability of each token."""
    if not isinstance(entries := result.get("logprobs"), list):
        raise InvalidInput(
            "the results have no log probabilities; run the rows again with flexengine run --score"
            " --logprobs 0 --restart"
        )
    return [logprob_of(entry) for entry in entries]


def _tokens(ids: Sequence[int], logprobs: Sequence[float], encoding: Encoding) -> list[Token]:
    return [
        {"text": encoding.tokenizer.decode([token]), "logprob": logprob}
        for token, logprob in zip(ids, logprobs, strict=True)
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
