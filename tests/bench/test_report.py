"""bench.report: docs/benchmarks.md is what the records say, the latest counts, and plots work without matplotlib."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.report import __main__ as report
from bench.report import blocks, lines, plots
from bench.report.plots import Bars, Curve, Gantt

OLD = {
    "bench": "offload", "time": "2026-01-01", "lossy": "exact", "limit_bytes": 2 * 10**9, "peer_dtype": "float16",
    "case": {
        "name": "c1", "rows": 16, "prompt": {"low": 128, "high": 128, "median": 0.0, "sigma": None},
        "output": {"low": 8, "high": 8, "median": 0.0, "sigma": None}, "seed": 0, "peer_batches": [],
    },
    "ours_tok_s": {"median": 5.597, "min": 5.5, "max": 5.6}, "peer_tok_s": {"median": 1.0, "min": 1.0, "max": 1.0},
    "ratio": {"median": 5.597, "min": 5.5, "max": 5.6}, "ratio_at_least": None, "rows_equal": [15, 16],
    "share_of_bound_per_sweep": {"median": 0.83, "min": 0.8, "max": 0.86}, "ours": [{}, {}], "peer": [{}],
}  # fmt: skip


def test_the_page_is_what_the_records_say() -> None:
    assert report.stale() == []


def test_a_stale_table_and_a_missing_marker_are_told(tmp_path: Path) -> None:
    text = report.PAGE.read_text()
    altered = tmp_path / "benchmarks.md"
    altered.write_text(text.replace("| (a) SmolLM2", "| (a) SmallLM2", 1))
    assert report.stale(altered) == ["benchmarks.md: the table of compare"]
    assert report.updated(altered.read_text()) == text
    with pytest.raises(ValueError, match="markers of compare 0 times"):
        report.updated("nothing")


def test_the_latest_of_a_case_switches_and_peer_counts_even_if_it_is_worse() -> None:
    (line,) = lines.lines_of(OLD)
    newer = replace(line, time="2026-01-02", ours={"median": 1.0, "min": 1.0, "max": 1.0})
    other = replace(line, switches="weights=int4")
    assert lines.latest([newer, line, other]) == [newer, other]
    assert lines.latest([line, newer]) == [newer]


def test_a_row_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "offload.jsonl").write_text(json.dumps(OLD) + "\n")
    row = blocks.compare_block(tmp_path).splitlines()[2]
    assert row == (
        "| (c1) OPT-1.3B shape, fp16, memory limit 2.0 GB, 16 x (128 in, 8 out) | none | 5.6 (5.5-5.6) "
        "| `accelerate-disk`, float16, batch 16 | 1 | 5.6 (5.5-5.6) | 15 of 16 | 83 % (80-86) | 2026-01-01 |"
    )


def test_a_row_of_the_table_in_the_readme(tmp_path: Path) -> None:
    others = [OLD | {"lossy": lossy, "share_of_bound_per_sweep": share}
              for lossy, share in (("weights=int4,compute=int8", {"median": 0.5, "min": 0.5, "max": 0.5}),
                                   ("compute=bf16,cache=bf16", None))]  # fmt: skip
    (tmp_path / "offload.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (OLD, *others)))
    assert blocks.bounds_block(tmp_path).splitlines()[2] == (
        "| (c1) OPT-1.3B shape, fp16, memory limit 2.0 GB, 16 x (128 in, 8 out) | 5.6 (83 %) |  | 5.6 (50 %) |"
    )


@pytest.mark.parametrize(("value", "said"), [(1234.0, "1230"), (0.0123, "0.0123"), (99.96, "100"), (5.0, "5")])
def test_three_digits(value: float, said: str) -> None:
    assert lines.short(value) == said


def test_every_kind_of_plot_as_text_and_as_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {
        "bars": Bars("Rates", "tok/s", (("(a)", "ours", 10.0), ("(a)", "theirs", 5.0))),
        "curve": Curve("Frontier", "s", "tok/s", ((1.0, 2.0, "1 row"), (2.0, 3.0, "2 rows"))),
        "gantt": Gantt("Sweep", (("device", "compute", 1.0, 2.0), ("disk_read", "load", 0.0, 1.0))),
    }
    monkeypatch.setattr(plots, "PLOTS", {name: lambda value=value: value for name, value in shown.items()})
    assert plots.text("bars").splitlines()[2].count("#") == 25
    assert "2 rows: 2 s, 3 tok/s" in plots.text("curve")
    assert plots.text("gantt").splitlines()[2].endswith("#" * 50 + "." * 50)
    assert set(plots.drawn(tmp_path).values()) == {""}
    pytest.importorskip("matplotlib")
    for name in shown:
        assert plots.draw(name, tmp_path)
        assert plots.drawn(tmp_path)[name] == plots.digest(name)
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert not plots.draw("bars", tmp_path)


def test_attention_shows_decode_and_prompts(tmp_path: Path) -> None:
    shape = {"heads": 8, "kv_heads": 2, "dim": 64}
    kind = {"gb_s": 10.0, "share": 0.25, "bound": 0.5, "to_sdpa": 3.0}
    decode = {"case": {"name": "a", "sequences": 3, "tokens": 7, **shape}, "kinds": {"4-bit": kind, "sdpa": {}}}
    prompt = {
        "case": {"name": "b", "tokens": [5, 9], **shape}, "peak_gflop_s": 200.0, "simd": 256, "threads": 2,
        "lengths": {"5": {"gflop_s": 50.0, "share": 0.25}, "9": {"gflop_s": 100.0, "share": 0.5}},
    }  # fmt: skip
    (tmp_path / "attention.jsonl").write_text("\n".join(map(json.dumps, (decode, prompt))))
    block = blocks.attention_block(tmp_path)
    assert "| 8 heads, 2 of KV | 4-bit | 10 | 25 % | 50 % | 3 |" in block
    assert "| 8 heads, 2 of KV | 50 (25 %) | 100 (50 %) |" in block
    assert "200 GFLOP/s" in block
