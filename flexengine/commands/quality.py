"""python -m flexengine.quality MODEL: what lossy choices cost on real text, through a job's own kernels and cache.

A stretch of text is a short prompt and a continuation that is forced token by token, as in decoding, so that what is
done to the cache is seen. Exact comes first; every choice is compared with it on the same stretches.
"""

import argparse
import hashlib
import json
import math
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import __version__, texts
from flexengine.commands.exit_codes import DONE, SOME_FAILED, exit_code, say
from flexengine.config import Result
from flexengine.errors import FlexError, InvalidInput
from flexengine.lossy import BUNDLED, CACHE, COMPUTE, EXACT, FITTED, WEIGHTS, Lossy
from flexengine.model.tokenizer import opening, spread, token_ids

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine

PROMPT, LEAST = 32, 16  # tokens of a stretch that are not judged; fewest tokens of a stretch
TOPK = (0.1, 0.25)
_ALL: Mapping[str, Iterable[Any]] = {"weights": WEIGHTS, "compute": COMPUTE, "cache": CACHE, "topk": TOPK}
_HEAD = ("choice", "nll", "more than exact", "perplexity", "same token", "weights", "cache/token", "seconds")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m flexengine.quality", description="Measure what lossy choices cost a model on real text.",
        epilog="Without any choice all of them are measured, one at a time.",
    )  # fmt: skip
    p.add_argument("model", nargs="?", metavar="MODEL", help="as for run (default: the demo model)")
    choices = p.add_argument_group("choices", "as for run; each may have several values")
    choices.add_argument("--weights", nargs="+", choices=WEIGHTS, help="keep matrices in so many bits")
    choices.add_argument("--compute", nargs="+", choices=COMPUTE, help="round what products multiply")
    choices.add_argument("--cache", nargs="+", choices=CACHE, help="keep keys and values in fewer bits")
    choices.add_argument("--topk", nargs="+", type=float, metavar="SHARE", help="read only the values of this share")
    choices.add_argument("--calibrate", nargs="?", const=BUNDLED, metavar="FILE",
                         help="measure choices of few-bit weights calibrated, too, on a UTF-8 text (default:"
                              f" {', '.join(texts.CALIBRATION)})")  # fmt: skip
    choices.add_argument("--all-together", action="store_true", help="the given choices combined, too")
    text = p.add_argument_group("text")
    text.add_argument("--text", metavar="FILE", help=f"UTF-8 text (default: {', '.join(texts.SAMPLE)})")
    text.add_argument("--rows", type=int, default=8, metavar="N", help="stretches of the text (default: %(default)s)")
    text.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of each (default: %(default)s)")
    machine = p.add_argument_group("machine")
    machine.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "sim"))
    machine.add_argument("--device-mem", metavar="SIZE", help="device memory to use, e.g. 800M or 16GiB (cpu: RAM)")
    machine.add_argument("--host-mem", metavar="SIZE", help="host memory to use beside a GPU")
    machine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    machine.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    p.add_argument("--json", metavar="FILE", help="write the numbers, too, as one JSON object")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0 done, 1 some choices could not be measured, 2 refused, 3 failed,
    130 interrupted."""
    return exit_code(lambda: SOME_FAILED if report(parser().parse_args(argv)) else DONE)


# What is asked for.


def asked(
    given: Mapping[str, Sequence[Any] | None], together: bool = False, calibrate: str | None = None
) -> list[Lossy]:
    """Each given value of a switch alone, all there are if none is given; together: then every combination of one value
    of each given switch; calibrate: those that fit weights with it, too. Raises InvalidInput for values that mean
    nothing."""
    some: dict[str, Iterable[Any]] = {name: values for name in _ALL if (values := given.get(name))}
    if together and len(some) < 2:
        raise InvalidInput("--all-together combines choices; give two kinds at least, such as --weights and --cache")
    alone = [Lossy(**{name: value}) for name, values in (some or _ALL).items() for value in values]
    mixed = [Lossy(**dict(zip(some, mix, strict=True))) for mix in product(*some.values())] if together else []
    found = list(dict.fromkeys(alone + mixed))
    if calibrate is None:
        return found
    if not any(lossy.coded in FITTED for lossy in found):
        raise InvalidInput(f"--calibrate {calibrate} is for weights that are fitted, and no choice has any; give"
                           f" --weights with one of {', '.join(FITTED)}, too, or leave it out")  # fmt: skip
    both = ((x, replace(x, calibrate=calibrate)) if x.coded in FITTED else (x,) for x in found)
    return [lossy for pair in both for lossy in pair]


@dataclass(frozen=True)
class Text:
    """What is read: its name, itself, and how it is cut."""

    name: str
    content: str
    rows: int
    tokens: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InvalidInput(f"--rows is {self.rows}; it must be at least 1 (from 2 on there is a standard error)")
        if self.tokens < LEAST:
            raise InvalidInput(f"--tokens is {self.tokens}; it must be at least {LEAST}")

    @property
    def prompt(self) -> int:
        """Tokens of a stretch that are given; the others are judged."""
        return min(PROMPT, self.tokens // 2)


def read(path: str | None, rows: int, tokens: int) -> Text:
    """The text of a file, or the bundled sample. Raises InvalidInput if there is none."""
    if path is None:
        return Text(", ".join(texts.SAMPLE), texts.sample(), rows, tokens)
    try:
        return Text(Path(path).name, Path(path).read_text(encoding="utf-8"), rows, tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--text {path} cannot be read as UTF-8 text: {error}") from error


def stretches(text: Text, tokenizer: Any, context: int | None) -> list[list[int]]:
    """Token ids of `rows` stretches of `tokens` tokens, spread evenly over the text; each begins with the tokenizer's
    `opening`. Raises InvalidInput if the text is too short or the context is."""
    if tokenizer is None:
        raise InvalidInput("the checkpoint has no tokenizer, so it cannot read text; put its tokenizer files beside it")
    if context is not None and text.tokens > context:
        raise InvalidInput(f"--tokens is {text.tokens}; the model's context is {context} tokens, give that at most")
    begin = opening(tokenizer)
    ids = token_ids(tokenizer, text.content, special=False)
    length = text.tokens - len(begin)
    rows = spread(begin, ids, text.rows, length)
    if not rows:
        raise InvalidInput(f"{text.name} has {len(ids):,} tokens; {text.rows} rows of {text.tokens} take"
                           f" {text.rows * length:,}; lower --rows or --tokens, or give a longer --text")  # fmt: skip
    return rows


# Statistics.


@dataclass(frozen=True)
class Scored:
    """logprobs: of the forced tokens, by stretch; likeliest: the tokens the model would have chosen; weights, cache:
    bytes of all weights and of a token in all layers; seconds: of prefill and decoding, all that stays in memory being
    there before, so that forms of one model compare by what they compute and stream."""

    logprobs: tuple[tuple[float, ...], ...]
    likeliest: tuple[tuple[int, ...], ...]
    weights: int
    cache: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """What a choice costs. nll: mean negative log-likelihood of a token, in nats; more: its increase over exact, and
    error: the standard error of that, paired over stretches (None for a single one); same: share of places where the
    likeliest token is exact's; weights, cache: bytes; refused: why there are no numbers."""

    lossy: Lossy
    nll: float = math.nan
    more: float = math.nan
    error: float | None = None
    perplexity: float = math.nan
    same: float = math.nan
    weights: int = 0
    cache: int = 0
    seconds: float = 0.0
    refused: str | None = None


