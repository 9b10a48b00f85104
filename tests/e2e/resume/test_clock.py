"""Chat templates that read the clock: all rows of a job have the time at which the job began first."""

import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from flexengine import Engine, SamplingParams
from flexengine.job.journal import Journal, decode_record, encode_record
from flexengine.job.rows import Request
from tests.helpers.speaker import make_speaker

DAY = 86_400
CHAT = [{"role": "user", "content": "why?"}]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
# The date, and as many letters as the clock shows milliseconds, but at most 50.
TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{{ 'a' * (strftime_now('%f') | int // 1000 % 50) }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}bot:"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clock")
    make_speaker(made, TEMPLATE)
    return made


class Leaping(datetime):
    """A clock that is a day later, and 7 milliseconds, whenever it is read."""

    reads = 0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        cls.reads += 1
        return datetime(2024, 7, 26) + cls.reads * timedelta(days=1, milliseconds=7)


@pytest.fixture
def leaping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Leaping)


@pytest.mark.usefixtures("leaping")
def test_a_job_that_is_resumed_on_another_day(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today, days = time.time() // DAY * DAY, [0]
    monkeypatch.setattr(time, "time", lambda: today + DAY * days[0])
    rows, output = tmp_path / "in.jsonl", {name: tmp_path / f"{name}.jsonl" for name in "abc"}
    rows.write_text("".join(json.dumps({"messages": CHAT, "max_tokens": 4}) + "\n" for _ in range(4)))
    with Engine(str(directory), device="cpu") as engine:
        engine.run_job(rows, output["a"], PARAMS)
        engine.run_job(rows, output["b"], PARAMS, limit=1)
        days[0] = 1
        engine.run_job(rows, output["b"], PARAMS)
        engine.run_job(rows, output["c"], PARAMS)
        (late,) = {
            item.prompt_ids
            for item in engine.reader.requests([{"messages": CHAT}], PARAMS)
            if isinstance(item, Request)
        }
        assert engine.reader.now == datetime.fromtimestamp(time.time())
        text = engine.tokenizer.decode(late, skip_special_tokens=True)
    assert output["a"].read_bytes() == output["b"].read_bytes()
    assert f"{datetime.fromtimestamp(time.time()):%d %b %Y}" in text
    tokens = {tuple(json.loads(line)["token_ids"]) for line in output["a"].read_text().splitlines()}
    assert len(tokens) == 1  # one time for all rows


@pytest.mark.usefixtures("leaping")
def test_one_call_has_one_time(directory: Path) -> None:
    with Engine(str(directory), device="cpu") as engine:
        results = engine.chat([CHAT] * 4, PARAMS)
    assert len({(result.prompt_tokens, *result.token_ids) for result in results}) == 1


def test_the_journal_has_the_local_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.journal"
    with Journal(path) as first:
        first.begin({"model": "m"}, 1_722_000_000)
        assert first.began == datetime.fromtimestamp(1_722_000_000)
    value = decode_record(path.read_bytes())
    assert value is not None
    path.write_bytes(encode_record(value | {"local": "2024-07-26T23:59:59"}))  # by a machine in another time zone
    with Journal(path) as other:
        assert other.began == datetime(2024, 7, 26, 23, 59, 59)
    del value["local"]
    path.write_bytes(encode_record(value))
    with Journal(path) as older:  # of a version that did not note the local time
        assert (older.manifest, older.began) == ({"model": "m"}, datetime.fromtimestamp(1_722_000_000))
