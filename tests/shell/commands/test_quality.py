"""Costs of lossy choices: statistics by hand, the report, the bundled texts, and a small model whose likelihoods
transformers computes in one pass over each stretch."""

import contextlib
import json
import math
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, texts
from flexengine.config import Result
from flexengine.errors import InvalidInput, UnsupportedModel
from flexengine.lossy import CACHE, COMPUTE, EXACT, WEIGHTS, Lossy
from flexengine.model.tokenizer import opening
from flexengine.shell.commands import quality, quality_choices
from flexengine.shell.commands.quality import SampleText, asked, stretches
from flexengine.shell.commands.quality_choices import LossyCost, Scored, cost
from flexengine.worker.weights import Weights
from tests.helpers.speaker import make_byte_llama
from tests.helpers.tokenizers import byte_tokenizer

EXACT_ROWS, OTHER_ROWS = ((-1.0, -2.0), (-3.0, -2.0)), ((-1.5, -2.5), (-3.25, -2.25))
ROWS, PROMPT, INT8, INT2 = 4, 32, Lossy(weights="int8"), Lossy(weights="int2")
POLICY = Policy(gpu_batch_size=4, num_gpu_batches=1)


# Statistics.


def scored(rows: Any = EXACT_ROWS, likeliest: Any = ((5, 6), (7, 8)), weights: int = 4_000_000) -> Scored:
    return Scored(rows, likeliest, weights, cache=1000, seconds=2.0)


def test_the_increase_is_paired_over_stretches() -> None:
    """0.5 and 0.25 more: mean 0.375, deviation 0.125 * sqrt 2, by sqrt 2 stretches."""
    found = cost(INT8, scored(), scored(OTHER_ROWS))
    assert found.more == 0.375
    assert found.error == pytest.approx(0.125)
    one = cost(INT8, scored(EXACT_ROWS[:1], ((5, 6),)), scored(OTHER_ROWS[:1], ((5, 6),)))
    assert (one.more, one.error) == (0.5, None)
    same = cost(INT8, scored(), scored())
    assert (same.more, same.error) == (0.0, 0.0)


def test_cost() -> None:
    found = cost(Lossy(weights="int4"), scored(), scored(OTHER_ROWS, ((5, 6), (7, 9)), 1_000_000))
    assert (found.nll, found.more, found.same, found.weights) == (2.375, 0.375, 0.75, 1_000_000)
    assert found.perplexity == pytest.approx(math.exp(2.375))
    assert cost(EXACT, scored(), scored()).nll == 2.0
    likeliest = ((1, 2, 3), (4, 5, 6)), ((1, 2, 7), (4, 5, 6))
    assert cost(EXACT, *(scored(likeliest=each) for each in likeliest)).same == pytest.approx(5 / 6)
    ruined = ((-1000.0, -1000.0),) * 2
    assert cost(Lossy(weights="int2"), scored(), scored(ruined)).perplexity == math.inf


# Choices.


def test_every_choice_alone_is_the_default() -> None:
    everything = asked({})
    assert len(everything) == len(WEIGHTS) + len(COMPUTE) + len(CACHE) + len(quality_choices.SHARES)
    assert all(len(lossy.enabled) == 1 for lossy in everything)


def test_choices_alone_and_together() -> None:
    given = {"weights": ["int8", "int4", "int8"], "cache": ["int4"], "compute": None}
    alone = [Lossy(weights="int8"), Lossy(weights="int4"), Lossy(cache="int4")]
    assert asked(given) == alone
    assert asked(given, together=True) == [
        *alone, Lossy(weights="int8", cache="int4"), Lossy(weights="int4", cache="int4"),
    ]  # fmt: skip
    assert asked({"sparsify": [0.5, 0.7]}) == [Lossy(sparsify=0.5), Lossy(sparsify=0.7)]
    assert asked({"sparsify": [0.5], "weights": ["int4"]}, calibrate="a.txt") == [
        Lossy(weights="int4"), Lossy(weights="int4", calibrate="a.txt"), Lossy(sparsify=0.5, calibrate="a.txt"),
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="two kinds"):
        asked({"weights": ["int8", "int4"]}, together=True)
    with pytest.raises(InvalidInput, match=r"sparse_attention is 1\.5"):
        asked({"sparse_attention": [1.5]})


