"""Common prefixes: against all prefixes of all prompts, compared one by one."""

import random

import pytest

from flexengine.schedule.prefixes import MAX_STEMS, MIN_SHARED_TOKENS, Stem, Tokens, order_of, stems_above, stems_of


def some_prefixes(rng: random.Random) -> list[Tokens]:
    trunk = [rng.randrange(3) for _ in range(60)]
    prefixes = [
        (*trunk[: rng.randrange(60)], *(rng.randrange(3) for _ in range(rng.randrange(20))))
        for _ in range(rng.randrange(1, 9))
    ]
    return prefixes + prefixes[: rng.randrange(2)]


def expected(prefixes: list[Tokens]) -> list[list[tuple[int, int]]]:
    """By prefix, (length, number of prefixes with it) of its stems: lengths after which fewer prefixes are left."""
    found = []
    for prefix in prefixes:
        stems, end = list[tuple[int, int]](), 0
        for length in range(1, len(prefix) + 1):
            alike = sum(other[:length] == prefix[:length] for other in prefixes)
            longer = length < len(prefix) and sum(other[: length + 1] == prefix[: length + 1] for other in prefixes)
            if alike > max(1, longer) and length - end >= MIN_SHARED_TOKENS:
                stems, end = [(length, alike), *stems], length
        found.append(stems)
    return found


def test_stems_are_the_prefixes_that_several_share() -> None:
    for seed in range(500):
        prefixes = some_prefixes(random.Random(seed))
        ordered = [prefixes[i] for i in order_of(prefixes)]
        stems = stems_of(ordered)
        assert [[(s.end, s.sequences) for s in stems_above(stem)] for stem in stems] == expected(ordered)
        for prefix, stem in zip(ordered, stems, strict=True):
            assert all(s.tokens[: s.end] == prefix[: s.end] for s in stems_above(stem))


def test_the_order_changes_only_to_bring_a_stem_together() -> None:
    for seed in range(200):
        prefixes = some_prefixes(random.Random(seed))
        order = order_of(prefixes)
        assert sorted(order) == list(range(len(prefixes)))
        stems = [stems_above(stem) for stem in stems_of([prefixes[i] for i in order])]
        least = {stem: min(i for i, chain in zip(order, stems, strict=True) if stem in chain)
                 for stem in {s for chain in stems for s in chain}}  # fmt: skip
        for a, b in zip(range(len(order)), range(1, len(order)), strict=False):
            both = set(stems[a]) & set(stems[b])
            one, other = ([s for s in stems[x] if s not in both] for x in (a, b))
            first = [least[chain[-1]] if chain else order[x] for x, chain in ((a, one), (b, other))]
            assert first[0] < first[1] or one[-1:] == other[-1:] != []
    assert order_of([(1, 2, 3), (9,), (1, 2, 4), ()]) == [0, 1, 2, 3]  # too little in common


def test_long_chains_are_cut() -> None:
    """Prompts of which each begins with the one before, as the turns of a conversation."""
    prefixes = [tuple(range(10 * n)) for n in range(1, 2000, 7)]
    stems = stems_of([prefixes[i] for i in order_of(prefixes)])
    assert max(len(stems_above(stem)) for stem in stems) == MAX_STEMS


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_share(count: int) -> None:
    prefixes = [tuple(range(50))] * count
    assert order_of(prefixes) == list(range(count))
    assert stems_of(prefixes) == [None] * count


def test_a_stem_begins_where_the_one_above_ends() -> None:
    above = Stem((1, 2, 3), 3, None, 4)
    assert (above.start, Stem((1, 2, 3, 4, 5), 5, above, 2).start) == (0, 3)
