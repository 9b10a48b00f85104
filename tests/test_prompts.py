"""Input files and rows. A line is judged by the json module on that line alone, tokens by the tokenizer itself."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job import prompts
from flexengine.job.prompts import Request, Row, encode, read_rows, row_of

WORDS = ["<unk>", "<bos>", "hello", "world", "user", "assistant", "system", ":", "a", "b"]
CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant :{% endif %}"
DEFAULTS = SamplingParams(max_tokens=4)


def make_tokenizer(bos: bool = False, chat: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=CHAT if chat else None)


def run(fields, tokenizer=None, context=64, **kwargs):
    return encode(Row(3, 7, fields), tokenizer or make_tokenizer(), context, DEFAULTS, **kwargs)


def error_of(*args, **kwargs) -> str:
    row = run(*args, **kwargs)
    assert isinstance(row, Row), row
    assert row.error is not None
    assert row.error.startswith("line 7: "), row.error
    return row.error


def rows_of(tmp_path, data: bytes, name: str = "in.jsonl", limit=None) -> list[Row]:
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_rows(path, limit))


def test_lines_and_indices(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \r\n{"prompt": "b", "id": 9}\n{"prompt": "c"}')
    assert [(r.index, r.line, r.fields["prompt"]) for r in rows] == [(0, 1, "a"), (1, 4, "b"), (2, 5, "c")]
    assert rows[1].fields["id"] == 9
    assert all(r.error is None for r in rows)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "a"', "JSON"),
        (b"[1, 2]", "list"),
        (b"null", "NoneType"),
        (b'{"prompt": "a", "x": NaN}', "NaN"),
        (b'{"prompt": "a", "x": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "x": 1e999}', "1e999"),
        (b'{"prompt": "a\x00b"}', "JSON"),
        (b"\x00\x00", "JSON"),
        (b"[" * 100_000, "deep"),
        (b"1" * 5000, "JSON"),
    ],
)
def test_a_bad_line_is_one_error_row(tmp_path, bad, reason):
    rows = rows_of(tmp_path, b'{"prompt": "a"}\n' + bad + b'\n{"prompt": "b"}\n')
    assert [r.index for r in rows] == [0, 1, 2]
    assert [r.error is None for r in rows] == [True, False, True]
    assert rows[1].error.startswith("line 2: ")
    assert reason in rows[1].error
    assert rows[1].fields == {}


def test_a_huge_line_is_one_error_row(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 1000)
    huge = b'{"prompt": "' + b"x" * 3_000_000 + b'"}'
    rows = rows_of(tmp_path, b'{"prompt": "a"}\n' + huge + b'\n{"prompt": "b"}\n' + huge)
    assert [(r.line, r.error is None) for r in rows] == [(1, True), (2, False), (3, True), (4, False)]
    assert "1,000 bytes" in rows[1].error
    exact = b'{"prompt": "' + b"x" * (1000 - 14) + b'"}'
    assert [r.error for r in rows_of(tmp_path, exact + b"\n" + exact)] == [None, None]


def test_text_files(tmp_path):
    rows = rows_of(tmp_path, b'\xef\xbb\xbfhello \n\n{"not": json}\r\n\xff\nlast', "in.txt")
    assert [r.fields for r in rows] == [{"prompt": "hello "}, {"prompt": '{"not": json}'}, {}, {"prompt": "last"}]
    assert [r.line for r in rows] == [1, 3, 4, 5]
    assert rows[2].error == "line 4: invalid UTF-8 at byte 0"


def test_limit(tmp_path):
    data = b'{"prompt": "a"}\n\n' * 5
    assert [len(rows_of(tmp_path, data, limit=n)) for n in (0, 3, 99, None)] == [0, 3, 5, 5]


def test_unusable_files_are_refused_at_once(tmp_path):
    (tmp_path / "x.csv").write_text("a")
    (tmp_path / "dir.jsonl").mkdir()
    for name, word in (("x.csv", ".jsonl"), ("gone.jsonl", "No such file"), ("dir.jsonl", "directory"), ("x", ".txt")):
        with pytest.raises(InvalidInput, match=word):
            read_rows(tmp_path / name)


def mutate(line: bytes, rng: random.Random) -> bytes:
    at, kind = rng.randrange(len(line)), rng.randrange(7)
    junk = [b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b'"', b"}", b"NaN", b"\\ud800", b"[[", b"\xe2\x82"]
    if kind == 0:
        return line[:at]
    if kind == 1:
        return line[:at] + line[at + rng.randrange(1, 9) :]
    if kind == 2:
        return line[:at] + bytes([line[at] ^ 1 << rng.randrange(8)]) + line[at + 1 :]
    if kind == 3:
        return line * 2
    return line[:at] + rng.choice(junk) * rng.randrange(1, 4) + line[at:]


def judge(line: bytes) -> bool:
    """Whether a line is a JSON object by RFC 8259, by the standard library's default reading plus its NaN rule."""
    try:
        value = json.loads(line.strip(b"\r\n").decode("utf-8"))
        return isinstance(value, dict) and not ({"NaN", "Infinity", "-Infinity"} & set(str(value).split()))
    except ValueError:
        return False


