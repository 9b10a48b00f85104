"""What tests of input files share."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexengine.config import SamplingParams
from flexengine.job.inputs import InputRows, Row
from flexengine.job.openai import COMPLETIONS

DEFAULTS = SamplingParams(max_tokens=4)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "hello", "world", "user", ":"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", chat_template=chat)


def written(tmp_path: Path, data: bytes, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def rows_of(tmp_path: Path, data: bytes, name: str = "in.jsonl", **options) -> list[Row]:
    return list(InputRows(written(tmp_path, data, name), **options))


# Parquet and Arrow
def arrow_file(path: Path, table) -> Path:
    pa = pytest.importorskip("pyarrow")
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=300)
    elif path.suffix == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


def batch_fields(url: str = COMPLETIONS, **body) -> dict:
    """Return the fields of an OpenAI batch line."""
    given = {"prompt": "hi"} if url == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": "r-1", "method": "POST", "url": url, "body": {**given, **body}}
