"""Which fields of a row are options, data or renamed, in all formats; templates, delimiters, and what is said."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, Policy
from flexengine.activity import reporting
from flexengine.apps.tables import cell_text
from flexengine.config import Result, SamplingParams
from flexengine.engine.file_job import check_rows
from flexengine.engine.scoring import encode_scored
from flexengine.errors import VISIBLE, InvalidInput, blankness
from flexengine.job.inputs import InputRows
from flexengine.job.results import encode_row
from flexengine.job.row_fields import OPTIONS, RESULTS, meant_field
from flexengine.job.rows import Request, Row, encode
from tests.helpers.inputs import DEFAULTS, make_tokenizer, rows_of, written
from tests.helpers.speaker import make_speaker
from tests.helpers.tokenizers import byte_tokenizer

pandas = pytest.importorskip("pandas")
COUNT, EMPTY = 300, 7  # rows, and the row with an empty prompt
DATA = ("temperature", "n", "seed", "stop")  # named like sampling parameters
OURS = ("index", "error", "samples", "scores")  # named like fields of results
RENAMED = (
    "the output has the input's error, index, samples and scores as input_error, input_index, input_samples and"
    " input_scores, beside its own fields"
)
MISSPELT = "field max_token is data; did you mean max_tokens?"
LENGTHS = ("max_length", "min_length", "enable_thinking", "suffix")  # named like fields of other programs


def frame(options: bool = False) -> Any:
    """Return a table of measurements. options: the columns DATA have values that are possible as options."""
    table = {
        "review": ["" if i == EMPTY else f"hello world {i}" for i in range(COUNT)],
        "temperature": [i / 4 if options else -25.3 - i for i in range(COUNT)],
        "n": [i % 3 + 1 if options else 1000 + i for i in range(COUNT)],
        "seed": list(range(COUNT)),
        "stop": [f"stop {i}" for i in range(COUNT)],
        "index": [7 * i for i in range(COUNT)],
        "error": [i % 2 for i in range(COUNT)],
        "samples": [f"s{i}" for i in range(COUNT)],
        "scores": [i / 4 for i in range(COUNT)],
        "max_token": list(range(COUNT)),
    }
    return pandas.DataFrame(table if options else table | {name: range(COUNT) for name in LENGTHS})


def stored(folder: Path, table: Any, suffix: str) -> Path:
    path = folder / f"in{suffix}"
    if suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    elif suffix == ".parquet":
        pytest.importorskip("pyarrow")
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False)
    return path


def job(path: Path, **options: Any) -> tuple[list[Any], Any, list[str]]:
    """Return requests or refused rows, the output as a table, and the messages of a job whose results are empty."""
    said: list[str] = []
    with InputRows(path, "review", chat=True, **options) as rows:
        with reporting(lambda record: said.append(record.text)):
            check_rows(rows, SamplingParams())
        made = [(row, encode(row, make_tokenizer(), 64, DEFAULTS)) for row in rows]
    lines = [encode_row(row, Result(row.index, error=getattr(item, "error", None))) for row, item in made]
    return [item for _, item in made], pandas.read_json(io.BytesIO(b"".join(lines)), lines=True), said


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_of_tables_are_data(tmp_path: Path, suffix: str) -> None:
    table = frame()
    items, out, said = job(stored(tmp_path, table, suffix))
    assert [item.sampling for item in items if isinstance(item, Request)] == [DEFAULTS] * (COUNT - 1)
    check_joined(table, out)
    data = sorted([*DATA, *(f"{name} (did you mean max_tokens?)" for name in ("max_length", "max_token"))])
    assert said == [
        RENAMED,
        f"columns {', '.join(data[:-1])} and {data[-1]} are data; with row_options=True columns named like options set"
        " them for their rows",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "asked"), [(".jsonl", None), (".csv", True), (".parquet", True)])
def test_fields_are_options_in_json_lines_and_where_asked_for(tmp_path: Path, suffix: str, asked: bool | None) -> None:
    table = frame(options=True)
    items, out, said = job(stored(tmp_path, table, suffix), row_options=asked)
    for i, item in enumerate(items):
        if i != EMPTY:
            assert item.sampling == SamplingParams(4, i / 4, i, stop=(f"stop {i}",), n=i % 3 + 1)
    check_joined(table, out)
    renamed, *taken, misspelt = said
    assert renamed == RENAMED
    assert misspelt == MISSPELT
    assert (
        taken
        == [
            "fields n, seed, stop and temperature are options of their rows; rename a field that holds data"
            " (row_options=False in Python makes all data)"
        ][: asked is None]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_whole_job_is_joined_without_loss(tmp_path: Path, suffix: str) -> None:
    make_speaker(tmp_path)
    table, said = frame(options=True), list[str]()
    policy = Policy(gpu_batch_size=64, num_gpu_batches=1)
    with Engine(
        tmp_path, device="cpu", device_mem="1G", policy=policy, progress=lambda r: said.append(r.text)
    ) as engine:
        path = stored(tmp_path, table, suffix)
        engine.run_job(path, tmp_path / "out", SamplingParams(max_tokens=1), prompt_column="review", chat=True)
    check_joined(table, pandas.read_json(tmp_path / "out", lines=True))
    names = "max_token (did you mean max_tokens?), n, seed, stop and temperature"
    data = f"columns {names} are data; with row_options=True columns named like options set them for their rows"
    taken = "fields n, seed, stop and temperature are options of their rows; rename a field that holds data"
    for text in (
        RENAMED,
        *([data] if suffix != ".jsonl" else [f"{taken} (row_options=False in Python makes all data)", MISSPELT]),
    ):
        assert said.count(text) == 1
    assert sum("max_token " in text for text in said) == 1


def check_joined(table: Any, out: Any) -> None:
    """Every column comes back unchanged, and the empty prompt is the one error."""
    own = out.rename(columns={f"input_{name}": name for name in OURS} | {name: f"our_{name}" for name in OURS})
    joined = table.merge(own.set_index("our_index"), left_index=True, right_index=True, suffixes=("", "_out"))
    assert len(joined) == len(out) == COUNT
    for name in table.columns:
        assert joined[f"{name}_out"].tolist() == table[name].tolist(), name
    failed = {i: error for i, error in joined["our_error"].items() if isinstance(error, str)}
    assert list(failed) == [EMPTY]
    assert "is empty; give a text" in failed[EMPTY]


def test_fields_of_json_lines_may_be_data(tmp_path: Path) -> None:
    _, _, said = job(stored(tmp_path, frame(), ".jsonl"), row_options=False)
    assert len(said) == 1
    items, _, _ = job(stored(tmp_path, frame(), ".jsonl"), row_options=False)
    assert {type(item) for i, item in enumerate(items) if i != EMPTY} == {Request}


def test_batch_lines_and_usual_rows_say_nothing(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}}
    rows = [line, {"prompt": "b", "id": 1, "temperature": None, "temp": 3, "steps": 1, "topic": "x", "x" * 70: 1}]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)).encode())
    with InputRows(path) as opened:
        assert opened.scan().notes == ()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_templates(tmp_path: Path, suffix: str) -> None:
    table = pandas.DataFrame({"review": ["good", "", "bad"], "stars": [5, 4, 1], "prompt": ["x", "y", "z"]})
    path = stored(tmp_path, table, suffix)
    first, empty, last = InputRows(path, template="{{{review}}}: {stars} of 5")
    assert (first.request["prompt"], last.request["prompt"]) == ("{good}: 5 of 5", "{bad}: 1 of 5")
    assert first.fields["prompt"] == "x"
    assert str(empty.error).endswith("column review is empty; it must be text or a number")
    with pytest.raises(InvalidInput, match=r"the column 'reviw', which no row has; choose from .*review"):
        InputRows(path, template="{reviw}").scan()
    for wrong, reason in (("no column", "no column in braces"), ("{", "a brace is alone"), ("{}", "a column's name")):
        with pytest.raises(InvalidInput, match=rf"--template \(template in Python\).*{reason}"):
            InputRows(path, template=wrong)
    others: tuple[dict[str, Any], ...] = ({"prompt_column": "prompt"}, {"score": True})
    for more in others:
        with pytest.raises(InvalidInput, match="leave --"):
            InputRows(path, template="{review}", **more)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("asked", [None, True])
def test_columns_of_a_template_are_data(tmp_path: Path, suffix: str, asked: bool | None) -> None:
    """Whatever they are named: like options, those of other programs, tools, or with what str.format takes apart."""
    columns = ["temperature", "stop", "suffix", "tools", "Frage: Text", "a!r", "a.b[0]", "größe", "x y", "{z"]
    table = pandas.DataFrame({name: [f"v{i}", f"w{i}"] for i, name in enumerate(columns)} | {"max_tokens": [2, 3]})
    template = "{{" + "|".join(f"{{{name}}}" for name in columns[:-1]) + "}}"
    with InputRows(stored(tmp_path, table, suffix), template=template, row_options=asked) as rows:
        first, second = rows
        notes = rows.scan().notes
    assert first.error is None
    assert second.request.pop("prompt") == "{" + "|".join(f"w{i}" for i in range(9)) + "}"
    options = asked or suffix == ".jsonl"
    assert second.request == ({"max_tokens": 3, "{z": "w9"} if options else {"{z": "w9"})
    assert ("fields stop and temperature are data, as the template has them, and set no options" in notes) is options
    assert len(notes) == (1 if asked else 2 if options else 1)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("review:>9", "write {review} alone"),
        ("review!r", "write {review} alone"),
        ("reviw", "choose from review"),
        ('"a": 1', "choose from review; write {{ and }} for braces that are text"),
    ],
)
def test_a_column_of_a_template_that_no_row_has(tmp_path: Path, name: str, remedy: str) -> None:
    for suffix in (".csv", ".jsonl"):
        path = stored(tmp_path, pandas.DataFrame({"review": ["a"]}), suffix)
        with pytest.raises(InvalidInput) as raised:
            InputRows(path, template=f"{{{name}}}").scan()
        assert str(raised.value).endswith(f"the column {name!r}, which no row has; {remedy}")


NAMED = {
    "max_tokens": "max_token max_tok maxTokens max_new_token max-new-tokens MaxLength",
    "top_p": "top-p topP",
    "top_k": "top-k",
    "stop_token_ids": "stop_token stop_tokens",
    "temperature": "tempreature temperatur",
    "seed": "Seed",
}
ORDINARY = (
    "id text title topic steps stops seeds temp score note message choices user tokens num_tokens total_tokens"
    " max_price max_temp min_temp temperature_c temperature_max avg_temperature temperature2 log presence frequency"
    " sequence repetition format language stop_name seed_id bus_stop random_state words ignore top_10 prompt_id 评论"
    " N _n n% n° än #n seed评论 n(%)"
)


def test_names_that_resemble_options() -> None:
    for ours, names in NAMED.items():
        assert {name: meant_field(name) for name in names.split()} == dict.fromkeys(names.split(), ours)
    assert {meant_field(name) for name in (" max_tokens", "max_tokens ", "Max tokens")} == {"max_tokens"}
    known = [*ORDINARY.split(), *OPTIONS, *RESULTS, "prompt", "messages", "x" * 70]
    assert [name for name in known if meant_field(name)] == []
    assert [meant_field(name, False) for name in ("promt", "Prompt", "message", "review")] == [
        "prompt", "prompt", "messages", None
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_ordinary_columns_are_not_named(tmp_path: Path, suffix: str) -> None:
    names = [*ORDINARY.split(), "prompt", *(["Temperature", "Seed", "Stop"] if suffix == ".csv" else [])]
    with InputRows(stored(tmp_path, pandas.DataFrame({name: ["a"] for name in names}), suffix)) as rows:
        assert rows.scan().notes == ()


def test_columns_that_resemble_options(tmp_path: Path) -> None:
    """In lower or mixed case. Columns that no switch makes options are not named."""
    names = ["prompt", "maxTokens", "topP", "images", "suffix", "MaxTokens"]
    with InputRows(stored(tmp_path, pandas.DataFrame({name: ["a"] for name in names}), ".csv")) as rows:
        (note,) = rows.scan().notes
    assert note.startswith("columns maxTokens (did you mean max_tokens?) and topP (did you mean top_p?) are data; ")


def test_a_misspelt_prompt(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"promt": "a", "top-p": 1}\n{"prompt": "a", "message": "b"}\n')
    with InputRows(path) as rows:
        assert rows.scan().notes == ("fields promt and top-p are data; did you mean prompt and top_p?",)
    with InputRows(path, "promt") as rows:
        assert rows.scan().notes == ("field top-p is data; did you mean top_p?",)


def test_misspelt_fields_of_scored_rows(tmp_path: Path) -> None:
    """A field that a row has, or that other rows have, is none; rows without one are errors that name it."""
    path = written(
        tmp_path, b'{"text": "a", "contxt": "b", "texts": 1, "content": 2}\n{"text": "a", "continuaton": "c"}\n'
    )
    with InputRows(path, score=True) as rows:
        assert rows.scan().notes == ("fields continuaton and contxt are data; did you mean continuation and context?",)
    with InputRows(
        written(tmp_path, b'{"context": "a", "choise": 1}\n{"context": "a", "choices": 1}\n'), score=True
    ) as rows:
        assert rows.scan().notes == ()


def test_templates_and_batch_lines(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    for rows, number in (([line], 1), ([{"review": "a"}, line, {**line, "custom_id": "b"}], 2)):
        path = written(tmp_path, "\n".join(map(json.dumps, rows)).encode())
        with pytest.raises(InvalidInput) as raised:
            InputRows(path, template="{review}").scan()
        assert str(raised.value) == (
            f"--template (template in Python) makes the prompt of each row, but line {number} is an OpenAI batch line,"
            " whose prompt is in its body; leave the template out"
        )


def test_data_that_is_named_like_batch_lines(tmp_path: Path) -> None:
    """Such as a log of requests: with a template its rows are data."""
    log = {"custom_id": "a", "method": "GET", "url": "/x", "body": "b"}
    rows = [{"url": "/x", "body": "b", "title": None}, {"url": "/x", "body": "b"}, {**log, "title": "T"}]
    found = list(InputRows(written(tmp_path, "\n".join(map(json.dumps, rows)).encode()), template="{title}"))
    assert [row.error and row.error.split(": ")[1] for row in found] == [
        "column title is null; it must be text or a number",
        "column title is missing; it must be text or a number",
        None,
    ]


def test_columns_that_a_row_lacks(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"review": "a"}\n{"reviw": "a"}\n{"review": null}\n{"id": 1}\n')
    must = "it must be text or a number"
    assert [row.error for row in InputRows(path, template="{review}")] == [
        None,
        f"line 2: column review is missing (did you mean review by 'reviw'?); {must}",
        f"line 3: column review is null; {must}",
        f"line 4: column review is missing; {must}",
    ]


def test_one_name_for_a_column_in_all_rows(tmp_path: Path) -> None:
    """Whatever other fields a row has; no two fields get one name."""
    rows = [{"error": 1}, {"error": 2, "input_error": 3}, {"input_error": 4, "input_input_error": 5, "input_x": 6}]
    path = written(tmp_path, "\n".join(json.dumps({"prompt": "a", **row}) for row in rows).encode())
    with InputRows(path) as opened:
        outs = [json.loads(encode_row(row, Result(row.index))) for row in opened]
        (note,) = opened.scan().notes
    for row, out in zip(rows, outs, strict=True):
        assert {
            f"input_{name}" if name != "input_x" else name: value for name, value in row.items()
        }.items() <= out.items()
        assert len(out) == 1 + len(row) + len(json.loads(encode_row(Row(0, 0), Result(0))))
    assert note == (
        "the output has the input's error, input_error and input_input_error as input_error, input_input_error and"
        " input_input_input_error, beside its own fields"
    )


def test_names_beyond_the_most_that_are_looked_at(tmp_path: Path) -> None:
    rows = [{f"x{i}": 1 for i in range(1500)}, {"y": 1, "prompt": "a", "temperature": 0.5, "error": 1}]
    with InputRows(written(tmp_path, "\n".join(map(json.dumps, rows)).encode())) as opened:
        renamed, taken = opened.scan().notes
    assert renamed == "the output has the input's error as input_error, beside its own fields"
    assert taken.startswith("field temperature is an option of their rows;")


def test_a_template_for_lines_of_text(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, b"a b\n", "in.txt", template="Sum: {prompt}")
    assert row.request["prompt"] == "Sum: a b"


def test_a_german_export_of_excel(tmp_path: Path) -> None:
    """Semicolons and decimal commas, with a byte order mark as CSV UTF-8, or in Windows-1252 as CSV."""
    text = 'Nr;Bewertung;Preis\r\n1;"Schön; aber teuer";25,30\r\n2;Gut;3,10\r\n'
    rows = rows_of(tmp_path, text.encode("utf-8-sig"), "in.csv", delimiter=";", template="{Bewertung} ({Preis})")
    assert [row.request["prompt"] for row in rows] == ["Schön; aber teuer (25,30)", "Gut (3,10)"]
    named = rows_of(tmp_path, ("sep=;\r\n" + text).encode(), "sep.csv", delimiter=";", template="{Bewertung}")
    assert [(row.line, row.request["prompt"]) for row in named] == [(3, "Schön; aber teuer"), (4, "Gut")]
    old = rows_of(tmp_path, text.encode("cp1252"), "old.csv", delimiter=";", prompt_column="Bewertung")
    assert [row.error is None for row in old] == [False, True]
    assert str(old[0].error).endswith("(Excel: CSV UTF-8), or convert it: iconv -f WINDOWS-1252 -t UTF-8")
    readings: tuple[dict[str, Any], ...] = ({}, {"prompt_column": "Bewertung"}, {"template": "{Bewertung}"})
    for more in readings:
        with pytest.raises(InvalidInput, match=r"separated by ';'; give --delimiter ';' \(delimiter=';' in Python\)"):
            InputRows(tmp_path / "in.csv", **more)
    for wrong, name in ((";;", "in.csv"), ('"', "in.csv"), (";", "in.jsonl")):
        with pytest.raises(InvalidInput, match=f"the delimiter is {wrong!r}; (it must be one|only .csv)"):
            InputRows(written(tmp_path, text.encode(), name), delimiter=wrong)
    assert rows_of(tmp_path, b"id\tprompt\n1\ta\n", "t.csv", delimiter="\\t")[0].prompt == "a"


def test_columns_without_a_name_at_the_end(tmp_path: Path) -> None:
    """As Excel writes them. Empty cells there are left out, others are a row's error."""
    first, short, other = rows_of(tmp_path, b"Nr;prompt;;\n1;a;;\n2;b\n3;c;;d\n", "in.csv", delimiter=";")
    assert (first.fields, short.fields) == ({"Nr": "1", "prompt": "a"}, {"Nr": "2", "prompt": "b"})
    assert (first.error, short.error) == (None, None)
    assert other.error == "line 4: has a cell in column 4, which has no name"
    assert other.fields["further_cells"] == ["", "d"]
    (index,) = rows_of(tmp_path, b",prompt,,\n0,a,,\n", "index.csv")
    assert index.fields == {"": "0", "prompt": "a"}
    for data, fields in ((b",prompt\n0,a\n", {"": "0", "prompt": "a"}), (b"prompt,\na,b\n", {"prompt": "a", "": "b"})):
        assert rows_of(tmp_path, data, "one.csv")[0].fields == fields  # pandas writes its index so
    with pytest.raises(InvalidInput, match="has several columns without a name; name them"):
        rows_of(tmp_path, b",,prompt\n0,1,a\n", "two.csv")
    with pytest.raises(InvalidInput, match="no header line that names the columns: line 1 has empty cells only"):
        rows_of(tmp_path, b";;\nNr;prompt;\n1;a;\n", "blank.csv", delimiter=";")


