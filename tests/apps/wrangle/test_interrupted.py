"""flexengine wrangle with a random model, interrupted and killed with SIGKILL: the same command ends with the same
files."""

import random
from pathlib import Path

import pytest

from flexengine.config import Result
from flexengine.job.journal import Journal
from flexengine.shell.commands.main import main
from tests.apps.wrangle.helpers import PAIRS, written
from tests.helpers.forked import SlowCommand
from tests.helpers.speaker import make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

KILLS, ROWS = 10, 150
FINAL = ("o.csv", "o.csv.rows.jsonl", "o.csv.results.jsonl", "m.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_byte_llama(folder, len(byte_tokenizer(folder)), seed=5, width=32, context=400, spread=0.3)
    return str(folder)


def words(table: str, model: str, *more: str) -> list[str]:
    return ["wrangle", "match", table, "-o", "o.csv", "-m", model, "--label", "same", "--shots", "1", "--metrics",
            "m.json", *more]  # fmt: skip


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FINAL]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of an undisturbed run and of another."""
    folders = tmp_path / "whole", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_restart_is_continued_without_it(
    model: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of another run, which --restart replaces, are not taken for changed ones."""
    whole, other = folders
    given = words(written(whole, "t.csv", PAIRS), model)
    monkeypatch.chdir(whole)
    assert main(given) == 0
    monkeypatch.chdir(other)
    assert main([*given, "--noun", "Place"]) == 0
    before = contents(other)
    assert main([*given, "--restart", "-m", str(other / "none")]) == 2
    assert contents(other) == before
    real, added = Journal.add, list[int]()

    def add(journal: Journal, result: Result) -> None:
        real(journal, result)
        added.append(result.index)
        if len(added) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", add)
    capsys.readouterr()
    assert main([*given, "--restart"]) == 130
    assert "interrupted: the same command without --restart continues" in capsys.readouterr().err
    assert not (other / "o.csv").exists()
    assert main(given) == 0
    assert sorted(added) == list(range(4))
    assert contents(other) == contents(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_killed_ten_times_ends_with_the_same_files(
    model: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = folders
    header, *rows = PAIRS.splitlines(keepends=True)
    given = words(written(whole, "t.csv", header + "".join(rows[i % 4] for i in range(ROWS))), model, "-q")
    monkeypatch.chdir(whole)
    assert main(given) == 0
    command = SlowCommand(given, 0.05, other, other / "o.csv.results.jsonl.journal")
    rng, done = random.Random(1), [0]
    for _ in range(KILLS):
        command.start_and_kill(rng, rows=4)
        done.append(command.rows_done())
    assert done[-1] < ROWS - 1  # one row is the example
    assert len(set(done)) > KILLS // 2
    assert not (other / "o.csv").exists()
    monkeypatch.chdir(other)
    assert main(given) == 0
    assert command.rows_done() == ROWS - 1
    assert contents(other) == contents(whole)
