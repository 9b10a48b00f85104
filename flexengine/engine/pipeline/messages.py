"""Bodies of the frames between the driver and a stage.

| body | numbers |
|---|---|
| an order | the events since the last order; texts; stems; the sweep with its gpu_batches |
| an event | CLAIM or RELEASE, sequence, home, cached tokens, source or NONE, tokens to hold |
| a text | sequence, row, sample, prompt, targets, sampling parameters; with the first order that has it |
| new tokens | sequence, tokens that it has generated since the last order |
| a gpu_batch | homes of cache and hidden states, place of attention, whether queries go first, pieces in 7 numbers |
| a result | seconds, then sampled tokens and scored targets with their log probabilities |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from flexengine.config import SamplingParams
from flexengine.engine.pipeline.words import Reader, Writer
from flexengine.engine.stages import StageResult, Sweep
from flexengine.model.sample import Sampled
from flexengine.model.stop import Stops
from flexengine.places import MOST_DISKS, MOST_WORKERS, place_names, worker_names
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.sweeps import Sequence as Claimed
from flexengine.worker.sequence_text import SequenceText

CLAIM, RELEASE = 0, 1
NONE = -(1 << 62)
_PLACES = (*place_names(MOST_DISKS), *worker_names(MOST_WORKERS),
           *worker_names(MOST_WORKERS, MOST_WORKERS))  # fmt: skip
_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class Event:
    """Pages of a sequence that are claimed or released.

    Attributes:
        sequence: the sequence, with its home, cached tokens and source at this time.
        tokens: tokens to hold; None if the pages are released.
    """

    sequence: Claimed
    tokens: int | None


@dataclass
class Order:
    """A sweep for a stage in another process, with all that has changed since the last sweep.

    Attributes:
        sweep: the sweep.
        events: claims and releases of pages, in order.
        texts: by sequence, texts that the stage does not have yet.
        grown: by sequence, tokens that were generated since the last order.
    """

    sweep: Sweep
    events: list[Event] = field(default_factory=list)
    texts: dict[int, SequenceText] = field(default_factory=dict)
    grown: dict[int, Sequence[int]] = field(default_factory=dict)


def pack_order(order: Order) -> Tensor:
    """Return the body of an order."""
    out = Writer()
    out.add(len(order.events))
    for event in order.events:
        s, op = event.sequence, CLAIM if event.tokens is not None else RELEASE
        source = s.source.id if s.source is not None else NONE
        out.add(op, s.id, _PLACES.index(s.home), s.cached, source, event.tokens or 0)
    out.add(len(order.texts))
    for sequence, text in order.texts.items():
        out.add(sequence, text.row, text.sample)
        out.add_list(text.prompt)
        out.add_list(text.targets)
        _pack_sampling(out, text.sampling)
    out.add(len(order.grown))
    for sequence, tokens in order.grown.items():
        out.add(sequence)
        out.add_list(tokens)
    sweep = order.sweep
    out.add(len(sweep.stems))
    for number, tokens in sweep.stems.items():
        out.add(number)
        out.add_list(tokens)
    out.add(sweep.number, int(sweep.another), len(sweep.batches))
    for batch in sweep.batches:
        out.add(*map(_PLACES.index, (batch.cache_home, batch.hidden_home, batch.attention)), batch.queries_first,
                len(batch.pieces))  # fmt: skip
        for p in batch.pieces:
            source = NONE if p.source is None else p.source
            out.add(p.sequence, p.start, p.count, int(p.final), source, p.scored, int(p.prompt))
    return out.body


def unpack_order(body: Tensor) -> Order:
    """Return the order in a body."""
    given = Reader(body)
    events = list[Event]()
    for _ in range(given.take()):
        op, number, home, cached, source, tokens = given.take_many(6)
        sequence = Claimed(number, 0, 0, cached=cached, home=_PLACES[home])
        if source != NONE:
            sequence.source = cast("None", Claimed(source, 0, 0))  # its number is all that a claim reads
        events.append(Event(sequence, tokens if op == CLAIM else None))
    texts = dict[int, SequenceText]()
    for _ in range(given.take()):
        number, row, sample = given.take_many(3)
        prompt, targets = tuple(given.take_list()), tuple(given.take_list())
        texts[number] = SequenceText(row, sample, prompt, _unpack_sampling(given), cast(Stops, None), targets)
    grown = {given.take(): given.take_list() for _ in range(given.take())}
    stems = {given.take(): tuple(given.take_list()) for _ in range(given.take())}
    number, another, count = given.take_many(3)
    batches = list[Batch]()
    for _ in range(count):
        *numbers, first, pieces = given.take_many(5)
        cache, hidden, attention = (_PLACES[number] for number in numbers)
        batches.append(Batch(tuple(_piece(given) for _ in range(pieces)), cache, hidden, attention, bool(first)))
    return Order(Sweep(number, batches, stems, bool(another)), events, texts, grown)


def _piece(given: Reader) -> Piece:
    sequence, start, count, final, source, scored, prompt = given.take_many(7)
    return Piece(sequence, start, count, bool(final), None if source == NONE else source, scored, bool(prompt))


def _pack_sampling(out: Writer, sampling: SamplingParams) -> None:
    """Add the parameters that choose a token. The driver ends sequences, so it alone needs the others."""
    out.add_long(sampling.seed)
    out.add(sampling.top_k, NONE if sampling.logprobs is None else sampling.logprobs)
    for name in _REALS:
        out.add_real(getattr(sampling, name))


def _unpack_sampling(given: Reader) -> SamplingParams:
    seed, top_k, logprobs = given.take_long(), given.take(), given.take()
    reals: dict[str, Any] = {name: given.take_real() for name in _REALS}
    return SamplingParams(seed=seed, top_k=top_k, logprobs=None if logprobs == NONE else logprobs, **reals)


def pack_result(result: StageResult) -> Tensor:
    """Return the body of a stage's result."""
    out = Writer()
    out.add_real(result.seconds)
    out.add(len(result.sampled))
    for sequence, sampled in result.sampled.items():
        out.add(sequence)
        _pack_sampled(out, sampled)
    out.add(len(result.scored))
    for sequence, scored in result.scored.items():
        out.add(sequence, len(scored))
        for each in scored:
            _pack_sampled(out, each)
    return out.body


def unpack_result(body: Tensor) -> StageResult:
    """Return the result in a body."""
    given = Reader(body)
    seconds = given.take_real()
    sampled = {given.take(): _unpack_sampled(given) for _ in range(given.take())}
    scored: Mapping[int, list[Sampled]] = {
        given.take(): [_unpack_sampled(given) for _ in range(given.take())] for _ in range(given.take())
    }
    return StageResult(seconds, sampled, scored)


def _pack_sampled(out: Writer, sampled: Sampled) -> None:
    out.add(sampled.token, int(sampled.logprob is not None), len(sampled.top))
    out.add_real(sampled.logprob or 0.0)
    for token, logprob in sampled.top:
        out.add(token)
        out.add_real(logprob)


def _unpack_sampled(given: Reader) -> Sampled:
    token, known, count = given.take_many(3)
    logprob = given.take_real()
    return Sampled(token, logprob if known else None, tuple((given.take(), given.take_real()) for _ in range(count)))
