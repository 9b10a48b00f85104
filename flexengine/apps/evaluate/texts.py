"""Comparison of a generated text with a right answer. All functions return a number from 0 to 1."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces, as HELM and SQuAD do."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, reference: str) -> float:
    """Return 1 if the texts are equal but for white space at their ends."""
    return float(text.strip() == reference.strip())


def quasi_exact_match(text: str, reference: str) -> float:
    """Return 1 if the words are equal."""
    return float(_words(text, reference) == _words(reference, reference))


def f1(text: str, reference: str) -> float:
    """Return the F1 of the words, with repetitions, as SQuAD does."""
    return _f1(Counter(_words(text, reference)), Counter(_words(reference, reference)))


def set_f1(text: str, reference: str) -> float:
    """Return the F1 of the sets of words, as HELM does."""
    return _f1(Counter(set(_words(text, reference))), Counter(set(_words(reference, reference))))


def _words(text: str, reference: str) -> list[str]:
    """Return the normalized words of a text. If normalization leaves nothing of the reference, such as "A" or "!",
    return the text in lower case as one word."""
    return normalized(text).split() if normalized(reference) else [text.strip().lower()]


def _f1(given: Counter[str], right: Counter[str]) -> float:
    shared = (given & right).total()
    return 2 * shared / (given.total() + right.total()) if shared else 0.0
