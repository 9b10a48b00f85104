"""Pages in headless Chromium: no request, no error, all sections, tooltips. Skipped where there is no Chromium."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flexengine.shell.report.page import render
from flexengine.shell.report.record import ErrorCounts
from tests.helpers.reports import record
from tests.shell.report.test_page import HOSTILE, SECTIONS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium"),
]
PROBE = """
<script>
{
const shape = document.querySelector("#sweep [data-tip]"), box = shape.getBoundingClientRect();
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
    assert dom.count("<svg") == 6
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
