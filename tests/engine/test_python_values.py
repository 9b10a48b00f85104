"""Values that users of Python hand to an engine: each line of the table in docs/python.md, "What an engine takes"."""

import asyncio
import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexengine import Engine, EngineOptions, Hardware, InvalidInput, Links, Lossy, Policy, SamplingParams, TooLittle
from flexengine.activity import Activity, activity, message, reporting
from flexengine.engine.job import Job
from flexengine.errors import ModelNotFound, shown
from flexengine.job.rows import one_of, refuse_table, row_of
from flexengine.words import command_words, in_python
from tests.helpers.speaker import make_speaker

pd = pytest.importorskip("pandas")
SHORT, LONG = SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=80, ignore_eos=True)
TEXTS = ["One two", "Three"]
FRAME = pd.DataFrame({"text": TEXTS, "label": [0, 1]})
CHAT = [{"role": "user", "content": "Hi"}]
BLANKS = ["", " ", "\n", "\u200b\ufeff"]


class Polars:
    """A Series of polars: a list, with other methods than those of pandas."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def to_list(self) -> list[Any]:
        return self.values


def columns_of(values: list[Any]) -> Iterator[Any]:
    """Yield a column in all forms that Python's libraries have."""
    yield from (values, tuple(values), deque(values), pd.Series(values), np.array(values), Polars(values))
    yield (value for value in values)
    pyarrow = pytest.importorskip("pyarrow")
    yield from (pyarrow.array(values), pyarrow.table({"prompt": values})["prompt"])


