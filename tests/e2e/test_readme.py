"""README.md: short, its commands are those that CI runs, its links lead to files, the policy table is complete."""

import json
import re
import shlex
from pathlib import Path

from flexengine.policy import Policy
from flexengine.shell.commands.run import parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 150


def commands() -> list[str]:
    """Return the two long commands."""
    return [block.strip() for block in re.findall(r"```bash\n(.*?)```", README, re.S)]


def test_length() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_ci_runs_the_test_command() -> None:
    """With the slow tests, too."""
    _, tests = commands()
    install, _, run = tests.rpartition(" && ")
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert install in lines
    assert run == "python -m pytest"
    assert [line.partition("  #")[0] for line in lines if line.startswith(run)] == [f'{run} -m ""']


def test_main_command_uses_files_that_exist() -> None:
    words = shlex.split(commands()[0].rpartition(" && ")[2])
    assert words[:3] == ["python", "-m", "flexengine.run"]
    args = parser().parse_args(words[3:])
    assert (ROOT / args.input).is_file()


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    local = {target.partition("#")[0] for target in targets if not target.startswith("https://")}
    assert [name for name in local if not (ROOT / name).is_file()] == []
    assert {"docs/images/idea.svg", "docs/start.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"} <= local


def test_policy_table_is_complete() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    table = page.split("## A policy file")[1].split("A policy that you give")[0]
    rows = re.findall(r"^\| (`[^|]*) \| `?([^|`]*)`?(?: each)? \|", table, re.M)
    told = {name: json.loads(default) for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == Policy().to_json()