def cost(lossy: Lossy, exact: Scored, found: Scored) -> Cost:
    """Of a choice by what was scored with it and without."""
    nll = mean_nll(found.logprobs)
    more, error = increase(exact.logprobs, found.logprobs)
    perplexity = math.exp(nll) if nll < 700 else math.inf
    same = agreement(exact.likeliest, found.likeliest)
    return Cost(lossy, nll, more, error, perplexity, same, found.weights, found.cache, found.seconds)


def mean_nll(logprobs: Sequence[Sequence[float]]) -> float:
    """Mean negative log-likelihood over all tokens of all stretches."""
    return -statistics.fmean(value for row in logprobs for value in row)


def increase(exact: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean of nll(other) - nll(exact) over stretches of one length, and its standard error, None for a single one:
    stretches, not tokens, are taken to be independent."""
    apart = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(exact, other, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
    return statistics.fmean(apart), error


def agreement(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Share of places at which both have the same token."""
    pairs = [a == b for row, col in zip(exact, other, strict=True) for a, b in zip(row, col, strict=True)]
    return sum(pairs) / len(pairs)


# Measuring.


def measure(
    make: Callable[[Lossy], AbstractContextManager["Engine"]], text: Text, choices: Sequence[Lossy], named: bool = True
) -> Iterator[tuple[Cost, dict[str, Any]]]:
    """Exact, then each choice, with facts about the engine that ran it: one engine at a time, from `make`. A choice
    that the model or the machine refuses has `refused`; for exact it is raised. named: by the user; else those that
    mean nothing here are left out."""
    with make(EXACT) as engine:
        rows = stretches(text, engine.core.tokenizer, engine.core.skeleton.context_length)
        exact, about = score(engine, rows, text.prompt), facts(engine)
        choices = [each for each in choices if named or engine.core.opened.refusal(each) is None]
    yield cost(EXACT, exact, exact), about
    for lossy in choices:
        try:
            with make(lossy) as engine:
                found, about = score(engine, rows, text.prompt), facts(engine)
        except FlexError as error:
            yield Cost(lossy, refused=_line(error)), about
        else:
            yield cost(lossy, exact, found), about


def score(engine: "Engine", rows: Sequence[Sequence[int]], prompt: int) -> Scored:
    """Forces the stretches through an engine, all but their first `prompt` tokens. Raises FlexError, also if a row
    cannot be run."""
    began, engine.load_first = time.perf_counter(), True
    results = engine.score([(row[:prompt], row[prompt:]) for row in rows])
    seconds = engine.summary.get("total_seconds", time.perf_counter() - began)
    if bad := next((r for r in results if r.error is not None), None):
        raise InvalidInput(f"stretch {bad.index} cannot be scored: {bad.error}")
    places = [_places(r) for r in results]
    return Scored(
        tuple(tuple(p["logprob"] for p in row) for row in places),
        tuple(tuple(p["top_logprobs"][0]["token_id"] for p in row) for row in places),
        sum(t.held_bytes for t in engine.facts.tensors), engine.facts.kv_token * len(engine.facts.layers), seconds,
    )  # fmt: skip


def _places(result: Result) -> list[dict[str, Any]]:
    assert result.logprobs is not None
    return result.logprobs


def facts(engine: "Engine") -> dict[str, Any]:
    """What a reader wants to know of the run besides its numbers."""
    from flexengine.engine.manifest import numerics  # late: they take torch
    from flexengine.measure.store import machine_name

    core = engine.core
    name = machine_name(core.machine)
    return {"model": core.source.name, "kind": core.machine.kind, "machine": name, **numerics(core)}


# What is told.


def header(about: Mapping[str, Any], text: Text) -> str:
    """What was measured, of what."""
    judged = text.rows * (text.tokens - text.prompt)
    return (f"{about['model']} on {about['kind']} ({about['machine']}, {about['dtype']})\n"
            f"{text.name}: {text.rows} x {text.tokens} tokens, {judged:,} of them predicted, one decode step each\n"
            "nll: nats per token; ±: one standard error, paired over stretches; same token: the likeliest is exact's\n"
            )  # fmt: skip


def table(costs: Sequence[Cost]) -> str:
    """One line a choice; the first, exact, has bytes, the others their share of them."""
    exact = costs[0]
    lines = [_HEAD, *(_cells(c, exact) for c in costs)]
    widths = [max(len(line[i]) for line in lines if len(line) == len(_HEAD)) for i in range(len(_HEAD))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=False))])
        for line in lines
    )


