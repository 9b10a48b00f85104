"""Shipped files: names and paths in a checkout find them from any directory; other paths stay the user's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexengine import shipped
from flexengine.errors import InvalidInput
from flexengine.policy import Policy
from flexengine.shell.commands import plan, run
from flexengine.shell.commands.options import policy_of
from flexengine.shell.commands.parser import Parser

FOLDER = Path(__file__).parents[1] / "policies"
MODELS = ("bloom-176b", "opt-1.3b", "opt-13b", "opt-175b", "opt-30b", "opt-6.7b", "opt-66b")
MACHINES = ("cpu-2core_24gb", "h100-80gb_512gb", "rtx3090-24gb_128gb", "t4-16gb_208gb_ssd")
POLICIES = ("opt-175b", "opt-175b-4bit", "opt-30b", "opt-30b-4bit", "opt-6.7b", "opt-6.7b-4bit")
T4 = "t4-16gb_208gb_ssd"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names() -> None:
    assert shipped.names("models") == MODELS
    assert shipped.names("hardware") == MACHINES
    assert shipped.names("policies") == POLICIES
    assert shipped.names("clusters") == tuple(sorted(f"llm-pq-{k}" for k in range(1, 12)))


@pytest.mark.parametrize(
    ("kind", "given", "file"),
    [
        ("models", "opt-30b", "models/opt-30b"),
        ("models", "policies/models/opt-30b", "models/opt-30b"),
        ("models", "/gone/policies/models/opt-30b/", "models/opt-30b"),
        ("hardware", T4, f"hardware/{T4}.json"),
        ("hardware", f"{T4}.json", f"hardware/{T4}.json"),
        ("hardware", f"policies/hardware/{T4}.json", f"hardware/{T4}.json"),
        ("policies", "opt-6.7b", "published/opt-6.7b.json"),
        ("policies", "flexengine/shipped/policies/opt-6.7b.json", "published/opt-6.7b.json"),
        ("hardware", f"flexengine/shipped/hardware/{T4}.json", f"hardware/{T4}.json"),
        ("policies", "./policies/published/opt-6.7b.json", "published/opt-6.7b.json"),
        ("clusters", "policies/clusters/llm-pq-3.json", "clusters/llm-pq-3.json"),
        ("clusters", "llm-pq-3", "clusters/llm-pq-3.json"),
    ],
)
def test_names_and_paths_in_a_checkout(kind: shipped.Kind, given: str, file: str) -> None:
    assert shipped.find(kind, given) == str(FOLDER / file)


@pytest.mark.parametrize(
    ("kind", "given"),
    [("models", "facebook/opt-30b"), ("models", "opt-31b"), ("models", "my/policies/opt-30b"), ("models", ""),
     ("models", "x" * 5000), ("models", "opt-30b\0"), ("hardware", f"mine/{T4}.json"), ("hardware", "opt-30b"),
     ("hardware", f"policies/published/{T4}.json"), ("policies", "policies/opt-30b.json")],
)  # fmt: skip
def test_other_paths_stay(kind: shipped.Kind, given: str) -> None:
    """A hub id, a mistyped path of the user and a name of another kind name no shipped file."""
    assert shipped.find(kind, given) == given


def test_an_existing_path_comes_first(elsewhere: Path) -> None:
    (elsewhere / f"{T4}.json").write_text("{}")
    assert shipped.find_file("hardware", f"{T4}.json") == f"{T4}.json"
    assert shipped.find_file("hardware", T4) == str(FOLDER / "hardware" / f"{T4}.json")


def test_a_directory_does_not_hide_a_policy(elsewhere: Path) -> None:
    """As of a model that has the same name."""
    (elsewhere / "opt-30b").mkdir()
    assert shipped.find_file("policies", "opt-30b") == str(FOLDER / "published" / "opt-30b.json")
    assert shipped.find("models", "opt-30b") == "opt-30b"


def test_a_shipped_name_is_no_file_to_write_over(elsewhere: Path) -> None:
    options = ["--hardware", T4, "--compare", "opt-6.7b", "--rows", "2", "--save", "opt-6.7b"]
    assert plan.main(["opt-6.7b", *options]) == 0
    assert Policy.load("opt-6.7b").gpu_batch_size > 0


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [("policies", "opt-31b",
      f"there is no policy file opt-31b; did you mean opt-30b? Else give a path, or a name (shipped policies:"
      f" {', '.join(POLICIES)})"),
     ("policies", "nothing-alike", "there is no policy file nothing-alike; give a path, or a name (shipped policies:"
                                   f" {', '.join(POLICIES)})"),
     ("hardware", "t4",
      f"there is no hardware file t4; did you mean {T4}? Else give a path, or a name (shipped hardware:"
      f" {', '.join(MACHINES)})"),
     ("policies", "x/opt-30b.json",
      f"there is no policy file x/opt-30b.json; did you mean opt-30b? Else give a path, or a name (shipped"
      f" policies: {', '.join(POLICIES)})")],
)  # fmt: skip
def test_an_unknown_name_is_answered_by_the_known_ones(kind: shipped.Kind, given: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        shipped.find_file(kind, given)
    assert str(error.value) == message


def test_an_unknown_model_is_answered_by_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["./opt-31b", "--hardware", T4]) == 2
    error = capsys.readouterr().err
    assert error == ("flexengine: there is no model at opt-31b; a model is a directory, a .gguf file or a hub id;"
                     f" shipped models: {', '.join(MODELS)}\n")  # fmt: skip


@pytest.mark.parametrize(
    ("model", "machine", "policy"),
    [("opt-6.7b", T4, "opt-6.7b"),
     ("policies/models/opt-6.7b", f"policies/hardware/{T4}.json", "policies/published/opt-6.7b.json")],
)  # fmt: skip
def test_plan_finds_the_files(model: str, machine: str, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From a directory without the files."""
    same = str(FOLDER / "published" / "opt-6.7b.json")
    options = ["--hardware", machine, "--compare", policy, "--policy", same, "--rows", "2", "--json"]
    assert plan.main([model, *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["hardware"]) == ("opt-6.7b", T4)
    first, second = answer["policies"]
    assert (first["name"], second["name"]) == (same, policy)
    assert first["tok_s"] == second["tok_s"] > 0


@pytest.mark.parametrize("parser", [plan.parser, run.parser])
def test_the_policy_option_finds_the_files(parser: Callable[[], Parser]) -> None:
    policy = Policy.load(str(FOLDER / "published" / "opt-30b.json"))
    assert policy_of(parser().parse_args(["x", "--policy", "opt-30b"])) == policy
    assert policy_of(parser().parse_args(["x"])) is None
