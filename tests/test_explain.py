"""What the planner says: numbers in its text against the records and against arithmetic done anew here."""

import itertools
import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flexengine import planning, run
from flexengine.errors import InvalidInput, OutOfMemory
from flexengine.plan import __main__ as command
from flexengine.plan import explain, picture, whatif, words
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts, TensorFact
from flexengine.plan.hardware import Hardware
from flexengine.plan.layout import lay_out
from flexengine.plan.prediction import Prediction
from flexengine.plan.rates import Rates
from flexengine.plan.search import Search, frontier, search
from flexengine.plan.workload import Workload
from flexengine.policy import TIERS, Policy

GPU = Hardware(
    name="toy", kind="cuda", device_bytes=120 << 20, host_bytes=1 << 30, disk_bytes=4 << 30,
    links={"disk_read": 2e8, "disk_write": 1e8, "h2d": 1e9, "d2h": 1e9}, checkpoint_read=2e8,
    products={"float16": 1e12}, prompt_attention=1e12, decode_attention=1e11, elementwise=1e11,
)  # fmt: skip
CPU = replace(GPU, name="toy cpu", kind="cpu", host_bytes=None, device_bytes=120 << 20, products={"float32": 1e10})
WORK = Workload({(64, 16): 9, (40, 8): 3})
MIXED = Policy(4, 2, (0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (1, 0, 0), prefill_tokens=128)


def model(layers: int = 8, hidden: int = 1024, bytes_: int = 2) -> ModelFacts:
    def matrix(name: str, elements: int) -> TensorFact:
        return TensorFact(name, elements, bytes_, bytes_)

    def layer(j: int) -> tuple[TensorFact, ...]:
        square = hidden * hidden
        norm = TensorFact(f"{j}.norm", hidden, bytes_, bytes_, matrix=False)
        return (*(matrix(f"{j}.{name}", square) for name in "qkvo"), *(matrix(f"{j}.{n}", 4 * square) for n in (1, 2)),
                norm)  # fmt: skip

    return ModelFacts(tuple(layer(j) for j in range(layers)), (), matrix("embedding", 1000 * hidden), None,
                      1000, hidden, 4 * hidden, 8, 8, hidden // 8, 2, "toy")  # fmt: skip


def predicted(policy: Policy, hardware: Hardware = GPU, facts: ModelFacts | None = None) -> Prediction:
    facts = facts or model()
    return Cost(facts, hardware, WORK).predict(lay_out(facts, policy, WORK, hardware.capacity))


@cache
def toy_search() -> Search:
    return search(model(), GPU, WORK)


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def told(policy: Policy, hardware: Hardware = GPU, **more: Any) -> str:
    return explain.report("toy-model", model(), hardware, WORK, predicted(policy, hardware), **more)


# Numbers.


def test_sizes_and_times() -> None:
    assert [words.size(n) for n in (0, 999, 1000, 15_400_000_000, 999_990_000, 2e12)] == [
        "0 B", "999 B", "1.00 kB", "15.4 GB", "1.00 GB", "2.00 TB"]  # fmt: skip
    assert [words.clock(s) for s in (0, 0.0123, 5.5, 59.96, 61, 3885.2, 360000)] == [
        "0.00 s", "0.0123 s", "5.50 s", "0:01:00", "0:01:01", "1:04:45", "100:00:00"]  # fmt: skip
    assert [words.percent(x) for x in (0, 0.001, 0.25, 1)] == ["0 %", "<1 %", "25 %", "100 %"]


def test_bytes_of_every_purpose_add_up() -> None:
    facts, found = model(), predicted(MIXED)
    text = told(MIXED, verbose=True)
    assert len(text.splitlines()) < 60
    booked = re.findall(r"^    (\D+?) +([\d,]+) bytes$", text, re.M)
    assert sum(int(n.replace(",", "")) for _, n in booked) == sum(found.layout.total(tier) for tier in TIERS)
    for tier, limit in zip(TIERS, (120 << 20, 1 << 30, 4 << 30), strict=True):
        line = next(line for line in text.splitlines() if re.match(rf"  {tier} .* of ", line))
        used = found.layout.total(tier)
        shown, bar, share = re.fullmatch(rf"  {tier} +([\d.]+ \w+) of .*\[(.{{40}})\] (<?\d+) %", line).groups()  # type: ignore[union-attr]
        assert in_bytes(shown) == pytest.approx(used, rel=0.01)
        assert abs(bar.count("#") - 40 * used / limit) <= 0.5
        assert share.strip("<") == f"{max(1, round(100 * used / limit))}"
    assert f"weights        {words.size(2 * sum(t.elements for t in facts.tensors))}".split() == next(
        line.split()[:3] for line in text.splitlines() if line.startswith("  weights "))  # fmt: skip


def test_placement_shows_where_weights_lie() -> None:
    found, facts = predicted(MIXED), model()
    line = next(line for line in told(MIXED).splitlines() if line.startswith("  weights "))
    bar = re.search(r"\[(.{40})\]", line)[1]  # type: ignore[index]
    for tier, mark in zip(TIERS, "#=.", strict=True):
        streamed = [*(t for layer in facts.layers for t in layer), facts.embedding]
        share = sum(t.elements for t in streamed if found.layout.homes[t.name] == tier) / sum(
            t.elements for t in streamed)  # fmt: skip
        assert abs(bar.count(mark) - 40 * share) <= 1.5
        assert f"{tier} {share:.0%}".replace("%", " %") in line


def test_lanes_and_what_the_job_waits_for() -> None:
    away = Policy(8, 4, (0, 1, 0), prefill_tokens=256)
    roomy = replace(GPU, device_bytes=200 << 20)
    found = predicted(away, roomy)
    text = told(away, roomy)
    rows = {kind: line.split() for kind in ("prefill", "decode") for line in text.splitlines()
            if line.startswith(f"  {kind} ")}  # fmt: skip
    streamed = 2 * sum(t.elements for t in model().tensors)
    for kind, row in rows.items():
        assert float(row[1].replace(",", "")) == pytest.approx(found.counts[kind], rel=0.06)
        assert float(row[2]) == pytest.approx(found.sweep_seconds[kind], rel=0.01)
        assert float(row[3]) == pytest.approx(streamed / 1e9, rel=0.01)  # the only lane besides computing
    assert "decode (" in text
    assert "waits for the link from host to device: busy 100 % of a sweep, carrying weights 100 %" in text
    assert f"{words.digits((9 * 16 + 3 * 8) / found.seconds)} tok/s" in text
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 130 and line == line.rstrip() for line in text.splitlines())


def test_a_link_that_carries_two_things() -> None:
    policy = replace(MIXED, cache=(0, 1, 0), weights=(0, 1, 0))
    cost, found = Cost(model(), GPU, WORK), predicted(policy)
    weights = 2 * sum(t.elements for t in model().tensors) / 1e9 / found.lanes["decode"]["h2d"]
    shares = explain.carried(cost, found, "decode", "h2d")
    assert shares == pytest.approx({"weights": weights, "KV cache": 1 - weights})
    assert 0.05 < 1 - weights < 0.95


def test_one_slot_overlaps_nothing() -> None:
    assert "with one slot every lane waits for the others" in told(replace(MIXED, slots=1))
    assert "1 slot for streamed weights: transfers wait for computing" in told(replace(MIXED, slots=1))


def test_a_machine_without_a_gpu_has_ram_and_no_host() -> None:
    text = told(Policy(4, 2, (0.2, 0, 0.8), prefill_tokens=128), CPU)
    assert "  RAM " in text
    assert not re.search(r"\b(host|device)\b", text)
    account = predicted(Policy(4, 2, (0.2, 0, 0.8), prefill_tokens=128), CPU).layout
    used = account.total("device") + account.total("host")
    assert in_bytes(re.search(r"  RAM +([\d.]+ \w+) of", text)[1]) == pytest.approx(used, rel=0.01)  # type: ignore[index]


def test_help_is_told_with_what_it_is_worth() -> None:
    text = told(MIXED, helps=[whatif.Help("more", 2.0), whatif.Help("other", 1.5, False)])
    assert re.search(r"  more     2.00x\n  other  >=1.50x\n  >= is", text)
    assert "nothing that was tried" in told(MIXED, helps=[])
    assert "Would help" not in told(MIXED)


# What if.


@pytest.mark.slow
def test_twice_the_link_is_twice_as_fast_where_all_wait_for_it() -> None:
    facts = replace(model(layers=32, bytes_=1), kv_heads=1)  # 403 MB; already too narrow to shrink much
    machine = replace(
        GPU, device_bytes=60 << 20, checkpoint_read=1e13, products={"float16": 1e15}, elementwise=1e14,
        prompt_attention=1e15, decode_attention=1e15,
    )  # fmt: skip
    best = search(facts, machine, WORK).best
    assert best.bottleneck == "h2d"
    found = whatif.helps(facts, machine, WORK, best, budget=60)
    assert found[0].label == "link between host and device twice as fast"
    assert found[0].ratio == pytest.approx(2, rel=0.1)
    assert [h.ratio for h in found] == sorted((h.ratio for h in found), reverse=True)
    assert all(h.ratio >= 1.03 and h.searched for h in found)
    assert not any(h.label.startswith(("disk", "4-bit")) for h in found)
    assert any(h.label == "+62.9 MB device memory" for h in found)


@pytest.mark.slow
def test_when_time_is_up_the_rest_is_a_lower_bound() -> None:
    best = toy_search().best
    whole = {h.label: h for h in whatif.helps(model(), GPU, WORK, best, budget=1e9)}
    ticks = itertools.count()
    hurried = whatif.helps(model(), GPU, WORK, best, budget=3, now=lambda: float(next(ticks)))
    assert {h.searched for h in hurried} == {True, False}
    assert [h.ratio for h in hurried] == sorted((h.ratio for h in hurried), reverse=True)
    for h in hurried:
        assert h.ratio <= whole[h.label].ratio * 1.0001
        assert h.searched <= (h.ratio == pytest.approx(whole[h.label].ratio))


def test_four_bits_take_9_of_32_of_the_bytes_and_the_same_time() -> None:
    facts = model()
    narrow = whatif.four_bits(facts)
    assert narrow is not None
    for old, new in zip(facts.layers[0], narrow.layers[0], strict=True):
        share = new.elements * new.held / (old.elements * old.held)
        assert share == pytest.approx(0.28125 if old.matrix else 1)
    assert whatif.four_bits(narrow) is None
    before, after = Rates.of(facts, GPU), Rates.of(narrow, whatif.as_fast(GPU, facts, narrow))
    for tokens in (1.0, 64.0, 1024.0):
        assert float(after.stack(tokens)) == pytest.approx(float(before.stack(tokens)), rel=1e-6)
        assert float(after.head(tokens)) == pytest.approx(float(before.head(tokens)), rel=1e-6)


def test_a_device_twice_as_fast_takes_half_the_time() -> None:
    measured = replace(GPU, layers={model().signature(0): 0.01}, heads={model().head_signature: 0.002})
    for machine in (GPU, measured):
        before, after = (Rates.of(model(), m) for m in (machine, whatif.faster_device(machine)))
        for seconds in (lambda r: r.stack(100.0), lambda r: r.head(100.0),
                        lambda r: r.attention[None].decode(500.0, 50.0),
                        lambda r: r.attention[None].prompt(500.0, 50.0)):  # fmt: skip
            assert float(seconds(after)) == pytest.approx(float(seconds(before)) / 2)


# Several policies.


def test_compare_ranks_and_says_why_one_does_not_fit() -> None:
    base = Policy(4, 2, (0, 1, 0), prefill_tokens=128)
    policies = {"host": base, "disk": replace(base, weights=(0, 0, 1)), "alone": replace(base, num_gpu_batches=1)}
    entries: list[tuple[str, Any]] = [(name, predicted(policy)) for name, policy in policies.items()]
    with pytest.raises(OutOfMemory) as caught:
        predicted(Policy(4, 2))
    lines = explain.compare([("resident", caught.value), *entries], GPU).splitlines()
    ranked = [line.split()[1] for line in lines[1:4]]
    assert ranked == [name for name, p in sorted(entries, key=lambda e: e[1].seconds)]
    for line in lines[1:4]:
        cells = line.split()
        assert float(cells[2]) == pytest.approx(dict(entries)[cells[1]].tok_s, rel=0.01)
        assert line.endswith("  " + words.lane_names(False)[dict(entries)[cells[1]].bottleneck])
    over = caught.value.needed + caught.value.used - caught.value.capacity
    assert lines[4].split()[:2] == ["-", "resident"]
    assert f"does not fit: {words.size(over)} too much for the {words.size(120 << 20)} of device memory" in lines[4]


def test_frontier_holds_what_nothing_beats() -> None:
    found = toy_search()
    kept = frontier(found)

    def beaten(p: Prediction) -> bool:
        mine = (p.latency, p.seconds)
        others = [(q.latency, q.seconds) for q in found.tried]
        return any(other != mine and all(x <= y for x, y in zip(other, mine, strict=True)) for other in others)

    unbeaten = {(p.latency, p.seconds) for p in found.tried if not beaten(p)}
    assert [(p.latency, p.seconds) for p in kept] == sorted(unbeaten)
    lines = explain.frontier_text(kept, 1000).splitlines()
    assert len(lines) == len(kept) + 1
    assert [float(line[10:20]) for line in lines[1:]] == [pytest.approx(p.tok_s, rel=0.01) for p in kept]
    few = explain.frontier_text(kept * 30, 10).splitlines()
    assert len(few) <= 13
    assert f"({30 * len(kept) - (len(few) - 2)} more policies between these)" in few[-1]


# The picture.


@pytest.mark.parametrize("curve", [False, True])
def test_plot_draws(tmp_path: Path, curve: bool) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    found = toy_search()
    picture.plot(found.best, GPU, tmp_path / "a.png", frontier=frontier(found) if curve else ())
    image = imread(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert image.shape[1] > (1900 if curve else 1200)
    assert len({tuple(pixel) for row in image[::7] for pixel in row[::7].round(2)}) > 6  # bars of several colours


def test_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(MIXED)
    with pytest.raises(InvalidInput, match=r"a\.jpg does not end with \.png"):
        picture.plot(found, GPU, tmp_path / "a.jpg")
    for name in [n for n in sys.modules if n.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=r"pip install 'flexengine\[plot\]'"):
        picture.plot(found, GPU, tmp_path / "a.png")


# The command line.

TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 2048, "torch_dtype": "float16", "tie_word_embeddings": False}  # fmt: skip


ANSWERS: dict[str, Search] = {}  # by question: most commands here ask the same ones


def answered(*question: Any) -> Search:
    """What is searched, once for all tests."""
    if (key := repr(question)) not in ANSWERS:
        ANSWERS[key] = search(*question)
    return ANSWERS[key]


class Line:
    """A config-only model and a hardware file; calls the command with them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
        small = replace(GPU, device_bytes=200 << 20)  # 194 MiB of them are workspace
        (folder / "hw.json").write_text(json.dumps(small.to_json()))

    def __call__(self, *more: str, code: int = 0) -> str:
        self.capsys.readouterr()
        hardware = [] if "--hardware" in more else ["--hardware", str(self.folder / "hw.json")]
        found = command.main([str(self.folder / "tiny"), *hardware, *more])
        captured = self.capsys.readouterr()
        assert found == code, captured.err
        return captured.out if code == 0 else captured.err


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Line:
    for asks in (command, whatif):
        monkeypatch.setattr(asks, "search", answered)
    return Line(tmp_path, capsys)


SHAPE = ("--prompt-tokens", "30", "--max-tokens", "10", "--rows", "6")


def test_the_linear_program_is_written(line: Line) -> None:
    """That of the policy's block: all kinds of data, lanes and memories have a name in it."""
    file = line.folder / "a.lp"
    line(*SHAPE, "--save-lp", str(file))
    text = file.read_text()
    names = ("all_weights_share", "weights_on_disk_share", "first_sweep_ms", "decode_1_sweep_ms", "device_memory_MB")
    assert [name for name in names if name not in text] == []


@pytest.mark.slow
def test_a_plan_from_a_config_alone(line: Line) -> None:
    text = line(*SHAPE, "--save", str(line.folder / "policy.json"))
    assert text.startswith("tiny on toy (cuda, numbers written by hand)\n6 rows of 30 prompt tokens, at most 10")
    assert "Would help" in text
    assert len(text.splitlines()) <= 40
    values = json.loads(line(*SHAPE, "--json"))
    assert values["tokens"] == 60
    assert values["tok_s"] == pytest.approx(60 / values["seconds"])
    assert Policy(**values["policy"]) == Policy.load(line.folder / "policy.json")
    assert all(sum(m["bytes"].values()) <= m["capacity"] for m in values["memory"].values())
    again = json.loads(line(*SHAPE, "--json", "--policy", str(line.folder / "policy.json")))
    assert again["tok_s"] == values["tok_s"]
    assert again["helps"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("context", "prompt"), [(2048, 512), (100, 90)])
def test_a_short_context_bounds_the_default_prompt(line: Line, context: int, prompt: int) -> None:
    (line.folder / "tiny" / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": context}))
    assert f"6 rows of {prompt} prompt tokens" in line("--max-tokens", "10", "--rows", "6")
    assert f"--max-tokens {context} leaves no room for a prompt" in line("--max-tokens", str(context), code=2)
    error = line("--prompt-tokens", str(context - 9), "--max-tokens", "10", code=2)
    assert f"--prompt-tokens {context - 9} and --max-tokens 10 make more than the {context} tokens" in error


def test_rows_of_a_file(line: Line) -> None:
    rows = [{"prompt_token_ids": [5] * n, "max_tokens": 4} for n in (3, 9, 30)]
    (line.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "3 rows of 3 to 30 prompt tokens, at most 4 tokens" in line("--input", str(line.folder / "in.jsonl"))
    assert "1 row of 3 prompt tokens" in line("--input", str(line.folder / "in.jsonl"), "--limit", "1")
    (line.folder / "in.jsonl").write_text("{}\n")
    assert "has no row that can be run" in line("--input", str(line.folder / "in.jsonl"), code=2)


def test_compare_and_frontier(line: Line) -> None:
    files = {"small": Policy(1, 1, (0, 0, 1), prefill_tokens=32), "huge": Policy(64, 64, prefill_tokens=1 << 20)}
    for name, policy in files.items():
        (line.folder / name).write_text(json.dumps(policy.to_json()))
    paths = [str(line.folder / name) for name in files]
    lines = line(*SHAPE, "--compare", *paths).splitlines()
    assert [row.split()[:2] for row in lines[4:6]] == [["1", "auto"], ["2", paths[0]]]
    assert lines[6].split()[1] == paths[1]
    assert "does not fit" in lines[6]
    values = json.loads(line(*SHAPE, "--compare", *paths, "--json"))["policies"]
    assert [("error" in v) for v in values] == [False, False, True]
    curve = json.loads(line(*SHAPE, "--frontier", "--json"))["frontier"]
    assert line(*SHAPE, "--frontier", "--verbose").count("continuous") + line(
        *SHAPE, "--frontier", "--verbose").count("diagonal") >= len(curve)  # fmt: skip
    limit = (curve[0]["latency"] + curve[-1]["latency"]) / 2 if len(curve) > 1 else curve[0]["latency"] * 2
    assert json.loads(line(*SHAPE, "--json", "--latency", str(limit)))["latency"] <= limit


def test_lossy_switches_change_the_plan(line: Line) -> None:
    """From a bare config: the bytes are those of the switches; --compare prices both policies with them."""

    def bytes_of(*more: str) -> dict[str, int]:
        values = json.loads(line(*SHAPE, "--json", "--policy", str(line.folder / "all.json"), *more))
        return values["memory"]["device"]["bytes"]

    (line.folder / "all.json").write_text(json.dumps(Policy(2, 3, prefill_tokens=32).to_json()))
    roomy = replace(GPU, device_bytes=1 << 30)
    (line.folder / "hw.json").write_text(json.dumps(roomy.to_json()))
    exact, weights, cache = bytes_of(), bytes_of("--weights", "int4"), bytes_of("--cache", "int8")
    matrices = 6 * 2 * (256 * 256 * 3 + 3 * 256 * 512)  # bytes: q, o and half as many for k and v; gate, up, down
    matrices += 2 * 1000 * 256  # the head
    saved = (exact["weights"] - weights["weights"]) / matrices
    assert 1 - 5 / 16 < saved < 1 - 4 / 16  # 4 bits, and less than one more for scales
    assert cache["weights"] == exact["weights"]
    assert 0.5 * exact["KV cache"] < cache["KV cache"] < 0.65 * exact["KV cache"]
    text = line(*SHAPE, "--weights", "int4", "--compare", str(line.folder / "all.json"))
    assert text.startswith("tiny (weights int4) on toy")


@pytest.mark.slow
def test_what_run_may_choose_plan_chooses(line: Line) -> None:
    chosen = json.loads(line(*SHAPE, "--quality", "small", "--json"))
    exact = json.loads(line(*SHAPE, "--json"))
    assert exact["lossy"] == {}
    assert chosen["lossy"]
    assert chosen["seconds"] + chosen["load_seconds"] < exact["seconds"] + exact["load_seconds"]
    alone = [json.loads(line(*SHAPE, "--allow", name, "--json"))["lossy"] for name in ("int8-cache", "int4-weights")]
    assert all(set(lossy) <= {kind} for lossy, kind in zip(alone, ("cache", "weights"), strict=True))
    assert "6 rows of" in line(*SHAPE, "--n", "1")
    assert "12 rows of" in line(*SHAPE, "--n", "2")


def test_every_option_of_run_that_changes_a_plan_is_there() -> None:
    """What run has besides is about reading, sampling, writing and running."""
    def names(parser: Any) -> set[str]:
        return {option for action in parser._actions for option in action.option_strings if option[:2] == "--"}

    elsewhere = {"--model", "--output", "--restart", "--retry-errors", "--trace", "--temperature", "--seed", "--top-k",
                 "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty",
                 "--logprobs", "--stop", "--stop-token-id", "--ignore-eos", "--verify", "--dry-run",
                 "--version"}  # fmt: skip
    assert names(run.parser()) - names(command.parser()) == elsewhere


def test_plot_file(line: Line) -> None:
    pytest.importorskip("matplotlib")
    line(*SHAPE, "--frontier", "--plot", str(line.folder / "a.png"))
    assert (line.folder / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
        (["--prompt-tokens", "-3"], "--prompt-tokens is -3; it must be at least 1 and at most 1,048,576"),
        (["--max-tokens", "0"], "max_tokens is 0; it must be a whole number"),
        (["--input", "x", "--rows", "3"], "leave one out"),
        (["--latency", "nan"], "--latency is nan; it must be a positive number"),
        ([*SHAPE, "--latency", "1e-9"], "set it higher"),
        (["--frontier", "--policy", "x"], "leave --policy out"),
        (["--policy", "missing.json"], "policy file missing.json"),
        (["--hardware", "missing.json"], "hardware file missing.json"),
        (["--device", "cpu"], "is of kind cuda; leave one out"),
        (["--device-mem", "1K"], "device memory: "),
        (["--plot", "x.jpg"], "does not end with .png"),
        (["--save", "/missing/x.json"], "/missing/x.json cannot be written"),
        (["--save", "/tmp"], "/tmp cannot be written: it is a directory; name a file in it"),
        (["--save", "x.json", "--save-lp", "x.json"], "name another file"),
        (["--dtype", "int3"], "int3"),
        (["--weights", "int4", "--quality", "near"], "leave out one of them"),
        (["--policy", "POLICY", "--allow", "int4-cache"], "a policy is given; leave out one of them"),
        (["--allow", "int5-cache"], "'int5-cache' cannot be allowed"),
        (["--cache", "bf16"], "cache is 'bf16', but this GPU computes in"),
        (["--topk", "2"], "topk is 2.0; it must be a share above 0 and below 1"),
        (["--calibrate"], "it is for weights that are fitted"),
    ],
)
def test_refusals(line: Line, options: list[str], message: str) -> None:
    (line.folder / "policy.json").write_text("{}")
    error = line(*(str(line.folder / "policy.json") if o == "POLICY" else o for o in options), code=2)
    assert error.startswith("flexengine: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_measured_machine(line: Line, monkeypatch: pytest.MonkeyPatch, machine: Hardware) -> None:
    def this_machine(place: planning.Place, opened: object, again: bool, say: Any, dtype: str) -> Hardware:
        say("measuring")
        assert (place.device, place.offload_dir, opened, again, dtype) == ("cpu", "d", None, True, "auto")
        return machine

    monkeypatch.setattr(planning, "this_machine", this_machine)
    file = line.folder / "machine.json"
    arguments = ["measure", "--device", "cpu", "--offload-dir", "d", "--again", "--save", str(file)]
    assert command.main(arguments) == 0
    captured = line.capsys.readouterr()
    assert captured.err == "flexengine: measuring\n"
    assert re.search(r"\n  host to device +1.00 GB/s\n" if machine is GPU else r"\n  RAM to slot +1.00 GB/s\n",
                     captured.out)  # fmt: skip
    assert ("host capacity" in captured.out) == (machine is GPU)
    assert Hardware.load(file) == machine
    assert command.main([*arguments, "--json"]) == 0
    assert Hardware.from_json(json.loads(line.capsys.readouterr().out), "stdout") == machine


def test_a_table_of_rates_is_cut_to_four_points() -> None:
    table = tuple((float(2**i), 1e9 * (i + 1)) for i in range(12))
    text = explain.hardware_text(replace(GPU, checkpoint_read=table))
    row = next(line for line in text.splitlines() if line.startswith("  model files"))
    assert row.count(" at ") == 4
    assert "1.00 GB/s at 1 B" in row
    assert "12.0 GB/s at 2.05 kB" in row