def _cells(c: Cost, exact: Cost) -> tuple[str, ...]:
    if c.refused is not None:
        return str(c.lossy), f"not measured: {c.refused}"
    more = f"{c.more:+.4f}" + (f" ± {c.error:.4f}" if c.error is not None else "")
    weights, cache = f"{c.weights / exact.weights:.1%}", f"{c.cache / exact.cache:.1%}"
    if c is exact:
        more, weights, cache = "", f"{c.weights / 1e6:,.1f} MB", f"{c.cache / 1e3:,.2f} kB"
    return (str(c.lossy), f"{c.nll:.4f}", more, f"{c.perplexity:,.2f}", f"{c.same:.1%}", weights, cache,
            f"{c.seconds:.1f}")  # fmt: skip


def brief(c: Cost) -> str:
    """One line while the rest is measured, for whoever waits or stops."""
    if c.refused is not None:
        return f"{c.lossy}: not measured: {c.refused}"
    return f"{c.lossy}: nll {c.nll:.4f}, {c.more:+.4f} against exact, {c.seconds:.1f} s"


def hint(costs: Sequence[Cost], model: str | None) -> str:
    """How to use a choice, by the example of the cheapest in likelihood."""
    best = min((c for c in costs if c.lossy and c.refused is None), key=lambda c: c.more, default=None)
    if best is None:
        return "none of these choices can be used with this model here"
    words = ["python", "-m", "flexengine.run", "INPUT", *(["--model", model] if model else [])]
    given = best.lossy.enabled.items()
    words += [word for name, value in given for word in (f"--{name}", str(value)) if word != BUNDLED]
    return f"to use one: {shlex.join(words)}"


