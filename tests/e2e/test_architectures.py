"""Every causal LM of the installed `transformers`, at tiny size: run exactly, or refused with a reason."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.helpers import architectures
from tests.helpers.architectures import Finding, config_classes, documented, grouped, rendered
from tests.helpers.forked import Forked

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "models.md"
EXACT_AT_LEAST = 155
# What Python or torch says when something was not foreseen; a reason is for people.
_INTERNAL = re.compile(r"has no attribute|NoneType|\w+Error\b|meta tensor|register_meta|positional argument|\.py\b")


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    """Run all architectures in a process that has not computed yet, as it forks. It uses the other tests' kernels."""
    scratch = tmp_path_factory.mktemp("architectures")
    code = f"from {architectures.__name__} import main; sys.exit(main(sys.argv[1:]))"
    done = Forked(code, ["--json", str(scratch / "findings.json")], ROOT, scratch / "log")
    assert done.wait(600) == 0, done.said()[-2000:]
    return [Finding(**entry) for entry in json.loads((scratch / "findings.json").read_text())]


def _told(findings: list[Finding], verdict: str) -> list[str]:
    return [f"{f.model_type}: {f.reason}" for f in findings if f.verdict == verdict]


@pytest.mark.slow
def test_every_architecture_is_walked(findings: list[Finding]) -> None:
    assert {f.model_type for f in findings} == set(config_classes())


@pytest.mark.slow
def test_none_is_wrong(findings: list[Finding]) -> None:
    assert not _told(findings, "wrong")


@pytest.mark.slow
def test_none_crashes(findings: list[Finding]) -> None:
    assert not _told(findings, "crash")


@pytest.mark.slow
def test_most_are_exact(findings: list[Finding]) -> None:
    assert len(_told(findings, "exact")) >= EXACT_AT_LEAST


@pytest.mark.slow
def test_refusals_give_a_reason_for_people(findings: list[Finding]) -> None:
    refused = [f for f in findings if f.verdict == "refused"]
    bad = [f"{f.model_type}: {f.reason}" for f in refused if _INTERNAL.search(f.reason) or len(f.reason.split()) < 5]
    assert not bad


@pytest.mark.slow
def test_the_document_says_what_was_found(findings: list[Finding]) -> None:
    version, verdicts = documented(DOCUMENT.read_text(encoding="utf-8"))
    if version != transformers.__version__:
        pytest.skip(f"docs/models.md is about transformers {version}, not {transformers.__version__}")
    assert set(verdicts) == {f.model_type for f in findings}
    found = {f.model_type: f.verdict for f in findings}
    # Where the document has no reference there may be one here: some models need packages of their own.
    differing = {n: (v, found[n]) for n, v in verdicts.items() if found[n] != v and v != "no reference"}
    assert not differing, f"documented and found; run {architectures.COMMAND}"


def test_a_document_can_be_read_again() -> None:
    findings = [
        Finding("one-a", "OneForCausalLM", "exact"),
        Finding("two", "TwoForCausalLM", "refused", "says a | b"),
        Finding("three", "ThreeForCausalLM", "refused", "is too odd"),
        Finding("four", "FourForCausalLM", "refused", "is too odd"),
        Finding("five", "FiveForCausalLM", "no reference", "its logits are not finite"),
    ]
    text = rendered(findings)
    assert documented(text) == (transformers.__version__, {f.model_type: f.verdict for f in findings})
    assert "| refused | 3 |" in text
    assert list(grouped(findings[1:4])) == ["is too odd", "says a | b"]


def test_processes_that_die_or_hang_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: dict[str, Callable[[], Any]] = {
        "die": lambda: os._exit(3),
        "hang": lambda: time.sleep(1000),
        "answer": lambda: ("exact", ""),
    }
    monkeypatch.setattr(architectures, "_warm", lambda fork: None)
    monkeypatch.setattr(architectures, "examine", lambda act, directory: acts[act]())
    now, found = [0.0], dict[str, Finding]()
    monkeypatch.setattr(architectures, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    for finding in architectures.walk({"llama": "die", "opt": "hang", "gpt2": "answer"}, tmp_path):
        found[finding.model_type] = finding
        now[0] = 1000.0 * (len(found) == 2)  # the others have ended
    assert {name: (f.verdict, f.reason) for name, f in found.items()} == {
        "llama": ("crash", "ended with code 3"),
        "opt": ("crash", "no answer in 90 s"),
        "gpt2": ("exact", ""),
    }
    assert found["llama"].architecture == "LlamaForCausalLM"
