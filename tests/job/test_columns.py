"""Batches of columns through an engine, as Ray Data hands them over, against transformers and rows one by one."""

import json
import pickle
from typing import Any

import numpy as np
import pytest

from flexengine import Engine, SamplingParams
from flexengine.activity import reporting
from flexengine.config import Completion, Result
from flexengine.errors import InvalidInput, shown
from flexengine.job import columns
from flexengine.job.columns import _say, answered, json_columns, result_columns, results_of, rows_of
from flexengine.job.rows import Row
from tests.helpers.families import NEW

pa = pytest.importorskip("pyarrow", reason="columns are made by pyarrow")

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
OURS = {
    "generated_text": pa.string(), "token_ids": pa.list_(pa.int64()), "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(), "completion_tokens": pa.int64(), "error": pa.string(),
}  # fmt: skip


def objects(*values: Any) -> Any:
    """A numpy column of any Python values, as Ray makes of text and lists."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def ids_column(prompts: list[list[int] | None]) -> Any:
    return objects(*(None if p is None else np.array(p) for p in prompts))


@pytest.fixture(scope="module")
def llama(families: Any) -> Any:
    return families("llama")


@pytest.fixture
def engine(llama: Any) -> Any:
    with Engine(llama.directory, device="cpu") as made:
        yield made


# Rows


def test_numpy_cells_become_python_values() -> None:
    rows = rows_of({
        "prompt": objects("a", None, "c", "d"),
        "max_tokens": np.array([1.0, np.nan, 3.0, 4.5]),
        "seed": np.array([1, 2, 3, 4], np.int32),
        "temperature": np.array([0.5, np.nan, 1, 0], np.float32),
        "ignore_eos": objects(True, None, np.bool_(False), True),
        "stop": objects("x", None, np.array(["y", "z"], dtype=object), []),
        "prompt_token_ids": objects(None, np.array([4, 5]), None, None),
        "min_p": np.full(4, np.nan, np.float32),  # what Ray makes of a column of nulls
        "note": objects(1, 2, 3, 4),
    })  # fmt: skip
    assert [r.fields for r in rows] == [
        {"prompt": "a", "max_tokens": 1, "seed": 1, "temperature": 0.5, "ignore_eos": True, "stop": "x"},
        {"seed": 2, "prompt_token_ids": [4, 5]},
        {"prompt": "c", "max_tokens": 3, "seed": 3, "temperature": 1.0, "ignore_eos": False, "stop": ["y", "z"]},
        {"prompt": "d", "max_tokens": 4.5, "seed": 4, "temperature": 0.0, "ignore_eos": True, "stop": []},
    ]
    kinds = {type(v) for r in rows for v in r.fields.values()}
    assert kinds == {str, int, float, bool, list}
    assert [r.index for r in rows] == [0, 1, 2, 3]


def test_infinity_is_no_gap() -> None:
    for batch in ({"temperature": np.array([np.inf, np.nan])}, pa.table({"temperature": [np.inf, np.nan]})):
        assert [row.fields for row in rows_of(batch)] == [{"temperature": np.inf}, {}]


def test_objects_may_be_json_text_and_fields_of_other_programs_are_read() -> None:
    rows = rows_of({
        "prompt": objects("a", "b", "c"),
        "logit_bias": objects('{"5": -1}', None, "{"),
        "chat_template_kwargs": objects({"a": False}, None, None),
        "max_new_tokens": objects(None, 5, None),
    })  # fmt: skip
    assert rows[0].fields == {"prompt": "a", "logit_bias": {"5": -1}, "chat_template_kwargs": {"a": False}}
    assert rows[1].fields == {"prompt": "b", "max_new_tokens": 5}
    assert "logit_bias is text, but not JSON" in str(rows[2].error)


def test_tools_beside_messages() -> None:
    chat, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
    rows = rows_of({"messages": [chat, json.dumps(chat), chat], "tools": [tools, json.dumps(tools), "{broken"]})
    assert [row.request.get("tools") for row in rows[:2]] == [tools, tools]
    assert str(rows[2].error).startswith("prompt 2: tools is text, but not JSON")
    (plain,) = rows_of({"prompt": ["a"], "tools": ["hammer, saw"]})
    assert plain.error is None


@pytest.mark.parametrize("table", [False, True])
def test_messages_as_structs_or_as_text(table: bool) -> None:
    chat = [{"role": "user", "content": "hi"}]
    struct = np.array(chat, dtype=object)
    text: Any = {"messages": [json.dumps(chat), "{broken", None]}
    nested: Any = {"messages": [chat, None]} if table else {"messages": objects(struct, None)}
    rows = rows_of(pa.table(text) if table else text) + rows_of(pa.table(nested) if table else nested)
    assert [r.fields.get("messages") for r in rows] == [chat, "{broken", None, chat, None]
    assert [bool(r.error) for r in rows] == [False, True, False, False, False]
    assert str(rows[1].error).startswith("prompt 1: messages is text, but not JSON")


def test_two_dimensions_are_lists() -> None:
    rows = rows_of({"prompt_token_ids": np.arange(6).reshape(2, 3)})
    assert [r.fields["prompt_token_ids"] for r in rows] == [[0, 1, 2], [3, 4, 5]]


def test_index_column() -> None:
    rows = rows_of({"prompt": ["a"] * 5, "index": objects(7, None, 9.0, -1, np.int64(2**40))})
    assert [r.index for r in rows] == [7, 1, 9, -1, 2**40]
    assert all("index" not in r.fields for r in rows)


@pytest.mark.parametrize("other", ["r1", "", True, False, 2.5, [1]])
def test_an_index_that_is_data(other: Any) -> None:
    """Rows are numbered by their places, and run."""
    said: list[str] = []
    _say.cache_clear()
    with reporting(lambda record: said.append(record.text)):
        for batch in (objects("r0", None, other), [2.5, "r1", other]):
            rows = rows_of({"prompt": ["a"] * 3, "index": batch})
            assert [(r.index, r.error, r.fields) for r in rows] == [(i, None, {"prompt": "a"}) for i in range(3)]
    assert said == ["column index is data, as it holds no whole numbers; rows are numbered by their places in a batch"]


@pytest.mark.parametrize("other", ["r1", "", True, 2.5])
def test_an_index_that_is_no_whole_number_beside_others(other: Any) -> None:
    """The row is an error, and the others keep their numbers, on which their noise depends."""
    *rows, bad = rows_of({"prompt": ["a"] * 3, "index": [7, 8, other]})
    assert [(row.index, row.error) for row in rows] == [(7, None), (8, None)]
    assert bad.error == f"prompt 2: index is {shown(other)}, beside whole numbers; it must be one, too"


def test_names_of_columns_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(columns, "meant_field", lambda name: seen.append(name))
    batch = {"prompt": ["a"], **{f"looked_at_{i}": [1] for i in range(1100)}}
    for _ in range(3):
        answered(batch, SamplingParams(), lambda rows: [Result(row.index) for row in rows], row_options=True)
    assert seen == list(batch)


def test_columns_of_a_batch_come_back() -> None:
    """Each under one name in all batches, and what is said about them."""
    said: list[str] = []
    _say.cache_clear()
    batch = {"prompt": ["a"], "index": ["r1"], "error": [3], "input_error": [4], "max_token": [5], "temperature": [6]}
    with reporting(lambda record: said.append(record.text)):
        for options in (False, False, True):
            out = answered(batch, SamplingParams(), lambda rows: [Result(row.index) for row in rows], options)
            assert (out["index"], out["input_error"], out["input_input_error"]) == (["r1"], [3], [4])
    assert out["max_token"] == [5]
    assert said == [
        "columns max_token (did you mean max_tokens?) and temperature are data; with row_options=True columns named"
        " like options set them for their rows",
        "column index is data, as it holds no whole numbers; rows are numbered by their places in a batch",
        "error and input_error of the batch are returned as input_error and input_input_error, beside the results",
        "field max_token is data; did you mean max_tokens?",
    ]


def test_text_that_is_not_utf8_is_its_rows_error() -> None:
    raw = pa.array([b"a", b"\xff", b"c"])
    for column in (raw, pa.Array.from_buffers(pa.string(), 3, raw.buffers())):
        rows = rows_of(pa.table({"prompt": column, "other": [1, 2, 3]}))
        assert [r.fields.get("prompt") for r in rows][::2] == ["a", "c"]
        assert [r.error is None for r in rows] == [True, False, True]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (["a"], "batch is list"),
        ({"prompt": "text"}, "column prompt is str"),
        ({"prompt": 3}, "column prompt is int"),
        ({"prompt": ["a"], "n": [1, 2]}, "one length"),
    ],
)
def test_what_is_no_batch(batch: Any, message: str, engine: Engine) -> None:
    with pytest.raises(InvalidInput, match=message):
        engine(batch)


# Results


def test_rows_that_share_an_index_are_told_apart() -> None:
    calls = []

    def generate(rows: list[Row]) -> list[Result]:
        calls.append([r.index for r in rows])
        return [Result(r.index, generated_text=r.fields["prompt"].upper()) for r in reversed(rows)]

    rows = rows_of({"prompt": list("abcdef"), "index": [3, 3, 1, 3, 1, 0]})
    assert [r.generated_text for r in results_of(rows, generate)] == list("ABCDEF")
    assert calls == [[3, 1, 0], [3, 1], [3]]


def test_types_do_not_depend_on_what_became_of_the_rows() -> None:
    good = Result(0, "text", [1, 2], "stop", 3, 2, None, [{"logprob": -np.inf}], [Completion("a", [1], "stop")])
    bad, extra = Result(0, error="half a pair: \ud800"), ["logprobs", "samples"]
    wanted = pa.schema({**OURS, "logprobs": pa.string(), "samples": pa.string()})
    for results in ([good], [bad], [good, bad], []):
        assert pa.table(result_columns(results, extra)).schema == wanted
        assert pa.table(result_columns(results, [])).schema == pa.schema(OURS)
    first, second = pa.table(result_columns([good, bad], extra)).to_pylist()
    assert json.loads(first["logprobs"]) == [{"logprob": None}]
    sample = {"generated_text": "a", "token_ids": [1], "finish_reason": "stop"}
    assert json.loads(first["samples"]) == [sample]
    assert second == {"generated_text": None, "token_ids": [], "finish_reason": None, "prompt_tokens": 0,
                      "completion_tokens": 0, "error": "half a pair: \\ud800", "logprobs": None,
                      "samples": None}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "params", "expected"),
    [
        ([], SamplingParams(), []),
        (["n"], SamplingParams(), ["samples"]),
        (["logprobs"], SamplingParams(), ["logprobs"]),
        ([], SamplingParams(n=2, logprobs=0), ["logprobs", "samples"]),
    ],
)
def test_json_columns(names: list[str], params: SamplingParams, expected: list[str]) -> None:
    assert json_columns(names, params) == expected


# The engine


def test_a_numpy_batch(engine: Engine, llama: Any) -> None:
    """Tokens equal those of transformers; a bad row affects no other; input columns are returned, with lists for
    arrays."""
    batch = {
        "prompt_token_ids": ids_column([*llama.prompts, [10**6], None]),
        "max_tokens": np.array([NEW] * 7 + [2.0, np.nan, 1]),
        "kept": np.arange(10, dtype=np.int16),
        "error": objects(*["old"] * 10),
    }
    out = engine(batch, GREEDY, row_options=True)
    assert list(out) == [*(name if name != "error" else "input_error" for name in batch), *OURS]
    assert out["input_error"] == ["old"] * 10
    assert {name: out[name].type for name in OURS} == OURS
    assert out["kept"] is batch["kept"]
    assert out["prompt_token_ids"] == [*llama.prompts, [10**6], None]
    assert out["token_ids"].to_pylist() == [*llama.expected[:7], llama.expected[7][:2], [], []]
    assert out["prompt_tokens"].to_pylist() == [*map(len, llama.prompts), 0, 0]
    errors = out["error"].to_pylist()
    assert errors[:8] == [None] * 8
    assert "prompt 8: prompt_token_ids holds 1000000" in errors[8]
    assert "prompt 9: has none of prompt" in errors[9]


def test_a_table(engine: Engine, llama: Any) -> None:
    """The same, and the caller's columns keep their Arrow types, nulls and places."""
    given = pa.table({
        "prompt_token_ids": pa.array([*llama.prompts, None], pa.list_(pa.int32())),
        "error": pa.nulls(9),
        "max_tokens": pa.array([NEW] * 7 + [2, None], pa.int16()),
        "when": pa.array([None] * 8 + [5], pa.timestamp("ns")),
    })  # fmt: skip
    out = engine(given, GREEDY, row_options=True)
    assert out.column_names == ["prompt_token_ids", "input_error", "max_tokens", "when", *OURS]
    for name in ("prompt_token_ids", "max_tokens", "when"):
        assert out[name].equals(given[name])
    assert {name: out.schema.field(name).type for name in OURS} == OURS
    assert out["token_ids"].to_pylist() == [*llama.expected[:7], llama.expected[7][:2], []]
    split = pa.concat_tables([given.slice(0, 3), given.slice(3)])  # in several chunks
    assert engine(split, GREEDY, row_options=True).equals(out)


