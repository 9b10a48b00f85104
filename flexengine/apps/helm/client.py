"""A client of HELM for runners that give one request at a time, such as HELM's own. `runner` is faster."""

import dataclasses
import threading
from typing import Any

from helm.clients.client import CachingClient
from helm.common.cache import CacheConfig
from helm.common.request import ErrorFlags, Request, RequestResult, wrap_request_time

from flexengine.apps.helm.exchange import PARAMS, encoding_of, engine_of
from flexengine.apps.helm.imported import helm_result
from flexengine.apps.helm.requests import result_of, row_of
from flexengine.errors import FlexError

_LOCK = threading.Lock()  # an engine runs one job at a time


class FlexClient(CachingClient):  # type: ignore[misc]
    """Computes one request after the other."""

    def __init__(self, cache_config: CacheConfig, end_of_text_token: str | None = None, **args: Any) -> None:
        """Open the model. No weights are read. Errors are those of `engine_of`.

        Args:
            end_of_text_token: text that ends a completion; None is the tokenizer's end-of-sequence token.
            args: `apply_chat_template`, `model_logprobs` (see `Encoding`), options of EngineOptions and switches of
                Lossy by name.
        """
        super().__init__(cache_config=cache_config)
        self._args = {**args, "end_of_text_token": end_of_text_token}
        self._encoding = encoding_of(self._args)

    def make_request(self, request: Request) -> RequestResult:
        """Return the result of a request, from HELM's cache if it is there."""
        given = dataclasses.asdict(request)
        try:
            row = row_of(given, self._encoding)
            key = {**row, "options": {name: str(value) for name, value in self._args.items()}}
            output, cached = self.cache.get(key, wrap_request_time(lambda: self._compute(row)))
        except FlexError as error:
            return RequestResult(success=False, embedding=[], completions=[], cached=False, error=str(error),
                                 error_flags=ErrorFlags(is_retriable=False))  # fmt: skip
        found = helm_result(result_of(given, row | output, self._encoding))
        return dataclasses.replace(
            found, cached=cached, request_time=output["request_time"], request_datetime=output["request_datetime"]
        )

    def _compute(self, row: dict[str, Any]) -> dict[str, Any]:
        engine = engine_of(self._args)
        with _LOCK:
            if "continuation" in row:
                result = engine.score(row["context"], row["continuation"])
            else:
                result = engine.generate(row, PARAMS)
        if result.error is not None:
            raise FlexError(result.error)  # HELM's cache holds no errors
        columns: dict[str, Any] = result.columns()
        # Plain values, as HELM's caches store JSON or pickles.
        return {**columns, **{name: [vars(each) for each in columns[name] or ()] for name in ("samples", "scores")}}
