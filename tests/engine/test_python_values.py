"""Values that users of Python hand to an engine: each line of the table in docs/python.md, "What an engine takes"."""

import copy
import json
import logging
import pickle
import re
import sys
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
from flexengine.activity import activity, message, reporting
from flexengine.errors import shown
from flexengine.job.python_arguments import argument, file_note, refuse_table
from flexengine.job.rows import row_of
from flexengine.plan.cluster import file as cluster_file
from flexengine.plan.stages import Strategy
from flexengine.words import command_words, in_python
from tests.helpers.speaker import SHORT, TEXTS, opened, tokens

pd = pytest.importorskip("pandas")
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
    for call in (
        lambda: Engine(FRAME),  # type: ignore[arg-type]
        lambda: engine.run_job("in.csv", FRAME),
        lambda: engine.run_job("in.csv", "out.jsonl", FRAME),
        lambda: engine.generate("a", FRAME),
        lambda: SamplingParams(temperature=FRAME),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput, match=r"^(model|output|params|temperature) is a DataFrame[; ]"):
            call()
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


def test_the_name_of_a_file_as_a_prompt_is_noticed(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flexengine"):
        assert engine.generate("rows.jsonl", SHORT).error is None
        assert engine.generate("What is a .csv", SHORT).error is None
    note = "'rows.jsonl' is run as a prompt; engine.run_job('rows.jsonl', 'results.jsonl') runs the rows of a file"
    assert [record.message for record in caplog.records] == [note]
    assert file_note("data/in.csv.gz")
    assert not any(map(file_note, ("in.py", "Summarise in.csv", "a\nb.txt", {"prompt": "a.csv"}, ".csv")))


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
    assert "has none of prompt, messages" in engine.generate([FRAME.iloc[0]])[0].error


def test_a_series_is_a_row_or_a_column_only_if_it_is_surely_one() -> None:
    rows = [
        FRAME.rename(columns={"text": "prompt"}).iloc[0],
        pd.DataFrame({"prompt": ["a"], "id": ["b"]}).iloc[0],
        pd.Series({"prompt": "a", "max_tokens": 2}),
        pd.Series({"messages": CHAT, "n": float("nan")}, name="x"),
    ]
    assert [argument("prompts", row) for row in rows] == [dict(row) for row in rows]
    columns = [
        pd.DataFrame({"label": ["n", "y"], "text": TEXTS}).groupby("label")["text"].first(),
        FRAME["text"],
        FRAME["text"][FRAME["label"] > 0],
        pd.Series(TEXTS, index=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["x", "y"])),
    ]
    columns += [pd.Series(TEXTS, index=["a", "b"], name="prompt"), pd.Series(TEXTS, index=["n", "text"], name="prompt")]
    assert all(argument(name, column) is column for column in columns for name in ("prompts", "messages", "context"))
    either = [
        pd.Series({"text": "a", "prompt": "b"}),
        pd.Series({"text": "a", "prompt": None}, name="text"),
        *(pd.Series({name: "a", "x": 1}) for name in ("n", "seed", "text")),
        FRAME.iloc[0],
        pd.DataFrame([["a", "b"]], columns=pd.MultiIndex.from_tuples([("x", "y"), ("x", "z")])).iloc[0],
    ]
    for series in either:
        with pytest.raises(InvalidInput, match=r"^prompts is a Series with labels \[.*\], a row or a column; give"):
            argument("prompts", series)
    assert [row_of(each, 0).fields for each in either[::2]] == [
        {"text": "a", "prompt": "b"}, {"n": "a", "x": 1}, {"text": "a", "x": 1}, {("x", "y"): "a", ("x", "z"): "b"}
    ]  # fmt: skip


def test_a_series_that_may_be_a_row_is_refused(engine: Any) -> None:
    """Else all cells of a row would be run as prompts, contexts or conversations, and be paid for."""
    row = FRAME.rename(columns={"text": "prompt"}).assign(label=["a", "b"]).set_index(pd.Index(["r1", "r2"])).loc["r1"]
    for name, one, cell, call in (
        ("prompts", r"series.to_dict\(\)", "prompt", lambda: engine.generate(row)),
        ("prompts", r"series.to_dict\(\)", "prompt", lambda: engine.stream(row)),
        ("messages", r"series\['messages'\]", "conversation", lambda: engine.chat(row)),
        ("context", r"series\['context'\]", "text", lambda: engine.score(row, [" a", " b"])),
        ("continuation", r"series\['continuation'\]", "text", lambda: engine.score("a", row)),
    ):
        said = (
            rf"^{name} is a Series with labels \[\"prompt\", \"label\"\], a row or a column; give {one} for the row, or"
        )
        with pytest.raises(InvalidInput, match=rf"{said} series.tolist\(\) for a {cell} in each cell$"):
            call()
    assert engine.generate(row.to_dict(), SHORT).token_ids == engine.expected[0]
    assert tokens(engine.generate(pd.Series(TEXTS, index=["n", "y"]).tolist(), SHORT)) == engine.expected