# Text.


BUNDLED = texts.SAMPLE + texts.CALIBRATION


def test_bundled_texts() -> None:
    sizes = {name: len(texts.text(name).encode()) for name in BUNDLED}
    assert not set(texts.SAMPLE) & set(texts.CALIBRATION)
    assert 200_000 <= sum(sizes.values()) <= 400_000
    assert min(sizes.values()) > 40_000
    assert len(texts.sample()) > 150_000
    assert len(texts.calibration()) > 140_000
    about = Path(texts.__file__).with_name("README.md").read_text()
    assert all(f"`{name}.txt`" in about for name in sizes)
    assert {path.stem for path in Path(texts.__file__).parent.glob("*.txt")} == set(sizes)


def test_bundled_texts_hold_nothing_but_the_works() -> None:
    for name in BUNDLED:
        text = texts.text(name).lower()
        assert not any(word in text for word in ("gutenberg", "copyright", "licence", "ebook", "http", "\r", "\ufffd"))
    for one, other in combinations(BUNDLED, 2):  # no paragraph of one is in another
        own = [line for line in texts.text(one).splitlines() if len(line) > 200]
        assert own
        assert not any(line in texts.text(other) for line in own)


def test_stretches_are_spread_and_begin_as_texts_do() -> None:
    tokenizer = byte_tokenizer()
    rows = stretches(SampleText("t", "abcdefghij" * 20, rows=3, tokens=21), tokenizer, context=21)
    assert [len(row) for row in rows] == [21] * 3
    assert all(row[0] == 0 and 0 not in row[1:] for row in rows)
    assert [tokenizer.decode(row[1:]) for row in rows] == [
        "abcdefghij" * 2, "ghijabcdefghijabcdef", "cdefghijabcdefghijab",
    ]  # fmt: skip


def test_opening() -> None:
    def tokenizer(begin: list[int], end: list[int]) -> Any:
        return lambda text, add_special_tokens, verbose: {
            "input_ids": [*begin, 7, *end] if add_special_tokens else [7]
        }  # fmt: skip

    assert opening(tokenizer([], [])) == []
    assert opening(tokenizer([1, 2], [3])) == [1, 2]
    assert opening(tokenizer([], [3])) == []


