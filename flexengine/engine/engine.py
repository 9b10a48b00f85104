"""The engine: prompts in, results out."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, overload

from flexengine.activity import Listener, message, reporting
from flexengine.config import Result, SamplingParams
from flexengine.engine.options import EngineOptions, takes
from flexengine.engine.session import Session
from flexengine.engine.summary import Summary
from flexengine.engine.survey import Params
from flexengine.errors import InvalidInput, shown
from flexengine.records import as_list, check_argument, check_names
from flexengine.words import python_words

Row = str | Mapping[str, Any]  # a prompt, or a row with a prompt and sampling parameters by name
Messages = Sequence[Mapping[str, Any]]  # a conversation
Tools = list[dict[str, Any]] | None
Text = str | Sequence[int]  # text, or token ids
OnResult = Callable[[Result], None]


class Engine(Session):
    """Generates text with a model whose weights, KV cache and activations may live on device, host and disk.

    Use it as a context manager, or call `close`. It is for offline batches: one job runs at a time. The public methods
    are `generate`, `chat`, `score`, `stream`, `run_job` and `close`; the public attributes are `summary`, `tokenizer`,
    `options` and `on_sweep`. All others may change in any version.

    Attributes:
        options: the options that were given.
        on_sweep: see EngineOptions; may be changed between jobs.

    Examples:
        >>> from flexengine import Engine, SamplingParams
        >>> with Engine(device_mem="4G") as engine:
        ...     result = engine.generate("The capital of France is", SamplingParams(max_tokens=8))
        ...     print(result.generated_text)
    """

    @takes(EngineOptions)
    @python_words
    def __init__(self, *args: Any, **options: Any) -> None:
        """Open a model. No weights are read.

        Args:
            model: a directory, a .gguf file or a hub id; None is the demo model. All other options are keyword-only:
                `EngineOptions` describes them.

        Raises:
            InvalidInput: an option is wrong, or this machine cannot serve it.
            ModelNotFound: there is no such model.
            UnsupportedModel: the model's architecture cannot be run.
            BadCheckpoint: the model's files are broken.
        """
        if len(args) > 1:
            raise TypeError(f"Engine is given {shown(args[1])} without a name; only the model needs none")
        check_names(f"{type(self).__name__} has no option", options, list(EngineOptions.__dataclass_fields__))
        super().__init__(EngineOptions(*args, **options), self._exact)

    def _exact(self, progress: Listener) -> "Engine":
        return Engine(**vars(self.options.exact(self.planner.rates.known(), progress)))

    @overload
    def generate(self, prompts: Row, params: SamplingParams | None = None) -> Result: ...

    @overload
    def generate(self, prompts: Iterable[Any], params: Params | None = None) -> list[Result]: ...

    @python_words
    def generate(self, prompts: Iterable[Any], params: Params | None = None) -> Result | list[Result]:
        """Return the result of one prompt, or the results of many in their order.

        Args:
            prompts: a text, or a row: a dict with "prompt", "messages" or "prompt_token_ids", and sampling parameters
                by name. Or an iterable of texts and rows.
            params: sampling parameters of all prompts, or a list with those of each prompt. Those of a row replace
                them. None is `SamplingParams()`.

        Returns:
            One Result for one prompt, else a list. A prompt that cannot be run has a Result with `error`.

        Raises:
            InvalidInput: an argument has the wrong type, the engine is closed, or it runs a job already.
            OutOfMemory: no prompt fits into memory; raised before anything large is allocated.
            RanOut: memory ran out, and smaller plans did not help or the policy was given; has the finished `results`.

        Examples:
            >>> engine.generate("Two plus two is").generated_text
            >>> engine.generate(["One", {"prompt": "Two", "max_tokens": 4}], SamplingParams(max_tokens=16))
            >>> engine.generate(["One", "Two"], [SamplingParams(seed=1), SamplingParams(seed=2)])
        """
        from flexengine.job.python_arguments import argument, file_note  # jobs of files do without, here and below

        prompts = argument("prompts", prompts)
        if isinstance(prompts, str | Mapping):
            if not isinstance(params, SamplingParams | None):
                raise InvalidInput(f"params is {shown(params)} beside one prompt; it must be SamplingParams")
            if note := file_note(prompts):
                with reporting(self.listener):
                    message(note, logging.WARNING)
            return self._all([prompts], params)[0]
        return self._all(prompts, params)

    @overload
    def chat(self, messages: Messages, params: SamplingParams | None = None, *, tools: Tools = None) -> Result: ...

    @overload
    def chat(
        self, messages: Sequence[Messages], params: Params | None = None, *, tools: Tools = None
    ) -> list[Result]: ...

    @python_words
    def chat(self, messages: Any, params: Any = None, *, tools: Tools = None) -> Result | list[Result]:
        """Return the answer to one conversation, or the answers to many in their order.

        The model's chat template converts a conversation to text. `SamplingParams.chat_template_kwargs` sets
        variables of the template, such as enable_thinking.

        Args:
            messages: a conversation: a list of messages {"role": ..., "content": ...}. Or a list of conversations.
            params: as for `generate`.
            tools: tools that the model may call, as JSON schemas, for templates that have tools.

        Returns:
            One Result for one conversation, else a list. A conversation that cannot be run has a Result with `error`.

        Raises:
            InvalidInput: as for `generate`.
            OutOfMemory: as for `generate`.
            RanOut: as for `generate`.

        Examples:
            >>> engine.chat([{"role": "user", "content": "Name three colours."}]).generated_text
        """
        from flexengine.job.python_arguments import argument, remedy_of

        messages = as_list(argument("messages", messages))
        if isinstance(messages, str | bytes | bytearray | memoryview) or not isinstance(messages, Sequence):
            must = f"it must be a list of messages, or of such lists{remedy_of('messages', messages)}"
            raise InvalidInput(f"messages is {shown(messages)}; {must}")
        check_argument("tools", tools, Annotated[list[Any] | None, "a list of tools (JSON schemas), or None"])
        shared = {} if tools is None else {"tools": tools}
        if messages and isinstance(messages[0], Mapping):
            one: Row = {"messages": messages, **shared}
            result: Result = self.generate(one, params)
            return result
        return self._all([{"messages": each, **shared} for each in messages], params)

    @overload
    def score(  # type: ignore[overload-overlap]
        self, context: Text, continuation: Text, *, on_result: OnResult | None = None
    ) -> Result: ...

    @overload
    def score(
        self, context: Text | Sequence[Text], continuation: Sequence[Text], *, on_result: OnResult | None = None
    ) -> list[Result]: ...

    @python_words
    def score(self, context: Any, continuation: Any, *, on_result: OnResult | None = None) -> Result | list[Result]:
        """Return the log probabilities of given continuations (teacher forcing).

        Contexts and continuations are computed like prompts; a context that several continuations share is computed
        once. Text is tokenized as lm-evaluation-harness does: white space at the end of a context belongs to its
        continuation, and an empty context is the beginning-of-sequence token, or the end-of-sequence token if there is
        none.

        Args:
            context: a text or its token ids, or a list of these.
            continuation: likewise. A list has one entry for each context, or any number for one context.
            on_result: called with each result as soon as it is computed, in any order; `index` is the pair's number.

        Returns:
            One Result for one pair, else a list. `token_ids` are those of the continuation; `logprobs` has an entry per
            token, with the most likely token in `top_logprobs`; `cumulative_logprob` is their sum in nats, and
            `is_greedy` says whether all are the most likely ones. A pair that cannot be scored has a Result with
            `error`.

        Raises:
            InvalidInput: an argument has the wrong type, the lists have different lengths, the engine is closed, or it
                runs a job already.
            OutOfMemory: as for `generate`.
            RanOut: as for `generate`.

        Examples:
            >>> yes, no = engine.score("Is snow white? Answer:", [" yes", " no"])
            >>> yes.cumulative_logprob > no.cumulative_logprob
        """
        self._check_open()
        check_argument("on_result", on_result, Annotated[OnResult | None, "a function that takes a Result, or None"])
        from flexengine.engine.scoring import rows_of  # other jobs score nothing

        rows, alone = rows_of(context, continuation)
        results = self._all(rows, SamplingParams(logprobs=1), on_result)
        return results[0] if alone else results

    @python_words
    def run_job(
        self,
        input: str | Path,
        output: str | Path,
        params: SamplingParams | None = None,
        *,
        prompt_column: str | None = None,
        limit: int | None = None,
        input_format: str | None = None,
        chat: bool = False,
        score: bool = False,
        row_options: bool | None = None,
        template: str | None = None,
        delimiter: str | None = None,
        restart: bool = False,
        retry_errors: bool = False,
    ) -> Summary:
        """Run the rows of a file and write a file of results, as `flexengine run INPUT --output OUTPUT` does.

        Finished rows go to OUTPUT.journal. After an interruption of any kind, Ctrl-C included, the same call continues
        the job, and so does the command with the same options; OUTPUT has the same bytes. If the job is finished, the
        call returns at once. Bad rows become rows with an `error`.

        Args:
            input: .jsonl, .txt, .csv, .parquet, ...; docs/jobs.md lists all formats.
            output: file for JSON lines in the order of the input. It appears when all rows have a result.
            params: sampling parameters of rows without fields of these names; None is `SamplingParams()`.
            prompt_column: column or field that holds the prompt; None reads any of prompt, messages and
                prompt_token_ids, in CSV and TSV files prompt.
            limit: run only the first rows; None runs all. A later call with a larger limit continues.
            input_format: jsonl, txt, csv, tsv, parquet or arrow; None goes by the name of the input.
            chat: run each prompt as a user's message, through the model's chat template. Rows with messages or token
                ids, and OpenAI batch lines, are run as they are.
            score: compute the log probability of given continuations or texts: of rows with `context` and
                `continuation` or `choices`, and of rows with `text` (docs/scoring.md). Rows with a prompt generate.
            row_options: let columns or fields named like sampling parameters set them for their row; False takes them
                for data. None is True for JSON lines, and False for tables.
            template: the prompt of each row, as text with columns in braces: "Label: {review}"; {{ and }} are braces.
            delimiter: the character between the cells of a .csv or .tsv file; None is a comma, or a tab. A first line
                sep=; of the file counts more.
            restart: delete the journal of earlier runs, and start over.
            retry_errors: run rows again that ended with an error.

        Returns:
            The summary of this run; `job` has the counts of all runs. Its counts are 0 if no row remained to be run.

        Raises:
            InvalidInput: an argument is wrong, the input or the output cannot be used, the journal is of a job with
                another input, model or parameters, the engine is closed, or it runs a job already.
            OutOfMemory: no row fits into memory.
            RanOut: memory ran out; finished rows are in the journal.
            OSError: a file cannot be read or written; finished rows are in the journal.

        Examples:
            >>> summary = engine.run_job("prompts.csv", "results.jsonl", SamplingParams(max_tokens=32),
            ...                          prompt_column="question")
            >>> print(f"{summary.job.done} of {summary.job.rows} rows done")
        """
        self._check_idle()
        if not isinstance(input, str | os.PathLike):
            from flexengine.job.python_arguments import refuse_table

            refuse_table("input", input, file=True)
        from flexengine.engine.file_job import run_job  # other jobs read no file

        return run_job(
            self, input, output, SamplingParams() if params is None else params, prompt_column=prompt_column,
            limit=limit, input_format=input_format, chat=chat, score=score, row_options=row_options, template=template,
            delimiter=delimiter, restart=restart, retry_errors=retry_errors,
        )  # fmt: skip

    def __call__(self, batch: Any, params: SamplingParams | None = None, row_options: bool = False) -> Any:
        """Return a batch of columns with result columns added: Ray Data's `map_batches(Engine, ...)` calls this.

        See docs/python.md for the columns, and examples/ray_data.py for a whole program.

        Args:
            batch: a dict of columns (numpy arrays, lists) or a pyarrow Table.
            row_options: let columns named like sampling parameters set them for their row; else they are data.
        """
        from flexengine.job.columns import answered  # other jobs have no columns

        return answered(batch, params or SamplingParams(), lambda rows: self._all(rows, params), row_options)
