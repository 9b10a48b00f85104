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
    """Return 1 if the normalized texts are equal. No text matches nothing."""
    return float(bool(text) and normalized(text) == normalized(reference))


def f1(text: str, reference: str) -> float:
    """Return the F1 of the normalized words, with repetitions, as SQuAD does."""
    return _f1(Counter(normalized(text).split()), Counter(normalized(reference).split()))


def set_f1(text: str, reference: str) -> float:
    """Return the F1 of the sets of normalized words, as HELM does."""
    return _f1(Counter(set(normalized(text).split())), Counter(set(normalized(reference).split())))


def _f1(found: Counter[str], right: Counter[str]) -> float:
    shared = (found & right).total()
    return 2 * shared / (found.total() + right.total()) if shared else 0.0