def test_200_mutated_lines(tmp_path):
    rng = random.Random(0)
    good = b'{"prompt": "hello \xe2\x82\xac world", "max_tokens": 3, "id": 12.5, "tags": ["a", null]}'
    lines = [mutate(good, rng).replace(b"\n", b" ") for _ in range(200)]
    data = b"\n".join(lines)
    numbers = [n for n, line in enumerate(lines, 1) if line.strip()]
    rows = rows_of(tmp_path, data)
    assert [r.index for r in rows] == list(range(len(numbers)))
    assert [r.line for r in rows] == numbers
    first = lines[0].removeprefix(b"\xef\xbb\xbf")
    assert [r.error is None for r in rows] == [judge(line) for line in [first, *lines[1:]] if line.strip()]
    assert all(r.error is None or r.error.startswith(f"line {r.line}: ") for r in rows)
    assert 20 < sum(r.error is None for r in rows) < 180
    tokenizer = make_tokenizer()
    for row in rows:  # nothing raises, and an error always says which line
        out = encode(row, tokenizer, 64, DEFAULTS)
        assert out.index == row.index
        assert isinstance(out, Request) or out.error.startswith(f"line {row.line}: ")


def test_row_of():
    assert row_of("hi", 2) == Row(2, 0, {"prompt": "hi"})
    assert row_of({"prompt_token_ids": [1]}, 0).fields == {"prompt_token_ids": [1]}
    bad = row_of(17, 5)
    assert bad.error == "prompt 5: is int; it must be a string or a row (dict)"
    assert encode(bad, make_tokenizer(), 64, DEFAULTS) is bad


def test_prompt_ids_are_the_tokenizers():
    for bos in (False, True):
        tokenizer = make_tokenizer(bos)
        request = run({"prompt": "hello world a"}, tokenizer)
        assert request == Request(3, tuple(tokenizer("hello world a")["input_ids"]), DEFAULTS)
    assert request.prompt_ids[0] == 1


def test_messages_go_through_the_chat_template():
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "hello world"}]
    ids = run({"messages": messages}, make_tokenizer(bos=True)).prompt_ids
    assert [WORDS[i] for i in ids] == ["system", ":", "a", "user", ":", "hello", "world", "assistant", ":"]


def test_overrides():
    request = run({"prompt": "a", "max_tokens": 9, "temperature": 1, "seed": 5, "ignore_eos": True, "other": 1})
    assert request.sampling == SamplingParams(9, 1, 5, True)
    assert run({"prompt": "a", "max_tokens": None}).sampling == DEFAULTS


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": "9"}, {"max_tokens": 0}, {"max_tokens": True}, {"max_tokens": 1.5}, {"temperature": -1},
     {"temperature": "hot"}, {"temperature": float("nan")}, {"seed": 1.5}, {"seed": [1]}, {"ignore_eos": 1}],
)  # fmt: skip
def test_wrong_overrides(wrong):
    assert next(iter(wrong)) in error_of({"prompt": "a", **wrong})


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "prompt_token_ids": [1]},
     {"text": "a"}, {"prompt": None}],
)  # fmt: skip
def test_exactly_one_kind_of_prompt(fields):
    assert "exactly one" in error_of(fields)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": 5}, {"prompt": ["a"]}, {"messages": []}, {"messages": "hi"}, {"messages": [1]},
     {"messages": [{"role": "user"}]}, {"messages": [{"role": 1, "content": "a"}]},
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
     {"prompt_token_ids": []}, {"prompt_token_ids": 3}, {"prompt_token_ids": [1, "2"]}, {"prompt_token_ids": [True]},
     {"prompt_token_ids": [-1]}, {"prompt_token_ids": [10]}, {"prompt_token_ids": [2**70]},
     {"prompt": "\ud800"}, {"messages": [{"role": "user", "content": "a\udfff"}]}],
)  # fmt: skip
def test_unusable_prompts(fields):
    assert next(iter(fields)) in error_of(fields)


def test_token_id_range():
    assert run({"prompt_token_ids": [0, 9]}).prompt_ids == (0, 9)
    assert run({"prompt_token_ids": [12]}, vocab_size=13).prompt_ids == (12,)
    assert "[0, 12)" in error_of({"prompt_token_ids": [12]}, vocab_size=12)


def test_without_a_tokenizer():
    for fields, works in (({"prompt_token_ids": [5]}, True), ({"prompt": "a"}, False)):
        out = encode(Row(0, 1, fields), None, 64, DEFAULTS, vocab_size=10)
        assert isinstance(out, Request) == works
    assert "no tokenizer" in out.error


def test_without_a_chat_template():
    messages = [{"role": "user", "content": "a"}]
    assert "chat_template" in error_of({"messages": messages}, make_tokenizer(chat=False))


def test_context_length_counts_prompt_and_continuation():
    fields = {"prompt": "a b a b a b"}
    assert isinstance(run(fields, context=10), Request)
    message = error_of(fields, context=9)
    assert all(number in message for number in ("6", "4", "9"))


def test_empty_prompts():
    assert "empty after tokenisation" in error_of({"prompt": ""})
    assert run({"prompt": ""}, make_tokenizer(bos=True)).prompt_ids == (1,)