@pytest.mark.parametrize(
    ("table", "guess"),
    [
        ({"id": ["a-long-name-of-a-row"], "title": ["two words"], "body": ["a text of many words"]}, "body"),
        ({"body": ["a text of many words"], "Prompt": ["short"]}, "Prompt"),
        ({"id": ["17"], "label": ["good"]}, "NAME"),
        ({"id": ["1 234,50"], "评论": ["味道很好"]}, "评论"),
        ({"id": [17], "感想": ["おいしい"]}, "感想"),
        ({"when": ["2024-01-01 10:00:00"], "day": ["Mon Jan 01 2024, 10:00 AM"], "day2": ["1 January 2024"]}, "NAME"),
        ({"url": ["https://a.b/c d.e"], "iban": ["DE89 3704 0044"], "kg": ["12.5 kg"], "日": ["2024年1月1日"]}, "NAME"),
        ({"url": ["https://a.b/a-long-address of-a-page"], "body": ["Don't go!"]}, "body"),
        ({"note": ["a b"], "लेख": ["कमरे में पानी नहीं"]}, "लेख"),
        ({"வரி": ["இது நல்ல படம்"]}, "வரி"),
        ({"লেখা": ["এটি ভালো ছবি"]}, "লেখা"),
        ({"نص": ["كِتَابٌ جَمِيلٌ"]}, "نص"),
        ({"טקסט": ["שָׁלוֹם עוֹלָם"]}, "טקסט"),
        ({"stars": ["❤️ 1️⃣ #️⃣ ❤️"], "letters": ["e\u0301 a\u0300"]}, "NAME"),
    ],
)
def test_the_proposed_column_has_the_longest_texts(tmp_path: Path, table: dict[str, Any], guess: str) -> None:
    for suffix in (".csv", ".parquet"):
        with pytest.raises(InvalidInput, match=rf"--prompt-column '?{guess}'? \(prompt_column='{guess}' in Python\)"):
            InputRows(stored(tmp_path, pandas.DataFrame(table), suffix))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ""}, "prompt is empty; give a text"),
        ({"prompt": None}, "prompt is null or NaN, so missing; give a text, messages or token ids"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content is empty; give the user's text"),
        ({"prompt": " \n"}, "prompt is blank; give a text"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content is blank; give the user's text"),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "The"}]},
         "messages[0].content is empty; give the user's text"),
        ({"prompt": ["a", "b"]}, "prompt is an array; it must be a string, an array of messages (objects with role and"
         " content) or an array of token ids; give each text its own row"),
        ({"text": "a", "chat_template_kwargs": {}}, 'has none of prompt, messages, prompt_token_ids; exactly one is'
         ' needed (its fields are ["text", "chat_template_kwargs"]; rename one to prompt, or name it by --prompt-column'
         " (prompt_column of run_job in Python))"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role is 'usr', which the chat template does not"
         " name; it must be user, assistant, system or tool: did you mean user?"),
        ({"messages": [{"role": "gpt", "content": "a"}]}, "messages[0].role is 'gpt', which the chat template does not"
         " name; it must be user, assistant, system or tool: did you mean assistant?"),
        ({"messages": [{"from": "human", "value": "a"}]}, "messages[0].role is missing; it must be a string such as"
         " user; rename from to role and value to content"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chat", [False, True])
def test_reasons(fields: dict[str, Any], reason: str, chat: bool) -> None:
    found = encode(Row(0, 1, fields, chat=chat), make_tokenizer(), 64, DEFAULTS)
    assert isinstance(found, Row)
    assert found.error == f"line 1: {reason}"


BLANKS = [" ", "\n", "\t \r\n", "\u00a0\u3000", "\u200b", "\ufeff", "\u2060 \u200d\u00ad", "\0\x1b\x7f", "\u3164"]


@pytest.mark.parametrize("text", [*BLANKS, "\u2800\ufe0f", "\u115f\u1160\uffa0\u034f\u180b", "\U000e0041\U000e0100"])
def test_blank_texts_are_empty(tmp_path: Path, text: str) -> None:
    """At every door, as wrangle takes their cells for missing; a scored context is free."""
    tokenizer = make_tokenizer()
    parts = [{"type": "text", "text": text}] * 2
    body: dict[str, Any]
    rows: list[tuple[dict[str, Any], bool]] = [({"prompt": text}, False), ({"prompt": text}, True)]
    rows += [({"messages": [{"role": "user", "content": each}]}, False) for each in (text, parts)]
    for row in (Row(0, 1, fields, chat=chat) for fields, chat in rows):
        assert "is blank; give " in str(encode(row, tokenizer, 64, DEFAULTS).error)  # type: ignore[union-attr]
    for url, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
        (row,) = rows_of(tmp_path, line)
        assert "is blank; give " in str(encode(row, tokenizer, 64, DEFAULTS).error)  # type: ignore[union-attr]
    for suffix in (".csv", ".jsonl"):
        path = stored(tmp_path, pandas.DataFrame({"review": [text]}), suffix)
        (row,) = InputRows(path, template="Label: {review}")
        assert str(row.error).endswith("column review is blank; it must be text or a number")
    assert cell_text(text) is None
    assert cell_text(f"{text}a") is not None
    scored = Row(0, 1, {"context": text, "continuation": " a"}, scored=True)
    assert isinstance(encode_scored(scored, byte_tokenizer(), 64, DEFAULTS, 300), Request)


def test_characters_that_show_nothing() -> None:
    """Those that Unicode says to ignore, controls, white space and blank letters; no others."""
    regex = pytest.importorskip("regex")
    every = "".join(map(chr, [*range(0xD800), *range(0xF900, 0x20000), *range(0xDFF00, 0xE1100)]))
    ignorable = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cc}\s]+").sub("", every)
    left = set(VISIBLE.findall(every))
    assert sorted(left ^ set(ignorable)) == list("\u2800\ufff9\ufffa\ufffb\U00013441\U00013442\U0001d159")
    for text in (
        "\u2764\ufe0f",
        "1\ufe0f\u20e3",
        "\U0001f3f4\U000e0067\U000e007f",
        "\u0301",
        "\ufffd",
        "\ud800",
        "\0a",
    ):
        assert not blankness(text)


