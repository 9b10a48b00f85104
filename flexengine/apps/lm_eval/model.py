"""The model `flexengine` of lm-evaluation-harness.

The harness gives all requests of a type in one list. `FlexLM` computes each list in one call of the engine, and stores
every result in the harness's cache (--use_cache) as soon as it is computed. Tokens are those of the harness's own model
`hf`.
"""

import json
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Self

from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text, resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from flexengine import __version__
from flexengine.activity import message
from flexengine.apps.lm_eval.arguments import MAX_GEN_TOKS, engine_options, generation_of, joined, unused
from flexengine.config import Result
from flexengine.engine.engine import Engine
from flexengine.errors import FlexError, InvalidInput, library_faults, shown
from flexengine.job.manifest import LOSSY, MODEL_FILES
from flexengine.job.same_job import differences
from flexengine.job.templates import TemplateFault, chat_text
from flexengine.records import as_whole

RECORD = "flexengine"  # key of the model's record in the cache; keys of responses are digests
Ids = Sequence[int]
Answer = tuple[float, bool]  # log probability in nats, and whether greedy decoding gives the continuation


@register_model("flexengine")
class FlexLM(TemplateLM):  # type: ignore[misc]
    """A model of lm-evaluation-harness.

    Attributes:
        engine: the engine, open until `close` is called or the object is deleted.
        max_length: most tokens of a sequence. Longer contexts lose their first tokens, as with `hf`.
        max_gen_toks: most tokens that are generated if a task sets no number.
    """

    max_gen_toks = MAX_GEN_TOKS

    def __init__(
        self, model: str | None = None, *, batch_size: int | str | None = None, max_batch_size: int | None = None,
        device: str | None = None, max_length: int | None = None, enable_thinking: bool | None = None,
        think_end_token: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Open a model. No weights are read.

        Args:
            model: a directory, a .gguf file or a hub id; None is the demo model. `pretrained` is the same.
            batch_size, max_batch_size: not used, as the plan chooses the sizes of batches; a message says so.
            device: auto, cpu, cuda, cuda:0 or sim.
            max_length: most tokens of a sequence; None is the model's context.
            enable_thinking: passed to the chat template; None leaves the template's default. True needs
                `think_end_token`, and refuses tasks that score given answers, as `hf` does.
            think_end_token: text that ends the model's thinking. The answer is the text after it.
            options: options of EngineOptions and switches of Lossy, by name.

        Raises:
            InvalidInput: an option is wrong, or the checkpoint has no tokenizer.
            FlexError: as for `Engine`.
        """
        super().__init__()
        if enable_thinking and think_end_token is None:
            lacks = "think_end_token, the text that ends the model's thinking"
            raise InvalidInput(f"enable_thinking is true without {lacks}; set both")
        given = options if model is None else {"model": model, **options}
        self.engine = engine = Engine(**engine_options(given, device))
        self._closing = weakref.finalize(self, engine.close)
        if (text := unused(batch_size, max_batch_size)) is not None:
            message(text, logging.WARNING)
        if engine.tokenizer is None:
            lacks = "the checkpoint has no tokenizer, and tasks of lm-evaluation-harness are text"
            raise InvalidInput(f"{lacks}; add the tokenizer's files to the model's directory")
        self.tokenizer = engine.tokenizer  # the model's tokenizer, of transformers
        skeleton = engine.core.skeleton
        most: int = skeleton.context_length or resolve_max_length(skeleton.config, self.tokenizer)
        max_length = as_whole(max_length)
        if max_length is not None and not (isinstance(max_length, int) and 2 <= max_length <= most):
            raise InvalidInput(f"max_length is {shown(max_length)}; it must be from 2 to {most}, the model's context")
        self.max_length = most if max_length is None else max_length
        self._thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._think_end_token = think_end_token
        self._said_truncated, self._began = False, datetime.now()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Return the model of a text of arguments, `name=value,name=value`; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Return the model of --model_args. additional_config: the harness's batch_size, max_batch_size and device."""
        return cls(**joined(arg_dict, additional_config or {}))

    def close(self) -> None:
        """Close the engine. Further calls do nothing."""
        self._closing()

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Store responses in a cache. Raise InvalidInput if it has those of another model."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            options = {"max_length": self.max_length, "think_end_token": self._think_end_token, **self._thinking}
            check_cache(cache_hook.dbdict, self.engine, options)

    # Tokens.

    @property
    def eot_token_id(self) -> int | None:
        """Return the token that ends a text; None if the tokenizer has none."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands for an empty context: the beginning-of-sequence token, or else the
        end-of-sequence token. Raise InvalidInput if the tokenizer has neither."""
        tokens: tuple[int | None, ...] = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        first = next((token for token in tokens if token is not None), None)
        if first is None:
            lacks = "the tokenizer has no token that begins or ends a sequence"
            raise InvalidInput(f"{lacks}, which an empty context and rolling log likelihoods need")
        return first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text. add_special_tokens: add the tokenizer's special tokens; None adds them unless
        the text begins with the token that begins a sequence."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self._encoded(string, add_special_tokens)

    def _encoded(self, text: str, special: bool | None) -> list[int]:
        """Return the token ids of a text. special: None is the tokenizer's default."""
        options = {} if special is None else {"add_special_tokens": special}
        with library_faults("a request cannot be tokenised"):
            return [int(i) for i in self.tokenizer(text, verbose=False, **options)["input_ids"]]

    def _cut(self, ids: list[int], most: int) -> list[int]:
        """Return the last `most` tokens. The first time that tokens are cut off, a message says so."""
        if len(ids) > most and not self._said_truncated:
            self._said_truncated = True
            text = f"a request has {len(ids)} tokens where {most} fit into max_length {self.max_length}"
            message(f"{text}; its first tokens are cut off, as those of all such requests", logging.WARNING)
        return ids[-most:]

    # Requests.

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Return the log probability of each continuation, and whether it is greedy."""
        if self._thinking.get("enable_thinking"):
            fault = "enable_thinking is true, but a task scores given answers"
            raise InvalidInput(f"{fault}; leave enable_thinking out, or run only tasks that generate")
        if (empty := next((r.args for r in requests if not r.args[1]), None)) is not None:
            fault = f"the continuation of the context {shown(empty[0])} is empty"
            raise InvalidInput(f"{fault}; it must have at least one token")
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Answer]:
        """Return the log probability of each continuation, and whether it is greedy. requests: (context, continuation)
        as text and as token ids of both."""
        pairs = []
        for texts, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                fault = f"the continuation {shown(texts[1])} has {len(continuation)} tokens"
                joined_with = "" if continuation else ", as the tokenizer joins it with the end of the context"
                raise InvalidInput(f"{fault}{joined_with}; it must have 1 to {self.max_length}, which is max_length")
            whole = self._cut(context + continuation, self.max_length + 1)
            pairs.append((whole[: -len(continuation)], continuation))
        answers: list[Any] = [None] * len(pairs)

        def keep(index: int, answer: Answer) -> None:
            answers[index] = answer
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        self._score(pairs, keep)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text. A text longer than max_length is cut into windows."""
        pairs, owners = list[tuple[Ids, Ids]](), list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(number)
        parts: list[list[float]] = [[] for _ in requests]
        windows = Counter(owners)

        def keep_finished(owner: int) -> None:
            if len(parts[owner]) == windows[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, math.fsum(parts[owner]))

        def keep(index: int, answer: Answer) -> None:
            parts[owners[index]].append(answer[0])
            keep_finished(owners[index])

        for owner in range(len(requests)):
            keep_finished(owner)  # those without a window
        self._score(pairs, keep)
        return [math.fsum(part) for part in parts]

    def _score(self, pairs: Sequence[tuple[Ids, Ids]], keep: Callable[[int, Answer], None]) -> None:
        """Compute log probabilities in one call of the engine. keep: called with each pair's number and answer."""
        failed: list[Result] = []

        def finish(result: Result) -> None:
            logprob, greedy = result.cumulative_logprob, result.is_greedy
            if result.error is not None or logprob is None or greedy is None:
                failed.append(result)
            else:
                keep(result.index, (logprob, greedy))

        if pairs:
            self.engine.score([c for c, _ in pairs], [c for _, c in pairs], on_result=finish)
        _check(failed, len(pairs))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that continues each context, before the first of all end strings, without the model's
        thinking."""
        ways = [generation_of(request.args[1], self.eot_token_id) for request in requests]
        rows = [
            {"prompt_token_ids": self._prompt(request.args[0], params.max_tokens)}
            for request, (params, _) in zip(requests, ways, strict=True)
        ]
        texts: list[Any] = [None] * len(rows)
        failed: list[Result] = []
        end = [] if self.eot_token_id is None else [self.tokenizer.decode(self.eot_token_id)]
        with closing(self.engine.stream(rows, [params for params, _ in ways])) as stream:
            for result in stream:
                if result.error is not None:
                    failed.append(result)
                    continue
                ends = [*ways[result.index][1], *end]
                # As `hf` decodes: without the prompt, so that some tokenizers drop a leading space.
                alone = self.tokenizer.decode(result.token_ids, skip_special_tokens=True)
                text = postprocess_generated_text(alone, ends, self._think_end_token)
                texts[result.index] = text
                self.cache_hook.add_partial("generate_until", requests[result.index].args, text)
        _check(failed, len(rows))
        return texts

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        """Return the token ids of a context, the last ones if not all fit. An empty context is the prefix token."""
        room = self.max_length - max_tokens
        if room < 1:
            must = f"it must be below max_length {self.max_length}"
            raise InvalidInput(f"max_gen_toks is {max_tokens}; {must}; set --gen_kwargs max_gen_toks=N")
        special = False if has_bos_prefix(context, self.tokenizer.bos_token) else None
        return self._cut(self._encoded(context, special), room) or [self.prefix_token_id]

    # Chat templates and records.

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which the harness caches requests that the chat template formed."""
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's chat template writes it. If the template refuses system messages, they
        are left out, as with `hf`. Raise InvalidInput if the model has no chat template. add_generation_prompt: end
        with the beginning of an answer; else the last message is continued."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            remedy = "leave out --apply_chat_template, or take an instruction-tuned model"
            raise InvalidInput(f"the model has no chat template; {remedy}")
        given: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **self._thinking}
        given["continue_final_message"] = not add_generation_prompt
        try:
            return chat_text(self.tokenizer, chat_history, None, self._began, given)
        except TemplateFault as error:
            rest = [turn for turn in chat_history if turn["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            message(f"the chat template refuses system messages ({error}); they are left out", logging.WARNING)
            return self.apply_chat_template(rest, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness adds to its results: version, dtype and lossy switches."""
        dtype = str(self.engine.core.dtype).removeprefix("torch.")
        return {"flexengine_version": __version__, "model_dtype": dtype, "lossy": self.engine.lossy.enabled}


def _check(failed: Sequence[Result], total: int) -> None:
    """Raise FlexError if requests failed. The others are in the harness's cache, if there is one."""
    if failed:
        fault = f"{len(failed)} of {total} requests could not be computed"
        raise FlexError(f"{fault}; request {failed[0].index}: {failed[0].error}")


def check_cache(stored: MutableMapping[str, Any], engine: Engine, options: dict[str, Any]) -> None:
    """Compare the record of a model in the harness's cache of responses (--use_cache), an SQLite file, with this model,
    and add it to a cache without one. The harness finds a response by its request alone. Raise InvalidInput if the
    cache has responses of another model. options: further values that responses depend on, by name."""
    was = stored.get(RECORD) or {}
    model = engine.fingerprint(was.get(MODEL_FILES, {}))
    if engine.options.allow:
        model.pop("cache", None)  # the planner chooses it
    now = json.loads(json.dumps({**options, **model, LOSSY: engine.switches}))  # tuples become lists
    if was and (changed := differences(was, now)):
        fault = f"the cache of --use_cache holds responses of another model: {'; '.join(changed)}"
        raise InvalidInput(f"{fault}; name another file, or give the same model and options")
    if not was and len(stored):
        text = "the cache of --use_cache does not say which model gave its responses; they are taken as this model's"
        message(text, logging.WARNING)
    stored[RECORD] = now
