"""How often a job reads its input and tokenizes its prompts."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexengine import Engine, SamplingParams
from flexengine.engine import survey
from flexengine.job.rows import Request, Target

ROWS = 40
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


class Tokenizer:
    """Counts its calls. A token is a character."""

    chat_template = None

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __len__(self) -> int:
        return 64

    def __call__(self, text: str, verbose: bool = False) -> dict[str, list[int]]:
        self.texts.append(text)
        return {"input_ids": [5 + ord(character) % 50 for character in text]}


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Bytes that were read of the input, each time that it was open."""
    readings: list[int] = []

    class Counted(io.BufferedReader):
        def close(self) -> None:
            if not self.closed:
                readings.append(self.tell())
            super().close()

    real = Path.open

    def opened(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if path.parent == tmp_path and path.stem == "in" and mode == "rb":
            return Counted(io.FileIO(path, "r"))
        return real(path, mode, *given, **named)

    monkeypatch.setattr(Path, "open", opened)
    return readings


def written(folder: Path, suffix: str) -> Path:
    """An input whose rows hold more than the beginning that is looked at when it is opened."""
    rows = [{"prompt": f"row {i} of many", "note": "x" * 60_000} for i in range(ROWS)]
    lines = [json.dumps(row) for row in rows]
    if suffix == ".csv":
        lines = ["prompt,note", *(",".join(row.values()) for row in rows)]
    path = folder / f"in{suffix}"
    path.write_text("\n".join(lines) if suffix != ".json" else f"[{', '.join(lines)}]")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_job_reads_its_input_three_times(
    suffix: str, limit: int | None, families: Any, readings: list[int], tmp_path: Path
) -> None:
    """To count and hash it, to run it, and to write the output. Each prompt is tokenized once."""
    path, tokenizer = written(tmp_path, suffix), Tokenizer()
    with Engine(families("llama").directory, device_mem="300M") as engine:
        engine.reader.tokenizer = tokenizer
        summary = engine.run_job(path, tmp_path / "out.jsonl", PARAMS, limit=limit)
        assert summary.rows == (limit or ROWS)
        size = path.stat().st_size
        assert readings.count(size) == (3 if limit is None else 2)  # the run stops at the limit
        assert sum(count < size for count in readings) <= 5  # the beginning is looked at to find the format
        assert tokenizer.texts == [f"row {i} of many" for i in range(limit or ROWS)]
        readings.clear()
        tokenizer.texts.clear()
        assert engine.run_job(path, tmp_path / "out.jsonl", PARAMS, limit=limit).rows == 0
        assert (readings.count(size), tokenizer.texts) == (1, [])


@pytest.mark.parametrize("where", ["memory", "file", "no file"])
def test_prompts_are_tokenized_once(where: str, families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Encoded prompts wait in memory or in a file. If there is no room for the file, they are tokenized again."""
    if where != "memory":
        monkeypatch.setattr(survey, "MEMORY_BYTES", 100)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path if where == "file" else tmp_path / "gone"))
    tokenizer, prompts = Tokenizer(), [f"prompt {i}" for i in range(20)]
    rows = [*prompts, {"prompt": "last", "max_tokens": 1}, {"prompt_token_ids": [-1]}, {"context": "no prompt"}]
    with Engine(families("llama").directory, device_mem="300M") as engine:
        engine.reader.tokenizer = tokenizer
        results = engine.generate(rows, PARAMS)
    assert [result.prompt for result in results] == [*prompts, "last", [-1], None]
    assert [result.completion_tokens for result in results] == [*[2] * 20, 1, 0, 0]
    assert [result.error is None for result in results] == [*[True] * 21, False, False]
    assert tokenizer.texts == [*prompts, "last"] * (2 if where == "no file" else 1)


def test_requests_of_the_spool_share_the_default_parameters() -> None:
    """A window of short prompts may hold half a million requests."""
    own = SamplingParams(max_tokens=1)
    spool = survey.RequestSpool(PARAMS)
    for i, params in enumerate((SamplingParams(**vars(PARAMS)), own, PARAMS)):
        spool.add(Request(i, (5, 6), params, prompt="left out"))
    items = list(spool.items(None))
    assert items == [Request(0, (5, 6), PARAMS), Request(1, (5, 6), own), Request(2, (5, 6), PARAMS)]
    assert [getattr(item, "sampling", None) is PARAMS for item in items] == [True, False, True]


def test_parameters_of_a_class_that_cannot_be_pickled(families: Any) -> None:
    """Prompts are then tokenized again."""

    class Own(SamplingParams):
        pass

    with Engine(families("llama").directory, device_mem="300M") as engine:
        engine.reader.tokenizer = Tokenizer()
        shared = engine.generate(["a", "b"], Own(max_tokens=2, ignore_eos=True))
        each = engine.generate(["a", "b"], [Own(max_tokens=2, ignore_eos=True)] * 2)
        assert [r.token_ids for r in shared] == [r.token_ids for r in each]
        assert [r.token_ids for r in each] == [r.token_ids for r in engine.generate(["a", "b"], PARAMS)]


def test_the_token_whose_logits_are_needed_is_not_shared() -> None:
    """Sequences of equal prompts share all tokens but the last, and scored texts all but that before the first."""
    prompt = tuple(range(5, 25))
    twice = replace(PARAMS, n=2)
    choices = tuple((Target(prompt, (30 + i,)),) for i in range(2))
    arranged = survey.arrange([Request(0, prompt, twice), Request(1, prompt, PARAMS)], shares=True)
    assert [[stem and stem.end for stem in each.stems] for each in arranged] == [[19, 19], [19]]
    scored = survey.arrange([Request(0, prompt, PARAMS, choices=choices)], shares=True)
    assert [[stem and stem.end for stem in each.stems] for each in scored] == [[19, 19]]