def test_roles_of_a_model_are_allowed() -> None:
    """Names that resemble none, and those that the template has in quotes."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{# 'usr' #}"
    for role in ("narrator", "usr"):
        messages = [{"role": role, "content": "hello"}]
        assert isinstance(encode(Row(0, 1, {"messages": messages}), tokenizer, 64, DEFAULTS), Request)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"context": "a", "choices": ["", "b"]}, "choices[0] is empty; give a text of at least one character"),
        ({"context": "a", "choices": []}, "choices is []; it must be an array of 1 to 1000 continuations"),
        ({"context": "a", "choices": None}, "choices is null or empty; give a text"),
        (
            {"contxt": "a", "choices": ["b"]},
            'has choices, but no context (its fields are ["contxt", "choices"]; did you mean context by \'contxt\'?);'
            ' give one: in JSON "" is the beginning of a text',
        ),
        (
            {"context": "a", "choise": ["b"]},
            "has none of continuation, choices, text to score, and none of prompt, messages, prompt_token_ids to run"
            """ (its fields are ["context", "choise"]; did you mean choices by 'choise'?)""",
        ),
        (
            {"context": None, "choices": ["b"]},
            'has choices, but no context (its fields are ["context", "choices"]); give one: in JSON "" is the beginning'
            " of a text",
        ),
    ],
)
def test_empty_choices(fields: dict[str, Any], reason: str) -> None:
    found = encode_scored(Row(0, 1, fields, scored=True), make_tokenizer(), 64, DEFAULTS, 5)
    assert isinstance(found, Row)
    assert found.error == f"line 1: {reason}"