@pytest.mark.parametrize("batch", [{}, {"prompt": np.array([])}, {"prompt": [], "x": []}])
def test_no_rows(engine: Engine, batch: dict[str, Any]) -> None:
    for given in (batch, pa.table({name: pa.array([], pa.string()) for name in batch})):
        out = engine(given)
        assert {name: out[name].type for name in OURS} == OURS
        assert all(len(out[name]) == 0 for name in [*batch, *OURS])


def test_no_prompt_column(engine: Engine) -> None:
    out = engine(pa.table({"other": ["a", "b"]}))
    assert out["other"].to_pylist() == ["a", "b"]
    assert all("has none of prompt" in error for error in out["error"].to_pylist())


def test_index_makes_noise_independent_of_batches(engine: Engine, llama: Any) -> None:
    """Cut in any way and order, the rows get what one generate gives all of them; without an index equal rows at one
    place get equal noise."""
    hot = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True)
    prompts = [llama.prompts[0]] * 6
    whole = [r.token_ids for r in engine.generate([{"prompt_token_ids": p} for p in prompts], hot)]
    assert len({tuple(t) for t in whole}) == 6
    for cut in ([0, 1, 2], [3, 4, 5], [5, 0], [2]):
        batch = {"prompt_token_ids": ids_column([prompts[i] for i in cut]), "index": np.array(cut)}
        assert engine(batch, hot)["token_ids"].to_pylist() == [whole[i] for i in cut]
    alone = {"prompt_token_ids": ids_column(prompts[:1])}
    assert engine(alone, hot)["token_ids"].to_pylist() == whole[:1]
    seeded = [engine({**alone, "seed": [s]}, hot, row_options=True)["token_ids"].to_pylist()[0] for s in range(4)]
    assert seeded[0] == whole[0]
    assert len({tuple(t) for t in seeded}) == 4


