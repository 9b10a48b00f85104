"""Names that no file can have, links in a circle and links to nowhere: one sentence each, before all work."""

from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job.inputs import InputRows
from flexengine.job.results import check_output
from flexengine.shell.commands import run

LONG = "x" * 300
HAS = "has 300 bytes; a file's name has at most 255"


@pytest.fixture
def input_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5]}\n')
    return "in.jsonl"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run.main([*words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([LONG, "-m", "m", "-o", "o.jsonl"], f"{HAS}; a prompt goes in a file, or `echo ... | flexengine run - "),
        ([LONG], f"{HAS}; a"),
        (["in.jsonl", "-o", LONG, "-m", "m"], f"{HAS}; give a shorter name"),
        (["in.jsonl", "-o", "é" * 124 + ".jsonl", "-m", "m"], "with .journal, a name in it has 262 bytes"),
        (["in.jsonl", "-o", "o.jsonl", "-m", LONG], f"cannot be a path: it {HAS}; a model is a directory"),
        (["in.jsonl", "-o", "o.jsonl", "-m", "m", "--report", LONG[5:] + ".html"], f"{HAS}; give a shorter name"),
    ],
)
def test_a_long_name_is_refused(
    input_file: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *words)


def test_links_in_a_circle_are_refused(input_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").symlink_to("two.jsonl")
    Path("two.jsonl").symlink_to("one.jsonl")
    said = refused(capsys, "one.jsonl", "-m", "m", "-o", "o.jsonl")
    assert "input one.jsonl cannot be read (Too many levels of symbolic links: its links lead back to it)" in said
    check_output("o.jsonl", "one.jsonl")  # it is not the input
    with pytest.raises(InvalidInput, match=r"output two\.jsonl cannot be reached: Symlink loop"):
        check_output("two.jsonl", "one.jsonl")


def test_a_link_to_nowhere_names_its_target(input_file: str) -> None:
    Path("link.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(InvalidInput) as refusal:
        InputRows("link.jsonl")
    said = str(refusal.value)
    assert said.startswith("input link.jsonl cannot be read (it is a link to nowhere.jsonl, which does not exist)")
    assert "did you mean" not in said
