"""Choice of the examples that stand before a question."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from flexengine.apps.wrangle.questions import CellQuestion
from flexengine.apps.wrangle.similar import nearest
from flexengine.apps.wrangle.spec import BALANCED, DEFAULT_SHOTS, GIVEN, NEAREST, TRANSFORM, TRANSFORMATIONS, Spec
from flexengine.errors import InvalidInput


def shot_count(spec: Spec, available: int, left_out: int) -> int:
    """Return the number of shots.

    Args:
        available: number of examples.
        left_out: most examples in the row of one question, which NEAREST leaves out; 0 if examples stand in no row of a
            question. Else examples would be predicted and compared, so the default takes at most half of them.

    Raises:
        InvalidInput: --shots is larger than the number of examples, or there are none where they
            are wanted or needed.
    """
    if spec.shots is None:
        count = min(DEFAULT_SHOTS, available // 2 if left_out and spec.picks != NEAREST else available)
        if count == 0 and (spec.pick or spec.examples):
            raise InvalidInput(
                f"--pick {spec.picks} has {available} examples to choose from; give more rows with"
                " answers, or --shots 0"
            )
        if count == 0 and spec.task == TRANSFORM and not spec.instruction:
            raise InvalidInput(f"transform has no example to show; {TRANSFORMATIONS}")
        return count
    most = available - left_out if spec.picks == NEAREST else available
    if spec.shots > most:
        other = " in other rows" if most < available else ""
        raise InvalidInput(
            f"--shots is {spec.shots}, but there are {most} examples{other}; give at most so many, or"
            " more rows with answers by --examples or in the table"
        )
    return spec.shots


def most_of_a_row(questions: Sequence[CellQuestion], pool: Sequence[CellQuestion]) -> int:
    """Return the largest number of examples in the row of one question. There are several if a row has several checked
    cells."""
    counts = Counter(q.row for q in pool)
    return max((counts[q.row] for q in questions), default=0)


def chosen(spec: Spec, pool: Sequence[CellQuestion], count: int, choices: Sequence[str]) -> list[CellQuestion]:
    """Return the examples that all questions share: the first ones, or drawn with the seed.

    Args:
        pool: all examples.
        count: number of shots, at most the number of examples.
        choices: allowed answers, for BALANCED.

    Raises:
        InvalidInput: an answer has too few examples.
    """
    if spec.picks == GIVEN:
        return list(pool[:count])
    rng = random.Random(spec.seed)
    if spec.picks != BALANCED:
        return rng.sample(list(pool), count)
    shots: list[CellQuestion] = []
    for place, choice in enumerate(choices):
        wanted = count // len(choices) + (place < count % len(choices))
        own = [q for q in pool if q.answer == choice]
        if wanted > len(own):
            raise InvalidInput(
                f"--pick balanced needs {wanted} examples with the answer {choice}, but there are"
                f" {len(own)}; lower --shots, or pick random"
            )
        shots += rng.sample(own, wanted)
    rng.shuffle(shots)
    return shots


def nearest_shots(
    spec: Spec, questions: Sequence[CellQuestion], pool: Sequence[CellQuestion], count: int, own: bool
) -> Iterator[list[CellQuestion]]:
    """Yield the most similar examples of each question, the most similar last, where it stands beside the question.

    Args:
        own: examples are rows of the questions' own table. Examples of a question's own row are left out.
    """
    spare = most_of_a_row(questions, pool) if own else 0
    texts = [q.text for q in pool]
    found = nearest([q.text for q in questions], texts, min(count + spare, len(pool)), spec.similarity)
    for question, neighbours in zip(questions, found, strict=True):
        examples = [pool[n.number] for n in neighbours if not (own and pool[n.number].row == question.row)]
        yield examples[:count][::-1]
