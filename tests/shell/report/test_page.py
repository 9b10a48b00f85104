"""Pages: text of a job is escaped, all sections are there, nothing refers to another file, pictures say what they
show."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from flexengine.shell.report.page import SERIES, _lengths, _token_rates, render
from flexengine.shell.report.record import Bucket, ErrorCounts, LengthCounts, ReportRecord
from tests.helpers.reports import GB, PLAN, record

pytest.importorskip("matplotlib")

SECTIONS = ["placement", "sweep", "rates", "prediction", "lengths", "errors", "numbers", "machine", "again"]
HOSTILE = ("</pre></style></script><script>alert(1)</script><img src=//e.example/x onerror=alert(2)>&lt;{{ 7*7 }}$x^2$"
           "\x00\u202e'\"")  # fmt: skip
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements and text of a page. Raises AssertionError if an element is not closed, or closed in another order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def test_all_sections_and_numbers() -> None:
    page = Page(render(record()))
    text = " ".join(page.texts)
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    assert len(page.all("svg")) == 10  # four of them twice, of which one is narrow
    for words in ("2.00 tok/s", "5 of 5", "1 with an error", "15.0 tok/s", "2.00 GB (20 %)", "5.00 GB (50 %)",
                  "the prediction for them is 14.0 s", "5 to 31 tokens, mean 18.8", "length 3, stop 1",
                  "line 5: max_tokens is 0", "python -m flexengine.run in.jsonl --report r.html", "a processor",
                  '{"gpu_batch_size": 3}', "device 1.00 GB"):  # fmt: skip
        assert words in text, words


def test_text_of_the_job_is_escaped() -> None:
    errors = ErrorCounts()
    errors.add(0, HOSTILE)
    errors.add(1, "half a pair: \ud800")
    plan = dataclasses.replace(PLAN, hardware=HOSTILE, text=HOSTILE, policy={"schedule": HOSTILE})
    page = render(record(
        model=HOSTILE, error=HOSTILE, state="failed", command=HOSTILE, folder=HOSTILE, errors=errors, plan=plan,
        machine=[("processor", HOSTILE)], summary={**record().summary, "replanned": [HOSTILE]},
    ))  # fmt: skip
    parsed = Page(page)
    assert len(parsed.all("script")) == 1
    assert not parsed.all("img")
    shown = HOSTILE.replace("\x00", "\\x00").replace("\u202e", "\\u202e")
    assert "".join(parsed.texts).count(shown) == 10
    assert "half a pair: \\ud800" in "".join(parsed.texts)
    assert "{{ 7*7 }}" in page  # Jinja rendered no text of the job
    page.encode()


def test_the_most_frequent_errors_come_first() -> None:
    errors = ErrorCounts()
    for row, message in enumerate(["prompt is 'a'", "n is 0", "n is 7"]):
        errors.add(row, message)
    page = render(record(errors=errors))
    assert page.index("n is 0") < page.index("prompt is")


def test_names_in_pictures_are_escaped() -> None:
    memories = [("<script>&lt;", {"</svg><img src=x>": 5}, 10)]
    page = Page(render(record(plan=dataclasses.replace(PLAN, memories=memories))))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert "</svg><img src=x>" in page.texts


def test_nothing_refers_to_another_file() -> None:
    page = render(record())
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    parsed = Page(page)
    for _, attrs in parsed.elements:
        for name, value in attrs.items():
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert (value or "").startswith("#"), (name, value)
            assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", value or ""))
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r"(?:href=\"|url\()#([\w-]+)", page))
    assert references <= set(ids)
    assert references
    policy = next(attrs["content"] or "" for attrs in parsed.all("meta") if "http-equiv" in attrs)
    assert "default-src 'none'" in policy


def test_pictures_have_titles_and_colors_of_the_page() -> None:
    page = render(record())
    parsed = Page(page)
    ids = {attrs.get("id") for _, attrs in parsed.elements}
    for attrs in parsed.all("svg"):
        assert attrs["role"] == "img"
        assert set((attrs["aria-labelledby"] or "").split()) <= ids
        assert attrs["viewbox"]
        assert "width" not in attrs
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    colors = {color for svg in svgs for color in re.findall(r"#[0-9a-f]{6}\b", svg)}
    assert colors <= {"#000000"}
    for words in ("disk read: load weight, layer 1, 400 ms from 500 ms on", "device: KV cache 1.00 GB, 25.0 %",
                  "compute: compute, layers 0 to 1, gpu_batches 0 to 2, 600 ms from 400 ms on; 3 tasks, 600 ms of work",
                  "decode, 5.00 s to 15.0 s: 2.60 tok/s in 5 sweeps", "disk read: predicted 10.0 s",
                  "30 tokens: 1 row", "15 tokens: 2 samples"):  # fmt: skip
        assert f"<title>{words}</title>" in page, words


def test_numbers_of_rows_and_tokens_have_whole_ticks() -> None:
    for counts in ([8], [8, 8, 9], [*range(40)]):
        picture = _lengths("x", "", "row", LengthCounts(counts), SERIES[0])
        ticks = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture) if text[0].isdigit()]
        assert len(ticks) >= 3
        assert all(text.isdecimal() for text in ticks)


def test_bars_of_rates_have_edges_so_that_narrow_ones_are_seen() -> None:
    """A bar of one sweep of many is narrower than a pixel, and would be pale."""
    rates = _token_rates([Bucket(1, 5.0, 0.0, 75, 0), *(Bucket(1, 0.0, 0.1, 0, 2) for _ in range(50))])
    for kind, color in (("decode", 4), ("prefill", 1)):
        styles = re.findall(rf'<path [^>]*style="([^"]*)"[^>]*>\s*<title>{kind}, ', rates)
        assert len(styles) >= 51
        for look in (f"fill: var(--series-{color})", f"stroke: var(--series-{color})", "stroke-width: 0.4"):
            assert all(look in style for style in styles), look


def test_computed_prompt_tokens_are_explained_if_there_are_any() -> None:
    words = "Prompt tokens are computed once for a prefix that several prompts share, and again for rows that had to"
    for computed in (75, 0):
        totals = dataclasses.replace(record().totals, computed_prompt_tokens=computed)
        text = " ".join(" ".join(Page(render(record(totals=totals))).texts).split())
        assert (words in text) == (computed > 0)


def test_a_place_that_holds_nothing_has_no_column() -> None:
    plan = dataclasses.replace(PLAN, placement={"weights": (2 * GB, 0, 0), "KV cache": (0, 0, GB)})
    text = " ".join(" ".join(Page(render(record(plan=plan))).texts).split())
    assert "data bytes device disk weights 2.00 GB 2.00 GB (100 %) KV cache 1.00 GB 1.00 GB (100 %)" in text
    assert "prompt tokens computed 15.0 tok/s 75 in the 5.00 s of prefill sweeps" in text


def test_layers_that_run_as_modules_are_named() -> None:
    text = "3 of 4 layers run as modules of transformers, which is slower: a <reason>"
    for texts in ([], [text, "1 of 4 layers ..."]):
        words = Page(render(record(summary=record().summary | {"as_modules": texts}))).texts
        assert [words.count(one) for one in (text, "1 of 4 layers ...", "layers")] == [len(texts) // 2] * 3


@pytest.mark.parametrize("state", ["running", "interrupted", "failed"])
def test_a_job_that_has_not_begun_a_sweep(state: str) -> None:
    page = Page(render(ReportRecord("run", state=state)))
    assert [attrs["id"] for attrs in page.all("section")] == SECTIONS
    assert not page.all("svg")
    assert "No sweep has ended." in " ".join(page.texts)


def test_a_large_job_is_a_small_page() -> None:
    """The bounds of all series together stay below 1 MB."""
    from flexengine.shell.report.record import KINDS, MOST_BUCKETS, MOST_DRAWN, Bucket, LaneSpan, SweepLine

    lanes = ["disk_read", "cpu", "h2d", "device", "d2h", "disk_write"]
    spans = tuple(LaneSpan(lanes[i % 6], "compute from the rows on", KINDS[i % 4], i / 1000, (i + 4) / 1000, (i, i + 9),
                       (0, 99), 10, 0.0039) for i in range(MOST_DRAWN))  # fmt: skip
    rates = [Bucket(100, 1.1 + i % 7, 2.2, 1000 + i, 200) for i in range(MOST_BUCKETS)]
    lengths = LengthCounts(range(2000))
    line = SweepLine(1, False, 1.0, spans, dict.fromkeys(lanes, 0.5))
    page = render(record(sweep=line, rates=rates, prompts=lengths, completions=lengths))
    assert len(page) < 600_000
    assert page.count("<title>") > MOST_DRAWN + 2 * MOST_BUCKETS