def test_logprobs_and_samples(engine: Engine, llama: Any) -> None:
    params = SamplingParams(max_tokens=3, n=2, logprobs=1, temperature=1.5, ignore_eos=True)
    row = {"prompt_token_ids": llama.prompts[1]}
    (expected,) = engine.generate([row], params)
    out = engine({"prompt_token_ids": ids_column([row["prompt_token_ids"], []])}, params)
    logprobs, samples = (out[name].to_pylist() for name in ("logprobs", "samples"))
    assert json.loads(logprobs[0]) == expected.logprobs
    assert expected.samples is not None
    assert json.loads(samples[0]) == [vars(s) for s in expected.samples]
    assert logprobs[1] is samples[1] is None


def test_a_batch_of_rows_too_long_for_the_memory(llama: Any, tmp_path: Any) -> None:
    """All rows get an error, and nothing is raised, as the next batch may hold shorter rows."""
    small = dict(device="sim", device_mem="1100K", host_mem="5M", offload_dir=tmp_path)
    with Engine(llama.directory, **small) as engine:
        long, bad = [5] * 200, [-1]
        out = engine({"prompt_token_ids": ids_column([long, bad])}, GREEDY)
        errors = out["error"].to_pylist()
        assert "prompt 0: cannot be held: " in errors[0]
        assert "prompt 1: " in errors[1]
        assert engine({"prompt_token_ids": ids_column(llama.prompts[:1])}, GREEDY)["error"].to_pylist() == [None]


def test_class_and_parameters_can_be_pickled() -> None:
    params = SamplingParams(max_tokens=3, stop=("a",))
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(Engine)) is Engine
