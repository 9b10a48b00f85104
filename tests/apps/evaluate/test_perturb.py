"""Perturbations."""

import re
from random import Random

import pytest

from flexengine.apps.evaluate.perturb import CONTRACTIONS, NEIGHBOURS, Perturbations, contracted, extra_space, typos

TEXT = "After their marriage, she started a close Collaboration with Karvelas in 1999."


def test_neighbours_are_those_of_a_keyboard() -> None:
    assert {key: set(NEIGHBOURS[key]) for key in "qgpzm"} == {
        "q": set("wa"), "g": set("tyfhvb"), "p": set("ol"), "z": set("asx"), "m": set("njk")}  # fmt: skip
    assert all(a in NEIGHBOURS[b] for a in NEIGHBOURS for b in NEIGHBOURS[a])


def test_typos_replace_letters_by_neighbours_in_the_same_case() -> None:
    changed = typos(TEXT, Random(1), 0.3)
    assert len(changed) == len(TEXT)
    pairs = [(old, new) for old, new in zip(TEXT, changed, strict=True) if old != new]
    assert all(new.lower() in NEIGHBOURS[old.lower()] and new.isupper() == old.isupper() for old, new in pairs)
    letters = 4000
    share = sum(c != "g" for c in typos("g" * letters, Random(2), 0.3)) / letters
    assert share == pytest.approx(0.3, abs=0.03)
    assert all(new != old for old, new in zip("abc", typos("abc", Random(3), 1), strict=True))


def test_extra_space() -> None:
    changed = extra_space("a b  c\nd", Random(0), 3)
    assert re.fullmatch(r"a {1,3}b {1,3}c\nd", changed)
    assert {len(extra_space("a b", Random(seed), 3)) for seed in range(40)} == {3, 4, 5}


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("She is a doctor, and I am a student", "She's a doctor, and I'm a student"),
        ("It IS hot; he does not know what it is.", "It's hot; he doesn't know what it is."),
        ("You cannot go and will not stay", "You can't go and won't stay"),
        ("This is his, and the island is not", "This is his, and the island isn't"),
        ("WE ARE here; they have gone", "WE'RE here; they've gone"),
        ("Should have, would have been", "Should have, would've been"),
    ],
)
def test_contractions(text: str, short: str) -> None:
    assert contracted(text + (" so" if text.endswith("not") else "")).removesuffix(" so") == short


def test_contractions_have_an_apostrophe() -> None:
    assert all(long != short and short.count("'") == 1 for long, short in CONTRACTIONS.items())
    assert not {"i is not", "i is", "it am"} & set(CONTRACTIONS)


def test_copies_depend_on_seed_row_and_column() -> None:
    both = Perturbations(typos=0.5, extra_space=3)
    row = {"a": TEXT, "b": TEXT, "n": 7}
    copies = both.copies(row, ("a", "b", "n"), 4)
    assert list(copies) == ["typos", "extra_space"]
    assert copies == both.copies(row, ("a", "b", "n"), 4)
    assert copies["typos"]["a"] != copies["typos"]["b"] != TEXT
    assert copies["typos"] != both.copies(row, ("a", "b"), 5)["typos"]
    assert copies["typos"] != Perturbations(typos=0.5, seed=1).copies(row, ("a", "b"), 4)["typos"]
    assert copies["typos"]["n"] == 7
