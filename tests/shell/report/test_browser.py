"""Pages in headless Chromium: no request, no error, all sections, tooltips. Skipped where there is no Chromium."""

import re
import subprocess
from pathlib import Path

import pytest

from flexengine.apps.evaluate.report import page as evaluate_page
from flexengine.shell.report.page import render
from flexengine.shell.report.record import ErrorCounts
from tests.helpers.browser import BROWSER, CUT, browser
from tests.helpers.reports import record
from tests.shell.report.test_page import HOSTILE, SECTIONS

pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium"),
]
PROBE = """
<script>
{
const shapes = [...document.querySelectorAll("#sweep [data-tip]")].filter(each => each.getClientRects().length);
const box = shapes[0].getBoundingClientRect();
const at = {bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
scrollTo(0, 0);
document.elementFromPoint(at.clientX, at.clientY).dispatchEvent(new PointerEvent("pointermove", at));
const tip = document.getElementById("tip");
document.body.dataset.over = getComputedStyle(tip).display + ": " + tip.textContent;
document.querySelector("h1").dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
document.body.dataset.beside = getComputedStyle(tip).display;
document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth;
}
</script>
"""


def browse(page: Path, *more: str, width: int = 1100) -> subprocess.CompletedProcess[str]:
    """Open a page in Chromium, which finds no host, with a profile of its own."""
    assert BROWSER is not None
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}",
         f"--window-size={width},5000", "--hide-scrollbars", *more, page.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip


def hostile_page() -> str:
    errors = ErrorCounts()
    errors.add(0, HOSTILE)
    return render(record(model=HOSTILE, error=HOSTILE, command=HOSTILE, errors=errors))


def test_page_in_a_browser(tmp_path: Path) -> None:
    """The unchanged page: its script runs, that of the hostile strings does not, and the console stays empty."""
    log = tmp_path / "net.json"
    page = tmp_path / "r.html"
    page.write_text(hostile_page(), encoding="utf-8")
    found = browse(page, "--dump-dom", f"--log-net-log={log}")
    assert "CONSOLE" not in found.stderr
    requested = set(re.findall(r'"url":"([^"]*)"', log.read_text()))
    assert {url for url in requested if page.name in url} <= {page.as_uri()}
    for url in requested:  # Chromium itself asks for updates; the page asks for nothing
        assert "example" not in url
    dom = found.stdout
    assert re.findall(r'<section id="(\w+)">', dom) == SECTIONS
    assert dom.count("<svg") == 10
    assert 'data-tip="disk read: load weight, layer 0, 400 ms from 0.00 ms on"' in dom
    assert "<title>disk read" not in dom
    assert dom.count("<img") == 0


@pytest.mark.parametrize("width", [1100, 500])
def test_tooltips_and_width(tmp_path: Path, width: int) -> None:
    """A second script, which the page's policy would refuse, points at the first box of the time line."""
    page = tmp_path / "r.html"
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    page.write_text(policy.sub("", hostile_page()).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dom = browse(page, "--dump-dom", width=width).stdout
    assert 'data-over="block: disk read: load weight, layer 0, 400 ms from 0.00 ms on"' in dom
    assert 'data-beside="none"' in dom
    assert 'data-wide="0"' in dom  # wide pictures scroll, the page does not


def evaluation(runs: int, name: str) -> str:
    """Return the page of an evaluation of this many runs."""
    names = [f"{name}{run}" for run in range(runs)]
    figure = {"scenario": "s", "variant": "original", "metric": "accuracy_unconditional", "value": 0.5, "low": 0.25,
              "high": 0.75, "difference": -0.25, "difference_low": -0.5, "difference_high": 0.0, "instances": 9_999,
              "errors": 1, "errors_counted": "as 0"}  # fmt: skip
    return evaluate_page({
        "bootstrap": {"level": 0.95, "resamples": 1000},
        "runs": [{"name": run, "model": f"/{name}/" * 9, "lossy": {"weights": "int4"}, "dtype": None} for run in names],
        "scenarios": [{"name": "s", "kind": "choice", "data": {"file": "f.csv"}, "shots": [], "unusable": 0,
                       "instances": 9}],
        "results": [figure for _ in names],
    })  # fmt: skip


def test_nothing_is_cut(tmp_path: Path) -> None:
    """At each width, elements fit into the window, or scroll with a sign at the edge. Pictures always fit."""
    pages = {"done": render(record()), "hostile": hostile_page(), "one": evaluation(1, "run"),
             "many": evaluation(5, "a-long-name-of-a-run-")}  # fmt: skip
    pages["too wide"] = pages["done"].replace("<section", "<div style='width: 3000px'>x</div><section", 1)
    pages["no sign"] = pages["many"].replace("linear-gradient", "no-gradient")
    found = {}
    with browser(tmp_path) as tab:
        for name, text in pages.items():
            page = tmp_path / f"{name}.html"
            page.write_text(text, encoding="utf-8")
            for width in (390, 800, 1400):
                tab.open(page, width)
                tab.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
                found[name, width] = tab.value(CUT)
                wide = tab.value(
                    "[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().right)"
                )
                assert max(wide, default=0) <= width
    wrong = {place: cut for place, cut in found.items() if bool(cut) != (place[0] in ("too wide", "no sign"))}
    assert not wrong


def test_foreign_scripts_are_refused(tmp_path: Path) -> None:
    """The browser reports the script that the page's policy refuses, so that an empty console means something."""
    page = tmp_path / "r.html"
    page.write_text(render(record()).replace("</body>", PROBE + '<img src="http://e.example/x"></body>'))
    found = browse(page, "--dump-dom")
    assert "data-over" not in found.stdout
    assert len(re.findall("CONSOLE.*(?:Refused to|violates)", found.stderr)) >= 2


def test_light_and_dark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    page = tmp_path / "r.html"
    page.write_text(render(record()))
    levels = {}
    for scheme, setting in (("light", "1"), ("dark", "0")):
        shot = tmp_path / f"{scheme}.png"
        browse(page, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={setting}")
        image = imread(shot)
        assert image.shape[1] == 1100
        levels[scheme] = float(image[..., :3].mean())
        assert image[..., :3].std() > 0.05
    assert levels["light"] > 0.8
    assert levels["dark"] < 0.3
