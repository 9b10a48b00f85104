"""Perturbations of prompts, as in HELM: typing errors, lower case, extra spaces and contractions.

Each function takes a text and a seeded generator, and returns the perturbed text.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

from flexengine.records import Limit

ORIGINAL = "original"
MAX_SPACES = 1000  # that one space becomes
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard; each row lies half a key further right than the last


@dataclass(frozen=True)
class Perturbations:
    """Perturbed copies of each row, one for each field that is set. Shots, instructions and answers stay unchanged."""

    # Probability with which a letter is replaced by a neighbour on the keyboard; None is off.
    typos: Annotated[float | None, Limit(math.ulp(0.0), 1), "a probability above 0 and at most 1"] = None
    lower_case: bool = False
    # Each run of spaces becomes 1 to this many; None is off.
    extra_space: Annotated[int | None, Limit(2, MAX_SPACES)] = None
    contractions: bool = False  # replace "is not" by "isn't", "I am" by "I'm", and so on
    seed: int = 0  # seed of typos and spaces
    columns: tuple[str, ...] = ()  # columns of the template that are perturbed; none given is all

    def named(self) -> dict[str, Callable[[str, Random], str]]:
        """Return the perturbations that are on, by name."""
        every: dict[str, Callable[[str, Random], str]] = {
            "typos": lambda text, random: typos(text, random, self.typos or 0),
            "lower_case": lambda text, random: text.lower(),
            "extra_space": lambda text, random: extra_space(text, random, self.extra_space or 1),
            "contractions": lambda text, random: contracted(text),
        }
        return {name: change for name, change in every.items() if getattr(self, name)}

    def copies(self, row: Mapping[str, Any], columns: tuple[str, ...], number: int) -> dict[str, dict[str, Any]]:
        """Return the perturbed copies of a row, by name. number: number of the row in its file; the noise of a row
        depends on it and on the seed only."""
        changed = [name for name in columns if isinstance(row.get(name), str) and name in (self.columns or columns)]
        return {
            name: {**row, **{c: change(row[c], Random(f"{self.seed} {name} {number} {c}")) for c in changed}}
            for name, change in self.named().items()
        }


def typos(text: str, random: Random, probability: float) -> str:
    """Return the text with letters replaced by neighbours on an English keyboard, in the same case."""
    letters = list(text)
    for place, letter in enumerate(text):
        if letter.lower() in NEIGHBOURS and random.random() < probability:
            other = random.choice(NEIGHBOURS[letter.lower()])
            letters[place] = other if letter.islower() else other.upper()
    return "".join(letters)


_PLACES = {key: (column + row / 2, row) for row, keys in enumerate(_ROWS) for column, key in enumerate(keys)}
# The keys that touch each key: left and right, and two in the row above and in the row below.
NEIGHBOURS = {
    key: "".join(k for k, (a, b) in _PLACES.items() if k != key and abs(a - x) <= 1 and abs(b - y) <= 1)
    for key, (x, y) in _PLACES.items()
}


def extra_space(text: str, random: Random, most: int) -> str:
    """Return the text with each run of spaces replaced by 1 to `most` spaces."""
    return re.sub(" +", lambda _: " " * random.randint(1, most), text)


_ALL_SUBJECTS = "i you he she it we they that there what where when who why how"
_SHORT = {"am": "'m", "are": "'re", "is": "'s", "will": "'ll", "would": "'d", "have": "'ve"}
_NEGATED = "are could did do does had has have is might must need ought should was were would"
# Subjects after which English contracts a verb: "you are" becomes "you're", but "there are" stays.
_SUBJECTS_BY_VERB = {"am": "i", "are": "you we they", "is": "he she it that there what where when who why how",
                     "will": _ALL_SUBJECTS, "would": _ALL_SUBJECTS, "have": "i you we they"}  # fmt: skip


# Contractions by their words in lower case.
CONTRACTIONS = {
    **{f"{subject} {verb}": subject + _SHORT[verb]
       for verb, subjects in _SUBJECTS_BY_VERB.items() for subject in subjects.split()},
    **{f"{verb} not": f"{verb}n't" for verb in _NEGATED.split()},
    **{f"{modal} have": f"{modal}'ve" for modal in ("could", "might", "must", "should", "would")},
    "cannot": "can't", "will not": "won't", "shall not": "shan't",
}  # fmt: skip
# Only before a space, so that no contraction ends a sentence ("What it is." stays).
_CONTRACTED = re.compile(rf"\b({'|'.join(sorted(CONTRACTIONS, key=len, reverse=True))})(?= )", re.IGNORECASE)


def contracted(text: str) -> str:
    """Return the text with contractions. A contraction has the case of the first letter that it replaces."""

    def short(match: re.Match[str]) -> str:
        words, shorter = match[0], CONTRACTIONS[match[0].lower()]
        in_capitals = words.isupper() and len(words.split()[0]) > 1
        return shorter.upper() if in_capitals else words[0] + shorter[1:]

    return _CONTRACTED.sub(short, text)