@pytest.mark.parametrize(
    ("cut", "context", "says"),
    [
        (dict(rows=2, tokens=64), None, "t has 100 tokens; 2 rows of 64 take 126; lower --rows or --tokens"),
        (dict(rows=1, tokens=64), 63, "--tokens is 64; the model's context is 63"),
        (dict(rows=0, tokens=64), None, "--rows is 0"),
        (dict(rows=1, tokens=15), None, "--tokens is 15; it must be at least 16"),
    ],
)
def test_texts_that_cannot_be_cut(cut: dict[str, int], context: int | None, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        stretches(SampleText("t", "x" * 100, **cut), byte_tokenizer(), context)


def test_no_tokenizer() -> None:
    with pytest.raises(InvalidInput, match="no tokenizer"):
        stretches(SampleText("t", "x", 1, 16), None, None)


def test_unreadable_text(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path in (tmp_path / "latin", tmp_path / "none", tmp_path):
        with pytest.raises(InvalidInput, match="cannot be read as UTF-8"):
            quality.read(str(path), 1, 16)


# The report.
COSTS = [
    cost(EXACT, scored(), scored()),
    cost(Lossy(weights="int4"), scored(), scored(OTHER_ROWS, weights=1_000_000)),
    LossyCost(Lossy(cache="int2"), refused="keys of 3 values cannot be packed in a long sentence of many words"),
]
ABOUT = {"model": "m", "kind": "cpu", "machine": "c, 2 cores", "dtype": "float32"}


def test_table() -> None:
    lines = quality.cost_table(COSTS).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "choice nll more than exact perplexity same token weights cache/token seconds",
        "exact 2.0000 7.39 100.0% 4.0 MB 1.00 kB 2.0",
        "weights int4 2.3750 +0.3750 ± 0.1250 10.75 100.0% 25.0% 100.0% 2.0",
        "cache int2 not measured: keys of 3 values cannot be packed in a long sentence of many words",
    ]
    assert len(lines[0]) == len(lines[1]) == len(lines[2])  # the words of a refusal do not widen the columns
    assert quality.brief(COSTS[1]) == "weights int4: nll 2.3750, +0.3750 against exact, 2.0 s"
    assert quality.brief(COSTS[2]).startswith("cache int2: not measured: keys")
    single = cost(Lossy(sparse_attention=0.1), scored(EXACT_ROWS[:1]), scored(OTHER_ROWS[:1]))
    assert " ± " not in quality.cost_table([COSTS[0], single])


def test_header_and_hint() -> None:
    text = SampleText("t", "x", rows=8, tokens=512)
    first, second, _ = quality.header(ABOUT, text).splitlines()
    assert first == "m on cpu (c, 2 cores, float32)"
    assert second.startswith("t: 8 x 512 tokens, 3,840 of them predicted")
    assert quality.hint(COSTS, "a b").endswith("flexengine run INPUT --model 'a b' --weights int4")
    assert quality.hint(COSTS, None).endswith("flexengine run INPUT --weights int4")
    assert "none of these" in quality.hint(COSTS[::2], None)


def test_json_has_no_nan() -> None:
    made = quality.as_json(ABOUT, SampleText("t", "x", rows=8, tokens=512), COSTS)
    made = json.loads(json.dumps(made, allow_nan=False))
    assert (made["model"], made["rows"], made["tokens"], made["prompt"]) == ("m", 8, 512, 32)
    assert [c["lossy"] for c in made["choices"]] == [{}, {"weights": "int4"}, {"cache": "int2"}]
    assert (made["choices"][1]["more"], made["choices"][2]["nll"]) == (0.375, None)
    assert made["choices"][2]["refused"].startswith("keys of 3")


def stand_in(lossy: Lossy, error: str | None = None) -> Any:
    """An engine that gives every token the same likelihood."""

    def entry(token: int) -> dict[str, Any]:
        return {"logprob": -1.0 - bool(lossy), "top_logprobs": [{"token_id": token + bool(lossy)}]}

    def score(contexts: Any, continuations: Any) -> list[Result]:
        assert len(contexts) == len(continuations)
        return [Result(i, error=error, logprobs=[entry(t) for t in rest]) for i, rest in enumerate(continuations)]

    layers = SimpleNamespace(tensors=[SimpleNamespace(held_bytes=100)] * 3, kv_token=64, attended=(None,) * 4)
    core = SimpleNamespace(
        tokenizer=byte_tokenizer(), skeleton=SimpleNamespace(context_length=None), source=SimpleNamespace(name="s"),
        machine=SimpleNamespace(kind="cpu", gpu=False, compute=torch.device("cpu")),
        options=SimpleNamespace(policy=None),
        dtype=torch.float32, cache_form="", opened=SimpleNamespace(refusal=lambda each: None),
    )  # fmt: skip
    summary = SimpleNamespace(total_seconds=2.5)
    return SimpleNamespace(core=core, score=score, facts=layers, summary=summary, lossy=lossy)


def test_what_means_nothing_here_is_left_out_unless_it_was_named() -> None:
    def make(lossy: Lossy) -> Any:
        engine = stand_in(lossy)
        engine.core.opened.refusal = lambda each: "no bf16 here" if each.compute == "bf16" else None
        return contextlib.nullcontext(engine)

    text, among = quality.SampleText("t", "words " * 200, 2, 64), [Lossy(compute="bf16"), INT8]
    for named, expected in ((False, [EXACT, INT8]), (True, [EXACT, *among])):
        assert [c.lossy for c in quality.measure(make, text, among, named)] == expected


class Stand:
    """Makes stand-in engines, one at a time. Refuses the lossy choice `refuse`."""

    def __init__(self, refuse: Lossy | None = None, **options: Any) -> None:
        self.refuse, self.options, self.open, self.made = refuse, options, 0, list[Lossy]()

    def __call__(self, lossy: Lossy) -> Any:
        assert self.open == 0
        if lossy == self.refuse:
            raise UnsupportedModel("not  this\none")
        self.made.append(lossy)
        return self._entered(lossy)

    def _entered(self, lossy: Lossy) -> Any:
        stand = self

        class Entered:
            def __enter__(self) -> Any:
                stand.open += 1
                return stand_in(lossy, **stand.options)

            def __exit__(self, *_: object) -> None:
                stand.open -= 1

        return Entered()


TEXT = SampleText("t", "x" * 100, rows=2, tokens=40)


def test_one_engine_at_a_time_and_refusals_cost_no_other_choice() -> None:
    stand = Stand(refuse=Lossy(weights="int2"))
    exact, int2, int4 = quality.measure(stand, TEXT, [Lossy(weights="int2"), Lossy(weights="int4")])
    assert stand.open == 0
    assert stand.made == [EXACT, Lossy(weights="int4")]
    assert (exact.nll, exact.more, exact.same, exact.weights, exact.cache) == (1.0, 0.0, 1.0, 300, 256)
    assert int2.refused == "not this one"
    assert (int4.nll, int4.more, int4.error, int4.same) == (2.0, 1.0, 0.0, 0.0)


def test_exact_must_be_measured() -> None:
    with pytest.raises(UnsupportedModel):
        list(quality.measure(Stand(refuse=EXACT), TEXT, []))
    with pytest.raises(InvalidInput, match="stretch 0 cannot be scored: too long"):
        list(quality.measure(Stand(error="too long"), TEXT, []))


# The command line.


def test_what_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x")
    for words in (
        ["--text", str(tmp_path / "none")], ["--rows", "0"], ["--tokens", "3"], ["--sparse-attention", "2"],
        ["--all-together"], ["--save", str(tmp_path)], ["--save", str(tmp_path / "a" / "b")],
        ["--text", str(text), "--save", str(text)],
        [str(tmp_path / "no model")],
    ):  # fmt: skip
        assert quality.main(words) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines()[-1].startswith("flexengine: ")
        assert "Traceback" not in err
    with pytest.raises(SystemExit, match="2"):
        quality.main(["--weights", "int5"])


# A small model, through the real engine.


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama of bytes, its directory, and text that it generated: no other model gives this text more
    likelihood."""
    directory = tmp_path_factory.mktemp("speaker")
    tokenizer = byte_tokenizer(directory)
    model = make_byte_llama(directory, len(tokenizer), seed=0, width=64, context=128, spread=0.2)
    said = torch.zeros(ROWS, 1, dtype=torch.long)
    with torch.no_grad():
        while said.shape[1] < 64:
            said = torch.cat([said, model(said).logits[:, -1].softmax(1).multinomial(1)], 1)
    return SimpleNamespace(directory=directory, model=model, rows=said.tolist())


def scored_by(speaker: Any, lossy: Lossy) -> Scored:
    with Engine(speaker.directory, policy=POLICY, device="cpu", lossy=lossy) as engine:
        return quality.score(engine, speaker.rows, PROMPT)


def test_exact_agrees_with_transformers(speaker: Any) -> None:
    found = scored_by(speaker, EXACT)
    assert found.cache == 2 * 2 * 32 * 4  # layers, K and V, one head, fp32
    assert found.weights == 4 * sum(p.numel() for p in speaker.model.parameters())
    rows = torch.tensor(speaker.rows)
    with torch.no_grad():
        logprobs = speaker.model(rows).logits.double().log_softmax(2)[:, PROMPT - 1 : -1]
    expected = logprobs.gather(2, rows[:, PROMPT:, None])[..., 0]
    assert (expected - torch.tensor(found.logprobs)).abs().max() < 1e-4
    assert cost(EXACT, found, found).nll == pytest.approx(-expected.mean().item(), abs=1e-4)
    theirs = replace(found, likeliest=tuple(map(tuple, logprobs.argmax(2).tolist())))
    assert cost(EXACT, theirs, found).same > 0.99  # but for near ties
    assert cost(EXACT, found, scored_by(speaker, EXACT)).same == 1


@pytest.mark.slow
def test_seconds_are_without_reading_what_stays(speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is slowed so much that it would show; in an ordinary job it is part of the first sweep."""
    load, slow, spent = Weights.load_resident, 1000.0, [0.0]  # seconds; no machine needs as many

    def slowly(weights: Weights, unit: int) -> None:
        spent[0] += slow
        load(weights, unit)

    for clock in (time.perf_counter, time.monotonic):
        monkeypatch.setattr(time, clock.__name__, lambda clock=clock: clock() + spent[0])

    monkeypatch.setattr(Weights, "load_resident", slowly)
    with Engine(speaker.directory, policy=POLICY, device="cpu") as engine:
        found = quality.score(engine, speaker.rows, PROMPT)
        apart = engine.summary
    with Engine(speaker.directory, policy=POLICY, device="cpu") as engine:
        engine.score([row[:PROMPT] for row in speaker.rows], [row[PROMPT:] for row in speaker.rows])
        within = engine.summary
    units = 2  # layers; the rest comes with the first, or is a third
    assert apart.load_seconds >= units * slow
    assert "loading" not in apart.busy
    assert within.load_seconds < slow
    assert within.prefill_seconds >= units * slow
    assert within.busy["loading"] * within.total_seconds >= units * slow
    assert apart.prefill_seconds < units * slow
    assert found.seconds == apart.total_seconds


def test_lossy_choices_cost(speaker: Any) -> None:
    exact = scored_by(speaker, EXACT)
    int8, int2 = (cost(lossy, exact, scored_by(speaker, lossy)) for lossy in (INT8, INT2))
    assert abs(int8.more) < 0.02
    assert int8.same > 0.8
    assert int2.error is not None
    assert int2.more > max(0.1, 3 * int2.error)
    assert int2.same < 0.8
    assert int2.weights < int8.weights < exact.weights


def test_the_whole_command(speaker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, written = tmp_path / "t.txt", tmp_path / "q.json"
    text.write_text(texts.text("alice")[:2000])
    words = [str(speaker.directory), "--text", str(text), "--rows", "2", "--tokens", "48", "--weights", "int4"]
    assert quality.main([*words, "--device", "cpu", "--save", str(written)]) == 0
    out, err = capsys.readouterr()
    assert "t.txt: 2 x 48 tokens, 48 of them predicted" in out
    assert out.splitlines()[-1].endswith(f"flexengine run INPUT --model {speaker.directory} --weights int4")
    assert "flexengine: weights int4: nll " in err
    kept = json.loads(written.read_text())
    assert [c["lossy"] for c in kept["choices"]] == [{}, {"weights": "int4"}]
    assert kept["dtype"] == "float32"
    assert quality.main([*words, "--rows", "2000"]) == 2
    assert "t.txt has 2,000 tokens; 2000 rows of 48 take 94,000; lower" in capsys.readouterr().err
    assert quality.main([*words, "--tokens", "129"]) == 2
    assert "context is 128" in capsys.readouterr().err