def opened(directory: Path, **options: Any) -> Engine:
    policy = Policy(gpu_batch_size=4, num_gpu_batches=1)
    return Engine(directory, device="cpu", device_mem="1G", policy=policy, **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speaker")
    make_speaker(made)
    return made


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with opened(directory) as engine:
        engine.expected = [result.token_ids for result in engine.generate(TEXTS, SHORT)]  # type: ignore[attr-defined]
        yield engine


def tokens(results: Any) -> list[list[int]]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


# Tables and columns.


def test_a_table_is_refused_with_the_remedy(engine: Any, tmp_path: Path) -> None:
    remedy = r"is a DataFrame with columns \[\"text\", \"label\"\]; name the column: df\['text'\].tolist\(\)$"
    for name, call in {
        "prompts": lambda: engine.generate(FRAME, SHORT),
        "prompts ": lambda: engine.stream(FRAME, SHORT),
        "messages": lambda: engine.chat(FRAME),
        "continuation": lambda: engine.score("a", FRAME),
        "context": lambda: engine.score(FRAME, ["a"]),
    }.items():
        texts = r"\[\[{.*}\] for text in df\['text'\].tolist\(\)\]$"
        said = remedy.replace(r"df\['text'\].tolist\(\)$", texts) if name == "messages" else remedy
        with pytest.raises(InvalidInput, match=f"^{name.strip()} {said}"):
            call()
    with pytest.raises(InvalidInput, match=r"input is a DataFrame; it must be the name of a file: .*df.to_json\("):
        engine.run_job(FRAME, tmp_path / "out.jsonl")
    with pytest.raises(InvalidInput, match="batch is DataFrame; it must be a dict of columns"):
        engine(FRAME)


def test_a_table_of_pyarrow_is_refused_with_its_own_remedy(engine: Any) -> None:
    table = pytest.importorskip("pyarrow").table({"prompt": TEXTS})
    with pytest.raises(InvalidInput, match=r"a Table with columns .*df\['prompt'\].to_pylist\(\)"):
        engine.generate(table)
    with pytest.raises(InvalidInput, match=r"pyarrow.parquet.write_table\(table, 'rows.parquet'\), or give a column"):
        engine.run_job(table, "out.jsonl")
    fields: dict[str, Any] = {"__module__": "polars.dataframe.frame", "columns": ["text"]}
    frame, lazy = type("DataFrame", (), fields)(), type("LazyFrame", (), fields | {"collect": None})()
    for value, name in ((frame, "df"), (lazy, r"df.collect\(\)")):
        with pytest.raises(InvalidInput, match=rf": {name}\['text'\].to_list\(\)$"):
            refuse_table("prompts", value)
        with pytest.raises(InvalidInput, match=rf"such as {name}.write_ndjson\('rows.jsonl'\), or"):
            refuse_table("input", value, file=True)


def test_names_of_columns_that_are_no_text() -> None:
    with pytest.raises(InvalidInput, match=r"columns \[\"0\", \"1\"\]; name the column: df\[0\].tolist\(\)$"):
        refuse_table("prompts", pd.DataFrame([[1, 2]]))

    class Cursor(list[str]):
        def columns(self) -> None:
            """As rows of databases have."""

    refuse_table("prompts", Cursor())


def test_fields_without_a_value_are_left_out() -> None:
    missing = [float("nan"), np.float32("nan"), pd.NA, pd.NaT, Decimal("nan")]
    assert row_of({"prompt": "a", **{f"x{i}": each for i, each in enumerate(missing)}}, 0).fields == {"prompt": "a"}


def test_a_misspelt_field_is_named_once(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Fields named like options set them, as in rows of JSON lines."""
    with caplog.at_level(logging.WARNING, "flexengine"):
        for _ in range(2):
            given = {"prompt": "One two", "max_token": 1, "top-p": 0.5, "max_tokens": 2, "ignore_eos": True, "topic": 1}
            assert tokens(engine.generate([given, pd.Series(given)])) == [engine.expected[0]] * 2
        assert engine.generate([pd.Series({"prompt": "One", "max_toks": 1})], SHORT)[0].error is None
        assert engine.generate([{"promt": "One two"}])[0].error is not None
    said = [record.message for record in caplog.records if "did you mean" in record.message]
    assert said == [
        "fields max_token and top-p are data; did you mean max_tokens and top_p?",
        "field max_toks is data; did you mean max_tokens?",
        "field promt is data; did you mean prompt?",
    ]


def test_a_column_is_a_list(engine: Any) -> None:
    for given in columns_of(TEXTS):
        assert tokens(engine.generate(given, SHORT)) == engine.expected
    assert (
        tokens(engine.generate(FRAME.rename(columns={"text": "prompt"}).to_dict("records"), SHORT)) == engine.expected
    )


def test_columns_of_conversations_and_continuations(engine: Any) -> None:
    one = engine.chat(CHAT, SHORT).token_ids
    assert tokens(engine.chat(pd.Series([CHAT, CHAT]), SHORT)) == tokens(engine.chat((CHAT, CHAT), SHORT)) == [one] * 2
    assert tokens(engine.chat((each for each in (CHAT,)), SHORT)) == [one]
    scores = [result.cumulative_logprob for result in engine.score("One", [" a", " b"])]
    for given in columns_of([" a", " b"]):
        assert [result.cumulative_logprob for result in engine.score("One", given)] == scores
    contexts = (text for text in ["One", "One"])
    assert [result.cumulative_logprob for result in engine.score(contexts, [" a", " b"])] == scores


def test_one_prompt_in_another_form(engine: Any) -> None:
    """An array without a dimension, a scalar of pyarrow, and a row of a DataFrame, which is a Series."""
    pyarrow = pytest.importorskip("pyarrow")
    frame = FRAME.rename(columns={"text": "prompt"})
    for given in (np.array(TEXTS[0]), pyarrow.scalar(TEXTS[0]), frame.iloc[0], pyarrow.scalar({"prompt": TEXTS[0]})):
        assert engine.generate(given, SHORT).token_ids == engine.expected[0]
    assert tokens(engine.generate([row for _, row in frame.iterrows()], SHORT)) == engine.expected
    assert tokens(engine.generate(pd.Series(TEXTS, index=["a", "b"]), SHORT)) == engine.expected
    assert "has none of prompt, messages" in engine.generate([FRAME.iloc[0]])[0].error


def test_a_series_is_a_row_only_if_no_prompt_is_lost() -> None:
    """Labels of a column may be named like fields of rows."""
    rows = [
        FRAME.rename(columns={"text": "prompt"}).iloc[0],
        pd.DataFrame({"prompt": ["a"], "id": ["b"]}).iloc[0],
        pd.Series({"prompt": "a", "max_tokens": 2}),
        pd.Series({"messages": CHAT, "n": float("nan")}, name="x"),
    ]
    assert [one_of(row) for row in rows] == [dict(row) for row in rows]
    columns = [
        pd.Series({"text": "a", "prompt": "b"}),
        pd.Series({"text": "a", "prompt": None}, name="text"),
        pd.DataFrame({"label": ["n", "y"], "text": TEXTS}).groupby("label")["text"].first(),
        *(pd.Series({name: "a", "x": 1}) for name in ("n", "seed", "stop", "text", "context")),
    ]
    assert all(one_of(column) is column for column in columns)
    assert [row_of(column, 0).fields for column in columns[::2]] == [
        {"text": "a", "prompt": "b"}, dict(n="One two", y="Three"), {"seed": "a", "x": 1}, {"text": "a", "x": 1}
    ]  # fmt: skip


def test_labels_of_a_column_are_no_fields(engine: Any) -> None:
    for labels in (["n", "y"], ["text", "prompt"]):
        assert tokens(engine.generate(pd.Series(TEXTS, index=labels), SHORT)) == engine.expected
        assert tokens(list(engine.stream(pd.Series(TEXTS, index=labels), SHORT))) == engine.expected


def test_what_is_no_list_of_prompts(engine: Any) -> None:
    for wrong in ({"One"}, frozenset({"One"}), b"One", Path("One"), 5, np.array(5), None):
        for call in (engine.generate, engine.stream):
            with pytest.raises(InvalidInput, match=r"^prompts is .*; it must be a list of prompts"):
                call(wrong)
        with pytest.raises(InvalidInput, match=r"^messages is .*; it must be a list of messages"):
            engine.chat(wrong)
        with pytest.raises(InvalidInput, match="continuation"):
            engine.score("a", wrong)
    with pytest.raises(InvalidInput, match="prompts is 'One'; it must be a list"):
        engine.stream(np.array("One"))
    one = engine.generate({"prompt": TEXTS})  # a dict of columns
    assert one.error.endswith(" or an array of token ids; give each text its own row")
    errors = [str(result.error) for result in engine.generate([TEXTS, b"One", Path("One"), [1, 2]])]
    assert [error.split("; ")[0] for error in errors] == [
        f"prompt {i}: is {kind}" for i, kind in enumerate(("an array", "bytes", "PosixPath", "an array"))
    ]


def test_a_bad_pair_is_an_error_of_its_own(engine: Any) -> None:
    good = engine.score("One", " b")
    found = engine.score("One", pd.Series([" b", float("nan"), None, pd.NA], dtype=object))
    assert found[0] == good
    missing = "missing (NaN)", "None", "missing (NA)"
    assert [result.error for result in found[1:]] == [
        f"prompt {i}: continuation is {kind}; it must be text or a list of token ids"
        for i, kind in enumerate(missing, 1)
    ]
    assert "context is missing (NaN)" in engine.score(pd.Series(["One", float("nan")]), [" b", " b"])[1].error


def test_blank_prompts_are_error_rows(engine: Any) -> None:
    results = engine.generate([*BLANKS, *TEXTS], SHORT)
    assert tokens(results[4:]) == engine.expected
    kinds = ["empty", "blank", "blank", "blank"]
    assert [result.error for result in results[:4]] == [
        f"prompt {i}: prompt is {kind}; give a text" for i, kind in enumerate(kinds)
    ]
    asked = engine.chat([[{"role": "user", "content": text}] for text in BLANKS], SHORT)
    assert [result.error.split(": ")[1] for result in asked] == [
        f"messages[0].content is {kind}; give the user's text" for kind in kinds
    ]
    assert len(engine.generate({"prompt_token_ids": [32]}, SHORT).token_ids) == 2


def test_missing_values_are_error_rows(engine: Any) -> None:
    """As pandas writes them, each alone: other rows run."""
    results = engine.generate(pd.Series(["One two", None, float("nan"), "Three"], dtype=object), SHORT)
    assert [result.token_ids for result in results if result.error is None] == engine.expected
    assert [result.error for result in results[1:3]] == [
        f"prompt {i}: is {what}; it must be a string or an object with the fields of a row, such as prompt_token_ids"
        for i, what in ((1, "None"), (2, "missing (NaN)"))
    ]
    missing = (float("nan"), np.float32("nan"), pd.NA, pd.NaT)
    rows = [*missing, *({"prompt": each, "messages": each, "x": 1} for each in missing)]
    errors = [str(result.error) for result in engine.generate(rows, SHORT)]
    for name, error in zip(("NaN", "NaN", "NA", "NaT"), errors[:4], strict=True):
        assert f": is missing ({name}); it must be" in error
    assert all("prompt is None or NaN, so missing; give a text, messages" in each for each in errors[4:])
    assert "messages is None or NaN" in engine.chat([CHAT, float("nan")], SHORT)[1].error
    with pytest.raises(InvalidInput, match=r"prompts is {'One'}; it must be a list of prompts"):
        engine.generate({"One"}, SHORT)  # a set has another order in each process
    with pytest.raises(InvalidInput, match="prompts is None; it must be a list of prompts"):
        engine.generate(None)
    with pytest.raises(InvalidInput, match="messages is None; it must be a list"):
        engine.chat(None)
    assert engine.generate({"prompt": "One two", "max_tokens": 2}, None).error is None


# Numbers of numpy and torch.


def test_token_ids_are_arrays_of_any_kind(engine: Any) -> None:
    ids = [5, 6, 7]
    expected = engine.generate({"prompt_token_ids": ids}, SHORT).token_ids
    for given in (np.array(ids), [*np.array(ids, dtype=np.int32)], torch.tensor(ids), pd.Series(ids)):
        assert engine.generate({"prompt_token_ids": given}, SHORT).token_ids == expected
        assert engine.generate({"prompt": given}, SHORT).token_ids == expected
    scores = engine.score(ids, [[8], [9]])
    assert engine.score(np.array(ids), np.array([[8], [9]])) == scores
    assert engine.score([5.0, 6.0, 7.0], [[8.0], [9.0]]) == scores
    assert engine.score([5.0, 6.0, 7.0], [8.0]) == scores[0]


def test_scalars_of_numpy_are_numbers(engine: Any, tmp_path: Path) -> None:
    given = SamplingParams(
        max_tokens=np.int64(2), temperature=np.float32(0.5), seed=np.uint32(7), ignore_eos=np.bool_(True),
        stop_token_ids=np.array([1, 2]), logit_bias={np.int64(5): np.float32(1)}, bad_words=[[np.int64(5)]],
        top_p=torch.tensor(0.5), stop=np.array(["x"]), chat_template_kwargs={"budget": np.int64(3)},
    )  # fmt: skip
    assert given == SamplingParams(
        max_tokens=2, temperature=0.5, seed=7, ignore_eos=True, stop_token_ids=[1, 2], logit_bias={5: 1.0},
        bad_words=[[5]], top_p=0.5, stop=["x"], chat_template_kwargs={"budget": 3},
    )  # fmt: skip
    row = {"prompt": "One two", "max_tokens": np.int64(2), "ignore_eos": np.bool_(True), "seed": np.float64("nan")}
    assert engine.generate(row).token_ids == engine.expected[0]
    assert EngineOptions(device_mem=np.int64(10**9), sharing=np.int32(2), prefix_sharing=np.bool_(False)) == (
        EngineOptions(device_mem=10**9, sharing=2, prefix_sharing=False)
    )
    assert EngineOptions(attention_workers=2.0, worker_mem=1e9).attention_workers == 2
    assert Policy(slots=np.int64(3), weights=np.array([0.5, 0.5, 0])) == Policy(slots=3, weights=(0.5, 0.5, 0))
    assert Links(h2d=np.float32(8)) == Links(h2d=8)
    assert Lossy(sparse_attention=np.float64(0.5)) == Lossy(sparse_attention=0.5)
    hardware = Hardware.load("t4-16gb_208gb_ssd")
    assert type(replace(hardware, device_bytes=np.int64(2**30)).device_bytes) is int
    (rows := tmp_path / "in.txt").write_text("One two\nThree\n")
    assert engine.run_job(rows, tmp_path / "out.jsonl", SHORT, limit=np.int64(1)).job.rows == 1
    assert engine.run_job(rows, tmp_path / "out.jsonl", SHORT, limit=2.0).job.rows == 2


# Words.


def test_messages_name_arguments_and_none(
    engine: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, said in (
        ({"device_mem": "1X"}, "device_mem is '1X'; it must be a number of bytes"),
        ({"worker_mem": "1G"}, "^worker_mem is 1G, but there are no attention workers; set attention_workers, or"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Engine(directory, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="max_tokens is None; it must be"):
        SamplingParams(max_tokens=None)  # type: ignore[arg-type]
    with pytest.raises(TooLittle, match=r"; set device_mem='[\d.]+[kM]B' or more$"):
        Engine(directory, device="cpu", device_mem="20K").generate("One", SHORT)
    variables = {"prompt": "x", "chat_template_kwargs": {"a": 1}}
    assert engine.generate(variables).error.endswith("prompt has none: send messages, as engine.chat does")
    assert engine.generate({"text": "x"}).error.endswith(
        '(its fields are ["text"]; rename one to prompt, or name it by prompt_column of run_job)'
    )
    (rows := tmp_path / "in.txt").write_text("One\n")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(InvalidInput, match="or give restart=True to"):
        engine.run_job(rows, tmp_path / "out.jsonl")
    (table := tmp_path / "in.csv").write_text("prompt,seed\nOne,2\n")
    messages = list[str]()
    monkeypatch.setattr(engine, "listener", lambda record: messages.append(record.text))
    engine.run_job(table, tmp_path / "table.jsonl", SHORT)
    assert "; with row_options=True columns named like options" in " ".join(messages)
    (rows := tmp_path / "in.jsonl").write_text('{"prompt": "One", "ignore_eos": "--chat"}\n')
    engine.run_job(rows, tmp_path / "rows.jsonl", SHORT)  # errors of rows are those of the command
    error = json.loads((tmp_path / "rows.jsonl").read_text())["error"]
    assert error == "line 1: ignore_eos is '--chat'; it must be true or false"
    for text, words in {
        "give --chat (chat=True in Python) to run": "give chat=True to run",
        "raise --device-mem or lower max_tokens": "raise device_mem or lower max_tokens",
        "train: flexengine flash train MODEL --misses 0.1": "train: flexengine flash train MODEL --misses 0.1",
        "n is null; it must be true or false, or null": "n is None; it must be True or False, or None",
        "it is true or false, not null": "it is True or False, not null",
        "give --stop-token-id 7 or set it to true": "give stop_token_ids=7 or set it to True",
        "a user's file, --stop 'a b'": "a user's file, stop 'a b'",
        **{
            text: text
            for text in (
                "stop is 'null -- true'",
                "max_tokens is '--chat is null'",
                'stop is "it\'s to null, --chat"',
                r"stop is 'a \' is null'",
                "output a/--chat exists",
                "(./--device-mem is no file)",
                "see c:/d/--chat.x",
                f"n is {shown('--chat is null ' * 9)}; it must be df['a']",
            )
        },
        "--prompt-column 'a b' (prompt_column='a b' in Python)": "prompt_column='a b'",
        "join them with `gguf-split --merge` first": "join them with `gguf-split --merge` first",
    }.items():
        assert in_python(text) == words
        with command_words():
            assert in_python(text) == text


def test_a_notebook_shows_long_work_that_is_done_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as converting and compiling, with its first line only; other work and messages go to the logger."""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with opened(directory) as engine, reporting(engine.listener):
        message("a message")
        with activity("searching", "searching for seconds"):
            pass
        with activity("compiling", "compiling for a minute", 2, "files", logging.INFO) as work:
            work.advance(2)
    assert capsys.readouterr().err == "flexengine: compiling for a minute; progress=True shows more\n"


# Processes, threads and tasks.


def test_an_engine_is_not_copied_and_a_closed_one_says_so(directory: Path) -> None:
    with opened(directory) as engine:
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidInput, match="can be neither copied nor pickled; use this one, or open another"):
                call(engine)
    for again in (copy.copy, copy.deepcopy, pickle.dumps, lambda closed: closed.__enter__()):
        with pytest.raises(InvalidInput, match="this engine is closed; open a new Engine"):
            again(engine)
    engine.close()


def test_a_fork_of_an_engine_is_refused(engine: Any) -> None:
    """In the child; the parent's files and threads stay as they are, whatever the child does."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            try:
                engine.generate("One")
            except InvalidInput as error:
                os.write(write, str(error).encode())
            engine.close()
        os._exit(0)
    os.close(write)
    with open(read) as said:
        assert "; start processes by multiprocessing.get_context('spawn') and open an Engine in each" in said.read()
    assert os.waitpid(child, 0)[1] == 0
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_fork_of_a_process_whose_engine_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may open an engine, as no threads were started."""
    monkeypatch.setattr("flexengine.engine.core._openers", set())
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with pytest.raises(ModelNotFound):
        Engine("nothing", device="cpu", device_mem="1G")
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in the fork
    with pytest.raises(ModelNotFound):
        Engine("nothing", device="cpu", device_mem="1G")


@pytest.mark.slow  # forks of a process with torch
def test_a_new_engine_in_a_fork(engine: Any, directory: Path) -> None:
    """It is refused, as torch would wait for threads that the child lacks; with one thread it runs."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(30)
        with contextlib.suppress(BaseException):
            torch.set_num_threads(2)
            with contextlib.suppress(InvalidInput):
                opened(directory).close()
                os._exit(6)
            torch.set_num_threads(1)
            with opened(directory) as new:
                os.write(write, str(tokens(new.generate(TEXTS, SHORT))).encode())
            os._exit(5)
        os._exit(7)
    os.close(write)
    with open(read) as said:
        assert said.read() == str(engine.expected)
    assert os.waitpid(child, 0)[1] == 5 << 8


@pytest.mark.slow  # forks of a process with torch
def test_a_fork_within_a_stream_leaves_it_to_the_parent(engine: Any) -> None:
    """The child can go on to its end, and drop the stream."""
    stream = engine.stream(TEXTS * 4, SHORT)
    next(stream)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            next(stream)
        except InvalidInput as error:
            stream = None
            gc.collect()
            os._exit(5 if "and open an Engine in each" in str(error) else 6)
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 5 << 8
    if (child := os.fork()) == 0:
        signal.alarm(20)
        stream.close()
        os._exit(5)
    assert os.waitpid(child, 0)[1] == 5 << 8
    assert len(tokens(list(stream))) == 7
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_thread_may_run_a_job_and_a_second_one_is_told(engine: Any) -> None:
    found: list[Any] = []
    stream = engine.stream(TEXTS, SHORT)
    next(stream)

    def other() -> None:
        try:
            found.append(engine.generate(TEXTS, SHORT))
        except InvalidInput as error:
            found.append(str(error))

    for _ in range(2):
        (thread := threading.Thread(target=other)).start()
        thread.join()
        stream.close()
    assert "generating already, in this thread or another one; let the other call end, or call stop()" in found[0]
    assert tokens(found[1]) == engine.expected


def test_stop_ends_a_job_and_the_engine_goes_on(engine: Any) -> None:
    engine.stop()  # no job runs
    engine.on_sweep = lambda _: engine.stop()
    try:
        with pytest.raises(InvalidInput, match=r"the job was ended before all rows were done, by stop\(\)"):
            engine.generate(TEXTS, LONG)
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps == 1
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_cancelled_task_stops_its_job(engine: Any) -> None:
    began = threading.Event()
    engine.on_sweep = lambda _: began.set()

    async def cancelled() -> None:
        task = asyncio.create_task(engine.in_thread(engine.generate, TEXTS, LONG))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await task

    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps < 80
    assert tokens(asyncio.run(engine.in_thread(engine.generate, TEXTS, SHORT))) == engine.expected


def test_a_cancelled_task_leaves_the_jobs_of_others(engine: Any) -> None:
    async def both() -> Any:
        began = asyncio.Event()
        loop = asyncio.get_running_loop()
        engine.on_sweep = lambda _: loop.call_soon_threadsafe(began.set)
        first = asyncio.create_task(engine.in_thread(engine.generate, TEXTS, LONG))
        await began.wait()
        second = asyncio.create_task(engine.in_thread(time.sleep, 0.1))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        return await first

    try:
        assert len(tokens(asyncio.run(both()))) == 2
    finally:
        engine.on_sweep = None


def test_a_cancelled_task_of_another_thread_goes_on_until_stop(engine: Any) -> None:
    """`asyncio.to_thread` cannot end its thread; the error of the next call names what can."""
    began, again = threading.Event(), threading.Event()
    engine.on_sweep = lambda _: (began.set(), again.wait(10))

    async def cancelled() -> None:
        task = asyncio.create_task(asyncio.to_thread(engine.generate, TEXTS, LONG))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with pytest.raises(InvalidInput, match=r"or call stop\(\), as a task .* `await engine.in_thread\(...\)` runs"):
            engine.generate(TEXTS, SHORT)
        engine.stop()
        again.set()

    try:
        asyncio.run(cancelled())  # waits for its threads
    finally:
        engine.on_sweep = None
    assert engine.summary.sweeps == 1
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_a_task_that_is_cancelled_between_results_ends_the_stream(engine: Any) -> None:
    async def reads() -> None:
        for _ in engine.stream(TEXTS, SHORT):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(reads())
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    gc.collect()
    assert tokens(engine.generate(TEXTS, SHORT)) == engine.expected


def test_close_ends_the_job_of_another_thread(directory: Path) -> None:
    began, engine = threading.Event(), opened(directory)
    engine.on_sweep = lambda _: began.set()
    (thread := threading.Thread(target=lambda: began.wait(10) and engine.close())).start()
    with pytest.raises(InvalidInput, match=r"the job was ended before all rows were done, by close\(\)"):
        engine.generate(TEXTS, LONG)
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(InvalidInput, match="this engine is closed; open a new Engine"):
        engine.generate("One")


def test_close_in_a_function_that_the_job_calls(directory: Path) -> None:
    engine = opened(directory)
    engine.on_sweep = lambda _: engine.close()
    with pytest.raises(InvalidInput, match=r"by close\(\) of this engine"):
        engine.generate(TEXTS, LONG)
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())


def test_close_in_a_progress_function_that_another_thread_calls(directory: Path) -> None:
    """As the watchdog does, while the job waits for the function."""
    left: list[bool] = []

    def progress(_: Activity) -> None:
        if threading.current_thread() is not threading.main_thread():
            engine.close()

    def sweep_ended(_: Any) -> None:
        thread = threading.Thread(target=engine.listener, args=[Activity("other", "work")], daemon=True)
        thread.start()
        thread.join(5)
        left.append(thread.is_alive())

    engine = opened(directory, progress=progress)
    engine.on_sweep = sweep_ended
    with pytest.raises(InvalidInput, match=r"by close\(\) of this engine"):
        engine.generate(TEXTS, LONG)
    assert left == [False]
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())


def test_several_threads_close_an_engine_whose_stream_waits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job takes some time to end; meanwhile the stream is asked for its next result."""
    ends, wait = threading.Event(), Job._write_trace
    monkeypatch.setattr(Job, "_write_trace", lambda job: (ends.set(), time.sleep(0.1), wait(job)))
    engine = opened(directory)
    stream = engine.stream(TEXTS * 4, SHORT)
    next(stream)
    threads = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert ends.wait(10)
    with pytest.raises(InvalidInput, match="the engine was closed before this stream had ended"):
        next(stream)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(tier.ledger.used == 0 for tier in engine.core.machine.tiers.values())


def test_names_of_vllm(engine: Any) -> None:
    one, two = engine.generate([*TEXTS[:1], {"prompt": TEXTS[1], "n": 2, "temperature": 1, "logprobs": 0}], SHORT)
    assert [(each.text, each.token_ids) for each in one.outputs] == [(one.generated_text, one.token_ids)]
    assert two.outputs == two.samples
    assert two.outputs[0].logprobs == two.logprobs
    assert engine.generate({"prompt": None}).outputs == []
