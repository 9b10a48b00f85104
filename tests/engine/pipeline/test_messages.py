"""Bodies of frames: everything that is packed comes back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexengine import SamplingParams
from flexengine.engine.pipeline.messages import Event, Order, pack_order, pack_result, unpack_order, unpack_result
from flexengine.engine.pipeline.words import Reader, Writer
from flexengine.engine.stages import StageResult, Sweep
from flexengine.model.sample import Sampled
from flexengine.places import place_names
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.sequence_text import SequenceText

NUMBER = st.integers(-(2**40), 2**40)
COUNT = st.integers(0, 2**31)
TOKENS = st.lists(COUNT, max_size=5).map(tuple)
PLACE = st.sampled_from(place_names(8))
REAL = st.floats(allow_nan=False)
PIECE = st.builds(Piece, NUMBER, COUNT, COUNT, st.booleans(), st.none() | NUMBER, COUNT, st.booleans())
BATCH = st.builds(Batch, st.lists(PIECE, min_size=1, max_size=3).map(tuple), PLACE, PLACE, PLACE)
SAMPLING = st.builds(
    SamplingParams, seed=st.integers(-(2**63), 2**64 - 1), temperature=st.floats(0, 5), top_k=st.integers(0, 100),
    top_p=st.floats(0.01, 1), min_p=st.floats(0, 1), repetition_penalty=st.floats(0.1, 2),
    presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2), logprobs=st.none() | st.integers(0, 20),
)  # fmt: skip
SAMPLED = st.builds(Sampled, NUMBER, st.none() | REAL, st.lists(st.tuples(COUNT, REAL), max_size=3).map(tuple))


@given(st.integers(-(2**63), 2**64 - 1), REAL, st.lists(NUMBER))
def test_numbers(seed: int, real: float, numbers: list[int]) -> None:
    writer = Writer()
    writer.add_long(seed)
    writer.add_list(numbers)
    writer.add_real(real)
    reader = Reader(writer.body)
    assert (reader.take_long(), list(reader.take_list()), reader.take_real()) == (seed, numbers, real)


@given(st.lists(BATCH, max_size=3), st.dictionaries(NUMBER, TOKENS, max_size=2), COUNT, st.booleans(),
       st.dictionaries(COUNT, st.tuples(COUNT, COUNT, TOKENS, SAMPLING, TOKENS), max_size=2),
       st.lists(st.tuples(NUMBER, PLACE, COUNT, st.none() | NUMBER, st.none() | COUNT), max_size=3))  # fmt: skip
def test_orders(batches, stems, number, another, texts, events) -> None:  # type: ignore[no-untyped-def]
    order = Order(Sweep(number, batches, stems, another), [
        Event(Sequence(i, 0, 0, cached=cached, home=home, source=None if source is None else Sequence(source, 0, 0)),
              tokens)
        for i, home, cached, source, tokens in events
    ], {s: SequenceText(row, n, prompt, sampling, None, targets)
        for s, (row, n, prompt, sampling, targets) in texts.items()},
        {5: (1, 2), 6: ()})  # fmt: skip
    found = unpack_order(pack_order(order))
    assert found.sweep == order.sweep
    assert {s: tuple(tokens) for s, tokens in found.grown.items()} == order.grown
    assert found.texts == {
        s: replace(text, sampling=replace(text.sampling, max_tokens=SamplingParams().max_tokens))
        for s, text in order.texts.items()
    }
    for event, expected in zip(found.events, order.events, strict=True):
        one, other = event.sequence, expected.sequence
        assert (one.id, one.home, one.cached, event.tokens) == (other.id, other.home, other.cached, expected.tokens)
        assert (one.source and one.source.id) == (other.source and other.source.id)


@given(REAL, st.dictionaries(NUMBER, SAMPLED, max_size=3), st.dictionaries(NUMBER, st.lists(SAMPLED), max_size=3))
def test_results(seconds: float, sampled: dict[int, Sampled], scored: dict[int, list[Sampled]]) -> None:
    result = StageResult(seconds, sampled, scored)
    assert unpack_result(pack_result(result)) == result
