"""Bodies of frames: everything that is packed comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine import SamplingParams
from flexengine.engine.stages import StageResult, Sweep
from flexengine.guests.stages.remote import JobOrder, Order, SentText, claimant
from flexengine.guests.wire.link import Broken, pack, unpack
from flexengine.lossy import Lossy
from flexengine.model.sample import Sampled
from flexengine.places import place_names
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.schedule.batches import Batch, Piece
from flexengine.schedule.sweeps import Sequence
from flexengine.worker.row_sequence import RowSequence

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
    stop=st.lists(st.text(min_size=1), max_size=2), min_tokens=st.integers(0, 128), add_generation_prompt=st.booleans(),
    logit_bias=st.none() | st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(COUNT, min_size=1, max_size=3), max_size=2),
)  # fmt: skip
SAMPLED = st.builds(Sampled, NUMBER, st.none() | REAL, st.lists(st.tuples(COUNT, REAL), max_size=3).map(tuple))


@given(st.lists(BATCH, max_size=3), st.dictionaries(NUMBER, TOKENS, max_size=2), COUNT, st.booleans(),
       st.dictionaries(COUNT, st.tuples(COUNT, COUNT, TOKENS, SAMPLING, TOKENS), max_size=2),
       st.lists(st.tuples(NUMBER, PLACE, COUNT, st.none() | NUMBER, st.none() | COUNT), max_size=3))  # fmt: skip
def test_orders(batches, stems, number, another, texts, events) -> None:  # type: ignore[no-untyped-def]
    sequences = [
        (Sequence(i, 0, 0, cached=cached, home=home, source=None if source is None else Sequence(source, 0, 0)), tokens)
        for i, home, cached, source, tokens in events
    ]
    known = {
        s: RowSequence(s, 0, 0, noise_row=row, sample=n, prompt=prompt, sampling=drawn, targets=targets)
        for s, (row, n, prompt, drawn, targets) in texts.items()
    }
    order = Order(
        Sweep(number, batches, stems, another),
        [(claimant(sequence), tokens) for sequence, tokens in sequences],
        {
            s: SentText(t.noise_row, t.sample, t.prompt, t.targets, replace(t.sampling, stop=()))
            for s, t in known.items()
        },
        {5: [1, 2], 6: []},
    )
    unpacked = unpack(pack(order), Order)
    assert {s: tuple(tokens) for s, tokens in unpacked.sweep.stems.items()} == stems
    assert unpacked == order._replace(sweep=order.sweep._replace(stems=unpacked.sweep.stems), events=unpacked.events)
    for s, text in known.items():
        assert vars(unpacked.texts[s].sequence(s)) == vars(text) | {"sampling": replace(text.sampling, stop=())}
    for (one, count), (other, tokens) in zip(unpacked.events, sequences, strict=True):
        assert (one.id, one.home, one.cached, count) == (other.id, other.home, other.cached, tokens)
        assert (one.source and one.source.id) == (other.source and other.source.id)


@given(st.dictionaries(st.tuples(COUNT, COUNT), COUNT, max_size=3), REAL)
def test_jobs(sizes: dict[tuple[int, int], int], spared: float) -> None:
    workload = Workload(sizes, dict.fromkeys(sizes, spared), scored=3)
    policy = Policy(3, weights=(0.125, 0.25, 0.625), cache=(0.0, 1.0, 0.0), slots=1, delegate="host")
    job = JobOrder(workload=workload, lossy=Lossy(weights=("int8", None), cache="int8"), policy=policy)
    job = replace(job, layers=[(0, 3), (3, 4)], hardware={"name": "x", "links": {"h2d": [[1.0, 2.0]]}})
    assert unpack(pack(job), JobOrder) == replace(job, lost=[])


def test_a_body_of_another_kind_is_refused() -> None:
    with pytest.raises(Broken, match="a message is no Order"):
        unpack(pack({"events": []}), Order)
    with pytest.raises(Broken, match="a message is no Order"):
        unpack(pack([1])[:1], Order)


@given(REAL, st.dictionaries(NUMBER, SAMPLED, max_size=3), st.dictionaries(NUMBER, st.lists(SAMPLED), max_size=3))
def test_results(seconds: float, sampled: dict[int, Sampled], scored: dict[int, list[Sampled]]) -> None:
    result = StageResult(seconds, sampled, scored)
    assert unpack(pack(result), StageResult) == result