def as_json(about: Mapping[str, Any], text: Text, costs: Sequence[Cost]) -> dict[str, Any]:
    """The same for programs; numbers that are none or endless are null."""
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    cut = {"text": text.name, "text_sha256": digest, "rows": text.rows, "tokens": text.tokens, "prompt": text.prompt}
    records = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(c).items()}
               | {"lossy": c.lossy.enabled} for c in costs]  # fmt: skip
    versions = {"python": platform.python_version(), "flexengine": __version__}
    return {**about, **cut, "versions": versions, "choices": records}


def report(args: argparse.Namespace) -> int:
    """Measures, prints and writes. Returns how many choices could not be measured. Raises FlexError."""
    choices = asked(vars(args), args.all_together, args.calibrate)
    text = read(args.text, args.rows, args.tokens)
    if args.json:
        _check_written(args.json, args.text, args.calibrate)
    _check_apart(args.calibrate, args.text)
    from flexengine.engine.engine import Engine  # late: it takes torch, and --help shall not

    def make(lossy: Lossy) -> Engine:
        engine = Engine(
            args.model, device=args.device, device_mem=args.device_mem, host_mem=args.host_mem, dtype=args.dtype,
            trust_remote_code=args.trust_remote_code, lossy=lossy,
        )  # fmt: skip
        engine.planner.say = say
        return engine

    measured = []
    named = any(vars(args).get(name) for name in _ALL)
    for one in measure(make, text, choices, named):
        measured.append(one)
        say(brief(one[0]))
    costs, about = [c for c, _ in measured], measured[0][1]
    print(f"{header(about, text)}\n{table(costs)}\n\n{hint(costs, args.model)}")
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(about, text, costs), allow_nan=False) + "\n", encoding="utf-8")
    return sum(c.refused is not None for c in costs)


def _check_written(path: str, *read_from: str | None) -> None:
    """Raises InvalidInput, before minutes of measuring, for a file that cannot be written."""
    target = Path(path).absolute()
    if target.is_dir() or not target.parent.is_dir():
        raise InvalidInput(f"--json {path} cannot be written: it is a directory, or there is none for it; name a file")
    for name in filter(None, read_from):
        if target.resolve() == Path(name).resolve():
            raise InvalidInput(f"--json {path} is also a text that is read; give each a file of its own")


def _check_apart(calibrate: str | None, text: str | None) -> None:
    """Raises InvalidInput for a text to calibrate with that cannot be read or that choices are judged on."""
    if calibrate is None:
        return
    from flexengine.engine.calibration import read as read_calibration  # late: it takes torch

    read_calibration(calibrate)
    if text is not None and Path(calibrate).resolve() == Path(text).resolve():
        raise InvalidInput(f"--calibrate and --text are one file, {text}; what is fitted to a text looks too good on"
                           " it, so give two")  # fmt: skip


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
