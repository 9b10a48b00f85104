"""The pages build without a warning, and load nothing from another host. Runs after pip install ".[docs]"."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import flexengine
from tests.helpers.browser import BROWSER, CUT, browser
from tests.helpers.pages import ROOT

CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
# Elements that a browser loads by itself; <a> and <link rel="canonical"> are followed by readers only.
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\brel="stylesheet"[^>]*\bhref="([^"]+)"'
)


def pages_of(entry: object) -> list[str]:
    """Return the file names in a navigation entry."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    return [name for part in parts for name in pages_of(part)]


def test_every_page_is_in_the_navigation() -> None:
    (nav,) = (part for part in CONFIG.read_text().split("\n\n") if part.startswith("nav:"))
    listed = pages_of(yaml.safe_load(nav)["nav"])
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    named = re.findall(r"^::: flexengine\.(\w+)$", page, re.M)
    assert sorted(named) == sorted(set(flexengine.__all__) - {"__version__"})


@pytest.mark.skipif(find_spec("mkdocs") is None, reason='needs pip install -e ".[docs]"')
def test_site(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(CONFIG), site_dir=str(tmp_path), strict=True)
    build(config)
    files = list(tmp_path.rglob("*.html"))
    assert {"index.html", "python.html", "command-line.html"} <= {path.name for path in files}
    loaded = {a or b for path in files for a, b in LOADED.findall(path.read_text(encoding="utf-8"))}
    assert loaded
    assert not [url for url in loaded if url.startswith(("http:", "https:", "//"))]
    styles = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css"))
    assert not re.findall(r'(?:url\(|@import\s+)["\']?(?:https?:)?//[^)]*', styles)
    reference = re.sub(r"<[^>]+>", "", (tmp_path / "python.html").read_text(encoding="utf-8"))
    assert not re.findall(r"(?<![\w.])_[A-Za-z]\w*|Annotated", reference)
    if BROWSER is not None:
        in_a_browser(tmp_path)


def in_a_browser(site: Path) -> None:
    """The pages as files: nothing is cut, the sample plan fits at 1300 px, and the search finds a word."""
    with browser(site) as tab:
        for name in ("index", "plan", "python", "command-line", "benchmarks"):
            for width in (390, 800, 1400):
                tab.open(site / f"{name}.html", width)
                assert not tab.value(CUT), (name, width)
        tab.open(site / "plan.html", 1300)
        assert tab.value(
            "[...document.querySelectorAll('pre > code')].every(each => each.scrollWidth <= each.clientWidth)"
        )
        tab.value("document.querySelector('.md-search__input').focus()")
        tab.call("Input.insertText", text="delegated")
        tab.call("Input.dispatchKeyEvent", type="keyUp", key="d")
        assert "matching documents" in tab.until("document.querySelector('.md-search-result').innerText", "matching")