def test_labels_of_a_column_are_no_fields(engine: Any) -> None:
    for labels in ([3, 7], pd.Index(["n", "y"], name="label"), pd.to_datetime(["2026-01-01", "2026-01-02"])):
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
    for given, remedy in (
        (b"One", "bytes(prompts).decode()"),
        (bytearray(b"One"), "bytes(prompts).decode()"),
        ({"One"}, "sorted(prompts)"),
    ):
        with pytest.raises(InvalidInput, match=rf"; it must be a list of prompts: give {re.escape(remedy)}$"):
            engine.generate(given)
    for given in (np.array("One"), {"prompt": "One"}):
        with pytest.raises(InvalidInput, match=r"^prompts is .*One.*; it must be a list of prompts: give \[prompts\]$"):
            engine.stream(given)
    with pytest.raises(InvalidInput, match="must be a list of prompts: run_job runs the rows of a file"):
        engine.generate(Path("rows.csv"))
    with pytest.raises(InvalidInput, match=r"such as \['A text', {'prompt': 'A row', 'max_tokens': 8}\]$"):
        engine.generate(None)
    with pytest.raises(InvalidInput, match=r'give \[{"role": "user", "content": messages}\]$'):
        engine.chat("Hi")
    with pytest.raises(InvalidInput, match=r"give \[messages\]$"):
        engine.chat(CHAT[0])
    assert engine.generate([], SHORT) == engine.chat([]) == engine.score("One", []) == []
    assert "messages is []; it must be an array" in engine.chat([[]])[0].error
    assert 'such as [{"role": "user", "content": "..."}]' in engine.chat(["Hi"])[0].error
    assert "; exactly one is needed, but it has no fields" in engine.generate({}).error
    assert "put it into messages, as engine.chat does" in engine.generate(CHAT)[0].error
    one = engine.generate({"prompt": TEXTS})  # a dict of columns
    assert one.error.endswith(" or an array of token ids; give each text its own row")
    errors = [str(result.error) for result in engine.generate([TEXTS, b"One", Path("One"), [1, 2]])]
    assert [error.split("; ")[0] for error in errors] == [
        f"prompt {i}: is {kind}" for i, kind in enumerate(("an array", "bytes", "PosixPath", "an array"))
    ]


def test_a_function_of_results_is_one_before_anything_is_computed(engine: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^on_result is 5; it must be a function that takes a Result, or None$"):
        engine.score("One", " b", on_result=5)


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


def test_conversations_that_a_template_would_not_write(engine: Any) -> None:
    """Are error rows; the other one runs."""
    wrong = [
        [{"role": "system", "content": ""}],
        [{"role": "user", "content": "\u3164"}],
        [*CHAT, {**CHAT[0], "role": "gpt"}],
    ]
    *results, last = engine.chat([*wrong, CHAT], SHORT)
    assert [result.error.split(": ", 1)[1] for result in results] == [
        "no message has visible text (messages[0].content is empty); give one",
        "messages[0].content is blank; give the user's text",
        "messages[1].role is 'gpt', which the chat template does not name; it must be user, assistant, system or tool:"
        " did you mean assistant?",
    ]
    assert last.token_ids == engine.chat(CHAT, SHORT).token_ids


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


def test_a_record_names_its_fields() -> None:
    for kind, wrong, near in (
        (SamplingParams, "max_token", "max_tokens"),
        (Policy, "slot", "slots"),
        (Lossy, "zz", ""),
    ):
        question = f"; did you mean {near}\\?" if near else ";"
        with pytest.raises(TypeError, match=f"^{kind.__name__} has no field {wrong}{question} it takes "):
            kind(**{wrong: 1})
    with pytest.raises(
        TypeError, match=r"^Engine has no option device_memory; did you mean device_mem\? it takes device, "
    ):
        Engine(device_memory="4G")
    with pytest.raises(TypeError, match=r"^Engine is given 'cpu' without a name; only the model needs none$"):
        Engine("model", "cpu")  # type: ignore[misc]
    for kind in (SamplingParams, Policy, Lossy, Links, Hardware):
        said = rf'^{kind.__name__} is given {{"n": 2}}; give fields by name, as {kind.__name__}\(\*\*fields\)$'
        with pytest.raises(InvalidInput, match=said):
            kind({"n": 2})  # type: ignore[arg-type, call-arg]
    with pytest.raises(InvalidInput, match="max_tokens is 'greedy'; it must be a whole number"):
        SamplingParams("greedy")  # type: ignore[arg-type]
    assert SamplingParams(5) == copy.copy(pickle.loads(pickle.dumps(SamplingParams(max_tokens=5))))


@pytest.mark.parametrize(
    "wrong", [None, 5, {}, [], b"policy.json", FRAME], ids=["None", "number", "dict", "list", "bytes", "table"]
)
def test_the_name_of_a_file_is_text_or_a_path(wrong: Any) -> None:
    value = in_python(f"is {shown(wrong)}").removeprefix("is ")
    for load, said in (
        (Policy.load, "policy file is {}; it must be the name of a file, or of a shipped one; Policy(**fields) takes"),
        (Hardware.load, "hardware file is {}; it must be the name of a file, or of a shipped one; Hardware(**fields)"),
        (Strategy.load, "strategy file is {}; it must be the name of a file"),
        (cluster_file.load, "cluster file is {}; it must be the name of a file"),
    ):
        with pytest.raises(InvalidInput, match=f"^{re.escape(said.format(value))}"):
            load(wrong)


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


def test_names_of_vllm(engine: Any) -> None:
    one, two = engine.generate([*TEXTS[:1], {"prompt": TEXTS[1], "n": 2, "temperature": 1, "logprobs": 0}], SHORT)
    assert [(each.text, each.token_ids) for each in one.outputs] == [(one.generated_text, one.token_ids)]
    assert two.outputs == two.samples
    assert two.outputs[0].logprobs == two.logprobs
    assert engine.generate({"prompt": None}).outputs == []
