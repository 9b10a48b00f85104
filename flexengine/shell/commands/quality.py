"""flexengine quality MODEL: measure the cost of lossy choices on real text, with a job's kernels and cache.

A stretch of text is a short prompt and a continuation that is forced token by token, as in decoding, so that errors of
the encoded cache count. The exact model is measured first; every choice is compared with it on the same stretches.
"""

import argparse
import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine import __version__, texts
from flexengine.errors import BudgetTooSmall, FlexError, InvalidInput, shown
from flexengine.lossy import BUNDLED, CACHE, COMPUTE, EXACT, FLASH, MIXED, WEIGHTS, Lossy
from flexengine.model.tokenizer import excerpts
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands.habits import command_text
from flexengine.shell.commands.messages import DONE, SOME_FAILED, program, say, table
from flexengine.shell.commands.parser import Parser, refuse_given
from flexengine.shell.commands.quality_choices import ALL, LossyCost, Scored, asked, cost, run_words
from flexengine.shell.commands.quality_harm import harm_of, harm_table, harm_text
from flexengine.worker import layer_formats

if TYPE_CHECKING:
    from flexengine.engine.engine import Engine

PROMPT, MIN_TOKENS = 32, 16  # most prompt tokens of a stretch, which are not scored; fewest tokens of a stretch
_CHOICES = f"""
--weights NAME,...            from {", ".join((*WEIGHTS, MIXED))}
--compute NAME,...            from {", ".join(COMPUTE)}
--cache NAME,...              from {", ".join(CACHE)}
--flash NAME,...              from {", ".join(FLASH)}
--sparse-attention SHARE,...  read only the values of this share when decoding
--sparsify SHARE,...          set these shares of the activations of SiLU or GELU to 0 (docs/flash.md)
"""
_TOGETHER = "--all-together  measure combinations of the given choices, too"
_TEXT = f"""
--text FILE  UTF-8 text (default: {", ".join(texts.SAMPLE)})
--rows N     stretches of the text (default: %(default)s)
--tokens N   tokens of each (default: %(default)s)
"""
_FOR_CHOICES = ("all_together", "budget", "text", "rows", "tokens", "save", "save_bits")
_OUTPUT = """
--json                 print the numbers as JSON instead of a table
--save FILE.json       write the numbers to this file as JSON
--save-bits FILE.json  write the format of every layer that --weights mixed chose to this file, for --layer-bits
--harm FILE.json       measure how much 8, 4 and 3 bits harm each layer, and LLM-PQ's variance indicator, and write
                       them to this file, for plan --cluster --harm and plan --stages --harm; choices are then
                       measured only if they are given
"""
_HEAD = ("choice", "nll", "more than exact", "perplexity", "same token", "weights", "cache/token", "seconds")


def parser() -> Parser:
    p = Parser("quality", "[MODEL]", "If no choice is given, all choices are measured, one at a time.")
    known = {"weights": (*WEIGHTS, MIXED), "compute": COMPUTE, "cache": tuple(CACHE), "flash": FLASH}
    types: dict[str, dict[str, Any]] = {name: {"type": _several(values)} for name, values in known.items()}
    types |= {name: {"type": _several_shares} for name in ("sparse_attention", "sparsify")}
    tables = (common.OptionTable(_CHOICES, more=types), common.BITS, common.CALIBRATION, _TOGETHER)
    p.group("choices", *tables, about="as for run; each may have several values, with commas")
    p.group("text", common.OptionTable(_TEXT, {"rows": 8, "tokens": 512}, {"text": {"type": str}}))
    p.group("machine", common.MODEL, common.MACHINE)
    p.add_twin("model")
    p.group("output", _OUTPUT)
    return p


def _several(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that splits a text at commas and refuses values that are not in `values`."""

    def split(text: str) -> list[str]:
        if wrong := [one for one in text.split(",") if one not in values]:
            raise argparse.ArgumentTypeError(f"{shown(wrong[0])} is not known; choose from {', '.join(values)}")
        return text.split(",")

    return split


def _several_shares(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be numbers with commas, such as 0.1,0.25") from None


# Text.


@dataclass(frozen=True)
class SampleText:
    """The text on which choices are measured."""

    name: str  # for messages
    content: str
    rows: int  # number of stretches
    tokens: int  # of each stretch

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InvalidInput(f"--rows is {self.rows}; it must be at least 1 (a standard error needs at least 2)")
        if self.tokens < MIN_TOKENS:
            raise InvalidInput(f"--tokens is {self.tokens}; it must be at least {MIN_TOKENS}")

    @property
    def prompt(self) -> int:
        """Return the number of prompt tokens of a stretch. The other tokens are forced and scored."""
        return min(PROMPT, self.tokens // 2)


def read(path: str | None, rows: int, tokens: int) -> SampleText:
    """Return the text of a file, or the bundled sample. Raise InvalidInput if the file cannot be read."""
    if path is None:
        return SampleText(", ".join(texts.SAMPLE), texts.sample(), rows, tokens)
    return SampleText(Path(path).name, texts.read(path), rows, tokens)


def stretches(text: SampleText, tokenizer: Any, context: int | None) -> list[tuple[int, ...]]:
    """Return the token ids of the stretches of a text. Raise InvalidInput if there is no tokenizer, or the text or the
    context is too short.

    Args:
        tokenizer: None if the checkpoint has none.
        context: most tokens of a sequence; None if there is no limit.
    """
    if context is not None and text.tokens > context:
        raise InvalidInput(f"--tokens is {text.tokens}; the model's context is {context} tokens; give at most these")
    use, remedy = f"{text.rows} rows of {text.tokens} take", "lower --rows or --tokens, or give a longer --text"
    return excerpts(tokenizer, text.name, text.content, text.rows, text.tokens, use, remedy)


# Measuring.


def measure(
    make: Callable[[Lossy], AbstractContextManager["Engine"]],
    text: SampleText,
    choices: Sequence[Lossy],
    named: bool = True,
) -> Iterator[LossyCost]:
    """Yield the cost of the exact model, then of each choice. One engine exists at a time.

    Args:
        make: open an engine with a choice.
        named: whether the user named the choices. If not, choices that the model or machine does not support are
            skipped; if so, they are yielded with `refused`.

    Raises:
        FlexError: the exact model cannot be measured.
        BudgetTooSmall: a budget of mixed weights cannot be met.
    """
    for lossy in choices:
        if lossy.weights == MIXED:
            try:
                with make(lossy):
                    pass
            except FlexError as error:
                if isinstance(error, BudgetTooSmall):  # other choices are yielded as refused below
                    raise
    with make(EXACT) as engine:
        rows = stretches(text, engine.core.tokenizer, engine.core.skeleton.context_length)
        exact = score(engine, rows, text.prompt)
        choices = [each for each in choices if named or engine.core.opened.refusal(each) is None]
    yield cost(EXACT, exact, exact)
    for lossy in choices:
        try:
            with make(lossy) as engine:
                scored = score(engine, rows, text.prompt)
        except FlexError as error:
            yield LossyCost(lossy, refused=" ".join(str(error).split()))
        else:
            yield cost(lossy, exact, scored)


def score(engine: "Engine", rows: Sequence[Sequence[int]], prompt: int) -> Scored:
    """Return the scores of the stretches with an engine. The first `prompt` tokens of each stretch are not scored."""
    engine.load_first = True
    results = engine.score([row[:prompt] for row in rows], [row[prompt:] for row in rows])
    seconds = engine.summary.total_seconds
    if bad := next((r for r in results if r.error is not None), None):
        raise InvalidInput(f"stretch {bad.index} cannot be scored: {bad.error}")
    places: list[list[dict[str, Any]]] = [result.logprobs or [] for result in results]
    return Scored(
        logprobs=tuple(tuple(place["logprob"] for place in row) for row in places),
        likeliest=tuple(tuple(place["top_logprobs"][0]["token_id"] for place in row) for row in places),
        weights=sum(tensor.held_bytes for tensor in engine.facts.tensors),
        cache=engine.facts.kv_token * len(engine.facts.attended),
        seconds=seconds,
        bits=engine.lossy.weights if isinstance(engine.lossy.weights, tuple) else None,
    )


def facts(engine: "Engine") -> dict[str, Any]:
    """Return the model, the machine and the versions of a run."""
    from flexengine.measure.store import machine_name

    core = engine.core
    name = machine_name(core.machine)
    return {"model": core.source.name, "kind": core.machine.kind, "machine": name, **core.numerics}


# Output.


def header(about: Mapping[str, Any], text: SampleText) -> str:
    """Return the lines above the table: model, machine, text, and the meaning of the columns."""
    judged = text.rows * (text.tokens - text.prompt)
    return f"""\
{about["model"]} on {about["kind"]} ({about["machine"]}, {about["dtype"]})
{text.name}: {text.rows} x {text.tokens} tokens, {judged:,} of them predicted, one decode step each
nll: nats per token; ±: one standard error, paired over stretches; same token: the likeliest is exact's
"""


def cost_table(costs: Sequence[LossyCost]) -> str:
    """Return the table, one line per choice. The first line, exact, has bytes; the other lines have shares of them."""
    return table([_HEAD, *(_cells(each, costs[0]) for each in costs)], right=range(1, len(_HEAD)))


def _cells(c: LossyCost, exact: LossyCost) -> tuple[str, ...]:
    if c.refused is not None:
        return c.name, f"not measured: {c.refused}"
    more = f"{c.more:+.4f}" + (f" ± {c.error:.4f}" if c.error is not None else "")
    weights, cache = f"{c.weights / exact.weights:.1%}", f"{c.cache / (exact.cache or 1):.1%}"
    if c is exact:
        more, weights, cache = "", f"{c.weights / 1e6:,.1f} MB", f"{c.cache / 1e3:,.2f} kB"
    return c.name, f"{c.nll:.4f}", more, f"{c.perplexity:,.2f}", f"{c.same:.1%}", weights, cache, f"{c.seconds:.1f}"


def brief(c: LossyCost) -> str:
    """Return a progress line for one measured choice."""
    if c.refused is not None:
        return f"{c.name}: not measured: {c.refused}"
    return f"{c.name}: nll {c.nll:.4f}, {c.more:+.4f} against exact, {c.seconds:.1f} s"


def hint(costs: Sequence[LossyCost], model: str | None) -> str:
    """Return a line with the command that uses the choice of the smallest increase in nll."""
    best = min((c for c in costs if c.lossy and c.refused is None), key=lambda c: c.more, default=None)
    if best is None:
        return "none of these choices can be used with this model here"
    words = ["INPUT", *(["--model", model] if model else []), *run_words(best.lossy)]
    return f"to use one: {command_text('run', words)}"


def as_json(about: Mapping[str, Any], text: SampleText, costs: Sequence[LossyCost]) -> dict[str, Any]:
    """Return the table as a JSON object. NaN and infinity become None."""
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    cut = {"text": text.name, "text_sha256": digest, "rows": text.rows, "tokens": text.tokens, "prompt": text.prompt}
    records = []
    for each in costs:
        values = asdict(each) | {"lossy": each.lossy.enabled}
        infinite = {name for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
        records.append(values | dict.fromkeys(infinite))
    versions = {"python": platform.python_version(), "flexengine": __version__}
    return {**about, **cut, "versions": versions, "choices": records}


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the costs of all choices. Return the exit code: 1 if some could not be measured. Raise
    FlexError if an option is wrong or the exact model cannot be measured."""
    calibrate = common.calibration_of(args)
    given = dict(vars(args))
    if args.layer_bits:
        given["weights"] = [*(args.weights or ()), common.bits_file(args)]
    named = any(given.get(name) for name in ALL)
    if alone := args.harm is not None and not named:
        fault = "is for choices, but with --harm only those that are given are measured; give one, or leave it out"
        refuse_given(args, _FOR_CHOICES, fault)
    choices = [] if alone else asked(given, args.all_together, calibrate, args.budget)
    text = read(args.text, args.rows, args.tokens)
    if args.save_bits and not any(each.weights == MIXED for each in choices):
        why = f"--save-bits {args.save_bits} is for weights whose bits are chosen"
        raise InvalidInput(f"{why}; give --weights mixed, too, or leave it out")
    written = {"--save": args.save, "--save-bits": args.save_bits, "--harm": args.harm}
    common.check_written(args, written, {"--text": args.text})
    if calibrate is not None:
        from flexengine.guests.calibration import read as read_calibration  # imported here, as it imports torch

        read_calibration(calibrate)
        if args.text is not None and Path(calibrate).resolve() == Path(args.text).resolve():
            fault = f"--calibration-text and --text are one file, {args.text}"
            raise InvalidInput(f"{fault}, but quality on the calibration text looks better than it is; give two files")
    engine_class = openers.load_libraries()
    about: dict[str, Any] = {}

    def make(lossy: Lossy) -> "Engine":
        engine = engine_class(args.model, lossy=lossy, **openers.bare_options(args))
        if lossy == EXACT:  # the first of several engines
            engine.core.machine.say_no_offload()
            about.update(facts(engine))
        return engine

    if args.harm:
        with make(Lossy("int3", calibrate=calibrate or BUNDLED)) as engine:
            harm = harm_of(engine)
        common.write(args.harm, harm_text(harm))
        say(f"harms are in {args.harm}; flexengine plan MODEL --cluster FILE --harm {args.harm} reads them")
        if alone:
            print(json.dumps(harm) if args.json else harm_table(harm))
            return DONE
    costs = []
    for one in measure(make, text, choices, named):
        costs.append(one)
        say(brief(one))
    numbers = json.dumps(as_json(about, text, costs), allow_nan=False)
    print(numbers if args.json else f"{header(about, text)}\n{cost_table(costs)}\n\n{hint(costs, args.model)}")
    if args.save:
        common.write(args.save, numbers)
    if args.save_bits:
        if bits := next((c.bits for c in costs if c.lossy.weights == MIXED and c.bits is not None), None):
            common.write(args.save_bits, layer_formats.as_json(about["model"], bits))
        else:
            say(f"{args.save_bits} is not written: weights are exact, or were not measured")
    return SOME_FAILED if any(c.refused is not None for c in costs) else DONE


main = program(lambda words: run(parser().parse_args(words)))
